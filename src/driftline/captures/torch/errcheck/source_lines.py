"""Which line of the program is running: the innermost frames that are neither torch's nor ours."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

from __future__ import annotations

import linecache
import sys
import threading
from bisect import bisect_right
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

import driftline

MOST_LINES = 12
MOST_MARKS = 200_000
_autograd: Any = torch.autograd
_NOT_THEIRS = tuple(
    str(Path(package.__file__ or "").resolve().parent) + "/" for package in (torch, driftline)
)
_foreign: dict[CodeType, bool] = {}


class Line(NamedTuple):
    """One line of a program."""

    file: str
    number: int
    function: str

    @property
    def text(self) -> str:
        """What is written there; empty where it cannot be read."""
        return linecache.getline(self.file, self.number).strip()

    def __str__(self) -> str:
        return f"{self.file}:{self.number} in {self.function}"


def _is_theirs(code: CodeType) -> bool:
    found = _foreign.get(code)
    if found is None:
        name = code.co_filename
        found = not name.startswith((*_NOT_THEIRS, "<frozen", "<eval_with_key>"))
        if found and "/driftline/" in name:  # through the link a launched program sees us by
            found = not str(Path(name).resolve()).startswith(_NOT_THEIRS)
        _foreign[code] = found
    return found


def here() -> tuple[CodeType, int] | None:
    """Code and number of the program's innermost line; cheap, for every operator."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        known = _foreign.get(code)
        if known or (known is None and _is_theirs(code)):
            return code, frame.f_lineno
        frame = frame.f_back
    return None


def line_of(place: tuple[CodeType, int]) -> Line:
    code, number = place
    return Line(code.co_filename, number, code.co_qualname)


def stack() -> list[Line]:
    """The program's own lines, the innermost first."""
    lines: list[Line] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(lines) < MOST_LINES:
        if _is_theirs(frame.f_code):
            lines.append(line_of((frame.f_code, frame.f_lineno)))
        frame = frame.f_back
    return lines


class _Thread(threading.local):
    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.places: list[tuple[CodeType, int]] = []


class LineMarks:
    """Which line of the program made which nodes of the autograd graph, by their numbers."""

    def __init__(self) -> None:
        self._thread = _Thread()
        self._last = self._thread.numbers, self._thread.places

    def mark(self) -> None:
        """Called when an operator has run: its node, if it has one, has taken its number."""
        place = here()
        if place is None:
            return
        thread = self._thread
        number: int = _autograd._get_sequence_nr()
        if thread.places and thread.places[-1] == place:
            thread.numbers[-1] = number
            return
        thread.numbers.append(number)
        thread.places.append(place)
        if len(thread.places) > MOST_MARKS:
            del thread.numbers[: MOST_MARKS // 2], thread.places[: MOST_MARKS // 2]

    def enter_backward(self) -> None:
        # The engine may run nodes in threads of its own, which have no marks.
        self._last = self._thread.numbers, self._thread.places

    def line(self, number: int) -> Line | None:
        """The line that made the node with this number."""
        numbers, places = self._thread.numbers, self._thread.places
        if not numbers:
            numbers, places = self._last
        index = bisect_right(numbers, number)
        return line_of(places[index]) if index < len(places) else None
