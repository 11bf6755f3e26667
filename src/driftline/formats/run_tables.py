"""The sheets of a run as tables that can be shown: operators, kernels, times.

Read by the readers of ATB's own files, whose grammar they are in. Text → rows; prints nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from driftline.formats.atb_sheets import OperationLine, read_operations, read_profile
from driftline.formats.tree import DumpTable, TreeRun
from driftline.runs.calls import GRAPHS
from driftline.runs.run import Run
from driftline.runs.sheets import kind_of_sheet


def tables_of(run: Run) -> Sequence[DumpTable]:
    """What a run or dump holds beside its tensors."""
    if isinstance(run, TreeRun):
        return run.tables()
    found: list[DumpTable] = []
    for about in run.processes():
        rank, process = int(about.get("rank", 0)), int(about.get("process", 0))
        for name in run.sheets(rank, process):
            if name == GRAPHS:
                from driftline.formats.graph_tables import graph_tables

                where = f" (rank {rank}, process {process})" if rank or process else ""
                found += graph_tables(run.sheet(name, rank, process), where)
                continue
            kind = kind_of_sheet(name)
            if kind is None or (kind == "operation_statistic" and name.endswith(".csv")):
                continue
            text = run.sheet(name, rank, process)
            step = name.rpartition("_")[2].partition(".")[0]
            where = f"step {step}, rank {rank}" if rank or process else f"step {step}"
            if kind == "operation_statistic":
                found.append(read_profile(text, f"Times of operators in µs ({where})"))
            elif kind == "kernel_tensors":
                found.append(_kernels(read_operations(text, int(step)), where))
            else:
                found.append(_operators(read_operations(text, int(step)), where))
    return found


def _kernels(lines: Sequence[OperationLine], where: str) -> DumpTable:
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
                " ".join(f"{one.dtype}[{'x'.join(map(str, one.shape))}]" for one in line.inputs),
                " ".join(f"{one.dtype}[{'x'.join(map(str, one.shape))}]" for one in line.outputs),
                str(line.param.get("site", "")),
            )
            for line in lines
        ],
    )
