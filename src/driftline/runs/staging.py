"""Between the captured program and the disk: a few buffers, and a thread that empties them.

The program's thread copies into a buffer and goes on; when all buffers are full it waits, so that
memory stays bounded and at most `BUFFERS * BUFFER_BYTES` bytes can be lost to a kill. What a task
means is the writer's business; this file only keeps tasks in order and never lets the program hang
on a dead thread.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from driftline.runs.sink import Bytes

BUFFER_BYTES = 8 << 20
BUFFERS = 6
LONGEST_AGE = 0.5
"""Seconds after which a half-full buffer is written anyway; the promise to users is 2 s."""
_QUEUE = 16

Task = Callable[[], None]


class Staging:
    """A queue of tasks, the thread that does them, and the buffers they carry."""

    def __init__(self, when_idle: Task, when_wrong: Callable[[Exception], None]) -> None:
        """Nothing is started yet.

        Args:
            when_idle: Called by the thread every half second in which nothing was queued.
            when_wrong: Takes what a task raised; neither the thread nor the program sees it.
        """
        self._when_idle = when_idle
        self._when_wrong = when_wrong
        self._changed = threading.Condition(threading.Lock())
        self._tasks: deque[Task] = deque()
        self._free: list[Bytes] = []
        self._made = 0
        self._busy = False
        self._finished = False
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def start(self) -> None:
        """Starts the thread; without it, whoever waits for a buffer does the work."""
        with self._changed:
            self._start()

    def take_buffer(self) -> Bytes:
        """An empty buffer; waits for one when all are on their way to the disk."""
        while True:
            with self._changed:
                if self._free:
                    return self._free.pop()
                if self._made < BUFFERS:
                    self._made += 1
                    return np.empty(BUFFER_BYTES, np.uint8)
            self._wait_or_help()

    def give_back(self, buffer: Bytes) -> None:
        with self._changed:
            self._free.append(buffer)
            self._changed.notify_all()

    def submit(self, task: Task) -> None:
        """Queues a task; waits while too many are queued already."""
        while True:
            with self._changed:
                if len(self._tasks) < _QUEUE:
                    self._tasks.append(task)
                    self._start()
                    self._changed.notify_all()
                    return
            self._wait_or_help()

    def submit_now(self, task: Task) -> None:
        """Queues a task at once: for the thread itself, which must not wait for itself."""
        with self._changed:
            self._tasks.append(task)
            self._changed.notify_all()

    def finish(self) -> None:
        """Does everything that is queued, then ends the thread."""
        with self._changed:
            self._finished = True
            self._changed.notify_all()
        thread = self._thread
        if self._is_served() and thread is not None and thread is not threading.current_thread():
            thread.join()
        while self._do_one():
            pass

    def drain(self, seconds: float = 60.0) -> bool:
        """Waits until everything queued is done; False when that took too long."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with self._changed:
                if not self._tasks and not self._busy:
                    return True
            self._wait_or_help()
        return False

    def _start(self) -> None:
        if self._thread is None and not self._finished:
            thread = threading.Thread(target=self._loop, name="driftline-writer", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return  # the interpreter is ending: whoever waits helps, see _wait_or_help
            self._thread = thread

    def _wait_or_help(self) -> None:
        if self._is_served():
            with self._changed:
                self._changed.wait(0.2)
        elif not self._do_one():
            time.sleep(0.001)

    def _is_served(self) -> bool:
        """Whether the thread lives. After a fork made in C it does not, but says that it does."""
        thread = self._thread
        return thread is not None and self._pid == os.getpid() and thread.is_alive()

    def _do_one(self) -> bool:
        with self._changed:
            if not self._tasks:
                return False
            task = self._tasks.popleft()
            self._busy = True
        try:
            task()
        except Exception as error:
            self._when_wrong(error)
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
        return True

    def _loop(self) -> None:
        while True:
            with self._changed:
                if not self._tasks and not self._finished:
                    self._changed.wait(LONGEST_AGE / 2)
                waiting, finished = bool(self._tasks), self._finished
            if waiting:
                self._do_one()
            elif finished:
                return
            else:
                self._when_idle()
