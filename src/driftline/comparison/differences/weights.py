"""Relation between two weights: same, rounded, transposed, permuted or different.

It is found from what runs store about weights. Digests give exact answers; the 4096 samples and the
sketch show how far apart two tensors are. No tensor is read.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from driftline.numerics.dtypes import DTYPES
from driftline.runs.sidecars.model_facts import WeightValues, grid_of

F64 = npt.NDArray[np.float64]
# With fewer samples, two unrelated tensors may agree by accident.
_FEWEST = 32
_FEWEST_ROUNDED = 4
# Cosine below which two tensors of n samples are unrelated, in units of 1/sqrt(n). For few samples
# this would include any cosine, so it is limited: more than a half is never an accident.
_UNRELATED, _MOST_UNRELATED = 6.0, 0.5
_MOST_AXES = 5
SIXTEEN_BITS = ("bfloat16", "float16")


class Relation(NamedTuple):
    """How one weight follows from another.

    Attributes:
        word: same, rounded, transposed, permuted, different, unrelated, or empty if unknown.
        distance: Relative distance; 0 for equal weights, None if unknown.
        detail: The axes, or the number format.
    """

    word: str
    distance: float | None = None
    detail: str = ""


def relation_of(reference: WeightValues, candidate: WeightValues) -> Relation:
    """Return how the candidate's weight follows from the reference's."""
    if reference.unreadable or candidate.unreadable:
        return Relation("")
    if reference.shape == candidate.shape:
        return _of_same_shape(reference, candidate)
    if sorted(reference.shape) != sorted(candidate.shape):
        return Relation("")
    axes = _transposition(reference, candidate)
    return Relation("") if axes is None else Relation("transposed", None, f"axes {axes}")


def _of_same_shape(reference: WeightValues, candidate: WeightValues) -> Relation:
    if _same_bytes(reference, candidate):
        return Relation("same", 0.0)
    rounded = _rounding(reference, candidate)
    if rounded is not None:
        return rounded
    axes = _transposition(reference, candidate)
    if axes is not None:
        return Relation("transposed", _distance(reference, candidate), f"axes {axes}")
    if _same_elements(reference, candidate):
        return Relation("permuted", _distance(reference, candidate))
    return _apart(reference, candidate)


def _same_bytes(reference: WeightValues, candidate: WeightValues) -> bool:
    if reference.dtype != candidate.dtype:
        return False
    if reference.digest and candidate.digest and _alike(reference.digest, candidate.digest):
        return reference.digest == candidate.digest
    # Of a large model, and of a tensor on a device, only samples were stored.
    if not reference.encoded or reference.encoded != candidate.encoded:
        return False
    return _same_elements(reference, candidate) is not False


def _alike(first: str, second: str) -> bool:
    """Return whether two digests have the same algorithm; others cannot be compared."""
    return first.partition(":")[0] == second.partition(":")[0]


def _rounding(reference: WeightValues, candidate: WeightValues) -> Relation | None:
    """Return the relation if one side holds the other's values rounded to a number format."""
    first, second = reference.samples(), candidate.samples()
    exact = first is not None and second is not None and np.array_equal(first, second)
    distance = 0.0 if exact else _distance(reference, candidate, (first, second))
    if (coarse_dtype := _rounded_by_digest(reference, candidate)) is not None:
        return Relation("same" if exact else "rounded", distance, coarse_dtype)
    if first is None or second is None:
        return None
    if exact and (reference.basis == "sample" or candidate.basis == "sample"):
        other = _same_elements(reference, candidate) is False
        return None if other else Relation("same", 0.0)
    if exact:
        return Relation("same", 0.0) if reference.dtype != candidate.dtype else None
    # Values of a coarse format stored in a finer one, or known by samples only. One or two values
    # of the same format may look rounded by accident.
    changed = int(np.count_nonzero(first != second))
    if reference.dtype != candidate.dtype or changed >= _FEWEST_ROUNDED:
        coarse_dtype = _rounded_by_samples(first, second)
        if coarse_dtype is not None:
            return Relation("rounded", distance, coarse_dtype)
    wide = {reference.dtype, candidate.dtype} == {"float64", "float32"}
    if wide and np.array_equal(first.astype(np.float32), second.astype(np.float32)):
        return Relation("rounded", distance, "float32")
    return None


def _rounded_by_digest(reference: WeightValues, candidate: WeightValues) -> str | None:
    """Return the format to which one side is the other rounded; None if digests do not show it."""
    for coarse, fine in ((candidate, reference), (reference, candidate)):
        digest = fine.rounded.get(coarse.dtype)
        if digest and coarse.digest and digest == coarse.digest:
            return coarse.dtype
    return None


def _rounded_by_samples(first: F64, second: F64) -> str | None:
    """Return the format to which one side's samples are the other's rounded; None if to none."""
    for coarse, fine in ((second, first), (first, second)):
        for name in SIXTEEN_BITS:
            if np.array_equal(_rounded(fine, name), coarse, equal_nan=True):
                return name
    return None


def _rounded(values: F64, name: str) -> F64:
    with np.errstate(over="ignore", invalid="ignore"):
        single = values.astype(np.float32)
        if name == "float16":
            return single.astype(np.float16).astype(np.float64)
        bits = single.view(np.uint32).astype(np.uint64)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return bits.astype(np.uint32).view(np.float32).astype(np.float64)


def _same_elements(reference: WeightValues, candidate: WeightValues) -> bool | None:
    """Return whether both have the same elements in some order, apart from rounding.

    None if the runs do not say.
    """
    first, second = reference.unordered, candidate.unordered
    if reference.dtype == candidate.dtype:
        digests = first.get("own"), second.get("own")
    else:
        digests = (
            first.get("own" if reference.dtype == "bfloat16" else "bfloat16"),
            second.get("own" if candidate.dtype == "bfloat16" else "bfloat16"),
        )
    return digests[0] == digests[1] if all(digests) else None


def _transposition(reference: WeightValues, candidate: WeightValues) -> str | None:
    """Return the axes that transpose the reference into the candidate; None if there are none."""
    first, second = reference.samples(), candidate.samples()
    if first is None or second is None or not 2 <= first.ndim <= _MOST_AXES:
        return None
    # Either the samples contain all values, or the elements must be known to be the same.
    complete = grid_of(reference.shape) == reference.shape
    sampled = "sample" in (reference.basis, candidate.basis)
    if not complete and not sampled and not _same_elements(reference, candidate):
        return None
    usual = tuple(range(first.ndim))
    for axes in itertools.permutations(usual):
        if axes == usual or tuple(reference.shape[axis] for axis in axes) != candidate.shape:
            continue
        turned = first.transpose(axes)
        if np.ptp(first) > 0 and _equal_after_rounding(turned, second, candidate.dtype):
            return ", ".join(map(str, axes))
    return None


def _equal_after_rounding(first: F64, second: F64, dtype: str) -> bool:
    if np.array_equal(first, second, equal_nan=True):
        return True
    return dtype in SIXTEEN_BITS and np.array_equal(_rounded(first, dtype), second, equal_nan=True)


def _distance(
    reference: WeightValues,
    candidate: WeightValues,
    decoded: tuple[F64 | None, F64 | None] | None = None,
) -> float | None:
    """Return the relative distance by the samples, or by the sketches of all elements."""
    complete = grid_of(reference.shape) == reference.shape
    if not complete and reference.basis == candidate.basis == "all":
        first, second = reference.summary, candidate.summary
        if first is not None and second is not None and first.sketch and second.sketch:
            sketches: Any = first.sketch, second.sketch
            apart = np.asarray(sketches[1]) - np.asarray(sketches[0])
            return _ratio(float(np.linalg.norm(apart)), float(first.l2))
    samples = decoded or (reference.samples(), candidate.samples())
    if samples[0] is None or samples[1] is None or samples[0].shape != samples[1].shape:
        return None
    with np.errstate(invalid="ignore", over="ignore"):
        apart = float(np.linalg.norm(samples[1] - samples[0]))
    return _ratio(apart, float(np.linalg.norm(samples[0])))


def _ratio(apart: float, size: float) -> float | None:
    if not math.isfinite(apart) or not math.isfinite(size):
        return None
    if size == 0.0:
        return 0.0 if apart == 0.0 else math.inf
    return apart / size


def _apart(reference: WeightValues, candidate: WeightValues) -> Relation:
    # The weights differ. A distance of zero only means that the samples do not show where.
    distance = _distance(reference, candidate) or None
    first, second = reference.samples(), candidate.samples()
    dtype = DTYPES.get(candidate.dtype)
    if first is not None and second is not None and dtype is not None and dtype.is_floating:
        count = first.size
        # Both are centred, because two tensors of positive numbers always have a positive cosine.
        with np.errstate(invalid="ignore"):  # infinities have no mean
            a, b = first - first.mean(), second - second.mean()
        size = float(np.linalg.norm(a) * np.linalg.norm(b))
        if count >= _FEWEST and size > 0.0 and math.isfinite(size):
            cosine = float((a * b).sum()) / size
            most = min(_UNRELATED / math.sqrt(count), _MOST_UNRELATED)
            if abs(cosine) < most and (distance or 0.0) > 0.5:
                return Relation("unrelated", distance)
    return Relation("different", distance)
