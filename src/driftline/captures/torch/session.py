"""One capture of torch modules: the session, its step clock, and the protocol of its taps.

What a session decides is in `captures.session`; this file adds what is torch's own: the taps of
each level, the device backend, compiled graphs and distributed jobs.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import nn

from driftline.captures.calls import Frame, Look, StepsBy
from driftline.captures.calls import StepClock as CommonClock
from driftline.captures.naming import Root
from driftline.captures.options import Reduction
from driftline.captures.selection import Selection
from driftline.captures.session import LEVELS, Adapter, Session, checked_levels
from driftline.captures.torch.device import places
from driftline.captures.torch.device.backend import TorchDeviceBackend
from driftline.captures.torch.distributed import continues_batch, job_facts
from driftline.captures.torch.layers import STRUCTURE, compiled_graphs, module_tree, unwrapped
from driftline.captures.torch.tensors import snapshot, undisturbed
from driftline.registry import Address
from driftline.runs.sinks import JSON

if TYPE_CHECKING:
    from driftline.runs.sinks import Sink

__all__ = [
    "LEVELS",
    "CaptureSession",
    "Frame",
    "Look",
    "StepClock",
    "StepsBy",
    "Tap",
    "Tensors",
    "checked_levels",
]


class StepClock(CommonClock):
    """Counts steps for all models of a session; see `captures.calls`."""

    def __init__(self, by: StepsBy, roots: list[Root], on_done: Callable[[int], None]) -> None:
        super().__init__(
            by,
            roots,
            on_done,
            grad_enabled=torch.is_grad_enabled,
            optimizer=torch.optim.Optimizer,
            continues_batch=continues_batch,
        )


# Taps.


Tensors = list[tuple[str, str, torch.Tensor]]
"""Tensors of one port: (slot, alias, tensor)."""


class Tap(Protocol):
    """Something that notices tensors and hands them to `CaptureSession.emit`.

    `around_root` encloses a call that no other module made; `before_forward` and `on_forward` come
    just before and after every call, the latter not when the call raises.
    """

    def install(self) -> None: ...

    def remove(self) -> None: ...

    def around_root(self, module: nn.Module) -> AbstractContextManager[None]: ...

    def before_forward(self, frame: Frame, inputs: Tensors) -> None: ...

    def on_forward(self, frame: Frame, inputs: Tensors, outputs: Tensors) -> None: ...


# The session.


# Imported by level, because a tap for operators loads much of torch.
_TAPS = {
    "ops": ("driftline.captures.torch.operators.tensors", "OperatorTap"),
    "gradients": ("driftline.captures.torch.gradients", "GradientTap"),
    "params": ("driftline.captures.torch.gradients", "ParameterTap"),
}


class CaptureSession(Session):
    """Captures torch modules until it is stopped.

    Args:
        sink: Where tensors go, or a function that makes the sink when there is something to write.
        selection: Which tensors.
        reduction: How much of each.
        levels: Any of modules, ops, gradients, params.
        model: The one model to watch; None watches every module call of the process.
        rank: This process's rank.
        steps_by: What ends a step; see `captures.calls`.
    """

    def __init__(
        self,
        sink: Sink | Callable[[], Sink],
        selection: Selection | None = None,
        reduction: Reduction | None = None,
        levels: str | Iterable[str] = ("modules",),
        *,
        model: nn.Module | None = None,
        rank: int = 0,
        steps_by: StepsBy = "auto",
    ) -> None:
        super().__init__(
            sink,
            selection,
            reduction,
            levels,
            model=model,
            rank=rank,
            adapter=Adapter(
                STRUCTURE,
                snapshot,
                functools.partial(StepClock, steps_by),
                Address("driftline.captures.torch.model_facts:TorchFacts"),
            ),
        )
        self.device_backend = self.recorder.device_backend = TorchDeviceBackend(
            self.recorder, self.selection, self.reduction, rank
        )
        self._graphs_before = 0
        self.sees_graphs = False  # a tap looks into compiled graphs

    def watch(self) -> None:
        from driftline.captures.torch import module_calls

        # The modules themselves need no tap; the wrapper of their calls is always there.
        for level in LEVELS[1:]:
            if level in self.levels:
                where, name = _TAPS[level]
                self.taps.append(getattr(importlib.import_module(where), name)(self))
        self._graphs_before = compiled_graphs()
        # Before the first call, so that no allocation of the program is missed.
        places.watch(self.device_backend)
        self.device_backend.begin()
        module_calls.watch(self)

    def unwatch(self) -> None:
        from driftline.captures.torch import module_calls

        # Calls end first: a tensor that arrives after the device backend has stopped would be lost.
        module_calls.unwatch(self)
        places.unwatch(self.device_backend)
        self.device_backend.end()

    def after_fork(self) -> None:
        self.device_backend.after_fork()
        super().after_fork()

    def undisturbed(self) -> AbstractContextManager[None]:
        return undisturbed()

    def tree(self) -> dict[str, JSON]:
        with undisturbed():  # even reading a shape shows in the program's own modes
            return cast("dict[str, JSON]", module_tree(self.names, self.execution_order).to_json())

    def facts_of_models(self) -> dict[str, JSON]:
        """Meshes and stages may be made after the capture has begun, and stages have names now."""
        return job_facts(self._site_if_known)

    def _site_if_known(self, module: Any) -> str | None:
        place = self.names.known(module) or self.names.known(unwrapped(module))
        return None if place is None else place.site

    def say_at_end(self) -> None:
        from driftline.captures.torch import distributed

        if never := distributed.forget():
            self.event(
                "never-awaited",
                f"{never} results of collectives were never waited for; they were not captured",
            )
        graphs = compiled_graphs() - self._graphs_before
        # A module that is known to be compiled has been reported with its name already.
        if graphs > 0 and not self.sees_graphs and not self.recorder.has_event("compiled"):
            self.event(
                "compiled",
                f"torch.compile made {graphs} graph{'' if graphs == 1 else 's'}, of which nothing "
                "was seen; --graph auto records what runs inside",
                graphs=graphs,
            )
