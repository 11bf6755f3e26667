"""Notices backward passes: from which tensors one begins, and when it is over.

A pass may run passes of its own: recomputation differentiates what it has computed again. Those
belong to the outermost one.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any, Protocol

from paddle.base import core

_eager: Any = core.eager
_NAMES = ("run_backward", "run_partial_grad")


class Listener(Protocol):
    """Told of every pass of the process; never raises."""

    def begins(self, roots: list[Any]) -> None:
        """A pass, or one within a pass, is about to begin at these tensors."""
        ...

    def over(self) -> None:
        """The outermost pass is over, or has failed."""
        ...


class _Pass(threading.local):
    depth = 0
    number = 0


_lock = threading.Lock()
_listeners: list[Listener] = []
_plain: dict[str, Callable[..., Any]] = {}
_ours: dict[str, Callable[..., Any]] = {}
_numbers = itertools.count(1)
_pass = _Pass()


def number() -> int:
    """The number of the pass that is under way in this thread, or of its last one."""
    return _pass.number


def watch(listener: Listener) -> None:
    with _lock:
        if not _listeners:
            for name in _NAMES:
                _plain[name] = getattr(_eager, name)
                _ours[name] = _telling(_plain[name])
                setattr(_eager, name, _ours[name])
        _listeners.append(listener)


def unwatch(listener: Listener) -> None:
    with _lock:
        if listener not in _listeners:
            return
        _listeners.remove(listener)
        for name in () if _listeners else _NAMES:
            # Somebody else may have wrapped it after us; then ours stays below, doing nothing.
            if getattr(_eager, name) is _ours[name]:
                setattr(_eager, name, _plain[name])


def _telling(plain: Callable[..., Any]) -> Callable[..., Any]:
    def run(roots: Any, *args: Any, **kwargs: Any) -> Any:
        if not _pass.depth:
            _pass.number = next(_numbers)
        for listener in tuple(_listeners):
            listener.begins([*roots] if isinstance(roots, (list, tuple)) else [roots])
        _pass.depth += 1
        try:
            return plain(roots, *args, **kwargs)
        finally:
            _pass.depth -= 1
            if not _pass.depth:
                for listener in tuple(_listeners):
                    listener.over()

    return run
