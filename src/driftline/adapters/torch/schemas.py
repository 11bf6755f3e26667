"""What an operator's schema says about its values, and what it fails to say.

Knows which outputs are views, which arguments are written, and which memory was never filled:
reading that would make two equal runs differ. Sees schemas only, no tensors.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import re
from typing import Any

import torch

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
        short = str(schema.name).partition("::")[2]
        self.tensors = ()
        if not torch._C._should_allow_numbers_as_tensors(short):
            self.tensors = tuple(
                index
                for index, argument in enumerate(schema.arguments)
                if str(argument.type) == "Tensor"
            )
        undeclared = _UNDECLARED_WRITES.get(str(schema.name), ())
        written = [
            (index, argument.name)
            for index, argument in enumerate(schema.arguments)
            if (argument.alias_info is not None and argument.alias_info.is_write)
            or argument.name in undeclared
        ]
        # What is written and also returned (`add_`, `out=`) is an output already.
        returned = sum(r.alias_info is not None and r.alias_info.is_write for r in schema.returns)
        self.written = written if returned < len(written) else []
        self.unread = _SCRATCH.union(a.name for a in schema.arguments if a.is_out)
        if _OVERWRITES.fullmatch(schema.name):
            self.unread |= {"self"}
        self.scratch = frozenset(_SCRATCH_OUTPUTS.get(schema.name, ())).union(
            index for index, one in enumerate(schema.returns) if one.name in _SCRATCH
        )
        self.silent = bool(func.is_view) or str(schema.name) in _WITHOUT_VALUES
        space = str(schema.name).partition("::")[0]
        self.in_flight = space in _COLLECTIVES and short != "wait_tensor"
        if space == "c10d" and short not in _SENDERS:
            self.silent = True
        if space == "profiler":  # marks that torch's optimizers leave; they compute nothing
            self.silent = True
