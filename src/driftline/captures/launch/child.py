"""Run a command as a shell would: same terminal, same process group, same signals.

The program's input and output do not pass through the launcher, so chat loops, progress bars and
pagers work. This file knows nothing about captures.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import threading
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from driftline.errors import BadInput
from driftline.runs.redaction import redact_argv, redact_text

# These signals are sent to the launcher only, so they have to be passed on.
_FORWARDED = (signal.SIGTERM, signal.SIGHUP)
_STDERR = 2
# The terminal sends these to the whole process group, the program included.
_LEFT_TO_THE_PROGRAM = (signal.SIGINT, signal.SIGQUIT)


class NoSuchCommand(BadInput):
    """The command cannot be started at all."""


def require_command(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Check that a command can be started, before anything is written to disk.

    Raises:
        BadInput: It cannot.
    """
    if not argv:
        raise BadInput("the command to run is empty", hint='give --exec "python infer.py"')
    if shutil.which(argv[0], path=env.get("PATH")) is None:
        if os.sep in argv[0] and Path(argv[0]).is_file():
            raise NoSuchCommand(
                f"{argv[0]} is not executable",
                hint=f"name what runs it, such as python {argv[0]}",
            )
        shown = redact_text(argv[0])  # the user may have written `HF_TOKEN=abc python x.py`
        if "=" in argv[0]:
            hint = f"variables are set by env: env {shown} ..."
        else:
            hint = "give the program's path; what only a shell knows needs bash -c"
        raise NoSuchCommand(f"command not found: {shown}", hint=hint)


def run_child(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    to_stderr: bool = False,
    folder: Path | None = None,
    unseen: UnseenPythons | None = None,
) -> int:
    """Run a command and wait for its end.

    Args:
        argv: The words of the command.
        env: Its environment.
        to_stderr: Redirect its standard output to standard error, because ours is for the report.
        folder: Its working folder; None for the present one.
        unseen: Gets the command's process, to look for Pythons that capture cannot reach.

    Returns:
        The status that a shell would report: the exit status, or 128 + the signal.
    """
    try:
        child = subprocess.Popen(
            list(argv), env=dict(env), stdout=_STDERR if to_stderr else None, cwd=folder
        )
    except OSError as problem:
        raise NoSuchCommand(
            f"cannot run {argv[0]}: {problem.strerror or problem}",
            hint="a script without a '#!' line needs its interpreter: bash script.sh",
        ) from None
    with _signals_shared_with(child):
        if unseen is not None:
            unseen.watch(child.pid)
        code = child.wait()
    # Popen reports a signal as a negative number.
    return 128 - code if code < 0 else code


class UnseenPythons:
    """Finds Python processes of a program that lack the environment variables of capture.

    Capture misses such processes: `env -i python worker.py`, a job system that clears the
    environment, a container. `/proc` is searched for them four times a second; a process that lives
    shorter than that has no time to import a framework. Processes that are no longer descendants of
    the program (daemons) cannot be recognised and are not counted.
    """

    _EVERY = 0.25

    def __init__(self, variable: str) -> None:
        """`variable` is the name of the environment variable that every reached process has."""
        self._variable = variable.encode() + b"="
        self._root = 0
        self._seen: dict[tuple[int, str], str] = {}
        self._stop = threading.Event()

    def watch(self, pid: int) -> None:
        """Begin to watch the descendants of a process."""
        if not Path("/proc/self/environ").exists():  # not on every system
            return
        self._root = pid
        threading.Thread(target=self._loop, name="driftline-children", daemon=True).start()

    def commands(self) -> list[str]:
        """Stop watching; return the command lines of missed processes, with secrets hidden."""
        self._stop.set()
        return list(self._seen.values())

    def _loop(self) -> None:
        while not self._stop.wait(self._EVERY):
            with contextlib.suppress(OSError, ValueError):
                for pid in _descendants(self._root):
                    self._look_at(pid)

    def _look_at(self, pid: int) -> None:
        place = Path("/proc", str(pid))
        try:
            if not (place / "exe").readlink().name.startswith("python"):
                return
            variables = (place / "environ").read_bytes().split(b"\0")
            if any(variable.startswith(self._variable) for variable in variables):
                return
            words = (place / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")[:-1]
            started = (place / "stat").read_text().rpartition(")")[2].split()[19]
        except (OSError, IndexError):  # it has ended meanwhile, or belongs to another user
            return
        self._seen.setdefault((pid, started), shlex.join(redact_argv(words))[:_LONGEST_COMMAND])


_LONGEST_COMMAND = 120


def _descendants(root: int) -> list[int]:
    """A process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                # The name, in parentheses, may contain blanks, so fields are counted after it.
                fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry.name))
            except (OSError, ValueError, IndexError):
                continue
    pids, waiting = [root], [root]
    while waiting:
        inner = children.get(waiting.pop(), [])
        pids += inner
        waiting += inner
    return pids


@contextlib.contextmanager
def _signals_shared_with(child: subprocess.Popen[bytes]) -> Generator[None]:
    """Leave Ctrl-C to the program and pass on requests to terminate, while the program runs.

    The terminal sends Ctrl-C to the whole process group, so the program gets it anyway; the
    launcher only must not end. A handler is set instead of SIG_IGN, because child processes would
    inherit SIG_IGN.
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
                # Under nohup the launcher ignores SIGHUP, and the program inherits that.
                if signal.getsignal(number) is signal.SIG_IGN:
                    continue
                with contextlib.suppress(ValueError):  # not the main thread
                    before[number] = signal.signal(number, handler)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
