"""Write the files next to the tensors in an `ait` tree: operation csv, kernel csv, times, topology.

    ait_dump/operation_io_tensors/{pid}/operation_tensors_{n}.csv
    ait_dump/kernel_io_tensors/{pid}/kernel_tensors_{n}.csv
    ait_dump/cpu_profiling/{pid}/operation_statistic_{n}.txt and .csv
    ait_dump/model/{pid}/{model}.json, ait_dump/layer/{pid}/{layer}.json, and .onnx next to them

They are made from a run's list of calls and its sheets. `dump --layout ait` and `convert --to ait`
both use this file. The caller gives the location of a tensor's file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from driftline.errors import DriftlineError
from driftline.registry import Address
from driftline.runs.run import Run
from driftline.runs.sidecars.calls import CALLS, GRAPHS, Call, CallTensor, read_calls
from driftline.runs.sidecars.operator_sheets import (
    FOLDERS,
    OPERATIONS,
    READ_TIMES,
    kind_of_sheet,
    operation_sheet,
)
from driftline.units import csv_cell

# Model names become file names, which must be valid on any file system.
_UNSAFE = re.compile(r"[^0-9A-Za-z_.+@=#-]")
_LONGEST = 200
# By address, because formats must not import dialects.
FIND_FILE = Address("driftline.dialects.ait.dump_tree:find_file")
FileOf = Callable[[Call, str, CallTensor], str]


class Wanted(NamedTuple):
    """Selection of the sheets to write.

    Attributes:
        operations: The operation csv.
        model: The model's topology.
        layers: The topology of its layers.
        onnx: An ONNX file next to each topology.
    """

    operations: bool = True
    model: bool = False
    layers: bool = False
    onnx: bool = False


def drop_empty(folder: Path) -> None:
    """Remove the folder of a process without tensors, and its parent if that is empty too.

    Next to an empty `torch_tensors`, sheets would not be read as those of an ATB dump.
    """
    for place in (folder, folder.parent):
        if place.is_dir() and not any(place.iterdir()):
            place.rmdir()


def operations_by_step(calls: Iterable[Call], file_of: FileOf) -> dict[str, str]:
    """The operation csv of every step, by the name of its file."""
    steps: dict[int, list[Call]] = {}
    for call in calls:
        steps.setdefault(call.step, []).append(call)
    sheets: dict[str, str] = {}
    for step, step_calls in sorted(steps.items()):
        files: dict[tuple[int, str, str], str] = {}
        for call in step_calls:
            for tensor in call.inputs:  # a parameter has a port of its own
                file = file_of(call, "input", tensor) or file_of(call, "param", tensor)
                files[call.number, "input", tensor.slot] = file
            for tensor in call.outputs:
                files[call.number, "output", tensor.slot] = file_of(call, "output", tensor)
        sheets[OPERATIONS.format(step)] = operation_sheet(step_calls, files)
    return sheets


def convert_sheets(run: Run, rank: int, process: int, folder: Path) -> int:
    """Write the sheets of a run's process into an ait tree; returns the number of sheets.

    Args:
        run: The run.
        rank: Rank of the process.
        process: Number of the process of that rank.
        folder: The process's folder in the tree: `ait_dump/torch_tensors/{device}_{pid}`.

    Raises:
        OSError: The disk refused the write.
    """
    names = run.sheets(rank, process)
    if not names:
        return 0
    calls = list(read_calls(run.sheet(CALLS, rank, process)))
    sheets = {
        name: run.sheet(name, rank, process)
        for name in names
        if name not in (CALLS, GRAPHS) and kind_of_sheet(name) != "operation_tensors"
    }
    # Written again from the calls, because the old sheet has the paths of the run.
    operations = any(kind_of_sheet(name) == "operation_tensors" for name in names)
    find: Any = FIND_FILE.load()
    write_sheets(
        folder.parent.parent,
        # The folder of the tree is `{device}_{pid}`; side files are stored by process id.
        folder.name.partition("_")[2],
        calls,
        sheets,
        Wanted(operations, model=bool(calls), layers=bool(calls), onnx=bool(calls)),
        lambda call, port, tensor: find(folder, call, port, tensor),
    )
    drop_empty(folder)
    return len(names)


def write_sheets(
    root: Path,
    pid: str,
    calls: Sequence[Call],
    sheets: Mapping[str, str],
    wanted: Wanted,
    file_of: FileOf,
) -> list[str]:
    """Write the sheets of one process; returns sentences about what could not be written.

    Args:
        root: The `ait_dump` folder.
        pid: Name of the process's folder in each kind of folder.
        calls: The calls of the process.
        sheets: Existing sheets, by name.
        wanted: What to make from the calls.
        file_of: Returns the file of a call's tensor; empty if its values were not kept.

    Raises:
        OSError: The disk refused the write.
    """
    texts = dict(sheets)
    if wanted.operations:
        texts |= operations_by_step(calls, file_of)
    for name, text in texts.items():
        kind = kind_of_sheet(name)
        # Only runs have times by site; an ait tree has times as text, and in later versions as a
        # table.
        if kind is None or (kind == "operation_statistic" and not name.endswith(".txt")):
            continue
        place = root / FOLDERS[kind] / pid / name
        _write(place, text.encode("utf-8", "replace"))
        if kind == "operation_statistic":
            _write(place.with_suffix(".csv"), statistic_table(text).encode("utf-8", "replace"))
    if wanted.model or wanted.layers:
        return _write_topology(root, pid, calls, wanted)
    return []


def statistic_table(text: str) -> str:
    """Times by operator, as the table that later versions of ait write."""
    table = READ_TIMES.load()(text, "")
    lines = [",".join(("opname", *table.headings[1:]))]
    lines += [",".join(map(csv_cell, row)) for row in table.lines]
    return "\n".join(lines) + "\n"


def _write_topology(root: Path, pid: str, calls: Sequence[Call], wanted: Wanted) -> list[str]:
    # Imported here, because most conversions write no topology.
    from driftline.graphs.model import at_level
    from driftline.graphs.sources.calls import calls_graph
    from driftline.graphs.writers.atb import layer_graph, layer_json, layers_of, model_json
    from driftline.graphs.writers.onnx import onnx_bytes

    graph = calls_graph(calls)
    if graph is None:
        return ["no call was listed, so there is no topology"]
    made = [(layer_graph(graph, layer), layer_json(layer), "layer") for layer in layers_of(graph)]
    if wanted.model:
        made.append((graph, model_json(graph), "model"))
    trouble: list[str] = []
    for part, text, folder in made:
        place = root / folder / pid / f"{_safe(part.name)}.json"
        _write(place, text.encode("utf-8", "replace"))
        if wanted.onnx:
            try:
                _write(place.with_suffix(".onnx"), onnx_bytes(at_level(part)))
            # A graph that cannot be drawn must not prevent the rest of the dump.
            except DriftlineError as problem:
                trouble.append(f"{part.name} is not drawn: {problem}")
    return trouble


def _safe(name: str) -> str:
    plain = _UNSAFE.sub("_", name)[:_LONGEST]
    return "_" if plain in ("", ".", "..") else plain


def _write(place: Path, content: bytes) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(content)
