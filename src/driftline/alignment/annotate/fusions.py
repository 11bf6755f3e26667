"""Tensors that lie inside a fused node of an exported graph, and where they are compared after all.

Where several modules became one node, what the inner ones gave is computed nowhere. It is not lost
to the comparison: what the node gives was computed from it. So such a tensor has no partner, but a
place at which it is compared together with the others of its fusion. Decides by what the graph
says, and on a model's side by equal bytes: what one module gives the next one takes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from driftline.alignment.plan import Pair, Plan
from driftline.alignment.sites.kinds import kind_of
from driftline.graphs.sources.exported import ROOT, ExportedGraph, Place, Tensor
from driftline.runs.records import Record

_Call = tuple[int, int, int, str, int, str]
"""Rank, process, step, site, visit and port."""
_Key = tuple[int, int, int, str, int, str, str]
"""The same with the slot."""
_Side = tuple[str, str, Sequence[Record], ExportedGraph]
"""Which side lies inside, which one fused, what of the first is alone, the graph of the other."""


def with_fusions(
    plan: Plan, reference: ExportedGraph | None, candidate: ExportedGraph | None
) -> Plan:
    """The plan with what lies inside fusions, and how many leaf modules that is."""
    sides: list[_Side] = []
    if candidate is not None:
        sides.append(("reference", "candidate", plan.missing, candidate))
    if reference is not None:
        sides.append(("candidate", "reference", plan.extra, reference))
    inside = dict(plan.inside)
    reasons = dict(plan.reasons)
    holds: dict[int, list[Record]] = defaultdict(list)
    # Both sides may have fused something, if both are graphs.
    for side, other, lone, graph in sides:
        for record, node, pair in _inside(lone, graph, plan.pairs, other == "reference"):
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
    """A pair that says whose work its tensors are, where it is that of several."""
    if not held:
        return pair
    # Execution order, so that the text reads as the data flows.
    owners = {r.key.site: r.class_name for r in sorted(held, key=lambda r: r.order)}
    owners.setdefault(pair.reference.key.site, pair.reference.class_name)
    text = "; ".join(f"{site}: {kind}" if kind else site for site, kind in owners.items())
    return pair._replace(fused=text) if len(owners) > 1 else pair


def _inside(
    lone: Sequence[Record], graph: ExportedGraph, pairs_known: Sequence[Pair], graph_first: bool
) -> Iterator[tuple[Record, str, Pair]]:
    """What of a side lies inside a node of the other one, with the pair that holds it."""
    wholes: dict[_Key, Pair] = {}
    for pair in pairs_known:
        own = pair.reference if graph_first else pair.candidate
        wholes.setdefault((*_call(own), own.key.slot), pair)
    waiting: dict[_Call, list[Record]] = defaultdict(list)
    for record in lone:
        waiting[_call(record)].append(record)
    enclosed: dict[int, tuple[Record, str, Pair]] = {}
    for place, node, tensors in (*_of_modules(graph), *_of_nodes(graph, lone)):
        for call, records in _calls(waiting, place):
            # Two lone tensors of one port cannot be told apart inside a fusion.
            if len(records) != 1 or id(records[0]) in enclosed:
                continue
            pairs = [pair for w in tensors if (pair := wholes.get((*call[:3], *w))) is not None]
            if pairs:
                pair = min(pairs, key=_first_given)
                enclosed[id(records[0])] = (records[0], node, pair)
    # Bytes connect what one module gives with what the next one takes; only then are norms
    # asked, and what they give is passed on the same way.
    _spread_by_bytes(lone, enclosed)
    if graph.folded_norms:
        _norms(lone, enclosed, waiting)
        _spread_by_bytes(lone, enclosed)
    yield from enclosed.values()


def _first_given(pair: Pair) -> tuple[bool, int]:
    """Where a value is given says more than where it is taken; the innermost giver comes first."""
    return pair.reference.key.port != "output", pair.reference.order


def _call(record: Record) -> _Call:
    key = record.key
    return (key.rank, key.process, key.step, key.site, key.visit, key.port)


def _calls(
    waiting: Mapping[_Call, list[Record]], place: Place
) -> Iterator[tuple[_Call, list[Record]]]:
    # A place has no frame: the graph describes every step alike.
    frames = dict.fromkeys(call[:3] for call in waiting)
    for frame in frames:
        call: _Call = (*frame, *place)
        if call in waiting:
            yield call, waiting[call]


_Held = tuple[Place, str, Sequence[Tensor]]
"""A place inside, the node it is inside of, and where that node's result is."""


def _of_modules(graph: ExportedGraph) -> Iterator[_Held]:
    for fusion in graph.fusions:
        for place in fusion.holds:
            yield place, fusion.node, [*fusion.tensors, (fusion.node, 0, "output", "0")]


def _of_nodes(graph: ExportedGraph, lone: Iterable[Record]) -> Iterator[_Held]:
    """Nodes of a graph that fused less, by the names of values."""
    for site in dict.fromkeys(record.key.site for record in lone):
        if "/" in site and (node := graph.inside.get(site)) is not None:
            yield (site, 0, "output"), node, [(node, 0, "output", "0")]


def _spread_by_bytes(lone: Sequence[Record], enclosed: dict[int, tuple[Record, str, Pair]]) -> None:
    """What has the bytes of something inside a fusion is the same value, given or taken."""
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
    """Batch norms that the file knows nothing of, because it has them in a convolution's weights.

    What such a norm takes lies inside a fusion, so what it gives does, too.
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
    """How many leaf modules of a model are compared, and how."""
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
