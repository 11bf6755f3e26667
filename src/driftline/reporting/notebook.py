"""Views as HTML for a cell of a notebook: small, in one element, readable on light and dark.

There is no style sheet and no script, because notebooks remove both from untrusted output. Colours
with a meaning are half transparent or of medium lightness; all others are those of the page. All
text from a run is escaped.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

from driftline.reporting.formatting import heat, number, shape, shorten
from driftline.reporting.terminal import curve, printable
from driftline.reporting.view import (
    Block,
    Branch,
    Curve,
    Facts,
    Grid,
    Heading,
    Line,
    Sentence,
    Tone,
    Tree,
    Value,
    View,
)

if TYPE_CHECKING:
    from driftline.alignment.plan import Pair, Plan
    from driftline.comparison.table.table import Table
    from driftline.diagnosis.result import Diagnosis
    from driftline.runs.records import Record
    from driftline.runs.run import Run

# Names longer than this would push the numbers out of a cell's width.
_LONGEST = 120
# Notebooks are saved with their output, so long tables are cut here too.
_ROWS = 40
_PAIRS = 10
# If it were updated more often, the line would cost more than the work it reports.
_SECONDS_BETWEEN = 0.25
_MONO = "font-family:ui-monospace,Menlo,Consolas,monospace;font-size:12px;line-height:1.4"
_STYLES: dict[Tone, str] = {
    "plain": "",
    "good": "color:#1a9850",
    "bad": "color:#e5484d",
    "doubtful": "color:#c07a00",
    "quiet": "opacity:0.65",
    "strong": "font-weight:bold",
}
_EDGE = "border-bottom:1px solid rgba(128,128,128,0.35)"


def table_html(table: Table) -> str:
    """A comparison as HTML: the finding, its place in the model, the worst rows."""
    # Imported here: a notebook that never shows a table need not load it.
    from driftline.reporting.views import comparison

    return paint(comparison.view(table))


def diagnosis_html(diagnosed: Diagnosis) -> str:
    """A diagnosis: what was found, and the sites that matter."""
    from driftline.reporting.views import diagnosis

    return paint(diagnosis.view(diagnosed))


def run_html(run: Run) -> str:
    """A run: where it comes from and what is in it."""
    from driftline.reporting.views import run as report

    return paint(report.view(run))


def plan_html(plan: Plan) -> str:
    """A plan: how many pairs, by which rule, and the first of each."""
    return paint(plan_view(plan))


def plan_view(plan: Plan) -> View:
    """The view of a plan: its pairs, and the tensors without a partner."""
    blocks: list[Block] = [Sentence(str(plan), "strong")]
    blocks += [Sentence(note, "doubtful") for note in plan.notes]
    # Concluded pairs come first: pairs with equal names need no attention.
    pairs = sorted(plan.pairs, key=lambda pair: pair.by in ("name", "alias"))
    if pairs:
        headings = ("reference", "candidate", "by", "confidence", "dtype", "shape")
        blocks.append(
            Grid(
                "Pairs",
                tuple(Heading(title) for title in headings),
                tuple(Line(_pair(pair)) for pair in pairs[:_PAIRS]),
                len(pairs) - min(len(pairs), _PAIRS),
            )
        )
    lone = (("Only in the reference", plan.missing), ("Only in the candidate", plan.extra))
    for title, records in lone:
        if records:
            lines = tuple(Line(_record(record), "doubtful") for record in records[:_PAIRS])
            headings = (Heading("tensor"), Heading("dtype"), Heading("shape"))
            blocks.append(Grid(title, headings, lines, len(records) - len(lines)))
    return View(tuple(blocks))


def _pair(pair: Pair) -> tuple[Value, ...]:
    reference, candidate = pair.reference, pair.candidate
    dtype = (
        reference.dtype
        if reference.dtype == candidate.dtype
        else f"{reference.dtype} | {candidate.dtype}"
    )
    sizes = shape(reference.shape)
    if reference.shape != candidate.shape:
        sizes += f" | {shape(candidate.shape)}"
    return (str(reference.key), str(candidate.key), pair.by, pair.confidence, dtype, sizes)


def _record(record: Record) -> tuple[Value, ...]:
    return (str(record.key), record.dtype, shape(record.shape))


def paint(view: View) -> str:
    """The view as one element."""
    inner = "".join(part for block in view.blocks for part in _block(block))
    return f'<div class="driftline" style="max-width:100%;overflow-x:auto">{inner}</div>'


def _block(block: Block) -> Iterator[str]:
    if isinstance(block, Sentence):
        yield f'<div style="margin:2px 0;{_STYLES[block.tone]}">{_text(block.text)}</div>'
    elif isinstance(block, Facts):
        yield f'<table style="border-collapse:collapse;margin:4px 0;{_MONO}">'
        for name, value in block.pairs:
            yield (
                f'<tr style="background:none"><td style="text-align:left;opacity:0.65;'
                f'padding:1px 12px 1px 0">{_text(name)}</td>'
                f'<td style="text-align:left;padding:1px 0">{_text(value)}</td></tr>'
            )
        yield "</table>"
    elif isinstance(block, Grid):
        yield from _grid(block)
    elif isinstance(block, Curve):
        yield f'<div style="opacity:0.65;margin-top:4px">{_text(block.title)}</div>'
        # Names under the bars come from a run and are escaped like all others.
        bars = "\n".join(escape(line) for line in curve(block, 90))
        yield f'<pre style="margin:0;background:none;{_MONO};line-height:1.1">{bars}</pre>'
    else:
        yield from _tree(block)


def _tree(tree: Tree) -> Iterator[str]:
    if tree.title:
        yield f'<div style="font-weight:bold;margin-top:6px">{_text(tree.title)}</div>'
    for branch in tree.roots:
        yield from _branch(branch, 0)


def _branch(branch: Branch, depth: int) -> Iterator[str]:
    mark = "" if branch.heat is None else f"{heat(branch.heat)} "
    words = " ".join(_text(word) for word in (*branch.cells, branch.remark) if word)
    yield (
        f'<div style="padding-left:{18 * depth}px;{_MONO};{_STYLES[branch.tone]}">'
        f"{mark}{_text(branch.label)}{' ' if words else ''}{words}</div>"
    )
    for child in branch.below:
        yield from _branch(child, depth + 1)


def _grid(grid: Grid) -> Iterator[str]:
    if grid.title:
        yield f'<div style="font-weight:bold;margin-top:6px">{_text(grid.title)}</div>'
    yield f'<table style="border-collapse:collapse;margin:2px 0;{_MONO}"><thead>'
    yield f'<tr style="background:none;{_EDGE}">'
    for heading in grid.headings:
        yield f'<th style="text-align:left;padding:2px 10px 2px 0">{_text(heading.title)}</th>'
    yield "</tr></thead><tbody>"
    for line in grid.lines[:_ROWS]:
        yield f'<tr style="background:none;{_STYLES[line.tone]}">'
        for value in line.values:
            side = "left" if isinstance(value, str) else "right"
            cell = _text(value) if isinstance(value, str) else number(value)
            yield f'<td style="text-align:{side};padding:1px 10px 1px 0">{cell}</td>'
        yield "</tr>"
    yield "</tbody></table>"
    left_out = grid.left_out + max(0, len(grid.lines) - _ROWS)
    if left_out:
        yield f'<div style="opacity:0.65">... and {left_out} more</div>'


def _text(text: str) -> str:
    """A name of a run is text, whatever it looks like."""
    return escape(shorten(printable(text), _LONGEST * 4))


# One line that shows the progress of a long call.


class NotebookLine:
    """Shows progress; call it with (done, total). Does nothing outside of a notebook."""

    def __init__(self, display: Any = None) -> None:
        self._display = display
        self._handle: Any = None
        self._shown = 0.0

    def say(self, text: str) -> None:
        """Show a sentence instead of the previous one."""
        if self._display is None:
            return
        content = {"text/html": f'<div style="opacity:0.65">driftline: {escape(text)}</div>'}
        content["text/plain"] = f"driftline: {text}"
        if self._handle is None:
            self._handle = self._display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)
        self._shown = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if self._display is None:
            return
        if done == total or time.monotonic() - self._shown >= _SECONDS_BETWEEN:
            self.say(f"{done} of {total} pairs compared")

    def clear(self) -> None:
        """Remove the line, so that only the result is shown."""
        if self._handle is not None:
            self._handle.update({"text/html": "", "text/plain": ""}, raw=True)


@contextmanager
def notebook_line() -> Generator[NotebookLine, None, None]:
    """A line to report to while the block runs; only a notebook shows it."""
    display: Any = None
    # In a notebook, IPython is already loaded; nothing is imported to find out.
    if "ipykernel" in sys.modules:
        from IPython.display import display  # type: ignore[import-not-found]
    line = NotebookLine(display)
    try:
        yield line
    finally:
        line.clear()
