"""Open the graph of a path, and write graphs to files: `driftline topology` and its API.

A path is a topology file of ATB, a run, or any dump that opens as a run. The graph is made from the
best available source: the list of calls, otherwise the dump's edges, otherwise equal bytes.
"""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from driftline.errors import AlreadyThere, BadFile, BadInput, BadRun
from driftline.graphs.model import Graph, TensorInfo, at_level, require_level
from driftline.graphs.writers.atb import LARGEST, Shapes, atb_graph
from driftline.graphs.writers.onnx import onnx_bytes
from driftline.runs.files.local_files import read_inside, reason_of
from driftline.runs.layout import folder_name, parse_folder
from driftline.runs.sidecars.calls import CALLS, LARGEST_CALLS, Call, read_calls
from driftline.runs.sidecars.operator_sheets import FOLDERS, READ_OPERATIONS, kind_of_sheet
from driftline.runs.stores.addresses import url_of

if TYPE_CHECKING:
    from _typeshed import StrPath

    from driftline.formats.ascend.atb.tables import Described

_LARGEST_SHEET = 256 << 20


def topology_to_onnx(
    path: StrPath,
    model_level: int | None = None,
    *,
    output: StrPath | None = None,
    step: int | None = None,
    rank: int = 0,
    force: bool = False,
) -> Path:
    """Write the structure of a model as an ONNX file for a viewer.

    Args:
        path: A run, a dump of another program, or a topology file of ATB (`*.json`).
        model_level: 1 shows the outermost nodes, 0 the whole model as one node, and None or -1 the
            innermost nodes.
        output: Path of the file. Default: next to the source, with its name and `.onnx`.
        step: Step of a run; None for its first step.
        rank: Rank of a run.
        force: Replace an existing file.

    Returns:
        The file that was written.

    Raises:
        BadFile: The source is damaged.
        BadInput: The level is not a depth, or there is no such step.
        AlreadyThere: The output exists.
    """
    if model_level == -1:  # ait's function of this name uses -1 for the innermost nodes
        model_level = None
    require_level(model_level)
    place = output_for(Path(path), output, ".onnx", force=force)
    graph = read_graph(path, step=step, rank=rank)
    from driftline import __version__

    write_whole(place, onnx_bytes(at_level(graph, model_level), __version__))
    return place


def atb_json_to_onnx(path: StrPath, model_level: int | None = None) -> Path:
    """`topology_to_onnx` under the name that ait uses; like ait, it replaces an earlier file."""
    return topology_to_onnx(path, model_level, force=True)


def read_graph(path: StrPath, *, step: int | None = None, rank: int = 0, process: int = 0) -> Graph:
    """Read the graph of a path.

    Raises:
        BadFile: The file is damaged or not a topology.
        BadRun: The path holds nothing from which a graph can be made.
    """
    place = Path(path)
    if place.is_file():
        if place.suffix != ".json":
            raise BadFile(
                f"{place} is no topology",
                hint="give a run, the folder of a dump, or a topology file of ATB (*.json)",
            )
        return _of_file(place)
    from driftline.formats.registry import open_run

    # A list of calls is exact, so it is preferred to edges and bytes.
    if (place.is_dir() or url_of(path)) and (calls := _calls_of(place, rank, process)):
        from driftline.graphs.sources.calls import calls_graph

        graph = calls_graph(calls, step)
        if graph is not None:
            return graph
    run = open_run(place)
    from driftline.graphs.sources.run import run_graph

    graph = run_graph(run, rank, process, step)
    if graph is None:
        # The error names the existing steps and ranks: a wrong one is the usual reason for an empty
        # graph.
        steps = sorted({r.key.step for r in run.records if r.key.rank == rank})
        if step is not None and steps and step not in steps:
            raise BadInput(
                f"{place} has nothing of step {step}",
                hint=f"it has step{'s' if len(steps) > 1 else ''} "
                + ", ".join(map(str, steps[:12])),
            )
        ranks = sorted({record.key.rank for record in run.records})
        if ranks and rank not in ranks:
            raise BadInput(
                f"{place} has nothing of rank {rank}",
                hint=f"it has rank{'s' if len(ranks) > 1 else ''} "
                + ", ".join(map(str, ranks[:12])),
            )
        raise BadRun(
            f"{place} does not say what its model looks like: it has no calls, edges or tensors",
            hint="dump it with --type model onnx, or with --type tensor",
        )
    return graph


def _of_file(place: Path) -> Graph:
    try:
        text = read_inside(place.resolve().parent, place, LARGEST).decode("utf-8", "replace")
    except OSError as trouble:
        raise BadFile(f"{place} cannot be read: {reason_of(trouble)}") from None
    # This file looks like ATB's but belongs to a run, whose graph needs the tensors next to the
    # file.
    if place.name == "topology.json" and parse_folder(place.resolve().parent.name) is not None:
        raise BadFile(
            f"{place} is a part of a run", hint=f"give the run's folder: {place.parent.parent}"
        )
    return atb_graph(text, str(place), _shapes_of_dump(place.resolve()))


def _calls_of(place: Path, rank: int, process: int) -> list[Call]:
    if url_of(place) is None:
        # Read from the file itself, because the tensors next to it may be missing.
        with suppress(OSError):
            folder = place / folder_name(rank, process)
            content = read_inside(place.resolve(), folder / CALLS, LARGEST_CALLS)
            return list(read_calls(content.decode("utf-8", "replace")))
    from driftline.formats.registry import open_run

    run = open_run(place)
    # A dump of `ait llm` has its list elsewhere.
    if CALLS not in run.sheets(rank, process):
        return []
    return list(read_calls(run.sheet(CALLS, rank, process)))


def _shapes_of_dump(place: Path) -> Shapes:
    """Shapes from the operation csv of the same process, if the file is part of a dump."""
    # ATB stores topologies and operation tables in parallel folders of one dump.
    if place.parent.parent.name not in ("model", "layer"):
        return {}
    root = place.parent.parent.parent
    folder = root / FOLDERS["operation_tensors"] / place.parent.name
    shapes: dict[str, tuple[tuple[TensorInfo, ...], tuple[TensorInfo, ...]]] = {}
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return {}
    # Limited, because the folder may contain unrelated files.
    for name in names[:1000]:
        if kind_of_sheet(name) != "operation_tensors":
            continue
        try:
            text = read_inside(root, folder / name, _LARGEST_SHEET).decode("utf-8", "replace")
        except OSError:
            continue
        for line in READ_OPERATIONS.load()(text, 0):
            shapes.setdefault(line.name, (_infos(line.inputs), _infos(line.outputs)))
    return shapes


def _infos(described: tuple[Described, ...]) -> tuple[TensorInfo, ...]:
    return tuple(TensorInfo(tensor.dtype, tensor.shape) for tensor in described)


def output_for(source: Path, output: StrPath | None, suffix: str, *, force: bool) -> Path:
    """The path of the output, checked before the work is done.

    Raises:
        AlreadyThere: The path exists.
    """
    if output is None:
        real = source.resolve() if source.name in ("", ".", "..") else source
        name = real.name.removesuffix(".json") if real.is_file() else real.name
        place = real.parent / f"{name}{suffix}"
        if url_of(source) is not None:  # nothing is written next to a remote source
            place = Path(f"{name}{suffix}")
    else:
        place = Path(output)
    if place.is_dir():
        raise AlreadyThere(f"{place} is a folder", hint="give the name of a file with -o")
    if place.exists() and not force:
        raise AlreadyThere(f"{place} exists", hint="give another -o, or --force to replace it")
    return place


def write_whole(place: Path, content: bytes) -> None:
    """Write a file so that it appears complete or not at all.

    Raises:
        BadInput: The file cannot be written.
    """
    # A temporary file in the same folder: the rename is atomic and never crosses file systems.
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            prefix=f".{place.name}.", dir=place.parent, delete=False
        ) as stream:
            draft = Path(stream.name)
        try:
            draft.write_bytes(content)
            draft.chmod(0o644)
            draft.replace(place)
        except OSError:
            draft.unlink()
            raise
    except OSError as trouble:
        raise BadInput(
            f"{place} cannot be written: {reason_of(trouble)}", hint="give another -o"
        ) from None
