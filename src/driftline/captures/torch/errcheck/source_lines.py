"""Find source lines: the line of the program that is running, or that made an autograd node.

The line is that of the innermost frame that is neither torch's nor Driftline's. Nodes are needed
for findings in backward passes, for which the line of the forward pass is shown.
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
# Lines in these two packages are never shown.
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
        """The source text of the line; empty if it cannot be read."""
        return linecache.getline(self.file, self.number).strip()

    def __str__(self) -> str:
        return f"{self.file}:{self.number} in {self.function}"


def _is_program_code(code: CodeType) -> bool:
    is_program = _foreign.get(code)
    if is_program is None:
        # Generated code has no source file.
        name = code.co_filename
        is_program = not name.startswith((*_OTHER_CODE, "<frozen", "<eval_with_key>"))
        # A launched program may import Driftline through the launcher's link.
        if is_program and "/driftline/" in name:
            is_program = not str(Path(name).resolve()).startswith(_OTHER_CODE)
        _foreign[code] = is_program
    return is_program


def here() -> tuple[CodeType, int] | None:
    """Code and line number of the program's innermost line; fast, for use at every operator."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        # The cache is read here to avoid a call, because this runs for every operator.
        is_program = _foreign.get(code)
        if is_program or (is_program is None and _is_program_code(code)):
            return code, frame.f_lineno
        frame = frame.f_back
    return None


def line_of(place: tuple[CodeType, int]) -> Line:
    code, number = place
    return Line(code.co_filename, number, code.co_qualname)


def stack() -> list[Line]:
    """The program's own lines on the stack, the innermost first."""
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
    """The lines of the program that made the nodes of the autograd graph, by sequence number."""

    def __init__(self) -> None:
        self._thread = _Thread()
        self._last = self._thread.numbers, self._thread.places

    def mark(self) -> None:
        """Note the current line; call it after each operator, when its node has its number."""
        place = here()
        if place is None:
            return
        thread = self._thread
        number: int = _autograd._get_sequence_nr()
        # A loop may run the same line many times; only the last number is needed.
        if thread.places and thread.places[-1] == place:
            thread.numbers[-1] = number
            return
        thread.numbers.append(number)
        thread.places.append(place)
        # The oldest half is dropped, so that the lists stay small in long programs.
        if len(thread.places) > MOST_MARKS:
            del thread.numbers[: MOST_MARKS // 2], thread.places[: MOST_MARKS // 2]

    def enter_backward(self) -> None:
        # The engine may run nodes in its own threads, which have no marks.
        self._last = self._thread.numbers, self._thread.places

    def line(self, number: int) -> Line | None:
        """The line that made the node with this number."""
        numbers, places = self._thread.numbers, self._thread.places
        if not numbers:
            numbers, places = self._last
        # The first mark above a number was set just after its node was made.
        index = bisect_right(numbers, number)
        return line_of(places[index]) if index < len(places) else None
