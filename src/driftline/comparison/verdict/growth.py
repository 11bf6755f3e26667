"""Evidence from two runs alone: does more error come out of a site than its input explains?

Compares every site with its siblings in other layers and with the rounding of its format. Sites
that compute with integers behind a float interface are recognised first, because their noise is
that of eight bits: by class names, packed or integer weights, and weights that have disappeared
from the module tree.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import pairwise
from statistics import median
from typing import NamedTuple, TypeAlias

from driftline.alignment.plan import Plan
from driftline.comparison.table.row import Row
from driftline.comparison.table.structure import NO_STRUCTURE, Flow, Structure
from driftline.comparison.tolerance.defaults import LIMITS, QUANTISED, ROUNDINGS, coarsest
from driftline.comparison.tolerance.tolerance import is_on_another_scale
from driftline.comparison.verdict.dataflow import Transfer
from driftline.comparison.verdict.module_kinds import module_facts, strides_of
from driftline.comparison.verdict.sites import (
    FINE,
    Call,
    Place,
    Site,
    ancestors,
    error_of,
    flow_of,
    parts_of,
)
from driftline.graphs.module_tree import ModuleNode, ModuleTree
from driftline.graphs.sources.exported import exported_graph
from driftline.runs.records import TensorKey
from driftline.runs.run import Run
from driftline.runs.scope import scope_of

# Parts of class names and module names that quantisation libraries use.
_WORDS = ("quant", "int8", "int4", "4bit", "8bit", "gptq", "awq")
_PACKED = ("packed", *_WORDS)
_WEIGHTS = ("weight", "qweight", "weight_packed", "codes")
_NARROW = ("int", "uint", "float8", "float4")


def structure_of(
    reference: Run, candidate: Run, plan: Plan, rows: Iterable[Row] | None = None
) -> Structure:
    """The facts about the structure of two models that judging their sites needs.

    Args:
        reference: The run that is assumed to be right.
        candidate: The run to test.
        plan: The alignment of the two runs.
        rows: All rows, if they exist; reading the pairs of a long plan from the runs is slower.
    """
    with_outputs, with_inputs = set[str](), set[str]()
    places: set[tuple[int, int]] = set()
    learns = False
    classes: dict[str, set[str]] = {}
    for key, class_name, site in _compared_sites(plan, rows):
        places.add((key.rank, key.process))
        learns = learns or key.port == "optimizer_grad"
        classes.setdefault(class_name, set()).add(site)
        if key.port == "output":
            with_outputs.add(key.site)
        elif key.port == "input":
            with_inputs.add(key.site)
    for record in plan.extra:
        classes.setdefault(record.class_name, set()).add(record.key.site)
    facts = module_facts(reference, places)
    # The flow of tensors is needed only for sites that were captured without their inputs, and
    # reading it is slow.
    flow: Flow = flow_of(reference, candidate, plan) if with_outputs - with_inputs else {}
    quantised = quantised_sites(reference, candidate, classes)
    for site, error in with_containers(rounded_sites(candidate, plan)).items():
        quantised[site] = max(quantised.get(site, 0.0), error)
    misread = misread_sites(reference, candidate, plan)
    # Weights change between steps only if an optimizer gets gradients.
    strides = strides_of(reference, places) if learns else {}
    codes = _code_types(_nodes(candidate)) if quantised else {}
    return Structure(flow, facts.weights, facts.inside, quantised, misread, strides, codes)


def _compared_sites(plan: Plan, rows: Iterable[Row] | None) -> Iterator[tuple[TensorKey, str, str]]:
    """For each pair, the reference's key, the candidate's class and the candidate's site."""
    if rows is None:
        for pair in plan.pairs:
            yield pair.reference.key, pair.candidate.class_name, pair.candidate.key.site
        return
    for row in rows:
        yield row.key, row.candidate_class or row.class_name, row.candidate_site or row.key.site


def misread_sites(reference: Run, candidate: Run, plan: Plan) -> dict[str, str]:
    """Sites of the candidate that decode integers to other numbers than were encoded.

    The values are sentences that say how.
    """
    graph, other = exported_graph(candidate), exported_graph(reference)
    if graph is None or not graph.misread:
        return {}
    # What both files do is assumed to be intended.
    intended = {node.sentence for node in other.misread} if other is not None else set[str]()
    partner = {pair.candidate.key.site: pair.reference.key.site for pair in plan.pairs}
    compared = set(partner.values())
    sentences: dict[str, str] = {}
    for node in graph.misread:
        if node.sentence in intended:
            continue
        place = node.module if node.module in compared else partner.get(node.site)
        # The node's result may not be compared, but tensors computed from it are.
        after = [partner[module] for module in node.modules if module in partner]
        if place is not None or not after:
            sentences[place or node.module or node.site] = node.sentence
        else:
            innermost = max(after, key=lambda module: module.count("."))
            sentences[innermost] = (
                f"takes or gives what comes of '{node.site}', which {node.sentence}"
            )
    return sentences


def rounded_sites(candidate: Run, plan: Plan) -> dict[str, float]:
    """The relative error that the rounding of weights explains, by the reference's sites."""
    graph = exported_graph(candidate)
    if graph is None or not graph.rounded:
        return {}
    errors: dict[str, float] = {}
    compared_at: dict[TensorKey, set[str]] = {}
    for pair in plan.pairs:
        compared_at.setdefault(pair.candidate.key, set()).add(pair.reference.key.site)
        if error := graph.rounded.get(pair.candidate.key.site):
            site = pair.reference.key.site
            errors[site] = max(errors.get(site, 0.0), ROUNDINGS * error)
    for (side, key), fused in plan.inside.items():
        # A weight inside a fusion rounds the result of the fused node.
        error = graph.rounded.get(key.site, 0.0) if side == "reference" else 0.0
        for site in compared_at.get(fused, ()) if error else ():
            errors[site] = max(errors.get(site, 0.0), ROUNDINGS * error)
    return errors


def quantised_sites(
    reference: Run, candidate: Run, classes: Mapping[str, AbstractSet[str]]
) -> dict[str, float]:
    """The relative error allowed at each site that computes with integers; empty for most runs.

    Args:
        reference: The run that is assumed to be right.
        candidate: The run to test.
        classes: The candidate's sites of each class.
    """
    reference_nodes, candidate_nodes = _nodes(reference), _nodes(candidate)
    reference_weights = _weighted(reference_nodes)
    candidate_weights = _weighted(candidate_nodes)
    quantised = _packed(candidate_nodes) - _packed(reference_nodes)
    for name, sites in classes.items():
        if any(word in name.lower() for word in _WORDS):
            quantised |= sites
    # Weights of a graph are stored outside its nodes, so none of them has disappeared.
    if any(node.parameters for node in candidate_nodes) or scope_of(candidate).has_modules:
        gone = {
            site
            for site, count in reference_weights.items()
            if count and candidate_weights.get(site) == 0
        }
        # A tied or lazily built weight may be missing too, but if weights are packed, several are.
        if len(gone) >= 2:
            quantised |= gone
    types = _code_types(candidate_nodes)
    return with_containers({site: QUANTISED[types.get(site, "int8")] for site in quantised})


def with_containers(quantised: Mapping[str, float]) -> dict[str, float]:
    """The allowed errors of sites that compute with integers, and of the sites around them."""
    allowed = dict(quantised)
    for site, error in quantised.items():
        for outer in ancestors(site):
            # Errors of several such parts add up in a container.
            allowed[outer] = max(allowed.get(outer, 0.0), 2.0 * error)
    return allowed


def _packed(nodes: Sequence[ModuleNode]) -> set[str]:
    """The modules whose weight is stored as codes, or in a part that packs it."""
    sites: set[str] = set()
    for node in nodes:
        holds = any(
            parameter.name in _WEIGHTS and parameter.dtype.startswith(_NARROW)
            for parameter in node.parameters
        )
        packs = any(
            any(word in f"{name} {part.class_name}".lower() for word in _PACKED)
            and not part.children
            for name, part in node.children
        )
        if holds or packs:
            sites.add(node.site)
    return sites


UNSEEN_CODES = (
    "weights are stored as codes with scales, and were not compared: what a wrong zero point, or "
    "one wrong scale of many, does to outputs may be within limits; dumps with "
    "--level modules,params on both sides show it"
)


def unseen_codes(candidate: Run, structure: Structure, rows: Iterable[Row]) -> tuple[str, ...]:
    """A note if the candidate has quantised weights, and none of them was compared."""
    graph = exported_graph(candidate)
    if not structure.codes and (graph is None or not graph.rounded):
        return ()
    seen = any(
        row.key.port == "param" and "dequantise" in f"{row.reference_recipe} {row.candidate_recipe}"
        for row in rows
    )
    return () if seen else (UNSEEN_CODES,)


def _code_types(nodes: Sequence[ModuleNode]) -> dict[str, str]:
    """Module → type of the codes that its weight is stored as, where a limit for it is known."""
    return {
        node.site: parameter.dtype
        for node in nodes
        for parameter in node.parameters
        if parameter.name in _WEIGHTS and parameter.dtype in QUANTISED
    }


def _weighted(nodes: Sequence[ModuleNode]) -> dict[str, int]:
    """How many weights every module holds."""
    return {
        node.site: sum(parameter.name == "weight" for parameter in node.parameters)
        for node in nodes
    }


def _nodes(run: Run) -> list[ModuleNode]:
    """All modules of the first process; empty if the module tree cannot be read."""
    tree = run.topology()
    if not tree:
        return []
    try:
        return list(ModuleTree.from_json(tree).walk())
    except (AttributeError, KeyError, TypeError, ValueError):
        return []


# The growth of the error from input to output.


_SIBLINGS = 3
"""A role needs at least this many members for its median to be meaningful."""
_APART = 8.0
"""Units of roundoff by which right implementations of one function differ without any sum."""
_OWN_CODE = 4
"""Assumed number of operations in a container's own code; an attention has about this many."""
ALONE = 8.0
"""Factor by which an error may grow if there are no siblings to compare with."""
_LEAVES = (2.5, 1.45)
_CONTAINERS = (3.0, 1.8)
"""Factors over the median that the largest of three siblings, and of very many, may have. Measured
on clean models of 2 to 80 layers: leaves 1.0 to 1.2, the own code of attentions up to 2.2."""
_SPREAD = 0.5
"""Largest spread of siblings, in logarithms, at which they have a usual growth. A larger spread
does not narrow a limit, and widens it only as much as this one does."""
_QUIET, _LOUDEST = 1.0 / ALONE, 4
"""The code of a container is compared with siblings whose input error is at most this, or at most
twice its own. Larger errors grow less than others, because probabilities, gates and everything
else that is bounded can be off only by their own size."""
_NEAR = 2
"""This many siblings before a site, and after it, are at its depth."""
_Peers: TypeAlias = tuple[tuple[str, ...], int]
"""A role or kind, and the largest loudness of its members."""
_ENOUGH = 64
"""With fewer elements, the relative error of a tensor has no usual size."""
FAULT = 0.2
"""Relative error of a fault that a comparison must be able to see."""


_NOTHING: Mapping[str, AbstractSet[int]] = {}


class Growth(NamedTuple):
    """A site's error compared with the error that its input explains.

    Attributes:
        call: The call that exceeds its limit most, or comes nearest to it.
        expected: The expected relative error of that call.
        excess: The error divided by its limit; above 1 is outside.
        siblings: The number of siblings from which the expectation was derived.
        limit: The largest relative error that is explained.
        hides: Whether a fault of `FAULT` could stay within the limit.
        drowns: Whether it could even without the error that is allowed for integers.
    """

    call: Call
    expected: float
    excess: float
    siblings: int
    limit: float = math.inf
    hides: bool = False
    drowns: bool = False


def rounding(unit: float, parts: int, length: int = 1) -> float:
    """The relative error that rounding explains in a site.

    A leaf rounds its result once. Sums of n terms in two orders differ by about the root of
    n / 3 units, because each partial sum is rounded, and right implementations of a function differ
    by some further units. Formats of 16 bits and less are summed in float32. The rounding errors of
    parts add up like a random walk.

    Args:
        unit: Unit roundoff of the coarsest format involved.
        parts: The number of sites inside.
        length: The number of terms of its longest sum.
    """
    sums = min(unit, 2.0**-24) * math.sqrt(_APART**2 + length)
    once = unit if unit > FINE else 0.0
    return math.hypot(once, sums) * math.sqrt(1.0 + parts)


def growths(
    sites: Mapping[Place, Site],
    transfers: Mapping[Place, Sequence[Transfer]],
    structure: Structure = NO_STRUCTURE,
    covered_steps: Mapping[str, AbstractSet[int]] = _NOTHING,
) -> dict[Place, Growth]:
    """For every site, the transfer whose error exceeds the expected one most.

    Args:
        sites: All sites.
        transfers: The transfers of each site, from `transfers_of`.
        structure: Facts about the structure of the model.
        covered_steps: The steps of a site for which there is better evidence; other steps decide.
    """
    captured = parts_of(place.site for place in sites if place.direction == "forward")
    roles: dict[_Peers, list[tuple[int, float]]] = {}
    kin: dict[_Peers, list[tuple[int, float]]] = {}
    measured: dict[Place, list[_Measured]] = {}
    for place, made in transfers.items():
        uncaptured, is_known = _interior(place.site, captured, structure)
        own: list[_Measured] = []
        logs: dict[tuple[tuple[str, ...], tuple[str, ...], int], list[float]] = {}
        for transfer in made:
            parts = uncaptured + (_OWN_CODE if transfer.of_container else 0)
            # Gradients of a few units of roundoff may cancel inside a softmax, at a rectifier or
            # near the smallest step of a format, so there an allowance for the format is made.
            is_plain = is_known and place.direction != "backward"
            entry = _measured(transfer, parts, is_known=is_plain)
            own.append(entry)
            # An error that is mostly due to weights that have diverged does not show usual growth.
            if math.isfinite(entry.grown) and not transfer.moved > entry.base:
                for loud in range(entry.loudness, _LOUDEST + 1):
                    logs.setdefault((transfer.role, transfer.kind, loud), []).append(entry.grown)
        measured[place] = own
        # A site is represented by the median of its calls, so that one that is called often has
        # no more weight than others.
        order = sites[place].order[1]
        for (role, kind, loud), values in logs.items():
            usual_of_site = (order, median(values) if len(values) > 1 else values[0])
            roles.setdefault((role, loud), []).append(usual_of_site)
            kin.setdefault((kind, loud), []).append(usual_of_site)
    usual = {role: _usual(values) for role, values in roles.items()}
    usual_kin = {kind: _usual(values, is_kin=True) for kind, values in kin.items()}
    worst: dict[Place, Growth] = {}
    for place, entries in measured.items():
        least = structure.quantised.get(place.site, 0.0)
        steps = covered_steps.get(place.site, ()) if place.direction == "forward" else ()
        asked = _deciding_calls(entries, steps)
        results: list[Growth] = []
        for entry in asked:
            others = usual.get((entry.transfer.role, entry.loudness), _NO_SIBLINGS)
            if others.sites < _SIBLINGS:
                others = usual_kin.get((entry.transfer.kind, entry.loudness), _NO_SIBLINGS)
            results.append(_judged(entry, others, least, sites[place].order[1]))
        best = max(results, key=lambda growth: growth.excess)
        worst[place] = best._replace(
            hides=_hides_somewhere(asked, [growth.hides for growth in results]),
            drowns=_hides_somewhere(asked, [growth.drowns for growth in results]),
        )
    return worst


def _deciding_calls(entries: Sequence[_Measured], steps: Collection[int]) -> Sequence[_Measured]:
    """The calls whose growth counts: those in other steps than these, or else all."""
    return [entry for entry in entries if entry.transfer.call.step not in steps] or entries


def _hides_somewhere(entries: Sequence[_Measured], hides: Sequence[bool]) -> bool:
    """Whether a fault could hide in all calls of some part of a site's code.

    If the fault would show in one call of that code, it is enough: a later call with other weights
    need not show it again.
    """
    codes: dict[tuple[str, ...], bool] = {}
    for entry, hidden in zip(entries, hides, strict=True):
        role = entry.transfer.role
        codes[role] = codes.get(role, True) and hidden
    return any(codes.values())


def _interior(site: str, captured: Mapping[str, int], structure: Structure) -> tuple[int, bool]:
    """The number of modules inside a site that were not captured, and whether all are known.

    An operator has no modules inside. For a site that is not in the module tree, it is unknown.
    """
    if "/" in site:
        return 0, True
    inside = structure.inside.get(site)
    if inside is None:
        return 0, False
    return max(inside - captured.get(site, 0), 0), inside <= captured.get(site, 0)


class _Measured(NamedTuple):
    """A transfer with its errors.

    Attributes:
        transfer: The transfer.
        base: The error of its input, combined with half of the site's own rounding.
        error: The error of its output.
        grown: Logarithm of `error / base`.
        own: The error that the site's own rounding explains.
        flat: The error allowed for the number format if modules inside the site are unknown; else
            0.
    """

    transfer: Transfer
    base: float
    error: float
    grown: float
    own: float
    flat: float

    @property
    def loudness(self) -> int:
        """How large the input's error is, in powers of two; 0 if it is too small to meet bounds."""
        # Leaves such as linear layers, norms and activations do not bound errors in this way.
        if not self.transfer.of_container:
            return _LOUDEST
        if not self.base > _QUIET:
            return 0
        # Powers of two, so that a role has only a few groups, however many members it has.
        return min(math.ceil(math.log2(min(self.base / _QUIET, 1e9))), _LOUDEST)


def _measured(transfer: Transfer, parts: int, *, is_known: bool) -> _Measured:
    call = transfer.call
    # Errors that were judged on another scale are not explained by inputs alone.
    error = max((error_of(row) for row in call.outs if not is_on_another_scale(row)), default=0.0)
    own = rounding(call.unit, parts, call.length)
    went_in = 0.0 if math.isnan(call.error_in) else call.error_in
    base = math.hypot(went_in, 0.5 * own)
    flat = 0.0 if is_known else flat_limit(call)
    if not base > 0.0 or not math.isfinite(base):
        grown = math.inf if error > 0.0 and math.isfinite(base) else 0.0
    elif error > 0.0:
        grown = math.log(error / base)
    else:
        grown = -math.inf
    return _Measured(transfer, base, error, grown, own, flat)


def flat_limit(call: Call) -> float:
    """The largest of the limits of the outputs' number formats."""
    limits = [0.0]
    for row in call.outs:
        dtype = coarsest((row.reference_dtype, row.candidate_dtype))
        if dtype is not None:
            limits.append(LIMITS[dtype.name])
    return max(limits)


class _Usual(NamedTuple):
    """How errors grow at similar sites.

    Attributes:
        middle: Median of the growth, in logarithms.
        spread: The spread of the growth, in logarithms.
        sites: The number of sites.
        is_kin: Whether they have only their class in common.
        members: The order and the growth of each of them, in order of execution.
    """

    middle: float
    spread: float
    sites: int
    is_kin: bool = False
    members: Sequence[tuple[int, float]] = ()

    def near(self, order: int) -> float:
        """The usual growth at a depth of the model; at least that of the layers around it.

        Layers behave differently along a model: in the last layers tokens may be so similar that an
        attention attends to all of them, and errors of its scores do not matter. A fault of one
        layer does not affect the growth in the layers around it.
        """
        if self.is_kin:
            return self.middle
        place = bisect_left(self.members, (order, -math.inf))
        behind = place + (place < len(self.members) and self.members[place][0] == order)
        around = (*self.members[max(place - _NEAR, 0) : place], *self.members[behind:][:_NEAR])
        return max(self.middle, median(growth for _, growth in around)) if around else self.middle

    def beyond(self, *, of_container: bool) -> float:
        """The factor over the median that a site may have."""
        if self.is_kin:
            return _CONTAINERS[0]
        few, many = _CONTAINERS if of_container else _LEAVES
        return many + _SIBLINGS * (few - many) / self.sites


_NO_SIBLINGS = _Usual(0.0, 0.0, 0)


def _usual(members: Sequence[tuple[int, float]], *, is_kin: bool = False) -> _Usual:
    """How errors grow at similar sites, from the order and the growth of each."""
    values = [growth for _, growth in members]
    middle = median(values)
    # 1.4826 turns a median absolute deviation into the standard deviation of a normal distribution.
    spread = 1.4826 * median(abs(value - middle) for value in values)
    return _Usual(middle, spread, len(values), is_kin, () if is_kin else sorted(members))


def _judged(entry: _Measured, usual: _Usual, least: float, order: int) -> Growth:
    call, base = entry.transfer.call, entry.base
    count = usual.sites
    limit = ALONE * base
    expected = base
    if count >= _SIBLINGS:
        middle = math.exp(max(usual.near(order), -20.0))
        expected = base * min(middle, ALONE)
        among = base * middle * math.exp(3.0 * min(usual.spread, _SPREAD))
        among *= usual.beyond(of_container=entry.transfer.of_container)
        # Siblings narrow a limit, unless a tensor has too few elements for its error to have a
        # usual size. They widen it at most to the limit of the format: if all of them add more than
        # that, all of them have a fault.
        if among >= limit:
            limit = max(limit, min(among, flat_limit(call)))
        elif usual.spread <= _SPREAD and _size(call) >= _ENOUGH:
            limit = among
    # The error from diverged weights is an upper bound, so it is not part of the usual growth.
    without_steps = max(limit, 4.0 * entry.own, entry.flat, ALONE * entry.transfer.moved)
    limit = max(without_steps, least)
    siblings = max(count - 1, 0)
    # NaN or Inf that was not in the input was made here, whatever the sizes are.
    if call.one_sided and not call.one_sided_in:
        return Growth(call, expected, math.inf, siblings, limit)
    if not entry.grown > -math.inf:
        return Growth(call, expected, 0.0, siblings, limit)
    error = entry.error
    # If the output is the same tensor as the input, nothing was computed, so nothing can hide.
    if entry.transfer.is_same:
        return Growth(call, expected, min(error / limit, 1.0) if limit else 0.0, siblings, limit)
    excess = error / limit if limit > 0.0 else (math.inf if error > 0.0 else 0.0)
    # No further run makes the steps of integers smaller, so a fault that they hide is not counted
    # as hidden by noise.
    hides, drowns = _can_hide(error, limit), not least and _can_hide(error, without_steps)
    return Growth(call, expected, excess, siblings, limit, hides, drowns)


def _size(call: Call) -> int:
    """The number of elements of the largest output of a call."""
    return max(math.prod(row.reference_shape or ()) for row in call.outs)


def _can_hide(error: float, limit: float) -> bool:
    """Whether a fault of `FAULT` together with an error stays within a limit."""
    # The squares of independent errors add up.
    return math.hypot(min(error, limit), FAULT) <= limit


class Jump(NamedTuple):
    """A jump of the error along the depth of a model, between two modules of one kind.

    Attributes:
        site: The first module after the jump.
        before: Relative error of the module before the jump.
        after: Relative error of the module after it.
        usual: The factor by which the error grows between other neighbours.
    """

    site: str
    before: float
    after: float
    usual: float


def jump_along_depth(sites: Mapping[Place, Site]) -> Jump | None:
    """The clearest jump among the outputs of repeated containers; None if there is none."""
    chains: dict[tuple[str, str, str], list[Site]] = {}
    for site in sites.values():
        if site.place.direction == "forward" and "*" in site.role[1]:
            chains.setdefault(site.role, []).append(site)
    best: tuple[float, Jump] | None = None
    for chain in chains.values():
        # Three layers have only two steps, too few to know the usual one.
        if len(chain) < 4:
            continue
        logs = [math.log(max(site.error, 1e-12)) for site in chain if math.isfinite(site.error)]
        if len(logs) != len(chain):
            continue
        steps = [b - a for a, b in pairwise(logs)]
        middle = median(steps)
        steepest = max(range(len(steps)), key=steps.__getitem__)
        strength = steps[steepest] - middle
        if strength > math.log(3.0) and (best is None or strength > best[0]):
            before, after = chain[steepest].error, chain[steepest + 1].error
            best = strength, Jump(chain[steepest + 1].name, before, after, math.exp(middle))
    return best[1] if best else None
