"""Around a module call: steps that every framework's wrapper takes.

Taps are informed, failures are noted, and Python's recursion limit is raised for the frames that
capture itself adds. How a framework's calls are intercepted is in its own `module_calls.py`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from typing import Any

from driftline.captures.calls import Frame

_LONGEST_EXCEPTION = 200


def tell_taps(session: Any, frame: Frame, *, outermost: bool) -> None:
    """The last thing before a module runs: tell the taps; an outermost call is enclosed."""
    if outermost:
        # Operator and gradient taps install their modes around the outermost call only.
        frame.around = contextlib.ExitStack()
        for tap in session.taps:
            session.guarded(frame.site, frame.around.enter_context, tap.around_root(frame.module))
    for tap in session.taps:
        session.guarded(frame.site, tap.before_forward, frame, frame.inputs)


def note_failure(session: Any, frame: Frame, error: BaseException) -> None:
    """Report the module an exception was raised in, once per exception."""
    # The same exception object passes through every outer module; only the innermost is its
    # origin.
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
    """An exception in one line: its class and the beginning of what it says."""
    try:
        text = str(error).strip().partition("\n")[0][:_LONGEST_EXCEPTION]
    except Exception:  # an exception of the program may fail to describe itself
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def fault(session: Any, module: object, error: Exception) -> None:
    """Turn an error of the capture itself into an event; the program goes on."""

    # `guarded` formats the traceback of a raised exception, so the error is raised again for
    # it.
    def again() -> None:
        raise error

    session.guarded(type(module).__name__, again)


def optimizer_stepped(sessions: Iterable[Any]) -> None:
    """Some optimizer has made its step."""
    for session in sessions:
        session.guarded("optimizer", session.clock.optimizer_stepped)


# Recursion limit: the capture's own frames need room where modules nest by the hundred.


DEEP = 32
"""The limit is raised once per this many levels of nested modules."""
_OWN_FRAMES = 6  # at most, for each module call: the wrapper's own, and calls from C count too


def raise_recursion_limit() -> int:
    """Raise the recursion limit by the capture's own frames; returns it, 0 if refused."""
    # The program may have set the largest limit there is.
    with contextlib.suppress(ValueError, OverflowError):
        limit = sys.getrecursionlimit() + _OWN_FRAMES * DEEP
        sys.setrecursionlimit(limit)
        return limit
    return 0


def restore_recursion_limit(limit: int) -> None:
    """Lower the recursion limit again."""
    if sys.getrecursionlimit() == limit:  # else the program has set its own meanwhile
        # Python refuses a limit below the current depth.
        with contextlib.suppress(RecursionError):
            sys.setrecursionlimit(limit - _OWN_FRAMES * DEEP)
