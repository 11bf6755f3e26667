"""The status of every site: introduced, amplified, inherited, masked, clean or unknown.

The status says which site introduces error, which passes it on and which hides it. The best
evidence for a site decides: a replay, then recomputation, then the noise floor, then the growth of
the error. This file reads no tensor and names no cause.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from driftline.comparison.table.row import JSON
from driftline.comparison.tolerance.tolerance import HALF, REST
from driftline.comparison.verdict.dataflow import Transfer
from driftline.comparison.verdict.growth import FAULT, Growth, flat_limit, rounding
from driftline.comparison.verdict.noise import NoiseFloor
from driftline.comparison.verdict.own_error import AddedError, ReplayResult, added_error, too_coarse
from driftline.comparison.verdict.sites import (
    DIRECTIONS,
    FINE,
    ROOTS,
    Call,
    Place,
    Site,
    ancestors,
    contains,
    error_of,
    innermost,
    over_before,
    parts_of,
    unit_of,
)

# The error of an output must be clearly larger than that of the input before the site is blamed; a
# smaller increase is within the variation between runs.
_STEP_UP = 1.3
# Growth by more than this factor is called amplified rather than inherited.
_AMPLIFIED = 3.0
_ORDERS = 2.0
"""Factor on the rounding error expected of a sum of this length. Trusted runs on one device do not
try the orders in which another device adds. (CUDA's fused attention in float32 errs by 1.6 times
what eager attention does on either device.)"""
_FOLDED = 8.0
"""Units of roundoff by which merged or folded weights of a fine format may differ."""
LEAN = 0.5
"""Units of roundoff by which a projection may be outside the range of the trusted runs."""


Status: TypeAlias = Literal["introduced", "amplified", "inherited", "masked", "clean", "unknown"]
"""It makes the error, makes it larger, passes it on, hides it, has none, or cannot be judged."""


ROUTING_NOISE = "off only where a router chose other experts, at a near tie: arithmetic noise"
ROUTING_REACHES_ALL = "a router chose other experts at a near tie, and that reaches all of it"


class SiteStatus(NamedTuple):
    """The status of a site and the evidence for it.

    Attributes:
        status: Its status.
        by: The deciding evidence: replay, recomputed, noise, growth, weights, bisect or pattern.
        ratio: Its error divided by the allowed error.
        noise: The error expected from rounding.
        call: The call that decided.
        reason: The reason in words.
        inside: The part of it that is to blame.
        leaning: Whether the bias of its error is outside the allowed range, and not its size.
        suspected: For an unknown site, the status by evidence that would otherwise convict it.
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

    @property
    def jump(self) -> float:
        """How much the error grows at this site if its input does not explain it; else 0."""
        # Not in units of the limit: if all was equal before the first fault, its limit is tiny, and
        # later growth would seem small.
        came_in = 0.0 if math.isnan(self.call.error_in) else self.call.error_in
        grown = self.call.error - came_in
        return grown if self.ratio > 1.0 and math.isfinite(grown) else 0.0

    @property
    def drowns(self) -> bool:
        """Whether trusted runs have such large errors there that nothing can be concluded."""
        return (self.status, self.by) == ("unknown", "noise")


_NO_REPLAY: Mapping[str, ReplayResult] = {}
_NO_INTEGERS: Mapping[str, float] = {}


class Evidence(NamedTuple):
    """What is known besides the two runs.

    Attributes:
        replayed: Replay results of single sites, by the reference's names.
        floor: The errors of trusted runs at every tensor.
        proven: The site whose correction restores the final output, by substitution; else empty.
        proven_share: Fraction of the final error that the correction removes.
    """

    replayed: Mapping[str, ReplayResult] = _NO_REPLAY
    floor: NoiseFloor | None = None
    proven: str = ""
    proven_share: float = 0.0

    def as_json(self) -> dict[str, JSON]:
        """Return the JSON that a table stores; empty if there is no evidence.

        Lists of pairs instead of objects: a module may have the name of a key of the table.
        """
        shown: dict[str, JSON] = {}
        if self.replayed:
            shown["replayed"] = [[site, entry.as_json()] for site, entry in self.replayed.items()]
        if self.floor is not None:
            shown["floor"] = self.floor.as_json()
        if self.proven:
            shown["proven"] = [self.proven, self.proven_share]
        return shown

    @classmethod
    def from_json(cls, shown: Mapping[str, JSON]) -> Evidence:
        """The inverse of `as_json`.

        Raises:
            KeyError: A value is missing.
            TypeError, ValueError: A value is of another kind than `as_json` writes.
        """
        site, share = shown.get("proven", ("", 0.0))
        return cls(
            {str(name): ReplayResult.from_json(entry) for name, entry in shown.get("replayed", ())},
            NoiseFloor.from_json(shown["floor"]) if "floor" in shown else None,
            str(site),
            float(share),
        )

    @property
    def known_steps(self) -> dict[str, frozenset[int]]:
        """Steps that a replay covered, for each site that it did not cover in all steps."""
        return {
            site: frozenset(own.steps)
            for site, own in self.replayed.items()
            if own.steps is not None and not own.trouble
        }

    @property
    def has_noise(self) -> bool:
        """Whether trusted runs have measured the noise of the candidate's format."""
        return self.floor is not None and bool(self.floor.used)


NO_EVIDENCE = Evidence()


def site_statuses(
    sites: Mapping[Place, Site],
    transfers: Mapping[Place, Sequence[Transfer]],
    growth: Mapping[Place, Growth],
    evidence: Evidence,
    quantised: Mapping[str, float] = _NO_INTEGERS,
) -> dict[Place, SiteStatus]:
    """Return the status of every site: own evidence first, then other evidence, then inheritance.

    Args:
        sites: The sites to judge.
        transfers: For each of them, what came in and what it computed from that.
        growth: Its error compared with the error that came in.
        evidence: What is known besides the two runs.
        quantised: Relative error that sites may have because they compute with integers.
    """
    statuses = _own_evidence(sites, transfers, growth, evidence, quantised)
    # Replay is the better evidence: if it convicts a site, weaker evidence may not add others.
    if not any(
        entry.by == "replay" and entry.status == "introduced" for entry in statuses.values()
    ):
        statuses |= _other_evidence(sites, statuses, growth, evidence)
    statuses |= _proven(sites, statuses, evidence)
    guilty = next(iter(culprits_of(sites, statuses)), None)
    # Without a culprit nothing can be inherited; such statuses are noise near the limit.
    if guilty is None:
        return {
            place: standing._replace(status="clean")
            if standing.status in ("amplified", "inherited", "masked")
            else standing
            for place, standing in statuses.items()
        }
    return _named_parts(_relative_to(guilty, sites, statuses))


_PROVES = 0.5
"""Least fraction of the final error that correcting a site removes if substitution convicts it."""


def _proven(
    sites: Mapping[Place, Site], statuses: Mapping[Place, SiteStatus], evidence: Evidence
) -> dict[Place, SiteStatus]:
    """Return the site that substitution convicts, unless other evidence convicts it already.

    A conviction of a part or a container of the site counts as well.
    """
    place = Place("forward", evidence.proven)
    if not evidence.proven or evidence.proven_share < _PROVES or place not in sites:
        return {}
    for other, standing in statuses.items():
        about = other == place or contains(place.site, other.site)
        if standing.status == "introduced" and (about or contains(other.site, place.site)):
            return {}
    reason = f"with it corrected, {evidence.proven_share:.0%} of the final error is gone"
    call = sites[place].worst
    return {place: SiteStatus("introduced", "bisect", math.inf, math.nan, call, reason)}


def _own_evidence(
    sites: Mapping[Place, Site],
    transfers: Mapping[Place, Sequence[Transfer]],
    growth: Mapping[Place, Growth],
    evidence: Evidence,
    quantised: Mapping[str, float],
) -> dict[Place, SiteStatus]:
    """Return the status of every site by the best evidence available for it."""
    floor = evidence.floor
    within = _passing_wrong_inputs(sites, transfers, growth, evidence)
    parts = parts_of(place.site for place in sites if evidence.replayed)
    statuses: dict[Place, SiteStatus] = {}
    for place, site in sites.items():
        judgement = evidence.replayed.get(place.site) if place.direction == "forward" else None
        if judgement is not None:
            codes = quantised.get(place.site, 0.0)
            statuses[place] = _by_replay(site, judgement, codes, is_leaf=place.site not in parts)
            # A replay of a container's own code checks its output only; what it passes to its parts
            # is judged separately.
            if statuses[place].status == "clean" and place in within:
                statuses[place] = within[place]
        elif place.direction == "param":
            statuses[place] = _weights(site)
        elif (recomputed := _by_recomputation(site)) is not None:
            statuses[place] = recomputed
        elif floor is not None and floor.used and _has_floor(floor, site):
            statuses[place] = _confirmed(_by_noise(_own_code(site, transfers[place]), floor))
        else:
            statuses[place] = _confirmed(_by_growth(growth[place]))
            # The deciding transfer says where a container is wrong; a clean one has its worst call.
            if statuses[place].status == "clean":
                statuses[place] = statuses[place]._replace(call=site.worst)
    return statuses


_TINY = 2.0
"""Units of roundoff up to which an error is negligible, and its output need not be recomputed."""


def _by_recomputation(site: Site) -> SiteStatus | None:
    """Return the status by the reference's function on the candidate's input; None if unknown.

    Every call that differs must have been recomputed: any other may be the wrong one.
    """
    worst: tuple[AddedError, Call] | None = None
    for call in site.calls:
        for row in call.outs:
            added = added_error(row)
            if added is None:
                if error_of(row) > _TINY * unit_of(row):
                    return None
            elif worst is None or added.ratio > worst[0].ratio:
                worst = added, call
    if worst is None:
        return None
    added, call = worst
    status: Status = "introduced" if added.fault else "clean"
    return SiteStatus(status, "recomputed", added.ratio, added.allowed, call, added.reason)


_BY_ITSELF = ("replay", "recomputed", "bisect")
"""Evidence about what a site adds, independent of the error of its inputs."""
_GROSS = 4.0
"""Multiple of its limit above which an error counts although one half of the tokens lacks it."""


def _confirmed(standing: SiteStatus) -> SiteStatus:
    """Return the status, cleared if a second look at the tensor has shown an accident."""
    row = standing.call.worst
    half, rest = row.metrics.get(HALF), row.metrics.get(REST)
    if half is None or rest is None or is_borne_out(standing, float(half), float(rest)):
        return standing
    if rest == 0.0:
        return standing._replace(status="unknown", reason=ROUTING_REACHES_ALL)
    routed = rest < 0.999 * standing.call.error
    reason = ROUTING_NOISE if routed else "seen on one half of the tokens only"
    return standing._replace(status="clean", reason=reason)


def is_borne_out(standing: SiteStatus, half: float, rest: float) -> bool:
    """Whether a second look confirms a suspicion.

    No site is to blame for an error that one half of the tokens shows, unless it is gross, nor for
    one in tokens that a router sent to other experts at a near tie.

    Args:
        standing: The status of the site before the second look.
        half: Relative error on the half of the tokens where it is smaller.
        rest: Relative error without the tokens that were sent to other experts.
    """
    if standing.status != "introduced" or not math.isfinite(standing.ratio):
        return True
    # A bias counts only if both halves show it.
    if standing.leaning or not standing.ratio > 0.0:
        return half > 0.0
    limit = standing.call.error / standing.ratio
    return half > limit or rest > _GROSS * limit


def _relative_to(
    guilty: Place, sites: Mapping[Place, Site], statuses: Mapping[Place, SiteStatus]
) -> dict[Place, SiteStatus]:
    """Judge all other sites relative to the first culprit: later errors inherit from it.

    Statuses by noise runs, and convictions by evidence about single sites, are kept.
    """
    parts = parts_of(place.site for place in sites)
    level = _level(sites, guilty)
    return {
        place: standing
        if place == guilty
        or standing.status == "unknown"
        or standing.by == "noise"
        or (standing.by in _BY_ITSELF and standing.status == "introduced")
        or standing.call.outs[0].key.port == "input"
        else _relative_status(standing, level, parts.get(place.site, 0))
        for place, standing in statuses.items()
    }


def _other_evidence(
    sites: Mapping[Place, Site],
    statuses: Mapping[Place, SiteStatus],
    growth: Mapping[Place, Growth],
    evidence: Evidence,
) -> dict[Place, SiteStatus]:
    """Return sites that noise runs or growth convict although replay does not cover them fully.

    Used only if replay convicts no site. All other sites keep their status; one that does not
    reproduce its own output is marked as suspected.
    """
    floor = evidence.floor
    convicted: dict[Place, SiteStatus] = {}
    for place, site in sites.items():
        judgement = evidence.replayed.get(place.site) if place.direction == "forward" else None
        if judgement is None or statuses[place].status not in ("unknown", "clean"):
            continue
        asked, why = site, judgement.trouble
        if not why:
            asked = Site(
                place, site.class_name, site.candidate_class, _not_replayed(site, judgement)
            )
            why = "it was replayed in other steps only"
        if not asked.calls:
            continue
        if floor is not None and floor.used and _has_floor(floor, asked):
            standing = _confirmed(_by_noise(asked, floor))
        else:
            standing = _confirmed(_by_growth(growth[place]))
        if standing.status == "introduced" and judgement.failed:
            convicted[place] = statuses[place]._replace(suspected=standing)
        elif standing.status == "introduced":
            why = f"replay says nothing of it ({why})"
            reason = f"{standing.reason}; {why}" if standing.reason else why
            convicted[place] = standing._replace(reason=reason)
    return convicted


def _own_code(site: Site, transfers: Sequence[Transfer]) -> Site:
    """Return the model reduced to the outputs of its own code; other sites are returned unchanged.

    Containers with weights of their own (experts) stay whole: most of their error comes before the
    parts.
    """
    if site.place.site not in ROOTS:
        return site
    made = [
        transfer.call
        for transfer in transfers
        if transfer.of_container and transfer.call.outs[0].key.port == "output"
    ]
    return Site(site.place, site.class_name, site.candidate_class, made) if made else site


def _not_replayed(site: Site, judgement: ReplayResult) -> list[Call]:
    """Calls of a site that replay did not cover; replay does not acquit them."""
    if judgement.steps is None:
        return []
    return [call for call in site.calls if call.step not in judgement.steps]


def _passing_wrong_inputs(
    sites: Mapping[Place, Site],
    transfers: Mapping[Place, Sequence[Transfer]],
    growth: Mapping[Place, Growth],
    evidence: Evidence,
) -> dict[Place, SiteStatus]:
    """Return containers whose own code passes more error to a part than the container was given.

    Only containers are examined whose own code was replayed with a check of the output alone.
    """
    floor = evidence.floor
    reason = "what its own code hands to a part is off while nothing it was given is"
    convicted: dict[Place, SiteStatus] = {}
    for place, site in sites.items():
        judgement = evidence.replayed.get(place.site) if place.direction == "forward" else None
        if judgement is None or not judgement.own_code_only:
            continue
        handed = [
            transfer.call
            for transfer in transfers[place]
            if transfer.of_container and transfer.call.outs[0].key.port == "input"
        ]
        if not handed:
            continue
        passed = Site(place, site.class_name, site.candidate_class, handed)
        if floor is not None and floor.used and _has_floor(floor, passed):
            standing = _confirmed(_by_noise(passed, floor))
        else:
            standing = _confirmed(_by_growth(growth[place]))
            # The replay has already checked the output.
            if standing.call.outs[0].key.port != "input":
                continue
        if standing.status == "introduced":
            convicted[place] = standing._replace(reason=reason)
    return convicted


def _by_replay(site: Site, judgement: ReplayResult, codes: float, *, is_leaf: bool) -> SiteStatus:
    """Return the status by a replay; `codes` is the error that the site's integers may have."""
    call = site.worst
    limit = max(flat_limit(call), codes)
    # If a trusted module in this format has the same error, the format itself is wrong. This test
    # is for leaves only: a container's error is the sum of its parts' errors.
    as_wrong = is_leaf and not judgement.introduced and not judgement.failed
    if as_wrong and min(judgement.noise, call.error) > limit > 0.0:
        name = "a format of integers" if codes else call.worst.candidate_dtype
        reason, ratio = too_coarse(name, judgement.noise), judgement.noise / limit
        return SiteStatus("introduced", "replay", ratio, judgement.noise, call, reason)
    if judgement.trouble:
        return SiteStatus("unknown", "replay", math.nan, math.nan, call, judgement.trouble)
    status: Status = "introduced" if judgement.introduced else "clean"
    return SiteStatus(status, "replay", judgement.excess, judgement.noise, call, judgement.reason)


def _weights(site: Site) -> SiteStatus:
    """Return the status of weights, which are rounded once and have no inputs.

    Only the first step is judged: from the second step on, an optimizer has computed them.
    """
    first = min(call.step for call in site.calls)
    call = max((call for call in site.calls if call.step == first), key=lambda call: call.error)
    # Merged or folded weights of a fine format were rounded more than once.
    allowed = (_FOLDED if call.unit <= FINE else 1.01) * call.unit
    # Integers with scales have larger steps, and have passed by a limit for those. Weights after an
    # update are excluded, because they are computed from gradients.
    rows = [
        row
        for row in call.outs
        if row.key.moment != "after"
        and (row.status == "fail" or not row.limit_from.endswith("scales"))
    ]
    over = max((float(row.metrics.get("max_rel_error", 0.0)) for row in rows), default=0.0)
    error = max((error_of(row) for row in rows), default=0.0)
    ratio = error / allowed if allowed > 0.0 else (math.inf if error > 0.0 else 0.0)
    # A few elements of unusual size can exceed the relative L2 of one rounding, so both measures
    # must be outside.
    if ratio > 1.0 and over > 2.0 * call.unit:
        return SiteStatus(
            "introduced", "weights", ratio, call.unit / math.sqrt(3.0), call, "its weights differ"
        )
    return SiteStatus("clean", "weights", ratio, call.unit / math.sqrt(3.0), call)


def _has_floor(floor: NoiseFloor, site: Site) -> bool:
    return any(floor.errors.get(row.key) is not None for call in site.calls for row in call.outs)


def _by_noise(site: Site, floor: NoiseFloor) -> SiteStatus:
    """Return the status by the noise floor, which applies to inputs too; the worst call decides."""
    best: tuple[float, SiteStatus] | None = None
    for call in site.calls:
        # Coarse formats need no allowance: they round the result more than any order of a sum does.
        least = _ORDERS * rounding(call.unit, 0, call.length) if call.unit <= FINE else 0.0
        outs = [(floor.excess(row, least), row) for row in call.outs]
        measured = [(value, row) for value, row in outs if value is not None]
        if not measured:
            continue
        ins = [value for row in call.ins if (value := floor.excess(row, least)) is not None]
        out, row = max(measured, key=lambda pair: pair[0])
        # Captured inputs without a floor are unknown (NaN). A call without inputs took in no error.
        before = max(ins, default=0.0 if not call.ins else math.nan)
        noise = floor.errors[row.key]
        status = _by_excess(out, before)
        reason, leaning = "", False
        lean, lean_in = _biases(call, floor)
        # The bias of an error reveals faults that are smaller than noise, such as a wrong epsilon.
        if status == "clean" and lean > LEAN and lean > 2.0 * lean_in:
            status, reason = "introduced", "its error leans to one side as no trusted run's does"
            out, leaning = lean / LEAN, True
        # Gradients of deep models may be this far off and still be right.
        elif status == "clean" and noise > FAULT and site.place.direction == "forward":
            status = "unknown"
            reason = f"trusted runs are off by {noise:.2g} themselves: a fault could hide in that"
        # Sorted by status, then by excess: an introduced error outranks any inherited one.
        rank = _WEIGHT[status] * 1e9 + min(out, 1e8)
        if best is None or rank > best[0]:
            best = rank, SiteStatus(status, "noise", out, noise, call, reason, "", leaning)
    assert best is not None
    return best[1]


def _by_excess(out: float, before: float) -> Status:
    """Return the status of a result by its noise excess and the excess of its inputs."""
    if out > 1.0 and before > 1.0:
        return "amplified" if out > _AMPLIFIED * before else "inherited"
    if out > 1.0:
        return "introduced" if out > _STEP_UP * before or math.isnan(before) else "inherited"
    return "masked" if before > 1.0 else "clean"


_WEIGHT: dict[Status, int] = {
    "introduced": 5,
    "amplified": 4,
    "inherited": 3,
    "masked": 2,
    "clean": 1,
    "unknown": 0,
}


def _biases(call: Call, floor: NoiseFloor) -> tuple[float, float]:
    return (
        max((floor.lean(row) for row in call.outs), default=0.0),
        max((floor.lean(row) for row in call.ins), default=0.0),
    )


def _by_growth(growth: Growth) -> SiteStatus:
    status: Status = "introduced" if growth.excess > 1.0 else "clean"
    return SiteStatus(status, "growth", growth.excess, growth.expected, growth.call)


def culprits_of(sites: Mapping[Place, Site], statuses: Mapping[Place, SiteStatus]) -> list[Place]:
    """Return the innermost sites that introduce error, in order of execution."""
    guilty = [place for place, standing in statuses.items() if standing.status == "introduced"]
    inner: list[Place] = []
    for direction in DIRECTIONS:
        names = innermost(place.site for place in guilty if place.direction == direction)
        inner += [Place(direction, name) for name in names]
    inner.sort(key=lambda place: sites[place].order)
    return inner


def _level(sites: Mapping[Place, Site], guilty: Place) -> float:
    """Largest relative error of calls that ended before the culprit began; they have no fault."""
    begun = min(call.order for call in sites[guilty].calls)
    errors = [
        call.error
        for site in over_before(sites, guilty)
        for call in site.calls
        if call.order < begun and math.isfinite(call.error)
    ]
    return max(errors, default=0.0)


def _relative_status(standing: SiteStatus, level: float, parts: int) -> SiteStatus:
    """Return the status of a site that is not convicted, from its input and output error.

    Args:
        standing: Its status so far.
        level: Largest error before the first culprit.
        parts: Number of sites that it contains.
    """
    call = standing.call

    def beyond(error: float) -> bool:
        return error > max(2.0 * level, 4.0 * rounding(call.unit, parts, call.length))

    out, before = beyond(call.error), beyond(call.error_in)
    # NaN and Inf have no size to compare; they count as beyond any level.
    if not math.isfinite(call.error) or call.one_sided:
        out, before = True, before or call.one_sided_in > 0
    status: Status = "clean"
    if out and before:
        grown = call.error / call.error_in if call.error_in > 0.0 else math.inf
        burst = grown > _AMPLIFIED and math.isfinite(call.error) and not call.one_sided_in
        status = "amplified" if burst else "inherited"
    elif out:
        # Replay cleared the site, so its own code received a wrong value that was not captured.
        status = "inherited" if standing.by == "replay" else "introduced"
    elif before:
        status = "masked"
    # A container is guilty only of its own code, never of what its parts did.
    if status == "introduced" and standing.status != "introduced":
        status = "inherited"
    return standing._replace(status=status)


def _named_parts(statuses: dict[Place, SiteStatus]) -> dict[Place, SiteStatus]:
    """Set `inside` of containers that err because of a part to the name of that part."""
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
                if standing is None or standing.inside:
                    continue
                if standing.status in ("introduced", "inherited", "amplified"):
                    statuses[place] = standing._replace(inside=name)
    return statuses
