"""A second look at tensors that make a site suspect: does each half of the tokens show the error?

Sites are suspected because of sums over whole tensors. An error that only one half of the tokens
shows is an accident, unless it is far outside the limit (a single wrong token is enough then).
Tokens that a router sent to other experts at a near tie, and everything that they reach, are left
out if the error disappears without them. The input of a norm is measured as the norm weighs it:
after the norm every token has the same size, however small it was before. For gradients that an
optimizer divides by their size, only the signs count. The results become metrics of rows, so that a
stored table is judged in the same way as its runs. This file decides no status; `verdict.status`
does.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from driftline.alignment.plan import Pair, Plan
from driftline.comparison.evidence.error_stats import (
    F64,
    NOTHING,
    Effect,
    Places,
    chosen_rows,
    effect_of,
    halves,
    is_readable,
    read_rows,
    read_whole,
    sums,
)
from driftline.comparison.evidence.routing_changes import Flip, flips, rows_reached
from driftline.comparison.evidence.rules import is_bias
from driftline.comparison.measure.pair_rows import paired
from driftline.comparison.table.row import Row, Tensors, tensors_of
from driftline.comparison.table.table import Table
from driftline.comparison.tolerance.tolerance import GIVEN, HALF, REST, TURNED
from driftline.comparison.verdict.module_kinds import is_norm
from driftline.comparison.verdict.noise import NoiseFloor
from driftline.comparison.verdict.sites import ancestors, error_of, unit_of
from driftline.comparison.verdict.status import SiteStatus, is_borne_out
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run

ROUTERS = "routers sent"
"""Start of the note about tokens that were sent to other experts."""
_EPSILON = 1e-8
"""Number that optimizers add to the size of a gradient; smaller elements hardly move."""
_GONE = 0.3
"""Fraction of the error that may remain without the rerouted tokens; if no more remains, the error
belonged to those tokens."""


class Look(NamedTuple):
    """Result of a second look at a tensor.

    Attributes:
        effect: The effect on all tokens that count.
        halves: The effects on either half of them.
        rest: Relative error of the tokens that count; 0 if rerouting reaches all of them.
        is_routed: Whether rerouted tokens were left out.
    """

    effect: Effect
    halves: tuple[Effect, Effect]
    rest: float
    is_routed: bool = False

    @property
    def half(self) -> float:
        """Relative error on the half of the tokens where it is smaller."""
        # No tokens are left that could have an error.
        if self.is_routed and self.rest == 0.0:
            return 0.0
        return min(effect.error for effect in self.halves)


class Figures(NamedTuple):
    """Figures of a second look.

    Attributes:
        half: Relative error on the half of the tokens where it is smaller.
        rest: Relative error of the tokens that count.
    """

    half: float
    rest: float


class Looks(Protocol):
    """Second looks, taken now at tensors or earlier by shards."""

    @property
    def notes(self) -> Sequence[str]:
        """Sentences about what was left out in the looks taken so far."""
        ...

    def figures(self, standing: SiteStatus, floor: NoiseFloor | None) -> Figures | None:
        """Return the errors that a second look at a suspect shows; None if there is no look."""
        ...

    def explanations(self, standing: SiteStatus) -> Mapping[Tensors, dict[str, float]]:
        """Return what else may explain the error of a suspect, as metrics of other rows."""
        ...


def acquittals(
    looks: Looks, suspects: Iterable[SiteStatus], floor: NoiseFloor | None
) -> dict[Tensors, dict[str, float]]:
    """Return metrics for the tensors of suspects that a second look acquits.

    Args:
        looks: The second looks.
        suspects: Statuses of the suspects.
        floor: The noise floor, if sites were judged by it.
    """
    metrics: dict[Tensors, dict[str, float]] = {}
    for standing in suspects:
        metrics |= looks.explanations(standing)
        figures = looks.figures(standing, floor)
        if figures is None or not all(map(math.isfinite, figures)):
            continue
        if not is_borne_out(standing, *figures):
            metrics[tensors_of(standing.call.worst)] = {HALF: figures.half, REST: figures.rest}
    return metrics


def settle(
    table: Table,
    judge_table: Callable[[Table], Table],
    looks: Looks,
    masked: Callable[[Iterable[Row]], Iterable[Row]],
) -> Table:
    """Judge a measured table, with everything in the runs that may excuse a failing row.

    Args:
        table: The measured table.
        judge_table: Function that judges a table.
        looks: Second looks at the tensors that make sites suspect.
        masked: Function that measures rows of failing steps again without pads.
    """
    table, judged = _judged_looking(table, judge_table, looks)
    if judged.verdict != "fail":
        return judged
    # Pads are looked up only if something fails, because they can excuse a row but never blame one.
    steps = {row.key.step for row in judged.rows if row.status == "fail"}
    without_pads = list(masked(row for row in judged.rows if row.key.step in steps))
    if not without_pads:
        return judged
    from driftline.comparison.evidence.padding import judged_without_pads

    return judged_without_pads(
        judged, table, without_pads, lambda other: _judged_looking(other, judge_table, looks)[1]
    )


def _judged_looking(
    table: Table, judge_table: Callable[[Table], Table], looks: Looks
) -> tuple[Table, Table]:
    """Return a table with second looks at its suspects, and the same table judged.

    This repeats until no further culprit is acquitted, because acquitting one may bring another to
    the front.
    """
    judged = judge_table(table)
    acquitted: set[Tensors] = set()
    while judged.judgement is not None:
        judgement = judged.judgement
        metrics = acquittals(looks, judgement.suspects(), judgement.evidence.floor)
        # A tensor that was acquitted before gives nothing new if its site is suspected again.
        if not metrics.keys() - acquitted:
            break
        acquitted |= metrics.keys()
        table = table.with_rows(
            row._replace(metrics={**row.metrics, **seen})
            if (seen := metrics.get(tensors_of(row))) is not None
            else row
            for row in table.rows
        )
        judged = judge_table(table)
    notes = tuple(note for note in looks.notes if note not in judged.notes)
    return table, judged.changed(notes=(*judged.notes, *notes)) if notes else judged


class EarlierLooks:
    """Second looks taken earlier by the shards of a comparison, which had the tensors."""

    def __init__(self, figures: Mapping[Tensors, Figures], notes: Sequence[str]) -> None:
        self._figures = figures
        self._notes = notes
        self._asked = False

    @property
    def notes(self) -> Sequence[str]:
        return self._notes if self._asked else ()

    def figures(self, standing: SiteStatus, floor: NoiseFloor | None) -> Figures | None:
        self._asked = True
        return self._figures.get(tensors_of(standing.call.worst))

    def explanations(self, standing: SiteStatus) -> Mapping[Tensors, dict[str, float]]:
        # Shards examine single tensors; explanations need other tensors of the same run.
        del standing
        return {}


class SecondLook:
    """Second looks at tensors of two runs; changed expert choices are searched once."""

    def __init__(self, reference: Run, candidate: Run, plan: Plan) -> None:
        self._reference = reference
        self._candidate = candidate
        self._plan = plan
        self._pairs: dict[TensorKey, list[Pair]] | None = None
        self._flips: list[Flip] | None = None
        self._looks: dict[Tensors, Look | None] = {}

    @property
    def flips(self) -> Sequence[Flip]:
        """Changed expert choices at near ties."""
        if self._flips is None:
            self._flips = flips(self._reference, self._candidate, self._plan)
        return self._flips

    @property
    def notes(self) -> list[str]:
        """Sentences about what was left out in the looks taken so far."""
        if not self._flips:
            return []
        tokens = sum(int(flip.rows.sum()) for flip in self._flips)
        return [
            f"{ROUTERS} {tokens} tokens to other experts at a near tie, first "
            f"'{self._flips[0].router}': errors of those tokens alone were not counted"
        ]

    def of_rows(self, rows: Iterable[Row]) -> Iterator[tuple[int, Figures]]:
        """Yield second looks at all rows that may become suspect later, with their indices."""
        for place, row in enumerate(rows):
            if may_be_suspect(row) and (look := self.at(row)) is not None:
                yield place, Figures(look.half, look.rest)
                # Results are dropped one by one, because a shard may hold very many tensors.
                self._looks.clear()

    def at(self, row: Row) -> Look | None:
        """Return a second look at the tensor of a row; None if its values are missing."""
        tensors = tensors_of(row)
        if tensors not in self._looks:
            self._looks[tensors] = self._look(row)
        return self._looks[tensors]

    def figures(self, standing: SiteStatus, floor: NoiseFloor | None) -> Figures | None:
        """Return the errors that a second look at a suspect shows; None if its values are missing.

        Args:
            standing: Status of the suspect.
            floor: The noise floor, if sites were judged by it.
        """
        row = standing.call.worst
        look = self.at(row)
        if look is None:
            return None
        half = look.half
        if standing.leaning:
            leans = [lean_of(effect, row.key, floor) for effect in look.halves]
            half = half if min(leans) > 1.0 else 0.0
        return Figures(half, look.rest)

    def explanations(self, standing: SiteStatus) -> dict[Tensors, dict[str, float]]:
        """Return what else may explain the error of a suspect, as metrics of other rows."""
        row = standing.call.worst
        if standing.by != "growth":
            return {}
        metrics = self._turned_signs(row)
        if is_norm(row.class_name):
            metrics |= self._as_norms_weigh(standing.call.ins)
        return metrics

    def _turned_signs(self, row: Row) -> dict[Tensors, dict[str, float]]:
        """Return how far signs of rounding in gradients move the weights used for a row."""
        metrics: dict[Tensors, dict[str, float]] = {}
        key = row.key
        holders = {key.site, *ancestors(key.site)}
        for pair in self._learnt if key.step else ():
            other = pair.reference.key
            if other.site not in holders or other.rank != key.rank or other.step >= key.step:
                continue
            # A bias without a real gradient is measured separately (`loose_bias`).
            if is_bias(other.slot):
                continue
            r = read_whole(self._reference, pair.reference)
            c = read_whole(self._candidate, pair.candidate)
            if r is None or c is None or r.shape != c.shape:
                continue
            signs = [values / (np.abs(values) + _EPSILON) for values in (r, c)]
            size = float(np.linalg.norm(signs[0]))
            if size > 0.0:
                apart = float(np.linalg.norm(signs[1] - signs[0])) / size
                metrics[tensors_of(paired(pair))] = {TURNED: apart}
        return metrics

    @functools.cached_property
    def _learnt(self) -> Sequence[Pair]:
        """Gradients that optimizers received."""
        return [pair for pair in self._plan.pairs if pair.reference.key.port == "optimizer_grad"]

    def _as_norms_weigh(self, rows: Iterable[Row]) -> dict[Tensors, dict[str, float]]:
        """Return errors of a norm's inputs that are larger on the scale of its result."""
        metrics: dict[Tensors, dict[str, float]] = {}
        for row in rows:
            pair = self._pair_of(row)
            if pair is None or len(pair.reference.shape) < 2:
                continue
            r = read_whole(self._reference, pair.reference)
            c = read_whole(self._candidate, pair.candidate)
            if r is None or c is None or r.shape != c.shape:
                continue
            error = max(_normalised_error(r, c, row.class_name, centred) for centred in (0.0, 1.0))
            if error_of(row) < error < math.inf:
                metrics[tensors_of(row)] = {GIVEN: error}
        return metrics

    def _look(self, row: Row) -> Look | None:
        sample = self._sampled_rows(row)
        if sample is None:
            return None
        reference, places, r, c = sample
        # Fewer than four rows cannot be divided into meaningful halves.
        if len(r) < 4:
            return None
        reached = rows_reached(self.flips, row.key.site, reference, reference.shape)
        if reached is not None:
            kept = ~reached[places]
            if np.count_nonzero(kept) < 4:
                return Look(NOTHING, (NOTHING, NOTHING), 0.0, is_routed=True)
            rest = effect_of(sums(r[kept], c[kept]))
            if rest.error <= _GONE * effect_of(sums(r, c)).error and not rest.nonfinite:
                r, c = r[kept], c[kept]
            else:
                reached = None  # other tokens are off too
        row_sums = sums(r, c)
        effect = effect_of(row_sums)
        return Look(effect, halves(row_sums), effect.error, reached is not None)

    def _sampled_rows(self, row: Row) -> tuple[Record, Places, F64, F64] | None:
        """Return the reference's record of a row, the sampled row indices, and both sides."""
        pair = self._pair_of(row)
        if pair is None:
            return None
        reference, candidate = pair.reference, pair.candidate
        if not is_readable(self._reference, reference) or not is_readable(
            self._candidate, candidate
        ):
            return None
        if reference.shape != candidate.shape:
            return None
        places = chosen_rows(reference.shape)
        r = read_rows(self._reference, reference, places)
        c = read_rows(self._candidate, candidate, places)
        return None if r is None or c is None else (reference, places, r, c)

    def _pair_of(self, row: Row) -> Pair | None:
        """Return the pair of a row if its stored rows correspond one to one; else None."""
        if self._pairs is None:
            self._pairs = {}
            for pair in self._plan.pairs:
                self._pairs.setdefault(pair.reference.key, []).append(pair)
        place = _candidate_place(row)
        pair = next(
            (pair for pair in self._pairs.get(row.key, ()) if _place(pair.candidate.key) == place),
            None,
        )
        # Transformed pairs are skipped, because their stored rows do not correspond.
        if pair is None or pair.reference_recipe is not None or pair.candidate_recipe is not None:
            return None
        return pair


_BY_CHANNEL = ("GroupNorm", "InstanceNorm")


def _normalised_error(reference: F64, candidate: F64, class_name: str, centred: float) -> float:
    """Return the relative error of two tensors after dividing every group by its own size."""
    # Channels of images are normalised separately; all other tensors along the last axis.
    channels = class_name.startswith(_BY_CHANNEL)
    rows = math.prod(reference.shape[:2]) if channels else math.prod(reference.shape[:-1])
    sides: list[F64] = []
    for values in (reference, candidate):
        groups = values.reshape(rows, -1)
        groups = groups - centred * groups.mean(axis=1, keepdims=True)
        size = np.linalg.norm(groups, axis=1, keepdims=True)
        sides.append(groups / np.where(size > 0.0, size, 1.0))
    size = float(np.linalg.norm(sides[0]))
    return float(np.linalg.norm(sides[1] - sides[0])) / size if size > 0.0 else math.inf


def may_be_suspect(row: Row) -> bool:
    """Return whether a row may make its site suspect: it is off by more than one rounding."""
    return row.compared and row.basis == "values" and not error_of(row) <= unit_of(row)


_Place: TypeAlias = tuple[str, str, str, int, int, int]
"""Site, port, slot, step, visit and rank."""


def _place(key: TensorKey) -> _Place:
    return key.site, key.port, key.slot, key.step, key.visit, key.rank


def _candidate_place(row: Row) -> _Place:
    """Return the candidate's place of a row; copies on several ranks share one reference key."""
    key = row.key
    return (
        row.candidate_site or key.site,
        row.candidate_port or key.port,
        row.candidate_slot or key.slot,
        key.step if row.candidate_step is None else row.candidate_step,
        key.visit if row.candidate_visit is None else row.candidate_visit,
        key.rank if row.candidate_rank is None else row.candidate_rank,
    )


def lean_of(half: Effect, key: TensorKey, floor: NoiseFloor | None) -> float:
    """Return how far a half's projection is outside the trusted range, in five standard errors."""
    span = floor.leans.get(key) if floor is not None else None
    if span is None or not half.projection_se > 0.0:
        return 0.0
    # The range always contains 0: being nearer to the reference than trusted runs is no fault.
    low, high = min(span[0], 0.0), max(span[1], 0.0)
    return max(half.projection - high, low - half.projection, 0.0) / (5.0 * half.projection_se)
