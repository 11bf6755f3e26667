"""Pair inputs and outputs of modules with values of a graph in which the module is a set of nodes.

Compiled graphs: the output of a module is the single value of the right shape that a node outside
of the module reads. If several values fit, or the nodes are in several graphs, nothing is paired,
and the reason says so. Inductor keeps no memory for views, so the value may be read through a few
views, which become a recipe.

Exported graphs: modules that return several tensors, of which the graph uses only some. `Draft` is
the plan while these rules extend it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from driftline.alignment.plan import NO_NODE, Pair, Plan, Rule
from driftline.alignment.recipe import Recipe, Step, joined, start
from driftline.alignment.sites.compiled_graphs import FARTHEST, RESHAPES, Graphs, Match, Matching
from driftline.graphs.sources.exported import RECURRENT, ROOT, ExportedGraph
from driftline.graphs.sources.graph_files import Graph, GraphNode
from driftline.runs.records import Record

OF_A_MODULE = 0.95
_Side = tuple[int, int, int, str, int, str, tuple[int, ...]]
"""Rank, process, step, site, visit, port and shape."""


def pair_modules(records: Sequence[Record], graphs: Graphs, matching: Matching) -> Iterator[Match]:
    """Match inputs and outputs of modules with the values that enter or leave their nodes."""
    wanted = [r for r in records if r.key.port in ("input", "output") and "/" not in r.key.site]
    if not wanted:
        return
    # Modules are compared in the forward pass only; gradients have ports of their own.
    forward = [graph for graph in graphs.graphs if graph.kind != "backward"]
    borders = {id(graph): _borders(graphs, graph) for graph in forward}
    held: dict[_Side, set[str]] = defaultdict(set)
    # Two tensors of one shape at the same port of a call cannot be distinguished, unless their
    # bytes are equal: then either is right.
    for record in wanted:
        held[_side(record)].add(record.digest)
    for record in wanted:
        key = record.key
        matching.reasons[key] = NO_NODE
        if len(held[_side(record)]) > 1:
            matching.reasons[key] = "one of several of its shape here: which is which is not known"
            continue
        holders = [graph for graph in forward if key.site in borders[id(graph)][key.port]]
        # A module split over several graphs has no single set of nodes that values could leave.
        if len({graphs.piece(graph) for graph in holders}) > 1:
            matching.reasons[key] = "its nodes are in several graphs, so none of them is the module"
            continue
        for graph in holders:
            calls = borders[id(graph)][key.port][key.site]
            # A graph may contain several calls of a module and may be executed several times; calls
            # are counted over all executions.
            visit, which = divmod(key.visit, len(calls))
            fitting = _of_shape(calls[which], record.shape)
            if len(fitting) != 1:
                verb = "leave" if key.port == "output" else "enter"
                matching.reasons[key] = (
                    f"{len(fitting)} values of its shape {verb} its nodes: which is its {key.port} "
                    "is not known"
                )
                continue
            # The value itself may be a view, which inductor keeps no memory for; then the tensor
            # behind it is used with a recipe.
            reached = _reached(graphs, graph, fitting[0], key.step, visit, record.shape)
            if reached is not None:
                yield Match(record, *reached, confidence=OF_A_MODULE)
                break
            behind = _behind_views(graphs, graph, fitting[0])
            if behind.target == "placeholder":
                matching.reasons[key] = "an input of the graph, which no kernel gives"
            elif graphs.engine != "fx":
                matching.reasons[key] = graphs.why_not_kept(graph, behind)
                if fused := graphs.whole(graph, behind, key.step, visit):
                    matching.inside[key] = fused.key


def _side(record: Record) -> _Side:
    key = record.key
    return (key.rank, key.process, key.step, key.site, key.visit, key.port, record.shape)


def _of_shape(nodes: Sequence[GraphNode], shape: tuple[int, ...]) -> list[GraphNode]:
    """Nodes of one shape; nodes of unknown shape only if no other fits."""
    fitting = [node for node in nodes if node.shape == shape]
    return fitting or [node for node in nodes if node.shape is None]


def _borders(graphs: Graphs, graph: Graph) -> dict[str, dict[str, list[list[GraphNode]]]]:
    """By port and module, call by call: the nodes whose values enter or leave the module."""
    uses = graphs.uses(graph)
    merged = _merged_calls(graph)
    leaving: dict[str, dict[str, dict[str, GraphNode]]] = defaultdict(lambda: defaultdict(dict))
    entering: dict[str, dict[str, dict[str, GraphNode]]] = defaultdict(lambda: defaultdict(dict))
    for node in graph.nodes:
        # Nodes without shape and dtype give tuples or symbols, which are not tensors.
        valued = node.shape is not None or bool(node.dtype)
        for label in node.calls if node.target != "placeholder" else ():
            module = label.partition("@")[0]
            outputs = leaving[module][label]
            inputs = entering[module][label]
            outside = (item for item in uses[node.name] if label not in item.calls)
            if valued and (node.leaves or any(_reads_it(item, node, merged) for item in outside)):
                outputs[node.name] = node
            for name in node.inputs:
                source = graphs.node(graph, name)
                if source is None or label in source.calls or not _reads_it(node, source, merged):
                    continue
                if source.shape is not None or source.dtype:
                    inputs[name] = source
    return {
        port: {
            module: [list(labels[item].values()) for item in sorted(labels, key=_call_number)]
            for module, labels in sides.items()
        }
        for port, sides in (("output", leaving), ("input", entering))
    }


def _merged_calls(graph: Graph) -> set[tuple[str, str]]:
    """(module, operator) with some traced calls that have no node of their own.

    A compiler that finds the same computation in two modules keeps the first: the second module
    then reads a value that the first one never returned.
    """
    calls: dict[tuple[str, str], set[int]] = defaultdict(set)
    totals: dict[tuple[str, str], int] = {}
    for node in graph.nodes:
        for origin in node.origins if node.phase == "forward" else ():
            place = (node.module, origin.operator)
            calls[place].add(origin.nth)
            # Calls that the backward pass repeats continue the count, and come later.
            totals[place] = min(totals.get(place, origin.total), origin.total)
    return {place for place, total in totals.items() if len(calls[place]) < total}


def _reads_it(reader: GraphNode, node: GraphNode, merged: set[tuple[str, str]]) -> bool:
    """Whether a node outside of a module certainly reads the module's output.

    Otherwise it may read a value that its own module had computed as well.
    """
    # A reshape of the same elements is the same value.
    return all(
        origin.name in RESHAPES or (reader.module, origin.operator) not in merged
        for origin in node.origins
    )


def _call_number(label: str) -> int:
    number = label.partition("@")[2]
    return int(number) if number.isdigit() else 0


def _reached(
    graphs: Graphs, graph: Graph, node: GraphNode, step: int, visit: int, shape: tuple[int, ...]
) -> tuple[Record, Recipe | None] | None:
    """The tensor that holds a node's value, directly or behind views."""
    # Steps are collected from the value back to memory, so each step is inserted at the front.
    steps: list[Step] = []
    wanted = shape
    for _ in range(FARTHEST):
        value = graphs.by_node.get((id(graph), node.name, step, visit))
        if value is not None:
            return value.record, _seen_through(value.record, steps, shape)
        source = graphs.node(graph, node.inputs[0]) if node.inputs else None
        if source is None:
            return None
        if node.axes is not None:
            steps.insert(0, Step("transpose", numbers=node.axes))
        elif node.target.rpartition(".")[0] in RESHAPES:
            steps.insert(0, Step("reshape", numbers=wanted))
        else:
            return None
        node = source
        if node.shape is None:
            # A transposition needs the exact axes of its input; with an unknown shape it cannot be
            # checked.
            if any(step.kind == "transpose" for step in steps):
                return None
        else:
            wanted = node.shape
    return None


def _seen_through(record: Record, steps: Sequence[Step], shape: tuple[int, ...]) -> Recipe | None:
    if math.prod(record.shape) != math.prod(shape):
        return None
    if all(step.kind == "reshape" for step in steps):
        return reshaped(record, shape, anyhow=bool(steps))
    return start(record).then(*steps, shape=shape)


def _behind_views(graphs: Graphs, graph: Graph, node: GraphNode) -> GraphNode:
    for _ in range(FARTHEST):
        source = graphs.node(graph, node.inputs[0]) if node.inputs else None
        looks = node.axes is not None or node.target.rpartition(".")[0] in RESHAPES
        if source is None or not looks:
            return node
        node = source
    return node


def reshaped(record: Record, shape: tuple[int, ...], *, anyhow: bool = False) -> Recipe | None:
    """A reshape recipe if only axes of size one differ, or (`anyhow`) if a view proves it."""
    if record.shape == shape or math.prod(record.shape) != math.prod(shape):
        return None
    # Axes of size one may be added and removed without moving any element.
    alike = [size for size in record.shape if size != 1] == [size for size in shape if size != 1]
    if not alike and not anyhow:
        return None
    return start(record).then(Step("reshape", numbers=shape), shape=shape)


# --- modules that return several tensors, against exported graphs


MADE, SIGNATURE = 0.95, 0.9
"""Confidence of a pair by maker, and of a pair by signature (shape and dtype)."""
Twins = dict[tuple[int, str], set[str]]
"""Step and digest of a reference's tensor → digests of the candidate's tensors paired with it."""
_RECURRENT = ("LSTM", "GRU", "RNN")
_STATES = {"LSTM": 2, "GRU": 1, "RNN": 1}
"""Number of last states that a recurrent layer returns."""
CallKey = tuple[int, int, int, str, int]
"""Rank, process, step, site and visit."""


class Draft:
    """The plan while rules extend it: pairs, new pairs, and unpaired tensors on either side."""

    def __init__(self, plan: Plan) -> None:
        self.pairs = list(plan.pairs)
        self.new_pairs: list[Pair] = []
        self.missing = {id(record): record for record in plan.missing}
        self.extra = {id(record): record for record in plan.extra}

    def pair(
        self, reference: Record, candidate: Record, confidence: float, by: Rule = "graph"
    ) -> None:
        pair = Pair(reference, candidate, by, confidence)
        self.new_pairs.append(pair)
        self.pairs.append(pair)
        self.missing.pop(id(reference), None)
        self.extra.pop(id(candidate), None)

    def pair_decoded(self, codes: Record, value: Record, recipe: Recipe, codes_first: bool) -> None:
        if codes_first:
            pair = Pair(codes, value, "graph", 1.0, reference_recipe=recipe)
        else:
            pair = Pair(value, codes, "graph", 1.0, candidate_recipe=recipe)
        self.new_pairs.append(pair)
        self.pairs.append(pair)
        for record in pair.records:
            self.missing.pop(id(record), None)
            self.extra.pop(id(record), None)


def without_tuple_positions(plan: Plan, graph: ExportedGraph, *, exported_first: bool) -> Plan:
    """The plan without pairs that were made only by a position among several outputs."""
    alone = plan.extra if exported_first else plan.missing
    models = [pair.candidate if exported_first else pair.reference for pair in plan.pairs]
    # A tuple position means the same on both sides only if the module returns one tensor.
    output_counts = Counter(
        call_key(record) for record in (*models, *alone) if _is_output(record, graph)
    )
    loose = {
        id(pair)
        for pair, model in zip(plan.pairs, models, strict=True)
        if _is_output(model, graph) and output_counts[call_key(model)] > 1
    }
    gone = [pair for pair in plan.pairs if id(pair) in loose]
    return plan._replace(
        pairs=tuple(pair for pair in plan.pairs if id(pair) not in loose),
        missing=(*plan.missing, *(pair.reference for pair in gone)),
        extra=(*plan.extra, *(pair.candidate for pair in gone)),
    )


def digests_of_pairs(draft: Draft) -> Twins:
    """Digests of paired tensors, which translate one run's bytes into the other's."""
    twins: Twins = defaultdict(set)
    for pair in draft.pairs:
        if pair.reference.digest and pair.candidate.digest:
            twins[pair.reference.key.step, pair.reference.digest].add(pair.candidate.digest)
    return twins


def pair_by_bytes(draft: Draft, own: list[Record], others: list[Record], twins: Twins) -> None:
    """Pair tensors of one call whose bytes are paired elsewhere; remove them from both lists."""
    for record in list(own):
        digests = twins.get((record.key.step, record.digest), set())
        same = [o for o in others if o.digest in digests and o.shape == record.shape]
        if same:
            draft.pair(record, same[0], MADE)
            own.remove(record)
            others.remove(same[0])


def pair_outputs(draft: Draft, *, by_signature: bool) -> None:
    """Pair outputs of one call whose bytes are paired elsewhere.

    Args:
        draft: The plan so far.
        by_signature: Whether to also pair outputs whose signature is unique on both sides.
    """
    twins = digests_of_pairs(draft)
    reference_calls, candidate_calls = (
        _outputs_by_call(draft.missing.values()),
        _outputs_by_call(draft.extra.values()),
    )
    made = set[str]().union(*twins.values())
    for call, own in reference_calls.items():
        others = list(candidate_calls.get(call, ()))
        pair_by_bytes(draft, own, others, twins)
        # Counted after pairs by value were removed: a single remaining tensor of a signature is the
        # only choice.
        looks = Counter(map(signature, own)), Counter(map(signature, others))
        for record in own if by_signature else ():
            look = signature(record)
            unknown = (record.key.step, record.digest) not in twins and not is_square(record)
            if unknown and looks[0][look] == looks[1][look] == 1:
                other = next(option for option in others if signature(option) == look)
                if other.digest not in made:
                    draft.pair(record, other, SIGNATURE)


def pair_time_first(draft: Draft, *, exported_first: bool) -> None:
    """Pair outputs of recurrent layers that are batch first in the model and time first in ONNX.

    ONNX has a transposition before and after each layer; exporters remove those between two layers.
    """
    reference_calls, candidate_calls = (
        _outputs_by_call(draft.missing.values()),
        _outputs_by_call(draft.extra.values()),
    )
    models, graphs = (
        (candidate_calls, reference_calls) if exported_first else (reference_calls, candidate_calls)
    )
    for call, outputs in models.items():
        values = list(graphs.get(call, ()))
        for model in outputs:
            turned = (*model.shape[1::-1], *model.shape[2:])
            fitting = [
                option
                for option in values
                if option.shape == turned and option.dtype == model.dtype
            ]
            if not is_recurrent(model) or is_square(model) or len(fitting) != 1:
                continue
            if sum(option.shape == model.shape for option in outputs) == 1:
                # Only the first two axes are exchanged: time and batch.
                step = Step("transpose", numbers=(1, 0, 2))
                recipe = Recipe((fitting[0],), (step,), model.shape)
                draft.pair_decoded(fitting[0], model, recipe, exported_first)
                values.remove(fitting[0])


def pair_last_states(draft: Draft, graph: ExportedGraph, *, exported_first: bool) -> None:
    """Pair the last states of recurrent layers: a model stacks those of its layers and directions.

    ONNX has a node for each layer, with its sequence first and then its states.
    """
    graphs, models = (
        (draft.missing, draft.extra) if exported_first else (draft.extra, draft.missing)
    )
    states: dict[CallKey, dict[int, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in sorted(graphs.values(), key=lambda record: record.order):
        node = graph.owner(record.key.site)
        is_state = record.class_name in RECURRENT and len(record.shape) == 3
        if record.key.port == "output" and is_state and node is not None:
            module = record.key.site.rpartition("/")[0]
            states[(*call_key(record)[:3], module, 0)][id(node)].append(record)
    for call, outputs in _outputs_by_call(models.values()).items():
        stacked = sorted((r for r in outputs if is_recurrent(r)), key=lambda r: r.order)
        nodes = list(states.get(call, {}).values())
        count = _STATES.get(stacked[0].class_name, 0) if stacked else 0
        # An omitted state leaves no trace of which it was.
        if not nodes or len(stacked) != count or any(len(node) != count for node in nodes):
            continue
        for model, parts in zip(stacked, zip(*nodes, strict=True), strict=True):
            alike = all(part.shape[1:] == model.shape[1:] for part in parts)
            if alike and sum(part.shape[0] for part in parts) == model.shape[0]:
                if len(parts) == 1:
                    draft.pair(*((parts[0], model) if exported_first else (model, parts[0])), MADE)
                else:
                    recipe = joined(parts, "concat", 0, model.shape)
                    draft.pair_decoded(parts[0], model, recipe, exported_first)


def is_recurrent(record: Record) -> bool:
    """Whether a tensor is one of a batch that a recurrent layer of a model takes or gives."""
    return record.class_name in _RECURRENT and len(record.shape) == 3


def is_square(record: Record) -> bool:
    """Whether batch and time have equal size, so that the shape does not show which comes first."""
    return is_recurrent(record) and record.shape[0] == record.shape[1]


def _is_output(record: Record, graph: ExportedGraph) -> bool:
    key = record.key
    inner = key.site != ROOT and key.site not in graph.nodes and "/" not in key.site
    return inner and key.port == "output" and key.phase == "forward"


def _outputs_by_call(records: Iterable[Record]) -> Mapping[CallKey, list[Record]]:
    outputs: dict[CallKey, list[Record]] = defaultdict(list)
    for record in records:
        key = record.key
        if key.port == "output" and "/" not in key.site and key.phase == "forward":
            outputs[call_key(record)].append(record)
    return outputs


def call_key(record: Record) -> CallKey:
    """Key of the call to which a record belongs."""
    key = record.key
    return (key.rank, key.process, key.step, key.site, key.visit)


def signature(record: Record) -> tuple[tuple[int, ...], str]:
    """Properties that two tensors without names share if they may be the same."""
    return record.shape, record.dtype
