"""One capture of torch modules: the session, its step clock, and the protocol of its taps.

`captures.session` holds what is common to all frameworks. This file adds what only torch has: the
taps of each level, the device backend, compiled graphs and distributed jobs.
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
    """Observes tensors at one level and passes them to `CaptureSession.emit`.

    `around_root` returns a context that is entered around each outermost module call.
    `before_forward` is called just before every module call, and `on_forward` just after it unless
    the call raised.
    """

    def install(self) -> None: ...

    def remove(self) -> None: ...

    def around_root(self, module: nn.Module) -> AbstractContextManager[None]: ...

    def before_forward(self, frame: Frame, inputs: Tensors) -> None: ...

    def on_forward(self, frame: Frame, inputs: Tensors, outputs: Tensors) -> None: ...


# The session.


# A tap is imported only if its level is captured, because the operator tap loads much of torch.
_TAPS = {
    "ops": ("driftline.captures.torch.operators.tensors", "OperatorTap"),
    "gradients": ("driftline.captures.torch.gradients", "GradientTap"),
    "params": ("driftline.captures.torch.gradients", "ParameterTap"),
}


class CaptureSession(Session):
    """Captures torch modules until it is stopped.

    Args:
        sink: Receives the tensors; or a function that makes the sink when there is something to
            write.
        selection: Which tensors are captured.
        reduction: How much of each tensor is kept.
        levels: Any of modules, ops, gradients, params.
        model: The only model to watch; None watches every module call of the process.
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
        self.sees_graphs = False  # whether a tap captures the inside of compiled graphs

    def watch(self) -> None:
        from driftline.captures.torch import module_calls

        # The level `modules` needs no tap, because module calls are always wrapped.
        for level in LEVELS[1:]:
            if level in self.levels:
                where, name = _TAPS[level]
                self.taps.append(getattr(importlib.import_module(where), name)(self))
        self._graphs_before = compiled_graphs()
        # Started before the first call, so that no CUDA graph of the program is missed.
        places.watch(self.device_backend)
        self.device_backend.begin()
        module_calls.watch(self)

    def unwatch(self) -> None:
        from driftline.captures.torch import module_calls

        # Module calls are unwatched first, because a tensor that arrives after the device backend
        # has stopped would be lost.
        module_calls.unwatch(self)
        places.unwatch(self.device_backend)
        self.device_backend.end()

    def after_fork(self) -> None:
        self.device_backend.after_fork()
        super().after_fork()

    def undisturbed(self) -> AbstractContextManager[None]:
        return undisturbed()

    def tree(self) -> dict[str, JSON]:
        with undisturbed():  # the program's own modes would notice even the reading of a shape
            return cast("dict[str, JSON]", module_tree(self.names, self.execution_order).to_json())

    def facts_of_models(self) -> dict[str, JSON]:
        """Facts about the distributed job.

        They are read at the end of a capture: meshes and stages may be made after it has begun, and
        the modules of stages have names only now.
        """
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
        # If a "compiled" event exists, it has already reported the compiled module by name.
        if graphs > 0 and not self.sees_graphs and not self.recorder.has_event("compiled"):
            self.event(
                "compiled",
                f"torch.compile made {graphs} graph{'' if graphs == 1 else 's'}, of which nothing "
                "was seen; --graph auto records what runs inside",
                graphs=graphs,
            )
