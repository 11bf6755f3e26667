"""Masks: what stands at pads is in no metric, and what stands beside them is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import driftline
from driftline.comparison.table.row import Row
from driftline.comparison.table.table import Table
from driftline.errors import BadFile, BadInput
from driftline.runs.run import Run
from driftline.testing.runs import run_of

MASK = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])
ROWS, TOKENS = MASK.shape
SHAPES: dict[str, tuple[int, ...]] = {
    "hidden": (ROWS, TOKENS, 4),
    "list": (ROWS * TOKENS, 4),
    "heads": (ROWS, 3, TOKENS, 4),
    "scores": (ROWS, 3, TOKENS, TOKENS),
    "labels": (ROWS, TOKENS),
}


def values(name: str) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(len(name))
    return rng.standard_normal(SHAPES[name]).astype(np.float32)


def noisy(name: str, at: tuple[int, int]) -> np.ndarray[Any, Any]:
    """The tensor with something else at one position (row, token)."""
    x = values(name)
    row, token = at
    if name == "list":
        x[row * TOKENS + token] += 9
    elif name in ("heads", "scores"):
        x[row, :, token] += 9
    else:
        x[row, token] += 9
    return x


def run(tensors: dict[str, np.ndarray[Any, Any]], mask: np.ndarray[Any, Any] | None = None) -> Run:
    first = {} if mask is None else {"model/input/attention_mask": mask}
    return run_of({"model/input/input_ids": np.arange(10).reshape(2, 5), **first, **tensors})


@pytest.fixture
def mask_file(tmp_path: Path) -> Path:
    np.save(tmp_path / "mask.npy", MASK)
    return tmp_path / "mask.npy"


def row_of(table: Table, site: str) -> Row:
    return next(row for row in table.rows if row.site == site)


@pytest.mark.parametrize("name", list(SHAPES))
def test_what_stands_at_a_pad_does_not_count(name: str, mask_file: Path) -> None:
    reference = run({"a": values(name)})
    pad = run({"a": noisy(name, (0, 3))})
    assert row_of(driftline.compare(reference, pad), "a").status == "fail"
    row = row_of(driftline.compare(reference, pad, masks=[mask_file]), "a")
    assert row.status == "pass"
    assert row.metrics["different"] == 0
    assert "select(" in row.reference_recipe
    assert row.reference_recipe == row.candidate_recipe


@pytest.mark.parametrize("name", list(SHAPES))
@pytest.mark.parametrize("at", [(0, 2), (1, 3)])
def test_what_stands_beside_a_pad_counts(name: str, at: tuple[int, int], mask_file: Path) -> None:
    reference, candidate = run({"a": values(name)}), run({"a": noisy(name, at)})
    assert row_of(driftline.compare(reference, candidate, masks=[mask_file]), "a").status == "fail"


def test_pads_are_out_of_every_metric(mask_file: Path) -> None:
    x = values("hidden")
    y = x * 1.5
    spoilt = y.copy()
    spoilt[0, 4] = np.nan
    spoilt[1, 4] = 1e30
    masked = row_of(driftline.compare(run({"a": x}), run({"a": spoilt}), masks=[mask_file]), "a")
    kept = MASK != 0
    by_hand = row_of(driftline.compare(run({"a": x[kept]}), run({"a": y[kept]})), "a")
    assert masked.metrics == by_hand.metrics


def test_the_captured_mask_is_taken_when_asked_for() -> None:
    reference = run({"a": values("hidden")}, MASK)
    nearly = values("hidden")
    nearly[1, 4] *= 1.00001
    candidate = run({"a": nearly}, MASK)
    # Within the limit nobody looks for pads unasked: what stands there is measured.
    plain = row_of(driftline.compare(reference, candidate), "a")
    assert plain.status == "pass" and plain.metrics["different"] == 4
    table = driftline.compare(reference, candidate, masks="captured")
    assert row_of(table, "a").metrics["different"] == 0
    assert any("masks leave pads out of" in note for note in table.notes)


@pytest.mark.parametrize("masks", [(), "captured"])
def test_captured_pads_explain_what_stands_there_and_nothing_beside_it(masks: Any) -> None:
    reference = run({"a": values("hidden")}, MASK)
    at_pads = noisy("hidden", (1, 4))
    table = driftline.compare(reference, run({"a": at_pads}, MASK), masks=masks)
    assert row_of(table, "a").status == "pass"
    beside = at_pads.copy()
    beside[1, 3] += 9
    table = driftline.compare(reference, run({"a": beside}, MASK), masks=masks)
    assert row_of(table, "a").status == "fail"


def test_the_captured_mask_of_one_side_is_enough() -> None:
    reference = run({"a": values("hidden")}, MASK)
    candidate = run({"a": noisy("hidden", (0, 4))})
    assert row_of(driftline.compare(reference, candidate, masks="captured"), "a").status == "pass"


def test_a_pad_that_both_sides_captured_differently_counts_on_neither() -> None:
    other = MASK.copy()
    other[0, 0] = 0
    reference = run({"a": values("hidden")}, MASK)
    candidate = run({"a": noisy("hidden", (0, 0))}, other)
    assert row_of(driftline.compare(reference, candidate, masks="captured"), "a").status == "pass"


@pytest.mark.parametrize("mask", [MASK[:1], MASK[0]])
def test_a_mask_of_one_row_is_every_rows(mask: np.ndarray[Any, Any], tmp_path: Path) -> None:
    np.save(tmp_path / "m.npy", mask)
    reference, candidate = run({"a": values("hidden")}), run({"a": noisy("hidden", (1, 3))})
    table = driftline.compare(reference, candidate, masks=[tmp_path / "m.npy"])
    assert row_of(table, "a").status == "pass"


def test_pad_keys_are_left_out_where_every_row_has_the_same(tmp_path: Path) -> None:
    np.save(tmp_path / "m.npy", MASK[:1])
    x = values("scores")
    y = x.copy()
    y[..., 4] += 9
    table = driftline.compare(run({"a": x}), run({"a": y}), masks=[tmp_path / "m.npy"])
    row = row_of(table, "a")
    assert row.status == "pass"
    assert row.reference_shape == (6, 3, 3)


def test_parameters_are_never_masked(mask_file: Path) -> None:
    w = np.ones((ROWS, TOKENS), np.float32)
    v = w.copy()
    v[0, 4] = 2
    reference = run({"a": values("hidden"), "fc/param/weight": w})
    candidate = run({"a": values("hidden"), "fc/param/weight": v})
    table = driftline.compare(reference, candidate, masks=[mask_file])
    assert row_of(table, "fc").status == "fail"


def test_a_mask_that_fits_nothing_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "m.npy", np.ones((3, 7)))
    reference = run({"a": values("hidden")})
    with pytest.raises(BadInput, match=r"\(3x7\) fits no tensor"):
        driftline.compare(reference, reference, masks=[tmp_path / "m.npy"])


def test_a_captured_mask_that_nobody_captured_is_refused() -> None:
    reference = run({"a": values("hidden")})
    with pytest.raises(BadInput, match="no attention_mask"):
        driftline.compare(reference, reference, masks="captured")


@pytest.mark.parametrize("mask", [np.zeros((2, 5)), np.ones((2, 2, 2)), np.array(1.0)])
def test_a_file_that_is_no_mask_is_refused(mask: np.ndarray[Any, Any], tmp_path: Path) -> None:
    np.save(tmp_path / "m.npy", mask)
    reference = run({"a": values("hidden")})
    with pytest.raises(BadFile):
        driftline.compare(reference, reference, masks=[tmp_path / "m.npy"])


def test_pads_on_one_side_and_a_mask_for_the_rest_work_together() -> None:
    """Two texts of 3 and 4 tokens: the one side pads to 4, the other to 5 (on the right)."""
    ids = np.arange(1, 11).reshape(2, 5)
    x = values("hidden")
    y = x.copy()
    y[0, 3] += 9
    reference = run_of({"model/input/input_ids": ids, "model/input/attention_mask": MASK, "a": x})
    candidate = run_of(
        {
            "model/input/input_ids": ids[:, :4],
            "model/input/attention_mask": MASK[:, :4],
            "a": y[:, :4].copy(),
        }
    )
    row = row_of(driftline.compare(reference, candidate, masks="captured"), "a")
    assert row.status == "pass"
    assert row.reference_shape == (7, 4)


def test_a_file_with_several_arrays_is_no_mask(tmp_path: Path) -> None:
    from driftline.alignment.reconcile.masks import read_mask_file

    np.savez(tmp_path / "m.npz", first=np.ones(3), second=np.ones(3))
    with pytest.raises(BadFile, match="holds 2 tensors; a mask is one"):
        read_mask_file(tmp_path / "m.npz")


def test_a_mask_with_nan_is_refused(tmp_path: Path) -> None:
    from driftline.alignment.reconcile.masks import read_mask_file

    np.save(tmp_path / "m.npy", np.array([1.0, np.nan, 0.0]))
    with pytest.raises(BadFile, match="holds NaN"):
        read_mask_file(tmp_path / "m.npy")
