"""A run as the matching rules see it: other ranks and steps, shards as the whole they are part of.

What is seen can be taken back: every record of a view knows what it is made of, so that a plan made
of views becomes one of the runs themselves. Which rank or step is which, the rules say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from driftline.alignment.plan import Pair, Plan
from driftline.alignment.recipe import Recipe, Source, Step, start
from driftline.errors import BadInput
from driftline.runs.key import TensorKey
from driftline.runs.record import Record
from driftline.runs.run import Loss, Memory, Run, Storage

if TYPE_CHECKING:
    from driftline.runs.sink import JSON


class Replicas(NamedTuple):
    """Several ranks that should hold the same tensor; each is set against the other side."""

    records: tuple[Record, ...]


class Apart(NamedTuple):
    """Tensors of several ranks that cannot be made one, and why."""

    records: tuple[Record, ...]
    reason: str


class Gathered(NamedTuple):
    """Shards (or partial sums) of several ranks, the recipe that makes them whole, and a doubt.

    Attributes:
        recipe: Joins the ranks.
        replicas: Whether the ranks' shapes allow that each holds the whole tensor already; taken
            so when the other side has their shape rather than the recipe's.
    """

    recipe: Recipe
    replicas: bool = False


class Copies(NamedTuple):
    """What the places of a mesh hold that should all be the same: records, or wholes of shards.

    Attributes:
        sources: Each is set against the other side.
    """

    sources: tuple[Source, ...]


Origin = Record | Replicas | Gathered | Copies | Apart
Aside = tuple[Record, Origin, str]
"""A tensor that has no part in the matching: as it is seen, what it is made of, and why."""


class SeenRun(Run):
    """A run with some records in place of others; the rest of it is as it was."""

    def __init__(
        self,
        whole: Run,
        records: Sequence[Record],
        origins: Mapping[TensorKey, Origin],
        aside: Sequence[Aside] = (),
    ) -> None:
        self.name = whole.name
        self.ordered = whole.ordered
        self.whole = whole
        self.origins = origins
        self.aside = aside
        self._records = records

    @property
    def records(self) -> Sequence[Record]:
        return self._records

    @property
    def manifest(self) -> Mapping[str, Any]:
        return self.whole.manifest

    @property
    def losses(self) -> Sequence[Loss]:
        return self.whole.losses

    def raw(self, record: Record) -> Storage:
        origin = self._first(record)
        if isinstance(origin, Record):
            return self.whole.raw(origin)
        raise BadInput(f"{record.key} is gathered from several ranks when it is compared")

    def memory(self, record: Record) -> Memory | None:
        origin = self._first(record)
        return self.whole.memory(origin) if isinstance(origin, Record) else None

    def _first(self, record: Record) -> Origin:
        """What a record of the view is made of; of replicas the first."""
        origin = self.origins.get(record.key, record)
        if isinstance(origin, Replicas):
            return origin.records[0]
        if isinstance(origin, Copies):
            first = origin.sources[0]
            return Gathered(first) if isinstance(first, Recipe) else first
        return origin

    def lost(self, record: Record) -> str:
        origin = self._first(record)
        if isinstance(origin, Record):
            return self.whole.lost(origin)
        return "it is gathered from several ranks when it is compared"

    def topology(self, rank: int = 0, process: int = 0) -> Mapping[str, JSON] | None:
        found = self.whole.topology(rank, process)
        if found is not None:
            return found
        places = sorted({(r.key.rank, r.key.process) for r in self.whole.records})
        return next((tree for at in places if (tree := self.whole.topology(*at))), None)

    def sheets(self, rank: int = 0, process: int = 0) -> list[str]:
        return self.whole.sheets(rank, process)

    def sheet(self, name: str, rank: int = 0, process: int = 0) -> str:
        return self.whole.sheet(name, rank, process)


def taken_back(plan: Plan, reference: Run, candidate: Run) -> Plan:
    """A plan of two views as a plan of the runs behind them."""
    ours, theirs = origins_of(reference), origins_of(candidate)
    aside = aside_of(reference), aside_of(candidate)
    if not ours and not theirs and not any(aside):
        return plan
    pairs = [real for pair in plan.pairs for real in _real_pairs(pair, ours, theirs)]
    seen, reasons = plan.reasons, dict[tuple[str, TensorKey], str]()  # by views; by real keys
    missing = list(_real_records(plan.missing, ours, "reference", seen, reasons))
    extra = list(_real_records(plan.extra, theirs, "candidate", seen, reasons))
    for side, found, left in (("reference", missing, aside[0]), ("candidate", extra, aside[1])):
        for _, origin, reason in left:
            for record in _parts(origin):
                reasons.setdefault((side, record.key), reason)
                found.append(record)
        found.sort(key=lambda record: (record.key.rank, record.key.process, record.order))
    return plan._replace(
        pairs=tuple(pairs), missing=tuple(missing), extra=tuple(extra), reasons=reasons
    )


def origins_of(run: Run) -> Mapping[TensorKey, Origin]:
    """What the records of a view are made of; those of a run are themselves."""
    return run.origins if isinstance(run, SeenRun) else {}


def aside_of(run: Run) -> Sequence[Aside]:
    """What a view keeps out of the matching."""
    return run.aside if isinstance(run, SeenRun) else ()


def _parts(origin: Origin) -> tuple[Record, ...]:
    if isinstance(origin, Gathered):
        return origin.recipe.records
    if isinstance(origin, Copies):
        found = [each.records if isinstance(each, Recipe) else (each,) for each in origin.sources]
        return tuple(record for records in found for record in records)
    return (origin,) if isinstance(origin, Record) else origin.records


def _real_pairs(
    pair: Pair, ours: Mapping[TensorKey, Origin], theirs: Mapping[TensorKey, Origin]
) -> Iterator[Pair]:
    here = ours.get(pair.reference.key, pair.reference)
    there = theirs.get(pair.candidate.key, pair.candidate)
    left_side = _ways(here, pair.candidate.shape, pair.reference_recipe, ours)
    right_side = list(_ways(there, pair.reference.shape, pair.candidate_recipe, theirs))
    for which, (left, left_recipe, trouble) in enumerate(left_side):
        # Of copies on both sides the first of each is set against all of the other.
        for right, right_recipe, more in right_side if which == 0 else right_side[:1]:
            yield Pair(
                left,
                right,
                pair.by,
                pair.confidence,
                left_recipe,
                right_recipe,
                pair.trouble or trouble or more,
            )


def _ways(
    origin: Origin,
    other: tuple[int, ...],
    recipe: Recipe | None,
    origins: Mapping[TensorKey, Origin],
) -> Iterator[tuple[Record, Recipe | None, str]]:
    """The records of one side that a pair stands for, what to do to each, and what is wrong."""
    if isinstance(origin, Gathered):
        parts = origin.recipe.records
        as_replicas = origin.replicas and other == parts[0].shape != origin.recipe.shape
        if recipe is not None or not as_replicas:
            yield parts[0], _real_recipe(recipe, origins) or origin.recipe, ""
            return
        origin = Replicas(parts)
    if isinstance(origin, Apart):
        yield origin.records[0], _real_recipe(recipe, origins), origin.reason
    elif isinstance(origin, Copies):
        for which, source in enumerate(origin.sources):
            found = _real_recipe(recipe, origins, which)
            if isinstance(source, Recipe):
                yield source.records[0], found or source, ""
            else:  # how it lies is settled: it is whole
                yield source._replace(placement=""), found, ""
    elif isinstance(origin, Replicas):
        for which, record in enumerate(origin.records):  # each for itself, whatever is done to it
            yield record, _real_recipe(recipe, origins, which), ""
    else:
        yield origin, _real_recipe(recipe, origins), ""


def _real_recipe(
    recipe: Recipe | None, origins: Mapping[TensorKey, Origin], which: int = 0
) -> Recipe | None:
    """A recipe whose sources are what the run holds; of replicas, the one of this number."""
    if recipe is None or not origins:
        return recipe
    sources: list[Source] = []
    for source in recipe.sources:
        if isinstance(source, Recipe):
            inner = _real_recipe(source, origins, which)
            sources.append(source if inner is None else inner)
            continue
        origin = origins.get(source.key, source)
        if isinstance(origin, Gathered):
            sources.append(origin.recipe)
        elif isinstance(origin, Copies):
            sources.append(origin.sources[min(which, len(origin.sources) - 1)])
        elif isinstance(origin, Replicas):
            sources.append(origin.records[min(which, len(origin.records) - 1)])
        elif isinstance(origin, Apart):
            sources.append(origin.records[0])
        else:
            sources.append(origin)
    return Recipe(tuple(sources), recipe.steps, recipe.shape)


def _real_records(
    records: Iterable[Record],
    origins: Mapping[TensorKey, Origin],
    side: str,
    seen: Mapping[tuple[str, TensorKey], str],
    reasons: dict[tuple[str, TensorKey], str],
) -> Iterator[Record]:
    for record in records:
        origin = origins.get(record.key, record)
        reason = seen.get((side, record.key), "")
        if isinstance(origin, Apart):
            reason = reason or origin.reason
        for real in _parts(origin):
            if reason:
                reasons[side, real.key] = reason
            yield real


def shapes_of(pair: Pair) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of both sides as they would be compared."""
    ours, theirs = pair.reference_recipe, pair.candidate_recipe
    return (
        pair.reference.shape if ours is None else ours.shape,
        pair.candidate.shape if theirs is None else theirs.shape,
    )


def with_steps(pair: Pair, side: str, *steps: Step, shape: tuple[int, ...]) -> Pair:
    """A pair of which one side (`reference` or `candidate`) has more done to it."""
    if side == "reference":
        recipe = pair.reference_recipe or start(pair.reference)
        return pair._replace(reference_recipe=recipe.then(*steps, shape=shape))
    recipe = pair.candidate_recipe or start(pair.candidate)
    return pair._replace(candidate_recipe=recipe.then(*steps, shape=shape))
