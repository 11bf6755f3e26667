"""What `compare` prints of a pair agrees with longer arithmetic, within docs/metrics.md's bounds.

The figures are computed again with the 64 bits and the range of `longdouble`, not by the package's
own definitions; only the decoding of elements is shared. Pairs are drawn over all element types,
alignments, sizes, ways to split, magnitudes, non-finite values and tolerances.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from numerics_tensors import Bytes, encode, misaligned

from driftline.comparison.measure.operands import ValuePair, measure_moments, measure_values
from driftline.comparison.metrics.catalogue import KNOWN, STANDARD
from driftline.numerics import definitions, kernel
from driftline.numerics.dtypes import DTYPES, DType

WIDE = np.longdouble
METRICS = (*STANDARD, KNOWN["sqnr"])
INTEGRAL = ("int", "uint", "bool")
SMALLEST = WIDE(1e-323)
"""Two steps of subnormal float64 numbers, which is how far roundings there may be apart."""

# Values of one tensor: usual, tiny or huge, of all magnitudes at once, far from zero, mostly zero.
DRAWS: tuple[Callable[[np.random.Generator, int], np.ndarray], ...] = (
    lambda rng, n: rng.standard_normal(n) * 10.0 ** rng.uniform(-12, 12),
    lambda rng, n: rng.standard_normal(n) * 10.0 ** rng.integers(-320, 308),
    lambda rng, n: np.ldexp(rng.standard_normal(n), rng.integers(-1074, 1020, n)),
    lambda rng, n: rng.standard_normal(n) * 1e-6 + rng.standard_normal() * 1e3,
    lambda rng, n: np.where(rng.random(n) < 0.5, 0.0, rng.integers(-9, 9, n)),
    lambda rng, n: np.full(n, rng.standard_normal()),
)


def drawn(rng: np.random.Generator, values: np.ndarray, dtype: DType, count: int) -> Bytes:
    if dtype.kind in INTEGRAL:
        data = rng.integers(0, 256, dtype.byte_count(count), dtype=np.uint8)
    else:
        with np.errstate(all="ignore"):
            data = encode(values[: count * dtype.reals], dtype).copy()
        if dtype.kind == "float" and count and rng.random() < 0.25 and dtype.bits >= 8:
            size, at = dtype.bits // 8, int(rng.integers(count))
            odd = np.array([rng.choice([math.nan, math.inf, -math.inf, dtype.lowest])])
            data[at * size : (at + 1) * size] = encode(odd, dtype)
    return misaligned(data, int(rng.integers(16)))


def expected(
    raws: tuple[Bytes, Bytes], dtypes: tuple[DType, DType], count: int, atol: float, rtol: float
) -> dict[str, tuple[object, object]]:
    """Each figure with how far off it may be."""
    reals = [
        definitions.masked_as_infinite(definitions.real_values(raw, dtype, count), dtype)
        for raw, dtype in zip(raws, dtypes, strict=True)
    ]
    figures: dict[str, tuple[object, object]] = {}
    for side, values in zip(("reference", "candidate"), reals, strict=True):
        finite = values[np.isfinite(values)].astype(WIDE)
        figures[f"{side}_nan"] = np.isnan(values).sum(), 0
        figures[f"{side}_inf"] = np.isinf(values).sum(), 0
        if finite.size:
            square, mean = (finite * finite).mean(), finite.mean()
            std, length = np.sqrt(((finite - mean) ** 2).mean()), np.sqrt((finite * finite).sum())
            figures[f"{side}_min"], figures[f"{side}_max"] = (finite.min(), 0), (finite.max(), 0)
            figures[f"{side}_mean"] = mean, 1e-12 * np.sqrt(square)
            figures[f"{side}_std"] = std, max(1e-9 * std, WIDE(1e-13) * np.abs(finite).max())
            figures[f"{side}_l2"] = length, 1e-9 * length
    both = np.isfinite(reals[0]) & np.isfinite(reals[1])
    r64, c64 = reals[0][both], reals[1][both]
    e64 = c64 - r64
    differ = (reals[0] != reals[1]) & ~(np.isnan(reals[0]) & np.isnan(reals[1]))
    r, c = r64.astype(WIDE), c64.astype(WIDE)
    e = c - r
    if 64 in (dtypes[0].bits, dtypes[1].bits) and all(d.kind in INTEGRAL for d in dtypes):
        sides = [definitions._integers(*given, count) for given in zip(raws, dtypes, strict=True)]
        exact = sides[1] - sides[0]  # Python's integers
        differ, e64 = (exact != 0).astype(bool), exact.astype(np.float64)
        e = e64.astype(WIDE)
    one_sided = differ & ~both
    outside = one_sided.copy()
    outside[both] = ~(np.abs(e64) <= atol + rtol * np.abs(r64))
    figures["different"] = differ.sum(), 0
    figures["one_sided"] = one_sided.sum(), 0
    figures["outside_share"] = (outside.sum() / outside.size if outside.size else 0.0), 0
    if not r.size:
        return figures
    ae, size = np.abs(e), np.sqrt((e * e).sum())
    rel = np.where(e == 0, WIDE(0), ae / np.abs(r)).astype(np.float64).astype(WIDE)
    figures["max_abs_error"] = np.abs(e64).max(), 0
    for name, value in (
        ("mean_abs_error", ae.mean()),
        ("rmse", size / np.sqrt(WIDE(r.size))),
        ("max_rel_error", rel.max()),
        ("mean_rel_error", rel.mean()),
    ):
        figures[name] = value, 1e-9 * value
    lengths = np.sqrt((r * r).sum()), np.sqrt((c * c).sum())
    if lengths[0] > 0:
        share, ratio = size / lengths[0], lengths[1] / lengths[0]
        figures["relative_l2"] = share, 1e-9 * share
        figures["projection"] = (e * r).sum() / (r * r).sum(), 1e-12 * max(WIDE(1), ratio)
        if share > 0:
            decibels = -20 * np.log10(share)
            figures["sqnr"] = decibels, 1e-9 * max(WIDE(1), np.abs(decibels))
        if lengths[1] > 0:
            figures["cosine"] = (r * c).sum() / lengths[0] / lengths[1], 1e-12
    return figures


def printed(
    raws: tuple[Bytes, Bytes],
    dtypes: tuple[DType, DType],
    cuts: list[int],
    tolerances: tuple[float, float],
    path: str,
) -> dict[str, object]:
    """As the engine does it, in these pieces."""
    moments = []
    for start, stop in itertools.pairwise(cuts):
        reference, candidate = (
            raw[start * dtype.bits // 8 : (stop * dtype.bits + 7) // 8]
            for raw, dtype in zip(raws, dtypes, strict=True)
        )
        moments.append(
            kernel.pair_moments(
                *(reference, dtypes[0], candidate, dtypes[1]),
                count=stop - start,
                atol=tolerances[0],
                rtol=tolerances[1],
                path=path,
            )
        )
    stored = [raw.copy().view(dtype.storage) for raw, dtype in zip(raws, dtypes, strict=True)]
    pair = ValuePair(stored[0], dtypes[0], stored[1], dtypes[1], cuts[-1], (cuts[-1],))
    return dict(measure_values(pair, measure_moments(moments, METRICS), METRICS, []))


def check_drawn_pairs(seed: int, cases: int) -> None:
    rng = np.random.default_rng(seed)
    names = list(DTYPES)
    for case in range(cases):
        dtypes = DTYPES[rng.choice(names)], DTYPES[rng.choice(names)]
        # `compare` refuses a complex tensor against a real one.
        if rng.random() < 0.5 or dtypes[0].reals != dtypes[1].reals:
            dtypes = dtypes[0], dtypes[0]
        count = int(rng.integers(0, rng.choice([20, 140, 1100])))
        values = DRAWS[rng.integers(len(DRAWS))](rng, 2 * count)
        noise = 10.0 ** rng.uniform(-17, -1) * rng.standard_normal(values.size)
        with np.errstate(over="ignore"):
            other = (
                values * (1 + noise),
                values * rng.choice([-1, 1, 1.03, 1e-8, 1e30]),
                DRAWS[rng.integers(len(DRAWS))](rng, 2 * count),
            )[rng.integers(3)]
        raws = drawn(rng, values, dtypes[0], count), drawn(rng, other, dtypes[1], count)
        cuts = sorted({0, int(rng.integers(count + 1)) // 2 * 2, count})
        cuts = cuts if len(cuts) > 1 else [0, count]
        tolerances = 10.0 ** rng.uniform(-30, 2), float(rng.choice([0.0, 1e-3]))
        with np.errstate(all="ignore"):
            want = expected(raws, dtypes, count, *tolerances)
        for path in kernel.available():
            got = printed(raws, dtypes, cuts, tolerances, path)
            for name, (value, bound) in want.items():
                where = (seed, case, dtypes[0].name, dtypes[1].name, count, path, name, got[name])
                if math.isinf(float(value)):
                    assert got[name] == float(value), where
                else:
                    slack = bound + SMALLEST if bound else 0
                    assert abs(WIDE(got[name]) - WIDE(value)) <= slack, (*where, value)


def test_a_thousand_drawn_pairs_are_printed_as_longer_arithmetic_has_them() -> None:
    check_drawn_pairs(seed=1, cases=1000)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 20))
def test_ten_thousand_drawn_pairs_a_seed_are_printed_so_too(seed: int) -> None:
    check_drawn_pairs(seed, cases=10_000)
