"""The operation csv that a user names with -c: which operators it lists, what it says of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from driftline.errors import BadFile, BadInput
from driftline.formats.atb_sheets import Described, read_operations
from driftline.runs.inside import reason_of

_LARGEST = 256 << 20
_NUMBER = re.compile(r"_(\d{1,9})\.csv$")


class ListedOperator(NamedTuple):
    """One line of an operation csv.

    Attributes:
        execution: Number of the execution, from the file's name.
        name: As the line has it.
        kind: The type alone.
        ids: Operation id.
        param: Its parameters; None where the line has none that can be read.
        damaged: They are there, and no JSON.
        inputs: Types and shapes of what goes in.
        outputs: Of what comes out.
    """

    execution: int
    name: str
    kind: str
    ids: str
    param: Mapping[str, Any] | None
    damaged: bool
    inputs: tuple[Described, ...]
    outputs: tuple[Described, ...]


def listed(path: Path) -> list[ListedOperator]:
    """The operators of an operation csv.

    Raises:
        BadInput: It lists none, or kernels.
        BadFile: It cannot be read.
    """
    try:
        with path.open("rb") as stream:
            raw = stream.read(_LARGEST + 1)
    except OSError as trouble:
        raise BadFile(f"{path} cannot be read: {reason_of(trouble)}") from None
    if len(raw) > _LARGEST:
        raise BadFile(f"{path} is larger than {_LARGEST >> 20} MiB")
    number = _NUMBER.search(path.name)
    lines = read_operations(raw.decode("utf-8", "replace"), int(number[1]) if number else 0)
    found = [
        ListedOperator(
            line.execution,
            line.name,
            line.kind,
            line.ids,
            None if line.damaged else line.param,
            line.damaged,
            line.inputs,
            line.outputs,
        )
        for line in lines
        if line.name != line.kind and line.outputs
    ]
    if not found and lines:
        raise BadInput(
            f"{path} lists kernels, not operators",
            hint="give -c the file in operation_io_tensors, not that in kernel_io_tensors",
        )
    if not found:
        raise BadInput(
            f"{path} is no operation csv: no line of it has the 21 columns of one",
            hint="it is written by dump --type op, as operation_tensors_0.csv",
        )
    return found
