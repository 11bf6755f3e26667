"""Run a command as a shell would: same terminal, same process group, same signals.

The program's input and output do not pass through the launcher, so chat loops, progress bars and
pagers work. This file does not know what is captured.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from driftline.errors import BadInput

# Sent to the launcher alone, so they have to be passed on.
_FORWARDED = (signal.SIGTERM, signal.SIGHUP)
_STDERR = 2
# The terminal sends these to the whole process group, the program included.
_LEFT_TO_THE_PROGRAM = (signal.SIGINT, signal.SIGQUIT)


class NoSuchCommand(BadInput):
    """The program cannot be started at all."""


def require_command(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Raise when the program cannot be started, before anything is made on disk."""
    if not argv:
        raise BadInput("the command to run is empty", hint='give --exec "python infer.py"')
    if shutil.which(argv[0], path=env.get("PATH")) is None:
        if os.sep in argv[0] and Path(argv[0]).is_file():
            raise NoSuchCommand(
                f"{argv[0]} is not executable",
                hint=f"name what runs it, such as python {argv[0]}",
            )
        if "=" in argv[0]:
            hint = f"variables are set by env: env {argv[0]} ..."
        else:
            hint = "give the program's path; what only a shell knows needs bash -c"
        raise NoSuchCommand(f"command not found: {argv[0]}", hint=hint)


def run_child(argv: Sequence[str], env: Mapping[str, str], *, to_stderr: bool = False) -> int:
    """Run to the end. Returns what a shell would report: its status, or 128 + the signal.

    Args:
        argv: The command, word by word.
        env: Its environment.
        to_stderr: Send what it prints to standard error; standard output is for the report.
    """
    try:
        child = subprocess.Popen(list(argv), env=dict(env), stdout=_STDERR if to_stderr else None)
    except OSError as problem:
        raise NoSuchCommand(
            f"cannot run {argv[0]}: {problem.strerror or problem}",
            hint="a script without a '#!' line needs its interpreter: bash script.sh",
        ) from None
    with _signals_shared_with(child):
        code = child.wait()
    # Popen reports a signal as its negative number.
    return 128 - code if code < 0 else code


@contextlib.contextmanager
def _signals_shared_with(child: subprocess.Popen[bytes]) -> Generator[None]:
    """While the program runs, Ctrl-C is its business and a request to end is passed on.

    Ctrl-C reaches the whole process group, so the program gets it from the terminal; we only must
    not die of it ourselves. A handler, not SIG_IGN: ignoring would be inherited.
    """

    def stay(_signal: int, _frame: FrameType | None) -> None:
        return

    def pass_on(number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(number)

    before: dict[signal.Signals, Any] = {}
    try:
        for numbers, handler in ((_LEFT_TO_THE_PROGRAM, stay), (_FORWARDED, pass_on)):
            for number in numbers:
                # A launcher under nohup ignores hang-ups, and the program inherits that.
                if signal.getsignal(number) is signal.SIG_IGN:
                    continue
                with contextlib.suppress(ValueError):  # not the main thread
                    before[number] = signal.signal(number, handler)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
