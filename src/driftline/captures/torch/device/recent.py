# pyright: reportPrivateUsage=false
"""Tensors taken in the current call of the model, so that no tensor is read twice.

The output of one module is usually the input of the next ones. A tensor is assumed to be unchanged
since it was taken, and is not read again, if three conditions hold:

* It is the same object, with the same memory. Views of it are different tensors.
* torch has counted no write to it: its version is the same. A change of its shape or of the order
  of its elements counts as a write. Tensors of `torch.inference_mode` have no version and are
  always read.
* In a call in which everything was read, the digests of the two places were equal. Collectives such
  as `all_reduce`, kernels of other libraries and writes through `.data` change values without being
  counted. If a program does that, the digests of its first calls show it.

Everything is read in calls 0, 1, 2, 4, 8, 16, ..., so that a change in the program's behaviour is
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
"""Number of tensors that are remembered; limits the memory used in calls with many tensors."""


class TakenTensor(NamedTuple):
    """A tensor that was taken, and the pending transfer of its values.

    Attributes:
        reference: Weak reference to the tensor.
        version: torch's count of writes to it, when it was taken.
        address: Address of its elements.
        place: Number of the place where it was taken.
        what: Pending summary or bytes.
        digest: Pending digest; only in calls in which everything is read.
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
    """Two places where what seems to be the same tensor was taken, with their pending digests."""

    source: int
    place: int
    first: PendingSummary
    second: PendingSummary


class RecentTensors:
    """Contiguous device tensors that were taken in this call.

    Args:
        changed: Called with the number of a place if a write to its tensor was not counted by torch
            although the tensor was assumed unchanged in earlier calls.

    Attributes:
        reads_all: Whether everything is read in this call.
        compares: Whether digests are computed for the comparison too. Not in the first call: its
            tensors are often kept in full, and digests would be computed only for this purpose.
    """

    def __init__(self, changed: Callable[[int], None]) -> None:
        self._changed = changed
        self._taken: dict[int, TakenTensor] = {}
        self._trials: list[_Trial] = []
        self._proven: dict[tuple[int, int], bool] = {}
        self._calls = 0
        self.reads_all, self.compares = True, False

    def find(self, tensor: torch.Tensor, place: int) -> TakenTensor | None:
        """The entry of a tensor that was already taken; None if its values have to be read."""
        # A new tensor may have the id of a dead one, so the reference is compared.
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
        """Remember a contiguous tensor that has just been read."""
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
                # Later places are all compared with the first one.
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
        """Forget the tensors of a call that is over, and evaluate the digests that have arrived."""
        self._taken.clear()
        self._calls += 1
        self.reads_all = self.compares = self._calls & (self._calls - 1) == 0
        if self._trials:
            self._trials = [trial for trial in self._trials if not self._settled(trial)]

    def _settled(self, trial: _Trial) -> bool:
        """Compare the digests of a trial and store the result; False if they have not arrived."""
        first, second = (
            pending.transfer.digest(pending.slot) for pending in (trial.first, trial.second)
        )
        if first is None or second is None:
            return False
        pair = trial.source, trial.place
        before, equal = self._proven.get(pair), first == second
        if before and not equal:
            self._changed(trial.place)
        # After one difference the pair is never trusted again.
        self._proven[pair] = equal and before is not False
        return True
