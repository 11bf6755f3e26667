"""One capture: which models are watched, which tensors are wanted, and where they go.

`Session` is the base of each framework's session. It owns the life cycle (start, stop, fork), the
decisions (is this site, port and step wanted?) and the warnings at the end. It does not know how
calls are intercepted or how a tensor is read; the framework's subclass supplies both.
"""

from __future__ import annotations

import multiprocessing
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from driftline.captures import recorder
from driftline.captures.calls import Frame, Look, StepClock, Visits
from driftline.captures.ladder import LADDER, StepBudget, is_rung
from driftline.captures.naming import ModuleNames, ModuleStructure, Place, Root
from driftline.captures.options import LEVELS, Reduction, checked_levels
from driftline.captures.recorder import TensorAddress
from driftline.captures.selection import Selection
from driftline.registry import Address
from driftline.runs.records import usual_moment, usual_phase
from driftline.runs.redaction import redact_message
from driftline.runs.sinks import JSON

if TYPE_CHECKING:
    from driftline.captures.model_facts import FactOptions
    from driftline.runs.sinks import Sink
__all__ = ["LEVELS", "Session", "checked_levels"]


ONLY_OUTSIDE = "the model was not called; only operators outside it were captured"


def nothing_captured(unmatched: list[str], steps: int, *, ran: bool, selected: bool) -> list[str]:
    """Sentences that explain why no tensor was captured.

    Args:
        unmatched: Sentences about filters that matched nothing; the first may be the reason.
        steps: The number of steps that ran.
        ran: Whether anything ran.
        selected: Whether any of the steps was selected.
    """
    # A filter without a match is the likeliest reason, so it becomes the first sentence.
    rest = list(unmatched)
    if not ran:
        reason = "the model was not called"
    elif rest:
        reason = rest.pop(0)
    elif not selected:
        reason = f"{steps} steps ran, and none of them is selected"
    else:
        reason = "the filters left no tensor, or none could be stored; the run's events say why"
    return [f"nothing was captured: {reason}", *rest]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.stack: list[Frame] = []
        self.unwatched_class = ""  # class of the outermost running module that is not watched
        self.quiet = False  # whether a model is running whose parts are not watched
        self.failure = 0  # id of the exception that is propagating through the stack


class Adapter(NamedTuple):
    """What the framework's subclass supplies to a session.

    Attributes:
        structure: Access to the structure of the framework's modules.
        look: Makes a snapshot of one of its tensors.
        clock: Makes the clock that counts steps, from the models and a function to call after each
            step.
        description: Address of the class that describes its models; None if there is none. It is
            imported on use, because experiments, the error check and the saving hook do not need
            it.
    """

    structure: ModuleStructure
    look: recorder.Look
    clock: Callable[[list[Root], Callable[[int], None]], StepClock]
    description: Address | None = None


class ModelDescription(Protocol):
    """Describes models as data; see `captures.model_facts`."""

    def install(self) -> None: ...

    def remove(self) -> None: ...

    def before_root(self, place: Place, module: Any) -> None:
        """A model is about to be called from outside of all modules."""
        ...

    def after_root(self, frame: Frame, result: Any) -> None:
        """A model was called from outside of all modules, and has returned a result."""
        ...

    def digests_call(self, frame: Frame) -> bool:
        """Whether digests of the inputs and outputs of an outermost call are wanted."""
        ...

    def note_tensors(self, frame: Frame, port: str, tensors: Any) -> None:
        """Take the inputs or outputs of an outermost call."""
        ...

    def flush(self) -> None:
        """Write the facts that wait, if the run has its folder."""
        ...

    def finish(self) -> None:
        """The capture ends."""
        ...

    def after_fork(self) -> None: ...


class Session(ABC):
    """One capture, from `start` to `stop`.

    Args:
        sink: The sink for tensors, or a function that makes it when there is something to write.
        selection: The tensors to capture.
        reduction: What to keep of each tensor.
        levels: One or more of modules, ops, gradients, params.
        model: The only model to watch; None watches every module call of the process.
        rank: The rank of this process.
        adapter: What the framework's subclass supplies.
    """

    module_types: tuple[type, ...] = ()
    """If not empty, only modules of these classes and their subclasses are captured. A subclass
    sets it before it calls `__init__`, which decides about the modules of a model."""

    def __init__(
        self,
        sink: Sink | Callable[[], Sink],
        selection: Selection | None = None,
        reduction: Reduction | None = None,
        levels: str | Iterable[str] = ("modules",),
        *,
        model: Any | None = None,
        rank: int = 0,
        adapter: Adapter,
    ) -> None:
        self.levels = checked_levels(levels)
        self.selection = selection or Selection()
        self.reduction = reduction or Reduction()
        self.rank = rank
        self.recorder = recorder.Recorder(sink, self.selection, self.reduction, rank, adapter.look)
        # Bound once, because these are called for every tensor.
        self.guarded = self.recorder.guarded
        self.take = self.recorder.take
        self.thread = _Thread()
        self._rank_wanted = self.selection.takes_rank(rank)
        # The steps are those of the ladder unless the user named some.
        self.recorder.budget = StepBudget() if LADDER in self.selection.steps else None
        self.names = ModuleNames(adapter.structure, model, self._decide)
        self.clock = adapter.clock(self.names.roots, self._step_done)
        self.global_scope = model is None
        self.taps: list[Any] = []
        self._description = adapter.description
        self.model_facts: ModelDescription | None = None
        self.running = False
        # If set, experiments execute every watched call by this function: it gets (frame, call,
        # args, kwargs) and returns the result. Exceptions that it raises reach the program.
        self.stand_in: Callable[[Frame, Callable[..., Any], Any, Any], Any] | None = None
        self._visits: dict[tuple[str, bool], Visits] = {}
        self._wanted: dict[tuple[str, str, str], bool] = {}
        self.execution_order: dict[str, None] = {}
        self.bytes_in_first_step: int | None = None
        self.steps_seen: set[int] = set()
        self._selected = (-1, False)  # a step, and whether it is selected
        # Whether operators are to be executed again from this run.
        self.for_replay = False
        self._topology_places = 0
        self.outside = 0
        # The step in which an exception left the model, unless a later call of a model succeeded.
        self.unfinished_step: int | None = None
        # The exception that ended the program or the captured block, in words.
        self.exception = ""

        # Whether a run exists from the first watched call on, so that a killed program leaves one.
        # False if a run is only made for findings.
        self.begins_early = True
        self._has_begun = False

    # --- begin and end

    @abstractmethod
    def watch(self) -> None:
        """Begin to observe calls, and load the taps of the levels."""

    @abstractmethod
    def unwatch(self) -> None:
        """Stop observing calls."""

    @abstractmethod
    def undisturbed(self) -> AbstractContextManager[None]:
        """A context in which neither autograd nor the program's modes observe operations."""

    @abstractmethod
    def tree(self) -> dict[str, JSON]:
        """The module tree of the models seen so far."""

    def describe_models(self, options: FactOptions) -> None:
        """Also write facts about the models: attributes, code, state, training."""
        describing = self._description if options.model else None
        self.model_facts = None if describing is None else describing.load()(self, options)

    def facts_of_models(self) -> dict[str, JSON]:
        """Facts about this process that need the names of models; none by default."""
        return {}

    def say_at_end(self) -> None:
        """Record events that only the framework's adapter knows; none by default."""
        return

    def start(self) -> Self:
        """Begin to watch. Modules are always watched, because they determine the current site."""
        with self.recorder.lock:
            if self.running:
                return self
            self.running = True
            self.watch()
            for tap in self.taps:
                tap.install()
            if self.model_facts is not None:
                self.guarded("model facts", self.model_facts.install)
        return self

    def begin_run(self) -> None:
        """Create the run when a watched model is called for the first time.

        A process that ends normally without a tensor removes its empty part again.
        """
        if self.begins_early and not self._has_begun:
            self._has_begun = True
            # An experiment may watch without storing anything; then there is no run.
            if self._rank_wanted and self.levels:
                self.guarded("beginning", self.recorder.begin)

    def stop(self) -> None:
        """Stop watching, report filters without a match, write the module tree, close the sink."""
        with self.recorder.lock:
            if not self.running:
                return
            self.running = False
            self.unwatch()
            for tap in self.taps:
                # If one tap fails to remove itself, the others must be removed all the same.
                self.guarded("stopping", tap.remove)
            if self.model_facts is not None:
                self.guarded("stopping", self.model_facts.remove)
            self.guarded("closing", self._finish)

    def _finish(self) -> None:
        for kind, text, hint in self._unmatched():
            self.event("no-match", f"no {kind} matches '{text}'", hint=hint, filter=kind, text=text)
        # Tensors that are still on a device must reach the sink before the last events.
        self.say_at_end()
        self.recorder.finish()
        skipped = sorted(s for s in self.steps_seen if not self.selection.takes_step(s))
        budget = self.recorder.budget
        if budget is not None and budget.dropped is not None:
            self.event(
                "thinned",
                f"steps from {budget.dropped} on were left out: --budget allows "
                f"{budget.budget} bytes for steps after the first",
                step=budget.dropped,
                budget=budget.budget,
            )
        if skipped:
            selected = len(self.steps_seen) - len(skipped)
            self.event(
                "steps-skipped",
                f"{len(self.steps_seen)} steps ran, {selected} of them selected",
                ran=len(self.steps_seen),
                taken=selected,
            )
        if self.model_facts is not None:
            self.guarded("model facts", self.model_facts.finish)
        # Without a sink nothing was captured, and no empty run is left behind.
        if self.recorder.sink is not None:
            self._write_topology()
            self.recorder.sink.describe(capture=self._capture_facts(ended=True))
            self.recorder.sink.close()

    def places(self) -> list[tuple[str, str, str | None]]:
        """Site, class and ids of every module, then those of operators and parameters seen."""
        named = [(p.site, p.class_name, p.ids) for p in self.names.places()]
        seen = dict.fromkeys((site, class_name, None) for site, class_name, _ in self._wanted)
        return [*named, *seen]

    def _unmatched(self) -> list[tuple[str, str, str]]:
        return self.selection.unmatched(self.places())

    def end_warnings(self) -> list[str]:
        """Warnings to show to the user when the capture ends."""
        warnings = [
            f"no {kind} matches '{text}'" + (f"; {hint}" if hint else "")
            for kind, text, hint in self._unmatched()
        ]
        called = bool(self.execution_order)
        # A rank that was not selected has nothing to explain.
        if not self._rank_wanted:
            return warnings
        if self.tensors:
            lone = not called and not self.global_scope
            return [*warnings, ONLY_OUTSIDE] if lone else warnings
        selected = any(self.selection.takes_step(step) for step in self.steps_seen)
        return nothing_captured(
            warnings, len(self.steps_seen), ran=called or self.outside > 0, selected=selected
        )

    @property
    def replayable(self) -> bool:
        """Whether operators are captured so that they can be executed again from the run."""
        takes = self.selection.takes_port
        complete = self.reduction.kept == "full" and takes("input") and takes("output")
        return complete and "ops" in self.levels

    def step_over(self) -> None:
        """The program says that a step is over; from now on only this counts steps."""
        self.clock.step()

    # --- questions of taps

    @property
    def step(self) -> int:
        """The current step: that of the model called last."""
        return self.clock.now

    @property
    def sink(self) -> Sink | None:
        """The sink for tensors; None until there is something to write."""
        return self.recorder.sink

    @property
    def tensors(self) -> int:
        """The number of tensors captured so far."""
        return self.recorder.tensors

    def current_frame(self) -> Frame | None:
        """The innermost module call that is running in this thread."""
        stack = self.thread.stack
        return stack[-1] if stack else None

    def frames(self) -> list[Frame]:
        """All module calls that are running in this thread, outermost first; the live list."""
        return self.thread.stack

    def is_outside_model(self, module: Any) -> bool:
        """Whether a module is not part of the only model to watch."""
        return not self.global_scope and self.names.known(module) is None

    def unwatched_module(self) -> str:
        """Class of the outermost running module that is not watched; empty if there is none."""
        return self.thread.unwatched_class

    def site_of(self, module: Any) -> str:
        """The site of a module; its class name if it is not part of a known model."""
        place = self.names.known(module)
        return place.site if place is not None else type(module).__name__

    def wants(self, site: str, class_name: str, port: str) -> bool:
        """Whether this port of a site is captured in any step; a fast check before others."""
        key = (site, class_name, port)
        # Cached, because it is asked for every operator call, and matching patterns is slow.
        wanted = self._wanted.get(key)
        if wanted is None:
            # An operator's site is `module/operator`, and its ids are those of the module.
            place = self.names.site(site) or self.names.site(site.split("/", 1)[0])
            wanted = self._wanted[key] = (
                self._rank_wanted
                and self.selection.takes_port(port)
                and self.selection.takes_place(site, class_name, place.ids if place else None)
            )
        return wanted

    def wants_step(self, step: int) -> bool:
        """Whether tensors of a step are captured."""
        # Asked for every call, and matching patterns takes longer than a call may. Step and answer
        # are stored as one value, so that another thread never sees a mixture.
        asked, selected = self._selected
        if asked != step:
            selected = self.selection.takes_step(step)
            self._selected = step, selected
        if not selected:
            return False
        budget = self.recorder.budget
        return budget is None or step == 0 or budget.allows(step)

    def watches_state(self, step: int) -> bool:
        """Whether weights and gradients are described around a step's update."""
        budget = self.recorder.budget
        if budget is not None:
            return is_rung(step) and budget.allows(step)
        return is_rung(step) or self.selection.takes_step(step)

    def set_budget(self, budget: int | None) -> None:
        """Set the disk budget of the steps after the first, unless the user named steps."""
        if self.recorder.budget is not None and budget is not None:
            self.recorder.budget = StepBudget(budget)

    def charge(self, size: int) -> None:
        """Count bytes of lines about steps after the first."""
        if self.recorder.budget is not None:
            self.recorder.budget.charge(size)

    def is_quiet(self, step: int) -> bool:
        """Whether the parts of a model are not watched in this step, so that hooks are off."""
        return (
            self.stand_in is None
            and not self.wants_step(step)
            and all(getattr(tap, "only_wanted_steps", False) for tap in self.taps)
        )

    # --- calls by taps

    def ran_outside(self, step: int) -> None:
        """An operator ran outside of all modules; without any module it determines the steps."""
        self.outside += 1
        self.clock.ran_outside = True
        # If modules run too, only their calls determine which steps ran.
        if not self.execution_order:
            self.steps_seen.add(step)

    def emit(self, address: TensorAddress, tensor: Any) -> None:
        """Take one tensor if it is wanted. Never raises, and the program's modes do not see it."""
        port = address.port
        if not self.wants(address.site, address.class_name, port):
            return
        # The address names the step, because gradients belong to the step of their forward call.
        if not self.wants_step(address.step):
            return
        if not address.phase or not address.moment:
            phase, moment = usual_phase(port), usual_moment(port)
            address = address._replace(
                phase=address.phase or phase, moment=address.moment or moment
            )
        with self.undisturbed():
            self.guarded(address.site, self.take, address, tensor)

    def event(self, kind: str, message: str, **details: Any) -> None:
        """Write an event for readers of the run."""
        self.recorder.event(kind, message, **details)

    def event_once(self, kind: str, message: str, **details: Any) -> None:
        """Write an event, but only once for the same message and site."""
        self.recorder.event_once(kind, message, **details)

    # --- calls

    def _decide(self, place: Place) -> None:
        """Decide, once when a place gets its name, which of its tensors are captured."""
        module = place.ref()
        wanted = (
            "modules" in self.levels
            and (not self.module_types or isinstance(module, self.module_types))
            and self._rank_wanted
            and self.selection.takes_place(place.site, place.class_name, place.ids)
        )
        moments = self.selection.moments("input") if self.selection.takes_port("input") else ()
        place.look = Look(
            wanted and "before" in moments,
            wanted and "after" in moments,
            wanted and self.selection.takes_port("output"),
        )

    def count_visit(self, site: str, step: int, *, recompute: bool) -> int:
        return self.visits_of(site, recompute=recompute).next(step)

    def visits_of(self, site: str, *, recompute: bool) -> Visits:
        """The counter of the calls of a site; always the same object."""
        key = (site, recompute)
        visits = self._visits.get(key)
        if visits is None:
            visits = self._visits[key] = Visits()
        return visits

    def _step_done(self, step: int) -> None:
        self.guarded("step", self._note_step, step)

    def _note_step(self, step: int) -> None:
        self.recorder.call_done()
        self._write_topology()
        # Tensors of this step may not have arrived from a device; the step ends after them.
        self.recorder.in_turn(lambda: self._count_step(step))

    def _count_step(self, step: int) -> None:
        """A step is over, and its tensors have reached the sink."""
        if self.recorder.sink is None:
            return
        if self.bytes_in_first_step is None and self.tensors:
            step_bytes = self.bytes_in_first_step = self.recorder.sink.bytes_written
            # Parameters are stored once, so the estimate for all steps counts them once.
            steps, once = self.selection.step_count(), self.recorder.weight_bytes
            self.event(
                "estimate",
                f"the first step took {step_bytes} bytes in {self.tensors} tensors",
                bytes=step_bytes,
                tensors=self.tensors,
                steps=steps,
                once=once,
                total=None if steps is None else once + (step_bytes - once) * steps,
            )
        # A step between rungs has no tensors.
        if self.recorder.budget is None or self.wants_step(step):
            self.recorder.sink.step_done(step)

    def root_done(self) -> None:
        """A model has run: write its tree now, because it may be freed before the capture ends.

        If the process is a worker of a multiprocessing pool, it also flushes, because its parent
        kills it without notice once it has the results.
        """
        self.unfinished_step = None
        # The topology is written again only if places were added.
        if len(self.names.roots) + self.names.count != self._topology_places:
            self.guarded("topology", self._write_topology)
        self.guarded("devices", self.recorder.call_done)
        if self.model_facts is not None:
            self.guarded("model facts", self.model_facts.flush)
        # A daemonic worker is killed before it can close its files.
        if multiprocessing.current_process().daemon:
            self.guarded("flush", self.flush)

    def flush(self) -> None:
        """Return when everything captured so far would survive a kill of the process."""
        self.recorder.drain()
        if self.recorder.sink is not None:
            self.recorder.sink.flush()

    def _write_topology(self) -> None:
        places = len(self.names.roots) + self.names.count
        if self.recorder.sink is not None and places != self._topology_places:
            self._topology_places = places
            self.recorder.sink.topology(self.tree())
            self.recorder.sink.describe(
                capture=self._capture_facts(ended=False), **self.facts_of_models()
            )

    def _capture_facts(self, *, ended: bool) -> dict[str, JSON]:
        """What was selected and how far the program ran, which judging the run needs."""
        facts: dict[str, JSON] = {
            "levels": list(self.levels),
            "selection": self.selection.to_json(),
            "daemon": multiprocessing.current_process().daemon,
        }
        if ended:
            facts["steps_ran"] = len(self.steps_seen)
            facts["updates"] = self.clock.updates
            if self.unfinished_step is not None:
                facts["unfinished_step"] = self.unfinished_step
            if self.exception:
                facts["exception"] = redact_message(self.exception, digests=False)
        return facts

    def after_fork(self) -> None:
        """This is a forked child: no call is running, and its sink begins anew."""
        self.recorder.after_fork()
        self._has_begun = False
        if self.model_facts is not None:
            self.guarded("model facts", self.model_facts.after_fork)
        self.thread = _Thread()
        self.unfinished_step = None
        self._topology_places = 0
