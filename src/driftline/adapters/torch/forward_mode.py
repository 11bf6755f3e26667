"""Whether a level of forward-mode differentiation is open, and who wants to know when one is.

Inside a level (`torch.func.jvp`, `jacfwd`, `torch.autograd.forward_ad.dual_level`, ...) torch
chooses the formulas of tangents anew at each operator, and chooses others, with other last bits,
as soon as any dispatch mode is on. Which operators those are is not known here, nor what a mode is.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch.autograd import forward_ad

_forward_ad: Any = forward_ad
_open = False
_opened: Callable[[], None] | None = None
_closed: Callable[[], None] | None = None
_replaced: list[tuple[Any, str, Callable[..., Any], Callable[..., Any]]] = []


def is_open() -> bool:
    """Whether a level is open. Levels belong to the process, not to a thread."""
    return _open


def _doors() -> tuple[Any, str, str]:
    """Where torch opens and closes a level: a module, and two names that it looks up each time.

    The inner pair, where there is one: compiled graphs and programs that imported the outer one by
    name before us come through it too.
    """
    inner: Any = sys.modules.get("torch._functorch.predispatch")
    names = ("_enter_dual_level_impl", "_exit_dual_level_impl")
    if inner is not None and all(hasattr(inner, name) for name in names):
        return (inner, *names)
    return _forward_ad, "enter_dual_level", "exit_dual_level"


def follow(opened: Callable[[], None], closed: Callable[[], None]) -> None:
    """Call `opened` before the outermost level is opened, and `closed` after it is closed."""
    global _open, _opened, _closed
    _opened, _closed = opened, closed
    _open = _forward_ad._current_level >= 0
    where, enter_name, exit_name = _doors()
    enter, leave = getattr(where, enter_name), getattr(where, exit_name)

    def watched_enter() -> int:
        global _open
        if _open or _opened is None:
            return enter()
        _open = True
        _opened()
        try:
            return enter()
        except BaseException:
            _now_closed()
            raise

    def watched_leave(*, level: int | None = None) -> None:
        inmost = _forward_ad._current_level if level is None else level
        leave(level=level)
        if inmost == 0 and _open:
            _now_closed()

    for name, plain, watched in (
        (enter_name, enter, watched_enter),
        (exit_name, leave, watched_leave),
    ):
        setattr(where, name, watched)
        _replaced.append((where, name, plain, watched))


def _now_closed() -> None:
    global _open
    _open = False
    if _closed is not None:
        _closed()


def unfollow() -> None:
    """Call nobody any more; torch gets its own functions back."""
    global _opened, _closed
    _opened = _closed = None
    for where, name, plain, watched in _replaced:
        # Somebody else may have wrapped it after us; then ours stays below, doing nothing.
        if getattr(where, name) is watched:
            setattr(where, name, plain)
    _replaced.clear()
