"""Where in an ATB dump a path points: its root, its processes and executions, whatever was typed.

    [{output}/][ait_dump*|msit_dump*|atb_dump_data/]{tensors|data}/{device}_{pid}/{exec}/…

Older probes wrote `tensors/thread_{pid}/{token}` or `tensors/{pid}/{pid}_{n}`, without a folder of
their own around it. Looks at names, and into few folders.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from driftline.formats.atb_bin import FILE_NAME
from driftline.formats.several import refuse_several
from driftline.runs.inside import folders_in

ROOTS = ("ait_dump", "msit_dump", "atb_dump_data")
TENSORS = ("tensors", "data")
BESIDE = ("layer", "model", "info", "operation_io_tensors", "kernel_io_tensors", "cpu_profiling")
_DEVICE_PID = re.compile(r"(-?\d{1,4})_(\d{1,12})")
_OLD_PID = re.compile(r"(?:thread_)?(\d{1,12})")
_EXECUTION = re.compile(r"(?:\d{1,12}_)?(\d{1,9})")
_OPERATION = re.compile(r"\d{1,9}_.+")
_LOOKS = 4000
"""Entries looked at before a folder counts as one without tensors."""
_TRIED = 20
"""Executions of a process that are looked into for a tensor."""
_DEEPEST = 40


class Execution(NamedTuple):
    """The folder of one execution.

    Attributes:
        device: Device number; 0 where the dump does not say.
        pid: Process id, as text.
        number: The execution counter, or token number, that names it.
        folder: Where it lies.
        only: Names of folders inside that lead to the one operation that was asked for.
    """

    device: int
    pid: str
    number: int
    folder: Path
    only: tuple[str, ...] = ()


class Place(NamedTuple):
    """A dump, or the part of one that a path points to.

    Attributes:
        root: The dump's own folder; nothing outside it is read.
        generation: Which probe wrote it, as docs/formats.md counts them.
        executions: By device, process and number.
        whole: The whole dump was asked for, not a part of it.
    """

    root: Path
    generation: str
    executions: tuple[Execution, ...]
    whole: bool


def locate(path: Path) -> Place | None:
    """What a path points to; None when it is no ATB dump.

    Raises:
        BadRun: It holds several dumps.
    """
    real = path.resolve()
    inside = [name for name in folders_in(real) if name.startswith(ROOTS) and _is_root(real / name)]
    refuse_several(path, inside)
    if inside:
        return _whole(real / inside[0])
    if _is_root(real):
        return _whole(real)
    if real.name in TENSORS and _holds_tensors(real):
        return _whole(real.parent)
    return _part(real)


def _whole(root: Path) -> Place:
    found = [
        execution
        for name in TENSORS
        for device, pid, folder in _processes(root / name)
        for execution in _executions(device, pid, folder)
    ]
    return Place(root, _generation(root), _sorted(found), True)


def _part(real: Path) -> Place | None:
    """A process, an execution, or something inside one."""
    if (process := _process(real)) is not None and _any_tensors(_executions(*process, real)):
        return _placed(real, list(_executions(*process, real)))
    for depth, folder in enumerate((real, *real.parents)):
        if depth > _DEEPEST:
            break
        process = _process(folder.parent)
        match = _EXECUTION.fullmatch(folder.name)
        if process is not None and match and _has_tensors(real):
            only = real.relative_to(folder).parts
            if only and only[-1] in ("before", "after"):
                only = only[:-1]
            return _placed(folder.parent, [Execution(*process, int(match[1]), folder, only)])
    if any(_is_operation(real / name) for name in folders_in(real) if _OPERATION.fullmatch(name)):
        match = _EXECUTION.fullmatch(real.name)
        number = int(match[1]) if match else 0
        return Place(real, "", (Execution(0, "0", number, real),), False)
    return None


def _placed(process: Path, found: list[Execution]) -> Place:
    tensors = process.parent
    root = tensors.parent if tensors.name in TENSORS else process
    return Place(root, _generation(root), _sorted(found), False)


def _sorted(found: list[Execution]) -> tuple[Execution, ...]:
    return tuple(sorted(found, key=lambda e: (e.device, len(e.pid), e.pid, e.number, e.folder)))


def _generation(root: Path) -> str:
    name = root.name
    if name.startswith("atb_dump_data"):
        return "G4"
    if name.startswith("msit_dump"):
        return "G3"
    if name.startswith("ait_dump"):
        return "G2" if name == "ait_dump" else "G2t"
    names = folders_in(root / "tensors")
    return "G1" if any(_DEVICE_PID.fullmatch(name) for name in names) else "G0"


def torch_beside(opened: Path, root: Path) -> Iterator[str]:
    """Torch dumps of the same tool that lie in what was opened, relative to it."""
    for name in ("", *folders_in(opened)) if opened in (root, root.parent) else ():
        if (not name or name.startswith(ROOTS)) and (opened / name / "torch_tensors").is_dir():
            yield f"{name}/torch_tensors".lstrip("/")


def _is_root(folder: Path) -> bool:
    """Has tensors of processes, or is called like a dump and has what a dump may have besides."""
    names = set(folders_in(folder))
    if any(_holds_tensors(folder / name) for name in TENSORS if name in names):
        return True
    # Torch dumps are called the same; topology beside one of those does not make it ATB's.
    return (
        folder.name.startswith(ROOTS)
        and "torch_tensors" not in names
        and any(folders_in(folder / name) for name in BESIDE if name in names)
    )


def _holds_tensors(tensors: Path) -> bool:
    return any(_any_tensors(_executions(*process)) for process in _processes(tensors))


def _any_tensors(executions: Iterator[Execution]) -> bool:
    return any(_has_tensors(execution.folder) for execution in islice(executions, _TRIED))


def _processes(tensors: Path) -> list[tuple[int, str, Path]]:
    if tensors.name not in TENSORS:
        return []
    found: list[tuple[int, str, Path]] = []
    for name in folders_in(tensors):
        process = _process(tensors / name)
        if process is not None and any(True for _ in _executions(*process, tensors / name)):
            found.append((*process, tensors / name))
    return found


def _process(folder: Path) -> tuple[int, str] | None:
    if match := _DEVICE_PID.fullmatch(folder.name):
        return int(match[1]), match[2]
    if folder.parent.name in TENSORS and (match := _OLD_PID.fullmatch(folder.name)):
        return 0, match[1]
    return None


def _executions(device: int, pid: str, folder: Path) -> Iterator[Execution]:
    old = _DEVICE_PID.fullmatch(folder.name) is None
    for name in folders_in(folder):
        match = _EXECUTION.fullmatch(name)
        if match and (old or "_" not in name):
            yield Execution(device, pid, int(match[1]), folder / name)


def _is_operation(folder: Path) -> bool:
    return any(name in ("before", "after") for name in folders_in(folder))


def _has_tensors(folder: Path) -> bool:
    """Whether there is a tensor file, or a list of tensors, in some folder below."""
    left = _LOOKS
    waiting = [folder]
    while waiting and left > 0:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    left -= 1
                    if FILE_NAME.fullmatch(entry.name) or entry.name == "statistic.csv":
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(Path(entry.path))
        except OSError:
            continue
    return False
