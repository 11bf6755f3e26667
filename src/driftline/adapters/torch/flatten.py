"""Calls of torch modules as flat lists of named tensors; the rule is `adapters.flatten`'s."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from driftline.adapters.flatten import (
    MAX_DEPTH,
    MAX_TENSORS,
    NO_CACHE,
    WHOLE_CACHE,
    Binding,
    Flatten,
    binding_of,
)

Tensors = list[tuple[str, str, torch.Tensor]]

_FLATTEN = Flatten(torch.Tensor, (torch.dtype, torch.device, torch.Size))
inputs = _FLATTEN.inputs
outputs = _FLATTEN.outputs


def cache_part(module: nn.Module, stack: Sequence[object]) -> int:
    """Which part of a key-value cache concerns a module: its own layer, all for a root.

    Args:
        module: It is being called.
        stack: The calls under way, this one included.
    """
    if len(stack) <= 1:
        return WHOLE_CACHE
    layer = module.__dict__.get("layer_idx")
    return layer if type(layer) is int else NO_CACHE


__all__ = [
    "MAX_DEPTH",
    "MAX_TENSORS",
    "NO_CACHE",
    "WHOLE_CACHE",
    "Binding",
    "Tensors",
    "binding_of",
    "cache_part",
    "inputs",
    "outputs",
]
