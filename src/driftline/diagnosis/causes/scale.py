"""Everything is too large or too small by a factor: one factor, or one per token (wrong epsilon)."""

from __future__ import annotations

import math

import numpy as np

from driftline.diagnosis.causes.case import Case, Clue


def scale(case: Case) -> Clue | None:
    """`c = s r` with one s; for norms also one s per token that follows the epsilon's law."""
    projection = float(np.sum(case.e * np.where(case.finite, case.r, 0.0))) / max(case.size, 1e-300)
    if case.leaning:
        what = " (a wrong epsilon does this to a norm)" if case.is_norm else ""
        return Clue(
            "scale",
            0.85,
            f"the error leans along the output by {projection:+.2g} of it, less than noise{what}",
            "epsilon" if case.is_norm else "scale",
        )
    share = case.explained((1.0 + projection) * case.r)
    by_row = _by_row(case)
    if by_row is not None and by_row.score > share + 0.02:
        return by_row
    if abs(projection) < 0.25 * case.unit or abs(1.0 + projection) < 0.02:
        return None  # a factor of nothing, or everything gone: other rules speak of that
    detail = "epsilon" if case.is_norm and _follows_epsilon(case)[0] > 0.9 else "scale"
    return Clue(
        "scale",
        share,
        f"the output is {1.0 + projection:.6g} times what it should be, everywhere alike",
        detail,
    )


def _by_row(case: Case) -> Clue | None:
    """A factor of its own for every token; says nothing of tensors too narrow for that."""
    if not case.is_norm or case.r.ndim < 2 or case.r.shape[-1] < 8:
        return None
    correlation, factors = _follows_epsilon(case)
    if correlation < 0.9:
        return None
    predicted = (case.rows(case.r) * factors[:, None]).reshape(case.r.shape)
    share = case.explained(predicted)
    spread = f"{float(factors.min()):.4g} to {float(factors.max()):.4g}"
    return Clue(
        "scale",
        share,
        f"each token is scaled by a factor of its own ({spread}), the smaller its input the more: "
        "a wrong epsilon",
        "epsilon",
    )


def _follows_epsilon(case: Case) -> tuple[float, np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """How well each row's factor follows `sqrt((m + a) / (m + b))`, m being its mean square."""
    r, c = case.rows(np.where(case.finite, case.r, 0.0)), case.rows(case.c)
    c = np.where(np.isfinite(c), c, 0.0)
    rr = np.einsum("ij,ij->i", r, r)
    factors = np.einsum("ij,ij->i", r, c) / np.maximum(rr, 1e-300)
    x = next((x for x in case.inputs.values() if x.shape == case.r.shape), None)
    if x is None or len(factors) < 8 or not (factors > 0.0).all():
        return 0.0, factors
    rows = case.rows(x)
    if "layer" in case.words or case.site.rpartition(".")[2].startswith("ln"):
        rows = rows - rows.mean(axis=1, keepdims=True)
    square = np.mean(rows * rows, axis=1)
    law = 1.0 / np.maximum(square, 1e-300)
    seen = 1.0 / factors**2 - 1.0
    if float(law.std()) < 1e-6 * float(law.mean()):
        return 0.0, factors
    correlation = float(np.corrcoef(law, seen)[0, 1])
    return (abs(correlation) if math.isfinite(correlation) else 0.0), factors
