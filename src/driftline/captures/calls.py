"""A module call under way, and the step it belongs to.

`Frame` is the call as sessions and taps of every framework see it; `StepClock` decides when a step
ends. Neither knows tensors.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Literal, NamedTuple

from driftline.captures.naming import Place, Root
from driftline.runs.records import Phase


class Frame:
    """A module call that is under way."""

    __slots__ = (
        "around",
        "begun",
        "class_name",
        "digests",
        "inputs",
        "module",
        "phase",
        "place",
        "recompute",
        "site",
        "step",
        "visit",
    )

    def __init__(
        self, place: Place, module: Any, visit: int, step: int, *, recompute: bool
    ) -> None:
        self.place = place
        self.site = place.site
        self.module = module
        self.class_name = place.class_name
        self.visit = visit
        self.step = step
        self.phase: Phase = "recompute" if recompute else "forward"
        self.recompute = recompute
        self.inputs: list[tuple[str, str, Any]] = []
        self.around: ExitStack | None = None
        # Of an outermost call: digests of what it took and gave, and when it began.
        self.digests: dict[str, str] | None = None
        self.begun = 0.0


class Look(NamedTuple):
    """Which tensors of a module's own calls are wanted."""

    inputs_before: bool
    inputs_after: bool
    outputs: bool


class Visits:
    """Counts the calls of one place in each step."""

    # Two numbers instead of a table: a site is called in one step at a time.
    __slots__ = ("_count", "_step")

    def __init__(self) -> None:
        self._step = -1
        self._count = 0

    def next(self, step: int) -> int:
        """The number of the call that begins now: 0 for the first one of a step."""
        if step == self._step:
            self._count += 1
        else:
            self._step, self._count = step, 0
        return self._count


# Steps: when one ends and which of them a call belongs to.


StepsBy = Literal["auto", "call", "optimizer", "manual"]
# The search takes milliseconds and a program without an optimizer would repeat it every call.
_OPTIMIZER_SEARCHES = 3


class StepClock:
    """Counts steps for all models of a session.

    Args:
        by: auto, or what alone is a boundary: call, optimizer or manual.
        roots: The session's models, in order of appearance; the list grows.
        on_done: Called with the number of a step that is over.
        grad_enabled: Whether the framework records what a backward pass needs.
        optimizer: The class of the framework's optimizers.
        continues_batch: Whether the call of a model is a later micro-batch of a pipeline's batch.
    """

    def __init__(
        self,
        by: StepsBy,
        roots: list[Root],
        on_done: Callable[[int], None],
        *,
        grad_enabled: Callable[[], bool],
        optimizer: type,
        continues_batch: Callable[[Any], bool] = lambda _: False,
    ) -> None:
        self._grad_enabled = grad_enabled
        self._continues_batch = continues_batch
        self._optimizer = optimizer
        self._by: StepsBy = by
        self._roots = roots
        self._on_done = on_done
        self._current: Root | None = None
        self._base = 0
        self._optimizer_seen = False
        self._searches = 0
        self._last_done = -1
        self.highest = 0
        self.ran_outside = False
        self.updates = 0  # steps of optimizers
        self._graph_ran = False  # of a compiled function that calls a model; no module was called
        self._concluded = False  # by an optimizer, and no model has been called since

    @property
    def now(self) -> int:
        return self._current.step if self._current is not None else self._base

    @property
    def concluding(self) -> int:
        """The step whose parameters get gradients now, or are changed by them.

        A program may have several optimizers, such as one for each of its models: the first that
        steps ends the step, and what the others do before the next call belongs to it.
        """
        return self.now - 1 if self._concluded else self.now

    @property
    def trains(self) -> bool:
        """Whether the program has an optimizer, as far as is known."""
        return self._optimizer_seen

    def step_of(self, root: Root) -> int:
        return self.now if root.helper else root.step

    def enter(self, place: Place, module: Any) -> None:
        """A module is called from outside any other module; called before its step is asked for."""
        root = place.root
        if root.helper:
            return
        # A new call means that the gradients of the previous step are complete.
        self._concluded = False
        if self._current is not root:
            self._current = root
            # A model that appears late joins the step the other models are in.
            if not root.ever_called and not root.opened:
                root.step = max(root.step, self._base)
        if self._by in ("manual", "optimizer"):
            return
        # The micro-batches of one batch are one step, with or without an optimizer.
        if self._continues_batch(module):
            return
        # Calls of the model itself count steps; a part called alone counts only as
        # described below.
        if place.is_root:
            training = self._is_training(module)
            # Micro-batches share a step; an evaluation between training steps shares it with none.
            if root.called and not (training and root.training):
                self._advance(root)
            root.called = root.ever_called = True
            root.training = training
            return
        # `generate` calls its encoder once before the model; only parts seen in that role
        # open a step.
        if not root.ever_called and root.step == self._base:
            root.openers.add(place.site)
        begins = root.called and place.site in root.openers
        repeats = not root.ever_called and place.site in root.opened
        if (begins or repeats) and not self._is_training(module):
            self._advance(root)
        root.opened.add(place.site)

    def trained_by_graph(self) -> None:
        """A compiled graph that a backward pass follows was executed, and no module was called."""
        self._graph_ran = True
        self._concluded = False

    def optimizer_stepped(self) -> None:
        self._optimizer_seen = True
        self.updates += 1
        if self._by in ("manual", "call"):
            return
        without_models = self.ran_outside and not self._roots
        called = any(root.called or root.opened for root in self._roots)
        ran = without_models or called or self._graph_ran
        if self._by == "optimizer" or ran:
            self._advance_all()
            self._concluded = self._by == "auto"

    def step(self) -> None:
        """The program itself says that a step is over."""
        # One explicit step by the program switches all guessing off.
        self._by = "manual"
        self._concluded = False
        self._advance_all()

    def _advance(self, root: Root) -> None:
        done = root.step
        root.step += 1
        root.called = False
        root.opened.clear()
        self.highest = max(self.highest, root.step)
        self._done(done)

    def _advance_all(self) -> None:
        # All models meet at one number, so that records of one training step share it.
        done = max([self._base, *(root.step for root in self._roots)])
        self._base = done + 1
        self._graph_ran = False
        for root in self._roots:
            root.step = self._base
            root.called = False
            root.opened.clear()
        self.highest = max(self.highest, self._base)
        self._done(done)

    def _done(self, step: int) -> None:
        # Two models may end the same step; it is announced once.
        if step > self._last_done:
            self._last_done = step
            self._on_done(step)

    def _is_training(self, module: Any) -> bool:
        """Whether an optimizer will say when this step is over."""
        return (
            self._by == "auto"
            and module.training
            and self._grad_enabled()
            and self._has_optimizer()
        )

    def _has_optimizer(self) -> bool:
        # An optimizer may be older than the session, and accumulation asks before its first step:
        # so the kinds of living objects are searched, a few times at most because it takes
        # milliseconds.
        if not self._optimizer_seen and self._searches < _OPTIMIZER_SEARCHES:
            self._searches += 1
            kinds = set(map(type, gc.get_objects()))
            # An object of the bare base class trains nothing; Paddle itself keeps one.
            self._optimizer_seen = any(
                issubclass(kind, self._optimizer) and kind is not self._optimizer for kind in kinds
            )
        return self._optimizer_seen
