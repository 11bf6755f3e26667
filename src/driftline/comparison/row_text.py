"""Rows in a long JSON file that lies as we write it: one after the other, in little memory.

All rows of a table as JSON values at once would take several times the memory of the table itself.
Whatever does not lie so is left to `json.loads`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO

from driftline.comparison.row import Row

ROWS = ', "rows": ['
"""What comes before the first row. Keys of ours that come earlier hold no such text."""
_CHUNK = 1 << 20
_LONGEST = 16 << 20
"""Characters of a head or of one row; what is longer was not written by us."""


def write_rows(rows: Iterable[Row], stream: TextIO) -> None:
    """The rows, without the brackets around them."""
    encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode
    between = ""
    for row in rows:
        stream.write(between + encode(row.as_json()))
        between = ", "


class OtherText(ValueError):
    """The file does not lie as we write it."""


class RowText:
    """A file of rows: what comes before them, they themselves, what comes after.

    Attributes:
        head: All before the rows, without the mark; an open JSON object.
    """

    def __init__(self, stream: TextIO) -> None:
        """Reads as far as the first row.

        Raises:
            OtherText: There is none.
        """
        self._stream = stream
        self._text = ""
        self._at = 0
        while (found := self._text.find(ROWS)) < 0:
            if len(self._text) > _LONGEST or not self._more():
                raise OtherText
        self.head: str = self._text[:found]
        self._at = found + len(ROWS)

    def rows(self) -> Iterator[Any]:
        """Every row, once.

        Raises:
            OtherText: One is no row, or they do not end as they should.
        """
        read: Callable[[str, int], tuple[Any, int]] = json.JSONDecoder().raw_decode
        while True:
            while self._at >= len(self._text) - 2 and self._more():
                pass
            if self._text[self._at : self._at + 1] != "{":
                return
            try:
                value, end = read(self._text, self._at)
            except ValueError:
                if len(self._text) - self._at > _LONGEST or not self._more():
                    raise OtherText from None
                continue
            self._at = end
            while self._at >= len(self._text) - 2 and self._more():
                pass
            self._at += 2 if self._text[self._at : self._at + 2] == ", " else 0
            yield value

    def tail(self) -> str:
        """What comes after the rows, from the bracket that closes them on.

        Raises:
            OtherText: It is too long.
        """
        while self._more():
            if len(self._text) - self._at > _LONGEST:
                raise OtherText
        return self._text[self._at :]

    def _more(self) -> bool:
        text = self._stream.read(_CHUNK)
        self._text = self._text[self._at :] + text
        self._at = 0
        return bool(text)
