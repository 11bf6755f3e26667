"""Tensors that a dump saved once and names again: `data=1_0_outtensor0.bin` → the file meant.

The name is an operation id and a file name, looked up among the operations of the same execution;
it is never used as a path.
"""

from __future__ import annotations

import re
from pathlib import Path

from driftline.formats.atb_bin import FILE_NAME, leaf_of
from driftline.formats.atb_header import Header
from driftline.formats.atb_walk import OperationFolder, TensorFile, Walk
from driftline.formats.tree import Leaf
from driftline.runs.key import TensorKey

_ALIAS = re.compile(r"(\d{1,9}(?:_\d{1,9}){0,62})_((?:in|out)[tT]ensor\d{1,6}(?:_\w{1,200})?\.bin)")
_LONGEST_CHAIN = 8
_LEVELS = 12
"""Folders above a file in which its execution's is looked for."""

Place = tuple[str, str, str]
"""Operation id, port, slot."""


class Aliases:
    """The tensors of one execution by operation id, port and slot."""

    def __init__(self, top: OperationFolder) -> None:
        self._files: dict[Place, list[TensorFile]] = {}
        for operation in top.walk():
            for file in operation.files:
                self._files.setdefault((operation.ids, file.port, file.slot), []).append(file)

    def resolve(self, file: TensorFile) -> TensorFile:
        """The same tensor with the place of its values, or with the reason why there is none."""
        header, target = file.header, file
        if header is None:
            return file
        for _ in range(_LONGEST_CHAIN):
            assert target.header is not None
            if not target.header.points_to:
                return self._joined(file, header, target)
            wanted = target.header.points_to
            found = self._meant(wanted)
            if found is None:
                return _lost(file, f"says its values are in {wanted[:80]!r}, which is not there")
            if found.header is None:
                return _lost(file, f"has its values in {found.source}: {found.trouble}")
            target = found
        return _lost(file, "points to a file that points to a file, and so on")

    def _meant(self, wanted: str) -> TensorFile | None:
        match = _ALIAS.fullmatch(wanted)
        name = FILE_NAME.fullmatch(match[2]) if match else None
        if match is None or name is None:
            return None
        port = "input" if name[1] == "in" else "output"
        found = self._files.get((match[1], port, str(int(name[2]))), [])
        with_data = [file for file in found if file.header and file.header.has_data]
        return next(iter(with_data or found), None)

    def _joined(self, file: TensorFile, header: Header, target: TensorFile) -> TensorFile:
        there = target.header
        assert there is not None
        if (there.kind, there.layout, there.dims) != (header.kind, header.layout, header.dims):
            return _lost(
                file, f"has another type or shape than {target.source}, which it points to"
            )
        return file._replace(path=target.path, header=there)


def _lost(file: TensorFile, why: str) -> TensorFile:
    return file._replace(trouble=f"the file {why}", path="")


def beside(path: Path, key: TensorKey) -> Leaf | None:
    """A tensor file that points to another one of its dump, opened by itself.

    None when the file does not lie in the folder of an execution.
    """
    real = path.resolve()
    for folder in real.parents[1:_LEVELS]:
        if folder.name.isdecimal():
            break
    else:
        return None
    walk = Walk(folder)
    top = walk.execution(folder)
    source = walk.below(str(real))
    for operation in top.walk():
        for file in operation.files:
            if file.source == source:
                found = Aliases(top).resolve(file)
                if found.header is None or found.trouble:
                    return None
                return leaf_of(key, found.header, found.path, found.source)
    return None
