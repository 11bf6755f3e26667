"""Faults of what a model was loaded with: weights and biases that are not what they should be."""

# torch objects have no complete types
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
from __future__ import annotations

from typing import Any

import torch
from torch import nn

from driftline.testing.faults.planting import Fault, part, picked, rows_of

_HEADS = 4


def _square(module: Any) -> bool:
    rows = rows_of(module)
    return rows.shape[0] == rows.shape[1]


def _in_heads(module: Any) -> bool:
    return rows_of(module).shape[0] % _HEADS == 0 and type(module).__name__ == "Linear"


def _has_bias(module: Any) -> bool:
    return getattr(module, "bias", None) is not None


def _scaled(model: nn.Module, site: str, amount: float, generator: torch.Generator) -> None:
    module = part(model, site)
    module.weight.data.mul_(1 + amount)
    if _has_bias(module):
        module.bias.data.mul_(1 + amount)


def _norm_weight_plus_one(
    model: nn.Module, site: str, amount: float, generator: torch.Generator
) -> None:
    part(model, site).weight.data.add_(amount)


def _bias_times(model: nn.Module, site: str, amount: float, generator: torch.Generator) -> None:
    part(model, site).bias.data.mul_(amount)


def _heads_swapped(model: nn.Module, site: str, amount: float, generator: torch.Generator) -> None:
    rows = rows_of(part(model, site))
    heads = rows.reshape(_HEADS, -1, rows.shape[1])
    order = torch.roll(torch.arange(_HEADS), int(amount))
    rows.copy_(heads[order].reshape(rows.shape).clone())


def _channels_permuted(
    model: nn.Module, site: str, amount: float, generator: torch.Generator
) -> None:
    rows = rows_of(part(model, site))
    some = picked(max(2, int(amount * rows.shape[0])), rows.shape[0], generator)
    rows[some] = rows[some.roll(1)].clone()


def _interleaved(model: nn.Module, site: str, amount: float, generator: torch.Generator) -> None:
    """Rotary halves stored as neighbours: a converter that forgot to put them back."""
    rows = rows_of(part(model, site))
    parts = rows.reshape(_HEADS, 2, -1, rows.shape[1])
    rows.copy_(parts.transpose(1, 2).reshape(rows.shape).clone())


def _transposed(model: nn.Module, site: str, amount: float, generator: torch.Generator) -> None:
    rows = rows_of(part(model, site))
    rows.copy_(rows.t().clone())


def _channels_zeroed(
    model: nn.Module, site: str, amount: float, generator: torch.Generator
) -> None:
    module = part(model, site)
    rows = rows_of(module)
    some = picked(max(1, int(amount * rows.shape[0])), rows.shape[0], generator)
    rows[some] = 0
    if _has_bias(module):
        module.bias.data[some] = 0


def _partial_sum(model: nn.Module, site: str, amount: float, generator: torch.Generator) -> None:
    """One rank's share of a row-parallel layer: the other ranks' inputs were never added."""
    rows = rows_of(part(model, site))
    kept = int(rows.shape[1] / amount)
    rows[:, kept:] = 0


def _row_sign(model: nn.Module, site: str, amount: float, generator: torch.Generator) -> None:
    rows = rows_of(part(model, site))
    rows[picked(max(1, int(amount * rows.shape[0])), rows.shape[0], generator)] *= -1


def _weight_in_fp8(model: nn.Module, site: str, amount: float, generator: torch.Generator) -> None:
    weight = part(model, site).weight
    weight.data = weight.data.to(torch.float8_e4m3fn).to(weight.dtype)


def _expert_zeroed(model: nn.Module, site: str, amount: float, generator: torch.Generator) -> None:
    part(model, site).down_proj.data[int(amount)] = 0


def _experts_swapped(
    model: nn.Module, site: str, amount: float, generator: torch.Generator
) -> None:
    module = part(model, site)
    first, second = 0, int(amount)
    for stack in (module.gate_up_proj.data, module.down_proj.data):
        stack[[first, second]] = stack[[second, first]].clone()


def _one_weight(model: nn.Module, site: str, amount: float, generator: torch.Generator) -> None:
    rows = rows_of(part(model, site))
    at = int(picked(1, rows.numel(), generator)[0])
    rows[at // rows.shape[1], at % rows.shape[1]] += amount


PARAMETER_FAULTS = (
    Fault("scaled weight", "linear", ("scale",), (0.5, 0.05), _scaled),
    Fault("scale of 0.2 %", "linear", ("scale",), (0.002,), _scaled, sub_noise=True),
    Fault("norm weight plus one", "norm", ("scale", "offset"), (1.0, 0.25), _norm_weight_plus_one),
    Fault("bias missing", "linear", ("offset",), (0.0,), _bias_times, _has_bias),
    Fault("bias doubled", "linear", ("offset",), (2.0,), _bias_times, _has_bias),
    Fault("heads in another order", "linear", ("permutation",), (1, 2), _heads_swapped, _in_heads),
    Fault("channels permuted", "linear", ("permutation",), (1.0, 0.25), _channels_permuted),
    Fault("halves interleaved", "linear", ("permutation",), (1,), _interleaved, _in_heads),
    Fault("weight transposed", "linear", ("transpose",), (1,), _transposed, _square),
    Fault("channels zeroed", "linear", ("zeroed",), (0.25, 0.04), _channels_zeroed),
    Fault("partial sum", "linear", ("missing-reduction",), (2, 4), _partial_sum),
    Fault("sign of channels", "linear", ("scale", "unknown"), (0.25,), _row_sign),
    Fault("weight in fp8", "linear", ("low-precision",), (1,), _weight_in_fp8),
    Fault("expert zeroed", "experts", ("zeroed",), (0, 1), _expert_zeroed),
    Fault("experts swapped", "experts", ("permutation", "unknown"), (1, 2), _experts_swapped),
    Fault("one weight flipped", "linear", ("zeroed", "offset", "unknown"), (4.0, 1.0), _one_weight),
)
