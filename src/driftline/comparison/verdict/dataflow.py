"""How errors flow: what a site's own code computes, and how much of an error reaches the end.

A leaf computes its output from its inputs. The own code of a container computes what it passes to
its parts (an attention's result goes into its output projection) and its own output, but not what
its parts compute. For every site, this file lists these transfers: a result, and the worst of the
tensors from which it was computed. It also estimates which fraction of the final error comes from
the sites that introduce error, and which calls without a comparison are between compared ones.
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
"""Site and visit of a call."""
_Window: TypeAlias = tuple[Direction, str, int, int, int]
"""Direction, container, rank, process and step."""


class Transfer(NamedTuple):
    """A tensor that a site's own code computed, and the tensors from which it was computed.

    Attributes:
        role: What it has in common with its siblings in other layers.
        kind: What it has in common with everything of its class.
        call: A call whose output is the result, and whose input is the worst of the tensors from
            which it was computed.
        of_container: Whether a container computed it from its inputs and its parts' results.
        is_same: Whether it seems to be one of those tensors, because the figures agree.
        moved: Relative error that is explained by parameters which an optimizer has moved apart.
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
"""Factor on the root of an activation's error, for the error that its gradient may have. If a
rectifier's input has a normal distribution, this fraction of its signs changes, and the gradient
with them."""


class MovedWeights:
    """How far apart an optimizer has moved the parameters of two models, site by site.

    Parameters are mostly captured once, before training, but the gradients that an optimizer gets
    show how they change. If the step is a multiple of the gradient, it has the gradient's relative
    error. If the optimizer divides the gradient by its size, an element moves the other way if
    rounding changed its sign. The fraction of such elements is proportional to the gradient's
    error, and the step has an error of twice the root of that.
    """

    def __init__(self, sites: Mapping[Place, Site], strides: Mapping[str, Stride]) -> None:
        # By module, and also by rank and process unless ranks hold parts of the parameter.
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
            # A module that was not captured belongs to the code of the one around it.
            outer = (key.site, *ancestors(key.site))
            if (holder := next((name for name in outer if name in names), None)) is not None:
                stride = strides.get(tensor_path(key.site, key.slot))
                owner = (holder,) if is_in_parts(row) else (holder, key.rank, key.process)
                self._learnt.setdefault(owner, []).append((row, stride))

    def error(self, site: str, call: Call) -> float:
        """The relative error of a call that earlier updates of its parameters explain."""
        apart: dict[tuple[str, str], float] = {}
        own = self._learnt.get((site, call.rank, call.process), ())
        for row, stride in (*own, *self._learnt.get((site,), ())):
            if row.key.step < call.step:
                parameter = (row.key.site, row.key.slot)
                apart[parameter] = apart.get(parameter, 0.0) + _moved_apart(row, stride, call)
        return math.hypot(*apart.values())


def _moved_apart(row: Row, stride: Stride | None, call: Call) -> float:
    """The error that one update with different gradients adds to results of a parameter."""
    # On the scale on which it was judged. The effect of a bias without a gradient is removed from
    # results separately (`evidence/loose_bias.py`).
    error = min(error_of(row), 1.0)
    by_gradient = stride is not None and stride.by_gradient
    # If many elements of a gradient are only rounding, more signs change; a second look has counted
    # them.
    turned = float(row.metrics.get(TURNED, 0.0))
    share = error if by_gradient else max(2.0 * math.sqrt(error), turned)
    if stride is None:
        # A bias may begin at zero and be small compared with what it is added to, so without a
        # known step nothing is assumed.
        return 0.0 if is_bias(row.key.slot) else share
    length = stride.length
    if by_gradient:
        length *= float(row.metrics.get("reference_l2", 0.0))
    if not is_bias(row.key.slot):
        # A weight that begins at zero has the size of the first step.
        largest = max(stride.size, length)
        return share * length / largest if largest > 0.0 else 0.0
    made = max(call.outs, key=lambda out: float(out.metrics.get("reference_l2", 0.0)))
    size = float(made.metrics.get("reference_l2", 0.0))
    times = math.prod(made.reference_shape or ()) / max(math.prod(row.reference_shape or ()), 1)
    return share * length * math.sqrt(times) / size if size > 0.0 else 0.0


def transfers_of(
    sites: Mapping[Place, Site], structure: Structure = NO_STRUCTURE
) -> dict[Place, list[Transfer]]:
    """The transfers of every site, call by call.

    Args:
        sites: All sites.
        structure: Facts about the structure of the model.
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
            # Gradients are computed from activations, too, which have the forward error.
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
    """For each part that gets a tensor of another shape, the container whose own code made it.

    Shapes that can be broadcast to each other, or that have as many elements, do not count.
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
    """The first result of another shape from a module whose inputs have the reference's shapes."""
    other: dict[tuple[object, ...], Row] = {}
    excluded: set[tuple[object, ...]] = set()
    for row in rows:
        key = row.key
        call = key.site, key.step, key.rank, key.process, key.visit
        if key.phase != "forward" or key.port not in ("input", "output"):
            continue
        if key.port == "output" and has_other_shape(row) and not _is_another_form(row):
            other.setdefault(call, row)
        # An input explains the shape, or another output of the call was compared.
        elif row.compared == (key.port == "output") or row.status == "fail":
            excluded.add(call)
    makers = [row for call, row in other.items() if call not in excluded]
    return min(makers, key=lambda row: row.order, default=None)


def has_other_shape(row: Row) -> bool:
    """Whether a tensor could not be compared because the shapes differ."""
    shapes = row.reference_shape, row.candidate_shape
    return row.status == "incomparable" and None not in shapes and shapes[0] != shapes[1]


def _is_another_form(row: Row) -> bool:
    first, second = row.reference_shape or (), row.candidate_shape or ()
    if math.prod(first) == math.prod(second):
        return True
    sizes = zip(reversed(first), reversed(second), strict=False)
    return all(own == other or 1 in (own, other) for own, other in sizes)


def _parent(place: Place, names: set[str]) -> str | None:
    """The nearest captured site around another one."""
    return next((outer for outer in ancestors(place.site) if outer in names), None)


def _events(
    sites: Mapping[Place, Site], parents: Mapping[Place, str | None]
) -> dict[_Window, list[_Event]]:
    """The inputs and outputs of the parts of every container, in order of execution."""
    events: dict[_Window, list[_Event]] = {}
    for place, site in sites.items():
        parent = parents[place]
        # Containers compute nothing for weights and optimizers.
        if parent is None or place.direction not in ("forward", "backward"):
            continue
        for call in site.calls:
            window = (place.direction, parent, call.rank, call.process, call.step)
            listed = events.setdefault(window, [])
            # A tensor in parts was computed on several ranks; the first one's call represents it.
            listed += [
                _Event(row.order, False, row) for row in call.ins if row.key.rank == call.rank
            ]
            # The gradient of a parameter is not passed on inside the model.
            listed += [
                _Event(row.order, True, row) for row in call.outs if row.key.port != "param_grad"
            ]
    for listed in events.values():
        listed.sort(key=lambda event: event[:2])
    return events


def _inside(
    events: Sequence[_Event], call: Call, ended: dict[tuple[int, int, int], int]
) -> Sequence[_Event]:
    """The events of one call of a container."""
    moment = (call.rank, call.process, call.step)
    begin = call.begin
    # If a container was captured without inputs, its call begins after the one before it.
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
    """The largest forward error at every site and its direct parts, which gradients depend on."""
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
        # If other choices sort tokens differently, the error of this input says nothing.
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
    """Whether all outputs of a leaf are among its inputs."""
    inputs = {identity_of(row) for row in call.ins}
    return bool(inputs) and all(identity_of(row) in inputs for row in call.outs)


def identity_of(row: Row) -> tuple[object, ...]:
    """Figures that are equal for two tensors only if the tensors are the same."""
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


# Fraction of the final output's error, estimated from two squared errors.


def final_error(
    sites: Mapping[Place, Site], floor: NoiseFloor | None, first: Place | None
) -> tuple[float, float]:
    """The relative error of the final output, and the error that noise explains."""
    forward = [site for place, site in sites.items() if place.direction == "forward"]
    if not forward:
        return math.nan, math.nan
    # The root is the end of the model, even if a later output (such as that of a loss) was
    # captured.
    last = max(forward, key=lambda site: (site.name in ROOTS, site.order))
    call = last.worst
    error = math.inf if call.one_sided else call.error
    if floor is not None and floor.used:
        floors = [floor.errors[row.key] for row in call.outs if row.key in floor.errors]
        if floors:
            return error, max(floors)
    if first is None or first.direction != "forward":
        return error, math.nan
    # Rounding errors add up like a random walk, so the error before the first culprit is
    # extrapolated to the end.
    errors = [site.error for site in over_before(sites, first) if math.isfinite(site.error)]
    further = min(math.sqrt(len(forward) / max(len(errors), 1)), 4.0)
    return error, max(further * max(errors, default=0.0), call.unit)


def explained(final: float, noise: float) -> float | None:
    """The fraction of the final squared error that faults cause; None if it is unknown.

    Noise and faults are independent, so their squared errors add up, and that of noise is
    subtracted.
    """
    if math.isnan(final) or math.isnan(noise):
        return None
    if not math.isfinite(final):
        return 1.0
    if final <= 0.0:
        return 0.0
    return round(min(max(1.0 - (noise / final) ** 2, 0.0), 1.0), 4)


# --- calls without a comparison


class SeenTensor(NamedTuple):
    """Where a tensor was first compared: the call, and whether the tensor is its output."""

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
    """The fraction of leaves' calls in short stretches of execution between compared calls.

    Their results go into the next compared call, so an error in them shows there. They do not go
    into a call that takes only tensors which were compared before they ran: that call is in a
    parallel branch. The branches lead to one result, so what they left out is one stretch. If the
    output of the container around a stretch was not compared either, the stretch continues.

    Args:
        ordered: All calls of one side, in the order in which they ended.
        missed: Leaves that were not compared in all of their calls.
        compared: Calls whose output was compared.
        sources: The inputs of compared calls, and where each was first compared.
        most: The largest number of calls in a short stretch.
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
    """When the newest input of a call was computed, except outputs of compared calls.

    The output of a compared call already covers what it was computed from.
    """
    if sources is None:
        return math.inf
    made = (seen.call for seen in sources if not seen.is_given)
    return max(
        (times[source].begin if source in times else math.inf for source in made),
        default=-math.inf,
    )


class _Times(NamedTuple):
    """When a call began and ended, in numbers of calls that ended before."""

    begin: float
    end: float


class _Missed(NamedTuple):
    """A call without a comparison, when it ended, and whether something before it was compared."""

    site: str
    time: float
    is_behind: bool


def _divided(
    missed: Iterable[_Missed], newest: float, begin: float
) -> tuple[list[_Missed], list[_Missed]]:
    """Divide missed calls into those that may have gone into a compared call, and the others.

    Args:
        missed: The missed calls before it.
        newest: When the newest of its inputs was computed.
        begin: When it began. Calls inside a container go into the container's output.
    """
    parts: tuple[list[_Missed], list[_Missed]] = ([], [])
    for part in missed:
        parts[not (part.time < newest or part.time > begin)].append(part)
    return parts


def _times(ordered: Iterable[SiteCall]) -> dict[SiteCall, _Times]:
    """When calls began and ended, from the order in which they ended.

    A container began before the first of its parts that ended after the container's last call.
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
    """The names of sites that may contain a site, the nearest first, the model itself last.

    >>> list(containers_around("layers.0.mlp/add"))
    ['layers.0.mlp', 'layers.0', 'layers', '(root)', '']
    """
    rest = site
    while (cut := max(rest.rfind("."), rest.rfind("/"))) > 0:
        rest = rest[:cut]
        yield rest
    if site not in MODEL_SITES:
        yield from MODEL_SITES
