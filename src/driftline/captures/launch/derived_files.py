"""Files derived after a program has ended: operation csv files and ONNX graphs from its calls.

Tensors are never changed. A list of calls that ends in the middle of a line, because its process
was killed, is read up to that line.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from driftline.captures.launch.jobs import CapturePlan
from driftline.errors import DriftlineError
from driftline.runs.files.local_files import read_inside, reason_of
from driftline.runs.layout import parse_folder
from driftline.runs.records import TensorKey, usual_moment
from driftline.runs.sidecars.calls import CALLS, LARGEST_CALLS, Call, CallTensor, read_calls
from driftline.runs.sidecars.operator_sheets import ONNX, kind_of_sheet

_IN_WORDS = {
    "operation_tensors": "operation csv",
    "kernel_tensors": "kernel csv",
    "operation_statistic": "times of operators",
}


@dataclass(frozen=True, slots=True)
class Sheets:
    """Side files of a dump.

    Attributes:
        words: Descriptions of the files that exist.
        trouble: Sentences about files that could not be made.
    """

    words: tuple[str, ...] = ()
    trouble: tuple[str, ...] = ()


def finish_sheets(plan: CapturePlan) -> Sheets:
    """Write the files derived from the lists of calls, and describe all side files."""
    # Lists of calls exist only if one of these types was requested.
    if not (plan.wants_calls or plan.wants_profile):
        return Sheets()
    output = Path(plan.output)
    trouble: list[str] = []
    try:
        if plan.layout == "ait":
            trouble += _finish_tree(plan, output / "ait_dump")
        else:
            for folder in sorted(output.glob("rank*")):
                if parse_folder(folder.name) is not None:
                    trouble += _finish_part(plan, output, folder)
    # The tensors are on disk already, so on a full disk only derived files are lost.
    except OSError as problem:
        trouble.append(f"the sheets are incomplete: {reason_of(problem)}")
    # Only our own folders are searched; the probe of another library may have written next to them.
    own = [output / "ait_dump"] if plan.layout == "ait" else sorted(output.glob("rank*"))
    return Sheets(tuple(_words(own)), tuple(dict.fromkeys(trouble)))


def _words(folders: Sequence[Path]) -> list[str]:
    steps_by_kind: dict[str, set[str]] = {kind: set() for kind in _IN_WORDS}
    graphs = 0
    for path in (path for folder in folders for path in folder.rglob("*")):
        kind = kind_of_sheet(path.name)
        if kind is not None and path.suffix == (
            ".txt" if kind == "operation_statistic" else ".csv"
        ):
            steps_by_kind[kind].add(path.stem)  # a step of several processes counts once
        graphs += path.suffix == ".onnx"
    words = [
        f"{_IN_WORDS[kind]} of {len(steps)} step{'s' if len(steps) != 1 else ''}"
        for kind, steps in steps_by_kind.items()
        if steps
    ]
    return words + ([f"{graphs} ONNX graph{'s' if graphs != 1 else ''}"] if graphs else [])


def _calls(root: Path, path: Path) -> list[Call]:
    try:
        # The size is limited, and links that lead out of the dump are refused.
        text = read_inside(root.resolve(), path, LARGEST_CALLS).decode("utf-8", "replace")
    except OSError:
        return []
    return list(read_calls(text))


# --- Files in a run.


def _finish_part(plan: CapturePlan, output: Path, folder: Path) -> list[str]:
    calls = _calls(output, folder / CALLS)
    if not calls:
        return []
    trouble: list[str] = []
    if "op" in plan.types:
        from driftline.formats.ait.side_files import operations_by_step

        kept = _kept(output, folder)

        def file_of(call: Call, port: str, tensor: CallTensor) -> str:
            return kept.get((call.site, call.step, call.visit, call.phase, port, tensor.slot), "")

        for name, text in operations_by_step(calls, file_of).items():
            (folder / name).write_text(text, encoding="utf-8")
    if "onnx" in plan.types:
        trouble += _draw(plan, folder, calls)
    return trouble


def _kept(output: Path, folder: Path) -> dict[tuple[str, int, int, str, str, str], str]:
    """The keys of the stored tensors of one process, as text, by the fields that a csv knows."""
    from driftline.runs.reader import open_run

    place = parse_folder(folder.name)
    try:
        run = open_run(output)
        records = [r for r in run.records if (r.key.rank, r.key.process) == place]
    except DriftlineError:
        return {}
    names_by_place: dict[tuple[str, int, int, str, str, str], str] = {}
    for record in records:
        key: TensorKey = record.key
        # A csv names stored tensors only, and each argument once.
        if record.kept == "describe" or key.moment != usual_moment(key.port):
            continue
        names_by_place[key.site, key.step, key.visit, key.phase, key.port, key.slot] = str(key)
    return names_by_place


def _draw(plan: CapturePlan, folder: Path, calls: list[Call]) -> list[str]:
    from driftline.graphs.model import at_level
    from driftline.graphs.sources.calls import calls_graph
    from driftline.graphs.writers.atb import layer_graph, layers_of
    from driftline.graphs.writers.onnx import onnx_bytes

    graph = calls_graph(calls)
    if graph is None:
        return ["there is nothing to draw: no call of a forward pass is listed"]
    try:
        if "model" in plan.types:
            (folder / ONNX).write_bytes(onnx_bytes(at_level(graph)))
        if "layer" in plan.types:
            for number, layer in enumerate(layers_of(graph)):
                content = onnx_bytes(at_level(layer_graph(graph, layer)))
                (folder / f"layer_{number}.onnx").write_bytes(content)
    except DriftlineError as problem:
        return [f"the model is not drawn: {problem}"]
    return []


# --- Files in ait's tree.


def _finish_tree(plan: CapturePlan, root: Path) -> list[str]:
    from driftline.dialects.ait.dump_tree import SHEET, TENSORS, find_file
    from driftline.formats.ait.side_files import Wanted, drop_empty, write_sheets

    wanted = Wanted(
        "op" in plan.types,
        "model" in plan.types,
        "model" in plan.types or "layer" in plan.types,
        "onnx" in plan.types,
    )
    trouble: list[str] = []
    for folder in sorted((root / TENSORS.name).glob("*")):
        if not folder.is_dir():
            continue
        calls = _calls(root, folder / f"{SHEET}{CALLS}")
        side_files = [
            path for path in folder.glob(f"{SHEET}*") if path.name.endswith((".csv", ".txt"))
        ]
        sheets = {
            path.name.removeprefix(SHEET): path.read_text(encoding="utf-8", errors="replace")
            for path in side_files
        }

        def file_of(call: Call, port: str, tensor: CallTensor, folder: Path = folder) -> str:
            return find_file(folder, call, port, tensor)

        pid = folder.name.partition("_")[2] or folder.name
        if calls or sheets:
            trouble += write_sheets(root, pid, calls, sheets, wanted, file_of)
        # Next to tensors of operators the list is kept, because `opcheck` reads their parameters
        # from it.
        kept = wanted.operations and plan.wants_tensors
        for path in (*side_files, *(() if kept else (folder / f"{SHEET}{CALLS}",))):
            path.unlink(missing_ok=True)
        # Without tensors, the module tree is kept only if type model or layer was requested.
        if not plan.wants_tensors and not wanted.layers:
            (folder / "model_tree.json").unlink(missing_ok=True)
        drop_empty(folder)
    return trouble


# --- Graphs of the ATB probe.


def draw_atb(roots: Iterable[Path]) -> Sheets:
    """Write an ONNX file next to each topology of the probe, and describe them."""
    from driftline.graphs.open import topology_to_onnx

    trouble: list[str] = []
    drawn = 0
    for root in roots:
        for path in sorted((*root.glob("model/*/*.json"), *root.glob("layer/*/*.json"))):
            # A link could lead to a file outside the dump.
            if path.is_symlink():
                continue
            try:
                topology_to_onnx(path, force=True)
                drawn += 1
            except DriftlineError as problem:
                trouble.append(str(problem))
    words = (f"{drawn} ONNX graph{'s' if drawn != 1 else ''}",) if drawn else ()
    return Sheets(words, tuple(trouble))
