"""A run as the matching rules see it: renumbered ranks and steps, shards joined into tensors.

Every record of a view has an origin, the stored tensors that it is made of, so that a plan of two
views can be converted to a plan of the runs themselves. This file does not decide which ranks or
steps match; the normalisers do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from driftline.alignment.plan import Pair, Plan, execution
from driftline.alignment.recipe import Recipe, Source, Step, start
from driftline.errors import BadInput
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Memory, ReadAhead, Run, Storage
from driftline.runs.views import RunView

if TYPE_CHECKING:
    from driftline.runs.sinks import JSON


class Replicas(NamedTuple):
    """Records of several ranks that should hold the same tensor; each is compared."""

    records: tuple[Record, ...]


class Unjoinable(NamedTuple):
    """Tensors of several ranks that cannot be joined, and the reason."""

    records: tuple[Record, ...]
    reason: str


class Gathered(NamedTuple):
    """Shards (or partial sums) of several ranks, with the recipe that joins them.

    Attributes:
        recipe: Recipe that joins the ranks.
        replicas: Whether the ranks may instead be replicas, by their shapes. They are treated as
            replicas if the other side has the shape of one part rather than the recipe's.
    """

    recipe: Recipe
    replicas: bool = False


class Copies(NamedTuple):
    """Several copies of one tensor on a mesh: records, or joined shards.

    Attributes:
        sources: The copies; each is compared with the other side.
    """

    sources: tuple[Source, ...]


Origin = Record | Replicas | Gathered | Copies | Unjoinable
Excluded = tuple[Record, Origin, str]
"""A tensor that takes no part in the matching: its record in the view, its origin, the reason."""


class AlignedView(RunView):
    """A run with some records replaced; everything else is the run's own.

    Attributes:
        origins: Key of a record → its origin; a record without an entry is the run's own.
        excluded: Tensors that take no part in the matching.
    """

    def __init__(
        self,
        base: Run,
        records: Sequence[Record],
        origins: Mapping[TensorKey, Origin],
        excluded: Sequence[Excluded] = (),
    ) -> None:
        super().__init__(base)
        self.origins = origins
        self.excluded = excluded
        self._records = records
        # Filled on first use, because the side files of most views are never read.
        self._places: dict[tuple[int, int], tuple[int, int]] | None = None

    @property
    def records(self) -> Sequence[Record]:
        return self._records

    def raw(self, record: Record) -> Storage:
        origin = self._first(record)
        if isinstance(origin, Record):
            return self.base.raw(origin)
        raise BadInput(f"{record.key} is gathered from several ranks when it is compared")

    def memory(self, record: Record) -> Memory | None:
        origin = self._first(record)
        return self.base.memory(origin) if isinstance(origin, Record) else None

    def window(self, record: Record, start: int, stop: int) -> Memory | None:
        origin = self._first(record)
        return self.base.window(origin, start, stop) if isinstance(origin, Record) else None

    def read_ahead(self) -> ReadAhead | None:
        """None, because rules read few tensors of a view, and the run has them under other keys."""
        return None

    def lost(self, record: Record) -> str:
        origin = self._first(record)
        if isinstance(origin, Record):
            return self.base.lost(origin)
        return "it is gathered from several ranks when it is compared"

    def source(self, record: Record) -> str:
        origin = self._first(record)
        return self.base.source(origin) if isinstance(origin, Record) else ""

    def topology(self, rank: int = 0, process: int = 0) -> Mapping[str, JSON] | None:
        tree = self.base.topology(*self._place(rank, process))
        if tree is not None:
            return tree
        # A gathered run has no tree of its own; that of any process describes the same model.
        places = sorted({(r.key.rank, r.key.process) for r in self.base.records})
        return next((tree for place in places if (tree := self.base.topology(*place))), None)

    def sheets(self, rank: int = 0, process: int = 0) -> list[str]:
        return self.base.sheets(*self._place(rank, process))

    def sheet(self, name: str, rank: int = 0, process: int = 0) -> str:
        return self.base.sheet(name, *self._place(rank, process))

    def _first(self, record: Record) -> Origin:
        """Origin of a record of the view; the first origin if there are copies."""
        origin = self.origins.get(record.key, record)
        if isinstance(origin, Replicas):
            return origin.records[0]
        if isinstance(origin, Copies):
            first = origin.sources[0]
            return Gathered(first) if isinstance(first, Recipe) else first
        return origin

    def _place(self, rank: int, process: int) -> tuple[int, int]:
        """The run's process behind a process of the view; the first one of gathered ranks."""
        if self._places is None:
            self._places = {}
            for record in self._records:
                place = (record.key.rank, record.key.process)
                if place not in self._places:
                    real = _parts(self.origins.get(record.key, record))[0].key
                    self._places[place] = (real.rank, real.process)
        return self._places.get((rank, process), (rank, process))


def resolve_views(plan: Plan, reference: Run, candidate: Run) -> Plan:
    """Convert a plan of two views to a plan of the runs behind them."""
    reference_origins, candidate_origins = origins_of(reference), origins_of(candidate)
    excluded = excluded_of(reference), excluded_of(candidate)
    # Without views, the plan already contains records of the runs.
    if not reference_origins and not candidate_origins and not any(excluded):
        return plan
    pairs = [
        real
        for pair in plan.pairs
        for real in _real_pairs(pair, reference_origins, candidate_origins)
    ]
    view_reasons, reasons = (
        plan.reasons,
        dict[tuple[str, TensorKey], str](),
    )  # by keys of views; by keys of runs
    missing = list(
        _real_records(plan.missing, reference_origins, "reference", view_reasons, reasons)
    )
    extra = list(_real_records(plan.extra, candidate_origins, "candidate", view_reasons, reasons))
    for side, unpaired, left in (
        ("reference", missing, excluded[0]),
        ("candidate", extra, excluded[1]),
    ):
        # Excluded tensors become unpaired tensors, with the reason why they were excluded.
        for _, origin, reason in left:
            for record in _parts(origin):
                reasons.setdefault((side, record.key), reason)
                unpaired.append(record)
        unpaired.sort(key=execution)
    stored_keys = {"reference": _keys(reference_origins), "candidate": _keys(candidate_origins)}
    lines = {
        (side, key): line
        for (side, seen_key), line in plan.lone_lines.items()
        for key in stored_keys[side].get(seen_key, (seen_key,))
    }
    # The first copy of a compared tensor represents all its copies, as in a pair.
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
    """Origins of a view's records; empty for a run, whose records are their own origins."""
    return run.origins if isinstance(run, AlignedView) else {}


def excluded_of(run: Run) -> Sequence[Excluded]:
    """Tensors that a view excludes from the matching."""
    return run.excluded if isinstance(run, AlignedView) else ()


def _parts(origin: Origin) -> tuple[Record, ...]:
    if isinstance(origin, Gathered):
        return origin.recipe.records
    if isinstance(origin, Copies):
        parts = [
            source.records if isinstance(source, Recipe) else (source,) for source in origin.sources
        ]
        return tuple(record for records in parts for record in records)
    return (origin,) if isinstance(origin, Record) else origin.records


def _real_pairs(
    pair: Pair,
    reference_origins: Mapping[TensorKey, Origin],
    candidate_origins: Mapping[TensorKey, Origin],
) -> Iterator[Pair]:
    reference_origin = reference_origins.get(pair.reference.key, pair.reference)
    candidate_origin = candidate_origins.get(pair.candidate.key, pair.candidate)
    left_side = _ways(
        reference_origin, pair.candidate.shape, pair.reference_recipe, reference_origins
    )
    right_side = list(
        _ways(candidate_origin, pair.reference.shape, pair.candidate_recipe, candidate_origins)
    )
    for which, (left, left_recipe, trouble) in enumerate(left_side):
        # With copies on both sides, the first copy of each side is compared with all of the other:
        # every copy is compared once, without every combination.
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
    """The stored records of one side of a pair, each with its recipe and its trouble."""
    if isinstance(origin, Gathered):
        parts = origin.recipe.records
        # The other side has the shape of one part, not of the joined tensor, so every rank holds
        # the complete tensor.
        as_replicas = origin.replicas and other == parts[0].shape != origin.recipe.shape
        if recipe is not None or not as_replicas:
            yield parts[0], _real_recipe(recipe, origins) or origin.recipe, ""
            return
        origin = Replicas(parts)
    if isinstance(origin, Unjoinable):
        yield origin.records[0], _real_recipe(recipe, origins), origin.reason
    elif isinstance(origin, Copies):
        for which, source in enumerate(origin.sources):
            stored_recipe = _real_recipe(recipe, origins, which)
            if isinstance(source, Recipe):
                yield source.records[0], stored_recipe or source, ""
            else:  # its placement is resolved: this copy is complete
                yield source._replace(placement=""), stored_recipe, ""
    elif isinstance(origin, Replicas):
        for which, record in enumerate(origin.records):  # every replica gets the same recipe
            yield record, _real_recipe(recipe, origins, which), ""
    else:
        yield origin, _real_recipe(recipe, origins), ""


def _real_recipe(
    recipe: Recipe | None, origins: Mapping[TensorKey, Origin], which: int = 0
) -> Recipe | None:
    """A recipe with stored sources; `which` chooses one of several copies."""
    # A recipe of a view names records that no file holds; they are replaced by their origins.
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
            # The two sides may have different numbers of copies; the last copy replaces missing
            # ones.
            sources.append(origin.sources[min(which, len(origin.sources) - 1)])
        elif isinstance(origin, Replicas):
            sources.append(origin.records[min(which, len(origin.records) - 1)])
        elif isinstance(origin, Unjoinable):
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
        # A rule's reason is more specific than the reason that the parts do not fit together.
        reason = seen.get((side, record.key), "")
        if isinstance(origin, Unjoinable):
            reason = reason or origin.reason
        for real in _parts(origin):
            if reason:
                reasons[side, real.key] = reason
            yield real


def shapes_of(pair: Pair) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of both sides after their recipes."""
    reference_recipe, candidate_recipe = pair.reference_recipe, pair.candidate_recipe
    return (
        pair.reference.shape if reference_recipe is None else reference_recipe.shape,
        pair.candidate.shape if candidate_recipe is None else candidate_recipe.shape,
    )


def with_steps(pair: Pair, side: str, *steps: Step, shape: tuple[int, ...]) -> Pair:
    """A pair with more steps on one side (`reference` or `candidate`)."""
    if side == "reference":
        recipe = pair.reference_recipe or start(pair.reference)
        return pair._replace(reference_recipe=recipe.then(*steps, shape=shape))
    recipe = pair.candidate_recipe or start(pair.candidate)
    return pair._replace(candidate_recipe=recipe.then(*steps, shape=shape))
