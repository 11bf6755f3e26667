"""`--python`: a command's calls of the Python API, run or printed as a program.

A command makes every call that does its work through `step`, `part` or `act`. Usually they call the
function. With `--python` they record the call and its arguments instead, and `end` prints the
records as a program. So the printed program is what would have run, with the parsed values.

The second half of the file turns calls and values of our own frozen classes into Python source.
Arguments at their default are left out, and so are arguments that only report progress or print.
"""

from __future__ import annotations

import builtins
import dataclasses
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, ParamSpec, TypeVar, cast

FLAG = "--python"
P = ParamSpec("P")
R = TypeVar("R")

_WIDTH = 88
# Parts of annotations of parameters that open a path themselves: `compare("ref", "cand")` is what a
# person would write, not `compare(open_run("ref"), …)`.
_TAKES_PATHS = ("StrPath", "Source", "Evidence")
_OPENERS = ("driftline.open_run", "driftline.open_table", "driftline.load_thresholds")
# Names that the program may import, so that no result is called the same.
_RESERVED = frozenset(("driftline", "sys", "Path"))

# The program that is being recorded; empty if commands run. It is a list so that functions need no
# `global`; at most one command is recorded at a time.
_scripts: list[Script] = []


class _Recorded(Exception):
    """The command was recorded rather than run; the message is the program."""


def is_script() -> bool:
    """Whether the command is recorded rather than run."""
    return bool(_scripts)


def step(name: str, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call `function`, or record `name = function(...)`; later calls may take the result."""
    if not _scripts:
        return function(*args, **kwargs)
    return cast("R", _scripts[-1].assign(name, function, args, kwargs))


def part(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call `function`, or record it as a value inside a later call, not on a separate line."""
    if not _scripts:
        return function(*args, **kwargs)
    return cast("R", _scripts[-1].inline(function, args, kwargs))


def act(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call `function`, or record a line that calls it, for its side effect."""
    if not _scripts:
        return function(*args, **kwargs)
    return cast("R", _scripts[-1].act(function, args, kwargs))


def end(*results: Any) -> None:
    """Mark the end of the work: what follows only prints. A recorded command ends here.

    Args:
        results: What the program prints at its end.

    Raises:
        _Recorded: The command is recorded rather than run.
    """
    if _scripts:
        _finish(_scripts[-1], results)


def _finish(script: Script, results: tuple[Any, ...]) -> NoReturn:
    for result in results:
        script.act(print, (result,), {})
    raise _Recorded(script.text())


def write_script(command: Callable[[], object]) -> str:
    """The Python program that does what a command would do.

    Raises:
        DriftlineError: The command refuses its arguments.
    """
    _scripts.append(Script())
    try:
        command()
    except _Recorded as recorded:
        return str(recorded)
    finally:
        _scripts.pop()
    raise AssertionError("a command went on after its last call: it does not call `end`")


class Name(NamedTuple):
    """A result that has a name in the program."""

    text: str


class Inline(NamedTuple):
    """A call written inside another one; `opens` is its path if it only opens something."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    opens: Any = None


class Script:
    """Lines of a program, and what they import."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._imports: dict[str, str] = {}
        self._names: set[str] = set()

    def assign(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Name:
        """Add a line that assigns the result of a call to a new name, and return that name."""
        call = self._call(function, args, kwargs, 0)
        variable, number = name, 1
        while variable in self._names or variable in self._imports or variable in _RESERVED:
            number += 1
            variable = f"{name}_{number}"
        self._names.add(variable)
        self._lines.append(f"{variable} = {call}")
        return Name(variable)

    def inline(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Inline:
        """A call that will be written inside the next one."""
        path = args[0] if len(args) == 1 and not any(kwargs.values()) else None
        opens = path if _public_name(function) in _OPENERS else None
        return Inline(function, args, kwargs, opens)

    def act(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Add a line that only calls."""
        self._lines.append(self._call(function, args, kwargs, 0))

    def text(self) -> str:
        """The whole program, ended by a newline."""
        blocks = [*_import_blocks(self._imports.values()), "\n".join(self._lines)]
        return "\n\n".join(block for block in blocks if block) + "\n"

    def _call(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        depth: int,
    ) -> str:
        arguments = _arguments(function, args, kwargs)
        # `Table.write` is written `table.write(...)`: the first argument owns it.
        if "." in function.__qualname__ and not inspect.isclass(function):  # a method
            owner, arguments = arguments[0].value, arguments[1:]
            callee = f"{self._value(owner, '', depth)}.{function.__name__}"
        else:
            callee = self._callee(function)
        words = [
            (f"{argument.name}=" if argument.by_name else "")
            + self._value(argument.value, argument.annotation, depth + 1)
            for argument in arguments
        ]
        return _laid_out(f"{callee}(", words, ")", depth)

    def _callee(self, function: Callable[..., Any]) -> str:
        if public := _public_name(function):
            self._imports["driftline"] = "import driftline"
            return public
        return self._imported(function.__module__, function.__qualname__.partition(".")[0])

    def _imported(self, module: str, name: str) -> str:
        if module == builtins.__name__:
            return name
        line, variable, number = f"from {module} import {name}", name, 1
        while variable in self._names or self._imports.get(variable, line) != line:
            number += 1
            variable = f"{name}_{number}"
            line = f"from {module} import {name} as {variable}"
        self._imports[variable] = line
        return variable

    def _value(self, value: Any, annotation: str, depth: int) -> str:
        if isinstance(value, Name):
            return value.text
        if isinstance(value, Inline):
            if value.opens is not None and _takes_path(annotation):
                return self._value(value.opens, annotation, depth)
            return self._call(value.function, value.args, value.kwargs, depth)
        if isinstance(value, Path):
            if _takes_path(annotation):
                return quoted(str(value))
            return f"{self._imported('pathlib', 'Path')}({quoted(str(value))})"
        if isinstance(value, str):
            return quoted(value)
        # `inf` and `nan` are no names of Python.
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        if value is None or isinstance(value, (bool, int, float)):
            return repr(value)
        if value is sys.stdout:
            self._imports["sys"] = "import sys"
            return "sys.stdout"
        return self._composite(value, annotation, depth)

    def _composite(self, composite: object, annotation: str, depth: int) -> str:
        value = cast("Any", composite)
        if hasattr(value, "_field_defaults"):  # a named tuple
            return self._record(value, value._fields, value._field_defaults, depth)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            defaults = {field.name: _default(field) for field in dataclasses.fields(value)}
            return self._record(value, list(defaults), defaults, depth)
        if isinstance(value, Mapping):
            pairs = [
                f"{self._value(key, '', depth + 1)}: {self._value(item, '', depth + 1)}"
                for key, item in cast("Mapping[Any, Any]", value).items()
            ]
            return _laid_out("{", pairs, "}", depth)
        if isinstance(value, (list, tuple)):
            items = [self._value(v, annotation, depth + 1) for v in cast("list[Any]", value)]
            if isinstance(value, list):
                return _laid_out("[", items, "]", depth)
            # A tuple of one item needs its comma.
            items = [f"{items[0]},"] if len(items) == 1 else items
            return _laid_out("(", items, ")", depth)
        if isinstance(value, (set, frozenset)):
            # Sorted: a set has no order, and the program must be the same each time.
            items = [self._value(v, annotation, depth + 1) for v in sorted(cast("set[Any]", value))]
            return f"frozenset({_laid_out('{', items, '}', depth)})" if items else "frozenset()"
        if callable(value):
            return self._callee(value) if _is_public(value) else "print"
        raise AssertionError(f"{type(value).__name__} cannot be written down")

    def _record(
        self, value: Any, fields: Iterable[str], defaults: Mapping[str, Any], depth: int
    ) -> str:
        """A value of one of our classes, with the fields that are not at their defaults."""
        words = [
            f"{name}={self._value(getattr(value, name), '', depth + 1)}"
            for name in fields
            if name not in defaults or getattr(value, name) != defaults[name]
        ]
        name = self._imported(type(value).__module__, type(value).__qualname__)
        return _laid_out(f"{name}(", words, ")", depth)


def _import_blocks(lines: Iterable[str]) -> list[str]:
    """Two blocks of import lines: the standard library, then driftline; one line per module."""
    # By everything before the name, so that names of one module share a line.
    modules: dict[str, set[str]] = {}
    for line in lines:
        head, _, name = line.rpartition("import ")
        modules.setdefault(head or line, set()).add(name)
    merged = [
        f"{head}import {', '.join(sorted(names))}" if head.startswith("from ") else head
        for head, names in modules.items()
    ]
    merged.sort(key=lambda line: (line.startswith("from "), line))
    package = [line for line in merged if line.split()[1].startswith("driftline")]
    return ["\n".join(line for line in merged if line not in package), "\n".join(package)]


class _Argument(NamedTuple):
    """An argument of a call, as it will be written."""

    name: str
    value: Any
    annotation: str
    by_name: bool


def _arguments(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[_Argument]:
    """The arguments that are written, in the order of the call: not defaults, not reporters."""
    try:
        parameters = dict(inspect.signature(function).parameters)
    except ValueError:  # a builtin without a signature
        parameters = {}
    places = list(parameters.values())
    arguments: list[_Argument] = []
    for position, value in enumerate(args):
        parameter = places[position] if position < len(places) else None
        annotation = "" if parameter is None else str(parameter.annotation)
        name = "" if parameter is None else parameter.name
        arguments.append(_Argument(name, value, annotation, by_name=False))
    for name, value in kwargs.items():
        parameter = parameters[name]
        if parameter.default is not parameter.empty and (
            _only_reports(value) or _is_default(value, parameter.default)
        ):
            continue
        arguments.append(_Argument(name, value, str(parameter.annotation), by_name=True))
    return arguments


def _only_reports(value: Any) -> bool:
    """Whether a value is a reporting object of the command line, which a program does not need."""
    if isinstance(value, (Name, Inline, type)):
        return False
    from_cli = type(value).__module__.startswith("driftline.cli.")
    return from_cli or (callable(value) and not _is_public(value))


def _is_public(value: Any) -> bool:
    name = getattr(value, "__qualname__", "<")
    module = str(getattr(value, "__module__", ""))
    return (
        not name.startswith("_")
        and "<" not in name
        and "." not in name
        and module.startswith("driftline.")
        and not module.startswith("driftline.cli.")
    )


def _is_default(value: Any, default: Any) -> bool:
    if isinstance(value, (Name, Inline)):
        return False
    # An empty list for an empty tuple says the same: nothing was given.
    return bool(value == default) or (not value and default in ((), [], {}, None, "", False))


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _public_name(function: Callable[..., Any]) -> str:
    """The public name of a function, such as `driftline.compare`; empty if it has none."""
    import driftline

    address = f"{function.__module__}:{function.__qualname__}"
    addresses = cast("Mapping[str, str]", vars(driftline)["_ADDRESSES"])
    return next((f"driftline.{name}" for name, place in addresses.items() if place == address), "")


def _takes_path(annotation: str) -> bool:
    return any(word in annotation for word in _TAKES_PATHS)


def quoted(text: str) -> str:
    r"""The text as a Python literal, in double quotes if it needs no escapes.

    >>> print(quoted("a b"), quoted('say "x"'), quoted("a\n\udcff"))
    "a b" 'say "x"' 'a\n\udcff'
    """
    # `repr` prefers single quotes; the house style is double ones.
    if text.isprintable() and '"' not in text and "\\" not in text:
        return f'"{text}"'
    return repr(text)


def _laid_out(opening: str, words: Sequence[str], closing: str, depth: int) -> str:
    """The parts joined on one line, or one part per line if that line is too long."""
    line = opening + ", ".join(words) + closing
    if words and ("\n" in line or len(line) + 4 * depth > _WIDTH):
        inner = " " * (4 * (depth + 1))
        return (
            opening
            + "".join(f"\n{inner}{word.removesuffix(',')}," for word in words)
            + ("\n" + " " * (4 * depth) + closing)
        )
    return line
