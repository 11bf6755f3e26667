"""Pairs that nothing is the matter with, small ones above all: measured with few words.

Two tensors of 16 kB are measured in 4 µs, and a dump has tens of thousands of them. Whatever is out
of the ordinary (a recipe, a lost side, samples, numbers beyond the kernel's range) is not taken
here, or handed back: the engine, which knows all of that, then looks at the pair from the start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from driftline.alignment.plan import Pair
from driftline.comparison.metrics.catalogue import STANDARD, Metric
from driftline.comparison.metrics.derivation import needs_definition, standard
from driftline.comparison.row import Row
from driftline.comparison.unmeasured import clash, lies, paired
from driftline.errors import DriftlineError
from driftline.numerics import kernel
from driftline.numerics.dtypes import DTYPES, DType
from driftline.numerics.moments import PairMoments
from driftline.runs.run import Memory, Run

SMALL_BYTES = 1 << 18
"""Both sides of a pair together. Below this most of the work is Python's, which threads do not
share: two of them take longer than one. Pairs of 256 kB a side are read and measured side by side.
"""
_AHEAD = 64
"""Pairs that are read at a time while those before them are measured, where a run can do that."""
FAR_OFF = 0.1
"""A relative L2 from which on a square weight is also looked at the other way round."""


class _Types(NamedTuple):
    """What is the same for all pairs of two dtypes."""

    ours: DType
    theirs: DType
    bits: int
    rtol: float
    atol: float


class SmallPairs:
    """Measures usual pairs of two runs; `rows` is for one thread, the rest for any."""

    def __init__(
        self,
        reference: Run,
        candidate: Run,
        metrics: Sequence[Metric],
        elementwise: Callable[[str, str], tuple[float, float]],
    ) -> None:
        self._reference = reference
        self._candidate = candidate
        self._elementwise = elementwise
        # Other metrics want the values as arrays, and so does numpy in the kernel's place.
        self._able = kernel.takes_addresses() and tuple(metrics) == STANDARD
        self._known: dict[tuple[str, str], _Types] = {}

    def elements(self, pair: Pair) -> int | None:
        """How many elements a pair has that is, as far as its records say, as usual; else None."""
        ours, theirs, _, _, our_recipe, their_recipe, trouble, *_ = pair
        if not self._able or our_recipe is not None or their_recipe is not None or trouble:
            return None
        shape = ours.shape
        if ours.kept != "full" or theirs.kept != "full" or shape != theirs.shape:
            return None
        if ours.placement != theirs.placement and lies(ours) != lies(theirs):
            return None
        types = self._known.get((ours.dtype, theirs.dtype)) or self._types(pair)
        if types is None or self._reference.lost(ours) or self._candidate.lost(theirs):
            return None
        return math.prod(shape)

    def is_small(self, pair: Pair, elements: int) -> bool:
        """Whether a usual pair of so many elements is one for the calling thread."""
        types = self._known[pair.reference.dtype, pair.candidate.dtype]
        return elements * types.bits <= 8 * SMALL_BYTES

    def _types(self, pair: Pair) -> _Types | None:
        if clash(pair):
            return None
        ours, theirs = DTYPES[pair.reference.dtype], DTYPES[pair.candidate.dtype]
        rtol, atol = self._elementwise(ours.name, theirs.name)
        types = _Types(ours, theirs, ours.bits + theirs.bits, rtol, atol)
        self._known[pair.reference.dtype, pair.candidate.dtype] = types
        return types

    def rows(self, pairs: Sequence[Pair]) -> Iterator[Row | None]:
        """Rows of pairs that are as usual, in their order; see `row`."""
        pieces = [pairs[at : at + _AHEAD] for at in range(0, len(pairs), _AHEAD)]
        many = len(pieces) > 1
        here = self._reference.read_ahead() if many else None
        there = self._candidate.read_ahead() if many else None

        def begin(at: int) -> None:
            if here is not None and at < len(pieces):
                here.begin([pair.reference for pair in pieces[at]])
            if there is not None and at < len(pieces):
                there.begin([pair.candidate for pair in pieces[at]])

        try:
            begin(0)
            for at, piece in enumerate(pieces, 1):
                unread = [None] * len(piece)
                ours = unread if here is None else here.take()
                theirs = unread if there is None else there.take()
                begin(at)
                yield from map(self.row, piece, ours, theirs)
        finally:
            for side in (here, there):
                if side is not None:
                    side.close()

    def row(
        self,
        pair: Pair,
        here: Memory | None = None,
        there: Memory | None = None,
    ) -> Row | None:
        """The measured row of a pair that is as usual; None to let the engine look at it.

        Args:
            pair: The pair.
            here: Where the reference's values lie, if that is known already.
            there: The same of the candidate.
        """
        moments = self._measured(pair, here, there)
        if moments is None or needs_definition(moments):
            return None
        found = standard(moments)
        shape = pair.reference.shape
        if len(shape) == 2 and shape[0] == shape[1] and found["relative_l2"] > FAR_OFF:
            return None
        return paired(pair, "values", found)

    def _measured(
        self, pair: Pair, here: Memory | None, there: Memory | None
    ) -> PairMoments | None:
        ours, theirs = pair.reference, pair.candidate
        our_dtype, their_dtype, _, rtol, atol = self._known[ours.dtype, theirs.dtype]
        count = math.prod(ours.shape)
        try:
            if here is None:
                here = self._reference.memory(ours)
            if there is None:
                there = self._candidate.memory(theirs)
        except (DriftlineError, OSError, ValueError):
            return None
        if (
            here is None
            or there is None
            or here.length * 8 < our_dtype.bits * count
            or there.length * 8 < their_dtype.bits * count
        ):
            return None
        return kernel.pair_moments_at(
            here.address, our_dtype, there.address, their_dtype, count=count, atol=atol, rtol=rtol
        )
