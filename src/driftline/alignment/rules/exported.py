"""A model against a graph that names none of its modules: layers with weights, in order.

The graph's list of what it does with weights (products, convolutions, norms, look-ups) is laid over
the model's leaves of the same kinds. Order, kind and shape decide; what is not the only answer
stays alone. A batch norm that an exporter worked into its convolution is known by its absence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from driftline.alignment.annotate.fusions import with_fusions
from driftline.alignment.plan import Pair, Plan
from driftline.alignment.recipe import Recipe, Step
from driftline.alignment.rules.leaves import align_sequences
from driftline.alignment.rules.module_borders import (
    LOOK,
    MADE,
    Left,
    either_way,
    take_outputs,
    take_turned,
    without_places,
)
from driftline.alignment.sites.kinds import kind_of, same_kind
from driftline.alignment.sites.site_graph import Call, calls_of, frames_of, main_tensor
from driftline.graphs.sources.exported import (
    ROOT,
    ExportedGraph,
    Fusion,
    exported_graph,
    listed,
    names_fit,
    without_number,
)
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run

# Only these kinds carry weights in every exported file; anything else may be folded or fused away.
_KINDS = ("linear", "conv", "embedding", "norm", "norm.layer", "norm.rms", "norm.batch")


class Work(NamedTuple):
    """One node with weights.

    Attributes:
        kind: What it does.
        takes: The value it works on.
        makes: The site of what it makes.
        shape: Of that; None where it is not known.
        norm_after: A batch norm of its own reads it.
    """

    kind: str
    takes: str
    makes: str
    shape: tuple[int, ...] | None
    norm_after: bool


def work_of(about: Mapping[str, Any]) -> Work:
    """A work from a topology."""
    shape = about.get("shape")
    sizes = cast("list[int]", shape) if isinstance(shape, list) else None
    known = tuple(int(size) for size in sizes) if sizes is not None else None
    return Work(
        str(about.get("kind", "")),
        str(about.get("takes", "")),
        str(about.get("makes", "")),
        known,
        bool(about.get("norm_after")),
    )


class Linked(NamedTuple):
    """Tensors that belong together, and what of a model lies inside the graph's fused nodes.

    Attributes:
        pairs: Of the model, and of the graph.
        fusions: Nodes of the graph, with what of the model went into them.
    """

    pairs: list[tuple[Record, Record]]
    fusions: list[Fusion]


def link_works(model: Sequence[Record], graph: Sequence[Record], about: ExportedGraph) -> Linked:
    """Tensors of a model's leaves with those of the graph's works, step by step."""
    found = Linked([], [])
    works = [work_of(work) for work in about.works]
    there = frames_of(graph)
    for frame, records in frames_of(model).items():
        if frame in there:
            one = _in_frame(sorted(records, key=lambda r: r.order), there[frame], works, about)
            found.pairs.extend(one.pairs)
            found.fusions.extend(fusion for fusion in one.fusions if fusion not in found.fusions)
    return found


def _in_frame(
    model: Sequence[Record], graph: Sequence[Record], works: Sequence[Work], about: ExportedGraph
) -> Linked:
    made = {r.key.site: r for r in graph if r.key.port == "output" and not r.alias}
    read: dict[str, Record] = {}
    # Several nodes may read one value; the first reader stands for all of them.
    for record in graph:
        if record.key.port == "input":
            read.setdefault(record.key.slot, record)
    leaves = [c for c in calls_of(model) if c.leaf and c.called and c.kind in _KINDS]
    norms = {call.fed_by: call for call in leaves if call.kind == "norm.batch" and call.fed_by}
    # An export without a single batch norm has folded them all into the convolutions before
    # them.
    merged = not any(work.kind == "norm.batch" for work in works)
    if merged:
        leaves = [call for call in leaves if call.kind != "norm.batch"]
    found = Linked([], [])
    for call, work in _matched(leaves, list(works), made):
        # A folded convolution computes what the model's batch norm gives, so that is its
        # partner, unless the graph still has a norm of its own after it.
        after = norms.get(call.makes) if merged and call.makes and not work.norm_after else None
        output = main_tensor((after or call).records, "output")
        source = main_tensor(call.records, "input")
        for own, other in ((source, read.get(work.takes)), (output, made.get(work.makes))):
            if own is not None and other is not None and own.shape == other.shape:
                found.pairs.append((own, other))
        # What the graph no longer computes lies inside the node that holds it; it is
        # compared there.
        holds = [(call.site, call.visit, "output")] if after or work.makes not in made else []
        if after is not None:
            holds.append((after.site, after.visit, "input"))
            holds += [(after.site, after.visit, "output")] if work.makes not in made else []
        node = work.makes if work.makes in made else about.inside.get(work.makes, "")
        if holds and node:
            values = [str(value) for value in listed(about.nodes.get(node, {}).get("values"))]
            takers = [read[value].key for value in values if value in read]
            at = [(key.site, key.visit, "input", key.slot) for key in takers]
            kind = str(about.nodes.get(node, {}).get("class", ""))
            found.fusions.append(Fusion(node, kind, tuple(holds), ((node, 0, "output", "0"), *at)))
    return found


def _matched(
    leaves: list[Call], works: list[Work], made: Mapping[str, Record]
) -> list[tuple[Call, Work]]:
    shapes = [made[w.makes].shape if w.makes in made else w.shape for w in works]
    worth = np.zeros((len(leaves), len(works)), np.int32)
    for row, call in enumerate(leaves):
        for column, (work, shape) in enumerate(zip(works, shapes, strict=True)):
            fits = shape is None or shape == call.out
            # Only the same kind of work may pair: a guess between two classes is left
            # to other rules.
            if fits and same_kind(call.kind, work.kind) == 2:
                worth[row, column] = 2 if shape is not None else 1
    # Equal counts with fitting shapes throughout need no alignment, and it is the usual case.
    if len(leaves) == len(works) and all(worth[at, at] for at in range(len(works))):
        return list(zip(leaves, works, strict=True))
    if not leaves or not works:
        return []
    try:
        matched = align_sequences(np.arange(len(leaves)), np.arange(len(works)), worth)
    except ValueError:
        return []
    return [(leaves[i], works[j]) for i, j in matched.pairs]


# A model against a graph that was exported from it: what names leave over, by what the graph
# says.


SAME, WORK = 0.9, 0.7
"""Confidence of what holds the same bytes, and of layers whose order says which is which."""

_DEQUANTISED = "_DequantizeLinear_Output"
"""How onnxruntime.quantization calls what a tensor is after it was quantised."""
_NORM = "norm.batch"
_Call = tuple[int, int, int, str, int]


def pair_exported(
    plan: Plan, ours: ExportedGraph | None, theirs: ExportedGraph | None
) -> tuple[list[Pair], dict[tuple[str, TensorKey], str]]:
    """Pairs for what names have left over, and why the rest is alone.

    Args:
        plan: What names have paired.
        ours: The reference's graph; None if it is a model that ran as it is.
        theirs: The candidate's.
    """
    left = Left(plan)
    # Two graphs name their values; a model and a graph share only modules. The order inside
    # each branch goes from what names say to what bytes say.
    if ours is not None and theirs is not None:
        _by_value(left, ours, theirs)
        _by_code(left, ours, theirs)
        for graph, turned in ((ours, False), (theirs, True)):
            _fused(graph, left, turned)
        _same_bytes(left, exported_first=False, only_modules=ours)
    else:
        _repeated_modules(left, exported_first=ours is not None)
        # Outputs by value first, then inputs, then outputs by signature: each step leaves
        # fewer rivals for the next, weaker one.
        take_outputs(left, by_look=False)
        _inputs(left)
        take_outputs(left, by_look=True)
        take_turned(left, exported_first=ours is not None)
        _worked_in(left, ours or theirs, exported_first=ours is not None)
        _same_bytes(left, exported_first=ours is not None)
    return left.found, _reasons(left, ours, theirs)


def pair_unnamed(
    plan: Plan, ours: ExportedGraph | None, theirs: ExportedGraph | None
) -> tuple[list[Pair], dict[tuple[str, TensorKey], str], list[Fusion]]:
    """Pairs where the graph names no modules of the model: layers with weights, in order.

    Nothing where both are graphs, or none is. Third comes what lies inside of the graph's nodes.
    """
    graph = ours if ours is not None else theirs
    if graph is None or (ours is not None and theirs is not None):
        return [], {}, []

    first = ours is not None
    # All of both sides, so that what is paired already keeps its place in the order.
    here = [*(pair.reference for pair in plan.pairs), *plan.missing]
    there = [*(pair.candidate for pair in plan.pairs), *plan.extra]
    model, values = (there, here) if first else (here, there)
    left = Left(plan)
    linked = link_works(model, values, graph)
    for own, value in linked.pairs:
        both = (value, own) if first else (own, value)
        if id(both[0]) in left.here and id(both[1]) in left.there:
            left.take(*both, WORK, "structure")
    # Without a single layer in order there is no evidence that the two belong together at all.
    if not left.found:
        return [], {}, []
    _same_bytes(left, exported_first=first)
    return left.found, _reasons(left, ours, theirs), linked.fusions


def _call(record: Record) -> _Call:
    key = record.key
    return (key.rank, key.process, key.step, key.site, key.visit)


def loosened(plan: Plan, ours: ExportedGraph | None, theirs: ExportedGraph | None) -> Plan:
    """Without pairs by names that say nothing: of a value that only one of two graphs rounds, and
    of the place in a tuple where one side is no graph.
    """
    if ours is None or theirs is None:
        graph = ours if ours is not None else theirs
        if graph is None:
            return plan
        return without_places(plan, graph, exported_first=ours is not None)
    # A value that only one graph rounds has another content under the same name.
    rounded = ours.quantised() ^ theirs.quantised()
    sites = {site for value, site in ours.values().items() if value in rounded}
    loose = [
        pair
        for pair in plan.pairs
        if pair.by == "name"
        and pair.reference.key.port == "output"
        and pair.reference.key.site in sites
    ]
    gone = {id(pair) for pair in loose}
    return plan._replace(
        pairs=tuple(pair for pair in plan.pairs if id(pair) not in gone),
        missing=(*plan.missing, *(pair.reference for pair in loose)),
        extra=(*plan.extra, *(pair.candidate for pair in loose)),
    )


def _by_value(left: Left, ours: ExportedGraph, theirs: ExportedGraph) -> None:
    """Outputs of nodes by the names of values; a quantised one by what its integers stand for."""
    here, there = ours.values(), theirs.values()
    rounded = ours.quantised() ^ theirs.quantised()
    mine, others = _outputs(left.here.values()), _outputs(left.there.values())
    # onnxruntime's quantiser appends a suffix to the values it rounds, so names are tried with
    # and without it.
    for value, site in here.items():
        for name in (f"{value}{_DEQUANTISED}", value, value.removesuffix(_DEQUANTISED)):
            if name == value and value in rounded:
                continue
            for record in mine.get(site, ()) if name in there else ():
                for other in others.get(there[name], ()):
                    same = record.key.step == other.key.step and _look(record) == _look(other)
                    if same and id(record) in left.here and id(other) in left.there:
                        left.take(record, other, 1.0)


def _by_code(left: Left, ours: ExportedGraph, theirs: ExportedGraph) -> None:
    """A value against the integers that stand for it on the other side."""
    for graph, other, codes_first in ((ours, theirs, True), (theirs, ours, False)):
        coded = _outputs((left.here if codes_first else left.there).values())
        plain = _outputs((left.there if codes_first else left.here).values())
        taken = _inputs_by_value((left.there if codes_first else left.here).values())
        makers = other.values()
        for site, about in graph.codes.items():
            # The topology comes from a file that others write: a short or mistyped
            # entry is skipped.
            of, scale, zero, dtype = (*listed(about), "", None, None, "")[:4]
            if site in other.codes or not isinstance(scale, float) or not isinstance(zero, float):
                continue
            for record in coded.get(site, ()):
                for value in (*plain.get(makers.get(str(of), ""), ()), *taken.get(str(of), ())):
                    if record.shape == value.shape and record.key.step == value.key.step:
                        # onnxruntime may turn int8 codes into uint8 while it optimises, which moves
                        # the zero point by 128.
                        step = Step("dequantise", factor=scale, zero=zero + _shift(dtype, record))
                        left.take_decoded(
                            record, value, Recipe((record,), (step,), record.shape), codes_first
                        )


def _inputs_by_value(records: Iterable[Record]) -> dict[str, list[Record]]:
    """What nodes take, by the name of the value: a float that the other side takes as integers."""
    found: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record.key.port == "input" and "/" in record.key.site:
            found[record.key.slot].append(record)
    return found


def _shift(dtype: object, record: Record) -> float:
    """How much further the zero point lies where int8 was made uint8, or the other way."""
    moved = {("int8", "uint8"): 128.0, ("uint8", "int8"): -128.0}
    return moved.get((str(dtype), record.dtype), 0.0)


def _outputs(records: Iterable[Record]) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record.key.port == "output":
            found[record.key.site].append(record)
    return found


def _fused(graph: ExportedGraph, left: Left, turned: bool) -> None:
    """Inputs of fused nodes, at whatever node reads the same value on the other side."""
    fused, plain = (left.there, left.here) if turned else (left.here, left.there)
    reads: dict[tuple[int, int, int, str, str], list[Record]] = defaultdict(list)
    for record in plain.values():
        if record.key.port == "input":
            rank, process, step, site, _ = _call(record)
            reads[rank, process, step, site, record.key.slot].append(record)
    for record in list(fused.values()):
        # A fused node may read what several of its members read, so partners are used up one by
        # one.
        if record.key.port != "input":
            continue
        rank, process, step, site, _ = _call(record)
        for other in graph.replaced_by(site):
            at = reads.get((rank, process, step, other, record.key.slot))
            if at:
                partner = at.pop(0)
                left.take(*((partner, record) if turned else (record, partner)), 1.0)
                break


def _repeated_modules(left: Left, *, exported_first: bool) -> None:
    """torch's older exporter calls the second call of `relu` by `relu_1`."""
    graph, model = (left.here, left.there) if exported_first else (left.there, left.here)
    known: dict[_Call, list[Record]] = defaultdict(list)
    for record in model.values():
        known[_call(record)].append(record)
    # Older exporters number repeated calls of one module instead of naming the call.
    for record in list(graph.values()):
        for site, number in without_number(record.key.site):
            key = record.key
            for other in known.get((key.rank, key.process, key.step, site, number), ()):
                alike = other.key.port == key.port and other.shape == record.shape
                if alike and id(other) in model and key.port == "output":
                    left.take(*((record, other) if exported_first else (other, record)), MADE)
                    break


def _worked_in(left: Left, graph: ExportedGraph | None, *, exported_first: bool) -> None:
    """What a convolution with a batch norm in it gives is what the model's batch norm gives."""
    values, model = (left.here, left.there) if exported_first else (left.there, left.here)
    made = _outputs(values.values())
    given = _outputs(model.values())
    # Within the model, equal bytes show which norm reads a convolution; the graph no longer says.
    takers = {
        (record.key.step, record.digest): record
        for record in model.values()
        if record.key.port == "input" and record.digest and kind_of(record.class_name) == _NORM
    }
    for site, node in graph.reworked.items() if graph is not None else ():
        for record in given.get(site, ()):
            taker = takers.get((record.key.step, record.digest))
            for norm in given.get(taker.key.site, ()) if taker is not None else ():
                for value in made.get(node, ()):
                    same = norm.key.step == value.key.step == record.key.step
                    if same and norm.shape == value.shape and id(norm) in model:
                        left.take(*((value, norm) if exported_first else (norm, value)), MADE)


def _inputs(left: Left) -> None:
    """Inputs of calls that belong together, by who made them; by their looks where nobody knows.

    What one module computes first an exporter may leave to another that computes the same. So an
    input whose maker is known is never set against one of another maker.
    """
    partner: dict[_Call, _Call] = {}
    twins: dict[tuple[int, str], set[str]] = defaultdict(set)
    for pair in left.pairs:
        partner.setdefault(_call(pair.reference), _call(pair.candidate))
        if pair.reference.digest and pair.candidate.digest:
            twins[pair.reference.key.step, pair.reference.digest].add(pair.candidate.digest)
    for call in _calls(left.here.values(), left.there.values()):
        # A module whose output is computed nowhere in the graph still has inputs to compare.
        partner.setdefault(call, call)
    here, there = _by_call(left.here.values()), _by_call(left.there.values())
    # A value that some pair has claimed may not be paired again by its signature.
    made = set[str]().union(*twins.values())
    for call, mine in here.items():
        others = list(there.get(partner.get(call, call), ()))
        mine = list(mine)
        for record in list(mine):
            digests = twins.get((record.key.step, record.digest), set())
            same = [one for one in others if one.digest in digests and one.shape == record.shape]
            if same:
                left.take(record, same[0], MADE)
                mine.remove(record)
                others.remove(same[0])
        for record in mine:
            # Signature pairs are guesses, so each side must have exactly one tensor of
            # that signature.
            rivals = [one for one in mine if _look(one) == _look(record)]
            alike = [one for one in others if _look(one) == _look(record)]
            unknown = (record.key.step, record.digest) not in twins
            unknown = unknown and not any(map(either_way, (record, *alike)))
            if unknown and len(rivals) == len(alike) == 1 and alike[0].digest not in made:
                left.take(record, alike[0], LOOK)


def _calls(ours: Iterable[Record], theirs: Iterable[Record]) -> set[_Call]:
    return {_call(record) for record in ours} & {_call(record) for record in theirs}


def _by_call(records: Iterable[Record]) -> dict[_Call, list[Record]]:
    found: dict[_Call, list[Record]] = defaultdict(list)
    for record in records:
        if record.key.port == "input" and record.key.phase == "forward":
            found[_call(record)].append(record)
    return found


def _look(record: Record) -> tuple[tuple[int, ...], str]:
    return record.shape, record.dtype


def _same_bytes(
    left: Left, *, exported_first: bool, only_modules: ExportedGraph | None = None
) -> None:
    """What of the model holds the bytes of something that has a partner: one value in the graph."""
    known: dict[tuple[int, int, int, str, tuple[int, ...]], Pair] = {}
    for output in (True, False):  # who made it says more than who read it
        for pair in left.pairs:
            model = pair.candidate if exported_first else pair.reference
            whole = (pair.candidate_recipe if exported_first else pair.reference_recipe) is None
            if model.digest and whole and (model.key.port == "output") is output:
                known.setdefault(_bytes(model), pair)
    # Modules repeat values: a wrapper returns what its last child made. One comparison in the
    # graph then serves all of them.
    model_side = left.there if exported_first else left.here
    for record in list(model_side.values()):
        if record.key.port not in ("input", "output") or record.key.phase != "forward":
            continue
        # Between two graphs only modules are looked at: nodes are paired by value already.
        if only_modules and (record.key.site in only_modules.nodes or record.key.port == "input"):
            continue
        pair = known.get(_bytes(record)) if record.digest and record.kept == "full" else None
        if pair is None:
            continue
        value = pair.reference if exported_first else pair.candidate
        if recipe := pair.reference_recipe or pair.candidate_recipe:
            left.take_decoded(value, record, recipe, exported_first)
        elif value.shape == record.shape:
            left.take(*((value, record) if exported_first else (record, value)), SAME)


def _bytes(record: Record) -> tuple[int, int, int, str, tuple[int, ...]]:
    key = record.key
    return key.rank, key.process, key.step, record.digest, record.shape


def _reasons(
    left: Left, ours: ExportedGraph | None, theirs: ExportedGraph | None
) -> dict[tuple[str, TensorKey], str]:
    found: dict[tuple[str, TensorKey], str] = {}
    sides: Sequence[tuple[str, Iterable[Record], ExportedGraph | None, ExportedGraph | None]] = (
        ("reference", left.here.values(), ours, theirs),
        ("candidate", left.there.values(), theirs, ours),
    )
    twins: dict[str, dict[tuple[int, int, int, str, tuple[int, ...]], Record]] = {}
    for side in ("reference", "candidate"):
        paired: list[Record] = [getattr(pair, side) for pair in left.pairs]
        # Outputs sort last, so that they overwrite inputs below: the maker of a value says
        # more.
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
                found[side, record.key] = why
    return found


def _of_a_node(record: Record, own: ExportedGraph, twin: Record | None, *, model: bool) -> str:
    key = record.key
    # The other run has no nodes at all, so a node can only be explained by where else it is
    # compared.
    if key.site in own.nodes and model:
        if twin is not None:
            return f"a node; the same value is compared at '{twin.key.site}' {twin.key.port}"
        module = key.site.rpartition("/")[0]
        where = f" inside '{module}'" if module and module != ROOT else ""
        return f"a node{where}; the other run has modules only"
    if key.port == "param":
        return "the other run has no such weight; --level params records weights"
    if own.replaced_by(key.site):
        return f"a fused node; it replaced {', '.join(own.replaced_by(key.site)[:3])}"
    if not model:
        return "the other graph has no value of this name at this place"
    return "no tensor of the other run is surely the same"


# Runs of exported graphs become a plan: where their names fit, and where they do not.


def align_exported(
    plan: Plan, reference: Run, candidate: Run, *, structural: bool = False
) -> Plan | None:
    """A graph that was exported: if names fit, it says the rest. None for other runs.

    With `structural` its names do not, and layers with weights are taken in order.
    """
    graphs = exported_graph(reference), exported_graph(candidate)
    if graphs == (None, None) or not (structural or names_fit(plan, *graphs)):
        return None
    plan = loosened(plan, *graphs)
    inside: list[Fusion] = []
    if structural:
        pairs, reasons, inside = pair_unnamed(plan, *graphs)
        if not pairs:
            return None
    else:
        pairs, reasons = pair_exported(plan, *graphs)
    ours, theirs = (
        graph if graph is None or not inside else graph._replace(fusions=inside) for graph in graphs
    )
    return with_fusions(plan.with_pairs(pairs)._replace(reasons=reasons), ours, theirs)


def with_calls(plan: Plan, reference: Run, candidate: Run) -> Plan:
    """With pairs of nodes where one of the two graphs was compiled and the other one exported."""
    for first, run, other in ((True, reference, candidate), (False, candidate, reference)):
        if (graph := exported_graph(run)) is not None and exported_graph(other) is None:
            from driftline.alignment.rules.exported_nodes import pair_calls

            pairs, reasons = pair_calls(plan, other, graph, exported_first=first)
            plan = plan.with_pairs(pairs)
            plan = plan._replace(reasons={**plan.reasons, **reasons})
    return plan
