"""Bugs to plant into small Llamas and GPT-2s: layer 2 gets one, the module it sits in is known."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

Change = Callable[[torch.Tensor], torch.Tensor]


def layer(model: Any) -> Any:
    return model.model.layers[2] if hasattr(model, "model") else model.transformer.h[2]


def first_of(owner: Any, *names: str) -> Any:
    return next(getattr(owner, name) for name in names if hasattr(owner, name))


def norm(model: Any) -> Any:
    return first_of(layer(model), "input_layernorm", "ln_1")


def down(model: Any) -> Any:
    return first_of(layer(model).mlp, "down_proj", "c_proj")


def up(model: Any) -> Any:
    return first_of(layer(model).mlp, "up_proj", "c_fc")


def act(model: Any) -> Any:
    return first_of(layer(model).mlp, "act_fn", "act")


def attention(model: Any) -> Any:
    return first_of(layer(model), "self_attn", "attn")


def query(model: Any) -> Any:
    return first_of(attention(model), "q_proj", "c_attn")


def after(module: nn.Module, change: Change) -> None:
    """Change what a module gives."""

    def hook(_: Any, __: Any, out: Any) -> Any:
        return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)

    module.register_forward_hook(hook)


def before(module: nn.Module, change: Change) -> None:
    """Change what a module computes with, behind what was captured as its input."""
    module.register_forward_pre_hook(lambda _, args: (change(args[0]), *args[1:]))


def epsilon(model: Any) -> None:
    module = norm(model)
    if hasattr(module, "variance_epsilon"):
        module.variance_epsilon = 1e-4
    else:
        module.eps = 1e-3


def relu(model: Any) -> None:
    module = act(model)
    module.forward = types.MethodType(lambda self, input: F.relu(input), module)


def zero_tile(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[..., 16:32] = 0
    return x


def copy_tile(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[:, 8:16] = x[:, 0:8]
    return x


def shuffle(x: torch.Tensor) -> torch.Tensor:
    return x[..., torch.randperm(x.shape[-1], generator=torch.Generator().manual_seed(1))]


def merge(x: torch.Tensor) -> torch.Tensor:
    b, t, c = x.shape
    return x.reshape(b, t, 4, c // 4).transpose(1, 2).reshape(b, t, c)


def one_nan(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[0, 3, 5] = float("nan")
    return x


def late(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[:, x.shape[1] * 3 // 4 :] *= 1.3
    return x


def add_bias(model: Any) -> None:
    module = down(model)
    if getattr(module, "bias", None) is not None:
        module.bias.data.zero_()
        return
    b = torch.randn(64, generator=torch.Generator().manual_seed(3))
    after(module, lambda x: x + (0.2 * x.float().std() * b).to(x.dtype))


class Bug(NamedTuple):
    plant: Callable[[Any], None]
    where: Callable[[Any], Any]
    cause: str


BUGS = {
    "epsilon": Bug(epsilon, norm, "scale"),
    "scale": Bug(lambda m: after(down(m), lambda x: x * 1.05), down, "scale"),
    "bias": Bug(add_bias, down, "offset"),
    "shuffled channels": Bug(lambda m: after(up(m), shuffle), up, "permutation"),
    "heads merged wrongly": Bug(lambda m: after(down(m), merge), down, "transpose"),
    "shift": Bug(lambda m: after(down(m), lambda x: torch.roll(x, 1, 1)), down, "shift"),
    "zero tile": Bug(lambda m: after(up(m), zero_tile), up, "zeroed"),
    "stale tile": Bug(lambda m: after(up(m), copy_tile), up, "stale"),
    "clipped": Bug(
        lambda m: after(up(m), lambda x: x.clamp(-0.8 * x.std(), 0.8 * x.std())), up, "saturation"
    ),
    "fp8": Bug(
        lambda m: after(down(m), lambda x: x.to(torch.float8_e4m3fn).to(x.dtype)),
        down,
        "low-precision",
    ),
    "relu": Bug(relu, act, "activation"),
    "dropout": Bug(lambda m: after(down(m), lambda x: F.dropout(x, 0.1, True)), down, "dropout"),
    "nan": Bug(lambda m: after(down(m), one_nan), down, "nan"),
    "late tokens": Bug(lambda m: after(attention(m), late), attention, "mask"),
}


def site_of(model: nn.Module, module: nn.Module) -> str:
    return next(name for name, each in model.named_modules() if each is module)


def fused(model: Any) -> Any:
    """Another right implementation: norms and activations in one rounding."""
    for module in model.modules():
        name = type(module).__name__
        if "RMSNorm" in name:

            def rms(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
                x = hidden_states.float()
                square = x.pow(2).mean(-1, keepdim=True)
                normal = x * torch.rsqrt(square + self.variance_epsilon)
                return (normal * self.weight.float()).to(hidden_states.dtype)

            module.forward = types.MethodType(rms, module)
        elif "GELU" in name:

            def gelu(self: Any, input: torch.Tensor) -> torch.Tensor:
                return F.gelu(input.float(), approximate="tanh").to(input.dtype)

            module.forward = types.MethodType(gelu, module)
        elif hasattr(module, "gate_proj"):

            def mlp(self: Any, x: torch.Tensor) -> torch.Tensor:
                gate = F.silu(self.gate_proj(x).float()) * self.up_proj(x).float()
                return self.down_proj(gate.to(x.dtype))

            module.forward = types.MethodType(mlp, module)
    return model
