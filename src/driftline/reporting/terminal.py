"""Views as text for a terminal: fitted to the width, with colours only on a terminal.

rich is not used: comparing a gigabyte takes 0.15 s, and importing rich takes nearly as long.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

from driftline import settings
from driftline.reporting.formatting import group_of, heat, number, shorten, spark
from driftline.reporting.view import Block, Branch, Curve, Facts, Grid, Sentence, Tone, Value, View

_CODES: dict[Tone, str] = {
    "plain": "",
    "good": "\x1b[32m",
    "bad": "\x1b[31m",
    "doubtful": "\x1b[33m",
    "quiet": "\x1b[2m",
    "strong": "\x1b[1m",
}
_RESET = "\x1b[0m"
# Blanks between columns.
_GAP = 2
_LEAST_STRETCH = 16
_LEAST_LEGIBLE = 8
_TELLING = 24
_CURVE = 100
_FACT_LINES = 3
"""Most lines of a fact; a longer one, such as a long command line, is cut in its middle."""
_LABELS = 40
"""Labels of a tree are aligned up to this length."""
NOT_A_TERMINAL = 160
"""Width for a pipe or a file, which have none."""
_ASCII = str.maketrans("▁▂▃▄▅▆▇█│└├─…→◀▲", ".:-=+*%#|`|-~><^")
"""ASCII replacements of one character each, so that columns stay aligned."""


def width_of(stream: TextIO) -> int:
    columns = settings.columns()
    # COLUMNS wins, as users and tests set it to fix the width.
    if columns <= 0 and sys.__stdout__ is not None:  # like `shutil`, which imports more
        with contextlib.suppress(OSError, ValueError):
            columns = os.get_terminal_size(sys.__stdout__.fileno()).columns
    return columns if columns > 0 else 100 if stream.isatty() else NOT_A_TERMINAL


def wants_colour(stream: TextIO) -> bool:
    if settings.colours_forced():
        return True
    return stream.isatty() and not settings.colours_refused()


def show(view: View, stream: TextIO | None = None) -> None:
    """Write a view to a stream (default: stdout), with its width, colours and encoding."""
    out = stream or sys.stdout
    out.write(written_for(out, paint(view, width=width_of(out), colour=wants_colour(out))))


def written_for(stream: TextIO, text: str) -> str:
    """The text; with our own signs in ASCII if the stream's encoding lacks them."""
    try:
        # Testing three of our signs is enough: an encoding has either all of them or none.
        "▁└…".encode(stream.encoding or "utf-8")
    except (UnicodeEncodeError, LookupError, AttributeError):
        return text.translate(_ASCII)
    return text


def paint(view: View, *, width: int = 100, colour: bool = False) -> str:
    """The view as text that ends with a newline."""
    parts: list[str] = []
    previous = None
    for block in view.blocks:
        # Sentences follow each other directly; every other block follows a blank line.
        if previous is not None and not (
            isinstance(block, Sentence) and isinstance(previous, Sentence)
        ):
            parts.append("")
        parts += _block(block, width, colour)
        previous = block
    return "".join(line.rstrip() + "\n" for line in parts)


def _wrapped(text: str, width: int, *, break_long_words: bool = True) -> list[str]:
    if 0 < len(text) <= width and text.isprintable() and not text[0].isspace():
        return [text.rstrip()]  # most texts; nothing needs to be loaded for them
    import textwrap

    return textwrap.wrap(
        text, width, break_long_words=break_long_words, break_on_hyphens=break_long_words
    )


def _block(block: Block, width: int, colour: bool) -> Iterator[str]:
    if isinstance(block, Sentence):
        # A broken path cannot be copied, so long words are not broken.
        for line in _wrapped(printable(block.text), width, break_long_words=False) or [""]:
            yield _toned(line, block.tone, colour)
    elif isinstance(block, Facts):
        longest = max((len(name) for name, _ in block.pairs), default=0)
        for name, value in block.pairs:
            room = max(20, width - longest - 2)
            lines = _wrapped(shorten(printable(value), _FACT_LINES * room), room) or [""]
            yield f"{_toned(name.ljust(longest), 'quiet', colour)}  {lines[0]}"
            for line in lines[1:]:
                yield f"{' ' * longest}  {line}"
    elif isinstance(block, Grid):
        yield from _grid(block, width, colour)
    elif isinstance(block, Curve):
        for line in _wrapped(block.title, width):
            yield _toned(line, "quiet", colour)
        yield from curve(block, width)
    else:
        if block.title:
            yield _toned(block.title, "strong", colour)
        sizes = _sizes(block.roots)
        for branch in block.roots:
            yield from _branch(branch, "", "", width, colour, sizes)


def _toned(text: str, tone: Tone, colour: bool) -> str:
    code = _CODES[tone]
    return f"{code}{text}{_RESET}" if colour and code else text


def curve(block: Curve, width: int) -> Iterator[str]:
    """The lines of a curve: its bars, and below them the mark with its label."""
    # Longer lines of bars do not say more.
    wide = max(10, min(width, _CURVE))
    yield spark(block.values, wide, errors=True)
    if block.marked is not None:
        column = group_of(block.marked, len(block.values), wide)
        label = printable(block.label)
        # The label is right of the mark, or left of it, or left out if there is no room.
        if column + 2 + columns(label) <= width:
            yield " " * column + f"▲ {label}"
        elif column > columns(label):
            yield " " * (column - columns(label) - 1) + f"{label} ▲"
        else:
            yield " " * column + "▲"


def _sizes(branches: Sequence[Branch]) -> list[int]:
    """The widths of labels and cells, so that neighbours are aligned."""
    sizes = [columns(printable(branch.label)) for branch in branches]
    # One very long name must not push all its neighbours to the right.
    widths = [max((size for size in sizes if size <= _LABELS), default=0)]
    for column in range(max((len(branch.cells) for branch in branches), default=0)):
        cells = [branch.cells[column] for branch in branches if column < len(branch.cells)]
        widths.append(max(columns(printable(cell)) for cell in cells))
    return widths


def _branch(
    branch: Branch, lead: str, below: str, width: int, colour: bool, sizes: Sequence[int]
) -> Iterator[str]:
    mark = ""
    if branch.heat is not None:
        mark = _toned(heat(branch.heat), _tone_of(branch.heat), colour) + " "
    parts = [printable(part) for part in (branch.label, *branch.cells)]
    remark = [printable(branch.remark)] if branch.remark else []
    padded = [_left(part, size) for part, size in zip(parts, sizes, strict=False)]
    text = "  ".join([*padded, *remark]).rstrip()
    room = max(20, width - len(lead) - (2 if mark else 0))
    while columns(text) > room and len(parts) > 1:  # first without alignment, then fewer cells
        text = "  ".join(part for part in (*parts, *remark) if part)
        del parts[1]
    yield lead + mark + _toned(cut(text, room), branch.tone, colour)
    inner = _sizes(branch.below)
    for index, child in enumerate(branch.below):
        last = index == len(branch.below) - 1
        yield from _branch(
            child,
            below + ("└─ " if last else "├─ "),
            below + ("   " if last else "│  "),
            width,
            colour,
            inner,
        )


def _tone_of(severity: float) -> Tone:
    if not severity <= 1:  # NaN is no pass
        return "bad"
    return "doubtful" if severity > 0.5 else "good"


def columns(text: str) -> int:
    """How many columns a text takes; Chinese and Japanese characters take two."""
    # Nearly every text; the Unicode tables are then not loaded.
    if text.isascii() or text.translate(_ASCII).isascii():
        return len(text)
    from unicodedata import combining, east_asian_width

    return sum(0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1 for c in text)


def _left(text: str, width: int) -> str:
    return text + " " * (width - columns(text))


def _right(text: str, width: int) -> str:
    return " " * (width - columns(text)) + text


def _grid(grid: Grid, width: int, colour: bool) -> Iterator[str]:
    if grid.title:
        for line in _wrapped(printable(grid.title), width):
            yield _toned(line, "strong", colour)
    texts = [[_text(value) for value in line.values] for line in grid.lines]
    titles = [heading.title for heading in grid.headings]
    widths = [
        max([len(title), *(columns(row[column]) for row in texts)])
        for column, title in enumerate(titles)
    ]
    # Before lines are made: it also narrows the widths.
    shown = _fitting(grid, widths, width)
    numeric = [_is_numeric(grid, column) for column in range(len(grid.headings))]

    def joined(cells: list[str]) -> str:
        placed: list[str] = []
        for column in shown:
            cell = cut(cells[column], widths[column])
            placed.append((_right if numeric[column] else _left)(cell, widths[column]))
        return cut((" " * _GAP).join(placed).rstrip(), max(width, _LEAST_STRETCH))

    yield _toned(joined(titles), "quiet", colour)
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
        return sum(widths[column] for column in shown) + _GAP * (len(shown) - 1)

    stretching = [column for column in shown if grid.headings[column].stretch]

    def spare(least: int) -> int:
        return sum(max(0, widths[column] - least) for column in stretching if column in shown)

    for column in reversed(range(len(grid.headings))):
        # Shortening long names a little is better than losing a column of numbers.
        if total() - spare(2 * _LEAST_STRETCH) > width and not grid.headings[column].essential:
            shown.remove(column)
    for column in reversed(range(len(grid.headings))):
        # Hardly any width: what is left must still say where, and how much. A name that is cut to
        # less than this no longer says which layer it is.
        few = (
            column in shown
            and not grid.headings[column].kept
            and any(h.kept for h in grid.headings)
        )
        if few and total() - spare(_TELLING) > width:
            shown.remove(column)
    for least in (2 * _LEAST_STRETCH, _LEAST_STRETCH, _LEAST_LEGIBLE):
        for column in sorted(stretching, key=lambda column: -widths[column]):
            if column in shown and total() > width:
                narrow = max(
                    least, widths[column] - (total() - width), len(grid.headings[column].title)
                )
                widths[column] = min(widths[column], narrow)
    return shown


def cut(text: str, width: int) -> str:
    """The text shortened in its middle to a number of columns."""
    if columns(text) <= width:
        return text
    short = shorten(text, width)
    # `shorten` counts characters; wide ones need another cut.
    while columns(short) > width and len(short) > 1:
        short = shorten(text, len(short) - 1)
    return short


def _is_numeric(grid: Grid, column: int) -> bool:
    values = [line.values[column] for line in grid.lines if line.values[column] is not None]
    return bool(values) and all(isinstance(value, (int, float)) for value in values)


def _text(value: Value) -> str:
    if isinstance(value, str):
        return printable(value)
    return number(value)


def printable(text: str) -> str:
    """The text with control characters escaped, so that a name in a file cannot steer the terminal.

    >>> printable("a\\x1b[2J")
    'a\\\\x1b[2J'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
