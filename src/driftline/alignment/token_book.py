"""What each step of two runs worked on, looked up once per step."""

from __future__ import annotations

from driftline.alignment.plan import Pair
from driftline.alignment.steps import counter_of, counters_alike
from driftline.alignment.tokens import Batch, Common, batch_of, common_part, cut
from driftline.runs.record import Record
from driftline.runs.run import Run

Place = tuple[int, int, int, str]
"""Step, rank, process, and the counter that the step is one of."""


class TokenBook:
    """Batches of both runs by step and rank, and what those of a pair have in common."""

    def __init__(self, reference: Run, candidate: Run) -> None:
        self._runs = (reference, candidate)
        self._records: list[dict[Place, list[Record]] | None] = [None, None]
        self._counters: list[dict[str, str]] = [{}, {}]
        self._known: dict[tuple[int, Place], Batch | None] = {}
        self._common: dict[tuple[Place, Place], Common | None] = {}
        self.notes: list[str] = []

    def cut(self, pair: Pair) -> tuple[Pair | None, str]:
        """The pair cut to the tokens both sides have; else None and perhaps a reason."""
        ours, theirs = self.batches(pair)
        common = self.common(pair)
        if ours is None or theirs is None or common is None:
            return None, ""
        return cut(pair, ours, theirs, common), common.trouble

    def batches(self, pair: Pair) -> tuple[Batch | None, Batch | None]:
        """What both sides of a pair worked on."""
        ours, theirs = self._places(pair)
        return self._batch(0, ours), self._batch(1, theirs)

    def common(self, pair: Pair) -> Common | None:
        """What both sides of a pair share; None when that is not known."""
        ours, theirs = self.batches(pair)
        if ours is None or theirs is None:
            return None
        places = self._places(pair)
        if places not in self._common:
            self._common[places] = self._compared(places, ours, theirs)
        return self._common[places]

    def _places(self, pair: Pair) -> tuple[Place, Place]:
        return self._place(0, pair.reference), self._place(1, pair.candidate)

    def _place(self, side: int, record: Record) -> Place:
        steps = self._records[side]
        if steps is None:
            steps = self._records[side] = {}
            self._counters[side] = counters_alike(self._runs[side])
            for each in self._runs[side].records:
                steps.setdefault(self._place(side, each), []).append(each)
        key = record.key
        counter = counter_of(key.site)
        return key.step, key.rank, key.process, self._counters[side].get(counter, counter)

    def _batch(self, side: int, place: Place) -> Batch | None:
        if (side, place) not in self._known:
            steps = self._records[side] or {}
            self._known[side, place] = batch_of(self._runs[side], steps.get(place, ()))
        return self._known[side, place]

    def _compared(self, places: tuple[Place, Place], ours: Batch, theirs: Batch) -> Common | None:
        if (ours.rows, ours.tokens) == (theirs.rows, theirs.tokens):
            whole = (0, ours.tokens)
            return Common(ours.rows, whole, whole)
        common = common_part(ours, theirs)
        if common is None:
            return None
        step = places[0][0]
        sizes = f"{_size(ours)} tokens in the reference, {_size(theirs)} in the candidate"
        if common.trouble:
            self.notes.append(f"step {step}: {sizes}; {common.trouble}")
        elif common.said:
            self.notes.append(f"step {step}: {sizes}; compared: {common.said}")
        return common


def _size(batch: Batch) -> str:
    return f"{batch.tokens}" if batch.flat else f"{batch.rows}x{batch.tokens}"
