"""Rules that hold in every file of the package, whoever writes it."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "driftline"
FILES = sorted(PACKAGE.rglob("*.py"))
LONGEST_FILE = 800


@functools.cache
def texts() -> dict[str, str]:
    return {str(path.relative_to(PACKAGE)): path.read_text("utf-8") for path in FILES}


@functools.cache
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(text) for name, text in texts().items()}


FORBIDDEN = {
    r"\bpickle\.(load|loads|Unpickler)\b": "a pickle runs code",
    r"(?<![\w.])eval\(": "runs code",
    r"(?<![\w.])exec\(": "runs code",
    r"shell\s*=\s*True": "a shell reads more into a command than the user wrote",
    r"weights_only\s*=\s*False": "lets a .pt file run code",
    r"allow_pickle\s*=\s*True": "lets an .npy file run code",
    r"\b(TODO|FIXME|XXX)\b": "unfinished work belongs into an issue",
    r"raise NotImplementedError": "what is not there is not offered",
    r"/work/|\.\./shared": "a path of somebody's machine",
}


@pytest.mark.parametrize(("pattern", "why"), FORBIDDEN.items(), ids=FORBIDDEN.values())
def test_files_are_free_of_what_is_unsafe_or_unfinished(pattern: str, why: str) -> None:
    found = {name: seen[0] for name, text in texts().items() if (seen := re.search(pattern, text))}
    assert not found, why


def test_only_settings_reads_the_environment() -> None:
    readers = ("environ", "environb", "getenv", "putenv")
    found = [
        f"{name}:{node.lineno}"
        for name, tree in trees().items()
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr in readers)
        or (isinstance(node, ast.alias) and node.name in readers)
    ]
    assert [line for line in found if not line.startswith("settings.py:")] == []
    assert found, "settings.py reads it; what does not find that finds nothing"


def test_files_are_short_and_have_names_that_say_something() -> None:
    long = [name for name, text in texts().items() if len(text.splitlines()) > LONGEST_FILE]
    assert not long, "ask for it to be split"
    vague = ("utils", "util", "helpers", "helper", "common", "misc")
    assert not [name for name in texts() if Path(name).stem in vague]


def test_files_say_what_they_are_for() -> None:
    mute = [name for name, tree in trees().items() if texts()[name] and not ast.get_docstring(tree)]
    assert not mute


def test_test_files_have_names_of_their_own() -> None:
    names = [p.name for p in (ROOT / "tests").rglob("test_*.py")]
    twins = {name for name in names if names.count(name) > 1}
    assert not twins, "pytest imports test files by name"
