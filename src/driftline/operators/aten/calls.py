"""One call of a torch operator, rebuilt from a run, and executed.

The operator is looked up by its validated name, and its arguments are decoded by its schema:
nothing in a run is evaluated as code. Needs only torch and numpy, since reproducing scripts contain
this file. Does not know what the result should be.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Operators that must not be executed again, with the reason shown to the user.
NOT_AGAIN = {
    "from_file": "it reads a file",
    "_local_scalar_dense": "it gives a number, no tensor",
    "_print": "it prints",
}
COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem", "_dtensor")
CUT = 1000
"""The longest list of arguments that a capture keeps."""


_NAMED = ("ScalarType", "Layout", "MemoryFormat", "Device", "str", "Stream", "Storage")


class Unfit(Exception):
    """A call that cannot be executed again; the text says why."""


def operator_of(name: str) -> Any:
    """The operator overload with a name such as `aten.add.Tensor`."""
    if name.startswith("higher_order."):
        raise Unfit("a higher-order operator calls a function, which a run does not hold")
    # The name comes from a file: only identifiers are ever looked up in torch.
    parts = name.split(".")
    if len(parts) != 3 or not all(NAME.fullmatch(part) for part in parts):
        raise Unfit(f"{name[:80]!r} is not the name of an operator")
    space, short, overload = parts
    if space in COLLECTIVES:
        # Collectives wait for other processes; executing one here would hang.
        raise Unfit("it takes the tensors of other ranks")
    if short in NOT_AGAIN:
        raise Unfit(NOT_AGAIN[short])
    names = getattr(torch.ops, space, None)
    packet: Any = None
    if isinstance(names, torch._ops._OpNamespace):
        try:
            packet = getattr(names, short)
        except (AttributeError, RuntimeError):
            packet = None
    operator = getattr(packet, overload, None) if _is_packet(packet) else None
    if not isinstance(operator, torch._ops.OpOverload):
        if space in ("aten", "prims"):
            raise Unfit(f"torch {torch.__version__} has no operator {name}")
        raise Unfit(
            f"nothing here defines the custom operator {space}.{short}; "
            "give the module that does with --import"
        )
    return operator


def _is_packet(thing: Any) -> bool:
    return isinstance(thing, torch._ops.OpOverloadPacket)


def dtype_named(name: str) -> torch.dtype:
    """The element type with a name such as `bfloat16`."""
    dtype = getattr(torch, name, None) if NAME.fullmatch(name) else None
    if not isinstance(dtype, torch.dtype):
        raise Unfit(f"torch has no element type {name[:40]}")
    return dtype


def tensor_of(raw: np.ndarray[Any, Any], dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """A tensor from the bytes of its elements in C order."""
    kind = dtype_named(dtype)
    flat = np.ascontiguousarray(raw).reshape(-1).view(np.uint8)
    count = math.prod(shape)
    if flat.size != count * kind.itemsize or dtype in ("float4_e2m1fn_x2",):
        raise Unfit(f"values of {dtype} cannot be given to torch")
    # Packed formats, and files of another length, cannot be given to torch.
    if not count:
        try:
            return torch.empty(tuple(shape), dtype=kind)
        except RuntimeError:
            raise Unfit(f"no tensor has the shape {list(shape)}") from None
    return torch.from_numpy(flat.copy()).view(kind).reshape(tuple(shape))


def raw_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The bytes of a tensor in C order, as unsigned integers."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)


def widened(dtype: torch.dtype, precision: str) -> torch.dtype:
    """What an element type becomes: `float64`, `float32` (at least), or `own` for itself."""
    if precision == "own" or dtype in (torch.float64, torch.complex128):
        return dtype
    if dtype.is_complex:
        return torch.complex128 if precision == "float64" else torch.complex64
    if dtype.is_floating_point:
        return torch.float64 if precision == "float64" else torch.float32
    return dtype


def decoded(name: str, kind: str, value: Any, precision: str, device: str) -> Any:
    """An argument that is no tensor, converted from JSON to the type in the schema."""
    if value is None or "Generator" in kind:
        return None
    if isinstance(value, list):
        if len(value) >= CUT:
            raise Unfit(f"its argument {name} is a list too long to be kept")
        return [decoded(name, kind, member, precision, device) for member in value]
    if "Device" in kind:
        return torch.device(device)
    if name == "pin_memory":
        return None
    if name == "half_to_float" and precision != "own":
        return False  # what would be converted is wider already
    if not isinstance(value, str):
        # Torch takes any number for a type or a layout, and some end the process.
        if not isinstance(value, (bool, int, float)) or any(word in kind for word in _NAMED):
            raise Unfit(f"its argument {name} makes no sense: {str(value)[:40]}")
        return value
    return _decoded_text(name, kind, value, precision)


def _decoded_text(name: str, kind: str, value: str, precision: str) -> Any:
    """An argument that JSON holds as text: a type, a layout, a text, or a number."""
    if value.startswith("<"):
        raise Unfit(f"its argument {name} is a {value.strip('<>')[:40]}, which a run does not hold")
    if "ScalarType" in kind:
        return widened(dtype_named(value.removeprefix("torch.")), precision)
    if "Layout" in kind or "MemoryFormat" in kind:
        short = value.removeprefix("torch.")
        constant = getattr(torch, short, None) if NAME.fullmatch(short) else None
        if not isinstance(constant, (torch.layout, torch.memory_format)):
            raise Unfit(f"its argument {name} makes no sense: {value[:40]}")
        return constant
    if "str" in kind:
        return value
    try:
        if "int" in kind and "number" not in kind:
            return int(value)
        number = complex(value.replace(" ", ""))
    except ValueError:
        raise Unfit(f"its argument {name} makes no sense: {value[:40]}") from None
    return number if number.imag or value.endswith("j)") else number.real


def arguments_of(
    func: Any,
    param: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    precision: str,
    device: str,
    *,
    lenient: bool = False,
) -> list[Any]:
    """All arguments of a call, by position; tensors are copied and widened.

    Args:
        func: The operator.
        param: Its arguments that are no tensors, by name.
        tensors: The others, by name; members of a list as `name.0`, `name.1`.
        precision: See `widened`.
        device: Where the tensors go.
        lenient: An argument that is missing is None.
    """
    lists: dict[str, dict[int, torch.Tensor]] = {}
    # Lists of tensors are stored member by member, with gaps for None.
    for slot, tensor in tensors.items():
        name, _, index = slot.rpartition(".")
        if name and index.isdigit():
            lists.setdefault(name, {})[int(index)] = tensor

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        kind = widened(tensor.dtype, precision)
        return tensor.to(device=device, dtype=kind, copy=True)

    arguments: list[Any] = []
    for argument in func._schema.arguments:
        name, kind = argument.name, str(getattr(argument, "real_type", argument.type))
        if name in tensors:
            arguments.append(moved(tensors[name]))
        elif name in lists:
            members = lists[name]
            if max(members) >= CUT * 100:
                raise Unfit(f"its argument {name} has too many members")
            arguments.append(
                [moved(members[i]) if i in members else None for i in range(max(members) + 1)]
            )
        # The program's device may not exist here.
        elif name == "device" and "Device" in kind:
            arguments.append(torch.device(device))  # also where the program left it to torch
        elif name in param and _is_default(argument, param[name]):
            arguments.append(argument.default_value)
        elif name in param:
            arguments.append(decoded(name, kind, param[name], precision, device))
        elif argument.has_default_value():
            arguments.append(argument.default_value)
        elif lenient or "Optional" in kind:
            arguments.append(None)
        else:
            raise Unfit(f"its argument {name} is not in the run")
    return arguments


def _is_default(argument: Any, value: Any) -> bool:
    """Whether a number is the schema's default, where types are stored as numbers."""
    return (
        type(value) is int
        and argument.has_default_value()
        and type(argument.default_value) is int
        and value == argument.default_value
    )


def executed(
    func: Any, args: Sequence[Any], precision: str, written: Sequence[tuple[int, str]]
) -> dict[str, torch.Tensor]:
    """Results of a call by slot, including arguments that it wrote to but does not return."""
    before = torch.get_default_dtype()
    keyword = [a.name for a in func._schema.arguments if a.kwarg_only]
    count = len(args) - len(keyword)
    try:
        # Factories such as `arange` would otherwise compute in float32.
        if precision == "float64":
            torch.set_default_dtype(torch.float64)
        with torch.no_grad():
            result = func(*args[:count], **dict(zip(keyword, args[count:], strict=True)))
    finally:
        torch.set_default_dtype(before)
    outputs: dict[str, torch.Tensor] = {}
    if isinstance(result, torch.Tensor):
        outputs["0"] = result
    elif isinstance(result, (list, tuple)):
        for index, value in enumerate(result):
            _collect(value, str(index), outputs)
    for index, name in written:
        _collect(args[index], name, outputs)
    return outputs


def _collect(value: Any, slot: str, outputs: dict[str, torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        outputs[slot] = value
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            _collect(part, f"{slot}.{index}", outputs)
