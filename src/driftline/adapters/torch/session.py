"""One capture of torch modules.

What a session decides is `adapters.session`'s. How calls are noticed is the business of the taps:
`modules.py` for module calls, `ops.py`, `gradients.py` and `parameters.py` for the rest, loaded by
level.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from driftline.adapters.reduction import Reduction
from driftline.adapters.selection import Selection
from driftline.adapters.session import LEVELS, Session, known_levels
from driftline.adapters.torch.compiled_regions import compiled_graphs
from driftline.adapters.torch.device import graph_watch
from driftline.adapters.torch.device.arrivals import Arrivals
from driftline.adapters.torch.names import FAMILY, unwrapped
from driftline.adapters.torch.placed import job_facts
from driftline.adapters.torch.snapshot import snapshot, undisturbed
from driftline.adapters.torch.steps import StepClock, StepsBy
from driftline.adapters.torch.tree import module_tree
from driftline.runs.sink import JSON

if TYPE_CHECKING:
    from driftline.runs.sink import Sink

__all__ = ["LEVELS", "CaptureSession", "known_levels"]

_TAPS = {
    "ops": ("driftline.adapters.torch.ops", "OperatorTap"),
    "gradients": ("driftline.adapters.torch.gradients", "GradientTap"),
    "params": ("driftline.adapters.torch.parameters", "ParameterTap"),
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
        process: Tells processes of one rank apart.
        steps_by: What ends a step; see `steps.py`.
        module_types: If given, only modules of these classes (subclasses too).
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
        process: int = 0,
        steps_by: StepsBy = "auto",
        module_types: tuple[type, ...] = (),
    ) -> None:
        super().__init__(
            sink,
            selection,
            reduction,
            levels,
            model=model,
            rank=rank,
            process=process,
            module_types=module_types,
            family=FAMILY,
            look=snapshot,
            clock=lambda roots, done: StepClock(steps_by, roots, done),
        )
        self.arrivals = self.intake.elsewhere = Arrivals(
            self.intake, self.selection, self.reduction, rank, process
        )
        self._graphs_before = 0
        self.sees_graphs = False  # a tap looks into compiled graphs

    def watch(self) -> None:
        from driftline.adapters.torch import modules

        for level in LEVELS[1:]:
            if level in self.levels:
                where, name = _TAPS[level]
                self.taps.append(getattr(importlib.import_module(where), name)(self))
        self._graphs_before = compiled_graphs()
        graph_watch.watch(self.arrivals)
        modules.watch(self)

    def unwatch(self) -> None:
        from driftline.adapters.torch import modules

        modules.unwatch(self)
        graph_watch.unwatch(self.arrivals)

    def after_fork(self) -> None:
        self.arrivals.after_fork()
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
        from driftline.adapters.torch import awaited

        if never := awaited.forget():
            self.event(
                "never-awaited",
                f"{never} results of collectives were never waited for; they were not captured",
            )
        graphs = compiled_graphs() - self._graphs_before
        if graphs > 0 and not self.sees_graphs and not self.intake.has_said("compiled"):
            self.event(
                "compiled",
                f"torch.compile made {graphs} graphs; modules inside them are not seen: run the "
                "program with TORCHDYNAMO_DISABLE=1 to see them",
                graphs=graphs,
            )
