"""Writes `.npy` files of single tensors from a background thread.

`save` copies the tensor, and the program continues at once. It waits only while more than
`MOST_WAITING` bytes are queued for a slow disk. A file is written completely or not at all. All
saved tensors are on disk when the interpreter exits, also after an exception or `sys.exit`, and
when a child of multiprocessing ends; a kill or `os._exit` loses the queue.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from driftline.numerics.dtypes import DTYPES, to_float64
from driftline.runs.files.owned_file import OwnedFile
from driftline.runs.journal import Staging

MOST_WAITING = 1 << 30
"""Most bytes in the queue; with more, the program waits for the disk."""
# Seconds between two looks at the queue while the program has to wait.
_PATIENCE = 0.1

Bytes = npt.NDArray[np.uint8]


class SavedFiles:
    """Writes `.npy` files in the background.

    Args:
        complain: Called once, in the background, if writing fails; nothing is written after that.
    """

    def __init__(self, complain: Callable[[Path, Exception], None]) -> None:
        self._complain = complain
        self._begin()
        # After a fork each child has to begin its own queue.
        _LIVE.add(self)

    def _begin(self) -> None:
        self._staging = Staging(lambda: None, lambda _: None)
        self._lock = threading.Lock()
        self._waiting = 0
        self._started = False
        self.broken = False

    def save(self, path: Path, dtype: str, shape: tuple[int, ...], data: Bytes) -> None:
        """Copy a tensor's bytes, and queue them to be written."""
        if self.broken:
            return
        # The thread starts with the first tensor: a hook that saves nothing costs nothing.
        if not self._started:
            self._started = True
            _finish_at_exit(self.finish)
            self._staging.start()
        size = data.nbytes
        while self._waiting and self._waiting + size > MOST_WAITING:
            self._staging.drain(_PATIENCE)  # helps if no thread can be started any more
        # The program may overwrite the tensor at once.
        copied = data.copy()
        with self._lock:
            self._waiting += size
        self._staging.submit_now(lambda: self._write(path, dtype, shape, copied))

    def flush(self) -> None:
        """Wait until everything saved so far is on disk."""
        while self._started and not self._staging.drain():
            continue

    def finish(self) -> None:
        """Write the queue, then end the thread. May be called twice."""
        self._staging.finish()

    def finish_behind(self) -> None:
        """Let the thread write the queue and end; the program does not wait."""
        if self._started:
            self._staging.submit_now(self._staging.finish)

    def after_fork(self) -> None:
        """Drop the queue in a forked child: its parent writes it."""
        self._begin()

    def _write(self, path: Path, dtype: str, shape: tuple[int, ...], data: Bytes) -> None:
        try:
            if not self.broken:
                write_npy(path, dtype, shape, data)
        except Exception as problem:  # the program goes on without its files
            self.broken = True
            self._complain(path, problem)
        finally:
            with self._lock:
                self._waiting -= data.nbytes


def write_npy(path: Path, dtype: str, shape: tuple[int, ...], data: Bytes) -> None:
    """Write one file under a temporary name, then rename it."""
    # A leading dot and another ending, so that no reader takes the temporary file for a tensor.
    draft = path.with_name(f".{path.name[:80]}.{os.getpid()}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        array = as_numpy(dtype, shape, data)
        header = io.BytesIO()
        about = np.lib.format.header_data_from_array_1_0(array)
        np.lib.format.write_array_header_1_0(header, about)
        with OwnedFile(draft, "replace") as file:
            file.append_all(header.getvalue())
            file.append_all(array.reshape(-1).view(np.uint8).data)
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def as_numpy(dtype: str, shape: tuple[int, ...], data: Bytes) -> npt.NDArray[Any]:
    """The tensor as a numpy array; bfloat16 and float8 formats become float32, without loss."""
    kind = DTYPES[dtype]
    if dtype == np.dtype(kind.storage).name:
        return data.view(kind.storage).reshape(shape)
    # bfloat16 is the upper half of a float32, so shifting is exact.
    if dtype == "bfloat16":
        return (data.view("<u2").astype("<u4") << 16).view("<f4").reshape(shape)
    count = int(np.prod(shape, dtype=np.int64))
    numbers = to_float64(data.view(kind.storage), kind, count)
    wide = np.complex64 if kind.kind == "complex" else np.float32
    return numbers.astype(wide).reshape(shape)


_LIVE: weakref.WeakSet[SavedFiles] = weakref.WeakSet()


def _finish_at_exit(finish: Callable[[], None]) -> None:
    atexit.register(finish)
    # Children of multiprocessing end without atexit; they run these finalizers instead.
    process = sys.modules.get("multiprocessing.process")
    util = sys.modules.get("multiprocessing.util")
    if process is not None and util is not None and process.parent_process() is not None:
        util.Finalize(None, finish, exitpriority=0)


def _after_fork() -> None:
    for files in list(_LIVE):
        files.after_fork()


os.register_at_fork(after_in_child=_after_fork)
