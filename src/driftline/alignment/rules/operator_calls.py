"""Pairs if at least one run has compiled graphs.

In a run of operators against compiled graphs, the nth calls of an operator in a module and phase
are paired. Both sides must have the same number of calls; otherwise nothing is paired, and the
reason says so. If a kernel only computes a value on the way to another one, the reason is the
fusion. Two compiled runs are paired call by call. Modules are paired by `module_borders`,
parameters by name. `align_compiled` combines these; nothing is guessed beyond them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from driftline.alignment.annotate.compiled_graphs import Owners, with_lines
from driftline.alignment.plan import NO_NODE, NO_TENSOR, NOT_KEPT, Pair, Plan, execution
from driftline.alignment.rules.module_borders import pair_modules, reshaped
from driftline.alignment.rules.names import pair_by_name, refuse_unrelated
from driftline.alignment.sites.compiled_graphs import (
    SAVED,
    Graphs,
    Match,
    Matching,
    Piece,
    Place,
    Value,
    graphs_of,
    why_unpaired,
)
from driftline.graphs.sources.graph_files import Graph, GraphNode, Origin
from driftline.runs.records import Record, TensorKey

if TYPE_CHECKING:
    from driftline.alignment.align import Context

_Calls = Mapping[tuple[int, str, str, str], Mapping[int, Mapping[str, Record]]]


def pair_operators(
    records: Sequence[Record], graphs: Graphs, matching: Matching
) -> Iterator[Match]:
    """Match results of operators with the values of the nodes that come from their calls."""
    calls: dict[tuple[int, str, str, str], dict[int, dict[str, Record]]]
    calls = defaultdict(lambda: defaultdict(dict))
    for record in records:
        module, slash, name = record.key.site.rpartition("/")
        if slash and record.key.port == "output":
            key = (record.key.step, module, name, record.key.phase)
            calls[key][record.key.visit][record.key.slot] = record
            matching.reasons[record.key] = NO_NODE
    if not calls:
        return
    index = _CallIndex(graphs, calls)
    # With kernels, the fusion is every call's reason to be unpaired, until a match removes it.
    if graphs.engine != "fx":
        for graph, node, step in index.executed():
            for result in index.by(graph, node, step):
                matching.reasons[result.key] = graphs.why_not_kept(graph, node)
                if fused := graphs.whole(graph, node, step, 0):
                    matching.inside[result.key] = fused.key
    # The first value that fits a call is kept; later ones are views of it.
    once: set[TensorKey] = set()
    shown = [
        (bool(value.inside), node is not value.node, value, node)
        for value in graphs.values
        for node in graphs.same_elements(value)
    ]
    # Views come last: they represent an operator only if nothing else of it was kept. Values that
    # were recomputed outside of a kernel come after all values that kernels kept.
    for *_, value, node in sorted(shown, key=lambda row: row[:2]):
        key = value.record.key
        for result in index.by(value.graph, node, key.step, key.visit):
            fits = math.prod(result.shape) == math.prod(value.record.shape)
            if fits and result.key not in once:
                once.add(result.key)
                yield Match(result, value.record, reshaped(value.record, result.shape))
                break
        else:
            if why := index.why_unknown(value.graph, node, key.step):
                matching.partner_reasons[key] = why


class _CallIndex:
    """The calls of a run of operators from which the nodes of compiled graphs come.

    Args:
        graphs: The compiled graphs.
        calls: Results by step, module, operator and phase; then by call and slot.
    """

    def __init__(self, graphs: Graphs, calls: _Calls) -> None:
        self._graphs = graphs
        self._calls = calls
        self._totals = _totals(graphs)
        self._times = _executions(graphs)

    def executed(self) -> Iterator[tuple[Graph, GraphNode, int]]:
        """Every node of a graph, for each step that executed it."""
        steps: dict[int, list[int]] = defaultdict(list)
        for graph_id, step in self._times:
            steps[graph_id].append(step)
        for graph in self._graphs.graphs:
            for step in steps[id(graph)]:
                for node in graph.nodes:
                    yield graph, node, step

    def by(
        self, graph: Graph, node: GraphNode, step: int, visit: int | None = None
    ) -> Iterator[Record]:
        """Results of a node's calls in one execution of its graph, or in all of a step."""
        for origin, calls, per_run, ran in self._calls_of(graph, node, step):
            # Numbers mean the same on both sides only if both counted equally many calls.
            if per_run * ran == max(calls) + 1:
                pieces = self._totals[node.module, origin.name, node.phase]
                own_piece = self._graphs.piece(graph)
                # Pieces run in program order, so calls of earlier pieces come before this piece's
                # own.
                place = sum(n for piece, n in pieces.items() if piece < own_piece) + origin.nth
                for time in range(ran) if visit is None else (visit,):
                    result = calls.get(time * per_run + place, {}).get(origin.slot)
                    if result is not None:
                        yield result

    def why_unknown(self, graph: Graph, node: GraphNode, step: int) -> str:
        for origin, calls, per_run, ran in self._calls_of(graph, node, step):
            if per_run * ran != max(calls) + 1:
                return (
                    f"{max(calls) + 1} calls of {origin.name} in {node.module} there, "
                    f"{per_run * ran} here: which is which is not known"
                )
        return ""

    def _calls_of(
        self, graph: Graph, node: GraphNode, step: int
    ) -> Iterator[tuple[Origin, Mapping[int, Mapping[str, Record]], int, int]]:
        """For each call of a node: the recorded calls of its operator, calls per run, and runs."""
        if node.target == "placeholder" or node.body:
            return
        ran = self._times[id(graph), step]
        for origin in node.origins:
            # In-place operators have an underscore in eager mode; compilers trace the plain
            # operator.
            for name in (origin.name, f"{origin.name}_", _EAGER.get(origin.name, "")):
                calls = self._calls.get((step, node.module, name, node.phase))
                if calls:
                    per_run = sum(self._totals[node.module, origin.name, node.phase].values())
                    yield origin, calls, per_run, ran
                    break


_EAGER = {
    "aten._native_batch_norm_legit_no_training": "aten.native_batch_norm",
    "aten._native_batch_norm_legit_functional": "aten.native_batch_norm",
}
"""Operators that a compiler traces → those that eager mode dispatches instead."""


def _totals(graphs: Graphs) -> dict[tuple[str, str, str], dict[Piece, int]]:
    """By module, operator and phase: the number of calls in each piece of the program."""
    totals: dict[tuple[str, str, str], dict[Piece, int]] = defaultdict(dict)
    for graph in graphs.graphs:
        for node in graph.nodes:
            if node.target == "placeholder" or node.body:
                continue
            for origin in node.origins:
                key = (node.module, origin.name, node.phase)
                totals[key][graphs.piece(graph)] = origin.total
    return totals


def _executions(graphs: Graphs) -> dict[tuple[int, int], int]:
    """How often each graph was executed in each step."""
    runs: dict[tuple[int, int], int] = {}
    for value in graphs.values:
        # A visit is counted from 0 within its step, so the highest visit plus one is the number of
        # runs.
        graph_step = (id(value.graph), value.record.key.step)
        runs[graph_step] = max(runs.get(graph_step, 0), value.record.key.visit + 1)
    return runs


# --- whole runs


_Input = tuple[Piece, str, str, str, tuple[int, ...], int, int]
_READ = "a parameter, which kernels only read (--level params records it)"


class _OwnerPairs(NamedTuple):
    """Pairs of one process of either run, reasons for unpaired tensors, and notes."""

    pairs: list[Pair]
    reasons: dict[tuple[str, TensorKey], str]
    inside: dict[tuple[str, TensorKey], TensorKey]
    notes: list[str]


def align_compiled(reference_graphs: Owners, candidate_graphs: Owners, plan: Plan) -> Plan:
    """The plan with the pairs that follow from compiled graphs, and no guesses beyond them.

    Args:
        reference_graphs: Graphs of the reference, by rank and process; empty if not compiled.
        candidate_graphs: Graphs of the candidate.
        plan: The plan whose unpaired tensors are paired.
    """
    reference, candidate = _by_owner(plan.missing), _by_owner(plan.extra)
    total = _OwnerPairs([], {}, {}, [])
    for owner, other in _owners(list(reference), list(candidate)):
        graphs = reference_graphs.get(owner), candidate_graphs.get(other)
        result = _align_owner(*graphs, reference[owner], candidate[other])
        total.pairs.extend(result.pairs)
        total.reasons.update(result.reasons)
        total.inside.update(result.inside)
        total.notes.extend(result.notes)
    together = sorted([*plan.pairs, *total.pairs], key=lambda pair: execution(pair.reference))
    paired = {id(record) for pair in total.pairs for record in pair.records}
    missing = tuple(record for record in plan.missing if id(record) not in paired)
    extra = tuple(record for record in plan.extra if id(record) not in paired)
    # Reasons of tensors that were paired are dropped.
    alone = {("reference", r.key) for r in missing} | {("candidate", r.key) for r in extra}
    reasons = {place: why for place, why in total.reasons.items() if place in alone}
    inside = {place: fused for place, fused in total.inside.items() if place in alone}
    return plan._replace(
        pairs=tuple(together),
        missing=missing,
        extra=extra,
        notes=(*plan.notes, *dict.fromkeys(total.notes)),
        reasons={**plan.reasons, **reasons},
        inside={**plan.inside, **inside},
    )


def _align_owner(
    a: Graphs | None, b: Graphs | None, left: list[Record], right: list[Record]
) -> _OwnerPairs:
    # Modules around compiled regions have names on both sides, so they pair as usual.
    by_name = pair_by_name(_others(a, left), _others(b, right))
    result = _OwnerPairs(list(by_name.pairs), {}, {}, [])
    named = {id(record) for pair in by_name.pairs for record in pair.records}
    left = [record for record in left if id(record) not in named]
    right = [record for record in right if id(record) not in named]
    matching = _match_owner(a, b, left, right)
    if matching is None:
        return result
    # A tensor is paired once, by the first match that claims it.
    free = {id(record): record.key for record in (*left, *right)}
    recipe_first = b is None
    for match in matching.matches:
        if id(match.record) in free and id(match.partner) in free:
            recipes = (match.recipe, None) if recipe_first else (None, match.recipe)
            pair = Pair(match.record, match.partner, "graph", match.confidence, *recipes)
            result.pairs.append(pair)
    # A fused result explains its inner values only if it is compared itself.
    compared = {free[id(r)] for pair in result.pairs for r in pair.records if id(r) in free}
    for key, fused in matching.inside.items():
        if fused in compared:
            side = "reference" if key in matching.reasons else "candidate"
            result.inside[side, key] = fused
    result.reasons.update({("reference", key): why for key, why in matching.reasons.items()})
    result.reasons.update(
        {("candidate", key): why for key, why in matching.partner_reasons.items()}
    )
    result.notes.extend((*_notes("reference", a), *_notes("candidate", b)))
    return result


def _match_owner(
    a: Graphs | None, b: Graphs | None, left: Sequence[Record], right: Sequence[Record]
) -> Matching | None:
    """Matches with the reference first; None if neither side was compiled.

    If both were compiled, calls have the same keys. If one was compiled, the other is a run of
    modules or operators: it is matched from that plain side, and flipped if the reference was
    compiled.
    """
    if a is not None and b is not None:
        matching = _by_calls(a, b)
        matching.matches.extend(_parameters(left, b))
        matching.matches.extend(_flipped(match) for match in _parameters(right, a))
        return matching
    if b is not None:
        return _plain(left, b)
    if a is None:
        return None
    plain = _plain(right, a)
    matches = [_flipped(match) for match in plain.matches]
    return Matching(matches, plain.partner_reasons, plain.reasons, plain.inside)


def _flipped(match: Match) -> Match:
    return match._replace(record=match.partner, partner=match.record)


def _notes(side: str, graphs: Graphs | None) -> Iterator[str]:
    if graphs is None:
        return
    count = len(graphs.graphs)
    what = f"{count} compiled graph{'' if count == 1 else 's'}"
    if graphs.engine == "fx":
        yield f"the {side} executed {what} node by node, with torch's own operators"
        return
    results = [value for value in graphs.values if value.kernel is not None]
    exact = sum(value.node is not None for value in results)
    inside = len(results) - exact
    yield (
        f"the {side} ran inductor's kernels of {what}: {exact} of their results are the value of "
        f"one node, and only those are paired; {inside} are inside a fusion"
    )
    if recomputed := sum(bool(value.inside) for value in graphs.values):
        yield (
            f"{recomputed} values of nodes inside the {side}'s fusions were computed separately, "
            "node by node, from the inputs of the kernels: they show what inductor decomposes "
            "operators into; the results of the kernels show what it generated from that"
        )


# --- two compiled runs


def _by_calls(a: Graphs, b: Graphs) -> Matching:
    matching = Matching([], {}, {}, {})
    # Three ranks of evidence: the node's own value, a view of it, and values that were recomputed
    # for a fused kernel. The strongest one is used.
    index: dict[tuple[Place, int, int], Value] = {}
    shown: dict[tuple[Place, int, int], Value] = {}
    inside: dict[tuple[Place, int, int], Value] = {}
    for value in b.values:
        key = value.record.key
        for node in b.same_elements(value):
            for place in b.places(value.graph, node):
                call = (place, key.step, key.visit)
                rank = index if node is value.node else shown
                (inside if value.inside else rank).setdefault(call, value)
    index = inside | shown | index
    # Inputs have no call that made them, so only equal piece, phase and shape, in order, can pair
    # them. This does not apply to graphs that were cut, whose parts have inputs of their own.
    inputs: dict[_Input, list[Value]] = defaultdict(list)
    for value in b.values:
        if _is_input(value) and not b.is_cut(value.graph):
            inputs[_input(b, value)].append(value)
    matched: set[int] = set()
    for value in a.values:
        partner = _partner(a, value, index)
        if partner is None and _is_input(value) and not a.is_cut(value.graph):
            waiting = inputs[_input(a, value)]
            partner = waiting.pop(0) if waiting else None
        if partner is not None:
            matched.add(id(partner.record))
            matching.matches.append(
                Match(value.record, partner.record, reshaped(partner.record, value.record.shape))
            )
        elif reason := why_unpaired(value) or _why_alone(a, value, b, matching.inside):
            matching.reasons[value.record.key] = reason
    for value in b.values:
        if id(value.record) not in matched and (
            reason := why_unpaired(value) or _why_alone(b, value, a, matching.inside)
        ):
            matching.partner_reasons[value.record.key] = reason
    return matching


def _partner(
    a: Graphs, value: Value, index: Mapping[tuple[Place, int, int], Value]
) -> Value | None:
    key = value.record.key
    for node in a.same_elements(value):
        for place in a.places(value.graph, node):
            partner = index.get((place, key.step, key.visit))
            if (
                partner is None and place.phase == SAVED
            ):  # the other run computed it instead of saving it
                forward = place._replace(phase="forward")
                partner = index.get((forward, key.step, key.visit))
            if partner is not None:
                return partner
    return None


def _is_input(value: Value) -> bool:
    node = value.node
    input_targets = ("placeholder", "get_attr")
    return node is not None and node.target in input_targets and bool(_kind(node))


def _kind(node: GraphNode) -> str:
    """The kind of a graph input; empty for values that the forward pass saved."""
    if node.origins:
        return ""
    if node.body or node.target == "get_attr":
        return node.target
    # Names that AOTAutograd gives to graph inputs.
    name = node.name.rstrip("_0123456789")
    return {"primals": "input", "arg": "input", "tangents": "gradient"}.get(name, "")


def _input(graphs: Graphs, value: Value) -> _Input:
    """The identity of an input of a graph; inputs with equal identity pair in order.

    Parameters are identified by name.
    """
    key, node = value.record.key, value.node
    body = f"{node.body} {_kind(node)}" if node is not None else ""
    whose = f"{node.module} {node.parameter}" if node is not None and node.parameter else ""
    piece = graphs.piece(value.graph)
    return piece, body, whose, key.phase, value.record.shape, key.step, key.visit


def _why_alone(own: Graphs, value: Value, other: Graphs, inside: dict[TensorKey, TensorKey]) -> str:
    if value.node is None:
        return ""
    for place in own.places(value.graph, value.node):
        nodes = other.by_place.get(place)
        if nodes:
            graph, node = nodes[-1]
            key = value.record.key
            if fused := other.whole(graph, node, key.step, key.visit):
                inside[key] = fused.key
            return other.why_not_kept(graph, node) if other.engine != "fx" else ""
    if value.node.target == "placeholder" and value.node.body:
        return "what a body is given by its operator, compared where it comes from"
    if value.node.target == "placeholder":
        return _READ if value.node.parameter and other.engine != "fx" else "an input of the graph"
    return "the other run's graph has no node for this call: it was replaced or left out"


# --- a compiled run and one of modules or operators


def _plain(records: Sequence[Record], graphs: Graphs) -> Matching:
    matching = Matching([], {}, {}, {})
    matched: set[int] = set()
    # Operators first: a module's output is often the result of its last operator, which is exact.
    for match in (
        *pair_operators(records, graphs, matching),
        *pair_modules(records, graphs, matching),
        *_parameters(records, graphs),
    ):
        matching.matches.append(match)
        matched.add(id(match.partner))
        matching.reasons.pop(match.record.key, None)
    paired = {match.record.key for match in matching.matches}
    # Inputs of operators are outputs of others and are compared there.
    for record in records:
        if record.key.port == "input" and "/" in record.key.site and record.key not in paired:
            matching.reasons[record.key] = NOT_KEPT
    for value in graphs.values:
        if id(value.record) not in matched:
            reason = why_unpaired(value) or NO_TENSOR
            matching.partner_reasons.setdefault(value.record.key, reason)
    return matching


def _parameters(records: Sequence[Record], graphs: Graphs) -> Iterator[Match]:
    """Match parameters of a run of modules with the graph inputs that hold them."""
    named = {(r.key.step, r.key.site, r.key.slot): r for r in records if r.key.port == "param"}
    for value in graphs.values if named else ():
        node, key = value.node, value.record.key
        if node is not None and node.parameter and not key.visit:
            parameter = named.get((key.step, node.module, node.parameter))
            if parameter is not None and parameter.shape == value.record.shape:
                yield Match(parameter, value.record)


def _others(graphs: Graphs | None, records: Sequence[Record]) -> Sequence[Record]:
    """Records that are not the value of a node: modules around compiled regions."""
    if graphs is None:
        return [record for record in records if "/" not in record.key.site]
    values = {value.record.key for value in graphs.values}
    return [record for record in records if record.key not in values]


def _by_owner(records: Sequence[Record]) -> dict[tuple[int, int], list[Record]]:
    by_owner: dict[tuple[int, int], list[Record]] = {}
    for record in records:
        by_owner.setdefault((record.key.rank, record.key.process), []).append(record)
    return by_owner


def _owners(
    reference: list[tuple[int, int]], candidate: list[tuple[int, int]]
) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    if len(reference) == len(candidate) == 1:
        return [(reference[0], candidate[0])]
    return [(owner, owner) for owner in reference if owner in candidate]


def by_compiled_graphs(plan: Plan, context: Context) -> Plan:
    """Pairs by the calls that a compiler lists, with the program lines that they come from."""
    from driftline.alignment.rules.exported import with_calls

    graphs = graphs_of(context.reference), graphs_of(context.candidate)
    plan = with_calls(align_compiled(*graphs, plan), context.reference, context.candidate)
    return with_lines(plan, *graphs) if plan.pairs else refuse_unrelated(plan)
