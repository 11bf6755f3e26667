"""What a page says: the document that is made of a comparison, and the HTML around it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import driftline
from driftline.comparison.table.table import Table
from driftline.errors import AlreadyThere, BadFile, BadInput, DriftlineError
from driftline.graphs.sources.run import site_edges
from driftline.reporting.html import page as page_text
from driftline.reporting.html.document import outline, page_data
from driftline.reporting.html.page import decode_container, unpack
from driftline.reporting.html.report import PageOptions, page_of, report
from driftline.runs.records import TensorKey
from driftline.runs.run import Run
from driftline.testing.runs import run_of

HOSTILE = "</script><img src=x onerror=alert(1)>"
LAYERS = 4
FAULTY = 2


def tensors(dtype: Any, *, fault: bool, extra: str = "") -> dict[Any, Any]:
    """A stack of layers that each add their own, in a coarse format, one of them wrong."""
    rng = np.random.default_rng(3)
    state = rng.standard_normal((1, 16, 32))
    found: dict[Any, Any] = {}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}{extra}"
        found[TensorKey.of(f"{name}.mlp", "input", "x")] = state.astype(dtype)
        inner = np.tanh(state @ rng.standard_normal((32, 32)) / 6)
        if fault and layer == FAULTY:
            inner[:, 5] *= 3.0
        found[TensorKey.of(f"{name}.mlp", "output")] = inner.astype(dtype)
        state = state + inner
    found[TensorKey.of("(root)", "output")] = state.astype(dtype)
    return found


@pytest.fixture(scope="module")
def runs() -> tuple[Run, Run, Run]:
    classes = {f"model.layers.{at}.mlp": "Mlp" for at in range(LAYERS)}
    good = run_of(tensors(np.float32, fault=False), name="ref", classes=classes)
    bad = run_of(tensors(ml_dtypes.bfloat16, fault=True), name="cand", classes=classes)
    clean = run_of(tensors(ml_dtypes.bfloat16, fault=False), name="clean", classes=classes)
    return good, bad, clean


def data_in(text: str) -> dict[str, Any]:
    """What the page holds, read out of its HTML."""
    found = re.search(r'<script type="application/octet-stream" id="data">([^<]*)</script>', text)
    assert found is not None
    return unpack(decode_container(found[1]))


def text_of(*words: Any, **more: Any) -> str:
    text = report(*words, **more)
    assert isinstance(text, str)
    return text


def test_the_page_names_the_first_site_as_the_comparison_does(runs: tuple[Run, Run, Run]) -> None:
    text = text_of(*runs[:2])
    table = driftline.compare(*runs[:2])
    shown = data_in(text)
    assert shown["verdict"]["status"] == "fail"
    assert shown["verdict"]["site"] == table.first_site == f"model.layers.{FAULTY}.mlp"
    assert shown["verdict"]["sentence"] == table.finding
    assert shown["rows"]["count"] == len(table.rows)
    # The headline is there without any script.
    head = text.partition("<main")[0]
    assert "The drift starts at" in head and "model.<wbr>layers.<wbr>2.<wbr>mlp" in head
    assert f"{len(table.rows)} of {len(table.rows)} tensors" in head


def test_every_figure_of_the_table_is_in_the_page(runs: tuple[Run, Run, Run]) -> None:
    table = driftline.compare(*runs[:2])
    shown = page_data(table)["rows"]
    for name, column in shown["metrics"].items():
        for at, row in enumerate(table.rows):
            wanted = row.metrics.get(name)
            if "same" in column:
                assert column["same"] == wanted
            else:
                absent = column["absent"] is not None and column["absent"][at]
                assert absent == (wanted is None)
                if wanted is not None:
                    assert column["numbers"][at] == pytest.approx(wanted, rel=1e-6)


def test_the_line_along_the_depth_has_every_output_once_and_its_noise(
    runs: tuple[Run, Run, Run],
) -> None:
    page = page_of(*runs[:2], PageOptions(noise=[runs[2]]))
    line = page.document["depth"]["forward"]
    sites = [page.table.rows[at].site for at in line["rows"]]
    assert sites == [*(f"model.layers.{at}.mlp" for at in range(LAYERS)), "(root)"]
    band = line["noise"]["relative_l2"]
    at = sites.index(f"model.layers.{FAULTY}.mlp")
    own = page.table.rows[line["rows"][at]].metrics["relative_l2"]
    assert 0 < band["high"][at] < own and np.isnan(band["low"][at])  # shaded from the floor
    assert line["noise_from"] == "1 trusted run"
    two = page_of(*runs[:2], PageOptions(noise=[runs[2], runs[2]])).document["depth"]["forward"]
    band = two["noise"]["relative_l2"]
    assert 0 < band["low"][at] <= band["high"][at] and two["noise_from"] == "2 trusted runs"
    assert page.document["depth"]["backward"] is None


def test_gradients_make_a_line_of_their_own() -> None:
    values = np.ones((4, 4), np.float32)
    keys = [TensorKey.of("a", "output"), TensorKey.of("a", "grad_output")]
    page = page_of(run_of(dict.fromkeys(keys, values)), run_of(dict.fromkeys(keys, values)))
    lines = page.document["depth"]
    assert [page.table.rows[at].port for at in lines["backward"]["rows"]] == ["grad_output"]
    assert [page.table.rows[at].port for at in lines["forward"]["rows"]] == ["output"]


def test_the_worst_tensors_have_pictures_and_the_first_is_among_them(
    runs: tuple[Run, Run, Run],
) -> None:
    page = page_of(*runs[:2], PageOptions(pictures=3))
    drawn = page.document["pictures"]
    assert len(drawn) == 3 and str(page.document["verdict"]["row"]) in drawn
    first = drawn[str(page.document["verdict"]["row"])]
    assert first["heat"] is not None and first["histogram"] is not None
    assert any(each["axis"] == "token" and 5 in each["index"] for each in first["bad"])
    assert page_of(*runs[:2], PageOptions(pictures=0)).document["pictures"] == {}


def test_the_cause_is_said_at_the_top_when_it_is_known(runs: tuple[Run, Run, Run]) -> None:
    cause = page_of(*runs[:2], PageOptions(noise=[runs[2]])).document["verdict"]["cause"]
    assert cause["site"] == f"model.layers.{FAULTY}.mlp" and cause["agrees"]
    assert page_of(*runs[:2], PageOptions(diagnosis=False)).document["verdict"]["cause"] is None
    assert page_of(runs[0], runs[2]).document["verdict"]["cause"] is None


def test_what_differs_between_the_runs_is_listed_first_what_changes_numbers(
    runs: tuple[Run, Run, Run],
) -> None:
    shown = page_data(driftline.compare(*runs[:2]))["sides"]["differences"]
    assert shown[0]["reference"] == "float32" and shown[0]["candidate"] == "bfloat16"
    assert [each["weight"] for each in shown] == sorted(each["weight"] for each in shown)


def test_a_module_of_another_class_is_a_difference() -> None:
    values = {"act": np.ones(3, np.float32)}
    ours, theirs = run_of(values, classes={"act": "SiLU"}), run_of(values, classes={"act": "GELU"})
    (found,) = page_data(driftline.compare(ours, theirs))["sides"]["differences"]
    assert found["what"] == "class of act"
    assert (found["reference"], found["candidate"]) == ("SiLU", "GELU")


def test_producers_and_consumers_come_from_equal_bytes() -> None:
    a, b = (np.random.default_rng(at).standard_normal((4, 4)) for at in range(2))
    run = run_of({"first/input/x": a, "first": b, "second/input/x": b, "second": a + b})
    flow = site_edges(run)
    ends = zip(flow["from"], flow["to"], strict=True)
    edges = [(flow["sites"][maker], flow["sites"][taker]) for maker, taker in ends]
    assert edges == [("first", "second")]


def test_the_tree_has_every_site_under_its_parents() -> None:
    tree = outline([("layers.0.mlp/aten.mm", "mm"), ("layers.0", "Layer"), ("(root)", "Model")])
    assert tree["name"] == ["(root)", "layers", "0", "mlp", "aten.mm"]
    assert tree["site"] == ["(root)", None, "layers.0", None, "layers.0.mlp/aten.mm"]
    assert tree["parent"].tolist() == [-1, 0, 1, 2, 3]
    deep = outline([(".".join("a" * 5000), "")])
    assert deep["count"] < 100


def test_names_of_strangers_stay_text_and_cannot_leave_their_place() -> None:
    values = np.ones((2, 2), np.float32)
    key = TensorKey.of(HOSTILE, "output", HOSTILE)
    ours = run_of({key: values}, name=HOSTILE, classes={HOSTILE: HOSTILE})
    theirs = run_of({key: values * 3}, name=HOSTILE, classes={HOSTILE: HOSTILE})
    text = text_of(ours, theirs, title=HOSTILE)
    # Two scripts, both ours, and no element that a name has opened.
    assert len(re.findall(r"<script\b", text)) == len(re.findall(r"</script", text)) == 2
    body = re.sub(r"<script\b.*?</script>", "", text, flags=re.S)
    assert "<img" not in body and "onerror=alert" not in re.sub(r"&lt;.*?&gt;", "", body)
    shown = data_in(text)
    assert shown["verdict"]["site"] == HOSTILE and shown["title"] == HOSTILE


def test_a_name_cannot_turn_itself_around_to_pose_as_another() -> None:
    name = "\u202elive\u202c.mlp"
    values = np.ones((2, 2), np.float32)
    text = text_of(run_of({name: values}), run_of({name: values * 3}))
    assert "\u202e" not in text
    assert data_in(text)["verdict"]["site"] == "\\u202elive\\u202c.mlp"


def test_the_page_forbids_itself_every_network(runs: tuple[Run, Run, Run]) -> None:
    text = text_of(*runs[:2])
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy.startswith("default-src 'none'")
    assert "connect-src" not in policy and "unsafe" not in policy and "http" not in policy
    rules = dict(rule.strip().partition(" ")[::2] for rule in policy.split(";"))
    assert rules["img-src"] == "data: blob:"
    assert not re.findall(r"""(?:src|href)=["']?(?:https?:)?//""", text)
    assert "importScripts" not in text and "eval(" not in text and "new Function" not in text


def test_the_code_keeps_its_budget(runs: tuple[Run, Run, Run]) -> None:
    text = text_of(*runs[:2])
    data = text.partition('id="data">')[2].partition("</script>")[0]
    # 150 kB until the page also drew the dataflow.
    assert len(text.encode()) - len(data) <= 160_000


def test_a_clean_comparison_says_so() -> None:
    values = {"a": np.ones(4, np.float32), "b": np.ones(4, np.float32)}
    text = text_of(run_of(values), run_of(values))
    assert "The two runs agree" in text.partition("<main")[0]
    assert data_in(text)["verdict"]["status"] == "pass"


def test_what_could_not_be_compared_is_not_said_to_agree() -> None:
    ours = {"a": np.ones(4, np.float32), "b": np.ones(4, np.float32)}
    text = text_of(run_of(ours), run_of(ours | {"b": np.ones((2, 3), np.float32)}))
    head = text.partition("<main")[0]
    assert "Not enough was compared to tell" in head and "The two runs agree" not in head
    many = {f"{number}": np.ones(4, np.float32) for number in range(20)}
    text = text_of(run_of(many), run_of(many | {"3": np.ones((2, 3), np.float32)}))
    head = text.partition("<main")[0]
    assert "What could be compared agrees" in head and "The two runs agree" not in head


def test_where_nothing_was_compared_the_headline_is_short_and_why_stands_below() -> None:
    ours, theirs = np.ones((2, 3), np.float32), np.ones((5, 7), np.float32)
    head = text_of(run_of({"a": ours}), run_of({"a": theirs})).partition("<main")[0]
    assert "<h1>Nothing could be compared</h1>" in head
    assert '<p class="lede">0 of 1 tensors compared' in head


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (" (SiLU, in the candidate GELU), in its output: 0.1", "SiLU · in its output: 0.1"),
        (" (SiLU) in step 5, in its output: 0.1", "SiLU · in step 5, in its output: 0.1"),
        (", in its output: 0.1", "SiLU · in its output: 0.1"),
    ],
)
def test_the_headline_is_not_said_again_below_it(after: str, said: str) -> None:
    verdict = {
        "site": "mlp.act",
        "status": "fail",
        "class": "SiLU",
        "sentence": f"the drift starts at 'mlp.act'{after}",
    }
    assert page_text._lede(verdict) == f'<p class="lede">{said}</p>'


def test_a_table_alone_is_enough_and_its_runs_are_found_again(tmp_path: Path) -> None:
    for name, scale in (("ref", 1.0), ("cand", 3.0)):
        np.savez(tmp_path / f"{name}.npz", layer=np.full((4, 8), scale, np.float32))
    paths = [tmp_path / f"{name}.npz" for name in ("ref", "cand")]
    driftline.compare(*paths).write(tmp_path / "table")
    page = page_of(tmp_path / "table")
    assert page.document["verdict"]["status"] == "fail" and page.document["pictures"]
    paths[0].unlink()
    alone = page_of(tmp_path / "table")
    for what in ("status", "sentence", "site", "row", "coverage"):
        assert alone.document["verdict"][what] == page.document["verdict"][what]
    assert page.document["verdict"]["cause"]["kind"] == "scale"
    assert alone.document["verdict"]["cause"]["kind"] == "unknown"
    assert alone.document["pictures"] == {} and alone.reference is None


def test_a_table_of_nothing_and_one_of_strange_numbers_become_pages() -> None:
    assert "schema" in page_data(Table(()))
    odd = {"a": np.array([np.nan, 1.0, np.inf], np.float32)}
    even = {"a": np.array([0.0, 1.0, 2.0], np.float32)}
    shown = data_in(text_of(run_of(even), run_of(odd)))
    assert shown["verdict"]["status"] == "fail"


def test_a_file_is_written_whole_and_never_over_another(
    tmp_path: Path, runs: tuple[Run, Run, Run]
) -> None:
    place = tmp_path / "new" / "report.html"
    assert report(*runs[:2], place) == place
    assert place.read_text(encoding="utf-8").endswith("</html>\n")
    with pytest.raises(AlreadyThere, match="exists"):
        report(*runs[:2], place)
    report(*runs[:2], place, force=True)
    with pytest.raises(AlreadyThere, match="folder"):
        report(*runs[:2], tmp_path)
    assert [each.name for each in place.parent.iterdir()] == ["report.html"]


def test_what_cannot_be_shown_is_refused_in_a_sentence(
    tmp_path: Path, runs: tuple[Run, Run, Run]
) -> None:
    with pytest.raises(BadInput, match="only one run"):
        report(runs[0])
    with pytest.raises(BadInput, match="no comparison, and holds no scores"):
        report(tmp_path)
    with pytest.raises(DriftlineError):
        report(tmp_path / "nothing")
    with pytest.raises(BadInput, match="not there"):
        report(driftline.compare(*runs[:2]), noise=[runs[2]])


def test_a_file_of_something_else_is_refused_with_what_would_do(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("<!doctype html>")
    with pytest.raises(BadFile, match="is no comparison") as refused:
        page_of(tmp_path / "report.html")
    assert "driftline compare" in str(refused.value.hint)


def test_a_check_of_operators_becomes_a_page(tmp_path: Path) -> None:
    good = {"site": "a/aten.mm", "op_type": "aten.mm.default", "status": "pass", "output": "0"}
    good |= {"share": 100.0, "required": 99.6, "max_rel_error": 1e-3, "max_abs_error": 1e-3}
    bad = good | {"site": "b/aten.add", "status": "fail", "share": 12.0, "reason": "12 % are near"}
    odd = {"site": "c/aten.rand", "op_type": "aten.rand", "status": "not checked", "reason": "luck"}
    place = tmp_path / "checked.json"
    told = {"format": "driftline-operators/1", "source": "run", "rows": [good, bad, odd]}
    place.write_text(json.dumps(told), encoding="utf-8")
    text = text_of(place)
    assert "is not what it should compute" in text.partition("<main")[0]
    shown = data_in(text)
    assert shown["verdict"]["site"] == "b/aten.add" and shown["diagnosis"] is None
    assert shown["verdict"]["coverage"] == {
        "compared": 2,
        "incomparable": 1,
        "missing": 0,
        "extra": 0,
        "inside_fusion": 0,
    }
    place.write_text(json.dumps(told | {"rows": [{}]}), encoding="utf-8")
    with pytest.raises(BadFile, match="damaged operator check"):
        report(place)
