"""Gradients of module calls and parameters: the parts that all frameworks share.

The file keeps track of the call to which a gradient belongs, numbers visits if several backward
passes go through a call, and adds up the parts of an input's gradient. Each framework's own
`gradients.py` places hooks in the backward graph.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any, Generic, NamedTuple, TypeVar

from driftline.captures.recorder import TensorAddress

# There are no more backward passes of older steps, so their visit numbers can be forgotten.
_STEPS_REMEMBERED = 4


class Visits:
    """Assigns visit numbers that are unique even if several backward passes go through a call."""

    def __init__(self) -> None:
        self._taken: dict[int, dict[str, set[int]]] = {}
        self._lock = threading.Lock()

    def claim(self, site: str, step: int, visit: int) -> int:
        with self._lock:
            if step not in self._taken:
                self._taken[step] = {}
                # The oldest steps are forgotten, so that the table stays small in long programs.
                while len(self._taken) > _STEPS_REMEMBERED:
                    del self._taken[min(self._taken)]
            used = self._taken.setdefault(step, {}).setdefault(site, set())
            # A second backward pass through the same call gets the next free number.
            while visit in used:
                visit += 1
            used.add(visit)
            return visit


class Owner(NamedTuple):
    """The owner of a parameter: the module's site, the name in it, and the module's class."""

    site: str
    name: str
    class_name: str


class Contributions:
    """Captures gradient contributions to parameters, numbered as visits in each step."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._step = -1
        self._counts: dict[tuple[str, str, str], int] = {}

    def take(self, port: str, owner: Owner, gradient: Any) -> None:
        """Record one more contribution; never raises."""
        session = self._session
        try:
            # An optimizer may already have ended the step to which the gradient belongs.
            step: int = session.clock.concluding
            visit = self._number(step, port, owner)
            address = TensorAddress(
                owner.site, port, owner.name, step, visit, class_name=owner.class_name
            )
            session.emit(address, gradient)
        # A hook must not raise into the backward pass of the program.
        except Exception as error:
            session.event_once(
                "gradient-lost", f"{port} of {owner.site}.{owner.name} not captured: {error}"
            )

    def _number(self, step: int, port: str, owner: Owner) -> int:
        if step != self._step:
            self._step = step
            self._counts.clear()
        place = (port, owner.site, owner.name)  # the class is not part of a record's key
        visit = self._counts.get(place, 0)
        self._counts[place] = visit + 1
        return visit


class CallGradients(ABC):
    """Base of the taps that capture the gradients of calls."""

    def __init__(self, session: Any) -> None:
        self.session = session
        self.active = False
        self.visits = Visits()

    @abstractmethod
    def task(self) -> int:
        """The number of the backward pass that is running."""

    def undisturbed(self) -> AbstractContextManager[None]:
        """A context in which tensors are added without being seen by the program."""
        context: AbstractContextManager[None] = self.session.undisturbed()
        return context

    @abstractmethod
    def expect(self, gradient_sum: GradientSum[Any], task: int) -> None:
        """Finish an incomplete gradient of an input when this backward pass is over.

        Some edges may never send a gradient, if the loss does not depend on every output.
        """

    def emit(
        self, call: PassedCall[Any], port: str, slot: str, alias: str, gradient: Any, task: int
    ) -> None:
        address = TensorAddress(
            call.site,
            port,
            slot,
            call.step,
            call.visit_in(task),
            "backward",
            alias=alias,
            class_name=call.class_name,
        )
        self.session.emit(address, gradient)

    def lost(self, site: str, error: Exception) -> None:
        self.session.event_once(
            "gradient-lost", f"gradients of {site or 'the root'} not captured: {error}", site=site
        )


Tap = TypeVar("Tap", bound=CallGradients)


class PassedCall(Generic[Tap]):
    """One call of one module, with what its gradient hooks need."""

    __slots__ = ("_task", "_visit", "_visit_now", "class_name", "site", "step", "tap")

    def __init__(self, tap: Tap, frame: Any) -> None:
        # A weak reference, because hooks live as long as the program keeps the graph, perhaps
        # longer than the session.
        self.tap = weakref.ref(tap)
        self.site: str = frame.site
        self.class_name: str = frame.class_name
        self.step: int = frame.step
        self._visit: int = frame.visit
        self._visit_now: int = frame.visit
        self._task = -1

    def visit_in(self, task: int) -> int:
        """The visit number of this call in one backward pass."""
        # The first gradient of each pass claims the number, which all gradients of the call share.
        if task != self._task:
            self._task = task
            tap = self.tap()
            if tap is not None:
                self._visit_now = tap.visits.claim(self.site, self.step, self._visit)
        return self._visit_now


class GradientSum(Generic[Tap]):
    """Sum of the gradients that reach one input of one call over `expected` edges of the graph."""

    __slots__ = ("_seen", "_sum", "_task", "alias", "call", "expected", "slot")

    def __init__(self, call: PassedCall[Tap], slot: str, alias: str) -> None:
        self.call = call
        self.slot = slot
        self.alias = alias
        self.expected = 0
        self._seen = 0
        self._sum: Any = None
        self._task = -1

    def arrived(self, gradient: Any) -> None:
        """Add the gradient that one edge sent; None for none."""
        tap = self.call.tap()
        if tap is None or not tap.active:
            return
        task = tap.task()
        # With a single edge the gradient is complete at once and needs no copy.
        if self.expected == 1:
            if gradient is not None:
                tap.emit(self.call, "grad_input", self.slot, self.alias, gradient, task)
            return
        # In a new pass, an incomplete sum of an earlier pass is dropped.
        if task != self._task:
            self._task, self._seen, self._sum = task, 0, None
        self._seen += 1
        if gradient is not None:
            # A copy, because the engine may add to the original later.
            with tap.undisturbed():
                self._sum = gradient.clone() if self._sum is None else self._sum + gradient
        # Only the first part registers the callback for the end of the pass.
        if self._seen == 1:
            tap.expect(self, task)
        if self._seen == self.expected:
            self.finish(task)

    def finish(self, task: int) -> None:
        """Capture the sum, once; called when it is complete and again at the end of the pass."""
        # The sum is cleared first, so that the call at the end of the pass cannot emit it again.
        total, self._sum = self._sum, None
        tap = self.call.tap()
        if total is None or task != self._task or tap is None or not tap.active:
            return
        try:
            tap.emit(self.call, "grad_input", self.slot, self.alias, total, task)
        except Exception as error:
            tap.lost(self.call.site, error)
