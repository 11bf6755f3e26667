"""Faults that are planted from outside into a model of somebody else's package.

Each function gives what plants one fault, at a module's path. Nothing here knows a package: weights
and buffers are changed, attributes set, modules replaced, forward functions wrapped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Plant = Callable[[nn.Module], None]


def tensor_changed(site: str, name: str, change: Callable[[Tensor], Tensor]) -> Plant:
    """A parameter or buffer holds other values."""

    def plant(model: nn.Module) -> None:
        owner: Any = model.get_submodule(site)
        tensor = getattr(owner, name)
        with torch.no_grad():
            # As a new value: a cached buffer may be shared with other modules.
            changed = change(tensor.detach().clone()).contiguous()
        if isinstance(tensor, nn.Parameter):
            tensor.data = changed
        else:
            setattr(owner, name, changed)

    return plant


def scaled(site: str, name: str, factor: float) -> Plant:
    """A weight is too large or too small."""
    return tensor_changed(site, name, lambda tensor: tensor * factor)


def rolled(site: str, name: str, axis: int, shift: int = 1) -> Plant:
    """Rows or columns are in another order."""
    return tensor_changed(site, name, lambda tensor: tensor.roll(shift, axis))


def through(site: str, name: str, dtype: torch.dtype) -> Plant:
    """A weight or buffer was kept in a coarser format."""
    return tensor_changed(site, name, lambda tensor: tensor.to(dtype).to(tensor.dtype))


def attribute(site: str, name: str, value: Any) -> Plant:
    """A setting is another one."""

    def plant(model: nn.Module) -> None:
        owner = model.get_submodule(site)
        if not hasattr(owner, name):
            raise AttributeError(f"'{site}' has no '{name}'")
        setattr(owner, name, value)

    return plant


def replaced(site: str, module: Callable[[], nn.Module]) -> Plant:
    """Another module takes the place, such as another activation."""

    def plant(model: nn.Module) -> None:
        parent, _, name = site.rpartition(".")
        model.get_submodule(site)
        setattr(model.get_submodule(parent), name, module())

    return plant


def training_left_on(site: str) -> Plant:
    """A part is still in training mode."""
    return lambda model: model.get_submodule(site).train() and None


def wrapped(site: str, change: Callable[..., Any]) -> Plant:
    """A module computes something else: `change(forward, *arguments)`."""

    def plant(model: nn.Module) -> None:
        module: Any = model.get_submodule(site)
        forward = module.forward
        module.forward = lambda *args, **kwargs: change(forward, *args, **kwargs)

    return plant


def stale(site: str) -> Plant:
    """A stale cache: a module gives the result of its first call again, if the shapes agree."""
    kept: list[Tensor] = []

    def change(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        if kept and kept[0].shape == result.shape:
            return kept[0].clone()
        kept[:] = [result.detach().clone()]
        return result

    return wrapped(site, change)
