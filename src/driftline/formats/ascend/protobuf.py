"""Protobuf without descriptors: binary messages field by field, text messages token by token.

This is enough to read a message whose layout the caller knows. Only requested values are allocated.
An invalid message raises `Malformed`, an invalid text `NotText`, with the reason. This file does
not know what any field means.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
# Ten groups of seven bits hold 64 bits.
LONGEST_VARINT = 10
MOST_FIELDS = 65_536
"""Limit for one message; no message that is read here has a thousandth of it."""


class Malformed(ValueError):
    """Bytes that are not a valid message, with the reason."""


def varint(data: bytes, start: int, end: int) -> tuple[int, int]:
    """Read a number; returns it and the position after it.

    Raises:
        Malformed: The number does not end, or is longer than allowed.
    """
    value = shift = 0
    for position in range(start, min(end, start + LONGEST_VARINT)):
        byte = data[position]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            # The tenth byte may have bits beyond 64, which protobuf ignores.
            return value & 0xFFFF_FFFF_FFFF_FFFF, position + 1
        shift += 7
    if end - start >= LONGEST_VARINT:
        raise Malformed(f"the number at byte {start} is longer than 64 bits")
    raise Malformed(f"the number at byte {start} does not end before its message does")


def fields(data: bytes, position: int, end: int) -> list[tuple[int, int, int, int]]:
    """Every field of the message in `data[position:end]`: number, wire type, and its value.

    Returns:
        `(number, VARINT, value, 0)` for numbers, `(number, BYTES, start, stop)` for text, bytes,
        messages and packed lists, `(number, wire, start, stop)` for the fixed widths.

    Raises:
        Malformed: The message ends inside a field, or contains something impossible.
    """
    message_fields: list[tuple[int, int, int, int]] = []
    while position < end:
        # A field takes only two bytes, so a hostile file could become millions of tuples.
        if len(message_fields) > MOST_FIELDS:
            raise Malformed(f"more than {MOST_FIELDS} fields in one message")
        begin = position
        tag = data[position]
        position += 1
        if tag >= 0x80:
            tag, position = varint(data, begin, end)
        number, wire = tag >> 3, tag & 7
        # Field numbers begin at 1; zero shows that the bytes are not a message.
        if number == 0:
            raise Malformed(f"byte {begin} opens a field of number 0")
        if wire in (VARINT, BYTES):
            # Most numbers are one byte long; this loop takes half the time of opening a large dump.
            if position < end and data[position] < 0x80:
                value = data[position]
                position += 1
            else:
                value, position = varint(data, position, end)
            if wire == VARINT:
                message_fields.append((number, VARINT, value, 0))
                continue
        elif wire in (FIXED64, FIXED32):
            value = 8 if wire == FIXED64 else 4
        else:
            raise Malformed(f"field {number} at byte {begin} has wire type {wire}")
        if value > end - position:
            raise Malformed(
                f"field {number} at byte {begin} is {value} bytes long "
                f"and {end - position} are left"
            )
        message_fields.append((number, wire, position, position + value))
        position += value
    return message_fields


def expect(number: int, wire: int, wanted: Literal[0, 2]) -> None:
    """Refuse a known field that has another wire type.

    Raises:
        Malformed: The wire type differs.
    """
    if wire != wanted:
        raise Malformed(f"field {number} has wire type {wire} instead of {wanted}")


def numbers(data: bytes, field: tuple[int, int, int, int], into: list[int], at_most: int) -> None:
    """Add the value or values of a repeated number, packed or not.

    Raises:
        Malformed: The field is not a list of numbers, or is too long.
    """
    number, wire, start, stop = field
    if wire == VARINT:
        into.append(start)
    else:
        expect(number, wire, BYTES)
        # Stops one after the limit, so that a long list is refused without being read.
        while start < stop and len(into) <= at_most:
            value, start = varint(data, start, stop)
            into.append(value)
    if len(into) > at_most:
        raise Malformed(f"field {number} repeats more than {at_most} times")


def text(data: bytes, start: int, stop: int, longest: int = 65_536) -> str:
    """Decode a string; invalid bytes are replaced.

    Raises:
        Malformed: The string is too long.
    """
    if stop - start > longest:
        raise Malformed(f"a text of {stop - start} bytes, more than the {longest} anybody writes")
    return bytes(data[start:stop]).decode("utf-8", "replace")


# ---- Text form: `name: "x" attr { key: "a" value { s: "b: {c}" } }`


DEEPEST = 100
Event = tuple[Literal["open", "close", "value"], str, str]
"""("open", field, ""), ("close", "", "") or ("value", field, the token as written)."""

# Every alternative consumes a character, so the scan is linear in the text.
_TOKEN = re.compile(
    r"""\s*(?:
      (?P<word>[A-Za-z0-9_.+\-/%$]+|\[[A-Za-z_][\w./]*\](?=\s*[:{<]))
    | (?P<mark>[:{}<>\[\],;])
    | (?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
    | \#[^\n]*
    | (?P<stray>\S)
    )""",
    re.VERBOSE | re.ASCII,
)
_ESCAPE = re.compile(
    rb"\\(?:x([0-9A-Fa-f]{1,2})|([0-7]{1,3})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL
)
_LETTERS = dict(zip(b"nrtabfv", (b"\n", b"\r", b"\t", b"\a", b"\b", b"\f", b"\v"), strict=True))
_CLOSES = {"{": "}", "<": ">", "[": "]"}


class NotText(ValueError):
    """The text is not a protobuf text; the message has the line."""


def walk(text: str) -> Iterator[Event]:
    """Every field of a text, in its order.

    Raises:
        NotText: The text is not a protobuf text, or is nested too deep.
    """
    closers: list[str] = []
    lists: list[str] = []  # the field of each open list
    field = pending = ""  # adjacent strings are one value
    awaiting: Literal["field", "colon", "value", "more"] = "field"
    for kind, token, offset in _tokens(text):
        # Adjacent strings are one value, so a string waits for the next token.
        if awaiting == "more":
            if kind == "string":
                pending += " " + token
                continue
            yield "value", field, pending
            awaiting = "field"
        in_list = bool(closers) and closers[-1] == "]"
        if awaiting == "field" and token in (",", ";"):
            continue
        if awaiting == "field" and closers and token == closers[-1]:
            closers.pop()
            if in_list:
                lists.pop()
            else:
                yield "close", "", ""
            continue
        if awaiting == "field" and in_list:
            field, awaiting = lists[-1], "value"
        if awaiting == "field":
            if kind != "word":
                raise _malformed_text(text, offset, f"{token[:40]} where a field's name should be")
            field, awaiting = token, "colon"
        elif awaiting == "colon" and token == ":":
            awaiting = "value"
        elif token in _CLOSES and (token != "[" or (awaiting == "value" and not in_list)):
            closers.append(_CLOSES[token])
            # Protobuf's own limit for nesting.
            if len(closers) > DEEPEST:
                raise _malformed_text(text, offset, f"nested deeper than {DEEPEST} levels")
            if token == "[":
                lists.append(field)
            else:
                yield "open", field, ""
            awaiting = "field"
        elif awaiting == "value" and kind == "string":
            pending, awaiting = token, "more"
        elif awaiting == "value" and kind == "word":
            yield "value", field, token
            awaiting = "field"
        else:
            raise _malformed_text(
                text, offset, f"{token[:40]} after '{field[:40]}' where a value should be"
            )
    if awaiting == "more":
        yield "value", field, pending
    elif awaiting != "field":
        raise _malformed_text(text, len(text), f"the text ends after '{field[:40]}'")
    if closers:
        raise _malformed_text(text, len(text), f"{len(closers)} messages are never closed")


def _tokens(text: str) -> Iterator[tuple[str, str, int]]:
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup
        if kind is None:  # a comment
            continue
        if kind == "stray":
            stray = match[kind]
            what = "a string that does not end" if stray in "\"'" else f"a stray {stray!r}"
            raise _malformed_text(text, match.start(kind), what)
        yield kind, match[kind], match.start(kind)


def _malformed_text(text: str, offset: int, what: str) -> NotText:
    return NotText(f"line {text.count(chr(10), 0, offset) + 1}: {what}")


def unquoted(token: str) -> str:
    """The text of a value: strings without quotes and escapes, words unchanged.

    >>> unquoted(r'"a: {b}\\n" "\\303\\244"')
    'a: {b}\\nä'
    """
    if token[:1] not in "\"'":
        return token
    parts: list[bytes] = []
    for kind, part, _ in _tokens(token):
        if kind == "string":
            body = part[1:-1].encode("utf-8", "surrogatepass")
            parts.append(_ESCAPE.sub(_unescaped, body) if b"\\" in body else body)
    return b"".join(parts).decode("utf-8", "replace")


def _unescaped(match: re.Match[bytes]) -> bytes:
    hexadecimal, octal, short, long, letter = match.groups()
    if hexadecimal is not None:
        return bytes((int(hexadecimal, 16),))
    if octal is not None:
        return bytes((int(octal, 8) & 0xFF,))
    if short is not None or long is not None:
        code = int(short or long, 16)
        # Surrogates and numbers beyond Unicode cannot be encoded.
        legal = code <= 0x10FFFF and not 0xD800 <= code < 0xE000
        return (chr(code) if legal else "�").encode()
    return _LETTERS.get(letter[0], letter)
