"""Notices optimizers: which gradients they are given, and when a step of theirs is over.

Paddle has no hooks for this, and every optimizer may bring its own `step`. So `step` is wrapped
wherever a class defines it, also in classes that are made later, and the outermost call counts. A
parallel wrapper goes straight to `_apply_optimize`, as `minimize` does: outside a `step` that is
one. Gradients are looked at between clipping and weight decay: what torch's optimizers find.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any

import paddle

_Optimizer: Any = paddle.optimizer.Optimizer
_OURS = "_driftline_original"

Stepped = Callable[[], None]
Given = Callable[[Any, list[tuple[Any, Any]]], None]
"""Takes an optimizer and its (parameter, gradient) pairs."""

_lock = threading.Lock()
_stepped: list[Stepped] = []
_given: list[Given] = []
_wrapped: list[tuple[Any, str]] = []


class _Depth(threading.local):
    value = 0


_depth = _Depth()


def watch(stepped: Stepped) -> None:
    """Call `stepped` after every step of any optimizer."""
    _add(_stepped, stepped)


def unwatch(stepped: Stepped) -> None:
    _drop(_stepped, stepped)


def watch_gradients(given: Given) -> None:
    """Call `given` with the gradients of every step, before they are used."""
    _add(_given, given)


def unwatch_gradients(given: Given) -> None:
    _drop(_given, given)


def _add(listeners: list[Any], one: Any) -> None:
    with _lock:
        if not _stepped and not _given:
            _wrap_all()
        listeners.append(one)


def _drop(listeners: list[Any], one: Any) -> None:
    with _lock:
        if one in listeners:
            listeners.remove(one)
        if not _stepped and not _given:
            _unwrap_all()


def _wrap_all() -> None:
    _wrap(_Optimizer, "__init__", _on_making)
    _wrap(_Optimizer, "_apply_optimize", _on_applying)
    _wrap(_Optimizer, "append_regularization_ops", _on_regularizing)
    for kind in _with_subclasses(_Optimizer):
        _wrap_step(kind)


def _wrap_step(kind: Any) -> None:
    if "step" in vars(kind) and not hasattr(vars(kind)["step"], _OURS):
        _wrap(kind, "step", _on_step)


def _wrap(kind: Any, name: str, instead: Callable[..., Any]) -> None:
    original = vars(kind).get(name)
    if original is None or not callable(original):
        return

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return instead(original, self, *args, **kwargs)

    setattr(call, _OURS, original)
    setattr(kind, name, call)
    _wrapped.append((kind, name))


def _unwrap_all() -> None:
    for kind, name in reversed(_wrapped):
        # Somebody else may have wrapped it after us; then ours stays below, doing nothing.
        original = getattr(vars(kind).get(name), _OURS, None)
        if original is not None:
            setattr(kind, name, original)
    _wrapped.clear()


def _with_subclasses(kind: Any) -> Iterable[Any]:
    yield kind
    for below in kind.__subclasses__():
        yield from _with_subclasses(below)


def _on_making(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """An optimizer is made: its class may have come into being after the watch began."""
    with _lock:
        if _stepped or _given:
            for kind in type(self).__mro__:
                if issubclass(kind, _Optimizer):
                    _wrap_step(kind)
    return original(self, *args, **kwargs)


def _on_step(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    _depth.value += 1
    try:
        result = original(self, *args, **kwargs)
    finally:
        _depth.value -= 1
    if _depth.value == 0:
        _tell_stepped()
    return result


def _on_applying(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    group = kwargs.get("param_group_idx", args[3] if len(args) > 3 else 0)
    if _depth.value == 0 and group == 0 and paddle.in_dynamic_mode():
        _tell_stepped()
    return result


def _on_regularizing(
    original: Callable[..., Any], self: Any, pairs: Any, *args: Any, **kwargs: Any
) -> Any:
    if _given and isinstance(pairs, list) and paddle.in_dynamic_mode():
        for given in tuple(_given):
            given(self, pairs)
    return original(self, pairs, *args, **kwargs)


def _tell_stepped() -> None:
    for stepped in tuple(_stepped):
        stepped()
