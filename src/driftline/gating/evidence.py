"""What measured rows alone do not know, and a fair judgement needs: all of it, in one call."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from driftline.alignment.plan import Pair
from driftline.comparison.row import Row
from driftline.comparison.table import is_kept, kept_like
from driftline.gating.far import GRADIENTS, any_asked, is_asked
from driftline.runs.run import Run

if TYPE_CHECKING:
    from driftline.comparison.kept_rows import KeptRows


def with_evidence(
    rows: Sequence[Row], pairs: Sequence[Pair], reference: Run, candidate: Run
) -> Sequence[Row]:
    """Rows with what is known of biases that move by themselves, and of sums that cancel.

    Args:
        rows: Measured; all rows of a plan, or some.
        pairs: All pairs of the plan.
        reference: The one run.
        candidate: The other.
    """
    if not is_kept(rows):
        return _looked_up(rows, pairs, reference, candidate)
    if not _may_be_asked(rows):
        return rows
    if isinstance(pairs, tuple):  # all of them are held already
        return kept_like(rows, _looked_up(list(rows), pairs, reference, candidate))
    return rows.changed_by_process(_OfOneProcess(pairs, reference, candidate))


def _looked_up(
    rows: Sequence[Row], pairs: Sequence[Pair], reference: Run, candidate: Run
) -> Sequence[Row]:
    if not any(map(is_asked, rows)):
        return rows
    from driftline.gating.cancelled import with_cancelled
    from driftline.gating.loose_biases import with_loose_biases
    from driftline.gating.moved import with_moved
    from driftline.gating.sums import with_sums

    found = with_loose_biases(rows, pairs, reference, candidate)
    found = with_sums(found, pairs, reference, candidate)
    found = with_cancelled(found, pairs, reference, candidate)
    return with_moved(found, pairs, reference, candidate)


def _may_be_asked(rows: KeptRows) -> bool:
    """Whether any row of a long table is one that evidence is looked for."""
    if not rows.has_operators and rows.ports.isdisjoint((*GRADIENTS, "grad_input")):
        return False
    if not any_asked(rows.largest, after_the_first_step=rows.after_the_first_step):
        return False  # known without reading them again
    return any(map(is_asked, rows))


class _OfOneProcess:
    """Looks up what rows of one process need; a step or a sum is of one process alone."""

    def __init__(self, pairs: Sequence[Pair], reference: Run, candidate: Run) -> None:
        self._runs = (reference, candidate)
        self._processes: Iterator[tuple[tuple[int, int], Iterator[Pair]]] = itertools.groupby(
            pairs, key=lambda pair: (pair.reference.key.rank, pair.reference.key.process)
        )
        self._next = next(self._processes, None)

    def __call__(self, rows: Sequence[Row]) -> Sequence[Row]:
        place = (rows[0].key.rank, rows[0].key.process)
        while self._next is not None and self._next[0] < place:
            self._next = next(self._processes, None)
        if self._next is None or self._next[0] != place:
            return rows  # what is alone comes at the end
        if not any(map(is_asked, rows)):
            return rows  # the pairs are not gathered
        pairs = list(self._next[1])
        self._next = next(self._processes, None)
        return _looked_up(rows, pairs, *self._runs)
