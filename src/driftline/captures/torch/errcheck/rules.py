"""The rule of the error check: which operator produced the first value that is not finite.

An operator is the *producer* when its inputs were finite, or infinite on purpose, and its output
was not. With something that is not finite and not deliberate among its inputs it only passes it on:
a *propagator*. Deliberate are numbers written into the call (`full(-inf)`, `masked_fill(-inf)`),
infinities that came from such a tensor, the lowest value of a 16-bit or wider format (masks are
filled with it: one step further down it is minus infinity), minus infinities that came with data,
and the logarithm of a mask of zeros and ones, or of positions. A NaN out of deliberate infinities
is nobody's intention, and is reported. So is what comes of a NaN that was written on purpose (a
missing value) as soon as a product, norm or softmax spreads it, and of an infinity that is a factor
in a product of matrices.

Reads no tensors: readings in, a verdict out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from driftline.captures.torch.errcheck.inspect import Origin, Reading
from driftline.numerics.dtypes import PATTERNS, Pattern

FindingType = Literal["nan", "inf", "saturation", "underflow"]
UNDERFLOW_SHARE = 0.1
"""Of an output's elements: so many zeros and subnormal numbers without a zero among the inputs."""

LOGARITHMS = frozenset({"log", "log_", "log2", "log2_", "log10", "log10_"})
CLAMPS = frozenset(
    {"clamp", "clamp_", "clamp_max", "clamp_max_", "clamp_min", "clamp_min_", "hardtanh"}
)
UNDERFLOWS = frozenset(
    (
        *("mul", "mul_", "div", "div_", "_to_copy", "pow", "square", "reciprocal", "mm", "bmm"),
        *("addmm", "addcmul", "addcdiv", "_foreach_mul", "_foreach_mul_", "_foreach_div"),
        *("_foreach_div_",),
    )
)
"""Operators whose zero from numbers that are none is a loss. Where zeros are the point (`relu`,
`dropout`, comparisons, `sub`, the far side of `exp` and `softmax`), they are none."""
_SUMS = frozenset({"addmm", "baddbmm", "addbmm", "addmv"})
_PRODUCTS = _SUMS | {"mm", "bmm", "mv", "dot", "convolution", "_scaled_mm"}
SPREADING = _PRODUCTS.union(
    ("_softmax", "_log_softmax", "native_layer_norm", "native_group_norm", "_fused_rms_norm"),
    ("native_batch_norm", "_native_batch_norm_legit", "cudnn_convolution", "mkldnn_convolution"),
    ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    ("_scaled_dot_product_efficient_attention",),
)
"""Operators that put one element of an input into many of an output."""
# Complex formats are left out: nobody clamps to the limit of a real part.
_NARROW_TOPS = {p.largest: p for p in PATTERNS.values() if p.narrow and p.reals == 1}


class Input(NamedTuple):
    """One tensor that an operator read.

    Attributes:
        name: The argument.
        reading: What stood in it before the call.
        origin: What is known of it.
        mask: It holds zeros and ones only, or positions.
    """

    name: str
    reading: Reading
    origin: Origin = Origin.UNKNOWN
    mask: bool = False


class Verdict(NamedTuple):
    """What an operator call was.

    Attributes:
        types: What it is found to have made; empty if nothing.
        origin: What its outputs are from now on; UNKNOWN where they are finite.
        entered: Inputs that were not finite and that nobody seen had made.
        propagates: It only handed on what a producer had made.
        reason: What else is worth saying.
        received: It came out of a collective.
    """

    types: tuple[FindingType, ...] = ()
    origin: Origin = Origin.UNKNOWN
    entered: tuple[str, ...] = ()
    propagates: bool = False
    reason: str = ""
    received: bool = False


class Numbers(NamedTuple):
    """Numbers written into a call.

    Attributes:
        nan: One of them is NaN.
        infinite: One of them is infinite.
        magnitudes: The magnitudes of the finite ones.
    """

    nan: bool = False
    infinite: bool = False
    magnitudes: tuple[float, ...] = ()


def judge(
    name: str,
    inputs: Sequence[Input],
    outputs: Sequence[Reading],
    numbers: Numbers | None,
    wanted: frozenset[str],
    *,
    allowed: bool = False,
) -> Verdict:
    """What one call was.

    Args:
        name: The operator without its namespace and overload: `log`.
        inputs: What it read.
        outputs: What it wrote.
        numbers: What was written into the call; None for a module, of which that is not known:
            minus infinities alone are then taken for a mask.
        wanted: Types of findings that are looked for.
        allowed: The user allows it whatever it makes.
    """
    if numbers is None:
        numbers = Numbers(infinite=not any(output.pos_inf for output in outputs))
    if any(output.nonfinite for output in outputs):
        verdict = _not_finite(name, inputs, outputs, numbers, wanted, allowed=allowed)
        # Saturation beside a NaN is not worth a second finding.
        if verdict.types or verdict.origin in (Origin.MADE, Origin.RAW):
            return verdict
    else:
        verdict = Verdict()
    if allowed:
        return verdict
    more: list[FindingType] = []
    reason = ""
    if "saturation" in wanted:
        reason = _saturation(name, inputs, outputs, numbers)
        if reason:
            more.append("saturation")
    if "underflow" in wanted and name in UNDERFLOWS:
        lost = _underflow(inputs, outputs, numbers)
        if lost:
            more.append("underflow")
            reason = "; ".join(filter(None, (reason, lost)))
    return verdict._replace(types=tuple(more), reason=reason) if more else verdict


def judge_module(
    inputs: Sequence[Input],
    outputs: Sequence[tuple[Reading, Origin]],
    wanted: frozenset[str],
    *,
    numbers: Numbers | None = None,
    inside: bool,
    earlier: bool,
    allowed: bool = False,
) -> Verdict:
    """What the call of a module was; or what an optimizer got from a backward pass.

    Args:
        inputs: What it read, and parameters of its own that are not finite.
        outputs: What it gave, and what is known of it: it may be what a module inside gave.
        wanted: Types of findings that are looked for.
        numbers: As in `judge`.
        inside: Something was found in it, or since: this is its consequence.
        earlier: Something was found before it began.
        allowed: The user allows it whatever it makes.
    """
    operands = list(inputs)
    if earlier:
        # What functions do between modules is not seen: it may be the consequence.
        operands = [
            operand._replace(origin=Origin.MADE) if operand.origin is Origin.UNKNOWN else operand
            for operand in operands
        ]
    if inside or any(origin is Origin.MADE for _, origin in outputs):
        operands += [Input("", reading, Origin.MADE) for reading, _ in outputs]
    readings = [
        reading for reading, origin in outputs if origin not in (Origin.MEANT, Origin.ALLOWED)
    ]
    return judge("", operands, readings, numbers, wanted, allowed=allowed)


def _not_finite(
    name: str,
    inputs: Sequence[Input],
    outputs: Sequence[Reading],
    numbers: Numbers,
    wanted: frozenset[str],
    *,
    allowed: bool,
) -> Verdict:
    strange = [operand for operand in inputs if operand.reading.nonfinite]
    verdict = _inherited(strange, wanted, allowed=allowed)
    if verdict is not None:
        return verdict
    written_nan = any(operand.reading.nan for operand in strange)
    factors = _infinite_factors(name, strange)
    made: list[FindingType] = []
    meant_nan = numbers.nan or (written_nan and name not in SPREADING)
    if any(output.nan for output in outputs) and not meant_nan and "nan" in wanted:
        made.append("nan")
    infinite = any(output.infinite for output in outputs)
    if infinite and "inf" in wanted and not _is_meant_infinite(name, inputs, outputs, numbers):
        made.append("inf")
    if not made:
        return Verdict(origin=Origin.MEANT)
    reason = ""
    if written_nan:
        reason = "out of a NaN that the program wrote there itself"
    elif factors:
        reason = "out of an infinity that the program wrote there itself"
    elif "nan" in made and strange:
        reason = "out of deliberate infinities: is everything in a row masked?"
    return Verdict(tuple(made), Origin.MADE, reason=reason)


def _inherited(
    strange: Sequence[Input], wanted: frozenset[str], *, allowed: bool
) -> Verdict | None:
    """The verdict where an input says it all; None where the call itself has to be judged."""
    origins = {operand.origin for operand in strange}
    # The order matters: a consequence of a finding stays one, whatever else came in.
    if Origin.MADE in origins:
        return Verdict(origin=Origin.MADE, propagates=True)
    if allowed or Origin.ALLOWED in origins:
        return Verdict(origin=Origin.ALLOWED)
    if Origin.RAW in origins:
        return Verdict(origin=Origin.RAW)
    entered = tuple(operand for operand in strange if _came_in(operand))
    return _entered(entered, wanted) if entered else None


def _infinite_factors(name: str, strange: Sequence[Input]) -> list[Input]:
    """Inputs that are not finite and factors of a product; the sum beside it is none."""
    if name not in _PRODUCTS:
        return []
    return [operand for operand in strange if not (name in _SUMS and operand.name == "self")]


def _is_meant_infinite(
    name: str, inputs: Sequence[Input], outputs: Sequence[Reading], numbers: Numbers
) -> bool:
    """Whether an infinity among the outputs is deliberate."""
    factors = _infinite_factors(name, [operand for operand in inputs if operand.reading.nonfinite])
    return (
        numbers.infinite
        or any(operand.reading.infinite for operand in inputs if operand not in factors)
        or _below_the_lowest(inputs, outputs)
        or (name in LOGARITHMS and any(operand.mask for operand in inputs))
    )


def _came_in(operand: Input) -> bool:
    """Not finite, of unknown origin, and more than the minus infinities of a mask."""
    # Minus infinities alone are how masks come with data.
    strange = bool(operand.reading.nan or operand.reading.pos_inf)
    return operand.origin in (Origin.UNKNOWN, Origin.RECEIVED) and strange


def _entered(entered: Sequence[Input], wanted: frozenset[str]) -> Verdict:
    types: list[FindingType] = []
    if "nan" in wanted and any(operand.reading.nan for operand in entered):
        types.append("nan")
    if "inf" in wanted and any(operand.reading.infinite for operand in entered):
        types.append("inf")
    if not types:
        return Verdict(origin=Origin.MEANT)
    names = tuple(operand.name for operand in entered)
    received = any(operand.origin is Origin.RECEIVED for operand in entered)
    reason = "a collective left it there: another rank made it, or the sum" if received else ""
    return Verdict(tuple(types), Origin.MADE, names, reason=reason, received=received)


def _below_the_lowest(inputs: Sequence[Input], outputs: Sequence[Reading]) -> bool:
    """Minus infinities only, from a mask that was filled with the lowest finite value."""
    if any(operand.pos_inf for operand in outputs):
        return False
    return any(operand.reading.bottom and operand.reading.pattern.bits >= 16 for operand in inputs)


def _saturation(
    name: str, inputs: Sequence[Input], outputs: Sequence[Reading], numbers: Numbers
) -> str:
    """Why an operator is said to saturate; empty if it does not."""
    if name in CLAMPS:
        return _clamped(inputs, numbers)
    for out in outputs:
        pattern = out.pattern
        if not pattern.narrow or not (out.top or out.bottom):
            continue
        handed_on = any(
            (operand.reading.top if out.top else operand.reading.bottom)
            and operand.reading.pattern.name == pattern.name
            for operand in inputs
        )
        masked = not out.top and any(
            operand.reading.bottom or operand.reading.neg_inf for operand in inputs
        )
        if handed_on or masked or pattern.largest in numbers.magnitudes:
            continue
        # A conversion rounds; only what is clearly beyond the limit was cut.
        if name in ("_to_copy", "copy_", "copy") and not _beyond(inputs, pattern.largest, pattern):
            continue  # it was exactly this number, or rounded to it
        return f"at the largest value of {pattern.name}, {pattern.largest:g}"
    return ""


def _clamped(inputs: Sequence[Input], numbers: Numbers) -> str:
    """Cut at the top of a narrow format, as those who convert to it do."""
    for bound in numbers.magnitudes:
        pattern = _NARROW_TOPS.get(bound)
        if pattern is not None and _beyond(inputs[:1], bound, pattern):
            return f"values were cut at {bound:g}, the largest of {pattern.name}"
    return ""


def _beyond(inputs: Sequence[Input], bound: float, pattern: Pattern) -> bool:
    """Whether an input is so far beyond a format's largest value that it would not round to it."""
    # Half a unit in the last place beyond the largest value still rounds to it.
    limit = bound * (1 + 2.0 ** -(pattern.mantissa + 2))
    return any(
        not math.isnan(operand.reading.peak) and operand.reading.peak > limit for operand in inputs
    )


def _underflow(inputs: Sequence[Input], outputs: Sequence[Reading], numbers: Numbers) -> str:
    """How much was lost to zero; empty where it is too little, or somebody's intention."""
    if 0.0 in numbers.magnitudes or numbers.infinite or not inputs:
        return ""
    for out in outputs:
        if out.zero < 0 or not out.elements:
            continue
        small = out.zero + out.subnormal
        for operand in inputs:
            reading = operand.reading
            # Counts of other formats cannot be subtracted from each other.
            if reading.zero < 0 or reading.pattern.reals != out.pattern.reals:
                return ""  # whole numbers, perhaps a mask; or imaginary parts that come into being
            if not reading.elements:
                continue
            zeros = reading.zero + reading.subnormal
            # A broadcast input puts each of its zeros into several outputs.
            small -= zeros * max(1, out.elements // reading.elements)
        if small > 0 and small >= UNDERFLOW_SHARE * out.elements:
            return f"{100 * small / out.elements:.0f} % of its elements became zero or subnormal"
    return ""
