"""Results for continuous integration: a list of checks, written for GitHub Actions or as JUnit XML.

`of_table`, `of_diagnosis`, `of_operators` and `of_verdicts` turn a result into `Checks`; the two
writers know nothing but `Checks`. Whether a run passes has been decided before.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TextIO, TypeAlias
from xml.sax.saxutils import escape, quoteattr

from driftline import settings
from driftline.comparison.table.row import Row
from driftline.comparison.table.table import Table, is_spooled
from driftline.reporting import markdown
from driftline.reporting.formatting import counted, number, shorten
from driftline.reporting.terminal import printable
from driftline.reporting.view import Block, Facts, Grid, Heading, Line, Sentence, Tree, View

if TYPE_CHECKING:
    from driftline.comparison.table.row_spool import RowSpool
    from driftline.decoding.validate import Verdict
    from driftline.diagnosis.result import Diagnosis
    from driftline.reporting.views.operators import Report


# A summary is read in a browser between other steps: the worst few rows are enough.
WORST = 20
# Lines under one failed case; CI servers store them for every run.
_DETAILS = 20
Outcome: TypeAlias = Literal["pass", "fail", "skipped"]


class Case(NamedTuple):
    """The result of one check, such as one site.

    Attributes:
        name: Name of the check.
        group: The group it belongs to.
        outcome: pass, fail, or skipped if it could not be judged.
        message: Why it did not pass, in a sentence.
        details: Further lines about that.
    """

    name: str
    group: str
    outcome: Outcome
    message: str = ""
    details: tuple[str, ...] = ()


class Checks(NamedTuple):
    """All checks of one command.

    Attributes:
        command: Name of the command.
        passed: Whether the command ends with exit code 0.
        finding: The result as a sentence.
        first: The first failing place; empty if there is none.
        tally: Numbers of checks and of failures, as a sentence.
        cases: The single checks.
        summary: The same for people, with the worst failures.
        word: The verdict in capitals, if it is neither pass nor fail.
    """

    command: str
    passed: bool
    finding: str
    first: str
    tally: str
    cases: Iterable[Case]
    summary: View
    word: str = ""


def of_table(table: Table, command: str = "compare", *, allow_incomplete: bool = False) -> Checks:
    """A comparison: a case for each site, of each step and rank.

    Args:
        table: A judged table.
        command: Which command made it.
        allow_incomplete: The command ends with exit code 0 also if too little was compared.
    """
    cases = SiteCases(table.rows)
    failing = sum(row.status == "fail" for row in table.rows)
    compared = table.coverage.compared
    count = f"{failing} of {counted(compared, 'compared tensor')} fail; coverage: {table.coverage}"
    # The site that diagnosis of the table names goes before the first failing row.
    first = table.first_site or (table.first.site if table.first is not None else "")
    return Checks(
        command,
        table.verdict == "pass" or (allow_incomplete and table.verdict == "incomplete"),
        table.finding or table.verdict,
        first,
        count,
        # A table on disk may have millions of rows, which must not all be in memory.
        cases if is_spooled(table.rows) else tuple(cases),
        _table_summary(table, command, count),
        _word(table.verdict),
    )


def _word(verdict: str) -> str:
    return "" if verdict in ("pass", "fail") else verdict.upper()


_Place = tuple[int, int, int, str]


class SiteCases(Iterable[Case]):
    """A case for each site of each step and rank, made anew in each iteration.

    For a long table that is ordered by step, the cases of one step are in memory at a time.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        if is_spooled(rows):
            self._several = len(rows.processes) > 1 or rows.several_steps
        else:
            self._several = len({_place(row)[:3] for row in rows}) > 1

    def __iter__(self) -> Iterator[Case]:
        rows = self._rows
        if not is_spooled(rows) or not rows.in_turn:
            return self._of(rows, {})
        return self._step_by_step(rows)

    def _step_by_step(self, rows: RowSpool) -> Iterator[Case]:
        extra: dict[_Place, list[Row]] = {}
        # Extra rows are at the end of a table, but belong to the cases of their step.
        if rows.coverage.extra:
            for row in rows:
                if row.status == "extra":
                    extra.setdefault(_place(row), []).append(row)
        others = (row for row in rows if row.status != "extra")
        for _, some in itertools.groupby(others, key=lambda row: _place(row)[:3]):
            yield from self._of(some, extra)
        # Sites that only the candidate has were in no step above.
        yield from self._of([row for left in extra.values() for row in left], {})

    def _of(self, rows: Iterable[Row], more: dict[_Place, list[Row]]) -> Iterator[Case]:
        """The cases of `rows` and of the rows in `more` at the same places, which are removed."""
        places: dict[_Place, list[Row]] = {}
        for row in rows:
            places.setdefault(_place(row), []).append(row)
        for place, own in places.items():
            rank, process, step, site = place
            name = site or "(model)"
            if self._several:
                name += f" [step {step}, rank {rank}" + (f".p{process}]" if process else "]")
            yield _site_case(name, site.rpartition(".")[0], [*own, *more.pop(place, ())])


def _place(row: Row) -> _Place:
    return row.key.rank, row.key.process, row.key.step, row.key.site


def of_diagnosis(diagnosed: Diagnosis, *, allow_incomplete: bool = False) -> Checks:
    """A diagnosis: a case for each site, which fails where it introduces error."""
    from driftline.reporting.views import diagnosis

    # Inherited and amplified errors pass: a case fails only where error begins.
    outcomes: dict[str, Outcome] = {"introduced": "fail", "unknown": "skipped"}
    cases = [
        Case(
            (site.site or "(root)") + ("" if site.direction == "forward" else f" {site.direction}"),
            site.site.rpartition(".")[0],
            outcomes.get(site.status, "pass"),
            (site.reason or site.cause or site.status) if site.status in outcomes else "",
            (f"status {site.status}, error {number(site.error)}, cause {site.cause or 'unknown'}",)
            if site.status == "introduced"
            else (),
        )
        for site in diagnosed.sites
    ]
    guilty = sum(case.outcome == "fail" for case in cases)
    count = (
        f"{guilty} of {counted(len(cases), 'site')} introduce error; coverage: {diagnosed.coverage}"
    )
    finding = str(diagnosed) or diagnosed.verdict
    return Checks(
        "diagnose",
        diagnosed.exit_code == 0 or (allow_incomplete and diagnosed.verdict == "incomplete"),
        finding,
        diagnosed.first_site,
        count,
        tuple(cases),
        _headed("diagnose", diagnosis.view(diagnosed, most=WORST)),
        _word(diagnosed.verdict),
    )


def of_operators(report: Report) -> Checks:
    """Checked operators: a case for each output."""
    from driftline.reporting.views import operators

    outcomes: dict[str, Outcome] = {"pass": "pass", "fail": "fail"}
    cases = [
        Case(
            f"{row.call.site} {row.slot}".strip()
            + (f" [step {row.call.step}, rank {row.call.rank}]"),
            row.call.op_type,
            outcomes.get(row.status, "skipped"),
            row.figures.reason or ("" if row.status == "pass" else row.status),
        )
        for row in report.rows
    ]
    cover = report.coverage
    count = (
        f"{cover.failed} of {counted(cover.passed + cover.failed, 'checked operator')} are not "
        f"right; {cover.unchecked} could not be checked"
    )
    first = next((row.call.site for row in report.rows if row.status == "fail"), "")
    # Pass is earned: where nothing could be checked, nothing passed.
    passed = bool(cover.passed) and not cover.failed
    return Checks(
        "opcheck",
        passed,
        operators.verdict(report),
        first,
        count,
        tuple(cases),
        _headed("opcheck", operators.view(report)),
    )


def of_verdicts(verdicts: Sequence[Verdict], lines: Callable[[Verdict], Iterable[str]]) -> Checks:
    """Validations of decoders: a case for each model and shape.

    Args:
        verdicts: The results.
        lines: Returns the lines of text about one result.
    """
    cases = [
        Case(
            verdict.options.id,
            verdict.options.model,
            "pass" if verdict.passed else "fail",
            "" if verdict.passed else verdict.complaint or "tokens differ",
            () if verdict.passed else tuple(lines(verdict)),
        )
        for verdict in verdicts
    ]
    bad = [case for case in cases if case.outcome == "fail"]
    count = f"{len(bad)} of {counted(len(cases), 'model and shape', 'models and shapes')} fail"
    finding = f"{bad[0].name}: {bad[0].message}" if bad else "every model and shape passes"
    grid = Grid(
        "",
        (Heading("status"), Heading("model and shape"), Heading("finding")),
        tuple(
            Line((case.outcome, case.name, case.message), "bad" if case.message else "plain")
            for case in sorted(cases, key=lambda case: case.outcome != "fail")[:WORST]
        ),
        max(0, len(cases) - WORST),
    )
    head = Sentence(f"{'FAIL' if bad else 'PASS'}: {finding}", "bad" if bad else "good")
    view = _headed("validate", View((head, Sentence(count), grid)))
    first = bad[0].name if bad else ""
    return Checks("validate", not bad, finding, first, count, tuple(cases), view)


def _site_case(name: str, group: str, rows: Sequence[Row]) -> Case:
    failing = [row for row in rows if row.status == "fail"]
    if failing:
        # The worst first, because its line becomes the message of the case; NaN is worst.
        failing.sort(key=lambda row: -math.inf if math.isnan(row.severity) else -row.severity)
        details = tuple(_failure_text(row) for row in failing[:_DETAILS])
        return Case(name, group, "fail", details[0], details)
    if any(row.status == "pass" for row in rows):
        return Case(name, group, "pass")
    # Nothing was judged here, so the case is skipped, not passed.
    reason = rows[0].reason or rows[0].status
    return Case(name, group, "skipped", f"{rows[0].status}: {reason}")


def _failure_text(row: Row) -> str:
    where = f"{row.port} {row.slot}"
    value = row.metrics.get(row.decided_by)
    if value is None:
        return f"{where}: {row.reason or row.status}"
    limit = "" if row.limit is None else f", allowed {number(row.limit)}"
    whose = f" ({row.limit_from})" if row.limit_from else ""
    return f"{where}: {row.decided_by} {number(value)}{limit}{whose}"


def _table_summary(table: Table, command: str, count: str) -> View:
    from driftline.reporting.views import comparison
    from driftline.reporting.views.comparison import along_depth, where

    blocks: list[Block] = [comparison.headline(table), Sentence(count)]
    if table.first is not None and table.reference.ordered:
        blocks.append(Tree("", (where(table),)))
    blocks += along_depth(table)
    if table.coverage.compared:
        blocks.append(comparison.grid(table, most=WORST))
    about = [("reference", table.reference.path), ("candidate", table.candidate.path)]
    blocks.append(Facts(tuple((name, path) for name, path in about if path)))
    return _headed(command, View(tuple(blocks)))


def _headed(command: str, view: View) -> View:
    return View((Sentence(f"driftline {command}", "strong"), *view.blocks))


# GitHub Actions: at most two annotations, and a summary of the step.


_LONGEST = 200
"""Characters of a name that are shown: a summary may have at most a megabyte."""
_LONGEST_TEXT = 2000


def write_github(checks: Checks, stream: TextIO, summary: str | None = None) -> None:
    """Write the annotations to a stream, and append the summary to a file.

    Args:
        checks: The results.
        stream: The stream that the runner reads.
        summary: The file of the step's summary; empty for no summary. None: the file that the
            runner names.
    """
    for line in commands(checks):
        stream.write(f"{line}\n")
    summary = settings.step_summary() if summary is None else summary
    if not summary:
        return
    try:
        with Path(summary).open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(markdown.paint(_bounded(checks.summary)) + "\n")
    # The verdict must reach the runner even if the summary does not.
    except OSError as trouble:
        why = trouble.strerror or type(trouble).__name__
        print(f"driftline: the summary cannot be written to {summary}: {why}", file=sys.stderr)


def commands(checks: Checks) -> list[str]:
    """The annotations: an error for the first failing place, if any, and a notice."""
    title = f"driftline {checks.command}"
    lines: list[str] = []
    finding = f"{checks.word}: {checks.finding}" if checks.word else checks.finding
    if not checks.passed:
        where = f"{title}: {checks.first}" if checks.first else title
        # One error only: GitHub shows ten annotations of a step at most.
        lines.append(_command("error", where, finding))
    elif checks.word:
        lines.append(_command("warning", title, finding))
    lines.append(_command("notice", title, checks.tally))
    return lines


def _command(kind: str, title: str, text: str) -> str:
    # Names come from files of others and may hold control characters.
    shown = shorten(printable(title), _LONGEST)
    message = shorten(printable(text), _LONGEST_TEXT)
    return f"::{kind} title={_property(shown)}::{_data(message)}"


def _data(text: str) -> str:
    r"""The text with the characters escaped that would end a command for the runner.

    >>> _data("50 %\r\n::error::x")
    '50 %25%0D%0A::error::x'
    """
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """The text with the characters escaped that would end a command or a property.

    >>> _property("a: b, c")
    'a%3A b%2C c'
    """
    # Properties are separated by commas and ended by colons.
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _bounded(view: View) -> View:
    """The view with long names shortened."""

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


# JUnit XML, which CI servers read.


def write_junit(checks: Checks, stream: TextIO) -> None:
    """The whole document, ended by a newline."""
    # A separate case: a run may fail although no single site does, for example by coverage.
    outcome: Outcome = "fail"
    if checks.passed:
        # An allowed INCOMPLETE is not a pass.
        outcome = "skipped" if checks.word else "pass"
    finding = f"{checks.word}: {checks.finding}" if checks.word else checks.finding
    verdict = Case(
        "verdict",
        f"driftline {checks.command}",
        outcome,
        "" if outcome == "pass" else finding,
        () if checks.passed else (finding, checks.tally),
    )
    # Cases are walked twice, as JUnit states the counts before the cases.
    outcomes = Counter(case.outcome for case in checks.cases) + Counter([verdict.outcome])
    counts = _attributes(
        tests=outcomes.total(),
        failures=outcomes["fail"],
        errors=0,
        skipped=outcomes["skipped"],
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
    """The text as a quoted attribute; characters that XML forbids are written as escapes."""
    return quoteattr(printable(text))


def _text(text: str) -> str:
    return escape(printable(text))
