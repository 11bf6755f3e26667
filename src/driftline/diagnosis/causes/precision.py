"""Arithmetic in a coarser format than declared: values on its grid, or noise of its size."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np

from driftline.comparison.evidence.error_stats import GRIDS, rounded
from driftline.comparison.verdict.sites import FINE
from driftline.diagnosis.causes.case import F64, Case, Clue
from driftline.diagnosis.causes.linear_solve import solved_inputs

UNITS = {
    "float16": 2.0**-11,
    "tf32": 2.0**-11,
    "bfloat16": 2.0**-8,
    "float8_e4m3fn": 2.0**-4,
    "float8_e5m2": 2.0**-3,
}
"""Unit roundoffs of the formats in which a computation may be done without declaring it."""

TF32 = ("tf32", "float16")
"""Details of clues that TF32 may explain: it rounds like float16, except for small numbers."""

_SHOWN = {
    "float8_e4m3fn": "fp8 (e4m3)",
    "float8_e5m2": "fp8 (e5m2)",
    "bfloat16": "bf16",
    "float16": "fp16",
    "tf32": "tf32",
}


_SURE = 0.9
"""Share of the error from which a rounded product counts as measured, and not only as likely."""
_LINEAR = re.compile(r"linear|conv|proj|dense|matmul|gemm|fc")
_CONVOLVES = re.compile(r"(?i:conv)(?!1D$)")


def low_precision(case: Case) -> Clue | None:
    """The result or an intermediate value is rounded to a coarser format than declared."""
    if case.ratio < 1.3 or case.is_norm:
        return None
    # The strictest test comes first: a grid is proof, noise of a certain size is only a hint.
    return _on_a_grid(case) or _rounded_product(case) or _as_noise(case, "low-precision")


def _rounded_product(case: Case) -> Clue | None:
    """A linear layer whose input or weight was rounded: its product is recomputed and compared."""
    if case.r.ndim < 2 or case.ratio < 2.0:
        return None
    best: Clue | None = None
    for inputs, weight, bias in solved_inputs(case):
        for name, unit in UNITS.items():
            if unit <= 1.5 * case.unit:
                continue
            for what, a, b in (
                ("its weight", inputs, rounded(weight, name)),
                ("its input", rounded(inputs, name), weight),
                ("its input and weight", rounded(inputs, name), rounded(weight, name)),
            ):
                score = case.explained((a @ b + bias).reshape(case.r.shape))
                if score > 0.8 and (best is None or score > best.score):
                    sentence = f"it is the product with {what} rounded to {_SHOWN[name]}"
                    # The weight is solved from input and output, so with few rows some error
                    # remains.
                    sure = score >= _SURE
                    best = Clue("low-precision", min(score, 0.98), sentence, name, measured=sure)
    return best


def norm_precision(case: Case) -> Clue | None:
    """The mean square or the result of a norm is in a coarser format than declared."""
    if not case.is_norm or case.ratio < 1.2:
        return None
    clue = _on_a_grid(case) or _as_noise(case, "norm-precision")
    if clue is not None:
        return replace(clue, cause="norm-precision")
    if case.unit > FINE and 1.2 <= case.ratio <= 5.0:
        return Clue(
            "norm-precision",
            0.82,
            f"its rounding noise is {case.ratio:.2g} times that of the trusted norm in the same "
            "format: sums or steps in between are rounded too",
            "steps",
            measured=False,
        )
    return None


def _on_a_grid(case: Case) -> Clue | None:
    """The candidate's values use fewer digits than its format offers; the reference's do not."""
    c = case.c[case.finite & (case.c != 0.0)].reshape(-1)[: 1 << 16]
    r = case.r[case.finite & (case.r != 0.0)].reshape(-1)[: 1 << 16]
    if len(c) < 64 or len(r) < 64:
        return None
    # The coarsest format comes first: values on its grid are on all finer grids as well.
    for name in reversed(GRIDS[1:]):
        if UNITS[name] <= 1.5 * case.unit:
            continue
        if _on(c, name) > 0.999 and _on(r, name) < 0.5:
            return Clue(
                "low-precision", 0.95, f"every value lies on the grid of {_SHOWN[name]}", name
            )
    grid = _integer_grid(c) if case.unit <= 2.0**-11 else 0
    if grid and not _integer_grid(r):
        return Clue("low-precision", 0.95, f"values lie on {grid} equal steps", "int8")
    return None


def _on(values: F64, name: str) -> float:
    return float(np.count_nonzero(rounded(values, name) == values)) / len(values)


def _integer_grid(values: F64) -> int:
    """Number of equal steps that covers all values; 0 if the values are not on such a grid."""
    distinct = np.unique(np.abs(values))
    # There must be few distinct values, and each must occur several times: otherwise any values
    # are on some grid.
    if len(distinct) > 256 or len(values) < 8 * len(distinct):
        return 0
    step = float(np.min(np.diff(np.concatenate([[0.0], distinct]))))
    if not step > 0.0:
        return 0
    counts = distinct / step
    if float(np.max(np.abs(counts - np.rint(counts)))) > 0.02 or counts[-1] > 300:
        return 0
    return int(np.rint(counts[-1]))


def _as_noise(case: Case, cause: str) -> Clue | None:
    """Error without structure that is as large as that of one rounding to a coarser format."""
    beyond = max(case.energy - case.noise_energy, 0.0)
    error = math.sqrt(beyond / max(case.size, 1e-300))
    if _whiteness(case) < 0.85:
        return None
    # A large bias makes the output larger, but not the rounding error of the product, so the error
    # is also compared with the varying part.
    rows = _by_channel(case, np.where(case.finite, case.r, 0.0))
    varying = float(np.sum((rows - rows.mean(axis=0)) ** 2))
    errors = (error, math.sqrt(beyond / max(varying, 1e-300)))
    for name, unit in UNITS.items():
        # Rounding the inputs (or inputs and weights) of a product gives an error of 0.3 to 0.7
        # units.
        if unit >= 2.0**-4 and (case.ratio < 6.0 or not _LINEAR.search(case.words)):
            continue  # many errors have the size of such coarse roundings; only products count
        # Sums that are accumulated in such a format are rounded again and again.
        most = 3.0 if name == "bfloat16" and _LINEAR.search(case.words) else 0.7
        fits = any(0.22 * unit <= relative <= most * unit for relative in errors)
        if unit > 1.5 * case.unit and fits and name != "tf32":
            shown = "fp16 or tf32" if name == "float16" else _SHOWN[name]
            return Clue(
                cause,
                0.85,
                f"the error has no structure and the size of rounding to {shown} "
                f"({error:.2g} of the output)",
                name,
                measured=False,
            )
    return None


def convolves(class_name: str) -> bool:
    """Whether a module convolves, judged by its name; transformers' `Conv1D` is a product.

    >>> convolves("Conv1d"), convolves("Conv1D")
    (True, False)
    """
    return bool(_CONVOLVES.search(class_name))


def _by_channel(case: Case, values: F64) -> F64:
    """Values as rows of channels; convolutions have their channels in the second axis."""
    if values.ndim >= 3 and convolves(case.class_name):
        values = np.moveaxis(values, 1, -1)
    return case.rows(values)


def _whiteness(case: Case) -> float:
    """Score from 0 to 1; 1 for error like rounding: spread over tokens and channels, unbiased.

    The limits were measured on planted roundings (of inputs, weights, sums) and on other faults
    (heads exchanged, another softmax scale). With roundings, the error per token varies by 0.11 to
    0.20 of its mean, with other faults by 0.49 and more. One direction holds 0.04 to 0.24 of the
    energy, with other faults 0.35 and more. The kurtosis of roundings is 3.1 to 6.2.
    """
    if case.r.ndim < 2:
        return 0.0
    e, r = (_by_channel(case, x) for x in (case.e, np.where(case.finite, case.r, 0.0)))
    rows, columns = e.shape
    if rows < 8 or columns < 8 or not case.energy > 0.0:
        return 0.0
    if _LINEAR.search(case.words):
        # A rounded weight turns the constant part of its input into a constant error.
        e, r = e - e.mean(axis=0), r - r.mean(axis=0)
    energy, size = float(np.sum(e * e)), float(np.sum(r * r))
    if not energy > 0.2 * case.energy:
        return 0.0
    per_row = np.einsum("ij,ij->i", e, e)
    if float(np.count_nonzero(e == 0.0)) > 0.5 * e.size or not (per_row > 0.0).all():
        return 0.0
    lean = float(np.sum(e * r)) ** 2 / (energy * max(size, 1e-300))
    means = e.mean(axis=0)
    offset = max(rows * float(np.sum(means * means)) / energy - 1.5 / rows, 0.0)
    level = np.sqrt(per_row / np.maximum(np.einsum("ij,ij->i", r, r), 1e-300))
    uneven = float(level.std()) / float(level.mean())
    kurtosis = float(np.sum(e**4)) * e.size / energy**2
    # The top direction of a random matrix holds about `shape` of its energy.
    some = e[:: max(1, rows // 512), : min(columns, 512)]
    top = float(np.linalg.norm(some, 2)) ** 2 / max(float(np.sum(some * some)), 1e-300)
    shape = (1.0 / np.sqrt(some.shape[0]) + 1.0 / np.sqrt(some.shape[1])) ** 2
    if uneven > 0.3 or kurtosis > 8.0 or top > 0.17 + 2.0 * shape:
        return 0.0
    return max(0.0, 1.0 - 3.0 * lean - 2.0 * offset)
