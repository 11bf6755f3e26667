"""Sites and their calls: rows of a comparison, grouped by the call they belong to.

Rows become calls, and calls become sites. If a site's inputs were not captured, the sites that
produced them are found from the edges of a dump (graphs, ATB, lists of calls). A producer that is
not in the table is skipped, so edges pass through code that was not captured. This file also
determines which site contains which, and which steps of two runs can be compared at all. It judges
nothing.
"""

from __future__ import annotations

import functools
import math
import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from driftline.alignment.plan import Plan
from driftline.alignment.sites.values import edges_of
from driftline.comparison.table.row import Row
from driftline.comparison.table.structure import NO_STRUCTURE, Flow, Makers, Structure
from driftline.comparison.tolerance.defaults import LIMITS, coarsest, step_of
from driftline.comparison.tolerance.tolerance import GIVEN, error_on_scale
from driftline.comparison.verdict.module_kinds import length_of
from driftline.errors import DriftlineError
from driftline.graphs.sources.graph_files import read_graphs
from driftline.numerics.dtypes import DTYPES
from driftline.runs.run import Run
from driftline.runs.sidecars.calls import CALLS, GRAPHS, read_calls
from driftline.runs.sidecars.calls import Call as RecordedCall

_NOBODY: frozenset[str] = frozenset()
_MOST = 64
"""Largest number of producers of one tensor; the search for more stops there."""


def flow_of(reference: Run, candidate: Run, plan: Plan) -> Flow:
    """Edges of the reference, or else those of the candidate, under the reference's names."""
    captured = {pair.reference.key.site for pair in plan.pairs if _is_made(pair.reference.key.port)}
    flow = _of_run(reference, captured)
    if any(flow.values()):
        return flow
    names = {
        pair.candidate.key.site: pair.reference.key.site
        for pair in plan.pairs
        if _is_made(pair.candidate.key.port)
    }
    return {
        place: {
            names[taker]: frozenset(names[maker] for maker in makers)
            for taker, makers in edges.items()
        }
        for place, edges in _of_run(candidate, names).items()
    }


def _is_made(port: str) -> bool:
    return port == "output"


def _of_run(run: Run, captured: Collection[str]) -> Flow:
    places = sorted({(record.key.rank, record.key.process) for record in run.records})
    return {place: _of_process(run, *place, captured) for place in places}


def _of_process(run: Run, rank: int, process: int, captured: Collection[str]) -> Makers:
    try:
        # Lists of calls are the most precise source, then compiled graphs, then topology edges.
        if CALLS in run.sheets(rank, process):
            return by_calls(read_calls(run.sheet(CALLS, rank, process)), captured)
        if GRAPHS in run.sheets(rank, process):
            return by_edges(_of_graphs(run.sheet(GRAPHS, rank, process)), captured)
        edges = edges_of(run, rank, process).makers
    except (DriftlineError, OSError):
        return {}  # unreadable files give no edges; the comparison itself reports them
    return by_edges(((maker, taker) for (taker, _), (maker, _) in edges.items()), captured)


def _of_graphs(text: str) -> Iterator[tuple[str, str]]:
    """(maker, taker) pairs of compiled graphs; a part of a result is replaced by its whole node."""
    for graph in read_graphs(text):
        nodes = {node.name: node for node in graph.nodes}
        # Edges of the backward graph are edges of gradients, which are derived by reversing the
        # forward edges.
        for node in graph.nodes if graph.kind != "backward" else ():
            for name in node.inputs:
                maker = nodes.get(name)
                producer = nodes.get(maker.of[0]) if maker is not None and maker.of else maker
                if producer is not None and node.of is None:
                    yield producer.site, node.site


def by_edges(edges: Iterable[tuple[str, str]], captured: Collection[str]) -> Makers:
    """Return the makers of each captured site, from pairs (maker, taker).

    >>> by_edges([("a", "cast"), ("cast", "b")], {"a", "b"})["b"]
    frozenset({'a'})
    """
    before: dict[str, list[str]] = {}
    for maker, taker in edges:
        before.setdefault(taker, []).append(maker)
    by_taker: dict[str, frozenset[str]] = {}
    for taker in before:
        if taker not in captured:
            continue
        makers: set[str] = set()
        # Search backwards and stop at captured sites. `seen` guards against cycles in damaged
        # files.
        seen, waiting = {taker}, list(before[taker])
        while waiting and len(makers) < _MOST:
            maker = waiting.pop()
            if maker in seen:
                continue
            seen.add(maker)
            if maker in captured:
                makers.add(maker)
            else:
                waiting += before.get(maker, [])
        by_taker[taker] = frozenset(makers)
    return by_taker


def by_calls(calls: Iterable[RecordedCall], captured: Collection[str]) -> Makers:
    """Return the makers of each captured site, from the calls of the first step's forward pass.

    One step is enough, because the edges of a model are the same in each step.
    """
    forward = sorted(
        (call for call in calls if call.phase == "forward"), key=lambda call: call.number
    )
    step = min((call.step for call in forward), default=0)
    first_step = [call for call in forward if call.step == step]
    gave: dict[tuple[int, str], str] = {}
    for call in first_step:
        if call.site not in captured:
            continue
        for tensor in call.outputs:
            of = tensor.source if call.kind == "module" else (call.number, tensor.slot)
            # Keep the innermost site: a container returns tensors that a part of it made.
            if isinstance(of, tuple) and len(call.site) > len(gave.get(of, "")):
                gave[of] = call.site
    past: dict[tuple[int, str], frozenset[str]] = {}

    def makers_of(call: RecordedCall) -> frozenset[str]:
        makers: set[str] = set()
        for tensor in call.inputs:
            of = tensor.source
            if isinstance(of, tuple):
                makers |= {gave[of]} if of in gave else past.get(of, _NOBODY)
        # Producers are limited in a fixed order, so that results do not depend on the hash order.
        return frozenset(sorted(makers)[:_MOST])

    for call in first_step:
        if call.kind != "module":
            before = makers_of(call)
            past |= {(call.number, tensor.slot): before for tensor in call.outputs}
    by_taker: dict[str, frozenset[str]] = {}
    for call in first_step:
        if call.site in captured:
            before = makers_of(call) - {call.site}
            by_taker[call.site] = by_taker.get(call.site, _NOBODY) | before
    return by_taker


# Calls and sites.


Direction = Literal["forward", "backward", "optimizer", "param"]

# Names that captures of different frameworks give to the model itself.
ROOTS = ("(root)", "", "(program)")

# Port -> direction, and whether the tensor is an input. Rows of other ports are not evidence.
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
"""Directions in order of execution."""


class Place(NamedTuple):
    """A site in one direction: its forward pass, backward pass, optimizer or parameters."""

    direction: Direction
    site: str


@dataclass(slots=True)
class Call:
    """One call of a site, with the rows of its inputs and outputs.

    Attributes:
        order: Position of its last output in the execution order.
        begin: Position of its first tensor.
        ins: Rows of its floating-point inputs; for an optimizer, the gradients of the same
            parameters from all backward passes of its step.
        outs: Rows of its floating-point outputs.
        changed_codes: Whether an integer or boolean input differs (token ids, masks, routes).
        error_in: Largest relative error of an input; NaN if nothing is known.
        error: Largest relative error of an output.
        process: The process of the rank.
        has_codes: Whether an integer or boolean input was compared.
        known_by: How the inputs are known: `inputs` (captured), `edges` (outputs of the producers),
            or `order` (the last output before the call).
        length: Length of the longest sum in it, in elements.
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
    has_codes: bool = False
    known_by: str = "inputs"
    length: int = 1
    known_unit: float = -1.0

    @property
    def unit(self) -> float:
        """Unit roundoff of the coarsest format involved, at the size of the outputs."""
        # Cached, because judging reads it many times for every call.
        if self.known_unit < 0.0:
            units = (*map(roundoff_of, self.outs), *map(unit_of, self.ins))
            self.known_unit = max(units, default=0.0)
        return self.known_unit

    @property
    def one_sided_in(self) -> int:
        return sum(int(row.metrics.get("one_sided", 0)) for row in self.ins)

    @property
    def one_sided(self) -> int:
        return sum(int(row.metrics.get("one_sided", 0)) for row in self.outs)

    @property
    def worst(self) -> Row:
        """The output with the largest error."""
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
        """Direction, and end of its first call; all of forward comes before backward."""
        return DIRECTIONS.index(self.place.direction), min(call.order for call in self.calls)

    @property
    def error(self) -> float:
        return max((call.error for call in self.calls), default=math.nan)

    @property
    def worst(self) -> Call:
        return max(self.calls, key=lambda call: call.error)

    @property
    def role(self) -> tuple[str, str, str]:
        """Key that a site shares with its siblings in other layers."""
        return self.place.direction, role_of(self.name), self.class_name


_NUMBER = re.compile(r"\d+")


@functools.lru_cache(1 << 14)
def role_of(name: str) -> str:
    """Return a site's name without layer numbers.

    >>> role_of("model.layers.12.mlp")
    'model.layers.*.mlp'
    """
    return _NUMBER.sub("*", name)


def error_of(row: Row) -> float:
    """Relative L2 of a row on the scale on which it was judged; inf if it is not a number."""
    value = error_on_scale(row)
    return math.inf if math.isnan(value) else value


FINE = 2.0**-20
"""Unit roundoff up to which a format is fine: rounding in sums is as large as that of results."""


def unit_of(row: Row) -> float:
    """Unit roundoff of the coarser format of a row; 0 for exact formats."""
    reference, candidate = DTYPES.get(row.reference_dtype), DTYPES.get(row.candidate_dtype)
    return max(
        reference.unit_roundoff if reference else 0.0, candidate.unit_roundoff if candidate else 0.0
    )


def roundoff_of(row: Row) -> float:
    """Unit roundoff at the size of the tensor; it is larger for subnormal values.

    Below its smallest normal number, a format has one fixed step. Half a step is the largest
    rounding error there, and as a fraction of an element it grows as elements get smaller. For a
    norm of zero the plain unit is returned: such a tensor has lost more than rounding explains.
    """
    unit = unit_of(row)
    size, left = row.metrics.get("reference_l2", 0.0), row.metrics.get("candidate_l2", 0.0)
    dtype = coarsest((row.reference_dtype, row.candidate_dtype))
    if dtype is None or not (0.0 < size < math.inf and left):
        return unit
    component = DTYPES[dtype.component]
    step = math.ldexp(1.0, component.smallest_normal_exponent - component.mantissa)
    return math.hypot(unit, 0.5 * step * math.sqrt(math.prod(row.reference_shape or ())) / size)


def is_floating(row: Row) -> bool:
    dtype = DTYPES.get(row.reference_dtype)
    return dtype is not None and dtype.is_floating


def _is_dequantised(row: Row) -> bool:
    """Whether the reference holds integer codes that were compared as the numbers they encode."""
    is_codes = not is_floating(row) and "dequantise" in row.reference_recipe
    return is_codes and "relative_l2" in row.metrics


def same_kind(row: Row) -> bool:
    """Whether the candidate holds numbers: floating point, or integers with a single scale.

    A boolean mask and a floating-point mask may have the same meaning.
    """
    candidate = DTYPES.get(row.candidate_dtype)
    if candidate is None or candidate.is_floating:
        return True
    # Only integers with a single scale count. A tensor of scales means that it is a weight, and a
    # wrong weight excuses nothing.
    return step_of(row.candidate_recipe) > 0.0


def place_of(row: Row) -> Place | None:
    """Return the site and direction that a row belongs to; None for rows that are not evidence."""
    role = _ROLES.get(row.key.port)
    # Recomputed activations repeat the forward pass; with them, every site would count twice.
    if role is None or row.key.phase == "recompute":
        return None
    direction = role[0]
    # Operators have inputs and outputs in the backward pass as well.
    if row.key.phase == "backward" and direction == "forward":
        direction = "backward"
    return Place(direction, row.key.site)


def is_given(row: Row) -> bool:
    """Whether a tensor is an input of its site."""
    role = _ROLES.get(row.key.port)
    return role is not None and role[1]


def sites_of(rows: Iterable[Row], structure: Structure = NO_STRUCTURE) -> dict[Place, Site]:
    """Return all sites with at least one measured output, in order of execution.

    Args:
        rows: The measured rows.
        structure: What the runs know about their model, by the reference's names.
    """
    calls: dict[tuple[Place, int, int, int, int], Call] = {}
    sites: dict[Place, Site] = {}
    for row in rows:
        place = place_of(row)
        if place is None or not row.compared:
            continue
        key, is_input = row.key, is_given(row)
        of = (place, key.rank, key.process, key.step, key.visit)
        call = calls.get(of)
        if call is None:
            call = calls[of] = Call(key.step, key.rank, process=key.process)
            site = sites.get(place)
            if site is None:
                site = sites[place] = Site(place, row.class_name, row.candidate_class)
            site.calls.append(call)
        # The first tensor of a call, including inputs, marks where the call begins.
        call.begin = min(call.begin, row.order)
        # Integers with scales are numbers: those of two programs may all differ and mean the same.
        if is_input and _is_dequantised(row):
            call.ins.append(row)
        # Different integer inputs (token ids, routes) explain any difference of the outputs.
        elif not is_floating(row):
            call.has_codes |= is_input
            # Different bytes mean different codes; how many differ is not known without values.
            unlike = row.metrics.get("different", row.basis == "digest")
            call.changed_codes |= is_input and bool(unlike)
        elif "relative_l2" not in row.metrics or (is_input and not same_kind(row)):
            continue
        elif is_input:
            call.ins.append(row)
        else:
            call.outs.append(row)
            call.order = max(call.order, row.order)
    _give_parts(calls)
    # Sites without a measured output cannot be judged and are dropped here.
    measured = [site for site in sites.values() if _kept(site)]
    measured.sort(key=lambda site: site.order)
    _give_gradients(measured)
    _fill(measured, structure.flow)
    for site in measured:
        weight = structure.weights.get(site.name)
        for call in site.calls:
            call.length = length_of(site.class_name, weight, call.ins, call.outs)
    _longest_inside(measured)
    return {site.place: site for site in measured}


def is_in_parts(row: Row) -> bool:
    """Whether ranks of the reference hold a tensor in parts; its only row is on the first rank."""
    return " ranks" in row.reference_recipe


def _give_parts(calls: Mapping[tuple[Place, int, int, int, int], Call]) -> None:
    """Add the parts of split inputs to the calls of all ranks."""
    together: dict[tuple[Place, int, int], list[Row]] = {}
    for (place, _, _, step, visit), call in calls.items():
        if rows := [row for row in call.ins if is_in_parts(row)]:
            together.setdefault((place, step, visit), []).extend(rows)
    for (place, rank, _, step, visit), call in calls.items() if together else ():
        call.ins += [r for r in together.get((place, step, visit), ()) if r.key.rank != rank]


def _longest_inside(sites: Sequence[Site]) -> None:
    """Give every container at least the sum length of its parts."""
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
    """Add the gradients of the backward passes as inputs of the optimizer's gradients."""
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
                call.ins += [gradient for row in call.outs for gradient in made.get(of(row), ())]


def _fill(sites: Sequence[Site], flow: Flow) -> None:
    """Set the input error and the output error of every call.

    If no inputs were captured, the outputs of their producers are used instead. These are found by
    edges, or, without edges, the output made just before the call is used.
    """
    blind: list[tuple[Site, Call]] = []
    for site in sites:
        for call in site.calls:
            call.error = max(error_of(row) for row in call.outs)
            if call.ins:
                # The input of a norm counts as the norm weighs it.
                call.error_in = max(
                    max(error_of(row), float(row.metrics.get(GIVEN, 0.0))) for row in call.ins
                )
            # Weights have no inputs, and equal codes bring no error. If codes differ, there is
            # nothing to compare the outputs with.
            elif call.has_codes or site.place.direction == "param":
                call.error_in = math.inf if call.changed_codes else 0.0
            else:
                blind.append((site, call))
    rest = _from_makers(sites, blind, flow) if blind and flow else blind
    if rest:
        _from_before(sites, rest)


def _from_makers(
    sites: Sequence[Site], blind: Sequence[tuple[Site, Call]], flow: Flow
) -> list[tuple[Site, Call]]:
    """Set the input error to the largest error of the producers' last outputs before the call.

    Gradients flow the other way: their inputs come from the sites that read the output. Returns the
    calls for which no edge is known.
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
            before = [earlier for earlier in those if earlier.order < call.order]
            if before:
                errors.append(max(before, key=lambda call: call.order).error)
        if makers and not errors:
            rest.append((site, call))  # the producers ran in another step or were not captured
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
    """Set the input error to that of the last output before the call ended.

    Outputs of its own parts are skipped. The very first call takes in no error.
    """
    made: dict[tuple[str, int, int, int], list[tuple[int, str, float]]] = {}
    for site in sites:
        for call in site.calls:
            where = (site.place.direction, call.rank, call.process, call.step)
            made.setdefault(where, []).append((call.order, site.name, call.error))
    for outputs in made.values():
        outputs.sort()
    for site, call in blind:
        outputs = made[(site.place.direction, call.rank, call.process, call.step)]
        call.error_in, call.known_by = 0.0, "order"
        # The outputs are searched by bisection, because a long run has as many outputs as calls.
        for order, name, error in reversed(outputs[: bisect_left(outputs, (call.order,))]):
            if order < call.order and name != site.name and not contains(site.name, name):
                call.error_in = error
                break


def contains(outer: str, inner: str) -> bool:
    """Whether one site is inside another.

    >>> contains("model.layers.1", "model.layers.1.mlp"), contains("a.1", "a.10")
    (True, False)
    """
    # A site does not contain itself; callers handle that case.
    if outer == inner:
        return False
    if outer in ROOTS:
        return True
    return inner.startswith((outer + ".", outer + "/"))


def innermost(names: Iterable[str]) -> list[str]:
    """Return the names that contain none of the others, in their order."""
    listed = list(dict.fromkeys(names))
    around = {outer for name in listed for outer in ancestors(name)}
    return [name for name in listed if name not in around]


def ancestors(name: str) -> Iterator[str]:
    """Yield every site that may contain a site, nearest first and the roots last."""
    inner = name
    # The site of an operator is `module/operator`, so its module contains it.
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
    """Return the number of sites in each site."""
    counts: dict[str, int] = {}
    for name in names:
        for outer in ancestors(name):
            counts[outer] = counts.get(outer, 0) + 1
    return counts


def over_before(sites: Mapping[Place, Site], first: Place) -> list[Site]:
    """Return the sites of the same direction that ended before a site.

    Its own parts are excluded: a part that runs after the container's code (an attention's output
    projection) ends before the container does, and may show the container's fault.
    """
    return [
        site
        for place, site in sites.items()
        if place.direction == first.direction
        and site.order < sites[first].order
        and not contains(first.site, place.site)
    ]


# Steps that can be compared: both models get the same tokens and have equal weights.


def comparable_steps(
    sites: Mapping[Place, Site], rows: Sequence[Row]
) -> tuple[dict[Place, Site], str, int | None]:
    """Return the sites without steps that say nothing about single modules, a note, and the step.

    From the returned step on, the models were given different tokens or had different weights. No
    module is to blame for what training has changed.
    """
    tokens, weights = _other_tokens(sites, rows), _other_weights(sites, rows)
    # The earlier of the two reasons is reported, because the later one may be its consequence.
    if tokens is not None and (weights is None or tokens <= weights):
        return (
            _before(sites, tokens),
            f"from step {tokens} on the two models were given different tokens: "
            "those steps say nothing about numbers and were left out",
            tokens,
        )
    if weights is None:
        return dict(sites), "", None
    return (
        _before(sites, weights),
        f"the gradients of step {weights - 1} differ, so from step {weights} on the two models "
        "have different weights: those steps say nothing about single modules and were left out",
        weights,
    )


def _before(sites: Mapping[Place, Site], step: int) -> dict[Place, Site]:
    kept: dict[Place, Site] = {}
    for place, site in sites.items():
        site.calls = [call for call in site.calls if call.step < step]
        if site.calls:
            kept[place] = site
    return kept


def _other_tokens(sites: Mapping[Place, Site], rows: Sequence[Row]) -> int | None:
    other: set[int] = set()
    for place, site in sites.items():
        if place.site in ROOTS and place.direction == "forward":
            other |= {call.step for call in site.calls if call.changed_codes}
    for row in rows:
        is_given = row.key.site in ROOTS and row.key.port == "input"
        is_code = row.reference_dtype.startswith(("int", "uint"))
        if is_given and is_code and row.metrics.get("different"):
            other.add(row.key.step)
    return min(other, default=None)


def _other_weights(sites: Mapping[Place, Site], rows: Sequence[Row]) -> int | None:
    """Return the first step with different weights: the one after the first wrong gradients."""
    # Only gradients that an optimizer received count; other gradients may just be accumulated.
    off = [row for row in rows if row.key.port == "optimizer_grad" and is_off(row)]
    first = min((row.key.step for row in off), default=None)
    last = max((call.step for site in sites.values() for call in site.calls), default=-1)
    # A difference in the last step changes no weights that were used afterwards.
    return None if first is None or first >= last else first + 1


def is_off(row: Row) -> bool:
    dtype = coarsest((row.reference_dtype, row.candidate_dtype))
    return row.compared and dtype is not None and error_of(row) > LIMITS.get(dtype.name, math.inf)
