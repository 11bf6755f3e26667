"""Patterns over like sites: a small error that every layer adds, too small to convict one of them.

Siblings are the sites of one role: the same place in every layer. Rounding has no preferred
direction, so what a site adds along its own result (`projection`) has no common sign over siblings,
and where tokens are exchanged or a norm holds the size, it is at most the square of the error. A
factor that somebody forgot or added has the same sign and size in all of them. Works on rows alone
and reads no tensor. Another pattern is a result of another shape, which was compared with nothing:
who is given it seems to err.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from driftline.comparison.evidence.rules import ADDED_PROJECTION
from driftline.comparison.table.row import Row
from driftline.comparison.tolerance.tolerance import ADDED, ADDED_ALLOWED
from driftline.comparison.verdict.dataflow import first_of_other_shape, makers_of_other_shapes
from driftline.comparison.verdict.sites import Call, Place, Site, contains, error_of, unit_of
from driftline.comparison.verdict.status import SiteStatus

SIBLINGS = 4
"""Members a role needs for a pattern: fewer agree in sign by chance."""
_NEARLY_ALL = 0.8
"""Share of the siblings that must show it: inherited noise may hide it in the others."""
_ALIKE = 0.25
"""Spread of a factor over siblings, as a share of it, up to which it is one factor."""
_UNITS = 2.0
"""Units of roundoff that a norm computed in steps, or a kernel that truncates, may lean by."""
_PRODUCT = 2.0
_LEAST = 2.0**-11
"""Least factor, less one, of a pattern: TF32 and truncating kernels lean by less."""
_MEASURED = ("replay", "noise")
"""Evidence that has measured how much a site may lean."""


class Pattern(NamedTuple):
    """A fault that like sites share.

    Attributes:
        members: The sites that have it, in order of execution.
        siblings: How many sites of the role there are.
        factor: What their results are multiplied by; NaN where that is not the same for all.
        low: Least factor of a member.
        high: Largest.
        error: The usual relative error that a member adds.
        explained: What the number format explains of it; NaN where that is not known.
        kind: What the members have in common: the last part of their names, or their class.
        clear: In how many of them it is larger than noise.
    """

    members: tuple[Place, ...]
    siblings: int
    factor: float
    low: float
    high: float
    error: float
    explained: float
    kind: str
    clear: int

    @property
    def first(self) -> Place:
        return self.members[0]

    @property
    def sentence(self) -> str:
        """Who, how many, and what: "all 32 `down_proj`: scaled by 1.05"."""
        count = len(self.members)
        who = f"all {count}" if count == self.siblings else f"{count} of {self.siblings}"
        hidden = "" if self.clear == count else f" (clear in {self.clear}, noise hides the others)"
        if math.isfinite(self.factor):
            what = f"scaled by {_shown(self.factor)}"
        elif math.isfinite(self.low):
            what = f"scaled, by {_shown(self.low)} to {_shown(self.high)}"
        else:
            what = f"each adds a relative error of about {self.error:.2g}"
            if math.isfinite(self.explained):
                what += f", of which its number format explains {self.explained:.2g}"
        return f"{who} `{self.kind}`: {what}{hidden}"


def _shown(factor: float) -> str:
    """A factor with two digits of what it differs from one by."""
    return f"{1.0 + float(f'{factor - 1.0:.2g}'):.6g}"


class _Lean(NamedTuple):
    """What one site adds along its own result, and how much of that may be chance."""

    place: Place
    lean: float
    noise: float


def scaled_siblings(sites: Mapping[Place, Site]) -> list[Pattern]:
    """Roles whose members are all off by a factor in the same direction, in order of execution.

    A container is left out where its parts show it, and so is everything downstream: a site counts
    by what it adds to the lean of its input.
    """
    roles: dict[tuple[str, ...], list[Site]] = {}
    for place, site in sites.items():
        if place.direction == "forward":
            roles.setdefault(site.role, []).append(site)
    patterns: list[Pattern] = []
    for members in roles.values():
        # Most roles of most tables end here.
        if len(members) < SIBLINGS or sum(map(_may_lean, members)) < SIBLINGS:
            continue
        if (pattern := _scaled(members)) is not None:
            patterns.append(pattern)
    if not patterns:
        return []
    made_by: dict[tuple[float, ...], str] = {}
    for place, site in sites.items():
        if place.direction == "forward":
            # The innermost maker of a tensor comes first: a container gives it on afterwards.
            made_by.setdefault(_identity(site.calls[0].outs[0]), place.site)
    patterns = [
        pattern
        for pattern in patterns
        if not contains(
            pattern.first.site, made_by[_identity(sites[pattern.first].calls[0].outs[0])]
        )
    ]
    inner = [
        pattern
        for pattern in patterns
        if not any(_surrounds(pattern, other) for other in patterns if other is not pattern)
    ]
    return sorted(inner, key=lambda pattern: sites[pattern.first].order)


def scaled_before(
    sites: Mapping[Place, Site], statuses: Mapping[Place, SiteStatus], culprits: Sequence[Place]
) -> Pattern | None:
    """The first factor that siblings share, unless a culprit comes before it."""
    for pattern in scaled_siblings(sites):
        if culprits and sites[culprits[0]].order < sites[pattern.first].order:
            return None
        standings = [statuses[place] for place in pattern.members]
        cleared = sum(
            standing.by in _MEASURED and standing.status == "clean" for standing in standings
        )
        if 2 * cleared < len(standings):
            return pattern
    return None


def with_pattern(statuses: Mapping[Place, SiteStatus], pattern: Pattern) -> dict[Place, SiteStatus]:
    """Statuses where all members of a pattern are guilty of it."""
    return {
        place: standing._replace(
            status="introduced", by="pattern", ratio=math.inf, reason=pattern.sentence
        )
        if place in pattern.members
        else standing
        for place, standing in statuses.items()
    }


def like_sites(
    sites: Mapping[Place, Site], excesses: Mapping[Place, float], first: Place
) -> Pattern | None:
    """The pattern that a convicted site belongs to; None if it stands alone.

    Args:
        sites: All of them.
        excesses: What sites err by over what is allowed, by the evidence that convicts; sites that
            have no such evidence are not there.
        first: The site that is convicted.
    """
    guilty = sites[first]
    place_of = {id(site): place for place, site in sites.items()}

    def members_of(alike: Iterable[Site]) -> tuple[list[Place], int]:
        places = [place_of[id(site)] for site in alike if place_of[id(site)] in excesses]
        return [place for place in places if excesses[place] > 1.0], len(places)

    forward = [site for site in sites.values() if site.place.direction == first.direction]
    # A class first: where all linears of all roles do it, one role would be too little to say.
    by_class = [site for site in forward if site.class_name == guilty.class_name]
    by_role = [site for site in by_class if site.role == guilty.role]
    kinds = ((by_class, guilty.class_name), (by_role, first.site.rpartition(".")[2]))
    for alike, kind in kinds:
        members, count = members_of(alike)
        if len(members) < SIBLINGS or len(members) < _NEARLY_ALL * count or first not in members:
            continue
        if kind:
            return _named(members, count, sites, kind)
    return None


def _named(members: Sequence[Place], count: int, sites: Mapping[Place, Site], kind: str) -> Pattern:
    rows = [sites[place].worst.worst for place in members]
    leans = [_lean(sites[place]) for place in members]
    scaled = [entry.lean for entry in leans if entry is not None]
    low = high = factor = math.nan
    # Nearly all of what they add lies along their results: they are scaled.
    if (
        len(scaled) == len(members)
        and _is_common(scaled)
        and all(abs(lean) > 0.7 * _added(row) for lean, row in zip(scaled, rows, strict=True))
    ):
        factor, low, high = _factors(scaled)
    allowed = [float(row.metrics[ADDED_ALLOWED]) for row in rows if ADDED_ALLOWED in row.metrics]
    return Pattern(
        tuple(members),
        count,
        factor,
        low,
        high,
        median(_added(row) for row in rows),
        median(allowed) if len(allowed) == len(rows) else math.nan,
        kind,
        len(members),
    )


def _added(row: Row) -> float:
    return float(row.metrics[ADDED]) if ADDED in row.metrics else error_of(row)


def _scaled(members: Sequence[Site]) -> Pattern | None:
    """The pattern of one role, if its members have one."""
    leans = [lean for site in members if (lean := _lean(site)) is not None]
    if len(leans) < SIBLINGS:
        return None
    clear = [entry for entry in leans if abs(entry.lean) > entry.noise]
    if len(clear) < SIBLINGS or not _is_common([entry.lean for entry in clear]):
        return None
    usual = abs(median(entry.lean for entry in clear))
    # Those that noise hides it from tell nothing; of the others nearly all must show it.
    telling = [entry for entry in leans if entry.noise < usual]
    if len(clear) < _NEARLY_ALL * len(telling):
        return None
    middle = median(entry.lean for entry in clear)
    # A sibling that does not contradict belongs to it, although it alone would show nothing.
    alike = [
        entry
        for entry in leans
        if abs(entry.lean) > entry.noise or abs(entry.lean - middle) <= entry.noise + _ALIKE * usual
    ]
    by_place = {site.place: site for site in members}
    alike.sort(key=lambda entry: by_place[entry.place].order)
    factor, low, high = _factors([entry.lean for entry in clear])
    if math.isfinite(factor):
        factor = 1.0 + _weighted_lean(clear)
    places = tuple(entry.place for entry in alike)
    kind = places[0].site.rpartition(".")[2]
    if kind.isdigit():
        kind = members[0].class_name or kind
    return Pattern(places, len(leans), factor, low, high, usual, math.nan, kind, len(clear))


def _weighted_lean(entries: Sequence[_Lean]) -> float:
    """The mean lean; quiet siblings know it better than noisy ones."""
    weights = [entry.noise**-2 for entry in entries]
    total = sum(entry.lean * weight for entry, weight in zip(entries, weights, strict=True))
    return total / sum(weights)


def _factors(leans: Sequence[float]) -> tuple[float, float, float]:
    """The common factor, NaN if there is none, and the least and largest one."""
    middle = median(leans)
    spread = 1.4826 * median(abs(lean - middle) for lean in leans)
    factor = 1.0 + middle if spread <= _ALIKE * abs(middle) else math.nan
    return factor, 1.0 + min(leans), 1.0 + max(leans)


def _is_common(leans: Sequence[float]) -> bool:
    return all(lean > 0.0 for lean in leans) or all(lean < 0.0 for lean in leans)


def _lean(site: Site) -> _Lean | None:
    """What a site adds along its own result: the median of its calls; None if nothing tells."""
    entries = [entry for call in site.calls if (entry := _of_call(call)) is not None]
    if not entries:
        return None
    lean = median(lean for lean, _ in entries)
    return _Lean(site.place, lean, max(noise for _, noise in entries))


def _of_call(call: Call) -> tuple[float, float] | None:
    if len(call.outs) != 1:
        return None
    row = call.outs[0]
    floor = max(_UNITS * max(call.unit, unit_of(row)), _LEAST)
    if ADDED_PROJECTION in row.metrics and ADDED in row.metrics:
        lean = float(row.metrics[ADDED_PROJECTION])
        return lean, floor + max(float(row.metrics[ADDED]) ** 2 - lean**2, 0.0)
    lean = _projection(row)
    if lean is None or not call.ins:
        return None
    input_projections = [
        projection for other in call.ins if (projection := _projection(other)) is not None
    ]
    if not input_projections:
        return None
    across = _across(row) + max(_across(other) for other in call.ins)
    # What came in with a lean may go out with it (a linear) or without (a norm): the smaller change
    # of the two is what the site has added at least.
    before = max(input_projections, key=abs)
    changes = (lean, lean - before)
    # A product of what was given goes as its square: twice the lean may come out of right code.
    noise = floor + across + _PRODUCT * abs(before)
    return (min(changes, key=abs) if changes[0] * changes[1] > 0.0 else 0.0), noise


def _may_lean(site: Site) -> bool:
    """Whether some result of a site leans by more than rounding does."""
    for call in site.calls:
        for row in call.outs:
            lean = row.metrics.get(ADDED_PROJECTION, row.metrics.get("projection", 0.0))
            if abs(lean) > _LEAST and abs(lean) > _UNITS * unit_of(row):
                return True
    return False


def _identity(row: Row) -> tuple[float, ...]:
    """Figures that two rows have in common if they are about one tensor."""
    names = ("relative_l2", "projection", "reference_l2", "candidate_l2")
    return tuple(float(row.metrics.get(name, math.nan)) for name in names)


def _projection(row: Row) -> float | None:
    value = row.metrics.get("projection")
    return float(value) if value is not None and math.isfinite(value) else None


def _across(row: Row) -> float:
    """Energy of the error across the result: chance leans along it by no more than this."""
    along, error = _projection(row), error_of(row)
    if along is None or not math.isfinite(error):
        return math.inf
    return max(error**2 - along**2, 0.0)


def _surrounds(pattern: Pattern, other: Pattern) -> bool:
    """Whether the sites of a pattern contain those of another."""
    return any(
        contains(place.site, inner.site) for place in pattern.members for inner in other.members
    )


# Results of another shape.


def with_source(
    sites: dict[Place, Site], statuses: dict[Place, SiteStatus], rows: Sequence[Row]
) -> tuple[dict[Place, Site], dict[Place, SiteStatus]]:
    """Sites and how they stand, where the first result of another shape is what two runs show.

    The module that is given it, or the one around both, is then blamed for nothing.
    """
    source = first_of_other_shape(rows)
    if source is None or Place("forward", source.key.site) in sites:
        return sites, _with_makers(sites, statuses, rows)
    maker = Place("forward", source.key.site)
    shapes = source.reference_shape, source.candidate_shape
    receivers = {
        row.key.site
        for row in rows
        if row.key.port == "input" and (row.reference_shape, row.candidate_shape) == shapes
    }
    blamed = [
        place
        for place, standing in statuses.items()
        if (place.direction, standing.status, standing.by) == ("forward", "introduced", "growth")
        and standing.call.worst.order > source.order
        and (contains(place.site, maker.site) or place.site in receivers)
    ]
    if not blamed:
        return sites, _with_makers(sites, statuses, rows)
    key = source.key
    call = Call(key.step, key.rank, source.order, source.order, outs=[source], process=key.process)
    call.error = math.inf
    site = Site(maker, source.class_name, source.candidate_class, [call])
    own, other = (list(shape or ()) for shape in shapes)
    reason = f"its result has shape {own}, in the candidate {other}"
    convicted = SiteStatus("introduced", "pattern", math.inf, math.nan, call, reason)
    cleared = {place: statuses[place]._replace(status="inherited") for place in blamed}
    ordered = sorted({**sites, maker: site}.items(), key=lambda item: item[1].order)
    return dict(ordered), _with_makers(sites, {**statuses, **cleared, maker: convicted}, rows)


def _with_makers(
    sites: Mapping[Place, Site], statuses: dict[Place, SiteStatus], rows: Sequence[Row]
) -> dict[Place, SiteStatus]:
    """Containers blamed for what their own code hands to a part in another shape."""
    changed = dict(statuses)
    for name, maker in makers_of_other_shapes(rows).items():
        # By two runs a part errs that was given another thing than the reference's.
        part, container = Place("forward", name), Place("forward", maker)
        standing = statuses.get(part)
        if container not in sites or standing is None:
            continue
        if (standing.status, standing.by) == ("introduced", "growth"):
            changed[part] = standing._replace(status="inherited")
            changed[container] = standing._replace(reason=f"it hands another shape to '{name}'")
    return changed
