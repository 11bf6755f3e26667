"""Sites whose names say nothing, told apart by what reads them; and faults that stay faults."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import driftline
from driftline.alignment.plan import Plan
from driftline.alignment.rules.fused_projections import pair_reordered, parts_of
from driftline.alignment.sites.roles import infer_roles
from driftline.alignment.sites.site_graph import Call, Frame, calls_of
from driftline.alignment.sites.values import Dataflows, edges_of
from driftline.comparison.table.table import Table
from driftline.testing.runs import run_of
from support.atb_twins import Error, atb_twin, torch_twin, toy_decoder

PROMPT = np.array([[3, 1, 4, 1, 5]])
FIRST = "1_Decoder_layer.1_LinearOperation"


def twin(folder: Path, *, edges: bool = True, **options: Any) -> Path:
    atb_twin(folder, toy_decoder(layers=2), PROMPT, **options)
    if not edges:
        for kind in ("model", "layer"):
            for path in folder.glob(f"*/{kind}"):
                shutil.rmtree(path)
    return folder


def compared(here: Path, there: Path) -> tuple[Plan, Table]:
    plan = driftline.align(here, there)
    return plan, driftline.compare(here, there, plan=plan)


@pytest.mark.parametrize("edges", [True, False])
@pytest.mark.parametrize("order", ["qkv", "vkq"])
@pytest.mark.parametrize("turned", [False, True])
def test_fused_operators_pair_with_split_ones_though_no_name_tells_them_apart(
    tmp_path: Path, edges: bool, order: str, turned: bool
) -> None:
    split = twin(tmp_path / "split", edges=edges)
    fused = twin(tmp_path / "fused", edges=edges, fused=True, order=order)
    plan, table = compared(fused, split) if turned else compared(split, fused)
    assert table.verdict == "pass", table.finding
    alone = {record.class_name for record in (*plan.missing, *plan.extra)}
    assert alone == {"SplitOperation"}
    assert all(row.compared or row.class_name == "SplitOperation" for row in table.rows)
    outputs = [p for p in plan.pairs if p.reference.key.port == "output"]
    assert sum("Linear" in pair.reference.class_name for pair in outputs) == 2 * 7 + 1


@pytest.mark.parametrize("edges", [True, False])
@pytest.mark.parametrize("fused", [False, True])
def test_swapped_q_and_k_fail_and_do_not_align(tmp_path: Path, edges: bool, fused: bool) -> None:
    split = twin(tmp_path / "split", edges=edges)
    wrong = twin(tmp_path / "wrong", edges=edges, fused=fused, swapped=True)
    _, table = compared(split, wrong)
    assert table.verdict == "fail"
    failing = {row.key.site for row in table.rows if row.status == "fail"}
    assert FIRST in failing


@pytest.mark.parametrize("edges", [True, False])
def test_projections_called_in_another_order_pair_by_what_reads_them(
    tmp_path: Path, edges: bool
) -> None:
    here = twin(tmp_path / "a", edges=edges)
    there = twin(tmp_path / "b", edges=edges, order="kqv")
    plan, table = compared(here, there)
    assert table.verdict == "pass", table.finding
    assert any("used differently" in note for note in plan.notes)
    partners = {p.reference.key.site: p.candidate.key.site for p in plan.pairs}
    assert partners[FIRST] == "1_Decoder_layer.2_LinearOperation"
    wrong = twin(tmp_path / "c", edges=edges, order="kqv", swapped=True)
    _, broken = compared(here, wrong)
    assert broken.verdict == "fail"


def test_fused_matrices_with_their_parts_in_another_order_pair_part_by_part(tmp_path: Path) -> None:
    here = twin(tmp_path / "a", fused=True)
    plan, table = compared(here, twin(tmp_path / "b", fused=True, order="vkq"))
    assert table.verdict == "pass", table.finding
    assert not plan.missing and not plan.extra
    wrong = twin(tmp_path / "c", fused=True, order="vkq", swapped=True)
    assert compared(here, wrong)[1].verdict == "fail"


@pytest.mark.parametrize("edges", [True, False])
def test_named_modules_pair_with_unnamed_operators_in_another_order(
    tmp_path: Path, edges: bool
) -> None:
    torch_twin(tmp_path / "torch", toy_decoder(layers=2), PROMPT)
    for name, fused in (("split", False), ("fused", True)):
        other = twin(tmp_path / name, edges=edges, order="kqv", fused=fused)
        _, table = compared(tmp_path / "torch", other)
        assert table.verdict == "pass", table.finding


def test_an_error_in_one_part_of_a_fused_operator_is_named_there(tmp_path: Path) -> None:
    split = twin(tmp_path / "split")
    fused = twin(tmp_path / "fused", fused=True, error=Error(1, "LinearOperation", 1, 1.3))
    _, table = compared(split, fused)
    assert table.first is not None
    assert table.first.key.site == "2_Decoder_layer.5_LinearOperation"


def test_a_layer_that_was_given_other_bytes_than_its_operators_took_is_a_finding(
    tmp_path: Path,
) -> None:
    here = twin(tmp_path / "a", edges=False)
    there = twin(tmp_path / "b", edges=False, fused=True)
    path = next(there.glob("*/tensors/*/0/1_Decoder_layer/before/intensor3.bin"))
    head, mark, data = path.read_bytes().partition(b"$End=1\n")
    path.write_bytes(head + mark + (np.frombuffer(data, np.float16) * 2).tobytes())
    _, table = compared(here, there)
    assert [row.key.site for row in table.failing] == ["1_Decoder_layer"]


def test_edges_that_are_nonsense_change_nothing(tmp_path: Path) -> None:
    run = run_of({"a": np.zeros((2, 2), np.float32)})
    run.topology = lambda rank=0, process=0: {  # type: ignore[method-assign]
        "edges": [None, 3, ["a"], ["a", 1, None, 2], {"from": "a"}, ["a", "0", "b", "1"]],
        "roots": [None, {"site": 4}, {"site": "b", "inputs": [None, "w"], "children": "x"}],
    }
    flow = edges_of(run, 0, 0)
    assert dict(flow.makers) == {("b", "1"): ("a", "0")}
    assert flow.source("b", "1") == "a/0"
    assert dict(flow.names) == {("b", "1"): "w"}


_WORDS = ("Linear", "Split", "SelfAttention", "Rope", "Elewise", "Activation", "Slice", "RmsNorm")
_KINDS = tuple(f"{word}Operation" for word in _WORDS)
_SITES = [f"{at}_{kind}" for at, kind in enumerate(_KINDS * 2)]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_graph_however_odd_breaks_the_roles(data: st.DataObject) -> None:
    shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)
    tensors: dict[str, Any] = {}
    for site in _SITES:
        for port in ("input", "output"):
            for slot in range(data.draw(st.integers(0, 3))):
                tensors[f"{site}/{port}/{slot}"] = np.zeros(data.draw(shapes), np.float32)
    tensors["x"] = np.zeros(2, np.float32)
    run = run_of(tensors, classes={site: site.partition("_")[2] for site in _SITES})
    ends = st.tuples(
        st.sampled_from(_SITES),
        st.sampled_from("012"),
        st.sampled_from(_SITES),
        st.sampled_from("012"),
    )
    edges = data.draw(st.lists(ends, max_size=40))
    roots = [
        {"site": site, "param": {"offsets": [data.draw(st.integers(-3, 9))]}} for site in _SITES
    ]
    run.topology = lambda rank=0, process=0: {  # type: ignore[method-assign]
        "edges": [list(edge) for edge in edges], "roots": roots,
    }  # fmt: skip
    calls = calls_of(list(run.records))
    infer_roles(calls, edges_of(run, 0, 0))
    for call in calls:
        assert call.role in ("", "q", "k", "v", "gate", "up")
        assert all(0 <= start < stop or start == stop for _, start, stop in call.layout)
    driftline.align(run, run_of(tensors, classes={s: s.partition("_")[2] for s in _SITES}))


def _call(site: str, *sizes: int, width: int = 6) -> Call:
    """A projection of (2, width); its output has all these columns."""
    columns = sum(sizes)
    tensors = {
        f"{site}/input/0": np.ones((2, width), np.float32),
        f"{site}/input/1": np.ones((columns, width), np.float32),
        f"{site}/output/0": np.ones((2, columns), np.float32),
    }
    run = run_of(tensors, classes={site: "LinearOperation"})
    return calls_of(list(run.records))[0]


def _cuts(fused: Call, *members: Call) -> list[str]:
    parts, trouble = parts_of(fused, members, None)
    assert bool(parts) != bool(trouble)
    outputs = [part for part in parts if part.member.key.port == "output"]
    return [f"{part.member.key.site} {part.fused_recipe.steps[0]}" for part in outputs]  # type: ignore[union-attr]


def test_parts_that_only_the_fused_side_tells_apart_are_not_guessed() -> None:
    fused, members = _call("f", 4, 4, 4), [_call(name, 4) for name in "abc"]
    fused.layout = (("v", 0, 4), ("k", 4, 8), ("q", 8, 12))
    assert _cuts(fused, *members) == []
    fused.layout = (("q", 0, 4), ("k", 4, 8), ("v", 8, 12))  # as everybody has them
    assert len(_cuts(fused, *members)) == 3


def test_the_one_part_that_nothing_tells_is_what_the_others_leave() -> None:
    fused, members = _call("f", 4, 4, 4), [_call(name, 4) for name in "qkx"]
    fused.layout = (("k", 4, 8), ("q", 8, 12))
    assert _cuts(fused, *members) == [
        "q split(axis 1, 8:12)",
        "k split(axis 1, 4:8)",
        "x split(axis 1, 0:4)",
    ]
    other = _call("g", 4, 4, 4)
    other.layout = (("q", 0, 4), ("k", 8, 12))
    cuts = [
        (str(pair.reference_recipe), str(pair.candidate_recipe))
        for pair in pair_reordered(fused, other, 0.9)
        if pair.reference.key.port == "output"
    ]
    assert [a.partition(" of")[0] for a, _ in cuts] == [
        "split(axis 1, 4:8)", "split(axis 1, 8:12)", "split(axis 1, 0:4)",
    ]  # fmt: skip
    assert [b.partition(" of")[0] for _, b in cuts] == [
        "split(axis 1, 8:12)", "split(axis 1, 0:4)", "split(axis 1, 4:8)",
    ]  # fmt: skip


@pytest.mark.parametrize("edges", [True, False])
@pytest.mark.parametrize("fused", [(False, False), (False, True), (True, True)])
def test_keys_and_values_of_the_same_bytes_pair_either_way(
    tmp_path: Path, edges: bool, fused: tuple[bool, bool]
) -> None:
    model = toy_decoder(layers=2)
    for layer in model.layers:
        attention: Any = layer.self_attn
        attention.v_proj.load_state_dict(attention.k_proj.state_dict())
    for name, one, order in (("a", fused[0], "qkv"), ("b", fused[1], "vkq")):
        atb_twin(tmp_path / name, model, PROMPT, fused=one, order=order)
        for kind in () if edges else ("model", "layer"):
            shutil.rmtree(next((tmp_path / name).glob(f"*/{kind}")))
    _, table = compared(tmp_path / "a", tmp_path / "b")
    assert table.verdict == "pass", table.finding
    assert not [row for row in table.rows if row.status == "missing"]


def test_ones_say_nothing_of_who_made_them() -> None:
    ones, x = np.ones((2, 4), np.float16), np.arange(8, dtype=np.float16).reshape(2, 4)
    tensors = {
        "a/output/0": ones,
        "b/output/0": x,
        "c/input/0": ones,
        "c/input/1": x,
        "c/output/0": x + 1,
    }
    run = run_of(tensors, classes={"c": "SelfAttentionOperation"})
    read = [record._replace(digest="") for record in run.records]  # as in a dump of plain files
    run.raw = lambda record: tensors["/".join(record.key[:3])]  # type: ignore[method-assign]
    flow = Dataflows(run).of(Frame(0, 0, 0), calls_of(read), None)
    assert dict(flow.makers) == {("c", "1"): ("b", "0")}
    assert ("c", "0") in flow.names
