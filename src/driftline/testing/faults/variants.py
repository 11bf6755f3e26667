# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportPrivateUsage=false
"""The same model computed differently but correctly: other implementations and number formats.

A method that calls such a difference a fault raises a false alarm. `trusted` gives the runs that
measure the noise of a format.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from driftline.testing.faults.faults import plant_again, rows_of, sites_of


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
            continue  # this module has a planted fault
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
            # Dropout does nothing in evaluation, and compiling it costs time.
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


# Number formats a candidate can run in, and trusted runs of the same kind.


FORMATS = ("fp32", "bf16", "fp16", "int8", "torch-int8", "compiled", "compiled-modules")
"""`int8` quantises weights by channel and activations by token, linear layers of all kinds;
`torch-int8` is `torch.ao.quantization.quantize_dynamic`, which takes `nn.Linear` alone. `compiled`
has each block compiled as a whole by inductor, `compiled-modules` each of its innermost modules."""
COMPILED = ("compiled", "compiled-modules")
INTEGERS = ("int8", "torch-int8")
_DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


def unit_roundoff(name: str) -> float:
    """Half the distance of neighbouring numbers near one; for integers, of codes at full scale."""
    if name in INTEGERS:
        return 1 / 254
    return torch.finfo(_DTYPES.get(name, torch.float32)).eps / 2


def in_format(
    model: nn.Module, inputs: dict[str, Any], name: str
) -> tuple[nn.Module, dict[str, Any]]:
    """The model as it would run in a format; the model passed in may be changed."""
    match name:
        case "bf16" | "fp16":
            return _lowered(model, _DTYPES[name]), cast(inputs, _DTYPES[name])
        case "int8":
            _swap(model, {site: Int8Linear(model.get_submodule(site)) for site in _linears(model)})
        case "torch-int8":
            _quantised_by_torch(model)
        case "compiled":
            compiled_blocks(model)
        case "compiled-modules":
            compiled_modules(model)
        case "fp32":
            pass
        case _:
            raise ValueError(f"no format is called {name}")
    return model, inputs


def _lowered(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Everything in a type but the frequencies of rotary positions.

    In 16 bits these are a fault of their own that grows with the position: loaders of models keep
    them in float32, a plain `.to` does not.
    """
    kept = {
        (module, name): value
        for module in model.modules()
        for name, value in module.named_buffers(recurse=False)
        if name.endswith("inv_freq")
    }
    model.to(dtype)
    for (module, name), value in kept.items():
        setattr(module, name, value)
    return model


def cast(inputs: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Inputs with their float tensors in a type."""
    return {
        key: value.to(dtype)
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for key, value in inputs.items()
    }


def _grid(values: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    # The clamp keeps a row of zeros from dividing by zero.
    scale = values.abs().amax(dim, keepdim=True).clamp(min=1e-12) / 127
    return torch.round(values / scale), scale


class Int8Linear(nn.Module):
    """A linear layer in eight bits: weights by output channel, activations by token, exact sums."""

    codes: torch.Tensor
    scales: torch.Tensor

    def __init__(self, module: Any) -> None:
        super().__init__()
        codes, scales = _grid(rows_of(module), 1)
        self.register_buffer("codes", codes.to(torch.int8))
        self.register_buffer("scales", scales[:, 0])
        self.bias: torch.Tensor | None = module.bias
        self.training = module.training

    @property
    def weight(self) -> torch.Tensor:
        """What the codes mean; some models ask for its type."""
        return self.codes * self.scales[:, None]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        quantized, scale = _grid(x, -1)
        y = functional.linear(quantized, self.codes.float()) * scale * self.scales
        return y if self.bias is None else y + self.bias


def _linears(model: nn.Module, kinds: tuple[str, ...] = ("Linear", "Conv1D")) -> list[str]:
    """Layers to quantise; one whose computation was replaced by a fault stays what it is."""
    return [
        name
        for name, module in model.named_modules()
        if type(module).__name__ in kinds and not _replaced(module)
    ]


def _replaced(module: nn.Module) -> bool:
    # A replaced forward no longer uses the weight that would be quantised.
    return "forward" in vars(module) and "planted" not in vars(module)


def _swap(model: nn.Module, others: Mapping[str, nn.Module]) -> None:
    for site, other in others.items():
        plant_again(model.get_submodule(site), other)
        model.set_submodule(site, other)


def _quantised_by_torch(model: nn.Module) -> None:
    from torch.ao import quantization
    from torch.ao.quantization.qconfig import default_dynamic_qconfig

    sites = _linears(model, ("Linear",))
    faulty = {site: model.get_submodule(site) for site in sites}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and still what people run
        quantize: Any = getattr(quantization, "quantize_dynamic")  # noqa: B009
        quantize(model, dict.fromkeys(sites, default_dynamic_qconfig), inplace=True)
    # Quantising replaced the modules, and the planted changes with them.
    for site, module in faulty.items():
        plant_again(module, model.get_submodule(site))


def dithered(model: nn.Module, seed: int) -> nn.Module:
    """The model with every embedding moved by about a unit in the last place of its format."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Embedding | nn.Conv2d) and isinstance(weight, torch.Tensor):
            unit = torch.finfo(weight.dtype).eps
            # One unit up, down or not at all.
            signs = torch.randint(-1, 2, weight.shape, generator=generator).to(weight.dtype)
            weight.data = weight.data * (1 + unit * signs)
    return model


def trusted(
    model: nn.Module, inputs: dict[str, Any], name: str, without: str = ""
) -> Iterator[tuple[str, nn.Module, dict[str, Any]]]:
    """Executions of the reference in a format: other implementations of it, and dithered.

    Args:
        model: The reference; it is copied.
        inputs: What it is called with.
        name: The format.
        without: An implementation to leave out. A fault-free candidate is one of these executions
            itself, and a noise run that is the candidate to the bit would prove nothing.
    """
    for label in ("as it is", "other attention", "other norms"):
        if label == without:
            continue
        live, fed = in_format(IMPLEMENTATIONS[label](copy.deepcopy(model)), inputs, name)
        yield label, live, fed
    for seed in (1, 2):
        live, fed = in_format(copy.deepcopy(model), inputs, name)
        yield f"dithered {seed}", dithered(live, seed), fed
