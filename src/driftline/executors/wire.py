"""What goes between processes: plain values as bytes, and frames of them on a pipe.

Plain values are None, booleans, numbers, text, bytes, lists and dictionaries; tuples arrive as
lists. Nothing that arrives is ever executed: there is no pickle here.
"""

from __future__ import annotations

import json
import struct
from typing import Any, BinaryIO

_LENGTH = struct.Struct("<Q")
_MOST = 1 << 40
_MSGPACK, _JSON = b"m", b"j"


def pack(value: Any) -> bytes:
    """A plain value as bytes; floats arrive with all their bits."""
    import msgspec

    try:
        return _MSGPACK + msgspec.msgpack.encode(value)
    except UnicodeEncodeError:  # a file name that is no text: JSON can escape it
        return _JSON + json.dumps(value).encode()


def unpack(content: bytes) -> Any:
    """The value that `pack` was given."""
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
    """The next frame's value.

    Raises:
        EOFError: The other side is gone; also in the middle of a frame.
    """
    head = _exactly(stream, _LENGTH.size)
    length = _LENGTH.unpack(head)[0]
    if length > _MOST:
        raise EOFError(f"a frame of {length} bytes is none of ours")
    return unpack(_exactly(stream, length))


def _exactly(stream: BinaryIO, count: int) -> bytes:
    content = stream.read(count)
    if len(content) < count:
        raise EOFError("the other side has closed the pipe")
    return content
