"""The console script: find the command, run it, turn errors into a sentence and an exit code.

Results are on stdout, messages on stderr.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

from driftline import __version__, settings
from driftline.errors import EXIT_COULD_NOT, EXIT_FINE, BadInput, DriftlineError, did_you_mean

# With one dash as well, because many of our long options have one.
HELP = ("--help", "-h", "-help")
INTERRUPTED = 128 + 2  # what a shell reports for a program that SIGINT ended
PIPE_CLOSED = 128 + 13
BISECT_EXIT = "--bisect-exit"
EXIT_SKIP = 125
"""What `git bisect run` reads as: this commit can be called neither good nor bad."""
WAYS_OUT = {
    errno.ENOSPC: "make room, or give another -o",
    errno.EDQUOT: "make room, or give another -o",
    errno.EACCES: "give a path that you may read, or write",
    errno.EPERM: "give a path that you may read, or write",
    errno.EROFS: "give a path on a disk that can be written",
    errno.EMFILE: "allow more open files: ulimit -n 4096",
    errno.ENAMETOOLONG: "give a shorter path",
}
"""The hint for each error of the operating system."""


def console() -> int:
    """Entry point of a process that runs one command: `driftline`, `python -m driftline`."""
    # Threads that measure hold Python's lock for microseconds, and must not wait milliseconds.
    sys.setswitchinterval(2e-4)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # started with the stream closed: `driftline ... >&-`
            # Open for as long as the process lives.
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115
    return main(sys.argv[1:])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code.

    Args:
        argv: Its words, without the program; the process's own if not given.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    code = _guarded(words)
    own_words = words[: words.index("--")] if "--" in words else words
    # Errors too: a commit that cannot be compared is neither good nor bad.
    return EXIT_SKIP if code == EXIT_COULD_NOT and BISECT_EXIT in own_words else code


def _guarded(words: list[str]) -> int:
    """The exit code of a command line; errors become sentences."""
    for stream in (sys.stdout, sys.stderr):
        # A name that the terminal's encoding cannot write must not end the command.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # Cut files that an earlier command or a server in this process met do not concern this command.
    if (mapped := _mapped_files()) is not None:
        mapped.forget_cut_files()
    try:
        code = _dispatch(words)
        sys.stdout.flush()
    except DriftlineError as error:
        print_error(error)
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        print(f"driftline: interrupted {interrupt}".rstrip(), file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # `driftline show run | head`: the reader has seen enough. Python would complain once more
        # when it flushes stdout at exit, so give it somewhere to flush to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except OSError as error:
        # A full disk or a missing permission is no bug of ours.
        hint = WAYS_OUT.get(error.errno or 0, "look at that path, then give the command again")
        print_error(DriftlineError(_system_text(error), hint=hint))
        return EXIT_COULD_NOT
    except MemoryError:
        print_error(DriftlineError("there is not enough memory for this", hint="try --threads 1"))
        return EXIT_COULD_NOT
    except Exception as bug:
        return _report_bug(bug)
    return _unless_cut(code)


def _unless_cut(code: int) -> int:
    """The exit code; 2 if a file became shorter while it was read, since no figure is then sure."""
    mapped = _mapped_files()
    files: list[str] = mapped.cut_files() if mapped is not None else []
    if not files:
        return code
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    print_error(
        DriftlineError(
            f"{files[0]}{more} became shorter while it was read; do not use its figures",
            hint="wait until the program that writes it has ended, then run this again",
        )
    )
    return EXIT_COULD_NOT


def _mapped_files() -> Any:
    """The module that knows which mapped files were cut; None if nothing was mapped yet."""
    return sys.modules.get("driftline.runs.files.mapped_file")


def print_error(error: DriftlineError) -> None:
    """Print the error as one sentence on stderr, and the hint on the next line."""
    print(f"driftline: {_printable(str(error))}", file=sys.stderr)
    if error.hint:
        print(f"  hint: {_printable(error.hint)}", file=sys.stderr)


def _printable(text: str) -> str:
    try:
        from driftline.reporting.terminal import printable
    except OSError:  # no more files can be opened, not even our own
        return ascii(text)[1:-1]
    return printable(text)


def _system_text(error: OSError) -> str:
    text = error.strerror or str(error) or type(error).__name__
    return f"{error.filename}: {text}" if error.filename else text


def _dispatch(words: list[str]) -> int:
    if words and words[0] in ("--version", "-V"):
        print(f"driftline {__version__}")
        return EXIT_FINE
    # cyclopts takes 60 ms to import; the version needs none of it.
    from driftline.cli import app

    if not words or words[0] in HELP or words == ["help"]:
        app.print_overview(__version__)
        # Without a command nothing was done, which scripts must notice.
        return EXIT_FINE if words else EXIT_COULD_NOT
    name, rest = words[0], words[1:]
    if name == "help":
        name, rest = rest[0], ["--help"]
    if name not in app.COMMANDS:
        raise BadInput(f"there is no command '{name}'", hint=did_you_mean(name, app.COMMANDS))
    # `driftline dump -- program --help` asks the program, not us.
    own_words = rest[: rest.index("--")] if "--" in rest else rest
    if any(word in HELP for word in own_words):
        app.print_help(name)
        return EXIT_FINE
    if not app.COMMANDS[name].takes_program:
        # A program that is run inherits the environment as it is; our own commands multiply no
        # matrices.
        settings.one_blas_thread()
    return app.run(name, rest)


def _report_bug(bug: Exception) -> int:
    """Report an unexpected exception as a bug of ours, and save its traceback to a file."""
    import tempfile
    import traceback

    if settings.debug():
        traceback.print_exception(bug)
        return EXIT_COULD_NOT
    sentence = _printable(f"{type(bug).__name__}: {bug}".splitlines()[0])
    with tempfile.NamedTemporaryFile(
        "w", prefix="driftline-bug-", suffix=".txt", delete=False, encoding="utf-8"
    ) as report:
        report.writelines(traceback.format_exception(bug))
    print(f"driftline: this is a bug in driftline, not in your data: {sentence}", file=sys.stderr)
    print(
        f"  hint: please report it with {report.name}; {settings.DEBUG}=1 shows the traceback",
        file=sys.stderr,
    )
    return EXIT_COULD_NOT


if __name__ == "__main__":
    sys.exit(console())
