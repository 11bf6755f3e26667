"""Faults of how a model computes: what a kernel, a port or a forgotten switch gets wrong."""

# torch objects have no complete types
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from driftline.testing.faults.planting import Fault, after, before, part

FP8 = torch.float8_e4m3fn


def _epsilon_name(module: Any) -> str:
    return next((n for n in ("variance_epsilon", "eps") if hasattr(module, n)), "")


def _epsilon(model: nn.Module, site: str, amount: float, generator: torch.Generator) -> None:
    module = part(model, site)
    setattr(module, _epsilon_name(module), amount)


def _offset(model: nn.Module, site: str, amount: float, generator: torch.Generator) -> None:
    after(part(model, site), lambda y: y + amount * y.abs().mean())


def _token_shift(model: nn.Module, site: str, amount: float, generator: torch.Generator) -> None:
    after(part(model, site), lambda y: torch.roll(y, int(amount), dims=1))


def _tile_zeroed(model: nn.Module, site: str, amount: float, generator: torch.Generator) -> None:
    def change(y: torch.Tensor) -> torch.Tensor:
        y = y.clone()
        side = int(amount)
        y[..., side : 2 * side, side : 2 * side] = 0
        return y

    after(part(model, site), change)


def _tile_stale(model: nn.Module, site: str, amount: float, generator: torch.Generator) -> None:
    """A tile that was never written: it holds what the tile before it left there."""

    def change(y: torch.Tensor) -> torch.Tensor:
        y = y.clone()
        side = int(amount)
        y[..., side : 2 * side, :side] = y[..., :side, :side]
        return y

    after(part(model, site), change)


def _saturated(model: nn.Module, site: str, amount: float, generator: torch.Generator) -> None:
    def change(y: torch.Tensor) -> torch.Tensor:
        limit = float(amount * y.float().std())
        return y.clamp(-limit, limit)

    after(part(model, site), change)


def _rounded(model: nn.Module, site: str, amount: float, generator: torch.Generator) -> None:
    kind = FP8 if amount == 8 else torch.bfloat16
    after(part(model, site), lambda y: y.to(kind).to(y.dtype))


def _low_accumulation(
    model: nn.Module, site: str, amount: float, generator: torch.Generator
) -> None:
    """A product summed in bfloat16, chunk by chunk."""
    module = part(model, site)
    turned = type(module).__name__ == "Conv1D"

    def forward(x: torch.Tensor) -> torch.Tensor:
        weight: torch.Tensor = module.weight
        weight = weight.t() if turned else weight
        total: torch.Tensor | None = None
        for values, columns in zip(x.split(8, -1), weight.split(8, -1), strict=True):
            piece = (values.float() @ columns.t().float()).to(torch.bfloat16)
            total = piece if total is None else (total + piece)
        assert total is not None
        y = total.to(x.dtype)
        bias: torch.Tensor | None = module.bias
        return y if bias is None else y + bias

    module.forward = forward


_OTHERS = {
    "SiLUActivation": ("gelu", "relu"),
    "NewGELUActivation": ("relu", "gelu"),
    "GELUActivation": ("relu", "gelu_tanh"),
    "ReLU": ("gelu", "silu"),
}


def _activation(model: nn.Module, site: str, amount: float, generator: torch.Generator) -> None:
    module = part(model, site)
    kind = _OTHERS.get(type(module).__name__, ("relu", "silu"))[int(amount)]
    functions = {
        "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "relu": functional.relu,
        "silu": functional.silu,
    }
    module.forward = lambda x: functions[kind](x)


def _norm_in_low_precision(
    model: nn.Module, site: str, amount: float, generator: torch.Generator
) -> None:
    module = part(model, site)
    centred = isinstance(module, nn.LayerNorm)

    def forward(x: torch.Tensor) -> torch.Tensor:
        h = x.to(torch.bfloat16)
        if centred:
            h = h - h.mean(-1, keepdim=True)
        h = h * torch.rsqrt((h * h).mean(-1, keepdim=True) + getattr(module, _epsilon_name(module)))
        h = h * module.weight.to(torch.bfloat16)
        if centred:
            h = h + module.bias.to(torch.bfloat16)
        return h.to(x.dtype)

    module.forward = forward


def _dropout(model: nn.Module, site: str, amount: float, generator: torch.Generator) -> None:
    module = part(model, site)
    module.p = amount
    module.train()


def _dropout_after(model: nn.Module, site: str, amount: float, generator: torch.Generator) -> None:
    after(part(model, site), lambda y: functional.dropout(y, amount, training=True))


def _random(model: nn.Module, site: str, amount: float, generator: torch.Generator) -> None:
    """Additions in an order that is drawn anew, much enlarged."""
    after(part(model, site), lambda y: y * (1 + amount * torch.randn_like(y)))


def _not_a_number(model: nn.Module, site: str, amount: float, generator: torch.Generator) -> None:
    def change(y: torch.Tensor) -> torch.Tensor:
        y = y.clone()
        y.view(-1)[int(amount) % y.numel()] = float("nan")
        return y

    after(part(model, site), change)


def _is_mask(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 4 and value.is_floating_point()


def _with_mask(model: nn.Module, site: str, change: Any) -> None:
    def swap(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (
            tuple(change(a) if _is_mask(a) else a for a in args),
            {k: change(v) if _is_mask(v) else v for k, v in kwargs.items()},
        )

    before(part(model, site), swap)


def _mask_missing(model: nn.Module, site: str, amount: float, generator: torch.Generator) -> None:
    _with_mask(model, site, torch.zeros_like)


def _window(model: nn.Module, site: str, amount: float, generator: torch.Generator) -> None:
    """A sliding window that nobody asked for: late tokens lose sight of early ones."""

    def change(mask: torch.Tensor) -> torch.Tensor:
        rows, columns = mask.shape[-2:]
        late, early = (torch.arange(n, device=mask.device) for n in (rows, columns))
        far = late[:, None] - early[None] >= int(amount)
        return mask.masked_fill(far, torch.finfo(mask.dtype).min)

    _with_mask(model, site, change)


def _mask_shifted(model: nn.Module, site: str, amount: float, generator: torch.Generator) -> None:
    """Off by one: every token also sees the next."""
    _with_mask(model, site, lambda m: torch.cat([m[..., 1:, :], m[..., -1:, :]], dim=-2))


def _scaling(module: nn.Module) -> bool:
    return isinstance(getattr(module, "scaling", None), float)


def _attention_scale(
    model: nn.Module, site: str, amount: float, generator: torch.Generator
) -> None:
    part(model, site).scaling *= amount


def _residual_lost(model: nn.Module, site: str, amount: float, generator: torch.Generator) -> None:
    module = part(model, site)
    original = module.forward

    def forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        value = original(hidden, *args, **kwargs)
        if isinstance(value, torch.Tensor):
            return value - amount * hidden
        return (value[0] - amount * hidden, *value[1:])

    module.forward = forward


COMPUTING_FAULTS = (
    Fault(
        "norm epsilon",
        "norm",
        ("scale",),
        (1e-2, 1e-4),
        _epsilon,
        lambda m: bool(_epsilon_name(m)),
        sub_noise=True,
    ),
    Fault("offset", "linear", ("offset",), (0.5, 0.05), _offset),
    Fault("shift by a token", "linear", ("shift",), (1, -1), _token_shift),
    Fault("attention of the next token", "attention", ("shift",), (-1,), _token_shift),
    Fault("tile zeroed", "linear", ("zeroed",), (16, 8), _tile_zeroed),
    Fault("tile stale", "linear", ("stale",), (16, 8), _tile_stale),
    Fault("saturated", "linear", ("saturation",), (1.0, 2.0), _saturated),
    Fault("output in fp8", "linear", ("low-precision",), (8,), _rounded),
    Fault("output in bf16", "linear", ("low-precision",), (16,), _rounded, formats=("fp32",)),
    Fault(
        "sums in bf16",
        "linear",
        ("low-precision",),
        (16,),
        _low_accumulation,
        formats=("fp32", "fp16"),
    ),
    Fault("activation", "activation", ("activation",), (0, 1), _activation),
    Fault(
        "norm in low precision",
        "norm",
        ("norm-precision", "low-precision"),
        (16,),
        _norm_in_low_precision,
        formats=("fp32", "fp16"),
    ),
    Fault("dropout left on", "dropout", ("dropout",), (0.1,), _dropout),
    Fault("dropout in the mlp", "mlp", ("dropout",), (0.1, 0.3), _dropout_after),
    Fault("random", "linear", ("nondeterminism", "unknown"), (0.05,), _random),
    Fault("one NaN", "linear", ("nan",), (1000,), _not_a_number),
    Fault("mask missing", "attention", ("mask",), (1,), _mask_missing),
    Fault("window", "attention", ("mask",), (8, 24), _window),
    Fault("mask off by one", "attention", ("mask", "shift"), (1,), _mask_shifted),
    Fault(
        "attention scale", "attention", ("unknown", "scale"), (2.0, 1.2), _attention_scale, _scaling
    ),
    Fault("residual lost", "block", ("unknown", "offset", "scale"), (1.0, 0.25), _residual_lost),
)
