"""The Python door to comparison: `driftline.compare(reference, candidate)` gives a judged table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from driftline.alignment.door import UNMASKED, AlignOptions, align_runs
from driftline.alignment.plan import Plan
from driftline.comparison.engine import Elementwise, Progress, measure
from driftline.comparison.metrics.catalogue import STANDARD, Metric, limited, requested
from driftline.comparison.table import Table
from driftline.executors.choosing import chosen
from driftline.runs.key import TensorKey
from driftline.runs.run import Run
from driftline.runs.uncollected import uncollected
from driftline.tolerance.defaults import elementwise
from driftline.tolerance.limits import Limit, Tolerance, limits_from

if TYPE_CHECKING:
    from _typeshed import StrPath

    from driftline.executors.work import Executor
    from driftline.tolerance.thresholds import Thresholds

Source: TypeAlias = "Run | StrPath"
"""A run, or the path of one or of a foreign dump."""
Limits: TypeAlias = Mapping[str, float] | Sequence[Limit] | None


def compare(
    reference: Source,
    candidate: Source,
    *,
    metrics: Sequence[str] = (),
    limits: Limits = None,
    rtol: float | None = None,
    atol: float | None = None,
    min_coverage: float = 0.0,
    thresholds: Thresholds | StrPath | None = None,
    sites: Sequence[str] = (),
    ports: Sequence[str] = (),
    maps: Sequence[str] = (),
    mapping: StrPath | None = None,
    placements: Sequence[str] = (),
    masks: Sequence[StrPath] = (),
    step_map: Mapping[int, int] | None = None,
    plan: Plan | StrPath | None = None,
    structural: bool = True,
    threads: int | None = None,
    jobs: int | None = None,
    executor: str | Executor | None = None,
    planned: Callable[[Plan], None] | None = None,
    progress: Progress | None = None,
) -> Table:
    """Compare two runs tensor by tensor.

    Args:
        reference: What is right: a run, or the path of one (or of a file of tensors).
        candidate: What is in question.
        metrics: Measured besides the standard ones: `kl`, a plug-in's name, `file.py:function`.
        limits: Metric → worst value that passes, in place of the limits of the coarser dtype.
        rtol: With `atol`, every element must keep `|c - r| <= atol + rtol |r|`.
        atol: See `rtol`.
        min_coverage: The share of all tensors that must have been compared for a pass.
        thresholds: Limits of each layer: what `calibrate` gave, or the path of a thresholds file.
            Tensors it does not speak of are then measured, but not judged by it.
        sites: Globs; only sites that match one of them. All, when none is given.
        ports: Only these ports. All, when none is given.
        maps: `REFERENCE=CANDIDATE` for sites that are called differently; see `align`.
        mapping: A file of such pairs; see `align`.
        placements: `SITE=shard(AXIS)`: how the tensors of a sharded run lie over its ranks.
        masks: Files of the positions that count ([batch, tokens]), or `captured`. Without any, rows
            that fail are measured again without the pads of the captured attention_mask; `none`
            counts pads as everything else.
        step_map: Step of the reference → step of the candidate.
        plan: What `align` gave, or the path of a saved plan; nothing else is paired then.
        structural: Whether tensors that are called differently may be paired; see `align`.
        threads: Worker threads; one per usable core when not given.
        jobs: Worker processes that share the pairs; the table is the same, bit for bit.
        executor: `ray` or `ray://HOST:PORT`: workers are those of a Ray cluster.
        planned: Called with the plan before any tensor is read.
        progress: Called with (pairs done, pairs in all).

    Raises:
        DriftlineError: A path, metric, glob or limit that cannot mean anything, or two runs that
            share no name. Numbers that differ are no exception: they are rows.
    """
    named = [metrics] if isinstance(metrics, str) else metrics
    limits_on = limits if isinstance(limits, Mapping) else [one.metric for one in limits or ()]
    wanted = requested([*named, *limited(limits_on)])
    tolerance = allowed(wanted, limits, rtol, atol, min_coverage, thresholds)
    # Metrics of users may make cycles, ours do not.
    with uncollected() if wanted == STANDARD else nullcontext():
        ours, theirs = open_source(reference), open_source(candidate)
        if not isinstance(plan, Plan):
            plan = align(
                ours,
                theirs,
                sites=sites,
                ports=ports,
                maps=maps,
                mapping=mapping,
                placements=placements,
                masks=masks,
                step_map=step_map,
                plan=plan,
                structural=structural,
            )
        if planned is not None:
            planned(plan)
        each = outside(tolerance)
        table = measure(
            plan,
            ours,
            theirs,
            metrics=wanted,
            elementwise=each,
            threads=threads,
            progress=progress,
            executor=chosen(jobs, executor),
        )
        if plan.missing or plan.extra:
            from driftline.gating.conversions import with_conversions

            table = with_conversions(table, ours, theirs, wanted, each)
        from driftline.gating.evidence import with_evidence

        table = table.changed(rows=with_evidence(table.rows, plan.pairs, ours, theirs))
        judged = _judged(table, tolerance)
        if judged.verdict != "fail" or masks:
            return judged
        from driftline.gating.pads import judged_without_pads

        return judged_without_pads(
            judged, table, plan, ours, theirs, wanted, each, lambda one: _judged(one, tolerance)
        )


def _judged(table: Table, tolerance: Tolerance) -> Table:
    if tolerance.thresholds is None:
        from driftline.gating.judge import judge

        return judge(table, tolerance)
    from driftline.gating.checking import judge_by

    return judge_by(table, tolerance)


def _loaded(thresholds: Thresholds | StrPath | None) -> Thresholds | None:
    if thresholds is None:
        return None
    from driftline.tolerance.thresholds import Thresholds, load_thresholds

    return thresholds if isinstance(thresholds, Thresholds) else load_thresholds(thresholds)


def allowed(
    wanted: Sequence[Metric],
    limits: Limits,
    rtol: float | None,
    atol: float | None,
    min_coverage: float,
    thresholds: Thresholds | StrPath | None,
) -> Tolerance:
    """What a comparison of these metrics allows, as `compare` is told it."""
    if limits is None or isinstance(limits, Mapping):
        found = limits_from(limits, [metric.column for metric in wanted])
    else:
        found = tuple(limits)
    return Tolerance(found, rtol, atol, min_coverage, _loaded(thresholds))


def outside(tolerance: Tolerance) -> Elementwise:
    """What `outside_share` counts as outside."""
    if not tolerance.elementwise:
        return elementwise
    rtol, atol = tolerance.rtol or 0.0, tolerance.atol or 0.0
    return lambda reference, candidate: (rtol, atol)


def align(
    reference: Source,
    candidate: Source,
    *,
    sites: Sequence[str] = (),
    ports: Sequence[str] = (),
    maps: Sequence[str] = (),
    mapping: StrPath | None = None,
    placements: Sequence[str] = (),
    masks: Sequence[StrPath] = (),
    step_map: Mapping[int, int] | None = None,
    plan: StrPath | None = None,
    structural: bool = True,
) -> Plan:
    """What `compare` would set against what; nothing is read but the two indexes.

    Args:
        reference: What is right: a run, or the path of one (or of a file of tensors).
        candidate: What is in question.
        sites: Globs; only sites that match one of them. All, when none is given.
        ports: Only these ports. All, when none is given.
        maps: `REFERENCE=CANDIDATE`, such as `model.*=*`; a star stands for the same text on both
            sides.
        mapping: A file of such pairs, or the folder of an `op_mapping_file.json`.
        placements: How tensors lie over ranks when one side is sharded, such as `attn.*=shard(1)`:
            shard(AXIS), replicate or partial(sum).
        masks: Files of the positions that count ([batch, tokens]), or `captured` for the
            attention_mask that a run holds; `none` leaves nothing out.
        step_map: Step of the reference → step of the candidate, where the runs count differently.
        plan: A saved plan; it wins over every rule.
        structural: Whether tensors that are called differently may be paired by class, shape and
            dataflow.

    Raises:
        DriftlineError: A path that is no run, a glob that matches nothing, nothing in common.
    """
    given = [masks] if isinstance(masks, str | Path) else masks
    options = AlignOptions(
        sites=_words(sites),
        ports=_words(ports),
        maps=_words(maps),
        mapping_file=None if mapping is None else Path(mapping),
        placements=_words(placements),
        masks=tuple(str(mask) for mask in given if str(mask) != UNMASKED),
        step_map=tuple(f"{here}={there}" for here, there in (step_map or {}).items()),
        plan_file=None if plan is None else Path(plan),
        structural=structural,
    )
    ours, theirs = open_source(reference), open_source(candidate)
    return _growing(align_runs(ours, theirs, options), ours, theirs)


def _growing(plan: Plan, reference: Run, candidate: Run) -> Plan:
    """What a run lacks that is still being written may come yet: the rows say so."""
    why: dict[tuple[str, TensorKey], str] = {}
    for side, alone, other, run in (
        ("reference", plan.missing, "candidate", candidate),
        ("candidate", plan.extra, "reference", reference),
    ):
        if alone and run.growing:
            said = f"not yet in the {other}, which is still being written"
            why |= {(side, record.key): said for record in alone}
    return plan._replace(reasons={**plan.reasons, **why}) if why else plan


def _words(given: Sequence[str]) -> tuple[str, ...]:
    """One word given by itself is one word, not its letters."""
    return (given,) if isinstance(given, str) else tuple(given)


def open_source(source: Source) -> Run:
    """A run as it is, or opened from its path, in whatever format it is."""
    if isinstance(source, Run):
        return source
    from driftline.formats.opening import open_run

    return open_run(source)
