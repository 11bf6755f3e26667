"""The compiled graphs of a run as tables that can be shown: graphs, their nodes, their kernels."""

from __future__ import annotations

from collections.abc import Iterator

from driftline.formats.tree import DumpTable
from driftline.runs.graphs import Graph, read_graphs

_GRAPHS = ("graph", "compiled", "kind", "what ran", "nodes", "kernels", "results")
_NODES = ("node", "operator", "line", "phase")
_KERNELS = ("kernel", "keeps", "is the value of", "nodes on the way")
_SHOWN = 8


def graph_tables(text: str, where: str) -> Iterator[DumpTable]:
    """What `driftline show` prints of a run's graphs.

    Args:
        text: The list of graphs.
        where: Which process, to be put behind titles; may be empty.
    """
    graphs = list(read_graphs(text))
    if not graphs:
        return
    yield DumpTable(f"Compiled graphs{where}", _GRAPHS, tuple(_line(graph) for graph in graphs))
    for graph in graphs:
        title = f"of graph {graph.number} ({graph.kind}, {graph.compile_id}){where}"
        yield DumpTable(
            f"Nodes {title}",
            _NODES,
            tuple((node.site, node.target, node.line, node.phase) for node in graph.nodes),
        )
        if graph.kernels:
            yield DumpTable(f"Kernels {title}", _KERNELS, tuple(_kernels(graph)))


def _line(graph: Graph) -> tuple[str, ...]:
    ran = "inductor's kernels" if graph.engine == "inductor" else "nodes, one by one"
    if graph.engine == "fx" and graph.backend:
        ran += f" (not {graph.backend})"
    kept = sum(len(kernel.kept) for kernel in graph.kernels)
    counts = (len(graph.nodes), len(graph.kernels), kept or len(graph.nodes))
    return (str(graph.number), graph.compile_id, graph.kind, ran, *map(str, counts))


def _kernels(graph: Graph) -> Iterator[tuple[str, ...]]:
    for kernel in graph.kernels:
        for kept in kernel.kept:
            way = ", ".join(kept.nodes[-_SHOWN:])
            more = len(kept.nodes) - _SHOWN
            node = kept.node or "no node: inside a fusion"
            yield kernel.name, kept.buffer, node, f"{way} and {more} more" if more > 0 else way
