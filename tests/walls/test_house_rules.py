"""Rules that hold in every file of the package, whoever writes it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "driftline"
FILES = sorted(PACKAGE.rglob("*.py"))
LONGEST_FILE = 800

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


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_is_free_of_what_is_unsafe_or_unfinished(path: Path) -> None:
    text = path.read_text("utf-8")
    for pattern, why in FORBIDDEN.items():
        found = re.search(pattern, text)
        assert found is None, f"{path.name} contains {found[0]!r}: {why}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_settings_reads_the_environment(path: Path) -> None:
    if path == PACKAGE / "settings.py":
        return
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        name = ""
        if isinstance(node, ast.Attribute):
            name = node.attr
        elif isinstance(node, ast.alias):
            name = node.name
        assert name not in ("environ", "environb", "getenv", "putenv"), (
            f"{path.name}:{node.lineno} reads the environment; add an accessor to settings.py"
        )


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_is_short_and_has_a_name_that_says_something(path: Path) -> None:
    assert len(path.read_text("utf-8").splitlines()) <= LONGEST_FILE, "ask for it to be split"
    assert path.stem not in ("utils", "util", "helpers", "helper", "common", "misc")


@pytest.mark.parametrize(
    "path",
    [p for p in FILES if p.stat().st_size],
    ids=lambda p: str(p.relative_to(PACKAGE)),
)
def test_a_file_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text("utf-8")))


def test_test_files_have_names_of_their_own() -> None:
    names = [p.name for p in (ROOT / "tests").rglob("test_*.py")]
    twins = {name for name in names if names.count(name) > 1}
    assert not twins, "pytest imports test files by name"
