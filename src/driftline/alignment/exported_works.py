"""A model against a graph that names none of its modules: layers with weights, in order.

The graph's list of what it does with weights (products, convolutions, norms, look-ups) is laid over
the model's leaves of the same kinds. Order, kind and shape decide; what is not the only answer
stays alone. A batch norm that an exporter worked into its convolution is known by its absence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from driftline.alignment.calls import Call, calls_of, frames_of, main_tensor
from driftline.alignment.classes import same_kind
from driftline.alignment.exported_graph import ExportedGraph, Fusion, listed
from driftline.alignment.sequence import align_sequences
from driftline.runs.record import Record

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
    for record in graph:
        if record.key.port == "input":
            read.setdefault(record.key.slot, record)
    leaves = [c for c in calls_of(model) if c.leaf and c.called and c.kind in _KINDS]
    norms = {call.fed_by: call for call in leaves if call.kind == "norm.batch" and call.fed_by}
    merged = not any(work.kind == "norm.batch" for work in works)
    if merged:
        leaves = [call for call in leaves if call.kind != "norm.batch"]
    found = Linked([], [])
    for call, work in _matched(leaves, list(works), made):
        after = norms.get(call.makes) if merged and call.makes and not work.norm_after else None
        output = main_tensor((after or call).records, "output")
        source = main_tensor(call.records, "input")
        for own, other in ((source, read.get(work.takes)), (output, made.get(work.makes))):
            if own is not None and other is not None and own.shape == other.shape:
                found.pairs.append((own, other))
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
            if fits and same_kind(call.kind, work.kind) == 2:
                worth[row, column] = 2 if shape is not None else 1
    if len(leaves) == len(works) and all(worth[at, at] for at in range(len(works))):
        return list(zip(leaves, works, strict=True))
    if not leaves or not works:
        return []
    try:
        matched = align_sequences(np.arange(len(leaves)), np.arange(len(works)), worth)
    except ValueError:
        return []
    return [(leaves[i], works[j]) for i, j in matched.pairs]
