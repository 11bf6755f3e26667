"""Float against quantised: the scales that are in the run make numbers of integers again.

A scale is found by its name beside the values. Without one an 8-bit integer says nothing about a
float, and the pair says so instead of giving a number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from driftline.alignment.plan import Pair
from driftline.alignment.quantised_operators import CODES, OperatorScales
from driftline.alignment.recipe import Recipe, Source, Step
from driftline.numerics.dtypes import DTYPES
from driftline.runs.record import Record
from driftline.runs.run import Run

Shape = tuple[int, ...]

_PERHAPS = ("uint8", "int32", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
"""Taken for codes where a scale lies beside them, for numbers where none does."""
_SCALES = {
    "weight": ("weightscale", "weightscales", "scales", "scale", "weightscaleinv", "wscale"),
    "input": ("inputscale", "xscale", "pertokenscale", "activationscale", "scale", "scales"),
    "output": ("deqscale", "outputscale", "scale", "scales"),
}
_ZEROS = {
    "weight": ("weightzeropoint", "weightoffset", "zeros", "zeropoint", "offset", "zero"),
    "input": ("inputzeropoint", "inputoffset", "xoffset", "zeropoint", "offset"),
    "output": ("outputzeropoint", "outputoffset", "zeropoint", "offset"),
}
LOOKED_FOR = "weight_scale, scales, scale, input_scale, deq_scale"


class Scales:
    """The small float tensors of a run that may be scales, by where they lie and what they are."""

    def __init__(self, run: Run) -> None:
        self._known: dict[tuple[int, int, str, str], list[Record]] = {}
        self._words = {word for words in (*_SCALES.values(), *_ZEROS.values()) for word in words}
        for record in run.records:
            for place, word in _named(record):
                if word in self._words:
                    key = (record.key.rank, record.key.process, place, word)
                    self._known.setdefault(key, []).append(record)

    def find(self, values: Record, words: Iterable[str]) -> Record | None:
        """The first of these names beside the values, of the same step where it has several."""
        key = values.key
        for word in words:
            for place in _places(values):
                found = self._known.get((key.rank, key.process, place, word), ())
                best = [record for record in found if record.key.step == key.step] or list(found)
                for record in best:
                    if record.key != key:
                        return record
        return None


def _named(record: Record) -> Iterator[tuple[str, str]]:
    """Where a tensor lies and how it is called there, in the ways writers have for both."""
    key = record.key
    yield key.site, _plain(key.slot)
    if record.alias:
        yield key.site, _plain(record.alias)
    parent, _, last = key.site.rpartition(".")
    yield parent, _plain(last)


def _places(record: Record) -> Iterator[str]:
    """Where a scale of these values may lie: at the same module, or beside it in a flat file."""
    site = record.key.site
    yield site
    yield site.rpartition(".")[0]


def _plain(name: str) -> str:
    return name.replace("_", "").replace(".", "").lower()


def dequantised(
    pair: Pair, ours: Scales, theirs: Scales, operators: tuple[OperatorScales, OperatorScales]
) -> Pair:
    """The pair with its quantised side made numbers; or with the reason why it cannot be."""
    here, there = DTYPES.get(pair.reference.dtype), DTYPES.get(pair.candidate.dtype)
    if here is None or there is None or here.name == there.name:
        return pair
    for side, dtype, other, scales, more in (
        ("reference", here, there, ours, operators[0]),
        ("candidate", there, here, theirs, operators[1]),
    ):
        is_code = dtype.name in CODES and other.kind == "float"
        may_be = dtype.name in _PERHAPS and other.kind == "float" and other.bits > 8
        if not is_code and not may_be:
            continue
        record = pair.reference if side == "reference" else pair.candidate
        known = pair.reference_recipe if side == "reference" else pair.candidate_recipe
        if known is not None and any(step.kind == "dequantise" for step in known.steps):
            continue
        recipe = _recipe(record, known, scales) or more.recipe(record, known)
        if recipe is not None:
            return pair._replace(**{f"{side}_recipe": recipe})
        if is_code:
            why = f"{dtype.name} against {other.name}, and "
            if both := more.why_not(record):
                why += f"in the {side} {both}; dump the operator that quantises the input too"
            else:
                why += f"no scale that fits lies beside it in the {side} (looked for {LOOKED_FOR} "
                why += f"at '{record.key.site}'); capture the scales too"
            return pair._replace(trouble=f"{why}, or write a dequantise step into a plan")
    return pair


def as_numbers(pair: Pair, operators: tuple[OperatorScales, OperatorScales]) -> Pair:
    """Codes of both sides as the numbers they stand for: scales may differ, and so may rounding.

    Only those that were computed: the codes of two weights are equal or not.
    """
    if pair.reference.dtype not in CODES or pair.candidate.dtype not in CODES:
        return pair
    ours = operators[0].of_activation(pair.reference, pair.reference_recipe)
    theirs = operators[1].of_activation(pair.candidate, pair.candidate_recipe)
    if ours is None or theirs is None:
        return pair
    return pair._replace(reference_recipe=ours, candidate_recipe=theirs)


def same_terms(pair: Pair, operators: tuple[OperatorScales, OperatorScales]) -> Pair:
    """Two scales of weights as the same thing: floats, and without the scale of the input."""
    ours = operators[0].weight_scale(pair.reference)
    theirs = operators[1].weight_scale(pair.candidate) if ours is not None else None
    if ours is None or theirs is None:
        return pair
    unlike = ours.factor != theirs.factor
    if unlike and (ours.why or theirs.why):
        return pair._replace(
            trouble=f"scales of weights in different terms: {ours.why or theirs.why}"
        )
    if not unlike and ours.packed == theirs.packed:
        return pair
    recipes: list[Recipe | None] = []
    for scale, record, known in (
        (ours, pair.reference, pair.reference_recipe),
        (theirs, pair.candidate, pair.candidate_recipe),
    ):
        source: Source = record if known is None else known
        shape = source.shape
        if scale.packed:
            source = Recipe((source,), (Step("lowfloat"),), shape)
        if unlike and scale.factor is not None:
            source = Recipe((source,), (Step("dequantise", factor=scale.factor),), shape)
        recipes.append(source if isinstance(source, Recipe) else None)
    return pair._replace(reference_recipe=recipes[0], candidate_recipe=recipes[1])


def _recipe(record: Record, known: Recipe | None, scales: Scales) -> Recipe | None:
    role = _role(record)
    scale = scales.find(record, _SCALES[role])
    if scale is None or scale.dtype not in DTYPES or not DTYPES[scale.dtype].is_floating:
        return None
    values: Source = record if known is None else known
    shape = record.shape if known is None else known.shape
    axis = _axis(shape, scale.shape, role)
    if axis is None:
        return None
    sources: list[Source] = [values, scale]
    zero = scales.find(record, _ZEROS[role])
    if zero is not None and zero.dtype in DTYPES and zero.shape == scale.shape:
        sources.append(zero)
    return Recipe(tuple(sources), (Step("dequantise", axis),), shape)


def _role(record: Record) -> str:
    key = record.key
    if key.port in ("param", "param_grad", "optimizer_grad"):
        return "weight"
    if "weight" in (_plain(key.slot), _plain(record.alias)):
        return "weight"
    if _plain(key.site.rpartition(".")[2]).endswith("weight"):
        return "weight"  # a file of weights: everything is a value there, none has a port
    return "input" if key.port == "input" else "output"


def _axis(shape: Shape, scale: Shape, role: str) -> int | None:
    """Along which axis a list of scales lies; 0 where the scales have a shape of their own."""
    count = math.prod(scale)
    if count == 1:
        return 0
    if len([size for size in scale if size != 1]) == 1 and len(scale) != len(shape):
        last = len(shape) - 1
        order = (0, last) if role in ("weight", "input") else (last, 0)
        return next((axis for axis in order if shape and shape[axis] == count), None)
    fits = len(scale) == len(shape) and all(
        size and whole % size == 0 for whole, size in zip(shape, scale, strict=True)
    )
    return 0 if fits else None
