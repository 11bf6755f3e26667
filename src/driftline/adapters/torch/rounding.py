"""Other executions of one module that are all right: rounded once, or moved by a last bit."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from driftline.adapters.torch import modules
from driftline.adapters.torch.repeating import Script, copied

_LOW = (torch.bfloat16, torch.float16)
_WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def rounded_once(
    call: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What a fused kernel gives: computed in 32 bits, rounded at the end.

    Nothing changes for a module that computes in 32 bits anyway.
    """
    seen: list[torch.dtype] = []

    def widen(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype not in _LOW:
            return tensor
        seen.append(tensor.dtype)
        return tensor.float()

    wide_args, wide_kwargs = copied((args, kwargs), widen)
    if not seen:
        return call(module, *args, **kwargs)
    weights = {
        name: tensor.float()
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None and tensor.dtype in _LOW
    }
    with modules.aside(Script(module)):
        result = functional_call(module, weights, wide_args, wide_kwargs, strict=False)
    return copied(
        result, lambda tensor: tensor.to(seen[0]) if tensor.dtype is torch.float32 else tensor
    )


def dithered(tensor: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """A tensor of which each element is moved by one unit in its last place, up, down or not."""
    bits = tensor.detach().clone().contiguous().view(_WHOLE[tensor.element_size()])
    step = torch.randint(-1, 2, tensor.shape, generator=draw, dtype=bits.dtype).to(tensor.device)
    moved = torch.where(torch.isfinite(tensor) & (tensor != 0), bits + step, bits)
    value = moved.view(tensor.dtype).reshape(tensor.shape)
    # A step over zero or to infinity would be more than the last place.
    near = torch.isfinite(value) & (value.sign() == tensor.sign())
    return torch.where(near, value, tensor)
