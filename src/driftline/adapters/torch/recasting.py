"""Number formats of a replay: what a module is given, and with which weights it computes.

*Exact* is wide arithmetic (float32, or float64 where the captured run is that wide) on what the
captured run had: its inputs, and weights rounded to its format. *Native* is the same in the
captured run's own formats. The difference of the two is what that format costs at this module.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from driftline.adapters.torch.candidate import Candidate, CandidateCall, torch_dtype
from driftline.adapters.torch.repeating import Give, copied, laid_out
from driftline.runs.record import Record

Slots = list[tuple[str, str, torch.Tensor]]
_FROM_THE_PROGRAM = ("mask", "position", "bias", "cache", "index", "ids", "past_key_values")
_WIDE = (torch.float32, torch.float64)


class Recast:
    """Decides formats for one captured run.

    Args:
        candidate: The captured run.
        site_of: The captured run's site of a module of the program; None if it has none.
    """

    def __init__(self, candidate: Candidate, site_of: Callable[[nn.Module], str | None]) -> None:
        self._candidate = candidate
        self._site_of = site_of

    def changes_format(self, site: str, module: nn.Module) -> bool:
        """Whether the captured run computed a site in other formats than the exact replay does."""
        if self._candidate.autocast is not None:
            return True
        dtypes = {self._candidate.dtypes.get(site)}
        for child in module.modules():
            at = self._site_of(child)
            if at is not None:
                held = self._candidate.parameters.get(at, {})
                dtypes |= {torch_dtype(dtype) for dtype, _ in held.values()}
                dtypes.add(self._candidate.dtypes.get(at))
        return any(d is not None and d.is_floating_point and d not in _WIDE for d in dtypes)

    # --- what goes in

    def inputs(
        self,
        call: CandidateCall | None,
        live: Slots,
        site: str,
        strangers: list[torch.Tensor],
        *,
        exact: bool,
    ) -> Give:
        """What stands for each tensor among the program's own arguments.

        Captured values where there are any; masks, positions and the like that the captured run
        was not given come from the program. What belongs to other modules (layers of a cache) is
        left as it is, and noted among the strangers.

        Raises:
            LookupError: The captured run lacks an input that matters.
        """
        assert call is not None
        by_alias = {record.alias: record for record in call.inputs.values() if record.alias}
        found: dict[int, tuple[torch.Tensor, Record | None]] = {}
        for slot, alias, tensor in live:
            record = call.inputs.get(slot) or by_alias.get(slot)
            if record is None and alias:
                record = call.inputs.get(alias) or by_alias.get(alias)
            if record is None and tensor.is_floating_point():
                words = slot.lower()
                if not any(word in words for word in _FROM_THE_PROGRAM):
                    raise LookupError(f"the candidate run has no input '{slot}'")
            found[id(tensor)] = (tensor, record)
        low = self._low(call, site)
        made: dict[int, torch.Tensor] = {}

        def give(tensor: torch.Tensor) -> torch.Tensor:
            known = found.get(id(tensor))
            if known is None:
                strangers.append(tensor)
                return tensor
            if id(tensor) not in made:
                record = known[1]
                made[id(tensor)] = (
                    _narrowed(tensor, None if exact else low)
                    if record is None
                    else self._value(record, tensor, exact=exact)
                )
            return made[id(tensor)]

        return give

    def can_answer(self, call: CandidateCall | None, slots: Slots) -> bool:
        """Whether the captured run has everything that a part of a module gave."""
        return (
            call is not None and bool(slots) and all(slot in call.outputs for slot, _, _ in slots)
        )

    def answer(
        self,
        call: CandidateCall | None,
        slots: Slots,
        value: Any,
        strangers: list[torch.Tensor],
        *,
        exact: bool,
    ) -> Callable[[], Any]:
        """What a part gave in the captured run, in the form in which the program's own gave it."""
        assert call is not None
        names = {id(tensor): slot for slot, _, tensor in slots}
        outputs = call.outputs

        def give(tensor: torch.Tensor) -> torch.Tensor:
            slot = names.get(id(tensor))
            if slot is None:
                strangers.append(tensor)
                return tensor
            return self._value(outputs[slot], tensor, exact=exact)

        return lambda: copied(value, give)

    def _value(self, record: Record, like: torch.Tensor, *, exact: bool) -> torch.Tensor:
        value = self._candidate.tensor(record, like.device)
        value = _wide(value) if exact else value
        # Where a row ends in memory shows in the last bits: lie as the program's own does.
        return value if like.is_contiguous() else laid_out(value, like)

    def _low(self, call: CandidateCall, site: str) -> torch.dtype | None:
        """The format of the captured inputs, for masks that come from the program."""
        for record in call.inputs.values():
            dtype = torch_dtype(record.dtype)
            if dtype is not None and dtype.is_floating_point:
                return dtype
        return self._candidate.dtypes.get(site)

    # --- what it computes with

    def weights(
        self, module: nn.Module, real: Iterable[nn.Module], *, exact: bool
    ) -> dict[str, torch.Tensor]:
        """Weights and buffers in the format wanted, by their names below `module`."""
        found: dict[str, torch.Tensor] = {}
        made: dict[int, torch.Tensor] = {}
        for path, owner, name, tensor, is_buffer in _tensors(module, real):
            site = self._site_of(owner) or self._site_of(module) or ""
            if id(tensor) not in made:
                format_ = self._candidate.dtype_of(site, name)
                made[id(tensor)] = _recast(tensor, format_, exact=exact, is_buffer=is_buffer)
            if made[id(tensor)] is not tensor:
                found[path] = made[id(tensor)]
        return found

    def as_they_are(self, module: nn.Module, real: Iterable[nn.Module]) -> dict[str, torch.Tensor]:
        """Only buffers, copied: a repeated call may move running statistics."""
        return {
            path: tensor.detach().clone()
            for path, _, _, tensor, is_buffer in _tensors(module, real)
            if is_buffer
        }

    def arithmetic(self, module: nn.Module, *, exact: bool) -> AbstractContextManager[Any]:
        """Autocast as the captured run had it; off for exact arithmetic."""
        device = next((p.device.type for p in module.parameters()), "cpu")
        low = self._candidate.autocast
        if exact or low is None:
            if torch.is_autocast_enabled(device):
                return torch.autocast(device, enabled=False)
            return contextlib.nullcontext()
        return torch.autocast(device, dtype=low)


def _tensors(
    module: nn.Module, real: Iterable[nn.Module]
) -> Iterator[tuple[str, nn.Module, str, torch.Tensor, bool]]:
    """(path, owner, name, tensor, is a buffer) of everything that runs."""
    running = {id(each) for each in real}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        if id(owner) not in running:
            continue
        start = f"{prefix}." if prefix else ""
        for table, is_buffer in ((owner._parameters, False), (owner._buffers, True)):
            for name, tensor in table.items():
                if tensor is not None:
                    yield start + name, owner, name, tensor, is_buffer


def _recast(
    tensor: torch.Tensor, format_: torch.dtype | None, *, exact: bool, is_buffer: bool
) -> torch.Tensor:
    value = tensor.detach()
    if not value.is_floating_point():
        return value.clone() if is_buffer else tensor
    if format_ is not None and format_.is_floating_point and format_ != value.dtype:
        value = value.to(format_)
    if exact:
        value = _wide(value)
    if is_buffer and value.data_ptr() == tensor.data_ptr():
        return value.clone()
    return (
        tensor if value.dtype == tensor.dtype and value.data_ptr() == tensor.data_ptr() else value
    )


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point() or tensor.dtype in _WIDE:
        return tensor
    return tensor.to(torch.float32)


def _narrowed(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A tensor of the program's in another format; a mask's lowest value stays one."""
    value = tensor.detach()
    if not value.is_floating_point():
        return value.clone()
    if dtype is None:
        return _wide(value).clone()
    return value.clamp(min=torch.finfo(dtype).min, max=torch.finfo(dtype).max).to(dtype)
