"""A comparison in shards, each measured independently on any machine, and the merge of their parts.

`compare_shard` measures one shard of the pairs, and `merge` judges the measurements of all shards.
The result equals that of `compare`, bit for bit.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from driftline import __version__
from driftline.alignment.plan import Pair, Plan
from driftline.comparison.evidence.second_look import EarlierLooks, Figures, settle
from driftline.comparison.measure.assemble import in_order, in_turn, is_in_order, sides_of
from driftline.comparison.measure.distribute import weight_of
from driftline.comparison.measure.pair_rows import repeats_of
from driftline.comparison.measure.scheduler import Progress, is_long
from driftline.comparison.options import (
    CompareOptions,
    Limits,
    tolerance_from_json,
    tolerance_to_json,
)
from driftline.comparison.pipeline import (
    Comparison,
    PairPlaces,
    Source,
    prepare,
    with_placed_differences,
    without_collector,
)
from driftline.comparison.table.part import Part, open_parts, plan_digest
from driftline.comparison.table.row import MANY, Row, tensors_of
from driftline.comparison.table.structure import NO_STRUCTURE
from driftline.comparison.table.table import Table
from driftline.comparison.training.update_order import training_report
from driftline.comparison.verdict.judge import judge
from driftline.errors import BadFile, BadInput
from driftline.execution.slicing import Shard, parse_shard, slice_of
from driftline.numerics import kernel

if TYPE_CHECKING:
    from _typeshed import StrPath

    from driftline.comparison.tolerance.thresholds import Thresholds
    from driftline.execution.jobs import Executor

_NAMED = 12
"""Number of missing shards that are listed by name."""


def compare_shard(
    reference: Source,
    candidate: Source,
    shard: str | Shard,
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
) -> Part:
    """Measure one shard of a comparison; `merge` makes the table from all of them.

    The pairs are divided into shards of about the same number of bytes, in the same way on every
    machine. All shards of a comparison need the same runs and options.

    Args:
        reference: The trusted run, or its path (or that of a file of tensors).
        candidate: The run to test.
        shard: The number of the shard, such as `3/8` for the third of eight.
        metrics: As for `compare`, like all other arguments.

    Raises:
        DriftlineError: As `compare`.
    """
    which = parse_shard(shard) if isinstance(shard, str) else shard
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
    with without_collector(options):
        comparison = prepare(
            reference, candidate, options, plan if isinstance(plan, Plan) else None
        )
        if planned is not None:
            planned(comparison.plan)
        return _part(comparison, which, progress)


def _part(comparison: Comparison, shard: Shard, progress: Progress | None) -> Part:
    """Return the measurements of one shard, in the form in which they are written."""
    plan = comparison.plan
    places = pairs_of_shard(plan, shard)
    # Tensors without a partner belong to no pair, so the first shard reports them.
    own = PairPlaces(places, pairs_at(plan.pairs, places), with_lone=shard.number == 1)
    measured = comparison.measure(own, progress=progress)
    look = comparison.second_look()
    # Only the whole table shows which sites are suspect, but the merge has no tensors to examine.
    judges_sites = not comparison.options.tolerance.explicit
    looks = tuple(
        (index, figures.half, figures.rest)
        for index, figures in look.of_rows(measured.rows if judges_sites else ())
    )
    # Facts about the models do not belong to pairs either.
    differences = comparison.differences() if shard.number == 1 else None
    # Versions are included, so that parts of different versions are not merged silently.
    return Part(
        shard,
        {"driftline": __version__, "kernel": kernel.active(), "numpy": str(np.__version__)},
        plan_digest(plan),
        len(plan.pairs),
        tolerance_to_json(comparison.options.tolerance),
        measured.columns,
        *sides_of(plan, comparison.reference, comparison.candidate),
        plan.notes,
        places,
        measured.rows if is_long(plan.pairs) else tuple(measured.rows),
        tuple(measured.missing),
        tuple(measured.extra),
        tuple(comparison.masked_for_shard(measured)),
        comparison.structure() if shard.number == 1 else NO_STRUCTURE,
        looks,
        tuple(look.notes),
        differences,
        training_report(comparison.reference, comparison.candidate, plan, differences)
        if shard.number == 1
        else None,
    )


def pairs_of_shard(plan: Plan, shard: Shard) -> Sequence[int]:
    """Return the indices of the pairs that a shard measures: neighbours, and their repeats.

    Repeats are pairs with the same bytes. For a long plan the shard has neighbours only, and
    repeats are found among them.
    """
    if is_long(plan.pairs):
        return slice_of(array("Q", map(weight_of, plan.pairs)), shard)
    # Pairs of the same bytes go to one shard, which measures them once.
    repeats = repeats_of(plan.pairs)
    again = {later for group in repeats.values() for later in group}
    firsts = [index for index in range(len(plan.pairs)) if index not in again]
    own = slice_of([weight_of(plan.pairs[index]) for index in firsts], shard)
    return sorted(place for n in own for place in (firsts[n], *repeats.get(firsts[n], ())))


def pairs_at(pairs: Sequence[Pair], places: Sequence[int]) -> Sequence[Pair]:
    """Return the pairs at some indices."""
    if isinstance(pairs, tuple) or not isinstance(places, range):
        return [pairs[place] for place in places]
    from driftline.alignment.streaming import StreamedPairs

    assert isinstance(pairs, StreamedPairs)
    return pairs.between(places.start, places.stop)


def merge(parts: StrPath | Part | Sequence[StrPath | Part]) -> Table:
    """Make the table of a comparison from the parts of all its shards.

    Args:
        parts: Files that `compare --shard` wrote, folders with such files, or results of
            `compare_shard`.

    Raises:
        BadInput: A shard is missing or given twice, or the parts are of different comparisons.
        BadFile: One of them is not a part.
    """
    sources = (
        [parts] if isinstance(parts, (str, Part)) or not isinstance(parts, Sequence) else parts
    )
    shards = [source for source in sources if isinstance(source, Part)]
    if paths := [source for source in sources if not isinstance(source, Part)]:
        shards += open_parts(paths)
    if not shards:
        raise BadInput("there is nothing to merge", hint="name the parts, or their folder")
    # Sorted, because the table must not depend on the order in which files were named.
    shards.sort(key=lambda part: part.shard)
    first = shards[0]
    for part in shards[1:]:
        _require_alike(first, part)
    _require_all(shards)
    table = Table(
        _in_their_places(shards) if first.pairs <= MANY else _one_after_another(shards),
        first.columns,
        reference=first.reference,
        candidate=first.candidate,
        notes=first.notes,
        differences=first.differences,
        structure=first.structure,
        training=first.training,
    )
    tolerance = tolerance_from_json(first.tolerance, first.source)
    # Only now are all rows in one table, which shows which rows fail and which sites are suspect.
    judged = settle(
        table,
        lambda measured: judge(measured, tolerance),
        _looks(shards),
        lambda _: itertools.chain.from_iterable(part.masked for part in shards),
    )
    return with_placed_differences(judged)


def _looks(parts: Sequence[Part]) -> EarlierLooks:
    """Return the second looks that all shards have taken."""
    figures = {
        tensors_of(part.rows[place]): Figures(half, rest)
        for part in parts
        for place, half, rest in part.looks
    }
    return EarlierLooks(
        figures, tuple(dict.fromkeys(note for part in parts for note in part.look_notes))
    )


def _in_their_places(parts: Sequence[Part]) -> tuple[Row, ...]:
    """Return all rows of a comparison whose shards may have rows from anywhere in the plan."""
    first = parts[0]
    # Rows are placed by index, so that a gap or an overlap is detected.
    rows: list[Row | None] = [None] * first.pairs
    for part in parts:
        for place, row in zip(part.places, part.rows, strict=True):
            if not place < len(rows) or rows[place] is not None:
                raise BadFile(
                    f"{_called(part)} holds pairs that are not its own",
                    hint="compute this shard again",
                )
            rows[place] = row
    measured = [row for row in rows if row is not None]
    if len(measured) < len(rows):
        raise _in_none(len(rows) - len(measured))
    if first.missing:
        measured = in_order([*measured, *first.missing])
    return (*measured, *first.extra)


def _one_after_another(parts: Sequence[Part]) -> Sequence[Row]:
    """Return the rows of a long comparison, whose shards are consecutive."""
    from driftline.comparison.table.row_spool import keep

    first = parts[0]
    # Shards of a long plan are consecutive, so rows need not be held in memory.
    end = 0
    for part in parts:
        own = part.places
        if len(own) and (not isinstance(own, range) or own.start < end):
            raise BadFile(
                f"{_called(part)} holds pairs that are not its own", hint="compute this shard again"
            )
        if len(own) and own[0] > end:
            raise _in_none(own[0] - end)
        end += len(own)
    if end != first.pairs:
        raise _in_none(first.pairs - end)
    rows: Iterable[Row] = itertools.chain.from_iterable(part.rows for part in parts)
    if first.missing:
        again = (row for part in parts for row in part.rows)
        rows = (
            in_turn(rows, first.missing)
            if is_in_order(again)
            else in_order([*rows, *first.missing])
        )
    return keep(itertools.chain(rows, first.extra))


def _in_none(count: int) -> BadFile:
    return BadFile(f"{count} pairs are in none of the shards")


def remarks(parts: Sequence[Part]) -> list[str]:
    """Return why the merged table may differ from that of one process in the last digits."""
    sentences: list[str] = []
    for what, called, hint in (
        ("kernel", "path of the kernel", "; DRIFTLINE_KERNEL=avx2, say, makes all take the same"),
        ("numpy", "version of numpy", ""),
    ):
        # Other vector widths add in another order, so the last digits may differ.
        kinds = sorted({part.made.get(what, "") for part in parts})
        if len(kinds) > 1:
            sentences.append(
                f"the shards were measured with more than one {called} ({', '.join(kinds)}): last "
                f"digits may differ from those of one process{hint}"
            )
    return sentences


def _require_all(parts: Sequence[Part]) -> None:
    """Refuse shards that are missing or occur twice."""
    by_number: dict[int, Part] = {}
    for part in parts:
        other = by_number.setdefault(part.shard.number, part)
        if other is not part:
            raise BadInput(
                f"shard {part.shard} is there twice: {_called(other)} and {_called(part)}",
                hint="leave one of them out",
            )
    of = parts[0].shard.of
    missing = [f"{number}/{of}" for number in range(1, of + 1) if number not in by_number]
    if missing:
        named = missing if len(missing) <= _NAMED else missing[: _NAMED - 1]
        if len(missing) > len(named):
            named = [*named, f"{len(missing) - len(named)} more"]
        words = " and ".join(filter(None, (", ".join(named[:-1]), named[-1])))
        single = len(missing) == 1
        raise BadInput(
            f"shard{'' if single else 's'} {words} {'is' if single else 'are'} missing",
            hint=f"driftline compare … --shard {missing[0]} makes "
            + ("it" if single else "the first of them"),
        )


def _require_alike(first: Part, other: Part) -> None:
    """Refuse parts of different comparisons, and say how they differ."""
    # Tested from cause to effect: different runs explain different plans, but not the reverse.
    what = ""
    if first.shard.of != other.shard.of:
        what = f"one is of {first.shard.of} shards, the other of {other.shard.of}"
    elif (first_version := first.made.get("driftline")) != (
        other_version := other.made.get("driftline")
    ):
        what = f"one was made by Driftline {first_version}, the other by {other_version}"
    elif first.reference.about != other.reference.about:
        paths = _names(first.reference.path, other.reference.path)
        what = f"their references are different runs{paths}"
    elif first.candidate.about != other.candidate.about:
        paths = _names(first.candidate.path, other.candidate.path)
        what = f"their candidates are different runs{paths}"
    elif first.tolerance != other.tolerance:
        what = "they were given different limits"
    elif first.columns != other.columns:
        what = "they were given different metrics"
    elif first.plan != other.plan or first.pairs != other.pairs:
        what = "they compare different tensors: other runs, or other options of what to compare"
    elif (first.reference.losses, first.candidate.losses, first.notes) != (
        *(other.reference.losses, other.candidate.losses),
        other.notes,
    ):
        what = "something was missing from a run for one of them that was there for the other"
    if what:
        raise BadInput(
            f"{_called(first)} and {_called(other)} are not of one comparison: {what}",
            hint="give all shards the same runs and options",
        )


def _names(first: str, other: str) -> str:
    return f", {first} and {other}" if first != other else ""


def _called(part: Part) -> str:
    return part.source or f"shard {part.shard}"
