"""Rows of a table become calls (what went into a site, what came out), calls become sites.

Knows which site lies inside which, and what every call took and gave; judges nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from driftline.comparison.row import Row
from driftline.comparison.table import Table
from driftline.diagnosis.flow import Flow, Makers
from driftline.numerics.dtypes import DTYPES
from driftline.tolerance.scales import error_on_scale

Direction = Literal["forward", "backward", "optimizer", "param"]

ROOTS = ("(root)", "", "(program)")

_ROLES: dict[str, tuple[Direction, bool]] = {
    "input": ("forward", True),
    "output": ("forward", False),
    "grad_output": ("backward", True),
    "grad_input": ("backward", False),
    "param_grad": ("backward", False),
    "optimizer_grad": ("optimizer", False),
    "param": ("param", False),
}
DIRECTIONS: tuple[Direction, ...] = ("param", "forward", "backward", "optimizer")
"""In order of execution."""


class Place(NamedTuple):
    """A site in one direction: forward, or the backward pass through it."""

    direction: Direction
    site: str


@dataclass(slots=True)
class Call:
    """One call of a site.

    Attributes:
        order: Place of its last output in the execution order.
        begin: Place of its first tensor.
        ins: Rows of floating tensors that went in; for an optimizer, gradients of the same
            parameters from all backward passes of its step.
        outs: Rows of floating tensors that came out.
        changed_codes: An integer or boolean that went in differs (token ids, masks, routes).
        error_in: Largest relative error that went in; NaN when nothing is known.
        error: Largest relative error that came out.
        process: Which process of the rank.
        known_by: How what went in is known: `inputs` (captured), `edges` (who made it), `order`
            (what was made last before it).
        length: Of the longest sum in it, in elements.
    """

    step: int
    rank: int
    order: int = -1
    begin: int = 1 << 62
    ins: list[Row] = field(default_factory=list[Row])
    outs: list[Row] = field(default_factory=list[Row])
    changed_codes: bool = False
    error_in: float = math.nan
    error: float = math.nan

    process: int = 0
    known_by: str = "inputs"
    length: int = 1
    known_unit: float = -1.0

    @property
    def unit(self) -> float:
        """Unit roundoff of the coarsest format that took part, on either side."""
        if self.known_unit < 0.0:
            self.known_unit = max((unit_of(row) for row in (*self.outs, *self.ins)), default=0.0)
        return self.known_unit

    @property
    def one_sided_in(self) -> int:
        return sum(int(row.metrics.get("one_sided", 0)) for row in self.ins)

    @property
    def one_sided(self) -> int:
        return sum(int(row.metrics.get("one_sided", 0)) for row in self.outs)

    @property
    def worst(self) -> Row:
        """The output that is furthest off."""
        return max(self.outs, key=error_of)


@dataclass(slots=True)
class Site:
    """A site in one direction, with all its calls."""

    place: Place
    class_name: str = ""
    candidate_class: str = ""
    calls: list[Call] = field(default_factory=list[Call])

    @property
    def name(self) -> str:
        return self.place.site

    @property
    def order(self) -> tuple[int, int]:
        """When its first call was over; all of forward lies before backward."""
        return DIRECTIONS.index(self.place.direction), min(call.order for call in self.calls)

    @property
    def error(self) -> float:
        return max((call.error for call in self.calls), default=math.nan)

    @property
    def worst(self) -> Call:
        return max(self.calls, key=lambda call: call.error)

    @property
    def role(self) -> tuple[str, str, str]:
        """What it has in common with its siblings in other layers."""
        return self.place.direction, _NUMBER.sub("*", self.name), self.class_name


_NUMBER = re.compile(r"\d+")


def error_of(row: Row) -> float:
    """Relative L2 of a row on the scale it was judged on, inf where it is not a number."""
    value = error_on_scale(row)
    return math.inf if math.isnan(value) else value


FINE = 2.0**-20
"""Unit roundoff up to which sums are rounded like everything else."""


def unit_of(row: Row) -> float:
    """Unit roundoff of the coarser format of a row; 0 for exact ones."""
    ours, theirs = DTYPES.get(row.reference_dtype), DTYPES.get(row.candidate_dtype)
    return max(ours.unit_roundoff if ours else 0.0, theirs.unit_roundoff if theirs else 0.0)


def is_floating(row: Row) -> bool:
    dtype = DTYPES.get(row.reference_dtype)
    return dtype is not None and dtype.is_floating


def same_kind(row: Row) -> bool:
    """Whether both sides are of one kind.

    A mask of booleans beside one of floats is no error: the same thing said otherwise.
    """
    theirs = DTYPES.get(row.candidate_dtype)
    return theirs is None or theirs.is_floating


def sites_of(
    table: Table, flow: Flow | None = None, lengths: Lengths | None = None
) -> dict[Place, Site]:
    """All sites with something that was measured, in order of execution.

    Args:
        table: What was measured.
        flow: Who feeds whom, as far as it is known, by the reference's names.
        lengths: How many terms the sums of a site have, by what it holds and was given.
    """
    calls: dict[tuple[Place, int, int, int, int], Call] = {}
    sites: dict[Place, Site] = {}
    for row in table.rows:
        known = _ROLES.get(row.key.port)
        if known is None or not row.compared or row.key.phase == "recompute":
            continue
        direction, is_input = known
        key = row.key
        place = Place(direction, key.site)
        of = (place, key.rank, key.process, key.step, key.visit)
        call = calls.get(of)
        if call is None:
            call = calls[of] = Call(key.step, key.rank, process=key.process)
            site = sites.get(place)
            if site is None:
                site = sites[place] = Site(place, row.class_name, row.candidate_class)
            site.calls.append(call)
        call.begin = min(call.begin, row.order)
        if not is_floating(row):
            call.changed_codes |= is_input and bool(row.metrics.get("different", 0))
        elif "relative_l2" not in row.metrics or (is_input and not same_kind(row)):
            continue
        elif is_input:
            call.ins.append(row)
        else:
            call.outs.append(row)
            call.order = max(call.order, row.order)
    found = [site for site in sites.values() if _kept(site)]
    found.sort(key=lambda site: site.order)
    _give_gradients(found)
    _fill(found, flow or {})
    if lengths is not None:
        for site in found:
            for call in site.calls:
                call.length = lengths(site.name, site.class_name, call.ins, call.outs)
        _longest_inside(found)
    return {site.place: site for site in found}


Lengths: TypeAlias = Callable[[str, str, Sequence[Row], Sequence[Row]], int]
"""(site, class, rows in, rows out) → terms of the longest sum of a call."""


def _longest_inside(sites: Sequence[Site]) -> None:
    """A container's sums are also those of its parts."""
    longest: dict[tuple[str, str], int] = {}
    for site in sites:
        own = max(call.length for call in site.calls)
        for outer in ancestors(site.name):
            place = (site.place.direction, outer)
            longest[place] = max(longest.get(place, 1), own)
    for site in sites:
        inside = longest.get((site.place.direction, site.name), 1)
        for call in site.calls:
            call.length = max(call.length, inside)


def _kept(site: Site) -> bool:
    site.calls = [call for call in site.calls if call.outs]
    return bool(site.calls)


def _give_gradients(sites: Sequence[Site]) -> None:
    """What goes into an optimizer's gradient is what backward passes made of that parameter."""
    made: dict[tuple[str, str, int, int, int], list[Row]] = {}

    def of(row: Row) -> tuple[str, str, int, int, int]:
        key = row.key
        return key.site, key.slot, key.rank, key.process, key.step

    for site in sites:
        for call in site.calls:
            for row in call.outs:
                if row.key.port == "param_grad":
                    made.setdefault(of(row), []).append(row)
    for site in sites:
        if site.place.direction == "optimizer":
            for call in site.calls:
                call.ins += [each for row in call.outs for each in made.get(of(row), ())]


def _fill(sites: Sequence[Site], flow: Flow) -> None:
    """Errors in and out.

    Where no inputs were kept, the outputs that they are stand for them, by the edges that are
    known; without edges, what was made just before.
    """
    blind: list[tuple[Site, Call]] = []
    for site in sites:
        for call in site.calls:
            call.error = max(error_of(row) for row in call.outs)
            if call.ins:
                call.error_in = max(error_of(row) for row in call.ins)
            elif call.changed_codes or site.place.direction == "param":
                call.error_in = 0.0
            else:
                blind.append((site, call))
    rest = _from_makers(sites, blind, flow) if blind and flow else blind
    if rest:
        _from_before(sites, rest)


def _from_makers(
    sites: Sequence[Site], blind: Sequence[tuple[Site, Call]], flow: Flow
) -> list[tuple[Site, Call]]:
    """The largest error of what the makers of its inputs gave last before a call.

    Gradients flow the other way: what comes in was made by those that take the output. Gives back
    the calls of which no edge is known.
    """
    made: dict[tuple[Place, int, int, int], list[Call]] = {}
    for site in sites:
        for call in site.calls:
            made.setdefault((site.place, call.rank, call.process, call.step), []).append(call)
    takers = {place: _turned(makers) for place, makers in flow.items()}
    rest: list[tuple[Site, Call]] = []
    for site, call in blind:
        direction = site.place.direction
        edges = flow if direction == "forward" else takers
        makers = edges.get((call.rank, call.process), {}).get(site.name)
        if makers is None or direction not in ("forward", "backward"):
            rest.append((site, call))
            continue
        errors: list[float] = []
        for maker in makers:
            those = made.get((Place(direction, maker), call.rank, call.process, call.step), ())
            before = [each for each in those if each.order < call.order]
            if before:
                errors.append(max(before, key=lambda each: each.order).error)
        if makers and not errors:
            rest.append((site, call))  # made in another step, or not captured
            continue
        call.error_in, call.known_by = max(errors, default=0.0), "edges"
    return rest


def _turned(makers: Makers) -> Makers:
    takers: dict[str, set[str]] = {}
    for taker, those in makers.items():
        for maker in those:
            takers.setdefault(maker, set()).add(taker)
    return {maker: frozenset(those) for maker, those in takers.items()}


def _from_before(sites: Sequence[Site], blind: Sequence[tuple[Site, Call]]) -> None:
    """The error of the output that was made last before a call began.

    A container without inputs begins where the first of its parts is over, so what came before
    that is meant; the very first call has nothing before it and takes in no error.
    """
    made: dict[tuple[str, int, int], list[tuple[int, str, float]]] = {}
    for site in sites:
        for call in site.calls:
            where = (site.place.direction, call.rank, call.step)
            made.setdefault(where, []).append((call.order, site.name, call.error))
    for outputs in made.values():
        outputs.sort()
    for site, call in blind:
        outputs = made[(site.place.direction, call.rank, call.step)]
        call.error_in, call.known_by = 0.0, "order"
        for order, name, error in reversed(outputs):
            if order < call.order and name != site.name and not contains(site.name, name):
                call.error_in = error
                break


def contains(outer: str, inner: str) -> bool:
    """Whether one site lies inside another.

    >>> contains("model.layers.1", "model.layers.1.mlp"), contains("a.1", "a.10")
    (True, False)
    """
    if outer == inner:
        return False
    if outer in ROOTS:
        return True
    return inner.startswith((outer + ".", outer + "/"))


def innermost(names: Iterable[str]) -> list[str]:
    """Those that contain none of the others, in their order."""
    listed = list(dict.fromkeys(names))
    around = {outer for name in listed for outer in ancestors(name)}
    return [name for name in listed if name not in around]


def ancestors(name: str) -> Iterator[str]:
    """Every site that a site may lie in, nearest first; the roots last."""
    inner = name
    if "/" in inner:
        inner = inner.rpartition("/")[0]
        yield inner
    while "." in inner:
        inner = inner.rpartition(".")[0]
        yield inner
    for root in ROOTS:
        if name != root:
            yield root


def parts_of(names: Iterable[str]) -> Mapping[str, int]:
    """How many sites lie in each site."""
    counts: dict[str, int] = {}
    for name in names:
        for outer in ancestors(name):
            counts[outer] = counts.get(outer, 0) + 1
    return counts


def over_before(sites: Mapping[Place, Site], first: Place) -> list[Site]:
    """Sites that were over before another one, in its direction.

    Its own parts are not among them: one that runs after code of the whole (an attention's last
    product) ends before the whole does, and may hold the whole's fault.
    """
    return [
        site
        for place, site in sites.items()
        if place.direction == first.direction
        and site.order < sites[first].order
        and not contains(first.site, place.site)
    ]
