"""Scales of an operator library, which no name tells: by the operator that made or takes the codes.

An operator that quantises says its scale among its parameters or takes it as an input; a product of
two quantised matrices takes one scale for both (as a float, or as a float in the low half of 64
bits), so that of the weight alone is what is left when the input's is divided out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

from driftline.alignment.plan import Pair
from driftline.alignment.recipe import Recipe, Source, Step
from driftline.alignment.sites.operators import OperatorSteps
from driftline.alignment.sites.site_graph import Call, main_tensor
from driftline.alignment.sites.values import Dataflow
from driftline.errors import DriftlineError
from driftline.numerics.dtypes import DTYPES, to_float64
from driftline.runs.records import Record
from driftline.runs.run import Run

_SCALE_INPUTS = ("inputScale", "quantInputScale")
_OFFSET_INPUTS = ("inputOffset", "quantInputOffset")
_SCALE_TYPES = ("float32", "float16", "bfloat16", "uint64", "int64")
CODES = ("int8", "int4", "uint4")
"""Integers that against a float can only be codes of a quantised tensor."""
_FOR_BOTH = (
    "its operator takes one scale for the weight and the input, and nothing says the input's"
)
_BY_COLUMN = (
    "its operator takes one scale for the weight and the input, whose columns have their own"
)


class _Made(NamedTuple):
    """How codes become numbers: a number for all of them, or a tensor of scales."""

    factor: float = 1.0
    zero: float = 0.0
    scale: Record | None = None
    offset: Record | None = None


class WeightScale(NamedTuple):
    """What a product takes as the scale of its weight.

    Attributes:
        record: The tensor.
        packed: Whether it is a float in the low half of 64 bits.
        factor: What makes it the weight's alone, if it is the input's too.
        why: Why nothing does.
    """

    record: Record
    packed: bool
    factor: float | None = None
    why: str = ""


class OperatorScales:
    """The scales of a run's operators."""

    def __init__(self, steps: OperatorSteps) -> None:
        self._run = steps.run
        self._steps = steps

    def recipe(self, record: Record, known: Recipe | None) -> Recipe | None:
        """What makes numbers of these codes; None if no operator says it."""
        calls, flow = self._steps.at(record)
        call = calls.get(record.key.site)
        if call is None:
            return self._handed_on(record, known)
        values: Source = record if known is None else known
        shape = record.shape if known is None else known.shape
        is_input = record.key.port == "input" and record is main_tensor(call.records, "input")
        if is_input or record.key.port == "output":
            made = self._made(record, calls, flow)
            return None if made is None else _recipe_of_operator(values, shape, made)
        return self._weight(record, call, calls, flow, values, known)

    def _handed_on(self, record: Record, known: Recipe | None) -> Recipe | None:
        """What a container takes for an operator inside is made numbers as it is there."""
        taken = self._steps.taken(record)
        found = None if taken is None else self.recipe(taken, known)
        if found is None:
            return None
        return found._replace(sources=(record if known is None else known, *found.sources[1:]))

    def _made(self, codes: Record, calls: Mapping[str, Call], flow: Dataflow) -> _Made | None:
        """By the operator that wrote the codes."""
        key = codes.key
        place = (key.site, key.slot)
        maker = flow.makers.get(place) if key.port == "input" else place
        call = None if maker is None else calls.get(maker[0])
        if maker is None or call is None:
            return None
        # Tensors first: an operator that takes its scale as one still has a parameter, at its
        # default of 1.
        if call.kind != "linear" and (beside := self._beside(call, codes)) is not None:
            return beside
        param = flow.params.get(call.site, {})
        scale = _number(param, _SCALE_INPUTS)
        return _Made(scale, _number(param, _OFFSET_INPUTS) or 0.0) if scale else None

    def _beside(self, call: Call, codes: Record) -> _Made | None:
        """A scale, and perhaps a zero point, that a quantising operator takes, or gives per token.

        A norm takes its own weights too: of one element, or after those, is the scale.
        """
        last = codes.shape[-1] if codes.shape else -1
        rows = math.prod(codes.shape[:-1])
        given = [
            r
            for r in call.records
            if r.key.port == "output" and r is not codes and r.dtype in ("float32", "float16")
        ]
        if len(given) == 1 and math.prod(given[0].shape) == rows:
            return _Made(scale=given[0])
        vectors = [
            r for r in call.records if r.key.port == "input" and math.prod(r.shape) in (1, last)
        ]
        vectors = [r for r in vectors if r is not main_tensor(call.records, "input")]
        floats = [r for r in vectors if "float" in r.dtype]
        single = [r for r in floats if math.prod(r.shape) == 1]
        zeros = [r for r in vectors if r.dtype in ("int8", "int32")]
        scale = single[0] if len(single) == 1 else None
        if scale is None and not call.kind.startswith("norm") and len(floats) == 1:
            scale = floats[0]
        if scale is None:
            return None
        offset = zeros[0] if len(zeros) == 1 and zeros[0].shape == scale.shape else None
        if math.prod(scale.shape) == 1 and (number := self._value(scale)):
            zero = self._value(offset) if offset is not None else 0.0
            return None if zero is None else _Made(number, zero)
        return _Made(scale=scale, offset=offset)

    def _weight(
        self,
        codes: Record,
        call: Call,
        calls: Mapping[str, Call],
        flow: Dataflow,
        values: Source,
        known: Recipe | None,
    ) -> Recipe | None:
        """The scale that a product takes beside two matrices, less that of its input."""
        own = self._own_scale(call, calls, flow) if len(codes.shape) == 2 else None
        if own is None or own.why:
            return None
        scale: Source = own.record
        axis = 0 if codes.shape[0] == call.features else 1
        if (
            codes.shape[0] == codes.shape[1]
            and flow.params.get(call.site, {}).get("transposeB") is False
        ):  # [in, out], which the shape does not say
            axis = 1
        if own.packed:
            scale = Recipe((own.record,), (Step("lowfloat"),), own.record.shape)
        if known is not None:
            cut = next((step for step in known.steps if step.kind == "split"), None)
            if cut is None or len(known.steps) != 1 or cut.axis != axis:
                return None
            if math.prod(own.record.shape) > 1:  # the same columns of the scales
                inner = scale.steps if isinstance(scale, Recipe) else ()
                flat = (math.prod(own.record.shape),)
                steps = (
                    *inner,
                    Step("reshape", numbers=flat),
                    Step("split", 0, cut.start, cut.stop),
                )
                scale = Recipe((own.record,), steps, (cut.stop - cut.start,))
        shape = codes.shape if known is None else known.shape
        return Recipe((values, scale), (Step("dequantise", axis, factor=own.factor),), shape)

    def _own_scale(
        self, call: Call, calls: Mapping[str, Call], flow: Dataflow
    ) -> WeightScale | None:
        """What a product takes as the scale of its weight; None if it takes none."""
        if call.kind != "linear":
            return None
        scales = [
            record
            for record in call.records
            if record.key.port == "input"
            and record.dtype in _SCALE_TYPES
            and math.prod(record.shape) in (call.features, 1)
            and record is not main_tensor(call.records, "input")
        ]
        if len(scales) > 1:  # beside a bias, whose type is that of the result
            scales = [r for r in scales if r.dtype in ("uint64", "int64")] or [
                r for r in scales if r.dtype == "float32"
            ]
        if len(scales) != 1:
            return None
        packed = scales[0].dtype in ("uint64", "int64")
        fed = main_tensor(call.records, "input")
        if fed is None or fed.dtype not in CODES:
            return WeightScale(scales[0], packed)
        made = self._made(fed, calls, flow)
        if made is None:
            return WeightScale(scales[0], packed, why=_FOR_BOTH)
        if made.scale is not None and made.scale.key.port == "input":
            return WeightScale(scales[0], packed, why=_BY_COLUMN)
        return WeightScale(scales[0], packed, 1.0 / made.factor if made.scale is None else None)

    def weight_scale(self, record: Record) -> WeightScale | None:
        """What a tensor says of the scale of a product's weight; None if it is no such scale."""
        calls, flow = self._steps.at(record)
        taken = record if record.key.site in calls else self._steps.taken(record)
        call = None if taken is None else calls.get(taken.key.site)
        own = None if call is None else self._own_scale(call, calls, flow)
        return own if own is not None and own.record is taken else None

    def why_not(self, record: Record) -> str:
        """Why the scale that a product takes does not make numbers of its weight; else empty."""
        calls, flow = self._steps.at(record)
        taken = record if record.key.site in calls else self._steps.taken(record)
        call = None if taken is None else calls.get(taken.key.site)
        if taken is None or call is None or taken is main_tensor(call.records, "input"):
            return ""
        own = self._own_scale(call, calls, flow) if taken.key.port == "input" else None
        return "" if own is None else own.why

    def of_activation(self, record: Record, known: Recipe | None) -> Recipe | None:
        """What makes numbers of codes that were computed in the run; None for a weight's."""
        calls, _ = self._steps.at(record)
        call = calls.get(record.key.site)
        if call is None or record.key.phase != "forward":
            return None
        if record.key.port == "input" and record is not main_tensor(call.records, "input"):
            return None
        return self.recipe(record, known) if record.key.port in ("input", "output") else None

    def _value(self, record: Record) -> float | None:
        """A number that a tensor of one element holds."""
        try:
            return float(to_float64(self._run.raw(record).reshape(-1), DTYPES[record.dtype])[0])
        except (DriftlineError, OSError, ValueError, IndexError, KeyError):
            return None


def _recipe_of_operator(values: Source, shape: tuple[int, ...], made: _Made) -> Recipe:
    sources: list[Source] = [values]
    axis = 0
    if made.scale is not None:
        sources.append(made.scale)
        size = math.prod(made.scale.shape)
        if shape and size == shape[-1] and made.scale.key.port == "input":
            axis = len(shape) - 1
        elif size > 1 and len(shape) > 1:  # one per token, in a tensor of fewer axes
            sources[1] = Recipe(
                (made.scale,), (Step("reshape", numbers=(*shape[:-1], 1)),), (*shape[:-1], 1)
            )
        if made.offset is not None:
            sources.append(made.offset)
    factor = made.factor if made.scale is None else None
    step = Step("dequantise", axis, factor=factor, zero=made.zero)
    return Recipe(tuple(sources), (step,), shape)


def _number(param: Mapping[str, Any], names: tuple[str, ...]) -> float | None:
    """A parameter, itself or one level down (`quantParam`, `normParam`)."""
    levels = [param]
    for each in param.values():
        if isinstance(each, Mapping):
            levels.append(cast("Mapping[str, Any]", each))
    for level in levels:
        for name in names:
            value = level.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                return float(value) if math.isfinite(value) else None
    return None


# Float against quantised: the scales that are in the run make numbers of integers again.


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
