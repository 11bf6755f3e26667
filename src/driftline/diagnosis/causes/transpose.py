"""Two axes change places: of the output, of its heads and tokens, or of the weight behind it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from driftline.diagnosis.causes.case import F64, Case, Clue
from driftline.diagnosis.causes.solving import solved

_WIDEST = 1024


def transpose(case: Case) -> Clue | None:
    """The best of all ways in which axes can have been confused."""
    if case.ratio < 2.0:
        return None
    best: Clue | None = None
    for what, predicted in _ways(case):
        share = case.explained(predicted)
        if best is None or share > best.score:
            best = Clue("transpose", share, what)
    return best


def _ways(case: Case) -> Iterator[tuple[str, F64]]:
    r, shape = case.r, case.r.shape
    for a in range(r.ndim):
        for b in range(a + 1, r.ndim):
            if shape[a] == shape[b] > 1:
                yield f"axes {a} and {b} have changed places", np.swapaxes(r, a, b)
    if r.ndim == 2 and shape[0] != shape[1]:
        yield "it lies transposed in memory", r.T.reshape(shape)
    if r.ndim == 3:
        batch, tokens, width = shape
        for heads in _divisors(width):
            size = width // heads
            split = r.reshape(batch, tokens, heads, size)
            joined = split.transpose(0, 2, 1, 3).reshape(shape)
            yield f"{heads} heads were joined without putting tokens first again", joined
            back = r.reshape(batch, heads, tokens, size).transpose(0, 2, 1, 3).reshape(shape)
            yield f"{heads} heads were split as if they came before tokens", back
            if 2 in (heads, size):
                continue  # halves against interleaved: the channels' order, not an axis
            swapped = split.transpose(0, 1, 3, 2).reshape(shape)
            yield f"heads and their channels ({heads} x {size}) have changed places", swapped
    yield from _weights(case)


def _divisors(width: int) -> list[int]:
    return [heads for heads in range(2, min(width, 129)) if width % heads == 0]


def _weights(case: Case) -> Iterator[tuple[str, F64]]:
    """The product with the transposed weight, known or solved for from what went in and out."""
    if case.r.ndim < 2 or case.r.shape[-1] > _WIDEST:
        return
    r = case.rows(case.r)
    for x in case.inputs.values():
        if x.shape != case.r.shape:
            continue
        given = case.rows(x)
        weight, bias = case.params.get("weight"), case.params.get("bias", 0.0)
        if weight is None or weight.shape != (given.shape[1], r.shape[1]):
            found = solved(given, r)
            if found is None:
                continue
            weight, bias = found
        as_is = given @ weight + bias
        turned = given @ weight.T + bias
        if float(np.sum((as_is - r) ** 2)) < float(np.sum((turned - r) ** 2)):
            as_is, turned = turned, as_is
        yield "the weight was used transposed", as_is.reshape(case.r.shape)
