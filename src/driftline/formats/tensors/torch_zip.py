"""Describe tensors of a `torch.save` file without torch and without running any code.

This file knows the few pickle operations for tensors in dicts, lists and tuples. It builds names
and numbers from them, and never an object of a class that the file names. For anything else
(another class, a compressed or foreign zip, the layout before zips) it returns None; `torch_file`
then calls torch with `weights_only=True`. Loading 10 000 files of one tensor with torch takes 4 s;
reading them here takes a tenth of that.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from typing import Any, NamedTuple, cast

# Limits for files that are not trusted; beyond any of them, torch is used.
LARGEST_PICKLE = 1 << 20
MOST_OPERATIONS = 200_000
MOST_TENSORS = 50_000
DEEPEST = 32
_SMALL_PICKLE = 1 << 12
_TAIL = 1 << 16
_END = struct.Struct("<4s4H2IH")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_LOCAL_NAMES = struct.Struct("<2H")

_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
}


class Stored(NamedTuple):
    """One tensor as a file describes it.

    Attributes:
        name: Its path through the containers, joined by dots; empty for a lone tensor.
        dtype: torch's name.
        shape: Sizes, as torch counts them.
        start: Offset of its storage in the file.
        length: Number of bytes of its storage.
        offset: Index of its first element in the storage.
        dense: Whether the elements are in C order without gaps.
        device: Its device when it was saved.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    length: int
    offset: int
    dense: bool
    device: str


class _Global(NamedTuple):
    module: str
    name: str


class _Storage(NamedTuple):
    kind: str
    key: str
    device: str


class _Tensor(NamedTuple):
    storage: _Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Unsupported(Exception):
    """The file contains something that this file does not know."""


class _Source(NamedTuple):
    size: int
    read: Callable[[int, int], bytes]


def read_tensors(size: int, read: Callable[[int, int], bytes]) -> list[Stored] | None:
    """The tensors of a file in the file's order, or None if torch must read it.

    Args:
        size: Length of the file.
        read: Function (length, offset) → bytes.
    """
    source = _Source(size, read)
    try:
        entries = _entries(source)
        pickled = next((name for name in entries if name.endswith("/data.pkl")), None)
        if pickled is None:
            return None
        prefix = pickled.removesuffix("data.pkl")
        # Files of big-endian machines are rare enough to be left to torch.
        if f"{prefix}byteorder" in entries:
            start, length = entries[f"{prefix}byteorder"]
            if length > 16 or source.read(length, _data(source, start, length)) != b"little":
                return None
        start, length = entries[pickled]
        if length > LARGEST_PICKLE:
            return None
        pickle = source.read(length, _data(source, start, length))
        # Large pickles differ from file to file, so caching them would only cost memory.
        tree = _unpickled_once(pickle) if length <= _SMALL_PICKLE else _unpickled(pickle)
        named_tensors: list[tuple[str, _Tensor]] = []
        _collect(tree, "", 0, named_tensors, [MOST_OPERATIONS])
        return [_stored(source, name, tensor, prefix, entries) for name, tensor in named_tensors]
    # Damage of any kind: torch's own message explains it better.
    except (_Unsupported, OSError, struct.error, ValueError, IndexError, TypeError, KeyError):
        return None


def _entries(source: _Source) -> dict[str, tuple[int, int]]:
    """Name → (offset of the local header, length) of every stored member of the zip."""
    # The end record and, in a small file, the whole directory fit into this.
    tail_start = max(0, source.size - 4096)
    tail = source.read(source.size - tail_start, tail_start)
    offset = tail.rfind(b"PK\x05\x06")
    if offset < 0:
        raise _Unsupported
    _, disk, _, _, count, length, start, _ = _END.unpack_from(tail, offset)
    # These values mean that the true ones are in a zip64 record.
    if disk or count == 0xFFFF or start == 0xFFFFFFFF or length > _TAIL:
        raise _Unsupported
    end = tail_start + offset
    # torch writes a zip64 record with the same values between the directory and the end.
    if start + length > end:
        raise _Unsupported
    if start >= tail_start:
        directory = tail[start - tail_start : start - tail_start + length]
    else:
        directory = source.read(length, start)
    members: dict[str, tuple[int, int]] = {}
    offset = 0
    for _ in range(count):
        (magic, _, _, _, method, _, _, _, packed, plain, names, extra, comment, *_, header) = (
            _ENTRY.unpack_from(directory, offset)
        )
        if (
            # Compressed members cannot be read in place; torch never compresses.
            magic != b"PK\x01\x02"
            or method != 0
            or packed != plain
            or 0xFFFFFFFF in (plain, header)
        ):
            raise _Unsupported
        offset += _ENTRY.size
        name = directory[offset : offset + names].decode()
        # With two equal names, choosing one would be a guess.
        if name in members:
            raise _Unsupported
        members[name] = (header, plain)
        offset += names + extra + comment
    return members


def _data(source: _Source, header: int, length: int) -> int:
    """Offset of a member's bytes, after its local header, whose length must be read first."""
    local = source.read(30, header)
    if local[:4] != b"PK\x03\x04":
        raise _Unsupported
    names, extra = _LOCAL_NAMES.unpack_from(local, 26)
    start = header + 30 + names + extra
    if start + length > source.size:
        raise _Unsupported
    return start


@functools.lru_cache(256)
def _unpickled_once(data: bytes) -> Any:
    """As `_unpickled`, cached: files of one dump have the same few pickles, for other values."""
    return _unpickled(data)


def _unpickled(data: bytes) -> Any:
    """Run the pickle operations for containers, texts, numbers and tensors, and no others."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    position = 0
    end = len(data)
    for _ in range(MOST_OPERATIONS):
        if position >= end:
            raise _Unsupported
        code = data[position]
        position += 1
        # The most frequent operations come first, because this loop takes most of the time.
        if code == 0x71:  # BINPUT
            memo[data[position]] = stack[-1]
            position += 1
        elif code == 0x4B:  # BININT1
            stack.append(data[position])
            position += 1
        elif code == 0x58:  # BINUNICODE
            size = int.from_bytes(data[position : position + 4], "little")
            stack.append(_slice(data, position + 4, size).decode())
            position += 4 + size
        elif code == 0x28:  # MARK
            marks.append(len(stack))
        elif code == 0x74:  # TUPLE
            base = marks.pop()
            stack[base:] = [tuple(stack[base:])]
        elif code in (0x85, 0x86, 0x87):  # TUPLE1 to TUPLE3
            base = len(stack) - (code - 0x84)
            if base < 0:
                raise _Unsupported
            stack[base:] = [tuple(stack[base:])]
        elif code == 0x63:  # GLOBAL
            first = data.index(b"\n", position)
            second = data.index(b"\n", first + 1)
            stack.append(_Global(data[position:first].decode(), data[first + 1 : second].decode()))
            position = second + 1
        elif code == 0x52:  # REDUCE
            arguments = stack.pop()
            stack[-1] = _rebuilt(stack[-1], arguments)
        elif code == 0x51:  # BINPERSID
            stack[-1] = _storage(stack[-1])
        elif code == 0x68:  # BINGET
            stack.append(memo[data[position]])
            position += 1
        elif code == 0x6A:  # LONG_BINGET
            stack.append(memo[int.from_bytes(_slice(data, position, 4), "little")])
            position += 4
        elif code == 0x72:  # LONG_BINPUT
            memo[int.from_bytes(_slice(data, position, 4), "little")] = stack[-1]
            position += 4
        elif code == 0x4A:  # BININT
            stack.append(int.from_bytes(_slice(data, position, 4), "little", signed=True))
            position += 4
        elif code == 0x4D:  # BININT2
            stack.append(int.from_bytes(_slice(data, position, 2), "little"))
            position += 2
        elif code == 0x8A:  # LONG1
            size = data[position]
            stack.append(int.from_bytes(_slice(data, position + 1, size), "little", signed=True))
            position += 1 + size
        elif code == 0x47:  # BINFLOAT
            stack.append(struct.unpack(">d", _slice(data, position, 8))[0])
            position += 8
        elif code == 0x29:  # EMPTY_TUPLE
            stack.append(())
        elif code == 0x7D:  # EMPTY_DICT
            stack.append({})
        elif code == 0x5D:  # EMPTY_LIST
            stack.append([])
        elif code in (0x88, 0x89):  # NEWTRUE, NEWFALSE
            stack.append(code == 0x88)
        elif code == 0x4E:  # NONE
            stack.append(None)
        elif code == 0x73:  # SETITEM
            value = stack.pop()
            key = stack.pop()
            _fill(stack[-1], [key, value])
        elif code == 0x75:  # SETITEMS
            base = marks.pop()
            items = stack[base:]
            del stack[base:]
            _fill(stack[-1], items)
        elif code == 0x61:  # APPEND
            value = stack.pop()
            cast("list[Any]", _list(stack[-1])).append(value)
        elif code == 0x65:  # APPENDS
            base = marks.pop()
            items = stack[base:]
            del stack[base:]
            cast("list[Any]", _list(stack[-1])).extend(items)
        elif code == 0x62:  # BUILD: a state_dict's remarks about its modules
            remarks = stack.pop()
            if not (_is_dict(stack[-1]) and _is_dict(remarks)):
                raise _Unsupported
        elif code == 0x80:  # PROTO
            position += 1
        elif code == 0x2E:  # STOP
            return cast("Any", stack[-1])
        else:
            raise _Unsupported
    raise _Unsupported


def _slice(data: bytes, start: int, size: int) -> bytes:
    if start + size > len(data):
        raise _Unsupported
    return data[start : start + size]


def _is_dict(value: Any) -> bool:
    return type(value) is dict


def _list(value: Any) -> Any:
    if type(value) is not list:
        raise _Unsupported
    return cast("Any", value)


def _fill(target: Any, items: list[Any]) -> None:
    if type(target) is not dict or len(items) % 2:
        raise _Unsupported
    for key, value in zip(items[0::2], items[1::2], strict=True):
        # Other keys have no spelling that a name could use.
        if type(key) not in (str, int):
            raise _Unsupported
        target[key] = value


def _storage(claim: Any) -> _Storage:
    if type(claim) is not tuple or len(cast("tuple[Any, ...]", claim)) != 5:
        raise _Unsupported
    tag, kind, key, device, _ = cast("tuple[Any, ...]", claim)
    if tag != "storage" or type(kind) is not _Global or type(key) is not str:
        raise _Unsupported
    if kind.module == "torch" and kind.name in _STORAGES:
        return _Storage(_STORAGES[kind.name], key, str(device))
    # An untyped storage leaves the type to the tensor (`_rebuild_tensor_v3`).
    if kind == ("torch.storage", "UntypedStorage"):
        return _Storage("", key, str(device))
    raise _Unsupported


def _rebuilt(function: Any, arguments: Any) -> Any:
    if type(function) is not _Global or type(arguments) is not tuple:
        raise _Unsupported
    args = cast("tuple[Any, ...]", arguments)
    if function == ("collections", "OrderedDict"):
        if args:
            raise _Unsupported
        return {}
    if function == ("torch._utils", "_rebuild_parameter"):
        if type(args[0]) is not _Tensor:
            raise _Unsupported
        return args[0]
    if function == ("torch._utils", "_rebuild_tensor_v2"):
        # A seventh argument marks the tensor as a conjugate or a negative.
        if len(args) != 6 or type(args[0]) is not _Storage or not args[0].kind:
            raise _Unsupported
        return _tensor(args[0], args[0].kind, args[1:4])
    if function == ("torch._utils", "_rebuild_tensor_v3"):
        if len(args) != 7 or type(args[0]) is not _Storage or type(args[6]) is not _Global:
            raise _Unsupported
        if args[6].module != "torch":
            raise _Unsupported
        return _tensor(args[0], args[6].name, args[1:4])
    raise _Unsupported


def _tensor(storage: _Storage, dtype: str, claim: tuple[Any, ...]) -> _Tensor:
    offset, shape, strides = claim
    # A negative offset would read before the storage.
    if type(offset) is not int or offset < 0 or len(shape) != len(strides):
        raise _Unsupported
    for size in (*shape, *strides):
        if type(size) is not int or size < 0:
            raise _Unsupported
    return _Tensor(storage, dtype, offset, shape, strides)


def _collect(
    value: Any, name: str, depth: int, named_tensors: list[tuple[str, _Tensor]], left: list[int]
) -> None:
    left[0] -= 1
    # A list may contain itself, or another list twice: few bytes, but an endless walk.
    if depth > DEEPEST or len(named_tensors) > MOST_TENSORS or left[0] < 0:
        raise _Unsupported
    if type(value) is _Tensor:
        named_tensors.append((name, value))
    elif type(value) is dict:
        for key, child in cast("dict[Any, Any]", value).items():
            _collect(child, f"{name}.{key}" if name else str(key), depth + 1, named_tensors, left)
    elif type(value) in (list, tuple):
        for index, child in enumerate(cast("list[Any]", value)):
            _collect(
                child, f"{name}.{index}" if name else str(index), depth + 1, named_tensors, left
            )


def _stored(
    source: _Source, name: str, tensor: _Tensor, prefix: str, entries: dict[str, tuple[int, int]]
) -> Stored:
    header, length = entries[f"{prefix}data/{tensor.storage.key}"]
    start = _data(source, header, length)
    expected = 1
    dense = True
    # C order: each stride is the product of the later sizes; axes of size 1 may have any stride.
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
        if size != 1 and stride != expected:
            dense = False
        expected *= size
    return Stored(
        name,
        tensor.dtype,
        tensor.shape,
        start,
        length,
        tensor.offset,
        dense or expected == 0,
        tensor.storage.device,
    )
