# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""Read ONNX model files: the graph without its weights, the weights one at a time, and a digest.

A large model file is memory-mapped, and the values of its tensors are left out before protobuf
parses it, so that the graph needs memory only for its nodes. This file knows the wire format of
protobuf, but no session.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from driftline.captures.onnxruntime.tensors import TYPES, AnyArray, HostTensor
from driftline.errors import BadFile, NotInstalled
from driftline.numerics import kernel
from driftline.numerics.dtypes import DTYPES
from driftline.registry import require
from driftline.runs.files.mapped_file import map_file, map_range

INSTALL = "onnxruntime onnx"
SMALL = 1024
"""Bytes up to which the values of a tensor stay in the graph, such as shapes, axes and scales."""

# Field numbers of ModelProto.graph and GraphProto.initializer.
_GRAPH, _INITIALIZER = 7, 5
_VALUES = frozenset({4, 5, 6, 7, 9, 10, 11})
"""Fields of a TensorProto that hold values; field 13 locates values in another file."""
# Wire type of fields with a length: messages, texts and packed numbers.
_BYTES = 2


def engine() -> Any:
    """The package onnxruntime.

    Raises:
        NotInstalled: It is missing; the hint has the command that installs it.
    """
    return _package("onnxruntime")


def protobuf() -> Any:
    """The package onnx.

    Raises:
        NotInstalled: It is missing.
    """
    return _package("onnx")


def _package(name: str) -> Any:
    try:
        return require(name, install=INSTALL)
    except NotInstalled as absent:
        raise NotInstalled(
            f"capturing an ONNX model needs the package {name}, which is not installed here",
            hint=f"pip install {INSTALL}",
        ) from absent


def load_graph(path: Path) -> Any:
    """The model as a protobuf; tensors of more than a kilobyte have no values.

    Raises:
        BadFile: The file cannot be read, or is no ONNX model.
    """
    onnx = protobuf()
    try:
        with path.open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                raise BadFile(f"'{path}' is empty", hint="give an .onnx file")
            with map_file(file.fileno(), str(path)) as data:
                text = _without_values(memoryview(data))
    except OSError as error:
        raise BadFile(
            f"cannot read '{path}': {error.strerror or error}", hint="give an .onnx file"
        ) from None
    model = None
    if text is not None:
        try:
            model = onnx.ModelProto.FromString(text)
        except Exception:  # the class of protobuf's error depends on its implementation
            model = None
    if model is None or not (model.graph.node or model.graph.output):
        raise BadFile(
            f"'{path}' is no ONNX model, or only the beginning of one",
            hint="give the .onnx file that the exporter wrote; others are not understood",
        )
    return model


def _without_values(data: memoryview) -> bytes | None:
    """The bytes of a ModelProto without long values of initializers; None if it is invalid."""
    try:
        return _copied(data, (_GRAPH, _INITIALIZER))
    except (IndexError, ValueError):
        return None
    finally:
        data.release()


def _copied(data: memoryview, way: tuple[int, ...]) -> bytes:
    out: list[bytes] = []
    for field, start, first, end in _fields(data):
        # At the end of the path of fields is a tensor, whose long value fields are left out.
        if not way and field in _VALUES and end - first > SMALL:
            continue
        if way and field == way[0]:
            # The length of a message changes if fields are left out.
            inner = _copied(data[first:end], way[1:])
            out.append(_varint(field << 3 | _BYTES) + _varint(len(inner)) + inner)
        else:
            out.append(bytes(data[start:end]))
    return b"".join(out)


def _fields(data: memoryview) -> Iterator[tuple[int, int, int, int]]:
    """(number, start, start of the content, end) of each field of a message.

    Raises:
        ValueError: The message is invalid.
        IndexError: The message is cut off.
    """
    offset, size = 0, len(data)
    while offset < size:
        start = offset
        tag, offset = _read(data, offset)
        kind = tag & 7
        # The wire types of protobuf are varint, bytes, and fixed 64 or 32 bits.
        if kind == 0:
            first = offset
            _, offset = _read(data, offset)
        elif kind == _BYTES:
            length, first = _read(data, offset)
            offset = first + length
        elif kind in (1, 5):
            first, offset = offset, offset + (8 if kind == 1 else 4)
        else:
            raise ValueError("no field of protobuf")
        # Field number 0 does not exist in protobuf.
        if offset > size or not tag >> 3:
            raise ValueError("a field ends beyond its message")
        yield tag >> 3, start, first, offset


def _read(data: memoryview, offset: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[offset]
        offset += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, offset
        shift += 7
        # A varint has at most ten bytes; a longer one means that the file is damaged.
        if shift > 63:
            raise ValueError("a number is too long")


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def external_files(model: Any) -> list[str]:
    """Names of the files that hold values of a model's tensors, as in the model."""
    return sorted(
        {
            # A name that is not UTF-8 is bytes; file names on disk may be any bytes.
            entry.value if isinstance(entry.value, str) else os.fsdecode(entry.value)
            for tensor in model.graph.initializer
            for entry in tensor.external_data
            if entry.key == "location"
        }
    )


def check_external(path: Path, model: Any) -> list[Path]:
    """The files of a model's weights.

    Raises:
        BadFile: A file is missing, or is outside the model's folder.
    """
    files: list[Path] = []
    for name in external_files(model):
        folder = path.parent.resolve()
        try:
            place = (folder / name).resolve()
        except (OSError, ValueError, RuntimeError):  # a name with a zero byte, or a loop of links
            raise BadFile(
                f"'{path.name}' keeps weights in {name!r:.80}, which is no name of a file",
                hint="export the model again",
            ) from None
        # A model from an unknown source must not make Driftline read other files.
        if not place.is_relative_to(folder):
            raise BadFile(
                f"'{path.name}' keeps weights in '{name}', which is not below its own folder",
                hint="put the weights into the model's folder",
            )
        if not place.is_file():
            raise BadFile(
                f"'{path.name}' keeps weights in '{name}', which is not there",
                hint="the exporter writes two files; copy both",
            )
        files.append(place)
    return files


def digest_of(files: list[Path]) -> str:
    """One digest of several files in order, which identifies a model."""
    parts: list[str] = []
    for path in files:
        # An empty file cannot be mapped.
        if not path.stat().st_size:
            continue
        with path.open("rb") as file, map_file(file.fileno(), str(path)) as data:
            view = np.frombuffer(data, np.uint8)
            parts.append(kernel.digest(view))
            # The map cannot be closed while an array refers to it.
            del view
    if len(parts) == 1:
        return parts[0]
    return kernel.digest(np.frombuffer(" ".join(parts).encode(), np.uint8))


# The weights of an optimised model, read from its files one at a time.


class Weights:
    """The initializers of a model, of which large ones are in files next to it."""

    def __init__(self, path: Path) -> None:
        model = protobuf().load(str(path), load_external_data=False)
        self._folder = path.parent
        self._tensors = {tensor.name: tensor for tensor in model.graph.initializer}

    def read(self, name: str) -> HostTensor | None:
        """The initializer of this name; None if it does not exist or has no readable numbers."""
        tensor = self._tensors.get(name)
        dtype = TYPES.get(tensor.data_type, "") if tensor is not None else ""
        if tensor is None or not dtype:
            return None
        shape = tuple(tensor.dims)
        size = DTYPES[dtype].byte_count(math.prod(shape))
        data = self._bytes(tensor, size)
        return None if data is None or data.nbytes != size else HostTensor(data, dtype, shape)

    def _bytes(self, tensor: Any, size: int) -> AnyArray | None:
        if tensor.external_data:
            where = {entry.key: entry.value for entry in tensor.external_data}
            # An empty region cannot be mapped.
            if not size:
                return np.empty(0, np.uint8)
            return map_range(self._folder / where["location"], int(where.get("offset", 0)), size)
        if tensor.raw_data:
            return np.frombuffer(tensor.raw_data, np.uint8)
        array: AnyArray = np.asarray(protobuf().numpy_helper.to_array(tensor))
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
