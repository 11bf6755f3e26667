"""The right numbers in the wrong places: channels, heads, sequences, or another module's output."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from driftline.diagnosis.causes.case import F64, Case, Clue

_WIDEST = 2048
_ALIKE = 0.9
Places = npt.NDArray[np.intp]


def permutation(case: Case) -> Clue | None:
    """Columns (or sequences) of the candidate are those of the reference in another order."""
    clues = [_of_channels(case), _of_sequences(case), _of_sites(case)]
    return max((clue for clue in clues if clue is not None), key=lambda c: c.score, default=None)


def _of_channels(case: Case) -> Clue | None:
    if case.r.ndim < 2 or case.ratio < 2.0:
        return None
    r, c = case.rows(np.where(case.finite, case.r, 0.0)), case.rows(case.r + case.e)
    if len(r) < 4:
        return None
    order = _matched(r, c)
    if order is None:
        return None
    share = case.explained(r[:, order].reshape(case.r.shape))
    block = _block(order)
    moved = int(np.count_nonzero(order != np.arange(len(order))))
    if block > 1:
        what = f"blocks of {block} channels (heads) stand in another order"
    elif _is_interleaved(order):
        what = "channels are interleaved where they should be split in halves, or the reverse"
    else:
        what = f"{moved} of {len(order)} channels stand in another order"
    return Clue("permutation", share, what, "heads" if block > 1 else "channels")


def _matched(r: F64, c: F64) -> Places | None:
    """Which column of r each column of c is; None when they are no rearrangement."""
    width = r.shape[1]
    energy = np.einsum("ij,ij->j", r, r)
    off = np.einsum("ij,ij->j", c - r, c - r)
    moved = np.flatnonzero(off > 0.05 * np.maximum(energy, 1e-300))
    if not 2 <= len(moved) <= _WIDEST:
        return None
    ours, theirs = _unit(r[:, moved]), _unit(c[:, moved])
    # Closeness of the values, not of their shape alone: a scaled column is another fault.
    alike = ours.T @ theirs
    sizes = np.sqrt(np.maximum(energy[moved], 1e-300))
    own = np.linalg.norm(c[:, moved], axis=0)
    with np.errstate(divide="ignore"):
        alike -= np.abs(np.log(np.maximum(own, 1e-300)[None, :] / sizes[:, None])) * 0.5
    order = np.arange(width, dtype=np.intp)
    free = np.ones(len(moved), dtype=bool)
    best = alike.max(axis=0)
    for column in np.argsort(-best):
        choices = np.where(free, alike[:, column], -math.inf)
        at = int(np.argmax(choices))
        if choices[at] < _ALIKE:
            return None
        free[at] = False
        order[moved[column]] = moved[at]
    return order


def _unit(columns: F64) -> F64:
    return columns / np.maximum(np.linalg.norm(columns, axis=0), 1e-300)


def _block(order: Places) -> int:
    """The width of blocks that move as one; 1 when single channels do."""
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
    order = _matched(r.T, (r + case.e.reshape(len(case.r), -1)).T)
    if order is None:
        return None
    share = case.explained(case.r[order])
    return Clue("permutation", share, "sequences of the batch stand in another order", "sequences")


def _of_sites(case: Case) -> Clue | None:
    """The output of another module: q for k, two experts, two layers mixed up."""
    best: Clue | None = None
    for site, other in case.others.items():
        share = case.explained(other)
        if best is None or share > best.score:
            best = Clue(
                "permutation", share, f"it is what the reference computes at '{site}'", "sites"
            )
    return best
