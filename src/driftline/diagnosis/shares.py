"""How much of the final output's error goes back to a culprit: an estimate, from two energies."""

from __future__ import annotations

import math
from collections.abc import Mapping

from driftline.diagnosis.calls import ROOTS, Place, Site, over_before
from driftline.diagnosis.floor import Floor


def final_error(
    sites: Mapping[Place, Site], floor: Floor | None, first: Place | None
) -> tuple[float, float]:
    """Relative error of the final output, and how much of it noise explains."""
    forward = [site for place, site in sites.items() if place.direction == "forward"]
    if not forward:
        return math.nan, math.nan
    last = max(forward, key=lambda site: (site.name in ROOTS, site.order))
    call = last.worst
    error = math.inf if call.one_sided else call.error
    if floor is not None and floor.used:
        known = [floor.errors[row.key] for row in call.outs if row.key in floor.errors]
        if known:
            return error, max(known)
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
