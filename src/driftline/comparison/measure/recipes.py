"""Recipes carried out: stored tensors become the one that can be set against the other side's.

Elements travel as the raw words they are stored in (bfloat16 and the 8-bit floats have no numpy
type, and need none to be moved); only sums and dequantised values are computed, in float64 block by
block, and come out as float32. Knows nothing of why a recipe is what it is.

Memory: a result is one copy of the tensor in its storage type; steps before it are views. Packed
4-bit elements take a byte each on the way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from driftline.alignment.plan import Pair
from driftline.alignment.recipe import JOINING, Recipe, Source, Step, is_packing, start
from driftline.alignment.reconcile.layout import are_weights
from driftline.comparison.measure.operands import ValuePair
from driftline.comparison.metrics.catalogue import KNOWN
from driftline.errors import BadInput
from driftline.numerics.dtypes import DTYPES, DType, to_float64, unpack_nibbles, value_table
from driftline.runs.run import Run

_ROWS = 1 << 20
"""Elements that are decoded to float64 at a time."""

F64 = npt.NDArray[np.float64]
Storage = npt.NDArray[Any]


class RecipeResult(NamedTuple):
    """What a recipe gives.

    Attributes:
        values: Flat storage values of `dtype`, as `Run.raw` would give them.
        dtype: What they mean.
        shape: The tensor's shape.
    """

    values: Storage
    dtype: DType
    shape: tuple[int, ...]


def apply_recipe(run: Run, recipe: Recipe) -> RecipeResult:
    """Carry out a recipe on the tensors of a run.

    Raises:
        DriftlineError: A source has no values, or a step does not fit what it is given.
    """
    words, dtype = made(run, recipe)
    if words.shape != recipe.shape:
        raise BadInput(
            f"the recipe '{recipe}' gives {_dims(words.shape)}, the plan says {_dims(recipe.shape)}"
        )
    # The kernel reads flat storage, two 4-bit codes to a byte.
    flat = np.ascontiguousarray(words).reshape(-1)
    return RecipeResult(_packed(flat) if dtype.bits == 4 else flat, dtype, words.shape)


def open_recipes(reference: Run, candidate: Run, pair: Pair) -> ValuePair:
    """Both sides of a pair after their recipes.

    Raises:
        DriftlineError: As `apply_recipe`.
    """
    reference_result = apply_recipe(reference, pair.reference_recipe or start(pair.reference))
    candidate_result = apply_recipe(candidate, pair.candidate_recipe or start(pair.candidate))
    if reference_result.shape != candidate_result.shape:
        raise BadInput(
            f"the shapes differ: {_dims(reference_result.shape)} against "
            f"{_dims(candidate_result.shape)}, after "
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
    """A remark on a square weight that is far off as it is and agrees the other way round.

    Its shape cannot say how it lies. Nothing is chosen: the row stays what it is.
    """
    if not are_weights(pair) or values.shape is None or values.reference_dtype.bits == 4:
        return ""
    if values.candidate_dtype.bits == 4:
        return ""
    # One more pass over a tensor that is far off anyway: rare, and worth it.
    turned = np.ascontiguousarray(values.candidate.reshape(values.shape).T).reshape(-1)
    moments = values._replace(candidate=turned).moments(0, values.count, atol=0.0, rtol=0.0)
    derive = KNOWN["relative_l2"].derive
    transposed_error = None if derive is None else derive(moments)
    if transposed_error is None or not transposed_error <= relative_l2 / 10:
        return ""
    return (
        f"ambiguous: transposed it would agree better (relative_l2 {transposed_error:.3g}), and "
        "being square its shape cannot say how it lies; a plan with a transpose step decides"
    )


def made(run: Run, recipe: Recipe) -> tuple[Storage, DType]:
    """The words of a recipe's result: an array of its shape, often a view; 4-bit codes unpacked.

    Raises:
        DriftlineError: As `apply_recipe`.
    """
    parts = [_taken(run, source) for source in recipe.sources]
    steps = recipe.steps
    # Joining comes first in every recipe: later steps have one tensor to work on.
    if steps and steps[0].kind in JOINING:
        words, dtype = _joined(steps[0], parts)
        steps = steps[1:]
    elif len(parts) == 1:
        words, dtype = parts[0]
    else:
        raise BadInput(f"the recipe '{recipe}' has {len(parts)} sources and does not join them")
    for step in steps:
        if step.kind == "lowfloat":
            words, dtype = _low_floats(words, dtype)
        elif step.kind == "unpack":
            words, dtype = _unpacked(step, words, dtype)
        elif step.kind == "times":
            words, dtype = _times(step, words, dtype)
        else:
            words = _done(step, words)
    return words, dtype


def _taken(run: Run, source: Source) -> tuple[Storage, DType]:
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
        # Unpacked, elements can be moved as those of any other type.
        words = unpack_nibbles(words.view(np.uint8), count)
    if words.size != count:
        raise BadInput(f"{source.key} holds {words.size} elements, its shape says {count}")
    return words.reshape(source.shape), dtype


def _done(step: Step, words: Storage) -> Storage:
    """One step on one tensor; a view wherever numpy has one."""
    shape = words.shape
    # Plans may be edited by hand: each step checks that it fits.
    if step.kind in ("split", "trim", "select") and not 0 <= step.axis < len(shape):
        raise BadInput(f"{step} does not fit {_dims(shape)}: it has no axis {step.axis}")
    if step.kind in ("split", "trim"):
        if not 0 <= step.start <= step.stop <= shape[step.axis]:
            raise BadInput(f"{step} does not fit {_dims(shape)}")
        return words[(slice(None),) * step.axis + (slice(step.start, step.stop),)]
    if step.kind == "transpose":
        if sorted(step.numbers) != list(range(len(shape))):
            raise BadInput(f"{step} does not fit {_dims(shape)}")
        return words.transpose(step.numbers)
    if step.kind == "reshape":
        if math.prod(step.numbers) != math.prod(shape) or any(n < 0 for n in step.numbers):
            raise BadInput(f"{step} does not fit {_dims(shape)}")
        return words.reshape(step.numbers)
    if step.kind == "select":
        if step.numbers and not 0 <= min(step.numbers) <= max(step.numbers) < shape[step.axis]:
            raise BadInput(f"{step} does not fit {_dims(shape)}")
        return np.take(words, np.asarray(step.numbers, np.intp), axis=step.axis)
    raise BadInput(f"{step} joins tensors, so it must be the first step")


def _joined(step: Step, parts: Sequence[tuple[Storage, DType]]) -> tuple[Storage, DType]:
    if step.kind == "dequantise":
        return _dequantised(step, parts)
    shapes = [words.shape for words, _ in parts]
    if step.kind in ("sum", "mean"):
        if len(set(shapes)) != 1:
            raise BadInput(f"tensors of {_all(shapes)} cannot be added up")
        return _sum(parts, 1.0 if step.kind == "sum" else 1 / len(parts))
    rest = {(*shape[: step.axis], *shape[step.axis + 1 :]) for shape in shapes}
    if not 0 <= step.axis < min(map(len, shapes)) or len(rest) != 1:
        raise BadInput(f"tensors of {_all(shapes)} cannot be joined along axis {step.axis}")
    if len({dtype.name for _, dtype in parts}) == 1:
        return np.concatenate([words for words, _ in parts], axis=step.axis), parts[0][1]
    common = _common([dtype for _, dtype in parts])
    converted = [_as(words, dtype, common) for words, dtype in parts]
    return np.concatenate(converted, axis=step.axis), common


def _times(step: Step, words: Storage, dtype: DType) -> tuple[Storage, DType]:
    return _sum([(words, dtype)], 1.0 if step.factor is None else step.factor)


def _sum(parts: Sequence[tuple[Storage, DType]], factor: float = 1.0) -> tuple[Storage, DType]:
    """Added up in float64 (integers: in int64) and multiplied, rounded once at the end."""
    common = _common([dtype for _, dtype in parts])
    # A mean of integers is no integer.
    if factor != 1.0 and common.kind in ("int", "uint"):
        common = DTYPES["float64"]
    shape = parts[0][0].shape
    flats = [(np.ascontiguousarray(words).reshape(-1), dtype) for words, dtype in parts]
    total = np.empty(math.prod(shape), common.storage)
    # Block by block: float64 copies of all parts at once could be larger than memory.
    for offset in range(0, total.size, _ROWS):
        block = slice(offset, offset + _ROWS)
        if common.kind in ("int", "uint"):
            total[block] = sum(_as(words[block], dtype, common) for words, dtype in flats)
        else:
            numbers = sum(_decoded(words[block], dtype) for words, dtype in flats)
            total[block] = numbers * factor
    return total.reshape(shape), common


def _dequantised(step: Step, parts: Sequence[tuple[Storage, DType]]) -> tuple[Storage, DType]:
    """`(values - zero point) * scale`, rounded once: what a float32 product gives, too."""
    if not (1 if step.factor is not None else 2) <= len(parts) <= 3:
        raise BadInput("dequantise takes values, a scale and perhaps a zero point")
    words, dtype = parts[0]
    shape = words.shape
    others = [_spread(_decoded(part, kind), shape, step.axis) for part, kind in parts[1:]]
    result = np.empty(shape, np.float32)
    rows = shape[0] if shape else 1
    # As many rows as keep the float64 block small.
    height = max(1, _ROWS // max(1, math.prod(shape[1:])))
    for first_row in range(0, rows, height):
        block = slice(first_row, first_row + height) if shape else ()
        numbers = _decoded(words[block], dtype)
        if len(others) == 2:
            numbers = numbers - others[1].rows(block)
        if step.zero:
            numbers = numbers - step.zero
        # A scale may be infinite in a damaged dump; the row then says so, not numpy.
        with np.errstate(over="ignore", invalid="ignore"):
            if others:
                numbers = numbers * others[0].rows(block)
            result[block] = numbers if step.factor is None else numbers * step.factor
    return result, DTYPES["float32"]


def _low_floats(words: Storage, dtype: DType) -> tuple[Storage, DType]:
    """The float32 in the low half of 64-bit words, as the operators of ATB take scales."""
    if dtype.name not in ("int64", "uint64"):
        raise BadInput(f"lowfloat takes words of 64 bits, not {dtype.name}")
    low = (np.ascontiguousarray(words).view(np.uint64) & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    return low.view(np.float32).reshape(words.shape), DTYPES["float32"]


def _unpacked(step: Step, words: Storage, dtype: DType) -> tuple[Storage, DType]:
    """The codes in words of 32 bits, one after the other along an axis, as uint8."""
    if dtype.name not in ("int32", "uint32") or not is_packing(step.numbers):
        raise BadInput(f"{step} takes words of 32 bits and 4, 8 or 16 places, not {dtype.name}")
    if not 0 <= step.axis < words.ndim:
        raise BadInput(f"{step} does not fit {_dims(words.shape)}: it has no axis {step.axis}")
    bits = 32 // len(step.numbers)
    unsigned = np.ascontiguousarray(words).view(np.uint32)
    mask = np.uint32((1 << bits) - 1)
    codes = [
        (unsigned >> np.uint32(bits * place) & mask).astype(np.uint8) for place in step.numbers
    ]
    axis = step.axis
    shape = (*words.shape[:axis], words.shape[axis] * len(codes), *words.shape[axis + 1 :])
    return np.stack(codes, axis=axis + 1).reshape(shape), DTYPES["uint8"]


class _Spread(NamedTuple):
    """Scales laid over a tensor without being written out: each axis repeated so many times."""

    values: F64
    repeats: tuple[int, ...]

    def rows(self, block: slice | tuple[()]) -> F64:
        """What lies over these rows of the tensor."""
        values = self.values
        if isinstance(block, slice) and values.shape[0] > 1:
            step = self.repeats[0]
            first = block.start // step
            values = np.repeat(values[first : -(-block.stop // step)], step, axis=0)
            begin = block.start - first * step
            values = values[begin : begin + block.stop - block.start]
        for axis, times in enumerate(self.repeats[1:], 1):
            if times > 1 and values.shape[axis] > 1:
                values = np.repeat(values, times, axis=axis)
        return values


def _spread(scale: F64, shape: tuple[int, ...], axis: int) -> _Spread:
    """One scale for all, one per element of `axis`, or one per group along every axis."""
    if scale.size == 1:
        return _Spread(scale.reshape((1,) * len(shape)), (1,) * len(shape))
    # A column or row of scales means the same as a flat list of them.
    if scale.ndim != len(shape) and max(scale.shape) == scale.size:
        scale = scale.reshape(-1)
    if scale.ndim == 1 and 0 <= axis < len(shape):
        scale = scale.reshape(*(-1 if dimension == axis else 1 for dimension in range(len(shape))))
    fits = scale.ndim == len(shape) and all(
        size and extent % size == 0 for extent, size in zip(shape, scale.shape, strict=True)
    )
    if not fits:
        raise BadInput(f"scales of {_dims(scale.shape)} do not fit values of {_dims(shape)}")
    repeats = tuple(extent // size for extent, size in zip(shape, scale.shape, strict=True))
    return _Spread(scale, repeats)


def _common(dtypes: Sequence[DType]) -> DType:
    """What holds sums of and mixtures of these: their own type where it is wide, else float32."""
    kinds = {dtype.kind for dtype in dtypes}
    if "complex" in kinds or "bits" in kinds:
        raise BadInput(f"{' and '.join(dtype.name for dtype in dtypes)} cannot be computed with")
    if kinds <= {"int", "uint", "bool"}:
        return DTYPES["int64"]
    # float32 cannot hold every int32, and must not lose digits of a float64.
    wide = any(dtype.bits == 64 or dtype.name in ("int32", "uint32") for dtype in dtypes)
    return DTYPES["float64" if wide else "float32"]


def _as(words: Storage, dtype: DType, common: DType) -> Storage:
    if common.kind == "int":
        return (_signed(words) if dtype.name == "int4" else words).astype(np.int64)
    numbers = _decoded(words, dtype)
    if dtype.lowest and dtype.bits >= 16:  # it means minus infinity in a mask, and must go on to
        numbers = np.where(numbers == dtype.lowest, common.lowest, numbers)
    return numbers.astype(common.storage)


def _decoded(words: Storage, dtype: DType) -> F64:
    """Words as numbers, in their shape; a 4-bit code is one byte here, not half of one."""
    if dtype.kind in ("complex", "bits"):
        raise BadInput(f"{dtype.name} cannot be computed with")
    if dtype.bits == 4:
        if dtype.kind != "float":
            return (_signed(words) if dtype.kind == "int" else words).astype(np.float64)
        return value_table(dtype.name)[words.astype(np.intp)]
    return to_float64(np.ascontiguousarray(words), dtype).astype(np.float64, copy=False)


def _signed(codes: Storage) -> npt.NDArray[np.int8]:
    numbers = codes.astype(np.int8)
    return np.where(numbers > 7, numbers - 16, numbers).astype(np.int8)


def _packed(codes: Storage) -> Storage:
    """Two codes to a byte, low nibble first, as the kernel reads them."""
    even = codes if codes.size % 2 == 0 else np.append(codes, np.uint8(0))
    nibbles = even.astype(np.uint8, copy=False)
    return nibbles[0::2] | (nibbles[1::2] << 4)


def _all(shapes: Sequence[tuple[int, ...]]) -> str:
    return " and ".join(dict.fromkeys(map(_dims, shapes)))


def _dims(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


# Large gathered tensors, made and measured some rows at a time, so that none is ever whole.


BLOCK = 1 << 22
"""Elements of a block; a single row may have more."""


def row_blocks(reference: Run, candidate: Run, pair: Pair) -> Iterator[ValuePair] | None:
    """Both sides of a pair after their recipes, block after block in order; None if they must be
    made whole.
    """
    reference_source, candidate_source = (
        pair.reference_recipe or pair.reference,
        pair.candidate_recipe or pair.candidate,
    )
    shape = reference_source.shape
    # Small ones are made as a whole, which is simpler and as fast.
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
    """The recipe for rows `start` to `stop` of what a source is; None where rows are mixed."""
    shape = (stop - start, *source.shape[1:])
    if not isinstance(source, Recipe):
        dtype = DTYPES.get(source.dtype)
        if dtype is None or dtype.bits < 8 or not source.shape:
            return None
        return Recipe((source,), (Step("split", 0, start, stop),), shape)
    # Only steps that keep rows apart allow to make some rows alone.
    joins = bool(source.steps) and source.steps[0].kind in JOINING
    if joins and source.steps[0].kind == "dequantise":
        return None
    if any(not _keeps_rows(step) for step in source.steps[joins:]):
        return None
    inner: list[Recipe] = []
    for part, begin, end in _parts(source, start, stop):
        if (rows := rows_of(part, begin, end)) is None:
            return None
        inner.append(rows)
    return Recipe(tuple(inner), source.steps, shape)


def _keeps_rows(step: Step) -> bool:
    return step.kind == "times" or (step.kind in ("select", "split", "trim") and step.axis > 0)


def _parts(source: Recipe, start: int, stop: int) -> Iterator[tuple[Source, int, int]]:
    """The sources that have a share in some rows, and which of their own rows those are."""
    if not source.steps or (source.steps[0].kind, source.steps[0].axis) != ("concat", 0):
        yield from ((part, start, stop) for part in source.sources)
        return
    offset = 0
    for part in source.sources:
        # Joined along the rows: each source has some of them.
        begin, end = max(start, offset), min(stop, offset + part.shape[0])
        if begin < end:
            yield part, begin - offset, end - offset
        offset += part.shape[0]
