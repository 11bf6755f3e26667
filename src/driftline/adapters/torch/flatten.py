"""Calls of torch modules as flat lists of named tensors; the rule is `adapters.flatten`'s."""

from __future__ import annotations

import torch

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

__all__ = [
    "MAX_DEPTH",
    "MAX_TENSORS",
    "NO_CACHE",
    "WHOLE_CACHE",
    "Binding",
    "Tensors",
    "binding_of",
    "inputs",
    "outputs",
]
