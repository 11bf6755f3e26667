"""A linear module that errs as if it had been given something else: what was that?

Where weight and bias can be solved for, the candidate's output tells which input it belongs to; the
other rules then look at that input instead. Names no cause of its own.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from driftline.diagnosis.causes.case import F64, Case
from driftline.diagnosis.causes.solving import solved

_STEEP = 1e3
"""Condition of a weight beyond which its inverse says nothing."""


def what_it_saw(case: Case) -> Case | None:
    """The same case in terms of the input; None where the map cannot be inverted."""
    if case.r.ndim < 2 or case.ratio < 4.0 or not case.finite.all():
        return None
    for x in case.inputs.values():
        if x.shape[:-1] != case.r.shape[:-1] or x.shape[-1] > case.r.shape[-1]:
            continue
        given, r = case.rows(x), case.rows(case.r)
        found = solved(given, r)
        if found is None:
            continue
        weight, bias = found
        strengths = np.linalg.svd(weight, compute_uv=False)
        if not strengths[-1] > 0.0 or strengths[0] > _STEEP * strengths[-1]:
            continue
        back: F64 = np.asarray(np.linalg.pinv(weight), dtype=np.float64)
        seen = (case.rows(case.c) - bias) @ back
        # Noise of the output, spread evenly, comes back through the inverse.
        rms = math.sqrt(case.size / case.r.size)
        noise = case.noise * rms * float(np.linalg.norm(back)) / math.sqrt(back.shape[1])
        size = math.sqrt(float(np.sum(given * given)) / given.size)
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
