"""The arguments of an operator: tensors in them by slot, the others as JSON. Reads no values."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import Any, cast

import torch

from driftline.adapters.torch.snapshot import undisturbed

_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
"""What a number is as a tensor, where torch makes one of it by itself."""
_LONGEST_TEXT = 200
_LONGEST_LIST = 1000


def with_tensors(args: tuple[Any, ...], positions: tuple[int, ...]) -> tuple[Any, ...]:
    """The same arguments with tensors in place of numbers, where an operator takes no number.

    TorchScript's constants are tensors that torch shows to modes as numbers, and it does not take
    all of them back.
    """
    for index in positions:
        if index < len(args) and type(args[index]) in _NUMBERS:
            number = args[index]
            with undisturbed():
                tensor = torch.scalar_tensor(number, dtype=_NUMBERS[type(number)])
            args = (*args[:index], tensor, *args[index + 1 :])
    return args


def tensors_in(value: Any, slot: str) -> Generator[tuple[str, torch.Tensor]]:
    """A tensor, or those of a list, each with its slot."""
    if isinstance(value, torch.Tensor):
        yield slot, value
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(cast("Sequence[Any]", value)):
            if isinstance(part, torch.Tensor):
                yield f"{slot}.{index}", part


def plain(value: Any) -> Any:
    """An argument that is no tensor, as JSON; what JSON has no word for in torch's words."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return value[:_LONGEST_TEXT]
    if type(value) is int:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, complex):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in cast("Sequence[Any]", value)[:_LONGEST_LIST]]
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return str(value)
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return str(value)
    return f"<{type(value).__name__}>"


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Its axes as they lie in memory, from the slowest; () where that is the order they have.

    In that order a transposed weight has the bytes of the weight itself.
    """
    if tensor.dim() < 2 or tensor.layout is not torch.strided or tensor.is_nested:
        return ()
    if tensor.is_contiguous():
        return ()
    strides = tensor.stride()
    order = tuple(sorted(range(len(strides)), key=lambda axis: -strides[axis]))
    return () if order == tuple(range(len(strides))) else order
