"""Protobuf bytes, field by field: enough to read a message whose layout is known.

No descriptors, no runtime, nothing allocated but what is asked for. A message that cannot be
believed is a `Malformed` with its reason; what the fields mean is not known here.
"""

from __future__ import annotations

from typing import Literal

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
LONGEST_VARINT = 10
MOST_FIELDS = 65_536
"""Of one message; nothing that is read here has a thousandth of it."""


class Malformed(ValueError):
    """Bytes that are no such message, with the reason."""


def varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """A number and the position behind it.

    Raises:
        Malformed: It does not end, or is longer than any number may be.
    """
    value = shift = 0
    for position in range(at, min(end, at + LONGEST_VARINT)):
        byte = data[position]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, position + 1
        shift += 7
    if end - at >= LONGEST_VARINT:
        raise Malformed(f"the number at byte {at} is longer than 64 bits")
    raise Malformed(f"the number at byte {at} does not end before its message does")


def fields(data: bytes, at: int, end: int) -> list[tuple[int, int, int, int]]:
    """Every field of the message in `data[at:end]`: number, wire type, and its value.

    Returns:
        `(number, VARINT, value, 0)` for numbers, `(number, BYTES, start, stop)` for text, bytes,
        messages and packed lists, `(number, wire, start, stop)` for the fixed widths.

    Raises:
        Malformed: The message ends in the middle of something, or says something impossible.
    """
    found: list[tuple[int, int, int, int]] = []
    while at < end:
        if len(found) > MOST_FIELDS:
            raise Malformed(f"more than {MOST_FIELDS} fields in one message")
        begin = at
        tag = data[at]
        at += 1
        if tag >= 0x80:
            tag, at = varint(data, begin, end)
        number, wire = tag >> 3, tag & 7
        if number == 0:
            raise Malformed(f"byte {begin} opens a field of number 0")
        if wire in (VARINT, BYTES):
            # Most numbers are one byte long: this loop is half of opening a large dump.
            if at < end and data[at] < 0x80:
                value = data[at]
                at += 1
            else:
                value, at = varint(data, at, end)
            if wire == VARINT:
                found.append((number, VARINT, value, 0))
                continue
        elif wire in (FIXED64, FIXED32):
            value = 8 if wire == FIXED64 else 4
        else:
            raise Malformed(f"field {number} at byte {begin} has wire type {wire}")
        if value > end - at:
            raise Malformed(
                f"field {number} at byte {begin} is {value} bytes long and {end - at} are left"
            )
        found.append((number, wire, at, at + value))
        at += value
    return found


def expect(number: int, wire: int, wanted: Literal[0, 2]) -> None:
    """Refuse a known field of another kind.

    Raises:
        Malformed: The wire type is not the wanted one.
    """
    if wire != wanted:
        raise Malformed(f"field {number} has wire type {wire} instead of {wanted}")


def numbers(data: bytes, field: tuple[int, int, int, int], into: list[int], at_most: int) -> None:
    """Add the value or values of a repeated number, packed or not.

    Raises:
        Malformed: It is no list of numbers, or longer than anybody would write.
    """
    number, wire, start, stop = field
    if wire == VARINT:
        into.append(start)
    else:
        expect(number, wire, BYTES)
        while start < stop and len(into) <= at_most:
            value, start = varint(data, start, stop)
            into.append(value)
    if len(into) > at_most:
        raise Malformed(f"field {number} repeats more than {at_most} times")


def text(data: bytes, start: int, stop: int, longest: int = 65_536) -> str:
    """A string; strange bytes are replaced.

    Raises:
        Malformed: It is longer than anybody would write.
    """
    if stop - start > longest:
        raise Malformed(f"a text of {stop - start} bytes, more than the {longest} anybody writes")
    return bytes(data[start:stop]).decode("utf-8", "replace")
