"""What every number means, in numpy float64: slow, obvious, what the C kernel is tested against.

The whole tensor is decoded at once, so this is for tests and, in blocks, for machines without
the kernel. It knows element types and flat arrays; shapes, files and thresholds are not its
business.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from driftline.numerics.dtypes import DType, to_float64
from driftline.numerics.moments import PairMoments
from driftline.numerics.sketch import sketch
from driftline.numerics.summary import Summary

F64: TypeAlias = "npt.NDArray[np.float64]"
U64: TypeAlias = "npt.NDArray[np.uint64]"
Mask: TypeAlias = "npt.NDArray[np.bool_]"
AnyArray: TypeAlias = "npt.NDArray[Any]"

# Stored mantissa bits, exponent of the smallest normal, ordinal past the greatest finite number.
ULP_FORMATS: dict[str, tuple[int, int, int]] = {
    "float64": (52, -1022, 0x7FF0000000000000),
    "float32": (23, -126, 0x7F800000),
    "float16": (10, -14, 0x7C00),
    "bfloat16": (7, -126, 0x7F80),
    "float8_e4m3fn": (3, -6, 0x7F),
    "float8_e4m3fnuz": (3, -7, 0x80),
    "float8_e5m2": (2, -14, 0x7C),
    "float8_e5m2fnuz": (2, -15, 0x80),
    "float8_e8m0fnu": (0, -127, 0x100),
    "float4_e2m1fn_x2": (1, 0, 0x8),
}
COMPONENT = {"complex128": "float64", "complex64": "float32", "complex32": "float16"}


def storage_view(raw: AnyArray, dtype: DType, count: int) -> AnyArray:
    """The elements' storage values, from a storage array or from raw bytes of any alignment."""
    flat = raw.reshape(-1)
    if dtype.bits == 4:
        return flat.view(np.uint8)[: dtype.byte_count(count)]
    if flat.dtype == np.dtype(dtype.storage):
        return flat[:count]
    bytes_ = flat.view(np.uint8)[: dtype.byte_count(count)]
    return np.frombuffer(bytes_.tobytes(), dtype.storage)


def real_values(raw: AnyArray, dtype: DType, count: int, *, widen: bool = False) -> F64:
    """All elements as float64; a complex one is two, and so is a real one with `widen`."""
    values: Any = to_float64(storage_view(raw, dtype, count), dtype, count)
    if dtype.kind == "complex":
        return np.ascontiguousarray(values).view(np.float64)
    if widen:
        return values.astype(np.complex128).view(np.float64)
    return values


def has_sentinel(dtype: DType) -> bool:
    """Whether the format's lowest value means -inf: attention masks use it so from 16 bits up."""
    return dtype.kind == "float" and dtype.bits >= 16


def masked_as_infinite(values: F64, dtype: DType) -> F64:
    if not has_sentinel(dtype):
        return values
    return np.where(values == dtype.lowest, -np.inf, values)


def _needs_exact_integers(a: DType, b: DType) -> bool:
    integral = ("int", "uint", "bool")
    return a.kind in integral and b.kind in integral and 64 in (a.bits, b.bits)


def _integers(raw: AnyArray, dtype: DType, count: int) -> AnyArray:
    """The elements as Python's integers, which do not round."""
    if dtype.bits == 64:
        return storage_view(raw, dtype, count).astype(object)
    return to_float64(storage_view(raw, dtype, count), dtype, count).astype(np.int64).astype(object)


def ordinals(magnitude: F64, name: str) -> U64:
    """Where each magnitude, rounded to nearest even, stands among the format's numbers; zero is 0.

    >>> ordinals(np.array([0.0, 2.0**-24, 1.0, 1e9]), "float16").tolist()
    [0, 1, 15360, 31744]
    """
    mantissa, emin, top = ULP_FORMATS[name]
    if mantissa == 52:
        return magnitude.view(np.uint64)
    _, exponent = np.frexp(magnitude)
    exponent = np.maximum(np.where(magnitude == 0, emin, exponent - 1), emin).astype(np.int64)
    steps = np.rint(np.ldexp(magnitude, mantissa - exponent)).astype(np.int64)
    return np.minimum(((exponent - emin) << mantissa) + steps, top).astype(np.uint64)


def max_ulp(reference: F64, candidate: F64, dtype: DType) -> float:
    """The greatest distance in the candidate's format, the reference rounded to it first."""
    if not reference.size:
        return 0.0
    name = COMPONENT.get(dtype.name, dtype.name)
    if name not in ULP_FORMATS:
        return float(np.max(np.abs(candidate - np.rint(reference))))
    a, b = ordinals(np.abs(reference), name), ordinals(np.abs(candidate), name)
    same_side = np.signbit(reference) == np.signbit(candidate)
    return float(np.max(np.where(same_side, np.maximum(a, b) - np.minimum(a, b), a + b)))


def _first(mask: Mask) -> int:
    return int(np.argmax(mask)) if mask.any() else -1


def _std(values: F64) -> float:
    return float(np.std(values)) if values.size else float("nan")


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
    """Every field of `PairMoments`, each from its own line."""
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
            # Beyond 2**53 float64 would call neighbours equal.
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
        return PairMoments(
            count=r.size,
            finite=int(both.sum()),
            sum_r=float(rb.sum()),
            sum_c=float(cb.sum()),
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
            r_finite=int(rf.sum()),
            c_finite=int(cf.sum()),
            r_min=_least(r[rf]),
            r_max=_greatest(r[rf]),
            c_min=_least(c[cf]),
            c_max=_greatest(c[cf]),
            r_sum=float(r[rf].sum()),
            c_sum=float(c[cf].sum()),
            r_sumsq=float((r[rf] * r[rf]).sum()),
            c_sumsq=float((c[cf] * c[cf]).sum()),
            r_std=_std(r[rf]),
            c_std=_std(c[cf]),
            r_nan=int(np.isnan(r).sum()),
            c_nan=int(np.isnan(c).sum()),
            r_pos_inf=int(np.isposinf(r).sum()),
            c_pos_inf=int(np.isposinf(c).sum()),
            r_neg_inf=int(np.isneginf(r).sum()),
            c_neg_inf=int(np.isneginf(c).sum()),
            one_sided=int(one_sided.sum()),
            one_sided_at=_first(one_sided),
            r_nonfinite_at=_first(~rf),
            c_nonfinite_at=_first(~cf),
        )


def summarize(data: AnyArray, dtype: DType, *, count: int, first: int = 0) -> Summary:
    """Every field of `Summary`; a complex element is two reals; `first`: place of the first."""
    x = masked_as_infinite(real_values(data, dtype, count), dtype)
    with np.errstate(all="ignore"):
        ok = np.isfinite(x)
        finite = x[ok]
        return Summary(
            count=x.size,
            min=_least(finite),
            max=_greatest(finite),
            mean=float(finite.mean()) if finite.size else float("nan"),
            std=_std(finite),
            l2=float(np.sqrt((finite * finite).sum())),
            zeros=int((x == 0).sum()),
            nan=int(np.isnan(x).sum()),
            pos_inf=int(np.isposinf(x).sum()),
            neg_inf=int(np.isneginf(x).sum()),
            sketch=tuple(float(v) for v in sketch(np.where(ok, x, 0.0), first=first)),
        )
