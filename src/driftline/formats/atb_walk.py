"""The folder of one execution in an ATB dump → its operations, and the files each of them left.

    {exec}/{id}_{Operation}/[{i}_{Child}/…/][{k}_{Kernel}/]{before|after}/{intensor|outtensor}{n}.bin

Folders behind links are not entered, files behind links only where they lead inside the dump.
Knows names and headers; keys and what lies beside the tensors are `atb_tree`'s.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from driftline.formats.atb_bin import FILE_NAME
from driftline.formats.atb_header import Header, Refused, header_of, open_file
from driftline.runs.inside import reason_of
from driftline.runs.key import Moment, Port

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
        """The one of this name, made if need be."""
        name = shown(name)
        found = self.children.get(name)
        if found is None:
            found = self.children[name] = OperationFolder(name, self)
        return found

    def walk(self) -> Iterator[OperationFolder]:
        """This and everything inside, parents first, children by number."""
        yield self
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
    if name.isprintable():
        return name
    return "".join(letter if letter.isprintable() else "�" for letter in name)


def _split(name: str) -> tuple[int | None, str]:
    found = _ID.fullmatch(name)
    return (int(found[1]), found[2]) if found else (None, name)


def kind_of(name: str) -> str:
    """The type in a folder's name.

    >>> kind_of("24_Decoder_layer")
    'Decoder_layer'
    """
    return _split(name)[1]


def _by_number(operation: OperationFolder) -> tuple[int, str]:
    number = _split(operation.name)[0]
    return (1 << 30 if number is None else number, operation.name)


def _by_port(file: TensorFile) -> tuple[bool, int]:
    return (file.port == "output", int(file.slot))


class Walk:
    """Reads the folders of a dump; remembers what it did not understand.

    Attributes:
        root: The dump's folder, links resolved; nothing outside is read.
        losses: Places below it that could not be looked into, with the reason.
        strangers: Files that are none of a dump's.
        tilings: Files of tiling data.
        statistics: statistic.csv files met.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._root = str(root)
        self.losses: list[tuple[str, str]] = []
        self.strangers: list[str] = []
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
            self.strangers.append(self.below(entry.path))

    def _tensor(
        self, match: re.Match[str], entry: os.DirEntry[str], moment: Moment | None
    ) -> TensorFile:
        path = entry.path
        source = self.below(path)
        if entry.is_symlink():
            real = os.path.realpath(path)
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
    usual: Moment = "before" if side == "in" else "after"
    return TensorFile(port, str(int(number)), parameter or "", moment or usual, source)


def _unread(match: re.Match[str], moment: Moment | None, source: str, why: str) -> TensorFile:
    return _named(match, moment, source)._replace(trouble=f"the file {why}")
