"""Correct values in wrong places: permutations, transposes, and shifts of tokens or positions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from driftline.diagnosis.causes.case import F64, Case, Clue
from driftline.diagnosis.causes.linear_solve import solved

# The cost of matching is quadratic in the columns; wider tensors are not searched.
_WIDEST_PERMUTATION = 2048
_ALIKE = 0.2
"""Largest share of a column's error that may remain after it is matched."""
_FITS = 0.9
Places = npt.NDArray[np.intp]


def permutation(case: Case) -> Clue | None:
    """Channels, sequences or rows in another order, or the output of another site."""
    clues = [_of_channels(case), _of_sequences(case), _of_sites(case), _of_weight_rows(case)]
    clues.append(_of_halves(case))
    return max((clue for clue in clues if clue is not None), key=lambda c: c.score, default=None)


def _of_channels(case: Case) -> Clue | None:
    if case.r.ndim < 2 or case.ratio < 2.0:
        return None
    shape = case.r.shape
    r, e = case.rows(np.where(case.finite, case.r, 0.0)), case.rows(case.e)
    if len(r) < 4:
        return None
    order, rest = _matched(r, r + e, case.noise), ""
    if order is not None:
        score = case.explained(r[:, order].reshape(shape))
    elif len(r) >= 16:
        # The weights may be in another order while the bias is not. Then only the part that varies
        # between tokens has moved.
        r, e, rest = r - r.mean(axis=0), e - e.mean(axis=0), ", but for a constant each"
        order = _matched(r, r + e, case.noise)
        if order is None:
            return None
        varying = replace(case, r=r.reshape(shape), c=(r + e).reshape(shape), inputs={})
        score = min(varying.explained(r[:, order].reshape(shape)), 0.97)
    else:
        return None
    block = _block(order)
    moved = int(np.count_nonzero(order != np.arange(len(order))))
    if block > 1:
        what = f"blocks of {block} channels (heads) stand in another order{rest}"
    elif _is_interleaved(order):
        what = "channels are interleaved where they should be split in halves, or the reverse"
    else:
        what = f"{moved} of {len(order)} channels stand in another order{rest}"
    return Clue("permutation", score, what, "heads" if block > 1 else "channels")


def _of_halves(case: Case) -> Clue | None:
    """Channels in one of a few orders that are often confused.

    Nothing is fitted, so one row is enough.
    """
    width = case.r.shape[-1] if case.r.ndim else 0
    if width < 8 or width % 2 or case.ratio < 2.0:
        return None
    straight = np.arange(width)
    woven = straight.reshape(2, -1).T.reshape(-1)
    orders = {
        "the two halves of the channels have changed places": np.roll(straight, width // 2),
        "channels are interleaved where they should be split in halves": woven,
        "channels are split in halves where they should be interleaved": np.argsort(woven),
        "channels stand in reverse order": straight[::-1],
    }
    shares = {what: case.explained(case.r[..., order]) for what, order in orders.items()}
    what = max(shares, key=lambda name: shares[name])
    return Clue("permutation", shares[what], what, "channels")


def _matched(r: F64, c: F64, noise: float) -> Places | None:
    """Index of the column of r that each column of c equals; None if c is no permutation of r."""
    width = r.shape[1]
    energy = np.einsum("ij,ij->j", r, r)
    off = np.einsum("ij,ij->j", c - r, c - r)
    moved = np.flatnonzero(off > 1e-4 * max(float(off.max()), 1e-300))
    if not 2 <= len(moved) <= _WIDEST_PERMUTATION:
        return None
    reference, candidate = r[:, moved], c[:, moved]
    # Columns are matched by distance, not by angle: all columns that hardly vary between tokens
    # have nearly the same direction.
    apart = energy[moved][:, None] + np.einsum("ij,ij->j", candidate, candidate)[None, :]
    apart -= 2.0 * (reference.T @ candidate)
    order = np.arange(width, dtype=np.intp)
    free = np.ones(len(moved), dtype=bool)
    # Rounding changes each column a little; this much error may remain in each.
    enough = _ALIKE * off[moved] + 16.0 * noise**2 * np.maximum(energy[moved], energy.mean())
    # The most certain columns are matched first, so that doubtful ones cannot take their partners.
    for column in np.argsort(apart.min(axis=0) / np.maximum(off[moved], 1e-300)):
        choices = np.where(free, apart[:, column], math.inf)
        source = int(np.argmin(choices))
        if choices[source] > enough[column]:
            return None
        free[source] = False
        order[moved[column]] = moved[source]
    return order


def _block(order: Places) -> int:
    """Width of the blocks that move together; 1 if single channels move."""
    breaks = np.flatnonzero(np.diff(order) != 1) + 1
    if len(breaks) == 0:
        return len(order)
    block = int(np.gcd.reduce(np.append(breaks, len(order))))
    return block if block > 1 else 1


def _is_interleaved(order: Places) -> bool:
    half = len(order) // 2
    if 2 * half != len(order):
        return False
    woven = np.arange(len(order)).reshape(2, half).T.reshape(-1)
    return bool(np.array_equal(order, woven) or np.array_equal(order, np.argsort(woven)))


def _of_sequences(case: Case) -> Clue | None:
    """Whole sequences of the batch in another order."""
    if case.r.ndim < 3 or not 2 <= case.r.shape[0] <= 256 or case.ratio < 2.0:
        return None
    r = np.where(case.finite, case.r, 0.0).reshape(len(case.r), -1)
    order = _matched(r.T, (r + case.e.reshape(len(case.r), -1)).T, case.noise)
    if order is None:
        return None
    share = case.explained(case.r[order])
    return Clue("permutation", share, "sequences of the batch stand in another order", "sequences")


def _of_weight_rows(case: Case) -> Clue | None:
    """Rows of a weight, which are output channels, in another order."""
    if case.port != "param" or case.r.ndim < 2 or case.ratio < 2.0:
        return None
    r = np.where(case.finite, case.r, 0.0).reshape(len(case.r), -1)
    order = _matched(r.T, (r + case.e.reshape(len(case.r), -1)).T, case.noise)
    if order is None:
        return None
    moved, block = int(np.count_nonzero(order != np.arange(len(order)))), _block(order)
    what = f"blocks of {block} rows" if block > 1 else f"{moved} of {len(order)} rows"
    share = case.explained(case.r[order])
    return Clue("permutation", share, f"{what} of the weight stand in another order", "rows")


def _of_sites(case: Case) -> Clue | None:
    """The output of another module: q and k, two experts or two layers were exchanged."""
    best: Clue | None = None
    for site, other in case.others.items():
        # `fitted` requires equality up to noise. If the candidate's result is far too small, every
        # small tensor explains most of the error.
        share = case.fitted(other)
        if best is None or share > best.score:
            best = Clue(
                "permutation", share, f"it is what the reference computes at '{site}'", "sites"
            )
    return best


# Transposes: two axes of the output or of the weight are exchanged, or heads and tokens.


_WIDEST_TRANSPOSE = 1024


def transpose(case: Case) -> Clue | None:
    """The exchange of axes that explains the error best."""
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
                continue  # halves versus interleaved is an order of channels (`_of_halves`)
            swapped = split.transpose(0, 1, 3, 2).reshape(shape)
            yield f"heads and their channels ({heads} x {size}) have changed places", swapped
    yield from _weights(case)


def _divisors(width: int) -> list[int]:
    return [heads for heads in range(2, min(width, 129)) if width % heads == 0]


def _weights(case: Case) -> Iterator[tuple[str, F64]]:
    """The product with the transposed weight, which is captured or solved from input and output."""
    if case.r.ndim < 2 or case.r.shape[-1] > _WIDEST_TRANSPOSE:
        return
    r = case.rows(case.r)
    for x in case.inputs.values():
        if x.shape != case.r.shape:
            continue
        inputs = case.rows(x)
        weight, bias = case.params.get("weight"), case.params.get("bias", 0.0)
        if weight is None or weight.shape != (inputs.shape[1], r.shape[1]):
            solution = solved(inputs, r)
            if solution is None:
                continue
            weight, bias = solution
        as_is = inputs @ weight + bias
        turned = inputs @ weight.T + bias
        # The orientation of the captured weight is not known; the one whose product is nearer to
        # the reference is taken as the correct one.
        if float(np.sum((as_is - r) ** 2)) < float(np.sum((turned - r) ** 2)):
            as_is, turned = turned, as_is
        yield "the weight was used transposed", as_is.reshape(case.r.shape)


# Shifts: each token, or each position of a picture or sound, has the values of a neighbour.


_NEAR_TOKENS = (1, -1, 2, -2)
# A convolution that is padded on one side only shifts positions by half its width.
_NEAR_POSITIONS = tuple(by * sign for by in range(1, 9) for sign in (1, -1))


def shift(case: Case) -> Clue | None:
    """`c[t] = r[t - d]` along the tokens or the last axis, for small d; the ends are ignored."""
    if case.tokens is None or case.ratio < 2.0:
        return None
    best = _moved(case, case.tokens, "token", _NEAR_TOKENS)
    last = case.r.ndim - 1
    # Convolutions have their positions in the last axis; it is tried if tokens do not fit.
    if last > case.tokens and (best is None or best.score < _FITS):
        along = _moved(case, last, "position", _NEAR_POSITIONS)
        if along is not None and _goes_round(case, last, int(along.detail)):
            along = None  # a cyclic shift is an order of channels (`permutation`)
        if along is not None and (best is None or along.score > best.score):
            best = along
    return best


def _goes_round(case: Case, axis: int, by: int) -> bool:
    """Whether a shift is cyclic: values shifted out at one end appear at the other."""
    end = np.zeros(case.r.shape, dtype=bool)
    place = slice(0, by) if by > 0 else slice(by, None)
    end[(*([slice(None)] * axis), place)] = True
    return case.explained(np.roll(case.r, by, axis=axis), end) >= _FITS


def _moved(case: Case, axis: int, what: str, distances: tuple[int, ...]) -> Clue | None:
    """The shift along one axis, by one of some distances, that explains the error best."""
    length = case.r.shape[axis]
    best: Clue | None = None
    for by in distances:
        if length < 4 * abs(by):
            continue
        # The ends have no neighbour, or one of another sequence, so they are ignored.
        inner = np.zeros(length, dtype=bool)
        inner[abs(by) : length - abs(by)] = True
        where = np.broadcast_to(
            inner.reshape([-1 if dimension == axis else 1 for dimension in range(case.r.ndim)]),
            case.r.shape,
        )
        share = case.explained(np.roll(case.r, by, axis=axis), where)
        if best is None or share > best.score:
            side = "before" if by > 0 else "after"
            count = f"the {what}" if abs(by) == 1 else f"{abs(by)} {what}s"
            place = "" if what == "token" else f" along axis {axis}"
            sentence = f"every {what}{place} has what belongs to {count} {side} it"
            best = Clue("shift", share, sentence, f"{by:+d}")
    return best
