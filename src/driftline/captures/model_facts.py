# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""What a model is, apart from its tensors: attributes, functions, code and configurations as data.

Every framework's capture uses these functions. Objects of the program are only looked at: values
come from `__dict__` and from tables of registered state, never through properties or methods, so
nothing of the program runs. What is no scalar, or too long, is left out.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import hashlib
import math
import sys
import time
import types
import zlib
from collections.abc import Callable, Container, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, cast

from driftline.captures.naming import ROOT
from driftline.runs.redaction import redact_value
from driftline.runs.sidecars.model_facts import line_of

# Longer lists and texts are data rather than settings.
_MOST_ITEMS = 32
_LONGEST_TEXT = 200
_DEEPEST = 4
_MOST_ATTRIBUTES = 256
_MOST_CONFIG = 2000
_DEEPEST_CONFIG = 8
# Functions of one class whose code is described: `forward` and what it calls.
_MOST_FUNCTIONS = 64
_MOST_LINES = 2000
_LARGEST_NUMBER = 1 << 256
_MARKS = ("__", "_is_torch_", "_torchdynamo", "_dynamo", "_fsdp", "_is_fsdp", "_ddp_")
"""Beginnings of names that compilers and wrappers leave on modules: they are no settings."""
NO_SCALAR = object()
"""Answer for a value that is no scalar, nor a short list of scalars."""
FRAMEWORK_TYPES = frozenset({"dtype", "device", "memory_format", "layout", "VarType", "DataType"})
"""Names of small classes of the frameworks whose text says all."""
_FRAMEWORKS = frozenset({"torch", "paddle", "numpy"})
_LIBRARIES = _FRAMEWORKS | sys.stdlib_module_names
"""Packages whose functions are named, but whose code is not looked at."""


_SELDOM = 0.2
"""Seconds between two writings of lines that come with every step."""
GOODBYE = "driftline-goodbye"
"""Name of the thread that ends a capture when its program leaves at once."""


class FactOptions(NamedTuple):
    """What of a model is described besides its tensors.

    Attributes:
        model: Modules, attributes, state, process and training.
        weights: Also summaries, digests and samples of the values of parameters and buffers.
    """

    model: bool = True
    weights: bool = True


# Values.


def scalar(value: Any, depth: int = 0) -> Any:
    """A value as JSON has it, or `NO_SCALAR`.

    >>> scalar((1, 2.5, None)), scalar({3, 1}), scalar(float("inf")), scalar(object()) is NO_SCALAR
    ([1, 2.5, None], [1, 3], 'inf', True)
    """
    kind: type[Any] = type(value)
    if value is None or kind is bool:
        return value
    if kind is int:
        return value if -_LARGEST_NUMBER < value < _LARGEST_NUMBER else NO_SCALAR
    if kind is float:
        return value if math.isfinite(value) else str(value)
    if kind is str:
        return value if len(value) <= _LONGEST_TEXT else NO_SCALAR
    # By type: `isinstance` would ask `__class__`, which is code of its own in lazy proxies.
    if issubclass(kind, Enum):
        return f"{kind.__name__}.{value.name}"
    if issubclass(kind, (tuple, list, set, frozenset)):
        return _listed(value, kind, depth)
    package = kind.__module__.partition(".")[0]
    if package in _FRAMEWORKS and (kind.__name__ in FRAMEWORK_TYPES or package == "numpy"):
        return _of_framework(value, kind)
    if kind in (complex, range, slice):
        return str(value)
    # A subclass of a number may print anything; its value as a plain number is meant.
    if issubclass(kind, int):
        return int.__add__(value, 0)
    if issubclass(kind, float):
        return scalar(float.__add__(value, 0.0), depth)
    if issubclass(kind, str):
        return scalar(str.__str__(value), depth) if kind.__str__ is str.__str__ else NO_SCALAR
    return NO_SCALAR


def _listed(value: Any, kind: type, depth: int) -> Any:
    base: Any = next(b for b in (tuple, list, set, frozenset) if issubclass(kind, b))
    # The length and the members as the base class knows them: a subclass may have code of its own.
    if depth >= _DEEPEST or base.__len__(value) > _MOST_ITEMS:
        return NO_SCALAR
    members = [scalar(member, depth + 1) for member in base.__iter__(value)]
    if NO_SCALAR in members:
        return NO_SCALAR
    # The order of a set is not a fact.
    return sorted(members, key=lambda m: (type(m).__name__, str(m))) if base in _SETS else members


_SETS = (set, frozenset)


def _of_framework(value: Any, kind: type) -> Any:
    if kind.__module__.partition(".")[0] != "numpy":
        return str(value)
    # A numpy scalar is a number; arrays are tensors and are not described here.
    item = getattr(value, "item", None)
    if kind.__name__ == "ndarray" or item is None:
        return str(value) if "dtype" in kind.__name__.lower() else NO_SCALAR
    return scalar(item())


def qualified(function: Any, depth: int = 0) -> str:
    """Name of a function or class with its module; empty for what is neither.

    >>> qualified(math.sqrt), qualified(functools.partial(round, ndigits=2))
    ('math.sqrt', 'functools.partial(builtins.round, ndigits=2)')
    """
    kind: type[Any] = type(function)
    if kind is functools.partial and depth < _DEEPEST:
        inner = qualified(function.func, depth + 1)
        words = [scalar(argument) for argument in function.args]
        named = {name: scalar(argument) for name, argument in function.keywords.items()}
        texts = [inner, *("..." if word is NO_SCALAR else repr(word) for word in words)]
        texts += [f"{n}={'...' if w is NO_SCALAR else repr(w)}" for n, w in named.items()]
        return f"functools.partial({', '.join(texts)})" if inner else ""
    if kind is types.MethodType:
        function, kind = function.__func__, type(function.__func__)
    if issubclass(kind, type):
        return f"{function.__module__}.{function.__qualname__}"
    if kind not in _FUNCTIONS:
        # An object that is called like a function is known by its class.
        callable_object = "__call__" in kind.__dict__ and kind.__name__ != "Module"
        return f"{kind.__module__}.{kind.__qualname__}()" if callable_object else ""
    name = f"{function.__module__ or 'builtins'}.{function.__qualname__}"
    # Names of lambdas and inner functions say little: part of their code's digest is added.
    if "<" in name and kind is types.FunctionType:
        return f"{name}#{_digest(_instructions(function.__code__))[-8:]}"
    return name


_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.WrapperDescriptorType)


class Attributes(NamedTuple):
    """Attributes of one object: scalars, and functions by qualified name."""

    scalars: dict[str, Any]
    functions: dict[str, str]


_shown: dict[tuple[str, str], str] = {}
_MOST_SHOWN = 20_000


def redacted(name: str, value: Any) -> Any:
    """A scalar without secrets, as command lines are written."""
    if type(value) is list:
        return [redacted(name, member) for member in cast("list[Any]", value)]
    if type(value) is not str:
        return value
    key = name, value
    text = _shown.get(key)
    if text is None:
        if len(_shown) >= _MOST_SHOWN:
            _shown.clear()
        text = _shown[key] = redact_value(name, value)
    return text


def attributes_of(table: Mapping[str, Any], skipped: Any = frozenset[str]()) -> Attributes:
    """Scalars and functions in an object's `__dict__`; short tables have dotted names.

    Args:
        table: The `__dict__`; it may change meanwhile.
        skipped: Names that are no attributes of the program.
    """
    scalars: dict[str, Any] = {}
    functions: dict[str, str] = {}
    for name, value in list(table.items()):
        if type(name) is not str or len(name) > _LONGEST_TEXT or name in skipped:
            continue
        if name.startswith(_MARKS):
            continue
        if len(scalars) + len(functions) >= _MOST_ATTRIBUTES:
            break
        try:
            _take(name, value, scalars, functions)
        # Objects of a program may raise whatever they like when they are looked at.
        except Exception as error:
            scalars[name] = f"not readable: {type(error).__name__}"
    return Attributes(scalars, functions)


def _take(name: str, value: Any, scalars: dict[str, Any], functions: dict[str, str]) -> None:
    plain = scalar(value)
    if plain is not NO_SCALAR:
        scalars[name] = redacted(name, plain)
    elif type(value) is dict:
        for key, member in _short_table(cast("dict[Any, Any]", value)):
            scalars[f"{name}.{key}"] = redacted(key, member)
    elif type(value) is list:
        held = cast("list[Any]", value)
        names = [qualified(member) for member in held[:_MOST_ITEMS]]
        # A list of functions, as schedulers have it; anything else in it is no setting.
        if names and all(names):
            # Often one function for each parameter group.
            functions[name] = redacted(name, ", ".join(dict.fromkeys(names)))
    elif text := qualified(value):
        functions[name] = redacted(name, text)


def _short_table(table: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    if len(table) <= _MOST_ITEMS:
        for key, value in list(table.items()):
            plain = scalar(value)
            if type(key) in (str, int) and plain is not NO_SCALAR:
                yield str(key), plain


# Configurations.


def looks_like_config(name: str, value: Any) -> bool:
    """Whether an attribute is a configuration that speaks for itself: a table or plain object.

    Known by its own class (`LlamaConfig`, a dataclass) or, for a plain table, by its name.
    """
    kind: type[Any] = type(value)
    word = name.lower()
    named = any(part in word for part in ("config", "cfg", "hparams")) or word == "_internal_dict"
    if issubclass(kind, dict):
        return named
    if getattr(kind, "__module__", "builtins") == "builtins" or not hasattr(kind, "__dict__"):
        return False
    own = kind.__name__.lower()
    telling = "__dataclass_fields__" in kind.__dict__ or any(w in own for w in ("config", "cfg"))
    return telling and (named or own.endswith(("config", "cfg")))


def config_lines(
    table: Mapping[str, Any], own: Container[str], site: str, seen: set[int]
) -> Iterator[str]:
    """A line for each configuration among a module's attributes; `seen` has those with a line."""
    for name, value in list(table.items()):
        if name in own or type(name) is not str:
            continue
        values: dict[str, Any] = {}
        # Classes of a program may raise when they are asked for their name.
        with contextlib.suppress(Exception):
            if looks_like_config(name, value):
                values = flat_config(value, seen, "" if site == ROOT else site)
        if values:
            yield line_of("config", site=site, name=name, values=values)


def flat_config(value: Any, seen: set[int], prefix: str = "") -> dict[str, Any]:
    """A configuration as one flat table with dotted names; what was seen before is left out."""
    flat: dict[str, Any] = {}
    waiting: list[tuple[str, Any, int]] = [(prefix, value, 0)]
    while waiting and len(flat) < _MOST_CONFIG:
        name, holder, depth = waiting.pop()
        kind: type[Any] = type(holder)
        # Configurations refer to each other, and sometimes to themselves.
        if id(holder) in seen or depth > _DEEPEST_CONFIG:
            continue
        seen.add(id(holder))
        if issubclass(kind, dict):
            table = cast("dict[Any, Any]", cast("Any", dict).copy(holder))
        else:
            table = cast("dict[Any, Any]", dict(_vars_of(holder)))
        for key, member in table.items():
            if type(key) not in (str, int) or len(flat) >= _MOST_CONFIG:
                continue
            path = f"{name}.{key}" if name else str(key)
            plain = scalar(member)
            if plain is not NO_SCALAR:
                flat[path] = redacted(str(key), plain)
            elif text := qualified(member):
                flat[path] = redacted(str(key), text)
            elif issubclass(type(member), dict) or looks_like_config("config", member):
                waiting.append((path, member, depth + 1))
    return flat


def _vars_of(holder: Any) -> Mapping[str, Any]:
    try:
        table = object.__getattribute__(holder, "__dict__")
    except AttributeError:  # an object with slots only
        return {}
    return cast("Mapping[str, Any]", table) if type(table) is dict else {}


# Code.


def class_line(kind: type, forward: str = "forward") -> str:
    """The line of a class: its constants, and the code of `forward` and of what it calls."""
    constants: dict[str, Any] = {}
    functions: dict[str, Any] = {}
    name = f"{kind.__module__}.{kind.__qualname__}"
    for base in kind.__mro__:
        package = base.__module__.partition(".")[0]
        if package in _LIBRARIES and base is not kind:
            continue
        for key, value in list(base.__dict__.items()):
            plain = NO_SCALAR if key.startswith("_") else scalar(value)
            # A property or function is no scalar, so nothing is called here.
            if plain is not NO_SCALAR and key not in constants:
                constants[key] = redacted(key, plain)
    for label, function in _reached(kind, forward):
        functions[label] = _code(function.__code__)
    return line_of("class", **{"class": name}, code=functions, constants=constants)


def _reached(kind: type, forward: str) -> Iterator[tuple[str, types.FunctionType]]:
    """`forward` of a class, and the program's own functions that it may call, nearest first."""
    first = _plain_function(_of_class(kind, forward))
    if first is None:
        return
    waiting: list[tuple[str, types.FunctionType]] = [(forward, first)]
    seen: set[int] = set()
    while waiting and len(seen) < _MOST_FUNCTIONS:
        label, function = waiting.pop(0)
        if id(function.__code__) in seen:
            continue
        seen.add(id(function.__code__))
        yield label, function
        # Code of libraries is the version's business, not the program's.
        if (function.__module__ or "").partition(".")[0] in _LIBRARIES:
            continue
        for name in _names_in(function.__code__):
            method = _plain_function(_of_class(kind, name))
            called = method or _plain_function(function.__globals__.get(name))
            if called is not None:
                package = (called.__module__ or "").partition(".")[0]
                if package not in _LIBRARIES:
                    text = name if method else f"{called.__module__}.{called.__qualname__}"
                    waiting.append((text, called))


def _of_class(kind: type, name: str) -> Any:
    for base in kind.__mro__:
        if name in base.__dict__:
            return base.__dict__[name]
    return None


def _plain_function(value: Any) -> types.FunctionType | None:
    """The Python function behind a method or decorator; None for anything else."""
    for _ in range(8):
        if type(value) in (staticmethod, classmethod):
            value = value.__func__
        if type(value) is not types.FunctionType:
            return None
        inner = value.__dict__.get("__wrapped__")
        if inner is None:
            return value
        value = inner
    return None


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if type(constant) is types.CodeType:
            yield from _names_in(constant)


@functools.lru_cache(maxsize=4096)
def _code(code: types.CodeType) -> dict[str, Any]:
    instructions = _instructions(code)
    first = code.co_firstlineno
    texts: dict[int, list[str]] = {}
    for line, text in instructions:
        texts.setdefault(line, []).append(text)
    # Offsets from the first line: a function that only moved has the same ones.
    lines = {
        str(line - first): f"{zlib.crc32(chr(10).join(parts).encode()):08x}"
        for line, parts in list(texts.items())[:_MOST_LINES]
        if line >= first
    }
    return {
        "digest": _digest(instructions),
        "file": _without_home(code.co_filename),
        "line": first,
        "lines": lines,
    }


def _digest(instructions: list[tuple[int, str]]) -> str:
    """Of the instructions without their lines: comments and blank lines change nothing."""
    text = "\n".join(text for _, text in instructions)
    digest = hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=12).hexdigest()
    # Another Python compiles the same source to other instructions.
    return f"py{sys.version_info.major}.{sys.version_info.minor}:{digest}"


_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))


def _instructions(code: types.CodeType, depth: int = 0) -> list[tuple[int, str]]:
    """Line and text of each instruction, functions inside included; no address, no offset."""
    listed: list[tuple[int, str]] = []
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        position: Any = getattr(instruction, "positions", None)
        line = getattr(position, "lineno", None) or line
        constant = instruction.argval
        if instruction.opcode in _JUMPS:
            text = instruction.opname  # targets are offsets, which shift with every change
        elif type(constant) is types.CodeType:
            text = f"{instruction.opname} {constant.co_name}"
            if depth < _DEEPEST:
                listed += _instructions(constant, depth + 1)
        elif type(constant) is frozenset:
            text = f"{instruction.opname} {sorted(map(repr, cast('frozenset[Any]', constant)))}"
        else:
            text = f"{instruction.opname} {constant!r}"
        listed.append((line, text))
    return listed


def _without_home(name: str) -> str:
    # Where packages are installed is no fact about a model.
    for folder in ("/site-packages/", "/dist-packages/"):
        if folder in name:
            return name.rpartition(folder)[2]
    # The name of the user's home folder is nobody's business in a bug report.
    try:
        return "~/" + Path(name).relative_to(Path.home()).as_posix()
    except (ValueError, RuntimeError):
        return name


# Writing.


class FactsFile:
    """Lines of the sidecars of one capture, kept until the run has a folder.

    A run without tensors has no folder, and facts alone must not make one.
    """

    def __init__(self, write: Callable[[str, str], None], ready: Callable[[], bool]) -> None:
        """
        Args:
            write: Adds text to a side file of the run.
            ready: Whether the run has its folder.
        """
        self._write = write
        self._ready = ready
        self._waiting: list[tuple[str, str]] = []
        self._written = 0.0

    def add(self, name: str, text: str) -> None:
        """Take lines for a file; any thread may call this."""
        self._waiting.append((name, text))

    def flush(self, *, at_once: bool = True) -> None:
        """Write what waits, if the run has its folder.

        Args:
            at_once: Or only if the last writing was a while ago: a file is opened each time, which
                a small step of a program would feel.
        """
        if not self._waiting or not self._ready():
            return
        now = time.monotonic()
        if not at_once and now - self._written < _SELDOM:
            return
        self._written = now
        # Exchanged first: the thread of the weights may add lines meanwhile.
        waiting, self._waiting = self._waiting, []
        texts: dict[str, list[str]] = {}
        for name, text in waiting:
            texts.setdefault(name, []).append(text)
        for name, parts in texts.items():
            self._write(name, "".join(parts))
