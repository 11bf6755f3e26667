"""Paddle, as the saving hook sees it; see `adapters.saving`."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from paddle.nn.layer.rnn import RNNBase

from driftline.adapters.names import unwrapped
from driftline.adapters.paddle import flatten, modules
from driftline.adapters.paddle.names import FAMILY, Layer
from driftline.adapters.paddle.provenance import facts, rank
from driftline.adapters.paddle.snapshot import snapshot, undisturbed
from driftline.adapters.saving import Leaf
from driftline.adapters.snapshot import Refusal, Snapshot
from driftline.runs.sink import JSON


class Engine:
    """Paddle's answers."""

    def is_model(self, model: object) -> bool:
        return isinstance(model, Layer)

    def leaves(self, model: Any) -> list[Leaf]:
        layers = list(unwrapped(FAMILY, model).named_sublayers(include_self=True))
        # One operator computes an LSTM; its cells hold the weights and are never called.
        cells = [one for _, layer in layers if isinstance(layer, RNNBase) for one in layer]
        silent = {id(one) for cell in cells for one in cell.sublayers(include_self=True)}
        return [
            Leaf(layer, name, str(layer.full_name()), id(layer) not in silent)
            for name, layer in layers
            if not any(True for _ in FAMILY.children(layer))
        ]

    def after_forward(self, layer: Any, look: Callable[[Any], None]) -> None:
        def hook(_layer: object, _inputs: object, output: object) -> None:
            look(output)

        layer.register_forward_post_hook(hook)

    def parameters(self, leaf: Leaf) -> Iterator[tuple[str, str, Any]]:
        for short, parameter in leaf.layer._parameters.items():
            if parameter is not None and not parameter.stop_gradient:
                yield short, str(parameter.name), parameter

    def at_gradient(self, parameter: Any, look: Callable[[Any], None]) -> None:
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
        return modules.is_plain_call() or modules.in_backward()

    def rank(self) -> tuple[int, int] | None:
        return rank()

    def facts(self) -> dict[str, JSON]:
        return facts()
