"""Values as text: sizes in bytes (`2GB`) both ways, and cells of CSV files."""

from __future__ import annotations

import json
import re

from driftline.errors import BadInput

_FORMULA = tuple("=+-@＝＋－＠\n")
"""A spreadsheet takes a cell that begins so for a formula."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtp]?)(i?)b?", re.IGNORECASE)
_UNITS = "kmgtp"


def size_of(text: str) -> int:
    """Bytes from `2GB`, `500MB`, `1GiB`, `1000`.

    >>> size_of("2GB"), size_of("1.5KiB"), size_of("7")
    (2000000000, 1536, 7)
    """
    match = _SIZE.fullmatch(text.strip())
    # A limit of zero would refuse everything, so it is taken for a mistake.
    if match is None or float(match[1]) == 0:
        raise BadInput(f"a limit is a size such as 500MB or 2GiB, not '{text}'")
    # Decimal units as disks are sold; with an `i` the powers of 1024.
    power = _UNITS.index(match[2].lower()) + 1 if match[2] else 0
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def size_text(count: int) -> str:
    """A number of bytes in decimal units, to one digit.

    >>> size_text(999), size_text(1_234_567)
    ('999 bytes', '1.2 MB')
    """
    if count < 1000:
        return f"{count} bytes"
    size = float(count)
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 1000:
            return f"{size:.1f} {unit}"
    return f"{size / 1000:.1f} TB"


def csv_cell(value: object) -> str:
    """The text of a cell that no spreadsheet executes and no terminal obeys; None is empty.

    Names in a run may be anybody's. A text that begins as a formula does, or holds a control
    character, gets an apostrophe in front, its backslashes doubled and its control characters
    written as escapes. Nothing is lost: a cell that begins with an apostrophe is read by dropping
    it and undoing the escapes if it goes on with one of `= + - @ '`, or has a backslash anywhere;
    every other cell is as it was. Numbers are never changed.

    >>> csv_cell("model.layers.0"), csv_cell(-1.5), csv_cell("-1.5"), csv_cell(None)
    ('model.layers.0', '-1.5', '-1.5', '')
    >>> print(csv_cell("=HYPERLINK(1)"), csv_cell("a\\x1b[2J"), csv_cell("'quoted'"))
    '=HYPERLINK(1) 'a\\x1b[2J 'quoted'
    """
    if value is None:
        return ""
    text = str(value)
    # A line end inside quotes is what the format has quotes for.
    control = _CONTROL.search(text.replace("\n", "")) is not None
    formula = text.startswith(_FORMULA) and not _is_number(text) and text not in ("-", "+")
    marked = text[:1] == "'" and (text[1:].startswith((*_FORMULA, "'")) or "\\" in text)
    if not (control or formula or marked):
        return text
    return "'" + visible(text.replace("\\", "\\\\"))


def visible(text: str) -> str:
    """A text with its control characters written as escapes.

    >>> print(visible("a\\x1b[2J"))
    a\\x1b[2J
    """
    return _CONTROL.sub(lambda match: _escape(match[0]), text)


def printed_json(value: object, *, indent: int | None = None) -> str:
    """Strict JSON for a terminal: what JSON itself leaves of control characters is escaped too.

    >>> print(printed_json("é \\x1b \\x9b"))
    "é \\u001b \\u009b"
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent)
    # Line ends between values are ours; inside of texts JSON has escaped them.
    return _CONTROL.sub(lambda match: "\n" if match[0] == "\n" else f"\\u{ord(match[0]):04x}", text)


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return text.isascii() and "_" not in text
