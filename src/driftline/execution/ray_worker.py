"""What runs on the machines of a Ray cluster: a bench that opens a workshop and does its tasks.

Ray carries the bytes, in its own way; what is in them are plain values (see `wire`).
"""

from __future__ import annotations

import os
import platform
from typing import Any

from driftline import __version__, settings
from driftline.errors import DriftlineError
from driftline.execution import codec
from driftline.execution.jobs import Workshop, done, failed, open_workshop


def look(content: bytes) -> bytes:
    """What a machine can do for a job, before it is given any of it.

    Returns:
        Its name, its version of Driftline, the first reason why it cannot help at all (or none),
        and what it does not have of the job's data.
    """
    job = codec.unpack(content)
    told: list[Any] = [platform.node(), __version__, "", []]
    if __version__ != job["version"]:
        return codec.pack(told)  # the rest is for those who understand it
    try:
        told[3] = _opened(job).absent()
    except DriftlineError as trouble:
        told[2] = str(trouble)
    except Exception as trouble:
        told[2] = f"{type(trouble).__name__}: {trouble}".partition("\n")[0]
    return codec.pack(told)


class Bench:
    """Does the tasks of one job, one at a time, in a process of its own."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._workshop: Workshop | None = None

    def do(self, content: bytes) -> bytes:
        """The answer to one task, and the lines it had to say."""
        said: list[str] = []
        try:
            if self._workshop is None:
                self._workshop = _opened(codec.unpack(self._content))
        except Exception as trouble:
            return codec.pack([said, failed(trouble)])
        return codec.pack([said, done(self._workshop, codec.unpack(content), said.append)])

    def pid(self) -> int:
        """Its process, for whoever must end it."""
        return os.getpid()


def _opened(job: dict[str, Any]) -> Workshop:
    if job["kernel"]:
        _take(job["kernel"])
    if folder := job["folder"]:
        try:
            os.chdir(folder)
        except OSError as trouble:
            said = (trouble.strerror or "it does not say why").lower()
            raise DriftlineError(f"cannot enter '{folder}': {said}") from None
    return open_workshop(job["workshop"], job["about"])


def _take(path: str) -> None:
    from driftline.numerics import kernel

    if path not in kernel.available():
        raise DriftlineError(
            f"cannot take the kernel's path {path}, as the machine that asks does; set "
            f"{settings.KERNEL}={kernel.available()[0]} there, and all digits agree"
        )
    settings.set_kernel_choice(path)
