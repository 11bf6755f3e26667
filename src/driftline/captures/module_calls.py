"""Parts of a module call's wrapper that all frameworks share.

Taps are notified, failures are reported, and Python's recursion limit is raised by the number of
frames that capture adds. Each framework's own `module_calls.py` intercepts its calls.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from typing import Any

from driftline.captures.calls import Frame

_LONGEST_EXCEPTION = 200


def tell_taps(session: Any, frame: Frame, *, outermost: bool) -> None:
    """Notify the taps just before a module runs; enter their contexts around an outermost call."""
    if outermost:
        # Operator and gradient taps install their modes around the outermost call only.
        frame.around = contextlib.ExitStack()
        for tap in session.taps:
            session.guarded(frame.site, frame.around.enter_context, tap.around_root(frame.module))
    for tap in session.taps:
        session.guarded(frame.site, tap.before_forward, frame, frame.inputs)


def note_failure(session: Any, frame: Frame, error: BaseException) -> None:
    """Report the module in which an exception was raised, once per exception."""
    # The same exception object passes through every outer module; the innermost one comes first.
    thread = session.thread
    first = thread.failure != id(error)
    thread.failure = id(error) if len(thread.stack) > 1 else 0
    if frame.recompute:  # checkpointing stops its recomputation with an exception
        return
    if len(thread.stack) == 1:
        session.unfinished_step = frame.step
    if not first:
        return
    session.event(
        "exception",
        f"{type(error).__name__} was raised inside {frame.site}",
        site=frame.site,
        step=frame.step,
    )


def exception_words(error: BaseException) -> str:
    """An exception in one line: its class and the beginning of its message."""
    try:
        text = str(error).strip().partition("\n")[0][:_LONGEST_EXCEPTION]
    except Exception:  # an exception of the program may fail to describe itself
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def fault(session: Any, module: object, error: Exception) -> None:
    """Turn an error of the capture itself into an event; the program goes on."""

    # `guarded` formats the traceback of a raised exception, so the error is raised again inside it.
    def again() -> None:
        raise error

    session.guarded(type(module).__name__, again)


def optimizer_stepped(sessions: Iterable[Any]) -> None:
    """Notify the step clocks of all sessions that an optimizer has updated parameters."""
    for session in sessions:
        session.guarded("optimizer", session.clock.optimizer_stepped)


# Recursion limit: with hundreds of nested modules, the frames that capture adds could exceed it.


DEEP = 32
"""The limit is raised once per this many levels of nested modules."""
# At most this many frames are added per module call; calls from C count too.
_OWN_FRAMES = 6


def raise_recursion_limit() -> int:
    """Raise the recursion limit by the capture's own frames; return it, or 0 if refused."""
    # The program may already have set the largest possible limit.
    with contextlib.suppress(ValueError, OverflowError):
        limit = sys.getrecursionlimit() + _OWN_FRAMES * DEEP
        sys.setrecursionlimit(limit)
        return limit
    return 0


def restore_recursion_limit(limit: int) -> None:
    """Lower the recursion limit again."""
    if sys.getrecursionlimit() == limit:  # otherwise the program has set a limit meanwhile
        # Python refuses a limit below the current depth.
        with contextlib.suppress(RecursionError):
            sys.setrecursionlimit(limit - _OWN_FRAMES * DEEP)
