"""A measured table in which errors are shares of what they are made of, for who weighs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from driftline.alignment.align import UNMASKED, AlignOptions, align_runs
from driftline.alignment.plan import Pair, Plan
from driftline.comparison.evidence.rules import GRADIENTS, with_evidence
from driftline.comparison.measure.scheduler import Elementwise, Progress, measure
from driftline.comparison.metrics.catalogue import STANDARD, Metric, limited, requested
from driftline.comparison.table.files import open_table
from driftline.comparison.table.row import Row
from driftline.comparison.table.table import Table, is_kept
from driftline.comparison.tolerance.defaults import elementwise
from driftline.comparison.tolerance.thresholds import LayerNames, Thresholds, load_thresholds
from driftline.comparison.tolerance.tolerance import (
    Limit,
    Tolerance,
    is_on_another_scale,
    limits_from,
)
from driftline.comparison.verdict.judge import NO_THRESHOLD, judge
from driftline.errors import BadInput
from driftline.execution.jobs import chosen
from driftline.runs.index import uncollected
from driftline.runs.records import TensorKey
from driftline.runs.run import Run

if TYPE_CHECKING:
    from _typeshed import StrPath

    from driftline.comparison.tolerance.thresholds import Thresholds
    from driftline.execution.jobs import Executor


def on_their_scales(table: Table, pairs: Sequence[Pair], reference: Run, candidate: Run) -> Table:
    """The same table; rows that pass on another scale than their own are judged, others are not.

    Args:
        table: Measured.
        pairs: All pairs of its plan.
        reference: The one run.
        candidate: The other.
    """
    rows = table.rows
    if is_kept(rows) or not any(row.key.port in GRADIENTS for row in rows):
        return table
    judged = judge(table.with_rows(with_evidence(rows, pairs, reference, candidate))).rows
    found = zip(rows, judged, strict=True)
    return table.with_rows(new if is_on_another_scale(new) else old for old, new in found)


# The Python door to comparison: `driftline.compare(reference, candidate)` gives a judged table.


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
            from driftline.comparison.evidence.conversions import with_conversions

            table = with_conversions(table, ours, theirs, wanted, each)
        from driftline.comparison.evidence.rules import with_evidence

        table = table.changed(rows=with_evidence(table.rows, plan.pairs, ours, theirs))
        judged = _judged(table, tolerance)
        if judged.verdict != "fail" or masks:
            return judged
        from driftline.comparison.evidence.padding import judged_without_pads

        return judged_without_pads(
            judged, table, plan, ours, theirs, wanted, each, lambda one: _judged(one, tolerance)
        )


def _judged(table: Table, tolerance: Tolerance) -> Table:
    if tolerance.thresholds is None:
        from driftline.comparison.verdict.judge import judge

        return judge(table, tolerance)

    return judge_by(table, tolerance)


def _loaded(thresholds: Thresholds | StrPath | None) -> Thresholds | None:
    if thresholds is None:
        return None
    from driftline.comparison.tolerance.thresholds import Thresholds, load_thresholds

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
    from driftline.formats.registry import open_run

    return open_run(source)


# A comparison that is there already, judged by other limits: thresholds of clean runs, or
# numbers.


_NOTE = "thresholds: "


def check(
    table: Table | StrPath,
    *,
    thresholds: Thresholds | StrPath | None = None,
    limits: Mapping[str, float] | Sequence[Limit] | None = None,
    slack: float = 1.0,
    min_coverage: float = 0.0,
    model: str | None = None,
) -> Table:
    """Judge a comparison again.

    Args:
        table: A table, or the folder that `compare -o` wrote.
        thresholds: What `calibrate` gave, or the path of a thresholds file. Tensors of layers it
            does not speak of are not judged by it.
        limits: Metric → worst value that passes, for every tensor.
        slack: How many times its threshold a tensor may reach.
        min_coverage: The share of all tensors that must be judged for a pass.
        model: Refuse thresholds that are for another model.

    Raises:
        BadInput: Thresholds that speak of no layer of this table, or an unknown metric.
        BadFile: No table or no thresholds file there.
    """
    found = table if isinstance(table, Table) else open_table(table)
    if limits is None or isinstance(limits, Mapping):
        allowed = limits_from(limits, found.columns)
    else:
        allowed = tuple(limits)
    known = None
    if thresholds is not None:
        known = thresholds if isinstance(thresholds, Thresholds) else load_thresholds(thresholds)
        if model is not None:
            known.require_model(model)
    tolerance = Tolerance(allowed, min_coverage=min_coverage, thresholds=known, slack=slack)
    fresh = found.with_rows(_forgotten(row) for row in found.rows)
    return judge_by(fresh, tolerance)


def judge_by(table: Table, tolerance: Tolerance) -> Table:
    """`judge`, with what is to be said of thresholds that do not fit the table.

    Raises:
        BadInput: They fit nothing of it.
    """
    judged = judge(table, tolerance)
    known = tolerance.thresholds
    if known is None:
        return judged
    called = known.path or "the thresholds"
    if not known.sites:
        raise BadInput(
            f"{called} has thresholds for the model as a whole ({', '.join(known.metrics)}), none "
            "for layers",
            hint="`driftline validate` applies those; make others with --layer_io or calibrate",
        )
    names = LayerNames({row.key.site for row in table.rows})
    absent = [site for site in known.sites if names.find(site) is None]
    if len(absent) == len(known.sites):
        whose = f" ('{known.model_id}')" if known.model_id else ""
        raise BadInput(
            f"{called} speaks of no layer of this comparison: it seems to be for another "
            f"model{whose}",
            hint=f"it has '{known.sites[0]}', the comparison "
            f"'{next(iter(row.key.site for row in table.rows), '')}'",
        )
    notes = [note for note in judged.notes if not note.startswith(_NOTE)]
    notes += [f"{_NOTE}{note}" for note in known.notes]
    broken = [entry for entry in known.entries if not entry.usable]
    if broken:
        notes.append(
            f"{_NOTE}{len(broken)} thresholds are no number, {broken[0].metric} of "
            f"'{broken[0].site}' for one; they judge nothing"
        )
    if absent:
        notes.append(
            f"{_NOTE}{len(absent)} of {len(known.sites)} layers with a threshold are not in the "
            f"comparison, '{absent[0]}' for one"
        )
    silent = sum(row.reason.startswith(NO_THRESHOLD) for row in judged.rows)
    if silent:
        notes.append(f"{_NOTE}{silent} tensors that were compared have none, and are not judged")
    return judged.changed(notes=tuple(notes))


def _forgotten(row: Row) -> Row:
    """What was measured may be judged again; what could not be measured stays as it is."""
    if row.status == "incomparable" and row.metrics:
        return row.judged("unjudged")
    return row
