"""Gathered tensors that are measured some rows at a time give what they give as wholes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import driftline
from driftline.alignment.recipe import Recipe, Step, joined
from driftline.comparison.measure.recipes import rows_of
from driftline.runs.reader import open_run
from driftline.runs.writer import RunWriter
from driftline.testing.runs import record_into, run_of

WHOLE = np.random.default_rng(0).standard_normal((9, 8)).astype(np.float32)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("off", [False, True])
def test_blocks_find_what_the_whole_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, axis: int, off: bool
) -> None:
    other = WHOLE.copy()
    other[7, 5] += 1 if off else 0
    for rank, part in enumerate(np.array_split(other, 2, axis=axis)):
        writer = RunWriter(tmp_path / "run", rank=rank, world_size=2)
        record_into(writer, "up/param/weight", part)
        writer.close()
    one, many = run_of({"up/param/weight": WHOLE}), open_run(tmp_path / "run")
    whole = driftline.compare(one, many).rows[0]
    monkeypatch.setattr("driftline.comparison.measure.recipes.BLOCK", 16)
    blocks = driftline.compare(one, many).rows[0]
    assert blocks.status == whole.status == ("fail" if off else "pass")
    assert blocks.reason == whole.reason
    assert dict(blocks.metrics) == pytest.approx(dict(whole.metrics))


def record(shape: tuple[int, ...]) -> Any:
    return run_of({"a": np.zeros(shape, np.float32)}).records[0]


def test_only_the_sources_that_have_a_share_in_some_rows_are_read() -> None:
    stacked = joined([record((4, 3)), record((2, 3)), record((4, 3))], "concat", 0, (10, 3))
    found = rows_of(stacked, 5, 8)
    assert found is not None
    assert [each.shape for each in found.sources] == [(1, 3), (2, 3)]


@pytest.mark.parametrize(
    "step",
    [
        Step("transpose", numbers=(1, 0)),
        Step("reshape", numbers=(12,)),
        Step("select", 0, numbers=(1, 0, 2, 3)),
    ],
)
def test_what_mixes_rows_is_made_whole(step: Step) -> None:
    assert rows_of(Recipe((record((4, 3)),), (step,), (4, 3)), 0, 2) is None
