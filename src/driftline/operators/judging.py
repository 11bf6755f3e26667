"""Comparison of golden values with what a program produced: figures and a status.

One definition for ATB operators and for replayed aten calls. Non-finite values are never patched:
their positions must agree, whatever share of the other elements is within the bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any, TypeAlias

import numpy as np

from driftline.comparison.tolerance.defaults import Allowed, allowed
from driftline.operators.result import Figures, Metric

_CHEAP = 2**31
"""Products up to which the size of the terms is computed to tell cancellation from outliers."""

AnyArray: TypeAlias = np.ndarray[Any, np.dtype[Any]]


def judge(
    golden: AnyArray,
    actual: AnyArray,
    dtype: str,
    *,
    terms: int = 1,
    scale: AnyArray | Callable[[], AnyArray | None] | float | None = None,
    exact: bool = False,
    metrics: Collection[Metric] = (),
) -> Figures:
    """Compare an output with its golden values.

    Args:
        golden: Golden values, already rounded to `dtype`: float64 or complex128 for floating
            types, integers or bool for the others.
        actual: The output, decoded in the same way.
        dtype: Element type of the output; a name of `numerics.dtypes.DTYPES`.
        terms: Length of the reduction behind one element (K of a matmul); 1 if there is none.
        scale: For `terms` > 1, the size of the terms: root of the sum of their squares, for each
            element or for all; or a function that computes it, called only if the plain bound is
            exceeded. Default: the root mean square of the golden values.
        exact: The operator only moves or selects; nothing is rounded.
        metrics: Figures to compute besides.
    """
    if golden.shape != actual.shape:
        reason = f"shape {list(actual.shape)}, but it should be {list(golden.shape)}"
        return Figures("fail", reason, elements=int(actual.size))
    bound = allowed(dtype, exact=exact)
    if golden.dtype.kind in "iub" and actual.dtype.kind in "iub":
        # Integers are compared exactly, in their own width: float64 cannot hold all of int64.
        return _judge_integers(golden.reshape(-1), actual.reshape(-1), bound, metrics)
    g, a = _same_kind(golden.reshape(-1), actual.reshape(-1))
    if not g.size:
        return _passed(bound, bound.name, 100.0, 0.0, 0.0, 0)
    finite = np.isfinite(g) & np.isfinite(a)
    # NaN against NaN and equal infinities agree; any other non-finite value is an error of infinite
    # size.
    astray = ~finite & ~_alike(g, a)
    with np.errstate(all="ignore"):
        error = np.where(finite, np.abs(a - g), np.where(astray, np.inf, 0.0))
        size = np.where(finite, np.abs(g), 0.0)
    figures = _decided(g, error, size, bound, terms, scale, finite)
    # A wrong NaN fails the output even if the share of good elements is high enough.
    if astray.any():
        figures = figures._replace(status="fail", reason=_astray(g, a, astray, bound))
    if metrics:
        figures = figures._replace(**_more(g, a, error, finite, bound, metrics))
    return figures


def _decided(
    g: AnyArray,
    error: AnyArray,
    size: AnyArray,
    bound: Allowed,
    terms: int,
    scale: AnyArray | Callable[[], AnyArray | None] | float | None,
    finite: AnyArray,
) -> Figures:
    # A relative bound needs a floor, or elements near zero would fail by their last bit.
    plain = bound.error * np.maximum(size, bound.floor) if bound.relative else bound.error
    inside = error <= plain
    name = bound.name
    share = _percent(inside)
    growth = bound.growth(terms)
    # Computing the terms' size may cost as much as the operator, so it is done only if the plain
    # bound fails or it is cheap.
    if growth and (share < bound.share or (share < 100.0 and g.size * terms <= _CHEAP)):
        # Terms below the normal numbers are rounded as roughly as the smallest normal one.
        width = np.maximum(_width(scale, size, finite), bound.floor)
        inside = error <= plain + growth * width
        # The name of the growing bound is shown only if that bound decided.
        if share < bound.share:
            name, share = bound.grown(terms), _percent(inside)
    worst, largest = _worst(error, size)
    if share >= bound.share:
        figures = _passed(bound, name, share, worst, largest, int(g.size))
        outside = int(g.size - np.count_nonzero(inside))
        if outside:
            figures = figures._replace(reason=f"{_elements(outside)} outside, as allowed")
        return figures
    reason = f"{_elements(int(g.size - np.count_nonzero(inside)))} of {g.size} outside the bound"
    return Figures(
        "fail", reason, bound.error, name, share, bound.share, worst, largest, int(g.size)
    )


def _width(
    scale: AnyArray | Callable[[], AnyArray | None] | float | None, size: AnyArray, finite: AnyArray
) -> AnyArray:
    """The size of the terms of each element."""
    if callable(scale):
        scale = scale()
    if scale is None:
        # Without terms, the size of the whole result is used.
        kept = size[finite]
        scale = math.sqrt(float(np.mean(kept * kept))) if kept.size else 0.0
    width = np.abs(np.asarray(scale, np.float64)).reshape(-1)
    return np.broadcast_to(np.where(np.isfinite(width), width, 0.0), size.shape)


def _judge_integers(
    g: AnyArray, a: AnyArray, bound: Allowed, metrics: Collection[Metric]
) -> Figures:
    if not g.size:
        return _passed(bound, bound.name, 100.0, 0.0, 0.0, 0)
    equal = g == a
    # Differences of 64-bit integers need more than 64 bits: only those that differ are looked at.
    difference = np.zeros(g.size, np.float64)
    if not equal.all():
        pairs = zip(g[~equal].tolist(), a[~equal].tolist(), strict=True)
        difference[~equal] = [float(abs(int(y) - int(x))) for x, y in pairs]
    size = np.abs(g.astype(np.float64))
    figures = _decided(g, difference, size, bound, 1, None, np.ones(g.size, np.bool_))
    if metrics:
        real = np.ones(g.size, np.bool_)
        more = _more(g.astype(float), a.astype(float), difference, real, bound, metrics)
        figures = figures._replace(**more)
    return figures


def _same_kind(g: AnyArray, a: AnyArray) -> tuple[AnyArray, AnyArray]:
    kind = np.complex128 if "c" in (g.dtype.kind, a.dtype.kind) else np.float64
    return g.astype(kind), a.astype(kind)


def _alike(g: AnyArray, a: AnyArray) -> AnyArray:
    """Where both are NaN, or the same infinity."""
    return (np.isnan(g) & np.isnan(a)) | (np.isinf(g) & (g == a))


def _percent(inside: AnyArray) -> float:
    return 100.0 * float(np.count_nonzero(inside)) / inside.size


def _worst(error: AnyArray, size: AnyArray) -> tuple[float, float]:
    with np.errstate(all="ignore"):
        relative = np.where(error == 0, 0.0, error / size)
    return float(relative.max()), float(error.max())


def _passed(
    bound: Allowed, name: str, share: float, worst: float, largest: float, elements: int
) -> Figures:
    return Figures(
        "pass", "", bound.error, name, share, bound.share, worst, largest, elements=elements
    )


def _elements(count: int) -> str:
    return "1 element" if count == 1 else f"{count} elements"


def _astray(g: AnyArray, a: AnyArray, astray: AnyArray, bound: Allowed) -> str:
    count = int(np.count_nonzero(astray))
    first = int(np.argmax(astray))
    return (
        f"{_elements(count)} not finite on one side only or of another kind; the first is element "
        f"{first}: {a[first]:g} where {g[first]:g} is right in {bound.dtype}"
    )


def _more(
    g: AnyArray,
    a: AnyArray,
    error: AnyArray,
    finite: AnyArray,
    bound: Allowed,
    metrics: Collection[Metric],
) -> dict[str, float]:
    figures: dict[str, float] = {}
    if "abs" in metrics:
        figures["abs_share"] = _percent(error <= bound.error)
    if "cos_sim" in metrics:
        figures["cos_sim"] = _cosine(g, a) if finite.all() else math.nan
    if "kl" in metrics:
        figures["kl"] = _divergence(g, a) if finite.all() else math.nan
    return figures


def _cosine(g: AnyArray, a: AnyArray) -> float:
    """1 for two tensors of zeros, 0 when only one of them is."""
    sizes = [float(np.abs(x).max(initial=0.0)) for x in (g, a)]
    if not all(sizes):
        return 1.0 if not any(sizes) else 0.0
    # Divided by the largest value first: squares of large numbers overflow.
    g, a = g / sizes[0], a / sizes[1]
    top = float(np.real(np.vdot(g, a)))
    below = math.sqrt(float(np.real(np.vdot(g, g))) * float(np.real(np.vdot(a, a))))
    return max(-1.0, min(1.0, top / below))


def _divergence(g: AnyArray, a: AnyArray) -> float:
    """KL(softmax(golden) || softmax(actual)) over the flattened tensors: never negative."""
    if np.iscomplexobj(g):
        return math.nan
    logs: list[AnyArray] = []
    # The largest value is subtracted so that the exponentials cannot overflow.
    for values in (g, a):
        shifted = values - values.max()
        logs.append(shifted - math.log(float(np.exp(shifted).sum())))
    return max(0.0, float(np.sum(np.exp(logs[0]) * (logs[0] - logs[1]))))
