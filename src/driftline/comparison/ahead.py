"""Pairs measured before it is known that they are pairs: while the rest is still loaded.

Most of a command's start is Python's, on one core. Meanwhile threads of the kernel's own measure
what two runs have under the same name, largest first, the way the engine would. The engine takes
what alignment comes to as well, and measures the rest. Nothing else depends on it: what cannot be
measured here is left to the engine, which says why.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from driftline.comparison.blocks import ENOUGH, LARGE, MAPPED, blocks_of, cores
from driftline.comparison.foreseen import Foreseen, taken
from driftline.errors import DriftlineError
from driftline.numerics import kernel
from driftline.numerics.dtypes import DTYPES
from driftline.numerics.many_pairs import ManyPairs, ask
from driftline.runs.record import Record
from driftline.runs.run import Run

if TYPE_CHECKING:
    from driftline.alignment.plan import Pair
    from driftline.numerics.moments import PairMoments

Elementwise: TypeAlias = Callable[[str, str], tuple[float, float]]

_MOST = 4_096
"""Tensors of a run up to which pairs are looked for: of more, the index is read just once."""


class Measured:
    """Some blocks of some pairs, measured or about to be.

    Args:
        blocks: Reference, candidate, first element and last plus one, how manieth it is.
        work: Who measures them, in that order.
    """

    def __init__(
        self,
        blocks: Sequence[tuple[Record, Record, int, int, int]] = (),
        work: ManyPairs | None = None,
    ) -> None:
        # By identity, which is sooner told than a key of nine parts; the blocks keep the records,
        # so that no other can come to have it.
        self._blocks = blocks
        self._work = work
        self._places = {
            (id(ours), id(theirs), start, stop): at for ours, theirs, start, stop, at in blocks
        }

    def turn(self, pair: Pair, start: int, stop: int) -> int | None:
        """The how manieth a block is; None if it is none of them."""
        return self._places.get((id(pair.reference), id(pair.candidate), start, stop))

    def moments(self, pair: Pair, start: int, stop: int) -> PairMoments | None:
        """Those of a block, which are waited for; None if it is none of them, or came too late."""
        at = self.turn(pair, start, stop)
        return None if at is None or self._work is None else self._work.moments(at)

    def finish(self) -> None:
        """Measure what is left of them: then any thread may ask."""
        if self._work is not None:
            self._work.finish()


class _Ahead:
    def __init__(
        self, reference: Run, candidate: Run, elementwise: Elementwise, threads: int
    ) -> None:
        self.sides = (reference, candidate, elementwise)
        self._blocks: list[tuple[Record, Record, int, int, int]] = []
        self._work: ManyPairs | None = None
        self._known = taken(reference.opened, candidate.opened, elementwise)
        if self._known is None:
            self._begin(threads)
        else:
            self._work = self._known.work

    def _recognise(self, known: Foreseen, pairs: Sequence[Pair]) -> bool:
        """Whether all that was foreseen has come to pass; what else there is, is the engine's."""
        for pair in pairs:
            ours, theirs = pair.reference, pair.candidate
            for start, stop in blocks_of(math.prod(ours.shape)):
                if (at := known.turn(ours, theirs, start, stop)) is not None:
                    self._blocks.append((ours, theirs, start, stop, at))
        return len({at for *_, at in self._blocks}) == len(known)

    def _begin(self, threads: int) -> None:
        reference, candidate, elementwise = self.sides
        asks: list[bytes] = []
        owners: dict[int, object] = {}
        left = ENOUGH
        for ours, theirs in _large_pairs(reference, candidate):
            here, there = reference.memory(ours), candidate.memory(theirs)
            count = math.prod(ours.shape)
            types = ours.dtype, theirs.dtype
            our_bits, their_bits = DTYPES[types[0]].bits, DTYPES[types[1]].bits
            left -= count
            if left < 0 or here is None or there is None or len(owners) > MAPPED:
                break
            if here.length * 8 < our_bits * count or there.length * 8 < their_bits * count:
                continue
            owners[id(here.owner)], owners[id(there.owner)] = here.owner, there.owner
            allowed = elementwise(*types)
            for start, stop in blocks_of(count):
                self._blocks.append((ours, theirs, start, stop, len(asks)))
                address = here.address + start * our_bits // 8
                other = there.address + start * their_bits // 8
                mapped = here.mapped and there.mapped
                asks.append(ask(address, other, types, stop - start, *allowed, mapped=mapped))
        if asks:
            self._work = ManyPairs(b"".join(asks), len(asks), list(owners.values()), threads)

    def end(self, pairs: Sequence[Pair]) -> Measured:
        """What was measured; it goes on, if all of it is wanted."""
        if self._work is None:
            return Measured()
        if self._known is not None:
            wanted = self._recognise(self._known, pairs)
        else:
            asked = {(id(pair.reference), id(pair.candidate)) for pair in pairs}
            wanted = all((id(one), id(other)) in asked for one, other, *_ in self._blocks)
        if not wanted:
            self._work.end()
        return Measured(self._blocks, self._work)


_under_way: list[_Ahead] = []
"""One at most: a process that is one command begins once."""


def begin(
    reference: Run, candidate: Run, elementwise: Elementwise, threads: int | None = None
) -> None:
    """Begin with the large tensors of two runs that lie in files of this machine.

    Args:
        reference: The one run.
        candidate: The other.
        elementwise: What the engine will be told, too.
        threads: As the engine will be told; the caller's is one of them.
    """
    _under_way.clear()
    beside = (threads or max(2, cores())) - 1
    if reference.fetched or candidate.fetched or not beside or not kernel.takes_addresses():
        return
    with contextlib.suppress(DriftlineError, OSError, ValueError):
        _under_way.append(_Ahead(reference, candidate, elementwise, beside))


def ready(
    reference: Run, candidate: Run, elementwise: Elementwise, pairs: Sequence[Pair]
) -> Measured:
    """What was measured of these pairs, if it was begun with just these."""
    if not _under_way:
        return Measured()
    ahead = _under_way.pop()
    if any(map(operator.is_not, ahead.sides, (reference, candidate, elementwise))):
        return Measured()
    return ahead.end(pairs)


def _large_pairs(reference: Run, candidate: Run) -> list[tuple[Record, Record]]:
    if max(len(reference.records), len(candidate.records)) > _MOST:
        return []
    theirs = {record.key: record for record in candidate.records if _is_large(record)}
    pairs: dict[tuple[object, ...], tuple[Record, Record]] = {}
    for ours in reference.records:
        other = theirs.get(ours.key)
        if other is not None and ours.shape == other.shape and _is_large(ours):
            # What one side has twice, as a rule the other has too: the engine measures it once.
            key = ours.key
            pairs.setdefault((key.rank, key.process, ours.blob, other.blob), (ours, other))
    return sorted(pairs.values(), key=lambda pair: math.prod(pair[0].shape), reverse=True)


def _is_large(record: Record) -> bool:
    return (
        record.kept == "full"
        and record.blob is not None
        and not record.lost
        and DTYPES[record.dtype].is_floating
        and math.prod(record.shape) >= LARGE
    )
