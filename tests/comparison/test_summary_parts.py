"""Parts of which only summaries were kept: what can be put together, and what cannot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import driftline
from driftline.comparison.measure import summaries
from driftline.comparison.table.table import Table
from driftline.numerics import kernel
from driftline.numerics.dtypes import DTYPES
from driftline.numerics.fields import Summary
from driftline.runs.reader import open_run
from driftline.runs.run import Run
from driftline.runs.writer import RunWriter
from driftline.testing.runs import record_into, run_of

Kept = Literal["full", "summary"]
RANDOM = np.random.default_rng(1)
WHOLE = RANDOM.standard_normal((8, 12)).astype(np.float32)


def many(folder: Path, ranks: Sequence[Any], name: str, keep: Kept = "summary") -> Run:
    for rank, values in enumerate(ranks):
        writer = RunWriter(folder, rank=rank, world_size=len(ranks))
        record_into(writer, name, values, keep=keep)
        writer.close()
    return open_run(folder)


def compared(
    folder: Path, parts: Sequence[Any], keep: Kept, name: str = "up/param/weight"
) -> Table:
    return driftline.compare(run_of({name: WHOLE}, keep=keep), many(folder, parts, name))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("keep", ["full", "summary"])
def test_shards_agree_with_the_whole(tmp_path: Path, axis: int, keep: Kept) -> None:
    table = compared(tmp_path / "run", np.split(WHOLE, 4, axis=axis), keep)
    assert table.verdict == "pass", table.finding
    row = table.rows[0]
    assert (row.basis, row.candidate_recipe) == ("summary", f"concat(axis {axis}) of 4 ranks")
    assert row.metrics["candidate_l2"] == pytest.approx(float(np.linalg.norm(WHOLE)))
    assert row.metrics["candidate_std"] == pytest.approx(float(WHOLE.std()), rel=1e-6)
    assert row.metrics["candidate_max"] == float(WHOLE.max())


def test_against_values_a_permutation_inside_a_part_is_seen_and_its_rank_is_named(
    tmp_path: Path,
) -> None:
    parts = np.split(WHOLE, 4)
    parts[2] = parts[2][::-1]
    table = compared(tmp_path / "run", parts, "full")
    assert table.verdict == "fail"
    assert "the part of rank 2 is off, those of the other ranks agree" in table.rows[0].reason


def test_against_a_summary_only_a_changed_figure_is_seen_and_that_is_said(tmp_path: Path) -> None:
    parts = np.split(WHOLE, 4)
    parts[2] = parts[2][::-1]
    blind = compared(tmp_path / "turned", parts, "summary")
    assert blind.verdict == "pass"
    assert "the error is at least this large" in blind.rows[0].reason
    parts[2] = parts[2] * 3
    assert compared(tmp_path / "tripled", parts, "summary").verdict == "fail"


@pytest.mark.parametrize("keep", ["full", "summary"])
def test_sketches_of_terms_add_up(tmp_path: Path, keep: Kept) -> None:
    terms = [WHOLE * share for share in (0.5, 0.25, 0.25)]
    name = "down/param_grad/weight"  # what a backward pass contributes is not added up yet
    table = compared(tmp_path / "run", terms, keep, name)
    assert table.verdict == "pass", table.finding
    assert table.rows[0].candidate_recipe == "sum of 3 ranks"
    terms[1] = terms[1][::-1]
    other = compared(tmp_path / "off", terms, keep, name)
    assert other.verdict == "fail"


def test_copies_are_compared_by_their_sketches(tmp_path: Path) -> None:
    copies = [WHOLE, WHOLE, WHOLE * np.float32(1 + 2e-5), WHOLE]
    table = compared(tmp_path / "run", copies, "summary", "norm/optimizer_grad/weight")
    assert [row.status for row in table.rows] == ["pass", "pass", "fail", "pass"]
    assert "rank 2 holds something else than ranks 0, 1 and 3" in table.finding


def test_a_part_with_nan_is_counted(tmp_path: Path) -> None:
    parts = [part.copy() for part in np.split(WHOLE, 4)]
    parts[1][0, 0] = np.nan
    table = compared(tmp_path / "run", parts, "full")
    assert table.verdict == "fail"
    assert table.rows[0].metrics["one_sided"] == 1
    assert table.rows[0].metrics["candidate_nan"] == 1


def test_a_part_of_which_less_was_kept_is_a_row_with_a_reason(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for rank, part in enumerate(np.split(WHOLE, 2)):
        writer = RunWriter(folder, rank=rank, world_size=2)
        record_into(writer, "up", part, keep="digest" if rank else "summary")
        writer.close()
    table = driftline.compare(run_of({"up": WHOLE}), open_run(folder))
    assert table.rows[0].status == "incomparable"
    assert (
        "was kept as digest; it can be joined with summaries only if it has one"
        in table.rows[0].reason
    )


def test_two_runs_that_are_cut_alike_are_compared_part_by_part(tmp_path: Path) -> None:
    """Two and four ranks of which neighbours share a part: the same cuts on both sides."""
    parts = np.split(WHOLE, 2)
    two = many(tmp_path / "two", parts, "k/param/weight")
    four = many(tmp_path / "four", [parts[0], parts[0], parts[1], parts[1]], "k/param/weight")
    table = driftline.compare(two, four)
    assert table.verdict == "pass", table.finding
    assert {row.reason for row in table.rows} == {""}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_number_that_is_not_finite_leaves_no_bound_on_the_error(bad: float) -> None:
    # Our figures leave it out, and those of another tool may not: they are of other elements.
    values = np.arange(1.0, 9.0)
    reference, doubled = (_summary(values * factor) for factor in (1.0, 2.0))
    assert summaries._least(reference, doubled) > 0.4
    values[3] = bad
    assert math.isnan(summaries._least(_summary(values), doubled))
    assert math.isnan(summaries._least(reference, _summary(values)))


def _summary(values: np.ndarray) -> Summary:
    return kernel.summarize(values, DTYPES["float64"], count=values.size)
