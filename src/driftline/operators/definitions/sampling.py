"""Sampling with the C library's random numbers, so that a seed determines the result.

A draw within rounding of a boundary may rightly fall on either side; such a result is marked as one
that cannot be judged.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from driftline.operators.definitions.call import (
    AnyArray,
    Call,
    Definition,
    Result,
    Unfit,
    fits,
    real,
)

_LARGEST = 0x7FFFFFFF
_DRAWS = 512
_SINGLE, _MULTINOMIAL, _EXPONENTIAL, _MULTINOMIAL_LOG, _EXPONENTIAL_LOG = range(5)
# How near to a boundary a draw may be, relative to it, before rounding can move it across.
_CLOSE = {"float16": 2.0**-9, "bfloat16": 2.0**-6}
_MASKED = -9999.0


def draws(seed: int, count: int) -> list[float]:
    """Numbers from 0 to 1 as glibc's rand() gives them after srand(seed)."""
    # glibc's additive feedback generator: 31 words from a linear congruence, the first 310 results
    # discarded.
    state = [seed & 0xFFFFFFFF or 1]
    if state[0] > _LARGEST:
        state[0] -= 1 << 32
    for number in range(1, 31):
        state.append((16807 * state[number - 1]) % _LARGEST)
    state += state[0:3]
    for number in range(34, 344):
        state.append((state[number - 31] + state[number - 3]) & 0xFFFFFFFF)
    numbers: list[float] = []
    for number in range(344, 344 + count):
        state.append((state[number - 31] + state[number - 3]) & 0xFFFFFFFF)
        numbers.append((state[number] >> 1) / _LARGEST)
    return numbers


def multinomial(call: Call) -> list[Result]:
    """For each draw, the first element at which the running sum exceeds it."""
    x = call.at(0, "probabilities")
    samples = call.whole("numSamples", 1)
    fits(x.values.ndim == 2 and 0 < samples <= _DRAWS, "needs a matrix, and a sample or more")
    numbers = draws(call.whole("randSeed", 0), samples)
    sums = np.cumsum(real(x), -1)
    chosen = np.zeros((sums.shape[0], samples))
    note = ""
    for column, number in enumerate(numbers):
        beyond = sums > number
        chosen[:, column] = np.where(beyond.any(-1), beyond.argmax(-1), 0)
        note = note or _doubt(sums, np.full((sums.shape[0], 1), number), x.dtype)
    return [Result(chosen, call.out_dtype("int32"), exact=True, note=note)]


def _doubt(sums: AnyArray, bounds: AnyArray, dtype: str) -> str:
    near = np.abs(sums - bounds) <= _CLOSE.get(dtype, 1e-6) * np.maximum(np.abs(bounds), 1e-3)
    if near.any():
        return "a drawn number lies within rounding of a boundary, so its neighbour is right too"
    return ""


def topk_topp(call: Call) -> list[Result]:
    """One element of each row, drawn among the largest k whose sum stays below p."""
    kind = call.whole("topkToppSamplingType", call.whole("topktopp_sampling_type", _SINGLE))
    x = call.at(0, "probabilities")
    fits(x.values.ndim == 2, "the probabilities must be a matrix")
    probs = real(x)
    # A stable order: of equal probabilities the first comes first, as in the operator.
    order = np.argsort(-probs, -1, kind="stable")
    ranked = np.take_along_axis(probs, order, -1)
    batch, width = probs.shape
    if kind == _SINGLE:
        kept = call.whole("topk", 100)
        fits(0 < kept <= width, f"topk {kept} of {width} cannot be kept")
        ranked, order = ranked[:, :kept], order[:, :kept]
        bound = _column(call, 1, "top p", batch)
        numbers = np.asarray(draws(call.whole("randSeed", 0), batch)).reshape(-1, 1)
        place, note, _ = _drawn(np.cumsum(ranked, -1), bound, numbers, x.dtype)
        return _picked(call, order, ranked, place, x.dtype, note)
    if kind not in (_MULTINOMIAL, _EXPONENTIAL, _MULTINOMIAL_LOG, _EXPONENTIAL_LOG):
        raise Unfit(f"topkToppSamplingType {kind} is not known")
    tops, bound = _column(call, 1, "top k", batch), _column(call, 2, "top p", batch)
    limit = np.clip(tops.astype(np.int64), 0, width - 1)
    # Elements that equal the k-th one are kept, however many there are.
    cut = ranked < np.take_along_axis(ranked, limit, -1)
    masked = np.where(cut, 0.0, ranked)
    sums = np.cumsum(masked, -1)
    if kind in (_EXPONENTIAL, _EXPONENTIAL_LOG):
        beyond = sums > bound
        weighed = np.where(beyond, 0.0, masked) / real(call.at(3, "exponential numbers"))
        place = weighed.argmax(-1)[:, None]
        note = _doubt(sums, bound, x.dtype)
        kept_mask = ~(beyond | cut)
    else:
        if kind == _MULTINOMIAL:
            seeds = call.wholes("randSeeds")
            fits(len(seeds) >= batch, f"{len(seeds)} randSeeds for {batch} rows")
            numbers = np.asarray([draws(seed, 1)[0] for seed in seeds[:batch]]).reshape(-1, 1)
        else:
            numbers = _column(call, 3, "random numbers", batch)
        place, note, kept_mask = _drawn(sums, bound, numbers, x.dtype)
    outputs = _picked(call, order, ranked, place, x.dtype, note)
    if kind in (_MULTINOMIAL_LOG, _EXPONENTIAL_LOG):
        outputs.append(_log_probabilities(call, ranked, sums, kept_mask, note))
    return outputs


def _column(call: Call, number: int, name: str, batch: int) -> AnyArray:
    values = real(call.at(number, name)).reshape(-1, 1)
    fits(values.shape[0] in (1, batch), f"{values.shape[0]} {name} for {batch} rows")
    return np.broadcast_to(values, (batch, 1))


def _drawn(
    sums: AnyArray, bound: AnyArray, numbers: AnyArray, dtype: str
) -> tuple[AnyArray, str, AnyArray]:
    below = sums < bound
    last = np.maximum(below.sum(-1, keepdims=True) - 1, 0)
    edge = np.take_along_axis(sums, last, -1) * numbers
    place = np.minimum((sums <= edge).sum(-1, keepdims=True), sums.shape[-1] - 1)
    note = _doubt(sums, bound, dtype) or _doubt(sums, edge, dtype)
    return place, note, below


def _picked(
    call: Call, order: AnyArray, ranked: AnyArray, place: AnyArray, dtype: str, note: str
) -> list[Result]:
    chosen: Sequence[AnyArray] = [np.take_along_axis(table, place, -1) for table in (order, ranked)]
    return [
        Result(chosen[0], call.out_dtype("int32"), exact=True, note=note),
        Result(chosen[1], call.out_dtype(dtype, 1), exact=True, note=note),
    ]


def _log_probabilities(
    call: Call, ranked: AnyArray, sums: AnyArray, kept: AnyArray, note: str
) -> Result:
    size = call.whole("logProbsSize", 0)
    kept = kept.copy()
    # The largest element is always kept, even if it alone exceeds p.
    kept[:, 0] = True
    last = np.maximum(kept.sum(-1, keepdims=True) - 1, 0)
    total = np.take_along_axis(sums, last, -1)
    values = np.where(kept, np.log(ranked / total), _MASKED)[:, :size]
    return Result(values, call.out_dtype("float32", 2), 2, np.ones_like(values), note=note)


DEFINITIONS: dict[str, Definition] = {
    "Multinomial": multinomial,
    "TopkToppSampling": topk_topp,
}
