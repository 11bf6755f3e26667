"""Results of collectives: taken when the program itself waits for them, never before.

Such a tensor has no values until its collective is done, and waiting for that in the program's
place could make a rank wait for another one that waits for it. So it is put aside, and taken in
the moment the program's own wait is over, before anything is computed with it. What the program
never waits for is never taken.
"""

# pyright: reportUnknownMemberType=false
from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

Take = Callable[[Any], None]

_lock = threading.RLock()
_waiting: dict[int, list[tuple[torch.Tensor, Take]]] = {}
"""By place in memory: views share it, and waiting for one of them is waiting for all."""
_watched: set[type] = set()


def when_there(tensor: Any) -> Callable[[Take], None]:
    """Hands the values behind an awaited tensor on: now, if they are there, else when they are."""

    def arrange(take: Take) -> None:
        inner: torch.Tensor = tensor.elem
        if tensor.completed:
            take(inner)
            return
        with _lock:
            _watch(type(tensor))
            _waiting.setdefault(_place(inner), []).append((inner, take))

    return arrange


def forget() -> int:
    """The program is over; returns how many tensors it never waited for."""
    with _lock:
        left = sum(map(len, _waiting.values()))
        _waiting.clear()
    return left


def _watch(kind: Any) -> None:
    """Stays: without anything put aside it costs one look at an empty dictionary."""
    if kind in _watched:
        return
    _watched.add(kind)
    for name in ("trigger_wait", "wait"):
        setattr(kind, name, _after(getattr(kind, name)))


def _after(wait: Callable[[Any], torch.Tensor]) -> Callable[[Any], torch.Tensor]:
    @functools.wraps(wait)
    def waited(tensor: Any) -> torch.Tensor:
        result = wait(tensor)
        if _waiting:
            _arrived(tensor.elem)
        return result

    return waited


def _arrived(inner: torch.Tensor) -> None:
    from driftline.adapters.torch.snapshot import undisturbed

    with undisturbed():
        with _lock:
            there = _waiting.pop(_place(inner), [])
        for tensor, take in there:
            take(tensor)


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
