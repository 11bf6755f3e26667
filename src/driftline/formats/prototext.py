"""Protobuf text, token by token: `name: "x"  attr { key: "a" value { s: "b: {c}" } }`.

Strings may hold braces, colons and escapes; lists, `<>` messages, comments and adjacent strings are
understood; nesting is bounded and nothing is kept. Knows no message: whoever walks it picks out
what it wants.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

DEEPEST = 100
Event = tuple[Literal["open", "close", "value"], str, str]
"""("open", field, ""), ("close", "", "") or ("value", field, the token as it is written)."""

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
    """Something that is no protobuf text, with its line."""


def walk(text: str) -> Iterator[Event]:
    """Every field of a text in the order in which it stands.

    Raises:
        NotText: It is none, or nested deeper than anybody would write.
    """
    closers: list[str] = []
    lists: list[str] = []  # the field that each open list belongs to
    field = pending = ""  # strings side by side are one
    awaiting: Literal["field", "colon", "value", "more"] = "field"
    for kind, token, at in _tokens(text):
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
                raise _wrong(text, at, f"{token[:40]} where a field's name should be")
            field, awaiting = token, "colon"
        elif awaiting == "colon" and token == ":":
            awaiting = "value"
        elif token in _CLOSES and (token != "[" or (awaiting == "value" and not in_list)):
            closers.append(_CLOSES[token])
            if len(closers) > DEEPEST:
                raise _wrong(text, at, f"nested deeper than {DEEPEST} levels")
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
            raise _wrong(text, at, f"{token[:40]} after '{field[:40]}' where a value should be")
    if awaiting == "more":
        yield "value", field, pending
    elif awaiting != "field":
        raise _wrong(text, len(text), f"the text ends after '{field[:40]}'")
    if closers:
        raise _wrong(text, len(text), f"{len(closers)} messages are never closed")


def _tokens(text: str) -> Iterator[tuple[str, str, int]]:
    for found in _TOKEN.finditer(text):
        kind = found.lastgroup
        if kind is None:  # a comment
            continue
        if kind == "stray":
            stray = found[kind]
            what = "a string that does not end" if stray in "\"'" else f"a stray {stray!r}"
            raise _wrong(text, found.start(kind), what)
        yield kind, found[kind], found.start(kind)


def _wrong(text: str, at: int, what: str) -> NotText:
    return NotText(f"line {text.count(chr(10), 0, at) + 1}: {what}")


def unquoted(token: str) -> str:
    """The text a value stands for: strings without quotes and escapes, words as they are.

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


def _unescaped(found: re.Match[bytes]) -> bytes:
    hexadecimal, octal, short, long, letter = found.groups()
    if hexadecimal is not None:
        return bytes((int(hexadecimal, 16),))
    if octal is not None:
        return bytes((int(octal, 8) & 0xFF,))
    if short is not None or long is not None:
        code = int(short or long, 16)
        legal = code <= 0x10FFFF and not 0xD800 <= code < 0xE000
        return (chr(code) if legal else "�").encode()
    return _LETTERS.get(letter[0], letter)
