"""What a report contains, before it is rendered: sentences, facts, grids, trees and curves.

A view stands between a result (a table, a run) and a renderer (terminal, Markdown, notebook). It
knows no width, no colour and no markup; a renderer knows no run and no table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

# Tones say what a part means; each renderer decides on colours.
Tone: TypeAlias = Literal["plain", "good", "bad", "doubtful", "quiet", "strong"]
Value: TypeAlias = str | int | float | None


class Sentence(NamedTuple):
    """A line of text; the first one of a view is its headline."""

    text: str
    tone: Tone = "plain"


class Facts(NamedTuple):
    """Names and what is known under them."""

    pairs: tuple[tuple[str, str], ...]


class Heading(NamedTuple):
    """A column of a grid.

    Attributes:
        title: What it holds.
        essential: Whether a renderer keeps it if the width is short; others are dropped, the last
            one first.
        stretch: Whether its text may be shortened in the middle if there is no other way.
        kept: Whether it is kept, of the essential columns, if there is hardly any width.
    """

    title: str
    essential: bool = True
    stretch: bool = False
    kept: bool = False


class Line(NamedTuple):
    """A row of a grid: one value per heading, and the tone of the whole row."""

    values: tuple[Value, ...]
    tone: Tone = "plain"


class Grid(NamedTuple):
    """Rows under headings.

    Attributes:
        title: What is listed.
        headings: Columns.
        lines: Rows, in the order to read them.
        left_out: How many more there are.
        how_to_see: The way to see those.
    """

    title: str
    headings: tuple[Heading, ...]
    lines: tuple[Line, ...]
    left_out: int = 0
    how_to_see: str = ""


class Branch(NamedTuple):
    """A place in a tree, and what is below it.

    Attributes:
        label: Its name.
        remark: Text at the end of the line.
        tone: Its tone.
        below: The branches below it.
        cells: Its values; each position has the same meaning for all neighbours.
        heat: Value over limit at the place; None if that is not known.
    """

    label: str
    remark: str = ""
    tone: Tone = "plain"
    below: tuple[Branch, ...] = ()
    cells: tuple[str, ...] = ()
    heat: float | None = None


class Tree(NamedTuple):
    """Places of a model as a tree."""

    title: str
    roots: tuple[Branch, ...]


class Curve(NamedTuple):
    """Errors in their order.

    Attributes:
        title: What is shown.
        values: One per place; None where there is none.
        marked: Index of the marked value; None for none.
        label: Label of the mark.
    """

    title: str
    values: tuple[float | None, ...]
    marked: int | None = None
    label: str = ""


Block: TypeAlias = Sentence | Facts | Grid | Tree | Curve


class View(NamedTuple):
    """A whole report, from top to bottom."""

    blocks: tuple[Block, ...]


class Sheet(NamedTuple):
    """Data for a spreadsheet: complete and not rounded."""

    headings: tuple[str, ...]
    lines: Sequence[Sequence[Value]]
