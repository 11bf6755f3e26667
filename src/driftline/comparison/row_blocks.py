"""Large gathered tensors, made and measured some rows at a time, so that none is ever whole.

A recipe whose steps leave the first axis alone can be carried out for some rows only: those of its
sources are views of mapped files, and what is made of them is as large as the block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from driftline.alignment.plan import Pair
from driftline.alignment.recipe import JOINING, Recipe, Source, Step
from driftline.comparison.cooking import open_cooked
from driftline.comparison.values import ValuePair
from driftline.numerics.dtypes import DTYPES
from driftline.runs.run import Run

BLOCK = 1 << 22
"""Elements of a block; a single row may have more."""


def row_blocks(reference: Run, candidate: Run, pair: Pair) -> Iterator[ValuePair] | None:
    """Both sides of a pair after their recipes, block after block in order; None if they must be
    made whole.
    """
    ours, theirs = (
        pair.reference_recipe or pair.reference,
        pair.candidate_recipe or pair.candidate,
    )
    shape = ours.shape
    if shape != theirs.shape or not shape or math.prod(shape) <= BLOCK or shape[0] < 2:
        return None
    if rows_of(ours, 0, 1) is None or rows_of(theirs, 0, 1) is None:
        return None
    many = max(1, BLOCK // math.prod(shape[1:]))
    return _blocks(reference, candidate, pair, (ours, theirs), many)


def _blocks(
    reference: Run, candidate: Run, pair: Pair, sides: tuple[Source, Source], many: int
) -> Iterator[ValuePair]:
    last = sides[0].shape[0]
    for start in range(0, last, many):
        ours, theirs = (rows_of(side, start, min(start + many, last)) for side in sides)
        cut = pair._replace(reference_recipe=ours, candidate_recipe=theirs)
        yield open_cooked(reference, candidate, cut)


def rows_of(source: Source, start: int, stop: int) -> Recipe | None:
    """The recipe for rows `start` to `stop` of what a source is; None where rows are mixed."""
    shape = (stop - start, *source.shape[1:])
    if not isinstance(source, Recipe):
        dtype = DTYPES.get(source.dtype)
        if dtype is None or dtype.bits < 8 or not source.shape:
            return None
        return Recipe((source,), (Step("split", 0, start, stop),), shape)
    joins = bool(source.steps) and source.steps[0].kind in JOINING
    if joins and source.steps[0].kind == "dequantise":
        return None
    if any(not _keeps_rows(step) for step in source.steps[joins:]):
        return None
    inner: list[Recipe] = []
    for each, begin, end in _parts(source, start, stop):
        if (rows := rows_of(each, begin, end)) is None:
            return None
        inner.append(rows)
    return Recipe(tuple(inner), source.steps, shape)


def _keeps_rows(step: Step) -> bool:
    return step.kind == "times" or (step.kind in ("select", "split", "trim") and step.axis > 0)


def _parts(source: Recipe, start: int, stop: int) -> Iterator[tuple[Source, int, int]]:
    """The sources that have a share in some rows, and which of their own rows those are."""
    if not source.steps or (source.steps[0].kind, source.steps[0].axis) != ("concat", 0):
        yield from ((each, start, stop) for each in source.sources)
        return
    at = 0
    for each in source.sources:
        begin, end = max(start, at), min(stop, at + each.shape[0])
        if begin < end:
            yield each, begin - at, end - at
        at += each.shape[0]
