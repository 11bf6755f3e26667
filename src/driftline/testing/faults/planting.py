"""What a fault is, where it can be planted, and how it is put into a live model."""

# torch objects have no complete types
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Plant = Callable[[nn.Module, str, float, torch.Generator], None]
Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    Attributes:
        name: What it is called.
        role: Where it can be: linear, norm, activation, attention, mlp, block, dropout, experts.
        causes: Names of causes that are right for it, best first.
        amounts: Severities, gross first; what they mean is the fault's own business.
        plant: Puts it into the model, at a site.
        fits: Whether a module of that role can have it.
        formats: Candidate formats it can be seen in; all where empty.
        sub_noise: It is meant to be smaller than the noise of 16-bit formats.
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
    """Changes the first tensor that a module returns."""
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
    if change is not None and "planted" not in vars(other):
        vars(other).pop("forward", None)
        after(other, change)


def before(module: Any, change: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> None:
    """Changes what a module is called with: `change` returns new `args, kwargs`."""
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = change(args, kwargs)
        return original(*args, **kwargs)

    module.forward = forward


def rows_of(module: Any) -> torch.Tensor:
    """A linear layer's weight with one row per output channel, whichever way it is stored."""
    weight: torch.Tensor = module.weight.data
    return weight.t() if type(module).__name__ == "Conv1D" else weight


def picked(count: int, most: int, generator: torch.Generator) -> torch.Tensor:
    """Some of the first `most` numbers, without repeats."""
    return torch.randperm(most, generator=generator)[:count]
