"""Coarser arithmetic than the format says: values on a coarser grid, or noise of its size."""

from __future__ import annotations

import math

import numpy as np

from driftline.diagnosis.causes.case import F64, Case, Clue
from driftline.diagnosis.reading import GRIDS, rounded

UNITS = {
    "float16": 2.0**-11,
    "tf32": 2.0**-11,
    "bfloat16": 2.0**-8,
    "float8_e4m3fn": 2.0**-4,
    "float8_e5m2": 2.0**-3,
}
"""Unit roundoffs of formats that a computation may secretly be in."""

_SHOWN = {"float8_e4m3fn": "fp8 (e4m3)", "float8_e5m2": "fp8 (e5m2)", "bfloat16": "bf16"}
_SHOWN |= {"float16": "fp16", "tf32": "tf32"}


def low_precision(case: Case) -> Clue | None:
    """Rounded to a coarser format than declared, at the end or on the way."""
    if case.ratio < 1.3 or case.is_norm:
        return None
    return _on_a_grid(case) or _as_noise(case, "low-precision")


def norm_precision(case: Case) -> Clue | None:
    """The same of a norm: its mean square or its result in a coarser format than declared."""
    if not case.is_norm or case.ratio < 1.2:
        return None
    clue = _on_a_grid(case) or _as_noise(case, "norm-precision")
    if clue is not None:
        return Clue("norm-precision", clue.score, clue.sentence, clue.detail)
    if case.unit > 2.0**-20 and 1.2 <= case.ratio <= 5.0 and _whiteness(case) > 0.8:
        return Clue(
            "norm-precision",
            0.85,
            f"its rounding noise is {case.ratio:.2g} times that of the trusted norm in the same "
            "format: sums or steps in between are rounded too",
            "steps",
        )
    return None


def _on_a_grid(case: Case) -> Clue | None:
    """The candidate's values have fewer digits than its format offers, the reference's have not."""
    c = case.c[case.finite & (case.c != 0.0)].reshape(-1)[: 1 << 16]
    r = case.r[case.finite & (case.r != 0.0)].reshape(-1)[: 1 << 16]
    if len(c) < 64 or len(r) < 64:
        return None
    for name in reversed(GRIDS[1:]):
        if UNITS[name] <= 1.5 * case.unit:
            continue
        if float(np.mean(rounded(c, name) == c)) > 0.999 and (
            float(np.mean(rounded(r, name) == r)) < 0.5
        ):
            return Clue(
                "low-precision", 0.95, f"every value lies on the grid of {_SHOWN[name]}", name
            )
    grid = _integer_grid(c)
    if grid and not _integer_grid(r):
        return Clue("low-precision", 0.95, f"values lie on {grid} equal steps", "int8")
    return None


def _integer_grid(values: F64) -> int:
    """How many equal steps all values lie on; 0 when they do not."""
    distinct = np.unique(np.abs(values))
    if len(distinct) > 256 or len(values) < 8 * len(distinct):
        return 0
    step = float(np.min(np.diff(np.concatenate([[0.0], distinct]))))
    if not step > 0.0:
        return 0
    counts = distinct / step
    if float(np.max(np.abs(counts - np.rint(counts)))) > 0.02 or counts[-1] > 32768:
        return 0
    return int(np.rint(counts[-1]))


def _as_noise(case: Case, cause: str) -> Clue | None:
    """Error without structure, of the size that one rounding to a coarser format makes."""
    error = math.sqrt(max(case.energy - case.noise_energy, 0.0) / max(case.size, 1e-300))
    white = _whiteness(case)
    if white < 0.85:
        return None
    for name, unit in UNITS.items():
        # Rounding inputs (or inputs and weights) of a product leaves 0.3 to 1.2 units in its result.
        if unit > 1.5 * case.unit and 0.22 * unit <= error <= 1.3 * unit and name != "tf32":
            shown = "fp16 or tf32" if name == "float16" else _SHOWN[name]
            return Clue(
                cause,
                0.85,
                f"the error has no structure and the size of rounding to {shown} "
                f"({error:.2g} of the output)",
                name,
            )
    return None


def _whiteness(case: Case) -> float:
    """1 for error that looks like rounding: spread over tokens and channels, leaning nowhere."""
    if case.r.ndim < 2:
        return 0.0
    e, r = case.rows(case.e), case.rows(np.where(case.finite, case.r, 0.0))
    rows, columns = e.shape
    if rows < 4 or columns < 4:
        return 0.0
    energy = max(case.energy, 1e-300)
    lean = float(np.sum(e * r)) ** 2 / (energy * max(case.size, 1e-300))
    means = e.mean(axis=0)
    offset = max(rows * float(np.sum(means * means)) / energy - 1.5 / rows, 0.0)
    zeros = float(np.mean(e == 0.0))
    peak = float(np.max(np.abs(e))) / math.sqrt(energy / e.size)
    # Rounding is bounded: a few elements that carry everything are something else.
    tail = 1.0 if peak < 12.0 else 12.0 / peak
    level = np.einsum("ij,ij->i", e, e) / np.maximum(np.einsum("ij,ij->i", r, r), 1e-300)
    even = float(np.median(level)) / max(float(level.mean()), 1e-300)
    return (
        max(0.0, 1.0 - 3.0 * lean - 2.0 * offset)
        * tail
        * min(1.0, 1.6 * even)
        * (1.0 if zeros < 0.5 else 0.0)
    )
