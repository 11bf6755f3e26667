"""Large pairs measured before it is known that they are pairs: while the rest is still loaded.

Most of a command's start is Python's, on one core. Meanwhile a thread measures what two runs have
under the same name, largest first, the way the engine would. The engine takes what is ready, if
alignment comes to the same pairs, and measures the rest. Nothing else depends on it: what fails
here is left to the engine, which says why.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable
from typing import NamedTuple
from weakref import WeakKeyDictionary

from driftline.comparison.blocks import blocks_of
from driftline.errors import DriftlineError
from driftline.numerics import kernel
from driftline.numerics.dtypes import DTYPES
from driftline.numerics.moments import PairMoments
from driftline.runs.key import TensorKey
from driftline.runs.record import Record
from driftline.runs.run import Run

LARGE = 1 << 20
"""Elements from which on a tensor is worth it: a thread waits for Python's lock after each."""
_MOST = 4_096
"""Tensors of a run up to which large ones are looked for: of more, the index is read just once."""
_ENOUGH = 1 << 28
"""Elements after which it is no longer the start that takes long: the engine lets go of what it
maps, this does not."""


class Place(NamedTuple):
    """A block of a pair."""

    reference: TensorKey
    candidate: TensorKey
    start: int
    stop: int


class _Ahead:
    def __init__(
        self,
        reference: Run,
        candidate: Run,
        elementwise: Callable[[str, str], tuple[float, float]],
    ) -> None:
        self.found: dict[Place, PairMoments] = {}
        self.candidate = candidate
        self.elementwise = elementwise
        self._runs = (reference, candidate)
        self._pairs = _large_pairs(reference, candidate)  # by the thread that will use the runs
        self._over = False
        self._thread = threading.Thread(target=self._work, name="driftline-ahead", daemon=True)
        self._thread.start()

    def end(self) -> dict[Place, PairMoments]:
        self._over = True
        self._thread.join()
        return self.found

    def _work(self) -> None:
        with contextlib.suppress(DriftlineError, OSError, ValueError):
            left = _ENOUGH
            for ours, theirs in self._pairs:
                for start, stop in blocks_of(math.prod(ours.shape)):
                    left -= stop - start
                    if self._over or left < 0:
                        return
                    self._measure(ours, theirs, start, stop)

    def _measure(self, ours: Record, theirs: Record, start: int, stop: int) -> None:
        here, there = (run.memory(one) for run, one in zip(self._runs, (ours, theirs), strict=True))
        our_dtype, their_dtype = DTYPES[ours.dtype], DTYPES[theirs.dtype]
        count = math.prod(ours.shape)
        if (
            here is None
            or there is None
            or here.length < our_dtype.byte_count(count)
            or there.length < their_dtype.byte_count(count)
        ):
            return
        rtol, atol = self.elementwise(ours.dtype, theirs.dtype)
        self.found[Place(ours.key, theirs.key, start, stop)] = kernel.pair_moments_at(
            here.address + start * our_dtype.bits // 8,
            our_dtype,
            there.address + start * their_dtype.bits // 8,
            their_dtype,
            count=stop - start,
            atol=atol,
            rtol=rtol,
        )


_under_way: WeakKeyDictionary[Run, _Ahead] = WeakKeyDictionary()


def begin(
    reference: Run, candidate: Run, elementwise: Callable[[str, str], tuple[float, float]]
) -> None:
    """Begin with the large tensors of two runs that lie in files of this machine.

    Args:
        reference: The one run.
        candidate: The other.
        elementwise: What the engine will be told, too.
    """
    if reference.fetched or candidate.fetched or not kernel.takes_addresses():
        return
    with contextlib.suppress(DriftlineError, OSError, ValueError):
        _under_way[reference] = _Ahead(reference, candidate, elementwise)


def ready(
    reference: Run, candidate: Run, elementwise: Callable[[str, str], tuple[float, float]]
) -> dict[Place, PairMoments]:
    """What was measured so far; nothing more is begun."""
    ahead = _under_way.pop(reference, None)
    if ahead is None:
        return {}
    found = ahead.end()
    same = ahead.candidate is candidate and ahead.elementwise is elementwise
    return found if same else {}


def _large_pairs(reference: Run, candidate: Run) -> list[tuple[Record, Record]]:
    if max(len(reference.records), len(candidate.records)) > _MOST:
        return []
    theirs = {record.key: record for record in candidate.records if _is_large(record)}
    pairs = [
        (ours, theirs[ours.key])
        for ours in reference.records
        if ours.key in theirs and _is_large(ours) and ours.shape == theirs[ours.key].shape
    ]
    return sorted(pairs, key=lambda pair: math.prod(pair[0].shape), reverse=True)


def _is_large(record: Record) -> bool:
    return (
        record.kept == "full"
        and record.blob is not None
        and not record.lost
        and DTYPES[record.dtype].is_floating
        and math.prod(record.shape) >= LARGE
    )
