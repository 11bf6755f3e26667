"""torch, as the saving hook sees it; see `adapters.saving`."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from driftline.adapters.names import ROOT
from driftline.adapters.saving import Leaf
from driftline.adapters.snapshot import Pending, Refusal, Snapshot
from driftline.adapters.torch import flatten
from driftline.adapters.torch.names import unwrapped
from driftline.adapters.torch.provenance import facts
from driftline.adapters.torch.snapshot import snapshot, undisturbed
from driftline.runs.sink import JSON


class Engine:
    """torch's answers."""

    def is_model(self, model: object) -> bool:
        return isinstance(model, nn.Module)

    def leaves(self, model: nn.Module) -> list[Leaf]:
        layers: list[tuple[str, nn.Module]] = list(unwrapped(model).named_modules())
        # It hands the weights of its projection to a function.
        attention = [layer for _, layer in layers if isinstance(layer, nn.MultiheadAttention)]
        silent = {id(child) for layer in attention for child in layer.children()}
        return [
            Leaf(layer, name, name or ROOT, id(layer) not in silent)
            for name, layer in layers
            if not any(True for _ in layer.children())
        ]

    def after_forward(self, layer: nn.Module, look: Callable[[Any], None]) -> None:
        def hook(_layer: object, _inputs: object, output: object) -> None:
            look(output)

        layer.register_forward_hook(hook)

    def parameters(self, leaf: Leaf) -> Iterator[tuple[str, str, torch.Tensor]]:
        for short, parameter in leaf.layer.named_parameters(recurse=False):
            if parameter.requires_grad:
                yield short, f"{leaf.name}.{short}", parameter

    def at_gradient(self, parameter: torch.Tensor, look: Callable[[Any], None]) -> None:
        def hook(gradient: torch.Tensor | None) -> None:
            if gradient is not None:
                look(gradient)

        parameter.register_hook(hook)

    def tensors(self, output: Any) -> list[tuple[str, str, Any]]:
        return flatten.outputs(output)

    def look(self, tensor: torch.Tensor) -> Snapshot | Refusal | Pending:
        return snapshot(tensor)

    def undisturbed(self) -> AbstractContextManager[None]:
        return undisturbed()

    def is_replay(self) -> bool:
        return torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1

    def rank(self) -> tuple[int, int] | None:
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            return int(distributed.get_rank()), int(distributed.get_world_size())
        return None

    def facts(self) -> dict[str, JSON]:
        return facts()
