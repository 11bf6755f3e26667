"""Writers of GE dumps, their graph texts and FX dumps, for tests and for twins of a model.

    dump = GeDump(folder)
    dump.operator("Add", "Add_2", [x, y], [x + y])
    dump.graph_text([GraphNode("Add_2", "Add", (("x", 0), ("y", 0)), ("add-aten.add.OUTPUT.0",))])

Bytes and layouts are those of the programs that write such dumps. This file reads no dumps.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from driftline.formats.ascend.ge.graph_text import FX_NAME, GraphNode

Array = np.ndarray[Any, np.dtype[Any]]

CODES = {
    "float32": 1,
    "float16": 2,
    "int8": 3,
    "uint8": 4,
    "int16": 5,
    "uint16": 6,
    "int32": 7,
    "int64": 8,
    "uint32": 9,
    "uint64": 10,
    "bool": 11,
    "float64": 12,
    "complex64": 16,
    "complex128": 17,
    "bfloat16": 27,
    "int4": 28,
    "uint1": 29,
    "float8_e5m2": 34,
    "float8_e4m3fn": 35,
}
"""The graph engine's dtype numbers, by the names of numpy and ml_dtypes."""
ND, NCHW, NC1HWC0, FRACTAL_NZ = 2, 0, 3, 29


class GeValue(NamedTuple):
    """One tensor in the form of a dump file.

    Attributes:
        data: Its bytes.
        data_type: Number of the element type.
        shape: Stored shape; None to leave it out.
        format: Number of the layout.
        original: Shape before the layout was changed; None to leave it out.
        padding: Zero bytes after the data.
    """

    data: bytes
    data_type: int
    shape: Sequence[int] | None
    format: int = ND
    original: Sequence[int] | None = None
    padding: int = 0


def ge_value(array: Array, *, padding: int = 0) -> GeValue:
    """An array in its plain layout."""
    plain = np.ascontiguousarray(array)
    shape = tuple(array.shape)
    return GeValue(plain.tobytes(), CODES[plain.dtype.name], shape, ND, shape, padding)


def ge_tiles(matrix: Array) -> GeValue:
    """A matrix or a stack of matrices as FRACTAL_NZ, in tiles of 16 by 16 (16 by 32 for bytes)."""
    width = 32 if matrix.dtype.itemsize == 1 else 16
    *lead, rows, columns = matrix.shape
    padded = np.zeros((*lead, -(-rows // 16) * 16, -(-columns // width) * width), matrix.dtype)
    padded[..., :rows, :columns] = matrix
    tiles = padded.reshape(*lead, padded.shape[-2] // 16, 16, padded.shape[-1] // width, width)
    stored = np.ascontiguousarray(np.moveaxis(tiles, -2, len(lead)))
    code = CODES[matrix.dtype.name]
    return GeValue(stored.tobytes(), code, stored.shape, FRACTAL_NZ, matrix.shape)


def ge_bytes(
    op_name: str,
    inputs: Iterable[Array | GeValue],
    outputs: Iterable[Array | GeValue],
    *,
    dump_time: int = 0,
    version: str = "2.0",
    bare: bool = False,
    buffers: Iterable[bytes] = (),
) -> bytes:
    """The bytes of a GE dump file.

    Args:
        op_name: Name of the operator.
        inputs: Its inputs.
        outputs: Its outputs.
        dump_time: Time in the header.
        version: Version in the header.
        bare: Whether to use the old form, with the data inside the message.
        buffers: Bytes of buffers after the tensors.
    """
    values = [[_value(one) for one in side] for side in (inputs, outputs)]
    spare = list(buffers)
    message = _bytes_field(1, version.encode()) + _number_field(2, dump_time)
    message += b"".join(_bytes_field(3, _tensor(one, (5, 6, 7), bare)) for one in values[1])
    message += b"".join(_bytes_field(4, _tensor(one, (4, 5, 6), bare)) for one in values[0])
    message += b"".join(_bytes_field(5, _number_field(3, len(one))) for one in spare)
    message += _bytes_field(6, op_name.encode())
    if bare:
        return message
    data = b"".join(one.data + bytes(one.padding) for side in values for one in side)
    return struct.pack("<Q", len(message)) + message + data + b"".join(spare)


def _value(given: Array | GeValue) -> GeValue:
    return given if isinstance(given, GeValue) else ge_value(given)


def _tensor(value: GeValue, places: tuple[int, int, int], bare: bool) -> bytes:
    data, size, original = places
    message = _number_field(1, value.data_type) + _number_field(2, value.format)
    if value.shape is not None:
        message += _bytes_field(3, _shape(value.shape))
    if bare:
        message += _bytes_field(data, value.data + bytes(value.padding))
    message += _number_field(size, len(value.data) + value.padding)
    if value.original is not None:
        message += _bytes_field(original, _shape(value.original))
    return message


def _shape(sizes: Sequence[int]) -> bytes:
    return _bytes_field(1, b"".join(_varint(size) for size in sizes)) if len(sizes) else b""


def _varint(number: int) -> bytes:
    number &= 0xFFFF_FFFF_FFFF_FFFF
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _number_field(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _bytes_field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def graph_text(nodes: Iterable[GraphNode], name: str = "graph_1") -> str:
    """The text of operators in a `dynamo_original_graph_*.txt`."""
    lines = [f"name: {json.dumps(name)}"]
    for node in nodes:
        lines += [
            "op {",
            f"  name: {json.dumps(node.name)}",
            f"  type: {json.dumps(node.class_name)}",
        ]
        lines += [f"  input: {json.dumps(f'{source}:{output}')}" for source, output in node.inputs]
        for fx in node.fx or ("",):
            lines += ["  output_desc {", '    name: "y"', "    dtype: DT_FLOAT", '    layout: "ND"']
            if fx:
                lines += ["    attr {", f"      key: {json.dumps(FX_NAME)}", "      value {"]
                lines += [f"        s: {json.dumps(fx)}", "      }", "    }"]
            lines.append("  }")
        lines.append("}")
    return "\n".join(lines) + "\n"


class GeDump:
    """Writes a GE dump, file by file."""

    def __init__(
        self,
        folder: Path,
        *,
        graph: str = "graph_1_0",
        graph_id: int = 1,
        device: int = 0,
        session: str = "20240130064151",
        world: tuple[int, int] | None = None,
    ) -> None:
        """Set the place of the dump.

        Args:
            folder: The folder of the dump; made if it does not exist.
            graph: Name of the graph.
            graph_id: Number of the graph.
            device: Number of the device.
            session: Start time of the session, YYYYmmddHHMMSS.
            world: World size and rank, for the layout that has them.
        """
        self.folder = folder
        self.graph = graph
        above = folder if world is None else folder / f"worldsize{world[0]}_global_rank{world[1]}"
        self.place = above / session / str(device) / graph / str(graph_id)
        self.stamp = 1706596911000000
        self.task = 0

    def operator(
        self,
        class_name: str,
        op_name: str,
        inputs: Iterable[Array | GeValue],
        outputs: Iterable[Array | GeValue],
        *,
        step: int = 0,
        suffix: str = "",
    ) -> Path:
        """Write one call of an operator, with a later stamp than the last; returns the file."""
        self.stamp += 1000
        self.task += 1
        flat = op_name.translate(str.maketrans("./\\ ", "____"))
        place = self.place / str(step)
        place.mkdir(parents=True, exist_ok=True)
        path = place / f"{class_name}.{flat}.{self.task}.6.{self.stamp}{suffix}"
        path.write_bytes(ge_bytes(op_name, inputs, outputs, dump_time=self.stamp))
        return path

    def graph_text(self, nodes: Iterable[GraphNode], *, graph_id: int = 1) -> Path:
        """Write the graph text into the folder of the dump; returns the file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"dynamo_original_graph_{graph_id}_rank_0_pid_1_ts_20240130064150123456.txt"
        path = self.folder / name
        path.write_text(graph_text(nodes, f"graph_{graph_id}"))
        return path


def write_fx(
    folder: Path,
    node: str,
    target: str,
    inputs: Sequence[Any],
    outputs: Sequence[Array],
    *,
    stamp: int = 20240130064201000001,
) -> None:
    """Write one node of an FX dump into the folder of its step.

    Args:
        folder: `…/{step}` or `…/{step}/gm_{stamp}_dump`, depending on the layout.
        node: Name of the node.
        target: The function that it calls.
        inputs: Its arguments: arrays, numbers, strings, lists of arrays; None is left out.
        outputs: Its results.
        stamp: The time in the file names.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for at, given in enumerate(inputs):
        listed = isinstance(given, list | tuple)
        for inner, value in enumerate(cast("Sequence[Any]", given) if listed else [given]):
            if value is not None:
                slot = f"{at}.{inner}" if listed else str(at)
                np.save(folder / f"{node}-{target}.INPUT.{slot}.{stamp}.npy", np.asarray(value))
    for at, value in enumerate(outputs):
        np.save(folder / f"{node}-{target}.OUTPUT.{at}.{stamp}.npy", value)
