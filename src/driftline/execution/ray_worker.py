"""The code that runs on the machines of a Ray cluster: an actor opens a worker for its tasks.

Ray carries bytes, which hold plain values only (see `codec`).
"""

from __future__ import annotations

import os
import platform
from typing import Any

from driftline import __version__, settings
from driftline.errors import DriftlineError
from driftline.execution import codec
from driftline.execution.jobs import Worker, done, failed, open_worker


def inspect_machine(content: bytes) -> bytes:
    """Say whether a machine can help with a job. It is asked before it gets any task.

    Returns:
        The machine's name, its version of Driftline, the first reason why it cannot help at all
        (empty if there is none), and which of the job's data it lacks.
    """
    job = codec.unpack(content)
    answer: list[Any] = [platform.node(), __version__, "", []]
    # Another version may use another format of jobs, so nothing else of the job is read.
    if __version__ != job["version"]:
        return codec.pack(answer)  # the other fields stay empty
    try:
        answer[3] = _open_worker(job).absent()
    except DriftlineError as trouble:
        answer[2] = str(trouble)
    except Exception as trouble:
        answer[2] = f"{type(trouble).__name__}: {trouble}".partition("\n")[0]
    return codec.pack(answer)


class RayWorker:
    """Does the tasks of one job, one at a time, in its own process (a Ray actor)."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._worker: Worker | None = None

    def do(self, content: bytes) -> bytes:
        """Do one task; returns the lines that it printed, and its answer."""
        lines: list[str] = []
        try:
            # Opened at the first task, in the worker's own process, and kept for later tasks.
            if self._worker is None:
                self._worker = _open_worker(codec.unpack(self._content))
        except Exception as trouble:
            return codec.pack([lines, failed(trouble)])
        return codec.pack([lines, done(self._worker, codec.unpack(content), lines.append)])

    def pid(self) -> int:
        """The worker's process ID, for tests that end it."""
        return os.getpid()


def _open_worker(job: dict[str, Any]) -> Worker:
    # All machines use the same kernel path, because other instructions round differently.
    if job["kernel"]:
        _use_kernel_path(job["kernel"])
    if folder := job["folder"]:
        try:
            os.chdir(folder)
        except OSError as trouble:
            reason = (trouble.strerror or "it does not say why").lower()
            raise DriftlineError(f"cannot enter '{folder}': {reason}") from None
    return open_worker(job["worker"], job["about"])


def _use_kernel_path(path: str) -> None:
    from driftline.numerics import kernel

    if path not in kernel.available():
        raise DriftlineError(
            f"cannot take the kernel's path {path}, as the machine that asks does; set "
            f"{settings.KERNEL}={kernel.available()[0]} there, and all digits agree"
        )
    settings.set_kernel_choice(path)
