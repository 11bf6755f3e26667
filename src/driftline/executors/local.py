"""Tasks on this machine: worker processes that are fed through pipes.

Processes, not threads: for small tensors, recipes and metrics of users most of the work is
Python's, of which threads do one at a time.
"""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from driftline import settings
from driftline.errors import DriftlineError
from driftline.executors import wire
from driftline.executors.work import Finished, Job, Said, Task, WorkerFailed, result_of

_ATTEMPTS = 2
"""A task whose worker ends twice has ended it."""


class Processes:
    """So many worker processes of this machine; they live as long as one `run`."""

    elsewhere = False

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs

    @property
    def workers(self) -> int:
        return self._jobs

    def run(
        self, job: Job, tasks: Sequence[Task], finished: Finished, said: Said | None = None
    ) -> None:
        if tasks:
            _Round(job, tasks, min(self._jobs, len(tasks))).run(finished, said)

    def __repr__(self) -> str:
        return f"Processes({self._jobs})"


class _Round:
    """One job. Each worker process has a thread here that feeds it and hands on what it answers."""

    def __init__(self, job: Job, tasks: Sequence[Task], workers: int) -> None:
        self.job = job
        self.tasks = tasks
        # Large ones first, but about equal ones in their order, which is that of their files.
        order = sorted(range(len(tasks)), key=lambda at: -tasks[at].weight.bit_length())
        self.waiting: deque[int] = deque(order)
        self.attempts = [0] * len(tasks)
        self.lock = threading.Lock()
        self.ending = False
        self.alive: set[subprocess.Popen[bytes]] = set()
        self.news: queue.SimpleQueue[tuple[str, int, Any]] = queue.SimpleQueue()
        self.threads = [
            threading.Thread(target=self._serve, name=f"driftline-worker-{n}", daemon=True)
            for n in range(workers)
        ]

    def run(self, finished: Finished, said: Said | None) -> None:
        left = len(self.tasks)
        for thread in self.threads:
            thread.start()
        try:
            while left:
                kind, at, what = self.news.get()
                if kind == "failure":
                    raise what
                if kind == "said":
                    if said is not None:
                        said(at, what)
                    continue
                finished(at, what)
                left -= 1
        finally:
            self._end()

    def _end(self) -> None:
        with self.lock:
            self.ending = True
            self.waiting.clear()
            for process in self.alive:
                process.kill()
        for thread in self.threads:
            thread.join()

    def _serve(self) -> None:
        try:
            while self._one_process():
                pass
        except BaseException as trouble:
            self.news.put(("failure", -1, trouble))

    def _one_process(self) -> bool:
        """Feed one process until no task is left; whether another must take its place."""
        at = self._next()
        if at is None:
            return False
        process = self._start()
        if process is None:
            return False
        assert process.stdin is not None and process.stdout is not None
        to, back = cast("Any", process.stdin), cast("Any", process.stdout)
        try:
            with contextlib.suppress(BrokenPipeError):  # its answer, or its end, says more
                wire.send(to, [self.job.workshop, self.job.about])
            hello = wire.receive(back)
            if hello[0] != "ready":
                result_of(hello, "its start")
            while at is not None:
                with contextlib.suppress(BrokenPipeError):
                    wire.send(to, self.tasks[at].content())
                while (answer := wire.receive(back))[0] == "said":
                    self.news.put(("said", at, answer[1]))
                self.news.put(("done", at, result_of(answer, self.tasks[at].called)))
                at = self._next()
        except EOFError:
            if not self.ending:
                self._ended(process, cast(int, at))
                return True
        finally:
            self._stop(process)
        return False

    def _next(self) -> int | None:
        with self.lock:
            return self.waiting.popleft() if self.waiting else None

    def _ended(self, process: subprocess.Popen[bytes], at: int) -> None:
        """A worker that ended by itself: its task is begun again, once."""
        code = process.wait()
        self.attempts[at] += 1
        if self.attempts[at] >= _ATTEMPTS:
            raise WorkerFailed(
                f"a worker process ended {_how(code)} at {self.tasks[at].called}, "
                f"{_ATTEMPTS} times",
                hint="memory may be short: try fewer --jobs" if code == -9 else "",
            )
        with self.lock:
            if not self.ending:
                self.waiting.appendleft(at)

    def _start(self) -> subprocess.Popen[bytes] | None:
        home = str(Path(__file__).parents[2])
        with self.lock:
            if self.ending:
                return None
            try:
                process = subprocess.Popen(
                    [sys.executable, "-m", "driftline.executors.serving"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    cwd=self.job.folder or None,
                    process_group=0,  # Ctrl-C on a terminal is for us alone; we end them
                    env=settings.worker_environment(home, self.job.kernel),
                )
            except OSError as trouble:
                raise DriftlineError(
                    f"a worker process cannot be started: {trouble.strerror}",
                    hint="try fewer --jobs",
                ) from trouble
            self.alive.add(process)
        return process

    def _stop(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        process.wait()
        with self.lock:
            self.alive.discard(process)


def _how(code: int) -> str:
    if code >= 0:
        return f"with code {code}"
    import signal

    try:
        return f"by {signal.Signals(-code).name}"
    except ValueError:
        return f"by signal {-code}"
