"""Tables that a run holds besides tensors: operators, kernels, times and compiled graphs.

Text in, rows out; nothing is printed. The sheets have the grammar of ATB's own files and are read
by the same readers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from driftline.formats.dump_run import DumpTable, TreeRun
from driftline.graphs.sources.graph_files import Graph, read_graphs
from driftline.runs.run import Run
from driftline.runs.sidecars.calls import GRAPHS
from driftline.runs.sidecars.operator_sheets import READ_OPERATIONS, READ_TIMES, kind_of_sheet

if TYPE_CHECKING:
    from driftline.formats.ascend.atb.tables import OperationLine


def tables_of(run: Run) -> Sequence[DumpTable]:
    """What a run or dump holds beside its tensors."""
    # Dumps of other programs bring tables of their own.
    if isinstance(run, TreeRun):
        return run.tables()
    tables: list[DumpTable] = []
    for about in run.processes():
        rank, process = int(about.get("rank", 0)), int(about.get("process", 0))
        for name in run.sheets(rank, process):
            if name == GRAPHS:
                where = f" (rank {rank}, process {process})" if rank or process else ""
                tables += graph_tables(run.sheet(name, rank, process), where)
                continue
            kind = kind_of_sheet(name)
            # Times are read from their text form; the csv form is for other programs.
            if kind is None or (kind == "operation_statistic" and name.endswith(".csv")):
                continue
            text = run.sheet(name, rank, process)
            step = name.rpartition("_")[2].partition(".")[0]
            where = f"step {step}, rank {rank}" if rank or process else f"step {step}"
            if kind == "operation_statistic":
                tables.append(READ_TIMES.load()(text, f"Times of operators in µs ({where})"))
            elif kind == "kernel_tensors":
                tables.append(_run_kernels(READ_OPERATIONS.load()(text, int(step)), where))
            else:
                tables.append(_operators(READ_OPERATIONS.load()(text, int(step)), where))
    return tables


def _run_kernels(lines: Sequence[OperationLine], where: str) -> DumpTable:
    # A kernel runs thousands of times; one line per kernel and place.
    alike: dict[tuple[str, str, str, str], list[float]] = {}
    for line in lines:
        operator, site, device = (
            str(line.param.get(key, "")) for key in ("operator", "site", "device")
        )
        time = line.param.get("time_us")
        key = (line.name, operator, site, device)
        alike.setdefault(key, []).append(float(time) if isinstance(time, (int, float)) else 0.0)
    return DumpTable(
        f"Kernels ({where})",
        ("kernel", "operator", "site", "device", "calls", "time_us"),
        [(*key, len(times), round(sum(times), 3)) for key, times in alike.items()],
    )


def _operators(lines: Sequence[OperationLine], where: str) -> DumpTable:
    return DumpTable(
        f"Operators ({where})",
        ("operator", "inputs", "outputs", "site"),
        [
            (
                line.name,
                " ".join(
                    f"{tensor.dtype}[{'x'.join(map(str, tensor.shape))}]" for tensor in line.inputs
                ),
                " ".join(
                    f"{tensor.dtype}[{'x'.join(map(str, tensor.shape))}]" for tensor in line.outputs
                ),
                str(line.param.get("site", "")),
            )
            for line in lines
        ],
    )


# Compiled graphs: the graphs, their nodes, and the kernels that ran them.


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
            yield DumpTable(f"Kernels {title}", _KERNELS, tuple(_graph_kernels(graph)))


def _line(graph: Graph) -> tuple[str, ...]:
    ran = "inductor's kernels" if graph.engine == "inductor" else "nodes, one by one"
    if graph.engine == "fx" and graph.backend:
        ran += f" (not {graph.backend})"
    kept = sum(len(kernel.kept) for kernel in graph.kernels)
    counts = (len(graph.nodes), len(graph.kernels), kept or len(graph.nodes))
    return (str(graph.number), graph.compile_id, graph.kind, ran, *map(str, counts))


def _graph_kernels(graph: Graph) -> Iterator[tuple[str, ...]]:
    for kernel in graph.kernels:
        for kept in kernel.kept:
            way = ", ".join(kept.nodes[-_SHOWN:])
            more = len(kept.nodes) - _SHOWN
            node = kept.node or "no node: inside a fusion"
            yield kernel.name, kept.buffer, node, f"{way} and {more} more" if more > 0 else way
