"""Application of recipes: stored tensors are converted for comparison with the other side.

The sources are read from a run, and `alignment.recipe_steps` performs the steps. A large result is
computed and measured by blocks of rows. This file does not know why a recipe was chosen.

Memory: a result is one copy of the tensor in its storage type; the steps before it are views.
Packed 4-bit elements temporarily take a byte each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from driftline.alignment.plan import Pair
from driftline.alignment.recipe import Recipe, Source, start
from driftline.alignment.recipe_steps import STEPS, Part, Step, Storage, apply_step, dims, fold
from driftline.alignment.reconcile.layout import are_weights
from driftline.comparison.measure.operands import ValuePair
from driftline.comparison.metrics.catalogue import KNOWN
from driftline.errors import BadInput
from driftline.numerics.dtypes import DTYPES, DType, unpack_nibbles
from driftline.runs.run import Run


class RecipeResult(NamedTuple):
    """The result of a recipe.

    Attributes:
        values: Flat storage values of `dtype`, as `Run.raw` would return them.
        dtype: Their dtype.
        shape: The tensor's shape.
    """

    values: Storage
    dtype: DType
    shape: tuple[int, ...]


def apply_recipe(run: Run, recipe: Recipe) -> RecipeResult:
    """Apply a recipe to the tensors of a run.

    Raises:
        DriftlineError: A source has no values, or a step does not fit its input.
    """
    words, dtype = made(run, recipe)
    if words.shape != recipe.shape:
        raise BadInput(
            f"the recipe '{recipe}' gives {dims(words.shape)}, the plan says {dims(recipe.shape)}"
        )
    # The kernel reads flat storage, with two 4-bit codes in a byte.
    flat = np.ascontiguousarray(words).reshape(-1)
    return RecipeResult(_packed(flat) if dtype.bits == 4 else flat, dtype, words.shape)


def open_recipes(reference: Run, candidate: Run, pair: Pair) -> ValuePair:
    """Return both sides of a pair after their recipes.

    Raises:
        DriftlineError: As in `apply_recipe`.
    """
    reference_result = apply_recipe(reference, pair.reference_recipe or start(pair.reference))
    candidate_result = apply_recipe(candidate, pair.candidate_recipe or start(pair.candidate))
    if reference_result.shape != candidate_result.shape:
        raise BadInput(
            f"the shapes differ: {dims(reference_result.shape)} against "
            f"{dims(candidate_result.shape)}, after "
            f"{pair.reference_recipe or 'nothing'} and {pair.candidate_recipe or 'nothing'}"
        )
    count = math.prod(reference_result.shape)
    return ValuePair(
        reference_result.values,
        reference_result.dtype,
        candidate_result.values,
        candidate_result.dtype,
        count,
        reference_result.shape,
    )


def transpose_hint(pair: Pair, values: ValuePair, relative_l2: float) -> str:
    """Return a remark about a square weight that is far off but agrees when transposed.

    Its shape does not show how it is stored. The row itself is not changed.
    """
    if not are_weights(pair) or values.shape is None or values.reference_dtype.bits == 4:
        return ""
    if values.candidate_dtype.bits == 4:
        return ""
    # Another pass over the tensor, which is acceptable because this case is rare.
    turned = np.ascontiguousarray(values.candidate.reshape(values.shape).T).reshape(-1)
    moments = values._replace(candidate=turned).moments(0, values.count, atol=0.0, rtol=0.0)
    derive = KNOWN["relative_l2"].derive
    transposed_error = None if derive is None else derive(moments)
    if transposed_error is None or not transposed_error <= relative_l2 / 10:
        return ""
    return (
        f"ambiguous: transposed it would agree better (relative_l2 {transposed_error:.3g}), and "
        "its shape is square, so it does not show the layout; a plan with a transpose step decides"
    )


def made(run: Run, recipe: Recipe) -> Part:
    """Return the result of a recipe as an array of its shape, often a view; 4-bit codes unpacked.

    Raises:
        DriftlineError: As in `apply_recipe`.
    """
    return fold(recipe.steps, [_stored(run, source) for source in recipe.sources], apply_step)


def _stored(run: Run, source: Source) -> Part:
    if isinstance(source, Recipe):
        return made(run, source)
    if source.kept != "full":
        raise BadInput(
            f"{source.key} was kept as {source.kept}; a recipe needs all values of its sources"
        )
    if why := run.lost(source):
        raise BadInput(f"the values of {source.key} are lost: {why}")
    dtype = DTYPES.get(source.dtype)
    if dtype is None:
        raise BadInput(f"the element type {source.dtype} is not known")
    count = math.prod(source.shape)
    words: Storage = run.raw(source)
    if dtype.bits == 4:
        # Unpacked elements can be moved like those of any other type.
        words = unpack_nibbles(words.view(np.uint8), count)
    if words.size != count:
        raise BadInput(f"{source.key} holds {words.size} elements, its shape says {count}")
    return words.reshape(source.shape), dtype


def _packed(codes: Storage) -> Storage:
    """Pack two codes in a byte, low nibble first, as the kernel reads them."""
    even = codes if codes.size % 2 == 0 else np.append(codes, np.uint8(0))
    nibbles = even.astype(np.uint8, copy=False)
    return nibbles[0::2] | (nibbles[1::2] << 4)


# Large gathered tensors are computed and measured by blocks of rows, and are never held whole.


BLOCK = 1 << 22
"""Number of elements of a block; a single row may have more."""


def row_blocks(reference: Run, candidate: Run, pair: Pair) -> Iterator[ValuePair] | None:
    """Return both sides of a pair after their recipes, as blocks of rows in order.

    Returns None if the tensors must be computed whole.
    """
    reference_source, candidate_source = (
        pair.reference_recipe or pair.reference,
        pair.candidate_recipe or pair.candidate,
    )
    shape = reference_source.shape
    # Small tensors are computed whole, which is simpler and as fast.
    if shape != candidate_source.shape or not shape or math.prod(shape) <= BLOCK or shape[0] < 2:
        return None
    if rows_of(reference_source, 0, 1) is None or rows_of(candidate_source, 0, 1) is None:
        return None
    many = max(1, BLOCK // math.prod(shape[1:]))
    return _blocks(reference, candidate, pair, (reference_source, candidate_source), many)


def _blocks(
    reference: Run, candidate: Run, pair: Pair, sides: tuple[Source, Source], many: int
) -> Iterator[ValuePair]:
    last = sides[0].shape[0]
    for first in range(0, last, many):
        reference_rows, candidate_rows = (
            rows_of(side, first, min(first + many, last)) for side in sides
        )
        cut = pair._replace(reference_recipe=reference_rows, candidate_recipe=candidate_rows)
        yield open_recipes(reference, candidate, cut)


def rows_of(source: Source, start: int, stop: int) -> Recipe | None:
    """Return the recipe for rows `start` to `stop` of a source; None if its steps mix rows."""
    shape = (stop - start, *source.shape[1:])
    if not isinstance(source, Recipe):
        dtype = DTYPES.get(source.dtype)
        if dtype is None or dtype.bits < 8 or not source.shape:
            return None
        return Recipe((source,), (Step("split", 0, start, stop),), shape)
    # Single rows can be computed only if every step keeps rows separate.
    if not all(STEPS[step.kind].keeps_rows(step) for step in source.steps):
        return None
    inner: list[Recipe] = []
    for part, begin, end in _parts(source, start, stop):
        if (rows := rows_of(part, begin, end)) is None:
            return None
        inner.append(rows)
    return Recipe(tuple(inner), source.steps, shape)


def _parts(source: Recipe, start: int, stop: int) -> Iterator[tuple[Source, int, int]]:
    """Yield the sources that contribute to some rows, with the range of their own rows."""
    if not source.steps or (source.steps[0].kind, source.steps[0].axis) != ("concat", 0):
        yield from ((part, start, stop) for part in source.sources)
        return
    offset = 0
    for part in source.sources:
        # The sources are joined along the rows, so each has some of them.
        begin, end = max(start, offset), min(stop, offset + part.shape[0])
        if begin < end:
            yield part, begin - offset, end - offset
        offset += part.shape[0]
