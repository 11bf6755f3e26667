"""Pair nodes of an exported graph with nodes of a compiled graph, operator call by operator call.

The exporter records for which call of torch's graph each node was made; a compiled graph records
from which call of the program each node comes: module, operator, and the index of the call in that
module. If these and the shapes agree, the two nodes are a pair. A kernel that fused several calls
holds the result of the last one. Operators that the exporter keeps whole and torch decomposes are
found by the operator that makes their result, or by their source line if it makes only one value.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from driftline.alignment.plan import Pair, Plan
from driftline.alignment.sites.compiled_graphs import Graphs, graphs_of, is_view
from driftline.graphs.sources.exported import ExportedGraph
from driftline.graphs.sources.graph_files import Graph, GraphNode
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run

CALL, LINE = 0.95, 0.9
"""Confidence of a pair by call, and of a pair by source line."""
# Which attention kernel torch chooses depends on the machine; all of them give the same result.
_ATTENTION = tuple(
    f"aten._scaled_dot_product_{how}"
    for how in (
        *("flash_attention_for_cpu", "flash_attention", "efficient_attention"),
        *("cudnn_attention", "fused_attention_overrideable"),
    )
)
_RESULT_OF = {
    "aten.softmax": ("aten._softmax",),
    "aten.log_softmax": ("aten._log_softmax",),
    "aten.layer_norm": ("aten.native_layer_norm",),
    "aten.group_norm": ("aten.native_group_norm",),
    **{f"aten.conv{n}d": ("aten.convolution",) for n in (1, 2, 3)},
    **{f"aten.conv_transpose{n}d": ("aten.convolution",) for n in (1, 2, 3)},
    **{f"aten.max_pool{n}d": (f"aten.max_pool{n}d_with_indices",) for n in (2, 3)},
    "aten.scaled_dot_product_attention": _ATTENTION,
}
"""Operators that the exporter keeps whole → operators that make their first result in torch."""
_Call = tuple[int, str, str, int, str]
"""Step, module, operator, index of the call in the module, and slot of the result."""
_Line = tuple[str, str]
"""Module and line of the program."""


def pair_calls(
    plan: Plan, compiled: Run, graph: ExportedGraph, *, exported_first: bool
) -> tuple[list[Pair], dict[tuple[str, TensorKey], str]]:
    """Pairs of exported and compiled nodes, and reasons for unpaired nodes.

    Args:
        plan: The plan so far.
        compiled: The run with compiled graphs.
        graph: The exported graph of the other run.
        exported_first: Whether that other run is the reference.
    """
    nodes = _Nodes(graphs_of(compiled).values())
    values = [_Value.of(r, graph) for r in (plan.missing if exported_first else plan.extra)]
    nodes.learn_modules(plan.pairs, exported_first=exported_first)
    pairs: list[Pair] = []
    paired: set[int] = set()
    nodes.wholes = _wholes(graph)
    # Calls first, then source lines, then modules: calls are counted, but a line may make several
    # values.
    for find, confidence in ((nodes.by_call, CALL), (nodes.by_line, LINE), (nodes.by_module, CALL)):
        for value in values:
            if value is None or id(value.record) in paired:
                continue
            partner = find(value)
            if partner is not None and id(partner) not in paired:
                ordered = (value.record, partner) if exported_first else (partner, value.record)
                pairs.append(Pair(*ordered, "graph", confidence))
                paired |= {id(value.record), id(partner)}
    return pairs, _reasons(plan.with_pairs(pairs), graph, nodes, exported_first=exported_first)


class _Value(NamedTuple):
    """The output of an exported node, and the call of which it is the result."""

    record: Record
    module: str
    operator: str
    line: str
    slot: str
    ends: bool
    sure: bool
    nth: int
    total: int
    on_line: int
    in_line: int

    @classmethod
    def of(cls, record: Record, graph: ExportedGraph) -> _Value | None:
        """The value of a record; None if it is not the result of a call."""
        if record.key.port != "output":
            return None
        call = graph.call(record.key.site)
        # Without all four counts a call cannot be numbered, and thus not be found on the other
        # side.
        counts = [call.get(name) for name in ("nth", "total", "on_line", "in_line")]
        numbers = [count for count in counts if isinstance(count, int)]
        if len(numbers) < len(counts):
            return None
        return cls(
            record,
            record.key.site.rpartition("/")[0],
            str(call.get("target")).rpartition(".")[0],
            str(call.get("line") or ""),
            str(call.get("slot", 0)),
            bool(call.get("ends")),
            bool(call.get("sure")),
            *numbers,
        )


def _wholes(graph: ExportedGraph) -> Mapping[tuple[str, str], int]:
    """Module and inner operator → number of whole operators whose result it makes."""
    # An exporter keeps `softmax` whole where torch traces `_softmax`. The result belongs to it only
    # if no other whole operator of the module ends in the same inner operator.
    operators_of: dict[tuple[str, str], set[str]] = defaultdict(set)
    for site, node in graph.nodes.items():
        operator = str(node.get("target", "")).rpartition(".")[0]
        for inner in _RESULT_OF.get(operator, ()):
            operators_of[site.rpartition("/")[0], inner].add(operator)
    return {place: len(operators) for place, operators in operators_of.items()}


class _Nodes:
    """The values of a compiled run, by the calls and the source lines that they come from."""

    def __init__(self, owners: Iterable[Graphs]) -> None:
        self.by_place: dict[_Call, Record | None] = {}
        self.nodes: dict[TensorKey, GraphNode] = {}
        self.wholes: Mapping[tuple[str, str], int] = {}
        self._module_outputs: dict[tuple[int, str, str, tuple[int, ...]], Record] = {}
        self._totals: dict[tuple[str, str], set[int]] = defaultdict(set)
        self._ends: dict[_Line, list[tuple[Graphs, Graph, GraphNode]]] = defaultdict(list)
        self._on_line: dict[_Line, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        for graphs in owners:
            self._learn(graphs)
            for graph in graphs.graphs:
                if graph.kind != "backward":
                    self._learn_lines(graphs, graph)

    def _learn(self, graphs: Graphs) -> None:
        for value in graphs.values:
            record, node = value.record, value.node
            if node is None or record.key.phase != "forward":
                continue
            self.nodes[record.key] = node
            for origin in node.origins:
                # Only the first visit of a step, because calls of an exported graph are counted
                # within one execution.
                if origin.nth >= 0 and record.key.visit == 0:
                    place = (record.key.step, node.module, origin.name, origin.nth, origin.slot)
                    # A place that two values claim identifies neither of them.
                    self.by_place[place] = None if place in self.by_place else record
                    self._totals[node.module, origin.name].add(origin.total)

    def _learn_lines(self, graphs: Graphs, graph: Graph) -> None:
        uses = graphs.uses(graph)
        for node in graph.nodes:
            if node.target == "placeholder" or not node.line:
                continue
            place = (node.module, _short(node.line))
            for origin in node.origins:
                if origin.nth >= 0:
                    self._on_line[place][origin.name].add(origin.nth)
            # A value that only its own line reads is an intermediate, not a result of the line.
            others = (
                reader
                for reader in uses[node.name]
                if (reader.module, _short(reader.line)) != place
            )
            if node.shape is not None and (node.leaves or any(True for _ in others)):
                self._ends[place].append((graphs, graph, node))

    def learn_modules(self, pairs: Iterable[Pair], *, exported_first: bool) -> None:
        """Store with which nodes the outputs of the exported graph's modules are paired."""
        for pair in pairs:
            records = pair.reference, pair.candidate
            module, node = records if exported_first else records[::-1]
            recipes = pair.reference_recipe or pair.candidate_recipe
            if module.key.port == "output" and module.digest and not recipes:
                key = module.key
                self._module_outputs[key.step, key.site, module.digest, module.shape] = node

    def by_module(self, value: _Value) -> Record | None:
        """The partner of the module's output, if the node holds the same bytes."""
        record = value.record
        place = (record.key.step, value.module, record.digest, record.shape)
        return self._module_outputs.get(place) if record.digest else None

    def by_call(self, value: _Value) -> Record | None:
        """The value of the same call.

        An exporter omits calls. An uncertain call counts only if both sides have equally many calls
        in the module or on the source line.
        """
        for operator in (value.operator, *_RESULT_OF.get(value.operator, ())):
            is_part = operator != value.operator
            if is_part and self.wholes.get((value.module, operator)) != 1:
                continue
            on_line = sorted(self._calls_on(value).get(operator, ()))
            # Equal totals mean that the exporter omitted no call, so the call's number is reliable.
            if self._totals.get((value.module, operator)) == {value.total}:
                nth = value.nth
            elif value.line and value.on_line < len(on_line) == value.in_line:
                nth = on_line[value.on_line]
            elif value.sure and not is_part:
                nth = value.nth
            else:
                continue
            step = value.record.key.step
            record = self.by_place.get((step, value.module, operator, nth, value.slot))
            if record is not None and record.shape == value.record.shape:
                return record
        return None

    def _calls_on(self, value: _Value) -> Mapping[str, set[int]]:
        """Operators on the source line of an exported node → indices of their calls."""
        return self._on_line.get((value.module, value.line), {})

    def by_line(self, value: _Value) -> Record | None:
        """The only value of the same shape that the same source line makes.

        None if the line makes the same call as the exported node, because `by_call` has then
        decided.
        """
        called = {value.operator, *_RESULT_OF.get(value.operator, ())}
        if not value.ends or called & self._calls_on(value).keys():
            return None
        ends = self._ends.get((value.module, value.line), ())
        fitting = [end for end in ends if end[2].shape == value.record.shape]
        # Two values of one shape on a line cannot be distinguished.
        if len(fitting) != 1:
            return None
        graphs, graph, node = fitting[0]
        recorded = graphs.by_node.get((id(graph), node.name, value.record.key.step, 0))
        return recorded.record if recorded and recorded.record.shape == value.record.shape else None


def _short(line: str) -> str:
    """A source line in the form that exported graphs store.

    >>> _short("/home/me/net.py:12 in forward")
    'net.py:12'
    """
    return line.partition(" in ")[0].rpartition("/")[2]


def _reasons(
    plan: Plan, graph: ExportedGraph, nodes: _Nodes, *, exported_first: bool
) -> dict[tuple[str, TensorKey], str]:
    """Reasons for unpaired nodes of both sides."""
    exported_side, compiled_side = (
        ("reference", "candidate") if exported_first else ("candidate", "reference")
    )
    exported, others = plan.missing, plan.extra
    if not exported_first:
        exported, others = others, exported
    # The bytes of an unpaired node may be compared elsewhere; then nothing is lost, and the reason
    # names the place.
    twins: dict[tuple[int, str, tuple[int, ...]], Record] = {}
    for pair in plan.pairs:
        record = pair.reference if exported_first else pair.candidate
        if record.digest:
            twins.setdefault((record.key.step, record.digest, record.shape), record)
    reasons = {(exported_side, key): why for key, why in _of_exported(exported, graph, twins)}
    reasons.update({(compiled_side, key): why for key, why in _of_compiled(others, nodes)})
    return reasons


def _of_exported(
    records: Sequence[Record],
    graph: ExportedGraph,
    twins: Mapping[tuple[int, str, tuple[int, ...]], Record],
) -> Iterator[tuple[TensorKey, str]]:
    for record in records:
        key = record.key
        node = graph.owner(key.site)
        twin = twins.get((key.step, record.digest, record.shape)) if record.digest else None
        if node is None:
            continue
        if twin is not None:
            shown = f"'{twin.key.site}' {twin.key.port}"
            yield key, f"the same value is compared at {shown}"
        elif key.port == "output":
            yield key, _why_alone(node, graph.call(key.site))


def _why_alone(node: Mapping[str, Any], call: Mapping[str, Any]) -> str:
    if call:
        return f"the compiled graphs have no such call of {call.get('target')} at this place"
    if not node.get("target"):
        return "a node that the exporter says nothing of"
    return f"a step on the way to {node.get('fx')} ({node['target']})"


def _of_compiled(records: Sequence[Record], nodes: _Nodes) -> Iterator[tuple[TensorKey, str]]:
    for record in records:
        node = nodes.nodes.get(record.key)
        if node is None or record.key.phase != "forward":
            continue
        if node.parameter:
            yield record.key, "a weight; --level params records those of an exported graph"
        elif is_view(node):
            yield record.key, "a view, for which the exported graph has no node"
        elif node.target != "placeholder":
            yield (
                record.key,
                "the exported graph has no node for it: a constant there, or worked into another",
            )


# Two exported files: which values correspond to each other, by the nodes that both files have.


def partner_values(reference: ExportedGraph, candidate: ExportedGraph) -> dict[str, str]:
    """Value of the candidate's file → the corresponding value of the reference's file.

    A value is identified by its readers: a node of the same name reads the same value in both
    files. A quantiser drops a ReLU after a convolution, because unsigned integers clip in the same
    way; the convolution's output keeps its name, but then is the ReLU's output. A value that no
    node of a common name reads is identified by its own name.
    """
    taken: dict[str, set[str]] = defaultdict(set)
    for name, (inputs, _) in candidate.reads.items():
        others = reference.reads.get(name, ((), ()))[0]
        if len(inputs) == len(others):
            for value, other in zip(inputs, others, strict=True):
                taken[value].add(other)
    partners = {value: next(iter(values)) for value, values in taken.items() if len(values) == 1}
    made = {value for _, outputs in reference.reads.values() for value in outputs}
    for name, (inputs, outputs) in candidate.reads.items():
        for value in (*inputs, *outputs):
            if value not in partners and value in made:
                partners[value] = value
        # No node with a common name reads the value, so its producer identifies it.
        others = reference.reads.get(name, ((), ()))[1]
        for value, other in zip(outputs, others, strict=False):
            partners.setdefault(value, other)
    return partners


def with_absorbed(graph: ExportedGraph, other: ExportedGraph) -> ExportedGraph:
    """A graph whose nodes also list the nodes of the other graph that they contain.

    If the next node was fused into a node of both files, that node's output has other readers in
    this file. The nodes between the two in the other file are then inside it.
    """
    partners = partner_values(other, graph)
    own_sites, other_sites = graph.values(), other.values()
    inside = dict(graph.inside)
    for name, (_, outputs) in graph.reads.items():
        for value, between in zip(outputs, other.reads.get(name, ((), ()))[1], strict=False):
            is_between = partners.get(value, between) != between and between in other_sites
            if is_between and value in own_sites:
                inside.setdefault(other_sites[between], own_sites[value])
    return graph._replace(inside=inside)
