# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""The Paddle adapter of capture and of the saving hook: models, leaf layers, sessions, hooks.

It is the counterpart of `torch/framework.py`; `captures.framework` describes the interface.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from paddle.nn.layer.rnn import RNNBase

from driftline.captures.calls import StepsBy
from driftline.captures.framework import Leaf
from driftline.captures.naming import unwrapped
from driftline.captures.options import Reduction
from driftline.captures.paddle import layers as flatten
from driftline.captures.paddle import module_calls
from driftline.captures.paddle.layers import STRUCTURE, Layer, facts, rank
from driftline.captures.paddle.session import NO_OPERATORS, PaddleSession
from driftline.captures.paddle.tensors import snapshot, undisturbed
from driftline.captures.recorder import Refusal, Snapshot
from driftline.captures.selection import Selection
from driftline.errors import BadInput
from driftline.runs.sinks import JSON, Sink

__all__ = ["active", "check_levels", "facts", "is_model", "session_for"]


class Engine:
    """The saving hook's interface to Paddle; see `captures.framework.Engine`."""

    def is_model(self, model: object) -> bool:
        return isinstance(model, Layer)

    def leaves(self, model: Any) -> list[Leaf]:
        layers = list(unwrapped(STRUCTURE, model).named_sublayers(include_self=True))
        # One operator computes a whole LSTM; its cells only hold the weights and are never called.
        cells = [cell for _, layer in layers if isinstance(layer, RNNBase) for cell in layer]
        silent = {id(part) for cell in cells for part in cell.sublayers(include_self=True)}
        return [
            Leaf(layer, name, str(layer.full_name()), id(layer) not in silent)
            for name, layer in layers
            if not any(True for _ in STRUCTURE.children(layer))
        ]

    def after_forward(self, layer: Any, look: Callable[[Any], None]) -> None:
        # The hook must return nothing, or Paddle would replace the output.
        def hook(_layer: object, _inputs: object, output: object) -> None:
            look(output)

        layer.register_forward_post_hook(hook)

    def parameters(self, leaf: Leaf) -> Iterator[tuple[str, str, Any]]:
        for short, parameter in leaf.layer._parameters.items():
            if parameter is not None and not parameter.stop_gradient:
                yield short, str(parameter.name), parameter

    def at_gradient(self, parameter: Any, look: Callable[[Any], None]) -> None:
        # This hook must return nothing either, or Paddle would replace the gradient.
        def hook(gradient: Any) -> None:
            if gradient is not None:
                look(gradient)

        parameter.register_hook(hook)

    def tensors(self, output: Any) -> list[tuple[str, str, Any]]:
        return flatten.outputs(output)

    def look(self, tensor: Any) -> Snapshot | Refusal:
        return snapshot(tensor)

    def undisturbed(self) -> AbstractContextManager[None]:
        return undisturbed()

    def is_replay(self) -> bool:
        return module_calls.is_plain_call() or module_calls.in_backward()

    def rank(self) -> tuple[int, int] | None:
        return rank()

    def facts(self) -> dict[str, JSON]:
        return facts()


# Entry points for `captures.api`.


active = module_calls.active


def is_model(thing: object) -> bool:
    return isinstance(thing, Layer)


def check_levels(levels: Sequence[str]) -> None:
    """Refuse levels that cannot be captured in Paddle.

    Raises:
        BadInput: Operators are requested.
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
