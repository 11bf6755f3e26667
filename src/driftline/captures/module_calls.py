"""What happens around a call of a module, in whichever framework it is noticed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from typing import Any

from driftline.captures.calls import Frame


def tell_taps(session: Any, frame: Frame, *, outermost: bool) -> None:
    """The last thing before a module runs: tell the taps; an outermost call is enclosed."""
    if outermost:
        frame.around = contextlib.ExitStack()
        for tap in session.taps:
            session.shielded(frame.site, frame.around.enter_context, tap.around_root(frame.module))
    for tap in session.taps:
        session.shielded(frame.site, tap.before_forward, frame, frame.inputs)


def note_failure(session: Any, frame: Frame, error: BaseException) -> None:
    """Say where an exception came from; on its way through the outer modules it is known."""
    thread = session.thread
    first = thread.failure != id(error)
    thread.failure = id(error) if len(thread.stack) > 1 else 0
    if frame.recompute or not first:  # checkpointing stops its recomputation with an exception
        return
    session.event(
        "exception",
        f"{type(error).__name__} was raised inside {frame.site}",
        site=frame.site,
        step=frame.step,
    )


def fault(session: Any, module: object, error: Exception) -> None:
    """An error of ours while a module was called: an event, and the program goes on."""

    def again() -> None:
        raise error

    session.shielded(type(module).__name__, again)


def optimizer_stepped(sessions: Iterable[Any]) -> None:
    """Some optimizer has made its step."""
    for session in sessions:
        session.shielded("optimizer", session.clock.optimizer_stepped)


# Room on Python's stack for the capture's own frames: modules nested by the hundred need it.


DEEP = 32
"""Every so many levels of modules the limit is raised."""
_OWN_FRAMES = 6  # at most, for each module call: the wrapper's own, and calls from C count too


def more_room() -> int:
    """Raise the limit by what our own frames take of it; returns what it is then."""
    with contextlib.suppress(ValueError, OverflowError):
        limit = sys.getrecursionlimit() + _OWN_FRAMES * DEEP
        sys.setrecursionlimit(limit)
        return limit
    return 0


def give_room_back(limit: int) -> None:
    """Lower it again."""
    if sys.getrecursionlimit() == limit:  # else the program has set its own meanwhile
        with contextlib.suppress(RecursionError):
            sys.setrecursionlimit(limit - _OWN_FRAMES * DEEP)
