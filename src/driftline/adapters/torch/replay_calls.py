"""Calls that a replay has to do with: one under way, those it made, and what makes two alike."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from driftline.adapters.torch.candidate import CandidateCall
from driftline.adapters.torch.repeating import Script

if TYPE_CHECKING:
    from driftline.adapters.torch.taps import Frame

Slots = list[tuple[str, str, torch.Tensor]]
_RANDOM = ("Dropout", "RReLU", "FractionalMaxPool")


class NotReplayed(Exception):
    """Why a call cannot be replayed; the replay's own, nobody else sees it."""


class Part:
    """A call that a module made of another one, and what it gave."""

    __slots__ = ("candidate", "module", "slots", "value")

    def __init__(
        self, module: nn.Module, value: Any, slots: Slots, candidate: CandidateCall | None
    ) -> None:
        self.module = module
        self.value = value
        self.slots = slots
        self.candidate = candidate


class Open:
    """A call under way.

    Attributes:
        held: Its arguments as they were before it, in memory of their own; None if not needed.
        parts: The calls it made; None when nobody wants them.
        reason: Why it cannot be replayed, found out before it ran.
    """

    __slots__ = (
        "args",
        "candidate",
        "frame",
        "held",
        "inputs",
        "kwargs",
        "parts",
        "reason",
        "site",
    )

    def __init__(self, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.frame = frame
        self.args = args
        self.kwargs = kwargs
        self.site = ""
        self.candidate: CandidateCall | None = None
        self.held: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.inputs: Slots = []
        self.parts: list[Part] | None = None
        self.reason = ""


class Noting:
    """A script that is asked, when the repeated call is over, whether it drew random numbers."""

    def __init__(self, script: Script, look: Callable[[], None]) -> None:
        self._script = script
        self._look = look
        self._entered = False

    def __call__(self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        top = not self._entered
        self._entered = True
        result = self._script(call, module, args, kwargs)
        if top:
            self._look()
        return result


def bytes_of(slots: Slots) -> int:
    return sum(tensor.numel() * tensor.element_size() for _, _, tensor in slots)


def is_pure(module: nn.Module) -> bool:
    """One of torch's own layers that computes from its inputs and weights alone."""
    kind = type(module)
    return (
        kind.__module__.startswith("torch.nn.modules.")
        and not module._modules
        and "forward" not in module.__dict__
        and not getattr(module, "inplace", False)
        and not (module.training and (kind.__name__.startswith(_RANDOM) or module._buffers))
        and not module._forward_hooks
        and not module._forward_pre_hooks
    )


def likeness(opened: Open) -> Any:
    """Calls that agree in this run the same code: proven for one, it holds for the others."""
    module = opened.frame.module
    weights = [p for p in module._parameters.values() if p is not None]
    return (
        type(module),
        module.training,
        module.extra_repr(),
        tuple((tuple(p.shape), p.dtype, p.device) for p in weights),
        tuple((tuple(t.shape), t.stride(), t.dtype) for _, _, t in opened.inputs),
        torch.get_num_threads(),
    )
