# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""Codec for values that go between processes: plain values, their bytes, and frames on a pipe.

Named tuples are sent by name, arrays by their bytes. Only types that the reader names can be
decoded; received bytes can neither import nor call anything.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path, PurePath
from typing import Any, BinaryIO, cast

# Exact types: subclasses, such as numpy's float64, must be turned into these first.
_ATOMS = (type(None), bool, int, float, str, bytes)


def encode(value: Any) -> Any:
    """Convert a value to plain values.

    Raises:
        TypeError: The value has a type that is never sent to a worker.
    """
    if type(value) in _ATOMS:
        return value
    if isinstance(value, PurePath):
        return ["path", str(value)]
    if isinstance(value, tuple):
        names: Any = getattr(cast(Any, value), "_fields", None)
        items = [encode(item) for item in cast("tuple[Any, ...]", value)]
        return ["tuple", items] if names is None else ["named", type(value).__name__, items]
    if is_dataclass(type(value)):
        values = {field.name: getattr(value, field.name) for field in fields(value)}
        return ["record", type(value).__name__, encode(values)]
    if isinstance(value, list):
        return ["list", [encode(item) for item in cast("list[Any]", value)]]
    if isinstance(value, frozenset):
        # Sorted, so that equal sets give equal bytes.
        return ["set", sorted(encode(item) for item in cast("frozenset[Any]", value))]
    if isinstance(value, Mapping):
        pairs = cast("Mapping[Any, Any]", value).items()
        return ["dict", [[encode(key), encode(item)] for key, item in pairs]]
    kind = type(value).__module__.partition(".")[0]
    if kind == "torch":
        return ["tensor", encode(value.detach().cpu().numpy())]
    if kind == "numpy":
        import numpy as np

        if isinstance(value, np.generic):
            return value.item()
        if value.dtype.kind in "biufc":
            return ["array", value.dtype.str, list(value.shape), value.tobytes()]
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    raise TypeError(f"a worker cannot be sent a {type(value).__name__}")


def decode(value: Any, kinds: Sequence[type] = ()) -> Any:
    """The inverse of `encode`.

    Args:
        value: Plain values, as `encode` returns them.
        kinds: Named tuples and dataclasses that may occur in the value.

    Raises:
        ValueError: A value of another type occurs.
    """
    # Only these types can be made: received bytes cannot choose any other class.
    kinds_by_name = {kind.__name__: kind for kind in kinds}

    def read(value: Any) -> Any:
        if not isinstance(value, list):
            return value
        match cast("list[Any]", value):
            case ["path", text]:
                return Path(text)
            case ["tuple", items]:
                return tuple(read(item) for item in items)
            case ["list", items]:
                return [read(item) for item in items]
            case ["set", items]:
                return frozenset(read(item) for item in items)
            case ["dict", pairs]:
                return {read(key): read(item) for key, item in pairs}
            case ["named", name, items] if name in kinds_by_name:
                return kinds_by_name[name](*(read(item) for item in items))
            case ["record", name, values] if name in kinds_by_name:
                return kinds_by_name[name](**read(values))
            case ["tensor", array]:
                import torch

                return torch.from_numpy(read(array))
            case ["array", dtype, shape, content]:
                import numpy as np

                # A copy, because the received bytes are read-only.
                return np.frombuffer(content, dtype).reshape(shape).copy()
            case _:
                raise ValueError(f"{str(cast(Any, value))[:80]} is none of our values")

    return read(value)


_LENGTH = struct.Struct("<Q")
# A garbled length must make us neither wait for bytes nor allocate them.
_LONGEST_FRAME = 1 << 40
_MSGPACK, _JSON = b"m", b"j"


def pack(value: Any) -> bytes:
    """Encode a plain value as bytes; floats keep all their bits."""
    import msgspec

    try:
        return _MSGPACK + msgspec.msgpack.encode(value)
    except UnicodeEncodeError:  # a file name that is not valid text: JSON can escape it
        return _JSON + json.dumps(value).encode()


def unpack(content: bytes) -> Any:
    """Decode the bytes that `pack` returned."""
    import msgspec

    view = memoryview(content)
    if bytes(view[:1]) == _MSGPACK:
        return msgspec.msgpack.decode(view[1:])
    return json.loads(bytes(view[1:]))


def send(stream: BinaryIO, value: Any) -> None:
    """Write a value as one frame."""
    content = pack(value)
    stream.write(_LENGTH.pack(len(content)) + content)
    stream.flush()


def receive(stream: BinaryIO) -> Any:
    """Read one frame and return its value.

    Raises:
        EOFError: The other side closed the pipe, possibly in the middle of a frame.
    """
    head = _exactly(stream, _LENGTH.size)
    length = _LENGTH.unpack(head)[0]
    if length > _LONGEST_FRAME:
        raise EOFError(f"a frame of {length} bytes is no frame of a worker")
    return unpack(_exactly(stream, length))


def _exactly(stream: BinaryIO, count: int) -> bytes:
    content = stream.read(count)
    if len(content) < count:
        raise EOFError("the other side has closed the pipe")
    return content
