"""How errors flow: what a container passes to its parts, and how much of them reaches the end.

A replay of a container's own code answers the calls of its parts with what the candidate's parts
gave, so its output says nothing about what it computed in between; that went into a part (an
attention's result goes into its output projection). For every container, this file lists what went
in (its inputs, what its parts had made by then) and what it passed on. It also estimates which
share of the final error goes back to the sites that introduced error.
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
    """Whether a container's own code adds nothing to the error of its inputs.

    Everything it passed to its parts, and its own output, has at most `factor` times the error of
    what it had by then: its inputs and what its parts had made. Then its error is that of its
    parts, accumulated along the way.

    Args:
        call: A call of the container.
        handed: What its own code passed to its parts, from `passed_to_parts`.
        factor: Allowed growth of the error.
    """
    within = [passed for passed in handed if call.begin <= passed.order <= call.order]
    if not within or any(passed.error > factor * passed.error_in for passed in within):
        return False
    return call.error <= factor * max(max(passed.error, passed.error_in) for passed in within)


def passed_to_parts(sites: Mapping[Place, Site]) -> dict[Place, Site]:
    """For every container, calls whose outputs are the tensors it passed to its parts."""
    names = {place.site for place in sites if place.direction == "forward"}
    events: dict[tuple[str, int, int], list[_Event]] = {}
    for place, site in sites.items():
        if place.direction != "forward":
            continue
        # The nearest captured ancestor stands for the container; modules in between were not
        # captured.
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
    """One call for each tensor that was passed on; its input is the worst source until then."""
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


# Share of the final output's error: an estimate from two energies.


def final_error(
    sites: Mapping[Place, Site], floor: NoiseFloor | None, first: Place | None
) -> tuple[float, float]:
    """Relative error of the final output, and how much of it noise explains."""
    forward = [site for place, site in sites.items() if place.direction == "forward"]
    if not forward:
        return math.nan, math.nan
    # The root is the end of the model even where a later output (of a loss, say) was captured.
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
    """Share of the final error's energy that the faults cause.

    Noise and fault are unrelated, so their energies add up: what noise explains is subtracted.
    """
    if math.isnan(final) or math.isnan(noise):
        return None
    if not math.isfinite(final):
        return 1.0
    if final <= 0.0:
        return 0.0
    return round(min(max(1.0 - (noise / final) ** 2, 0.0), 1.0), 4)
