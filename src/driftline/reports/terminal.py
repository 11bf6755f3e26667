"""Views as text for a terminal: fits the width, colours only where somebody can see them.

Written by hand rather than with rich: comparing a gigabyte takes 0.15 s, importing rich nearly as
long.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import TextIO

from driftline import settings
from driftline.reports.view import Block, Branch, Facts, Grid, Sentence, Tone, Value, View
from driftline.reports.wording import number, shorten

_CODES: dict[Tone, str] = {
    "plain": "",
    "good": "\x1b[32m",
    "bad": "\x1b[31m",
    "doubtful": "\x1b[33m",
    "quiet": "\x1b[2m",
    "strong": "\x1b[1m",
}
_RESET = "\x1b[0m"
_GAP = 2
_LEAST_STRETCH = 16
NOT_A_TERMINAL = 160
"""Width for a pipe or a file, where nobody wraps."""


def width_of(stream: TextIO) -> int:
    if not stream.isatty():
        return shutil.get_terminal_size((NOT_A_TERMINAL, 24)).columns
    return shutil.get_terminal_size((100, 24)).columns


def wants_colour(stream: TextIO) -> bool:
    return stream.isatty() and not settings.colours_refused()


def show(view: View, stream: TextIO | None = None) -> None:
    """Write a view to a stream (stdout), as that stream can take it."""
    out = stream or sys.stdout
    out.write(paint(view, width=width_of(out), colour=wants_colour(out)))


def paint(view: View, *, width: int = 100, colour: bool = False) -> str:
    """The view as text that ends with a newline."""
    parts: list[str] = []
    previous = None
    for block in view.blocks:
        if previous is not None and not (
            isinstance(block, Sentence) and isinstance(previous, Sentence)
        ):
            parts.append("")
        parts += _block(block, width, colour)
        previous = block
    return "".join(line.rstrip() + "\n" for line in parts)


def _block(block: Block, width: int, colour: bool) -> Iterator[str]:
    if isinstance(block, Sentence):
        for line in textwrap.wrap(printable(block.text), width, break_long_words=False) or [""]:
            yield _toned(line, block.tone, colour)
    elif isinstance(block, Facts):
        longest = max((len(name) for name, _ in block.pairs), default=0)
        for name, value in block.pairs:
            label = _toned(name.ljust(longest), "quiet", colour)
            yield f"{label}  {shorten(printable(value), max(20, width - longest - 2))}"
    elif isinstance(block, Grid):
        yield from _grid(block, width, colour)
    else:
        if block.title:
            yield _toned(block.title, "strong", colour)
        for branch in block.roots:
            yield from _branch(branch, "", "", width, colour)


def _toned(text: str, tone: Tone, colour: bool) -> str:
    code = _CODES[tone]
    return f"{code}{text}{_RESET}" if colour and code else text


def _branch(branch: Branch, lead: str, below: str, width: int, colour: bool) -> Iterator[str]:
    text = printable(branch.label) + (f"  {printable(branch.remark)}" if branch.remark else "")
    yield lead + _toned(shorten(text, max(20, width - len(lead))), branch.tone, colour)
    for at, child in enumerate(branch.below):
        last = at == len(branch.below) - 1
        yield from _branch(
            child,
            below + ("└─ " if last else "├─ "),
            below + ("   " if last else "│  "),
            width,
            colour,
        )


def _grid(grid: Grid, width: int, colour: bool) -> Iterator[str]:
    if grid.title:
        yield _toned(grid.title, "strong", colour)
    texts = [[_text(value) for value in line.values] for line in grid.lines]
    widths = [
        max([len(heading.title), *(len(row[at]) for row in texts)])
        for at, heading in enumerate(grid.headings)
    ]
    shown = _fitting(grid, widths, width)
    numeric = [_is_numeric(grid, at) for at in range(len(grid.headings))]

    def joined(cells: list[str]) -> str:
        placed: list[str] = []
        for at in shown:
            cell = shorten(cells[at], widths[at])
            placed.append(cell.rjust(widths[at]) if numeric[at] else cell.ljust(widths[at]))
        return (" " * _GAP).join(placed).rstrip()

    yield _toned(joined([heading.title for heading in grid.headings]), "quiet", colour)
    for line, row in zip(grid.lines, texts, strict=True):
        yield _toned(joined(row), line.tone, colour)
    if grid.left_out:
        rest = f"... and {grid.left_out} more" + (
            f" ({grid.how_to_see})" if grid.how_to_see else ""
        )
        yield _toned(rest, "quiet", colour)


def _fitting(grid: Grid, widths: list[int], width: int) -> list[int]:
    """Which columns to show; narrows `widths` of the stretching ones in place."""
    shown = list(range(len(grid.headings)))

    def total() -> int:
        return sum(widths[at] for at in shown) + _GAP * (len(shown) - 1)

    stretching = [at for at in shown if grid.headings[at].stretch]
    spare = sum(max(0, widths[at] - 2 * _LEAST_STRETCH) for at in stretching)
    for at in reversed(range(len(grid.headings))):
        # Shortening long names a little is better than losing a column of numbers.
        if total() - spare > width and not grid.headings[at].essential:
            shown.remove(at)
    for at in sorted(stretching, key=lambda at: -widths[at]):
        if at in shown and total() > width:
            widths[at] = max(_LEAST_STRETCH, widths[at] - (total() - width))
    return shown


def _is_numeric(grid: Grid, at: int) -> bool:
    values = [line.values[at] for line in grid.lines if line.values[at] is not None]
    return bool(values) and all(isinstance(value, (int, float)) for value in values)


def _text(value: Value) -> str:
    if isinstance(value, str):
        return printable(value)
    return number(value)


def printable(text: str) -> str:
    """A name from somebody's file must not steer the terminal: control characters are escaped.

    >>> printable("a\\x1b[2J")
    'a\\\\x1b[2J'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
