"""What a call of a torch operator should have given: executed on the CPU in float64.

Without a float64 kernel the call is executed in float32, and the row says so. A result that must be
exact and differs from float64 may still be what the type itself gives: there a number such as 0.1
was rounded before it was compared.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from driftline.captures.torch.operators.schema import Operator
from driftline.operators.aten import kinds
from driftline.operators.aten.calls import Unfit, arguments_of, executed
from driftline.operators.aten.formulas import computed, has_formula

AnyArray = np.ndarray[Any, np.dtype[Any]]
# Results up to a million elements are always allowed, larger ones up to 64 times what the run
# lists.
_SMALL = 1 << 20
_TIMES = 64
_SIZE_NAMES = """
    N bins col end length m max_length minlength n num_classes output_size repeats row s size steps
    total_length window_length
"""
_SIZES = frozenset(_SIZE_NAMES.split())
"""Arguments that determine the size of a result, where torch cannot tell it in advance."""


class Prepared(NamedTuple):
    """A call whose arguments are at hand.

    Attributes:
        func: The operator overload.
        operator: Further facts about it.
        param: Arguments that are not tensors.
        tensors: Tensor arguments as captured, by slot.
        elsewhere: Whether the program executed it on a device other than the CPU.
    """

    func: Any
    operator: Operator
    param: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    elsewhere: bool = False

    def again(self, precision: str, device: str = "cpu") -> dict[str, torch.Tensor]:
        """Execute it; raises whatever torch raises, and Unfit."""
        if precision == "float64" and has_formula(self.func):
            named = arguments_of(
                self.func, self.param, self.tensors, precision, device, lenient=True
            )
            return computed(self.func, named)
        args = arguments_of(self.func, self.param, self.tensors, precision, device)
        return executed(self.func, args, precision, self.operator.written)

    def arguments(self) -> list[Any]:
        """All arguments, widened, on the CPU; one that is missing is None."""
        return arguments_of(self.func, self.param, self.tensors, "float64", "cpu", lenient=True)

    def check_size(self, listed: int) -> None:
        """Refuse a call that needs far more memory than the tensors the run lists.

        Args:
            listed: How many elements the run lists, inputs and outputs together.

        Raises:
            Unfit: It would.
        """
        most = _SMALL + _TIMES * listed
        wanted = self._asked_for()
        if wanted <= most and not has_formula(self.func):
            # Meta tensors give the shape of the result without computing it.
            try:
                args = arguments_of(self.func, self.param, self.tensors, "own", "meta")
                made = executed(self.func, args, "own", self.operator.written)
                wanted = max(wanted, sum(tensor.numel() for tensor in made.values()))
            except Unfit:
                raise
            except Exception:  # many have no description of their result without values
                wanted = max(wanted, asked_for(self.param))
        if wanted > most:
            raise Unfit(f"it would give {wanted} elements, where the run lists {listed}")

    def _asked_for(self) -> int:
        """Number of elements that values ask for, where values decide the size of the result."""
        deciding = {"repeat_interleave": "repeats", "bincount": "self", "_embedding_bag": ""}
        slot = deciding.get(kinds.plain_name(self.func), "")
        tensor = self.tensors.get(slot) if slot else None
        if tensor is None or not tensor.numel() or tensor.is_floating_point():
            return 0
        return int(tensor.max()) * (tensor.numel() if slot == "repeats" else 1)


def asked_for(param: Mapping[str, Any]) -> int:
    """Number of elements that the size arguments of a call ask for."""
    product = 1
    for name in _SIZES.intersection(param):
        value = param[name]
        numbers = cast("Sequence[Any]", value if isinstance(value, list) else [value])
        for number in numbers:
            # Bounded, because a product of numbers from a file may be astronomically large.
            if isinstance(number, (int, float)) and number > 1:
                product *= int(min(number, 2.0**62))
    return product


class Golden(NamedTuple):
    """The expected results of a call.

    Attributes:
        outputs: By slot, in the precision in which they were computed.
        note: How they were computed, if not in float64.
        precision: The precision.
    """

    outputs: Mapping[str, torch.Tensor]
    note: str = ""
    precision: str = "float64"


def golden_of(call: Prepared) -> Golden:
    """Execute a call in float64, else in float32, else in its own type.

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
    """The first line of an error of torch, without pointers into C++."""
    text = str(trouble).strip().split("\n")[0].strip() or type(trouble).__name__
    if text.startswith("Could not run"):
        return "it has no kernel there"
    return text if len(text) <= 160 else text[:157] + "..."


def fitted(call: Prepared, slot: str, right: torch.Tensor, actual: torch.Tensor) -> torch.Tensor:
    """A formula's result in the shape in which a device's kernel gives it.

    Attention kernels may leave the sums of exponentials out, or pad them.
    """
    if not has_formula(call.func) or slot != "1" or right.shape == actual.shape:
        return right
    if not actual.numel():
        return actual
    if right.numel() == actual.numel():
        return right.reshape(actual.shape)
    if actual.dim() == right.dim() and actual.shape[:-1] == right.shape[:-1]:
        beyond = actual[..., right.shape[-1] :].to(right.dtype)
        return torch.cat([right, beyond], -1) if beyond.shape[-1] else right
    return right


def as_array(tensor: torch.Tensor, dtype: torch.dtype) -> AnyArray:
    """A result rounded to the type of the output, in the form that `judging` expects."""
    rounded = tensor.detach().cpu().to(dtype)
    if dtype.is_complex:
        return rounded.to(torch.complex128).numpy()
    if dtype.is_floating_point:
        return rounded.to(torch.float64).numpy()
    return rounded.numpy()


def as_good(
    call: Prepared, slot: str, golden: Mapping[str, torch.Tensor], actual: torch.Tensor
) -> bool:
    """Whether indices that differ from the golden ones point at equal values."""
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
    # Indices from a file may be outside; gathering them would raise.
    if size == 0 or bool(((actual < 0) | (actual >= size)).any()):
        return False
    chosen, expected = source.gather(dim, actual), source.gather(dim, right)
    same = (chosen == expected) | (chosen.isnan() & expected.isnan())
    # A sort must name every place once: equal values do not excuse a repeated index.
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
    """Memory for arguments that are overwritten unread, in the shape of what was written."""
    memory: dict[str, torch.Tensor] = {}
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
                memory[name] = torch.zeros(cast("Any", shape), dtype=dtype)
        position += 1
    return memory
