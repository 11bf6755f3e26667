"""Worker processes of this machine, and the executor that feeds them through pipes (`Processes`).

A worker is started as `python -m driftline.execution.processes`. It reads frames of plain values
from standard input and writes frames to the original standard output; whatever the work prints goes
to standard error. A worker ends when its input ends, even in the middle of a task, because then
nobody waits for the result.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from driftline import settings
from driftline.errors import DriftlineError
from driftline.execution import codec
from driftline.execution.jobs import (
    Finished,
    Job,
    Printed,
    Task,
    WorkerFailed,
    done,
    failed,
    open_worker,
    result_of,
)


def main() -> int:
    """Serve one job."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for the parent, which ends us
    # Standard output carries the frames, so what the work prints goes to standard error.
    incoming = os.fdopen(os.dup(0), "rb")
    outgoing = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 0)
    sys.stdout = sys.stderr
    tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(incoming, tasks), daemon=True).start()
    name, about = tasks.get()
    try:
        worker = open_worker(name, about)
    except Exception as trouble:
        codec.send(outgoing, failed(trouble))
        return 0
    codec.send(outgoing, ["ready"])
    while True:
        work = tasks.get()
        codec.send(outgoing, done(worker, work, lambda line: codec.send(outgoing, ["said", line])))


def _listen(incoming: BinaryIO, tasks: queue.SimpleQueue[Any]) -> None:
    """Read tasks at once: if the pipe were full, the parent could not read our answers."""
    try:
        while True:
            tasks.put(codec.receive(incoming))
    except (EOFError, OSError, ValueError):
        # Exit at once, even in the middle of a task: nobody waits for its result any more.
        os._exit(0)


if __name__ == "__main__":
    try:
        code = main()
    except (BrokenPipeError, KeyboardInterrupt):
        code = 1
    sys.exit(code)


# The executor, in the parent process.


_ATTEMPTS = 2
"""A task whose workers ended this many times is assumed to be the cause."""


class Processes:
    """Executor that runs worker processes on this machine; they live as long as one `run`."""

    elsewhere = False

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs

    @property
    def workers(self) -> int:
        return self._jobs

    def run(
        self, job: Job, tasks: Sequence[Task], finished: Finished, printed: Printed | None = None
    ) -> None:
        if tasks:
            _Round(job, tasks, min(self._jobs, len(tasks))).run(finished, printed)

    def __repr__(self) -> str:
        return f"Processes({self._jobs})"


def open_executor(address: str, jobs: int | None, quiet: bool) -> Processes:
    """Open the executor `local`. It has no address, and no messages about other machines."""
    del address, quiet
    return Processes(jobs or 1)


class _Round:
    """One job. For each worker process, a thread sends its tasks and reads its answers."""

    def __init__(self, job: Job, tasks: Sequence[Task], workers: int) -> None:
        self.job = job
        self.tasks = tasks
        # Large tasks first. Tasks of similar size keep their order, which is that of their files.
        order = sorted(range(len(tasks)), key=lambda index: -tasks[index].weight.bit_length())
        self.waiting: deque[int] = deque(order)
        self.attempts = [0] * len(tasks)
        self.lock = threading.Lock()
        self.ending = False
        self.alive: set[subprocess.Popen[bytes]] = set()
        self.events: queue.SimpleQueue[tuple[str, int, Any]] = queue.SimpleQueue()
        self.threads = [
            threading.Thread(target=self._serve, name=f"driftline-worker-{n}", daemon=True)
            for n in range(workers)
        ]

    def run(self, finished: Finished, printed: Printed | None) -> None:
        left = len(self.tasks)
        for thread in self.threads:
            thread.start()
        try:
            while left:
                kind, index, content = self.events.get()
                # Failures are raised here, in the caller's thread.
                if kind == "failure":
                    raise content
                if kind == "said":
                    if printed is not None:
                        printed(index, content)
                    continue
                finished(index, content)
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
            self.events.put(("failure", -1, trouble))

    def _one_process(self) -> bool:
        """Feed one process until no task is left; returns True if it must be replaced."""
        # Take a task first: without one, no process is started.
        index = self._next()
        if index is None:
            return False
        process = self._start()
        if process is None:
            return False
        assert process.stdin is not None and process.stdout is not None
        requests, answers = cast("Any", process.stdin), cast("Any", process.stdout)
        try:
            with contextlib.suppress(BrokenPipeError):  # the answer or exit code says more
                codec.send(requests, [self.job.worker, self.job.about])
            hello = codec.receive(answers)
            if hello[0] != "ready":
                result_of(hello, "its start")
            while index is not None:
                with contextlib.suppress(BrokenPipeError):
                    codec.send(requests, self.tasks[index].content())
                while (answer := codec.receive(answers))[0] == "said":
                    self.events.put(("said", index, answer[1]))
                self.events.put(("done", index, result_of(answer, self.tasks[index].called)))
                index = self._next()
        except EOFError:
            if not self.ending:
                self._restart_task(process, cast(int, index))
                return True
        finally:
            self._stop(process)
        return False

    def _next(self) -> int | None:
        with self.lock:
            return self.waiting.popleft() if self.waiting else None

    def _restart_task(self, process: subprocess.Popen[bytes], index: int) -> None:
        """Handle a worker that ended by itself: its task is started again, once."""
        # We did not end it, so it was killed or ran out of memory.
        code = process.wait()
        self.attempts[index] += 1
        if self.attempts[index] >= _ATTEMPTS:
            raise WorkerFailed(
                f"a worker process ended {_exit_reason(code)} at {self.tasks[index].called}, "
                f"{_ATTEMPTS} times",
                hint="memory may be short: try fewer --jobs" if code == -9 else "",
            )
        with self.lock:
            if not self.ending:
                self.waiting.appendleft(index)

    def _start(self) -> subprocess.Popen[bytes] | None:
        home = str(Path(__file__).parents[2])
        with self.lock:
            if self.ending:
                return None
            try:
                process = subprocess.Popen(
                    [sys.executable, "-m", "driftline.execution.processes"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    cwd=self.job.folder or None,
                    process_group=0,  # Ctrl-C on a terminal reaches only us; we end the workers
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


def _exit_reason(code: int) -> str:
    if code >= 0:
        return f"with code {code}"
    import signal

    try:
        return f"by {signal.Signals(-code).name}"
    except ValueError:
        return f"by signal {-code}"
