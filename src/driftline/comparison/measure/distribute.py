"""Distribution of pairs among workers; the rows are the same as those of a single process.

Some pairs are measured in this process: those of runs in memory, and those that a worker on another
machine could not read. `PairsWorker` is the worker's side. `execution` starts the workers and sends
them tasks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from driftline.alignment.plan import Pair
from driftline.alignment.recipe import Recipe, Source, step_from_text
from driftline.comparison.measure import scheduler
from driftline.comparison.measure.pair_rows import paired, repeated, repeats_of
from driftline.comparison.measure.scheduler import measure_pairs
from driftline.comparison.metrics.catalogue import Metric, requested
from driftline.comparison.table.row import Row
from driftline.errors import BadInput, DriftlineError
from driftline.execution.jobs import Job, Task, folder_for
from driftline.execution.slicing import groups
from driftline.formats.registry import open_run
from driftline.numerics import kernel
from driftline.numerics.dtypes import DTYPES
from driftline.numerics.fields import Summary
from driftline.runs.records import Blob, Record, TensorKey
from driftline.runs.run import Run
from driftline.settings import cores

if TYPE_CHECKING:
    from driftline.execution.jobs import Executor, Say


_EACH = 1 << 15
"""Cost of a pair besides its bytes, expressed in bytes: its description, and Python's own time."""
_LEAST = 4 << 20
_MOST = 1 << 30
_ROUNDS = 16
"""Number of tasks per worker: enough that the last worker to finish has little left to do."""
_FINE, _COARSE = 512, 4096
"""Smallest and largest number of pairs of a long plan that are sent together."""
_PROBES = 8
"""Number of tensors of one process that a remote machine must read before it gets work."""


def weight_of(pair: Pair) -> int:
    """Return the cost of a pair, in bytes to be read."""
    reference_records, candidate_records = _sides(pair)
    return _EACH + sum(_bytes(record) for record in {*reference_records, *candidate_records})


def distribute_pairs(
    pairs: Sequence[Pair],
    reference: Run,
    candidate: Run,
    executor: Executor,
    *,
    metrics: Sequence[Metric],
    elementwise: scheduler.Elementwise,
    threads: int | None = None,
    progress: scheduler.Progress | None = None,
) -> Sequence[Row]:
    """Return the rows of all pairs, in their order; see `scheduler.measure_pairs`.

    Raises:
        DriftlineError: A worker met an error that no row can report.
    """
    runs = (reference, candidate)
    if not all(run.opened for run in runs):
        # Local workers cannot see such a run either, but this process can do their work.
        if executor.elsewhere:
            name = next(run.name for run in runs if not run.opened)
            raise BadInput(
                f"run '{name}' is in the memory of this process, which no other machine sees",
                hint="write it to a disk that all machines share",
            )
        return scheduler.measure_pairs(
            pairs,
            reference,
            candidate,
            metrics=metrics,
            elementwise=elementwise,
            threads=threads,
            progress=progress,
        )
    # Another machine may mount another disk under the same path.
    probes = _probes(pairs, runs) if executor.elsewhere else []
    job = _job(runs, metrics, elementwise, threads, executor, probes)
    at_home = partial(
        scheduler.measure_pairs,
        reference=reference,
        candidate=candidate,
        metrics=metrics,
        elementwise=elementwise,
        threads=threads,
    )
    share = _share_in_stretches if scheduler.is_long(pairs) else _share_once
    return share(pairs, executor, job, at_home, progress)


_AtHome = Callable[[Sequence[Pair]], Sequence[Row]]


def _share_once(
    pairs: Sequence[Pair],
    executor: Executor,
    job: Job,
    at_home: _AtHome,
    progress: scheduler.Progress | None,
) -> Sequence[Row]:
    """Share all pairs at once; pairs of the same bytes are measured only once."""
    # Found before the pairs are shared, so that no two workers measure the same bytes.
    repeats = repeats_of(pairs)
    again = {later for group in repeats.values() for later in group}
    firsts = [index for index in range(len(pairs)) if index not in again]
    weights = [weight_of(pairs[index]) for index in firsts]
    near = [_place(0, pairs[index].reference) for index in firsts]
    # Many small tasks compensate for workers of different speed.
    count = _ROUNDS * max(executor.workers, 1)
    gathered = groups(weights, near, least=_least(job), most=_MOST, count=count)
    shares = [[firsts[n] for n in group] for group in gathered]
    tasks = [
        Task(
            partial(_told, pairs, share),
            sum(weights[n] for n in group),
            near[group[0]],
            _needs([pairs[index] for index in share]) if executor.elsewhere else (),
            str(pairs[share[0]].reference.key),
        )
        for share, group in zip(shares, gathered, strict=True)
    ]
    rows: list[Row | None] = [None] * len(pairs)
    finished = 0

    def take(task: int, answer: Any) -> None:
        nonlocal finished
        share = shares[task]
        answered = _answered(answer, [pairs[index] for index in share], executor, at_home)
        for index, row in zip(share, answered, strict=True):
            later = repeats.get(index, ())
            # Pairs with the same bytes under later names need no further work.
            for place in (index, *later):
                rows[place] = row if place == index else repeated(pairs[place], row)
            finished += 1 + len(later)
        if progress is not None:
            progress(finished, len(pairs))

    executor.run(job, tasks, take)
    return [row for row in rows if row is not None]


def _share_in_stretches(
    pairs: Sequence[Pair],
    executor: Executor,
    job: Job,
    at_home: _AtHome,
    progress: scheduler.Progress | None,
) -> Sequence[Row]:
    """Share consecutive pairs, encoded when they are sent; the rows go into a file in order."""
    from driftline.comparison.table.row_spool import SpoolWriter

    count = _ROUNDS * max(executor.workers, 1)
    stretches = _stretches(pairs, count, executor.elsewhere, _least(job))
    # The content of a task is created when it is sent, so that memory never holds a million pairs.
    tasks = [
        Task(
            partial(_told, pairs, range(stretch.start, stretch.stop)),
            stretch.weight,
            stretch.near,
            stretch.needs,
            stretch.called,
        )
        for stretch in stretches
    ]
    keeper = SpoolWriter()
    finished = 0

    def take(task: int, answer: Any) -> None:
        nonlocal finished
        start, stop = stretches[task][:2]
        keeper.put(_answered(answer, pairs[start:stop], executor, at_home), share=task)
        finished += stop - start
        if progress is not None:
            progress(finished, len(pairs))

    executor.run(job, tasks, take)
    return keeper.rows()


def _least(job: Job) -> int:
    """Return the smallest task in bytes; a user's metric may take a second for each pair."""
    # The number of bytes says nothing about how long a user's function takes.
    own = any(":" in address for address in job.about["metrics"])
    return min(_LEAST, _EACH) if own else _LEAST


class _Stretch(NamedTuple):
    """Consecutive pairs of one process."""

    start: int
    stop: int
    weight: int
    near: str
    needs: tuple[str, ...]
    called: str


def _stretches(pairs: Sequence[Pair], count: int, elsewhere: bool, least: int) -> list[_Stretch]:
    """Return about `count` stretches of similar weight, without listing all pairs."""
    stretches: list[_Stretch] = []
    for index, pair in enumerate(pairs):
        weight, near = weight_of(pair), _place(0, pair.reference)
        needs = _needs([pair]) if elsewhere else ()
        last = stretches[-1] if stretches else None
        # A stretch never crosses processes, so that a task needs the files of one process only.
        if last is None or last.near != near or index - last.start >= _FINE:
            stretches.append(
                _Stretch(index, index + 1, weight, near, needs, str(pair.reference.key))
            )
        else:
            needs = tuple(dict.fromkeys((*last.needs, *needs)))
            stretches[-1] = last._replace(stop=index + 1, weight=last.weight + weight, needs=needs)
    weights = [stretch.weight for stretch in stretches]
    gathered = groups(weights, [e.near for e in stretches], least=least, most=_MOST, count=count)
    together: list[_Stretch] = []
    for group in gathered:
        # A group may be too long for a single message.
        for first in range(0, len(group), _COARSE // _FINE):
            some = [stretches[n] for n in group[first : first + _COARSE // _FINE]]
            needs = tuple(dict.fromkeys(need for stretch in some for need in stretch.needs))
            total = sum(stretch.weight for stretch in some)
            together.append(some[0]._replace(stop=some[-1].stop, weight=total, needs=needs))
    return together


def _answered(
    answer: Any, pairs: Sequence[Pair], executor: Executor, at_home: _AtHome
) -> list[Row]:
    """Return the rows that a worker has sent for some pairs."""
    rows = rows_from_plain(answer, pairs)
    # A pair that no machine can read fails here again, with this machine's reason.
    unread = [n for n, row in enumerate(rows) if row.status == "incomparable"]
    if unread and executor.elsewhere:
        # A disk that only the worker cannot see is no finding, so this process tries itself.
        for n, row in zip(unread, at_home([pairs[n] for n in unread]), strict=True):
            rows[n] = row
    return rows


def _told(pairs: Sequence[Pair], share: Sequence[int]) -> list[Any]:
    return [pair_to_plain(pairs[index]) for index in share]


def _job(
    runs: tuple[Run, Run],
    metrics: Sequence[Metric],
    elementwise: scheduler.Elementwise,
    threads: int | None,
    executor: Executor,
    probes: list[list[Any]],
) -> Job:
    # A function of this process cannot be sent, but a name can be looked up anywhere.
    for metric in metrics:
        if metric.function is not None and not metric.address:
            raise BadInput(
                f"the metric '{metric.name}' is a function of this process, which no other one has",
                hint="put it into a file and name it FILE.py:FUNCTION",
            )
    threads_each = threads or (1 if executor.elsewhere else max(1, cores() // executor.workers))
    about = {
        "paths": [run.opened for run in runs],
        "names": [run.name for run in runs],
        "probes": probes,
        "metrics": [metric.address for metric in metrics if metric.address],
        "threads": threads_each,
        # A table for all dtypes, because a function cannot be sent.
        "elementwise": [
            [reference, candidate, *elementwise(reference, candidate)]
            for reference in DTYPES
            for candidate in DTYPES
        ],
    }
    # The workers must be able to read the files of users' metrics, like the runs.
    files = [metric.address for metric in metrics if ":" in metric.address]
    folder = folder_for(*(run.opened for run in runs), *files)
    return Job("pairs", about, folder, kernel.active())


def _sides(pair: Pair) -> tuple[Sequence[Record], Sequence[Record]]:
    """Return the records that are read from each run."""
    reference_recipe, candidate_recipe = pair.reference_recipe, pair.candidate_recipe
    return (
        (pair.reference,) if reference_recipe is None else reference_recipe.records,
        (pair.candidate,) if candidate_recipe is None else candidate_recipe.records,
    )


def _bytes(record: Record) -> int:
    if record.blob is not None:
        return record.blob.length
    dtype = DTYPES.get(record.dtype)
    kept = record.kept == "full" and not record.lost and dtype is not None
    return dtype.byte_count(math.prod(record.shape)) if kept and dtype is not None else 0


def _place(side: int, record: Record) -> str:
    return f"{side}:{record.key.rank}:{record.key.process}"


def _needs(pairs: Sequence[Pair]) -> tuple[str, ...]:
    """Return the processes of both runs to which some pairs belong.

    Pairs with summaries only are included, because a worker opens both runs anyway.
    """
    processes: dict[str, None] = {}
    for pair in pairs:
        for side, records in enumerate(_sides(pair)):
            processes |= {_place(side, record): None for record in records}
    return tuple(processes)


def _probes(pairs: Sequence[Pair], runs: tuple[Run, Run]) -> list[list[Any]]:
    """Return a few small tensors of different files for every process, with their digests.

    Tensors that this process cannot read itself are left out. A process without any gets a probe
    without a tensor, which only tests whether the run can be opened.
    """
    smallest: dict[str, dict[str, Record]] = {}
    for pair in pairs:
        for side, records in enumerate(_sides(pair)):
            for record in records:
                files = smallest.setdefault(_place(side, record), {})
                if record.blob is None or record.lost or not record.blob.length:
                    continue
                smaller = files.get(record.blob.shard)
                if smaller is None and len(files) >= _PROBES:
                    continue
                if smaller is None or record.blob.length < smaller.blob.length:  # type: ignore[union-attr]
                    files[record.blob.shard] = record
    probes: list[list[Any]] = []
    for place, files in smallest.items():
        side = int(place[0])
        # A tensor that this process cannot read would make every worker look faulty.
        readable = [record for record in files.values() if not runs[side].lost(record)]
        for record in readable:
            digest = kernel.digest(runs[side].raw(record))
            probes.append([side, place, record_to_plain(record), digest])
        if not readable:
            probes.append([side, place, None, ""])
    return probes


# The worker of a comparison: it opens the two runs and measures the pairs that it receives.


class PairsWorker:
    """Measures pairs. It is created from paths, metric names, and tolerances by dtypes."""

    def __init__(self, about: Mapping[str, Any]) -> None:
        self._paths: list[str] = about["paths"]
        self._names: list[str] = about["names"]
        self._probes: list[tuple[int, str, Any, str]] = [
            (side, place, record, digest) for side, place, record, digest in about["probes"]
        ]
        self._metrics = requested(about["metrics"])
        self._threads: int = about["threads"]
        outside = {
            (reference, candidate): (r, a) for reference, candidate, r, a in about["elementwise"]
        }
        self._outside = outside
        self._runs: dict[int, Run] = {}

    def absent(self) -> list[tuple[str, str]]:
        """Return the processes whose probes cannot be read or differ, each with the reason.

        A probe without a tensor only tests whether the run can be opened.
        """
        unreadable: list[tuple[str, str]] = []
        for side, place, record, digest in self._probes:
            path = self._paths[side]
            try:
                run = self._run(side)
                # Without a tensor, the probe has succeeded once the run is open.
                if record is None:
                    continue
                if kernel.digest(run.raw(record_from_plain(record))) != digest:
                    unreadable.append(
                        (place, f"holds another '{path}': not the one that is compared")
                    )
            except (DriftlineError, OSError, KeyError, ValueError) as trouble:
                unreadable.append((place, f"cannot read '{path}': {_said(trouble)}"))
        return unreadable

    def do(self, work: Sequence[Sequence[Any]], say: Say) -> Any:
        """Return the rows of some pairs."""
        del say
        pairs = [pair_from_plain(shown) for shown in work]
        rows = measure_pairs(
            pairs,
            self._run(0),
            self._run(1),
            metrics=self._metrics,
            elementwise=self._elementwise,
            threads=self._threads,
        )
        return rows_to_plain(rows)

    def _run(self, side: int) -> Run:
        if side not in self._runs:
            path = self._paths[side]
            other = self._runs.get(1 - side)
            same = other is not None and path == self._paths[1 - side]
            run = other if other is not None and same else open_run(path)
            run.name = self._names[side]
            self._runs[side] = run
        return self._runs[side]

    def _elementwise(self, reference: str, candidate: str) -> tuple[float, float]:
        return self._outside[reference, candidate]


def _said(trouble: Exception) -> str:
    if isinstance(trouble, KeyError):
        return "it has other tensors"
    return str(trouble) or type(trouble).__name__


# Pairs and rows as plain values for other processes, reduced to what measuring needs. A worker
# opens the same runs and receives the records, so that it need not read their indexes.


Names = dict[tuple[str, ...], int]
"""Index of each tuple of metric names; most rows of a task have the same names."""


def pair_to_plain(pair: Pair) -> list[Any]:
    """Return a pair without the fields that measuring does not need."""
    # A summary is long, and needed only if there are no values to measure.
    have_values = pair.reference.kept in _VALUES and pair.candidate.kept in _VALUES
    lost = pair.reference.lost or pair.candidate.lost
    with_summary = not have_values or bool(lost)
    recipes = (pair.reference_recipe, pair.candidate_recipe)
    return [
        _record(pair.reference, with_summary),
        _record(pair.candidate, with_summary),
        pair.by,
        pair.confidence,
        *(None if recipe is None else _recipe(recipe, with_summary) for recipe in recipes),
        pair.trouble,
    ]


def pair_from_plain(shown: Sequence[Any]) -> Pair:
    """The inverse of `pair_to_plain`."""
    reference, candidate, by, confidence, reference_recipe, candidate_recipe, trouble = shown
    return Pair(
        record_from_plain(reference),
        record_from_plain(candidate),
        by,
        confidence,
        None if reference_recipe is None else _recipe_from(reference_recipe),
        None if candidate_recipe is None else _recipe_from(candidate_recipe),
        trouble,
    )


_VALUES = ("full", "sample")


def record_to_plain(record: Record) -> list[Any]:
    """Return a record with all its fields."""
    return _record(record, True)


def _record(record: Record, with_summary: bool) -> list[Any]:
    summary = record.summary if with_summary else None
    # By position instead of name, because there are many records.
    return [*record[:11], None if summary is None else list(summary), *record[12:]]


def record_from_plain(shown: Sequence[Any]) -> Record:
    """The inverse of `record_to_plain`."""
    key, order, dtype, shape, alias, class_name, device, kept, digest, blob = shown[:10]
    stride, summary, placement, lost = shown[10:]
    return Record(
        TensorKey(*key),
        order,
        dtype,
        tuple(shape),
        alias,
        class_name,
        device,
        kept,
        digest,
        None if blob is None else Blob(*blob),
        stride,
        None if summary is None else Summary(*summary[:10], sketch=tuple(summary[10])),
        placement,
        lost,
    )


def _recipe(recipe: Recipe, with_summary: bool) -> dict[str, Any]:
    return {
        "sources": [
            _recipe(source, with_summary)
            if isinstance(source, Recipe)
            else _record(source, with_summary)
            for source in recipe.sources
        ],
        "steps": [step.text() for step in recipe.steps],
        "shape": list(recipe.shape),
    }


def _recipe_from(shown: Mapping[str, Any]) -> Recipe:
    sources: list[Source] = [
        _recipe_from(cast("Mapping[str, Any]", source))
        if isinstance(source, Mapping)
        else record_from_plain(source)
        for source in shown["sources"]
    ]
    steps = tuple(step_from_text(text) for text in shown["steps"])
    return Recipe(tuple(sources), steps, tuple(shown["shape"]))


def rows_to_plain(rows: Sequence[Row]) -> list[Any]:
    """Return measurements without the fields of their pairs: metric names, and a line per row."""
    kinds: Names = {}
    lines: list[list[Any]] = []
    for row in rows:
        metrics = row.metrics
        # Rows with the same metrics share one list of names.
        names = kinds.setdefault(tuple(metrics), len(kinds))
        values = [_number(value) for value in metrics.values()]
        line: list[Any] = [names, values]
        # Most rows were measured from values and need no further fields.
        if row.status != "unjudged" or row.reason or row.estimated or row.basis != "values":
            line += [row.status, row.reason, row.basis, row.estimated, row.severity]
        lines.append(line)
    return [list(kinds), lines]


def rows_from_plain(shown: Sequence[Any], pairs: Sequence[Pair]) -> list[Row]:
    """The inverse of `rows_to_plain`, for the pairs that were measured."""
    kinds, lines = shown
    rows: list[Row] = []
    for pair, line in zip(pairs, lines, strict=True):
        metrics = dict(zip(kinds[line[0]], line[1], strict=True))
        # The short form of a row without further fields.
        if len(line) == 2:
            rows.append(paired(pair, "values", metrics))
            continue
        status, reason, basis, estimated, severity = line[2:]
        row = paired(pair, basis, metrics)
        rows.append(
            row._replace(
                status=status, reason=reason, estimated=tuple(estimated), severity=severity
            )
        )
    return rows


def _number(value: Any) -> Any:
    """Convert numbers of numpy to those of Python, with the same bits."""
    if type(value) in (float, int):
        return value
    return int(value) if isinstance(value, int) else float(value)
