"""Files that Driftline writes while a user's program runs, without writing into other files.

A descriptor is only a number. A program that becomes a daemon closes every number that it did not
open itself, and its next `open` returns a number that we still remember as our file. Five rules
keep our bytes out of the program's files:

* Our descriptors have high numbers, which `open` does not return, and are closed by `exec`. A
number that was taken away is not soon used for another file of ours, which a late write would
damage.
* Before every write, truncation or closing, `fstat` must name the file that we created.
* After every write, `fstat` is called again. If the descriptor was replaced in between, our bytes
may be in a file of the program: if they are not in ours, an error says so.
* A descriptor that was closed or replaced is left alone. The file is opened again by its path, and
used only if it is still the file that we created; writing continues at the end of our own bytes.
* After a fork, the files belong to the parent; the child closes its copies and writes to none.

If a rule cannot be kept, `FileTaken` is raised, and the caller stops and reports it. This file does
not know runs. It imports little, because the captured programs import it.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
import sys
import time
import weakref

try:
    import fcntl
except ImportError:  # not on every system
    fcntl = None

TYPE_CHECKING = False  # `typing` takes longer to import than all of this
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Literal, TypeAlias, TypeVar

    Result = TypeVar("Result")
    Mode: TypeAlias = Literal["append", "new", "replace", "shared"]
    Data: TypeAlias = bytes | bytearray | memoryview
    Identity: TypeAlias = tuple[int, int]

_FLAGS = {
    "append": os.O_CREAT,
    "new": os.O_CREAT | os.O_EXCL,
    "replace": os.O_CREAT | os.O_TRUNC,
    # Several processes write it, so the system must find the end for each write.
    "shared": os.O_CREAT | os.O_APPEND,
}
_HIGHEST = 4096
"""Highest descriptor number that we use.

The kernel's table of descriptors, which every fork copies, grows with the highest number in use: to
32 KB with this one.
"""
_TRIES = 100
_RANGE = 1024
"""Number of descriptor numbers that are ours.

A writer has three or four files open; the remaining numbers keep one from being used again while a
thread may still write to it.
"""
_TURNS = itertools.count()


class FileTaken(OSError):
    """The descriptor of a file was taken away, and the file cannot be opened again."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.ESTALE, reason)


class OwnedFile:
    """A file that only this process writes, whatever the program does to its descriptors.

    Not thread-safe: callers must not use it at the same time.

    Attributes:
        path: Absolute path of the file.
        end: Offset at which `append` writes next: the length of the file as far as we know.
    """

    __slots__ = ("__weakref__", "_access", "_file", "_identity", "_locked", "_pid", "end", "path")

    def __init__(
        self, path: str | os.PathLike[str], mode: Mode = "append", *, locked: bool = False
    ) -> None:
        """Open the file.

        Args:
            path: Path of the file, which may not exist yet.
            mode: `append` continues at the end, `new` refuses an existing file, `replace` empties
                the file, `shared` appends to a file to which other processes append as well.
            locked: Whether to hold the file's lock while it is open, so that others see that it is
                written.

        Raises:
            OSError: The file cannot be opened.
        """
        self.path = os.path.abspath(path)  # noqa: PTH100 - pathlib is slow to import
        self._locked = locked
        self._pid = os.getpid()
        self._access = os.O_RDWR | os.O_CLOEXEC | (_FLAGS[mode] & os.O_APPEND)
        self._file, status = self._opened(self._access | _FLAGS[mode])
        self._identity = _identity(status)
        self.end = status.st_size
        self._take_lock()
        _LIVE.add(self)

    def append(self, data: Data) -> int:
        """Write at the end; returns the number of bytes that the system took.

        Raises:
            FileTaken: The file is no longer ours; nothing was written.
            OSError: The disk refuses the write.
        """
        return self.write_at(data, self.end)

    def append_all(self, data: Data) -> None:
        """Write all of the data at the end.

        Raises:
            FileTaken: The file is no longer ours.
            OSError: The disk refuses the write; a part may have been written.
        """
        rest = memoryview(data)
        while rest:
            rest = rest[self.append(rest) :]

    def write_at(self, data: Data, offset: int) -> int:
        """Write at an offset, or at the end of a shared file; returns the number of bytes taken.

        Raises:
            FileTaken: The file is no longer ours; nothing was written.
            OSError: The disk refuses the write.
        """
        count = self._run_on_descriptor(lambda file: self._write(file, data, offset))
        if not _leads_to(self._file, self._identity):
            self._check_written(data, offset, count)
        self.end = max(self.end, offset + count)
        return count

    def _check_written(self, data: Data, offset: int, count: int) -> None:
        """Check that written bytes are in our file; another thread took the descriptor meanwhile.

        Raises:
            FileTaken: They are not, so they are in the file that now has the descriptor.
        """
        written = bytes(memoryview(data).cast("B")[:count])
        if self._access & os.O_APPEND:  # others append too: search everything after our end
            length = max(0, os.stat(self.path).st_size - self.end)  # noqa: PTH116
            if written in self._run_on_descriptor(lambda file: os.pread(file, length, self.end)):
                return
        elif self._run_on_descriptor(lambda file: os.pread(file, count, offset)) == written:
            return
        raise FileTaken(
            f"the program put a file of its own over a descriptor of Driftline while "
            f"{os.path.basename(self.path)} was written: {count} bytes may be in that file"  # noqa: PTH119
        )

    def truncate(self, length: int) -> None:
        """Set the length of the file.

        Raises:
            FileTaken: The file is no longer ours.
            OSError: The system refuses.
        """
        self._run_on_descriptor(lambda file: os.ftruncate(file, length))
        self.end = length

    def reserve(self, length: int) -> None:
        """Reserve disk space, so that later writes within it succeed.

        Raises:
            OSError: There is no space, or the file system cannot reserve any.
        """
        if hasattr(os, "posix_fallocate"):
            self._run_on_descriptor(lambda file: os.posix_fallocate(file, 0, length))

    def close(self) -> None:
        """Close the descriptor if it is still ours. May be called twice."""
        file, self._file = self._file, -1
        if file >= 0:
            _close_if_ours(file, self._identity)

    def __enter__(self) -> OwnedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, file: int, data: Data, offset: int) -> int:
        if self._access & os.O_APPEND:
            return os.write(file, data)
        return os.pwrite(file, data, offset)

    def _run_on_descriptor(self, action: Callable[[int], Result]) -> Result:
        """Run an action on the descriptor, which is opened again each time it was taken away.

        Raises:
            FileTaken: The file is no longer ours.
            OSError: The system refuses.
        """
        for _ in range(_TRIES):
            file = self._checked()
            try:
                return action(file)
            except OSError as error:
                # EBADF: closed after the check. EINVAL: replaced by a read-only descriptor, if the
                # action was a truncation. From a descriptor that is still ours, EINVAL is the
                # answer.
                if error.errno not in (errno.EBADF, errno.EINVAL):
                    raise
                if error.errno == errno.EINVAL and _leads_to(file, self._identity):
                    raise
        raise FileTaken(self._reason("cannot be opened again"))

    def _checked(self) -> int:
        """The descriptor, after a check that it still leads to our file."""
        if self._pid != os.getpid():
            raise FileTaken(self._reason("belongs to the process that this one is a copy of"))
        if self._file < 0:
            raise FileTaken(self._reason("is closed"))
        if _leads_to(self._file, self._identity):
            return self._file
        return self._reopened()

    def _reopened(self) -> int:
        """Open the same file again. The old number belongs to the program now and is not closed."""
        try:
            # A pipe that now has this path must not make the program wait.
            file, status = self._opened(self._access | getattr(os, "O_NONBLOCK", 0))
        except FileNotFoundError:
            raise FileTaken(self._reason("is no longer there")) from None
        if _identity(status) != self._identity:
            _close_if_ours(file, _identity(status))
            raise FileTaken(self._reason("is another file now"))
        if status.st_size < self.end:
            _close_if_ours(file, self._identity)
            raise FileTaken(self._reason("is shorter than what was written to it"))
        self._file = file
        self._take_lock()
        return file

    def _opened(self, flags: int) -> tuple[int, os.stat_result]:
        """Open a high descriptor of the file at the path.

        Raises:
            FileTaken: Other threads of the program close it each time.
            OSError: The file cannot be opened.
        """
        for _ in range(_TRIES):
            low = os.open(self.path, flags, 0o666)
            flags &= ~os.O_EXCL  # the file exists now, and we made it
            status = os.stat(self.path)  # noqa: PTH116
            high = _move_to_high_number(low, _identity(status))
            if high >= 0:
                return high, status
        raise FileTaken(self._reason("cannot be opened again"))

    def _reason(self, what: str) -> str:
        name = os.path.basename(self.path)  # noqa: PTH119
        return f"the program closed a descriptor of Driftline, and {name} {what}"

    def _take_lock(self) -> None:
        if self._locked:
            hold(self._file)


class UnnamedFile:
    """A temporary file without a name. Forked children may read it; a lost one cannot be reopened.

    Attributes:
        end: Offset at which `append` writes next.
    """

    def __init__(self, prefix: str) -> None:
        """Create the file in the folder for temporary files.

        Raises:
            OSError: That folder cannot be written.
        """
        import tempfile  # 4 ms, which most processes need not spend

        with tempfile.TemporaryFile(prefix=prefix, buffering=0) as file:
            self._identity = _identity(os.fstat(file.fileno()))
            self._file = _move_to_high_number(os.dup(file.fileno()), self._identity)
        self.end = 0

    def append(self, data: Data) -> int:
        """Write all of the data at the end; returns the offset of its first byte.

        Raises:
            FileTaken: The program has closed the descriptor.
            OSError: The disk refuses the write.
        """
        start, rest = self.end, memoryview(data)
        while rest:
            count = os.pwrite(self._checked(), rest, self.end)
            self._checked()  # otherwise the bytes may be in another file
            self.end, rest = self.end + count, rest[count:]
        return start

    def read(self, start: int, length: int) -> bytes:
        """Read `length` bytes from the offset `start`.

        Raises:
            FileTaken: The program has closed the descriptor.
            OSError: The disk cannot be read.
        """
        return os.pread(self._checked(), length, start)

    def __del__(self) -> None:
        try:
            os.close(self._checked())
        except (AttributeError, OSError):  # never opened, or the program has closed it
            return

    def _checked(self) -> int:
        if _leads_to(self._file, self._identity):
            return self._file
        raise FileTaken("the program closed a descriptor of Driftline, that of a temporary file")


def write_file(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a complete file, replacing an existing one.

    Raises:
        OSError: The file cannot be written.
    """
    with OwnedFile(path, "replace") as file:
        file.append_all(content)


def hold(file: int) -> bool:
    """Lock an open file until it is closed; False if another process holds the lock."""
    if fcntl is None:
        return True
    for wait in (0.01, 0.05, 0.0):  # `is_held` takes the lock for a moment
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(wait)
        except OSError:  # the file system has no locks
            return True
        else:
            return True
    return False


def print_to_stderr(sentence: str) -> None:
    """Print a sentence for the user, unless descriptor 2 has become a file of the program.

    A daemon that closes 0 to 2 gets these numbers for its own files. A sentence is printed if
    descriptor 2 is still the standard error of the start, a device, or the same file as standard
    output, that is, a log.
    """
    try:
        to_descriptor = sys.stderr is not None and sys.stderr.fileno() == 2
    except (AttributeError, OSError, ValueError):  # an object of the program
        to_descriptor = False
    if to_descriptor:
        try:
            status = os.fstat(2)
            if (
                _identity(status) != _STDERR
                and not stat.S_ISCHR(status.st_mode)
                and _identity(status) != _identity(os.fstat(1))
            ):
                return
        except OSError:  # closed
            return
    print(f"driftline: {sentence}", file=sys.stderr)


def _identity(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino


def _move_to_high_number(low: int, identity: Identity) -> int:
    """Move a descriptor to a high number, and close the low one; returns -1 if it was replaced.

    Another thread of the program may at any moment close the low number and open its own file under
    it. So both numbers are checked, and -1 is returned if one does not lead to our file.
    """
    high = low
    if fcntl is not None:
        limit = min(os.sysconf("SC_OPEN_MAX"), _HIGHEST)
        first = max(limit - _RANGE, limit // 2)
        # If few descriptors are allowed, or all high ones are in use, use any other number. 0 to 2
        # are refused: what the program prints must not end up in the file.
        for lowest in (first + next(_TURNS) % max(1, limit - first), first, 3):
            try:
                high = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, lowest)
                break
            except OSError as error:
                if error.errno == errno.EBADF:
                    return -1
    if not _leads_to(high, identity):
        if high != low:
            _close_quietly(high)
        return -1
    if high != low:
        _close_if_ours(low, identity)
    if high <= 2:
        _close_if_ours(high, identity)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return high


def _close_if_ours(file: int, identity: Identity) -> None:
    if _leads_to(file, identity):
        _close_quietly(file)


def _close_quietly(file: int) -> None:
    try:
        os.close(file)
    except OSError:  # another thread has just closed it
        return


def _leads_to(file: int, identity: Identity) -> bool:
    try:
        return _identity(os.fstat(file)) == identity
    except OSError:  # closed
        return False


def _stderr_identity() -> Identity | None:
    try:
        return _identity(os.fstat(2))
    except OSError:
        return None


_STDERR = _stderr_identity()
_LIVE: weakref.WeakSet[OwnedFile] = weakref.WeakSet()


def _close_after_fork() -> None:
    """Close inherited descriptors in a child: they would keep the parent's lock after its end."""
    for file in list(_LIVE):
        file.close()


os.register_at_fork(after_in_child=_close_after_fork)
