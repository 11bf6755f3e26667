"""A run as the matching rules see it: other ranks and steps, shards as the whole they are part of.

What is seen can be taken back: every record of a view knows what it is made of, so that a plan made
of views becomes one of the runs themselves. Which rank or step is which, the rules say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from driftline.alignment.plan import Pair, Plan
from driftline.alignment.recipe import Recipe, Source, Step, start
from driftline.errors import BadInput
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Memory, ReadAhead, Run, Storage
from driftline.runs.views import RunView

if TYPE_CHECKING:
    from driftline.runs.sinks import JSON


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


class SeenRun(RunView):
    """A run with some records in place of others; the rest of it is as it was.

    Attributes:
        origins: What the records are made of, by their keys; those that are not here are the run's.
        aside: Tensors that have no part in the matching.
    """

    def __init__(
        self,
        whole: Run,
        records: Sequence[Record],
        origins: Mapping[TensorKey, Origin],
        aside: Sequence[Aside] = (),
    ) -> None:
        super().__init__(whole)
        self.origins = origins
        self.aside = aside
        self._records = records
        # Filled on first use: most views are never asked for side files.
        self._places: dict[tuple[int, int], tuple[int, int]] | None = None

    @property
    def records(self) -> Sequence[Record]:
        return self._records

    def raw(self, record: Record) -> Storage:
        origin = self._first(record)
        if isinstance(origin, Record):
            return self.whole.raw(origin)
        raise BadInput(f"{record.key} is gathered from several ranks when it is compared")

    def memory(self, record: Record) -> Memory | None:
        origin = self._first(record)
        return self.whole.memory(origin) if isinstance(origin, Record) else None

    def window(self, record: Record, start: int, stop: int) -> Memory | None:
        origin = self._first(record)
        return self.whole.window(origin, start, stop) if isinstance(origin, Record) else None

    def read_ahead(self) -> ReadAhead | None:
        """None: rules read few of its tensors, and the run knows them by other keys."""
        return None

    def lost(self, record: Record) -> str:
        origin = self._first(record)
        if isinstance(origin, Record):
            return self.whole.lost(origin)
        return "it is gathered from several ranks when it is compared"

    def source(self, record: Record) -> str:
        origin = self._first(record)
        return self.whole.source(origin) if isinstance(origin, Record) else ""

    def topology(self, rank: int = 0, process: int = 0) -> Mapping[str, JSON] | None:
        tree = self.whole.topology(*self._place(rank, process))
        if tree is not None:
            return tree
        # A gathered run has no tree of its own: that of any process describes the same
        # model.
        places = sorted({(r.key.rank, r.key.process) for r in self.whole.records})
        return next((tree for place in places if (tree := self.whole.topology(*place))), None)

    def sheets(self, rank: int = 0, process: int = 0) -> list[str]:
        return self.whole.sheets(*self._place(rank, process))

    def sheet(self, name: str, rank: int = 0, process: int = 0) -> str:
        return self.whole.sheet(name, *self._place(rank, process))

    def _first(self, record: Record) -> Origin:
        """What a record of the view is made of; of replicas the first."""
        origin = self.origins.get(record.key, record)
        if isinstance(origin, Replicas):
            return origin.records[0]
        if isinstance(origin, Copies):
            first = origin.sources[0]
            return Gathered(first) if isinstance(first, Recipe) else first
        return origin

    def _place(self, rank: int, process: int) -> tuple[int, int]:
        """The process of the run that is seen as this one; of gathered ranks the first."""
        if self._places is None:
            self._places = {}
            for record in self._records:
                place = (record.key.rank, record.key.process)
                if place not in self._places:
                    real = _parts(self.origins.get(record.key, record))[0].key
                    self._places[place] = (real.rank, real.process)
        return self._places.get((rank, process), (rank, process))


def taken_back(plan: Plan, reference: Run, candidate: Run) -> Plan:
    """A plan of two views as a plan of the runs behind them."""
    ours, theirs = origins_of(reference), origins_of(candidate)
    aside = aside_of(reference), aside_of(candidate)
    # Without views the plan speaks of the runs already.
    if not ours and not theirs and not any(aside):
        return plan
    pairs = [real for pair in plan.pairs for real in _real_pairs(pair, ours, theirs)]
    seen, reasons = plan.reasons, dict[tuple[str, TensorKey], str]()  # by views; by real keys
    missing = list(_real_records(plan.missing, ours, "reference", seen, reasons))
    extra = list(_real_records(plan.extra, theirs, "candidate", seen, reasons))
    for side, found, left in (("reference", missing, aside[0]), ("candidate", extra, aside[1])):
        # Excluded tensors come back as unpaired ones, with the reason why they took no
        # part.
        for _, origin, reason in left:
            for record in _parts(origin):
                reasons.setdefault((side, record.key), reason)
                found.append(record)
        found.sort(key=lambda record: (record.key.rank, record.key.process, record.order))
    stored_keys = {"reference": _keys(ours), "candidate": _keys(theirs)}
    lines = {
        (side, key): line
        for (side, seen_key), line in plan.lone_lines.items()
        for key in stored_keys[side].get(seen_key, (seen_key,))
    }
    # Of what is compared on the other side the first stands for its copies, as it does in a pair.
    others = {"reference": stored_keys["candidate"], "candidate": stored_keys["reference"]}
    inside = {
        (side, key): others[side].get(partner, (partner,))[0]
        for (side, seen_key), partner in plan.inside.items()
        for key in stored_keys[side].get(seen_key, (seen_key,))
    }
    return plan._replace(
        pairs=tuple(pairs),
        missing=tuple(missing),
        extra=tuple(extra),
        reasons=reasons,
        lone_lines=lines,
        inside=inside,
    )


def _keys(origins: Mapping[TensorKey, Origin]) -> dict[TensorKey, tuple[TensorKey, ...]]:
    """Key of a view → keys of the stored tensors behind it."""
    return {key: tuple(r.key for r in _parts(origin)) for key, origin in origins.items()}


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
            yield pair._replace(
                reference=left,
                candidate=right,
                reference_recipe=left_recipe,
                candidate_recipe=right_recipe,
                trouble=pair.trouble or trouble or more,
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
        # The other side has the shape of one part, not of the joined ones: then every rank
        # holds it all.
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
    # A recipe of a view names records that no file holds; they are replaced by what they stand
    # for.
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
            # Sides may have another number of copies; the last one stands for those
            # that are lacking.
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
        # A rule's reason says more than that the parts do not fit together.
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
