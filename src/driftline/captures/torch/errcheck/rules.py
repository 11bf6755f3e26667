"""The rule of the error check: which operator produced the first value that is not finite.

An operator is the *producer* if its inputs were finite, or infinite on purpose, and its output was
not. If an input was not finite, and not on purpose, the operator only passes that on: it is a
*propagator*. These values are deliberate:

* numbers written into the call (`full(-inf)`, `masked_fill(-inf)`),
* infinities that came from such a tensor,
* the lowest value of a 16-bit or wider format, with which masks are filled: one step below it is
  minus infinity,
* minus infinities that came with data,
* the logarithm of a mask of zeros and ones, or of positions.

A NaN computed from deliberate infinities is not intended, and is reported. If a NaN was written on
purpose (a missing value), the results of a product, norm or softmax that spreads it are reported.
The same holds for an infinity that is a factor in a product of matrices.

This file reads no tensors; verdicts are made from readings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from driftline.captures.torch.errcheck.inspect import Origin, Reading
from driftline.numerics.dtypes import PATTERNS, Pattern

FindingType = Literal["nan", "inf", "saturation", "underflow"]
UNDERFLOW_SHARE = 0.1
"""Fraction of an output's elements that must have become zero or subnormal for an underflow."""

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
"""Operators for which a zero computed from non-zero numbers is a loss.

Operators that have zeros on purpose (`relu`, `dropout`, comparisons, `sub`, the far side of `exp`
and `softmax`) are not in it.
"""
_SUMS = frozenset({"addmm", "baddbmm", "addbmm", "addmv"})
_PRODUCTS = _SUMS | {"mm", "bmm", "mv", "dot", "convolution", "_scaled_mm"}
SPREADING = _PRODUCTS.union(
    ("_softmax", "_log_softmax", "native_layer_norm", "native_group_norm", "_fused_rms_norm"),
    ("native_batch_norm", "_native_batch_norm_legit", "cudnn_convolution", "mkldnn_convolution"),
    ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    ("_scaled_dot_product_efficient_attention",),
)
"""Operators in which one element of an input affects many elements of an output."""
# Complex formats are left out, because programs do not clamp to the limit of a real part.
_NARROW_TOPS = {p.largest: p for p in PATTERNS.values() if p.narrow and p.reals == 1}


class Input(NamedTuple):
    """One tensor that an operator read.

    Attributes:
        name: Name of the argument.
        reading: Its reading before the call.
        origin: The known origin of its values that are not finite.
        mask: Whether it is a mask of zeros and ones, or positions.
    """

    name: str
    reading: Reading
    origin: Origin = Origin.UNKNOWN
    mask: bool = False


class Verdict(NamedTuple):
    """The judgement of one call.

    Attributes:
        types: Types of the finding; empty if there is none.
        origin: Origin of its outputs from now on; UNKNOWN if they are finite.
        entered: Inputs that were not finite and that no observed operator had made.
        propagates: Whether it only passed on values that a producer had made.
        reason: Further explanation, or empty.
        received: Whether the values came from a collective.
    """

    types: tuple[FindingType, ...] = ()
    origin: Origin = Origin.UNKNOWN
    entered: tuple[str, ...] = ()
    propagates: bool = False
    reason: str = ""
    received: bool = False


class Numbers(NamedTuple):
    """The Python numbers among the arguments of a call.

    Attributes:
        nan: Whether one of them is NaN.
        infinite: Whether one of them is infinite.
        magnitudes: Magnitudes of the finite ones.
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
    """Judge one call.

    Args:
        name: The operator without its namespace and overload, such as `log`.
        inputs: The tensors that it read.
        outputs: Readings of the tensors that it wrote.
        numbers: Numbers among its arguments; None for a module, for which they are unknown. Then
            outputs whose only infinities are negative are assumed to be a mask.
        wanted: Types of findings to look for.
        allowed: Whether the user allows any result of it.
    """
    if numbers is None:
        numbers = Numbers(infinite=not any(output.pos_inf for output in outputs))
    if any(output.nonfinite for output in outputs):
        verdict = _not_finite(name, inputs, outputs, numbers, wanted, allowed=allowed)
        # Saturation next to a NaN is not reported.
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
    """Judge the call of a module, or the gradients that an optimizer got from a backward pass.

    Args:
        inputs: The tensors that it read, and its own parameters that are not finite.
        outputs: Its outputs with their known origins, because an inner module may have made them.
        wanted: Types of findings to look for.
        numbers: As in `judge`.
        inside: Whether there was a finding during the call, of which this is a consequence.
        earlier: Whether there was a finding before the call.
        allowed: Whether the user allows any result of it.
    """
    operands = list(inputs)
    if earlier:
        # Functions between modules are not observed, so an input may be a consequence of it.
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
    """The verdict if it follows from an input; None if the call itself has to be judged."""
    origins = {operand.origin for operand in strange}
    # The order matters: if one input is a consequence of a finding, the call is one too.
    if Origin.MADE in origins:
        return Verdict(origin=Origin.MADE, propagates=True)
    if allowed or Origin.ALLOWED in origins:
        return Verdict(origin=Origin.ALLOWED)
    if Origin.RAW in origins:
        return Verdict(origin=Origin.RAW)
    entered = tuple(operand for operand in strange if _came_in(operand))
    return _entered(entered, wanted) if entered else None


def _infinite_factors(name: str, strange: Sequence[Input]) -> list[Input]:
    """Inputs that are not finite and are factors of a product, not a term added to it."""
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
    """Whether an input has values from outside that are not finite and not only a mask's."""
    # Masks that come with data have only minus infinities.
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
    """Whether all infinities are negative and come from a mask with the lowest finite value."""
    if any(operand.pos_inf for operand in outputs):
        return False
    return any(operand.reading.bottom and operand.reading.pattern.bits >= 16 for operand in inputs)


def _saturation(
    name: str, inputs: Sequence[Input], outputs: Sequence[Reading], numbers: Numbers
) -> str:
    """The reason why an operator saturates; empty if it does not."""
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
        # A conversion rounds. If no input was clearly beyond the limit, the value was exactly the
        # limit or was rounded to it.
        if name in ("_to_copy", "copy_", "copy") and not _beyond(inputs, pattern.largest, pattern):
            continue
        return f"at the largest value of {pattern.name}, {pattern.largest:g}"
    return ""


def _clamped(inputs: Sequence[Input], numbers: Numbers) -> str:
    """The reason why a clamp saturates; empty if it does not.

    Programs clamp to the largest value of a narrow format before they convert to it.
    """
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
    """The reason why a call underflows; empty if too few elements did, or on purpose."""
    if 0.0 in numbers.magnitudes or numbers.infinite or not inputs:
        return ""
    for out in outputs:
        if out.zero < 0 or not out.elements:
            continue
        small = out.zero + out.subnormal
        for operand in inputs:
            reading = operand.reading
            # Zeros are not counted in integers, which may be a mask; and those of real and complex
            # tensors cannot be compared.
            if reading.zero < 0 or reading.pattern.reals != out.pattern.reals:
                return ""
            if not reading.elements:
                continue
            zeros = reading.zero + reading.subnormal
            # In a broadcast input each zero affects several elements of the output.
            small -= zeros * max(1, out.elements // reading.elements)
        if small > 0 and small >= UNDERFLOW_SHARE * out.elements:
            return f"{100 * small / out.elements:.0f} % of its elements became zero or subnormal"
    return ""
