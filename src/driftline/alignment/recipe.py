"""Recipes: transformations of stored tensors before they can be compared.

A recipe is data (sources and steps), so that a plan can be printed, saved, edited, and checked by
shapes alone before it runs. `recipe_steps` defines the steps; `comparison.measure.recipes` applies
recipes to the tensors of a run; the rules decide which recipe a pair needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, cast

from driftline.alignment.recipe_steps import Step, dims, fold, shape_after, step_from_text
from driftline.errors import BadInput
from driftline.runs.records import Record, TensorKey

_RANK, _VISIT = (TensorKey._fields.index(name) for name in ("rank", "visit"))


class Recipe(NamedTuple):
    """How one side of a pair is computed from stored tensors.

    Attributes:
        sources: Records of that side's run, the pair's own record first; or inner recipes (such as
            q, k and v, each gathered from its ranks).
        steps: Steps, in the order of application; a step that joins sources comes first.
        shape: Shape of the result.
    """

    sources: tuple[Source, ...]
    steps: tuple[Step, ...]
    shape: tuple[int, ...]

    @property
    def records(self) -> tuple[Record, ...]:
        """Every stored tensor of the recipe, in order, including those of inner recipes."""
        return tuple(_records(self.sources))

    @property
    def keeps_order(self) -> bool:
        """Whether only the shape changes, so that the elements stay in one source's order."""
        return len(self.sources) == 1 and all(step.kind == "reshape" for step in self.steps)

    def then(self, *steps: Step, shape: tuple[int, ...]) -> Recipe:
        """This recipe with more steps at its end."""
        return Recipe(self.sources, (*self.steps, *steps), shape)

    def __str__(self) -> str:
        steps = " then ".join(map(str, self.steps)) or "as it is"
        if len(self.sources) == 1 and not isinstance(self.sources[0], Recipe):
            return f"{steps} of {dims(self.sources[0].shape)}"
        return f"{steps} of {_counted(self.sources)}"

    def as_json(self) -> dict[str, Any]:
        """The recipe for a saved plan; a source is its key, or an inner recipe."""
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
        value: Content of a plan file.
        find: Returns the record of a key given as text; raises BadInput if there is none.
        depth: Nesting depth inside other recipes.

    Raises:
        BadInput: The value is not a recipe.
    """
    # Recipes nest to three levels in practice; the limit protects the stack from a hostile file.
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
    # Sizes are checked here, because later code multiplies them and allocates memory.
    if not isinstance(shape, list) or not all(
        isinstance(size, int) and size >= 0 for size in cast("list[Any]", shape)
    ):
        raise BadInput("a recipe needs a 'shape', such as [4, 16]")
    return Recipe(
        tuple(parsed_sources),
        tuple(step_from_text(str(step)) for step in cast("list[Any]", steps)),
        tuple(cast("list[int]", shape)),
    )


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
    # If only rank and call differ, it is one tensor in many parts; their number says more than
    # their names.
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


def check_recipe(recipe: Recipe) -> None:
    """Check by shapes alone that every step fits its input and that the recipe's shape results.

    Raises:
        BadInput: A step does not fit, or another shape results.
    """
    for source in recipe.sources:
        if isinstance(source, Recipe):
            check_recipe(source)
    shape = fold(recipe.steps, [source.shape for source in recipe.sources], shape_after)
    if shape != recipe.shape:
        raise BadInput(f"the steps give {dims(shape)}, the recipe says {dims(recipe.shape)}")
