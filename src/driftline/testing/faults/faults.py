# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
"""Faults that can be planted into a live model, and where each of them fits.

First what a fault is and the helpers that plant it, then faults of computation (kernels, ports,
forgotten switches), then faults of parameters (weights and biases). Knows nothing of diagnosis.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Plant = Callable[[nn.Module, str, float, torch.Generator], None]
Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    Attributes:
        name: Its name.
        role: Kind of module: linear, norm, activation, attention, mlp, block, dropout, experts.
        causes: Names of causes that are right for it, best first.
        amounts: Severities, largest first; their meaning depends on the fault.
        plant: Plants it into the model at a site.
        fits: Whether a module of that role can have it.
        formats: Candidate formats in which it is visible; empty for all.
        sub_noise: Whether it is meant to be smaller than the noise of 16-bit formats.
    """

    name: str
    role: str
    causes: tuple[str, ...]
    amounts: tuple[float, ...]
    plant: Plant
    fits: Callable[[nn.Module], bool] = lambda module: True
    formats: tuple[str, ...] = ()
    sub_noise: bool = False

    def sites(self, model: nn.Module) -> list[str]:
        """Where it can be planted in this model."""
        return [s for s in sites_of(model, self.role) if self.fits(model.get_submodule(s))]


def sites_of(model: nn.Module, role: str) -> list[str]:
    """Module paths of a role, inside the layer stack only."""
    # Embeddings and heads are left out: a path inside the stack has a number in it.
    inside = re.compile(r"\.\d+(\.|$)")
    return [
        name
        for name, module in model.named_modules()
        if inside.search(name) and _plays(module, role)
    ]


def _plays(module: nn.Module, role: str) -> bool:
    kind = type(module).__name__
    match role:
        case "linear":
            return kind in ("Linear", "Conv1D")
        case "norm":
            return kind.endswith("Norm")
        case "activation":
            return kind.endswith("Activation") or kind == "ReLU"
        case "attention":
            return "Attention" in kind and any(
                type(child).__name__ in ("Linear", "Conv1D") for child in module.children()
            )
        case "mlp":
            return kind.endswith(("MLP", "DenseActDense", "MoeBlock"))
        case "dropout":
            return isinstance(module, nn.Dropout)
        case "experts":
            return kind.endswith("Experts")
        case "block":
            return kind.endswith(("DecoderLayer", "Block")) or kind in ("BertLayer", "ViTLayer")
        case _:
            raise ValueError(f"no role is called {role}")


def part(model: nn.Module, site: str) -> Any:
    """A module by its path; Any, because modules have whatever attributes they have."""
    return model.get_submodule(site)


def after(module: Any, change: Change) -> None:
    """Change the first tensor that a module returns."""
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        value = original(*args, **kwargs)
        if isinstance(value, torch.Tensor):
            return change(value)
        return (change(value[0]), *value[1:])

    module.forward = forward
    module.planted = change  # so that it can be put on a module that takes this one's place


def plant_again(module: Any, other: Any) -> None:
    """Give a module that replaces another the change that `after` had put on that one."""
    change: Change | None = vars(module).get("planted")
    # A copy made by torch may carry the change already; twice would be another fault.
    if change is not None and "planted" not in vars(other):
        # The copied forward belongs to the replaced module and would run its weights.
        vars(other).pop("forward", None)
        after(other, change)


def before(module: Any, change: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> None:
    """Change the arguments of a module: `change` returns new `args, kwargs`."""
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = change(args, kwargs)
        return original(*args, **kwargs)

    module.forward = forward


def rows_of(module: Any) -> torch.Tensor:
    """A linear layer's weight with one row per output channel, whichever way it is stored."""
    weight: torch.Tensor = module.weight.data
    # GPT-2 stores its linear layers transposed.
    return weight.t() if type(module).__name__ == "Conv1D" else weight


def picked(count: int, most: int, generator: torch.Generator) -> torch.Tensor:
    """`count` of the numbers below `most`, drawn without repeats."""
    return torch.randperm(most, generator=generator)[:count]


# Faults of computation: kernels, ports to other hardware, forgotten switches.


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
    """A tile that was never written: it holds the values of the previous tile."""

    def change(y: torch.Tensor) -> torch.Tensor:
        y = y.clone()
        side = int(amount)
        y[..., side : 2 * side, :side] = y[..., :side, :side]
        return y

    after(part(model, site), change)


def _saturated(model: nn.Module, site: str, amount: float, generator: torch.Generator) -> None:
    def change(y: torch.Tensor) -> torch.Tensor:
        # Relative to the tensor's own spread, so that one amount fits every layer.
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
    # The product below needs one row per output channel.
    turned = type(module).__name__ == "Conv1D"

    def forward(x: torch.Tensor) -> torch.Tensor:
        weight: torch.Tensor = module.weight
        weight = weight.t() if turned else weight
        total: torch.Tensor | None = None
        for values, columns in zip(x.split(8, -1), weight.split(8, -1), strict=True):
            piece = (values.float() @ columns.t().float()).to(torch.bfloat16)
            total = piece if total is None else (total + piece)
        assert total is not None
        # The bias is added afterwards, as kernels do it.
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
    # Never the activation that the model has.
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
    # RMS norms subtract no mean and have no bias.
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
    # Attention masks are the only floating-point tensors of rank four among these arguments.
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
    """A sliding window by mistake: late tokens do not see early ones."""

    def change(mask: torch.Tensor) -> torch.Tensor:
        rows, columns = mask.shape[-2:]
        # Rows are the tokens that look, columns those that are seen.
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


# Faults of parameters: wrong weights and biases.


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
    # A rotation moves every head, so none is right by chance.
    order = torch.roll(torch.arange(_HEADS), int(amount))
    rows.copy_(heads[order].reshape(rows.shape).clone())


def _channels_permuted(
    model: nn.Module, site: str, amount: float, generator: torch.Generator
) -> None:
    rows = rows_of(part(model, site))
    # At least two: one channel cannot be permuted.
    some = picked(max(2, int(amount * rows.shape[0])), rows.shape[0], generator)
    # Cloned, because both sides share memory.
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
    index = int(picked(1, rows.numel(), generator)[0])
    rows[index // rows.shape[1], index % rows.shape[1]] += amount


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
    Fault(
        "one weight flipped",
        "linear",
        ("weights", "zeroed", "offset", "unknown"),
        (4.0, 1.0),
        _one_weight,
    ),
)
