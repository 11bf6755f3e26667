"""Outputs for CI: GitHub's annotations and step summary, JUnit's XML, Markdown; hostile names."""

from __future__ import annotations

import io
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from driftline.comparison.pipeline import compare
from driftline.comparison.table.table import Table
from driftline.comparison.verdict.judge import exit_code
from driftline.diagnosis.result import Diagnosis, SiteFinding
from driftline.operators.api import check
from driftline.reporting import ci, markdown, writers
from driftline.reporting.ci import Checks
from driftline.reporting.view import Sentence, View
from driftline.reporting.views.operators import report_of
from driftline.testing.runs import run_of
from support.atb import AtbDump, Operation, Value

AXES = {"axes": [-1]}
HOSTILE = (
    "a%0Ab",
    "x\n::error::owned",
    "y\r\n::set-output name=a::b",
    "t, file=/etc/passwd:1",
    "</failure><x>&\"'",
    "bell\x07\x00\x1b[2J",
    "half\udc80pair",
    "nonchar￾",
    "| a | <img src=x onerror=alert(1)> | [x](javascript:1) `code` **b** |",
    "```\n# heading",
    "https://evil.test/@user #1 $x$ ~~s~~",
)


def table_of(names: tuple[str, ...], bad: tuple[str, ...] = (), **how: float) -> Table:
    ours = {name: np.linspace(1, 2, 6, dtype=np.float32) for name in names}
    theirs = {name: value * (3 if name in bad else 1) for name, value in ours.items()}
    return compare(run_of(ours), run_of(theirs), **how)  # type: ignore[arg-type]


def annotated(found: Checks) -> list[tuple[str, dict[str, str], str]]:
    """What the runner makes of the lines: kind, properties, text."""
    lines = ci.commands(found)
    read = []
    for line in lines:
        assert "\n" not in line and "\r" not in line
        kind, properties, text = re.fullmatch(r"::(\w+) ([^:]*)::(.*)", line).groups()  # type: ignore[union-attr]
        pairs = dict(each.split("=", 1) for each in properties.split(","))
        read.append((kind, {k: unescaped(v) for k, v in pairs.items()}, unescaped(text)))
    return read


def unescaped(text: str) -> str:
    for code, sign in (("%3A", ":"), ("%2C", ","), ("%0D", "\r"), ("%0A", "\n"), ("%25", "%")):
        text = text.replace(code, sign)
    return text


def test_there_is_one_error_for_the_first_bad_site_and_one_notice_for_the_count() -> None:
    found = ci.of_table(table_of(("a", "b", "c", "d"), bad=("b", "c", "d")))
    error, notice = annotated(found)
    assert error[0] == "error" and error[1] == {"title": "driftline compare: b"}
    assert "the drift starts at 'b'" in error[2]
    assert notice[0] == "notice" and "3 of 4 compared tensors fail" in notice[2]


def test_a_pass_is_a_notice_alone() -> None:
    (notice,) = annotated(ci.of_table(table_of(("a", "b"))))
    assert notice[0] == "notice" and "0 of 2 compared tensors fail" in notice[2]


def test_too_little_coverage_is_an_error_though_no_site_is_to_blame() -> None:
    ours = run_of({"a": np.ones(2, np.float32), "b": np.ones(2, np.float32)})
    table = compare(ours, run_of({"a": np.ones(2, np.float32)}), min_coverage=0.9)
    (error, _) = annotated(ci.of_table(table))
    assert error[0] == "error" and "only 50.0% of the tensors" in error[2]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_makes_no_command_of_its_own(name: str) -> None:
    lines = annotated(ci.of_table(table_of((name, "z"), bad=(name, "z"))))
    assert [kind for kind, _, _ in lines] == ["error", "notice"]
    assert set(lines[0][1]) == {"title"}


def test_the_summary_is_appended_and_holds_the_worst_twenty(tmp_path: Path) -> None:
    names = tuple(f"layer.{n}" for n in range(50))
    place = tmp_path / "summary.md"
    place.write_text("what was there\n")
    stream = io.StringIO()
    ci.write_github(ci.of_table(table_of(names, bad=names)), stream, str(place))
    text = place.read_text()
    assert text.startswith("what was there\n") and "**FAIL: the drift starts at" in text
    assert len(re.findall(r"^\| fail \|", text, re.MULTILINE)) == 20
    assert "... and 30 more" in text and stream.getvalue().count("\n") == 2


def test_a_summary_that_cannot_be_written_does_not_stop_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ci.write_github(ci.of_table(table_of(("a",))), io.StringIO(), str(tmp_path))
    assert "the summary cannot be written" in capsys.readouterr().err


def test_the_environment_says_where_the_summary_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "s.md"))
    writers.table(table_of(("a",)), "github", io.StringIO())
    assert "PASS" in (tmp_path / "s.md").read_text()


@pytest.mark.parametrize("name", HOSTILE)
def test_markdown_takes_no_markup_from_a_name(name: str) -> None:
    text = markdown.paint(View((Sentence(name),)))
    bare = re.sub(r"\\[\\`*_\[\]|~#]", "", text)  # what is escaped is text
    assert not re.search(r"[`*_\[\]|<>~#$@]", re.sub(r"&(#\d+|\w+);", "", bare)), text
    assert "://" not in text and text.count("\n") == 1


@pytest.mark.parametrize("name", HOSTILE)
def test_a_row_of_markdown_stays_a_row(name: str) -> None:
    text = markdown.paint(ci.of_table(table_of((name,), bad=(name,))).summary)
    (row,) = [line for line in text.splitlines() if line.startswith("| fail")]
    heading = next(line for line in text.splitlines() if line.startswith("| status"))
    cells = re.split(r"(?<!\\)\|", row.replace("\\\\", ""))
    assert len(cells) == len(heading.split("|"))


@pytest.mark.parametrize("name", HOSTILE)
def test_xml_stays_whole_and_counts_what_it_holds(name: str) -> None:
    stream = io.StringIO()
    ci.write_junit(ci.of_table(table_of((name, "good"), bad=(name,))), stream)
    root = ElementTree.fromstring(stream.getvalue().encode("utf-8"))
    (suite,) = root
    cases = suite.findall("testcase")
    assert suite.get("tests") == str(len(cases)) == "3"
    assert suite.get("failures") == str(len(suite.findall("testcase/failure"))) == "2"
    assert cases[0].get("name") == "verdict"
    assert {child.tag for case in cases for child in case} <= {"failure", "skipped"}


def test_what_was_not_compared_is_skipped_with_its_reason() -> None:
    ours = run_of({"a": np.ones(2, np.float32), "only": np.ones(2, np.float32)})
    stream = io.StringIO()
    ci.write_junit(ci.of_table(compare(ours, run_of({"a": np.ones(2, np.float32)}))), stream)
    (skipped,) = ElementTree.fromstring(stream.getvalue()).iter("skipped")
    assert "missing" in (skipped.get("message") or "")


def test_there_is_a_failure_exactly_when_the_exit_code_is_not_0() -> None:
    one = np.ones(2, np.float32)
    tables = [
        table_of(("a", "b")),
        table_of(("a", "b"), bad=("b",)),
        compare(run_of({"a": one, "b": one}), run_of({"a": one}), min_coverage=0.9),
        compare(run_of({"a": np.ones(2)}), run_of({"a": np.ones(3)})),
    ]
    for table in tables:
        stream = io.StringIO()
        ci.write_junit(ci.of_table(table), stream)
        suite = ElementTree.fromstring(stream.getvalue())[0]
        assert (suite.get("failures") != "0") == (exit_code(table) != 0), table
    assert {exit_code(table) for table in tables} == {0, 1, 2}


def test_a_diagnosis_fails_where_error_is_introduced() -> None:
    sites = (
        SiteFinding("a", 0, "clean"),
        SiteFinding("b", 1, "introduced", cause="scale", reason="errs by itself"),
        SiteFinding("c", 2, "inherited"),
        SiteFinding("d", 3, "unknown", reason="was not replayed"),
    )
    found = ci.of_diagnosis(Diagnosis("fail", ("It starts at b.",), sites, first_site="b"))
    assert [case.outcome for case in found.cases] == ["pass", "fail", "pass", "skipped"]
    (error, notice) = annotated(found)
    assert error[1]["title"] == "driftline diagnose: b" and "1 of 4 sites introduce" in notice[2]


def test_checked_operators_are_cases_too(tmp_path: Path) -> None:
    zeros = Value("x", np.zeros(4, np.float32))
    operators = [
        Operation("SoftmaxOperation", [zeros], [Value("p", np.full(4, share, np.float32))], AXES)
        for share in (0.25, 0.3)
    ]
    AtbDump(tmp_path, "G2").execute([*operators, Operation("NobodyKnows", [zeros], [zeros], {})])
    found = ci.of_operators(report_of(check(tmp_path / "ait_dump")))
    assert [case.outcome for case in found.cases] == ["pass", "fail", "skipped"]
    (error, notice) = annotated(found)
    assert "1_SoftmaxOperation" in error[1]["title"] and "first" in error[2]
    assert "1 of 2 checked operators are not right; 1 could not be checked" in notice[2]


def test_the_summary_of_a_diagnosis_has_the_worst_twenty_too() -> None:
    sites = tuple(SiteFinding(f"s{n}", n, "inherited" if n else "introduced") for n in range(50))
    found = ci.of_diagnosis(Diagnosis("fail", ("It starts at s0.",), sites, first_site="s0"))
    text = markdown.paint(found.summary)
    assert len(re.findall(r"^\| s\d+ \|", text, re.MULTILINE)) == 20 and "| s0 | introduced" in text
