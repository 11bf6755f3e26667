"""What the pair kernel leaves out while it can: every way out of a shortcut is proven here."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from numerics_tensors import encode, misaligned
from test_kernel_moments import FAST, PATHS, check

from driftline.numerics.dtypes import DTYPES

pytestmark = pytest.mark.skipif(not PATHS, reason="the C kernel was not built on this machine")

COUNT = 9300
PAIRS = [("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "bfloat16")]
TOLERANCES = [(0.0, 0.0), (1e-3, 1e-3), (0.0, 1e-2), (1e-3, 0.0)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("r", "c"), [*PAIRS, ("float32", "float32"), ("bfloat16", "float16")])
def test_zeros_of_either_sign_on_either_side_are_no_difference(r: str, c: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    a = rng.standard_normal(COUNT)
    b = a + 1e-2 * rng.standard_normal(COUNT)
    first = int(rng.integers(COUNT))
    both = (rng.random(COUNT) < 0.01) & (np.arange(COUNT) >= first)
    a[both], b[both] = rng.choice([0.0, -0.0], both.sum()), rng.choice([0.0, -0.0], both.sum())
    if seed % 2:
        a[rng.random(COUNT) < 1e-3] = 0.0
    atol, rtol = TOLERANCES[seed % 4]
    check(
        encode(a, DTYPES[r]),
        DTYPES[r],
        encode(b, DTYPES[c]),
        DTYPES[c],
        COUNT,
        atol=atol,
        rtol=rtol,
    )


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(("r", "c"), [*PAIRS, ("float16", "bfloat16")])
def test_extremes_of_tensors_with_one_sign_are_found(r: str, c: str, sign: float) -> None:
    rng = np.random.default_rng(7)
    a = sign * np.exp(rng.standard_normal(COUNT))
    a[5000:] = rng.standard_normal(COUNT - 5000)
    b = a * (1 + 1e-3 * rng.standard_normal(COUNT))
    check(encode(a, DTYPES[r]), DTYPES[r], encode(b, DTYPES[c]), DTYPES[c], 5000)
    check(encode(a, DTYPES[r]), DTYPES[r], encode(b, DTYPES[c]), DTYPES[c], COUNT, atol=1e-2)


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("most", [1, 2, 5, 300])
def test_the_greatest_ulp_distance_is_found_wherever_it_stands(name: str, most: int) -> None:
    dtype = DTYPES[name]
    rng = np.random.default_rng(most)
    for spread in (0.0, 2.0, 8.0):
        a = encode(rng.standard_normal(COUNT) * np.exp(spread * rng.standard_normal(COUNT)), dtype)
        a = a.view(np.uint32 if name == "float32" else np.uint16)
        steps = rng.integers(-1, 2, COUNT)
        for at in rng.integers(0, COUNT, 3):
            steps[at] = rng.integers(-most, most + 1)
        b = (a.astype(np.int64) + steps).astype(a.dtype)
        flipped = rng.integers(0, COUNT, most % 4)
        top = a.dtype.type(1 << (8 * a.itemsize - 1))
        b[flipped] ^= top
        for atol, rtol in TOLERANCES:
            check(
                a.view(encode(np.zeros(1), dtype).dtype),
                dtype,
                b.view(encode(np.zeros(1), dtype).dtype),
                dtype,
                COUNT,
                atol=atol,
                rtol=rtol,
            )


@pytest.mark.parametrize(("r", "c"), [*PAIRS, ("float32", "float32")])
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-39])
def test_a_tolerance_that_is_met_exactly_is_counted_exactly(r: str, c: str, scale: float) -> None:
    rng = np.random.default_rng(11)
    a = rng.integers(-40, 41, COUNT) * scale
    b = a + rng.integers(-3, 4, COUNT) * scale
    a[:3000] += rng.standard_normal(3000)
    b[:3000] = a[:3000] + rng.standard_normal(3000)
    for atol, rtol in [(scale, 0.0), (2 * scale, 0.0), (0.0, 0.05), (0.0, 0.1), (scale, 0.05)]:
        check(
            encode(a, DTYPES[r]),
            DTYPES[r],
            encode(b, DTYPES[c]),
            DTYPES[c],
            COUNT,
            atol=atol,
            rtol=rtol,
        )


@pytest.mark.parametrize("name", FAST)
def test_one_value_that_is_not_finite_costs_no_other_value(name: str) -> None:
    dtype = DTYPES[name]
    rng = np.random.default_rng(13)
    a = rng.standard_normal(COUNT)
    b = a + 1e-2 * rng.standard_normal(COUNT)
    chain_ends = (0, 1, 255, 256, 383, 384, 511, 512, 767, 768, 1023, 3583, 3584)
    block_ends = (4095, 4096, 6143, 6144, 8191, 8192, COUNT - 1)
    for at in (*chain_ends, *block_ends):
        for odd in (math.nan, math.inf, -math.inf, dtype.lowest):
            for r_odd, c_odd in ((odd, None), (None, odd), (odd, odd)):
                x, y = a.copy(), b.copy()
                if r_odd is not None:
                    x[at] = r_odd
                if c_odd is not None:
                    y[at] = c_odd
                check(encode(x, dtype), dtype, encode(y, dtype), dtype, COUNT, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_what_is_not_finite_is_found_again_after_a_long_while_without_it(name: str) -> None:
    """The kernel looks for it first for 64 blocks, then no more until one fails."""
    dtype, rng = DTYPES[name], np.random.default_rng(17)
    count = 80 * 6144 + 77
    a = rng.standard_normal(count)
    b = a + 1e-2 * rng.standard_normal(count)
    for at in (5, 7000, 70 * 6144 + 3000, 70 * 6144 + 3001, 79 * 6144 + 6143, count - 1):
        a[at] = math.nan
    b[75 * 6144] = math.inf
    check(encode(a, dtype), dtype, encode(b, dtype), dtype, count, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
@pytest.mark.parametrize("known", [0, 1, 120, 127, 128, 129, 400])
def test_numbers_of_opposite_signs_are_far_apart_though_their_words_may_be_near(
    name: str, known: int
) -> None:
    dtype, rng = DTYPES[name], np.random.default_rng(known)
    kind = encode(np.zeros(1), dtype).dtype
    large = (0x5E80, 0x7F7E) if name == "bfloat16" else (0x5E80, 0x7BFE)
    a = encode(1 + rng.random(COUNT), dtype).view(np.uint16)
    b = a.copy()
    b[7] += known  # what is known after the first block
    for most, small in itertools.product(large, (0, 1, 0x80)):
        for negative in (0, 1):
            r, c = a.copy(), b.copy()
            r[5000], c[5000] = most, 0x8000 | small
            if negative:
                r[5000], c[5000] = r[5000] ^ 0x8000, c[5000] ^ 0x8000
            check(r.view(kind), dtype, c.view(kind), dtype, COUNT, atol=1e-3, rtol=1e-3)


# Pairs that stand late in a tensor whose errors do not depend on its values; 3e-3 is the noise.
LATE = {
    "signs of large numbers": (3.0, -3.0),
    "signs of numbers like the noise": (4e-3, -5e-3),
    "a zero": (0.0, 2e-3),
    "a number near zero": (1e-7, 3e-3),
    "one sign, far apart": (1e-7, 6e4),
    "one sign, far down": (3.0, 1e-7),
    "the greatest error": (0.5, 0.7),
    "a new end": (-7.0, -7.001),
    "nothing": (math.nan, math.nan),
}


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize(("r", "c"), [*PAIRS, ("float32", "float32"), ("float32", "float16")])
def test_what_is_new_late_in_a_tensor_is_found(r: str, c: str, late: str) -> None:
    rng = np.random.default_rng(17)
    a = rng.standard_normal(50_000)
    b = a + 1e-3 * rng.standard_normal(a.size)
    for at in (21_234, 44_000, 44_001, 49_999):
        a[at], b[at] = LATE[late]
        check(
            *(encode(a, DTYPES[r]), DTYPES[r], encode(b, DTYPES[c]), DTYPES[c], a.size),
            atol=1e-3,
            rtol=1e-3,
        )


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("offset", [0, 1, 2, 16, 34, 62])
def test_large_tensors_may_begin_anywhere_in_a_line_of_memory(name: str, offset: int) -> None:
    dtype, rng = DTYPES[name], np.random.default_rng(19)
    a = rng.standard_normal(17_000) + 3  # a mean that the first few elements must not set alone
    b = a + 1e-3 * rng.standard_normal(a.size)
    r, c = misaligned(encode(a, dtype), offset), misaligned(encode(b, dtype), 2)
    check(r, dtype, c, dtype, a.size, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
@pytest.mark.parametrize("known", [0, 1, 3, 126, 127, 128, 300])
def test_a_candidate_that_is_hardly_more_than_rounding_hides_no_ulp(name: str, known: int) -> None:
    dtype, rng = DTYPES[name], np.random.default_rng(29 + known)
    kind = encode(np.zeros(1), dtype).dtype
    a = (rng.standard_normal(30_000) * np.exp(rng.standard_normal(30_000))).astype(np.float32)
    rounded = encode(a.astype(np.float64), dtype).view(np.uint16)
    below = 13 if name == "float16" else 16  # bits that the format has not
    tie = (a.view(np.uint32) >> below << below | np.uint32(1 << (below - 1))).view(np.float32)
    for late, apart in ((None, 0), (known + 1, 0), (-known - 1, 0), (known, 0x8000), (0, 0x8000)):
        r, c = a.copy(), rounded.copy()
        c[7] += known
        if late is not None:
            c[25_000] = (int(c[25_000]) + late) & 0xFFFF ^ apart
        r[12_000:12_100] = tie[12_000:12_100]
        c[12_000:12_100] = encode(r.astype(np.float64), dtype).view(np.uint16)[12_000:12_100]
        if known % 2:  # the wrong one of two that are equally near
            c[12_050] ^= 1
        r[26_000:26_003], c[26_000:26_003] = (0.0, -0.0, 1e-42), (0, 0, 0x8000)
        for atol, rtol in TOLERANCES:
            fp32 = DTYPES["float32"]
            check(r, fp32, c.view(kind), dtype, r.size, atol=atol, rtol=rtol)


@pytest.mark.parametrize(("r", "c"), [*PAIRS, ("float32", "float32"), ("float32", "float16")])
@pytest.mark.parametrize("share", [1e-4, 3e-3, 0.3])
def test_errors_beyond_the_absolute_part_of_a_tolerance_are_counted(
    r: str, c: str, share: float
) -> None:
    rng = np.random.default_rng(31)
    a = rng.standard_normal(60_000)
    a[rng.random(a.size) < 0.3] *= 8
    b = a + 2.0**-11 * rng.integers(-1, 2, a.size)
    far = (rng.random(a.size) < share) & (np.arange(a.size) % 20_000 > 7_000)
    b[far] += rng.standard_normal(far.sum()) / 4
    x, y = encode(a, DTYPES[r]), encode(b, DTYPES[c])
    for atol, rtol in ((0.125, 0.0), (0.125, 1e-2), (2.0**-10, 2.0**-6)):
        check(x, DTYPES[r], y, DTYPES[c], a.size, atol=atol, rtol=rtol)


@pytest.mark.parametrize("name", FAST)
def test_a_mean_or_zeros_that_come_and_go_are_followed(name: str) -> None:
    dtype, rng = DTYPES[name], np.random.default_rng(37)
    a = rng.standard_normal(120_000)
    a[:20_000] += 30
    a[50_000:70_000] = 0
    a[70_000:110_000][rng.random(40_000) < 1e-4] = 0
    b = a + 1e-2 * rng.standard_normal(a.size) * (a != 0)
    b[65_000:66_000] = -0.0
    a[80_000], b[80_000] = 0.0, 1.0  # an infinite relative error
    for count in (40_000, a.size):
        r, c = encode(a[:count], dtype), encode(b[:count], dtype)
        check(r, dtype, c, dtype, count, atol=1e-2, rtol=1e-2)
        check(r, dtype, c, dtype, count)


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
@pytest.mark.parametrize("count", [8, 32, 64, 512, 5000])
def test_errors_whose_sum_is_beyond_float32_are_still_errors(name: str, count: int) -> None:
    dtype = DTYPES[name]
    for r, c in ((0.0, 3e38), (-2e38, 3e38), (1.0, -3e38)):
        a, b = np.full(count, r), np.full(count, c)
        check(encode(a, dtype), dtype, encode(b, dtype), dtype, count, atol=1e-3, rtol=1e-3)
        a[: count // 2] = b[: count // 2]
        check(encode(a, dtype), dtype, encode(b, dtype), dtype, count)
