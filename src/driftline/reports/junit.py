"""Checks as the XML that test runners write and CI servers read.

The first case is the verdict of the whole; each place that was looked at is one more. So the file
has a failure exactly when the command ends with another code than 0.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import TextIO
from xml.sax.saxutils import escape, quoteattr

from driftline.reports.checks import Case, Checks
from driftline.reports.terminal import printable


def write(checks: Checks, stream: TextIO) -> None:
    """The whole document, ended by a newline."""
    verdict = Case(
        "verdict",
        f"driftline {checks.command}",
        "pass" if checks.passed else "fail",
        "" if checks.passed else checks.finding,
        () if checks.passed else (checks.finding, checks.tally),
    )
    found = Counter(case.outcome for case in checks.cases) + Counter([verdict.outcome])
    counts = _attributes(
        tests=found.total(),
        failures=found["fail"],
        errors=0,
        skipped=found["skipped"],
        time=0,
    )
    suite = _attribute(f"driftline {checks.command}")
    stream.write('<?xml version="1.0" encoding="UTF-8"?>\n')
    stream.write(f'<testsuites name="driftline" {counts}>\n')
    stream.write(f"<testsuite name={suite} {counts}>\n")
    for case in itertools.chain([verdict], checks.cases):
        for line in _case(case):
            stream.write(f"{line}\n")
    stream.write(f"<system-out>{_text(checks.finding)}\n{_text(checks.tally)}</system-out>\n")
    stream.write("</testsuite>\n</testsuites>\n")


def _case(case: Case) -> Iterator[str]:
    group = case.group or "(model)"
    head = f'<testcase classname={_attribute(group)} name={_attribute(case.name)} time="0"'
    if case.outcome == "pass":
        yield f"{head}/>"
        return
    yield f"{head}>"
    if case.outcome == "skipped":
        yield f"<skipped message={_attribute(case.message)}/>"
    else:
        body = "\n".join(_text(line) for line in case.details)
        yield f'<failure type="drift" message={_attribute(case.message)}>{body}</failure>'
    yield "</testcase>"


def _attributes(**values: int) -> str:
    return " ".join(f'{name}="{value}"' for name, value in values.items())


def _attribute(text: str) -> str:
    """Quoted; what XML has no place for (control characters, halves of pairs) as its escape."""
    return quoteattr(printable(text))


def _text(text: str) -> str:
    return escape(printable(text))
