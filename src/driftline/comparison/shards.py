"""A comparison in shards, each by itself, on any machine; and their parts merged into its table.

`compare_shard` measures one share of the pairs; `merge` judges what all of them have measured. What
comes out is what `compare` gives, bit for bit.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from driftline import __version__
from driftline.alignment.plan import Pair, Plan
from driftline.comparison.evidence.conversions import with_conversions
from driftline.comparison.evidence.replicas import GAP_COLUMN, has_ranks, with_ranks
from driftline.comparison.evidence.rules import with_evidence
from driftline.comparison.measure.assemble import (
    in_order,
    in_turn,
    is_in_order,
    lone_rows,
    sides_of,
)
from driftline.comparison.measure.distribute import share_out, weight_of
from driftline.comparison.measure.pair_rows import repeats_of
from driftline.comparison.measure.scheduler import Progress, is_long, measure_pairs
from driftline.comparison.metrics.catalogue import STANDARD, Metric, requested
from driftline.comparison.pipeline import Limits, Source, align, allowed, open_source, outside
from driftline.comparison.table.part import Part, open_parts, plan_digest
from driftline.comparison.table.row import JSON, MANY, Row, number_from_json, number_to_json
from driftline.comparison.table.table import Table
from driftline.comparison.tolerance.thresholds import thresholds_from_json as thresholds_from_json
from driftline.comparison.tolerance.tolerance import Limit, Tolerance
from driftline.comparison.verdict.judge import judge
from driftline.errors import BadFile, BadInput
from driftline.execution.jobs import chosen
from driftline.execution.slicing import Shard, parse_shard, slice_of
from driftline.numerics import kernel
from driftline.runs.index import uncollected
from driftline.runs.run import Run

if TYPE_CHECKING:
    from _typeshed import StrPath

    from driftline.comparison.tolerance.thresholds import Thresholds
    from driftline.execution.jobs import Executor

_NAMED = 12
"""Missing shards that are named one by one."""


def compare_shard(
    reference: Source,
    candidate: Source,
    shard: str | Shard,
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
) -> Part:
    """Measure one shard of a comparison; `merge` makes a table of all of them.

    Pairs are cut into stretches of about the same number of bytes, in the same way wherever it is
    done. All shards of a comparison must be given the same runs and options.

    Args:
        reference: What is right: a run, or the path of one (or of a file of tensors).
        candidate: What is in question.
        shard: `3/8` for the third of eight.
        metrics: As for `compare`, and so for all others.

    Raises:
        DriftlineError: As `compare`.
    """
    which = parse_shard(shard) if isinstance(shard, str) else shard
    wanted = requested([metrics] if isinstance(metrics, str) else metrics)
    tolerance = allowed(wanted, limits, rtol, atol, min_coverage, thresholds)
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
        long = is_long(plan.pairs)
        places = shard_places(plan, which)
        pairs = stretch_of(plan.pairs, places)
        who = chosen(jobs, executor)
        if who is None:
            rows = measure_pairs(
                pairs,
                ours,
                theirs,
                metrics=wanted,
                elementwise=each,
                threads=threads,
                progress=progress,
            )
        else:
            rows = share_out(
                pairs,
                ours,
                theirs,
                who,
                metrics=wanted,
                elementwise=each,
                threads=threads,
                progress=progress,
            )
        columns = [metric.column for metric in wanted]
        if isinstance(plan.pairs, tuple) and has_ranks(plan.pairs):
            rows = with_ranks(plan.pairs, rows, ours, theirs, places)
            columns.append(GAP_COLUMN)
        rows = with_evidence(rows, plan.pairs, ours, theirs)
        alone: tuple[Sequence[Row], Sequence[Row]] = ((), ())
        if which.number == 1:
            alone = _alone(plan, ours, theirs, wanted, tolerance)
        return Part(
            which,
            {"driftline": __version__, "kernel": kernel.active(), "numpy": str(np.__version__)},
            plan_digest(plan),
            len(plan.pairs),
            _tolerance_to_json(tolerance),
            tuple(columns),
            *sides_of(plan, ours, theirs),
            plan.notes,
            places,
            rows if long else tuple(rows),
            tuple(alone[0]),
            tuple(alone[1]),
        )


def shard_places(plan: Plan, shard: Shard) -> Sequence[int]:
    """Which pairs of a plan a shard measures: neighbours, and what has the same bytes as they.

    Of a long plan neighbours only: what has the same bytes is looked for among them.
    """
    if is_long(plan.pairs):
        return slice_of(array("Q", map(weight_of, plan.pairs)), shard)
    repeats = repeats_of(plan.pairs)
    again = {later for group in repeats.values() for later in group}
    firsts = [at for at in range(len(plan.pairs)) if at not in again]
    mine = slice_of([weight_of(plan.pairs[at]) for at in firsts], shard)
    return sorted(place for n in mine for place in (firsts[n], *repeats.get(firsts[n], ())))


def stretch_of(pairs: Sequence[Pair], places: Sequence[int]) -> Sequence[Pair]:
    """The pairs at some places."""
    if isinstance(pairs, tuple) or not isinstance(places, range):
        return [pairs[at] for at in places]
    from driftline.alignment.streaming import StreamedPairs

    assert isinstance(pairs, StreamedPairs)
    return pairs.between(places.start, places.stop)


def _alone(
    plan: Plan, ours: Run, theirs: Run, metrics: Sequence[Metric], tolerance: Tolerance
) -> tuple[Sequence[Row], Sequence[Row]]:
    """Rows of what has no partner; conversions of a compiler are set against themselves."""
    missing, extra = (
        with_conversions(Table(tuple(rows)), ours, theirs, metrics, outside(tolerance)).rows
        for rows in lone_rows(plan)
    )
    return missing, extra


def merge(parts: StrPath | Part | Sequence[StrPath | Part]) -> Table:
    """Make the table of a comparison from the parts of all its shards.

    Args:
        parts: Files that `compare --shard` wrote, folders that hold such, or what `compare_shard`
            gave.

    Raises:
        BadInput: A shard is missing or there twice, or they are of different comparisons.
        BadFile: One of them is no part.
    """
    given = [parts] if isinstance(parts, (str, Part)) or not isinstance(parts, Sequence) else parts
    found = [each for each in given if isinstance(each, Part)]
    if paths := [each for each in given if not isinstance(each, Part)]:
        found += open_parts(paths)
    if not found:
        raise BadInput("there is nothing to merge", hint="name the parts, or their folder")
    found.sort(key=lambda part: part.shard)
    first = found[0]
    for part in found[1:]:
        _require_alike(first, part)
    _require_all(found)
    table = Table(
        _in_their_places(found) if first.pairs <= MANY else _one_after_another(found),
        first.columns,
        reference=first.reference,
        candidate=first.candidate,
        notes=first.notes,
    )
    tolerance = _tolerance_from_json(first.tolerance, first.source)
    if tolerance.thresholds is None:
        return judge(table, tolerance)
    from driftline.comparison.pipeline import judge_by

    return judge_by(table, tolerance)


def _in_their_places(parts: Sequence[Part]) -> tuple[Row, ...]:
    """All rows of a comparison, whose shards may each hold rows of anywhere."""
    first = parts[0]
    rows: list[Row | None] = [None] * first.pairs
    for part in parts:
        for place, row in zip(part.places, part.rows, strict=True):
            if not place < len(rows) or rows[place] is not None:
                raise BadFile(f"{_called(part)} holds pairs that are not its own")
            rows[place] = row
    measured = [row for row in rows if row is not None]
    if len(measured) < len(rows):
        raise _in_none(len(rows) - len(measured))
    if first.missing:
        measured = in_order([*measured, *first.missing])
    return (*measured, *first.extra)


def _one_after_another(parts: Sequence[Part]) -> Sequence[Row]:
    """The same of a long one, whose shards are stretches of it."""
    from driftline.comparison.table.row_spool import keep

    first = parts[0]
    end = 0
    for part in parts:
        own = part.places
        if len(own) and (not isinstance(own, range) or own.start < end):
            raise BadFile(f"{_called(part)} holds pairs that are not its own")
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
    """What keeps the table of these parts from being that of one process to the last digit."""
    found: list[str] = []
    for what, called, hint in (
        ("kernel", "path of the kernel", "; DRIFTLINE_KERNEL=avx2, say, makes all take the same"),
        ("numpy", "version of numpy", ""),
    ):
        kinds = sorted({part.made.get(what, "") for part in parts})
        if len(kinds) > 1:
            found.append(
                f"the shards were measured with more than one {called} ({', '.join(kinds)}): last "
                f"digits may differ from those of one process{hint}"
            )
    return found


def _require_all(parts: Sequence[Part]) -> None:
    """Refuse shards that are there twice, or not at all."""
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
        one = len(missing) == 1
        raise BadInput(
            f"shard{'' if one else 's'} {words} {'is' if one else 'are'} missing",
            hint=f"driftline compare … --shard {missing[0]} makes "
            + ("it" if one else "the first of them"),
        )


def _require_alike(one: Part, other: Part) -> None:
    """Refuse parts of different comparisons; says what is different about them."""
    what = ""
    if one.shard.of != other.shard.of:
        what = f"one is of {one.shard.of} shards, the other of {other.shard.of}"
    elif (ours := one.made.get("driftline")) != (theirs := other.made.get("driftline")):
        what = f"one was made by Driftline {ours}, the other by {theirs}"
    elif one.reference.about != other.reference.about:
        what = (
            f"their references are different runs{_names(one.reference.path, other.reference.path)}"
        )
    elif one.candidate.about != other.candidate.about:
        what = (
            f"their candidates are different runs{_names(one.candidate.path, other.candidate.path)}"
        )
    elif one.tolerance != other.tolerance:
        what = "they were given different limits"
    elif one.columns != other.columns:
        what = "they were given different metrics"
    elif one.plan != other.plan or one.pairs != other.pairs:
        what = "they compare different tensors: other runs, or other options of what to compare"
    elif (one.reference.losses, one.candidate.losses, one.notes) != (
        *(other.reference.losses, other.candidate.losses),
        other.notes,
    ):
        what = "something was missing from a run for one of them that was there for the other"
    if what:
        raise BadInput(
            f"{_called(one)} and {_called(other)} are not of one comparison: {what}",
            hint="give all shards the same runs and options",
        )


def _names(ours: str, theirs: str) -> str:
    return f", {ours} and {theirs}" if ours != theirs else ""


def _called(part: Part) -> str:
    return part.source or f"shard {part.shard}"


def _tolerance_to_json(tolerance: Tolerance) -> dict[str, JSON]:
    known = tolerance.thresholds
    return {
        "limits": [[limit.metric, number_to_json(limit.value)] for limit in tolerance.limits],
        "rtol": None if tolerance.rtol is None else number_to_json(tolerance.rtol),
        "atol": None if tolerance.atol is None else number_to_json(tolerance.atol),
        "min_coverage": tolerance.min_coverage,
        "thresholds": None
        if known is None
        else {"path": known.path, "notes": list(known.notes), "shown": known.as_json()},
    }


def _tolerance_from_json(shown: Mapping[str, JSON], source: str) -> Tolerance:
    try:
        known = shown["thresholds"]
        thresholds = None
        if known is not None:
            thresholds = replace(
                thresholds_from_json(known["shown"], source=source),
                path=str(known["path"]),
                notes=tuple(map(str, known["notes"])),
            )
        rtol, atol = (
            None if shown[name] is None else float(number_from_json(shown[name]))
            for name in ("rtol", "atol")
        )
        limits = tuple(
            Limit(str(name), float(number_from_json(value))) for name, value in shown["limits"]
        )
        return Tolerance(limits, rtol, atol, float(shown["min_coverage"]), thresholds)
    except (KeyError, TypeError, ValueError) as trouble:
        raise BadFile(f"{source} says its limits in a way that means nothing: {trouble}") from None
