"""One operator file of a GE dump: a protobuf `DumpData` header, and the bytes that it describes.

The first part handles the message: `parse` reads its fields into `GeFile` and `GeTensor`. The
second part handles the file: how it is recognised, how each tensor is read (`ReadingPlan`), and its
tensors as leaves of a run. Old files hold the data inside the message, newer ones after it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from driftline.errors import BadFile
from driftline.formats.ascend.protobuf import (
    BYTES,
    VARINT,
    Malformed,
    expect,
    fields,
    numbers,
    text,
)
from driftline.formats.ascend.tiled_layouts import PLAIN, Rearrangement, rearrangement
from driftline.formats.ascend.types import ElementType, format_name, recode, type_named
from driftline.formats.dump_run import Leaf, TreeRun
from driftline.formats.folder import Folder, pread
from driftline.numerics.dtypes import DTYPES
from driftline.runs.files.local_files import reason_of
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Storage

# Limits for a file that is not trusted; no real operator comes near them.
MOST_TENSORS = 4096
MOST_DIMENSIONS = 64
_SHORT = 256


class GeTensor(NamedTuple):
    """One input or output, as the header describes it.

    Attributes:
        port: input or output.
        position: Position among the inputs or outputs, from 0.
        data_type: A key of `GE_TYPES`, or an unknown number.
        format: Code of the storage layout.
        shape: Stored shape; None if the header has none.
        original: Shape before the layout was changed; None if the header has none.
        size: Number of bytes in the file, including padding.
        offset: Offset of the first byte.
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
        version: `2.0` for files with their data after the header.
        dump_time: Usually in microseconds since 1970.
        op_name: The operator's true name.
        tensors: Inputs, then outputs.
        others: Number of buffers and workspaces after them, which are not tensors.
        total: Number of bytes that the header describes, including itself.
        size: Number of bytes of the file.
    """

    version: str
    dump_time: int
    op_name: str
    tensors: tuple[GeTensor, ...]
    others: int
    total: int
    size: int = 0


def parse(data: bytes, begin: int, end: int, *, behind: bool) -> GeFile:
    """Read a `DumpData` message.

    Args:
        data: Bytes that contain the message.
        begin: Offset of its first byte.
        end: Offset after its last byte.
        behind: Whether the tensors' bytes follow the message; otherwise they are inside it.

    Raises:
        Malformed: The bytes are not such a message.
    """
    version = op_name = ""
    dump_time = others = spare = 0
    inputs: list[tuple[int, int]] = []
    outputs: list[tuple[int, int]] = []
    # 1 version, 2 time, 3 outputs, 4 inputs, 5 and 8 buffers and workspaces, 6 operator name.
    for number, wire, start, stop in fields(data, begin, end):
        if number in (1, 6):
            expect(number, wire, BYTES)
            name = text(data, start, stop)
            version, op_name = (name, op_name) if number == 1 else (version, name)
        elif number == 2:
            expect(number, wire, VARINT)
            dump_time = start
        elif number in (3, 4):
            expect(number, wire, BYTES)
            if len(inputs) + len(outputs) >= MOST_TENSORS:
                raise Malformed(f"more than {MOST_TENSORS} tensors")
            # Outputs come first in the message, but inputs come first in the data.
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
        shared = (
            _shared_description(data[start:stop], port)
            if behind and stop - start <= _SHORT
            else None
        )
        if shared is None:
            tensor = _tensor(data, start, stop, port, position, offset if behind else None)
        else:
            tensor = GeTensor(port, position, *shared[2:7], offset)
        offset += tensor.size
        tensors.append(tensor)
    total = offset + spare if behind else end
    return GeFile(version, dump_time, op_name, tuple(tensors), others, total)


_OUTPUT_FIELDS = {1: "data_type", 2: "format", 3: "shape", 5: "data", 6: "size", 7: "original"}
_INPUT_FIELDS = {1: "data_type", 2: "format", 3: "shape", 4: "data", 5: "size", 6: "original"}


@functools.lru_cache(4096)
def _shared_description(message: bytes, port: Literal["input", "output"]) -> GeTensor | None:
    """Parse a short description; None if it is malformed, so that the caller reports where.

    Cached, because the operators of a dump share a few descriptions.
    """
    try:
        return _tensor(message, 0, len(message), port, 0, 0)
    except Malformed:
        return None


def _tensor(
    data: bytes,
    begin: int,
    end: int,
    port: Literal["input", "output"],
    position: int,
    behind: int | None,
) -> GeTensor:
    """One tensor; `behind` is the offset of its bytes unless they are inside the message."""
    names = _OUTPUT_FIELDS if port == "output" else _INPUT_FIELDS
    data_type = layout = size = offset = inside = 0
    shape: tuple[int, ...] | None = None
    original: tuple[int, ...] | None = None
    for number, wire, start, stop in fields(data, begin, end):
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
    # Data after the message have no offsets of their own: tensors follow one another.
    if behind is not None:
        inside, offset = size, behind
    length = inside or size
    return GeTensor(port, position, data_type, layout, shape, original, length, offset)


def _shape(data: bytes, begin: int, end: int) -> tuple[int, ...]:
    sizes: list[int] = []
    for field in fields(data, begin, end):
        if field[0] == 1:
            numbers(data, field, sizes, MOST_DIMENSIONS)
    return tuple(sizes)


def _size_of_other(data: bytes, begin: int, end: int) -> int:
    size = 0
    for number, wire, start, _ in fields(data, begin, end):
        if number == 3:
            expect(number, wire, VARINT)
            size = start
    return size


# ---- The file: recognising it and reading its tensors


NAME = "ge"
LONGEST_HEADER = 16 << 20
LONGEST_OLD_FILE = 1 << 30
"""Old files hold the data inside the message, which must be read completely to find them."""
FIRST_READ = 4096
MODERN = "2.0"

_NAMES = (
    "int8 float float16 int8 uint8 int16 uint16 int32 int64 uint32 uint64 bool double string - - "
    "complex64 complex128 int8 int16 int32 uint8 uint16 int64 - - - bf16 int4 uint1 - - complex32 "
    "hifloat8 float8_e5m2 float8_e4m3fn float8_e8m0 float6_e3m2 float6_e2m3 float4_e2m1 float4_e1m2"
)
GE_TYPES: dict[int, ElementType] = {
    code: kind for code, name in enumerate(_NAMES.split()) if (kind := type_named(name)) is not None
}
"""The graph engine's own numbers of types; undefined is read as int8, a resource as int64."""


class ReadingPlan(NamedTuple):
    """How to read one tensor.

    Attributes:
        dtype: Our element type.
        shape: Shape of the result.
        kind: Element type in the file.
        stored: Number of elements in the file.
        layout: How the elements are rearranged; None if they already are in the tensor's order.
        trouble: Why the tensor cannot be read; empty if it can.
        note: What a reader of its figures should know.
    """

    dtype: str
    shape: tuple[int, ...]
    kind: ElementType
    stored: int = 0
    layout: Rearrangement | None = None
    trouble: str = ""
    note: str = ""


def sniff(path: Path) -> bool:
    """Whether a file begins like a GE dump; other formats are checked before this one."""
    try:
        folder = Folder(path.parent)
        begin, size = folder.start(path.name, FIRST_READ)
        # Both forms begin with the version in the message, unlike any other file. In a modern file,
        # eight bytes of length precede the message.
        offset = 8 if begin[8:10] == b"\n\x03" else 0
        if begin[offset : offset + 2] != b"\n\x03" or b"." not in begin[offset + 2 : offset + 5]:
            return False
        if offset and int.from_bytes(begin[:8], "little") > max(size, LONGEST_HEADER):
            return False
        return bool(offset) or bool(read_header(folder, path.name).tensors)
    except (Malformed, OSError):
        return False


def open(path: Path) -> TreeRun:
    """Open the tensors of one file.

    Raises:
        BadFile: The file is not valid.
    """
    folder = Folder(path.parent)
    try:
        file = read_header(folder, path.name)
    except (Malformed, OSError) as trouble:
        raise BadFile(f"{path} is no GE dump: {reason_of(trouble)}") from None
    site = file.op_name or path.name
    events: list[dict[str, str]] = []
    leaves = list(leaves_of(folder, path.name, file, TensorKey.of(site, "output"), events=events))
    return TreeRun(path, NAME, leaves, events=events, facts={"op_name": file.op_name})


def read_header(folder: Folder, name: str) -> GeFile:
    """Read the header of a file.

    Raises:
        Malformed: The file is not a GE dump, or contradicts itself.
        OSError: The file cannot be read.
    """
    begin, size = folder.prefetched(name)
    length = int.from_bytes(begin[:8], "little")
    if len(begin) > 8 and 0 < length <= len(begin) - 8:
        # If this fails, the slow path below gives the reason.
        with contextlib.suppress(Malformed):
            return _checked(parse(begin, 8, 8 + length, behind=True), size)
    file, size = folder.open(name)
    try:
        begin = os.read(file, FIRST_READ)
        if len(begin) < 8:
            raise Malformed(f"it has {size} bytes, fewer than any header")
        (length,) = struct.unpack_from("<Q", begin)
        modern: Malformed
        if 0 < length <= min(size - 8, LONGEST_HEADER):
            header = begin if length + 8 <= len(begin) else pread(file, length + 8, 0)
            try:
                return _checked(parse(header, 8, 8 + length, behind=True), size)
            except Malformed as trouble:
                modern = trouble
        elif length > LONGEST_HEADER and length <= size - 8:
            modern = Malformed(f"its header claims {length} bytes, more than anybody writes")
        else:
            modern = Malformed(
                f"its header claims {length} bytes and {max(size - 8, 0)} follow"
                if length
                else "its header is empty"
            )
        # Only if the modern reading failed, because an old file must be read completely to be
        # checked.
        if begin[0] == 0x0A and size <= LONGEST_OLD_FILE:
            bare = _old_file(file, size)
            if bare is not None:
                return bare
        raise modern
    finally:
        os.close(file)


def _old_file(file: int, size: int) -> GeFile | None:
    """Read an old file, which is one message."""
    try:
        header = parse(pread(file, size, 0), 0, size, behind=False)
    except Malformed:
        return None
    return header._replace(size=size) if header.version != MODERN and header.tensors else None


def _checked(header: GeFile, size: int) -> GeFile:
    """Refuse a header that does not cover all bytes, because every offset is then doubtful."""
    if header.total < size:
        raise Malformed(f"{size - header.total} bytes follow the data that its header describes")
    return header._replace(size=size)


def reading_plan(tensor: GeTensor, file_size: int) -> ReadingPlan:
    """How to read a tensor, or why it cannot be read."""
    plan = _read_as(*tensor[2:7])
    if not plan.trouble and tensor.offset + plan.kind.byte_count(plan.stored) > file_size:
        return _refused("the file is cut short before its end", plan.kind, plan.shape)
    return plan


@functools.lru_cache(4096)
def _read_as(
    data_type: int,
    layout: int,
    shape: tuple[int, ...] | None,
    original: tuple[int, ...] | None,
    size: int,
) -> ReadingPlan:
    """Interpret a description; cached, because the operators of a dump share a few."""
    kind = GE_TYPES.get(data_type)
    if kind is None:
        return _refused(f"its element type has the number {data_type}, which is not known")
    if not kind.dtype:
        return _refused(f"it holds elements of type {kind.name}, which are no numbers")
    # Without a shape, the elements are a flat list, as many as fit into the bytes.
    stored = shape
    if stored is None:
        stored = (size * 8 // kind.bits,) if size else ()
    if any(extent >= 1 << 63 for extent in stored):  # a negative number, written unsigned
        return _refused("its shape was not known when it was dumped")
    # More elements than any memory holds; a product of such sizes could hide that.
    if any(extent > 1 << 48 for extent in stored):
        return _refused(f"its shape claims {max(stored)} elements along one axis")
    elements = math.prod(stored)
    needed = kind.byte_count(elements)
    if needed > size:
        # The header also describes tensors whose values were switched off; that is no damage.
        if not size:
            return _refused("no values of it were dumped", kind, stored)
        sizes = "x".join(map(str, stored)) or "scalar"
        return _refused(f"its shape {sizes} of {kind.name} needs {needed} bytes and it has {size}")
    return _laid_out(format_name(layout), original or None, kind, stored, elements)


def _laid_out(
    layout: str,
    original: tuple[int, ...] | None,
    kind: ElementType,
    stored: tuple[int, ...],
    elements: int,
) -> ReadingPlan:
    note = ""
    moved = rearrangement(layout, stored, original)
    # Two elements share a byte, so a rearrangement of bytes would mix them up.
    packed = kind.recoded == "" and kind.bits < 8
    if moved is not None and packed and not moved.keeps_order:
        moved, note = None, f"{kind.name} in {layout} is left as it is stored"
    elif moved is None and layout not in PLAIN and original not in (None, stored) and elements:
        note = (
            f"{layout} of {stored} is left as it is stored: how it becomes {original} is not known"
        )
    return ReadingPlan(
        kind.dtype, moved.shape if moved else stored, kind, elements, moved, note=note
    )


def _refused(
    why: str, kind: ElementType | None = None, shape: tuple[int, ...] | None = None
) -> ReadingPlan:
    """The plan of a tensor that cannot be read; an invalid type or shape is left empty."""
    if kind is None or shape is None:
        return ReadingPlan("", (), GE_TYPES[0], trouble=why)
    return ReadingPlan(kind.dtype, shape, kind, trouble=why)


def leaves_of(
    folder: Folder,
    name: str,
    file: GeFile,
    owner: TensorKey,
    *,
    class_name: str = "",
    events: list[dict[str, str]] | None = None,
) -> Iterator[Leaf]:
    """The tensors of a file as leaves of a run.

    Args:
        folder: Folder of the dump.
        name: Name of the file in the folder.
        file: Header of the file.
        owner: Any key of the operator; its tensors have the same site, step, rank and process.
        class_name: Type of the operator.
        events: Receives a warning for each tensor whose figures need a remark.
    """
    for tensor in file.tensors:
        plan = reading_plan(tensor, file.size)
        slot = str(tensor.position)
        key = TensorKey.of(owner.site, tensor.port, slot, step=owner.step, rank=owner.rank)
        # `TensorKey.of` has no process; most dumps have one process and need no second object.
        if owner.process:
            key = key._replace(process=owner.process)
        record = Record(key, 0, plan.dtype, plan.shape, class_name=class_name, lost=plan.trouble)
        if plan.note and events is not None:
            events.append({"kind": "warning", "message": f"{name}: {key}: {plan.note}"})
        fetch = None if plan.trouble else functools.partial(_fetch, folder, name, tensor, plan)
        yield Leaf(record, f"{name},{tensor.port}s,{tensor.position}", fetch)


def _fetch(folder: Folder, name: str, tensor: GeTensor, plan: ReadingPlan) -> Storage:
    storage = np.dtype(DTYPES[plan.dtype].storage)
    if not plan.stored:
        return np.empty(0, storage)
    try:
        raw = folder.values(name, tensor.offset, plan.kind.byte_count(plan.stored))
    except OSError as trouble:
        raise BadFile(f"{folder.path / name}: {reason_of(trouble)}") from trouble
    values = recode(raw, plan.kind, plan.stored) if plan.kind.recoded else raw.view(storage)
    # If only the shape differs, the bytes can be used as they are.
    if plan.layout is None or plan.layout.keeps_order:
        return values
    return plan.layout.apply(values)
