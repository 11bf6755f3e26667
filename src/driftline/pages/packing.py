"""A document with arrays in it as bytes: JSON, and the arrays beside it (docs/report-format.md).

Knows the container, not what is in it. A front end maps the arrays where they lie, so that 50 000
rows open without 50 000 objects.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from driftline.errors import BadFile

MAGIC = b"DLP1"
_TYPES = {"f64": "<f8", "f32": "<f4", "i32": "<i4", "u32": "<u4", "u16": "<u2", "u8": "u1"}
_NAMES = {np.dtype(code).str.lstrip("|"): name for name, code in _TYPES.items()}
_FILL = 8
_LARGEST_SINGLE = float(np.finfo(np.float32).max)
_SMALLEST_SINGLE = float(np.finfo(np.float32).tiny)

Array = np.ndarray[Any, np.dtype[Any]]


def pack(document: Mapping[str, Any]) -> bytes:
    """The container of a document: mappings, sequences, text, numbers, None and numpy arrays."""
    blobs: list[bytes] = []
    place = 0

    def plain(value: Any) -> Any:
        nonlocal place
        if isinstance(value, np.ndarray):
            array = _stored(cast(Array, value))
            content = array.tobytes()
            at = place
            content += bytes(-len(content) % _FILL)
            blobs.append(content)
            place += len(content)
            return {"$": _NAMES[array.dtype.str.lstrip("|")], "at": at, "n": int(array.size)}
        if isinstance(value, np.generic):
            return plain(value.item())
        if isinstance(value, float):
            if math.isfinite(value):
                return value
            return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
        if isinstance(value, Mapping):
            items = cast("Mapping[object, Any]", value).items()
            return {str(key): plain(item) for key, item in items}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in cast("Sequence[Any]", value)]
        return value

    shown = plain(document)
    # A lone half of a surrogate pair (names of strangers) is no UTF-8, and no reason to fail.
    text = json.dumps(shown, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    content = text.encode("utf-8", "backslashreplace")
    content += b" " * (-len(content) % _FILL)
    return b"".join([MAGIC, struct.pack("<I", len(content)), content, *blobs])


def unpack(content: bytes) -> dict[str, Any]:
    """The document of a container, with numpy arrays where it has arrays.

    Raises:
        BadFile: It is no container.
    """
    if content[:4] != MAGIC or len(content) < 8:
        raise BadFile("this is no data of a page")
    (length,) = struct.unpack_from("<I", content, 4)
    start = 8 + length

    def whole(value: dict[str, Any]) -> Any:
        if value.keys() != {"$", "at", "n"}:
            return value
        return np.frombuffer(content, _TYPES[value["$"]], value["n"], start + value["at"])

    try:
        return json.loads(content[8:start], object_hook=whole)
    except (ValueError, KeyError, TypeError) as trouble:
        raise BadFile(f"this is no data of a page: {trouble}") from None


def armoured(content: bytes) -> str:
    """A container as it stands in a page: compressed, as letters that end no element."""
    # mtime: the same data are the same file.
    return base64.b64encode(gzip.compress(content, 6, mtime=0)).decode("ascii")


def disarmoured(text: str) -> bytes:
    """The inverse of `armoured`."""
    return gzip.decompress(base64.b64decode(text))


def _stored(array: Array) -> Array:
    """The array in one of the types of a container, without losing what a reader can see."""
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.dtype.str.lstrip("|") in _NAMES:
        return flat
    if flat.dtype.kind == "b":
        return flat.astype(np.uint8)
    if flat.dtype.kind in "iu":
        low, high = (int(flat.min()), int(flat.max())) if flat.size else (0, 0)
        if low >= 0:
            for kind in (np.uint8, np.uint16, np.uint32):
                if high <= np.iinfo(kind).max:
                    return flat.astype(kind)
        elif low >= -(1 << 31) and high < 1 << 31:
            return flat.astype(np.int32)
    return flat.astype("<f8")


def singles(values: Array) -> Array:
    """Figures as float32 where that loses nothing but digits nobody reads.

    >>> singles(np.array([1e-300, 1.0])).dtype, singles(np.array([0.1, np.inf])).dtype
    (dtype('float64'), dtype('float32'))
    """
    sizes = np.abs(values[np.isfinite(values)])
    sizes = sizes[sizes > 0]
    if sizes.size and (sizes.max() > _LARGEST_SINGLE or sizes.min() < _SMALLEST_SINGLE):
        return values
    whole = sizes.size and bool((sizes == np.floor(sizes)).all())
    if whole and sizes.max() > 1 << 24:
        return values
    return values.astype(np.float32)
