# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false
"""Number formats of a replay: those of a module's inputs and of its weights.

Inputs and weights are cast to the captured run's format, and widened again for exact arithmetic.
Masks may differ in kind: a boolean mask says which keys may be seen, a float mask is added to the
scores. A program's eager attention gets floats where another attention gets booleans. If both masks
hide the same keys, one may replace the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from driftline.captures.torch import framework
from driftline.diagnosis.experiments.live.captured_calls import (
    Candidate,
    CandidateCall,
    torch_dtype,
)
from driftline.diagnosis.experiments.live.repeat import Give, copied, laid_out
from driftline.runs.records import Record

_HIDDEN = -1e4
"""Largest value of a float mask that hides a key; a real bias is nearer to zero."""


def other_kind(first: torch.dtype, second: torch.dtype) -> bool:
    """Whether one dtype is boolean and the other floating point."""
    return (first is torch.bool and second.is_floating_point) or (
        second is torch.bool and first.is_floating_point
    )


def same_seen(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two masks hide the same keys, and each row sees at least one key.

    The result of a row that sees no key is not defined: it may be zero or the mean of all values.

    >>> floats = torch.tensor([[0.0, -3.4e38], [0.0, 0.0]])
    >>> same_seen(floats == 0, floats), same_seen(floats != 0, floats)
    (True, False)
    >>> same_seen(floats == 0, floats - 1.0)
    False
    """
    sides = [_seen(tensor) for tensor in (first, second)]
    if sides[0] is None or sides[1] is None:
        return False
    try:
        first_seen, second_seen = torch.broadcast_tensors(sides[0], sides[1])
    except RuntimeError:
        return False
    return bool(torch.equal(first_seen, second_seen)) and bool(torch.all(torch.any(first_seen, -1)))


def _seen(mask: torch.Tensor) -> torch.Tensor | None:
    """The keys that a mask shows, as booleans; None if the tensor adds a bias instead."""
    if mask.dim() == 0 or not mask.numel():
        return None
    if mask.dtype is torch.bool:
        return mask
    seen = mask == 0
    return seen if bool((seen | (mask <= _HIDDEN)).all()) else None


# Inputs and weights in the required format.


Slots = list[tuple[str, str, torch.Tensor]]
# Inputs that only control a computation; the program's own are used if the captured run has none.
_FROM_THE_PROGRAM = ("mask", "position", "bias", "cache", "index", "ids", "past_key_values")
_WIDE = (torch.float32, torch.float64)
MOST_SHELVED = 256 << 20


class SuppliedTensors:
    """The tensors that were supplied to a repeated call, as opposed to those that it computes.

    Attributes:
        strangers: Tensors of the program that belong to other modules (layers of a cache).
    """

    def __init__(self) -> None:
        self.strangers: list[torch.Tensor] = []
        self._captured: list[torch.Tensor] = []  # kept alive, so that no address is reused
        self._addresses: set[int] = set()

    def add(self, tensor: torch.Tensor) -> None:
        if tensor.numel():
            self._captured.append(tensor)
            self._addresses.add(tensor.data_ptr())

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a supplied one, or a view that begins where a supplied one does."""
        return tensor.data_ptr() in self._addresses


class Shelf:
    """Memory for the weights and inputs of one module at a time, reused for the next module.

    New pages cost more than the cast itself. The memory must not be shared between threads: a
    module's replay uses it from one `clear` to the next.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, int], list[torch.Tensor]] = {}
        self._used: list[torch.Tensor] = []
        self._bytes = 0

    def clear(self) -> None:
        for tensor in self._used:
            self._free.setdefault((tensor.dtype, tensor.numel()), []).append(tensor)
        self._used.clear()
        # Memory of sizes that no later module has would accumulate, so all of it is released when
        # the limit is exceeded.
        if self._bytes > MOST_SHELVED:
            self._free.clear()
            self._bytes = 0

    def cast(self, tensor: torch.Tensor, dtype: torch.dtype, *, own: bool = False) -> torch.Tensor:
        """A tensor in a format; the tensor itself if it has that format and `own` is not set."""
        if tensor.dtype == dtype and not own:
            return tensor
        size = tensor.numel() * dtype.itemsize
        if not tensor.is_contiguous() or not tensor.is_cpu or size > MOST_SHELVED:
            return tensor.to(dtype, copy=own)
        free = self._free.get((dtype, tensor.numel()))
        if free:
            place = free.pop()
        else:
            place = torch.empty(tensor.numel(), dtype=dtype)
            self._bytes += size
        self._used.append(place)
        return place.view(tensor.shape).copy_(tensor)


class Recast:
    """Decides formats for one captured run.

    Args:
        candidate: The captured run.
        site_of: The captured run's site of a module of the program; None if it has none.
    """

    def __init__(self, candidate: Candidate, site_of: Callable[[nn.Module], str | None]) -> None:
        self._candidate = candidate
        self._site_of = site_of
        self._shelf = Shelf()
        self._masks: dict[str, dict[str, bool]] = {}

    # --- what goes in

    def inputs(
        self,
        call: CandidateCall | None,
        live: Slots,
        site: str,
        supplied: SuppliedTensors,
        *,
        exact: bool,
        own: bool = True,
    ) -> Give:
        """A function that returns the replacement of each tensor among the program's arguments.

        The replacement is the captured value if there is one. Masks, positions and the like that
        the captured run lacks come from the program, and so do masks of another kind that are
        equivalent. Tensors of other modules (layers of a cache) are left unchanged and noted. A
        module that writes into none of its inputs needs no copies of its `own`.

        Raises:
            LookupError: The captured run lacks an input that matters.
        """
        assert call is not None
        by_alias = {record.alias: record for record in call.inputs.values() if record.alias}
        sources: dict[int, tuple[torch.Tensor, Record | None]] = {}
        for slot, alias, tensor in live:
            # A positional argument may have a number as its slot in one run and a name in the
            # other; its alias is the respective other one.
            record = call.inputs.get(slot) or by_alias.get(slot)
            if record is None and alias:
                record = call.inputs.get(alias) or by_alias.get(alias)
            if record is None and tensor.is_floating_point():
                words = slot.lower()
                if not any(word in words for word in _FROM_THE_PROGRAM):
                    raise LookupError(f"the candidate run has no input '{slot}'")
            if record is not None and self._is_the_same_mask(record, tensor, site):
                record = None
            sources[id(tensor)] = (tensor, record)
        low = self._low(call, site)
        made: dict[int, torch.Tensor] = {}

        def give(tensor: torch.Tensor) -> torch.Tensor:
            source = sources.get(id(tensor))
            if source is None:
                supplied.strangers.append(tensor)
                return tensor
            if id(tensor) not in made:
                record = source[1]
                made[id(tensor)] = (
                    _narrowed(tensor, None if exact else low)
                    if record is None
                    else self._value(record, tensor, exact=exact, own=own)
                )
                supplied.add(made[id(tensor)])
            return made[id(tensor)]

        return give

    def _is_the_same_mask(self, record: Record, tensor: torch.Tensor, site: str) -> bool:
        """Whether a captured mask is of another kind than the program's, but equivalent."""
        dtype = torch_dtype(record.dtype)
        # Only masks may differ in kind; anything else is a real difference of inputs.
        if dtype is None or not other_kind(dtype, tensor.dtype):
            return False
        same = same_seen(self._candidate.tensor(record, tensor.device, own=False), tensor)
        by_slot = self._masks.setdefault(site, {})
        by_slot[record.key.slot] = same and by_slot.get(record.key.slot, True)
        return same

    def same_masks(self, site: str) -> list[str]:
        """Slots of a site whose masks were of another kind, but equivalent at each call."""
        return sorted(slot for slot, same in self._masks.get(site, {}).items() if same)

    def can_answer(self, call: CandidateCall | None, slots: Slots) -> bool:
        """Whether the captured run has all outputs of a part."""
        return (
            call is not None and bool(slots) and all(slot in call.outputs for slot, _, _ in slots)
        )

    def answer(
        self,
        call: CandidateCall | None,
        slots: Slots,
        value: Any,
        supplied: SuppliedTensors,
        *,
        exact: bool,
    ) -> Callable[[], Any]:
        """A function that returns a part's captured outputs in the structure of the program's."""
        assert call is not None
        names = {id(tensor): slot for slot, _, tensor in slots}
        outputs = call.outputs

        def give(tensor: torch.Tensor) -> torch.Tensor:
            slot = names.get(id(tensor))
            if slot is None:
                supplied.strangers.append(tensor)
                return tensor
            value = self._value(outputs[slot], tensor, exact=exact)
            supplied.add(value)
            return value

        return lambda: copied(value, give)

    def captured(self, record: Record, like: torch.Tensor) -> torch.Tensor:
        """The captured tensor, read-only, on the device of a tensor of the program."""
        return self._candidate.tensor(record, like.device, own=False)

    def _value(
        self, record: Record, like: torch.Tensor, *, exact: bool, own: bool = True
    ) -> torch.Tensor:
        captured = self._candidate.tensor(record, like.device, own=False)
        narrow = captured.is_floating_point() and captured.dtype not in _WIDE
        format_ = torch.float32 if exact and narrow else captured.dtype
        value = self._shelf.cast(captured, format_, own=own)
        # The memory layout of rows affects the last bits, so the program's layout is used.
        return value if like.is_contiguous() else laid_out(value, like)

    def _low(self, call: CandidateCall, site: str) -> torch.dtype | None:
        """The format of the captured inputs, which is used for masks that come from the program."""
        for record in call.inputs.values():
            dtype = torch_dtype(record.dtype)
            if dtype is not None and dtype.is_floating_point:
                return dtype
        return self._candidate.dtypes.get(site)

    # --- what it computes with

    def begin(self) -> None:
        """Begin another module; the memory of tensors cast for the previous one is reused."""
        self._shelf.clear()

    def looked_up(
        self, module: nn.Module, rows: torch.Tensor, call: CandidateCall | None, *, exact: bool
    ) -> torch.Tensor:
        """Rows that were looked up in an uncast table, rounded as a cast table would give them."""
        format_ = self._candidate.dtype_of(self._site_of(module) or "", "weight", call)
        if format_ is not None and format_.is_floating_point:
            rows = rows.to(format_)
        return widened(rows) if exact else rows

    def rounds_buffers(self, real: Mapping[str, nn.Module], call: CandidateCall | None) -> bool:
        """Whether the captured run holds a buffer in fewer digits than the program does."""
        for _, owner, name, tensor, is_buffer in _tensors(real):
            if is_buffer and tensor.is_floating_point():
                format_ = self._format(real, owner, name, call)
                if format_ is not None and format_.itemsize < tensor.dtype.itemsize:
                    return True
        return False

    def _format(
        self, real: Mapping[str, nn.Module], owner: nn.Module, name: str, call: CandidateCall | None
    ) -> torch.dtype | None:
        site = self._site_of(owner) or self._site_of(real[""]) or ""
        format_ = self._candidate.dtype_of(site, name, call)
        return format_ if format_ is not None and format_.is_floating_point else None

    def weights(
        self,
        real: Mapping[str, nn.Module],
        call: CandidateCall | None,
        *,
        exact: bool,
        cast: dict[int, torch.Tensor],
        own_buffers: bool = False,
    ) -> dict[str, torch.Tensor]:
        """Weights and buffers in the required format, by their names.

        Args:
            real: The modules that run, by their paths below the one that is repeated.
            call: The captured call that is repeated.
            exact: Whether to widen them after rounding them to the captured run's format.
            cast: Weights in the captured run's format, kept from one repetition to the next.
            own_buffers: Whether buffers keep the program's format.
        """
        cast_tensors: dict[str, torch.Tensor] = {}
        for path, owner, name, tensor, is_buffer in _tensors(real):
            if not tensor.is_floating_point():
                # Buffers may be changed by the call, so each repetition gets its own copy.
                if is_buffer:
                    cast_tensors[path] = tensor.detach().clone()
                continue
            value = cast.get(id(tensor))
            if value is None:
                format_ = self._format(real, owner, name, call)
                value = tensor.detach()
                if format_ is not None and not (own_buffers and is_buffer):
                    value = self._shelf.cast(value, format_)
                cast[id(tensor)] = value
            if exact and value.dtype not in _WIDE:
                value = self._shelf.cast(value, torch.float32)
            if value.data_ptr() != tensor.data_ptr():
                cast_tensors[path] = (
                    value.clone() if is_buffer and value is cast[id(tensor)] else value
                )
            elif is_buffer:
                cast_tensors[path] = value.clone()
        return cast_tensors

    def as_they_are(self, real: Mapping[str, nn.Module]) -> dict[str, torch.Tensor]:
        """Copies of the buffers, because a repeated call may change running statistics."""
        return {
            path: tensor.detach().clone()
            for path, _, _, tensor, is_buffer in _tensors(real)
            if is_buffer
        }

    def arithmetic(self, module: nn.Module, *, exact: bool) -> AbstractContextManager[Any]:
        """Context with the captured run's autocast; for exact arithmetic without autocast and TF32.

        If the captured run is wide, TF32 is left as the program has it: the captured run may have
        used it too, on the same kind of device.
        """
        device = next((p.device.type for p in module.parameters()), "cpu")
        low = self._candidate.autocast
        if exact and device == "cuda" and not self._candidate.wide:
            return _all_digits(device)
        if exact or low is None:
            if torch.is_autocast_enabled(device):
                return torch.autocast(device, enabled=False)
            return contextlib.nullcontext()
        return torch.autocast(device, dtype=low)


@contextlib.contextmanager
def _all_digits(device: str) -> Generator[None]:
    with framework.tf32_switched_off(), torch.autocast(device, enabled=False):
        yield


def _tensors(
    real: Mapping[str, nn.Module],
) -> Iterator[tuple[str, nn.Module, str, torch.Tensor, bool]]:
    """Yield (path, owner, name, tensor, is a buffer) of the modules that run."""
    for prefix, owner in real.items():
        start = f"{prefix}." if prefix else ""
        for name, tensor in owner._parameters.items():
            if tensor is not None:
                yield start + name, owner, name, tensor, False
        for name, tensor in owner._buffers.items():
            if tensor is not None:
                yield start + name, owner, name, tensor, True


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Floats of 16 bits or less as float32; other tensors unchanged."""
    if not tensor.is_floating_point() or tensor.dtype in _WIDE:
        return tensor
    return tensor.to(torch.float32)


def _narrowed(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A tensor of the program in another format, clamped: a mask's lowest value stays finite."""
    value = tensor.detach()
    if not value.is_floating_point():
        return value.clone()
    if dtype is None:
        return widened(value).clone()
    return value.clamp(min=torch.finfo(dtype).min, max=torch.finfo(dtype).max).to(dtype)
