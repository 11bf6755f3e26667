"""Linear maps of modules, solved from their inputs and outputs. This file names no cause."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from driftline.diagnosis.causes.case import F64, Case


class Solved(NamedTuple):
    """One input as rows, and the weight and bias that map it to the reference's output."""

    inputs: F64
    weight: F64
    bias: F64


def solved_inputs(case: Case) -> Iterator[Solved]:
    """Yield the inputs of a case of which the reference's output is a linear map."""
    for x in case.inputs.values():
        if x.shape[:-1] != case.r.shape[:-1]:
            continue
        inputs = case.rows(x)
        solution = solved(inputs, case.rows(case.r))
        if solution is not None:
            yield Solved(inputs, *solution)


def solve(matrix: F64, values: F64) -> F64:
    """Least-squares solution of `matrix @ x = values`."""
    return np.asarray(np.linalg.lstsq(matrix, values, rcond=None)[0], dtype=np.float64)  # pyright: ignore[reportUnknownArgumentType]


def solved(inputs: F64, r: F64) -> tuple[F64, F64] | None:
    """Weight and bias of the linear map from `inputs` to `r`; None if there is none."""
    rows, width = inputs.shape
    # With fewer rows than columns any output is a linear map of the input.
    if rows < 1.5 * width or width > 512 or not np.isfinite(inputs).all():
        return None
    wide = np.concatenate([inputs, np.ones((rows, 1))], axis=1)
    coefficients, *_ = np.linalg.lstsq(wide, np.where(np.isfinite(r), r, 0.0), rcond=None)
    left = r - wide @ coefficients
    if float(np.sum(left * left)) > 1e-4 * float(np.sum(r * r)):
        return None  # the output is not a linear map of this input
    return np.asarray(coefficients[:-1], dtype=np.float64), np.asarray(
        coefficients[-1], dtype=np.float64
    )


# The input that the candidate's output implies, which may differ from the module's actual input.


_STEEP = 1e3
"""Largest condition number of a weight whose inverse is used."""


def implied_input(case: Case) -> Case | None:
    """The case with both outputs mapped back to inputs; None if the map cannot be inverted."""
    if case.r.ndim < 2 or case.ratio < 4.0 or not case.finite.all():
        return None
    for x in case.inputs.values():
        # A map to fewer channels loses information and has no inverse.
        if x.shape[:-1] != case.r.shape[:-1] or x.shape[-1] > case.r.shape[-1]:
            continue
        inputs, r = case.rows(x), case.rows(case.r)
        solution = solved(inputs, r)
        if solution is None:
            continue
        weight, bias = solution
        strengths = np.linalg.svd(weight, compute_uv=False)
        if not strengths[-1] > 0.0 or strengths[0] > _STEEP * strengths[-1]:
            continue
        back: F64 = np.asarray(np.linalg.pinv(weight), dtype=np.float64)
        seen = (case.rows(case.c) - bias) @ back
        # Noise of the input that noise of the output implies, if that is spread evenly.
        rms = math.sqrt(case.size / case.r.size)
        noise = case.noise * rms * float(np.linalg.norm(back)) / math.sqrt(back.shape[1])
        size = math.sqrt(float(np.sum(inputs * inputs)) / inputs.size)
        return replace(
            case,
            r=x,
            c=seen.reshape(x.shape),
            noise=2.0 * noise / max(size, 1e-300) + 1e-6,
            inputs={},
            params={},
            others={},
            before=(),
            ranks=(),
            repeats=(),
            leaning=False,
        )
    return None
