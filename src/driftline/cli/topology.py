"""`driftline topology`: the structure of a model as a file for a graph viewer."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from driftline.cli.parsing import Option
from driftline.errors import BadInput, did_you_mean

if TYPE_CHECKING:
    from driftline.comparison.row import Row
    from driftline.topology.model_explorer import Finding

_SUFFIX = {"onnx": ".onnx", "model-explorer": ".graph.json"}


def topology(
    path: Path,
    /,
    *,
    to: Literal["onnx", "model-explorer"] = "onnx",
    level: Annotated[int | None, Option(metavar="N")] = None,
    output: Annotated[Path | None, Option(names=("--output", "-o"), metavar="FILE")] = None,
    table: Annotated[Path | None, Option(metavar="DIR")] = None,
    metric: Annotated[str, Option(metavar="NAME")] = "",
    step: Annotated[int | None, Option(metavar="N")] = None,
    rank: Annotated[int, Option(metavar="N")] = 0,
    force: bool = False,
) -> int:
    """Write the structure of a model as a file for a graph viewer.

        driftline topology run --to onnx
        driftline topology ait_dump/model/4242/ToyModel.json --level 1
        driftline topology run --to model-explorer --table cmp

    A run shows its modules and, where they were dumped with --type op or onnx, the operators in
    them. Nothing of the file can be executed: it holds shapes and parameters, no weights.

    Args:
        path: A run, a dump of another program, or a topology file of ATB (*.json).
        to: onnx for Netron and others; model-explorer for Google's Model Explorer.
        level: How deep to look: 0 is the whole model as one node, 1 its outermost parts. Default:
            the innermost ones.
        output: The file. Default: beside the source, with its name.
        table: For model-explorer: a comparison's folder; colours the nodes by it, and writes the
            numbers beside the graph, as FILE.node_data.json.
        metric: Which number of the comparison. Default: how far each tensor is beyond its limit.
        step: Which step of a run. Default: its first one.
        rank: Which rank of a run.
        force: Replace a file that is there.
    """
    from driftline.reports.wording import counted
    from driftline.topology.door import output_for, read_graph, write_whole
    from driftline.topology.graph import require_level, seen_at

    require_level(level)
    if to == "onnx" and (table is not None or metric):
        raise BadInput(
            "an ONNX file has no place for the numbers of a comparison",
            hint="--to model-explorer colours nodes by them",
        )
    if metric and table is None:
        raise BadInput("--metric names a number of a comparison", hint="give one with --table DIR")
    place = output_for(path, output, _SUFFIX[to], force=force)
    beside = place.with_name(f"{place.name.removesuffix('.json')}.node_data.json")
    if table is not None:
        output_for(path, beside, "", force=force)
    findings = _findings(table, metric, step, rank) if table is not None else None
    graph = read_graph(path, step=step, rank=rank)
    seen = seen_at(graph, level)
    if to == "onnx":
        from driftline import __version__
        from driftline.topology.onnx_file import onnx_bytes

        write_whole(place, onnx_bytes(seen, __version__))
    else:
        from driftline.topology.model_explorer import model_explorer, node_data

        write_whole(place, model_explorer(seen, findings).encode("utf-8", "replace"))
        if findings is not None:
            write_whole(beside, node_data(seen, findings).encode("utf-8", "replace"))
    depth = graph.depth()
    made = {name for node in seen.nodes for name in node.outputs}
    edges = sum(name in made for node in seen.nodes for name in node.inputs)
    notes = list(graph.notes)
    if level is not None and level > depth:
        notes.append(f"the graph is {depth} level{'s' if depth != 1 else ''} deep; all are shown")
    if findings is not None:
        sites = {node.site for node in seen.nodes}
        notes += _unplaced(findings, sites | {site.rpartition("/")[0] for site in sites})
    if not edges and len(seen.nodes) > 1:
        notes.append("no node takes what another one gives, as far as the source says")
    size = f"{counted(len(seen.nodes), 'node')}, {counted(edges, 'edge')}"
    print(f"driftline: {size} in {place}", file=sys.stderr)
    if findings is not None:
        print(f"  numbers of the comparison in {beside}", file=sys.stderr)
    for note in notes:
        print(f"  note: {note}", file=sys.stderr)
    return 0


def _findings(folder: Path, metric: str, step: int | None, rank: int) -> Mapping[str, Finding]:
    """The worst row of each site, and as `site#visit` of each of its calls.

    Of the step and rank that are drawn, where the comparison has something of them.
    """
    from driftline.comparison.storage import open_table
    from driftline.topology.model_explorer import Finding

    table = open_table(folder)
    known = [column.name for column in table.columns]
    if metric and metric not in known:
        raise BadInput(f"the comparison has no metric '{metric}'", hint=did_you_mean(metric, known))
    worst: dict[str, Finding] = {}
    order = ("fail", "incomparable", "missing", "extra", "pass", "unjudged")
    rows = table.rows
    first = min((row.key.step for row in rows), default=0) if step is None else step
    drawn = [row for row in rows if row.key.step == first and row.key.rank == rank]
    for row in drawn or rows:
        value = float(row.metrics.get(metric, float("nan"))) if metric else float(row.severity)
        found = Finding(row.status, value, _words(row, metric))
        for name in (row.site, f"{row.site}#{row.key.visit}"):
            before = worst.get(name)
            if before is None or _rank(found, order) < _rank(before, order):
                worst[name] = found
    return worst


def _rank(found: Finding, order: tuple[str, ...]) -> tuple[int, float]:
    at = order.index(found.status) if found.status in order else len(order)
    return at, -found.value if found.value == found.value else float("inf")


def _words(row: Row, metric: str) -> str:
    from driftline.reports.wording import number

    name = metric or row.decided_by
    if name and name in row.metrics:
        limit = f", limit {number(row.limit)}" if row.limit is not None and not metric else ""
        return f"{row.port} {row.key.slot}: {name} {number(row.metrics[name])}{limit}"
    return row.reason or f"{row.port} {row.key.slot}"


def _unplaced(findings: Mapping[str, Finding], sites: set[str]) -> list[str]:
    lost = [site for site in findings if site not in sites]
    if findings and len(lost) == len(findings):
        return [f"no site of the comparison is a node of the graph, {lost[0]} for one"]
    return []
