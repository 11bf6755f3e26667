"""Folders of an ATB dump: what a path points to, and the operations and files of an execution.

    [{output}/][ait_dump*|msit_dump*|atb_dump_data/]{tensors|data}/{device}_{pid}/{exec}/…

Older probes wrote `tensors/thread_{pid}/{token}` or `tensors/{pid}/{pid}_{n}`, without an enclosing
folder of their own. `locate` accepts any level and looks only at names, in few folders. `Walk` then
reads the folders of one execution and the headers of its tensor files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from driftline.formats.ascend.atb.file import FILE_NAME, Header, Refused, header_of, open_file
from driftline.formats.dump_run import refuse_several
from driftline.runs.files.local_files import folders_in, reason_of
from driftline.runs.records import Moment, Port

ROOTS = ("ait_dump", "msit_dump", "atb_dump_data")
TENSORS = ("tensors", "data")
SIDE_FOLDERS = (
    "layer",
    "model",
    "info",
    "operation_io_tensors",
    "kernel_io_tensors",
    "cpu_profiling",
)
_DEVICE_PID = re.compile(r"(-?\d{1,4})_(\d{1,12})")
_OLD_PID = re.compile(r"(?:thread_)?(\d{1,12})")
_EXECUTION = re.compile(r"(?:\d{1,12}_)?(\d{1,9})")
_OPERATION = re.compile(r"\d{1,9}_.+")
_MOST_ENTRIES = 4000
"""Number of entries that are checked before a folder counts as one without tensors."""
_MOST_EXECUTIONS = 20
"""Number of executions of a process that are checked for a tensor."""
_DEEPEST = 40


class Execution(NamedTuple):
    """The folder of one execution.

    Attributes:
        device: Device number; 0 if the dump does not give it.
        pid: Process id, as text.
        number: The execution counter, or token number, that names the folder.
        folder: Path of the folder.
        only: Names of inner folders that lead to the single operation that was requested.
    """

    device: int
    pid: str
    number: int
    folder: Path
    only: tuple[str, ...] = ()


class Place(NamedTuple):
    """A dump, or the part of one that a path points to.

    Attributes:
        root: Folder of the dump; nothing outside it is read.
        generation: Generation of the probe that wrote it, as numbered in docs/formats.md.
        executions: Executions, by device, process and number.
        complete: Whether the whole dump was requested, rather than a part of it.
    """

    root: Path
    generation: str
    executions: tuple[Execution, ...]
    complete: bool


def locate(path: Path) -> Place | None:
    """What a path points to; None if it is not an ATB dump.

    Raises:
        BadRun: The path contains several dumps.
    """
    real = path.resolve()
    # A dump inside the folder is preferred to the folder itself, because users usually type `-o
    # out`.
    inside = [name for name in folders_in(real) if name.startswith(ROOTS) and _is_root(real / name)]
    refuse_several(path, inside)
    if inside:
        return _whole_dump(real / inside[0])
    if _is_root(real):
        return _whole_dump(real)
    if real.name in TENSORS and _holds_tensors(real):
        return _whole_dump(real.parent)
    return _part(real)


def _whole_dump(root: Path) -> Place:
    executions = [
        execution
        for name in TENSORS
        for device, pid, folder in _processes(root / name)
        for execution in _executions(device, pid, folder)
    ]
    return Place(root, _generation(root), _sorted(executions), True)


def _part(real: Path) -> Place | None:
    """A process, an execution, or something inside one."""
    if (process := _process(real)) is not None and _any_tensors(_executions(*process, real)):
        return _part_of_dump(real, list(_executions(*process, real)))
    # Go up from the given path until a folder is named like an execution of a process.
    for depth, folder in enumerate((real, *real.parents)):
        if depth > _DEEPEST:
            break
        process = _process(folder.parent)
        match = _EXECUTION.fullmatch(folder.name)
        if process is not None and match and _has_tensors(real):
            # The path inside the execution selects one operation; `before`/`after` are not
            # operations.
            only = real.relative_to(folder).parts
            if only and only[-1] in ("before", "after"):
                only = only[:-1]
            return _part_of_dump(folder.parent, [Execution(*process, int(match[1]), folder, only)])
    # An execution that was copied out of its dump still contains operations.
    if any(_is_operation(real / name) for name in folders_in(real) if _OPERATION.fullmatch(name)):
        match = _EXECUTION.fullmatch(real.name)
        number = int(match[1]) if match else 0
        return Place(real, "", (Execution(0, "0", number, real),), False)
    return None


def _part_of_dump(process: Path, executions: list[Execution]) -> Place:
    tensors = process.parent
    root = tensors.parent if tensors.name in TENSORS else process
    return Place(root, _generation(root), _sorted(executions), False)


def _sorted(executions: list[Execution]) -> tuple[Execution, ...]:
    return tuple(
        sorted(executions, key=lambda e: (e.device, len(e.pid), e.pid, e.number, e.folder))
    )


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


def torch_dumps_next_to(opened: Path, root: Path) -> Iterator[str]:
    """Torch dumps of the same tool inside the opened folder, relative to it."""
    for name in ("", *folders_in(opened)) if opened in (root, root.parent) else ():
        # Only mentioned to the user, because another format reads them.
        if (not name or name.startswith(ROOTS)) and (opened / name / "torch_tensors").is_dir():
            yield f"{name}/torch_tensors".lstrip("/")


def _is_root(folder: Path) -> bool:
    """Whether a folder has tensors of processes, or a dump's name and one of its side folders."""
    names = set(folders_in(folder))
    if any(_holds_tensors(folder / name) for name in TENSORS if name in names):
        return True
    # Torch dumps have the same name; a topology next to one of those does not make it an ATB dump.
    return (
        folder.name.startswith(ROOTS)
        and "torch_tensors" not in names
        and any(folders_in(folder / name) for name in SIDE_FOLDERS if name in names)
    )


def _holds_tensors(tensors: Path) -> bool:
    return any(_any_tensors(_executions(*process)) for process in _processes(tensors))


def _any_tensors(executions: Iterator[Execution]) -> bool:
    return any(_has_tensors(execution.folder) for execution in islice(executions, _MOST_EXECUTIONS))


def _processes(tensors: Path) -> list[tuple[int, str, Path]]:
    if tensors.name not in TENSORS:
        return []
    processes: list[tuple[int, str, Path]] = []
    for name in folders_in(tensors):
        process = _process(tensors / name)
        if process is not None and any(True for _ in _executions(*process, tensors / name)):
            processes.append((*process, tensors / name))
    return processes


def _process(folder: Path) -> tuple[int, str] | None:
    if match := _DEVICE_PID.fullmatch(folder.name):
        return int(match[1]), match[2]
    if folder.parent.name in TENSORS and (match := _OLD_PID.fullmatch(folder.name)):
        return 0, match[1]
    return None


def _executions(device: int, pid: str, folder: Path) -> Iterator[Execution]:
    # Only old layouts put the process id before the execution's number.
    old = _DEVICE_PID.fullmatch(folder.name) is None
    for name in folders_in(folder):
        match = _EXECUTION.fullmatch(name)
        if match and (old or "_" not in name):
            yield Execution(device, pid, int(match[1]), folder / name)


def _is_operation(folder: Path) -> bool:
    return any(name in ("before", "after") for name in folders_in(folder))


def _has_tensors(folder: Path) -> bool:
    """Whether a folder below contains a tensor file or a list of tensors."""
    # The number of entries is limited, so that a home folder is not searched completely.
    left = _MOST_ENTRIES
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


# ---- Operations of one execution


PARAM = "op_param.json"
STATISTIC = "statistic.csv"
TILING = "kernel_tilingdata.bin"
DEEPEST = 64
_ID = re.compile(r"(\d{1,9})_(.+)")
_MOMENTS: tuple[Moment, ...] = ("before", "after")


class TensorFile(NamedTuple):
    """One tensor file, or one line of statistic.csv that stands for a file.

    Attributes:
        port: input or output.
        slot: Number of the tensor.
        alias: Name of the parameter, if the file's name has it.
        moment: Whether it was saved before or after the execution.
        source: Path below the dump's root, for messages.
        path: Path for reading; empty if there is no such file.
        header: Content of the header; None if it is not valid.
        trouble: Why the tensor has no values; empty if it has.
    """

    port: Port
    slot: str
    alias: str
    moment: Moment
    source: str
    path: str = ""
    header: Header | None = None
    trouble: str = ""


class OperationFolder:
    """An operation or a kernel of one execution.

    Attributes:
        name: Name of the folder: `1_Decoder_layer`.
        kind: Type: the name without the number.
        site: Names from the outermost operation inwards, joined by `.`.
        ids: The numbers of those names, joined by `_`, as used by filters and csv files.
        files: Tensors of the operation.
        children: Operations and kernels inside, by name.
        param: Path of its op_param.json; empty if there is none.
    """

    __slots__ = ("children", "files", "ids", "kind", "name", "param", "site")

    def __init__(self, name: str, above: OperationFolder | None = None) -> None:
        name = self.name = shown(name)
        self.site = f"{above.site}.{name}" if above and above.site else name
        number, self.kind = _split(name)
        own = "" if number is None else str(number)
        self.ids = f"{above.ids}_{own}" if above and above.ids else own
        self.files: list[TensorFile] = []
        self.children: dict[str, OperationFolder] = {}
        self.param = ""

    def child(self, name: str) -> OperationFolder:
        """The child with this name; created if it does not exist."""
        name = shown(name)
        operation = self.children.get(name)
        if operation is None:
            operation = self.children[name] = OperationFolder(name, self)
        return operation

    def walk(self) -> Iterator[OperationFolder]:
        """This operation and all operations inside it, parents first, children by number."""
        yield self
        # Operations are numbered in the order in which they run.
        for child in sorted(self.children.values(), key=_by_number):
            yield from child.walk()

    def in_order(self) -> Iterator[tuple[OperationFolder, TensorFile]]:
        """Every tensor in execution order: inputs, the operations inside, outputs."""
        early: list[TensorFile] = []
        late: list[TensorFile] = []
        for file in self.files:
            (early if file.moment == "before" else late).append(file)
        early.sort(key=_by_port)
        late.sort(key=_by_port)
        for file in early:
            yield self, file
        for child in sorted(self.children.values(), key=_by_number):
            yield from child.in_order()
        for file in late:
            yield self, file


def shown(name: str) -> str:
    """A name that a terminal can print, because a folder may have any name."""
    # Control characters in a name could rewrite the terminal's screen.
    if name.isprintable():
        return name
    return "".join(letter if letter.isprintable() else "�" for letter in name)


def _split(name: str) -> tuple[int | None, str]:
    match = _ID.fullmatch(name)
    return (int(match[1]), match[2]) if match else (None, name)


def kind_of(name: str) -> str:
    """The type in a folder's name.

    >>> kind_of("24_Decoder_layer")
    'Decoder_layer'
    """
    return _split(name)[1]


def _by_number(operation: OperationFolder) -> tuple[int, str]:
    number = _split(operation.name)[0]
    # Folders without a number go last, by name.
    return (1 << 30 if number is None else number, operation.name)


def _by_port(file: TensorFile) -> tuple[bool, int]:
    return (file.port == "output", int(file.slot))


class Walk:
    """Reads the folders of a dump, and records what it does not understand.

    Attributes:
        root: The dump's folder, with links resolved; nothing outside it is read.
        losses: Paths below it that could not be read, with the reason.
        unknown_files: Files that do not belong to a dump.
        tilings: Files of tiling data.
        statistics: statistic.csv files, with their operations.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._root = str(root)
        self.losses: list[tuple[str, str]] = []
        self.unknown_files: list[str] = []
        self.tilings: list[str] = []
        self.statistics: list[tuple[OperationFolder, str]] = []

    def execution(self, folder: Path, only: tuple[str, ...] = ()) -> OperationFolder:
        """The operations of one execution, under a nameless top operation.

        Args:
            folder: Folder of the execution.
            only: Names of folders that lead to the single requested operation.
        """
        top = OperationFolder("")
        inner = top
        for name in only:
            inner = inner.child(name)
            folder = folder / name
        self._walk(str(folder), inner, None, 0)
        return top

    def below(self, path: str) -> str:
        """A path for messages: relative to the dump."""
        return shown(path[len(self._root) + 1 :] if path.startswith(self._root + "/") else path)

    def _walk(
        self, folder: str, operation: OperationFolder, moment: Moment | None, depth: int
    ) -> None:
        # Deeper nesting than in any model means damage or an attack; it is reported as a loss.
        if depth > DEEPEST:
            self.losses.append((self.below(folder), f"deeper than {DEEPEST} folders"))
            return
        inside: list[tuple[str, str]] = []
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    name = entry.name
                    if entry.is_dir(follow_symlinks=False):
                        inside.append((name, entry.path))
                    elif match := FILE_NAME.fullmatch(name):
                        operation.files.append(self._tensor(match, entry, moment))
                    else:
                        self._add_entry(operation, entry)
        except OSError as trouble:
            self.losses.append((self.below(folder), f"cannot be listed: {reason_of(trouble)}"))
        for name, path in inside:
            # `before/before` would be an operation of that name; only the first level is a moment.
            if name in _MOMENTS and moment is None:
                self._walk(path, operation, "before" if name == "before" else "after", depth + 1)
            elif match := FILE_NAME.fullmatch(name):
                operation.files.append(_unreadable(match, moment, self.below(path), "is a folder"))
            else:
                self._walk(path, operation.child(name), None, depth + 1)

    def _add_entry(self, operation: OperationFolder, entry: os.DirEntry[str]) -> None:
        name = entry.name
        if entry.is_symlink():
            self.losses.append((self.below(entry.path), "is a link; not followed"))
        elif name == PARAM:
            operation.param = entry.path
        elif name == TILING:
            self.tilings.append(entry.path)
        elif name == STATISTIC:
            self.statistics.append((operation, entry.path))
        else:
            self.unknown_files.append(self.below(entry.path))

    def _tensor(
        self, match: re.Match[str], entry: os.DirEntry[str], moment: Moment | None
    ) -> TensorFile:
        path = entry.path
        source = self.below(path)
        if entry.is_symlink():
            real = os.path.realpath(path)
            # A link out of the dump could show any file of this machine as a tensor.
            if not real.startswith(self._root + "/"):
                return _unreadable(match, moment, source, "is a link that leads out of the dump")
            path = real
        try:
            file = open_file(path)
            try:
                header = header_of(file)
            finally:
                os.close(file)
        except Refused as why:
            return _unreadable(match, moment, source, str(why))
        except OSError as trouble:
            return _unreadable(match, moment, source, f"cannot be read: {reason_of(trouble)}")
        return _named(match, moment, source)._replace(path=path, header=header)


def _named(match: re.Match[str], moment: Moment | None, source: str) -> TensorFile:
    side, number, parameter = match.groups()
    port: Port = "input" if side == "in" else "output"
    # Files outside of `before` and `after` folders: inputs are saved before, outputs after.
    usual: Moment = "before" if side == "in" else "after"
    return TensorFile(port, str(int(number)), parameter or "", moment or usual, source)


def _unreadable(match: re.Match[str], moment: Moment | None, source: str, why: str) -> TensorFile:
    return _named(match, moment, source)._replace(trouble=f"the file {why}")
