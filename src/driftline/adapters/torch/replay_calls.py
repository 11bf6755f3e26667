"""Calls that a replay has to do with: one under way, those it made, and what makes two alike."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from driftline.adapters.torch.candidate import Candidate, CandidateCall
from driftline.adapters.torch.names import is_compiled
from driftline.adapters.torch.repeating import same_bits

if TYPE_CHECKING:
    from driftline.adapters.torch.taps import Frame

Slots = list[tuple[str, str, torch.Tensor]]
_RANDOM = ("Dropout", "RReLU", "FractionalMaxPool")


class NotReplayed(Exception):
    """Why a call cannot be replayed; the replay's own, nobody else sees it."""


class NotReproduced(NotReplayed):
    """It was applied to its own inputs again, and did not give its own output."""


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
        proven: How a call like it was repeated to the bit; empty if that is still to be shown.
    """

    __slots__ = (
        "args",
        "candidate",
        "frame",
        "held",
        "inputs",
        "kwargs",
        "parts",
        "proven",
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
        self.proven = ""


def bytes_of(slots: Slots) -> int:
    return sum(tensor.numel() * tensor.element_size() for _, _, tensor in slots)


def in_bytes(size: int) -> str:
    """A limit in words; small ones are not called zero."""
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size} bytes"


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


def is_table(module: nn.Module) -> bool:
    """An embedding that only looks up: rounding its rows is rounding what comes out."""
    return type(module) is nn.Embedding and module.max_norm is None and is_pure(module)


def is_the_programs_own(opened: Open, candidate: Candidate) -> bool:
    """Whether the captured call was this very one: the same inputs in the same wide format."""
    call, module, inputs = opened.candidate, opened.frame.module, opened.inputs
    if call is None or any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")):
        return False
    if {slot for slot, _, _ in inputs} != set(call.inputs):
        return False
    tensors = (*module._parameters.values(), *module._buffers.values())
    return all(
        t is None or not t.is_floating_point() or t.dtype is torch.float32 for t in tensors
    ) and all(
        same_bits(tensor, candidate.tensor(call.inputs[slot], tensor.device, own=False))
        for slot, _, tensor in inputs
    )


def why_never(module: nn.Module) -> str:
    """Why a module is never applied again; empty if it may be."""
    if is_compiled(module):
        return "it is compiled; run the program with TORCHDYNAMO_DISABLE=1"
    held = (*module._parameters.values(), *module._buffers.values())
    if any(type(tensor).__name__ == "DTensor" for tensor in held):
        return "its weights are sharded over ranks"
    return ""


def likeness(opened: Open) -> Any:
    """Calls that agree in this run the same code: proven for one, it holds for the others.

    Among torch's own layers on a CPU shapes do not matter: no kernel there depends on the order in
    which threads arrive, whatever it chooses by shape. On other devices some do.
    """
    module = opened.frame.module
    weights = [p for p in module._parameters.values() if p is not None]
    if is_pure(module) and all(t.is_cpu for t in (*weights, *(t for _, _, t in opened.inputs))):
        kind = (type(module), module.training, len(weights))
        return *kind, tuple((slot, t.dtype) for slot, _, t in opened.inputs)
    return (
        type(module),
        getattr(module.forward, "__func__", module.forward),
        module.training,
        module.extra_repr(),
        tuple((name, type(child)) for name, child in module._modules.items()),
        tuple(sorted(name for name, value in opened.kwargs.items() if value is None)),
        tuple((tuple(p.shape), p.dtype, p.device) for p in weights),
        tuple((slot, tuple(t.shape), t.stride(), t.dtype) for slot, _, t in opened.inputs),
        bool(module._forward_hooks or module._forward_pre_hooks),
        torch.get_num_threads(),
    )


def in_short(problem: Exception) -> str:
    """An exception in one line that is not too long."""
    lines = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {lines[0][:200]}" if lines else type(problem).__name__
