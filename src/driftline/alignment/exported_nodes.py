"""Nodes of an exported graph against those of a compiled one: call of an operator by call.

The exporter writes down which call of torch's graph a node was made for, a compiled graph which
call of the program a node stems from: module, operator, and the how manieth in that module. Where
these agree, and the shapes do, the two are a pair; a kernel that fused several calls gives the last
one's.
"""

from __future__ import annotations

from driftline.alignment.compiled import graphs_of
from driftline.alignment.exported_graph import ExportedGraph
from driftline.alignment.plan import Pair, Plan
from driftline.runs.record import Record
from driftline.runs.run import Run

CALL = 0.95
_Call = tuple[int, str, str, int]
"""Step, module, operator, and the how manieth call of it there."""


def pair_calls(
    plan: Plan, compiled: Run, graph: ExportedGraph, *, exported_first: bool
) -> list[Pair]:
    """Pairs of the exported graph's nodes with those of the compiled one.

    Args:
        plan: What is paired already.
        compiled: The run with compiled graphs.
        graph: The exported graph of the other run.
        exported_first: Whether that other run is the reference.
    """
    values = plan.missing if exported_first else plan.extra
    known: dict[_Call, Record | None] = {}
    for each in graphs_of(compiled).values():
        for value in each.values:
            # One that is the output of a module, too, is compared at both places.
            record, node = value.record, value.node
            if node is None or record.key.phase != "forward":
                continue
            for origin in node.origins:
                if origin.nth >= 0 and origin.slot == "0":
                    call = (record.key.step, node.module, origin.operator, origin.nth)
                    known[call] = None if call in known else record
    found: list[Pair] = []
    for record in values:
        node = graph.nodes.get(record.key.site)
        if record.key.port != "output" or node is None or "nth" not in node:
            continue
        module = record.key.site.rpartition("/")[0]
        call = (record.key.step, module, str(node.get("target")), int(node["nth"]))
        partner = known.get(call)
        if partner is not None and partner.shape == record.shape:
            both = (record, partner) if exported_first else (partner, record)
            found.append(Pair(*both, "graph", CALL))
            known[call] = None
    return found
