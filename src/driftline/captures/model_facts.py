# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Describe a model apart from its tensors: attributes, functions, code and configurations as data.

The captures of all frameworks use these functions. They only read the program's objects: values
come from `__dict__` and from tables of registered state, never from properties or methods, so no
code of the program runs. Values that are neither scalars nor functions are left out, and so are
values that are too long.
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

# Longer lists and texts are more likely data than settings.
_MOST_ITEMS = 32
_LONGEST_TEXT = 200
_DEEPEST = 4
_MOST_ATTRIBUTES = 256
_MOST_CONFIG = 2000
_DEEPEST_CONFIG = 8
# At most this many functions of a class are described: `forward` and the functions it calls.
_MOST_FUNCTIONS = 64
_MOST_LINES = 2000
_LARGEST_NUMBER = 1 << 256
_INTERNAL_PREFIXES = (
    *("__", "_is_torch_", "_torchdynamo", "_dynamo", "_fsdp", "_is_fsdp", "_ddp_"),
    "_compile_kwargs",  # Lightning replaces `torch.compile` by a function that sets it
)
"""Attributes with these prefixes are set by compilers and wrappers; they are not settings."""
NO_SCALAR = object()
"""Returned for a value that is neither a scalar nor a short list of scalars."""
FRAMEWORK_TYPES = frozenset({"dtype", "device", "memory_format", "layout", "VarType", "DataType"})
"""Names of small classes of the frameworks whose `str` describes the value completely."""
_FRAMEWORKS = frozenset({"torch", "paddle", "numpy"})
_LIBRARIES = _FRAMEWORKS | sys.stdlib_module_names
"""Packages whose code is not described when a `forward` calls it: their version describes it."""


_FLUSH_SECONDS = 0.2
"""Lines that come with every step are written to their files at most this often."""
EXIT_THREAD = "driftline-exit"
"""Name of the thread that ends a capture when its program exits by `os._exit`."""


class FactOptions(NamedTuple):
    """Which facts about a model are written besides its tensors.

    Attributes:
        model: Facts about modules, attributes, tensors, the process and the training.
        weights: Summaries, digests and samples of the values of parameters and buffers.
    """

    model: bool = True
    weights: bool = True


# Values.


def scalar(value: Any, depth: int = 0) -> Any:
    """A value in the form JSON can hold, or `NO_SCALAR`.

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
    # By type: `isinstance` would read `__class__`, which runs code in lazy proxies.
    if issubclass(kind, Enum):
        return f"{kind.__name__}.{value.name}"
    if issubclass(kind, (tuple, list, set, frozenset)):
        return _listed(value, kind, depth)
    package = kind.__module__.partition(".")[0]
    if package in _FRAMEWORKS and (kind.__name__ in FRAMEWORK_TYPES or package == "numpy"):
        return _of_framework(value, kind)
    if kind in (complex, range, slice):
        return str(value)
    # A subclass of a number may print anything, so it is converted to a plain number first.
    if issubclass(kind, int):
        return int.__add__(value, 0)
    if issubclass(kind, float):
        return scalar(float.__add__(value, 0.0), depth)
    if issubclass(kind, str):
        return scalar(str.__str__(value), depth) if kind.__str__ is str.__str__ else NO_SCALAR
    return NO_SCALAR


def _listed(value: Any, kind: type, depth: int) -> Any:
    base: Any = next(b for b in (tuple, list, set, frozenset) if issubclass(kind, b))
    # Use the base class's methods for length and members: a subclass may run code of its own.
    if depth >= _DEEPEST or base.__len__(value) > _MOST_ITEMS:
        return NO_SCALAR
    members = [scalar(member, depth + 1) for member in base.__iter__(value)]
    if NO_SCALAR in members:
        return NO_SCALAR
    # A set has no order of its own, and sorting makes two runs comparable.
    return sorted(members, key=lambda m: (type(m).__name__, str(m))) if base in _SETS else members


_SETS = (set, frozenset)


def _of_framework(value: Any, kind: type) -> Any:
    if kind.__module__.partition(".")[0] != "numpy":
        return str(value)
    # A numpy scalar is a number. Arrays are tensors, which are described elsewhere.
    item = getattr(value, "item", None)
    if kind.__name__ == "ndarray" or item is None:
        return str(value) if "dtype" in kind.__name__.lower() else NO_SCALAR
    return scalar(item())


def qualified(function: Any, depth: int = 0) -> str:
    """The name of a function or class with its module; empty for any other object.

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
        # An object that can be called like a function is named by its class.
        callable_object = "__call__" in kind.__dict__ and kind.__name__ != "Module"
        return f"{kind.__module__}.{kind.__qualname__}()" if callable_object else ""
    name = f"{function.__module__ or 'builtins'}.{function.__qualname__}"
    # Lambdas and inner functions share names such as `<lambda>`, so part of a digest of their code
    # is added.
    if "<" in name and kind is types.FunctionType:
        return f"{name}#{_digest(_instructions(function.__code__))[-8:]}"
    return name


_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.WrapperDescriptorType)


class Attributes(NamedTuple):
    """The attributes of one object: its scalars, and the qualified names of its functions."""

    scalars: dict[str, Any]
    functions: dict[str, str]


_redacted_texts: dict[tuple[str, str], str] = {}
_MOST_REDACTED_TEXTS = 20_000


def redacted(name: str, value: Any) -> Any:
    """A scalar without secrets, by the rules that hold for command lines."""
    if type(value) is list:
        return [redacted(name, member) for member in cast("list[Any]", value)]
    if type(value) is not str:
        return value
    key = name, value
    text = _redacted_texts.get(key)
    if text is None:
        if len(_redacted_texts) >= _MOST_REDACTED_TEXTS:
            _redacted_texts.clear()
        text = _redacted_texts[key] = redact_value(name, value)
    return text


def attributes_of(table: Mapping[str, Any], skipped: Any = frozenset[str]()) -> Attributes:
    """Scalars and functions in an object's `__dict__`; members of short dicts get dotted names.

    Args:
        table: The `__dict__`; another thread may change it during the call.
        skipped: Names of attributes that every such object has; they are left out.
    """
    scalars: dict[str, Any] = {}
    functions: dict[str, str] = {}
    for name, value in list(table.items()):
        if type(name) is not str or len(name) > _LONGEST_TEXT or name in skipped:
            continue
        if name.startswith(_INTERNAL_PREFIXES):
            continue
        if len(scalars) + len(functions) >= _MOST_ATTRIBUTES:
            break
        try:
            _describe_attribute(name, value, scalars, functions)
        # Objects of a program may raise any exception when they are read.
        except Exception as error:
            scalars[name] = f"not readable: {type(error).__name__}"
    return Attributes(scalars, functions)


def _describe_attribute(
    name: str, value: Any, scalars: dict[str, Any], functions: dict[str, str]
) -> None:
    plain = scalar(value)
    if plain is not NO_SCALAR:
        scalars[name] = redacted(name, plain)
    elif type(value) is dict:
        for key, member in _short_table(cast("dict[Any, Any]", value)):
            scalars[f"{name}.{key}"] = redacted(key, member)
    elif type(value) is list:
        held = cast("list[Any]", value)
        names = [qualified(member) for member in held[:_MOST_ITEMS]]
        # Schedulers keep lists of functions. A list with anything else in it is not a setting.
        if names and all(names):
            # A scheduler often repeats one function for each parameter group.
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
    """Whether an attribute holds a configuration.

    A dict is recognised by the attribute's name. Any other object must have a class that looks like
    a configuration (`LlamaConfig`, or a dataclass), and the attribute's name must say so too unless
    the name of the class ends in `Config`.
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
    """A line for each configuration among a module's attributes.

    `seen` holds the identities of the configurations that already have a line.
    """
    for name, value in list(table.items()):
        if name in own or type(name) is not str:
            continue
        values: dict[str, Any] = {}
        # A class of the program may raise when its name is read.
        with contextlib.suppress(Exception):
            if looks_like_config(name, value):
                values = flat_config(value, seen, "" if site == ROOT else site)
        if values:
            yield line_of("config", site=site, name=name, values=values)


def flat_config(value: Any, seen: set[int], prefix: str = "") -> dict[str, Any]:
    """A configuration as one flat dict with dotted names; objects in `seen` are left out."""
    flat: dict[str, Any] = {}
    waiting: list[tuple[str, Any, int]] = [(prefix, value, 0)]
    while waiting and len(flat) < _MOST_CONFIG:
        name, holder, depth = waiting.pop()
        kind: type[Any] = type(holder)
        # Configurations refer to each other, and some refer to themselves.
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
    """The line of a class: its constants, and the code of `forward` and of functions it calls."""
    constants: dict[str, Any] = {}
    functions: dict[str, Any] = {}
    name = f"{kind.__module__}.{kind.__qualname__}"
    for base in kind.__mro__:
        package = base.__module__.partition(".")[0]
        if package in _LIBRARIES and base is not kind:
            continue
        for key, value in list(base.__dict__.items()):
            plain = NO_SCALAR if key.startswith("_") else scalar(value)
            # Properties and functions are not scalars, so none of them is called here.
            if plain is not NO_SCALAR and key not in constants:
                constants[key] = redacted(key, plain)
    for label, function in _described_functions(kind, forward):
        functions[label] = _described_code(function.__code__)
    return line_of("class", **{"class": name}, code=functions, constants=constants)


def _described_functions(kind: type, forward: str) -> Iterator[tuple[str, types.FunctionType]]:
    """`forward` of a class, then the program's own functions that it may call, breadth first."""
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
        # The version of a library describes its code, so its calls are not followed.
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
def _described_code(code: types.CodeType) -> dict[str, Any]:
    instructions = _instructions(code)
    first = code.co_firstlineno
    texts: dict[int, list[str]] = {}
    for line, text in instructions:
        texts.setdefault(line, []).append(text)
    # Relative to the first line: a function that only moved within its file keeps its numbers.
    lines = {
        str(line - first): f"{zlib.crc32(chr(10).join(parts).encode()):08x}"
        for line, parts in list(texts.items())[:_MOST_LINES]
        if line >= first
    }
    return {
        "digest": _digest(instructions),
        "file": _shortened_path(code.co_filename),
        "line": first,
        "lines": lines,
    }


def _digest(instructions: list[tuple[int, str]]) -> str:
    """A digest of instructions without line numbers: comments and blank lines do not change it."""
    text = "\n".join(text for _, text in instructions)
    digest = hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=12).hexdigest()
    # Another version of Python compiles the same source to other instructions.
    return f"py{sys.version_info.major}.{sys.version_info.minor}:{digest}"


_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))


def _instructions(code: types.CodeType, depth: int = 0) -> list[tuple[int, str]]:
    """Line and text of each instruction, with those of inner functions.

    The texts contain no addresses or offsets, which differ between equal functions.
    """
    listed: list[tuple[int, str]] = []
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        position: Any = getattr(instruction, "positions", None)
        line = getattr(position, "lineno", None) or line
        constant = instruction.argval
        if instruction.opcode in _JUMPS:
            text = instruction.opname  # a target is an offset, and shifts with every change
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


def _shortened_path(name: str) -> str:
    # The folder in which packages are installed says nothing about a model.
    for folder in ("/site-packages/", "/dist-packages/"):
        if folder in name:
            return name.rpartition(folder)[2]
    # The home folder names the user, and facts may be attached to bug reports.
    try:
        return "~/" + Path(name).relative_to(Path.home()).as_posix()
    except (ValueError, RuntimeError):
        return name


# Writing.


class FactsFile:
    """Lines for the sidecars of one capture, kept in memory until the run has a folder.

    A run without tensors has no folder, and facts alone must not create one.
    """

    def __init__(self, write: Callable[[str, str], None], ready: Callable[[], bool]) -> None:
        """
        Args:
            write: Appends text to a sidecar of the run.
            ready: Returns whether the run has its folder.
        """
        self._write = write
        self._ready = ready
        self._waiting: list[tuple[str, str]] = []
        self._written = 0.0

    def add(self, name: str, text: str) -> None:
        """Add lines for a file; any thread may call this."""
        self._waiting.append((name, text))

    def flush(self, *, at_once: bool = True) -> None:
        """Write the lines that wait, if the run has its folder.

        Args:
            at_once: Write now. If False, write only when the last time was a while ago: opening a
                file each time would slow down a program whose steps are short.
        """
        if not self._waiting or not self._ready():
            return
        now = time.monotonic()
        if not at_once and now - self._written < _FLUSH_SECONDS:
            return
        self._written = now
        # Exchange the list first: the thread that reads weights may add lines meanwhile.
        waiting, self._waiting = self._waiting, []
        texts: dict[str, list[str]] = {}
        for name, text in waiting:
            texts.setdefault(name, []).append(text)
        for name, parts in texts.items():
            self._write(name, "".join(parts))
