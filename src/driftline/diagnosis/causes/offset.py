"""The same amount is added everywhere, or in each channel: a bias missing, doubled or wrong."""

from __future__ import annotations

import math

import numpy as np

from driftline.diagnosis.causes.case import F64, Case, Clue


def offset(case: Case) -> Clue | None:
    """`c = r + b` with one b per channel."""
    if case.r.ndim < 2:
        return None
    rows = case.rows(case.e)
    if len(rows) < 4:
        return None  # with so few tokens any error is one constant per channel
    b: F64 = rows.mean(axis=0)
    share = case.fitted(case.r + b)
    # Means of few rows take some of any error with them.
    share = max(0.0, share - 1.0 / len(rows))
    if not np.any(b):
        return None
    if _may_be_scaled(rows, b, case.rows(np.where(case.finite, case.r, 0.0))):
        share = min(share, 0.75)
    bias = case.params.get("bias")
    detail, what = "", "one constant per channel is added to every token"
    if bias is not None and bias.shape == b.shape:
        detail, what = _against(bias, b, what)
    elif float(np.std(b)) < 0.05 * abs(float(np.mean(b))):
        detail, what = "constant", f"the constant {float(np.mean(b)):.4g} is added everywhere"
    return Clue("offset", share, what, detail)


def _may_be_scaled(e: F64, b: F64, r: F64) -> bool:
    """Whether the constants are a small share of what every token has anyway: a scale, perhaps.

    A factor moves what differs from token to token as well; where that clearly stays as it is, it
    is no factor.
    """
    middle = r.mean(axis=0)
    size = float(middle @ middle)
    both = float(b @ middle)
    alike = abs(both) / max(math.sqrt(size * float(b @ b)), 1e-300)
    if alike <= 0.5 or abs(both) >= 0.3 * size:
        return False
    varying = (both / size) * (r - middle)
    power = float(np.sum(varying * varying))
    if not power > 0.0:
        return True
    moved = np.einsum("ij,ij->i", e - b, varying)
    times = float(moved.sum()) / power
    left = moved - times * np.einsum("ij,ij->i", varying, varying)
    return times + 5.0 * math.sqrt(float(left @ left)) / power > _STILL


_STILL = 0.3
"""Of what a factor would move; below this it is none."""


def _against(bias: F64, b: F64, otherwise: str) -> tuple[str, str]:
    """What the constants are, compared with the bias that belongs there."""
    size = float(np.sum(bias * bias))
    if size <= 0.0:
        return "", otherwise
    for times, detail, what in (
        (-1.0, "missing", "what is missing from every token is the bias itself"),
        (1.0, "doubled", "the bias is added twice"),
        (-2.0, "negated", "the bias is subtracted instead of added"),
    ):
        left = b - times * bias
        if float(np.sum(left * left)) < 0.02 * size:
            return detail, what
    return "", otherwise
