"""The linear map behind a module, from what went in and what came out. Names no cause."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from driftline.diagnosis.causes.case import F64, Case


class Solved(NamedTuple):
    """One input as rows, and the weight and bias that make the reference's output of it."""

    given: F64
    weight: F64
    bias: F64


def solved_inputs(case: Case) -> Iterator[Solved]:
    """The inputs of a case of which its reference is a linear map."""
    for x in case.inputs.values():
        if x.shape[:-1] != case.r.shape[:-1]:
            continue
        given = case.rows(x)
        found = solved(given, case.rows(case.r))
        if found is not None:
            yield Solved(given, *found)


def solved(given: F64, r: F64) -> tuple[F64, F64] | None:
    """Weight and bias of the linear map from one to the other; None when there is none."""
    rows, width = given.shape
    if rows < 1.5 * width or width > 512 or not np.isfinite(given).all():
        return None
    wide = np.concatenate([given, np.ones((rows, 1))], axis=1)
    found, *_ = np.linalg.lstsq(wide, np.where(np.isfinite(r), r, 0.0), rcond=None)
    left = r - wide @ found
    if float(np.sum(left * left)) > 1e-4 * float(np.sum(r * r)):
        return None  # it is no linear map of this input
    return np.asarray(found[:-1], dtype=np.float64), np.asarray(found[-1], dtype=np.float64)
