"""Commands that the documents show: where they stand, and whether they are to be run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "examples" / "README.md",
    ROOT / "compat" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
REASONS = (
    "a usage line",
    "compiles for half a minute",
    "needs a torchrun job",
    "needs a CUDA device",
    "needs a network",
    "needs a Ray cluster",
    "needs an AIU",
    "needs an Ascend device",
    "sets up an environment",
)
"""Why a command is not run: there are no others."""

RUN_PYTHON = ("docs/tutorial.md",)
"""Pages whose blocks of Python are run, too; one that begins with `# name.py` is that file."""

_FILE = re.compile(r"# (\w+\.py)")
_PROGRAMS = ("driftline", "pytest", "python", "cp", "make", "pip")
_NOT_RUN = re.compile(r"<!-- not run here: (.*?) -->\s*$")
_ASSIGNMENT = re.compile(r"[A-Z_]+=\S*")


class Block(NamedTuple):
    """Commands that stand together.

    Attributes:
        line: Where they begin.
        commands: Each as its words.
        reason: Why they are not run; empty if they are.
        shown: What the page says they print: the block of text that follows.
    """

    line: int
    commands: list[list[str]]
    reason: str
    shown: str


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks_of(page: Path) -> list[Block]:
    """The commands of a page, from top to bottom: blocks, and last columns of tables."""
    lines = page.read_text("utf-8").splitlines()
    found: list[Block] = []
    comment = ""
    at = 0
    while at < len(lines):
        line = lines[at]
        if said := _NOT_RUN.search(line):
            comment = said[1]
            at += 1
            continue
        start = at
        if (fence := line.lstrip()).startswith("```"):
            language = fence.removeprefix("```").strip()
            at += 1
            while at < len(lines) and not lines[at].lstrip().startswith("```"):
                at += 1
            inner = lines[start + 1 : at]
            if language == "text" and found:
                found[-1] = found[-1]._replace(shown="\n".join(inner))
            elif language == "python" and name_of(page) in RUN_PYTHON:
                code = "\n".join(inner) + "\n"
                file = _FILE.fullmatch(inner[0])
                words = ["write", file[1], code] if file else ["python", "-c", code]
                found.append(Block(start + 1, [words], comment, ""))
            elif language in ("sh", "console"):
                _take(found, start, inner, comment)
            elif not language:  # a picture, a tree of files, or a usage line
                _take(found, start, [x for x in inner if x.startswith("driftline ")], comment)
        elif line.startswith("    ") and not line.strip().startswith(("-", "*")):
            while at < len(lines) and lines[at].startswith("    "):
                at += 1
            _take(found, start, lines[start:at], comment)
            at -= 1
        elif line.startswith("|"):
            cell = re.split(r"(?<!\\)\|", line)[-2]
            spans = re.findall(r"`(driftline [^`]+)`", cell)
            if "coming-from" in page.parts and spans:
                found.append(Block(start + 1, [shlex.split(each) for each in spans], "", ""))
        if line.strip():
            comment = ""
        at += 1
    return found


def _take(found: list[Block], start: int, lines: list[str], reason: str) -> None:
    commands = [shlex.split(text, comments=True) for text in _joined(lines)]
    mine = [words for words in commands if words and _program(words) in _PROGRAMS]
    if mine:
        found.append(Block(start + 1, mine, reason, ""))


def _joined(lines: list[str]) -> list[str]:
    """Lines that go on (by a backslash, or indented further) belong to the one before."""
    whole: list[str] = []
    depth = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    goes_on = False
    for line in lines:
        deeper = len(line) - len(line.lstrip()) > depth
        text = line.strip().removesuffix("\\").strip()
        if whole and (goes_on or deeper):
            whole[-1] += f" {text}"
        elif text.split(" ")[0] in _PROGRAMS or _ASSIGNMENT.match(text):
            whole.append(text)
        goes_on = line.rstrip().endswith("\\")
    return whole


def _program(words: list[str]) -> str:
    return next((word for word in words if not _ASSIGNMENT.fullmatch(word)), "")
