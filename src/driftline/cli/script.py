"""`--python`: a command's calls of the Python API, run or written down.

A command hands every call that does its work to one of the three functions here. Usually they call;
with `--python` on the command line they note the call and its values instead, and `end` prints the
notes as a program. So what is printed is what would have run, with the values that were parsed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar, cast

if TYPE_CHECKING:
    from driftline.cli.python_code import Program

FLAG = "--python"
P = ParamSpec("P")
R = TypeVar("R")

_program: list[Program] = []
"""The notes, while a command is written down; one command runs at a time."""


class Printed(Exception):
    """The command was written down; carries the program."""


def asked() -> bool:
    """Whether the command is written down rather than run."""
    return bool(_program)


def step(name: str, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """`name = function(...)`. Written down, the result is a name that later calls may be given."""
    if not _program:
        return function(*args, **kwargs)
    return cast(R, _program[-1].assign(name, function, args, kwargs))


def part(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """A value of a later call: written down, it stands there rather than on a line of its own."""
    if not _program:
        return function(*args, **kwargs)
    return cast(R, _program[-1].inline(function, args, kwargs))


def act(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """`function(...)`, called for what it does."""
    if not _program:
        return function(*args, **kwargs)
    return cast(R, _program[-1].act(function, args, kwargs))


def end(*shown: Any) -> None:
    """All calls are made: go on to say what came of them. Written down, the command is over here.

    Args:
        shown: Results that the program prints at its end.

    Raises:
        Printed: The command was to be written down.
    """
    if _program:
        _over(_program[-1], shown)


def _over(program: Program, shown: tuple[Any, ...]) -> NoReturn:
    for result in shown:
        program.act(print, (result,), {})
    raise Printed(program.text())


def written_down(command: Callable[[], object]) -> str:
    """The program of a command.

    Raises:
        DriftlineError: Its words are refused.
    """
    from driftline.cli.python_code import Program

    _program.append(Program())
    try:
        command()
    except Printed as over:
        return str(over)
    finally:
        _program.pop()
    raise AssertionError("a command went on after its last call: it has no `script.end`")
