"""Patterns over similar sites: a small error that every layer adds, too small to convict one layer.

Siblings are the sites of one role: the same place in every layer. Rounding has no preferred
direction, so the part of an error along the site's own result (`projection`) has no common sign
over siblings. Where tokens are exchanged or a norm preserves the size, that part is at most the
square of the error. A factor that a programmer forgot or added has the same sign and size in all
siblings. Another pattern is a result of another shape: it was compared with nothing, so the site
that receives it seems to err. This file reads rows only, and no tensor.
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
"""Smallest number of siblings for a pattern: fewer may agree in sign by chance."""
_NEARLY_ALL = 0.8
"""Fraction of the siblings that must show it: inherited noise may hide it in the others."""
_ALIKE = 0.25
"""Spread of a factor over siblings, relative to the factor, up to which it counts as one factor."""
_UNITS = 2.0
"""Units of roundoff of bias that a norm computed in steps, or a truncating kernel, may have."""
_PRODUCT = 2.0
_LEAST = 2.0**-11
"""Smallest `|factor - 1|` of a pattern: TF32 and truncating kernels have less bias."""
_MEASURED = ("replay", "noise")
"""Evidence that has measured how much bias a site may have."""


class Pattern(NamedTuple):
    """A fault that similar sites share.

    Attributes:
        members: The sites that have it, in order of execution.
        siblings: Number of sites of the role.
        factor: Factor by which their results are multiplied; NaN if it is not the same for all.
        low: Smallest factor of a member.
        high: Largest factor of a member.
        error: Median relative error that a member adds.
        explained: The part of it that the number format explains; NaN if unknown.
        kind: What the members have in common: the last part of their names, or their class.
        clear: Number of members in which it is larger than noise.
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
        """Sentence with members, count and fault: "all 32 `down_proj`: scaled by 1.05"."""
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
    """Return the factor as text, with two digits of its difference from one."""
    return f"{1.0 + float(f'{factor - 1.0:.2g}'):.6g}"


class _Lean(NamedTuple):
    """The error that one site adds along its own result, and how much of it may be chance."""

    place: Place
    lean: float
    noise: float


def scaled_siblings(sites: Mapping[Place, Site]) -> list[Pattern]:
    """Return the patterns of roles whose members share a factor, in order of execution.

    Containers are left out if their parts show the pattern, and so are sites downstream: a site
    counts by the bias that it adds to the bias of its input.
    """
    roles: dict[tuple[str, ...], list[Site]] = {}
    for place, site in sites.items():
        if place.direction == "forward":
            roles.setdefault(site.role, []).append(site)
    patterns: list[Pattern] = []
    for members in roles.values():
        # Most roles of most tables are skipped here.
        if len(members) < SIBLINGS or sum(map(_may_lean, members)) < SIBLINGS:
            continue
        if (pattern := _scaled(members)) is not None:
            patterns.append(pattern)
    if not patterns:
        return []
    made_by: dict[tuple[float, ...], str] = {}
    for place, site in sites.items():
        if place.direction == "forward":
            # The innermost maker of a tensor comes first; containers return the tensor later.
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
    """Return the first factor that siblings share; None if a culprit comes before it."""
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
    """Return the statuses in which all members of a pattern are guilty of it."""
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
    """Return the pattern that a convicted site belongs to; None if it has none.

    Args:
        sites: All sites.
        excesses: Error of sites over the allowed error, by the evidence that convicts. Sites
            without such evidence are not listed.
        first: The convicted site.
    """
    guilty = sites[first]
    place_of = {id(site): place for place, site in sites.items()}

    def members_of(alike: Iterable[Site]) -> tuple[list[Place], int]:
        places = [place_of[id(site)] for site in alike if place_of[id(site)] in excesses]
        return [place for place in places if excesses[place] > 1.0], len(places)

    forward = [site for site in sites.values() if site.place.direction == first.direction]
    # The class is tried first: if all linears of all roles are off, one role would say too little.
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
    # Nearly all of the added error is along the results, so they are scaled.
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
    """Return the pattern of one role, if its members have one."""
    leans = [lean for site in members if (lean := _lean(site)) is not None]
    if len(leans) < SIBLINGS:
        return None
    clear = [entry for entry in leans if abs(entry.lean) > entry.noise]
    if len(clear) < SIBLINGS or not _is_common([entry.lean for entry in clear]):
        return None
    usual = abs(median(entry.lean for entry in clear))
    # Siblings whose noise would hide it say nothing; nearly all of the others must show it.
    telling = [entry for entry in leans if entry.noise < usual]
    if len(clear) < _NEARLY_ALL * len(telling):
        return None
    middle = median(entry.lean for entry in clear)
    # A sibling that does not contradict the factor is a member, even if it shows nothing itself.
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
    """Return the mean bias, weighted so that siblings with less noise count more."""
    weights = [entry.noise**-2 for entry in entries]
    total = sum(entry.lean * weight for entry, weight in zip(entries, weights, strict=True))
    return total / sum(weights)


def _factors(leans: Sequence[float]) -> tuple[float, float, float]:
    """Return the common factor (NaN if there is none), and the smallest and largest factor."""
    middle = median(leans)
    spread = 1.4826 * median(abs(lean - middle) for lean in leans)
    factor = 1.0 + middle if spread <= _ALIKE * abs(middle) else math.nan
    return factor, 1.0 + min(leans), 1.0 + max(leans)


def _is_common(leans: Sequence[float]) -> bool:
    return all(lean > 0.0 for lean in leans) or all(lean < 0.0 for lean in leans)


def _lean(site: Site) -> _Lean | None:
    """Return the median of what a site's calls add along its result; None if no call shows it."""
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
    # A bias of the input may pass through (a linear) or not (a norm). The site has added at least
    # the smaller of the two changes.
    before = max(input_projections, key=abs)
    changes = (lean, lean - before)
    # A product of two inputs doubles a common bias, so correct code may show twice the input's.
    noise = floor + across + _PRODUCT * abs(before)
    return (min(changes, key=abs) if changes[0] * changes[1] > 0.0 else 0.0), noise


def _may_lean(site: Site) -> bool:
    """Whether some result of a site has more bias than rounding explains."""
    for call in site.calls:
        for row in call.outs:
            lean = row.metrics.get(ADDED_PROJECTION, row.metrics.get("projection", 0.0))
            if abs(lean) > _LEAST and abs(lean) > _UNITS * unit_of(row):
                return True
    return False


def _identity(row: Row) -> tuple[float, ...]:
    """Return the figures that are equal in two rows about the same tensor."""
    names = ("relative_l2", "projection", "reference_l2", "candidate_l2")
    return tuple(float(row.metrics.get(name, math.nan)) for name in names)


def _projection(row: Row) -> float | None:
    value = row.metrics.get("projection")
    return float(value) if value is not None and math.isfinite(value) else None


def _across(row: Row) -> float:
    """Energy of the error across the result; chance gives no more bias along it than this."""
    along, error = _projection(row), error_of(row)
    if along is None or not math.isfinite(error):
        return math.inf
    return max(error**2 - along**2, 0.0)


def _surrounds(pattern: Pattern, other: Pattern) -> bool:
    """Whether the sites of a pattern contain sites of another pattern."""
    return any(
        contains(place.site, inner.site) for place in pattern.members for inner in other.members
    )


# Results of another shape.


def with_source(
    sites: dict[Place, Site], statuses: dict[Place, SiteStatus], rows: Sequence[Row]
) -> tuple[dict[Place, Site], dict[Place, SiteStatus]]:
    """Return sites and statuses in which the first result of another shape is the culprit.

    Two runs alone would blame the module that receives the result, or the module around both; these
    are cleared.
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
    """Blame containers whose own code passes a tensor of another shape to a part."""
    changed = dict(statuses)
    for name, maker in makers_of_other_shapes(rows).items():
        # Two runs alone blame the part, although it received a different tensor.
        part, container = Place("forward", name), Place("forward", maker)
        standing = statuses.get(part)
        if container not in sites or standing is None:
            continue
        if (standing.status, standing.by) == ("introduced", "growth"):
            changed[part] = standing._replace(status="inherited")
            changed[container] = standing._replace(reason=f"it hands another shape to '{name}'")
    return changed
