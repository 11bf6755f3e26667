"""ATB dump trees as runs: sites, order, moments, processes, topology, and what lies beside."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

import driftline
from driftline.errors import BadRun
from driftline.formats.ascend.atb.dump import AtbRun
from support.atb import AtbDump, Operation, Value, write_bin
from support.atb_twins import Error, atb_twin, torch_twin, toy_decoder

MINI = Path(__file__).parents[1] / "data" / "ascend" / "mini_atb"
ROOT = MINI / "msit_dump_20240701_120000"
PROMPT = np.array([1, 5, 9, 2])


def opened(path: Path) -> AtbRun:
    run = driftline.open_run(path)
    assert isinstance(run, AtbRun)
    return run


def toy(name: str = "x", n: int = 4) -> Value:
    return Value(name, np.arange(n, dtype=np.float32))


def two_layers() -> list[Operation]:
    norm = Operation("RmsNormOperation", [toy("x")], [toy("n")], {"epsilon": 1e-5})
    linear = Operation("LinearOperation", [toy("n"), toy("w")], [toy("y")], {"hasBias": False})
    layer = Operation("Decoder_layer", [toy("x"), toy("w")], [toy("y")], children=[norm, linear])
    return [layer, layer]


def test_the_golden_tree_opens_at_every_level_with_the_same_keys() -> None:
    whole = opened(MINI)
    assert len(whole) == 81 and not whole.losses
    keys = [record.key for record in whole.records]
    for level in ("", "tensors", "tensors/0_4242", "tensors/0_4242/0"):
        assert [record.key for record in opened(ROOT / level).records] == keys
    layer = opened(ROOT / "tensors/0_4242/0/9_Decoder_layer")
    assert [r.key for r in layer.records] == [k for k in keys if k.site.startswith("9_")]


def test_order_follows_numbers_and_containers_enclose_their_children() -> None:
    sites = opened(MINI).sites()
    outermost = [int(site.split("_")[0]) for site in sites if "." not in site]
    assert outermost == sorted(outermost) == list(range(13))
    first = [str(r.key) for r in opened(MINI).records if r.key.site.startswith("1_")]
    assert first[0] == "rank0/step0/1_Decoder_layer/input/0"
    assert first[-1] == "rank0/step0/1_Decoder_layer/output/0"
    assert all(".0_RmsNorm" in name for name in first[1:3])


def test_classes_are_types_without_their_number() -> None:
    run = opened(MINI)
    assert run.get("1_Decoder_layer.1_LinearOperation").record.class_name == "LinearOperation"


def test_topology_has_classes_parameters_and_edges() -> None:
    topology = opened(MINI).topology()
    assert topology is not None
    (root,) = topology["roots"]
    assert (root["site"], root["class"]) == ("(root)", "ToyModel")
    layer = root["children"][1]
    assert (layer["site"], layer["ids"]) == ("1_Decoder_layer", "1")
    assert layer["children"][0]["param"]["normParam"]["epsilon"] == 1e-05
    edges = {tuple(edge) for edge in topology["edges"]}
    inner = ("1_Decoder_layer.0_RmsNormOperation", "0", "1_Decoder_layer.1_LinearOperation", "0")
    assert inner in edges
    assert ("1_Decoder_layer", "0", "2_Decoder_layer", "0") in edges
    across = ("1_Decoder_layer.1_LinearOperation", "0", "2_Decoder_layer.0_RmsNormOperation", "0")
    assert across in edges
    sites = {record.key.site for record in opened(MINI).records}
    assert {edge[0] for edge in edges} <= sites


def test_a_dump_without_topology_files_has_one_from_its_folders(tmp_path: Path) -> None:
    AtbDump(tmp_path).execute(two_layers(), first_id=3)
    run = opened(tmp_path)
    topology = run.topology()
    assert topology is not None
    (root,) = topology["roots"]
    assert [child["site"] for child in root["children"]] == ["3_Decoder_layer", "4_Decoder_layer"]
    norm = root["children"][0]["children"][0]
    assert norm["param"] == {"epsilon": 1e-5}  # from op_param.json
    assert run.param("3_Decoder_layer.1_LinearOperation") == {"hasBias": False}
    assert run.topology(rank=7) is None


def test_an_extra_operation_does_not_shift_the_model_against_its_folders(tmp_path: Path) -> None:
    atb_twin(tmp_path, toy_decoder(2), PROMPT, extra_operation=True)
    run = opened(tmp_path)
    topology = run.topology()
    assert topology is not None
    sites = {record.key.site for record in run.records}
    for edge in topology["edges"]:
        assert edge[0] in sites and edge[2] in sites
    names = [child["site"] for child in topology["roots"][0]["children"]]
    assert names[:3] == ["0_TransdataOperation", "1_WordEmbedding", "2_Decoder_layer"]


def test_only_a_topology_is_a_run_without_tensors(tmp_path: Path) -> None:
    AtbDump(tmp_path, "G2").topology("Toy", two_layers())
    run = opened(tmp_path)
    assert len(run) == 0
    topology = run.topology()
    assert topology is not None and topology["roots"][0]["class"] == "Toy"


def test_operation_and_kernel_csv_are_resolved_by_id() -> None:
    run = opened(MINI)
    (line,) = run.operations()
    assert (line.kind, line.ids, line.execution) == ("RmsNormOperation", "1_0", 0)
    assert line.param["normParam"]["epsilon"] == 1e-05
    assert [(d.dtype, d.shape) for d in line.inputs] == [("float16", (2, 4))]
    assert run.site_of(line.ids) == "1_Decoder_layer.0_RmsNormOperation"
    assert run.site_of("99_1") is None
    (kernel,) = run.kernels()
    assert (kernel.kind, kernel.ids, kernel.param) == ("RmsNormOperation", "1_0", {})


def test_csv_lines_know_their_process(tmp_path: Path) -> None:
    for pid in (7, 10):
        dump = AtbDump(tmp_path, pid=pid)
        dump.execute(two_layers())
        dump.operation_csv(two_layers())
    assert {(line.rank, line.process) for line in opened(tmp_path).operations()} == {(0, 0), (0, 1)}
    part = opened(AtbDump(tmp_path, pid=10).execution(0))
    assert {(line.rank, line.process) for line in part.operations()} == {(0, 0)}
    assert len(part.operations()) == 4


def test_faulty_csv_lines_are_tolerated(tmp_path: Path) -> None:
    dump = AtbDump(tmp_path)
    dump.execute(two_layers())
    path = dump.operation_csv(two_layers())
    text = path.read_text().replace('{"hasBias":false}', '{"name":"a|b"}')
    path.write_text(text + "short|line\n" + "|" * 20 + "\n\xff\n")
    lines = opened(tmp_path).operations()
    linear = next(line for line in lines if line.ids == "0_1")
    assert linear.param == {"name": "a|b"}
    assert [d.shape for d in linear.inputs] == [(4,), (4,)]


@pytest.mark.parametrize(
    "text",
    [
        "[Add_1]:totalTime:5, runnerSetupTime:2\n[Add_1]:totalTime:9, kernelExecuteTime:3\n"
        "[Add_1]:totalTime:7, kernelExecuteTime:4\n",
        "Add_1:\n[execute] totalTime:7, kernelExecuteTime:4\n"
        "[setup] totalTime:5, runnerSetupTime:2\n\n",
    ],
    ids=["raw", "blocks"],
)
def test_cpu_profiling_text_is_a_table(tmp_path: Path, text: str) -> None:
    dump = AtbDump(tmp_path, "G2")
    dump.execute(two_layers())
    dump.profile(text)
    (table,) = opened(tmp_path).tables()
    row = dict(zip(table.headings, table.lines[0], strict=True))
    assert row["operation"] == "Add_1"
    assert (row["execute_totalTime"], row["setup_totalTime"]) == (7, 5)


def test_cpu_profiling_csv_is_the_same_table(tmp_path: Path) -> None:
    dump = AtbDump(tmp_path)
    dump.execute(two_layers())
    path = dump.profile("opname,execute_totalTime,setup_totalTime\nAdd_1,7,\n")
    path.rename(path.with_suffix(".csv"))
    (table,) = opened(tmp_path).tables()
    assert table.lines == [("Add_1", 7, None)]


def test_both_moments_have_keys_of_their_own(tmp_path: Path) -> None:
    AtbDump(tmp_path, "G2", time=2).execute(two_layers())
    run = opened(tmp_path)
    moments = {(r.key.port, r.key.moment) for r in run.records}
    assert moments == {
        ("input", "before"),
        ("input", "after"),
        ("output", "before"),
        ("output", "after"),
    }
    assert not run.get("0_Decoder_layer", moment="before").numpy().any()
    assert run.get("0_Decoder_layer").numpy().any()


def test_several_processes_and_devices_have_addresses_of_their_own(tmp_path: Path) -> None:
    for device, pid in ((0, 900), (0, 1000), (1, 950), (-1, 5)):
        AtbDump(tmp_path, device=device, pid=pid).execute(two_layers())
    run = opened(tmp_path)
    places = {(r.key.rank, r.key.process) for r in run.records}
    assert places == {(0, 0), (0, 1), (0, 2), (1, 0)}
    one = opened(AtbDump(tmp_path, device=0, pid=1000).process)
    assert {(r.key.rank, r.key.process) for r in one.records} == {(0, 0)}


def test_old_task_folders_count_executions(tmp_path: Path) -> None:
    for n in (0, 2):
        path = tmp_path / "tensors" / "77" / f"77_{n}" / "0_Layer" / "after" / "outTensor0.bin"
        write_bin(path, np.ones(2))
    assert [r.key.step for r in opened(tmp_path).records] == [0, 2]


def test_several_dumps_in_one_folder_are_listed(tmp_path: Path) -> None:
    for stamp in ("20240101_000000", "20240102_000000"):
        AtbDump(tmp_path, stamp=stamp).execute(two_layers())
    with pytest.raises(BadRun, match="holds 2 dumps: msit_dump_20240101") as refused:
        driftline.open_run(tmp_path)
    assert "msit_dump_20240101_000000" in refused.value.hint


def test_parameter_names_in_file_names_are_aliases(tmp_path: Path) -> None:
    named = Operation("Attention", [toy("q"), toy("k")], [toy("o")], parameters=("query", "key"))
    AtbDump(tmp_path, "G4").execute([named])
    run = opened(tmp_path)
    assert run.get("0_Attention", "input", "key").record.key.slot == "1"


def test_kernels_are_sites_and_tilings_are_not_tensors(tmp_path: Path) -> None:
    add = Operation("Add", [toy("a")], [toy("b")], {}, kernels=["AddF32Kernel"])
    dump = AtbDump(tmp_path)
    dump.execute([add])
    dump.tiling("0_Add/0_AddF32Kernel", b"\1\2\3")
    kernel = dump.execution(0) / "0_Add" / "0_AddF32Kernel" / "kernel_tilingdata.bin"
    kernel.write_bytes(b"\1")
    run = opened(tmp_path)
    assert run.sites() == ["0_Add", "0_Add.0_AddF32Kernel"]
    assert len(run.tilings()) == 2 and run.manifest["beside"]["tiling"] == 2


def test_statistic_csv_alone_is_a_run_of_summaries(tmp_path: Path) -> None:
    AtbDump(tmp_path, "G4", keep="statistics").execute(two_layers())
    run = opened(tmp_path)
    assert len(run) == 16 and {r.kept for r in run.records} == {"summary"}
    summary = run.get("0_Decoder_layer.1_LinearOperation").summary
    assert summary is not None and summary.max == 3.0
    assert run.sites()[:2] == ["0_Decoder_layer", "0_Decoder_layer.0_RmsNormOperation"]


def test_a_file_that_statistic_csv_names_and_that_is_gone_is_a_loss(tmp_path: Path) -> None:
    dump = AtbDump(tmp_path, "G4")
    dump.execute(two_layers())
    gone = dump.execution(0) / "1_Decoder_layer" / "after" / "outtensor0.bin"
    gone.unlink()
    run = opened(tmp_path)
    (loss,) = run.losses
    assert loss.key is not None and loss.key.site == "1_Decoder_layer"
    assert "not in the dump" in loss.reason


@pytest.mark.parametrize(
    ("points_to", "said"),
    [
        ("9_outtensor0.bin", "which is not there"),
        ("../../0_Decoder_layer/after/outtensor0.bin", "which is not there"),
        ("/etc/passwd", "which is not there"),
        ("0_0_outtensor0.bin", ""),
        ("5_intensor0.bin", "points to a file that points to a file"),
        ("1_outtensor0.bin", "another type or shape"),
    ],
)
def test_aliases_stay_inside_their_execution(tmp_path: Path, points_to: str, said: str) -> None:
    dump = AtbDump(tmp_path, "G4")
    dump.execute(two_layers())
    wide = Operation("Wide", [toy("x", 8)], [toy("z", 8)])
    shutil.rmtree(dump.execution(0) / "1_Decoder_layer")
    (dump.execution(0) / "statistic.csv").unlink()
    dump.execute([wide], first_id=1)
    (dump.execution(0) / "statistic.csv").unlink()
    alias = dump.execution(0) / "5_Mul" / "before" / "intensor0.bin"
    write_bin(alias, toy().values, points_to=points_to)
    handle = opened(tmp_path).get("5_Mul", "input")
    if said:
        assert said in handle.lost
    else:
        np.testing.assert_array_equal(handle.numpy(), toy().values)


def test_links_between_equal_tensors_are_followed_inside_the_dump_only(tmp_path: Path) -> None:
    dump = AtbDump(tmp_path / "dump")
    dump.execute(two_layers())
    first = dump.execution(0) / "0_Decoder_layer" / "before" / "intensor0.bin"
    second = dump.execution(0) / "1_Decoder_layer" / "before" / "intensor0.bin"
    second.unlink()
    second.symlink_to(os.path.relpath(first, second.parent))
    assert opened(tmp_path / "dump").get("1_Decoder_layer", "input").numpy().any()
    # A part of a dump is read against the whole: the link still lies inside.
    part = opened(dump.execution(0) / "1_Decoder_layer")
    assert part.get("1_Decoder_layer", "input").numpy().any()
    secret = write_bin(tmp_path / "secret.bin", toy().values)
    second.unlink()
    second.symlink_to(secret)
    lost = opened(tmp_path / "dump").get("1_Decoder_layer", "input").lost
    assert "leads out of the dump" in lost


def test_damaged_topology_and_parameters_are_losses_not_errors(tmp_path: Path) -> None:
    dump = AtbDump(tmp_path)
    dump.execute(two_layers())
    dump.topology("Toy", two_layers())
    (dump.root / "model" / "4242" / "Toy.json").write_text("[" * 100_000)
    (dump.root / "layer" / "4242" / "Decoder_layer_0.json").write_text('{"nodes": [1, {}], "x"')
    (dump.root / "layer" / "4242" / "Odd_7.json").write_text(
        json.dumps({"opName": "Odd_7", "opType": "Odd", "nodes": [3, {"nodes": "x"}], "param": []})
    )
    (dump.execution(0) / "0_Decoder_layer" / "0_RmsNormOperation" / "op_param.json").write_text("{")
    run = opened(tmp_path)
    topology = run.topology()
    assert topology is not None
    reasons = " ".join(map(str, run.losses))
    assert "Toy.json" in reasons and "Decoder_layer_0.json" in reasons and "op_param" in reasons
    sites = [child["site"] for child in topology["roots"][0]["children"]]
    assert sites == ["0_Decoder_layer", "1_Decoder_layer", "7_Odd"]


def test_files_that_are_none_of_a_dump_are_mentioned(tmp_path: Path) -> None:
    dump = AtbDump(tmp_path)
    dump.execute(two_layers())
    (dump.execution(0) / "notes.txt").write_text("mine")
    said = str(list(opened(tmp_path).events()))
    assert "1 files were not understood" in said or "notes.txt" in said


def test_two_files_of_one_tensor_are_both_kept(tmp_path: Path) -> None:
    dump = AtbDump(tmp_path)
    dump.execute(two_layers())
    folder = dump.execution(0) / "0_Decoder_layer" / "before"
    write_bin(folder / "intensor0_again.bin", toy().values)
    keys = [r.key for r in opened(tmp_path).records if r.key.site == "0_Decoder_layer"]
    assert sorted(k.visit for k in keys if k.port == "input" and k.slot == "0") == [0, 1]


def test_a_planted_error_is_found_where_it_was_planted(tmp_path: Path) -> None:
    model = toy_decoder(12)
    atb_twin(tmp_path / "good", model, PROMPT)
    atb_twin(tmp_path / "bad", model, PROMPT, error=Error(layer=7, nth=1))
    table = driftline.compare(tmp_path / "good", tmp_path / "bad")
    assert table.verdict == "fail"
    assert table.first is not None
    assert table.first.key.site == "8_Decoder_layer.2_LinearOperation"
    clean = driftline.compare(tmp_path / "good", tmp_path / "good")
    assert clean.verdict == "pass" and clean.coverage.share == 1.0


def test_the_twins_compute_the_same_model(tmp_path: Path) -> None:
    model = toy_decoder(3)
    torch_twin(tmp_path / "torch", model, PROMPT, then=[3, 4])
    atb_twin(tmp_path / "atb", model, PROMPT, then=[3, 4], dtype=np.float32)
    atb_twin(tmp_path / "warm", model, PROMPT, then=[3, 4], dtype=np.float32, warm_up=True)
    atb_twin(tmp_path / "fused", model, PROMPT, dtype=np.float32, fused=True)
    atb_twin(tmp_path / "int8", model, PROMPT, quantised=True)
    atb = opened(tmp_path / "atb")
    torch_run = driftline.open_run(tmp_path / "torch")
    # Prefill and the first decode both are execution 0 of their graph; a warm-up shifts both.
    for token, (site, step) in enumerate((("5_LmHead", 0), ("11_LmHead", 0), ("11_LmHead", 1))):
        wanted = torch_run.get("lm_head", step=token).float64()
        np.testing.assert_allclose(atb.get(site, step=step).float64(), wanted, atol=1e-5)
        warm = opened(tmp_path / "warm").get(site, step=step + 1)
        np.testing.assert_allclose(warm.float64(), wanted, atol=1e-5)
    first = torch_run.get("lm_head", step=0).float64()
    fused = opened(tmp_path / "fused").get("5_LmHead").float64()
    np.testing.assert_allclose(fused, first, atol=1e-5)
    small = opened(tmp_path / "int8").get("5_LmHead").float64()
    error = np.linalg.norm(small - first) / np.linalg.norm(first)
    assert 1e-4 < error < 0.1


def test_unreadable_files_are_rows_with_reasons_and_no_pass(tmp_path: Path) -> None:
    model = toy_decoder(2)
    atb_twin(tmp_path / "good", model, PROMPT)
    dump = atb_twin(tmp_path / "hurt", model, PROMPT)
    victim = dump.execution(0) / "1_Decoder_layer" / "after" / "outtensor0.bin"
    victim.write_bytes(victim.read_bytes() * 2)
    table = driftline.compare(tmp_path / "good", tmp_path / "hurt")
    assert table.verdict == "incomplete" and "1 tensor could not be read" in table.finding
    (row,) = [row for row in table.rows if row.status == "incomparable"]
    assert row.key.site == "1_Decoder_layer" and "written twice" in row.reason


def test_a_pass_by_statistics_alone_says_so(tmp_path: Path) -> None:
    model = toy_decoder(2)
    atb_twin(tmp_path / "good", model, PROMPT)
    atb_twin(tmp_path / "figures", model, PROMPT, keep="statistics")
    atb_twin(tmp_path / "wrong", model, PROMPT, keep="statistics", error=Error(1, factor=2.0))
    table = driftline.compare(tmp_path / "good", tmp_path / "figures")
    assert table.verdict == "pass" and "by max, min, mean and l2 alone" in table.finding
    table = driftline.compare(tmp_path / "good", tmp_path / "wrong")
    assert table.first is not None
    assert table.first.key.site == "2_Decoder_layer.1_LinearOperation"


@pytest.mark.parametrize("count", [150, pytest.param(5000, marks=pytest.mark.slow)])
def test_damaged_text_beside_the_tensors_never_raises(tmp_path: Path, count: int) -> None:
    dice = random.Random(count)
    dump = AtbDump(tmp_path / "dump", "G3")
    dump.execute(two_layers())
    dump.topology("Toy", two_layers())
    dump.operation_csv(two_layers())
    dump.profile("[Add_1]:totalTime:5, runnerSetupTime:2\n[Add_1]:kernelExecuteTime:3\n")
    table = dump.profile("opname,execute_totalTime\nAdd_1,7\n", execution=1)
    table.rename(table.with_suffix(".csv"))
    newest = AtbDump(tmp_path / "newest", "G4", keep="statistics")
    newest.execute(two_layers())
    victims = [
        path
        for path in sorted(tmp_path.rglob("*"))
        if path.suffix in (".json", ".csv", ".txt") and path.is_file()
    ]
    words = (b"|", b";", b",", b"\n", b"\0", b'"', b"{", b"[" * 2000, b"9" * 5000, b"\xff", b"-1")
    words += ("²".encode(), b"../../etc", b"/" * 300, b"x" * 200_000)
    for _ in range(count):
        victim = dice.choice(victims)
        whole = victim.read_bytes()
        hurt = bytearray(whole)
        for _ in range(dice.randint(1, 5)):
            at = dice.randrange(len(hurt) + 1)
            if dice.random() < 0.3:
                del hurt[at : at + dice.randint(1, 30)]
            else:
                hurt[at:at] = dice.choice(words)
        victim.write_bytes(hurt)
        run = opened(tmp_path / victim.relative_to(tmp_path).parts[0])
        assert len(run) or run.losses
        run.topology()
        run.param("0_Decoder_layer.0_RmsNormOperation")
        assert len(run.operations()) + len(run.kernels()) + len(run.tables()) >= 0
        assert all("\n" not in str(loss) for loss in run.losses)
        json.dumps(run.topology())
        victim.write_bytes(whole)


def test_folders_may_be_called_anything(tmp_path: Path) -> None:
    dump = AtbDump(tmp_path)
    for name in (b"1_a\nb", b"2_\xff\xfe", b"no number", b"3_a.b", b"\x1b[31m4_red"):
        write_bin(dump.execution(0) / os.fsdecode(name) / "after" / "outtensor0.bin", np.ones(2))
    run = opened(tmp_path)
    assert len(run) == 5 and not run.losses
    for handle in run.tensors():
        assert handle.key.site.isprintable() and handle.numpy().sum() == 2
    assert driftline.compare(tmp_path, tmp_path).verdict == "pass"


def test_numbered_folders_of_other_things_are_left_alone(tmp_path: Path) -> None:
    for name in ("data/2024_12/1", "tensors/0_1/0", "2024_11/3"):
        (tmp_path / name).mkdir(parents=True)
        np.save(tmp_path / name / "x.npy", np.ones(2))
    for name in ("", "data", "tensors", "2024_11", "data/2024_12"):
        assert not isinstance(driftline.open_run(tmp_path / name), AtbRun)


def test_a_torch_dump_beside_a_topology_is_still_one(tmp_path: Path) -> None:
    torch_twin(tmp_path, toy_decoder(2), PROMPT, root="ait_dump")
    AtbDump(tmp_path, "G2").topology("Toy", two_layers())
    assert driftline.open_run(tmp_path).get("lm_head").shape == (1, 4, 64)
    atb_twin(tmp_path, toy_decoder(2), PROMPT, generation="G2")
    both = opened(tmp_path)
    assert "torch_tensors/" in str(list(both.events()))
