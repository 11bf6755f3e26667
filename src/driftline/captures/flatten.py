"""Flatten the arguments and results of a call into a list of named tensors.

All frameworks share these rules, so that their slots can be compared; the adapter supplies the
tensor type. A slot is an argument's name, or a path through nested containers
(`past_key_values.3.0`). Its alias is the same path written with positions, so that a call by
position matches a call by name, and a tuple matches a `ModelOutput`. Only the stored contents of
containers are read; no property or iterator of the program is run.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

import dataclasses
import inspect
import types
from collections import UserDict, deque
from collections.abc import Callable
from typing import Any

Tensors = list[tuple[str, str, Any]]
"""Slot, alias and tensor."""

# Limits for containers that contain themselves, or that hold very many tensors.
MAX_DEPTH = 8
MAX_TENSORS = 4096
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_CACHE_HOME = "transformers.cache_utils"
# Special values of `cache`, which otherwise is the index of a layer.
WHOLE_CACHE = -1
NO_CACHE = -2


class Binding:
    """Names of a forward function's positional arguments, and the position of each name."""

    __slots__ = ("names", "positions")

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.positions = {name: str(i) for i, name in enumerate(names)}


_BINDINGS: dict[types.CodeType, Binding] = {}
_NO_NAMES = Binding(())


def binding_of(forward: Callable[..., Any]) -> Binding:
    """The names of a bound forward's positional arguments, looked up once per function."""
    function = getattr(forward, "__func__", forward)
    code = getattr(function, "__code__", None)
    if code is None:
        # A callable of a C extension has no code object, which would be the key of the cache.
        return _read_binding(forward)
    # All functions that one decorator wraps share the wrapper's code, so the code of the wrapped
    # function is the key.
    if hasattr(function, "__wrapped__"):
        inner = inspect.unwrap(function)
        code = getattr(inner, "__code__", code)
    binding = _BINDINGS.get(code)
    if binding is None:
        binding = _BINDINGS[code] = _read_binding(forward)
    return binding


def _read_binding(forward: Callable[..., Any]) -> Binding:
    try:
        parameters = inspect.signature(forward).parameters.values()
    # Some built-in callables have no signature; their arguments are named by position.
    except (TypeError, ValueError):
        return _NO_NAMES
    return Binding(
        tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
    )


class Flatten:
    """Flattens the calls of one framework.

    Args:
        tensor: The framework's tensor type.
        plain: Further types of arguments that hold no tensors.
    """

    def __init__(self, tensor: type, plain: tuple[type, ...]) -> None:
        self._tensor = tensor
        self._plain = (*_PLAIN, *plain)

    def inputs(
        self,
        binding: Binding,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        cache: int = WHOLE_CACHE,
    ) -> Tensors:
        """The tensors of a call's arguments.

        Args:
            binding: Names of the positional arguments.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
            cache: Index of the layer to read of a key-value cache object, WHOLE_CACHE or NO_CACHE.
        """
        tensors: Tensors = []
        names, tensor, plain = binding.names, self._tensor, self._plain
        for i, value in enumerate(args):
            position = str(i)
            slot = names[i] if i < len(names) else position
            if isinstance(value, tensor):
                tensors.append((slot, "" if slot == position else position, value))
            elif not isinstance(value, plain):
                self._walk(value, slot, position, tensors, 0, cache)
        for name, value in kwargs.items():
            alias = binding.positions.get(name)
            if isinstance(value, tensor):
                tensors.append((name, alias or "", value))
            elif not isinstance(value, plain):
                self._walk(value, name, alias, tensors, 0, cache)
        # A single tensor cannot have a name clash.
        return _distinct(tensors) if len(tensors) > 1 else tensors

    def outputs(self, value: Any, cache: int = WHOLE_CACHE) -> Tensors:
        """The tensors of a returned value; a single tensor has slot `0`."""
        if isinstance(value, self._tensor):
            return [("0", "", value)]
        tensors: Tensors = []
        if not isinstance(value, self._plain):
            self._walk(value, "", "", tensors, 0, cache)
        return _distinct(tensors) if len(tensors) > 1 else tensors

    def _walk(
        self, value: Any, slot: str, alias: str | None, tensors: Tensors, depth: int, cache: int
    ) -> None:
        """Collect the tensors inside a value; `alias` is None if the value has no position."""
        if isinstance(value, self._tensor):
            tensors.append((slot or "0", "" if alias is None or alias == slot else alias, value))
            return
        if isinstance(value, self._plain) or depth >= MAX_DEPTH or len(tensors) >= MAX_TENSORS:
            return
        for name, position, item in self._items(value, cache):
            if item is not None:
                below = None if alias is None else _join(alias, position)
                self._walk(item, _join(slot, name), below, tensors, depth + 1, cache)

    def _items(self, value: Any, cache: int) -> list[tuple[str, str, Any]]:
        """(name, position, item) of each stored item of a container."""
        return _cache_items(value, cache, self._tensor) if _is_cache(type(value)) else _items(value)


def _distinct(tensors: Tensors) -> Tensors:
    """The tensors with distinct slots: `{"a": {"b": x}, "a.b": y}` gives `a.b` and `a.b~1`."""
    if len({slot for slot, _, _ in tensors}) == len(tensors):
        return tensors
    used_names: set[str] = set()
    renamed: Tensors = []
    for slot, alias, tensor in tensors:
        name, count = slot, 0
        while name in used_names:
            count += 1
            name = f"{slot}~{count}"
        used_names.add(name)
        renamed.append((name, alias if name == slot else "", tensor))
    return renamed


def _join(path: str, part: str) -> str:
    return f"{path}.{part}" if path else part


def _items(value: Any) -> list[tuple[str, str, Any]]:
    """(name, position, item) of each stored item of a container."""
    kind = type(value)
    # The unbound `tuple.__iter__` is called, because the `__iter__` of a subclass may run code of
    # the program.
    if issubclass(kind, tuple):
        fields = getattr(kind, "_fields", None)
        # A namedtuple subclass may hold more items than fields; the field names would be wrong.
        named = fields is not None and len(fields) == tuple.__len__(value)
        return [
            (fields[i] if fields is not None and named else str(i), str(i), item)
            for i, item in enumerate(tuple.__iter__(value))
        ]
    if issubclass(kind, list | deque):
        base: Any = list if issubclass(kind, list) else deque
        return [(str(i), str(i), item) for i, item in enumerate(base.__iter__(value))]
    if issubclass(kind, dict):
        # `ModelOutput` omits None from its tuple form, so positions count only other values.
        present = [(k, v) for k, v in dict.items(value) if v is not None]
        return [(str(k), str(i), v) for i, (k, v) in enumerate(present)]
    if issubclass(kind, UserDict):
        return [(str(k), str(i), v) for i, (k, v) in enumerate(value.__dict__["data"].items())]
    names = _field_names(value, kind)
    stored = [(name, _stored(value, name)) for name in names]
    present = [(name, item) for name, item in stored if item is not None]
    return [(name, str(i), item) for i, (name, item) in enumerate(present)]


def _field_names(value: Any, kind: type) -> list[str]:
    """The declared fields of a dataclass or similar record; none for objects of other classes."""
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    if kind is types.SimpleNamespace:
        return list(vars(value))
    attributes = kind.__dict__.get("__attrs_attrs__", ())
    return [attribute.name for attribute in attributes]


def _stored(thing: Any, name: str) -> Any:
    """An attribute as stored in the instance or a slot of its class; never a property."""
    table = getattr(thing, "__dict__", None)
    if table is not None and name in table:
        return table[name]
    member = inspect.getattr_static(type(thing), name, None)
    if isinstance(member, types.MemberDescriptorType):
        try:
            return member.__get__(thing, type(thing))
        except AttributeError:
            # A slot that was declared but never assigned.
            return None
    return None


def _is_cache(kind: type) -> bool:
    return any(base.__module__ == _CACHE_HOME for base in kind.__mro__)


def _cache_items(value: Any, cache: int, tensor: type) -> list[tuple[str, str, Any]]:
    """Items of a key-value cache of transformers, named as in the nested tuples it used to be.

    The first level is the layer; below it, 0 is the keys and 1 the values. Every layer gets the
    whole cache as an argument but uses only its own part. Reading the whole cache for each layer
    would take time quadratic in the number of layers.
    """
    if cache == NO_CACHE:
        return []
    stored: dict[str, Any] = vars(value)
    # Newer versions of transformers: one object per layer.
    if "layers" in stored and isinstance(stored["layers"], list):
        layers = list(enumerate(stored["layers"]))
        return [(str(i), str(i), layer) for i, layer in layers if cache in (WHOLE_CACHE, i)]
    if "keys" in stored and "values" in stored:
        return [("0", "0", stored["keys"]), ("1", "1", stored["values"])]
    # Older versions of transformers: two parallel lists.
    if "key_cache" in stored and "value_cache" in stored:
        pairs = list(enumerate(zip(stored["key_cache"], stored["value_cache"], strict=False)))
        return [(str(i), str(i), pair) for i, pair in pairs if cache in (WHOLE_CACHE, i)]
    return [
        (name, str(i), item)
        for i, (name, item) in enumerate(stored.items())
        if isinstance(item, (tensor, list, tuple, dict)) or _is_cache(type(item))
    ]
