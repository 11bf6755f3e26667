"""The same model computed otherwise, in ways that are all right: fused or not, other attention.

Whoever calls such a difference a fault raises a false alarm.
"""

# torch objects have no complete types
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from driftline.testing.faults.planting import sites_of


def as_it_is(model: nn.Module) -> nn.Module:
    """Nothing is changed."""
    return model


def other_attention(model: nn.Module) -> nn.Module:
    """Attention by `scaled_dot_product_attention`, where the model has that."""
    setter = getattr(model, "set_attn_implementation", None)
    if setter is not None:
        setter("sdpa")
    return model


def other_norms(model: nn.Module) -> nn.Module:
    """Norms that come in steps done by one fused kernel, and fused ones done in steps."""
    for module in model.modules():
        if "forward" in vars(module):
            continue  # somebody planted something here
        if isinstance(module, nn.LayerNorm):
            _in_steps(module)
        elif type(module).__name__.endswith("RMSNorm") or type(module).__name__ == "T5LayerNorm":
            _fused(module)
    return model


def _in_steps(module: Any) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide - wide.mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + module.eps)
        return wide.to(x.dtype) * module.weight + module.bias

    module.forward = forward


def _fused(module: Any) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        weight: torch.Tensor = module.weight
        return functional.rms_norm(x, weight.shape, weight, module.variance_epsilon)

    module.forward = forward


def compiled_blocks(model: nn.Module) -> nn.Module:
    """Every block compiled by inductor: what is inside is fused, and not seen any more."""
    for block in sites_of(model, "block"):
        model.get_submodule(block).compile()
    return model


def compiled_modules(model: nn.Module) -> nn.Module:
    """Every innermost module of a block compiled by inductor, the code around it left as it is."""
    for block in sites_of(model, "block"):
        for module in model.get_submodule(block).modules():
            if not module._modules and not isinstance(module, nn.Dropout):
                module.compile()
    return model


IMPLEMENTATIONS: Mapping[str, Callable[[nn.Module], nn.Module]] = {
    "as it is": as_it_is,
    "other attention": other_attention,
    "other norms": other_norms,
    "inductor": compiled_blocks,
}
"""By name: each takes a model, may change it, and gives one that means the same."""
