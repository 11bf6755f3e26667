"""A tensor file as a run: each of its tensors is the output of a site."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from driftline.errors import BadFile, BadInput
from driftline.formats.member import Member
from driftline.numerics.dtypes import DTYPES
from driftline.runs.key import TensorKey
from driftline.runs.record import Blob, Record
from driftline.runs.run import Loss, Run, Storage

LONE = "tensor"
"""Site of the only tensor of a file, so that any two such files pair, whatever they call it."""


class FileRun(Run):
    """A tensor file as a run: each tensor is the output of a site of its name, uncopied."""

    _order = "none"

    def __init__(self, path: Path, format_name: str, members: Sequence[Member]) -> None:
        self.name = str(path)
        self._format = format_name
        self._members = {_key(member, len(members)): member for member in members}
        if len(self._members) != len(members):
            raise BadFile(f"{path} holds two tensors of one name")
        self._records = [
            _record(path, key, member, order)
            for order, (key, member) in enumerate(self._members.items())
        ]

    @property
    def records(self) -> Sequence[Record]:
        return self._records

    @property
    def manifest(self) -> dict[str, Any]:
        return {"format": self._format, "path": self.name}

    @property
    def losses(self) -> Sequence[Loss]:
        return [
            Loss(record.key.site, record.lost, record.key)
            for record in self._records
            if record.lost
        ]

    def raw(self, record: Record) -> Storage:
        if record.lost:
            raise BadInput(f"{record.key.site} of {self.name} has no values: {record.lost}")
        values = self._members[record.key].fetch()
        values.flags.writeable = False
        return values


def _key(member: Member, how_many: int) -> TensorKey:
    return TensorKey.of(LONE if how_many == 1 else member.name or LONE, "output")


def _record(path: Path, key: TensorKey, member: Member, order: int) -> Record:
    known = DTYPES.get(member.dtype)
    length = known.byte_count(math.prod(member.shape)) if known else 0
    return Record(
        key,
        order,
        member.dtype,
        member.shape,
        blob=None if member.trouble else Blob(path.name, 0, length),
        lost=member.trouble,
    )
