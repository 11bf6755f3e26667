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
        found: Filters that matched nothing, in words; the first may be the reason.
        steps: How many steps ran.
        ran: Whether anything did.
        selected: Whether any of the steps was wanted.
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
        self.unwatched_class = ""  # class of the outermost module under way that is not watched
        self.quiet = False  # a model is under way whose parts nobody looks at
        self.failure = 0  # id of the exception that is passing through the stack


class Adapter(NamedTuple):
    """What a framework's own part supplies to a session.

    Attributes:
        structure: Access to the structure of the framework's modules.
        look: Makes a snapshot of one of its tensors.
        clock: Makes the clock that counts steps, from the models and what to call after a step.
        description: Where the class is that describes its models; None if nothing does. Loaded on
            use: experiments, the error check and the saving hook need none of it.
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
        """It was called, and this is what it returned."""
        ...

    def digests_call(self, frame: Frame) -> bool:
        """Whether digests of what an outermost call takes and gives are wanted."""
        ...

    def note_tensors(self, frame: Frame, port: str, tensors: Any) -> None:
        """What an outermost call took or gave."""
        ...

    def flush(self) -> None:
        """Write what waits, if the run has its folder."""
        ...

    def finish(self) -> None:
        """The capture ends."""
        ...

    def after_fork(self) -> None: ...


class Session(ABC):
    """One capture, from `start` to `stop`.

    Args:
        sink: Where tensors go, or a function that makes the sink when there is something to write.
        selection: Which tensors.
        reduction: How much of each.
        levels: Any of modules, ops, gradients, params.
        model: The one model to watch; None watches every module call of the process.
        rank: This process's rank.
        adapter: What the framework's own part supplies.
    """

    module_types: tuple[type, ...] = ()
    """If not empty, only modules of these classes (subclasses too) are captured. A subclass sets it
    before it calls `__init__`, which decides about the modules of a model."""

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
        # Bound once: these are called for every tensor.
        self.guarded = self.recorder.guarded
        self.take = self.recorder.take
        self.thread = _Thread()
        self._rank_wanted = self.selection.takes_rank(rank)
        # Its steps are those of a ladder only where nobody has named any.
        self.recorder.budget = StepBudget() if LADDER in self.selection.steps else None
        self.names = ModuleNames(adapter.structure, model, self._decide)
        self.clock = adapter.clock(self.names.roots, self._step_done)
        self.global_scope = model is None
        self.taps: list[Any] = []
        self._description = adapter.description
        self.model_facts: ModelDescription | None = None
        self.running = False
        # Carries out every watched call in place of the plain one: (frame, call, args, kwargs) to
        # the result. For experiments; exceptions it raises are the program's.
        self.stand_in: Callable[[Frame, Callable[..., Any], Any, Any], Any] | None = None
        self._visits: dict[tuple[str, bool], Visits] = {}
        self._wanted: dict[tuple[str, str, str], bool] = {}
        self.execution_order: dict[str, None] = {}
        self.bytes_in_first_step: int | None = None
        self.steps_seen: set[int] = set()
        self._selected = (-1, False)  # a step, and whether it is selected
        # Operators of this capture are to be executed again from what it leaves.
        self.for_replay = False
        self._topology_places = 0
        self.outside = 0
        # The step whose model was left by an exception, unless a later call of a model went well.
        self.unfinished_step: int | None = None
        # The exception that ended the program, or the block that is captured; in words.
        self.exception = ""

        # A killed program leaves a run that says so from its first watched call on. Off where a
        # run is only made for findings.
        self.begins_early = True
        self._has_begun = False

    # --- life

    @abstractmethod
    def watch(self) -> None:
        """Begin to notice calls, and load the taps of the levels."""

    @abstractmethod
    def unwatch(self) -> None:
        """Notice no more calls."""

    @abstractmethod
    def undisturbed(self) -> AbstractContextManager[None]:
        """Inside, nothing is recorded for a backward pass, and no mode of the program sees it."""

    @abstractmethod
    def tree(self) -> dict[str, JSON]:
        """The module tree of the models met so far."""

    def describe_models(self, options: FactOptions) -> None:
        """Also write what the models are: attributes, code, state, training; not by default."""
        describing = self._description if options.model else None
        self.model_facts = None if describing is None else describing.load()(self, options)

    def facts_of_models(self) -> dict[str, JSON]:
        """Facts about this process that need named models; none by default."""
        return {}

    def say_at_end(self) -> None:
        """Record events that only the framework's adapter knows; none by default."""
        return

    def start(self) -> Self:
        """Begin to watch. The module watch is always on: it is what knows the current site."""
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
        """A watched model is called: from the first call on there is a run, even without a tensor.

        A process that ends by itself without one takes its empty part away again.
        """
        if self.begins_early and not self._has_begun:
            self._has_begun = True
            # An experiment may watch without keeping anything: then there is no run.
            if self._rank_wanted and self.levels:
                self.guarded("beginning", self.recorder.begin)

    def stop(self) -> None:
        """Stop watching, say what was not found, write the module tree and close the sink."""
        with self.recorder.lock:
            if not self.running:
                return
            self.running = False
            self.unwatch()
            for tap in self.taps:
                # One tap that fails to remove itself must not keep the others
                # installed.
                self.guarded("stopping", tap.remove)
            if self.model_facts is not None:
                self.guarded("stopping", self.model_facts.remove)
            self.guarded("closing", self._finish)

    def _finish(self) -> None:
        for kind, text, hint in self._unmatched():
            self.event("no-match", f"no {kind} matches '{text}'", hint=hint, filter=kind, text=text)
        # Tensors still on a device have to reach the sink before the last events.
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
        """Warnings for the person who asked for this capture, read at its end."""
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

    # --- what taps ask

    @property
    def step(self) -> int:
        """The current step: that of the model called last."""
        return self.clock.now

    @property
    def sink(self) -> Sink | None:
        """Where tensors go; None until there was something to write."""
        return self.recorder.sink

    @property
    def tensors(self) -> int:
        """How many tensors were captured so far."""
        return self.recorder.tensors

    def current_frame(self) -> Frame | None:
        """The innermost module call under way in this thread."""
        stack = self.thread.stack
        return stack[-1] if stack else None

    def frames(self) -> list[Frame]:
        """All module calls under way in this thread, outermost first; the live list."""
        return self.thread.stack

    def is_outside_model(self, module: Any) -> bool:
        """Whether a module is no part of the one model to watch."""
        return not self.global_scope and self.names.known(module) is None

    def unwatched_module(self) -> str:
        """Class of the outermost module under way that is not watched; empty without one."""
        return self.thread.unwatched_class

    def site_of(self, module: Any) -> str:
        """The site of a module; its class name when it is not part of a known model."""
        place = self.names.known(module)
        return place.site if place is not None else type(module).__name__

    def wants(self, site: str, class_name: str, port: str) -> bool:
        """Whether anything of this port of this place is wanted in any step: a cheap pre-check."""
        key = (site, class_name, port)
        # Cached, because operators ask for every call and pattern matching would dominate.
        wanted = self._wanted.get(key)
        if wanted is None:
            # An operator's site is `module/operator`; its position in the tree is the
            # module's.
            place = self.names.site(site) or self.names.site(site.split("/", 1)[0])
            wanted = self._wanted[key] = (
                self._rank_wanted
                and self.selection.takes_port(port)
                and self.selection.takes_place(site, class_name, place.ids if place else None)
            )
        return wanted

    def wants_step(self, step: int) -> bool:
        """Whether tensors of a step are captured."""
        # Asked for every call, and patterns take longer than a whole call may. Kept as one value:
        # no other thread may find a step with another step's answer.
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
        """How many bytes of disk steps after the first may take, where no steps were named."""
        if self.recorder.budget is not None and budget is not None:
            self.recorder.budget = StepBudget(budget)

    def charge(self, size: int) -> None:
        """Lines about later steps have taken so many bytes."""
        if self.recorder.budget is not None:
            self.recorder.budget.charge(size)

    def is_quiet(self, step: int) -> bool:
        """Whether nobody looks at the parts of a model in this step: hooks are off then."""
        return (
            self.stand_in is None
            and not self.wants_step(step)
            and all(getattr(tap, "only_wanted_steps", False) for tap in self.taps)
        )

    # --- what taps tell

    def ran_outside(self, step: int) -> None:
        """An operator ran in no module; a program without modules has its steps from them."""
        self.outside += 1
        self.clock.ran_outside = True
        # Where modules run too, their calls alone say which steps there were.
        if not self.execution_order:
            self.steps_seen.add(step)

    def emit(self, address: TensorAddress, tensor: Any) -> None:
        """Take one tensor, if it is wanted. Never raises; the program's modes see nothing of it."""
        port = address.port
        if not self.wants(address.site, address.class_name, port):
            return
        # Gradients belong to the step of their forward call, so the address names the step.
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
        """Note something for the reader of the run."""
        self.recorder.event(kind, message, **details)

    def event_once(self, kind: str, message: str, **details: Any) -> None:
        """The same, but only the first time for this message and site."""
        self.recorder.event_once(kind, message, **details)

    # --- calls

    def _decide(self, place: Place) -> None:
        """Whether a place is wanted is asked once, when it gets its name."""
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
        """The counter of one place's calls; it stays the same."""
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
        # Tensors of this step may still be on their way from a device; the step ends after
        # them.
        self.recorder.in_turn(lambda: self._count_step(step))

    def _count_step(self, step: int) -> None:
        """A step is over, and what was taken in it is with the sink."""
        if self.recorder.sink is None:
            return
        if self.bytes_in_first_step is None and self.tensors:
            step_bytes = self.bytes_in_first_step = self.recorder.sink.bytes_written
            # Parameters are stored once, so the estimate for all steps must not
            # multiply them.
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
        # Of a step between rungs there is nothing to be told.
        if self.recorder.budget is None or self.wants_step(step):
            self.recorder.sink.step_done(step)

    def root_done(self) -> None:
        """A model has run: its tree is kept now, since the model may be gone when capture ends.

        So may the process, if it is a worker of a multiprocessing pool: its parent kills it without
        a word once it has the results.
        """
        self.unfinished_step = None
        # The topology is written again only when places were added.
        if len(self.names.roots) + self.names.count != self._topology_places:
            self.guarded("topology", self._write_topology)
        self.guarded("devices", self.recorder.call_done)
        if self.model_facts is not None:
            self.guarded("model facts", self.model_facts.flush)
        # A daemonic worker gets no chance to close its files.
        if multiprocessing.current_process().daemon:
            self.guarded("flush", self.flush)

    def flush(self) -> None:
        """Return when everything taken so far would outlive a kill of the process."""
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
        """What was asked for and how far it went, for whoever judges what this run can show."""
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
        """This is a forked child: nothing is under way, and its sink begins anew by itself."""
        self.recorder.after_fork()
        self._has_begun = False
        if self.model_facts is not None:
            self.guarded("model facts", self.model_facts.after_fork)
        self.thread = _Thread()
        self.unfinished_step = None
        self._topology_places = 0
