"""Quantised tensors: recipes that convert integer codes back to numbers with captured scales.

Scales are found by name next to the values (`Scales`). In dumps of an operator library, where names
do not show them, they are found by the operator that wrote or takes the codes (`OperatorScales`). A
quantising operator has its scale among its parameters or takes it as an input. A product of two
quantised matrices takes one scale for both (a float, or a float in the low half of 64 bits);
dividing it by the input's scale gives the weight's own scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

from driftline.alignment.plan import Pair, Plan
from driftline.alignment.recipe import Recipe, Source, Step
from driftline.alignment.sites.operators import OperatorSteps
from driftline.alignment.sites.site_graph import Call, main_tensor
from driftline.alignment.sites.values import Dataflow
from driftline.errors import DriftlineError
from driftline.graphs.sources.exported import ExportedGraph, Tensor, place_of
from driftline.numerics.dtypes import DTYPES, to_float64
from driftline.runs.records import Record
from driftline.runs.run import Run

_SCALE_INPUTS = ("inputScale", "quantInputScale")
_OFFSET_INPUTS = ("inputOffset", "quantInputOffset")
_SCALE_TYPES = ("float32", "float16", "bfloat16", "uint64", "int64")
CODES = ("int8", "int4", "uint4")
"""Integer types that, if paired with a float, can only be codes of a quantised tensor."""
_FOR_BOTH = (
    "its operator takes one scale for the weight and the input, and nothing says the input's"
)
_BY_COLUMN = (
    "its operator takes one scale for the weight and the input, whose columns have their own"
)


class _Quantisation(NamedTuple):
    """How codes were made from numbers: with one scale for all of them, or a tensor of scales."""

    factor: float = 1.0
    zero: float = 0.0
    scale: Record | None = None
    offset: Record | None = None


class WeightScale(NamedTuple):
    """The scale of a weight, as a product takes it.

    Attributes:
        record: The tensor of scales.
        packed: Whether it is a float in the low half of 64 bits.
        factor: Factor that removes the input's scale, if that is included.
        why: Why the input's scale cannot be removed; empty if it can.
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

    def recipe(self, record: Record, earlier: Recipe | None) -> Recipe | None:
        """Recipe that converts codes to numbers; None if no operator shows the scale."""
        calls, flow = self._steps.at(record)
        call = calls.get(record.key.site)
        if call is None:
            return self._through_container(record, earlier)
        values: Source = record if earlier is None else earlier
        shape = record.shape if earlier is None else earlier.shape
        is_input = record.key.port == "input" and record is main_tensor(call.records, "input")
        # Activations were quantised during the run, by an operator; weights were quantised before
        # it.
        if is_input or record.key.port == "output":
            made = self._quantisation(record, calls, flow)
            return None if made is None else _recipe_of_operator(values, shape, made)
        return self._weight(record, call, calls, flow, values, earlier)

    def _through_container(self, record: Record, earlier: Recipe | None) -> Recipe | None:
        """Recipe of a container's input, by the operator inside that takes the same tensor."""
        inner = self._steps.taken(record)
        inner_recipe = None if inner is None else self.recipe(inner, earlier)
        if inner_recipe is None:
            return None
        return inner_recipe._replace(
            sources=(record if earlier is None else earlier, *inner_recipe.sources[1:])
        )

    def _quantisation(
        self, codes: Record, calls: Mapping[str, Call], flow: Dataflow
    ) -> _Quantisation | None:
        """How the operator that wrote the codes quantised them."""
        key = codes.key
        place = (key.site, key.slot)
        maker = flow.makers.get(place) if key.port == "input" else place
        call = None if maker is None else calls.get(maker[0])
        if maker is None or call is None:
            return None
        # Tensors first: an operator that takes its scale as a tensor also has a parameter, at its
        # default of 1.
        if call.kind != "linear" and (tensors := self._scale_tensors(call, codes)) is not None:
            return tensors
        param = flow.params.get(call.site, {})
        scale = _number(param, _SCALE_INPUTS)
        return _Quantisation(scale, _number(param, _OFFSET_INPUTS) or 0.0) if scale else None

    def _scale_tensors(self, call: Call, codes: Record) -> _Quantisation | None:
        """The scale, and optionally the zero point, that a quantising operator takes or returns."""
        token_scales = [
            record
            for record in call.records
            if record.key.port == "output"
            and record is not codes
            and record.dtype in ("float32", "float16")
        ]
        # One float for each token, returned together with the codes: dynamic quantisation.
        rows = math.prod(codes.shape[:-1])
        if len(token_scales) == 1 and math.prod(token_scales[0].shape) == rows:
            return _Quantisation(scale=token_scales[0])
        scale, offset = _operand_scale(call, codes)
        if scale is None:
            return None
        # A single scale becomes a number in the recipe, which any plan file can hold.
        if math.prod(scale.shape) == 1 and (number := self._value(scale)):
            zero = self._value(offset) if offset is not None else 0.0
            return None if zero is None else _Quantisation(number, zero)
        return _Quantisation(scale=scale, offset=offset)

    def _weight(
        self,
        codes: Record,
        call: Call,
        calls: Mapping[str, Call],
        flow: Dataflow,
        values: Source,
        earlier: Recipe | None,
    ) -> Recipe | None:
        """Recipe of a weight: the scale that its product takes, without the input's scale."""
        own = self._own_scale(call, calls, flow) if len(codes.shape) == 2 else None
        if own is None or own.why:
            return None
        scale: Source = own.record
        axis = 0 if codes.shape[0] == call.features else 1
        if (
            codes.shape[0] == codes.shape[1]
            and flow.params.get(call.site, {}).get("transposeB") is False
        ):  # [in, out], which the shape does not show
            axis = 1
        if own.packed:
            scale = Recipe((own.record,), (Step("lowfloat"),), own.record.shape)
        if earlier is not None:
            cut = next((step for step in earlier.steps if step.kind == "split"), None)
            # A part of the weight has its own scales only if it was cut along the scaled axis.
            if cut is None or len(earlier.steps) != 1 or cut.axis != axis:
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
        shape = codes.shape if earlier is None else earlier.shape
        return Recipe((values, scale), (Step("dequantise", axis, factor=own.factor),), shape)

    def _own_scale(
        self, call: Call, calls: Mapping[str, Call], flow: Dataflow
    ) -> WeightScale | None:
        """The scale that a product takes for its weight; None if it takes none."""
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
        if len(scales) > 1:  # a bias has the type of the result
            scales = [r for r in scales if r.dtype in ("uint64", "int64")] or [
                r for r in scales if r.dtype == "float32"
            ]
        if len(scales) != 1:
            return None
        packed = scales[0].dtype in ("uint64", "int64")
        fed = main_tensor(call.records, "input")
        # If the input is not a code, the scale belongs to the weight alone.
        if fed is None or fed.dtype not in CODES:
            return WeightScale(scales[0], packed)
        made = self._quantisation(fed, calls, flow)
        if made is None:
            return WeightScale(scales[0], packed, why=_FOR_BOTH)
        # Scales by column of the input are folded into the product and cannot be divided out.
        if made.scale is not None and made.scale.key.port == "input":
            return WeightScale(scales[0], packed, why=_BY_COLUMN)
        # A scale for each token is applied after the product, so it is not part of the weight's.
        return WeightScale(scales[0], packed, 1.0 / made.factor if made.scale is None else None)

    def weight_scale(self, record: Record) -> WeightScale | None:
        """The scale of a product's weight, if a tensor is one; otherwise None."""
        calls, flow = self._steps.at(record)
        operand = record if record.key.site in calls else self._steps.taken(record)
        call = None if operand is None else calls.get(operand.key.site)
        own = None if call is None else self._own_scale(call, calls, flow)
        return own if own is not None and own.record is operand else None

    def why_not(self, record: Record) -> str:
        """Why the scale that a product takes cannot be applied to its weight; empty if it can."""
        calls, flow = self._steps.at(record)
        operand = record if record.key.site in calls else self._steps.taken(record)
        call = None if operand is None else calls.get(operand.key.site)
        if operand is None or call is None or operand is main_tensor(call.records, "input"):
            return ""
        own = self._own_scale(call, calls, flow) if operand.key.port == "input" else None
        return "" if own is None else own.why

    def of_activation(self, record: Record, earlier: Recipe | None) -> Recipe | None:
        """Recipe for codes that were computed in the run; None for those of a weight."""
        calls, _ = self._steps.at(record)
        call = calls.get(record.key.site)
        if call is None or record.key.phase != "forward":
            return None
        if record.key.port == "input" and record is not main_tensor(call.records, "input"):
            return None
        return self.recipe(record, earlier) if record.key.port in ("input", "output") else None

    def _value(self, record: Record) -> float | None:
        """The number in a tensor of one element; None if it cannot be read."""
        try:
            return float(to_float64(self._run.raw(record).reshape(-1), DTYPES[record.dtype])[0])
        except (DriftlineError, OSError, ValueError, IndexError, KeyError):
            return None


def _operand_scale(call: Call, codes: Record) -> tuple[Record | None, Record | None]:
    """The inputs of an operator that are its scale and its zero point."""
    features = codes.shape[-1] if codes.shape else -1
    main = main_tensor(call.records, "input")
    vectors = [
        record
        for record in call.records
        if record.key.port == "input"
        and math.prod(record.shape) in (1, features)
        and record is not main
    ]
    floats = [record for record in vectors if "float" in record.dtype]
    single = [record for record in floats if math.prod(record.shape) == 1]
    zeros = [record for record in vectors if record.dtype in ("int8", "int32")]
    scale = single[0] if len(single) == 1 else None
    # A norm's weights have the same shape as scales, so only a single number is accepted there.
    if scale is None and not call.kind.startswith("norm") and len(floats) == 1:
        scale = floats[0]
    if scale is None:
        return None, None
    offset = zeros[0] if len(zeros) == 1 and zeros[0].shape == scale.shape else None
    return scale, offset


def _recipe_of_operator(values: Source, shape: tuple[int, ...], made: _Quantisation) -> Recipe:
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
    # A tensor of scales replaces the number in the step.
    factor = made.factor if made.scale is None else None
    step = Step("dequantise", axis, factor=factor, zero=made.zero)
    return Recipe(tuple(sources), (step,), shape)


def _number(param: Mapping[str, Any], names: tuple[str, ...]) -> float | None:
    """A numeric parameter, at the top or one level down (`quantParam`, `normParam`)."""
    levels = [param]
    for nested in param.values():
        if isinstance(nested, Mapping):
            levels.append(cast("Mapping[str, Any]", nested))
    for level in levels:
        for name in names:
            value = level.get(name)
            # A bool is an int in Python, but not a scale.
            if isinstance(value, int | float) and not isinstance(value, bool):
                return float(value) if math.isfinite(value) else None
    return None


# Unsigned integers store the output of a rectifier.


def with_rectified(
    plan: Plan, reference: ExportedGraph | None, candidate: ExportedGraph | None
) -> Plan:
    """The plan with negative values set to zero wherever the other side does not store them.

    The graph no longer shows whether a rectifier follows a module or is its end. The rectifier's
    output has no negative values, so rectifying again changes nothing.
    """
    stored = [graph.rectified if graph else frozenset[Tensor]() for graph in (reference, candidate)]
    if not any(stored):
        return plan
    pairs: list[Pair] = []
    for pair in plan.pairs:
        cut = place_of(pair.reference) in stored[0], place_of(pair.candidate) in stored[1]
        if cut == (False, True):
            recipe = _rectified(pair.reference, pair.reference_recipe)
            pair = pair._replace(reference_recipe=recipe)
        elif cut == (True, False):
            recipe = _rectified(pair.candidate, pair.candidate_recipe)
            pair = pair._replace(candidate_recipe=recipe)
        pairs.append(pair)
    return plan._replace(pairs=tuple(pairs))


def _rectified(record: Record, earlier: Recipe | None) -> Recipe:
    values, steps = ((record,), ()) if earlier is None else (earlier.sources, earlier.steps)
    shape = record.shape if earlier is None else earlier.shape
    return Recipe(values, (*steps, Step("rectify")), shape)


# Scales by name: writers of checkpoints and captures store them next to the values.

Shape = tuple[int, ...]

_MAYBE_CODES = (
    "uint8",
    "int32",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
)
"""Types that are codes if a scale is found for them, and plain numbers otherwise."""
# Names in the order in which they are tried, the most specific first.
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
    """Tensors of a run that may be scales or zero points, by place and name."""

    def __init__(self, run: Run) -> None:
        self._by_name: dict[tuple[int, int, str, str], list[Record]] = {}
        self._words = {word for words in (*_SCALES.values(), *_ZEROS.values()) for word in words}
        for record in run.records:
            for place, word in _named(record):
                if word in self._words:
                    key = (record.key.rank, record.key.process, place, word)
                    self._by_name.setdefault(key, []).append(record)

    def find(self, values: Record, words: Iterable[str]) -> Record | None:
        """The first tensor with one of these names next to the values, preferably of their step."""
        key = values.key
        for word in words:
            for place in _places(values):
                named = self._by_name.get((key.rank, key.process, place, word), ())
                # Activations have a scale in every step, weights have one for all steps.
                best = [record for record in named if record.key.step == key.step] or list(named)
                for record in best:
                    if record.key != key:
                        return record
        return None


def _named(record: Record) -> Iterator[tuple[str, str]]:
    """Place and name of a tensor, in every form that writers use."""
    key = record.key
    yield key.site, _plain(key.slot)
    if record.alias:
        yield key.site, _plain(record.alias)
    parent, _, last = key.site.rpartition(".")
    yield parent, _plain(last)


def _places(record: Record) -> Iterator[str]:
    """Places where a scale of these values may be: the same module, or its parent in a file."""
    site = record.key.site
    yield site
    yield site.rpartition(".")[0]


def _plain(name: str) -> str:
    return name.replace("_", "").replace(".", "").lower()


def dequantised(
    pair: Pair,
    reference_scales: Scales,
    candidate_scales: Scales,
    operators: tuple[OperatorScales, OperatorScales],
) -> Pair:
    """The pair with a recipe that dequantises its quantised side, or with the reason why not."""
    reference_dtype, candidate_dtype = (
        DTYPES.get(pair.reference.dtype),
        DTYPES.get(pair.candidate.dtype),
    )
    if (
        reference_dtype is None
        or candidate_dtype is None
        or reference_dtype.name == candidate_dtype.name
    ):
        return pair
    for side, dtype, other, scales, more in (
        ("reference", reference_dtype, candidate_dtype, reference_scales, operators[0]),
        ("candidate", candidate_dtype, reference_dtype, candidate_scales, operators[1]),
    ):
        is_code = dtype.name in CODES and other.kind == "float"
        may_be = dtype.name in _MAYBE_CODES and other.kind == "float" and other.bits > 8
        if not is_code and not may_be:
            continue
        record = pair.reference if side == "reference" else pair.candidate
        earlier = pair.reference_recipe if side == "reference" else pair.candidate_recipe
        # Packed weights already have their own recipe.
        if earlier is not None and any(step.kind == "dequantise" for step in earlier.steps):
            continue
        # Names first, because they are exact and need no dataflow.
        recipe = _recipe(record, earlier, scales) or more.recipe(record, earlier)
        if recipe is not None:
            return pair._replace(**{f"{side}_recipe": recipe})
        # Types that may be numbers stay unchanged; codes without a scale cannot be compared.
        if is_code:
            why = f"{dtype.name} against {other.name}, and "
            if obstacle := more.why_not(record):
                why += f"in the {side} {obstacle}; dump the operator that quantises the input too"
            else:
                why += (
                    f"the {side} has no scale of a fitting shape for it (looked for {LOOKED_FOR} "
                )
                why += f"at '{record.key.site}'); capture the scales too"
            return pair._replace(trouble=f"{why}, or write a dequantise step into a plan")
    return pair


def as_numbers(pair: Pair, operators: tuple[OperatorScales, OperatorScales]) -> Pair:
    """Codes of both sides as the numbers they represent, because their scales may differ.

    This applies only to codes that were computed in the run; codes of two weights are compared
    directly.
    """
    if pair.reference.dtype not in CODES or pair.candidate.dtype not in CODES:
        return pair
    reference_recipe = operators[0].of_activation(pair.reference, pair.reference_recipe)
    candidate_recipe = operators[1].of_activation(pair.candidate, pair.candidate_recipe)
    if reference_recipe is None or candidate_recipe is None:
        return pair
    return pair._replace(reference_recipe=reference_recipe, candidate_recipe=candidate_recipe)


def comparable_scales(pair: Pair, operators: tuple[OperatorScales, OperatorScales]) -> Pair:
    """Two scales of weights in the same terms: as floats, and without the scale of the input."""
    reference_scale = operators[0].weight_scale(pair.reference)
    candidate_scale = (
        operators[1].weight_scale(pair.candidate) if reference_scale is not None else None
    )
    if reference_scale is None or candidate_scale is None:
        return pair
    # If both include the scale of an input, they are in the same terms.
    unlike = reference_scale.factor != candidate_scale.factor
    if unlike and (reference_scale.why or candidate_scale.why):
        why = reference_scale.why or candidate_scale.why
        return pair._replace(trouble=f"scales of weights in different terms: {why}")
    if not unlike and reference_scale.packed == candidate_scale.packed:
        return pair
    recipes: list[Recipe | None] = []
    for scale, record, earlier in (
        (reference_scale, pair.reference, pair.reference_recipe),
        (candidate_scale, pair.candidate, pair.candidate_recipe),
    ):
        source: Source = record if earlier is None else earlier
        shape = source.shape
        if scale.packed:
            source = Recipe((source,), (Step("lowfloat"),), shape)
        if unlike and scale.factor is not None:
            source = Recipe((source,), (Step("dequantise", factor=scale.factor),), shape)
        recipes.append(source if isinstance(source, Recipe) else None)
    return pair._replace(reference_recipe=recipes[0], candidate_recipe=recipes[1])


def _recipe(record: Record, earlier: Recipe | None, scales: Scales) -> Recipe | None:
    role = _role(record)
    scale = scales.find(record, _SCALES[role])
    if scale is None or scale.dtype not in DTYPES or not DTYPES[scale.dtype].is_floating:
        return None
    values: Source = record if earlier is None else earlier
    shape = record.shape if earlier is None else earlier.shape
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
        return "weight"  # in a file of weights, all tensors are values without ports
    return "input" if key.port == "input" else "output"


def _axis(shape: Shape, scale: Shape, role: str) -> int | None:
    """Axis along which a list of scales applies; 0 if the scales broadcast by their own shape."""
    count = math.prod(scale)
    if count == 1:
        return 0
    # A weight's scales usually follow its outputs (the first axis), an output's follow its
    # features.
    if len([size for size in scale if size != 1]) == 1 and len(scale) != len(shape):
        last = len(shape) - 1
        order = (0, last) if role in ("weight", "input") else (last, 0)
        return next((axis for axis in order if shape and shape[axis] == count), None)
    # Scales of blocks: every axis of the values is a multiple of that of the scales.
    fits = len(scale) == len(shape) and all(
        size and length % size == 0 for length, size in zip(shape, scale, strict=True)
    )
    return 0 if fits else None
