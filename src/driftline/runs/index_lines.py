"""One index line: a record as JSON, and back. Every value of a line is checked before it is used.

Fields with their usual value are omitted. Rank and process are not in a line, because the folder's
name has them. Writing needs only the standard library; reading uses msgspec for long indexes, if it
is installed. This file does not know files.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import struct
from collections.abc import Callable
from json.encoder import encode_basestring_ascii as json_string
from typing import Any, cast

from driftline.numerics.dtypes import DTYPES
from driftline.numerics.fields import SKETCH_BUCKETS, Summary
from driftline.runs.layout import is_shard_name
from driftline.runs.records import Blob, Record, TensorKey, shape_trouble, usual

_SKETCH = struct.Struct(f"<{SKETCH_BUCKETS}d")
# Numbers in a line come from a file; larger ones would overflow 64-bit arithmetic later.
_LARGEST = 2**62
_KEPT = ("full", "sample", "summary", "digest", "describe")
_NUMBERS = ("min", "max", "mean", "std", "l2")
_BYTES = ',"shard":"'
"""Start of the location of a line's bytes; inside a name, the quotes would be escaped."""
_COUNTS = ("count", "zeros", "nan", "pos_inf", "neg_inf")


class BadLine(ValueError):
    """An index line has impossible values; the message says which."""


@functools.lru_cache(maxsize=4096)
def shape_text(shape: tuple[int, ...]) -> str:
    """Content of a shape's brackets in JSON; cached, because a model has few different shapes."""
    return ",".join(str(int(size)) for size in shape)


def encode_line(record: Record, order: int, digest: str, blob: Blob | None, lost: str) -> str:
    """The JSON of one record, without a line end.

    It is formatted by hand, because the JSON encoder takes a second for 20 000 lines.
    """
    # Unpacked at once, which is faster than reading fields one by one.
    (key, _, dtype, shape, alias, class_name, device, kept, _, _, stride, summary, placement, _) = (
        record
    )
    site, port, slot, step, visit, _, _, phase, moment = key
    line = (
        f'{{"order":{order},"site":{json_string(site)},"port":{json_string(port)},'
        f'"slot":{json_string(slot)},"step":{step},"visit":{visit},'
        f'"dtype":"{dtype}","shape":[{shape_text(shape)}],"kept":"{kept}"'
    )
    # Usual values are omitted from the line; the reader adds them again.
    usual_phase, usual_moment = usual(port)
    if phase != usual_phase:
        line += f',"phase":{json_string(phase)}'
    if moment != usual_moment:
        line += f',"moment":{json_string(moment)}'
    if alias:
        line += f',"alias":{json_string(alias)}'
    if class_name:
        line += f',"class":{json_string(class_name)}'
    if device:
        line += f',"device":{json_string(device)}'
    if placement:
        line += f',"placement":{json_string(placement)}'
    if digest:
        line += f',"digest":"{digest}"'
    if stride != 1:
        line += f',"sample_stride":{stride}'
    if summary is not None:
        line += f',"summary":{encode_summary(summary)}'
    if blob is not None:
        shard, offset, length = blob
        line += f'{_BYTES}{shard}","offset":{offset},"length":{length}'
    if lost:
        line += f',"lost":{json_string(lost)}'
    return line + "}"


def bytes_end(line: str) -> tuple[str, int] | None:
    """The shard of a line that we wrote, and the offset after its bytes; None without bytes."""
    # Searched from the end, where the location is, because a site may have any name.
    _, separator, place = line.rpartition(_BYTES)
    if not separator:
        return None
    location = json.loads("{" + separator[1:] + place)
    return location["shard"], location["offset"] + location["length"]


def without_bytes(line: str, lost: str) -> str:
    """A line that we wrote, with the reason why its bytes are lost instead of their location."""
    return f'{line.rpartition(_BYTES)[0]},"lost":{json_string(lost)}}}'


def line_ends(record: Record) -> tuple[str, str]:
    """The constant parts of all lines of one tensor: the text before the step and after the visit.

    The second part ends where the digest follows. The record must have step 0, visit 0 and no
    digest.
    """
    step_and_visit = ',"step":0,"visit":0'
    before, behind = encode_line(record, 0, "", None, "").split(step_and_visit, 1)
    return before.removeprefix('{"order":0') + ',"step":', behind.removesuffix("}")


def number(value: float) -> str:
    """A JSON number, or a string if JSON cannot represent the number.

    >>> number(0.5), number(float("-inf"))
    ('0.5', '"-inf"')
    """
    text = repr(float(value))
    # JSON has no NaN and no infinities; their texts end in these two letters.
    return f'"{text}"' if text[-1] in "nf" else text


def encode_summary(summary: Summary) -> str:
    count, low, high, mean, std, l2, zeros, nan, pos_inf, neg_inf, sketch = summary
    if nan != nan:  # statistics of other programs, without counts
        zeros = nan = pos_inf = neg_inf = '"nan"'
    text = (
        f'{{"count":{count},"zeros":{zeros},"nan":{nan},"pos_inf":{pos_inf},"neg_inf":{neg_inf},'
        f'"min":{number(low)},"max":{number(high)},"mean":{number(mean)},'
        f'"std":{number(std)},"l2":{number(l2)}'
    )
    if sketch:
        import binascii  # half a millisecond, which an index without summaries does not need

        packed = binascii.b2a_base64(_SKETCH.pack(*sketch), newline=False).decode("ascii")
        text += f',"sketch":"{packed}"'
    return text + "}"


def _number_of(value: object) -> float:
    if type(value) is str and value in ("nan", "inf", "-inf"):
        return float(value)
    # Not isinstance: a bool is an int, but not a number of a summary.
    if type(value) is float or type(value) is int:
        try:
            return float(value)
        except OverflowError:
            pass
    raise BadLine(f"a summary says {str(value)[:40]!r} where a number should be")


def decode_summary(value: object) -> Summary:
    """Read the summary of a line.

    Raises:
        BadLine: It is not a summary. If only the sketch is damaged, the summary has none instead.
    """
    if not isinstance(value, dict):
        raise BadLine("the summary is not an object")
    fields = cast("dict[str, object]", value)
    count, zeros, nan, pos_inf, neg_inf = (_count_of(fields.get(name), name) for name in _COUNTS)
    low, high, mean, std, l2 = (_number_of(fields.get(name)) for name in _NUMBERS)
    sketch: tuple[float, ...] = ()
    packed = fields.get("sketch")
    if isinstance(packed, str):
        import binascii

        # A sketch only refines a comparison, so a damaged one does not spoil the whole line.
        with contextlib.suppress(ValueError, struct.error):
            sketch = _SKETCH.unpack(binascii.a2b_base64(packed, strict_mode=True))
    return Summary(count, low, high, mean, std, l2, zeros, nan, pos_inf, neg_inf, sketch=sketch)


def _check_summary(value: object) -> None:
    """Check that `decode_summary` will succeed, at a third of its cost: the sketch is skipped."""
    if not isinstance(value, dict):
        raise BadLine("the summary is not an object")
    fields = cast("dict[str, object]", value)
    for name in _COUNTS:
        _count_of(fields.get(name), name)
    for name in _NUMBERS:
        _number_of(fields.get(name))


def _count_of(value: object, name: str) -> Any:
    """A count; NaN if nothing was counted."""
    if value == "nan" and name != "count":
        return math.nan
    return _checked_count(value, name)


def _checked_count(value: object, name: str) -> int:
    if type(value) is not int or not 0 <= value < _LARGEST:
        raise BadLine(f"{name} is {str(value)[:40]}, not a count")
    return value


class Line:
    """One decoded line, as it was written; check it with `check_line` before `record_of`.

    msgspec fills a class that has the same fields several times faster (see `decoder`).
    """

    order: Any
    site: Any
    port: Any
    slot: Any
    dtype: Any
    shape: Any
    step: Any
    visit: Any
    kept: Any
    phase: Any
    moment: Any
    alias: Any
    class_: Any
    device: Any
    placement: Any
    digest: Any
    sample_stride: Any
    summary: Any
    shard: Any
    offset: Any
    length: Any
    lost: Any


# Defaults are not class attributes: Python finds instance attributes faster without them.
_USUAL: dict[str, Any] = {
    **dict.fromkeys(Line.__annotations__, ""),
    **dict.fromkeys(("order", "site", "port", "slot", "dtype", "shape", "summary")),
    **dict.fromkeys(("step", "visit", "offset", "length"), 0),
    "kept": "full",
    "sample_stride": 1,
}
_FIELDS = {("class" if name == "class_" else name): name for name in Line.__annotations__}


_KNOWN = frozenset(_FIELDS)
# The scanner of the standard library, without the checks around it. The name is private, thus
# getattr.
_scan = cast("Callable[[str, int], tuple[Any, int]]", getattr(json.JSONDecoder(), "scan_once"))  # noqa: B009


def _decode_with_json(text: bytes) -> Line:
    words = text.decode("utf-8")
    try:
        value, end = _scan(words, 0)  # half the time of `json.loads`
    except StopIteration:
        value, end = json.loads(words), len(words)
    if not isinstance(value, dict) or (end != len(words) and words[end:].strip(_BLANK)):
        raise BadLine("not an object")
    return _line_of(cast("dict[str, Any]", value))


def _line_of(fields: dict[str, Any]) -> Line:
    # Newer versions may add fields; these are ignored, so that old readers can open new runs.
    if not _KNOWN.issuperset(fields):
        fields = {name: fields[name] for name in fields if name in _KNOWN}
    line = Line()
    if "class" in fields:
        fields["class_"] = fields.pop("class")
    # One assignment of a dict instead of 22 attributes, because this runs for every line.
    line.__dict__ = {**_USUAL, **fields}
    return line


def decode_together(text: bytes) -> list[Line] | None:
    """Decode all lines of a short index at once, in two thirds of the time; None if one is bad.

    To find the bad line, decode them one by one.
    """
    count = text.count(b"\n")
    # Exactly one object per line; otherwise line numbers in errors would be wrong.
    if not text.endswith(b"}\n") or text.count(b"}\n{") != count - 1:
        return None
    listed = b"[" + text[:-1].replace(b"\n", b",") + b"]"
    try:
        values, _ = _scan(listed.decode("utf-8"), 0)
    except (ValueError, StopIteration, RecursionError):
        return None
    return list(map(_line_of, values)) if len(values) == count else None


_BLANK = " \t\r\n"
SHORT = 1 << 20
"""Bytes of indexes that are read without msgspec, whose import takes 6 ms."""
_begun = 0


def decoder(size: int = SHORT) -> Callable[[bytes], Line]:
    """The fastest decoder if `size` more bytes follow; it raises ValueError for a bad line."""
    # msgspec is optional, because captures run in foreign environments. Reading the first megabyte
    # with the standard library takes no longer than loading msgspec.
    global _begun
    _begun += size
    return _decode_with_json if _begun < SHORT else _fast_decoder()


@functools.cache
def _fast_decoder() -> Callable[[bytes], Line]:
    try:
        import msgspec
    except ImportError:
        return _decode_with_json
    # Fields are decoded as Any, because `check_line` checks them with messages of its own.
    fields: list[Any] = [(name, Any, usual) for name, usual in _USUAL.items()]
    structure = msgspec.defstruct("FastLine", fields, rename={"class_": "class"}, gc=False)
    return cast("Callable[[bytes], Line]", msgspec.json.Decoder(structure).decode)


_names_a_shard = functools.lru_cache(maxsize=64)(is_shard_name)


def check_line(line: Line) -> int:
    """Refuse a line with impossible values, before anything is allocated for it.

    Returns:
        Number of bytes of the tensor's stored values.

    Raises:
        BadLine: A value is impossible.
    """
    # One long condition instead of a loop over names, because it runs for every line of an index.
    if (
        type(line.site) is not str
        or type(line.port) is not str
        or type(line.slot) is not str
        or type(line.phase) is not str
        or type(line.moment) is not str
        or type(line.alias) is not str
        or type(line.class_) is not str
        or type(line.device) is not str
        or type(line.placement) is not str
        or type(line.digest) is not str
        or type(line.lost) is not str
    ):
        raise BadLine("a name is not a string")
    if not line.port:
        raise BadLine("it has no port")
    order, step, visit = line.order, line.step, line.visit
    if not (
        type(order) is type(step) is type(visit) is int
        and 0 <= order < _LARGEST
        and 0 <= step < _LARGEST
        and 0 <= visit < _LARGEST
    ):
        for name in ("order", "step", "visit"):
            _checked_count(getattr(line, name), name)
    # An unknown type has no size, so nothing about its bytes could be checked.
    if type(line.dtype) is not str or line.dtype not in DTYPES:
        raise BadLine(f"dtype {str(line.dtype)[:40]!r} is not known")
    if line.kept not in _KEPT:
        raise BadLine(f"kept is {str(line.kept)[:40]!r}")
    elements = _checked_elements(line.shape)
    stride = line.sample_stride
    if stride != 1:
        if _checked_count(stride, "sample_stride") < 1:
            raise BadLine("sample_stride is 0")
        elements = -(-elements // stride)
    if line.summary is not None:
        _check_summary(line.summary)
    expected = DTYPES[line.dtype].byte_count(elements)
    if line.shard != "":
        _check_location(line, expected)
    return expected


def _checked_elements(shape: object) -> int:
    """Number of elements of a shape; refuses impossible shapes."""
    if not isinstance(shape, list):
        raise BadLine("the shape is not a list")
    elements = 1
    for extent in cast("list[object]", shape):
        if type(extent) is not int or not 0 <= extent < _LARGEST:
            raise BadLine(f"the shape has {str(extent)[:40]} in it")
        elements *= extent
    # A product of plausible extents may still be absurd, even if a zero hides it.
    if elements >= _LARGEST:
        raise BadLine(f"the shape claims {elements:.3g} elements")
    if not elements and (trouble := shape_trouble(tuple(cast("list[int]", shape)))):
        raise BadLine(f"the line {trouble}")
    return elements


def _check_location(line: Line, expected: int) -> None:
    """Refuse a line whose bytes cannot have the location or the number that it claims."""
    # The name becomes part of a path, so only names of our own form are accepted.
    if type(line.shard) is not str or not _names_a_shard(line.shard):
        raise BadLine(f"shard {str(line.shard)[:60]!r} is not the name of a shard")
    offset, length = line.offset, line.length
    if type(offset) is not int or not 0 <= offset < _LARGEST:
        _checked_count(offset, "offset")
    # The length must follow from type and shape: a shorter blob would be read beyond its end.
    if type(length) is not int or length != expected:
        _checked_count(length, "length")
        raise BadLine(f"{length} bytes are listed for a tensor of {expected}")


def record_of(line: Line, rank: int, process: int) -> Record:
    """The record of a checked line."""
    port = line.port
    key = TensorKey(
        line.site,
        port,
        line.slot,
        line.step,
        line.visit,
        rank,
        process,
        line.phase or usual(port)[0],
        line.moment or usual(port)[1],
    )
    shard = line.shard
    # Positional, because keywords take twice as long, and an index may have a million lines.
    return Record(
        key,
        line.order,
        line.dtype,
        tuple(line.shape),
        line.alias,
        line.class_,
        line.device,
        line.kept,
        line.digest,
        Blob(shard, line.offset, line.length) if shard else None,
        line.sample_stride,
        None if line.summary is None else decode_summary(line.summary),
        line.placement,
        line.lost,
    )
