"""What a call of a torch operator should have given: executed on the CPU in float64.

Where there is no float64 kernel, the call is executed in float32, and that is said. A result that
must be exact and is not what float64 gives may still be what the type itself gives: there a number
such as 0.1 was rounded before it was compared.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from driftline.adapters.torch.schemas import Operator
from driftline.operators.aten import kinds
from driftline.operators.aten.calling import Unfit, arguments_of, executed

AnyArray = np.ndarray[Any, np.dtype[Any]]
_DRAWS = 8
_SEED = 20240229


class Prepared(NamedTuple):
    """A call whose arguments are at hand.

    Attributes:
        func: The operator overload.
        operator: What has to be known of it.
        param: Arguments that are no tensors.
        tensors: The others, as they were, by slot.
    """

    func: Any
    operator: Operator
    param: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]

    def again(self, precision: str, device: str = "cpu") -> dict[str, torch.Tensor]:
        """Execute it; raises whatever torch raises, and Unfit."""
        args = arguments_of(self.func, self.param, self.tensors, precision, device)
        return executed(self.func, args, precision, self.operator.written)

    def arguments(self) -> list[Any]:
        return arguments_of(self.func, self.param, self.tensors, "float64", "cpu")


class Golden(NamedTuple):
    """What a call should have given.

    Attributes:
        outputs: By slot, in the precision it was computed in.
        note: How, where that was not float64.
        precision: The precision itself.
    """

    outputs: Mapping[str, torch.Tensor]
    note: str = ""
    precision: str = "float64"


def golden_of(call: Prepared) -> Golden:
    """Execute a call in float64.

    Raises:
        Unfit: It cannot be executed on this machine; says why.
    """
    first: Exception | None = None
    for precision, note in (
        ("float64", ""),
        ("float32", "computed in float32: there is no float64 kernel"),
        ("own", "computed in its own type: there is no other kernel"),
    ):
        try:
            return Golden(call.again(precision), note, precision)
        except Unfit:
            raise
        except Exception as trouble:
            first = first or trouble
    assert first is not None
    raise Unfit(f"it cannot be executed on the CPU: {sentence(first)}")


def sentence(trouble: Exception) -> str:
    """The first line of what torch says, without its pointers into C++."""
    text = str(trouble).strip().split("\n")[0].strip() or type(trouble).__name__
    if text.startswith("Could not run"):
        return "it has no kernel there"
    return text if len(text) <= 160 else text[:157] + "..."


def scale_of(call: Prepared, slot: str, golden: torch.Tensor, roundoff: float) -> AnyArray:
    """The size of the terms behind each element: how the result moves when inputs are rounded.

    For products and sums it is the root of the sum of the squared terms. For everything else the
    inputs are moved by a rounding error each, at random and several times.
    """
    if kinds.plain_name(call.func) in kinds.LINEAR and not kinds.is_foreach(call.func):
        squared = {s: _wide(t).abs().square() for s, t in call.tensors.items()}
        param = dict(call.param)
        for name in ("alpha", "beta"):
            if isinstance(param.get(name), (int, float)):
                param[name] = param[name] ** 2
        found = call._replace(tensors=squared, param=param).again("float64")[slot]
        return found.abs().sqrt().numpy()
    source = torch.Generator().manual_seed(_SEED)
    moved = torch.zeros(golden.shape, dtype=torch.float64)
    step = max(roundoff, 1e-9)
    base = golden.to(torch.complex128 if golden.is_complex() else torch.float64)
    for _ in range(_DRAWS):
        tensors = {s: _jolted(t, step, source) for s, t in call.tensors.items()}
        other = call._replace(tensors=tensors).again("float64")[slot]
        moved += ((other - base).abs() / step).nan_to_num(0.0, 0.0, 0.0).square()
    return (moved / _DRAWS).sqrt().numpy()


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _jolted(tensor: torch.Tensor, step: float, source: torch.Generator) -> torch.Tensor:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
    signs = torch.randint(0, 2, tensor.shape, generator=source).double() * 2 - 1
    return wide * (1 + step * signs)


def as_array(tensor: torch.Tensor, dtype: torch.dtype) -> AnyArray:
    """A result rounded to the type of the output, as `judging` takes it."""
    rounded = tensor.detach().cpu().to(dtype)
    if dtype.is_complex:
        return rounded.to(torch.complex128).numpy()
    if dtype.is_floating_point:
        return rounded.to(torch.float64).numpy()
    return rounded.numpy()


def as_good(
    call: Prepared, slot: str, golden: Mapping[str, torch.Tensor], actual: torch.Tensor
) -> bool:
    """Whether other indices than the golden ones point at equal values."""
    name = kinds.plain_name(call.func)
    places = kinds.BY_INDEX.get(name)
    source = call.tensors.get("self")
    if places is None or source is None or slot != str(places[1]):
        return False
    dim = call.param.get("dim", -1 if name in ("topk", "sort", "argsort") else None)
    right = golden[slot]
    if right.shape != actual.shape or source.dim() == 0:
        return False
    if dim is None:
        source, right, actual = source.reshape(-1), right.reshape(-1), actual.reshape(-1)
        dim = 0
    elif right.dim() < source.dim():
        right, actual = right.unsqueeze(dim), actual.unsqueeze(dim)
    size = source.shape[dim]
    if size == 0 or bool(((actual < 0) | (actual >= size)).any()):
        return False
    there, here = source.gather(dim, actual), source.gather(dim, right)
    same = (there == here) | (there.isnan() & here.isnan())
    if name in ("sort", "argsort") and _repeats(actual, dim):
        return False
    return bool(same.all())


def _repeats(index: torch.Tensor, dim: int) -> bool:
    """Whether an order names a place twice."""
    ordered = index.sort(dim).values
    wanted = torch.arange(index.shape[dim])
    shape = [1] * index.dim()
    shape[dim] = -1
    return not bool((ordered == wanted.reshape(shape)).all())


def placeholders(
    func: Any,
    operator: Operator,
    have: Sequence[str],
    outputs: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
) -> dict[str, torch.Tensor]:
    """Memory for arguments that are overwritten unread: of the shape of what was written there."""
    found: dict[str, torch.Tensor] = {}
    position = 0
    for argument in func._schema.arguments:
        written = argument.alias_info is not None and argument.alias_info.is_write
        if not written:
            continue
        name = argument.name
        if name in operator.unread and name not in have:
            described = outputs.get(str(position)) or outputs.get(name)
            if described is not None:
                shape, dtype = described
                found[name] = torch.zeros(cast("Any", shape), dtype=dtype)
        position += 1
    return found
