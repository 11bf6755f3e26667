"""What every figure means, in numpy float64: slow and plain. The C kernel is tested against it.

The whole tensor is decoded at once, so these functions are for tests and, in blocks, for machines
without the kernel. They know element types and flat arrays, but no shapes, files or thresholds.

The sketch condenses a tensor's values into 64 numbers that change under permutations. Min, max,
mean, std and l2 do not change if two heads are swapped or the tokens are shifted by one; the signed
count-sketch does. Every element is added to one of 64 buckets; its index determines the bucket and
the sign. The sketch is linear, so the difference of two sketches is the sketch of the difference,
and its squared length is an unbiased estimate of the squared length of the difference (relative
standard error about sqrt(2/64) = 18 %; half of that for the length itself). Element `i` in flat C
order belongs to group `k = i // 64`. One 64-bit hash of `k` gives the signs: a set bit `i % 64`
means minus. Six bits of that hash times a constant are XORed to `i % 64`, which gives the bucket.
So a group fills every bucket once, and the kernel can treat it as a permutation of lanes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from driftline.numerics.dtypes import DTYPES, DType, to_float64
from driftline.numerics.fields import (
    SKETCH_BUCKETS,
    PairMoments,
    Summary,
    merge_moments,
    merge_summaries,
)

F64 = npt.NDArray[np.float64]
U64 = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]
AnyArray = npt.NDArray[Any]

NUMPY_BLOCK = 1 << 18
"""Elements per block without the C kernel; about fifteen float64 copies of it exist at a time."""


def storage_view(raw: AnyArray, dtype: DType, count: int) -> AnyArray:
    """Storage values of the elements, from a storage array or from raw bytes of any alignment."""
    flat = raw.reshape(-1)
    if dtype.bits == 4:
        return flat.view(np.uint8)[: dtype.byte_count(count)]
    if flat.dtype == np.dtype(dtype.storage):
        return flat[:count]
    bytes_ = flat.view(np.uint8)[: dtype.byte_count(count)]
    return np.frombuffer(bytes_.tobytes(), dtype.storage)


def real_values(raw: AnyArray, dtype: DType, count: int, *, widen: bool = False) -> F64:
    """All elements as float64. A complex element gives two; so does a real one with `widen`."""
    values: Any = to_float64(storage_view(raw, dtype, count), dtype, count)
    if dtype.kind == "complex":
        return np.ascontiguousarray(values).view(np.float64)
    if widen:
        return values.astype(np.complex128).view(np.float64)
    return values


def masked_as_infinite(values: F64, dtype: DType) -> F64:
    if not dtype.has_sentinel:
        return values
    return np.where(values == dtype.lowest, -np.inf, values)


def _needs_exact_integers(a: DType, b: DType) -> bool:
    integral = ("int", "uint", "bool")
    return a.kind in integral and b.kind in integral and 64 in (a.bits, b.bits)


def _integers(raw: AnyArray, dtype: DType, count: int) -> AnyArray:
    """The elements as Python integers, which do not round."""
    if dtype.bits == 64:
        return storage_view(raw, dtype, count).astype(object)
    return to_float64(storage_view(raw, dtype, count), dtype, count).astype(np.int64).astype(object)


def ordinals(magnitude: F64, name: str) -> U64:
    """Index of each magnitude, rounded to nearest even, among the format's numbers; zero has index
    0.

    >>> ordinals(np.array([0.0, 2.0**-24, 1.0, 1e9]), "float16").tolist()
    [0, 1, 15360, 31744]
    """
    dtype = DTYPES[name]
    mantissa, emin, top = dtype.mantissa, dtype.smallest_normal_exponent, dtype.past_largest
    if mantissa == 52:
        return magnitude.view(np.uint64)
    _, exponent = np.frexp(magnitude)
    exponent = np.maximum(np.where(magnitude == 0, emin, exponent - 1), emin).astype(np.int64)
    steps = np.rint(np.ldexp(magnitude, mantissa - exponent)).astype(np.int64)
    return np.minimum(((exponent - emin) << mantissa) + steps, top).astype(np.uint64)


def max_ulp(reference: F64, candidate: F64, dtype: DType) -> float:
    """Greatest distance in the candidate's format, after the reference is rounded to it."""
    if not reference.size:
        return 0.0
    if DTYPES[dtype.component].kind != "float":
        return float(np.max(np.abs(candidate - np.rint(reference))))
    return float(np.max(ulp_distances(reference, candidate, dtype)))


def ulp_distances(reference: F64, candidate: F64, dtype: DType) -> U64:
    """Distance of each pair in a floating-point format, after the reference is rounded to it.

    >>> one = np.array([1.0])
    >>> ulp_distances(one, one + 2.0**-7, DTYPES["bfloat16"])
    array([1], dtype=uint64)
    """
    name = dtype.component
    a, b = ordinals(np.abs(reference), name), ordinals(np.abs(candidate), name)
    same_side = np.signbit(reference) == np.signbit(candidate)
    return np.where(same_side, np.maximum(a, b) - np.minimum(a, b), a + b)


def _first(mask: Mask) -> int:
    return int(np.argmax(mask)) if mask.any() else -1


def spread(values: F64) -> tuple[float, float, float]:
    """Mean, standard deviation (ddof 0) and Euclidean norm of finite values.

    Values whose squares would overflow or underflow float64 are first scaled by a power of two,
    which is exact.

    >>> spread(np.array([3e200, -3e200, 3e200, -3e200]))
    (0.0, 3e+200, 6e+200)
    >>> spread(np.array([]))
    (nan, nan, 0.0)
    """
    if not values.size:
        return math.nan, math.nan, 0.0
    largest = float(np.max(np.abs(values)))
    exponent = 0
    if largest and not 2.0**-480 < largest < 2.0**480:
        exponent = min(1000, max(-1000, math.frexp(largest)[1] - 1))
    scaled = np.ldexp(values, -exponent) if exponent else values
    figures = scaled.mean(), scaled.std(), np.sqrt((scaled * scaled).sum())
    mean, std, l2 = (float(np.ldexp(figure, exponent)) for figure in figures)
    return mean, std, l2


def _least(values: F64) -> float:
    return float(values.min()) if values.size else float("nan")


def _greatest(values: F64) -> float:
    return float(values.max()) if values.size else float("nan")


def pair_moments(
    reference: AnyArray,
    reference_dtype: DType,
    candidate: AnyArray,
    candidate_dtype: DType,
    *,
    count: int,
    atol: float = 0.0,
    rtol: float = 0.0,
) -> PairMoments:
    """Every field of `PairMoments`, each computed by its own line."""
    is_complex = "complex" in (reference_dtype.kind, candidate_dtype.kind)
    r = real_values(reference, reference_dtype, count, widen=is_complex)
    c = real_values(candidate, candidate_dtype, count, widen=is_complex)
    r = masked_as_infinite(r, reference_dtype)
    c = masked_as_infinite(c, candidate_dtype)
    with np.errstate(all="ignore"):
        rf, cf = np.isfinite(r), np.isfinite(c)
        both = rf & cf
        different = (r != c) & ~(np.isnan(r) & np.isnan(c))
        rb, cb = r[both], c[both]
        e = cb - rb
        ulp = max_ulp(rb, cb, candidate_dtype)
        if _needs_exact_integers(reference_dtype, candidate_dtype):
            # Beyond 2**53, float64 would call neighbouring integers equal.
            exact = _integers(candidate, candidate_dtype, count) - _integers(
                reference, reference_dtype, count
            )
            different = (exact != 0).astype(np.bool_)
            e = exact.astype(np.float64)
            ulp = float(np.max(np.abs(e))) if e.size else 0.0
        ae, ar = np.abs(e), np.abs(rb)
        rel = np.where(ae == 0, 0.0, ae / ar)
        one_sided = different & ~both
        outside = one_sided.copy()
        outside[both] = ~(ae <= atol + rtol * ar)
        places = np.flatnonzero(both)
        largest = float(ae.max()) if ae.size else 0.0
        r_mean, r_std, r_l2 = spread(r[rf])
        c_mean, c_std, c_l2 = spread(c[cf])
        return PairMoments(
            count=r.size,
            finite=int(both.sum()),
            sum_rr=float((rb * rb).sum()),
            sum_cc=float((cb * cb).sum()),
            sum_rc=float((rb * cb).sum()),
            sum_ee=float((e * e).sum()),
            sum_abs_e=float(ae.sum()),
            max_abs_e=largest,
            max_abs_e_at=int(places[int(np.argmax(ae))]) if largest > 0 else -1,
            sum_rel_e=float(rel.sum()),
            max_rel_e=float(rel.max()) if rel.size else 0.0,
            max_ulp=ulp,
            outside=int(outside.sum()),
            different=int(different.sum()),
            first_different_at=_first(different),
            one_sided=int(one_sided.sum()),
            one_sided_at=_first(one_sided),
            r_finite=int(rf.sum()),
            c_finite=int(cf.sum()),
            r_min=_least(r[rf]),
            c_min=_least(c[cf]),
            r_max=_greatest(r[rf]),
            c_max=_greatest(c[cf]),
            r_mean=r_mean,
            c_mean=c_mean,
            r_std=r_std,
            c_std=c_std,
            r_l2=r_l2,
            c_l2=c_l2,
            r_nan=int(np.isnan(r).sum()),
            c_nan=int(np.isnan(c).sum()),
            r_pos_inf=int(np.isposinf(r).sum()),
            c_pos_inf=int(np.isposinf(c).sum()),
            r_neg_inf=int(np.isneginf(r).sum()),
            c_neg_inf=int(np.isneginf(c).sum()),
            r_nonfinite_at=_first(~rf),
            c_nonfinite_at=_first(~cf),
        )


def summarize(data: AnyArray, dtype: DType, *, count: int, first: int = 0) -> Summary:
    """Every field of `Summary`.

    A complex element is two reals; `first` is the index of the first one.
    """
    x = masked_as_infinite(real_values(data, dtype, count), dtype)
    with np.errstate(all="ignore"):
        ok = np.isfinite(x)
        finite = x[ok]
        mean, std, l2 = spread(finite)
        return Summary(
            count=x.size,
            min=_least(finite),
            max=_greatest(finite),
            mean=mean,
            std=std,
            l2=l2,
            zeros=int((x == 0).sum()),
            nan=int(np.isnan(x).sum()),
            pos_inf=int(np.isposinf(x).sum()),
            neg_inf=int(np.isneginf(x).sum()),
            sketch=tuple(float(v) for v in sketch(np.where(ok, x, 0.0), first=first)),
        )


def pair_moments_in_blocks(
    reference: AnyArray,
    reference_dtype: DType,
    candidate: AnyArray,
    candidate_dtype: DType,
    *,
    count: int,
    atol: float,
    rtol: float,
) -> PairMoments:
    """`pair_moments`, a block at a time, so that the float64 copies stay small."""
    return merge_moments(
        [
            pair_moments(
                _part(reference, reference_dtype, first, size),
                reference_dtype,
                _part(candidate, candidate_dtype, first, size),
                candidate_dtype,
                count=size,
                atol=atol,
                rtol=rtol,
            )
            for first, size in _blocks(count)
        ]
    )


def summarize_in_blocks(data: AnyArray, dtype: DType, *, count: int) -> Summary:
    """`summarize`, a block at a time."""
    merged: Summary | None = None
    for first, size in _blocks(count):
        part = summarize(
            _part(data, dtype, first, size), dtype, count=size, first=first * dtype.reals
        )
        merged = part if merged is None else merge_summaries(merged, part)
    assert merged is not None
    return merged


def _blocks(count: int) -> list[tuple[int, int]]:
    return [(i, min(NUMPY_BLOCK, count - i)) for i in range(0, count, NUMPY_BLOCK)] or [(0, 0)]


def _part(data: AnyArray, dtype: DType, first: int, count: int) -> AnyArray:
    start = first * dtype.bits // 8  # blocks begin at even elements, so nibbles are not cut
    return data.reshape(-1).view(np.uint8)[start : start + dtype.byte_count(count)]


def group_signs(groups: U64) -> U64:
    """Hash of each group number; a set bit j means that element j of the group is subtracted."""
    with np.errstate(over="ignore"):
        z = (groups + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def group_flips(signs: U64) -> U64:
    """Six bits that are XORed to the position inside the group to give the bucket."""
    with np.errstate(over="ignore"):
        return (signs * np.uint64(0xD6E8FEB86659FD93)) >> np.uint64(58)


def sketch(values: F64, *, first: int = 0) -> F64:
    """The sketch of finite values; `first` is the flat index of the first one.

    >>> bool(np.allclose(sketch(np.ones(100)) + sketch(-np.ones(100)), 0))
    True
    """
    flat = np.asarray(values, np.float64).reshape(-1)
    place = np.arange(first, first + flat.size, dtype=np.uint64)
    group, inside = place // np.uint64(SKETCH_BUCKETS), place % np.uint64(SKETCH_BUCKETS)
    signs = group_signs(group)
    bucket = inside ^ group_flips(signs)
    negative = (signs >> inside) & np.uint64(1)
    signed = np.where(negative == 1, -flat, flat)
    into = np.zeros(SKETCH_BUCKETS)
    np.add.at(into, bucket.astype(np.int64), signed)
    return into


def estimate_l2(of: Sequence[float]) -> float:
    """Estimate of the Euclidean norm of a tensor, from its sketch."""
    return math.sqrt(math.fsum(value * value for value in of))


def estimate_l2_distance(reference: Sequence[float], candidate: Sequence[float]) -> float:
    """Estimate of `

    candidate - reference

    `, from the two sketches.

    Exactly 0.0 for equal sketches; NaN if either is missing or their lengths differ.
    """
    if not reference or len(reference) != len(candidate):
        return math.nan
    return math.sqrt(
        math.fsum((c - r) * (c - r) for r, c in zip(reference, candidate, strict=True))
    )


def estimate_relative_l2(
    reference: Sequence[float], candidate: Sequence[float], *, reference_l2: float
) -> float:
    """Estimate of `

    candidate - reference

    /

    reference

    `; `reference_l2` is exact, from the summary.

    A zero reference has no scale: 0.0 if the sketches agree, otherwise inf.
    """
    distance = estimate_l2_distance(reference, candidate)
    if reference_l2 == 0.0:
        return 0.0 if distance == 0.0 else math.nan if math.isnan(distance) else math.inf
    return distance / reference_l2


def estimate_inner_product(reference: Sequence[float], candidate: Sequence[float]) -> float:
    """Estimate of `<reference, candidate>`; its error is about an eighth of the norms' product."""
    if not reference or len(reference) != len(candidate):
        return math.nan
    return math.fsum(r * c for r, c in zip(reference, candidate, strict=True))


# The digest of tensors that stay on a device.
#
# xxh3 reads its bytes one after the other; this digest can be computed by many threads at once. It
# divides a tensor into chunks of 512 groups of 64 elements. Every lane of a chunk hashes its words
# by multiplication with odd keys; each lane's result is mixed with the lane's position, and the
# results are added. Equal bytes of the same width have equal digests on every device. Digests of
# the two kinds cannot be compared with each other. The words of a group are taken in the order of
# the sketch's buckets, because `gpu/kernels/summary.py` reads them in that order.

DIGEST_PREFIX = "lanes-128:"
CHUNK_ROWS, LANES, STEPS = 512, 8, 4
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_TIMES_A, _TIMES_B = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
_DIGEST_KEYS = (
    (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93),
    (0xA0761D6478BD642F, 0xE7037ED1A0B428DB, 0x8EBC6AF09C88C6E3, 0x589965CC75374CC3),
)
_WORDS = {1: "<u1", 2: "<u4", 4: "<u4", 8: "<u8"}
_M = (1 << 64) - 1


def _scrambled(z: U64) -> U64:
    with np.errstate(over="ignore"):
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def digest_of(data: npt.NDArray[Any], width: int) -> str:
    """Digest of flat storage whose elements take `width` bytes: 1, 2, 4 or 8."""
    raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    columns = 32 if width == 2 else 64
    tile = LANES * STEPS
    row_bytes = 64 * width
    count = raw.size // width
    tiles = -(-count // (64 * tile))
    padded = np.zeros(tiles * tile * row_bytes, np.uint8)
    padded[: raw.size] = raw
    words = padded.view(_WORDS[width]).astype(np.uint64).reshape(-1, columns)
    flips = group_flips(group_signs(np.arange(len(words), dtype=np.uint64)))
    place = np.arange(columns)[None, :] ^ (flips >> np.uint64(width == 2)).astype(np.int64)[:, None]
    words = np.take_along_axis(words, place, 1)
    if width == 2:  # a thread reads 16 bytes of a group at a time
        words = np.moveaxis(words.reshape(tiles, tile, LANES, STEPS), 3, 1)
    else:
        words = words.reshape(tiles, STEPS, LANES, columns)
    sums = [np.uint64(0), np.uint64(0)]
    with np.errstate(over="ignore"):
        keys = [np.array(some, np.uint64)[:, None, None] for some in _DIGEST_KEYS]
        spots = np.arange(LANES * columns, dtype=np.uint64).reshape(words.shape[2:])
        per_chunk = CHUNK_ROWS // tile
        for chunk in range(-(-tiles // per_chunk)):
            a = b = np.zeros(words.shape[2:], np.uint64)
            for tile_words in words[chunk * per_chunk : (chunk + 1) * per_chunk]:
                a = a * _TIMES_A + (tile_words * keys[0]).sum(0, dtype=np.uint64)
                b = b * _TIMES_B + (tile_words * keys[1]).sum(0, dtype=np.uint64)
            first = np.uint64(chunk * LANES * columns + 1)
            spot = _scrambled((spots + first) * _GOLDEN)
            sums[0] += _scrambled(a ^ spot).sum(dtype=np.uint64)
            sums[1] += _scrambled(b + spot).sum(dtype=np.uint64)
    return digest_text(int(sums[0]), int(sums[1]), count, width)


def digest_text(a: int, b: int, count: int, width: int) -> str:
    """Text of a digest, from its two sums and the size of the data."""
    size = (count * width + 1) * 0x9E3779B97F4A7C15
    return f"{DIGEST_PREFIX}{a & _M:016x}{(b ^ size) & _M:016x}"
