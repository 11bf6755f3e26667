"""The C kernel against the numpy definition: every pair of types, size, alignment, value."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numerics_tensors import (
    SPECIALS,
    assert_same_moments,
    encode,
    misaligned,
    noisy_pair,
)

from driftline.numerics import definitions, kernel
from driftline.numerics.dtypes import DTYPES, DType

PATHS = [path for path in kernel.available() if path != "numpy"]
FAST = ("float32", "bfloat16", "float16")
SIZES = (*range(131), 1023, 1024, 1025, 2047, 4095, 4096, 4097, 70000)

pytestmark = pytest.mark.skipif(not PATHS, reason="the C kernel was not built on this machine")


def check(
    reference: np.ndarray,
    r: DType,
    candidate: np.ndarray,
    c: DType,
    count: int,
    *,
    atol: float = 0.0,
    rtol: float = 0.0,
    paths: list[str] = PATHS,
) -> None:
    want = definitions.pair_moments(reference, r, candidate, c, count=count, atol=atol, rtol=rtol)
    for path in paths:
        got = kernel.pair_moments(
            reference, r, candidate, c, count=count, atol=atol, rtol=rtol, path=path
        )
        try:
            assert_same_moments(got, want)
        except AssertionError as error:
            raise AssertionError(f"{path} {r.name}/{c.name} n={count}: {error}") from error


@pytest.mark.parametrize("r", DTYPES.values(), ids=lambda d: d.name)
def test_every_pair_of_types_is_measured_as_defined(r: DType) -> None:
    rng = np.random.default_rng(1)
    for c in DTYPES.values():
        for count in (1, 67, 1100):
            reference, candidate = noisy_pair(rng, count, r, c)
            check(reference, r, candidate, c, count, atol=1e-3, rtol=1e-2)
        check(reference, r, candidate, c, count)


@pytest.mark.parametrize("r", FAST)
@pytest.mark.parametrize("c", FAST)
def test_every_size_is_measured_as_defined(r: str, c: str) -> None:
    rng = np.random.default_rng(2)
    reference, candidate = noisy_pair(rng, max(SIZES), DTYPES[r], DTYPES[c])
    for count in SIZES:
        check(reference, DTYPES[r], candidate, DTYPES[c], count, atol=1e-4, rtol=1e-2)


@pytest.mark.parametrize(("r", "c"), [("float32", "float32"), ("float32", "bfloat16")])
@pytest.mark.parametrize("path", PATHS)
def test_every_alignment_is_measured_alike(r: str, c: str, path: str) -> None:
    rng = np.random.default_rng(3)
    reference, candidate = noisy_pair(rng, 1500, DTYPES[r], DTYPES[c])
    whole = kernel.pair_moments(reference, DTYPES[r], candidate, DTYPES[c], count=1500, path=path)
    for offset in range(64):
        a, b = misaligned(reference, offset), misaligned(candidate, 63 - offset)
        got = kernel.pair_moments(a, DTYPES[r], b, DTYPES[c], count=1500, path=path)
        assert got == whole, offset


@pytest.mark.parametrize(
    "scale", [1e-40, 1e-22, 1e-16, 1e-8, 1e4, 1e15, 1e19, 3e37], ids=lambda s: f"{s:g}"
)
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float64"])
def test_tiny_and_huge_values_keep_their_digits(name: str, scale: float) -> None:
    rng = np.random.default_rng(4)
    dtype = DTYPES[name]
    reference, candidate = noisy_pair(rng, 5000, dtype, dtype, scale=scale)
    check(reference, dtype, candidate, dtype, 5000, atol=scale * 1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("every", [1, 3, 40, 4096])
def test_values_that_are_not_finite_are_counted_and_left_out(name: str, every: int) -> None:
    rng = np.random.default_rng(5)
    dtype = DTYPES[name]
    r = rng.standard_normal(9000)
    c = r + 1e-2 * rng.standard_normal(9000)
    odd = np.array([math.nan, math.inf, -math.inf, dtype.lowest])
    where = rng.random(9000) < 1 / every
    r[where] = rng.choice(odd, where.sum())
    c[rng.random(9000) < 1 / every] = math.nan
    both = rng.random(9000) < 1 / every
    r[both] = c[both] = rng.choice(odd, both.sum())
    check(encode(r, dtype), dtype, encode(c, dtype), dtype, 9000, atol=1e-2, rtol=1e-2)
    check(encode(r, dtype), dtype, encode(c, DTYPES["float32"]), DTYPES["float32"], 9000)


@pytest.mark.parametrize("path", [*PATHS, "numpy"])
def test_the_lowest_value_of_a_mask_means_minus_infinity_on_both_sides(path: str) -> None:
    fp32, fp16 = DTYPES["float32"], DTYPES["float16"]
    r = np.where(np.arange(4096) % 2, fp32.lowest, 0.0)
    c = np.where(np.arange(4096) % 2, fp16.lowest, 0.0)
    got = kernel.pair_moments(encode(r, fp32), fp32, encode(c, fp16), fp16, count=4096, path=path)
    assert (got.different, got.outside, got.one_sided) == (0, 0, 0)
    assert (got.r_neg_inf, got.c_neg_inf, got.finite) == (2048, 2048, 2048)
    c[101] = -1.0
    got = kernel.pair_moments(encode(r, fp32), fp32, encode(c, fp16), fp16, count=4096, path=path)
    assert (got.one_sided, got.one_sided_at, got.outside) == (1, 101, 1)


@pytest.mark.parametrize("path", [*PATHS, "numpy"])
def test_neighbouring_64_bit_integers_differ(path: str) -> None:
    wide, unsigned = DTYPES["int64"], DTYPES["uint64"]
    r = np.full(3000, 2**62, np.int64)
    c = r.copy()
    c[2001] += 1
    got = kernel.pair_moments(r, wide, c, wide, count=3000, path=path)
    assert (got.different, got.first_different_at) == (1, 2001)
    assert (got.max_abs_e, got.max_abs_e_at, got.max_ulp, got.outside) == (1.0, 2001, 1.0, 1)
    top = np.full(3, 2**64 - 1, np.uint64)
    got = kernel.pair_moments(np.full(3, -1, np.int64), wide, top, unsigned, count=3, path=path)
    assert (got.different, got.max_abs_e) == (3, 2.0**64)


@pytest.mark.parametrize("path", [*PATHS, "numpy"])
def test_a_mean_far_from_zero_costs_the_standard_deviation_no_digits(path: str) -> None:
    rng = np.random.default_rng(6)
    fp32 = DTYPES["float32"]
    r = (100 + 0.01 * rng.standard_normal(200_000)).astype(np.float32)
    c = (r + 0.001 * rng.standard_normal(r.size)).astype(np.float32)
    got = kernel.pair_moments(r, fp32, c, fp32, count=r.size, path=path)
    assert math.isclose(got.r_std, r.astype(np.float64).std(), rel_tol=1e-6)
    assert math.isclose(got.c_std, c.astype(np.float64).std(), rel_tol=1e-6)
    assert math.isclose(
        kernel.summarize(r, fp32, count=r.size, path=path).std, got.r_std, rel_tol=1e-6
    )


@pytest.mark.parametrize("path", PATHS)
def test_a_tiny_systematic_error_survives_the_subtraction_of_large_sums(path: str) -> None:
    """The slope <e,r>/<r,r> is sum_rc - sum_rr over sum_rr; both are large and nearly equal."""
    rng = np.random.default_rng(7)
    fp32 = DTYPES["float32"]
    r = rng.standard_normal(1 << 18).astype(np.float32)
    c = (r.astype(np.float64) * (1 + 3e-6)).astype(np.float32)
    got = kernel.pair_moments(r, fp32, c, fp32, count=r.size, path=path)
    r64, e = r.astype(np.float64), c.astype(np.float64) - r
    assert math.isclose((got.sum_rc - got.sum_rr) / got.sum_rr, e @ r64 / (r64 @ r64), rel_tol=1e-4)


def test_structured_candidates_are_measured_as_defined() -> None:
    """Zeroed, scaled, shifted, negated, constant, unrelated: each defeats a shortcut."""
    rng = np.random.default_rng(8)
    r = rng.standard_normal(6000)
    relu = np.maximum(r, 0)
    candidates = {
        "zeroed": np.zeros_like(r),
        "zeroed in part": np.where(np.arange(r.size) < 3000, r, 0),
        "doubled": 2 * r,
        "tenth": 0.1 * r,
        "negated": -r,
        "shifted": r + 1000.0,
        "constant": np.full_like(r, 3.25),
        "unrelated": rng.standard_normal(r.size),
        "equal": r,
        "one off": np.where(np.arange(r.size) == 5987, r + 1e-6, r),
    }
    for name in FAST:
        dtype = DTYPES[name]
        for candidate in candidates.values():
            check(encode(r, dtype), dtype, encode(candidate, dtype), dtype, r.size, rtol=1e-3)
            check(encode(relu, dtype), dtype, encode(candidate, dtype), dtype, r.size, atol=1e-3)
            check(encode(candidate, dtype), dtype, encode(r, dtype), dtype, r.size)
        steps = np.repeat([0.0, 5.0, 5.0, -2e5, 1e-3, 7.0], 1000)  # blocks with means of their own
        check(encode(steps, dtype), dtype, encode(steps * 1.01, dtype), dtype, 6000, atol=1e-3)


def test_elements_exactly_at_the_tolerance_are_inside() -> None:
    fp32 = DTYPES["float32"]
    r = np.tile(np.array([0.0, 1.0, -1.0, 2.0, 1024.0]), 800)
    for atol, rtol in ((0.25, 0.0), (0.0, 0.125), (0.5, 0.25), (1e-3, 1e-3), (1e40, 0), (1e-40, 0)):
        allowed = atol + rtol * np.abs(r)
        with np.errstate(over="ignore"):
            for factor in (1.0, 1 - 2.0**-23, 1 + 2.0**-22):
                c = (r + allowed * factor).astype(np.float32)
                check(r.astype(np.float32), fp32, c, fp32, r.size, atol=atol, rtol=rtol)


@pytest.mark.parametrize("names", [("float32", "float32"), ("float16", "float32")])
def test_elements_a_few_float32_steps_from_the_tolerance_fall_on_the_right_side(
    names: tuple[str, str],
) -> None:
    rng = np.random.default_rng(9)
    r_dtype, c_dtype = DTYPES[names[0]], DTYPES[names[1]]
    for atol, rtol in ((1e-3, 1e-3), (0.0, 0.3), (0.7, 0.0), (1e-2, 0.11), (3e-5, 1.7)):
        r = encode(rng.standard_normal(20_000) * 10.0 ** rng.integers(-3, 4, 20_000), r_dtype)
        values = definitions.real_values(r, r_dtype, 20_000)
        steps = rng.integers(-14, 15, values.size)
        allowed = (atol + rtol * np.abs(values)) * (1 + steps * 2.0**-24)
        c = encode(values + rng.choice([-1, 1], values.size) * allowed, c_dtype)
        for start in range(0, 20_000, 2048):  # block by block, so that no count hides another
            count = min(2048, 20_000 - start)
            a, b = r[start * r_dtype.bits // 8 :], c[start * c_dtype.bits // 8 :]
            want = definitions.pair_moments(
                a, r_dtype, b, c_dtype, count=count, atol=atol, rtol=rtol
            ).outside
            for path in PATHS:
                got = kernel.pair_moments(
                    a, r_dtype, b, c_dtype, count=count, atol=atol, rtol=rtol, path=path
                )
                assert got.outside == want, (path, atol, rtol, start)
            # Alone, one such element decides for a whole block.
            for i in range(0, count, 97):
                one = definitions.real_values(a, r_dtype, count).copy()
                one[i] = definitions.real_values(b, c_dtype, count)[i]
                c_one = encode(one, c_dtype)
                want = definitions.pair_moments(
                    a, r_dtype, c_one, c_dtype, count=count, atol=atol, rtol=rtol
                ).outside
                for path in PATHS:
                    got = kernel.pair_moments(
                        a, r_dtype, c_one, c_dtype, count=count, atol=atol, rtol=rtol, path=path
                    )
                    assert got.outside == want, (path, atol, rtol, start, i)


def test_a_program_that_flushes_denormals_does_not_change_the_answer() -> None:
    torch = pytest.importorskip("torch")
    fp32 = DTYPES["float32"]
    r = (np.arange(4096) * 1e-42).astype(np.float32)
    c = np.roll(r, 1)
    want = definitions.pair_moments(r, fp32, c, fp32, count=4096)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        got = [kernel.pair_moments(r, fp32, c, fp32, count=4096, path=path) for path in PATHS]
        still_flushing = (torch.tensor([1e-42]) * 0.5).item() == 0.0
    finally:
        torch.set_flush_denormal(False)
    for moments in got:
        assert_same_moments(moments, want)
    assert still_flushing


FLOATS = st.one_of(
    st.sampled_from(SPECIALS),
    st.floats(width=32),
    st.floats(-4, 4, width=16),
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    data=st.data(),
    names=st.tuples(st.sampled_from(list(DTYPES)), st.sampled_from(list(DTYPES))),
    tile=st.integers(1, 40),
    offset=st.integers(0, 63),
    atol=st.sampled_from([0.0, 1e-6, 1e-3, 0.5]),
    rtol=st.sampled_from([0.0, 1e-5, 1e-2]),
)
def test_any_values_in_any_types_are_measured_as_defined(
    data: st.DataObject,
    names: tuple[str, str],
    tile: int,
    offset: int,
    atol: float,
    rtol: float,
) -> None:
    r, c = DTYPES[names[0]], DTYPES[names[1]]
    base = data.draw(st.lists(st.tuples(FLOATS, FLOATS), min_size=1, max_size=60))
    pairs = np.array(base * tile, np.float64)
    count = len(pairs)
    sides = []
    for dtype, column in ((r, pairs[:, 0]), (c, pairs[:, 1])):
        if dtype.kind == "complex":
            column = np.repeat(column, 2)
        sides.append(misaligned(encode(column, dtype), offset))
    check(sides[0], r, sides[1], c, count, atol=atol, rtol=rtol)


def test_counts_are_those_of_the_definition_when_everything_special_meets_everything() -> None:
    pairs = np.array(list(itertools.product(SPECIALS, SPECIALS)) * 9)
    for r, c in itertools.product((*FAST, "float64", "float8_e5m2"), repeat=2):
        a, b = encode(pairs[:, 0], DTYPES[r]), encode(pairs[:, 1], DTYPES[c])
        check(a, DTYPES[r], b, DTYPES[c], len(pairs), atol=1e-3, rtol=1e-3)
