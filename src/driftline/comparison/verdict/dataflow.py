"""How errors flow: what a site's own code computes, and how much of an error reaches the end.

A leaf computes its output of its inputs. A container computes what it passes to its parts (an
attention's result goes into its output projection) and its own output; what its parts compute is
not its own doing. For every site, this file lists these transfers: something that was made, and the
worst of what it was made of. It also estimates which share of the final error goes back to the
sites that introduced error, and which calls that were missed lie between compared ones.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from driftline.alignment.sites.site_graph import ROOTS as MODEL_SITES
from driftline.comparison.evidence.rules import is_bias
from driftline.comparison.table.row import Row
from driftline.comparison.table.structure import NO_STRUCTURE, Stride, Structure
from driftline.comparison.tolerance.tolerance import TURNED
from driftline.comparison.verdict.module_kinds import is_smooth
from driftline.comparison.verdict.noise import NoiseFloor
from driftline.comparison.verdict.sites import (
    ROOTS,
    Call,
    Direction,
    Place,
    Site,
    ancestors,
    error_of,
    is_in_parts,
    over_before,
    role_of,
)
from driftline.runs.sidecars.model_facts import tensor_path

SiteCall: TypeAlias = tuple[str, int]
"""Site and visit."""
_Window: TypeAlias = tuple[Direction, str, int, int, int]
"""Direction, container, rank, process, step."""


class Transfer(NamedTuple):
    """Something that a site's own code made, and what it was made of.

    Attributes:
        role: What it has in common with its siblings in other layers.
        kind: What it has in common with everything of its class.
        call: Its rows: what was made goes out, the worst of what it was made of goes in.
        of_container: Whether a container made it, of its inputs and of what its parts gave.
        is_same: Whether it is one of the tensors that it was made of, as far as numbers tell.
        moved: Relative error that its parameters explain, which an optimizer has moved apart.
    """

    role: tuple[str, ...]
    kind: tuple[str, ...]
    call: Call
    of_container: bool = False
    is_same: bool = False
    moved: float = 0.0


class _Event(NamedTuple):
    order: int
    is_source: bool
    row: Row


_KINK = math.sqrt(2.0 / math.pi)
"""Times the root of an activation's error that its gradient may be off by: where a rectifier's
input has a normal distribution, such a share of its signs turns, and with them the gradient."""


class MovedWeights:
    """How far apart an optimizer has moved the parameters of two models, site by site.

    Parameters are inputs of a site that are mostly captured once, before training. What an
    optimizer was given tells what became of them. A step that is a multiple of the gradient is off
    as the gradient is. One that divides the gradient by its size moves an element the other way
    where rounding turned its sign, and the share of such elements goes with the gradient's error:
    the step is off by twice the root of that.
    """

    def __init__(self, sites: Mapping[Place, Site], strides: Mapping[str, Stride]) -> None:
        # By the module, and by the process unless its ranks hold the parameter in parts.
        self._learnt: dict[tuple[object, ...], list[tuple[Row, Stride | None]]] = {}
        gradients = [
            row
            for place, site in sites.items()
            if place.direction == "optimizer"
            for call in site.calls
            for row in call.outs
            if row.key.port == "optimizer_grad"
        ]
        if not gradients:
            return
        names = {place.site for place in sites if place.direction == "forward"}
        for row in gradients:
            key = row.key
            # A module that was not captured is part of the code of the one around it.
            outer = (key.site, *ancestors(key.site))
            if (holder := next((name for name in outer if name in names), None)) is not None:
                stride = strides.get(tensor_path(key.site, key.slot))
                owner = (holder,) if is_in_parts(row) else (holder, key.rank, key.process)
                self._learnt.setdefault(owner, []).append((row, stride))

    def error(self, site: str, call: Call) -> float:
        """Relative error that a call has because its parameters were moved apart before."""
        apart: dict[tuple[str, str], float] = {}
        own = self._learnt.get((site, call.rank, call.process), ())
        for row, stride in (*own, *self._learnt.get((site,), ())):
            if row.key.step < call.step:
                parameter = (row.key.site, row.key.slot)
                apart[parameter] = apart.get(parameter, 0.0) + _moved_apart(row, stride, call)
        return math.hypot(*apart.values())


def _moved_apart(row: Row, stride: Stride | None, call: Call) -> float:
    """What one step with two gradients adds to the error of what is computed with a parameter."""
    # On the scale that it was judged on: what an optimizer makes of a bias without gradient is
    # taken out of results by itself (`evidence/loose_bias.py`).
    error = min(error_of(row), 1.0)
    by_gradient = stride is not None and stride.by_gradient
    # Gradients of which many elements are nothing but rounding turn more signs than that; a second
    # look has counted them.
    turned = float(row.metrics.get(TURNED, 0.0))
    share = error if by_gradient else max(2.0 * math.sqrt(error), turned)
    if stride is None:
        # A bias may have begun at zero and be small beside what it is added to: nothing says it.
        return 0.0 if is_bias(row.key.slot) else share
    length = stride.length
    if by_gradient:
        length *= float(row.metrics.get("reference_l2", 0.0))
    if not is_bias(row.key.slot):
        # Weights that begin at zero are what the first step makes of them.
        largest = max(stride.size, length)
        return share * length / largest if largest > 0.0 else 0.0
    made = max(call.outs, key=lambda out: float(out.metrics.get("reference_l2", 0.0)))
    size = float(made.metrics.get("reference_l2", 0.0))
    times = math.prod(made.reference_shape or ()) / max(math.prod(row.reference_shape or ()), 1)
    return share * length * math.sqrt(times) / size if size > 0.0 else 0.0


def transfers_of(
    sites: Mapping[Place, Site], structure: Structure = NO_STRUCTURE
) -> dict[Place, list[Transfer]]:
    """What the own code of every site made, call by call.

    Args:
        sites: All of them.
        structure: What the runs know of their model.
    """
    weights = structure.weights
    names: dict[Direction, set[str]] = {}
    for place in sites:
        names.setdefault(place.direction, set()).add(place.site)
    parents = {place: _parent(place, names[place.direction]) for place in sites}
    events = _events(sites, parents)
    levels = _forward_levels(sites, parents)
    moved = MovedWeights(sites, structure.strides)
    made: dict[Place, list[Transfer]] = {}
    for place, site in sites.items():
        backward = place.direction == "backward"
        transfers: list[Transfer] = []
        ended: dict[tuple[int, int, int], int] = {}
        for call in site.calls:
            moment = (call.rank, call.process, call.step)
            inside = _inside(events.get((place.direction, place.site, *moment), ()), call, ended)
            level = levels.get((place.site, *moment), 0.0) if backward else 0.0
            # A gradient is made of activations as well, and those carry the forward error.
            if inside or (place.site not in weights and not is_smooth(site.class_name)):
                level = max(level, _KINK * math.sqrt(level))
            apart = moved.error(place.site, call)
            if inside:
                transfers += [
                    transfer._replace(moved=apart)
                    for transfer in _of_container(site, call, inside, level)
                ]
            else:
                is_same = _is_same(call)
                if level > call.error_in or math.isnan(call.error_in):
                    call = _with_level(call, level)
                kind = (place.direction, site.class_name)
                transfers.append(Transfer(site.role, kind, call, is_same=is_same, moved=apart))
        made[place] = transfers
    return made


def makers_of_other_shapes(rows: Sequence[Row]) -> Mapping[str, str]:
    """Parts that are handed a tensor of another shape → the container whose own code made it.

    Shapes that one can be stretched to, or that hold as many elements, are the same thing in
    another form.
    """
    handed = {
        row.key.site
        for row in rows
        if row.key.port == "input" and has_other_shape(row) and not _is_another_form(row)
    }
    if not handed:
        return {}
    names = {row.key.site for row in rows if row.compared}
    makers: dict[str, str] = {}
    for name in handed:
        maker = next((outer for outer in ancestors(name) if outer in names), None)
        if maker is not None and maker not in handed:
            makers[name] = maker
    return makers


def first_of_other_shape(rows: Sequence[Row]) -> Row | None:
    """The first result of another shape of a module that was given the shapes of the reference."""
    other: dict[tuple[object, ...], Row] = {}
    excluded: set[tuple[object, ...]] = set()
    for row in rows:
        key = row.key
        call = key.site, key.step, key.rank, key.process, key.visit
        if key.phase != "forward" or key.port not in ("input", "output"):
            continue
        if key.port == "output" and has_other_shape(row) and not _is_another_form(row):
            other.setdefault(call, row)
        # What it was given explains it, or something else that it made was compared.
        elif row.compared == (key.port == "output") or row.status == "fail":
            excluded.add(call)
    makers = [row for call, row in other.items() if call not in excluded]
    return min(makers, key=lambda row: row.order, default=None)


def has_other_shape(row: Row) -> bool:
    """Whether a tensor could not be compared because its shape is another one."""
    shapes = row.reference_shape, row.candidate_shape
    return row.status == "incomparable" and None not in shapes and shapes[0] != shapes[1]


def _is_another_form(row: Row) -> bool:
    first, second = row.reference_shape or (), row.candidate_shape or ()
    if math.prod(first) == math.prod(second):
        return True
    sizes = zip(reversed(first), reversed(second), strict=False)
    return all(own == other or 1 in (own, other) for own, other in sizes)


def _parent(place: Place, names: set[str]) -> str | None:
    """The nearest captured site around another; modules in between were not captured."""
    return next((outer for outer in ancestors(place.site) if outer in names), None)


def _events(
    sites: Mapping[Place, Site], parents: Mapping[Place, str | None]
) -> dict[_Window, list[_Event]]:
    """What went into and came out of the parts of every container, in order of execution."""
    events: dict[_Window, list[_Event]] = {}
    for place, site in sites.items():
        parent = parents[place]
        # Weights and optimizers have no containers that compute something.
        if parent is None or place.direction not in ("forward", "backward"):
            continue
        for call in site.calls:
            window = (place.direction, parent, call.rank, call.process, call.step)
            listed = events.setdefault(window, [])
            # What ranks hold in parts was made on all of them; the first one's call tells of it.
            listed += [
                _Event(row.order, False, row) for row in call.ins if row.key.rank == call.rank
            ]
            # A parameter's gradient is handed to nobody inside the model.
            listed += [
                _Event(row.order, True, row) for row in call.outs if row.key.port != "param_grad"
            ]
    for listed in events.values():
        listed.sort(key=lambda event: event[:2])
    return events


def _inside(
    events: Sequence[_Event], call: Call, ended: dict[tuple[int, int, int], int]
) -> Sequence[_Event]:
    """Events of one call of a container."""
    moment = (call.rank, call.process, call.step)
    begin = call.begin
    # Where a container was captured without inputs, its call begins after the one before it.
    if not call.ins and not call.has_codes:
        begin = min(begin, ended.get(moment, -1) + 1)
    ended[moment] = call.order
    if not events:
        return ()
    first = bisect_left(events, begin, key=lambda event: event.order)
    return events[first : bisect_right(events, call.order, key=lambda event: event.order)]


def _forward_levels(
    sites: Mapping[Place, Site], parents: Mapping[Place, str | None]
) -> dict[tuple[str, int, int, int], float]:
    """Largest forward error at every site and its direct parts: gradients are made of these."""
    levels: dict[tuple[str, int, int, int], float] = {}
    if not any(place.direction == "backward" for place in sites):
        return levels
    for place, site in sites.items():
        if place.direction != "forward":
            continue
        for call in site.calls:
            errors = [error for error in (call.error, call.error_in) if math.isfinite(error)]
            for name in (place.site, parents[place]):
                if name is not None and errors:
                    key = (name, call.rank, call.process, call.step)
                    levels[key] = max(levels.get(key, 0.0), *errors)
    return levels


def _with_level(call: Call, level: float) -> Call:
    raised = Call(call.step, call.rank, call.order, call.begin, call.ins, call.outs)
    raised.error, raised.error_in = call.error, level
    raised.process, raised.known_by, raised.length = call.process, call.known_by, call.length
    return raised


def _of_container(site: Site, call: Call, events: Sequence[_Event], level: float) -> list[Transfer]:
    """One transfer for each tensor that was passed to a part, and one for each output."""
    worst = max(call.ins, key=_badness, default=None)
    sources = {identity_of(row) for row in call.ins}
    made: list[Transfer] = []

    def add(row: Row, *part: str) -> None:
        of = _transfer(call, row, worst, level)
        # Tokens that are sorted by other choices lie elsewhere: nothing is to be compared.
        if call.changed_codes and row.key.port == "input":
            of.error_in = math.inf
        tensor = (row.key.port, row.key.slot)
        role = (*site.role, *part, *tensor)
        kind = (site.place.direction, site.class_name, *part[1:], *tensor)
        is_same = identity_of(row) in sources
        made.append(Transfer(role, kind, of, of_container=True, is_same=is_same))

    for event in events:
        if event.is_source:
            sources.add(identity_of(event.row))
            if worst is None or _badness(event.row) > _badness(worst):
                worst = event.row
        else:
            name = event.row.key.site
            add(event.row, role_of(name), event.row.class_name, name.rpartition(".")[2])
    for row in call.outs:
        add(row)
    return made


def _is_same(call: Call) -> bool:
    """Whether all that a leaf gives is something it was given."""
    inputs = {identity_of(row) for row in call.ins}
    return bool(inputs) and all(identity_of(row) in inputs for row in call.outs)


def identity_of(row: Row) -> tuple[object, ...]:
    """Figures that two tensors have in common only if they are the same."""
    metrics = row.metrics
    return (
        *(row.reference_shape or ()),
        *(metrics.get(name) for name in ("relative_l2", "reference_l2", "candidate_l2")),
    )


def _badness(row: Row) -> tuple[bool, float]:
    return bool(row.metrics.get("one_sided", 0)), error_of(row)


def _transfer(call: Call, row: Row, source: Row | None, level: float) -> Call:
    return Call(
        call.step,
        call.rank,
        row.order,
        call.begin,
        [source] if source is not None else [],
        [row],
        error_in=max(level, error_of(source) if source is not None else 0.0),
        error=error_of(row),
        process=call.process,
        length=call.length,
    )


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


# --- calls that were missed


class SeenTensor(NamedTuple):
    """Where a tensor was first compared: the site and visit, and whether they gave it."""

    call: SiteCall
    is_given: bool


def in_short_stretches(
    ordered: Sequence[SiteCall],
    missed: Container[str],
    compared: Container[SiteCall],
    sources: Mapping[SiteCall, Sequence[SeenTensor]],
    most: float,
    *,
    ends: tuple[bool, bool],
) -> dict[str, float]:
    """The share of leaves' calls in short stretches of execution between what was compared.

    What they made went into what was compared next, so that an error of theirs shows there; but not
    into a call that takes only what was compared before they ran. That one is a branch beside
    theirs, and what all branches left out goes into one result: one stretch. Where the output of
    the container around them is missed, too, a stretch has not ended.

    Args:
        ordered: All calls of one side, in the order in which they ended.
        missed: Leaves that were not compared in all of their calls.
        compared: Calls whose output was compared.
        sources: What compared calls took, by where it was first compared.
        most: How many calls a short stretch has at most.
        ends: Whether the model's inputs and its outputs were compared.
    """
    inside, all_missed = Counter[str](), Counter[str]()
    times = _times(ordered)
    begun, is_closed = ends
    stretch: list[_Missed] = []
    ended: list[_Missed] = []
    for call in ordered:
        site = call[0]
        if call in compared:
            if stretch:
                newest = _newest(sources.get(call), times)
                ended, stretch = _divided(stretch, newest, times[call].begin)
                if not all(part.is_behind for part in ended):
                    ended = []
                if len(ended) <= most:
                    inside.update(part.site for part in ended)
            begun = True
        elif site in missed:
            all_missed[site] += 1
            stretch.append(_Missed(site, times[call].end, begun))
        elif any(part.site.startswith(f"{site}.") for part in ended):
            if len(ended) <= most:
                inside.subtract(part.site for part in ended)
            stretch, ended = ended + stretch, []
    if is_closed and len(stretch) <= most and all(part.is_behind for part in stretch):
        inside.update(part.site for part in stretch)
    return {site: count / all_missed[site] for site, count in inside.items()}


def _newest(sources: Sequence[SeenTensor] | None, times: Mapping[SiteCall, _Times]) -> float:
    """When the newest was made of what a call took and no compared call gave.

    What had gone into such a gift was behind it already.
    """
    if sources is None:
        return math.inf
    made = (seen.call for seen in sources if not seen.is_given)
    return max(
        (times[source].begin if source in times else math.inf for source in made),
        default=-math.inf,
    )


class _Times(NamedTuple):
    """When a call began and ended, in calls that ended before."""

    begin: float
    end: float


class _Missed(NamedTuple):
    """A call that was missed, when it ended, and whether something before it was compared."""

    site: str
    time: float
    is_behind: bool


def _divided(
    missed: Iterable[_Missed], newest: float, begin: float
) -> tuple[list[_Missed], list[_Missed]]:
    """What may have gone into a compared call, and what cannot have.

    Args:
        missed: Calls that were missed before it.
        newest: When the newest of what it took was made.
        begin: When it began; what ran inside a container goes into what that gives.
    """
    parts: tuple[list[_Missed], list[_Missed]] = ([], [])
    for part in missed:
        parts[not (part.time < newest or part.time > begin)].append(part)
    return parts


def _times(ordered: Iterable[SiteCall]) -> dict[SiteCall, _Times]:
    """When calls began and ended, of calls in the order in which they ended.

    A container began before the first of its parts that ended since its last call.
    """
    times: dict[SiteCall, _Times] = {}
    begins: dict[str, float] = {}
    for number, call in enumerate(ordered):
        begin = min(begins.pop(call[0], number), number) - 0.5
        times[call] = _Times(begin, number)
        for around in containers_around(call[0]):
            begins.setdefault(around, number)
    return times


def containers_around(site: str) -> Iterator[str]:
    """The names of what may be around a site, the nearest first, the model itself last.

    >>> list(containers_around("layers.0.mlp/add"))
    ['layers.0.mlp', 'layers.0', 'layers', '(root)', '']
    """
    rest = site
    while (cut := max(rest.rfind("."), rest.rfind("/"))) > 0:
        rest = rest[:cut]
        yield rest
    if site not in MODEL_SITES:
        yield from MODEL_SITES
