# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""What an operator's schema says about its values, what it fails to say, and arguments by slot.

Which outputs are views, which arguments are written, and which memory was never filled: reading
that would make two equal runs differ. `WatchedOperator` adds what the error check needs to know.
Sees schemas and arguments, no values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Generator, Iterator, Sequence
from typing import Any, cast

import torch

from driftline.captures.torch.errcheck.inspect import tensors_in
from driftline.captures.torch.errcheck.rules import Numbers
from driftline.captures.torch.tensors import undisturbed

_WITHOUT_VALUES = frozenset(
    f"aten::{name}"
    for name in (
        "_unsafe_view",  # a view in all but its schema
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_quantized",
        "empty_strided",
        "_efficientzerotensor",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "set_",
        "record_stream",
    )
)
# What was there before is of no interest, and often was never written.
_OVERWRITES = re.compile(
    "aten::(bernoulli|cauchy|copy|exponential|fill|geometric|(log_)?normal|random|uniform|zero)_"
)
# Scratch space that a kernel leaves for its backward: not all of it is ever written.
_SCRATCH = frozenset(
    (
        *("workspace", "reserve", "reserveSpace", "dropout_state", "weight_buf"),  # recurrent, norm
        *("rng_state", "unused", "debug_attn_mask", "philox_seed", "philox_offset"),  # attention
    )
)
_SCRATCH_OUTPUTS = {  # where the schema gives no names
    "aten::mkldnn_rnn_layer": (3,),
    "aten::_cudnn_rnn": (3, 4),
    "aten::miopen_rnn": (3, 4),
    "aten::cudnn_batch_norm": (3,),
    "aten::_batch_norm_with_update": (3,),
}
_RUNNING = ("running_mean", "running_var")
_UNDECLARED_WRITES = {  # older operators that write where their schema does not say so
    "aten::native_batch_norm": _RUNNING,
    "aten::cudnn_batch_norm": _RUNNING,
    "aten::miopen_batch_norm": _RUNNING,
}
# Collectives return before they are done. What they send can be read; what they receive cannot,
# and most of c10d's take the memory to receive into as an argument among others.
_COLLECTIVES = frozenset({"c10d", "_c10d_functional"})
# Operators of c10d that only send; what they are given can be read.
_SENDERS = frozenset({"allreduce_", "allreduce_coalesced_", "reduce_", "send"})


class Operator:
    """What has to be known of one operator overload; looked up at every call, worked out once.

    Attributes:
        silent: Nothing of it has values of its own.
        unread: Arguments whose values before the call mean nothing.
        scratch: Positions of outputs that mean nothing.
        written: Position and name of arguments that are written but not returned.
        in_flight: Its outputs are still being received when it returns.
        tensors: Positions of arguments that must be tensors: here no number stands for one.
    """

    __slots__ = (
        *("arguments", "full_name", "in_flight", "name", "scratch", "silent", "tensors"),
        *("unread", "written"),
    )

    def __init__(self, func: Any) -> None:
        schema = getattr(func, "_schema", None)
        if schema is None:  # a higher-order operator such as flex_attention
            self.name = "higher_order." + str(func.name() if callable(func.name) else func.name)
            self.full_name = self.name
            self.arguments: list[str] = []
            self.written: list[tuple[int, str]] = []
            self.unread: frozenset[str] = frozenset()
            self.scratch: frozenset[int] = frozenset()
            self.tensors: tuple[int, ...] = ()
            self.silent = self.in_flight = False
            return
        self.name = str(schema.name).replace("::", ".", 1)
        self.full_name = f"{self.name}.{schema.overload_name or 'default'}"
        self.arguments = [argument.name for argument in schema.arguments]
        space, _, short = str(schema.name).partition("::")
        self.tensors = _tensor_positions(schema, short)
        self.written = _written_only(schema)
        self.unread = _SCRATCH.union(a.name for a in schema.arguments if a.is_out)
        if _OVERWRITES.fullmatch(schema.name):
            self.unread |= {"self"}
        self.scratch = frozenset(_SCRATCH_OUTPUTS.get(schema.name, ())).union(
            index for index, output in enumerate(schema.returns) if output.name in _SCRATCH
        )
        self.in_flight = space in _COLLECTIVES and short != "wait_tensor"
        self.silent = (
            bool(func.is_view)
            or str(schema.name) in _WITHOUT_VALUES
            or (space == "c10d" and short not in _SENDERS)
            or space == "profiler"  # marks that torch's optimizers leave; they compute nothing
        )


def _tensor_positions(schema: Any, short: str) -> tuple[int, ...]:
    """Positions of arguments that must be tensors."""
    # Where a number may stand for a tensor, torch converts it itself.
    if torch._C._should_allow_numbers_as_tensors(short):
        return ()
    return tuple(
        index for index, argument in enumerate(schema.arguments) if str(argument.type) == "Tensor"
    )


def _written_only(schema: Any) -> list[tuple[int, str]]:
    """Position and name of arguments that are written but not returned."""
    undeclared = _UNDECLARED_WRITES.get(str(schema.name), ())
    written = [
        (index, argument.name)
        for index, argument in enumerate(schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or argument.name in undeclared
    ]
    # What is written and also returned (`add_`, `out=`) is an output already.
    returned = sum(r.alias_info is not None and r.alias_info.is_write for r in schema.returns)
    return written if returned < len(written) else []


# The arguments of an operator: tensors by slot, the others as JSON.


_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
"""What a number is as a tensor, where torch makes one of it by itself."""
# Bounds the lines of the list of calls, not what an operator computes.
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


def argument_tensors(value: Any, slot: str) -> Generator[tuple[str, torch.Tensor]]:
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
        # JSON has no infinity and no NaN.
        return value if math.isfinite(value) else str(value)
    if isinstance(value, complex):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in cast("Sequence[Any]", value)[:_LONGEST_LIST]]
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return str(value)
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return str(value)
    return f"<{type(value).__name__}>"


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Its axes as they are in memory, from the slowest; () where that is the order they have.

    In that order a transposed weight has the bytes of the weight itself.
    """
    # Order of axes has no meaning below two of them.
    if tensor.dim() < 2 or tensor.layout is not torch.strided or tensor.is_nested:
        return ()
    if tensor.is_contiguous():
        return ()
    strides = tensor.stride()
    order = tuple(sorted(range(len(strides)), key=lambda axis: -strides[axis]))
    return () if order == tuple(range(len(strides))) else order


# What the error check has to know of an operator and of one call.


_ALLOCATES = frozenset(
    (
        *("aten.empty", "aten.empty_like", "aten.empty_permuted", "aten.empty_strided"),
        *("aten.new_empty", "aten.new_empty_strided", "aten.resize_", "aten.empty_quantized"),
    )
)
# A larger integer does not fit a float, and is no value of a tensor either.
_LARGEST_INT = 2**1023
_COLLECTIVE_PREFIXES = ("c10d.", "_c10d_functional.")
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
        self.collective = self.name.startswith(_COLLECTIVE_PREFIXES) and self.short != "wait_tensor"
        self.allocates = self.name in _ALLOCATES
        schema = getattr(func, "_schema", None)
        arguments = schema.arguments if schema is not None else ()
        self.defaults: dict[str, Any] = {
            argument.name: argument.default_value
            for argument in arguments
            if argument.has_default_value() and "Tensor" not in str(argument.type)
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
    numbers: list[float] = []
    for value in (*args, *kwargs.values()):
        items = value if isinstance(value, (list, tuple)) else (value,)
        for number in items:
            if type(number) is float or (type(number) is int and abs(number) < _LARGEST_INT):
                numbers.append(float(number))
    infinite = float("inf")
    return Numbers(
        any(number != number for number in numbers),
        any(abs(number) == infinite for number in numbers),
        tuple(abs(number) for number in numbers if abs(number) < infinite),
    )


def parameters_in(
    operator: WatchedOperator, args: Sequence[Any], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of a call that are no tensors, as JSON: what a replay needs besides."""
    names = operator.arguments
    values = dict(operator.defaults)
    for index, value in enumerate(args):
        values[names[index] if index < len(names) else str(index)] = value
    values |= kwargs
    return {name: plain(value) for name, value in values.items() if not _has_tensors(value)}


def _has_tensors(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(isinstance(part, torch.Tensor) for part in value)
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
