"""What a report says, before anybody decides what it looks like: sentences, facts, grids and trees.

Frozen values between an artefact (a table, a run) and a painter (terminal, Markdown). A view knows
no width, no colour and no markup; a painter knows no run and no table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Tone: TypeAlias = Literal["plain", "good", "bad", "doubtful", "quiet", "strong"]
Value: TypeAlias = str | int | float | None


@dataclass(frozen=True, slots=True)
class Sentence:
    """A line of text; the first one of a view is its headline."""

    text: str
    tone: Tone = "plain"


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and what is known under them."""

    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Heading:
    """A column of a grid.

    Attributes:
        title: What it holds.
        essential: A painter that runs out of width drops the others, last one first.
        stretch: Text that may be shortened in its middle when there is no other way.
    """

    title: str
    essential: bool = True
    stretch: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    """A row of a grid: one value per heading, and how the whole row should strike the eye."""

    values: tuple[Value, ...]
    tone: Tone = "plain"


@dataclass(frozen=True, slots=True)
class Grid:
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


@dataclass(frozen=True, slots=True)
class Branch:
    """A place in a tree with a remark, and what is below it."""

    label: str
    remark: str = ""
    tone: Tone = "plain"
    below: tuple[Branch, ...] = ()


@dataclass(frozen=True, slots=True)
class Tree:
    """Where things sit."""

    title: str
    roots: tuple[Branch, ...]


Block: TypeAlias = Sentence | Facts | Grid | Tree


@dataclass(frozen=True, slots=True)
class View:
    """A whole report, from top to bottom."""

    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Sheet:
    """Data for a spreadsheet: everything, unabridged and unrounded."""

    headings: tuple[str, ...]
    lines: Sequence[Sequence[Value]]
