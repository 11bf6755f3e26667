"""A plan that was saved, with what the runs themselves say of its pairs: lines, and fusions.

The file says what is set against what; what a compiler or an exporter left beside the tensors is
read again, so that findings name as much as they did before the plan was saved.
"""

from __future__ import annotations

from pathlib import Path

from driftline.alignment.plan import Plan
from driftline.alignment.planfile import read_plan
from driftline.runs.run import Run


def saved_plan(path: Path, reference: Run, candidate: Run, *, compiled: bool) -> Plan:
    """The plan of a file.

    Args:
        path: The file.
        reference: The one run.
        candidate: The other.
        compiled: Whether one of them lists graphs of a compiler.

    Raises:
        BadFile: It cannot be read, or something in it means nothing.
    """
    plan = read_plan(path, reference, candidate)
    if compiled:
        from driftline.alignment.compiled import graphs_of
        from driftline.alignment.compiled_lines import with_lines

        plan = with_lines(plan, graphs_of(reference), graphs_of(candidate))
    from driftline.alignment.exported_graph import exported_graph

    graphs = exported_graph(reference), exported_graph(candidate)
    if graphs != (None, None):
        from driftline.alignment.exported_fusions import with_fusions

        plan = with_fusions(plan, *graphs)
        plan = plan._replace(notes=tuple(dict.fromkeys(plan.notes)))
    return plan
