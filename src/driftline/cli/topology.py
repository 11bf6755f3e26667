"""`driftline topology`: the structure of a model as a file for a graph viewer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from driftline.cli import script
from driftline.cli.parsing import Option


def topology(
    path: Annotated[Path, Option(urls=True)],
    /,
    *,
    to: Literal["onnx", "model-explorer"] = "onnx",
    level: Annotated[int | None, Option(metavar="N")] = None,
    output: Annotated[Path | None, Option(names=("--output", "-o"), metavar="FILE")] = None,
    table: Annotated[Path | None, Option(metavar="DIR", urls=True)] = None,
    metric: Annotated[str, Option(metavar="NAME")] = "",
    step: Annotated[int | None, Option(metavar="N")] = None,
    rank: Annotated[int, Option(metavar="N")] = 0,
    force: bool = False,
) -> int:
    """Write the structure of a model as a file for a graph viewer.

        driftline topology run --to onnx
        driftline topology ait_dump/model/4242/ToyModel.json --level 1
        driftline topology run --table cmp --metric relative_l2
        driftline topology run --to model-explorer --table cmp

    A run shows its modules and, where they were dumped with --type op or onnx, the operators in
    them. Nothing of the file can be executed: it holds shapes and parameters, no weights.

    Args:
        path: A run, a dump of another program, or a topology file of ATB (*.json).
        to: onnx for Netron and others; model-explorer for Google's Model Explorer.
        level: How deep to look: 0 is the whole model as one node, 1 its outermost parts. Default:
            the innermost ones.
        output: The file. Default: beside the source, with its name.
        table: A comparison's folder: its status and numbers stand on the nodes, as attributes.
            model-explorer also colours them and writes FILE.node_data.json (numbers) and
            FILE.status.node_data.json beside the graph.
        metric: Which number of the comparison. Default: how far each tensor is beyond its limit.
        step: Which step of a run. Default: its first one.
        rank: Which rank of a run.
        force: Replace a file that is there.
    """
    from driftline.reporting.formatting import counted
    from driftline.reporting.terminal import printable
    from driftline.reporting.views.graphs import write_graph

    drawn = script.step(
        "drawn",
        write_graph,
        path,
        to=to,
        level=level,
        output=output,
        table=table,
        metric=metric,
        step=step,
        rank=rank,
        force=force,
    )
    script.end(drawn)
    size = f"{counted(drawn.nodes, 'node')}, {counted(drawn.edges, 'edge')}"
    print(printable(f"driftline: {size} in {drawn.place}"), file=sys.stderr)
    for place, what in zip(drawn.data_files, ("numbers", "statuses"), strict=False):
        print(printable(f"  {what} of the comparison in {place}"), file=sys.stderr)
    for note in drawn.notes:
        print(printable(f"  note: {note}"), file=sys.stderr)
    return 0
