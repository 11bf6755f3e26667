"""Everything is too large or too small by a factor: one for all, one per token (wrong epsilon)."""

from __future__ import annotations

import math

import numpy as np

from driftline.diagnosis.causes.case import F64, Case, Clue


def scale(case: Case) -> Clue | None:
    """`c = s r`, also with a bias that is not scaled; for norms one s per token as well."""
    r = np.where(case.finite, case.r, 0.0)
    projection = float(np.sum(case.e * r)) / max(case.size, 1e-300)
    if case.leaning:
        what = " (a wrong epsilon does this to a norm)" if case.is_norm else ""
        return Clue(
            "scale",
            0.85,
            f"the error leans along the output by {projection:+.2g} of it, less than noise{what}",
            "epsilon" if case.is_norm else "scale",
        )
    clues = [
        _one_factor(case, projection),
        _without_bias(case, r),
        _by_token(case, r),
        _by_channel(case, r),
    ]
    return max((clue for clue in clues if clue is not None), key=lambda c: c.score, default=None)


def _one_factor(case: Case, projection: float) -> Clue | None:
    if abs(projection) < 0.25 * case.unit or abs(1.0 + projection) < 0.02:
        return None  # a factor of nothing, or everything gone: other rules speak of that
    score = case.fitted((1.0 + projection) * case.r)
    return Clue(
        "scale",
        score,
        f"the output is {1.0 + projection:.6g} times what it should be, everywhere alike",
        "scale",
    )


def _without_bias(case: Case, r: F64) -> Clue | None:
    """A scaled weight: what varies between tokens is scaled, what is constant need not be."""
    rows, e = case.rows(r), case.rows(case.e)
    if case.r.ndim < 2 or len(rows) < 8:
        return None
    middle, lean = rows - rows.mean(axis=0), e - e.mean(axis=0)
    size = float(np.sum(middle * middle))
    if not size > 0.0:
        return None
    factor = float(np.sum(middle * lean)) / size
    if abs(factor) < 0.25 * case.unit or abs(1.0 + factor) < 0.02:
        return None
    # The part that varies must follow the factor by itself; the constant would hide that.
    rest, energy = lean - factor * middle, float(np.sum(lean * lean))
    noise = case.noise**2 * size
    if energy <= 2.0 * noise or float(np.sum(rest * rest)) > 9.0 * noise + 0.01 * energy:
        return None
    predicted = rows + factor * middle + e.mean(axis=0)
    score = max(0.0, case.fitted(predicted.reshape(case.r.shape)) - 1.0 / len(rows))
    return Clue(
        "scale",
        min(score + 0.01, 1.0),
        f"what varies between tokens is {1.0 + factor:.6g} times what it should be, as with a "
        "scaled weight",
        "weight",
    )


def _by_channel(case: Case, r: F64) -> Clue | None:
    """A factor of its own for every channel, with what is constant in it left free."""
    rows, e = case.rows(r), case.rows(case.e)
    if case.r.ndim < 2 or len(rows) < 16 or rows.shape[1] < 2:
        return None
    middle, lean = rows - rows.mean(axis=0), e - e.mean(axis=0)
    size = np.maximum(np.einsum("ij,ij->j", middle, middle), 1e-300)
    factors = np.einsum("ij,ij->j", middle, lean) / size
    if float(np.abs(1.0 + factors).min()) < 0.02:
        return None  # a channel that is gone is another fault
    rest, energy = lean - factors * middle, float(np.sum(lean * lean))
    noise = case.noise**2 * float(size.sum())
    if energy <= 4.0 * noise or float(np.sum(rest * rest)) > 3.0 * noise + 1e-3 * energy:
        return None
    predicted = rows + factors * middle + e.mean(axis=0)
    score = case.fitted(predicted.reshape(case.r.shape)) - 2.0 / len(rows)
    low, high = float(1.0 + factors.min()), float(1.0 + factors.max())
    what = f"each channel is scaled by a factor of its own ({low:.4g} to {high:.4g})"
    return Clue("scale", max(0.0, min(score, 0.9)), what, "channels")


def _by_token(case: Case, r: F64) -> Clue | None:
    """A norm whose tokens each have a factor of their own that follows the epsilon's law."""
    if not case.is_norm or case.r.ndim < 2 or case.r.shape[-1] < 8:
        return None
    x = next((x for x in case.inputs.values() if x.shape == case.r.shape), None)
    if x is None or not np.isfinite(x).all():
        return None
    best: Clue | None = None
    rows = case.rows(r)
    for given in (case.rows(x), case.rows(x) - case.rows(x).mean(axis=1, keepdims=True)):
        square = np.mean(given * given, axis=1)
        core = _without_constants(given / np.sqrt(np.maximum(square, 1e-300))[:, None], rows)
        clue = _epsilon(case, rows, core, square)
        if clue is not None and (best is None or clue.score > best.score):
            best = clue
    return best


def _without_constants(normal: F64, rows: F64) -> F64:
    """The part of a norm's output that its input makes: without the bias, fitted per channel."""
    middle = normal - normal.mean(axis=0)
    size = np.maximum(np.einsum("ij,ij->j", middle, middle), 1e-300)
    weight = np.einsum("ij,ij->j", middle, rows - rows.mean(axis=0)) / size
    return normal * weight


def _epsilon(case: Case, rows: F64, core: F64, square: F64) -> Clue | None:
    e = case.rows(case.e)
    size = np.maximum(np.einsum("ij,ij->i", core, core), 1e-300)
    factors: F64 = 1.0 + np.einsum("ij,ij->i", core, e) / size
    if len(factors) < 8 or not (factors > 0.0).all():
        return None
    law, seen = 1.0 / np.maximum(square, 1e-300), 1.0 / factors**2 - 1.0
    if float(law.std()) < 1e-6 * float(law.mean()) or float(seen.std()) == 0.0:
        return None
    correlation = float(np.corrcoef(law, seen)[0, 1])
    if not abs(correlation) > 0.9 or not math.isfinite(correlation):
        return None
    predicted = rows + core * (factors - 1.0)[:, None]
    share, left = case.explained_and_left(predicted.reshape(case.r.shape))
    epsilon = float(np.sum(law * seen) / np.sum(law * law))
    return Clue(
        "scale",
        share if left < 0.05 else min(share, 0.75),
        f"each token is scaled by a factor of its own ({float(factors.min()):.4g} to "
        f"{float(factors.max()):.4g}), the smaller its input the more: an epsilon that is off by "
        f"about {epsilon:.2g}",
        "epsilon",
    )
