# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""Facts about operators from their schemas, facts that schemas lack, and arguments by slot.

They include which outputs are views, which arguments are written, and which memory is never filled;
if that was read, two equal runs would differ. `WatchedOperator` adds facts for the error check.
This file reads schemas and arguments, but no values of tensors.
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
        "_unsafe_view",  # a view, although its schema does not say so
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
# These operators overwrite `self`, whose old values often were never written.
_OVERWRITES = re.compile(
    "aten::(bernoulli|cauchy|copy|exponential|fill|geometric|(log_)?normal|random|uniform|zero)_"
)
# Scratch memory that a kernel keeps for its backward, not all of which is ever written.
_SCRATCH = frozenset(
    (
        *("workspace", "reserve", "reserveSpace", "dropout_state", "weight_buf"),  # recurrent, norm
        *("rng_state", "unused", "debug_attn_mask", "philox_seed", "philox_offset"),  # attention
    )
)
_SCRATCH_OUTPUTS = {  # for operators whose schemas do not name these outputs
    "aten::mkldnn_rnn_layer": (3,),
    "aten::_cudnn_rnn": (3, 4),
    "aten::miopen_rnn": (3, 4),
    "aten::cudnn_batch_norm": (3,),
    "aten::_batch_norm_with_update": (3,),
}
_RUNNING = ("running_mean", "running_var")
_UNDECLARED_WRITES = {  # older operators that write arguments although their schemas do not say so
    "aten::native_batch_norm": _RUNNING,
    "aten::cudnn_batch_norm": _RUNNING,
    "aten::miopen_batch_norm": _RUNNING,
}
# Collectives return before they are done. Tensors that they send can be read, but not those that
# they receive; most of c10d's get the memory for received tensors as an argument among others.
_COLLECTIVES = frozenset({"c10d", "_c10d_functional"})
# Operators of c10d that only send, so that their inputs can be read.
_SENDERS = frozenset({"allreduce_", "allreduce_coalesced_", "reduce_", "send"})


class Operator:
    """Facts about one operator overload, computed once and used at every call.

    Attributes:
        arguments: Names of its arguments.
        name: Its name with the namespace, such as `aten.mm`.
        full_name: Its name with the overload.
        silent: Whether none of its tensors has values of its own.
        unread: Arguments whose values before the call have no meaning.
        scratch: Positions of outputs whose values have no meaning.
        written: Position and name of arguments that are written but not returned.
        in_flight: Whether its outputs are still being received when it returns.
        tensors: Positions of arguments that must be tensors and cannot be numbers.
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
            or space == "profiler"  # marks of torch's optimizers for the profiler, without results
        )


def _tensor_positions(schema: Any, short: str) -> tuple[int, ...]:
    """Positions of arguments that must be tensors."""
    # If an operator accepts numbers as tensors, torch converts them.
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
    # Arguments that are written and also returned (`add_`, `out=`) are outputs already.
    returned = sum(r.alias_info is not None and r.alias_info.is_write for r in schema.returns)
    return written if returned < len(written) else []


# The arguments of an operator: tensors by slot, other arguments as JSON.


_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
"""The dtypes that torch uses when it makes tensors of Python numbers."""
# Limits for lines of the list of calls.
_LONGEST_TEXT = 200
_LONGEST_LIST = 1000


def with_tensors(args: tuple[Any, ...], positions: tuple[int, ...]) -> tuple[Any, ...]:
    """The arguments with numbers replaced by tensors at positions that must be tensors.

    torch passes constants of TorchScript, which are tensors, to modes as numbers. It does not
    accept all of these numbers as arguments.
    """
    for index in positions:
        if index < len(args) and type(args[index]) in _NUMBERS:
            number = args[index]
            with undisturbed():
                tensor = torch.scalar_tensor(number, dtype=_NUMBERS[type(number)])
            args = (*args[:index], tensor, *args[index + 1 :])
    return args


def argument_tensors(value: Any, slot: str) -> Generator[tuple[str, torch.Tensor]]:
    """(slot, tensor) of a tensor, or of each tensor in a list."""
    if isinstance(value, torch.Tensor):
        yield slot, value
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(cast("Sequence[Any]", value)):
            if isinstance(part, torch.Tensor):
                yield f"{slot}.{index}", part


def plain(value: Any) -> Any:
    """An argument other than a tensor, as JSON; torch's own types are converted to text."""
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
    """The axes of a tensor in memory order, the slowest first; () if this is their own order.

    In memory order a transposed weight has the same bytes as the weight itself.
    """
    # With fewer than two axes there is no order.
    if tensor.dim() < 2 or tensor.layout is not torch.strided or tensor.is_nested:
        return ()
    if tensor.is_contiguous():
        return ()
    strides = tensor.stride()
    order = tuple(sorted(range(len(strides)), key=lambda axis: -strides[axis]))
    return () if order == tuple(range(len(strides))) else order


# Facts about operators and calls for the error check.


_ALLOCATES = frozenset(
    (
        *("aten.empty", "aten.empty_like", "aten.empty_permuted", "aten.empty_strided"),
        *("aten.new_empty", "aten.new_empty_strided", "aten.resize_", "aten.empty_quantized"),
    )
)
# A larger integer may not fit into a float, and cannot be a value of a tensor either.
_LARGEST_INT = 2**1023
_COLLECTIVE_PREFIXES = ("c10d.", "_c10d_functional.")
# Outputs that are logarithms of sums of exponentials, for the backward pass. That of an empty sum
# is -inf, which is no error.
_LOGARITHMIC = {
    "_ctc_loss": (1,),
    "_scaled_dot_product_flash_attention": (1,),
    "_scaled_dot_product_flash_attention_for_cpu": (1,),
    "_scaled_dot_product_efficient_attention": (1,),
    "_scaled_dot_product_cudnn_attention": (1,),
    "_flash_attention_forward": (1,),
    "_efficient_attention_forward": (1,),
}


class WatchedOperator(Operator):
    """Further facts about an operator for the error check.

    Attributes:
        short: Its name without the namespace.
        allocates: Whether its result is memory that was never written.
        overwrites: Position and name of arguments that it reads and writes.
        collective: Whether other ranks may write into its tensors.
        mutates: Whether it writes into an argument.
        defaults: Default values of arguments other than tensors.
    """

    __slots__ = ("allocates", "collective", "defaults", "mutates", "overwrites", "short")

    def __init__(self, func: Any) -> None:
        super().__init__(func)
        self.short = self.name.partition(".")[2]
        self.scratch = self.scratch.union(_LOGARITHMIC.get(self.short, ()))
        if self.full_name.endswith("_mode"):
            self.short += "_mode"  # a division that rounds, so that results of zero are intended
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
    """The Python numbers among the arguments of a call."""
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
    """The arguments of a call other than tensors, as JSON; a replay needs them too."""
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
    """(slot, position, tensor) of each tensor that a call reads."""
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
    """(slot, tensor) of each tensor that a call writes."""
    if isinstance(result, torch.Tensor):
        yield "0", result
    elif isinstance(result, (list, tuple)):
        for index, value in enumerate(result):
            if index not in operator.scratch:
                yield from tensors_in(value, str(index))
    for index, name in operator.written:
        yield from tensors_in(args[index] if index < len(args) else kwargs.get(name), name)
