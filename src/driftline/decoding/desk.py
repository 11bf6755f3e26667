"""A hidden folder beside the results where work that is not finished lies; one process at a time.

While it is there, results of that name are not whole, whatever lies beside it.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from driftline.errors import AlreadyThere, BadInput

_LOCK = "lock"
_NAMING = "naming"


def require_writable(folder: Path, option: str) -> None:
    """Make the folder of the results, and see that files can be made in it.

    Raises:
        BadInput: They cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".driftline-probe"
        probe.touch()
        probe.unlink()
    except OSError as trouble:
        raise BadInput(
            f"the output folder {folder} cannot be written: {trouble.strerror}",
            hint=f"give another folder with {option}",
        ) from None


def desk_of(folder: Path, what: str, name: str) -> Path:
    """Where unfinished work of this name lies, if there is any."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return folder / f".driftline-{what}-{digest}"


@contextmanager
def empty_desk(folder: Path, what: str, name: str, option: str) -> Generator[Path]:
    """The desk, empty. It goes with the work, but stays if that ends while files are being named.

    Raises:
        AlreadyThere: Another process is at work there.
    """
    with _locked(folder, what, name, option) as desk:
        _clear(desk, files=True)
        try:
            yield desk
        except BaseException:
            if not (desk / _NAMING).exists():
                shutil.rmtree(desk, ignore_errors=True)
            raise
        shutil.rmtree(desk, ignore_errors=True)


@contextmanager
def kept_desk(
    folder: Path, what: str, name: str, option: str, *, fresh: bool = False
) -> Generator[Path]:
    """The desk with the files that finished steps have left; it stays until all work is done.

    Folders on it are drafts that somebody did not come to rename, and go. With `fresh` the files
    go as well.

    Raises:
        AlreadyThere: Another process is at work there.
    """
    with _locked(folder, what, name, option) as desk:
        _clear(desk, files=fresh)
        try:
            yield desk
        except BaseException:
            if all(left.name == _LOCK for left in desk.iterdir()):
                shutil.rmtree(desk, ignore_errors=True)
            raise
        shutil.rmtree(desk, ignore_errors=True)


@contextmanager
def _locked(folder: Path, what: str, name: str, option: str) -> Generator[Path]:
    desk = desk_of(folder, what, name)
    desk.mkdir(exist_ok=True)
    with (desk / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AlreadyThere(
                f"another driftline is at work on {name} in {folder}",
                hint=f"wait for it, or give another folder with {option}",
            ) from None
        except OSError:  # a file system without locks
            pass
        yield desk


def _clear(desk: Path, *, files: bool) -> None:
    """Take away what a process that was killed has left."""
    for old in desk.iterdir():
        if old.is_dir() and not old.is_symlink():
            shutil.rmtree(old, ignore_errors=True)
        elif files and old.name != _LOCK:
            old.unlink()


def naming_begins(desk: Path) -> None:
    """From now on files get their final names: until all have, the desk says they are not whole."""
    (desk / _NAMING).touch()
