# pyright: reportPrivateUsage=false
"""Tensors taken in the call under way, so that one that comes again is not read again.

What one module returns is mostly what the next ones are given. Three things must hold before a
tensor is believed to be one that was taken, and its values are not read:

* It is the same object, with the same memory. Views of it are other tensors.
* torch has counted no write to it: it has the version of then. Another shape or order of its
  elements counts as a write. Tensors of `torch.inference_mode` have no version and are always
  read.
* In a call in which everything was read, the two places had equal digests. Collectives such as
  `all_reduce`, kernels of other libraries and writes through `.data` change values without being
  counted; where a program does that, it shows in its first calls.

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
        address: Of its elements.
        place: Where it was taken, as a number.
        what: Brings what is kept of it.
        digest: Brings its digest, in calls in which everything is read.
    """

    reference: weakref.ref[torch.Tensor]
    version: int
    address: int
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
    """Contiguous tensors of devices that were taken in this call.

    Args:
        changed: Told the number of a place that was given a tensor whose change torch had not
            counted, after it was believed unchanged in earlier calls.

    Attributes:
        reads_all: Whether everything is read in this call.
        compares: Whether it also shows which tensors are one. Not in the first call: its tensors
            are often kept in full, and digests would be made for this alone.
    """

    def __init__(self, changed: Callable[[int], None]) -> None:
        self._changed = changed
        self._taken: dict[int, TakenTensor] = {}
        self._trials: list[_Trial] = []
        self._proven: dict[tuple[int, int], bool] = {}
        self._calls = 0
        self.reads_all, self.compares = True, False

    def find(self, tensor: torch.Tensor, place: int) -> TakenTensor | None:
        """A tensor as it was taken before; None where its values have to be read."""
        # The id of a dead tensor may be another one's now, so the reference is compared.
        recent = self._taken.get(id(tensor))
        if (
            recent is None
            or self.reads_all
            or recent.reference() is not tensor
            or tensor._version != recent.version
            or tensor.data_ptr() != recent.address
            or not self._proven.get((recent.place, place))
        ):
            return None
        return recent

    def add(
        self,
        tensor: torch.Tensor,
        place: int,
        what: PendingSummary | StagedTensor,
        digest: PendingSummary | None,
    ) -> None:
        """A contiguous tensor has just been read."""
        if tensor.is_inference():
            return
        version, address = tensor._version, tensor.data_ptr()
        if self.reads_all:
            recent = self._taken.get(id(tensor))
            if (
                recent is not None
                and recent.reference() is tensor
                and (recent.version, recent.address) == (version, address)
            ):
                # The first place stays the source of all that follow.
                if recent.digest is not None and digest is not None:
                    self._trials.append(_Trial(recent.place, place, recent.digest, digest))
                return
        if len(self._taken) >= _MOST:
            self._taken.clear()
        reference = weakref.ref(tensor)
        self._taken[id(tensor)] = TakenTensor(
            reference, version, address, tensor.dtype, tensor.shape, place, what, digest
        )

    def next_call(self) -> None:
        """A call is over, and what was taken in it is on its way."""
        self._taken.clear()
        self._calls += 1
        self.reads_all = self.compares = self._calls & (self._calls - 1) == 0
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
