"""What gradients need to know of the call they belong to, in whichever framework."""

from __future__ import annotations

import threading
import weakref
from typing import Any, Generic, Protocol, TypeVar

_STEPS_REMEMBERED = 4


class Visits:
    """Hands out visit numbers that stay unique when one call is passed backward more than once."""

    def __init__(self) -> None:
        self._taken: dict[int, dict[str, set[int]]] = {}
        self._lock = threading.Lock()

    def claim(self, site: str, step: int, wish: int) -> int:
        with self._lock:
            if step not in self._taken:
                self._taken[step] = {}
                while len(self._taken) > _STEPS_REMEMBERED:
                    del self._taken[min(self._taken)]
            taken = self._taken.setdefault(step, {}).setdefault(site, set())
            while wish in taken:
                wish += 1
            taken.add(wish)
            return wish


class Contributions:
    """Counts what each parameter has been given in one step: its visits."""

    def __init__(self) -> None:
        self._step = -1
        self._counts: dict[tuple[str, str, str], int] = {}

    def number(self, step: int, port: str, site: str, name: str) -> int:
        """Which one of this step the next contribution is."""
        if step != self._step:
            self._step = step
            self._counts.clear()
        place = (port, site, name)
        visit = self._counts.get(place, 0)
        self._counts[place] = visit + 1
        return visit


class _Tap(Protocol):
    visits: Visits


Tap = TypeVar("Tap", bound=_Tap)


class PassedCall(Generic[Tap]):
    """One call of one module, as its gradients need to know it."""

    __slots__ = ("_task", "_visit", "_visit_now", "class_name", "site", "step", "tap")

    def __init__(self, tap: Tap, frame: Any) -> None:
        # Weak: hooks may live as long as the program keeps the graph, longer than the session.
        self.tap = weakref.ref(tap)
        self.site: str = frame.site
        self.class_name: str = frame.class_name
        self.step: int = frame.step
        self._visit: int = frame.visit
        self._visit_now: int = frame.visit
        self._task = -1

    def visit_in(self, task: int) -> int:
        """The visit number of this call in one backward pass."""
        if task != self._task:
            self._task = task
            tap = self.tap()
            if tap is not None:
                self._visit_now = tap.visits.claim(self.site, self.step, self._visit)
        return self._visit_now
