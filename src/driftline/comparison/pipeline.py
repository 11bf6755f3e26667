"""The comparison pipeline: two runs are prepared, measured, given evidence, and judged.

    prepare -> measure -> evidence -> judge -> verdict

`compare`, its shards, live models, reports, the viewer, diagnoses and dialects all use this
pipeline, so that a question has the same answer everywhere. Tensors are read by
`Comparison.measure`, by `Comparison.masked` and by second looks; `judge` reads rows only. The
packages below define how a pair is measured, what an evidence rule examines and what a limit is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from driftline.alignment.align import align_runs
from driftline.alignment.plan import Pair, Plan
from driftline.comparison.measure.assemble import lone_rows, sides_of, with_lone_rows, with_replicas
from driftline.comparison.measure.scheduler import Elementwise, Progress, measure_pairs
from driftline.comparison.metrics.catalogue import STANDARD, Metric
from driftline.comparison.options import CompareOptions, Limits
from driftline.comparison.table.files import open_table
from driftline.comparison.table.row import Column, Row
from driftline.comparison.table.structure import NO_STRUCTURE, Structure
from driftline.comparison.table.table import Table
from driftline.comparison.tolerance.tolerance import Limit, Tolerance, limits_from
from driftline.comparison.verdict.judge import judge
from driftline.comparison.verdict.status import NO_EVIDENCE, Evidence
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
"""A run, or the path of a run or of a foreign dump."""


# --- measurers


@dataclass(frozen=True, slots=True)
class MeasureRequest:
    """The options for measuring pairs.

    Attributes:
        reference: The reference run.
        candidate: The candidate run.
        metrics: The metrics to measure.
        elementwise: Tolerances of `outside_share`, by the dtypes of a pair.
        threads: Number of worker threads; one per usable core if None.
        progress: Called with (pairs done, total pairs).
    """

    reference: Run
    candidate: Run
    metrics: tuple[Metric, ...]
    elementwise: Elementwise
    threads: int | None = None
    progress: Progress | None = None


class Measurer(Protocol):
    """Measures pairs: in this process, in other processes, or from moments in memory."""

    def rows(self, pairs: Sequence[Pair], request: MeasureRequest) -> Sequence[Row]:
        """Return a row for each pair, in their order."""
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
    """Distributes pairs among the workers of an executor."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def rows(self, pairs: Sequence[Pair], request: MeasureRequest) -> Sequence[Row]:
        # Imported on use, because most comparisons run in one process.
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
    """Measures only pairs that it has not measured before, for runs that grow while being viewed.

    A line of a run's index never changes once it is written, so a pair of two known lines keeps its
    row. A cache serves one comparison: the options must be the same each time.

    Attributes:
        measured: Number of pairs measured so far, over all calls.
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
        # Only measured rows are cached: a tensor that is incomplete now may be complete later.
        self._rows = {
            pair: row for pair, row in zip(pairs, rows, strict=True) if row.status == "unjudged"
        }
        return rows


# --- the comparison


class PairPlaces(NamedTuple):
    """Some of the pairs of a plan, such as those of one shard.

    Attributes:
        places: Their indices in the plan.
        pairs: The pairs themselves.
        with_lone: Whether tensors without a partner are included, as in exactly one shard.
    """

    places: Sequence[int]
    pairs: Sequence[Pair]
    # A tensor without a partner belongs to no pair, so exactly one shard must report it.
    with_lone: bool = False


class MeasuredRows(NamedTuple):
    """Measured rows with evidence, not judged yet.

    Attributes:
        rows: A row for each pair, in their order, with evidence.
        columns: Meaning of their metrics.
        missing: Rows of tensors that only the reference has.
        extra: Rows of tensors that only the candidate has.
    """

    rows: Sequence[Row]
    columns: tuple[Column, ...]
    missing: Sequence[Row]
    extra: Sequence[Row]


class Comparison:
    """Two open runs, the plan that pairs their tensors, and the options."""

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
        """Measure pairs, and collect the evidence that a fair judgement of them needs.

        Args:
            which: The pairs to measure; all pairs of the plan and tensors without a partner if
                None.
            by: The measurer; chosen by the options if None.
            progress: Called with (pairs done, total pairs).

        Raises:
            DriftlineError: An error that no row can report. An unreadable tensor is reported by its
                row.
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
        # Imported late, because the plan is printed first, while tensors are already being read.
        from driftline.comparison.evidence.rules import with_evidence

        rows = with_evidence(rows, plan.pairs, self.reference, self.candidate)
        missing: Sequence[Row] = ()
        extra: Sequence[Row] = ()
        if which is None or which.with_lone:
            missing, extra = self._lone_rows()
        # Standard metrics come first and those of evidence last; readers of files rely on this
        # order.
        columns = (*(metric.column for metric in options.metrics), *columns)
        return MeasuredRows(rows, columns, missing, extra)

    def _lone_rows(self) -> tuple[Sequence[Row], Sequence[Row]]:
        """Return rows of tensors without a partner; a conversion is compared with its own input."""
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
        """Return the table of all pairs and of tensors without a partner, not judged yet."""
        reference, candidate = sides_of(self.plan, self.reference, self.candidate)
        # Imported late, because most runs of other tools record no training.
        from driftline.comparison.training.update_order import training_report

        differences = self.differences()
        structure = self.structure(measured.rows)
        notes = self.plan.notes
        if structure is not NO_STRUCTURE:
            from driftline.comparison.verdict.growth import unseen_codes

            notes = (*notes, *unseen_codes(self.candidate, structure, measured.rows))
        return Table(
            rows=with_lone_rows(self.plan, measured.rows, measured.missing, measured.extra),
            columns=measured.columns,
            reference=reference,
            candidate=candidate,
            notes=notes,
            differences=differences,
            structure=structure,
            training=training_report(self.reference, self.candidate, self.plan, differences),
        )

    def differences(self) -> tuple[Difference, ...] | None:
        """Return the differences between the two models; None if a run has no model facts."""
        # Imported late, because most runs of other tools have no facts about a model.
        from driftline.comparison.differences.find import differences_of

        return differences_of(self.reference, self.candidate, self.plan)

    def structure(self, rows: Iterable[Row] | None = None) -> Structure:
        """Return the runs' knowledge about their model; empty if limits were requested.

        Args:
            rows: Rows of all pairs, if available.
        """
        # Sites are judged only by the default limits.
        if self.options.tolerance.explicit:
            return NO_STRUCTURE
        from driftline.comparison.verdict.growth import structure_of

        return structure_of(self.reference, self.candidate, self.plan, rows)

    def masked(self, suspects: Iterable[Row]) -> list[Row]:
        """Return rows measured again without pads: evidence for rows that fail or may fail."""
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
        """Return the same for a shard; only the whole table shows which of its rows fail."""
        if not self.options.may_leave_out_pads:
            return []
        return self.masked(measured.rows)

    def judged(
        self,
        by: Measurer | None = None,
        progress: Progress | None = None,
        evidence: Evidence = NO_EVIDENCE,
    ) -> Table:
        """Return the judged table of all pairs.

        Args:
            by: The measurer, as in `measure`.
            progress: Called with (pairs done, total pairs).
            evidence: What is known about the sites besides the two runs.
        """
        return self.settled(self.table(self.measure(by=by, progress=progress)), evidence)

    def settled(self, table: Table, evidence: Evidence = NO_EVIDENCE) -> Table:
        """Judge a measured table, with everything in the runs that may excuse a failing row."""
        from driftline.comparison.evidence.second_look import settle

        judged = settle(
            table,
            lambda measured: judge(measured, self.options.tolerance, evidence),
            self.second_look(),
            self.masked,
        )
        return with_placed_differences(judged)

    def second_look(self) -> SecondLook:
        """Return an object that examines tensors of suspect sites a second time."""
        # Imported late, because the plan is printed first, while tensors are already being read.
        from driftline.comparison.evidence.second_look import SecondLook

        return SecondLook(self.reference, self.candidate, self.plan)


def with_placed_differences(table: Table) -> Table:
    """Return the table with its differences placed relative to the start of the drift."""
    if table.differences is None:
        return table
    from driftline.comparison.differences.find import placed

    return table.changed(differences=placed(table.differences, table))


class EvidenceSources(NamedTuple):
    """Sources of evidence other than the two runs.

    Attributes:
        replay: Result of `driftline replay`, or the same in memory.
        noise: Results of `driftline noise`, or trusted runs.
        bisect: Output of `driftline bisect --format json`, as a file or as an object.
    """

    replay: Any = None
    noise: Sequence[Any] = ()
    bisect: Mapping[str, Any] | StrPath | None = None


def prepare(
    reference: Source, candidate: Source, options: CompareOptions, plan: Plan | None = None
) -> Comparison:
    """Open two runs and pair their tensors.

    Args:
        reference: The run that is right, or its path.
        candidate: The run to check, or its path.
        options: The options of the comparison.
        plan: A plan from `align`; no other tensors are paired then.

    Raises:
        DriftlineError: A path is not a run, a glob matches nothing, or nothing is in common.
    """
    reference_run, candidate_run = open_source(reference), open_source(candidate)
    # A given plan is used unchanged, even if the runs have grown since.
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
    """Return the judged table of two runs.

    Args:
        reference: The run that is right, or its path.
        candidate: The run to check, or its path.
        options: The options of the comparison.
        plan: A plan from `align`; no other tensors are paired then.
        on_plan: Called with the plan before any tensor is read.
        by: The measurer; chosen by the options if None.
        progress: Called with (pairs done, total pairs).
        evidence: Sources of further evidence.

    Raises:
        DriftlineError: As in `prepare` and `Comparison.measure`, or evidence of other runs.
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
            # Imported on use: the diagnosis package opens and evaluates replays and noise runs.
            from driftline.diagnosis.api import gather_evidence

            gathered = gather_evidence(comparison, evidence).evidence
        return comparison.judged(by, progress, gathered)


def without_collector(options: CompareOptions) -> AbstractContextManager[None]:
    """Return a context without the garbage collector, which would visit all records in vain.

    Users' metrics may create reference cycles; the standard metrics do not.
    """
    return uncollected() if options.metrics == STANDARD else nullcontext()


# --- functions of the Python API


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
        reference: The trusted run, or its path (or that of a file of tensors).
        candidate: The run to test.
        metrics: Metrics to measure besides the standard ones: `kl`, the name of a plug-in, or
            `file.py:function`.
        limits: The worst value that passes for each metric, in place of the default limits, which
            depend on the coarser dtype of a pair.
        rtol: With `atol`, every element must satisfy `|c - r| <= atol + rtol |r|`.
        atol: See `rtol`.
        min_coverage: The fraction of all tensors that must be compared for a pass. By default 90 %
            of the calls of leaf modules must be.
        thresholds: Limits for each layer: a result of `calibrate`, or the path of a thresholds
            file. Tensors that it does not name are measured, but not judged by it.
        sites: Globs; only sites that match one of them are compared. All by default.
        ports: Only these ports are compared. All by default.
        maps: `REFERENCE=CANDIDATE` for sites with different names; see `align`.
        mapping: A file of such pairs; see `align`.
        placements: `SITE=shard(AXIS)`: how the tensors of a sharded run are distributed over its
            ranks; see `align`.
        masks: Files with the positions that count ([batch, tokens]), or `captured` for the
            attention_mask in a run. By default, rows that fail are measured again without the
            padding of the captured attention_mask; with `none`, padding counts like other
            positions.
        step_map: The candidate's step for each step of the reference.
        plan: A plan from `align`, or the path of a saved one; nothing else is paired then.
        structural: Whether tensors with different names may be paired; see `align`.
        threads: Number of worker threads. Default: one per usable core.
        jobs: Number of worker processes that share the pairs. The table is bitwise the same.
        executor: `ray` or `ray://HOST:PORT` to run the workers on a Ray cluster.
        planned: Called with the plan before any tensor is read.
        progress: Called with (pairs done, pairs in total).
        replay: A folder that `driftline replay` wrote: results of the reference's modules on the
            candidate's inputs. This and the next two are evidence for judging sites, as in
            `diagnose`.
        noise: Trusted executions in the candidate's number format: folders that `driftline noise`
            wrote, or plain runs.
        bisect: The output of `driftline bisect --format json`: a file or the parsed object.

    Raises:
        DriftlineError: A path, metric, glob or limit is invalid, or the runs have no name in
            common. Numbers that differ raise nothing: they are rows of the table.
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
    """Return the plan of a comparison: which tensors are compared with each other. Reads no tensor.

    Args:
        reference: The trusted run, or its path (or that of a file of tensors).
        candidate: The run to test.
        sites: Globs; only sites that match one of them. All by default.
        ports: Only these ports. All by default.
        maps: `REFERENCE=CANDIDATE`, such as `model.*=*`; a star stands for the same text on both
            sides.
        mapping: A file of such pairs, or the folder of an `op_mapping_file.json`.
        placements: How tensors of a sharded side are distributed over ranks, such as
            `attn.*=shard(1)`: shard(AXIS), replicate or partial(sum).
        masks: Files with the positions that count ([batch, tokens]), or `captured` for the
            attention_mask in a run; `none` leaves nothing out.
        step_map: The candidate's step for each step of the reference, if the runs count steps
            differently.
        plan: A saved plan; it takes precedence over every rule.
        structural: Whether tensors with different names may be paired by class, shape and
            dataflow.

    Raises:
        DriftlineError: A path is not a run, a glob matches nothing, or the runs have no name in
            common.
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
        thresholds: A result of `calibrate`, or the path of a thresholds file. Tensors of layers
            that it does not name are not judged by it.
        limits: The worst value that passes for each metric, for every tensor.
        slack: How many times its threshold a tensor may reach.
        min_coverage: The fraction of all tensors that must be judged for a pass. By default 90 % of
            the calls of leaf modules must be.
        model: Refuse thresholds that are for another model.

    Raises:
        BadInput: The thresholds name no layer of this table, or a metric is unknown.
        BadFile: There is no table or no thresholds file.
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
    """Judge a table again with another tolerance or other evidence.

    Args:
        table: The table.
        tolerance: The limits; the default limits if None.
        evidence: Further evidence; that stored in the table if None.

    Raises:
        BadInput: No layer of this table has a threshold.
    """
    return judge(unjudged(table), tolerance, evidence)


def unjudged(table: Table) -> Table:
    """Return the table as it was measured, before it was judged."""
    return table.with_rows(map(_unjudged, table.rows))


def _unjudged(row: Row) -> Row:
    """Return a row that may be judged again; a row that could not be measured stays as it is."""
    # The row was compared and only lacked a limit, which another tolerance may have.
    if row.status == "incomparable" and row.metrics:
        return row.judged("unjudged")
    return row


def open_source(source: Source) -> Run:
    """Return the given run, or open it from its path, in any known format."""
    if isinstance(source, Run):
        return source
    from driftline.formats.registry import open_run

    return open_run(source)


def _with_growing_reasons(plan: Plan, reference: Run, candidate: Run) -> Plan:
    """Add reasons for tensors that a run lacks because it is still being written."""
    reasons: dict[tuple[str, TensorKey], str] = {}
    for side, lone, other, run in (
        ("reference", plan.missing, "candidate", candidate),
        ("candidate", plan.extra, "reference", reference),
    ):
        if lone and run.growing:
            reason = f"not yet in the {other}, which is still being written"
            reasons |= {(side, record.key): reason for record in lone}
    return plan._replace(reasons={**plan.reasons, **reasons}) if reasons else plan
