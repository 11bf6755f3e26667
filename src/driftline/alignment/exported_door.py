"""Runs of exported graphs become a plan: where their names fit, and where they do not.

The rules are in `exported.py` (names and values), `exported_outputs.py` (modules that give several
tensors), `exported_works.py` (layers in order),
`exported_nodes.py` (calls of a compiled graph) and `exported_fusions.py` (what became one node).
"""

from __future__ import annotations

from driftline.alignment.exported import loosened, pair_exported, pair_unnamed
from driftline.alignment.exported_fusions import with_fusions
from driftline.alignment.exported_graph import Fusion, exported_graph, names_fit
from driftline.alignment.plan import Plan
from driftline.runs.run import Run


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
            from driftline.alignment.exported_nodes import pair_calls

            pairs, reasons = pair_calls(plan, other, graph, exported_first=first)
            plan = plan.with_pairs(pairs)
            plan = plan._replace(reasons={**plan.reasons, **reasons})
    return plan
