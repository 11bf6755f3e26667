"""Annotations from exported graphs: tensors inside a fused node, and where they are compared.

If several modules became one node, the outputs of the inner modules are not computed. The node's
output was computed from them, so they are compared together there: such a tensor has no partner,
but a place where it is compared. The graph says which tensors are inside; in the model, equal bytes
connect outputs and inputs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from driftline.alignment.plan import Pair, Plan
from driftline.alignment.sites.kinds import kind_of
from driftline.graphs.sources.exported import RECURRENT, ROOT, ExportedGraph, Place, Tensor
from driftline.runs.records import Record

_Call = tuple[int, int, int, str, int, str]
"""Rank, process, step, site, visit and port."""
_Key = tuple[int, int, int, str, int, str, str]
"""Rank, process, step, site, visit, port and slot."""
_Side = tuple[str, str, Sequence[Record], ExportedGraph]
"""Side of the inner tensors, side with the fused nodes, unpaired tensors of the first, graph."""


def with_fusions(
    plan: Plan, reference: ExportedGraph | None, candidate: ExportedGraph | None
) -> Plan:
    """The plan with tensors inside fusions marked, and a note that counts the leaf modules."""
    sides: list[_Side] = []
    if candidate is not None:
        sides.append(("reference", "candidate", plan.missing, candidate))
    if reference is not None:
        sides.append(("candidate", "reference", plan.extra, reference))
    inside = dict(plan.inside)
    reasons = dict(plan.reasons)
    holds: dict[int, list[Record]] = defaultdict(list)
    matches: dict[str, list[tuple[Record, str, Pair]]] = {"reference": [], "candidate": []}
    # If both sides are graphs, both may have fused nodes: the node that contains a tensor may
    # itself be inside a node of the other side. That is known only after both sides were processed.
    for side, other, lone, graph in (*sides, *sides[: len(sides) - 1]):
        matches[side] = _inside(lone, graph, plan.pairs, matches[other], other == "reference")
    for side, other, _, graph in sides:
        for record, node, pair in matches[side]:
            fused: Record = getattr(pair, other)
            inside[side, record.key] = fused.key
            kept: Record = getattr(pair, side)
            holds[id(pair)].append(record)
            reasons[side, record.key] = (
                f"{graph.describe_inside(node)}, and is compared as a whole at '{kept.key.site}' "
                f"{kept.key.port}"
            )
    pairs = tuple(_with_words(pair, holds.get(id(pair), ())) for pair in plan.pairs)
    plan = plan._replace(pairs=pairs, inside=inside, reasons=reasons)
    if (reference is None) != (candidate is None):
        side = "candidate" if reference is not None else "reference"
        plan = plan._replace(notes=(*plan.notes, *_leaves(plan, side)))
    return plan


def _with_words(pair: Pair, held: Sequence[Record]) -> Pair:
    """The pair with the names of the sites that were fused into it, if there are several."""
    if not held:
        return pair
    # Execution order, so that the text follows the dataflow.
    owners = {r.key.site: r.class_name for r in sorted(held, key=lambda r: r.order)}
    owners.setdefault(pair.reference.key.site, pair.reference.class_name)
    text = "; ".join(f"{site}: {kind}" if kind else site for site, kind in owners.items())
    return pair._replace(fused=text) if len(owners) > 1 else pair


def _inside(
    lone: Sequence[Record],
    graph: ExportedGraph,
    pairs_known: Sequence[Pair],
    enclosed_there: Sequence[tuple[Record, str, Pair]],
    graph_first: bool,
) -> list[tuple[Record, str, Pair]]:
    """Tensors that are inside a node of the other side, with the pair that contains them.

    Args:
        lone: Tensors of one side without a partner.
        graph: The graph of the other side.
        pairs_known: All pairs.
        enclosed_there: Tensors of the graph's side that are inside a node of this side.
        graph_first: Whether the graph is that of the reference.
    """
    wholes: dict[_Key, Pair] = {}
    # Calls in the other side's terms: an exporter may number the calls of a module as modules.
    called: dict[_Call, _Call] = {}
    for pair in pairs_known:
        own, other = pair.reference, pair.candidate
        if not graph_first:
            own, other = other, own
        wholes.setdefault((*_call(own), own.key.slot), pair)
        if own.key.port == other.key.port == "output":
            called.setdefault(_call(own), _call(other))
    for record, _, pair in enclosed_there:
        wholes.setdefault((*_call(record), record.key.slot), pair)
    waiting: dict[_Call, list[Record]] = defaultdict(list)
    for record in lone:
        waiting[_call(record)].append(record)
    enclosed: dict[int, tuple[Record, str, Pair]] = {}
    for place, node, tensors in (*_of_modules(graph), *_of_nodes(graph, lone)):
        for call, records in _calls(waiting, place, called):
            # Of two unpaired tensors of one port nothing says which is inside a fusion. A recurrent
            # node computes all states of its layer.
            if len(records) != 1 and graph.nodes.get(node, {}).get("class") not in RECURRENT:
                continue
            pairs = [pair for w in tensors if (pair := wholes.get((*call[:3], *w))) is not None]
            for record in records if pairs else ():
                enclosed.setdefault(id(record), (record, node, min(pairs, key=_outputs_first)))
    # Equal bytes connect one module's output with the next one's input. Norms are added after that,
    # and their outputs are spread in the same way.
    _add_by_bytes(lone, enclosed)
    if graph.folded_norms:
        _norms(lone, enclosed, waiting)
        _add_by_bytes(lone, enclosed)
    return list(enclosed.values())


def _outputs_first(pair: Pair) -> tuple[bool, int]:
    """Sort key: outputs before inputs, innermost output first."""
    return pair.reference.key.port != "output", pair.reference.order


def _call(record: Record) -> _Call:
    key = record.key
    return (key.rank, key.process, key.step, key.site, key.visit, key.port)


def _calls(
    waiting: Mapping[_Call, list[Record]], place: Place, called: Mapping[_Call, _Call]
) -> Iterator[tuple[_Call, list[Record]]]:
    # A place has no rank, process and step, because the graph describes all steps.
    frames = dict.fromkeys(call[:3] for call in waiting)
    for frame in frames:
        call: _Call = (*frame, *place)
        if call not in waiting and (twin := called.get((*call[:5], "output"))) is not None:
            call = (*twin[:5], call[5])
        if call in waiting:
            yield call, waiting[call]


_PlaceValues = tuple[Place, str, Sequence[Tensor]]
"""A place, the node that contains it, and the tensors of that node's result."""


def _of_modules(graph: ExportedGraph) -> Iterator[_PlaceValues]:
    for fusion in graph.fusions:
        for place in fusion.holds:
            yield place, fusion.node, [*fusion.tensors, (fusion.node, 0, "output", "0")]


def _of_nodes(graph: ExportedGraph, lone: Iterable[Record]) -> Iterator[_PlaceValues]:
    """Nodes of a graph with fewer fusions, by value names."""
    for site in dict.fromkeys(record.key.site for record in lone):
        if "/" in site and (node := graph.inside.get(site)) is not None:
            yield (site, 0, "output"), node, [(node, 0, "output", "0")]


def _add_by_bytes(lone: Sequence[Record], enclosed: dict[int, tuple[Record, str, Pair]]) -> None:
    """Add tensors with the same bytes as an enclosed one: they are the same value."""
    nodes_of_bytes: dict[tuple[int, int, int, str], dict[str, Pair]] = defaultdict(dict)
    for record, node, pair in enclosed.values():
        if record.digest:
            nodes_of_bytes[_bytes(record)].setdefault(node, pair)
    for record in lone:
        if id(record) not in enclosed and record.digest and record.key.phase == "forward":
            nodes = nodes_of_bytes.get(_bytes(record), {})
            # Bytes that occur inside two fused nodes belong to neither for certain.
            for node, pair in nodes.items() if len(nodes) == 1 else ():
                enclosed[id(record)] = (record, node, pair)


def _norms(
    lone: Sequence[Record],
    enclosed: dict[int, tuple[Record, str, Pair]],
    waiting: Mapping[_Call, list[Record]],
) -> None:
    """Add outputs of batch norms that were folded into a convolution's weights.

    If the input of such a norm is inside a fusion, so is its output.
    """
    for record in lone:
        inside = enclosed.get(id(record))
        if (
            inside is None
            or record.key.port != "input"
            or kind_of(record.class_name) != "norm.batch"
        ):
            continue
        outputs = waiting.get((*_call(record)[:5], "output"), [])
        if len(outputs) == 1:
            enclosed.setdefault(id(outputs[0]), (outputs[0], *inside[1:]))


def _bytes(record: Record) -> tuple[int, int, int, str]:
    key = record.key
    return key.rank, key.process, key.step, record.digest


def _leaves(plan: Plan, side: str) -> Iterator[str]:
    """A note that says how many leaf modules of a model are compared, and where."""
    alone = plan.missing if side == "reference" else plan.extra
    records: list[Record] = [getattr(pair, side) for pair in plan.pairs]
    own = {r.key.site for r in records if r.key.port == "output"}
    with_input = {r.key.site for r in records}
    together = {k.site for s, k in plan.inside if s == side and k.port == "output"}
    sites = {r.key.site for r in (*records, *alone) if r.key.port in ("input", "output")}
    # Every prefix of a site that ends at a dot is a container.
    holders = {site[:index] for site in sites for index in range(len(site)) if site[index] == "."}
    leaves = {site for site in sites - holders - {ROOT} if "/" not in site}
    if not leaves:
        return
    counts = [
        (len(leaves & own), "at their own output"),
        (len(leaves & together - own), "inside a fusion, at what the fused node gives"),
        (len(leaves & with_input - own - together), "at their input only"),
        (len(leaves - with_input - together), "not at all"),
    ]
    shown = ", ".join(f"{count} {how}" for count, how in counts if count)
    yield f"{len(leaves)} leaf modules are compared: {shown}"
