"""Checks for a run of GitHub Actions: two annotations, and a summary of the step.

One error names the first bad place, one notice says how many there are: a run shows ten of either,
and fifty thousand tensors must not push the one that matters out of sight.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TextIO

from driftline.reports import markdown
from driftline.reports.checks import Checks
from driftline.reports.terminal import printable
from driftline.reports.view import Grid, Sentence, View
from driftline.reports.wording import shorten

_LONGEST = 200
"""Of a name: nobody reads more, and a summary holds a megabyte."""
_LONGEST_TEXT = 2000


def write(checks: Checks, stream: TextIO, summary: str = "") -> None:
    """Write the annotations to a stream, and append the summary to a file.

    Args:
        checks: What was found.
        stream: Whatever the runner reads.
        summary: The file that the step's summary is made of; empty where there is none.
    """
    for line in commands(checks):
        stream.write(f"{line}\n")
    if not summary:
        return
    try:
        with Path(summary).open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(markdown.paint(_bounded(checks.summary)) + "\n")
    except OSError as trouble:
        why = trouble.strerror or type(trouble).__name__
        print(f"driftline: the summary cannot be written to {summary}: {why}", file=sys.stderr)


def commands(checks: Checks) -> list[str]:
    """An error for the first bad place, where there is one, and a notice with the count."""
    title = f"driftline {checks.command}"
    lines: list[str] = []
    if not checks.passed:
        where = f"{title}: {checks.first}" if checks.first else title
        lines.append(_command("error", where, checks.finding))
    lines.append(_command("notice", title, checks.tally))
    return lines


def _command(kind: str, title: str, text: str) -> str:
    shown = shorten(printable(title), _LONGEST)
    said = shorten(printable(text), _LONGEST_TEXT)
    return f"::{kind} title={_property(shown)}::{_data(said)}"


def _data(text: str) -> str:
    r"""What the runner must not take for the end of a command.

    >>> _data("50 %\r\n::error::x")
    '50 %25%0D%0A::error::x'
    """
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """What it must not take for the end of a property either.

    >>> _property("a: b, c")
    'a%3A b%2C c'
    """
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _bounded(view: View) -> View:
    """The view with names that stay readable."""

    def short(value: object) -> object:
        return shorten(value, _LONGEST) if isinstance(value, str) else value

    blocks = [
        block._replace(
            lines=tuple(
                line._replace(values=tuple(short(value) for value in line.values))
                for line in block.lines
            )
        )
        if isinstance(block, Grid)
        else block._replace(text=shorten(block.text, _LONGEST_TEXT))
        if isinstance(block, Sentence)
        else block
        for block in view.blocks
    ]
    return View(tuple(blocks))
