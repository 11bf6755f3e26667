"""One capture: which models are watched, what is wanted of them, and where it goes.

The session owns the decisions and the sink. How calls are noticed is the business of the taps: `modules.py`
for module calls, `ops.py`, `gradients.py` and `parameters.py` for the rest, loaded by level. Nothing
here raises into the program that is watched: what goes wrong becomes an event of the run.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false
from __future__ import annotations

import importlib
import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import torch
from torch import nn

from driftline.adapters.reduction import Reduction
from driftline.adapters.selection import Selection
from driftline.adapters.torch import snapshot as snapshots
from driftline.adapters.torch.names import ModuleNames, Place
from driftline.adapters.torch.steps import StepClock, StepsBy
from driftline.errors import BadInput, did_you_mean
from driftline.numerics import kernel
from driftline.numerics.dtypes import DTYPES
from driftline.numerics.summary import Summary
from driftline.runs.key import Moment, Phase, Port, TensorKey, usual_moment, usual_phase
from driftline.runs.record import Kept, Record

if TYPE_CHECKING:
    from driftline.runs.sink import Sink

Tensors = list[tuple[str, str, torch.Tensor]]
"""Tensors of one port: (slot, alias, tensor)."""

LEVELS = ("modules", "ops", "gradients", "params")
_TAPS = {
    "ops": ("driftline.adapters.torch.ops", "OperatorTap"),
    "gradients": ("driftline.adapters.torch.gradients", "GradientTap"),
    "params": ("driftline.adapters.torch.parameters", "ParameterTap"),
}
_REMEMBERED_SUMMARIES = 512


class Frame:
    """A module call that is under way."""

    __slots__ = (
        "around",
        "class_name",
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
        self, place: Place, module: nn.Module, visit: int, step: int, *, recompute: bool
    ) -> None:
        self.place = place
        self.site = place.site
        self.module = module
        self.class_name = place.class_name
        self.visit = visit
        self.step = step
        self.phase: Phase = "recompute" if recompute else "forward"
        self.recompute = recompute
        self.inputs: Tensors = []
        self.around: ExitStack | None = None


class Look(NamedTuple):
    """What is wanted of one place's own calls."""

    inputs_before: bool
    inputs_after: bool
    outputs: bool


class Tap(Protocol):
    """Something that notices tensors and hands them to `CaptureSession.emit`.

    `around_root` encloses a call that no other module made; `before_forward` and `on_forward` come just
    before and after every call, the latter not when the call raises.
    """

    def install(self) -> None: ...

    def remove(self) -> None: ...

    def around_root(self, module: nn.Module) -> AbstractContextManager[None]: ...

    def before_forward(self, frame: Frame, inputs: Tensors) -> None: ...

    def on_forward(self, frame: Frame, inputs: Tensors, outputs: Tensors) -> None: ...


class _Thread(threading.local):
    def __init__(self) -> None:
        self.stack: list[Frame] = []
        self.failure = 0  # id of the exception that is passing through the stack


class CaptureSession:
    """Captures until it is stopped.

    Args:
        sink: Where tensors go, or a function that makes the sink when there is something to write.
        selection: Which tensors.
        reduction: How much of each.
        levels: Any of modules, ops, gradients, params.
        model: The one model to watch; None watches every module call of the process.
        rank: This process's rank.
        process: Tells processes of one rank apart.
        steps_by: What ends a step; see `steps.py`.
        module_types: If given, only modules of these classes (subclasses too).
    """

    def __init__(
        self,
        sink: Sink | Callable[[], Sink],
        selection: Selection | None = None,
        reduction: Reduction | None = None,
        levels: Iterable[str] = ("modules",),
        *,
        model: nn.Module | None = None,
        rank: int = 0,
        process: int = 0,
        steps_by: StepsBy = "auto",
        module_types: tuple[type, ...] = (),
    ) -> None:
        self.levels = tuple(levels)
        for level in self.levels:
            if level not in LEVELS:
                raise BadInput(f"there is no level '{level}'", hint=did_you_mean(level, LEVELS))
        self._make_sink = cast("Callable[[], Sink]", sink) if callable(sink) else None
        self._sink: Sink | None = None if callable(sink) else sink
        self.selection = selection or Selection()
        self.reduction = reduction or Reduction()
        self.rank = rank
        self.process = process
        self._module_types = module_types
        self._lock = threading.RLock()
        self._thread = _Thread()
        self._rank_wanted = self.selection.takes_rank(rank)
        self.names = ModuleNames(model, self._decide)
        self.clock = StepClock(steps_by, self.names.roots, self._step_done)
        self.global_scope = model is None
        self.taps: list[Tap] = []
        self.running = False
        self._visits: dict[tuple[str, bool], tuple[int, int]] = {}
        self._wanted: dict[tuple[str, str, str], bool] = {}
        self._said: set[tuple[str, str]] = set()
        self._summaries: OrderedDict[tuple[str, str, int], Summary] = OrderedDict()
        self.execution_order: dict[str, None] = {}
        self.tensors = 0
        self.bytes_in_first_step: int | None = None
        self.steps_seen: set[int] = set()
        self.full = False
        self._topology_places = 0
        self._modules_tap: Any = None

    # --- life ---------------------------------------------------------------------------------------

    def start(self) -> CaptureSession:
        """Begin to watch. The module watch is always on: it is what knows the current site."""
        from driftline.adapters.torch import modules

        with self._lock:
            if self.running:
                return self
            self.running = True
            for level in LEVELS[1:]:
                if level in self.levels:
                    where, name = _TAPS[level]
                    self.taps.append(getattr(importlib.import_module(where), name)(self))
            modules.watch(self)
            for tap in self.taps:
                tap.install()
        return self

    def stop(self) -> None:
        """Stop watching, say what was not found, write the module tree and close the sink."""
        from driftline.adapters.torch import modules

        with self._lock:
            if not self.running:
                return
            self.running = False
            modules.unwatch(self)
            for tap in self.taps:
                self.shielded("stopping", tap.remove)
            self.shielded("closing", self._finish)

    def _finish(self) -> None:
        for kind, text, hint in self.selection.unmatched(
            (p.site, p.class_name, p.ids) for p in self.names.places()
        ):
            self.event("no-match", f"no {kind} matches '{text}'", hint=hint, filter=kind, text=text)
        skipped = sorted(s for s in self.steps_seen if not self.selection.takes_step(s))
        if skipped:
            taken = len(self.steps_seen) - len(skipped)
            self.event(
                "steps-skipped",
                f"{len(self.steps_seen)} steps ran, {taken} of them selected",
                ran=len(self.steps_seen),
                taken=taken,
            )
        if self._sink is not None:
            self._write_topology()
            self._sink.close()

    def step_over(self) -> None:
        """The program says that a step is over; from now on only this counts steps."""
        self.clock.step()

    # --- what taps ask --------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The current step: that of the model called last."""
        return self.clock.now

    @property
    def sink(self) -> Sink | None:
        """Where tensors go; None until there was one."""
        return self._sink

    def current_frame(self) -> Frame | None:
        """The innermost module call under way in this thread."""
        stack = self._thread.stack
        return stack[-1] if stack else None

    def frames(self) -> list[Frame]:
        """All module calls under way in this thread, outermost first. The live list: do not keep it."""
        return self._thread.stack

    def site_of(self, module: nn.Module) -> str:
        """The site of a module; its class name when it is not part of a known model."""
        place = self.names.known(module)
        return place.site if place is not None else type(module).__name__

    def wants(self, site: str, class_name: str, port: str) -> bool:
        """Whether anything of this port of this place is wanted in any step: a cheap pre-check."""
        key = (site, class_name, port)
        wanted = self._wanted.get(key)
        if wanted is None:
            place = self.names.site(site) or self.names.site(site.split("/", 1)[0])
            wanted = self._wanted[key] = (
                self._rank_wanted
                and self.selection.takes_port(port)
                and self.selection.takes_place(site, class_name, place.ids if place else None)
            )
        return wanted

    def wants_step(self, step: int) -> bool:
        return self.selection.takes_step(step)

    # --- what taps tell --------------------------------------------------------------------------------

    def emit(
        self,
        site: str,
        port: str,
        slot: str,
        tensor: torch.Tensor,
        *,
        alias: str = "",
        class_name: str = "",
        visit: int = 0,
        phase: str | None = None,
        moment: str | None = None,
        step: int | None = None,
    ) -> None:
        """Take one tensor, if it is wanted. Never raises."""
        if not self.wants(site, class_name, port):
            return
        now = self.step if step is None else step
        if not self.selection.takes_step(now):
            return
        self.shielded(
            site,
            self.take,
            site,
            port,
            slot,
            tensor,
            alias,
            class_name,
            visit,
            phase or usual_phase(port),
            moment or usual_moment(port),
            now,
        )

    def event(self, kind: str, message: str, **details: Any) -> None:
        """Note something for the reader of the run."""
        with self._lock:
            self._open_sink().event(kind, message, **details)

    def event_once(self, kind: str, message: str, **details: Any) -> None:
        """The same, but only the first time for this kind and site."""
        key = (kind, f"{details.get('site', '')}\0{message}")
        if key not in self._said:
            self._said.add(key)
            self.event(kind, message, **details)

    def shielded(self, where: str, act: Callable[..., Any], *args: Any) -> None:
        """Do something for the capture's sake; whatever goes wrong is an event, not the program's problem."""
        try:
            act(*args)
        except Exception as error:
            try:
                self.event_once(
                    "capture-fault",
                    f"capture failed: {type(error).__name__}: {error}",
                    site=where,
                    trace=traceback.format_exc(limit=-4),
                )
            except Exception:  # the sink itself is broken; there is nobody left to tell
                self.full = True

    # --- writing -----------------------------------------------------------------------------------------

    def take(
        self,
        site: str,
        port: str,
        slot: str,
        tensor: torch.Tensor,
        alias: str,
        class_name: str,
        visit: int,
        phase: str,
        moment: str,
        step: int,
    ) -> None:
        """Reduce a wanted tensor and hand it to the sink. May raise: call it shielded."""
        if self.full:
            return
        kept = self.reduction.kept
        shot = snapshots.snapshot(tensor, values=kept != "describe")
        if isinstance(shot, snapshots.Refusal):
            self.event_once(
                "refused", f"not stored: {shot.reason}", site=site, port=port, slot=slot
            )
            return
        if not self.selection.takes_device(shot.device_index):
            return
        key = TensorKey(
            site,
            cast(Port, port),
            slot,
            step,
            visit,
            self.rank,
            self.process,
            cast(Phase, phase),
            cast(Moment, moment),
        )
        with self._lock:
            self._put(key, shot, kept, alias, class_name)

    def _put(
        self, key: TensorKey, shot: snapshots.Snapshot, kept: Kept, alias: str, class_name: str
    ) -> None:
        digest, summary, data, stride = "", None, shot.data, 1
        if kept == "summary" and data is not None:
            digest = kernel.digest(data)
            summary = self._summary(digest, shot)
            data = None
        elif kept == "digest" and data is not None:
            digest = kernel.digest(data)
            data = None
        elif kept == "sample" and data is not None:
            digest = kernel.digest(data)
            stride = self.reduction.stride(shot.count)
            data = snapshots.every_nth(shot, stride)
        elif kept == "describe":
            data = None
        record = Record(
            key,
            0,
            shot.dtype,
            shot.shape,
            alias,
            class_name,
            shot.device,
            kept,
            digest,
            None,
            stride,
            summary,
            shot.placement,
        )
        self._open_sink().put(record, data)
        self.tensors += 1

    def _summary(self, digest: str, shot: snapshots.Snapshot) -> Summary:
        """The output of one module is the input of the next: what was summarised is not read again."""
        key = (digest, shot.dtype, shot.count)
        known = self._summaries.get(key)
        if known is None:
            assert shot.data is not None
            known = kernel.summarize(shot.data, DTYPES[shot.dtype], count=shot.count)
            self._summaries[key] = known
            if len(self._summaries) > _REMEMBERED_SUMMARIES:
                self._summaries.popitem(last=False)
        return known

    def _open_sink(self) -> Sink:
        if self._sink is None:
            assert self._make_sink is not None
            self._sink = self._make_sink()
        return self._sink

    # --- calls -----------------------------------------------------------------------------------------

    def _decide(self, place: Place) -> None:
        """Whether a place is wanted is asked once, when it gets its name."""
        module = place.ref()
        taken = (
            "modules" in self.levels
            and (not self._module_types or isinstance(module, self._module_types))
            and self._rank_wanted
            and self.selection.takes_place(place.site, place.class_name, place.ids)
        )
        moments = self.selection.moments("input") if self.selection.takes_port("input") else ()
        place.look = Look(
            taken and "before" in moments,
            taken and "after" in moments,
            taken and self.selection.takes_port("output"),
        )

    def count_visit(self, site: str, step: int, *, recompute: bool) -> int:
        key = (site, recompute)
        last_step, count = self._visits.get(key, (step, -1))
        visit = count + 1 if last_step == step else 0
        self._visits[key] = (step, visit)
        return visit

    def _step_done(self, step: int) -> None:
        self.shielded("step", self._note_step, step)

    def _note_step(self, step: int) -> None:
        if self._sink is None:
            return
        if self.bytes_in_first_step is None and self.tensors:
            taken = self.bytes_in_first_step = self._sink.bytes_written
            steps = self.selection.step_count()
            self.event(
                "estimate",
                f"the first step took {taken} bytes in {self.tensors} tensors",
                bytes=taken,
                tensors=self.tensors,
                steps=steps,
                total=None if steps is None else taken * steps,
            )
        self._write_topology()
        self._sink.step_done(step)

    def _write_topology(self) -> None:
        from driftline.adapters.torch.tree import module_tree

        places = len(self.names.roots) + sum(1 for _ in self.names.places())
        if self._sink is not None and places != self._topology_places:
            self._topology_places = places
            self._sink.topology(module_tree(self.names, self.execution_order).to_json())

    def after_fork(self) -> None:
        """This process is a forked child: nothing is under way, and its sink begins anew by itself."""
        self._lock = threading.RLock()
        self._thread = _Thread()
        self._topology_places = 0
        self.tensors = 0
