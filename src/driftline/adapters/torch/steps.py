"""Which step a call of a torch module belongs to; the rule is `adapters.steps`'s."""

from __future__ import annotations

from collections.abc import Callable

import torch

from driftline.adapters.names import Root
from driftline.adapters.steps import StepClock as CommonClock
from driftline.adapters.steps import StepsBy

__all__ = ["StepClock", "StepsBy"]


class StepClock(CommonClock):
    """Counts steps for all models of a session; see `adapters.steps`."""

    def __init__(self, by: StepsBy, roots: list[Root], on_done: Callable[[int], None]) -> None:
        super().__init__(
            by,
            roots,
            on_done,
            grad_enabled=torch.is_grad_enabled,
            optimizer=torch.optim.Optimizer,
        )
