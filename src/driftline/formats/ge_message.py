"""The header of a GE dump file: a protobuf `DumpData` message that describes an operator's tensors.

Knows the message's fields; how the bytes it describes are read is `ge_file`'s part.
"""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

from driftline.formats.protowire import BYTES, VARINT, Malformed, expect, fields, numbers, text

MOST_TENSORS = 4096
MOST_DIMENSIONS = 64
_SHORT = 256


class GeTensor(NamedTuple):
    """One input or output, as the header describes it.

    Attributes:
        port: Which side.
        position: On that side, from 0.
        data_type: A key of `GE_TYPES`, or something unknown.
        format: Code of the storage layout.
        shape: As stored; None when the header has none.
        original: The shape before the layout was changed; None when the header has none.
        size: Bytes in the file, padding included.
        offset: Where they begin.
    """

    port: Literal["input", "output"]
    position: int
    data_type: int
    format: int
    shape: tuple[int, ...] | None
    original: tuple[int, ...] | None
    size: int
    offset: int


class GeFile(NamedTuple):
    """A header.

    Attributes:
        version: `2.0` for files with their data behind the header.
        dump_time: In microseconds since 1970, as a rule.
        op_name: The operator's true name.
        tensors: Inputs, then outputs.
        others: How many buffers and workspaces lie behind them; they are no tensors.
        total: Bytes that the header accounts for, itself included.
        size: Bytes that the file has.
    """

    version: str
    dump_time: int
    op_name: str
    tensors: tuple[GeTensor, ...]
    others: int
    total: int
    size: int = 0


def parse(data: bytes, at: int, end: int, *, behind: bool) -> GeFile:
    """Read a `DumpData` message.

    Args:
        data: Holds the message.
        at: Where it begins.
        end: Where it ends.
        behind: The tensors' bytes lie behind the message; otherwise inside it.

    Raises:
        Malformed: It is none.
    """
    version = op_name = ""
    dump_time = others = spare = 0
    inputs: list[tuple[int, int]] = []
    outputs: list[tuple[int, int]] = []
    for number, wire, start, stop in fields(data, at, end):
        if number in (1, 6):
            expect(number, wire, BYTES)
            said = text(data, start, stop)
            version, op_name = (said, op_name) if number == 1 else (version, said)
        elif number == 2:
            expect(number, wire, VARINT)
            dump_time = start
        elif number in (3, 4):
            expect(number, wire, BYTES)
            if len(inputs) + len(outputs) >= MOST_TENSORS:
                raise Malformed(f"more than {MOST_TENSORS} tensors")
            (outputs if number == 3 else inputs).append((start, stop))
        elif number in (5, 8):
            expect(number, wire, BYTES)
            others += 1
            spare += _size_of_other(data, start, stop)
    tensors: list[GeTensor] = []
    offset = end
    for number, (start, stop) in enumerate((*inputs, *outputs)):
        port, position = (
            ("input", number) if number < len(inputs) else ("output", number - len(inputs))
        )
        known = _known(data[start:stop], port) if behind and stop - start <= _SHORT else None
        if known is None:
            tensor = _tensor(data, start, stop, port, position, offset if behind else None)
        else:
            tensor = GeTensor(port, position, *known[2:7], offset)
        offset += tensor.size
        tensors.append(tensor)
    total = offset + spare if behind else end
    return GeFile(version, dump_time, op_name, tuple(tensors), others, total)


_OUTPUT_FIELDS = {1: "data_type", 2: "format", 3: "shape", 5: "data", 6: "size", 7: "original"}
_INPUT_FIELDS = {1: "data_type", 2: "format", 3: "shape", 4: "data", 5: "size", 6: "original"}


@functools.lru_cache(4096)
def _known(message: bytes, port: Literal["input", "output"]) -> GeTensor | None:
    """What a short description says; None to let its own place say what is wrong with it.

    The operators of a dump have a few descriptions between them.
    """
    try:
        return _tensor(message, 0, len(message), port, 0, 0)
    except Malformed:
        return None


def _tensor(
    data: bytes,
    at: int,
    end: int,
    port: Literal["input", "output"],
    position: int,
    behind: int | None,
) -> GeTensor:
    """One tensor; `behind` says where its bytes begin unless they are inside the message."""
    names = _OUTPUT_FIELDS if port == "output" else _INPUT_FIELDS
    data_type = layout = size = offset = inside = 0
    shape: tuple[int, ...] | None = None
    original: tuple[int, ...] | None = None
    for number, wire, start, stop in fields(data, at, end):
        name = names.get(number)
        if name is None:
            continue
        expect(number, wire, BYTES if name in ("shape", "data", "original") else VARINT)
        if name == "data_type":
            data_type = start
        elif name == "format":
            layout = start
        elif name == "size":
            size = start
        elif name == "data":
            offset, inside = start, stop - start
        elif name == "shape":
            shape = _shape(data, start, stop)
        else:
            original = _shape(data, start, stop)
    if behind is not None:
        inside, offset = size, behind
    length = inside or size
    return GeTensor(port, position, data_type, layout, shape, original, length, offset)


def _shape(data: bytes, at: int, end: int) -> tuple[int, ...]:
    sizes: list[int] = []
    for field in fields(data, at, end):
        if field[0] == 1:
            numbers(data, field, sizes, MOST_DIMENSIONS)
    return tuple(sizes)


def _size_of_other(data: bytes, at: int, end: int) -> int:
    size = 0
    for number, wire, start, _ in fields(data, at, end):
        if number == 3:
            expect(number, wire, VARINT)
            size = start
    return size
