"""What the doors of capture need of Paddle: a session for one model, and who runs now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from driftline.adapters.paddle import modules
from driftline.adapters.paddle.names import Layer
from driftline.adapters.paddle.provenance import facts
from driftline.adapters.paddle.session import NO_OPERATORS, PaddleSession
from driftline.adapters.reduction import Reduction
from driftline.adapters.selection import Selection
from driftline.adapters.steps import StepsBy
from driftline.errors import BadInput
from driftline.runs.sink import Sink

__all__ = ["active", "check_levels", "facts", "is_model", "session_for"]

active = modules.active


def is_model(thing: object) -> bool:
    return isinstance(thing, Layer)


def check_levels(levels: Sequence[str]) -> None:
    """Refuse what Paddle does not show.

    Raises:
        BadInput: Operators are asked for.
    """
    if "ops" in levels:
        raise BadInput(NO_OPERATORS, hint="leave the level ops out")


def session_for(
    sink: Sink,
    selection: Selection,
    reduction: Reduction,
    levels: Sequence[str],
    *,
    model: Any,
    rank: int,
    steps_by: StepsBy,
    to_folder: bool,
) -> PaddleSession:
    """A session of one model, not started yet."""
    return PaddleSession(
        sink, selection, reduction, levels, model=model, rank=rank, steps_by=steps_by
    )
