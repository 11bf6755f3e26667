"""What shape a recipe gives, by the shapes of its sources alone: a plan is checked before it runs.

Carries nothing out; `comparison.cooking` does, and checks again against what is stored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from driftline.alignment.recipe import JOINING, Recipe, Step
from driftline.errors import BadInput

Shape = tuple[int, ...]


def check_recipe(recipe: Recipe) -> None:
    """See that every step fits what it is given, and that the shape is what comes out.

    Raises:
        BadInput: One does not, or it is not.
    """
    shapes: list[Shape] = []
    for source in recipe.sources:
        if isinstance(source, Recipe):
            check_recipe(source)
        shapes.append(source.shape)
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
        shape = _after(step, shape)
    if shape != recipe.shape:
        raise BadInput(f"the steps give {_dims(shape)}, the recipe says {_dims(recipe.shape)}")


def _joined(step: Step, shapes: Sequence[Shape]) -> Shape:
    first = shapes[0]
    if step.kind == "dequantise":
        if not (1 if step.factor is not None else 2) <= len(shapes) <= 3:
            raise BadInput("dequantise takes values, a scale and perhaps a zero point")
        return first
    if step.kind in ("sum", "mean"):
        if len(set(shapes)) > 1:
            raise BadInput(f"tensors of {_all(shapes)} cannot be added up")
        return first
    at = step.axis
    rest = {(*shape[:at], *shape[at + 1 :]) for shape in shapes}
    if not 0 <= at < min(map(len, shapes)) or len(rest) > 1:
        raise BadInput(f"tensors of {_all(shapes)} cannot be joined along axis {at}")
    return (*first[:at], sum(shape[at] for shape in shapes), *first[at + 1 :])


def _after(step: Step, shape: Shape) -> Shape:
    fits, result = True, shape
    at = step.axis
    if step.kind in ("split", "trim", "select"):
        fits = 0 <= at < len(shape)
        if fits and step.kind == "select":
            fits = not step.numbers or 0 <= min(step.numbers) <= max(step.numbers) < shape[at]
            result = (*shape[:at], len(step.numbers), *shape[at + 1 :])
        elif fits:
            fits = 0 <= step.start <= step.stop <= shape[at]
            result = (*shape[:at], step.stop - step.start, *shape[at + 1 :])
    elif step.kind == "transpose":
        fits = sorted(step.numbers) == list(range(len(shape)))
        result = tuple(shape[n] for n in step.numbers) if fits else shape
    elif step.kind == "reshape":
        fits = math.prod(step.numbers) == math.prod(shape) and min(step.numbers, default=0) >= 0
        result = step.numbers
    elif step.kind == "unpack":
        fits = 0 <= at < len(shape) and is_packing(step.numbers)
        result = (*shape[:at], shape[at] * len(step.numbers), *shape[at + 1 :]) if fits else shape
    elif step.kind in ("lowfloat", "times"):
        pass
    else:
        raise BadInput(f"{step} joins tensors, so it must be the first step")
    if not fits:
        raise BadInput(f"{step} does not fit {_dims(shape)}")
    return result


def is_packing(places: Sequence[int]) -> bool:
    """Whether these are all places of a word, each once: 4, 8 or 16 codes of it."""
    return len(places) in (4, 8, 16) and sorted(places) == list(range(len(places)))


def _all(shapes: Sequence[Shape]) -> str:
    return " and ".join(dict.fromkeys(map(_dims, shapes)))


def _dims(shape: Shape) -> str:
    return "x".join(map(str, shape)) or "scalar"
