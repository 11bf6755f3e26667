"""One capture of Paddle layers.

`captures.session` holds what is common to all frameworks; this file adds what only Paddle has.
`module_calls` intercepts calls; `gradients` and `optimizers` are loaded if their level is captured.
Operators are not captured: Paddle has no function that all operators of a dynamic program call.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import paddle

from driftline.captures.calls import StepClock, StepsBy
from driftline.captures.options import Reduction
from driftline.captures.paddle.layers import STRUCTURE, layer_tree
from driftline.captures.paddle.tensors import grad_enabled, snapshot, undisturbed
from driftline.captures.selection import Selection
from driftline.captures.session import Adapter, Session
from driftline.registry import Address
from driftline.runs.sinks import JSON

if TYPE_CHECKING:
    from driftline.runs.sinks import Sink

# A tap is imported only if its level is captured.
_TAPS = {
    "gradients": ("driftline.captures.paddle.gradients", "GradientTap"),
    "params": ("driftline.captures.paddle.optimizers", "ParameterTap"),
}
NO_OPERATORS = "operators of Paddle programs are not seen; layers, gradients and parameters are"


class PaddleSession(Session):
    """Captures Paddle layers until it is stopped; see `captures.session.Session`.

    Args:
        sink: Receives the tensors; or a function that makes the sink when there is something to
            write.
        selection: Which tensors are captured.
        reduction: How much of each tensor is kept.
        levels: Any of modules, gradients, params; ops only causes an event.
        model: The only model to watch; None watches every layer call of the process.
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
        model: Any | None = None,
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
                functools.partial(
                    StepClock,
                    steps_by,
                    grad_enabled=grad_enabled,
                    optimizer=paddle.optimizer.Optimizer,
                ),
                Address("driftline.captures.paddle.model_facts:PaddleFacts"),
            ),
        )

    def watch(self) -> None:
        from driftline.captures.paddle import module_calls

        for level, (where, name) in _TAPS.items():
            if level in self.levels:
                self.taps.append(getattr(importlib.import_module(where), name)(self))
        # The level is not refused, because a launched program may use torch as well.
        if "ops" in self.levels:
            self.event("level", NO_OPERATORS)
        module_calls.watch(self)

    def unwatch(self) -> None:
        from driftline.captures.paddle import module_calls

        module_calls.unwatch(self)

    def undisturbed(self) -> AbstractContextManager[None]:
        return undisturbed()

    def tree(self) -> dict[str, JSON]:
        return cast("dict[str, JSON]", layer_tree(self.names, self.execution_order).to_json())
