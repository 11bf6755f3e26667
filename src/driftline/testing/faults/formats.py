"""Number formats and implementations a candidate can run in, and trusted runs of the same kind.

`trusted` gives executions of the reference that differ from the candidate's in rounding only: what
a noise floor is made of.
"""

# torch objects have no complete types
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from driftline.testing.faults.planting import sites_of

FORMATS = ("fp32", "bf16", "fp16", "int8", "compiled")
_DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


def in_format(
    model: nn.Module, inputs: dict[str, Any], name: str
) -> tuple[nn.Module, dict[str, Any]]:
    """The same model as it would run in a format; the given one may be changed."""
    if name in _DTYPES:
        return model.to(_DTYPES[name]), cast(inputs, _DTYPES[name])
    if name == "int8":
        for module in model.modules():
            if type(module).__name__ in ("Linear", "Conv1D") and "forward" not in vars(module):
                _dynamic_int8(module)
    elif name == "compiled":
        for block in sites_of(model, "block"):  # blocks, not the whole: what is inside is not seen
            model.get_submodule(block).compile()
    elif name != "fp32":
        raise ValueError(f"no format is called {name}")
    return model, inputs


def cast(inputs: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Inputs with their float tensors in a type."""
    return {
        key: value.to(dtype)
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for key, value in inputs.items()
    }


def _grid(values: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    scale = values.abs().amax(dim, keepdim=True).clamp(min=1e-12) / 127
    return torch.round(values / scale), scale


def _dynamic_int8(module: Any) -> None:
    """Weights by output channel, activations by token, sums exact, as dynamic quantisation does."""
    weight: torch.Tensor = module.weight.data
    rows = weight.t() if type(module).__name__ == "Conv1D" else weight
    codes, scales = _grid(rows, 1)

    def forward(x: torch.Tensor) -> torch.Tensor:
        here, scale = _grid(x, -1)
        y = functional.linear(here, codes) * scale * scales[:, 0]
        bias: torch.Tensor | None = module.bias
        return y if bias is None else y + bias

    module.forward = forward


def other_attention(model: nn.Module) -> nn.Module:
    """The model with another implementation of attention, where it has one."""
    setter = getattr(model, "set_attn_implementation", None)
    if setter is not None:
        setter("sdpa")
    return model


def dithered(model: nn.Module, seed: int) -> nn.Module:
    """The model with every embedding moved by about a unit in the last place of its format."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Embedding | nn.Conv2d) and isinstance(weight, torch.Tensor):
            unit = torch.finfo(weight.dtype).eps
            signs = torch.randint(-1, 2, weight.shape, generator=generator).to(weight.dtype)
            weight.data = weight.data * (1 + unit * signs)
    return model


def trusted(
    model: nn.Module, inputs: dict[str, Any], name: str
) -> Iterator[tuple[str, nn.Module, dict[str, Any]]]:
    """Executions of the reference in a format: as it is, with other attention, dithered."""
    for label, change in (
        ("plain", lambda m: m),
        ("other attention", other_attention),
        ("dithered", lambda m: dithered(m, 1)),
        ("dithered again", lambda m: dithered(m, 2)),
    ):
        fresh = copy.deepcopy(model)
        live, fed = in_format(fresh, inputs, name)
        yield label, change(live), fed
