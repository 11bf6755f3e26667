"""Recipes: what is done to stored tensors before they can be compared.

A recipe is data (sources and steps), so that a plan can be printed, saved and edited. This file
also computes the shape that a recipe gives, so that a plan is checked before it runs.
`comparison.measure.recipes` carries recipes out; the rules decide which recipe a pair needs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, cast, get_args

from driftline.errors import BadInput
from driftline.runs.records import Record, TensorKey

StepKind = Literal[
    "concat",  # sources joined along `axis`: q, k and v against a fused qkv; shards of a tensor
    "split",  # elements `start` to `stop` along `axis`: one part of a fused tensor
    "transpose",  # axes in the order `numbers`
    "reshape",  # to the shape `numbers`
    "trim",  # like split, of what is surplus: pads, rows the other side's batch has not
    "select",  # positions `numbers` along `axis`: rows, or interleaved parts of a fused tensor
    "sum",  # sources added up: partial results of ranks
    "mean",  # the same, divided by their number: gradients of ranks that each had other data
    "times",  # every element multiplied by `factor`
    "dequantise",  # (values - zero point) * scale; sources are values[, scale[, zero point]]
    "unpack",  # words of 32 bits become several codes along `axis`, whose places are `numbers`
    "lowfloat",  # words of 64 bits whose low half is a float32: that number (ATB's deq_scale)
]
KINDS: tuple[str, ...] = get_args(StepKind)
JOINING: tuple[StepKind, ...] = ("concat", "sum", "mean", "dequantise")
"""Steps that join all sources into one tensor; only the first step of a recipe may join."""

_MOST_POSITIONS = 1 << 22
"""Most selected positions that are read from a plan file, which may be somebody else's."""
_RANK, _VISIT = (TensorKey._fields.index(name) for name in ("rank", "visit"))
_WORDS = r"\s*([a-z]+)\s*(?:\(([^()]*)\))?\s*"


class Step(NamedTuple):
    """One step of a recipe; the kind decides which fields are used.

    Attributes:
        kind: What is done.
        axis: Along which axis (concat, split, trim, select); for dequantise the axis whose
            elements have a scale each, where the scales are a plain list.
        start: First element of a split or trim.
        stop: Last element plus one.
        numbers: Axes of a transpose, shape of a reshape, positions of a select, places of codes in
            a word, lowest first, for unpack.
        factor: Of dequantise: what every scale is multiplied by; the scale itself without a source.
            Of times: what every element is multiplied by.
        zero: Of dequantise: what is subtracted from every value.
    """

    kind: StepKind
    axis: int = 0
    start: int = 0
    stop: int = 0
    numbers: tuple[int, ...] = ()
    factor: float | None = None
    zero: float = 0.0

    def __str__(self) -> str:
        """Text for people: a long list of positions is given by its length."""
        if self.kind == "select":
            # Bounded, because a plan of somebody else may hold millions of positions.
            shown = ",".join(_ranges(self.numbers[:_MOST_POSITIONS]))
            shown = shown if len(shown) <= 24 else f"{len(self.numbers)} positions"
            return f"select(axis {self.axis}, {shown})"
        return self.text()

    def text(self) -> str:
        """Complete text for a file, as `step_from_text` reads it.

        >>> Step("select", 1, numbers=(0, 1, 2, 6)).text()
        'select(axis 1, 0:3,6)'
        """
        if self.kind in ("split", "trim"):
            return f"{self.kind}(axis {self.axis}, {self.start}:{self.stop})"
        if self.kind in ("transpose", "reshape"):
            return f"{self.kind}({','.join(map(str, self.numbers))})"
        if self.kind in ("select", "unpack"):
            return f"{self.kind}(axis {self.axis}, {','.join(_ranges(self.numbers))})"
        if self.kind == "dequantise":
            times = f", times {self.factor!r}" if self.factor is not None else ""
            minus = f", minus {self.zero!r}" if self.zero else ""
            return f"dequantise(axis {self.axis}{times}{minus})"
        if self.kind == "times":
            return f"times({self.factor!r})"
        bare = self.kind in ("sum", "mean", "lowfloat")
        return self.kind if bare else f"{self.kind}(axis {self.axis})"


class Recipe(NamedTuple):
    """How one side of a pair is computed from stored tensors.

    Attributes:
        sources: Records of that side's run, the pair's own record first; or inner recipes (q, k
            and v, each gathered from its ranks).
        steps: Applied in this order; a step that joins sources comes first.
        shape: Shape of the result.
    """

    sources: tuple[Source, ...]
    steps: tuple[Step, ...]
    shape: tuple[int, ...]

    @property
    def records(self) -> tuple[Record, ...]:
        """Every stored tensor it is made of, in order, those of inner recipes included."""
        return tuple(_records(self.sources))

    @property
    def keeps_order(self) -> bool:
        """Whether only the shape changes, so that the elements stay in the order of one source."""
        return len(self.sources) == 1 and all(step.kind == "reshape" for step in self.steps)

    def then(self, *steps: Step, shape: tuple[int, ...]) -> Recipe:
        """This recipe with more steps at its end."""
        return Recipe(self.sources, (*self.steps, *steps), shape)

    def __str__(self) -> str:
        steps = " then ".join(map(str, self.steps)) or "as it is"
        if len(self.sources) == 1 and not isinstance(self.sources[0], Recipe):
            return f"{steps} of {_dims(self.sources[0].shape)}"
        return f"{steps} of {_counted(self.sources)}"

    def as_json(self) -> dict[str, Any]:
        """The recipe for a saved plan; a source is its key, or a recipe of its own."""
        return {
            "sources": [
                source.as_json() if isinstance(source, Recipe) else str(source.key)
                for source in self.sources
            ],
            "steps": [step.text() for step in self.steps],
            "shape": list(self.shape),
        }


Source: TypeAlias = Record | Recipe


def start(record: Record) -> Recipe:
    """A recipe without steps."""
    return Recipe((record,), (), record.shape)


def joined(
    sources: Sequence[Source],
    kind: Literal["concat", "sum", "mean"],
    axis: int,
    shape: tuple[int, ...],
) -> Recipe:
    """A recipe that joins several tensors."""
    return Recipe(tuple(sources), (Step(kind, axis),), shape)


def recipe_from_json(value: Any, find: Callable[[str], Record], *, depth: int = 0) -> Recipe:
    """The inverse of `Recipe.as_json`.

    Args:
        shown: What a plan file holds.
        find: The record of a key as text; raises BadInput where there is none.
        depth: How deep inside other recipes this one is.

    Raises:
        BadInput: It is no recipe.
    """
    # Recipes nest to three levels in practice; the limit keeps a hostile file off the stack.
    if not isinstance(value, Mapping) or depth > 8:
        raise BadInput("a recipe has sources, steps and a shape")
    fields = cast("Mapping[str, Any]", value)
    sources, steps, shape = fields.get("sources"), fields.get("steps"), fields.get("shape")
    if not isinstance(sources, list) or not sources or not isinstance(steps, list):
        raise BadInput("a recipe needs the lists 'sources' and 'steps'")
    parsed_sources: list[Source] = [
        find(source) if isinstance(source, str) else recipe_from_json(source, find, depth=depth + 1)
        for source in cast("list[Any]", sources)
    ]
    # Sizes are checked here, because later code multiplies and allocates by them.
    if not isinstance(shape, list) or not all(
        isinstance(size, int) and size >= 0 for size in cast("list[Any]", shape)
    ):
        raise BadInput("a recipe needs a 'shape', such as [4, 16]")
    return Recipe(
        tuple(parsed_sources),
        tuple(step_from_text(str(step)) for step in cast("list[Any]", steps)),
        tuple(cast("list[int]", shape)),
    )


def step_from_text(text: str) -> Step:
    """The inverse of `Step.text`.

    >>> step_from_text("split(axis 0, 4:8)")
    Step(kind='split', axis=0, start=4, stop=8, numbers=(), factor=None, zero=0.0)

    Raises:
        BadInput: It is no step.
    """
    words = re.fullmatch(_WORDS, text)
    kind = words.group(1) if words else ""
    if words is None or kind not in KINDS:
        raise BadInput(f"'{text}' is no step of a recipe", hint=f"steps are {', '.join(KINDS)}")
    inside = (words.group(2) or "").strip()
    try:
        if kind in ("transpose", "reshape"):
            numbers = tuple(int(word) for word in inside.split(",") if word.strip())
            return Step(cast(StepKind, kind), numbers=numbers)
        if kind == "times":
            # `times` has one number and no word before it; a word is added to read it
            # like the others.
            return Step("times", factor=_number_after("by", f"by {inside}"))
        first, _, rest = inside.partition(",")
        axis = int(first.strip().removeprefix("axis")) if first.strip() else 0
        if kind in ("split", "trim"):
            begin, _, end = rest.partition(":")
            return Step(cast(StepKind, kind), axis, int(begin), int(end))
        if kind in ("select", "unpack"):
            return Step(cast(StepKind, kind), axis, numbers=tuple(_positions(rest)))
        if kind == "dequantise":
            zero = _number_after("minus", rest) or 0.0
            return Step("dequantise", axis, factor=_number_after("times", rest), zero=zero)
        return Step(cast(StepKind, kind), axis)
    except ValueError:
        raise BadInput(f"'{text}' is a {kind} whose numbers cannot be read") from None


def _number_after(word: str, text: str) -> float | None:
    """The number after a word; None where the word is not there.

    Raises:
        ValueError: It is none that can be computed with.
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
        # Checked before the range is made: `0:1000000000` is a short text.
        if last - int(begin) + len(numbers) > _MOST_POSITIONS:
            raise ValueError(word)
        numbers.extend(range(int(begin), last))
    return numbers


def _ranges(numbers: Sequence[int]) -> Iterator[str]:
    begin = 0
    while begin < len(numbers):
        # Runs of neighbours are written as one range, which keeps plans of masks readable.
        end = begin + 1
        while end < len(numbers) and numbers[end] == numbers[end - 1] + 1:
            end += 1
        first = numbers[begin]
        yield str(first) if end == begin + 1 else f"{first}:{first + end - begin}"
        begin = end


def _records(sources: Iterable[Source]) -> Iterator[Record]:
    for source in sources:
        if isinstance(source, Recipe):
            yield from _records(source.sources)
        else:
            yield source


def _counted(sources: Sequence[Source]) -> str:
    """Names of the sources (`q, k, v`); parts of one tensor are counted by ranks and calls."""
    if any(isinstance(source, Recipe) for source in sources):
        return "(" + "), (".join(map(_source_text, sources)) + ")"
    records = cast("Sequence[Record]", sources)
    # Only rank and call differ: one tensor in many parts, whose number says more than its
    # names.
    places = {record.key._replace(rank=0, process=0, visit=0) for record in records}
    if len(places) == 1:
        ranks, calls = ({r.key[field] for r in records} for field in (_RANK, _VISIT))
        words = [f"{len(ranks)} ranks"] if len(ranks) > 1 or len(calls) < 2 else []
        return " and ".join([*words, f"{len(calls)} calls"] if len(calls) > 1 else words)
    names = [
        f"{record.key.site}/{record.key.slot}"
        if len({r.key.site for r in records}) > 1
        else record.key.slot
        for record in records
    ]
    return ", ".join(names)


def _source_text(source: Source) -> str:
    return str(source) if isinstance(source, Recipe) else f"{source.key.site}/{source.key.slot}"


def _dims(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


Shape = tuple[int, ...]


def check_recipe(recipe: Recipe) -> None:
    """Check by shapes alone that every step fits its input and that the recipe's shape results.

    Raises:
        BadInput: A step does not fit, or another shape results.
    """
    shapes: list[Shape] = []
    for source in recipe.sources:
        if isinstance(source, Recipe):
            check_recipe(source)
        shapes.append(source.shape)
    # Only the first step may join: it turns several shapes into the one that later steps
    # change.
    steps = recipe.steps
    if steps and steps[0].kind in JOINING:
        shape = _joined(steps[0], shapes)
        steps = steps[1:]
    elif len(shapes) == 1:
        shape = shapes[0]
    else:
        raise BadInput(
            f"a recipe of {len(shapes)} sources begins with a step that joins them",
            hint=f"such are {', '.join(sorted(JOINING))}",
        )
    for step in steps:
        shape = _shape_after(step, shape)
    if shape != recipe.shape:
        raise BadInput(f"the steps give {_dims(shape)}, the recipe says {_dims(recipe.shape)}")


def _joined(step: Step, shapes: Sequence[Shape]) -> Shape:
    first = shapes[0]
    if step.kind == "dequantise":
        # A factor in the step replaces the tensor of scales.
        if not (1 if step.factor is not None else 2) <= len(shapes) <= 3:
            raise BadInput("dequantise takes values, a scale and perhaps a zero point")
        return first
    if step.kind in ("sum", "mean"):
        if len(set(shapes)) > 1:
            raise BadInput(f"tensors of {_all(shapes)} cannot be added up")
        return first
    axis = step.axis
    # Shapes may differ along the joined axis only.
    rest = {(*shape[:axis], *shape[axis + 1 :]) for shape in shapes}
    if not 0 <= axis < min(map(len, shapes)) or len(rest) > 1:
        raise BadInput(f"tensors of {_all(shapes)} cannot be joined along axis {axis}")
    return (*first[:axis], sum(shape[axis] for shape in shapes), *first[axis + 1 :])


def _shape_after(step: Step, shape: Shape) -> Shape:
    fits, result = True, shape
    axis = step.axis
    if step.kind in ("split", "trim", "select"):
        fits = 0 <= axis < len(shape)
        if fits and step.kind == "select":
            fits = not step.numbers or 0 <= min(step.numbers) <= max(step.numbers) < shape[axis]
            result = (*shape[:axis], len(step.numbers), *shape[axis + 1 :])
        elif fits:
            fits = 0 <= step.start <= step.stop <= shape[axis]
            result = (*shape[:axis], step.stop - step.start, *shape[axis + 1 :])
    elif step.kind == "transpose":
        fits = sorted(step.numbers) == list(range(len(shape)))
        result = tuple(shape[n] for n in step.numbers) if fits else shape
    elif step.kind == "reshape":
        fits = math.prod(step.numbers) == math.prod(shape) and min(step.numbers, default=0) >= 0
        result = step.numbers
    elif step.kind == "unpack":
        fits = 0 <= axis < len(shape) and is_packing(step.numbers)
        result = (
            (*shape[:axis], shape[axis] * len(step.numbers), *shape[axis + 1 :]) if fits else shape
        )
    elif step.kind in ("lowfloat", "times"):
        pass
    else:
        raise BadInput(f"{step} joins tensors, so it must be the first step")
    if not fits:
        raise BadInput(f"{step} does not fit {_dims(shape)}")
    return result


def is_packing(places: Sequence[int]) -> bool:
    """Whether these are the positions of 4, 8 or 16 codes in a word, each exactly once."""
    return len(places) in (4, 8, 16) and sorted(places) == list(range(len(places)))


def _all(shapes: Sequence[Shape]) -> str:
    return " and ".join(dict.fromkeys(map(_dims, shapes)))
