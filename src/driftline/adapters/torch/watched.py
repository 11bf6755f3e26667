"""What the error watch has to know of an operator and of one call, from schema and arguments."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from driftline.adapters.torch.arguments import plain
from driftline.adapters.torch.judging import Numbers
from driftline.adapters.torch.schemas import Operator
from driftline.adapters.torch.screen import tensors_in

_ALLOCATES = frozenset(
    (
        *("aten.empty", "aten.empty_like", "aten.empty_permuted", "aten.empty_strided"),
        *("aten.new_empty", "aten.new_empty_strided", "aten.resize_", "aten.empty_quantized"),
    )
)
_LARGEST_INT = 2**1023
_COLLECTIVES = ("c10d.", "_c10d_functional.")
_LOGARITHMIC = {  # sums of exponentials for the backward pass: nothing has a logarithm of -inf
    "_ctc_loss": (1,),
    "_scaled_dot_product_flash_attention": (1,),
    "_scaled_dot_product_flash_attention_for_cpu": (1,),
    "_scaled_dot_product_efficient_attention": (1,),
    "_scaled_dot_product_cudnn_attention": (1,),
    "_flash_attention_forward": (1,),
    "_efficient_attention_forward": (1,),
}


class WatchedOperator(Operator):
    """What the watch has to know of an operator besides.

    Attributes:
        short: Its name without the namespace.
        allocates: Its result is memory that nobody has written.
        overwrites: Position and name of arguments that it reads and writes.
        collective: Other ranks may write into its tensors.
        mutates: It writes into something that was there before.
        defaults: Arguments that are no tensors and need not be given.
    """

    __slots__ = ("allocates", "collective", "defaults", "mutates", "overwrites", "short")

    def __init__(self, func: Any) -> None:
        super().__init__(func)
        self.short = self.name.partition(".")[2]
        self.scratch = self.scratch.union(_LOGARITHMIC.get(self.short, ()))
        if self.full_name.endswith("_mode"):
            self.short += "_mode"  # a division that rounds: its zeros are the point
        self.collective = self.name.startswith(_COLLECTIVES) and self.short != "wait_tensor"
        self.allocates = self.name in _ALLOCATES
        schema = getattr(func, "_schema", None)
        arguments = schema.arguments if schema is not None else ()
        self.defaults: dict[str, Any] = {
            one.name: one.default_value
            for one in arguments
            if one.has_default_value() and "Tensor" not in str(one.type)
        }
        written = [
            (index, argument)
            for index, argument in enumerate(arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        self.mutates = bool(written or self.written)
        self.overwrites = [
            (index, argument.name)
            for index, argument in written
            if not argument.is_out and argument.name not in self.unread
        ]


def numbers_in(args: Sequence[Any], kwargs: dict[str, Any]) -> Numbers:
    """Numbers that were written into a call."""
    found: list[float] = []
    for value in (*args, *kwargs.values()):
        items = value if isinstance(value, (list, tuple)) else (value,)
        for one in items:
            if type(one) is float or (type(one) is int and abs(one) < _LARGEST_INT):
                found.append(float(one))
    infinite = float("inf")
    return Numbers(
        any(one != one for one in found),
        any(abs(one) == infinite for one in found),
        tuple(abs(one) for one in found if abs(one) < infinite),
    )


def parameters_in(
    operator: WatchedOperator, args: Sequence[Any], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of a call that are no tensors, as JSON: what a replay needs besides."""
    names = operator.arguments
    found = dict(operator.defaults)
    for index, value in enumerate(args):
        found[names[index] if index < len(names) else str(index)] = value
    found |= kwargs
    return {name: plain(value) for name, value in found.items() if not _has_tensors(value)}


def _has_tensors(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(isinstance(one, torch.Tensor) for one in value)
    return isinstance(value, torch.Tensor)


def inputs_of(
    operator: WatchedOperator, args: Sequence[Any], kwargs: dict[str, Any]
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Name, position and tensor of everything a call reads."""
    names = operator.arguments
    for index, value in enumerate(args):
        name = names[index] if index < len(names) else str(index)
        if name not in operator.unread:
            for slot, tensor in tensors_in(value, name):
                yield slot, str(index), tensor
    for name, value in kwargs.items():
        if name not in operator.unread:
            for slot, tensor in tensors_in(value, name):
                yield slot, "", tensor


def outputs_of(
    operator: WatchedOperator, args: Sequence[Any], kwargs: dict[str, Any], result: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """Slot and tensor of everything a call writes."""
    if isinstance(result, torch.Tensor):
        yield "0", result
    elif isinstance(result, (list, tuple)):
        for index, value in enumerate(result):
            if index not in operator.scratch:
                yield from tensors_in(value, str(index))
    for index, name in operator.written:
        yield from tensors_in(args[index] if index < len(args) else kwargs.get(name), name)
