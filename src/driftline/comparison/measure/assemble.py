"""Measured rows become a table: rows without partners are merged in, and both sides described."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from driftline.alignment.plan import Pair, Plan
from driftline.comparison.measure.pair_rows import inside_of, lone
from driftline.comparison.metrics.catalogue import Metric
from driftline.comparison.table.row import Column, Row
from driftline.comparison.table.table import Side, Table, like_storage
from driftline.runs.layout import folder_name
from driftline.runs.records import Record
from driftline.runs.run import Run
from driftline.runs.scope import scope_of

_ABOUT = ("id", "command", "argv", "created", "git")
_ABOUT_PROCESS = ("versions", "framework", "devices", "default_dtype", "seed")
_RAISED, _LONGEST = 3, 400
"""Number of exceptions of a program that are quoted, and largest number of characters of each."""


def assembled(
    plan: Plan, rows: Sequence[Row], reference: Run, candidate: Run, metrics: Sequence[Metric]
) -> Table:
    """Return the table of a plan.

    Args:
        plan: The plan.
        rows: A row for each of its pairs, in their order.
        reference: The reference run.
        candidate: The candidate run.
        metrics: The metrics that were measured.
    """
    rows, columns = with_replicas(plan, rows, reference, candidate)
    missing, extra = lone_rows(plan)
    reference_side, candidate_side = sides_of(plan, reference, candidate)
    return Table(
        rows=with_lone_rows(plan, rows, missing, extra),
        columns=(*(metric.column for metric in metrics), *columns),
        reference=reference_side,
        candidate=candidate_side,
        notes=plan.notes,
    )


def with_replicas(
    plan: Plan,
    rows: Sequence[Row],
    reference: Run,
    candidate: Run,
    places: Sequence[int] | None = None,
) -> tuple[Sequence[Row], tuple[Column, ...]]:
    """Return rows with findings about ranks, and the column for them if there are ranks.

    Args:
        plan: The plan.
        rows: A row for each of its pairs, or for those at `places`.
        reference: The reference run.
        candidate: The candidate run.
        places: Indices of the pairs that the rows are about; all if None.
    """
    # A long plan pairs by name only, and gathers no ranks.
    if not isinstance(plan.pairs, tuple) or not _may_have_ranks(plan.pairs):
        return rows, ()
    from driftline.comparison.evidence.replicas import GAP_COLUMN, has_ranks, with_ranks

    if not has_ranks(plan.pairs):
        return rows, ()
    return with_ranks(plan.pairs, rows, reference, candidate, places), (GAP_COLUMN,)


def with_lone_rows(
    plan: Plan, rows: Sequence[Row], missing: Sequence[Row], extra: Sequence[Row]
) -> Sequence[Row]:
    """Return rows of pairs and of tensors without a partner, in the order of a table."""
    placed: Iterable[Row] = rows
    if missing:
        by_name = not isinstance(plan.pairs, tuple)  # pairs by name are already in order
        placed = in_turn(rows, missing) if by_name else in_order([*rows, *missing])
    if missing or extra or isinstance(rows, list):
        return like_storage(rows, itertools.chain(placed, extra))
    return rows


def _may_have_ranks(pairs: Iterable[Pair]) -> bool:
    """Return False for most runs, so that the code about ranks need not be imported."""
    # Unpacked for speed, because this loop visits every pair of every comparison.
    for reference, candidate, _, _, our_recipe, their_recipe, *_ in pairs:
        if (
            reference.key.rank
            or candidate.key.rank
            or our_recipe is not None
            or their_recipe is not None
        ):
            return True
    return False


def lone_rows(plan: Plan) -> tuple[list[Row], list[Row]]:
    """Return the rows of tensors that only the reference has, and that only the candidate has."""

    def row(record: Record, status: Literal["missing", "extra"], side: str) -> Row:
        # One key may lack a partner on both sides, for two reasons.
        place = side, record.key
        reason = plan.reasons.get(place, f"only in the {side}")
        alone = lone(record, status, reason, plan.lone_lines.get(place, ""))
        fused_key = plan.inside.get(place)
        return alone if fused_key is None else inside_of(alone, fused_key)

    missing = [row(record, "missing", "reference") for record in plan.missing]
    extra = [row(record, "extra", "candidate") for record in plan.extra]
    return missing, extra


def in_order(rows: Iterable[Row]) -> list[Row]:
    """Return rows in the reference's execution order, rank by rank."""
    return sorted(rows, key=_place)


def in_turn(rows: Iterable[Row], others: Iterable[Row]) -> Iterator[Row]:
    """Merge two lists of rows that are already in that order."""
    # A merge, because sorting would hold all rows in memory.
    return heapq.merge(rows, others, key=_place)


def is_in_order(rows: Iterable[Row]) -> bool:
    return all(place <= next_one for place, next_one in itertools.pairwise(map(_place, rows)))


def _place(row: Row) -> tuple[int, int, int]:
    return row.key.rank, row.key.process, row.order


def sides_of(plan: Plan, reference: Run, candidate: Run) -> tuple[Side, Side]:
    """Return the descriptions of both sides of a table.

    If a side lacks tensors that the other has, the exceptions of its program are quoted.
    """
    seen = _seen_places(plan)
    return (
        _side(reference, "reference", plan, seen[0], lacks=bool(plan.extra)),
        _side(candidate, "candidate", plan, seen[1], lacks=bool(plan.missing)),
    )


_Places = set[tuple[int, int]]


def _seen_places(plan: Plan) -> tuple[_Places, _Places] | tuple[None, None]:
    """Return each side's processes that pairs use, recipes included; None if no row needs them."""
    # A long plan pairs by name only; and if the user selected ranks, the others are left out on
    # purpose.
    if not isinstance(plan.pairs, tuple) or any(word.startswith("rank") for word in plan.selected):
        return None, None
    seen: tuple[_Places, _Places] = (set(), set())
    for reference, candidate, _, _, our_recipe, their_recipe, *_ in plan.pairs:
        for places, record, recipe in (
            (seen[0], reference, our_recipe),
            (seen[1], candidate, their_recipe),
        ):
            places.add((record.key.rank, record.key.process))
            if recipe is not None:
                places.update((source.key.rank, source.key.process) for source in recipe.records)
    return seen


def _side(run: Run, name: str, plan: Plan, seen: _Places | None, *, lacks: bool) -> Side:
    manifest: Mapping[str, Any] = run.manifest
    processes = run.processes()
    # The program's own exceptions come before those that its launcher reports.
    facts: Mapping[str, Any] = {**manifest, **(processes[0] if processes else {})}
    about = {name: manifest[name] for name in _ABOUT if name in manifest}
    about |= {name: facts[name] for name in _ABOUT_PROCESS if name in facts}
    losses = [str(loss) for loss in run.losses]
    # Exceptions explain missing tensors, and are read only if tensors are missing.
    if lacks:
        exceptions = (event for event in run.events() if event.get("kind") == "exception")
        raised = (str(event.get("message", ""))[:_LONGEST] for event in exceptions)
        # All ranks of a job often raise the same exception.
        losses += itertools.islice(dict.fromkeys(raised), _RAISED)
    alone = plan.missing if name == "reference" else plan.extra
    held = {(record.key.rank, record.key.process) for record in alone}
    return Side(
        run.name,
        about,
        tuple(losses),
        run.ordered,
        scope_of(run),
        tuple(part._replace(side="") for part in plan.left_out if part.side == name),
        () if seen is None else tuple(folder_name(*place) for place in sorted(held - seen)),
        plan.selected,
        _sequence(run) if name == "candidate" and alone else (),
    )


def _sequence(run: Run) -> tuple[str, ...]:
    """Return the sites whose calls have outputs, in the order of these calls in the first step."""
    records = iter(run.records)
    first = next(records, None)
    if first is None:
        return ()
    place = (first.key.rank, first.key.process, first.key.step)
    step = itertools.takewhile(
        lambda record: (record.key.rank, record.key.process, record.key.step) == place, records
    )
    outputs = (record for record in (first, *step) if record.key.port == "output")
    ordered = sorted(outputs, key=lambda record: record.order)
    calls = dict.fromkeys((record.key.site, record.key.visit) for record in ordered)
    return tuple(site for site, _ in calls)
