"""Small pairs take a short way through the engine; it gives the rows of the long one."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driftline.alignment.rules.names import pair_by_name
from driftline.comparison.measure import scheduler
from driftline.comparison.measure.scheduler import SmallPairs, measure
from driftline.comparison.metrics.catalogue import STANDARD
from driftline.comparison.metrics.from_moments import standard
from driftline.comparison.tolerance.defaults import elementwise
from driftline.formats.registry import open_run
from driftline.numerics.fields import PairMoments
from driftline.testing.runs import run_of

RNG = np.random.default_rng(3)

numbers = st.one_of(
    st.floats(0, 1e6), st.sampled_from([0.0, 1e-300, 1e300, math.inf, math.nan, 5e-324])
)
counts = st.integers(0, 1 << 40)
places = st.integers(-1, 1 << 40)
FIELDS = {
    name: places if name.endswith("_at") else counts if hint == "int" else numbers
    for name, hint in PairMoments.__annotations__.items()
}


@settings(max_examples=300, deadline=None)
@given(st.fixed_dictionaries(FIELDS))
def test_all_standard_metrics_at_once_are_the_ones_derived_one_by_one(fields):
    moments = PairMoments(**fields)
    one_by_one = {metric.name: metric.derive(moments) for metric in STANDARD}
    wanted = {name: value for name, value in one_by_one.items() if value is not None}
    assert repr(standard(moments)) == repr(wanted)


def tensors():
    noise = RNG.standard_normal((6, 50)).astype(np.float32)
    holes = noise.copy()
    holes[2, 3] = np.nan
    holes[4, 5] = np.inf
    square = RNG.standard_normal((8, 8)).astype(np.float32)
    return {
        "plain": (noise, noise * np.float32(1.0001)),
        "same": (noise, noise.copy()),
        "half": (noise, noise.astype(np.float16)),
        "holes": (noise, holes),
        "turned": (square, np.ascontiguousarray(square.T)),
        "huge": (noise.astype(np.float64) * 1e200, noise.astype(np.float64) * 1.1e200),
        "tiny": (noise.astype(np.float64) * 1e-200, noise.astype(np.float64) * 1.1e-200),
        "whole": (np.arange(40), np.arange(40) + (np.arange(40) == 7)),
        "complex": (noise.astype(np.complex64), noise.astype(np.complex64) * 1j),
        "real": (noise, noise.astype(np.complex64)),
        "shape": (noise, noise.reshape(50, 6)),
        "empty": (noise[:0], noise[:0]),
        "scalar": (noise[0, 0], noise[0, 1]),
        "columns": (np.asfortranarray(noise), noise),
        "large": (np.ones(200_000, np.float32), np.full(200_000, 1.5, np.float32)),
    }


def trees(root):
    for side, name in enumerate("ab"):
        (root / name).mkdir()
        for site, pair in tensors().items():
            np.save(root / name / f"{site}.npy", pair[side])
    (root / "a" / "cut.npy").write_bytes((root / "a" / "plain.npy").read_bytes()[:-4])
    np.save(root / "b" / "cut.npy", tensors()["plain"][1])
    return open_run(root / "a"), open_run(root / "b")


def in_memory(root):
    del root
    pairs = tensors()
    return tuple(run_of({site: pair[side] for site, pair in pairs.items()}) for side in (0, 1))


def rows(ours, theirs):
    plan = pair_by_name(ours.records, theirs.records)
    return measure(plan, ours, theirs, elementwise=elementwise).rows


@pytest.mark.parametrize("made", [trees, in_memory])
def test_the_short_way_and_the_long_one_give_the_same_rows(tmp_path, monkeypatch, made):
    ours, theirs = made(tmp_path)
    short = rows(ours, theirs)
    monkeypatch.setattr(SmallPairs, "elements", lambda self, pair: None)
    assert list(map(repr, short)) == list(map(repr, rows(ours, theirs)))


def test_only_pairs_that_are_as_usual_go_the_short_way(tmp_path):
    ours, theirs = trees(tmp_path)
    plan = pair_by_name(ours.records, theirs.records)
    quick = SmallPairs(ours, theirs, STANDARD, elementwise)
    taken = {
        pair.reference.key.site: quick.row(pair)
        for pair in plan.pairs
        if quick.elements(pair) is not None
    }
    handed_back = {site for site, row in taken.items() if row is None}
    assert {"real", "shape", "cut"}.isdisjoint(taken)
    assert taken["large"] is not None
    assert {"turned", "huge", "tiny", "columns", "empty"} == handed_back


def test_a_file_that_shrank_after_it_was_described_is_a_row_with_the_reason(tmp_path):
    ours, theirs = trees(tmp_path)
    path = tmp_path / "b" / "plain.npy"
    for run in (ours, theirs):
        for leaf in run._leaves.values():
            folder = getattr(leaf.fetch, "folder", None)
            if folder is not None:
                folder._kept.clear()
    path.write_bytes(path.read_bytes()[:-4])
    row = next(row for row in rows(ours, theirs) if row.site == "plain")
    assert row.status == "incomparable"
    assert "ends too early" in row.reason


def test_the_bound_of_small_pairs_is_in_bytes_of_both_sides(tmp_path, monkeypatch):
    ours, theirs = trees(tmp_path)
    plan = pair_by_name(ours.records, theirs.records)
    pair = next(pair for pair in plan.pairs if pair.reference.key.site == "half")
    quick = SmallPairs(ours, theirs, STANDARD, elementwise)
    elements = quick.elements(pair)
    assert elements == 300
    monkeypatch.setattr(scheduler, "SMALL_BYTES", 300 * 6)
    assert quick.is_small(pair, elements)
    monkeypatch.setattr(scheduler, "SMALL_BYTES", 300 * 6 - 1)
    assert not quick.is_small(pair, elements)


def test_a_pair_that_is_placed_differently_goes_the_long_way():
    """The first pair has made its dtypes known: the second is not looked at again for them."""
    x = RNG.standard_normal((4, 6)).astype(np.float32)
    ours, theirs = run_of({"plain": x, "part": x}), run_of({"plain": x, "part": x + 1})
    theirs._records[1] = theirs.records[1]._replace(placement="S(0) at (1,) of (2,)")
    plan = pair_by_name(ours.records, theirs.records)
    quick = SmallPairs(ours, theirs, STANDARD, elementwise)
    assert [quick.elements(pair) for pair in plan.pairs] == [24, None]
    plain, part = rows(ours, theirs)
    assert (plain.status, plain.metrics["different"]) == ("unjudged", 0)
    assert part.status == "incomparable"
    assert part.reason == "placed differently: whole against S(0) at (1,) of (2,)"
    # On the same place, or on another rank of the same layout, it is a pair like any other.
    ours._records[1] = ours.records[1]._replace(placement="S(0) at (0,) of (2,)")
    plan = pair_by_name(ours.records, theirs.records)
    assert [quick.elements(pair) for pair in plan.pairs] == [24, 24]


@pytest.mark.parametrize("short", [0, 1])
def test_memory_that_is_shorter_than_its_tensor_is_never_read_past_its_end(short):
    x = RNG.standard_normal(64).astype(np.float32)
    runs = [run_of({"a": x}), run_of({"a": x * 2})]
    ((place, values),) = runs[short]._blobs.items()
    runs[short]._blobs = {place: values[:-1]}
    plan = pair_by_name(*(run.records for run in runs))
    quick = SmallPairs(*runs, STANDARD, elementwise)
    assert quick.elements(plan.pairs[0]) == 64
    assert quick.row(plan.pairs[0]) is None
    runs[short]._blobs = {place: values}
    assert quick.row(plan.pairs[0]) is not None
