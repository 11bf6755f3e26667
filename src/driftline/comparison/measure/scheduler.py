"""Pairs become rows: two runs are read once, in bounded memory, on all cores.

Large tensors are cut into blocks that threads share. Small pairs are measured by the calling
thread, with as little Python as possible. Long plans are measured a few thousand pairs at a time,
and their rows are stored in a file. This file does not know what a metric means, nor whether a
value is allowed.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from driftline.alignment.plan import Pair, Plan
from driftline.comparison.measure.assemble import assembled
from driftline.comparison.measure.operands import (
    measure_moments,
    measure_values,
    open_values,
    open_window,
)
from driftline.comparison.measure.pair_rows import (
    has_recipe,
    incompatibility,
    paired,
    placement_kind,
    repeated,
    repeats_of,
)
from driftline.comparison.measure.summaries import ESTIMATED, row_without_values
from driftline.comparison.metrics.catalogue import STANDARD, Metric
from driftline.comparison.metrics.from_moments import needs_definition, standard
from driftline.comparison.table.row import LOST, MANY, Number, Row
from driftline.comparison.table.row_spool import RowSpool, SpoolWriter
from driftline.comparison.table.table import Table
from driftline.errors import DriftlineError, Unreachable
from driftline.numerics import kernel
from driftline.numerics.dtypes import DTYPES, DType
from driftline.numerics.fields import PairMoments
from driftline.runs.files import mapped_file
from driftline.runs.records import Record
from driftline.runs.run import Memory, Run
from driftline.settings import cores

if TYPE_CHECKING:
    from driftline.execution.jobs import Executor


BLOCK = 4 << 20
"""Elements per block of a large tensor: enough to keep a core busy, few enough for many threads."""


def blocks_of(count: int) -> list[tuple[int, int]]:
    """Return the (start, stop) elements of each block; most tensors have a single block."""
    if count <= 2 * BLOCK:
        return [(0, count)]
    return [(offset, min(offset + BLOCK, count)) for offset in range(0, count, BLOCK)]


# Long plans are measured a few thousand pairs at a time, and their rows are stored in a file.


WINDOW = 4096

Told = Callable[[int, int], None]


def windows(pairs: Sequence[Pair], size: int = WINDOW) -> Iterator[list[Pair]]:
    """Yield consecutive pairs in windows of this size; each pair is created once."""
    more = iter(pairs)
    while window := list(itertools.islice(more, size)):
        yield window


def measure_windows(
    pairs: Sequence[Pair],
    measure: Callable[[Sequence[Pair], Told | None], Sequence[Row]],
    progress: Told | None,
) -> RowSpool:
    """Return the rows of all pairs, in their order.

    Args:
        pairs: Any number of pairs.
        measure: Function that measures some of them and reports its progress.
        progress: Called with (pairs done, total pairs).
    """
    keeper = SpoolWriter()
    done = 0
    for window in windows(pairs):
        # Bound now, because other threads may report progress when the next window has begun.
        before = done

        def tell(ready: int, _: int, before: int = before) -> None:
            assert progress is not None
            progress(before + ready, len(pairs))

        keeper.put(measure(window, None if progress is None else tell))
        done += len(window)
    return keeper.rows()


# The fast path, for pairs without complications, most of all small ones.


SMALL_BYTES = 1 << 18
"""Largest small pair, in bytes of both sides. Below this size most of the time is spent in Python,
where two threads take longer than one. Pairs of 256 kB a side are read and measured in parallel.
"""
_AHEAD = 64
"""Number of pairs that are read ahead while earlier ones are measured, if a run supports it."""
FAR_OFF = 0.1
"""Relative L2 above which a square weight is also compared transposed."""


class _Types(NamedTuple):
    """Values that are the same for all pairs of two dtypes."""

    reference: DType
    candidate: DType
    bits: int
    rtol: float
    atol: float


class SmallPairs:
    """Measures ordinary pairs of two runs; only one thread may use `rows`."""

    def __init__(
        self,
        reference: Run,
        candidate: Run,
        metrics: Sequence[Metric],
        elementwise: Callable[[str, str], tuple[float, float]],
    ) -> None:
        self._reference = reference
        self._candidate = candidate
        self._elementwise = elementwise
        # Other metrics need the values as arrays, and so does numpy if it replaces the kernel.
        self._able = kernel.takes_addresses() and tuple(metrics) == STANDARD
        self._known: dict[tuple[str, str], _Types] = {}

    def elements(self, pair: Pair) -> int | None:
        """Return the number of elements of a pair; None if its records show complications."""
        reference, candidate, _, _, reference_recipe, candidate_recipe, trouble, *_ = pair
        if (
            not self._able
            or reference_recipe is not None
            or candidate_recipe is not None
            or trouble
        ):
            return None
        shape = reference.shape
        # All other pairs take the slow path, which gives reasons in the row.
        if reference.kept != "full" or candidate.kept != "full" or shape != candidate.shape:
            return None
        if reference.placement != candidate.placement and placement_kind(
            reference
        ) != placement_kind(candidate):
            return None
        types = self._known.get((reference.dtype, candidate.dtype)) or self._types(pair)
        if types is None or self._reference.lost(reference) or self._candidate.lost(candidate):
            return None
        return math.prod(shape)

    def is_small(self, pair: Pair, elements: int) -> bool:
        """Return whether an ordinary pair of this size should be left to the calling thread."""
        # `bits` is the sum of the bits of one element of each side.
        types = self._known[pair.reference.dtype, pair.candidate.dtype]
        return elements * types.bits <= 8 * SMALL_BYTES

    def _types(self, pair: Pair) -> _Types | None:
        if incompatibility(pair):
            return None
        reference, candidate = DTYPES[pair.reference.dtype], DTYPES[pair.candidate.dtype]
        rtol, atol = self._elementwise(reference.name, candidate.name)
        types = _Types(reference, candidate, reference.bits + candidate.bits, rtol, atol)
        self._known[pair.reference.dtype, pair.candidate.dtype] = types
        return types

    def rows(self, pairs: Sequence[Pair]) -> Iterator[Row | None]:
        """Yield the rows of ordinary pairs, in their order; see `row`."""
        # While one piece is measured, the next one is read.
        pieces = [pairs[index : index + _AHEAD] for index in range(0, len(pairs), _AHEAD)]
        many = len(pieces) > 1
        reference_ahead = self._reference.read_ahead() if many else None
        candidate_ahead = self._candidate.read_ahead() if many else None

        def begin(index: int) -> None:
            if reference_ahead is not None and index < len(pieces):
                reference_ahead.begin([pair.reference for pair in pieces[index]])
            if candidate_ahead is not None and index < len(pieces):
                candidate_ahead.begin([pair.candidate for pair in pieces[index]])

        try:
            begin(0)
            for index, piece in enumerate(pieces, 1):
                unread = [None] * len(piece)
                reference_memory = unread if reference_ahead is None else reference_ahead.take()
                candidate_memory = unread if candidate_ahead is None else candidate_ahead.take()
                begin(index)
                yield from map(self.row, piece, reference_memory, candidate_memory)
        # Reading ahead holds buffers and threads, which must be released after an error.
        finally:
            for side in (reference_ahead, candidate_ahead):
                if side is not None:
                    side.close()

    def row(
        self,
        pair: Pair,
        reference_memory: Memory | None = None,
        candidate_memory: Memory | None = None,
    ) -> Row | None:
        """Return the measured row of an ordinary pair; None if it needs the slow path.

        Args:
            pair: The pair.
            reference_memory: Address of the reference's values, if it is known already.
            candidate_memory: Address of the candidate's values, if it is known already.
        """
        moments = self._measured(pair, reference_memory, candidate_memory)
        if moments is None or needs_definition(moments):
            return None
        measured = standard(moments)
        shape = pair.reference.shape
        if len(shape) == 2 and shape[0] == shape[1] and measured["relative_l2"] > FAR_OFF:
            return None
        return paired(pair, "values", measured)

    def _measured(
        self, pair: Pair, reference_memory: Memory | None, candidate_memory: Memory | None
    ) -> PairMoments | None:
        reference_record, candidate_record = pair.reference, pair.candidate
        our_dtype, their_dtype, _, rtol, atol = self._known[
            reference_record.dtype, candidate_record.dtype
        ]
        count = math.prod(reference_record.shape)
        try:
            if reference_memory is None:
                reference_memory = self._reference.memory(reference_record)
            if candidate_memory is None:
                candidate_memory = self._candidate.memory(candidate_record)
        except (DriftlineError, OSError, ValueError):
            return None
        if (
            reference_memory is None
            or candidate_memory is None
            or reference_memory.length * 8 < our_dtype.bits * count
            or candidate_memory.length * 8 < their_dtype.bits * count
        ):
            return None
        return kernel.pair_moments_at(
            reference_memory.address,
            our_dtype,
            candidate_memory.address,
            their_dtype,
            count=count,
            atol=atol,
            rtol=rtol,
        )


# The general path: threads share the blocks of all other pairs.


Progress = Callable[[int, int], None]
"""Called with (pairs done, total pairs), from any thread, one call at a time."""

Elementwise = Callable[[str, str], tuple[float, float]]
"""rtol and atol for two dtypes: an element is inside if `|c - r| <= atol + rtol |r|`."""

_LARGE = 64 << 20
"""Float64 copies of tensors larger than this many bytes are made by one thread at a time."""
_MAPPED = 1 << 29
"""Number of elements of both sides' large tensors after which mapped pages are released; 4 GB of
float32."""
_TRIES = 3
"""Number of attempts to measure a pair whose file becomes shorter during the measurement."""
_FETCHING = 8
"""Number of threads if values come from another machine, because they mostly wait for it."""


def exactly(reference: str, candidate: str) -> tuple[float, float]:
    """Return tolerances of 0, so that every element that differs is outside."""
    del reference, candidate
    return 0.0, 0.0


def measure(
    plan: Plan,
    reference: Run,
    candidate: Run,
    *,
    metrics: Sequence[Metric] = STANDARD,
    elementwise: Elementwise = exactly,
    threads: int | None = None,
    progress: Progress | None = None,
    executor: Executor | None = None,
) -> Table:
    """Measure every pair of a plan.

    Args:
        plan: The plan.
        reference: The reference run.
        candidate: The candidate run.
        metrics: The metrics to measure.
        elementwise: Tolerances of `outside_share`, by the dtypes of a pair.
        threads: Number of worker threads; one per usable core if None.
        progress: Called with (pairs done, total pairs).
        executor: Executor that measures instead of this process, if any.

    Returns:
        A table whose compared rows are `unjudged`, in the reference's execution order, extra last.
    """
    if executor is not None:
        from driftline.comparison.measure.distribute import distribute_pairs

        rows = distribute_pairs(
            plan.pairs,
            reference,
            candidate,
            executor,
            metrics=metrics,
            elementwise=elementwise,
            threads=threads,
            progress=progress,
        )
    else:
        rows = measure_pairs(
            plan.pairs,
            reference,
            candidate,
            metrics=metrics,
            elementwise=elementwise,
            threads=threads,
            progress=progress,
        )
    return assembled(plan, rows, reference, candidate, metrics)


def measure_pairs(
    pairs: Sequence[Pair],
    reference: Run,
    candidate: Run,
    *,
    metrics: Sequence[Metric] = STANDARD,
    elementwise: Elementwise = exactly,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Sequence[Row]:
    """Measure pairs in this process, as `measure`; the rows are in the order of the pairs."""

    def some(window: Sequence[Pair], tell: Progress | None) -> list[Row]:
        work = _Work(window, reference, candidate, tuple(metrics), elementwise, tell)
        return work.run(threads or (_FETCHING if work.fetched else cores()))

    if not is_long(pairs):
        return some(pairs, progress)

    def and_let_go(window: Sequence[Pair], tell: Progress | None) -> list[Row]:
        rows = some(window, tell)
        reference.release_some()
        candidate.release_some()
        return rows

    return measure_windows(pairs, and_let_go, progress)


def is_long(pairs: Sequence[Pair]) -> bool:
    """Return whether there are so many pairs that their rows go into a file; see `windows`."""
    return len(pairs) > MANY


class _Work:
    """Pairs shared among threads; the blocks of a large pair go to any idle thread."""

    def __init__(
        self,
        pairs: Sequence[Pair],
        reference: Run,
        candidate: Run,
        metrics: tuple[Metric, ...],
        elementwise: Elementwise,
        progress: Progress | None,
    ) -> None:
        self.pairs = pairs
        self.reference = reference
        self.candidate = candidate
        self.metrics = metrics
        self.elementwise = elementwise
        self.progress = progress
        self.rows: list[Row | None] = [None] * len(pairs)
        self.repeats = repeats_of(pairs)
        measured_once = {later for repeats in self.repeats.values() for later in repeats}
        self.quick = SmallPairs(reference, candidate, metrics, elementwise)
        self.small: list[int] = []
        self.usual: set[int] = set()
        self.units: list[tuple[int, int, int, int]] = []
        for index, pair in enumerate(pairs):
            if index in measured_once:
                continue
            elements = self.quick.elements(pair)
            if elements is not None and self.quick.is_small(pair, elements):
                self.small.append(index)
                continue
            blocks = _blocks(pair) if elements is None else blocks_of(elements)
            if elements is not None and len(blocks) == 1:
                self.usual.add(index)
            for block, (start, stop) in enumerate(blocks):
                self.units.append((stop - start, index, block, len(blocks)))
        self.fetched = reference.fetched or candidate.fetched
        # Largest first: in a run's order the logits come last, and a single thread would read them.
        # Remote values are taken in the order in which they are stored.
        if not self.fetched:
            self.units.sort(key=lambda unit: unit[0], reverse=True)
        self.parts: dict[int, dict[int, PairMoments]] = {}
        self.failure: BaseException | None = None
        self.done = 0
        self.looked_at = 0
        self.lock = threading.Lock()
        self.large = threading.Lock()
        self.ticket = itertools.count()

    def run(self, threads: int) -> list[Row]:
        """Return all rows, in the order of the pairs; the calling thread does small ones first."""
        # Daemon threads, because an interrupt must not wait for a tensor of gigabytes.
        helpers = [
            threading.Thread(target=self._worker, name=f"driftline-compare-{n}", daemon=True)
            for n in range(1, min(threads, len(self.units)))
        ]
        for helper in helpers:
            helper.start()
        self._small_ones()
        self._worker()
        for helper in helpers:
            helper.join()
        # This is an error of the program; errors of pairs become rows.
        if self.failure is not None:
            raise self.failure
        self._refuse_cut_off()
        return [row for row in self.rows if row is not None]

    def _refuse_cut_off(self) -> None:
        """Mark rows of tensors whose files were cut by less than a page, which causes no fault."""
        for side, run in enumerate((self.reference, self.candidate)):
            cut_off = run.cut_off()
            if cut_off is None:
                continue
            for index, (pair, row) in enumerate(zip(self.pairs, self.rows, strict=True)):
                recipe = (pair.reference_recipe, pair.candidate_recipe)[side]
                own = (pair.reference, pair.candidate)[side]
                records = recipe.records if recipe is not None else (own,)
                reasons = [reason for record in records if (reason := cut_off(record))]
                if row is not None and reasons and row.status != "incomparable":
                    self.rows[index] = paired(pair)._replace(
                        status="incomparable", reason=reasons[0]
                    )

    def _small_ones(self) -> None:
        try:
            rows = self.quick.rows([self.pairs[index] for index in self.small])
            faults = mapped_file.faults()
            for index, row in zip(self.small, rows, strict=True):
                measured = row or self._row(index, 0, 1)
                if faults != (now := mapped_file.faults()):
                    faults, measured = now, self._measured_again(index, 0, 1)
                self._finish(index, measured)
        except BaseException as bug:
            self.failure = bug

    def _worker(self) -> None:
        try:
            while self.failure is None and (ticket := next(self.ticket)) < len(self.units):
                size, index, block, blocks = self.units[ticket]
                faults = mapped_file.faults()
                row = self.quick.row(self.pairs[index]) if index in self.usual else None
                row = row or self._row(index, block, blocks)
                if faults != mapped_file.faults():
                    row = self._measured_again(index, block, blocks)
                self._finish(index, row)
                self._looked_at(size)
        except BaseException as bug:  # raised by the calling thread
            self.failure = bug

    def _measured_again(self, index: int, block: int, blocks: int) -> Row | None:
        """Measure a pair again after a mapped file became shorter during its measurement.

        The file may have been that of another pair. The files are opened again; if a tensor is cut,
        its file is too short then, and the row says so.
        """
        for _ in range(_TRIES):
            self.reference.release()
            self.candidate.release()
            faults = mapped_file.faults()
            row = self._row(index, block, blocks)
            if faults == mapped_file.faults():
                return row
        reason = "its file became shorter again and again while it was read"
        return paired(self.pairs[index])._replace(status="incomparable", reason=reason)

    def _looked_at(self, elements: int) -> None:
        """Release mapped pages from time to time, because memory limits count them as used."""
        with self.lock:
            self.looked_at += elements
            if self.looked_at < _MAPPED:
                return
            self.looked_at = 0
        self.reference.release_some()
        self.candidate.release_some()

    def _finish(self, index: int, row: Row | None) -> None:
        with self.lock:
            if (
                row is not None and self.rows[index] is None
            ):  # a pair of many blocks may fail in several
                self.rows[index] = row
                repeats = self.repeats.get(index, ())
                for later in repeats:
                    self.rows[later] = repeated(self.pairs[later], row)
                self.done += 1 + len(repeats)
                if self.progress is not None:
                    self.progress(self.done, len(self.pairs))

    def _row(self, index: int, block: int, blocks: int) -> Row | None:
        """Return the row of a pair; None while other blocks of it are still being measured."""
        pair = self.pairs[index]
        row = paired(pair)
        if trouble := pair.trouble or _undescribed(pair) or incompatibility(pair):
            return row._replace(status="incomparable", reason=trouble)
        try:
            if has_recipe(pair):
                return self._from_recipes(pair, row)
            if _has_values(self.reference, pair.reference) and _has_values(
                self.candidate, pair.candidate
            ):
                return self._from_values(index, block, blocks, row)
            return row_without_values(self.reference, self.candidate, pair, row)
        except Unreachable:  # an error of the store, not of this pair
            raise
        except (DriftlineError, OSError, ValueError) as trouble:
            reason = str(trouble) or type(trouble).__name__
            return row._replace(status="incomparable", reason=reason)

    def _from_recipes(self, pair: Pair, row: Row) -> Row:
        """Return the row of a pair with recipes; large ones are computed one at a time."""
        from contextlib import nullcontext

        from driftline.comparison.measure.recipes import open_recipes
        from driftline.comparison.measure.summaries import measure_parts, needs_summaries

        # Without values, a recipe can still be applied to summaries.
        if needs_summaries(pair):
            figures, remark = measure_parts(self.reference, self.candidate, pair)
            return row.measured("summary", figures, estimated=ESTIMATED, reason=remark)
        size = math.prod(row.reference_shape or ())
        # Only one large float64 copy at a time, whatever the number of threads.
        with self.large if size * 8 > _LARGE else nullcontext():
            if (metrics := self._by_rows(pair, row)) is not None:
                return row.measured("values", metrics)
            values = open_recipes(self.reference, self.candidate, pair)
            rtol, atol = self.elementwise(row.reference_dtype, row.candidate_dtype)
            parts = [
                values.moments(start, stop, rtol=rtol, atol=atol)
                for start, stop in blocks_of(values.count)
            ]
            notes: list[str] = []
            metrics = measure_values(
                values, measure_moments(parts, self.metrics), self.metrics, notes
            )
        measured = row.measured("values", metrics)
        return measured._replace(reason="; ".join(notes)) if notes else measured

    def _by_rows(self, pair: Pair, row: Row) -> dict[str, Number] | None:
        """Return the metrics of a gathered pair, measured by rows; None if it is needed whole."""
        from driftline.comparison.measure.recipes import row_blocks

        if any(metric.derive is None for metric in self.metrics):
            return None
        blocks = row_blocks(self.reference, self.candidate, pair)
        if blocks is None:
            return None
        rtol, atol = self.elementwise(row.reference_dtype, row.candidate_dtype)
        parts = [rows.moments(0, rows.count, rtol=rtol, atol=atol) for rows in blocks]
        measured = measure_moments(parts, self.metrics)
        return None if "_scaled" in measured else measured

    def _from_values(self, index: int, block: int, blocks: int, row: Row) -> Row | None:
        pair = self.pairs[index]
        # For a remote tensor, only the block to measure is fetched.
        if blocks > 1 and self.fetched:
            start, stop = blocks_of(math.prod(pair.reference.shape))[block]
            values = open_window(self.reference, self.candidate, pair, start, stop)
        else:
            values = open_values(self.reference, pair.reference, self.candidate, pair.candidate)
            start, stop = blocks_of(values.count)[block] if blocks > 1 else (0, values.count)
        rtol, atol = self.elementwise(row.reference_dtype, row.candidate_dtype)
        part = values.moments(start, stop, rtol=rtol, atol=atol)
        if blocks == 1:
            parts = [part]
        else:
            with self.lock:
                finished_blocks = self.parts.setdefault(index, {})
                finished_blocks[block] = part
                if len(finished_blocks) < blocks:
                    return None
                del self.parts[index]
            # Merged in the order of the blocks, because the result must not depend on timing.
            parts = [finished_blocks[n] for n in range(blocks)]
        metrics = measure_moments(parts, self.metrics)
        notes: list[str] = []
        if values.count * 8 > _LARGE:
            with self.large:
                metrics = measure_values(values, metrics, self.metrics, notes)
        else:
            metrics = measure_values(values, metrics, self.metrics, notes)
        if values.is_square and (off := metrics.get("relative_l2", 0.0)) > FAR_OFF:
            from driftline.comparison.measure.recipes import transpose_hint

            notes += filter(None, [transpose_hint(pair, values.arrays(), off)])
        measured = row.measured("values" if values.shape is not None else "sample", metrics)
        return measured._replace(reason="; ".join(notes)) if notes else measured


def _blocks(pair: Pair) -> list[tuple[int, int]]:
    """Return the blocks of a pair, before it is opened; only large tensors have several."""
    reference, candidate = pair.reference, pair.candidate
    if pair.reference_recipe is not None or pair.candidate_recipe is not None:
        if not has_recipe(pair) and not incompatibility(pair):
            return blocks_of(math.prod(reference.shape))
        return [(0, math.prod(reference.shape))]  # computed once, so measured by one thread
    if reference.kept == candidate.kept == "full" and not incompatibility(pair):
        return blocks_of(math.prod(reference.shape))
    return [(0, 0)]


def _undescribed(pair: Pair) -> str:
    """Return the reason of a lost tensor whose dtype is unknown too; empty otherwise."""
    # A lost tensor may lack even its dtype, which everything below needs.
    for record in (pair.reference, pair.candidate):
        if record.lost and record.dtype not in DTYPES:
            return f"{LOST}: {record.lost}"
    return ""


def _has_values(run: Run, record: Record) -> bool:
    return record.kept in ("full", "sample") and not run.lost(record)
