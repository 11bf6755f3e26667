"""Positions that the model's own attention mask leaves out: what they hold fails nobody."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import driftline
from driftline.runs.memory import MemorySink
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run

MASK = np.array([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]], np.int64)
SIZE = 8


def run_of(
    changes: dict[str, Any] | None = None,
    mask: Any = MASK,
    engine: str = "onnxruntime",
    pooled: float = 0.0,
) -> Run:
    """A run of three layers, in whose outputs some elements are other ones."""
    sink = MemorySink()
    sink.describe(framework=engine if changes is not None else "torch")
    draw = np.random.default_rng(0)
    values: dict[tuple[str, str, str], Any] = {
        ("(root)", "input", "input_ids"): np.arange(10).reshape(2, 5),
        ("(root)", "input", "attention_mask"): mask,
    }
    for layer in range(3):
        hidden = draw.standard_normal((2, 5, SIZE)).astype(np.float32)
        for at, value in (changes or {}).get(f"layers.{layer}", {}).items():
            hidden[at] = value
        values[f"layers.{layer}", "output", "0"] = hidden
    if pooled:
        values["pooler", "output", "0"] = np.full((2, SIZE), pooled, np.float32)
    for order, ((site, port, slot), value) in enumerate(values.items()):
        if value is None:
            continue
        array = np.ascontiguousarray(value)
        key = TensorKey.of(site, port, slot)  # type: ignore[arg-type]
        sink.put(
            Record(key, order, array.dtype.name, array.shape), array.reshape(-1).view(np.uint8)
        )
    return sink.run()


PADS = {"layers.0": {(1, 0): 3.0, (1, 1): np.nan}, "layers.2": {(1, 0, 3): 9.0}}


def statuses(table: driftline.Table) -> dict[str, str]:
    return {row.key.site: row.status for row in table.rows if row.key.site != "(root)"}


def test_what_differs_only_at_pads_passes_and_is_said() -> None:
    table = driftline.compare(run_of(), run_of(PADS))
    assert table.verdict == "pass"
    assert set(statuses(table).values()) == {"pass"}
    reasons = {row.key.site: row.reason for row in table.rows}
    assert "differs only at positions that attention_mask leaves out" in reasons["layers.0"]
    assert reasons["layers.1"] == ""  # passes as it is, and was not touched
    assert any("2 tensors differ only at positions" in note for note in table.notes)
    assert "pads were left out of 2 tensors" in table.finding


def test_two_runs_of_one_engine_may_fill_pads_in_two_ways() -> None:
    table = driftline.compare(run_of(), run_of(PADS, engine="torch"))
    assert table.verdict == "pass"
    assert "pads were left out of 2 tensors" in table.finding
    assert driftline.compare(run_of(), run_of(PADS), masks=["captured"]).verdict == "pass"


def test_a_fault_beside_pads_is_found_where_it_is() -> None:
    fault = {**PADS, "layers.2": {(0, 4): -1.0}}
    table = driftline.compare(run_of(), run_of(fault, engine="torch"))
    assert (table.verdict, table.first_site) == ("fail", "layers.2")
    assert any(note.startswith("1 tensor differs only at positions") for note in table.notes)


def test_pads_count_if_one_says_so() -> None:
    table = driftline.compare(run_of(), run_of(PADS), masks=["none"])
    assert table.verdict == "fail"
    assert statuses(table) == {"layers.0": "fail", "layers.1": "pass", "layers.2": "fail"}
    assert driftline.compare(run_of(), run_of(PADS), masks="none").verdict == "fail"


def test_a_fault_elsewhere_is_named_and_not_the_pads_before_it() -> None:
    fault = {**PADS, "layers.2": {(1, 0, 3): 9.0, (0, 4): -1.0}}
    table = driftline.compare(run_of(), run_of(fault))
    assert table.verdict == "fail"
    assert table.first_site == "layers.2"
    assert table.first is not None and table.first.status == "fail"
    assert statuses(table) == {"layers.0": "pass", "layers.1": "pass", "layers.2": "fail"}
    assert table.as_json()["first_row"] is not None


def test_a_tensor_without_positions_is_not_said_to_be_judged_without_pads() -> None:
    table = driftline.compare(run_of(pooled=1.0), run_of(PADS, pooled=2.0))
    assert statuses(table) == {
        **{f"layers.{layer}": "pass" for layer in range(3)},
        "pooler": "fail",
    }
    reasons = {row.key.site: row.reason for row in table.rows}
    assert "attention_mask" in reasons["layers.0"]
    assert "attention_mask" not in reasons["pooler"]


@pytest.mark.parametrize("other", [None, np.ones((2, 5), np.int64), MASK[:, ::-1]])
def test_another_mask_excuses_nothing(other: Any) -> None:
    theirs = run_of(PADS, mask=other)
    table = driftline.compare(run_of(mask=None if other is None else MASK), theirs)
    assert table.verdict == "fail"
    assert statuses(table)["layers.0"] == "fail"


def test_ids_are_compared_at_pads_too() -> None:
    ours, theirs = run_of(), run_of({})
    ids = np.arange(10).reshape(2, 5)
    ids[1, 0] = 77
    sink = MemorySink()
    sink.describe(framework="onnxruntime")
    for record in theirs.records:
        data = ids if record.key.slot == "input_ids" else None
        raw = np.array(theirs.raw(record)) if data is None else np.ascontiguousarray(data)
        sink.put(record._replace(digest=""), raw.reshape(-1).view(np.uint8))
    table = driftline.compare(ours, sink.run())
    assert table.verdict == "fail"
    assert table.first is not None and table.first.key.slot == "input_ids"
