"""Gradients that cancel inside one module: how large they were before they did.

A norm sends back what it is given less its mean and less its share along the output; a softmax less
its weighted mean. Where the loss depends on just that (a mean of squares behind a layer norm, which
is a constant), next to nothing is left, and it is rounding. Rounding is a share of what cancelled,
and what cancelled can be told from the module's own tensors: its gradient from behind, times the
slope of the module as its input and output show it.

The metric `cancelled_l2` is so much of it as rounding explains: of the format, and what input and
gradient were off already. It is judged elsewhere; modules whose slope is not known have none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from driftline.alignment.plan import Pair
from driftline.comparison.row import Row
from driftline.comparison.values import F64
from driftline.errors import DriftlineError
from driftline.gating.far import CANCELLED, is_far_cancelled
from driftline.gating.loose_biases import off_by, opened
from driftline.runs.key import TensorKey
from driftline.runs.run import Run
from driftline.tolerance.defaults import LIMITS, coarsest

_ROUNDINGS = 16
"""So many roundings of what cancels are nobody's fault."""
_CARRIED = 4
"""Times so much an error of input or gradient may come out of a module."""
_LARGEST = 1 << 24
"""Larger tensors are not read for this."""
_BY_CHANNEL = ("BatchNorm", "SyncBatchNorm", "GroupNorm", "InstanceNorm")


def with_cancelled(
    rows: Sequence[Row], pairs: Sequence[Pair], reference: Run, candidate: Run
) -> Sequence[Row]:
    """Rows with `cancelled_l2` wherever a gradient is far off that may have cancelled.

    Args:
        rows: Measured; all rows of a plan, or some.
        pairs: All pairs of the plan.
        reference: The one run.
        candidate: The other.
    """
    far = [at for at, row in enumerate(rows) if is_far_cancelled(row)]
    if not far:
        return rows
    calls = {_call(rows[at].key) for at in far}
    near: dict[tuple[object, ...], list[Pair]] = {}
    for pair in pairs:
        if (call := _call(pair.reference.key)) in calls:
            near.setdefault(call, []).append(pair)
    found = list(rows)
    for at in far:
        row = found[at]
        try:
            size = _explained(row, near[_call(row.key)], reference, candidate)
        except (DriftlineError, OSError, ValueError):
            continue  # the row stays as it was measured
        if size is not None:
            found[at] = row._replace(metrics={**row.metrics, CANCELLED: size})
    return found


def _explained(row: Row, pairs: Sequence[Pair], reference: Run, candidate: Run) -> float | None:
    """How large an error rounding explains; None where the module does not show it.

    Of other rows nothing is asked: a shard of a comparison has not got them.
    """
    shape, dtype = row.reference_shape, coarsest((row.reference_dtype, row.candidate_dtype))
    if dtype is None or shape is None or not 0 < math.prod(shape) <= _LARGEST:
        return None
    values: dict[str, F64] = {}
    off = 0.0
    for pair in pairs:
        port = pair.reference.key.port
        if port not in ("input", "output", "grad_output") or port in values:
            continue
        ours, theirs = opened(pair, reference, candidate).decoded()
        if ours.size != math.prod(shape):
            continue
        error = off_by(ours, theirs)
        if not ours.any() or not error <= LIMITS[dtype.name]:
            return None  # what it is made of is wrong already
        off += error
        values[port] = ours.reshape(shape)
    if len(values) < 3:
        return None
    before = _before(row.class_name, values["input"], values["output"], values["grad_output"])
    share = min(_ROUNDINGS * dtype.unit_roundoff + _CARRIED * off, LIMITS[dtype.name])
    return share * before if math.isfinite(before) else None


def _before(class_name: str, given: F64, result: F64, gradient: F64) -> float:
    """Norm of the gradient that a module sends back, before anything is taken from it."""
    if class_name.endswith("LogSoftmax"):
        return float(np.linalg.norm(gradient))
    if class_name.endswith("Softmax"):
        return float(np.linalg.norm(result * gradient))
    axes: tuple[int, ...] = (-1,)
    if class_name.startswith(_BY_CHANNEL) and given.ndim > 1:
        batch = (0,) if "BatchNorm" in class_name or given.ndim == 2 else ()
        axes = (*batch, *range(2, given.ndim))
    spread = given.std(axis=axes, keepdims=True)
    slope = result.std(axis=axes, keepdims=True) / np.where(spread > 0.0, spread, math.inf)
    return float(np.linalg.norm(slope * gradient))


def _call(key: TensorKey) -> tuple[object, ...]:
    return key.rank, key.process, key.step, key.site, key.visit
