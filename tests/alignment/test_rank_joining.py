"""Parts on a mesh, cut as torch cuts them, are the whole again: by what they say, and by shape."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import driftline
from driftline.alignment.placements.join import DoesNotFit, join
from driftline.alignment.placements.mesh import AxisPlacement, mesh_of, record_placement
from driftline.alignment.recipe import Recipe, step_from_text
from driftline.comparison.measure.recipes import apply_recipe
from driftline.runs.reader import open_run
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run
from driftline.runs.writer import RunWriter
from driftline.testing.runs import record_into, run_of


def written(folder: Path, ranks: Sequence[Any], name: str = "w/param/weight") -> Run:
    """A run in which every rank holds one tensor."""
    for rank, values in enumerate(ranks):
        if values is None:
            continue
        writer = RunWriter(folder, rank=rank, world_size=len(ranks))
        record_into(writer, name, values)
        writer.close()
    return open_run(folder)


def chunks(array: Any, axis: int, many: int) -> list[Any]:
    """As `torch.chunk` would, with empty ones at the end where there are too few rows."""
    each = -(-array.shape[axis] // many)
    ends = [min(each * n, array.shape[axis]) for n in range(1, many)]
    return np.split(array, ends, axis=axis)


def cut(whole: Any, sizes: tuple[int, ...], placed: tuple[AxisPlacement, ...]) -> dict[Any, Any]:
    """What each place of a mesh holds; what is `late` is cut after the axes to its right."""
    order = [n for n, how in enumerate(placed) if not how.late]
    order += [n for n in reversed(range(len(placed))) if placed[n].late]
    found = {}
    for at in itertools.product(*map(range, sizes)):
        part = whole
        for axis in order:
            how = placed[axis]
            if how.kind == "shard":
                part = chunks(part, how.axis, sizes[axis])[at[axis]]
            elif how.kind == "sum":
                part = part * (1.0 if at[axis] == 0 else 0.0)
        found[at] = part
    return found


placements = st.sampled_from(
    [
        AxisPlacement("shard", 0),
        AxisPlacement("shard", 1),
        AxisPlacement("shard", 0, True),
        AxisPlacement("replicate"),
        AxisPlacement("sum"),
    ]
)


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.lists(st.tuples(st.integers(1, 3), placements), min_size=1, max_size=3),
)
def test_what_was_cut_in_any_way_is_joined_to_the_whole(
    shape: tuple[int, int], mesh: list[tuple[int, AxisPlacement]]
) -> None:
    whole = np.arange(math.prod(shape), dtype=np.float32).reshape(shape) + 1
    sizes, placed = tuple(size for size, _ in mesh), tuple(how for _, how in mesh)
    parts = cut(whole, sizes, placed)
    with TemporaryDirectory() as folder:
        run = written(Path(folder) / "run", list(parts.values()))
        records = {record.key.rank: record for record in run.records}
        made = join({at: records[rank] for rank, at in enumerate(parts)}, placed)
        results = [
            (
                apply_recipe(run, source).values if isinstance(source, Recipe) else run.raw(source)
            ).copy()
            for source in made
        ]
    copies = math.prod(s for s, how in mesh if how.kind == "replicate")
    assert len(made) == copies
    for values in results:
        assert np.array_equal(values.reshape(shape), whole)


def test_a_part_that_is_missing_is_said(tmp_path: Path) -> None:
    run = written(tmp_path / "run", [np.ones((2, 2)), None, np.ones((2, 2))])
    parts = {(record.key.rank,): record for record in run.records}
    with pytest.raises(DoesNotFit, match="part 2 of 3 is missing"):
        join(parts, [AxisPlacement("shard", 0)])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "whole",
        "[S(0)] of (8, 4)",
        "[S(0), R] of (8, 4) over mesh (2,)",
        "[S(0)] of (8, 4) over mesh (2,) named (a, b)",
        "[" + "S(0), " * 5000 + "] of (8) over mesh (2,)",
    ],
)
def test_a_placement_that_means_nothing_is_no_placement(text: str) -> None:
    record = Record(TensorKey.of("w", "param"), 0, "float32", (4, 4), placement=text)
    assert record_placement(record) is None


def test_words_of_a_stranger_are_no_mesh(tmp_path: Path) -> None:
    run = written(tmp_path / "run", [np.ones(2), np.ones(2)])
    bad = [{"names": 3, "shape": "x", "ranks": [[1]]}, 7, {"shape": [2], "ranks": [0, 0]}]
    facts = tmp_path / "run" / "rank0" / "process.json"
    about = {**json.loads(facts.read_text()), "world_size": "many", "meshes": bad, "groups": 1}
    facts.write_text(json.dumps(about))
    assert str(mesh_of(run)) == "ranks 2"


def test_means_and_factors_are_steps_of_a_plan() -> None:
    assert step_from_text("mean").kind == "mean"
    assert step_from_text("times(0.25)").factor == 0.25
    assert step_from_text("times(0.25)").text() == "times(0.25)"


def test_a_replica_that_is_off_in_its_last_bits_is_the_same(tmp_path: Path) -> None:
    values = np.linspace(1, 2, 64, dtype=np.float32)
    copies = [values * np.float32(factor) for factor in (1, 1 + 2e-7, 1)]
    many = written(tmp_path / "run", copies, "norm/param_grad/weight")
    table = driftline.compare(run_of({"norm/param_grad/weight": values}), many)
    assert table.verdict == "pass"
    assert all("replica_gap" not in row.metrics for row in table.rows)


def test_of_two_copies_the_one_that_agrees_is_right(tmp_path: Path) -> None:
    values = np.linspace(1, 2, 64, dtype=np.float32)
    many = written(tmp_path / "run", [values * 2, values], "norm/param_grad/weight")
    table = driftline.compare(run_of({"norm/param_grad/weight": values}), many)
    assert [row.status for row in table.rows] == ["fail", "pass"]
    assert "rank 0 holds something else than rank 1" in table.rows[0].reason


def test_parts_in_another_order_are_named(tmp_path: Path) -> None:
    whole = np.arange(32, dtype=np.float32).reshape(8, 4)
    parts = np.split(whole, 4)
    many = written(tmp_path / "run", [parts[which] for which in (0, 2, 1, 3)], "up/param/weight")
    table = driftline.compare(run_of({"up/param/weight": whole}), many)
    assert "the parts are in another order: rank 1 that of rank 2, rank 2 that of rank 1" in (
        table.finding
    )


def test_the_rank_of_a_part_that_is_off_is_named(tmp_path: Path) -> None:
    whole = np.arange(32, dtype=np.float32).reshape(8, 4) + 1
    parts = np.split(whole, 4)
    parts[3] = parts[3] * 1.5
    many = written(tmp_path / "run", parts, "up")
    table = driftline.compare(run_of({"up": whole}), many)
    assert "the part of rank 3 is off, those of the other ranks agree" in table.finding


def test_shards_need_not_be_equally_large(tmp_path: Path) -> None:
    whole = np.arange(40, dtype=np.float32).reshape(10, 4) + 1
    many = written(tmp_path / "run", chunks(whole, 0, 4), "up")
    table = driftline.compare(run_of({"up": whole}), many)
    assert table.verdict == "pass"
    assert table.rows[0].candidate_recipe == "concat(axis 0) of 4 ranks"


def test_of_large_tensors_only_some_elements_are_asked_whether_they_are_terms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("driftline.alignment.placements.join._LARGEST", 16)
    whole = np.arange(96, dtype=np.float32).reshape(8, 12) + 1
    terms = [whole * 0.75, whole * 0.25]
    many = written(tmp_path / "run", terms, "down/param_grad/weight")
    table = driftline.compare(run_of({"down/param_grad/weight": whole}), many)
    assert table.verdict == "pass", table.finding
    assert table.rows[0].candidate_recipe == "sum of 2 ranks"
