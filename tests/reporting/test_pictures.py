"""Pictures of a pair of tensors, held against what plain numpy says of the same values."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from driftline import open_run
from driftline.alignment.plan import Pair
from driftline.alignment.recipe import Recipe, Step
from driftline.errors import BadInput, DriftlineError
from driftline.numerics.dtypes import DTYPES
from driftline.reporting.html.tensors import pictures as made
from driftline.reporting.html.tensors.outliers import outlier_slices
from driftline.reporting.html.tensors.pair import OpenedPair, Region, open_pair
from driftline.reporting.html.tensors.pair_statistics import error_histogram, histogram, statistics
from driftline.runs.memory import MemorySink
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run

Array = np.ndarray[Any, np.dtype[Any]]
RANDOM = np.random.default_rng(8)


def run_of(array: Array, *, dtype: str = "", site: str = "layer", shape: Any = None) -> Run:
    sink = MemorySink()
    name = dtype or str(array.dtype)
    key = TensorKey.of(site, "output")
    bytes_ = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
    sink.put(Record(key, 0, name, tuple(shape or array.shape)), bytes_)
    return sink.run()


def opened(ours: Array, theirs: Array, **how: Any) -> OpenedPair:
    reference, candidate = run_of(ours, **how), run_of(theirs, **how)
    return open_pair(reference, candidate, Pair(reference.records[0], candidate.records[0]))


def sheet(array: Array) -> Array:
    array = np.asarray(array, np.float64)
    return array.reshape(-1, array.shape[-1])


numbers = st.floats(width=32, min_value=-1e6, max_value=1e6) | st.sampled_from(
    [math.nan, math.inf, -math.inf, 0.0]
)


@st.composite
def pairs(draw: Any) -> tuple[Array, Array]:
    shape = draw(array_shapes(min_dims=1, max_dims=4, max_side=7))
    each = arrays(np.float32, shape, elements=numbers)
    return draw(each), draw(each)


@settings(max_examples=40, deadline=None)
@given(pairs(), st.integers(1, 9), st.integers(1, 9))
def test_the_map_holds_the_greatest_and_the_mean_error_of_each_cell(
    two: tuple[Array, Array], height: int, width: int
) -> None:
    r, c = map(sheet, two)
    found = made.error_map(opened(*two), height=height, width=width)
    rows = [at * r.shape[0] // found.height for at in range(found.height + 1)]
    columns = [at * r.shape[1] // found.width for at in range(found.width + 1)]
    for i in range(found.height):
        for j in range(found.width):
            cell = np.s_[rows[i] : rows[i + 1], columns[j] : columns[j + 1]]
            a, b = r[cell], c[cell]
            both = np.isfinite(a) & np.isfinite(b)
            error = np.abs(b[both] - a[both])
            apart = ~both & (a != b) & ~(np.isnan(a) & np.isnan(b))
            want = math.inf if apart.any() else float(error.max(initial=0.0))
            assert found.largest[i, j] == want
            assert (
                found.mean[i, j] == pytest.approx(error.mean(), nan_ok=True)
                if both.any()
                else (math.isnan(found.mean[i, j]))
            )
    assert found.extent.seen == found.extent.elements == r.size


@settings(max_examples=40, deadline=None)
@given(pairs(), st.integers(1, 70), st.sampled_from(["even", "symlog", "auto"]))
def test_every_element_is_in_one_bin_or_counted_as_not_finite(
    two: tuple[Array, Array], bins: int, scale: Any
) -> None:
    found = histogram(opened(*two), bins=bins, scale=scale)
    assert (np.diff(found.edges) > 0).all()
    for side, counts, values in zip(
        ("reference", "candidate"), (found.reference, found.candidate), two, strict=True
    ):
        odd = found.nonfinite[side]
        assert counts.sum() + sum(odd.values()) == values.size
        assert odd["nan"] == np.isnan(values).sum()
        assert odd["inf"] == np.isposinf(values).sum()
        finite = values[np.isfinite(values)].astype(np.float64)
        assert counts.tolist() == np.histogram(finite, found.edges)[0].tolist()
    errors = error_histogram(opened(*two), bins=bins)
    assert errors.counts.sum() + errors.zero + errors.one_sided == two[0].size


@settings(max_examples=25, deadline=None)
@given(pairs())
def test_figures_of_a_region_are_numpys(two: tuple[Array, Array]) -> None:
    r, c = map(sheet, two)
    region = Region(r.shape[0] // 3, r.shape[0], r.shape[1] // 2, r.shape[1])
    found = statistics(opened(*two), region)
    a, b = (side[region.top : region.bottom, region.left : region.right] for side in (r, c))
    finite = a[np.isfinite(a)]
    assert found.reference.nan == np.isnan(a).sum()
    if finite.size:
        assert found.reference.min == finite.min() and found.reference.max == finite.max()
        assert found.reference.mean == pytest.approx(finite.mean(), rel=1e-9, abs=1e-9)
        assert found.reference.std == pytest.approx(finite.std(), rel=1e-6, abs=1e-6)
    both = np.isfinite(a) & np.isfinite(b)
    error = np.abs(b[both] - a[both])
    assert found.error["max_abs_error"] == error.max(initial=0.0)
    assert found.different == np.sum((a != b) & ~(np.isnan(a) & np.isnan(b)))


@pytest.mark.parametrize("name", [n for n in DTYPES if DTYPES[n].kind != "bits"])
def test_values_of_every_dtype_are_those_of_its_tensor(name: str) -> None:
    dtype = DTYPES[name]
    shape = (3, 5)  # an odd number of columns: packed rows begin in the middle of a byte
    raw = RANDOM.integers(0, 100, dtype.byte_count(15), dtype=np.uint8)
    if name == "bool":
        raw %= 2
    reference = run_of(raw, dtype=name, shape=shape)
    record = reference.records[0]
    from driftline.numerics.definitions import masked_as_infinite, real_values

    want = masked_as_infinite(real_values(reference.raw(record), dtype, 15), dtype)
    pair = open_pair(reference, reference, Pair(record, record))
    wide = 2 if dtype.kind == "complex" else 1
    assert (pair.rows, pair.columns) == (3, 5 * wide)
    found = made.values(pair, Region(1, 3, 1, 5 * wide))
    expected = want.reshape(3, -1)[1:3, 1:]
    np.testing.assert_array_equal(
        np.asarray(found["reference"], np.float64).reshape(expected.shape), expected
    )


def test_neighbouring_64_bit_integers_are_told_apart() -> None:
    ours = np.array([[2**60, 2**60 + 1]])
    pair = opened(ours, ours + 1)
    found = made.values(pair, pair.whole)
    assert found["candidate"] == [str(2**60 + 1), str(2**60 + 2)]
    assert found["error"].tolist() == [[1.0, 1.0]]
    assert statistics(pair).different == 2
    assert made.error_map(pair).largest.tolist() == [[1.0, 1.0]]


def test_recipes_are_carried_out_without_a_copy_of_the_tensor() -> None:
    ours = RANDOM.normal(size=(4, 6, 8)).astype(np.float32)
    reference, candidate = run_of(ours), run_of(ours.transpose(1, 0, 2))
    record = candidate.records[0]
    turned = Recipe((record,), (Step("transpose", numbers=(1, 0, 2)),), (4, 6, 8))
    pair = open_pair(
        reference, candidate, Pair(reference.records[0], record, candidate_recipe=turned)
    )
    assert np.shares_memory(pair.candidate.words, candidate.raw(record))
    assert statistics(pair).different == 0
    sampled = made.error_map(pair, height=3, width=2, budget=12)
    assert sampled.largest.max() == 0.0


def test_a_sample_says_so_and_reaches_every_part() -> None:
    ours = np.zeros((4096, 512), np.float32)
    theirs = ours.copy()
    theirs[:, 500:] = 1.0
    pair = opened(ours, theirs)
    found = made.error_map(pair, height=32, width=32, budget=1 << 14)
    assert found.extent.seen <= 1 << 14 < found.extent.elements
    assert (found.largest[:, -1] == 1.0).all() and (found.largest[:, :-1] == 0.0).all()
    shown = made.pictures(pair, budget=1 << 14)
    assert "sample of" in shown["note"]
    zoomed = made.error_map(pair, Region(0, 32, 480, 512), height=32, width=32, budget=1 << 14)
    assert zoomed.extent.seen == zoomed.extent.elements


def test_one_long_row_is_sampled_along_its_columns() -> None:
    ours = np.zeros(1 << 20, np.float32)
    found = made.error_map(opened(ours, ours), width=64, budget=1 << 12)
    assert found.extent.seen == 1 << 12 and found.largest.shape == (1, 64)


def test_a_tensor_far_larger_than_memory_is_looked_into(tmp_path: Path) -> None:
    rows, columns = 3_000_000, 16_384
    for name, value in (("a", 1.0), ("b", 1.5)):
        with (tmp_path / f"{name}.npy").open("wb") as file:
            about = {"descr": "<f4", "fortran_order": False, "shape": (rows, columns)}
            np.lib.format.write_array_header_1_0(file, about)
            start = file.tell()
            file.truncate(start + 4 * rows * columns)  # 197 GB, of which next to nothing is there
            file.seek(start + 4 * (2_000_000 * columns + 77))
            file.write(np.full(3, value, np.float32).tobytes())
    ours, theirs = (open_run(tmp_path / f"{name}.npy") for name in "ab")
    before = anonymous_memory()
    pair = open_pair(ours, theirs, Pair(ours.records[0], theirs.records[0]))
    whole = made.error_map(pair, budget=1 << 14)
    assert whole.extent.seen <= 1 << 14
    near = made.error_map(pair, Region(1_999_998, 2_000_002, 70, 90), height=4, width=20)
    assert near.largest[2].tolist() == [0.0] * 7 + [0.5] * 3 + [0.0] * 10
    assert statistics(pair, Region(2_000_000, 2_000_001, 0, columns)).different == 3
    assert anonymous_memory() - before < 100 << 20


def anonymous_memory() -> int:
    """Bytes this process holds that are no part of a mapped file."""
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("this system does not say how much memory a process holds")
    found = re.search(r"RssAnon:\s+(\d+) kB", status.read_text())
    return int(found.group(1)) << 10 if found else 0


def test_the_worst_elements_are_named_in_the_tensors_own_axes() -> None:
    ours = RANDOM.normal(size=(2, 5, 6)).astype(np.float32)
    theirs = ours.copy()
    theirs[1, 3, 4] += 2.0
    theirs[0, 2, 5] = np.nan
    pair = opened(ours, theirs)
    worst = made.largest_errors(pair)
    assert [made.place(pair, one) for one in worst] == [
        "batch 0, token 2, channel 5",
        "batch 1, token 3, channel 4",
    ]


def test_a_bad_token_stands_out() -> None:
    ours = RANDOM.normal(size=(1, 64, 48)).astype(np.float32)
    theirs = ours + 1e-6 * RANDOM.normal(size=ours.shape).astype(np.float32)
    theirs[0, 7:10] += 0.1
    first = outlier_slices(opened(ours, theirs))[0]
    assert (first.axis, first.extent, sorted(first.places)) == ("token", 64, [7, 8, 9])
    assert first.sentence == "tokens 7–9 (3 of 64) hold all of the squared error"
    assert sum(first.share) == pytest.approx(1.0)


def test_a_bad_head_is_found_among_the_channels_and_on_its_own_axis() -> None:
    ours = RANDOM.normal(size=(2, 16, 256)).astype(np.float32)
    theirs = ours + 1e-6 * RANDOM.normal(size=ours.shape).astype(np.float32)
    theirs[..., 64:96] *= 1.1
    assert all(
        one.axis != "head" for one in outlier_slices(opened(ours, theirs, site="layers.0.mlp"))
    )
    found = outlier_slices(opened(ours, theirs, site="layers.0.self_attn.q_proj"))
    head = next(one for one in found if one.axis == "head")
    assert head.places == (2,) and head.extent == 8
    assert head.sentence == (
        "head 2 of 8, if heads are 32 channels wide, holds all of the squared error"
    )
    turned = [side.reshape(2, 16, 8, 32).transpose(0, 2, 1, 3) for side in (ours, theirs)]
    first = outlier_slices(opened(*turned))[0]
    assert (first.axis, first.places) == ("head", (2,))


def test_noise_everywhere_singles_out_nobody() -> None:
    ours = RANDOM.normal(size=(2, 32, 64)).astype(np.float32)
    theirs = ours + 1e-3 * RANDOM.normal(size=ours.shape).astype(np.float32)
    found = outlier_slices(opened(ours, theirs))
    assert found and all(one.standing_out == 0 for one in found)
    assert all(one.sentence.startswith("the error is spread over the") for one in found)


def test_a_one_sided_infinity_is_a_suspect_though_it_has_no_error_to_sum() -> None:
    ours = RANDOM.normal(size=(8, 16)).astype(np.float32)
    theirs = ours.copy()
    theirs[5, 3] = np.inf
    first = outlier_slices(opened(ours, theirs))[0]
    assert first.places in ((5,), (3,)) and first.value == (math.inf,)
    assert "not finite on one side only" in first.sentence


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (1, 1), (5,)])
def test_odd_shapes_have_pictures_too(shape: tuple[int, ...]) -> None:
    ours = np.ones(shape, np.float32)
    shown = made.pictures(opened(ours, ours + 1, shape=shape))
    assert (shown["heat"] is None) == (len(shape) < 2 or 0 in shape)


def test_huge_and_tiny_values_break_no_picture() -> None:
    ours = np.array([[1.7e308, -1.7e308, 5e-324, 0.0]])
    shown = made.pictures(opened(ours, -ours))
    assert shown["histogram"]["reference"].sum() == 4
    assert shown["error"]["counts"].sum() + shown["error"]["zero"] == 4


def test_tensors_that_cannot_be_looked_at_say_why() -> None:
    sink = MemorySink()
    sink.put(Record(TensorKey.of("layer", "output"), 0, "float32", (2, 2), kept="describe"), None)
    run = sink.run()
    with pytest.raises(BadInput, match="only its describe"):
        open_pair(run, run, Pair(run.records[0], run.records[0]))
    two, three = run_of(np.ones((2, 2), np.float32)), run_of(np.ones((3, 2), np.float32))
    with pytest.raises(DriftlineError, match="the shapes differ"):
        open_pair(two, three, Pair(two.records[0], three.records[0]))
    pair = open_pair(two, two, Pair(two.records[0], two.records[0]))
    with pytest.raises(BadInput, match="outside of 2 rows and 2 columns"):
        made.error_map(pair, Region(2, 4, 0, 2))
