"""Renders views as Markdown, for a pull request or an issue.

Text from a run is escaped: no name can become markup, a link or a mention.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TextIO

from driftline.reporting.formatting import number
from driftline.reporting.terminal import curve, printable
from driftline.reporting.view import Block, Branch, Curve, Facts, Grid, Sentence, Value, View

# Code blocks do not wrap; wider ones would scroll.
_CURVE = 80


def write(view: View, stream: TextIO) -> None:
    """Write a view to a stream."""
    stream.write(paint(view))


def paint(view: View) -> str:
    """The view as GitHub-flavoured Markdown that ends with a newline."""
    lines: list[str] = []
    for index, block in enumerate(view.blocks):
        if index:
            lines.append("")
        lines += _block(block)
    return "\n".join(lines) + "\n"


def _block(block: Block) -> Iterator[str]:
    if isinstance(block, Sentence):
        text = _escaped(block.text)
        yield f"**{text}**" if block.tone in ("strong", "bad", "good") else text
    elif isinstance(block, Facts):
        for name, value in block.pairs:
            yield f"- {_escaped(name)}: {_escaped(value)}"
    elif isinstance(block, Grid):
        yield from _grid(block)
    elif isinstance(block, Curve):
        yield _escaped(block.title)
        yield ""
        yield "```text"
        # Bars line up only in a fixed-width font, hence the code block.
        yield from curve(block, _CURVE)
        yield "```"
    else:
        if block.title:
            yield f"### {_escaped(block.title)}"
            yield ""
        for branch in block.roots:
            yield from _branch(branch, 0)


def _branch(branch: Branch, depth: int) -> Iterator[str]:
    # A backtick in a name would end the code span.
    label = "`" + printable(branch.label).replace("`", "'") + "`"
    if branch.tone in ("bad", "strong"):
        label = f"**{label}**"
    words = [*branch.cells, *([branch.remark] if branch.remark else [])]
    yield "  " * depth + " ".join([f"- {label}", *(_escaped(word) for word in words if word)])
    for child in branch.below:
        yield from _branch(child, depth + 1)


def _grid(grid: Grid) -> Iterator[str]:
    if grid.title:
        yield f"### {_escaped(grid.title)}"
        yield ""
    yield "| " + " | ".join(_escaped(heading.title) for heading in grid.headings) + " |"
    yield "|" + "|".join(" --- " for _ in grid.headings) + "|"
    for line in grid.lines:
        yield "| " + " | ".join(_cell(value) for value in line.values) + " |"
    if grid.left_out:
        yield ""
        yield f"... and {grid.left_out} more"


def _cell(value: Value) -> str:
    return _escaped(value) if isinstance(value, str) else number(value)


def _escaped(text: str) -> str:
    """Nothing a name contains may become markup: a site can be called `a|b` or `<script>`.

    >>> _escaped("a|b_<i>")
    'a\\\\|b\\\\_&lt;i&gt;'
    """
    text = printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    for mark in "\\`*_[]|~#":
        text = text.replace(mark, "\\" + mark)
    # No link, no mention, no formula.
    return text.replace("://", "&#58;//").replace("@", "&#64;").replace("$", "&#36;")
