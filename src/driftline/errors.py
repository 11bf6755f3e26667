"""Exceptions of Driftline: one family, each with a message, a hint and an exit code.

A numerical difference is never an exception; it is a row in a table. Exceptions are for what could
not be done.
"""

from __future__ import annotations

from collections.abc import Iterable

# Differences have a code of their own, so that a CI job can tell them from a failure to run.
EXIT_FINE = 0
EXIT_DIFFERENT = 1
EXIT_COULD_NOT = 2


class DriftlineError(Exception):
    """Something that could not be done; the message is one sentence.

    Attributes:
        hint: The next thing to try, shown on a line of its own; empty where the message says it.
        exit_code: What the command line returns for it.
        usual_hint: The hint of a kind of error whose way out is the same wherever it is raised.
    """

    exit_code = EXIT_COULD_NOT
    usual_hint = ""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        # Nobody is left without a way out because a reader of one more format forgot it.
        self.hint = hint or self.usual_hint
        if self.hint:
            # A traceback, in a notebook say, shows it too: in the words of somebody who calls us.
            self.add_note(f"hint: {in_python(self.hint)}")

    def __str__(self) -> str:
        return self.args[0]


class BadInput(DriftlineError):
    """An argument, option or selection that cannot mean anything."""


class BadConfig(BadInput, ValueError):
    """An argument of a function that stands in for another tool's, which promises a ValueError."""


class BadRun(DriftlineError):
    """A path that is no run, or a run that cannot be read."""

    usual_hint = "is it the folder you meant? if its program was cut short, dump it anew"


class BadFile(DriftlineError):
    """A single file that is malformed, too large for what it claims, or unsafe to open."""

    usual_hint = "is it the file you meant, and complete? if so, make it or copy it anew"


class Unreachable(DriftlineError):
    """A store on another machine that did not answer, however often it was asked."""


class AlreadyThere(DriftlineError):
    """An output that exists; nothing is overwritten unless asked."""


class NotInstalled(DriftlineError):
    """An optional part that is needed and missing."""


# Options whose keyword is called otherwise, and flags, which have no value to write.
_KEYWORDS = {
    "map": "maps",
    "mask": "masks",
    "metric": "metrics",
    "placement": "placements",
    "port": "ports",
    "site": "sites",
    "no-structure": "structural=False",
    "force": "force=True",
}


def in_python(hint: str) -> str:
    """A hint of the command line for somebody who calls a function.

    >>> in_python("give another -o, or --force to replace"), in_python("try --threads 1")
    ('give another path, or force=True to replace', 'try threads=1')
    >>> in_python("try --map 'model.*=*'"), in_python("see driftline compare --help")
    ("try maps=['model.*=*']", 'see driftline compare --help')
    """
    import re

    if "driftline " in hint:  # a whole command: it is run in a shell
        return hint
    hint = re.sub(r"(?<![\w-])-o\b(?! \w)", "path", hint).replace("an path", "a path")

    def keyword(option: re.Match[str]) -> str:
        name = _KEYWORDS.get(option[1], option[1].replace("-", "_"))
        if "=" in name:
            return name + (f" {option[2]}" if option[2] else "")
        if not option[2]:
            return f"{name}="
        return f"{name}=[{option[2]}]" if name in _KEYWORDS.values() else f"{name}={option[2]}"

    return re.sub(r"(?<![\w-])--([a-z][a-z-]+)(?: ('[^']*'|\d[\w.]*|[A-Z]+[\w.]*))?", keyword, hint)


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """A hint that names the closest known words, or lists a few when none is close.

    >>> did_you_mean("cosin", ["cosine", "rmse"])
    "did you mean 'cosine'?"
    """
    import difflib  # only needed when something is wrong

    # Sorted, so that the same mistake gets the same hint every time.
    names = sorted(set(choices))
    close = difflib.get_close_matches(word, names, n=3, cutoff=0.6)
    if close:
        return "did you mean " + " or ".join(repr(name) for name in close) + "?"
    if not names:
        return ""
    # Eight names fit on a line; the count tells that there are more.
    shown = ", ".join(names[:8])
    return f"known: {shown}" + (f" and {len(names) - 8} more" if len(names) > 8 else "")
