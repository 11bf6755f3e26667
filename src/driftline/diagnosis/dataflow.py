"""What a container's own code hands to its parts: the place where attention does its work.

A replay of a container's own code answers the calls of its parts with what the candidate's parts
gave, so its output says nothing of what it computed in between; that went into a part. Lays out,
for every container, what went in (its inputs, what its parts had made by then) and what it handed
on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from driftline.comparison.table.row import Row
from driftline.diagnosis.evidence.noise import NoiseFloor
from driftline.diagnosis.sites import ROOTS, Call, Place, Site, ancestors, error_of, over_before


class _Event(NamedTuple):
    order: int
    is_source: bool
    row: Row


def adds_no_error(call: Call, handed: Iterable[Call], factor: float) -> bool:
    """Whether a container's own code adds nothing to the error of what it was given.

    Everything it handed to its parts, and what it gave in the end, errs by no more than a factor of
    what it had by then: its inputs and what its parts had made. Then its error is that of its
    parts, gathered along the way.

    Args:
        call: A call of the container.
        handed: What its own code handed to its parts, from `passed_to_parts`.
        factor: The factor.
    """
    within = [passed for passed in handed if call.begin <= passed.order <= call.order]
    if not within or any(passed.error > factor * passed.error_in for passed in within):
        return False
    return call.error <= factor * max(max(passed.error, passed.error_in) for passed in within)


def passed_to_parts(sites: Mapping[Place, Site]) -> dict[Place, Site]:
    """For every container, calls whose outputs are what it handed to its parts."""
    names = {place.site for place in sites if place.direction == "forward"}
    events: dict[tuple[str, int, int], list[_Event]] = {}
    for place, site in sites.items():
        if place.direction != "forward":
            continue
        parent = next((outer for outer in ancestors(place.site) if outer in names), None)
        if parent is None:
            continue
        for call in site.calls:
            parent_events = events.setdefault((parent, call.rank, call.step), [])
            parent_events += [_Event(row.order, False, row) for row in call.ins]
            parent_events += [_Event(row.order, True, row) for row in call.outs]
    made: dict[Place, Site] = {}
    for place, site in sites.items():
        if place.direction != "forward":
            continue
        calls: list[Call] = []
        for call in site.calls:
            inside = events.get((place.site, call.rank, call.step))
            if inside:
                calls += _handed(call, inside)
        if calls:
            made[place] = Site(place, site.class_name, site.candidate_class, calls)
    return made


def _handed(call: Call, events: list[_Event]) -> list[Call]:
    """One call for each tensor that was handed on; the worst source so far is what went in."""
    worst = max(call.ins, key=error_of, default=None)
    handed: list[Call] = []
    for event in sorted(events, key=lambda entry: entry[:2]):  # copies of ranks have one order
        if not call.begin <= event.order <= call.order:
            continue
        if event.is_source:
            if worst is None or error_of(event.row) > error_of(worst):
                worst = event.row
            continue
        handed.append(
            Call(
                call.step,
                call.rank,
                event.order,
                call.begin,
                [worst] if worst is not None else [],
                [event.row],
                error_in=error_of(worst) if worst is not None else 0.0,
                error=error_of(event.row),
                length=call.length,
            )
        )
    return handed


# How much of the final output's error goes back to a culprit: an estimate, from two energies.


def final_error(
    sites: Mapping[Place, Site], floor: NoiseFloor | None, first: Place | None
) -> tuple[float, float]:
    """Relative error of the final output, and how much of it noise explains."""
    forward = [site for place, site in sites.items() if place.direction == "forward"]
    if not forward:
        return math.nan, math.nan
    last = max(forward, key=lambda site: (site.name in ROOTS, site.order))
    call = last.worst
    error = math.inf if call.one_sided else call.error
    if floor is not None and floor.used:
        floors = [floor.errors[row.key] for row in call.outs if row.key in floor.errors]
        if floors:
            return error, max(floors)
    if first is None or first.direction != "forward":
        return error, math.nan
    # Rounding adds up along the depth as a random walk does: what was there before the first
    # culprit, carried on to the end.
    errors = [site.error for site in over_before(sites, first) if math.isfinite(site.error)]
    further = min(math.sqrt(len(forward) / max(len(errors), 1)), 4.0)
    return error, max(further * max(errors, default=0.0), call.unit)


def explained(final: float, noise: float) -> float | None:
    """Share of the final error's energy that is there because of the culprits.

    Noise and fault add up as energies, being unrelated: what noise explains is left to it.
    """
    if math.isnan(final) or math.isnan(noise):
        return None
    if not math.isfinite(final):
        return 1.0
    if final <= 0.0:
        return 0.0
    return round(min(max(1.0 - (noise / final) ** 2, 0.0), 1.0), 4)
