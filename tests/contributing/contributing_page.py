"""The page docs/contributing.md as data: its recipes, and a tree to apply their patches to."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "contributing.md"
_HEADING = re.compile(r"^### (?P<name>.+?): (?P<files>one|two|up to seven) files?$", re.MULTILINE)
_COUNTS = {"one": 1, "two": 2, "up to seven": 7}


class Recipe(NamedTuple):
    """One recipe of the page: how many files it promises to touch, its text and its patch."""

    files: int
    text: str
    patch: str


def recipes() -> dict[str, Recipe]:
    """The recipes of the page, by the words of their headings."""
    text = PAGE.read_text("utf-8")
    headings = list(_HEADING.finditer(text))
    found: dict[str, Recipe] = {}
    for heading in headings:
        body = re.split(r"^#+ ", text[heading.end() :], maxsplit=1, flags=re.MULTILINE)[0]
        blocks = re.findall(r"^```diff\n(.*?)^```$", body, re.MULTILINE | re.DOTALL)
        # A long patch is a file that the page links to.
        linked = re.findall(r"\]\(\.\./(tests/contributing/[\w.]+\.patch)\)", body)
        patch = "".join([*blocks, *((ROOT / path).read_text("utf-8") for path in linked)])
        found[heading["name"]] = Recipe(_COUNTS[heading["files"]], body, patch)
    return found


def edits_of(patch: str) -> dict[str, list[tuple[str, str]]]:
    """What a patch does: (old text, new text) of each hunk, by file; no old text for a new file."""
    edits: dict[str, list[tuple[str, str]]] = {}
    hunks: list[tuple[str, str]] = []
    for line in patch.splitlines(keepends=True):
        if line.startswith("--- "):
            continue
        if line.startswith("+++ b/"):
            hunks = edits.setdefault(line.removeprefix("+++ b/").strip(), [])
        elif line.startswith("@@"):
            hunks.append(("", ""))
        else:
            # Markdown editors take the blank off an empty line of context.
            sign, rest = (line[0], line[1:]) if line.strip("\n") else (" ", "\n")
            old, new = hunks[-1]
            hunks[-1] = (old + rest * (sign != "+"), new + rest * (sign != "-"))
    return edits


class Tree:
    """A copy of the package that recipes are applied to, one at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._before: dict[Path, tuple[str, float] | None] = {}

    def apply(self, patch: str) -> list[str]:
        """Apply a patch; returns the files it touches. Context must occur exactly once."""
        edits = edits_of(patch)
        for name, hunks in edits.items():
            path = self.folder / name
            text = path.read_text("utf-8") if path.exists() else ""
            self._before[path] = (text, path.stat().st_mtime) if path.exists() else None
            for old, new in hunks:
                assert text.count(old) == 1 if old else not text, (
                    f"{name}: {old!r} is not there once"
                )
                text = text.replace(old, new) if old else new
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, "utf-8")
        return list(edits)

    def restore(self) -> None:
        """Undo what was applied."""
        for path, before in self._before.items():
            if before is None:
                path.unlink(missing_ok=True)
            else:
                path.write_text(before[0], "utf-8")
                os.utime(path, (before[1], before[1]))
        self._before.clear()

    def driftline(self, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run the command line of the copy."""
        return self.python("-m", "driftline", *words, cwd=cwd)

    def python(self, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run Python with the copy in front of the installed package."""
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(self.folder / "src"), str(cwd)]),
            # Compiled once for all recipes; a file that a patch changed has another size.
            "PYTHONDONTWRITEBYTECODE": "",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "100",
        }
        return subprocess.run(
            [sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True
        )
