"""Calls and their values as Python source that can be run as it is printed.

Knows no command: any function and any value of our own frozen classes will do. What a call leaves
at its default is left out; so is what only reports (progress bars, printing functions).
"""

from __future__ import annotations

import builtins
import dataclasses
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

_WIDTH = 88
_TAKES_PATHS = ("StrPath", "Source", "Evidence")
"""Parts of annotations of parameters that open or make a path themselves."""
_OPENERS = ("driftline.open_run", "driftline.open_table", "driftline.load_thresholds")


class Name(NamedTuple):
    """A result that has a name in the program."""

    text: str


class Inline(NamedTuple):
    """A call that stands inside another one; `opens` is its path where it only opens something."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    opens: Any = None


class Program:
    """Lines of a program, and what they import."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._imports: dict[str, str] = {}
        self._names: set[str] = set()

    def assign(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Name:
        call = self._call(function, args, kwargs, 0)
        own, number = name, 1
        while own in self._names or own in self._imports or own in _WORDS:
            number += 1
            own = f"{name}_{number}"
        self._names.add(own)
        self._lines.append(f"{own} = {call}")
        return Name(own)

    def inline(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Inline:
        lone = args[0] if len(args) == 1 and not any(kwargs.values()) else None
        return Inline(function, args, kwargs, lone if _door(function) in _OPENERS else None)

    def act(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._lines.append(self._call(function, args, kwargs, 0))

    def text(self) -> str:
        """The whole program, ended by a newline."""
        parts = [*_import_blocks(self._imports.values()), "\n".join(self._lines)]
        return "\n\n".join(part for part in parts if part) + "\n"

    def _call(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        depth: int,
    ) -> str:
        given = _given(function, args, kwargs)
        if "." in function.__qualname__ and not inspect.isclass(function):  # a method
            owner, given = given[0].value, given[1:]
            called = f"{self._value(owner, '', depth)}.{function.__name__}"
        else:
            called = self._called(function)
        words = [
            (f"{each.name}=" if each.by_name else "")
            + self._value(each.value, each.annotation, depth + 1)
            for each in given
        ]
        return _laid_out(f"{called}(", words, ")", depth)

    def _called(self, function: Callable[..., Any]) -> str:
        door = _door(function)
        if door:
            self._imports["driftline"] = "import driftline"
            return door
        return self._imported(function.__module__, function.__qualname__.partition(".")[0])

    def _imported(self, module: str, name: str) -> str:
        if module == builtins.__name__:
            return name
        line, own, number = f"from {module} import {name}", name, 1
        while own in self._names or self._imports.get(own, line) != line:
            number += 1
            own, line = f"{name}_{number}", f"from {module} import {name} as {name}_{number}"
        self._imports[own] = line
        return own

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
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        if value is None or isinstance(value, (bool, int, float)):
            return repr(value)
        if value is sys.stdout:
            self._imports["sys"] = "import sys"
            return "sys.stdout"
        return self._made_of_others(value, annotation, depth)

    def _made_of_others(self, whole: object, annotation: str, depth: int) -> str:
        value = cast("Any", whole)
        if hasattr(value, "_field_defaults"):  # a named tuple
            return self._record(value, value._fields, value._field_defaults, depth)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            known = {field.name: _default(field) for field in dataclasses.fields(value)}
            return self._record(value, list(known), known, depth)
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
            lone = [f"{items[0]},"] if len(items) == 1 else items
            return _laid_out("(", lone, ")", depth)
        if isinstance(value, (set, frozenset)):
            items = [self._value(v, annotation, depth + 1) for v in sorted(cast("set[Any]", value))]
            return f"frozenset({_laid_out('{', items, '}', depth)})" if items else "frozenset()"
        if callable(value):
            return self._called(value) if _is_public(value) else "print"
        raise AssertionError(f"{type(value).__name__} cannot be written down")

    def _record(
        self, value: Any, fields: Iterable[str], defaults: Mapping[str, Any], depth: int
    ) -> str:
        """A value of one of our classes: what of it is not as usual."""
        words = [
            f"{name}={self._value(getattr(value, name), '', depth + 1)}"
            for name in fields
            if name not in defaults or getattr(value, name) != defaults[name]
        ]
        own = self._imported(type(value).__module__, type(value).__qualname__)
        return _laid_out(f"{own}(", words, ")", depth)


def _import_blocks(lines: Iterable[str]) -> list[str]:
    """Imports of Python's own, then ours; several names of one module on one line."""
    modules: dict[str, set[str]] = {}
    for line in lines:
        head, _, name = line.rpartition("import ")
        modules.setdefault(head or line, set()).add(name)
    merged = [
        f"{head}import {', '.join(sorted(names))}" if head.startswith("from ") else head
        for head, names in modules.items()
    ]
    merged.sort(key=lambda line: (line.startswith("from "), line))
    ours = [line for line in merged if line.split()[1].startswith("driftline")]
    return ["\n".join(line for line in merged if line not in ours), "\n".join(ours)]


_WORDS = frozenset(("driftline", "sys", "Path"))


class _Given(NamedTuple):
    name: str
    value: Any
    annotation: str
    by_name: bool


def _given(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[_Given]:
    """The arguments that matter, in the function's own order."""
    try:
        known = dict(inspect.signature(function).parameters)
    except ValueError:  # a builtin that does not say
        known = {}
    named = list(known.values())
    found: list[_Given] = []
    for at, value in enumerate(args):
        parameter = named[at] if at < len(named) else None
        said = "" if parameter is None else str(parameter.annotation)
        found.append(_Given("" if parameter is None else parameter.name, value, said, False))
    for name, value in kwargs.items():
        parameter = known[name]
        if parameter.default is not parameter.empty and (
            _only_reports(value) or _same(value, parameter.default)
        ):
            continue
        found.append(_Given(name, value, str(parameter.annotation), True))
    return found


def _only_reports(value: Any) -> bool:
    """A function of the command line's own, which a program has no use for."""
    if isinstance(value, (Name, Inline, type)):
        return False
    ours = type(value).__module__.startswith("driftline.cli.")
    return ours or (callable(value) and not _is_public(value))


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


def _same(value: Any, default: Any) -> bool:
    if isinstance(value, (Name, Inline)):
        return False
    return bool(value == default) or (not value and default in ((), [], {}, None, "", False))


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _door(function: Callable[..., Any]) -> str:
    """The public name of a function; empty if it has none."""
    import driftline

    address = f"{function.__module__}:{function.__qualname__}"
    doors = cast("Mapping[str, str]", vars(driftline)["_DOORS"])
    return next((f"driftline.{name}" for name, at in doors.items() if at == address), "")


def _takes_path(annotation: str) -> bool:
    return any(word in annotation for word in _TAKES_PATHS)


def quoted(text: str) -> str:
    r"""A text as Python writes it, in double quotes where nothing stands against them.

    >>> print(quoted("a b"), quoted('say "x"'), quoted("a\n\udcff"))
    "a b" 'say "x"' 'a\n\udcff'
    """
    if text.isprintable() and '"' not in text and "\\" not in text:
        return f'"{text}"'
    return repr(text)


def _laid_out(opening: str, words: Sequence[str], closing: str, depth: int) -> str:
    """On one line, or a line for each word where that is too long."""
    line = opening + ", ".join(words) + closing
    if words and ("\n" in line or len(line) + 4 * depth > _WIDTH):
        inner = " " * (4 * (depth + 1))
        return (
            opening
            + "".join(f"\n{inner}{word.removesuffix(',')}," for word in words)
            + ("\n" + " " * (4 * depth) + closing)
        )
    return line
