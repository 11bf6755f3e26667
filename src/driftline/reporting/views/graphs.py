"""Writes the graph of a model as a file for a graph viewer, with the results of a comparison on it.

Decides which file is written and which row of a table belongs to which node; the formats themselves
are in `driftline.graphs.writers`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from driftline.comparison.table.files import open_table
from driftline.comparison.table.row import Row
from driftline.comparison.table.table import Table
from driftline.errors import BadInput, did_you_mean
from driftline.graphs.model import Graph, LevelGraph, at_level, require_level
from driftline.graphs.open import output_for, read_graph, write_whole
from driftline.graphs.overlay import Finding
from driftline.reporting.formatting import number

if TYPE_CHECKING:
    from _typeshed import StrPath

SUFFIX = {"onnx": ".onnx", "model-explorer": ".graph.json"}
SEVERITY = "value_over_limit"
NODE_DATA = (".node_data.json", ".status.node_data.json")
"""Endings of the additional files for Model Explorer: numbers, and statuses."""


class Overlay(NamedTuple):
    """A comparison whose status and numbers are shown on the nodes.

    Attributes:
        table: The table, or its folder.
        metric: The number to show. Default: the deciding metric, and value over limit.
    """

    table: Table | StrPath
    metric: str = ""


class Drawn(NamedTuple):
    """What was written.

    Attributes:
        place: The file of the graph.
        data_files: The files with the comparison's numbers and statuses, if any.
        nodes: Number of nodes.
        edges: Number of edges.
        notes: Sentences about what the graph does not show.
    """

    place: Path
    data_files: tuple[Path, ...]
    nodes: int
    edges: int
    notes: tuple[str, ...] = ()


def write_graph(
    path: StrPath,
    *,
    to: Literal["onnx", "model-explorer"] = "onnx",
    level: int | None = None,
    output: StrPath | None = None,
    overlay: Overlay | None = None,
    step: int | None = None,
    rank: int = 0,
    force: bool = False,
) -> Drawn:
    """Write the structure of a model as a file for a graph viewer.

    Args:
        path: A run, a dump of another program, or a topology file of ATB (`*.json`).
        to: onnx for Netron and others; model-explorer for Google's Model Explorer.
        level: Depth: 1 shows the outermost nodes, 0 the whole model as one. Default: the innermost.
        output: The file. Default: next to the source, with its name.
        overlay: A comparison to show on the nodes.
        step: Step of a run. Default: the first one.
        rank: Rank of a run.
        force: Replace existing files.

    Raises:
        DriftlineError: The source is invalid, or an output exists.
    """
    require_level(level)
    place = output_for(Path(path), output, SUFFIX[to], force=force)
    data_files = (
        _data_files(Path(path), place, force)
        if overlay is not None and to == "model-explorer"
        else ()
    )
    compared = None if overlay is None else _opened(overlay.table)
    metric = "" if overlay is None else overlay.metric
    findings = findings_of(compared, metric, step, rank) if compared is not None else None
    graph = read_graph(path, step=step, rank=rank)
    seen = at_level(graph, level)
    if to == "onnx":
        from driftline import __version__
        from driftline.graphs.writers.onnx import onnx_bytes

        about = {} if compared is None else _about(compared, metric)
        write_whole(place, onnx_bytes(seen, __version__, findings, about))
    else:
        from driftline.graphs.writers.model_explorer import model_explorer, node_data, status_data

        write_whole(place, model_explorer(seen, findings).encode("utf-8", "replace"))
        if findings is not None:
            numbers = node_data(seen, findings, metric or SEVERITY)
            for data_file, text in zip(
                data_files, (numbers, status_data(seen, findings)), strict=True
            ):
                write_whole(data_file, text.encode("utf-8", "replace"))
    made = {name for node in seen.nodes for name in node.outputs}
    edges = sum(name in made for node in seen.nodes for name in node.inputs)
    notes = _notes(graph, seen, level, findings)
    if not edges and len(seen.nodes) > 1:
        notes.append("no node takes what another one gives, as far as the source says")
    return Drawn(place, data_files, len(seen.nodes), edges, tuple(notes))


def _opened(table: Table | StrPath) -> Table:
    return table if isinstance(table, Table) else open_table(table)


def _data_files(source: Path, place: Path, force: bool) -> tuple[Path, ...]:
    """The additional files for Model Explorer; refuses existing ones before anything is written."""
    stem = place.name.removesuffix(".json")
    data_files = tuple(place.with_name(f"{stem}{end}") for end in NODE_DATA)
    # All outputs are checked first, so that none is written if one is in the way.
    for data_file in data_files:
        output_for(source, data_file, "", force=force)
    return data_files


def _notes(
    graph: Graph, seen: LevelGraph, level: int | None, findings: Mapping[str, Finding] | None
) -> list[str]:
    """Sentences about what the graph does not show."""
    depth = graph.depth()
    notes = list(graph.notes)
    if level is not None and level > depth:
        notes.append(f"the graph is {depth} level{'s' if depth != 1 else ''} deep; all are shown")
    if findings is not None:
        sites = {node.site for node in seen.nodes}
        notes += _unplaced(findings, sites | {site.rpartition("/")[0] for site in sites})
    return notes


def findings_of(
    table: Table, metric: str = "", step: int | None = None, rank: int = 0
) -> Mapping[str, Finding]:
    """The worst row of each site, and, as `site#visit`, of each of its calls.

    Only rows of the drawn step and rank are used, if the comparison has any.

    Raises:
        BadInput: The comparison has no such metric.
    """
    metrics = [column.name for column in table.columns]
    if metric and metric not in metrics:
        raise BadInput(
            f"the comparison has no metric '{metric}'", hint=did_you_mean(metric, metrics)
        )
    worst: dict[str, Finding] = {}
    rows = table.rows
    first = min((row.key.step for row in rows), default=0) if step is None else step
    drawn = [row for row in rows if row.key.step == first and row.key.rank == rank]
    # A comparison of another step is still better than an empty picture.
    for row in drawn or rows:
        finding = _finding(row, metric)
        # Graphs may draw a module once, or once for each call.
        for name in (row.site, f"{row.site}#{row.key.visit}"):
            before = worst.get(name)
            if before is None or finding.badness < before.badness:
                worst[name] = finding
    return worst


def _finding(row: Row, metric: str) -> Finding:
    name = metric or row.decided_by
    figures: dict[str, float] = {}
    if name in row.metrics:
        figures[name] = float(row.metrics[name])
    if row.limit is not None and name == row.decided_by:
        figures["limit"] = float(row.limit)
    if row.compared:
        figures[SEVERITY] = float(row.severity)
    # Colours follow value over limit, which can be compared between metrics.
    value = figures.get(metric, math.nan) if metric else float(row.severity)
    return Finding(row.status, value, _words(row, name, metric), figures)


def _words(row: Row, name: str, metric: str) -> str:
    if name and name in row.metrics:
        limit = f", limit {number(row.limit)}" if row.limit is not None and not metric else ""
        return f"{row.port} {row.key.slot}: {name} {number(row.metrics[name])}{limit}"
    return row.reason or f"{row.port} {row.key.slot}"


def _about(table: Table, metric: str) -> dict[str, str]:
    """Attributes of the file about the whole comparison."""
    return {
        "driftline.verdict": table.verdict,
        "driftline.finding": table.finding,
        "driftline.metric": metric or "what decided each tensor",
        "driftline.reference": table.reference.path,
        "driftline.candidate": table.candidate.path,
    }


def _unplaced(findings: Mapping[str, Finding], sites: set[str]) -> list[str]:
    lost = [site for site in findings if site not in sites]
    # A few unplaced sites are normal at a coarse level; none at all is a mistake.
    if findings and len(lost) == len(findings):
        return [f"no site of the comparison is a node of the graph, {lost[0]} for one"]
    return []
