"""Folders of an ATB dump: where a path points, and which operations and files an execution left.

    [{output}/][ait_dump*|msit_dump*|atb_dump_data/]{tensors|data}/{device}_{pid}/{exec}/…

Older probes wrote `tensors/thread_{pid}/{token}` or `tensors/{pid}/{pid}_{n}`, without a folder of
their own around it. `locate` accepts any level and looks at names only, and into few folders;
`Walk` then reads the folders of one execution and the headers of its tensor files.
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
        folder: Where it is.
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
        complete: The whole dump was asked for, not a part of it.
    """

    root: Path
    generation: str
    executions: tuple[Execution, ...]
    complete: bool


def locate(path: Path) -> Place | None:
    """What a path points to; None when it is no ATB dump.

    Raises:
        BadRun: It holds several dumps.
    """
    real = path.resolve()
    # A dump inside wins over the folder itself: `-o out` is the usual thing to type.
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
    # Upwards from what was typed, until a folder is named like an execution of a process.
    for depth, folder in enumerate((real, *real.parents)):
        if depth > _DEEPEST:
            break
        process = _process(folder.parent)
        match = _EXECUTION.fullmatch(folder.name)
        if process is not None and match and _has_tensors(real):
            # The path inside the execution picks one operation; `before`/`after` are no
            # operations.
            only = real.relative_to(folder).parts
            if only and only[-1] in ("before", "after"):
                only = only[:-1]
            return _part_of_dump(folder.parent, [Execution(*process, int(match[1]), folder, only)])
    # An execution that was copied out of its dump still has operations inside.
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


def torch_dumps_beside(opened: Path, root: Path) -> Iterator[str]:
    """Torch dumps of the same tool that are in what was opened, relative to it."""
    for name in ("", *folders_in(opened)) if opened in (root, root.parent) else ():
        # Only mentioned to the user: another format reads it.
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
        and any(folders_in(folder / name) for name in SIDE_FOLDERS if name in names)
    )


def _holds_tensors(tensors: Path) -> bool:
    return any(_any_tensors(_executions(*process)) for process in _processes(tensors))


def _any_tensors(executions: Iterator[Execution]) -> bool:
    return any(_has_tensors(execution.folder) for execution in islice(executions, _TRIED))


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
    """Whether there is a tensor file, or a list of tensors, in some folder below."""
    # Looks at a bounded number of entries: a home folder must not be searched whole.
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


# ---- Operations of one execution


PARAM = "op_param.json"
STATISTIC = "statistic.csv"
TILING = "kernel_tilingdata.bin"
DEEPEST = 64
_ID = re.compile(r"(\d{1,9})_(.+)")
_MOMENTS: tuple[Moment, ...] = ("before", "after")


class TensorFile(NamedTuple):
    """One tensor file, or one line of statistic.csv that stands for one.

    Attributes:
        port: input or output.
        slot: Number of the tensor.
        alias: Name of the parameter, where the file's name has it.
        moment: Taken before or after the execution.
        source: Path below the dump's root; what a person should look at.
        path: Where to read; empty when there is no such file.
        header: What it says; None when it cannot be believed.
        trouble: Why it cannot.
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
        name: Of the folder: `1_Decoder_layer`.
        kind: Its type: the name without the number.
        site: Names from the outermost operation inwards, joined by `.`.
        ids: The numbers of those names joined by `_`: what filters and csv files call it.
        files: Its tensors.
        children: Operations and kernels inside, by name.
        param: Path of its op_param.json; empty without one.
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
        """The child of this name; made if there is none yet."""
        name = shown(name)
        operation = self.children.get(name)
        if operation is None:
            operation = self.children[name] = OperationFolder(name, self)
        return operation

    def walk(self) -> Iterator[OperationFolder]:
        """This and everything inside, parents first, children by number."""
        yield self
        # Operations are numbered in the order in which they run.
        for child in sorted(self.children.values(), key=_by_number):
            yield from child.walk()

    def in_order(self) -> Iterator[tuple[OperationFolder, TensorFile]]:
        """Every tensor as execution meets it: what goes in, what happens inside, what comes out."""
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
    """A name that a terminal can print: a stranger's folder may be called anything."""
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
    """Reads the folders of a dump; remembers what it did not understand.

    Attributes:
        root: The dump's folder, links resolved; nothing outside is read.
        losses: Places below it that could not be looked into, with the reason.
        unknown_files: Files that are none of a dump's.
        tilings: Files of tiling data.
        statistics: statistic.csv files met.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._root = str(root)
        self.losses: list[tuple[str, str]] = []
        self.unknown_files: list[str] = []
        self.tilings: list[str] = []
        self.statistics: list[tuple[OperationFolder, str]] = []

    def execution(self, folder: Path, only: tuple[str, ...] = ()) -> OperationFolder:
        """The operations of one execution under a nameless top.

        Args:
            folder: The execution's.
            only: Names of folders that lead to the one operation wanted.
        """
        top = OperationFolder("")
        inner = top
        for name in only:
            inner = inner.child(name)
            folder = folder / name
        self._enter(str(folder), inner, None, 0)
        return top

    def below(self, path: str) -> str:
        """A path as a person should see it: relative to the dump."""
        return shown(path[len(self._root) + 1 :] if path.startswith(self._root + "/") else path)

    def _enter(
        self, folder: str, operation: OperationFolder, moment: Moment | None, depth: int
    ) -> None:
        # Deeper nesting than a model has is damage or an attack; it is reported as a loss.
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
                        self._other(operation, entry)
        except OSError as trouble:
            self.losses.append((self.below(folder), f"cannot be listed: {reason_of(trouble)}"))
        for name, path in inside:
            # `before/before` would be an operation of that name; only the first level
            # is a moment.
            if name in _MOMENTS and moment is None:
                self._enter(path, operation, "before" if name == "before" else "after", depth + 1)
            elif match := FILE_NAME.fullmatch(name):
                operation.files.append(_unread(match, moment, self.below(path), "is a folder"))
            else:
                self._enter(path, operation.child(name), None, depth + 1)

    def _other(self, operation: OperationFolder, entry: os.DirEntry[str]) -> None:
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
                return _unread(match, moment, source, "is a link that leads out of the dump")
            path = real
        try:
            file = open_file(path)
            try:
                header = header_of(file)
            finally:
                os.close(file)
        except Refused as why:
            return _unread(match, moment, source, str(why))
        except OSError as trouble:
            return _unread(match, moment, source, f"cannot be read: {reason_of(trouble)}")
        return _named(match, moment, source)._replace(path=path, header=header)


def _named(match: re.Match[str], moment: Moment | None, source: str) -> TensorFile:
    side, number, parameter = match.groups()
    port: Port = "input" if side == "in" else "output"
    # Files that are in no `before` or `after` folder: inputs are taken early, outputs late.
    usual: Moment = "before" if side == "in" else "after"
    return TensorFile(port, str(int(number)), parameter or "", moment or usual, source)


def _unread(match: re.Match[str], moment: Moment | None, source: str, why: str) -> TensorFile:
    return _named(match, moment, source)._replace(trouble=f"the file {why}")
