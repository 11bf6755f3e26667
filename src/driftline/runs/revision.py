"""Which commit a program ran from, read from `.git` by hand; git is only asked if files changed.

Nothing of the repository is executed: no hooks, no file-system monitor.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Revision:
    """A commit, and whether tracked files differ from it (None: could not be found out)."""

    commit: str
    dirty: bool | None


def _first_line(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(4096).split(b"\n")[0].decode("utf-8", "replace").strip()


def _git_folder(place: Path) -> tuple[Path, Path] | None:
    """The work tree around a place and its git folder."""
    for tree in (place, *place.parents):
        found = tree / ".git"
        if found.is_dir():
            return tree, found
        if found.is_file():  # a linked work tree or a submodule
            said = _first_line(found)
            if said.startswith("gitdir:"):
                return tree, (tree / said.removeprefix("gitdir:").strip()).resolve()
    return None


def _commit_of(git: Path) -> str:
    head = _first_line(git / "HEAD")
    if not head.startswith("ref:"):
        return head if _COMMIT.fullmatch(head) else ""
    name = head.removeprefix("ref:").strip()
    common = git
    if (git / "commondir").is_file():
        common = (git / _first_line(git / "commondir")).resolve()
    for folder in (git, common):
        if (folder / name).is_file():
            line = _first_line(folder / name)
            return line if _COMMIT.fullmatch(line) else ""
    packed = common / "packed-refs"
    if packed.is_file():
        with packed.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                commit, _, ref = line.strip().partition(" ")
                if ref == name and _COMMIT.fullmatch(commit):
                    return commit
    return ""


def _is_dirty(tree: Path) -> bool | None:
    git = shutil.which("git")
    if git is None:
        return None
    quiet = ["-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "--no-optional-locks"]
    try:
        done = subprocess.run(
            [git, *quiet, "status", "--porcelain", "--untracked-files=no", "--ignore-submodules"],
            cwd=tree,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return bool(done.stdout.strip()) if done.returncode == 0 else None


def revision_of(place: Path) -> Revision | None:
    """The commit checked out around a folder, or None where there is no repository."""
    try:
        found = _git_folder(place.absolute())
        if found is None:
            return None
        commit = _commit_of(found[1])
        return Revision(commit, _is_dirty(found[0])) if commit else None
    except OSError:
        return None
