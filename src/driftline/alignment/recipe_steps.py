"""The steps of recipes: a table of how each step is written, read, checked and executed.

A step changes a tensor, or joins several into one. For every kind, `STEPS` holds the text in plans,
the resulting shape (so that a plan is checked before it runs), and the computation. A new kind is
one row there, with its functions. The rules decide which recipe a pair needs.

Elements are moved as the raw words in which they are stored (bfloat16 and the 8-bit floats have no
numpy type, and do not need one for that). Only sums and dequantised values are computed, in float64
block by block, and returned as float32. Steps that only move elements return views.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from driftline.errors import BadInput
from driftline.numerics.dtypes import DTYPES, DType, to_float64, value_table

Shape = tuple[int, ...]
F64 = npt.NDArray[np.float64]
Storage = npt.NDArray[Any]
Part = tuple[Storage, DType]
"""A tensor in progress: words in the tensor's shape (one 4-bit code per byte), and their type."""

_ROWS = 1 << 20
"""Number of elements that are decoded to float64 at a time."""
_MOST_POSITIONS = 1 << 22
"""Largest number of selected positions that are read from a plan file, which may be foreign."""
_WORDS = r"\s*([a-z]+)\s*(?:\(([^()]*)\))?\s*"


class Step(NamedTuple):
    """One step of a recipe; the kind decides which fields are used.

    Attributes:
        kind: Kind of the step: a name of `STEPS`.
        axis: The axis (concat, split, trim, select). For dequantise, the axis whose elements have
            one scale each, if the scales are a plain list.
        start: First element of a split or trim.
        stop: Last element plus one.
        numbers: Axes of a transpose, shape of a reshape, positions of a select, or for unpack the
            places of codes in a word, lowest first.
        factor: For dequantise, the factor of every scale, or the scale itself if there is no
            source. For times, the factor of every element.
        zero: For dequantise, the number that is subtracted from every value.
    """

    kind: str
    axis: int = 0
    start: int = 0
    stop: int = 0
    numbers: tuple[int, ...] = ()
    factor: float | None = None
    zero: float = 0.0

    def __str__(self) -> str:
        """Text for people; a long list of positions is given by its length."""
        if self.kind == "select":
            # Limited, because a foreign plan may hold millions of positions.
            shown = ",".join(_ranges(self.numbers[:_MOST_POSITIONS]))
            shown = shown if len(shown) <= 24 else f"{len(self.numbers)} positions"
            return f"select(axis {self.axis}, {shown})"
        return self.text()

    def text(self) -> str:
        """Complete text for a file, as `step_from_text` reads it.

        >>> Step("select", 1, numbers=(0, 1, 2, 6)).text()
        'select(axis 1, 0:3,6)'
        """
        syntax = STEPS[self.kind].syntax
        # A reshape to a scalar has an empty list between its parentheses.
        return self.kind if syntax is _NOTHING else f"{self.kind}({syntax.write(self)})"


ShapeRule = Callable[[Step, Sequence[Shape]], Shape]
Work = Callable[[Step, Sequence[Part]], Part]


@dataclass(frozen=True)
class Syntax:
    """How the fields of a step are written between its parentheses.

    Attributes:
        write: Returns the text.
        read: Parses the text of a kind; raises ValueError if it cannot be read.
    """

    write: Callable[[Step], str]
    read: Callable[[str, str], Step]


@dataclass(frozen=True)
class StepRule:
    """One kind of step.

    Attributes:
        syntax: How it is written in plans.
        shape: Returns the resulting shape; raises BadInput if the step does not fit the shapes.
        apply: The computation, on parts that `shape` has accepted.
        joins: Whether it takes several tensors, so that it can only be the first step of a recipe.
        keeps_rows: Whether some rows of the result come from the same rows of every source, so that
            large tensors can be computed some rows at a time.
    """

    syntax: Syntax
    shape: ShapeRule
    apply: Work
    joins: bool = False
    keeps_rows: Callable[[Step], bool] = lambda step: False


_Item = TypeVar("_Item")


def fold(
    steps: Sequence[Step],
    sources: Sequence[_Item],
    do: Callable[[Step, Sequence[_Item]], _Item],
) -> _Item:
    """Apply the steps of a recipe to its sources, which may be shapes or tensors.

    Raises:
        BadInput: The first step does not join several sources, or a later step joins.
    """
    items = list(sources)
    for index, step in enumerate(steps):
        joins = STEPS[step.kind].joins
        if joins and index:
            raise BadInput(f"{step} joins tensors, so it must be the first step")
        if len(items) > 1 and not joins:
            break
        items = [do(step, items)]
    if len(items) != 1:
        joining = sorted(kind for kind, rule in STEPS.items() if rule.joins)
        raise BadInput(
            f"a recipe of {len(items)} sources begins with a step that joins them",
            hint=f"such are {', '.join(joining)}",
        )
    return items[0]


def shape_after(step: Step, shapes: Sequence[Shape]) -> Shape:
    """The shape that a step returns; BadInput if the step does not fit."""
    return STEPS[step.kind].shape(step, shapes)


def apply_step(step: Step, parts: Sequence[Part]) -> Part:
    """The tensor that a step returns; a view if numpy can make one.

    Raises:
        BadInput: The step does not fit the tensors.
    """
    rule = STEPS[step.kind]
    # Plans may be edited by hand, so each step is checked against its actual inputs.
    rule.shape(step, [words.shape for words, _ in parts])
    return rule.apply(step, parts)


def step_from_text(text: str) -> Step:
    """The inverse of `Step.text`.

    >>> step_from_text("split(axis 0, 4:8)")
    Step(kind='split', axis=0, start=4, stop=8, numbers=(), factor=None, zero=0.0)

    Raises:
        BadInput: The text is not a step.
    """
    words = re.fullmatch(_WORDS, text)
    kind = words.group(1) if words else ""
    if words is None or kind not in STEPS:
        raise BadInput(f"'{text}' is no step of a recipe", hint=f"steps are {', '.join(STEPS)}")
    try:
        return STEPS[kind].syntax.read(kind, (words.group(2) or "").strip())
    except ValueError:
        raise BadInput(f"'{text}' is a {kind} whose numbers cannot be read") from None


# --- how steps are written


def _read_axis(kind: str, inside: str) -> Step:
    return Step(kind, _axis(inside)[0])


def _read_range(kind: str, inside: str) -> Step:
    axis, rest = _axis(inside)
    begin, _, end = rest.partition(":")
    return Step(kind, axis, int(begin), int(end))


def _read_numbers(kind: str, inside: str) -> Step:
    return Step(kind, numbers=tuple(int(word) for word in inside.split(",") if word.strip()))


def _read_positions(kind: str, inside: str) -> Step:
    axis, rest = _axis(inside)
    return Step(kind, axis, numbers=tuple(_positions(rest)))


def _read_factor(kind: str, inside: str) -> Step:
    # A factor has no word before it; one is added, so that it is read like the others.
    return Step(kind, factor=_number_after("by", f"by {inside}"))


def _read_scale(kind: str, inside: str) -> Step:
    axis, rest = _axis(inside)
    zero = _number_after("minus", rest) or 0.0
    return Step(kind, axis, factor=_number_after("times", rest), zero=zero)


def _write_scale(step: Step) -> str:
    times = f", times {step.factor!r}" if step.factor is not None else ""
    minus = f", minus {step.zero!r}" if step.zero else ""
    return f"axis {step.axis}{times}{minus}"


def _axis(inside: str) -> tuple[int, str]:
    """The axis at the start (0 if there is none), and the text after it."""
    first, _, rest = inside.partition(",")
    return int(first.strip().removeprefix("axis")) if first.strip() else 0, rest


def _number_after(word: str, text: str) -> float | None:
    """The number after a word; None if the word does not occur.

    Raises:
        ValueError: It is not a number that can be used in computations.
    """
    clauses = [part.split() for part in text.split(",") if part.split()[:1] == [word]]
    if not clauses:
        return None
    # NaN and infinities would make every metric meaningless, so they are refused as unreadable.
    number = float(clauses[0][1]) if len(clauses[0]) == 2 else math.nan
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def _positions(text: str) -> list[int]:
    numbers: list[int] = []
    for word in text.split(","):
        begin, colon, end = word.partition(":")
        last = int(end) if colon else int(begin) + 1
        # Checked before the range is made, because `0:1000000000` is a short text.
        if last - int(begin) + len(numbers) > _MOST_POSITIONS:
            raise ValueError(word)
        numbers.extend(range(int(begin), last))
    return numbers


def _ranges(numbers: Sequence[int]) -> Iterator[str]:
    begin = 0
    while begin < len(numbers):
        # Consecutive numbers are written as one range, which keeps plans of masks readable.
        end = begin + 1
        while end < len(numbers) and numbers[end] == numbers[end - 1] + 1:
            end += 1
        first = numbers[begin]
        yield str(first) if end == begin + 1 else f"{first}:{first + end - begin}"
        begin = end


_NOTHING = Syntax(lambda step: "", _read_axis)
_AXIS = Syntax(lambda step: f"axis {step.axis}", _read_axis)
_RANGE = Syntax(lambda step: f"axis {step.axis}, {step.start}:{step.stop}", _read_range)
_NUMBERS = Syntax(lambda step: ",".join(map(str, step.numbers)), _read_numbers)
_POSITIONS = Syntax(
    lambda step: f"axis {step.axis}, {','.join(_ranges(step.numbers))}", _read_positions
)
_FACTOR = Syntax(lambda step: repr(step.factor), _read_factor)
_SCALE = Syntax(_write_scale, _read_scale)


# --- the shapes of their results


def _joined_shape(step: Step, shapes: Sequence[Shape]) -> Shape:
    first, axis = shapes[0], step.axis
    # Shapes may differ along the joined axis only.
    rest = {(*shape[:axis], *shape[axis + 1 :]) for shape in shapes}
    if not 0 <= axis < min(map(len, shapes)) or len(rest) > 1:
        raise BadInput(f"tensors of {_all(shapes)} cannot be joined along axis {axis}")
    return (*first[:axis], sum(shape[axis] for shape in shapes), *first[axis + 1 :])


def _summed_shape(step: Step, shapes: Sequence[Shape]) -> Shape:
    del step
    if len(set(shapes)) > 1:
        raise BadInput(f"tensors of {_all(shapes)} cannot be added up")
    return shapes[0]


def _dequantised_shape(step: Step, shapes: Sequence[Shape]) -> Shape:
    # A factor in the step replaces the tensor of scales.
    if not (1 if step.factor is not None else 2) <= len(shapes) <= 3:
        raise BadInput("dequantise takes values, a scale and perhaps a zero point")
    return shapes[0]


def _range_shape(step: Step, shape: Shape) -> Shape | None:
    fits = 0 <= step.start <= step.stop <= shape[step.axis]
    return _with_size(shape, step.axis, step.stop - step.start) if fits else None


def _selected_shape(step: Step, shape: Shape) -> Shape | None:
    numbers = step.numbers
    fits = not numbers or 0 <= min(numbers) <= max(numbers) < shape[step.axis]
    return _with_size(shape, step.axis, len(numbers)) if fits else None


def _transposed_shape(step: Step, shape: Shape) -> Shape | None:
    fits = sorted(step.numbers) == list(range(len(shape)))
    return tuple(shape[axis] for axis in step.numbers) if fits else None


def _reshaped_shape(step: Step, shape: Shape) -> Shape | None:
    fits = math.prod(step.numbers) == math.prod(shape) and min(step.numbers, default=0) >= 0
    return step.numbers if fits else None


def _unpacked_shape(step: Step, shape: Shape) -> Shape | None:
    codes = shape[step.axis] * len(step.numbers)
    return _with_size(shape, step.axis, codes) if is_packing(step.numbers) else None


def _of_one(
    shape_of: Callable[[Step, Shape], Shape | None], *, along_axis: bool = False
) -> ShapeRule:
    """The rule of a step that changes one tensor; it refuses a step that does not fit the shape."""

    def rule(step: Step, shapes: Sequence[Shape]) -> Shape:
        (shape,) = shapes
        if along_axis and not 0 <= step.axis < len(shape):
            raise BadInput(f"{step} does not fit {dims(shape)}: it has no axis {step.axis}")
        result = shape_of(step, shape)
        if result is None:
            raise BadInput(f"{step} does not fit {dims(shape)}")
        return result

    return rule


def _with_size(shape: Shape, axis: int, size: int) -> Shape:
    return (*shape[:axis], size, *shape[axis + 1 :])


def is_packing(places: Sequence[int]) -> bool:
    """Whether these are the positions of 4, 8 or 16 codes in a word, each exactly once."""
    return len(places) in (4, 8, 16) and sorted(places) == list(range(len(places)))


def _all(shapes: Sequence[Shape]) -> str:
    return " and ".join(dict.fromkeys(map(dims, shapes)))


def dims(shape: Shape) -> str:
    """A shape for people: `4x16`."""
    return "x".join(map(str, shape)) or "scalar"


# --- the computations


def _concatenated(step: Step, parts: Sequence[Part]) -> Part:
    if len({dtype.name for _, dtype in parts}) == 1:
        return np.concatenate([words for words, _ in parts], axis=step.axis), parts[0][1]
    common = _common([dtype for _, dtype in parts])
    converted = [_as(words, dtype, common) for words, dtype in parts]
    return np.concatenate(converted, axis=step.axis), common


def _moved(move: Callable[[Storage, Step], Storage]) -> Work:
    """The computation of a step that only moves the elements of one tensor."""
    return lambda step, parts: (move(parts[0][0], step), parts[0][1])


def _cut(words: Storage, step: Step) -> Storage:
    return words[(slice(None),) * step.axis + (slice(step.start, step.stop),)]


def _selected(words: Storage, step: Step) -> Storage:
    return np.take(words, np.asarray(step.numbers, np.intp), axis=step.axis)


def _sum(parts: Sequence[Part], factor: float | None = None) -> Part:
    """Sum in float64 (for integers: in int64), multiplied, and rounded once at the end."""
    common = _common([dtype for _, dtype in parts])
    # The mean of integers is not an integer.
    if factor not in (None, 1.0) and common.kind in ("int", "uint"):
        common = DTYPES["float64"]
    shape = parts[0][0].shape
    flats = [(np.ascontiguousarray(words).reshape(-1), dtype) for words, dtype in parts]
    total = np.empty(math.prod(shape), common.storage)
    # Block by block, because float64 copies of all parts at once could exceed the memory.
    for offset in range(0, total.size, _ROWS):
        block = slice(offset, offset + _ROWS)
        if common.kind in ("int", "uint"):
            total[block] = sum(_as(words[block], dtype, common) for words, dtype in flats)
        else:
            numbers = sum(_decoded(words[block], dtype) for words, dtype in flats)
            total[block] = numbers if factor is None else numbers * factor
    return total.reshape(shape), common


def _dequantised(step: Step, parts: Sequence[Part]) -> Part:
    """`(values - zero point) * scale`, rounded once, as a float32 product is."""
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
        # A scale may be infinite in a damaged dump; the row then shows it, without a numpy warning.
        with np.errstate(over="ignore", invalid="ignore"):
            if others:
                numbers = numbers * others[0].rows(block)
            result[block] = numbers if step.factor is None else numbers * step.factor
    return result, DTYPES["float32"]


def _rectified(step: Step, parts: Sequence[Part]) -> Part:
    """Replace negative values by zero."""
    del step
    values, dtype = _sum(parts)
    return np.maximum(values, 0, out=values), dtype


def _low_floats(step: Step, parts: Sequence[Part]) -> Part:
    """The float32 in the low half of 64-bit words: ATB's operators take scales in that form."""
    del step
    ((words, dtype),) = parts
    if dtype.name not in ("int64", "uint64"):
        raise BadInput(f"lowfloat takes words of 64 bits, not {dtype.name}")
    low = (np.ascontiguousarray(words).view(np.uint64) & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    return low.view(np.float32).reshape(words.shape), DTYPES["float32"]


def _unpacked(step: Step, parts: Sequence[Part]) -> Part:
    """The codes in words of 32 bits, one after the other along an axis, as uint8."""
    ((words, dtype),) = parts
    if dtype.name not in ("int32", "uint32"):
        raise BadInput(f"{step} takes words of 32 bits, not {dtype.name}")
    bits = 32 // len(step.numbers)
    unsigned = np.ascontiguousarray(words).view(np.uint32)
    mask = np.uint32((1 << bits) - 1)
    codes = [
        (unsigned >> np.uint32(bits * place) & mask).astype(np.uint8) for place in step.numbers
    ]
    shape = _with_size(words.shape, step.axis, words.shape[step.axis] * len(codes))
    return np.stack(codes, axis=step.axis + 1).reshape(shape), DTYPES["uint8"]


class _Spread(NamedTuple):
    """Scales broadcast over a tensor, not expanded: the number of repeats for each axis."""

    values: F64
    repeats: tuple[int, ...]

    def rows(self, block: slice | tuple[()]) -> F64:
        """The scales for these rows of the tensor."""
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
    """One scale for all, one for each element of `axis`, or one for each group along every axis."""
    if scale.size == 1:
        return _Spread(scale.reshape((1,) * len(shape)), (1,) * len(shape))
    # A column or row of scales has the same meaning as a flat list.
    if scale.ndim != len(shape) and max(scale.shape) == scale.size:
        scale = scale.reshape(-1)
    if scale.ndim == 1 and 0 <= axis < len(shape):
        scale = scale.reshape(*(-1 if dimension == axis else 1 for dimension in range(len(shape))))
    fits = scale.ndim == len(shape) and all(
        size and extent % size == 0 for extent, size in zip(shape, scale.shape, strict=True)
    )
    if not fits:
        raise BadInput(f"scales of {dims(scale.shape)} do not fit values of {dims(shape)}")
    repeats = tuple(extent // size for extent, size in zip(shape, scale.shape, strict=True))
    return _Spread(scale, repeats)


def _common(dtypes: Sequence[DType]) -> DType:
    """The type for sums and mixtures of these types: their own if it is wide, otherwise float32."""
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
    if dtype.lowest and dtype.bits >= 16:  # it means minus infinity in masks: keep that
        numbers = np.where(numbers == dtype.lowest, common.lowest, numbers)
    return numbers.astype(common.storage)


def _decoded(words: Storage, dtype: DType) -> F64:
    """Words as numbers, in their shape; a 4-bit code takes one byte here, not half of one."""
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


def _always(step: Step) -> bool:
    del step
    return True


def _within_rows(step: Step) -> bool:
    return step.axis > 0


_ANY = _of_one(lambda step, shape: shape)
_RANGE_RULE = StepRule(
    _RANGE, _of_one(_range_shape, along_axis=True), _moved(_cut), keeps_rows=_within_rows
)

STEPS: dict[str, StepRule] = {
    # Sources joined along an axis: q, k and v against a fused qkv, or shards of a tensor.
    "concat": StepRule(_AXIS, _joined_shape, _concatenated, joins=True, keeps_rows=_always),
    # Elements `start` to `stop` along an axis: one part of a fused tensor.
    "split": _RANGE_RULE,
    # Axes in the order `numbers`.
    "transpose": StepRule(
        _NUMBERS,
        _of_one(_transposed_shape),
        _moved(lambda words, step: words.transpose(step.numbers)),
    ),
    # To the shape `numbers`.
    "reshape": StepRule(
        _NUMBERS, _of_one(_reshaped_shape), _moved(lambda words, step: words.reshape(step.numbers))
    ),
    # Like split, for surplus elements: padding, or rows that the other side's batch does not have.
    "trim": _RANGE_RULE,
    # Positions `numbers` along an axis: rows, or interleaved parts of a fused tensor.
    "select": StepRule(
        _POSITIONS,
        _of_one(_selected_shape, along_axis=True),
        _moved(_selected),
        keeps_rows=_within_rows,
    ),
    # The sum of the sources: partial results of ranks.
    "sum": StepRule(
        _NOTHING, _summed_shape, lambda step, parts: _sum(parts), joins=True, keeps_rows=_always
    ),
    # The sum divided by the number of sources: gradients of ranks that each had different data.
    "mean": StepRule(
        _NOTHING,
        _summed_shape,
        lambda step, parts: _sum(parts, 1 / len(parts)),
        joins=True,
        keeps_rows=_always,
    ),
    # Every element multiplied by `factor`.
    "times": StepRule(
        _FACTOR, _ANY, lambda step, parts: _sum(parts, step.factor), keeps_rows=_always
    ),
    # Negative values become zero, as unsigned integers store them.
    "rectify": StepRule(_NOTHING, _ANY, _rectified, keeps_rows=_always),
    # (values - zero point) * scale; sources are values[, scale[, zero point]].
    "dequantise": StepRule(_SCALE, _dequantised_shape, _dequantised, joins=True),
    # Words of 32 bits become several codes along an axis, whose places are `numbers`.
    "unpack": StepRule(_POSITIONS, _of_one(_unpacked_shape, along_axis=True), _unpacked),
    # Words of 64 bits become the float32 in their low half (ATB's deq_scale).
    "lowfloat": StepRule(_NOTHING, _ANY, _low_floats),
}
"""Every kind of step, by its name in plans."""
