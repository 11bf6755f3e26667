# pyright: reportPrivateUsage=false
"""Tensors taken in the call under way, so that one that comes again is not read again.

What one module returns is mostly what the next ones are given. Three things must hold before a
tensor is believed to be one that was taken, and its values are not read:

* Its memory is the same and was not freed in between: the tensor taken then is still alive and
  still has that address.
* torch has counted no write to it: both have the version of then. Tensors of
  `torch.inference_mode` have none and are always read.
* In a call in which everything was read, the two places had equal digests. Collectives such as
  `all_reduce`, kernels of other libraries and writes through `.data` change values without being
  counted; where a program does that, it shows in its first call.

Everything is read in calls 0, 1, 2, 4, 8, 16, ..., so that a program that changes its ways is
noticed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from driftline.captures.torch.device.memory import PendingSummary, StagedTensor

_MOST = 8192
"""Bounds the memory of programs that take in many tensors in one call."""


class TakenTensor(NamedTuple):
    """A tensor that was taken, and what brings its values.

    Attributes:
        reference: To the tensor; dead when the program has let go of it.
        version: How often it had been written to.
        place: Where it was taken, as a number.
        what: Brings what is kept of it.
        digest: Brings its digest, in calls in which everything is read.
    """

    reference: weakref.ref[torch.Tensor]
    version: int
    dtype: torch.dtype
    shape: torch.Size
    place: int
    what: PendingSummary | StagedTensor
    digest: PendingSummary | None


class _Trial(NamedTuple):
    """Two places that were given what seems to be one tensor, and the digests that both had."""

    source: int
    place: int
    first: PendingSummary
    second: PendingSummary


class RecentTensors:
    """Contiguous tensors of devices, by the address of their elements.

    Args:
        changed: Told the number of a place that was given a tensor whose change torch had not
            counted, after it was believed unchanged in earlier calls.

    Attributes:
        reads_all: Whether everything is read in this call.
    """

    def __init__(self, changed: Callable[[int], None]) -> None:
        self._changed = changed
        self._taken: dict[int, TakenTensor] = {}
        self._trials: list[_Trial] = []
        self._proven: dict[tuple[int, int], bool] = {}
        self._calls = 0
        self.reads_all = True

    def find(self, tensor: torch.Tensor, address: int, place: int) -> TakenTensor | None:
        """A contiguous tensor as it was taken before; None where its values have to be read."""
        taken = self._taken.get(address)
        if (
            taken is None
            or self.reads_all
            or not self._proven.get((taken.place, place))
            or not _is_same(taken, tensor, address)
        ):
            return None
        return taken

    def add(
        self,
        tensor: torch.Tensor,
        address: int,
        place: int,
        what: PendingSummary | StagedTensor,
        digest: PendingSummary | None,
    ) -> None:
        """A contiguous tensor has just been read."""
        if tensor.is_inference():
            return
        if self.reads_all:
            taken = self._taken.get(address)
            if taken is not None and _is_same(taken, tensor, address):
                # The first place stays the source of all that follow.
                if taken.digest is not None and digest is not None:
                    self._trials.append(_Trial(taken.place, place, taken.digest, digest))
                return
        if len(self._taken) >= _MOST:
            self._taken.clear()
        version = tensor._version
        self._taken[address] = TakenTensor(
            weakref.ref(tensor), version, tensor.dtype, tensor.shape, place, what, digest
        )

    def next_call(self) -> None:
        """A call is over, and what was taken in it is on its way."""
        self._taken.clear()
        self._calls += 1
        self.reads_all = self._calls & (self._calls - 1) == 0
        if self._trials:
            self._trials = [trial for trial in self._trials if not self._settled(trial)]

    def _settled(self, trial: _Trial) -> bool:
        """Whether the digests of a trial have come, and say whether the two are one tensor."""
        first, second = (
            pending.transfer.digest(pending.slot) for pending in (trial.first, trial.second)
        )
        if first is None or second is None:
            return False
        pair = trial.source, trial.place
        before, equal = self._proven.get(pair), first == second
        if before and not equal:
            self._changed(trial.place)
        # One difference is enough, whatever other calls show.
        self._proven[pair] = equal and before is not False
        return True


def _is_same(taken: TakenTensor, tensor: torch.Tensor, address: int) -> bool:
    """Whether a tensor is the one that was taken, and no write to it was counted since."""
    if tensor.dtype is not taken.dtype or tensor.shape != taken.shape:
        return False
    first = taken.reference()
    if first is not tensor and (
        first is None
        or first.data_ptr() != address
        or first._version != taken.version
        or tensor.is_inference()
    ):
        return False
    return tensor._version == taken.version
