"""Write tensors of a run that came from an ATB dump back into ATB's own tree of `.bin` files.

    ait_dump/tensors/{device}_{pid}/{execution}/{id}_{Operation}/…/{before|after}/{in|out}tensor{n}.bin

Values are written in plain order (format ND) whatever the layout of the original. Only tensors are
written; topology and csv files belong to the program that knows the graph.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import numpy as np

from driftline.formats.ascend.types import ACL_TYPES
from driftline.formats.convert.targets import safe_name
from driftline.runs.records import Record
from driftline.runs.run import Storage

_ND = 2
# Recoded types are left out, because their values would change when written back.
_CODES = {kind.dtype: code for code, kind in ACL_TYPES.items() if kind.dtype and not kind.recoded}
_OPERATION = re.compile(r"\d+_\w+", re.ASCII)


class AtbTree:
    """Writes the tensors of one rank and process."""

    def __init__(self, folder: Path, rank: int, process: int, pid: int) -> None:
        self.folder = folder / "ait_dump" / "tensors" / f"{rank}_{pid + process}"
        self._taken: set[Path] = set()

    def put(self, record: Record, raw: Storage) -> str:
        """Write one tensor; returns why it cannot be written, or an empty text.

        Raises:
            OSError: The disk refused the write.
        """
        key = record.key
        code = _CODES.get(record.dtype)
        if code is None:
            return f"ATB has no element type {record.dtype}"
        if key.port not in ("input", "output") or record.kept != "full":
            return "ATB keeps whole inputs and outputs only"
        names = key.site.split(".")
        # The site becomes a path, so only names like those of operations are accepted.
        if not all(_OPERATION.fullmatch(name) for name in names) or not key.slot.isdigit():
            return "its name is no operation of an ATB dump"
        side = "intensor" if key.port == "input" else "outtensor"
        # The alias comes from the run and must not contain a separator.
        alias = f"_{safe_name(record.alias)}" if record.alias else ""
        place = self.folder.joinpath(str(key.step), *names, key.moment)
        path = place / f"{side}{key.slot}{alias}.bin"
        # Different names may become the same safe name; overwriting would lose a tensor silently.
        if path in self._taken:
            return "another tensor has its name"
        self._taken.add(path)
        place.mkdir(parents=True, exist_ok=True)
        dims = ",".join(str(size) for size in record.shape)
        header = (
            f"$Version=1.0\n$Object.Count=1\n$Object.Length={raw.nbytes}\n"
            f"format={_ND}\ndtype={code}\ndims={dims}\n"
            f"$Object.data=0,{raw.nbytes}\n$End=1\n"
        )
        with path.open("wb") as stream:
            stream.write(header.encode("ascii"))
            stream.write(cast("Any", np.ascontiguousarray(raw)).view(np.uint8).data)
        return ""
