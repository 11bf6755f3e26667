"""The status of every site: introduced, amplified, inherited, masked, clean or unknown.

Replay decides where there is one, then the noise floor, then the growth of the error. Decides which
site introduces error, which passes it on and which hides it. Reads no tensor and names no cause.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from driftline.diagnosis.dataflow import adds_no_error, passed_to_parts
from driftline.diagnosis.evidence.growth import Growth, growths, rounding
from driftline.diagnosis.evidence.noise import NoiseFloor
from driftline.diagnosis.evidence.replay import ReplayResult
from driftline.diagnosis.result import Status
from driftline.diagnosis.sites import (
    DIRECTIONS,
    FINE,
    Call,
    Place,
    Site,
    ancestors,
    contains,
    innermost,
    over_before,
    parts_of,
)

# An output must err clearly more than its input before the site is blamed; less is spread between
# runs.
_STEP_UP = 1.3
# Growth by this factor is called amplified rather than inherited.
_AMPLIFIED = 3.0
# Required excess for tensors between parts, which vary more than outputs do.
_SURE = 2.5
_ORDERS = 2.0
"""Factor on the difference that sums of this length may have: trusted runs on one device do not try
the orders in which another device adds. (CUDA's fused attention in float32 errs by 1.6 times what
eager attention does on either device.)"""
LEAN = 0.5
"""Units of roundoff by which a projection may leave what trusted runs have."""


class SiteStatus(NamedTuple):
    """How a site stands.

    Attributes:
        status: Its status.
        by: Which evidence decided: replay, noise, growth or weights.
        ratio: What it errs by over what is allowed.
        noise: What is expected there.
        call: The call that decided.
        reason: In words.
        inside: The part of it that is to blame.
        leaning: Whether the bias of its error is outside, not its size.
        suspected: Of an unknown site: its status by other evidence, which would convict it if it
            reproduced its own output.
    """

    status: Status
    by: str
    ratio: float
    noise: float
    call: Call
    reason: str = ""
    inside: str = ""
    leaning: bool = False
    suspected: SiteStatus | None = None


def site_statuses(
    sites: Mapping[Place, Site],
    growth: Mapping[Place, Growth],
    floor: NoiseFloor | None,
    judged: Mapping[str, ReplayResult],
) -> dict[Place, SiteStatus]:
    """Status of every site: own evidence first, then other evidence, then inheritance."""
    statuses = _own_evidence(sites, growth, floor, judged)
    # Replay is the better evidence: as soon as it convicts a site, weaker evidence may not add
    # others.
    if not any(
        entry.by == "replay" and entry.status == "introduced" for entry in statuses.values()
    ):
        statuses |= _other_evidence(sites, statuses, growth, floor, judged)
    statuses |= _gathered(sites, statuses)
    guilty = _first(statuses, sites)
    # Without a culprit nothing can be inherited: such statuses are noise near the limit.
    if guilty is None:
        return {
            place: standing._replace(status="clean")
            if standing.status in ("amplified", "inherited", "masked")
            else standing
            for place, standing in statuses.items()
        }
    return _named_parts(_relative_to(guilty, sites, statuses))


def _own_evidence(
    sites: Mapping[Place, Site],
    growth: Mapping[Place, Growth],
    floor: NoiseFloor | None,
    judged: Mapping[str, ReplayResult],
) -> dict[Place, SiteStatus]:
    """The status of every site by the best evidence there is for it."""
    within = _within(sites, floor, judged)
    statuses: dict[Place, SiteStatus] = {}
    for place, site in sites.items():
        judgement = judged.get(place.site) if place.direction == "forward" else None
        if judgement is not None:
            statuses[place] = _by_replay(site, judgement)
            # Replay of a container's own code looks at its output only; what it passes to parts is
            # judged apart.
            if statuses[place].status == "clean" and place in within:
                statuses[place] = within[place]
        elif place.direction == "param":
            statuses[place] = _weights(site)
        elif floor is not None and floor.used and _known(floor, site):
            statuses[place] = _by_noise(site, floor)
        else:
            statuses[place] = _by_growth(growth[place])
    return statuses


def _relative_to(
    guilty: Place, sites: Mapping[Place, Site], statuses: Mapping[Place, SiteStatus]
) -> dict[Place, SiteStatus]:
    """Judge every other site relative to the first culprit: what is off later inherits from it.

    Statuses that rest on noise runs or on a conviction by replay are kept.
    """
    parts = parts_of(place.site for place in sites)
    level = _level(sites, guilty)
    return {
        place: standing
        if place == guilty
        or standing.status == "unknown"
        or standing.by == "noise"
        or (standing.by == "replay" and standing.status == "introduced")
        or standing.call.outs[0].key.port == "input"
        else _handed_on(
            standing, level, parts.get(place.site, 0), contains(place.site, guilty.site)
        )
        for place, standing in statuses.items()
    }


def _other_evidence(
    sites: Mapping[Place, Site],
    statuses: Mapping[Place, SiteStatus],
    growth: Mapping[Place, Growth],
    floor: NoiseFloor | None,
    judged: Mapping[str, ReplayResult],
) -> dict[Place, SiteStatus]:
    """Sites that replay cannot judge, and which noise runs or growth convict.

    Only used where replay itself convicts no site. A site that these do not convict stays unknown,
    and so does one that does not reproduce its own output; that one becomes a suspect.
    """
    convicted: dict[Place, SiteStatus] = {}
    for place, site in sites.items():
        judgement = judged.get(place.site)
        if statuses[place].status != "unknown" or judgement is None or not judgement.is_suspect:
            continue
        if floor is not None and floor.used and _known(floor, site):
            standing = _by_noise(site, floor)
        else:
            standing = _by_growth(growth[place])
        if standing.status == "introduced" and not judgement.is_open:
            convicted[place] = statuses[place]._replace(suspected=standing)
        elif standing.status == "introduced":
            why = f"replay says nothing of it ({judgement.trouble})"
            reason = f"{standing.reason}; {why}" if standing.reason else why
            convicted[place] = standing._replace(reason=reason)
    return convicted


def _gathered(
    sites: Mapping[Place, Site], statuses: Mapping[Place, SiteStatus]
) -> dict[Place, SiteStatus]:
    """Containers that growth convicts although their parts made the error together, each a little.

    A model of many layers errs by more than its input and its own rounding explain, without any
    fault, most of all where every layer computes with integers.
    """
    guilty = [place for place, other in statuses.items() if other.status == "introduced"]
    handed: Mapping[Place, Site] | None = None
    acquitted: dict[Place, SiteStatus] = {}
    # Innermost first, so that a container is examined after everything inside it is settled.
    for place in sorted(guilty, key=lambda place: sum(1 for _ in ancestors(place.site)))[::-1]:
        inside = any(
            contains(place.site, other.site) and other.direction == place.direction
            for other in guilty
            if other not in acquitted
        )
        if inside or statuses[place].by != "growth" or place.direction != "forward":
            continue
        handed = passed_to_parts(sites) if handed is None else handed
        own = handed[place].calls if place in handed else []
        if all(adds_no_error(call, own, _STEP_UP) for call in sites[place].calls):
            acquitted[place] = statuses[place]._replace(
                status="clean", reason="its parts make this error together"
            )
    return acquitted


def _within(
    sites: Mapping[Place, Site], floor: NoiseFloor | None, judged: Mapping[str, ReplayResult]
) -> dict[Place, SiteStatus]:
    """Containers whose own code passes on more error than it was given.

    Only examined where a replay of that code looked at its output alone.
    """
    blind = {site for site, judgement in judged.items() if judgement.own_code_only}
    if not blind:
        return {}
    handed = {place: site for place, site in passed_to_parts(sites).items() if place.site in blind}
    reason = "what its own code hands to a part is off while nothing it was given is"
    convicted: dict[Place, SiteStatus] = {}
    grown = growths(handed)
    for place, site in handed.items():
        if floor is not None and floor.used and _known(floor, site):
            standing = _by_noise(site, floor)
        else:
            standing = _by_growth(grown[place])
            if standing.ratio <= _SURE:
                continue  # tensors between parts vary more than outputs do
        if standing.status == "introduced":
            convicted[place] = standing._replace(reason=reason)
    return convicted


def _by_replay(site: Site, judgement: ReplayResult) -> SiteStatus:
    call = site.worst
    if judgement.trouble:
        return SiteStatus("unknown", "replay", math.nan, math.nan, call, judgement.trouble)
    status: Status = "introduced" if judgement.introduced else "clean"
    return SiteStatus(status, "replay", judgement.excess, judgement.noise, call)


def _weights(site: Site) -> SiteStatus:
    """Status of weights, which are rounded once and computed from nothing."""
    call = site.worst
    allowed = 1.01 * call.unit
    over = max((float(row.metrics.get("max_rel_error", 0.0)) for row in call.outs), default=0.0)
    ratio = call.error / allowed if allowed > 0.0 else (math.inf if call.error > 0.0 else 0.0)
    # A few elements of odd size can exceed the relative L2 of one rounding; both measures must be
    # outside.
    if ratio > 1.0 and over > 2.0 * call.unit:
        return SiteStatus(
            "introduced", "weights", ratio, call.unit / math.sqrt(3.0), call, "its weights differ"
        )
    return SiteStatus("clean", "weights", ratio, call.unit / math.sqrt(3.0), call)


def _known(floor: NoiseFloor, site: Site) -> bool:
    return any(floor.errors.get(row.key) is not None for call in site.calls for row in call.outs)


def _by_noise(site: Site, floor: NoiseFloor) -> SiteStatus:
    """Status by the noise floor: the worst call decides; inputs are measured by the same floor."""
    best: tuple[float, SiteStatus] | None = None
    for call in site.calls:
        # Coarse formats round the result more than any order of a sum does: no allowance is needed.
        least = _ORDERS * rounding(call.unit, 0, call.length) if call.unit <= FINE else 0.0
        outs = [(floor.excess(row, least), row) for row in call.outs]
        measured = [(value, row) for value, row in outs if value is not None]
        if not measured:
            continue
        ins = [value for row in call.ins if (value := floor.excess(row, least)) is not None]
        out, row = max(measured, key=lambda pair: pair[0])
        # Captured inputs without a floor are unknown (NaN), no inputs at all mean that no error
        # came in.
        before = max(ins, default=0.0 if not call.ins else math.nan)
        noise = floor.errors[row.key]
        status: Status = "clean"
        reason, leaning = "", False
        if out > 1.0 and before > 1.0:
            status = "amplified" if out > _AMPLIFIED * before else "inherited"
        elif out > 1.0:
            status = "introduced" if out > _STEP_UP * before or math.isnan(before) else "inherited"
        elif before > 1.0:
            status = "masked"
        lean, lean_in = _leans(call, floor)
        # The bias of an error shows faults that are smaller than noise, such as a wrong epsilon.
        if status == "clean" and lean > LEAN and lean > 2.0 * lean_in:
            status, reason = "introduced", "its error leans to one side as no trusted run's does"
            out, leaning = lean / LEAN, True
        # The status comes first, the excess second: an introduced error outranks any inherited one.
        rank = _WEIGHT[status] * 1e9 + min(out, 1e8)
        if best is None or rank > best[0]:
            best = rank, SiteStatus(status, "noise", out, noise, call, reason, "", leaning)
    assert best is not None
    return best[1]


_WEIGHT: dict[Status, int] = {
    "introduced": 5,
    "amplified": 4,
    "inherited": 3,
    "masked": 2,
    "clean": 1,
    "unknown": 0,
}


def _leans(call: Call, floor: NoiseFloor) -> tuple[float, float]:
    return (
        max((floor.lean(row) for row in call.outs), default=0.0),
        max((floor.lean(row) for row in call.ins), default=0.0),
    )


def _by_growth(growth: Growth) -> SiteStatus:
    status: Status = "introduced" if growth.excess > 1.0 else "clean"
    return SiteStatus(status, "growth", growth.excess, growth.expected, growth.call)


def _first(statuses: Mapping[Place, SiteStatus], sites: Mapping[Place, Site]) -> Place | None:
    """The innermost site that introduces error, and of those the earliest."""
    guilty = [place for place, standing in statuses.items() if standing.status == "introduced"]
    if not guilty:
        return None
    inner: list[Place] = []
    for direction in DIRECTIONS:
        names = innermost(place.site for place in guilty if place.direction == direction)
        inner += [Place(direction, name) for name in names]
    return min(inner, key=lambda place: sites[place].order)


def _level(sites: Mapping[Place, Site], guilty: Place) -> float:
    """Largest relative error of what ended before the culprit: known to be without fault."""
    begun = min(call.order for call in sites[guilty].calls)
    errors = [
        call.error
        for site in over_before(sites, guilty)
        for call in site.calls
        if call.order < begun and math.isfinite(call.error)
    ]
    return max(errors, default=0.0)


def _handed_on(standing: SiteStatus, level: float, parts: int, around: bool) -> SiteStatus:
    """Status of a site that is not proven guilty, from the error that comes in and goes out.

    Args:
        standing: Its status so far.
        level: Error that was there before the first culprit.
        parts: How many sites it contains.
        around: Whether it contains the first culprit.
    """
    call = standing.call

    def beyond(error: float) -> bool:
        return error > max(2.0 * level, 4.0 * rounding(call.unit, parts, call.length))

    out, before = beyond(call.error), beyond(call.error_in)
    # NaN and Inf have no size to compare: they count as beyond any level.
    if not math.isfinite(call.error) or call.one_sided:
        out, before = True, before or call.one_sided_in > 0
    status: Status = "clean"
    if out and before:
        grown = call.error / call.error_in if call.error_in > 0.0 else math.inf
        burst = grown > _AMPLIFIED and math.isfinite(call.error) and not call.one_sided_in
        status = "amplified" if burst else "inherited"
    elif out:
        # Replay cleared it, so its own code received something wrong that is no captured tensor.
        status = "inherited" if standing.by == "replay" else "introduced"
    elif before:
        status = "masked"
    if status == "introduced" and standing.status != "introduced" and not around:
        status = "inherited"
    return standing._replace(status=status)


def _named_parts(statuses: dict[Place, SiteStatus]) -> dict[Place, SiteStatus]:
    """Let containers that err because of a part name that part."""
    for direction in DIRECTIONS:
        guilty = [
            place.site
            for place, standing in statuses.items()
            if place.direction == direction and standing.status == "introduced"
        ]
        for name in innermost(guilty):
            for outer in ancestors(name):
                place = Place(direction, outer)
                standing = statuses.get(place)
                if standing is not None and standing.status == "introduced" and not standing.inside:
                    statuses[place] = standing._replace(inside=name)
    return statuses
