"""The planter of mistakes: each is one small change that is still Python, and has a name."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SAMPLE = '''"""A module — with a dash of three bytes."""
LIMIT = 3


def f(x, y=True):
    """Says nothing."""
    if x < LIMIT and not y:
        return x[:LIMIT] + 1
    for each in x:
        if each is None:
            continue
        x.total += max(each, -y)
    while x:
        x.pop()
    return f"{x + 1}"
'''


@pytest.fixture(scope="module")
def tool() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tools")
        return importlib.import_module("mutants")


def planted(tool: Any) -> list[Any]:
    planter = tool.Planter("sample.py", SAMPLE.encode())
    planter.visit(ast.parse(SAMPLE))
    return planter.found


def test_each_kind_of_mistake_is_planted_where_it_can_be(tool: Any) -> None:
    changes = {
        (mutant.line, mutant.kind, mutant.applied(SAMPLE.encode()).decode().splitlines()[line])
        for mutant in planted(tool)
        for line in [mutant.line - 1]
    }
    expected = {
        (2, "constant", "LIMIT = 4"),
        (5, "constant", "def f(x, y=False):"),
        (7, "comparison", "    if (x <= LIMIT) and not y:"),
        (7, "and/or", "    if (x < LIMIT or not y):"),
        (7, "not dropped", "    if x < LIMIT and (y):"),
        (7, "condition", "    if True:"),
        (7, "condition", "    if False:"),
        (8, "return", "        return None"),
        (8, "off by one", "        return x[:(LIMIT) + 1] + 1"),
        (8, "arithmetic", "        return (x[:LIMIT] - 1)"),
        (10, "comparison", "        if (each is not None):"),
        (11, "statement", "            break"),
        (12, "statement", "        pass"),
        (12, "opposite call", "        x.total += min(each, -y)"),
        (12, "sign dropped", "        x.total += max(each, (y))"),
        (13, "condition", "    while False:"),
        (14, "statement", "        pass"),
        (15, "return", "    return None"),
    }
    assert expected <= changes
    lines = {line for line, _, _ in changes}
    assert not lines & {1, 6}  # docstrings
    assert (15, "constant") not in {change[:2] for change in changes}  # inside an f-string
    assert (13, "condition", "    while True:") not in changes


def test_mistakes_have_names_of_their_own_and_stay_python(tool: Any) -> None:
    for name in ("alignment/reconcile/tokens.py", "runs/stores/store.py"):
        path = f"src/driftline/{name}"
        source = (ROOT / path).read_bytes()
        found = tool.mutants_of(ROOT / path)
        assert len(found) > 200
        assert len({mutant.key for mutant in found}) == len(found)
        for mutant in found[::7]:
            changed = mutant.applied(source)
            assert changed != source
            ast.parse(changed)
            assert mutant.diff(source)


def test_the_table_of_tests_names_what_is_there(tool: Any) -> None:
    for package, paths in tool.TESTS.items():
        assert (ROOT / tool.SOURCE / package).is_dir()
        assert all((ROOT / path).exists() for path in (tool.EXAMPLES, *paths))


def test_tests_are_those_that_reach_the_statement_the_quickest_first(tool: Any) -> None:
    reached = {"src/a.py": {3: {"t::slow", "t::quick"}, 7: {"t::other"}}}
    seconds = {"t::quick": 0.1, "t::slow": 9.0, "t::other": 1.0}
    asked = tool.Map(seconds, reached)

    def tests(line: int, statement: int | None) -> list[str]:
        return asked.tests_of(tool.Mutant("src/a.py", line, statement, "f", "", 0, 0, "", ""))

    assert tests(3, 3) == ["t::quick", "t::slow"]
    assert tests(9, 7) == ["t::other"]  # a later line of the same statement
    assert tests(9, 8) == []
    assert tests(5, None) == ["t::quick", "t::other", "t::slow"]  # importing the file runs it


def test_a_mistake_knows_the_statement_that_runs_it(tool: Any) -> None:
    source = "LIMIT = 3\n\n\ndef f(\n    x=True,\n):\n    return (\n        x + 1\n    )\n"
    planter = tool.Planter("sample.py", source.encode())
    planter.visit(ast.parse(source))
    statements = {mutant.line: mutant.statement for mutant in planter.found}
    assert statements == {1: None, 5: 4, 8: 7}


def test_what_a_test_reaches_is_recorded_in_its_subprocesses_too(tool: Any, tmp_path: Path) -> None:
    path = tmp_path / "src" / "sample.py"
    path.parent.mkdir()
    text = '''"""Two parts."""

from __future__ import annotations

import functools


@functools.cache
def f(x):
    """A docstring."""
    if x:
        return 1
    return 2


class C:
    """Another."""

    def g(self):
        try:
            raise ValueError
        except ValueError:
            pass
'''
    path.write_text(text)
    lines = tool.ReachedLines(tmp_path, "src")
    assert path.read_text() == text

    def run(call: str) -> dict[str, list[int]]:
        subprocess.run(
            [sys.executable, "-c", f"import sample; sample.{call}; print(sample.f.__doc__)"],
            cwd=path.parent,
            check=True,
            capture_output=True,
        )
        return dict(lines.taken())

    assert run("f(False)") == {"src/sample.py": [8, 11, 13]}
    assert run("f(1)") == {"src/sample.py": [8, 11, 12]}
    assert run("C().g()") == {"src/sample.py": [19, 20, 21, 23]}
    assert lines.taken() == {}


def test_the_test_that_noticed_is_read_from_what_pytest_prints(tool: Any) -> None:
    tests = ["t/a.py::f[1 - 2]", "t/a.py::f", "t/b.py::g"]
    assert tool.failed_test("..F\nFAILED t/a.py::f[1 - 2] - assert 1 == 2\n", tests) == tests[0]
    assert tool.failed_test("FAILED t/a.py::f\nFAILED t/b.py::g", tests) == tests[1]
    assert tool.failed_test("ERROR t/b.py::g - OSError", tests) == tests[2]
    assert tool.failed_test("ERROR t/b.py", tests) == ""


def test_tests_that_never_end_are_counted_and_said(tool: Any) -> None:
    outcomes = ["noticed", "never ended", "survived", "not reached", "survived"]
    entries = [{"key": str(key), "outcome": word} for key, word in enumerate(outcomes)]
    said = tool.summary("runs", entries, {"4": "a reason"})
    assert said.startswith("runs: 2 of 4 noticed (50%), 1 of them because tests never ended; 1 ")
