"""Module calls in progress, and the steps to which they belong.

`Frame` describes a call to the sessions and taps of every framework. `StepClock` decides when a
step ends. Neither knows tensors.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Literal, NamedTuple

from driftline.captures.naming import Place, Root
from driftline.runs.records import Phase


class Frame:
    """A module call in progress."""

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
        # For an outermost call: digests of its inputs and outputs, and its start time.
        self.digests: dict[str, str] | None = None
        self.begun = 0.0


class Look(NamedTuple):
    """Which tensors of a module's calls are captured."""

    inputs_before: bool
    inputs_after: bool
    outputs: bool


class Visits:
    """Counts the calls of one place in each step."""

    # Two numbers are enough instead of a table, because a site is called in one step at a time.
    __slots__ = ("_count", "_step")

    def __init__(self) -> None:
        self._step = -1
        self._count = 0

    def next(self, step: int) -> int:
        """Index of the call that begins now: 0 for the first call in a step."""
        if step == self._step:
            self._count += 1
        else:
            self._step, self._count = step, 0
        return self._count


# Steps: when a step ends, and to which step a call belongs.


StepsBy = Literal["auto", "call", "optimizer", "manual"]
# The search takes milliseconds, and a program without an optimizer would repeat it in every call.
_OPTIMIZER_SEARCHES = 3


class StepClock:
    """Counts steps for all models of a session.

    Args:
        by: auto, or the only event that ends a step: call, optimizer or manual.
        roots: The session's models, in order of appearance; the list grows.
        on_done: Called with the number of each step that is over.
        grad_enabled: Whether the framework records what a backward pass needs.
        optimizer: The base class of the framework's optimizers.
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
        self.updates = 0  # number of optimizer steps
        # A compiled function that calls a model has run its graph, without any module call.
        self._graph_ran = False
        # An optimizer has ended a step, and no model has been called since.
        self._concluded = False

    @property
    def now(self) -> int:
        return self._current.step if self._current is not None else self._base

    @property
    def concluding(self) -> int:
        """The step to which gradients and parameter updates belong now.

        A program may have several optimizers, such as one for each of its models. The first
        optimizer that updates ends the step; updates by the others before the next model call
        belong to the step that has ended.
        """
        return self.now - 1 if self._concluded else self.now

    @property
    def trains(self) -> bool:
        """Whether an optimizer of the program has been seen."""
        return self._optimizer_seen

    def step_of(self, root: Root) -> int:
        return self.now if root.helper else root.step

    def enter(self, place: Place, module: Any) -> None:
        """Update the step for an outermost module call; call it before asking for the call's step.

        Args:
            place: The module's place.
            module: The module.
        """
        root = place.root
        if root.helper:
            return
        # A new call means that the gradients of the previous step are complete.
        self._concluded = False
        if self._current is not root:
            self._current = root
            # A model that appears late joins the current step of the other models.
            if not root.ever_called and not root.opened:
                root.step = max(root.step, self._base)
        if self._by in ("manual", "optimizer"):
            return
        # The micro-batches of one batch are one step, with or without an optimizer.
        if self._continues_batch(module):
            return
        # A call of the model itself begins a step; a call of a part alone does so only in the cases
        # below.
        if place.is_root:
            training = self._is_training(module)
            # Micro-batches share a step; an evaluation between training steps has its own step.
            if root.called and not (training and root.training):
                self._advance(root)
            root.called = root.ever_called = True
            root.training = training
            return
        # `generate` calls the encoder once before the model; only parts that were called so in the
        # first step open later steps.
        if not root.ever_called and root.step == self._base:
            root.openers.add(place.site)
        begins = root.called and place.site in root.openers
        repeats = not root.ever_called and place.site in root.opened
        if (begins or repeats) and not self._is_training(module):
            self._advance(root)
        root.opened.add(place.site)

    def trained_by_graph(self) -> None:
        """Note that a compiled training graph was executed without any module call."""
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
        """End a step because the program itself says so."""
        # After one explicit step, steps are no longer guessed.
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
        # All models continue with the same number, so that records of one training step share it.
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
        # Two models may end the same step; `on_done` is called once for it.
        if step > self._last_done:
            self._last_done = step
            self._on_done(step)

    def _is_training(self, module: Any) -> bool:
        """Whether this call is part of training, so that an optimizer update will end its step."""
        return (
            self._by == "auto"
            and module.training
            and self._grad_enabled()
            and self._has_optimizer()
        )

    def _has_optimizer(self) -> bool:
        # An optimizer may be older than the session, and with gradient accumulation the answer is
        # needed before its first update. So the types of all living objects are searched, at most a
        # few times, because the search takes milliseconds.
        if not self._optimizer_seen and self._searches < _OPTIMIZER_SEARCHES:
            self._searches += 1
            kinds = set(map(type, gc.get_objects()))
            # An object of the bare base class trains nothing; Paddle itself keeps one.
            self._optimizer_seen = any(
                issubclass(kind, self._optimizer) and kind is not self._optimizer for kind in kinds
            )
        return self._optimizer_seen
