"""A hidden work folder next to the results, used by one process at a time.

While it exists, results of that name are incomplete, whatever files are next to it. Several workers
may share the folder of the results, each with a work folder of its own.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from driftline.errors import AlreadyThere, BadInput

_LOCK = "lock"
_RENAMING = "naming"


def require_writable(folder: Path, option: str) -> None:
    """Create the folder of the results, and check that files can be created in it.

    Args:
        folder: The folder.
        option: The option that names it, for the hint.

    Raises:
        BadInput: They cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # A unique name: with one name for all, a worker would delete another's file.
        descriptor, probe = tempfile.mkstemp(prefix=".driftline-probe-", dir=folder)
        os.close(descriptor)
        Path(probe).unlink()
    except OSError as trouble:
        raise BadInput(
            f"the output folder {folder} cannot be written: {trouble.strerror}",
            hint=f"give another folder with {option}",
        ) from None


def work_folder_path(folder: Path, task: str, name: str) -> Path:
    """The path of unfinished work of this name, if there is any.

    Args:
        folder: Folder of the results.
        task: The kind of work.
        name: Name of the results; only its digest is used, as it may be long.
    """
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return folder / f".driftline-{task}-{digest}"


@contextmanager
def empty_work_folder(folder: Path, task: str, name: str, option: str) -> Generator[Path]:
    """A work folder that is empty at first and deleted at the end.

    It stays if the work ends while files get their final names, because then some results are old
    and some are new.

    Raises:
        AlreadyThere: Another process is at work there.
    """
    with _locked(folder, task, name, option) as work:
        _clear(work, files=True)
        try:
            yield work
        except BaseException:
            if not (work / _RENAMING).exists():
                _delete(work)
            raise
        _delete(work)


@contextmanager
def resumable_work_folder(
    folder: Path, task: str, name: str, option: str, *, fresh: bool = False
) -> Generator[Path]:
    """A work folder with the files of finished steps; it stays until all work is done.

    Folders in it are drafts that were not renamed in time, and are deleted. With `fresh` the files
    are deleted as well.

    Raises:
        AlreadyThere: Another process is at work there.
    """
    with _locked(folder, task, name, option) as work:
        _clear(work, files=fresh)
        try:
            yield work
        except BaseException:
            # With nothing in it that could be used again, the folder would only be in the way.
            if all(entry.name == _LOCK for entry in work.iterdir()):
                _delete(work)
            raise
        _delete(work)


def begin_renaming(work: Path) -> None:
    """Mark that files are being renamed; the mark stays until all have their final names."""
    (work / _RENAMING).touch()


@contextmanager
def _locked(folder: Path, task: str, name: str, option: str) -> Generator[Path]:
    work = work_folder_path(folder, task, name)
    while True:
        # Not `exist_ok`: it raises when the folder is deleted while it is looked at.
        with suppress(FileExistsError):
            work.mkdir()
        try:
            lock = (work / _LOCK).open("w")
        except FileNotFoundError:  # its last user has deleted it since
            continue
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise AlreadyThere(
                    f"another driftline is at work on {name} in {folder}",
                    hint=f"wait for it, or give another folder with {option}",
                ) from None
            except OSError:  # a file system without locks
                pass
            # A lock on a file that was deleted before it was locked has no effect.
            if _is_at(lock, work / _LOCK):
                yield work
                return


def _is_at(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _clear(work: Path, *, files: bool) -> None:
    """Delete the remains of a killed process, except the lock."""
    for entry in work.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        elif files and entry.name != _LOCK:
            entry.unlink()


def _delete(work: Path) -> None:
    """Delete the folder, the lock last: without it, another process may start to use the folder."""
    try:
        _clear(work, files=True)
        (work / _LOCK).unlink()
        work.rmdir()
    except OSError:  # another process uses it, or the rest cannot be deleted
        pass
