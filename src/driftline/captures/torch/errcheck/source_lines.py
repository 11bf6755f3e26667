"""Source lines: which line of the program is running, and which one made an autograd node.

The innermost frame counts that is neither torch's nor Driftline's. Nodes are needed for findings in
backward passes, where the line of the forward pass is the one to show.
"""

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
# Code of these two packages is never the line a user looks for.
_OTHER_CODE = tuple(
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


def _is_program_code(code: CodeType) -> bool:
    is_program = _foreign.get(code)
    if is_program is None:
        # Generated code has no file that could be shown.
        name = code.co_filename
        is_program = not name.startswith((*_OTHER_CODE, "<frozen", "<eval_with_key>"))
        if is_program and "/driftline/" in name:  # through the link a launched program sees us by
            is_program = not str(Path(name).resolve()).startswith(_OTHER_CODE)
        _foreign[code] = is_program
    return is_program


def here() -> tuple[CodeType, int] | None:
    """Code and number of the program's innermost line; cheap, for every operator."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        # The cache is asked first without a call: this runs for every operator.
        is_program = _foreign.get(code)
        if is_program or (is_program is None and _is_program_code(code)):
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
        if _is_program_code(frame.f_code):
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
        # A loop body marks the same line again and again; only its last number is needed.
        if thread.places and thread.places[-1] == place:
            thread.numbers[-1] = number
            return
        thread.numbers.append(number)
        thread.places.append(place)
        # The oldest half goes, as long programs would otherwise grow without end.
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
        # The first mark at or beyond a number was set right after its node was made.
        index = bisect_right(numbers, number)
        return line_of(places[index]) if index < len(places) else None
