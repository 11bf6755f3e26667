"""docs/seed-differences.md: every row has a state, and the tests that it names are there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
PAGE = (ROOT / "docs" / "seed-differences.md").read_text("utf-8")
STATES = ("works", "differs: ", "needs hardware")
WITHOUT_TEST = "tables of durations, the warning of triton, `Using AIU_TOPO_FILE=…`"
"""What other packages print, which no test of ours can hold."""


def rows_of(heading: str) -> Iterator[list[str]]:
    """Cells of all tables below a heading."""
    (text,) = re.findall(rf"^## {heading}\n(.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL)
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if cells and not set(cells[0]) <= {"-"} and cells[0] not in ("sentence", "what"):
            yield cells


SENTENCES = list(rows_of("Every sentence of the documents"))
BOTH_NAMES = list(rows_of("Under both names"))


def named_tests(cell: str) -> list[str]:
    return re.findall(r"`(\w+/(?:test_\w+\.py(?:::\w+)*)?)`", cell)


def exists(test: str) -> bool:
    """Whether pytest finds a test by this name: a folder, a file, a function, one of a class."""
    file, *names = test.split("::")
    path = TESTS / file
    if not names:
        return path.exists()
    if not path.is_file():
        return False
    body: list[ast.stmt] = ast.parse(path.read_text("utf-8")).body
    for name in names:
        found = [
            node
            for node in body
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name
        ]
        if not found:
            return False
        body = found[0].body
    return True


@pytest.mark.parametrize("row", SENTENCES, ids=lambda row: row[0][:60])
def test_a_sentence_has_a_state_and_tests_that_are_there(row: list[str]) -> None:
    sentence, state, tests = row
    assert state.startswith(STATES), state
    names = named_tests(tests)
    assert names or sentence == WITHOUT_TEST
    assert [name for name in names if not exists(name)] == []


@pytest.mark.parametrize("row", BOTH_NAMES, ids=lambda row: row[0][:60])
def test_what_is_held_under_both_names_names_tests_that_are_there(row: list[str]) -> None:
    _, theirs, ours = row
    names = [*named_tests(theirs), *named_tests(ours)]
    assert names and [name for name in names if not exists(name)] == []
    assert all("::" in name for name in names)
    # One test may go both ways; then it has a parameter for the spelling, or runs both commands.
    assert named_tests(theirs) or theirs == "not in the documents"
    assert named_tests(ours) or ours.startswith("the same test")


def test_every_document_has_its_table() -> None:
    documents = re.findall(r"^### .*\(document (\d+)\)$", PAGE, re.MULTILINE)
    assert documents == ["000", "001", "002", "003", "004"]
    assert len(SENTENCES) > 80 and len(BOTH_NAMES) == 17


@pytest.mark.parametrize(
    ("page", "command"),
    [
        ("ait-llm.md", "driftline doctor --ascend"),
        ("ait-llm.zh.md", "driftline doctor --ascend"),
        ("aiu-fms-testing-utils.md", "driftline doctor --aiu"),
    ],
)
def test_users_of_the_hardware_are_told_what_was_proven_and_what_to_run(
    page: str, command: str
) -> None:
    """Where they read first, and where the stand-ins are listed."""
    text = (ROOT / "docs" / "coming-from" / page).read_text("utf-8")
    assert command in text
    assert "seed-differences.md#what-was-proven-without-the-hardware" in text
    (proven,) = re.findall(
        r"^## What was proven without the hardware\n(.*?)(?=^## )", PAGE, re.MULTILINE | re.DOTALL
    )
    assert command in proven
    for stand_in in re.findall(r"`(tests/[\w./]+)`", proven):
        assert (ROOT / stand_in).exists(), stand_in
