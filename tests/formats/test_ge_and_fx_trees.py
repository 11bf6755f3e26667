"""GE and FX dumps as folders: every level, every layout, duplicates, bad files, links, texts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import driftline
from driftline.errors import DriftlineError
from driftline.formats.ascend.ge.dump import OpFile, parse_name
from driftline.formats.ascend.ge.fx_dump import parse_place as fx_place
from driftline.formats.ascend.ge.graph_text import GraphNode, parse_graph
from driftline.formats.ascend.protobuf import NotText, unquoted, walk
from driftline.formats.registry import open_run
from support.ge import GeDump, ge_bytes, graph_text, write_fx

DATA = Path(__file__).parents[1] / "data" / "ascend"
X = np.arange(4, dtype=np.float32)


def keys(path: Path) -> list[str]:
    return [str(record.key) for record in open_run(path).records]


def messages(path: Path) -> list[str]:
    return [event["message"] for event in open_run(path).events()]


def test_a_ge_dump_is_the_same_run_entered_at_any_level() -> None:
    root = DATA / "ge_dump"
    whole = open_run(root)
    assert keys(root)[:2] == [
        "rank0/step0/trans_TransData_1/input/0",
        "rank0/step0/trans_TransData_1/output/0",
    ]
    levels = ["20240130064151", "0", "graph_1_0", "1", "0"]
    for depth in range(1, 6):
        place = root.joinpath(*levels[:depth])
        run = open_run(place)
        assert [r.key for r in run.records] == [r.key for r in whole.records]
        # The graph text lies beside the first level, and is found from below.
        assert len(run.topology(0)["graphs"][0]["nodes"]) == 4
        assert driftline.compare(DATA / "fx_dump", place).verdict == "pass"


def test_a_record_knows_its_file_and_place_in_it() -> None:
    run = open_run(DATA / "ge_dump")
    record = run.get("Add_2", "input", "1").record
    file = "20240130064151/0/graph_1_0/1/0/Add.Add_2.44.6.1706596912161941"
    assert run.source(record) == f"{file},inputs,1"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Add.Add_2.44.6.1706596912161941", OpFile("Add", "Add_2", 44, 1706596912161941)),
        ("Add.Add_2.44.1706596912161941", OpFile("Add", "Add_2", 44, 1706596912161941)),
        ("Add.Add_2.4.6.1706596912161941.2.0.1.7", OpFile("Add", "Add_2", 4, 1706596912161941)),
        ("Data.0.3.6.1706596912161941", OpFile("Data", "0", 3, 1706596912161941)),
        ("Data.3.5.1706596912161941", OpFile("Data", "3", 5, 1706596912161941)),
        ("Add.a.b.4.6.1706596912161941", OpFile("Add", "a.b", 4, 1706596912161941)),
        ("Add.Add_2.1706596912161941", None),
        ("Add.Add_2.44.6", None),
        ("weights.npy", None),
        ("Add.Add_2.x.1706596912161941", None),
    ],
)
def test_names_of_operator_files(name: str, expected: OpFile | None) -> None:
    assert parse_name(name) == expected


def test_operators_come_in_the_order_of_their_stamps_not_of_their_names(tmp_path: Path) -> None:
    dump = GeDump(tmp_path)
    for name in ("Zeta_1", "Alpha_2", "Mid_10", "Mid_9"):
        dump.operator("Op", name, [], [X])
    assert open_run(tmp_path).sites() == ["Zeta_1", "Alpha_2", "Mid_10", "Mid_9"]


def test_of_two_files_of_one_operator_the_larger_is_taken_and_said(tmp_path: Path) -> None:
    dump = GeDump(tmp_path)
    dump.operator("Op", "a", [], [X])
    big = dump.operator("Op", "a", [X], [X])
    dump.operator("Op", "a", [], [X])
    assert len(open_run(tmp_path)) == 2
    (message,) = messages(tmp_path)
    assert big.name in message
    assert "the larger of 3 files" in message


def test_names_that_file_systems_cannot_hold_are_read_from_the_header_or_the_table(
    tmp_path: Path,
) -> None:
    dump = GeDump(tmp_path)
    dump.operator("Op", "model/layers.0/Add 1", [], [X])
    path = dump.operator("Op", "long" * 50, [], [X])
    path.rename(path.with_name("1234567890"))
    (path.parent / "mapping.csv").write_text(f"1234567890,{path.name}\n")
    assert open_run(tmp_path).sites() == ["model/layers.0/Add 1", "long" * 50]


def test_an_overflow_record_is_an_event_not_a_tensor(tmp_path: Path) -> None:
    dump = GeDump(tmp_path)
    dump.operator("Op", "a", [], [X])
    dump.operator("OpDebug", "Node_OpDebug", [], [np.zeros(128, np.uint8)])
    run = open_run(tmp_path)
    assert run.sites() == ["a"]
    (event,) = run.events()
    assert event["kind"] == "overflow"


def test_sessions_of_one_rank_are_one_process_unless_they_dumped_the_same_step(
    tmp_path: Path,
) -> None:
    for session, graph in (("20240130064151", "g_1"), ("20240130064152", "g_2")):
        GeDump(tmp_path / "one", session=session, graph=graph).operator("Op", "a", [], [X])
    assert keys(tmp_path / "one") == ["rank0/step0/g_1.a/output/0", "rank0/step0/g_2.a/output/0"]
    for session in ("20240130064151", "20240130064152"):
        GeDump(tmp_path / "two", session=session).operator("Op", "a", [], [X])
    assert keys(tmp_path / "two") == ["rank0/step0/a/output/0", "rank0.p1/step0/a/output/0"]


def test_graphs_whose_names_could_be_confused_are_kept_apart(tmp_path: Path) -> None:
    for graph, number in (("g", 1), ("g", 2), ("g_1", 3)):
        GeDump(tmp_path, graph=graph, graph_id=number).operator("Op", "a", [], [X])
    assert open_run(tmp_path).sites() == ["g.1.a", "g.2.a", "g_1.3.a"]


def test_a_rank_is_the_worlds_or_else_the_devices(tmp_path: Path) -> None:
    GeDump(tmp_path / "a", world=(8, 5), device=1).operator("Op", "a", [], [X], step=3)
    GeDump(tmp_path / "b", device=2).operator("Op", "a", [], [X])
    assert keys(tmp_path / "a") == ["rank5/step3/a/output/0"]
    assert keys(tmp_path / "a" / "worldsize8_global_rank5") == ["rank5/step3/a/output/0"]
    assert keys(tmp_path / "b") == ["rank2/step0/a/output/0"]


def test_bad_files_of_a_dump_are_lost_tensors_and_the_rest_is_compared(tmp_path: Path) -> None:
    ge, fx = tmp_path / "ge", tmp_path / "fx"
    shutil.copytree(DATA / "ge_dump", ge)
    shutil.copytree(DATA / "fx_dump", fx)
    hurt = next(ge.rglob("Add.Add_2.*"))
    hurt.write_bytes(hurt.read_bytes() + b"glued")
    cut = next(fx.rglob("relu_1*OUTPUT*"))
    cut.write_bytes(cut.read_bytes()[:-3])
    table = driftline.compare(fx, ge)
    reasons = {row.reason for row in table.rows if row.status == "incomparable"}
    assert len(reasons) == 2
    assert any("5 bytes follow the data" in reason for reason in reasons)
    assert any("claims 12 bytes of data and has 9" in reason for reason in reasons)
    # Two operators, and two conversions of the compiler that are set against themselves.
    assert sum(row.status == "pass" for row in table.rows) == 4


def test_links_do_not_lead_out_of_a_dump(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(ge_bytes("secret", [], [X]))
    dump = GeDump(tmp_path / "ge")
    inside = dump.operator("Op", "a", [], [X])
    link = inside.with_name("Op.stolen.7.6.1706596912161941")
    link.symlink_to(secret)
    (inside.parent.parent / "9").symlink_to(tmp_path)
    run = open_run(tmp_path / "ge")
    (loss,) = run.losses
    assert "leads out of" in loss.reason
    assert any("not followed" in message for message in messages(tmp_path / "ge"))
    text = tmp_path / "dynamo_original_graph_1_20240130064150123456.txt"
    text.write_text(graph_text([GraphNode("secret", "Op")]))
    (tmp_path / "ge" / text.name).symlink_to(text)
    assert any("no graph text" in message for message in messages(tmp_path / "ge"))


def test_a_pipe_in_a_dump_does_not_block(tmp_path: Path) -> None:
    dump = GeDump(tmp_path)
    inside = dump.operator("Op", "a", [], [X])
    os.mkfifo(inside.with_name("Op.pipe.7.6.1706596912161941"))
    assert "a" in open_run(tmp_path).sites()


def test_files_that_say_nothing_are_said(tmp_path: Path) -> None:
    dump = GeDump(tmp_path)
    inside = dump.operator("Op", "a", [], [X])
    inside.with_name("notes").write_text("hello")
    inside.with_name("renamed").write_bytes(ge_bytes("b", [], [X]))
    assert set(open_run(tmp_path).sites()) == {"a", "b"}
    assert any("notes: skipped" in message for message in messages(tmp_path))


def test_the_newest_graph_text_before_the_dump_is_its_own(tmp_path: Path) -> None:
    dump = GeDump(tmp_path, session="20240130064151")
    dump.operator("Op", "a", [], [X])
    for stamp, node in (
        ("20240130064000000000", "old"),
        ("20240130064100000000", "mine"),
        ("20240130065000000000", "later"),
    ):
        name = f"dynamo_original_graph_1_rank_0_pid_1_ts_{stamp}.txt"
        (tmp_path / name).write_text(graph_text([GraphNode(node, "Op")]))
    optimised = tmp_path / "dynamo_optimized_graph_1_rank_0_pid_1_ts_20240130064101000000.txt"
    optimised.write_text(graph_text([GraphNode("extra", "Cast")]))
    (graph,) = open_run(tmp_path).topology(0)["graphs"]
    assert [node["name"] for node in graph["nodes"]] == ["mine", "extra"]


def test_a_graph_text_that_cannot_be_read_is_said_and_the_dump_is_read(tmp_path: Path) -> None:
    dump = GeDump(tmp_path)
    dump.operator("Op", "a", [], [X])
    path = dump.graph_text([GraphNode("a", "Op")])
    path.write_text(path.read_text().replace("op {", "op {{", 1))
    assert len(open_run(tmp_path)) == 1
    (message,) = messages(tmp_path)
    assert "no graph text: line 2" in message


def test_graph_texts_hold_names_with_braces_colons_and_escapes() -> None:
    names = ["a: {b}", 'quo"te\\', "line\nbreak", "ä", "x } op { name: "]
    nodes = [GraphNode(name, "Op", ((names[0], 0),), ("", "n-t.OUTPUT.1")) for name in names]
    assert parse_graph(graph_text(nodes)) == nodes


def test_the_whole_grammar_of_protobuf_text_is_understood() -> None:
    text = """
    # a comment { "
    op < name: 'a' "b" type: "T"; input: ["x:0", "y:1" , "z:-1"], [ext.name] { v: 1 }
      output_desc: {
        attr { key: "_fx_tensor_name" value: { s: "\\303\\244-t.OUTPUT.0" i: -1.5e3 } } }
      attr { key: "list" value { list { i: [1, 2, 3] f: [] b: true m: [{a: 1}, <a: 2>] } } }
    >
    """
    (node,) = parse_graph(text)
    assert node == GraphNode("ab", "T", (("x", 0), ("y", 1)), ("ä-t.OUTPUT.0",))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("op {", "line 1: 1 messages are never closed"),
        ("op { }\n}", "line 2: }"),
        ('op { name: "a }', "string that does not end"),
        ("op { name: }", "where a value should be"),
        ("a {" * 101, "nested deeper than 100"),
        ("a: \x00", "stray"),
        ("a: 1", "holds no operator"),
        ("", "holds no operator"),
    ],
)
def test_a_bad_graph_text_is_refused_with_its_line(text: str, reason: str) -> None:
    with pytest.raises(NotText, match=reason):
        parse_graph(text)


def test_strings_are_unescaped_as_protobuf_does() -> None:
    assert unquoted(r"'\x41\102\n\u00e4\U0001F600\q\''") == "AB\nä😀q'"
    assert list(walk("a: 1")) == [("value", "a", "1")]


@pytest.mark.parametrize(
    ("layout", "first"),
    [
        ("gm_20240130064200000001_dump/{}", 1),
        ("data_dump/{}/gm_20240130064200000001_dump", 1),
        ("worldsize1_global_rank0/graph_1/{}", 0),
    ],
)
def test_steps_of_the_three_fx_layouts_count_from_nought(
    layout: str, first: int, tmp_path: Path
) -> None:
    for step in range(2):
        place = tmp_path / layout.format(first + step)
        write_fx(place, "add", "aten.add.Tensor", [X, 2.0], [X + 2])
    assert sorted(keys(tmp_path)) == [
        f"rank0/step{step}/add/{slot}"
        for step in (0, 1)
        for slot in ("input/0", "input/1", "output/0")
    ]
    # Entered at every level below, it is the same step.
    for place in {path.parent for path in tmp_path.rglob("*.npy")}:
        inner = place
        while inner != tmp_path:
            steps = {record.key.step for record in open_run(inner).records}
            assert steps <= {0, 1}
            inner = inner.parent
        number = next(int(part) for part in reversed(place.parts) if part.isdigit())
        assert {r.key.step for r in open_run(place).records} == {number - first}


def test_an_old_layout_that_counts_from_nought_is_believed(tmp_path: Path) -> None:
    for step in (0, 1):
        write_fx(tmp_path / "gm_20240130064200000001_dump" / str(step), "a", "t", [X], [X])
    run = open_run(tmp_path)
    assert {record.key.step for record in run.records} == {0, 1}
    assert any("here from 0" in message for message in messages(tmp_path))


def test_fx_arguments_numbers_lists_words_and_objects(tmp_path: Path) -> None:
    place = tmp_path / "gm_20240130064200000001_dump" / "1"
    write_fx(place, "cat", "aten.cat.default", [[X, X + 1], -1, None, "mean", True], [X])
    np.save(place / "cat-aten.cat.default.INPUT.9.20240130064201000001.npy", np.array([{}, None]))
    run = open_run(tmp_path)
    inputs = {r.key.slot: (r.dtype, r.shape) for r in run.records if r.key.port == "input"}
    assert inputs == {
        "0.0": ("float32", (4,)),
        "0.1": ("float32", (4,)),
        "1": ("int64", ()),
        "4": ("bool", ()),
    }
    said = messages(tmp_path)
    assert any("input/3 is the argument 'mean'" in message for message in said)
    assert any("input/9 is a Python object, which is not read" in message for message in said)
    assert not run.losses


def test_several_fx_graphs_are_kept_apart_and_repeats_are_visits(tmp_path: Path) -> None:
    for stamp in ("20240130064200000001", "20240130064300000001"):
        write_fx(tmp_path / "data_dump" / "1" / f"gm_{stamp}_dump", "a", "t", [], [X])
    write_fx(
        tmp_path / "data_dump" / "1" / "gm_20240130064200000001_dump",
        "a",
        "t",
        [],
        [X],
        stamp=20240130064209000001,
    )
    assert keys(tmp_path) == [
        "rank0/step0/gm_20240130064200000001_dump.a/output/0",
        "rank0/step0/gm_20240130064300000001_dump.a/output/0",
        "rank0/step0/gm_20240130064200000001_dump.a#1/output/0",
    ]


def test_fx_nodes_come_in_the_order_of_their_stamps(tmp_path: Path) -> None:
    place = tmp_path / "gm_20240130064200000001_dump" / "1"
    for at, node in enumerate(("z", "a", "m")):
        write_fx(place, node, "t", [X], [X], stamp=20240130064201000001 + at)
    assert open_run(tmp_path).sites() == ["z", "a", "m"]


def test_a_graph_text_beside_fx_files_does_not_make_them_a_ge_dump(tmp_path: Path) -> None:
    write_fx(tmp_path / "gm_20240130064200000001_dump" / "1", "a", "t", [X], [X])
    GeDump(tmp_path).graph_text([GraphNode("a", "Op")])
    assert open_run(tmp_path).manifest["format"] == "fx-dump"


def test_fx_places_are_read_from_any_level() -> None:
    assert fx_place(["x", "worldsize4_global_rank3", "graph_2", "7"])[:3] == (3, "graph_2", 7)
    assert fx_place(["data_dump", "2", "gm_1_dump"])[:4] == (0, "gm_1_dump", 2, True)


def test_an_empty_folder_is_neither(tmp_path: Path) -> None:
    with pytest.raises(DriftlineError):
        open_run(tmp_path)


def test_opening_many_files_is_quick(tmp_path: Path) -> None:
    """100 000 files in 10 s is the bar for any dump; a fiftieth of both is tried here."""
    import time

    dump = GeDump(tmp_path)
    place = dump.place / "0"
    place.mkdir(parents=True)
    content = ge_bytes("n", [X, X], [X])
    for number in range(2000):
        name = f"Op.op_{number}.{number}.6.{1706596911000000 + number}"
        (place / name).write_bytes(content)
    begin = time.process_time()
    assert len(open_run(tmp_path)) == 6000
    assert time.process_time() - begin < 2.0
