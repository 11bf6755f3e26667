"""Which operator call of the program a node of a traced graph stems from.

A compiler that traces a program takes operators apart (a softmax becomes six nodes) and throws
nodes away. What it keeps of their origin is the operator's name, not which call of it. Here every
call is counted before it is taken apart, and the nodes that give its results are stamped with
operator and number; so a graph that was taken apart and one that was not speak of the same calls.

Stamps lie in a node's `meta`, which the compiler hands on and otherwise ignores.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch

from driftline.runs.graphs import Origin

STAMP = "driftline_origins"
_proxy: Any = None
_original: Any = None
_users = 0
_lock = threading.Lock()


class _Thread(threading.local):
    depth = 0


_thread = _Thread()


class _Counts:
    """Calls of one trace so far, by operator, and by module and operator."""

    __slots__ = ("by_module", "by_operator")

    def __init__(self) -> None:
        self.by_operator: dict[str, int] = {}
        self.by_module: dict[tuple[str, str], int] = {}

    def next(self, operator: str, module: str | None) -> tuple[int, int]:
        number = self.by_operator.get(operator, 0)
        self.by_operator[operator] = number + 1
        if module is None:
            return number, -1
        nth = self.by_module.get((module, operator), 0)
        self.by_module[module, operator] = nth + 1
        return number, nth


def install() -> bool:
    """Begin to stamp; False where this version of torch has no such place."""
    global _proxy, _original, _users
    with _lock:
        _users += 1
        if _original is not None:
            return True
        _proxy = importlib.import_module("torch.fx.experimental.proxy_tensor")
        if not all(hasattr(_proxy, name) for name in ("proxy_call", "get_proxy_slot")):
            return False
        _original = _proxy.proxy_call
        _proxy.proxy_call = _call
        return True


def remove() -> None:
    global _original, _users
    with _lock:
        _users -= 1
        if _users or _original is None:
            return
        if _proxy.proxy_call is _call:
            _proxy.proxy_call = _original
        _original = None


def of_node(node: Any) -> tuple[Origin, ...]:
    """The calls whose results a node gives."""
    return tuple(Origin(*stamp) for stamp in node.meta.get(STAMP, ()))


def _call(mode: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    """What stands in for `proxy_call`: one operator of a program that is traced."""
    original = _original or _proxy.proxy_call
    if _thread.depth:  # what an operator is taken apart into
        return original(mode, func, *args, **kwargs)
    _thread.depth = 1
    try:
        result = original(mode, func, *args, **kwargs)
    finally:
        _thread.depth = 0
    if result is not NotImplemented:
        try:
            _stamp(mode.tracer, func, result)
        except Exception:  # the compiler goes on; the node has no origin then
            return result
    return result


def _stamp(tracer: Any, func: Any, result: Any) -> None:
    counts = tracer.__dict__.get(STAMP)
    if counts is None:
        counts = tracer.__dict__[STAMP] = _Counts()
    operator = str(func)
    number, nth = counts.next(operator, _module_now())
    for slot, tensor in _tensors(result, ""):
        held = _proxy.get_proxy_slot(tensor, tracer, None)
        proxy = getattr(held, "proxy", held)
        node = getattr(proxy, "node", None)
        if node is not None:
            # A new list each time: the meta of a node is copied to others with all it holds.
            before = node.meta.get(STAMP, [])
            node.meta[STAMP] = [*before, [operator, number, slot or "0", nth]]


def _module_now() -> str | None:
    """The module whose forward is traced; None in a backward pass, where torch does not say."""
    traceback: Any = importlib.import_module("torch.fx.traceback")
    meta: dict[str, Any] = traceback.current_meta
    if "grad_fn_seq_nr" in meta and meta.get("in_grad_fn", 0):
        return None
    stack = meta.get("nn_module_stack")
    return str(next(reversed(stack))).partition("@")[0] if stack else ""


def _tensors(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(cast("Sequence[Any]", value)):
            yield from _tensors(part, f"{path}.{index}" if path else str(index))
