"""The right numbers in the wrong places: channels, heads, sequences, or another module's output."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from driftline.diagnosis.causes.case import F64, Case, Clue

_WIDEST = 2048
_ALIKE = 0.2
"""A column that found its place leaves no more than this share of its error."""
Places = npt.NDArray[np.intp]


def permutation(case: Case) -> Clue | None:
    """Columns (or sequences) of the candidate are those of the reference in another order."""
    clues = [_of_channels(case), _of_sequences(case), _of_sites(case)]
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
        # Weights in another order and a bias that is not: only what varies between tokens moved.
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


def _matched(r: F64, c: F64, noise: float) -> Places | None:
    """Which column of r each column of c is; None when they are no rearrangement."""
    width = r.shape[1]
    energy = np.einsum("ij,ij->j", r, r)
    off = np.einsum("ij,ij->j", c - r, c - r)
    moved = np.flatnonzero(off > 1e-4 * max(float(off.max()), 1e-300))
    if not 2 <= len(moved) <= _WIDEST:
        return None
    ours, theirs = r[:, moved], c[:, moved]
    # By distance: columns that hardly vary between tokens all point the same way.
    apart = energy[moved][:, None] + np.einsum("ij,ij->j", theirs, theirs)[None, :]
    apart -= 2.0 * (ours.T @ theirs)
    order = np.arange(width, dtype=np.intp)
    free = np.ones(len(moved), dtype=bool)
    # Rounding moves every column a little; that much may be left of any of them.
    enough = _ALIKE * off[moved] + 16.0 * noise**2 * np.maximum(energy[moved], energy.mean())
    for column in np.argsort(apart.min(axis=0) / np.maximum(off[moved], 1e-300)):
        choices = np.where(free, apart[:, column], math.inf)
        at = int(np.argmin(choices))
        if choices[at] > enough[column]:
            return None
        free[at] = False
        order[moved[column]] = moved[at]
    return order


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
    order = _matched(r.T, (r + case.e.reshape(len(case.r), -1)).T, case.noise)
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
