"""Pairs between a model and an exported graph, or between two exported graphs.

There are three cases, in the order of this file:
- The graph does not name the model's modules: its nodes with weights (products, convolutions,
  norms, look-ups) are aligned in order with the model's layers of the same kinds. A batch norm that
  the exporter folded into its convolution is recognised by its absence.
- Names agree: tensors that names left unpaired are paired by value names, bytes and signatures.
- `align_exported` chooses between the two and returns a plan; `with_calls` pairs an exported graph
  with a compiled one.

The rule knows graphs and digests; it reads no tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from driftline.alignment.annotate.fusions import with_fusions
from driftline.alignment.plan import LONE_NODE, SAME_VALUE, Pair, Plan
from driftline.alignment.reconcile.quantised import with_rectified
from driftline.alignment.rules.enclosed_values import pair_enclosed
from driftline.alignment.rules.exported_nodes import pair_calls, partner_values, with_absorbed
from driftline.alignment.rules.leaves import align_sequences
from driftline.alignment.rules.module_borders import (
    MADE,
    SIGNATURE,
    CallKey,
    Draft,
    call_key,
    digests_of_pairs,
    is_square,
    pair_by_bytes,
    pair_last_states,
    pair_outputs,
    pair_time_first,
    signature,
    without_tuple_positions,
)
from driftline.alignment.sites.kinds import kind_of, same_kind
from driftline.alignment.sites.site_graph import Call, calls_of, frames_of, main_tensor
from driftline.graphs.sources.exported import (
    ROOT,
    ExportedGraph,
    Fusion,
    Tensor,
    exported_graph,
    place_of,
    without_number,
)
from driftline.runs.json_values import list_of
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run

if TYPE_CHECKING:
    from driftline.alignment.align import Context

# Only these kinds have weights in every exported file; others may be folded or fused away.
_KINDS = ("linear", "conv", "embedding", "norm", "norm.layer", "norm.rms", "norm.batch")
_NORM = "norm.batch"


class WeightedNode(NamedTuple):
    """A node of an exported graph that has weights.

    Attributes:
        kind: Kind of layer.
        input_value: The value that it reads.
        output_site: The site of its output.
        shape: Shape of its output; None if unknown.
        norm_after: Whether a separate batch norm reads the output.
    """

    kind: str
    input_value: str
    output_site: str
    shape: tuple[int, ...] | None
    norm_after: bool


def weighted_node(about: Mapping[str, Any]) -> WeightedNode:
    """Read a weighted node from its entry in a topology."""
    shape = about.get("shape")
    sizes = cast("list[int]", shape) if isinstance(shape, list) else None
    extents = tuple(int(size) for size in sizes) if sizes is not None else None
    return WeightedNode(
        str(about.get("kind", "")),
        str(about.get("takes", "")),
        str(about.get("makes", "")),
        extents,
        bool(about.get("norm_after")),
    )


class LinkedTensors(NamedTuple):
    """Paired tensors, and parts of the model that are computed inside fused nodes of the graph.

    Attributes:
        pairs: Pairs of a tensor of the model and one of the graph.
        fusions: Nodes of the graph, with the parts of the model that they contain.
    """

    pairs: list[tuple[Record, Record]]
    fusions: list[Fusion]


def link_weighted_nodes(
    model: Sequence[Record], graph: Sequence[Record], about: ExportedGraph
) -> LinkedTensors:
    """Pair tensors of a model's layers with those of the graph's weighted nodes, step by step."""
    linked = LinkedTensors([], [])
    weighted_nodes = [weighted_node(node) for node in about.weighted_nodes]
    graph_frames = frames_of(graph)
    for frame, records in frames_of(model).items():
        if frame in graph_frames:
            in_frame = _in_frame(
                sorted(records, key=lambda r: r.order), graph_frames[frame], weighted_nodes, about
            )
            linked.pairs.extend(in_frame.pairs)
            linked.fusions.extend(
                fusion for fusion in in_frame.fusions if fusion not in linked.fusions
            )
    return linked


class _GraphTensors(NamedTuple):
    """The recorded tensors of a graph in one frame: outputs by site, inputs by value."""

    made: Mapping[str, Record]
    read: Mapping[str, Record]


def _graph_tensors(records: Sequence[Record]) -> _GraphTensors:
    made = {r.key.site: r for r in records if r.key.port == "output" and not r.alias}
    read: dict[str, Record] = {}
    # Several nodes may read one value; the first reader represents all of them.
    for record in records:
        if record.key.port == "input":
            read.setdefault(record.key.slot, record)
    return _GraphTensors(made, read)


def _in_frame(
    model: Sequence[Record],
    graph: Sequence[Record],
    nodes: Sequence[WeightedNode],
    about: ExportedGraph,
) -> LinkedTensors:
    tensors = _graph_tensors(graph)
    leaves = [c for c in calls_of(model) if c.leaf and c.called and c.kind in _KINDS]
    norms: dict[str, Call] = {}
    # If an export has no batch norm, it has folded all of them into the convolutions before them.
    if not any(node.kind == _NORM for node in nodes):
        norms = {c.input_value: c for c in leaves if c.kind == _NORM and c.input_value}
        leaves = [call for call in leaves if call.kind != _NORM]
    linked = LinkedTensors([], [])
    for call, node in _matched(leaves, nodes, tensors.made):
        # A folded convolution computes the output of the model's batch norm, so that is its
        # partner, unless the graph still has a separate norm after it.
        norm = norms.get(call.output_value) if call.output_value and not node.norm_after else None
        source = main_tensor(call.records, "input")
        output = main_tensor((norm or call).records, "output")
        for own, other in (
            (source, tensors.read.get(node.input_value)),
            (output, tensors.made.get(node.output_site)),
        ):
            if own is not None and other is not None and own.shape == other.shape:
                linked.pairs.append((own, other))
        if (fusion := _fusion(call, norm, node, tensors, about)) is not None:
            linked.fusions.append(fusion)
    return linked


def _fusion(
    call: Call, norm: Call | None, node: WeightedNode, tensors: _GraphTensors, about: ExportedGraph
) -> Fusion | None:
    """Outputs of a layer, and of the norm folded into it, that the graph no longer has.

    They are inside the node that computes both, and are compared there.
    """
    is_kept = node.output_site in tensors.made
    holder = node.output_site if is_kept else about.inside.get(node.output_site, "")
    holds = [] if norm is None and is_kept else [(call.site, call.visit, "output")]
    if norm is not None:
        holds.append((norm.site, norm.visit, "input"))
        if not is_kept:
            holds.append((norm.site, norm.visit, "output"))
    if not holds or not holder:
        return None
    described = about.nodes.get(holder, {})
    values = [str(value) for value in list_of(described.get("values"))]
    readers = [tensors.read[value].key for value in values if value in tensors.read]
    places = [(key.site, key.visit, "input", key.slot) for key in readers]
    kind = str(described.get("class", ""))
    return Fusion(holder, kind, tuple(holds), ((holder, 0, "output", "0"), *places))


def _matched(
    leaves: Sequence[Call], nodes: Sequence[WeightedNode], made: Mapping[str, Record]
) -> list[tuple[Call, WeightedNode]]:
    """Layers and nodes in order; only those that have a single best partner."""
    shapes = [made[n.output_site].shape if n.output_site in made else n.shape for n in nodes]
    scores = np.zeros((len(leaves), len(nodes)), np.int32)
    for row, call in enumerate(leaves):
        for column, (node, shape) in enumerate(zip(nodes, shapes, strict=True)):
            fits = shape is None or shape == call.out
            # Only layers of the same kind may pair: a guess between two classes is left to other
            # rules.
            if fits and same_kind(call.kind, node.kind) == 2:
                scores[row, column] = 2 if shape is not None else 1
    # Equal counts with fitting shapes throughout need no alignment, and are the usual case.
    if len(leaves) == len(nodes) and all(scores[index, index] for index in range(len(nodes))):
        return list(zip(leaves, nodes, strict=True))
    if not leaves or not nodes:
        return []
    try:
        matched = align_sequences(np.arange(len(leaves)), np.arange(len(nodes)), scores)
    except ValueError:
        return []
    return [(leaves[i], nodes[j]) for i, j in matched.pairs]


# --- tensors that names left unpaired


SAME_BYTES, IN_ORDER = 0.9, 0.7
"""Confidence of tensors with the same bytes, and of layers that are paired in order."""

_Bytes = tuple[int, int, int, str, tuple[int, ...]]
"""Rank, process, step, digest and shape."""


def pair_exported(
    plan: Plan, reference: ExportedGraph | None, candidate: ExportedGraph | None
) -> tuple[list[Pair], dict[tuple[str, TensorKey], str], list[Fusion]]:
    """Pairs for tensors that names left unpaired, reasons for the others, and found fusions.

    Args:
        plan: The pairs made by names.
        reference: The reference's graph; None if the reference is a model rather than a graph.
        candidate: The candidate's graph, likewise.
    """
    draft = Draft(plan)
    fusions: list[Fusion] = []
    # Two graphs have names for their values; a model and a graph share only modules. In each
    # branch, names come before bytes.
    if reference is not None and candidate is not None:
        _by_value(draft, reference, candidate)
        for graph, turned in ((reference, False), (candidate, True)):
            _fused(graph, draft, turned)
        _same_bytes(draft, exported_first=False, only_modules=reference)
    else:
        _repeated_modules(draft, exported_first=reference is not None)
        # Outputs by value first, then inputs, then outputs by signature: each step leaves fewer
        # rivals for the next, weaker one.
        pair_outputs(draft, by_signature=False)
        _inputs(draft, (reference or candidate or ExportedGraph({}, {})).rectified)
        pair_outputs(draft, by_signature=True)
        pair_time_first(draft, exported_first=reference is not None)
        _folded_norms(draft, reference or candidate, exported_first=reference is not None)
        if (graph := reference or candidate) is not None:
            pair_last_states(draft, graph, exported_first=reference is not None)
            fusions = pair_enclosed(draft, graph, exported_first=reference is not None)
        _same_bytes(draft, exported_first=reference is not None)
    return draft.new_pairs, _reasons(draft, reference, candidate), fusions


def pair_unnamed(
    plan: Plan, reference: ExportedGraph | None, candidate: ExportedGraph | None
) -> tuple[list[Pair], dict[tuple[str, TensorKey], str], list[Fusion]]:
    """Pairs in order, for a graph that does not name the model's modules.

    Returns pairs, reasons and fusions; nothing if both sides are graphs, or neither is.
    """
    graph = reference if reference is not None else candidate
    if graph is None or (reference is not None and candidate is not None):
        return [], {}, []

    graph_first = reference is not None
    # Paired tensors are included, so that they keep their place in the order.
    reference_records = [*(pair.reference for pair in plan.pairs), *plan.missing]
    candidate_records = [*(pair.candidate for pair in plan.pairs), *plan.extra]
    model, values = (
        (candidate_records, reference_records)
        if graph_first
        else (reference_records, candidate_records)
    )
    draft = Draft(plan)
    linked = link_weighted_nodes(model, values, graph)
    for own, value in linked.pairs:
        ordered = (value, own) if graph_first else (own, value)
        if id(ordered[0]) in draft.missing and id(ordered[1]) in draft.extra:
            draft.pair(*ordered, IN_ORDER, "structure")
    # Without a single layer in order, there is no evidence that the two are the same model.
    if not draft.new_pairs:
        return [], {}, []
    _same_bytes(draft, exported_first=graph_first)
    return draft.new_pairs, _reasons(draft, reference, candidate), linked.fusions


def without_uncertain_pairs(
    plan: Plan, reference: ExportedGraph | None, candidate: ExportedGraph | None
) -> Plan:
    """The plan without pairs whose equal names are accidental.

    Between two graphs, these are values that only one of them rounds. Between a model and a graph,
    these are outputs that were paired only by a position in a tuple.
    """
    if reference is None or candidate is None:
        graph = reference if reference is not None else candidate
        if graph is None:
            return plan
        return without_tuple_positions(plan, graph, exported_first=reference is not None)
    partners = partner_values(reference, candidate)
    made = {site: value for value, site in reference.values().items()}
    others = {site: value for value, site in candidate.values().items()}
    loose = [
        pair
        for pair in plan.pairs
        if pair.by == "name" and not _agree(pair, partners, (made, others))
    ]
    gone = {id(pair) for pair in loose}
    return plan._replace(
        pairs=tuple(pair for pair in plan.pairs if id(pair) not in gone),
        missing=(*plan.missing, *(pair.reference for pair in loose)),
        extra=(*plan.extra, *(pair.candidate for pair in loose)),
    )


def _agree(
    pair: Pair, partners: Mapping[str, str], made: tuple[Mapping[str, str], Mapping[str, str]]
) -> bool:
    """Whether two tensors of nodes with the same name are the same value, by their readers."""
    if pair.reference.key.port == "input":
        value, other = pair.reference.key.slot, pair.candidate.key.slot
    else:
        value, other = (
            sites.get(record.key.site, "")
            for sites, record in zip(made, (pair.reference, pair.candidate), strict=True)
        )
    return not other or partners.get(other, value) == value


def _by_value(draft: Draft, reference: ExportedGraph, candidate: ExportedGraph) -> None:
    """Pair the outputs and inputs of nodes by their values in the two files."""
    own_sites, other_sites = reference.values(), candidate.values()
    # Tensors that are already paired hold the value as well, if no other tensor does.
    candidates = [*draft.extra.values(), *(pair.candidate for pair in draft.pairs)]
    own_outputs, others = _outputs(draft.missing.values()), _outputs(candidates)
    own_inputs = _inputs_by_value(draft.missing.values())
    other_inputs = _inputs_by_value(candidates)
    for value, partner in partner_values(reference, candidate).items():
        made = others.get(other_sites.get(value, ""), [])
        read = other_inputs.get(value, [])
        for record in own_outputs.get(own_sites.get(partner, ""), ()):
            _pair_first(draft, record, (*made, *read))
        for record in own_inputs.get(partner, ()):
            # The input of the same node first; any reader of the value has the same bytes.
            same = [other for other in read if other.key.site == record.key.site]
            _pair_first(draft, record, (*same, *read, *made))


def _pair_first(draft: Draft, record: Record, others: Sequence[Record]) -> None:
    """Pair a tensor with the first tensor that holds the same value; a free one if there is any."""
    alike = [
        other
        for other in others
        if other.key.step == record.key.step and signature(other) == signature(record)
    ]
    if alike and id(record) in draft.missing:
        free = [other for other in alike if id(other) in draft.extra]
        draft.pair(record, (free or alike)[0], 1.0)


def _inputs_by_value(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Inputs of nodes and modules, by value name."""
    by_value: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record.key.port == "input":
            by_value[record.key.slot].append(record)
    return by_value


def _outputs(records: Iterable[Record]) -> dict[str, list[Record]]:
    by_site: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record.key.port == "output":
            by_site[record.key.site].append(record)
    return by_site


def _fused(graph: ExportedGraph, draft: Draft, turned: bool) -> None:
    """Pair inputs of fused nodes with the node that reads the same value on the other side."""
    fused, plain = (draft.extra, draft.missing) if turned else (draft.missing, draft.extra)
    reads: dict[tuple[int, int, int, str, str], list[Record]] = defaultdict(list)
    for record in plain.values():
        if record.key.port == "input":
            rank, process, step, site, _ = call_key(record)
            reads[rank, process, step, site, record.key.slot].append(record)
    for record in list(fused.values()):
        # A fused node may read what several of its members read, so partners are used up one by
        # one.
        if record.key.port != "input":
            continue
        rank, process, step, site, _ = call_key(record)
        for other in graph.replaced_by(site):
            readers = reads.get((rank, process, step, other, record.key.slot))
            if readers:
                partner = readers.pop(0)
                draft.pair(*((partner, record) if turned else (record, partner)), 1.0)
                break


def _repeated_modules(draft: Draft, *, exported_first: bool) -> None:
    """Pair repeated calls: torch's older exporter names the second call of `relu` `relu_1`."""
    graph, model = (draft.missing, draft.extra) if exported_first else (draft.extra, draft.missing)
    by_call: dict[CallKey, list[Record]] = defaultdict(list)
    for record in model.values():
        by_call[call_key(record)].append(record)
    # Older exporters number repeated calls of one module instead of naming the call.
    for record in list(graph.values()):
        for site, number in without_number(record.key.site):
            key = record.key
            for other in by_call.get((key.rank, key.process, key.step, site, number), ()):
                alike = other.key.port == key.port and other.shape == record.shape
                if alike and id(other) in model and key.port == "output":
                    draft.pair(*((record, other) if exported_first else (other, record)), MADE)
                    break


def _folded_norms(draft: Draft, graph: ExportedGraph | None, *, exported_first: bool) -> None:
    """Pair a convolution that contains a folded batch norm with the model's batch norm."""
    values, model = (draft.missing, draft.extra) if exported_first else (draft.extra, draft.missing)
    made = _outputs(values.values())
    module_outputs = _outputs(model.values())
    # Within the model, equal bytes show which norm reads a convolution; the graph no longer does.
    takers = {
        (record.key.step, record.digest): record
        for record in model.values()
        if record.key.port == "input" and record.digest and kind_of(record.class_name) == _NORM
    }
    for site, node in graph.folded_norms.items() if graph is not None else ():
        for record in module_outputs.get(site, ()):
            taker = takers.get((record.key.step, record.digest))
            for norm in module_outputs.get(taker.key.site, ()) if taker is not None else ():
                for value in made.get(node, ()):
                    same = norm.key.step == value.key.step == record.key.step
                    if same and norm.shape == value.shape and id(norm) in model:
                        draft.pair(*((value, norm) if exported_first else (norm, value)), MADE)


def _inputs(draft: Draft, rectified: frozenset[Tensor]) -> None:
    """Pair inputs of paired calls by their makers, otherwise by signature.

    If two modules compute the same value, an exporter may keep either of them. So an input with a
    known maker is never paired with an input of another maker. A tensor that is stored without its
    negative values may have been made by a rectifier as well.
    """
    partner: dict[CallKey, CallKey] = {}
    twins = digests_of_pairs(draft)
    for pair in draft.pairs:
        partner.setdefault(call_key(pair.reference), call_key(pair.candidate))
    for call in _calls(draft.missing.values(), draft.extra.values()):
        # A module whose output is not computed in the graph still has inputs to compare.
        partner.setdefault(call, call)
    reference_calls, candidate_calls = (
        _inputs_by_call(draft.missing.values()),
        _inputs_by_call(draft.extra.values()),
    )
    # A value that is already in a pair may not be paired again by its signature.
    made = {
        pair.candidate.digest
        for pair in draft.pairs
        if rectified.isdisjoint(map(place_of, (pair.reference, pair.candidate)))
    }
    for call, own in reference_calls.items():
        others = list(candidate_calls.get(partner.get(call, call), ()))
        pair_by_bytes(draft, own, others, twins)
        for record in own:
            # Pairs by signature are guesses, so each side must have exactly one tensor with that
            # signature.
            rivals = [option for option in own if signature(option) == signature(record)]
            alike = [option for option in others if signature(option) == signature(record)]
            unknown = (record.key.step, record.digest) not in twins
            unknown = unknown and not any(map(is_square, (record, *alike)))
            if unknown and len(rivals) == len(alike) == 1 and alike[0].digest not in made:
                draft.pair(record, alike[0], SIGNATURE)


def _calls(reference: Iterable[Record], candidate: Iterable[Record]) -> set[CallKey]:
    return {call_key(record) for record in reference} & {call_key(record) for record in candidate}


def _inputs_by_call(records: Iterable[Record]) -> dict[CallKey, list[Record]]:
    inputs: dict[CallKey, list[Record]] = defaultdict(list)
    for record in records:
        if record.key.port == "input" and record.key.phase == "forward":
            inputs[call_key(record)].append(record)
    return inputs


def _same_bytes(
    draft: Draft, *, exported_first: bool, only_modules: ExportedGraph | None = None
) -> None:
    """Pair every tensor of the model that holds the same bytes as a paired one.

    Modules repeat values: a wrapper returns the output of its last child. One comparison in the
    graph then serves all of them.
    """
    pair_of_bytes = _pairs_by_bytes(draft.pairs, exported_first=exported_first)
    model_side = draft.extra if exported_first else draft.missing
    for record in list(model_side.values()):
        if record.key.port not in ("input", "output") or record.key.phase != "forward":
            continue
        # Between two graphs, only modules are considered, because nodes are paired by value
        # already.
        if only_modules and (record.key.site in only_modules.nodes or record.key.port == "input"):
            continue
        has_bytes = record.digest and record.kept == "full"
        pair = pair_of_bytes.get(_bytes(record)) if has_bytes else None
        if pair is None:
            continue
        value = pair.reference if exported_first else pair.candidate
        if recipe := pair.reference_recipe or pair.candidate_recipe:
            draft.pair_decoded(value, record, recipe, exported_first)
        elif value.shape == record.shape:
            draft.pair(*((value, record) if exported_first else (record, value)), SAME_BYTES)


def _pairs_by_bytes(pairs: Sequence[Pair], *, exported_first: bool) -> dict[_Bytes, Pair]:
    """Pairs by the bytes of the model's tensor; a tensor with a recipe holds other bytes."""
    by_bytes: dict[_Bytes, Pair] = {}
    # Outputs first, because the maker of a value identifies it better than a reader.
    for is_output in (True, False):
        for pair in pairs:
            model = pair.candidate if exported_first else pair.reference
            recipe = pair.candidate_recipe if exported_first else pair.reference_recipe
            if model.digest and recipe is None and (model.key.port == "output") is is_output:
                by_bytes.setdefault(_bytes(model), pair)
    return by_bytes


def _bytes(record: Record) -> _Bytes:
    key = record.key
    return key.rank, key.process, key.step, record.digest, record.shape


def _reasons(
    draft: Draft, reference: ExportedGraph | None, candidate: ExportedGraph | None
) -> dict[tuple[str, TensorKey], str]:
    reasons: dict[tuple[str, TensorKey], str] = {}
    sides: Sequence[tuple[str, Iterable[Record], ExportedGraph | None, ExportedGraph | None]] = (
        ("reference", draft.missing.values(), reference, candidate),
        ("candidate", draft.extra.values(), candidate, reference),
    )
    twins: dict[str, dict[_Bytes, Record]] = {}
    for side in ("reference", "candidate"):
        paired: list[Record] = [getattr(pair, side) for pair in draft.pairs]
        # Outputs sort last, so that they overwrite inputs below: the maker of a value says more.
        paired.sort(key=lambda record: (record.key.port == "output", -record.order))
        twins[side] = {_bytes(record): record for record in paired if record.digest}
    for side, records, own, other in sides:
        for record in records:
            why = other.why(record.key.site) if other is not None else ""
            if not why and own is not None:
                twin = twins[side].get(_bytes(record)) if record.digest else None
                why = _of_a_node(record, own, twin, model=other is None)
            elif not why and other is not None:
                why = "the graph as it ran computes no tensor for it: a constant there, or left out"
            if why:
                reasons[side, record.key] = why
    return reasons


def _of_a_node(record: Record, own: ExportedGraph, twin: Record | None, *, model: bool) -> str:
    key = record.key
    # The other run has no nodes, so a node can only be explained by where else it is compared.
    if key.site in own.nodes and model:
        if twin is not None:
            return f"{SAME_VALUE}'{twin.key.site}' {twin.key.port}"
        module = key.site.rpartition("/")[0]
        where = f"a node inside '{module}'; " if module and module != ROOT else LONE_NODE
        return f"{where}the other run has modules only"
    if key.port == "param":
        return "the other run has no such weight; --level params records weights"
    if own.replaced_by(key.site):
        return f"a fused node; it replaced {', '.join(own.replaced_by(key.site)[:3])}"
    if not model:
        return "the other graph has no value of this name at this place"
    return "no tensor of the other run is surely the same"


# --- whole runs


def align_exported(
    plan: Plan, reference: Run, candidate: Run, *, structural: bool = False
) -> Plan | None:
    """The plan of two runs, at least one of which is an exported graph; None for other runs.

    Without `structural`, the names of the two sides must agree; with it, layers with weights are
    paired in order.
    """
    graphs = exported_graph(reference), exported_graph(candidate)
    if graphs == (None, None) or not (structural or _names_fit(plan, *graphs)):
        return None
    plan = without_uncertain_pairs(plan, *graphs)
    if structural:
        pairs, reasons, fusions = pair_unnamed(plan, *graphs)
        if not pairs:
            return None
    else:
        pairs, reasons, hidden = pair_exported(plan, *graphs)
        declared = [fusion for graph in graphs if graph is not None for fusion in graph.fusions]
        fusions = [*declared, *hidden] if hidden else []
    plan = with_rectified(plan.with_pairs(pairs), *graphs)
    # Fusions are found between a model and a graph only, so there is one graph to add them to.
    reference_graph, candidate_graph = (
        graph if graph is None or not fusions else graph._replace(fusions=fusions)
        for graph in graphs
    )
    if reference_graph is not None and candidate_graph is not None:
        reference_graph, candidate_graph = (
            with_absorbed(reference_graph, candidate_graph),
            with_absorbed(candidate_graph, reference_graph),
        )
    return with_fusions(plan._replace(reasons=reasons), reference_graph, candidate_graph)


def _names_fit(
    plan: Plan, reference: ExportedGraph | None, candidate: ExportedGraph | None
) -> bool:
    """Whether the two sides use the same names.

    They do if half of the modules that the graph names are sites of the other side. For two graphs,
    half of the sites of the smaller one must be common.
    """
    sites = [
        {*(record.key.site for record in paired), *(record.key.site for record in left)}
        for paired, left in (
            ([pair.reference for pair in plan.pairs], plan.missing),
            ([pair.candidate for pair in plan.pairs], plan.extra),
        )
    ]
    # Sites are compared by the reference's names, so that earlier pairs count as agreement.
    linked = {pair.candidate.key.site: pair.reference.key.site for pair in plan.pairs}
    named = [{linked.get(site, site) for site in sites[1]}, sites[0]]
    shared = (named[0] & named[1]) - {ROOT}
    if reference is not None and candidate is not None:
        modules = [sites[0] - set(reference.nodes), sites[1] - set(candidate.nodes)]
        values = reference.values().keys() & candidate.values().keys()
        same_nodes = len(reference.reads.keys() & candidate.reads.keys())
        return (
            # `shared` leaves out the root, which both graphs have: hence one less.
            2 * len(shared) >= min(map(len, named)) - 1
            or len(modules[0] & modules[1] - {ROOT}) * 2 >= min(map(len, modules)) > 1
            or 2 * len(values) >= min(len(reference.nodes), len(candidate.nodes))
            or 2 * same_nodes >= min(len(reference.reads), len(candidate.reads)) > 1
        )
    own, others = (sites[0], named[0]) if reference is not None else (sites[1], sites[0])
    nodes = (reference or candidate or ExportedGraph({}, {})).nodes
    modules = {linked.get(site, site) for site in own if site not in nodes} - {ROOT}
    recognised = {
        site
        for site in modules
        if site in others or any(base in others for base, _ in without_number(site))
    }
    # Half of the modules, because an exporter renames or wraps some of them.
    return bool(recognised) and 2 * len(recognised) >= len(modules)


def with_calls(plan: Plan, reference: Run, candidate: Run) -> Plan:
    """The plan with pairs of nodes, if one graph was compiled and the other one exported."""
    for first, run, other in ((True, reference, candidate), (False, candidate, reference)):
        if (graph := exported_graph(run)) is not None and exported_graph(other) is None:
            pairs, reasons = pair_calls(plan, other, graph, exported_first=first)
            plan = plan.with_pairs(pairs)
            plan = plan._replace(reasons={**plan.reasons, **reasons})
    return plan


def by_export(plan: Plan, context: Context) -> Plan | None:
    """Pairs of an exported graph whose names fit."""
    return align_exported(plan, context.reference, context.candidate)


def by_export_order(plan: Plan, context: Context) -> Plan | None:
    """Pairs of an exported graph whose names do not fit: layers with weights, in order."""
    return align_exported(plan, context.reference, context.candidate, structural=True)
