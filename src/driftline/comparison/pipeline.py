"""The one comparison: two runs are prepared, measured, given evidence, and judged.

    prepare -> measure -> evidence -> judge -> verdict

`compare`, its shards, live models, reports, the viewer, diagnoses and dialects all come through
here, so that one question has one answer. Whatever reads a run happens in `Comparison.measure` and
`Comparison.masked`; judging reads rows only. How a pair is measured, what a rule of evidence looks
for and what a limit is, the packages below know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from driftline.alignment.align import align_runs
from driftline.alignment.plan import Pair, Plan
from driftline.comparison.measure.assemble import (
    lone_rows,
    sides_of,
    with_lone_rows,
    with_replicas,
)
from driftline.comparison.measure.scheduler import Elementwise, Progress, measure_pairs
from driftline.comparison.metrics.catalogue import STANDARD, Metric
from driftline.comparison.options import CompareOptions, Limits
from driftline.comparison.table.files import open_table
from driftline.comparison.table.row import Column, Row
from driftline.comparison.table.structure import NO_STRUCTURE, Structure
from driftline.comparison.table.table import Table
from driftline.comparison.tolerance.tolerance import Limit, Tolerance, limits_from
from driftline.comparison.verdict.judge import judge
from driftline.comparison.verdict.site_judgement import NO_EVIDENCE
from driftline.comparison.verdict.status import Evidence
from driftline.errors import BadInput
from driftline.runs.index import uncollected
from driftline.runs.records import TensorKey
from driftline.runs.run import Run

if TYPE_CHECKING:
    from _typeshed import StrPath

    from driftline.comparison.differences.difference import Difference
    from driftline.comparison.evidence.second_look import SecondLook
    from driftline.comparison.tolerance.thresholds import Thresholds
    from driftline.execution.jobs import Executor

Source: TypeAlias = "Run | StrPath"
"""A run, or the path of one or of a foreign dump."""


# --- measurers


@dataclass(frozen=True, slots=True)
class MeasureRequest:
    """What a measurer is asked to do with pairs.

    Attributes:
        reference: The one run.
        candidate: The other.
        metrics: What is measured.
        elementwise: What `outside_share` counts as outside, by the dtypes of a pair.
        threads: Worker threads; one per usable core when not given.
        progress: Called with (pairs done, pairs in all).
    """

    reference: Run
    candidate: Run
    metrics: tuple[Metric, ...]
    elementwise: Elementwise
    threads: int | None = None
    progress: Progress | None = None


class Measurer(Protocol):
    """Measures pairs: in this process, in others, from memory."""

    def rows(self, pairs: Sequence[Pair], request: MeasureRequest) -> Sequence[Row]:
        """A row for each pair, in their order."""
        ...


class LocalMeasurer:
    """Measures in this process."""

    def rows(self, pairs: Sequence[Pair], request: MeasureRequest) -> Sequence[Row]:
        return measure_pairs(
            pairs,
            request.reference,
            request.candidate,
            metrics=request.metrics,
            elementwise=request.elementwise,
            threads=request.threads,
            progress=request.progress,
        )


class DistributedMeasurer:
    """Shares pairs out among the workers of an executor."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def rows(self, pairs: Sequence[Pair], request: MeasureRequest) -> Sequence[Row]:
        # Most comparisons run in one process and need none of it.
        from driftline.comparison.measure.distribute import distribute_pairs

        return distribute_pairs(
            pairs,
            request.reference,
            request.candidate,
            self._executor,
            metrics=request.metrics,
            elementwise=request.elementwise,
            threads=request.threads,
            progress=request.progress,
        )


class RowCache:
    """Measures what it has not measured before, for runs that grow while somebody looks at them.

    A line of a run's index is final once it is written, so a pair of two known lines has a known
    row. It is for one comparison: the options must be the same each time.

    Attributes:
        measured: How many pairs were measured, all calls together.
    """

    def __init__(self) -> None:
        self._rows: dict[Pair, Row] = {}
        self.measured = 0

    def rows(self, pairs: Sequence[Pair], request: MeasureRequest) -> Sequence[Row]:
        fresh = tuple(pair for pair in pairs if pair not in self._rows)
        new = LocalMeasurer().rows(fresh, request)
        self.measured += len(fresh)
        rows_by_pair = {**self._rows, **dict(zip(fresh, new, strict=True))}
        rows = [rows_by_pair[pair] for pair in pairs]
        # Only what could be measured is final: a tensor that is not whole yet will be.
        self._rows = {
            pair: row for pair, row in zip(pairs, rows, strict=True) if row.status == "unjudged"
        }
        return rows


# --- the comparison


class PairPlaces(NamedTuple):
    """Some of the pairs of a plan, such as those of one shard.

    Attributes:
        places: Their numbers in the plan.
        pairs: The pairs themselves.
        with_lone: Whether tensors without a partner belong to them; to one shard they do.
    """

    places: Sequence[int]
    pairs: Sequence[Pair]
    # A tensor without a partner belongs to no pair, so exactly one shard must tell of it.
    with_lone: bool = False


class MeasuredRows(NamedTuple):
    """What was measured and looked up; nothing of it is judged.

    Attributes:
        rows: A row for each pair, in their order, with evidence.
        columns: What their metrics mean.
        missing: Rows of tensors that only the reference has.
        extra: Rows of tensors that only the candidate has.
    """

    rows: Sequence[Row]
    columns: tuple[Column, ...]
    missing: Sequence[Row]
    extra: Sequence[Row]


class Comparison:
    """Two opened runs, the plan of what is compared with what, and what was asked for."""

    def __init__(self, reference: Run, candidate: Run, plan: Plan, options: CompareOptions) -> None:
        self.reference = reference
        self.candidate = candidate
        self.plan = plan
        self.options = options

    def measure(
        self,
        which: PairPlaces | None = None,
        by: Measurer | None = None,
        progress: Progress | None = None,
    ) -> MeasuredRows:
        """Measure pairs, and look up in the runs what a fair judgement of them needs.

        Args:
            which: Only these pairs; all of the plan, and its lone tensors, when not given.
            by: Who measures; whoever the options name, when not given.
            progress: Called with (pairs done, pairs in all).

        Raises:
            DriftlineError: Something is wrong that no row can tell. What cannot be read is a row.
        """
        options, plan = self.options, self.plan
        if by is None:
            executor = options.execution.workers()
            by = LocalMeasurer() if executor is None else DistributedMeasurer(executor)
        request = MeasureRequest(
            self.reference,
            self.candidate,
            options.metrics,
            options.elementwise,
            options.execution.threads,
            progress,
        )
        rows = by.rows(plan.pairs if which is None else which.pairs, request)
        places = None if which is None else which.places
        rows, columns = with_replicas(plan, rows, self.reference, self.candidate, places)
        # Loaded late: the plan is printed before, while tensors are read already.
        from driftline.comparison.evidence.rules import with_evidence

        rows = with_evidence(rows, plan.pairs, self.reference, self.candidate)
        missing: Sequence[Row] = ()
        extra: Sequence[Row] = ()
        if which is None or which.with_lone:
            missing, extra = self._lone_rows()
        # Standard metrics first, what evidence adds last: readers of files rely on the
        # order.
        columns = (*(metric.column for metric in options.metrics), *columns)
        return MeasuredRows(rows, columns, missing, extra)

    def _lone_rows(self) -> tuple[Sequence[Row], Sequence[Row]]:
        """Rows of what has no partner; conversions of a compiler are compared with themselves."""
        if not self.plan.missing and not self.plan.extra:
            return (), ()
        from driftline.comparison.evidence.conversions import with_conversions

        missing, extra = lone_rows(self.plan)
        metrics, elementwise = self.options.metrics, self.options.elementwise
        return (
            with_conversions(missing, self.reference, metrics, elementwise),
            with_conversions(extra, self.candidate, metrics, elementwise),
        )

    def table(self, measured: MeasuredRows) -> Table:
        """The table of all pairs and lone tensors, not judged yet."""
        reference, candidate = sides_of(self.plan, self.reference, self.candidate)
        # Loaded late: most runs of other tools have nothing to say of a training.
        from driftline.comparison.training.update_order import training_report

        differences = self.differences()
        return Table(
            rows=with_lone_rows(self.plan, measured.rows, measured.missing, measured.extra),
            columns=measured.columns,
            reference=reference,
            candidate=candidate,
            notes=self.plan.notes,
            differences=differences,
            structure=self.structure(measured.rows),
            training=training_report(self.reference, self.candidate, self.plan, differences),
        )

    def differences(self) -> tuple[Difference, ...] | None:
        """What differs between the two models; None where a run has no facts about its model."""
        # Loaded late: most runs of other tools have no facts about a model.
        from driftline.comparison.differences.find import differences_of

        return differences_of(self.reference, self.candidate, self.plan)

    def structure(self, rows: Iterable[Row] | None = None) -> Structure:
        """What the runs know of their model; nothing where limits were asked for.

        Args:
            rows: Of all pairs, if they are at hand.
        """
        # Sites are judged only by default.
        if self.options.tolerance.explicit:
            return NO_STRUCTURE
        from driftline.comparison.verdict.growth import structure_of

        return structure_of(self.reference, self.candidate, self.plan, rows)

    def masked(self, suspects: Iterable[Row]) -> list[Row]:
        """Rows measured again without pads: evidence for those that fail, or may fail."""
        if not self.options.may_leave_out_pads:
            return []
        from driftline.comparison.evidence.padding import masked_rows

        return masked_rows(
            suspects,
            self.plan,
            self.reference,
            self.candidate,
            self.options.metrics,
            self.options.elementwise,
        )

    def masked_for_shard(self, measured: MeasuredRows) -> list[Row]:
        """The same for some of the rows: which of them fail, only the table of all can say."""
        if not self.options.may_leave_out_pads:
            return []
        return self.masked(measured.rows)

    def judged(
        self,
        by: Measurer | None = None,
        progress: Progress | None = None,
        evidence: Evidence = NO_EVIDENCE,
    ) -> Table:
        """The judged table of all pairs; the first two arguments as `measure` takes them.

        Args:
            by: Who measures.
            progress: Called with (pairs done, pairs in all).
            evidence: What is known of the sites besides the two runs.
        """
        return self.settled(self.table(self.measure(by=by, progress=progress)), evidence)

    def settled(self, table: Table, evidence: Evidence = NO_EVIDENCE) -> Table:
        """A measured table, judged; with whatever of the runs may excuse a failing row."""
        from driftline.comparison.evidence.second_look import settle

        judged = settle(
            table,
            lambda measured: judge(measured, self.options.tolerance, evidence),
            self.second_look(),
            self.masked,
        )
        return with_placed_differences(judged)

    def second_look(self) -> SecondLook:
        """What looks again at tensors that make a site suspect."""
        # Loaded late: the plan is printed before, while tensors are read already.
        from driftline.comparison.evidence.second_look import SecondLook

        return SecondLook(self.reference, self.candidate, self.plan)


def with_placed_differences(table: Table) -> Table:
    """The table with its differences as seen from where the drift starts; no verdict changes."""
    if table.differences is None:
        return table
    from driftline.comparison.differences.find import placed

    return table.changed(differences=placed(table.differences, table))


class EvidenceSources(NamedTuple):
    """Where evidence other than the two runs is.

    Attributes:
        replay: What `driftline replay` wrote, or the same in memory.
        noise: What `driftline noise` wrote, or trusted runs.
        bisect: What `driftline bisect --format json` printed: a file of it, or the object.
    """

    replay: Any = None
    noise: Sequence[Any] = ()
    bisect: Mapping[str, Any] | StrPath | None = None


def prepare(
    reference: Source, candidate: Source, options: CompareOptions, plan: Plan | None = None
) -> Comparison:
    """Open two runs and say what is compared with what.

    Args:
        reference: What is right: a run, or the path of one.
        candidate: What is in question.
        options: What is asked for.
        plan: What `align` gave; nothing else is paired then.

    Raises:
        DriftlineError: A path that is no run, a glob that matches nothing, nothing in common.
    """
    reference_run, candidate_run = open_source(reference), open_source(candidate)
    # A plan that was given is taken as it is, also where runs have grown since.
    if plan is None:
        plan = align_runs(reference_run, candidate_run, options.paired_by)
        plan = _with_growing_reasons(plan, reference_run, candidate_run)
        align_options = options.align
        chosen = (("--site", align_options.sites), ("--port", align_options.ports))
        words = (f"{option} {', '.join(globs)}" for option, globs in chosen if globs)
        plan = plan._replace(selected=(*plan.selected, *words))
    return Comparison(reference_run, candidate_run, plan, options)


def run_comparison(
    reference: Source,
    candidate: Source,
    options: CompareOptions,
    *,
    plan: Plan | None = None,
    on_plan: Callable[[Plan], None] | None = None,
    by: Measurer | None = None,
    progress: Progress | None = None,
    evidence: EvidenceSources | None = None,
) -> Table:
    """The judged table of two runs.

    Args:
        reference: What is right: a run, or the path of one.
        candidate: What is in question.
        options: What is asked for.
        plan: What `align` gave; nothing else is paired then.
        on_plan: Called with the plan before any tensor is read.
        by: Who measures; whoever the options name, when not given.
        progress: Called with (pairs done, pairs in all).
        evidence: Where more evidence is.

    Raises:
        DriftlineError: As `prepare` and `Comparison.measure`; evidence of other runs.
    """
    with without_collector(options):
        comparison = prepare(reference, candidate, options, plan)
        if on_plan is not None:
            on_plan(comparison.plan)
        gathered = NO_EVIDENCE
        if evidence is not None and evidence != EvidenceSources():
            if options.tolerance.explicit:
                raise BadInput(
                    "limits were asked for, and they judge without other evidence",
                    hint="leave out the limits, or the replay, noise runs and bisection",
                )
            # Replays and noise runs are opened and judged by the diagnosis, for whoever asks.
            from driftline.diagnosis.api import gather_evidence

            gathered = gather_evidence(comparison, evidence).evidence
        return comparison.judged(by, progress, gathered)


def without_collector(options: CompareOptions) -> AbstractContextManager[None]:
    """Without the garbage collector, which would walk all records of two runs for nothing.

    Metrics of users may make cycles, ours do not.
    """
    return uncollected() if options.metrics == STANDARD else nullcontext()


# --- what Python programs call


def compare(
    reference: Source,
    candidate: Source,
    *,
    metrics: Sequence[str] = (),
    limits: Limits = None,
    rtol: float | None = None,
    atol: float | None = None,
    min_coverage: float | None = None,
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
    replay: Any = None,
    noise: Sequence[Any] = (),
    bisect: Mapping[str, Any] | StrPath | None = None,
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
        placements: `SITE=shard(AXIS)`: how the tensors of a sharded run are spread over its ranks.
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
        replay: The reference's modules applied to the candidate's inputs: what `driftline replay`
            wrote. Like the next two, evidence for the judgement of sites, as `diagnose` takes it.
        noise: Trusted executions in the candidate's number format: what `driftline noise` wrote,
            or plain runs.
        bisect: What `driftline bisect --format json` printed: a file of it, or the object.

    Raises:
        DriftlineError: A path, metric, glob or limit that cannot mean anything, or two runs that
            share no name. Numbers that differ are no exception: they are rows.
    """
    options = CompareOptions.of(
        metrics=metrics,
        limits=limits,
        rtol=rtol,
        atol=atol,
        min_coverage=min_coverage,
        thresholds=thresholds,
        sites=sites,
        ports=ports,
        maps=maps,
        mapping=mapping,
        placements=placements,
        masks=masks,
        step_map=step_map,
        plan=None if isinstance(plan, Plan) else plan,
        structural=structural,
        threads=threads,
        jobs=jobs,
        executor=executor,
    )
    return run_comparison(
        reference,
        candidate,
        options,
        plan=plan if isinstance(plan, Plan) else None,
        on_plan=planned,
        progress=progress,
        evidence=EvidenceSources(replay, noise, bisect),
    )


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
    """What `compare` would compare with what; nothing is read but the two indexes.

    Args:
        reference: What is right: a run, or the path of one (or of a file of tensors).
        candidate: What is in question.
        sites: Globs; only sites that match one of them. All, when none is given.
        ports: Only these ports. All, when none is given.
        maps: `REFERENCE=CANDIDATE`, such as `model.*=*`; a star stands for the same text on both
            sides.
        mapping: A file of such pairs, or the folder of an `op_mapping_file.json`.
        placements: How tensors of a sharded side are spread over ranks, such as `attn.*=shard(1)`:
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
    options = CompareOptions.of(
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
    return prepare(reference, candidate, options).plan


def check(
    table: Table | StrPath,
    *,
    thresholds: Thresholds | StrPath | None = None,
    limits: Mapping[str, float] | Sequence[Limit] | None = None,
    slack: float = 1.0,
    min_coverage: float | None = None,
    model: str | None = None,
) -> Table:
    """Judge a comparison again.

    Args:
        table: A table, or the folder that `compare -o` wrote.
        thresholds: What `calibrate` gave, or the path of a thresholds file. Tensors of layers it
            does not speak of are not judged by it.
        limits: Metric → worst value that passes, for every tensor.
        slack: How many times its threshold a tensor may reach.
        min_coverage: The share of all tensors that must be judged for a pass; without it, 90 % of
            the calls of leaves.
        model: Refuse thresholds that are for another model.

    Raises:
        BadInput: Thresholds that speak of no layer of this table, or an unknown metric.
        BadFile: No table or no thresholds file there.
    """
    subject = table if isinstance(table, Table) else open_table(table)
    if limits is None or isinstance(limits, Mapping):
        limits = limits_from(limits, subject.columns)
    layer_limits = None
    if thresholds is not None:
        from driftline.comparison.tolerance.thresholds import Thresholds, load_thresholds

        layer_limits = (
            thresholds if isinstance(thresholds, Thresholds) else load_thresholds(thresholds)
        )
        if model is not None:
            layer_limits.require_model(model)
    tolerance = Tolerance(
        tuple(limits), min_coverage=min_coverage, thresholds=layer_limits, slack=slack
    )
    return judge_again(subject, tolerance)


def judge_again(
    table: Table, tolerance: Tolerance | None = None, evidence: Evidence | None = None
) -> Table:
    """A table that was judged before, judged by another tolerance or other evidence.

    Args:
        table: The table.
        tolerance: What is allowed; the default when not given.
        evidence: What is known besides; what the table keeps, when not given.

    Raises:
        BadInput: Thresholds that speak of no layer of this table.
    """
    return judge(unjudged(table), tolerance, evidence)


def unjudged(table: Table) -> Table:
    """What was measured for a table, before it was judged."""
    return table.with_rows(map(_unjudged, table.rows))


def _unjudged(row: Row) -> Row:
    """What was measured may be judged again; what could not be measured stays as it is."""
    # It was compared, and only a limit was missing; another tolerance may have one.
    if row.status == "incomparable" and row.metrics:
        return row.judged("unjudged")
    return row


def open_source(source: Source) -> Run:
    """A run as it is, or opened from its path, in whatever format it is."""
    if isinstance(source, Run):
        return source
    from driftline.formats.registry import open_run

    return open_run(source)


def _with_growing_reasons(plan: Plan, reference: Run, candidate: Run) -> Plan:
    """What a run lacks that is still being written may come yet: the rows say so."""
    reasons: dict[tuple[str, TensorKey], str] = {}
    for side, lone, other, run in (
        ("reference", plan.missing, "candidate", candidate),
        ("candidate", plan.extra, "reference", reference),
    ):
        if lone and run.growing:
            reason = f"not yet in the {other}, which is still being written"
            reasons |= {(side, record.key): reason for record in lone}
    return plan._replace(reasons={**plan.reasons, **reasons}) if reasons else plan
