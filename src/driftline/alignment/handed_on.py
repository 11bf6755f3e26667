"""Inputs of a container that it only hands on: they pair as the operators that take them do.

A layer of an operator library takes all weights of its operators as inputs of its own. Which is
which its place in the list does not say, if the other program has other operators; the names that
the dump's topology gives tensors do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from driftline.alignment.calls import Call
from driftline.alignment.dataflow import Dataflow
from driftline.alignment.plan import Pair
from driftline.alignment.recipe import Recipe
from driftline.runs.record import Record

_NONE: dict[object, Pair] = {}


def name_of(record: Record, flow: Dataflow) -> str:
    """What the dump calls an input; empty if it does not say."""
    if record.key.port != "input":
        return ""
    return flow.names.get((record.key.site, record.key.slot), "")


class HandedOn:
    """The pairs of operators' inputs, by the names of the tensors."""

    def __init__(self, pairs: Iterable[Pair], ours: Dataflow, theirs: Dataflow) -> None:
        self._flows = (ours, theirs)
        self._pairs: dict[str, dict[object, Pair]] = {}
        for pair in pairs:
            names = name_of(pair.reference, ours), name_of(pair.candidate, theirs)
            if all(names):
                # Norms of all layers may hold the same bytes: what says the same is said once.
                self._pairs.setdefault(names[0], {}).setdefault((names[1], _said(pair)), pair)

    def pairs_of(
        self, one: Call, other: Call, free: set[int], confidence: float
    ) -> tuple[list[Pair], set[int]]:
        """Pairs of two containers' inputs, and the records in them."""
        there: dict[str, list[Record]] = {}
        for record in other.records:
            if id(record) in free:
                there.setdefault(name_of(record, self._flows[1]), []).append(record)
        seen: Counter[str] = Counter()
        found: dict[tuple[int, int, str], Pair] = {}
        for record in one.records:
            if id(record) not in free:
                continue
            name = name_of(record, self._flows[0])
            nth = seen[name]  # equal bytes have equal names: the nth goes with the nth
            seen[name] += 1
            for pair in self._pairs.get(name, _NONE).values():
                fitting = there.get(name_of(pair.candidate, self._flows[1]), ())
                partner = fitting[min(nth, len(fitting) - 1)] if fitting else None
                alike = partner is not None and _alike(record, pair.reference)
                if partner is None or not alike or not _alike(partner, pair.candidate):
                    continue
                mine = _instead(pair.reference_recipe, pair.reference, record)
                theirs = _instead(pair.candidate_recipe, pair.candidate, partner)
                both = Pair(record, partner, "structure", confidence, mine, theirs)
                found.setdefault((id(record), id(partner), f"{mine} {theirs}"), both)
        told = {id(record) for pair in found.values() for record in pair.records}
        return list(found.values()), told


def _said(pair: Pair) -> object:
    """What a pair says of two tensors, whichever they are."""
    said: list[object] = []
    for record, recipe in (
        (pair.reference, pair.reference_recipe),
        (pair.candidate, pair.candidate_recipe),
    ):
        alone = recipe is None or recipe.sources == (record,)
        steps = () if recipe is None else recipe.steps
        said.append((record.shape, record.dtype, steps, None if alone else id(recipe)))
    return tuple(said)


def _alike(ours: Record, theirs: Record) -> bool:
    return ours.shape == theirs.shape and ours.dtype == theirs.dtype


def _instead(recipe: Recipe | None, old: Record, new: Record) -> Recipe | None:
    if recipe is None:
        return None
    sources = tuple(new if source is old else source for source in recipe.sources)
    return recipe._replace(sources=sources)
