"""Large pairs measured ahead of time: the same numbers, and nothing that was not asked for."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from driftline.alignment.names import pair_by_name
from driftline.comparison import ahead, blocks, small
from driftline.comparison.engine import exactly, measure
from driftline.formats.opening import open_run
from driftline.numerics import kernel
from driftline.numerics.many_pairs import ManyPairs
from driftline.runs.key import TensorKey
from driftline.runs.record import Record
from driftline.runs.run import Run
from driftline.runs.writer import RunWriter

pytestmark = pytest.mark.skipif(
    not kernel.takes_addresses(), reason="the C kernel was not built here"
)
SHAPES = {"weight": (60, 100), "large": (70, 1000), "square": (90, 90), "small": (7,)}


def tolerance(reference: str, candidate: str) -> tuple[float, float]:
    return 1e-3, 1e-3


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Run, Run]:
    monkeypatch.setattr(ahead, "LARGE", 5000)
    monkeypatch.setattr(blocks, "BLOCK", 10_000)
    monkeypatch.setattr(small, "SMALL_BYTES", 1000)
    rng = np.random.default_rng(0)
    values = {
        name: rng.standard_normal(math.prod(shape), np.float32) for name, shape in SHAPES.items()
    }
    for side, error in (("a", 0.0), ("b", 1e-2)):
        writer = RunWriter(tmp_path / side)
        for order, (name, shape) in enumerate(SHAPES.items()):
            record = Record(TensorKey.of(name, "output"), order, "float32", shape)
            noise = np.float32(error) * rng.standard_normal(values[name].size, np.float32)
            writer.put(record, (values[name] + noise).view(np.uint8))
        writer.close()
    return open_run(tmp_path / "a"), open_run(tmp_path / "b")


def test_what_was_measured_ahead_is_what_the_engine_would_have_measured(
    runs: tuple[Run, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = pair_by_name(runs[0].records, runs[1].records)
    usual = measure(plan, *runs, elementwise=tolerance)
    ahead.begin(*runs, tolerance)
    (under_way,) = ahead._under_way
    sites = [ours.key.site for ours, *_ in under_way._blocks]
    assert sites == ["large"] * 7 + ["square", "weight"]  # largest first
    with monkeypatch.context() as patch:
        asked: list[int] = []

        def refuse(*_: object, count: int, **__: object) -> None:
            asked.append(count)
            raise LookupError

        patch.setattr(kernel, "pair_moments_at", refuse)
        with pytest.raises(LookupError):
            measure(plan, *runs, elementwise=tolerance)
        assert asked == [7]  # only the small one was left for the kernel
    ahead.begin(*runs, tolerance)
    again = measure(plan, *runs, elementwise=tolerance)
    assert list(map(repr, again.rows)) == list(map(repr, usual.rows))
    assert not ahead._under_way


@pytest.mark.parametrize("other", ["run", "tolerance"])
def test_what_was_measured_for_something_else_is_not_taken(
    runs: tuple[Run, Run], other: str
) -> None:
    reference, candidate = runs
    pairs = pair_by_name(reference.records, candidate.records).pairs
    weight = next(pair for pair in pairs if pair.reference.key.site == "weight")
    ahead.begin(*runs, tolerance)
    assert ahead.ready(*runs, tolerance, pairs).moments(weight, 0, 6000) is not None
    ahead.begin(*runs, tolerance)
    if other == "run":
        found = ahead.ready(reference, reference, tolerance, pairs)
    else:
        found = ahead.ready(reference, candidate, exactly, pairs)
    assert found.moments(weight, 0, 6000) is None
    found = ahead.ready(reference, candidate, tolerance, pairs)
    assert found.moments(weight, 0, 6000) is None  # gone


def test_when_less_is_wanted_than_was_begun_the_rest_is_not_waited_for(
    runs: tuple[Run, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = pair_by_name(runs[0].records, runs[1].records)
    few = plan._replace(pairs=plan.pairs[:1])
    usual = measure(few, *runs, elementwise=tolerance)
    calls: list[str] = []
    for name in ("end", "finish"):
        usually = getattr(ManyPairs, name)
        said = lambda self, name=name, usually=usually: (calls.append(name), usually(self))  # noqa: E731
        monkeypatch.setattr(ManyPairs, name, said)
    ahead.begin(*runs, tolerance)
    assert measure(few, *runs, elementwise=tolerance).rows == usual.rows
    assert calls[0] == "end"
    calls.clear()
    ahead.begin(*runs, tolerance)
    measure(plan, *runs, elementwise=tolerance)
    assert calls[0] == "finish"
    ahead.begin(*runs, tolerance, 1)
    assert not ahead._under_way  # one thread is one thread


def test_the_same_bytes_under_two_names_are_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "LARGE", 100)
    for side in ("a", "b"):
        writer = RunWriter(tmp_path / side)
        for order, name in enumerate(("one", "two")):
            record = Record(TensorKey.of(name, "output"), order, "float32", (1000,))
            writer.put(record, np.arange(1000, dtype=np.float32).view(np.uint8))
        writer.close()
    ahead.begin(open_run(tmp_path / "a"), open_run(tmp_path / "b"), tolerance)
    assert len(ahead._under_way.pop()._blocks) == 1


def test_a_run_that_cannot_be_read_ahead_is_left_to_who_says_why(
    runs: tuple[Run, Run], tmp_path: Path
) -> None:
    shard = next((tmp_path / "b").rglob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:1000])
    candidate = open_run(tmp_path / "b")
    ahead.begin(runs[0], candidate, tolerance)
    plan = pair_by_name(runs[0].records, candidate.records)
    rows = measure(plan, runs[0], candidate, elementwise=tolerance).rows
    assert {row.status for row in rows} >= {"incomparable"}
    assert all(row.reason for row in rows if row.status == "incomparable")
