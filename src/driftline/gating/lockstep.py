"""Two live models compared layer by layer as they run, without a run of either.

The fast path of `compare_models`, and a door of its own. Where the two are not built alike, or a
metric needs every value at once, it steps aside and both are captured instead.
"""

# torch objects have no complete types
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from driftline.alignment.plan import Pair, Plan
from driftline.comparison.engine import measure
from driftline.comparison.metrics.catalogue import Metric, limited, requested
from driftline.comparison.metrics.derivation import needs_definition
from driftline.comparison.row import Row
from driftline.comparison.small import FAR_OFF
from driftline.comparison.table import Table
from driftline.comparison.unmeasured import clash, paired
from driftline.comparison.values import measure_moments
from driftline.errors import DriftlineError
from driftline.gating.door import Limits, align, allowed, outside
from driftline.gating.judge import judge
from driftline.numerics.fields import PairMoments
from driftline.registry import require

if TYPE_CHECKING:
    from _typeshed import StrPath
    from torch import nn

    from driftline.runs.key import TensorKey
    from driftline.tolerance.thresholds import Thresholds

Call = Callable[[], Any]


def lockstep(
    reference: nn.Module,
    candidate: nn.Module,
    inputs: Any,
    *,
    metrics: Sequence[str] = (),
    limits: Limits = None,
    rtol: float | None = None,
    atol: float | None = None,
    min_coverage: float = 0.0,
    thresholds: Thresholds | StrPath | None = None,
    sites: Sequence[str] = (),
    ports: Sequence[str] = (),
) -> Table:
    """Run two models side by side and compare what every module took and gave, as they run.

    Each tensor is compared where it lies, on the device if both are there, and is free to go
    afterwards: nothing is kept and nothing written. The table is that of `compare_models`. Models
    that are not built alike are captured and aligned instead, as `compare_models` does it.

    Args:
        reference: The model that is right.
        candidate: The model in question.
        inputs: One tensor, a tuple or list of positional arguments, or a dict of keyword arguments.
        metrics: As for `compare`, and so for the others.

    Raises:
        NotInstalled: There is no torch here.
        DriftlineError: As `compare` does.
    """
    from driftline.gating.models import compare_models

    require("torch", install="driftline[torch]")
    return compare_models(
        reference,
        candidate,
        inputs,
        metrics=metrics,
        limits=limits,
        rtol=rtol,
        atol=atol,
        min_coverage=min_coverage,
        thresholds=thresholds,
        sites=sites,
        ports=ports,
    )


def compared_in_step(
    reference: tuple[nn.Module, Call],
    candidate: tuple[nn.Module, Call],
    *,
    metrics: Sequence[str],
    limits: Limits,
    rtol: float | None,
    atol: float | None,
    min_coverage: float,
    thresholds: Thresholds | StrPath | None,
    sites: Sequence[str],
    ports: Sequence[str],
) -> Table | None:
    """The judged table of two models and what calls them; None when they are not in step."""
    from driftline.adapters.torch.lockstep import can_be_in_step, in_step

    if not can_be_in_step(reference[0], candidate[0]):
        return None
    named = [metrics] if isinstance(metrics, str) else metrics
    limits_on = limits if isinstance(limits, Mapping) else [one.metric for one in limits or ()]
    wanted = requested([*named, *limited(limits_on)])
    if any(metric.derive is None for metric in wanted):
        return None
    tolerance = allowed(wanted, limits, rtol, atol, min_coverage, thresholds)
    steps = in_step(reference, candidate, outside(tolerance))
    if steps.apart:
        return None
    ours, theirs = steps.reference.run(), steps.candidate.run()
    try:
        plan = align(ours, theirs, sites=sites, ports=ports)
    except DriftlineError:
        if sites or ports:  # a glob that matches nothing is the caller's
            raise
        return None
    rows = _rows(plan, steps.moments, wanted)
    if rows is None:
        return None
    empty = measure(plan._replace(pairs=()), ours, theirs, metrics=wanted)
    table = empty.changed(rows=tuple(rows))
    if tolerance.thresholds is None:
        return judge(table, tolerance)
    from driftline.gating.checking import judge_by

    return judge_by(table, tolerance)


def _rows(
    plan: Plan, moments: Mapping[TensorKey, PairMoments], metrics: Sequence[Metric]
) -> list[Row] | None:
    """A row for each pair; None when one of them needs more than its moments."""
    if plan.missing or plan.extra:
        return None
    rows: list[Row] = []
    for pair in plan.pairs:
        found = moments.get(pair.reference.key)
        if found is None or not _is_simple(pair) or needs_definition(found):
            return None
        measured = measure_moments([found], metrics)
        shape = pair.reference.shape
        if len(shape) == 2 and shape[0] == shape[1]:
            off = measured.get("relative_l2", 0.0)
            if isinstance(off, float) and off > FAR_OFF:  # it may lie the other way round
                return None
        rows.append(paired(pair, "values", measured))
    return rows


def _is_simple(pair: Pair) -> bool:
    return (
        pair.reference.key == pair.candidate.key
        and pair.reference_recipe is None
        and pair.candidate_recipe is None
        and not pair.trouble
        and not clash(pair)
    )
