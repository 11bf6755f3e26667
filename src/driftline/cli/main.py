"""The console script: find the command, run it, turn what went wrong into a sentence and a code.

Nothing heavy is imported before it is known which command runs.
Results are on stdout, messages on stderr.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import sys

from driftline.cli.commands import COMMANDS, overview
from driftline.errors import EXIT_COULD_NOT, EXIT_FINE, BadInput, DriftlineError, did_you_mean

TYPE_CHECKING = False  # what `typing` calls it; importing that would cost more than `--help` does
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

HELP = ("--help", "-h", "-help")
INTERRUPTED = 128 + 2  # what a shell reports for a program that SIGINT ended
PIPE_CLOSED = 128 + 13


def console() -> int:
    """A process that is nothing but one command: `driftline`, `python -m driftline`."""
    # It need not look for cycles while modules load.
    gc.set_threshold(100_000, 50, 100)
    # Threads that measure hold Python's lock for microseconds, and must not wait milliseconds.
    sys.setswitchinterval(2e-4)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # started with the stream closed: `driftline ... >&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115 - lives as long as we
    code: list[int] = []
    # Registered first, so called last: every thread has ended, every other handler has run.
    atexit.register(_leave_at_once, code)
    code.append(main(sys.argv[1:], alone=True))
    return code[0]


def _load_pathlib() -> None:
    """`pathlib` without `urllib.parse`, which takes longer to load and is for `as_uri` alone."""
    if "pathlib" in sys.modules or "urllib.parse" in sys.modules:
        return
    name = "urllib.parse"
    standing_in = type(sys)(name)

    def quote_from_bytes(*words: Any, **options: Any) -> str:
        from urllib import parse  # the real one, by now

        return parse.quote_from_bytes(*words, **options)

    vars(standing_in)["quote_from_bytes"] = quote_from_bytes
    sys.modules[name] = standing_in
    try:
        __import__("pathlib")
    except ImportError:  # another Python's wants more of it, and gets that when it is asked again
        pass
    finally:
        del sys.modules[name]


def _leave_at_once(code: list[int]) -> None:
    """Leave memory to the system: to take numpy apart piece by piece costs 10 ms, a table more."""
    if not code:
        return  # something unforeseen is on its way out, and Python reports it
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):  # full, closed, or never there
        os._exit(code[0] or EXIT_COULD_NOT)
    os._exit(code[0])


def main(argv: Sequence[str] | None = None, *, alone: bool = False) -> int:
    """Run one command line; returns the exit code.

    Args:
        argv: Its words, without the program; the process's own when not given.
        alone: The process is nothing but this command.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        # A name that the terminal's encoding cannot write must not end the command.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _dispatch(words, alone=alone)
        sys.stdout.flush()
    except DriftlineError as error:
        complain(error)
        return error.exit_code
    except KeyboardInterrupt:
        print("driftline: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # `driftline show run | head`: the reader has seen enough. Python would complain once more
        # when it flushes stdout at exit, so give it somewhere to flush to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except OSError as trouble:
        # What a disk, a permission or a full device refuses is nobody's bug.
        complain(DriftlineError(_said_by_the_system(trouble)))
        return EXIT_COULD_NOT
    except MemoryError:
        complain(DriftlineError("there is not enough memory for this", hint="try --threads 1"))
        return EXIT_COULD_NOT
    except Exception as bug:
        return _confess(bug)
    return code


def complain(error: DriftlineError) -> None:
    """One sentence on stderr, and the way out on a line of its own."""
    print(f"driftline: {_printable(str(error))}", file=sys.stderr)
    if error.hint:
        print(f"  hint: {_printable(error.hint)}", file=sys.stderr)


def _printable(text: str) -> str:
    try:
        from driftline.reporting.terminal import printable  # only a command that fails pays for it
    except OSError:  # no more files can be opened: not ours either
        return ascii(text)[1:-1]
    return printable(text)


def _said_by_the_system(trouble: OSError) -> str:
    what = trouble.strerror or str(trouble) or type(trouble).__name__
    return f"{trouble.filename}: {what}" if trouble.filename else what


def _dispatch(words: list[str], *, alone: bool) -> int:
    from driftline import __version__

    if not words or words[0] in HELP or words == ["help"]:
        sys.stdout.write(overview(__version__))
        return EXIT_FINE if words else EXIT_COULD_NOT
    if words[0] in ("--version", "-V"):
        print(f"driftline {__version__}")
        return EXIT_FINE
    name, rest = words[0], words[1:]
    if name == "help":
        name, rest = rest[0], ["--help"]
    if name not in COMMANDS:
        raise BadInput(f"there is no command '{name}'", hint=did_you_mean(name, COMMANDS))

    own = rest[: rest.index("--")] if "--" in rest else rest
    if any(word in HELP for word in own):
        from driftline.cli.helppage import help_page

        sys.stdout.write(help_page(name))
        return EXIT_FINE
    if not COMMANDS[name].takes_program:
        from driftline import settings

        # What a dumped program inherits must stay as it is; our own commands multiply no matrices.
        settings.one_blas_thread()
    if alone:
        from driftline.cli.own_modules import find_quickly

        find_quickly()
    if alone:
        _load_pathlib()
    from driftline.cli import parsing

    return parsing.run(name, rest)


def _confess(bug: Exception) -> int:
    """An exception nobody planned for is our bug: say so, and keep the traceback out of the way."""
    import tempfile
    import traceback

    from driftline import settings

    if settings.debug():
        traceback.print_exception(bug)
        return EXIT_COULD_NOT
    what = _printable(f"{type(bug).__name__}: {bug}".splitlines()[0])
    with tempfile.NamedTemporaryFile(
        "w", prefix="driftline-bug-", suffix=".txt", delete=False, encoding="utf-8"
    ) as report:
        report.writelines(traceback.format_exception(bug))
    print(f"driftline: this is a bug in driftline, not in your data: {what}", file=sys.stderr)
    print(
        f"  hint: please report it with {report.name}; {settings.DEBUG}=1 shows the traceback",
        file=sys.stderr,
    )
    return EXIT_COULD_NOT


if __name__ == "__main__":
    sys.exit(console())
