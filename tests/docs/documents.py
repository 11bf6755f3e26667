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
    "a formula",
    "a picture",
    "a usage line",
    "compiles for half a minute",
    "needs a torchrun job",
    "needs a CUDA device",
    "needs a network",
    "needs a Ray cluster",
    "needs an AIU",
    "needs an Ascend device",
    "sets up an environment",
    "takes an hour",
)
"""Why a command is not run: there are no others."""

HELD = {
    "docs/alignment.md": {"toml": "docs/test_docs_blocks.py"},
    "docs/contributing.md": {"diff": "contributing/test_recipes.py"},
    "docs/decoders.md": {"json": "docs/test_docs_blocks.py"},
    "docs/first-hour.md": {"text": "install/test_wheel.py"},
    "docs/formats.md": {
        "python": "formats/test_documented_format.py",
        "toml": "formats/test_documented_format.py",
    },
    "docs/how-to.md": {"mermaid": "docs/test_docs_commands.py"},
    "docs/python-api.md": {"text": "docs/test_docs_commands.py"},
    "docs/run-format.md": {"python": "runs/test_run_format_page.py"},
    "docs/scale.md": {
        "text": "execution/test_shards.py",
        "bash": "execution/test_scale_scripts.py",
        "yaml": "execution/test_scale_scripts.py",
    },
    "docs/table-format.md": {"json": "comparison/test_comparison_docs.py"},
    "docs/verdicts.md": {"yaml": "docs/test_docs_blocks.py"},
}
"""Blocks that are no commands, by page and language: the test that reads them."""
HELD_TEXT = [name for name, held in HELD.items() if "text" in held]
PYTHON_IN_PLACE = ("docs/tutorial.md", "docs/metrics.md")
"""Pages whose Python runs among the commands; a block that begins with `# name.py` is that file.
Of other pages `test_docs_blocks.py` runs it."""

_FILE = re.compile(r"# (\w+\.py)")
_PROGRAMS = ("driftline", "pytest", "python", "cp", "make", "pip", "bash")
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


class Fence(NamedTuple):
    """A block of a page, as it stands there.

    Attributes:
        line: Where it begins.
        language: What is written behind its first fence; `indented` for a block without fences.
        lines: What is in it.
        reason: Why it is not run, if the page says so.
    """

    line: int
    language: str
    lines: list[str]
    reason: str


def fences_of(page: Path) -> list[Fence]:
    """Every block of a page, fenced or indented, whether anybody checks it or not."""
    lines = page.read_text("utf-8").splitlines()
    fences: list[Fence] = []
    reason = ""
    at = 0
    while at < len(lines):
        line, start = lines[at], at
        if comment := _NOT_RUN.search(line):
            reason = comment[1]
            at += 1
            continue
        if (opening := line.lstrip()).startswith("```"):
            at += 1
            while at < len(lines) and not lines[at].lstrip().startswith("```"):
                at += 1
            language = opening.removeprefix("```").strip()
            fences.append(Fence(start + 1, language, lines[start + 1 : at], reason))
        elif _is_indented(lines, at):
            while at < len(lines) and lines[at].startswith("    "):
                at += 1
            fences.append(Fence(start + 1, "indented", lines[start:at], reason))
            at -= 1
        if line.strip():
            reason = ""
        at += 1
    return fences


def _is_indented(lines: list[str], at: int) -> bool:
    """A block without fences: four blanks, behind an empty line or a comment."""
    before = lines[at - 1].strip() if at else ""
    return lines[at].startswith("    ") and (not before or before.startswith(("<!--", "##")))


def unchecked(page: Path) -> list[Fence]:
    """Blocks that no test looks at: neither run, nor what a command prints, nor held elsewhere."""
    taken = {block.line: block for block in blocks_of(page)}
    held = HELD.get(name_of(page), {})
    lonely: list[Fence] = []
    printed = False  # whether the block before is one whose output may be shown next
    for fence in fences_of(page):
        block = taken.get(fence.line)
        if fence.language == "text" and printed and not fence.reason:
            continue
        printed = block is not None and not block.reason
        if fence.language == "python" and name_of(page) not in PYTHON_IN_PLACE:
            printed = True  # test_docs_blocks.py runs it
            continue
        if fence.language not in held and block is None and fence.reason not in REASONS:
            lonely.append(fence)
        elif block is not None and fence.language in ("sh", "console", "indented"):
            # A line that is no command would be passed over in silence.
            words = " ".join(" ".join(command) for command in block.commands)
            bare = [line.partition(" #")[0].strip() for line in fence.lines]
            if any(line and line.split()[0].strip("\\") not in words for line in bare):
                lonely.append(fence)
    return lonely


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
            if language == "text" and found and name_of(page) not in HELD_TEXT:
                found[-1] = found[-1]._replace(shown="\n".join([found[-1].shown, *inner]))
            elif language == "python" and name_of(page) in PYTHON_IN_PLACE:
                code = "\n".join(inner) + "\n"
                file = _FILE.fullmatch(inner[0])
                words = ["write", file[1], code] if file else ["python", "-c", code]
                found.append(Block(start + 1, [words], comment, ""))
            elif language in ("sh", "console"):
                _take(found, start, inner, comment)
            elif language == "bash" and "bash" not in HELD.get(name_of(page), {}):
                found.append(Block(start + 1, [["bash", "-c", "\n".join(inner)]], comment, ""))
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
