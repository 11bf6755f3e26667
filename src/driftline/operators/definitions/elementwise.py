"""Element-wise operators: activations, arithmetic, comparisons and quantisation."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from driftline.operators.definitions.call import (
    ACL_DTYPES,
    AnyArray,
    Call,
    Definition,
    Result,
    Tensor,
    Unfit,
    fits,
    is_float,
    one_of,
    real,
    spread,
)

# Numbers of `activationType`, as parameters of ATB have them.
_RELU, _GELU, _FAST_GELU, _SWISH, _LOG, _SWIGLU, _SWIGLU_BACKWARD, _SIGMOID, _FASTER = range(1, 10)
_EXACT_GELU = 1


def activation(call: Call) -> list[Result]:
    """One of nine functions, chosen by `activationType`."""
    kind = call.whole("activationType", 0)
    x = call.at(0, "x")
    dtype = call.out_dtype(x.dtype)
    values = real(x)
    if kind == _RELU:
        return [Result(np.maximum(values, 0.0), dtype, exact=x.dtype == dtype)]
    if kind == _GELU:
        # `geluMode` 1 asks for erf; everything else for the tanh approximation.
        exact = call.whole("geluMode", 0) == _EXACT_GELU
        # 1 + erf(...) and 1 + tanh(...) lose digits for negative x, and both add a few roundings.
        # In float32 erf itself is off by a few units in common libraries.
        size = np.abs(values) * (2.0 if dtype == "float32" else 1.0)
        return [Result(gelu(values) if exact else gelu_tanh(values), dtype, 4, size)]
    if kind == _FAST_GELU:
        return [Result(fast_gelu(values), dtype)]
    if kind == _SWISH:
        return [Result(values * sigmoid(values * call.number("scale", 1.0)), dtype)]
    if kind == _LOG:
        return [Result(np.log(values), dtype, 2, np.ones_like(values))]
    if kind == _SWIGLU:
        a, b = _halves(call, values)
        return [Result(a * sigmoid(a) * b, dtype)]
    if kind == _SWIGLU_BACKWARD:
        return _swiglu_backward(call)
    if kind == _SIGMOID:
        return [Result(sigmoid(values), dtype)]
    if kind == _FASTER:
        return [Result(values * sigmoid(1.702 * values), dtype)]
    raise Unfit(f"activationType {kind} is not known")


def _halves(call: Call, values: AnyArray) -> tuple[AnyArray, AnyArray]:
    axis = one_of(call.whole("dim", -1), values.ndim, "dim")
    fits(
        values.shape[axis] % 2 == 0, f"dimension {axis} of size {values.shape[axis]} has no halves"
    )
    a, b = np.split(values, 2, axis)
    return a, b


def _swiglu_backward(call: Call) -> list[Result]:
    """Gradient of silu(a) * b, where a and b are the halves of the second input."""
    grad, x = real(call.at(0, "gradient")), real(call.at(1, "x"))
    a, b = _halves(call, x)
    fits(grad.shape == a.shape, f"gradient {list(grad.shape)} is no half of {list(x.shape)}")
    sig = sigmoid(a)
    slope = sig * (1.0 + a * (1.0 - sig))
    # 1 - sigmoid(a) loses digits for large a, in proportion to a.
    axis = one_of(call.whole("dim", -1), x.ndim, "dim")
    values = np.concatenate([grad * b * slope, grad * a * sig], axis)
    scale = np.concatenate([np.abs(grad * b) * (1.0 + np.abs(a)), np.abs(grad * a)], axis)
    return [Result(values, call.out_dtype(call.at(1).dtype), 2, scale)]


def sigmoid(x: AnyArray) -> AnyArray:
    """1 / (1 + exp(-x)) without overflow."""
    # exp of a negative number cannot overflow; both branches share it.
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, small) / (1.0 + small)


def gelu_tanh(x: AnyArray) -> AnyArray:
    # 1 + tanh(z) = 2 sigmoid(2z), which keeps its digits for large negative z.
    return x * sigmoid(2.0 * math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))


def gelu(x: AnyArray) -> AnyArray:
    tail = np.fromiter(map(math.erfc, (-x / math.sqrt(2.0)).reshape(-1)), np.float64, x.size)
    return 0.5 * x * tail.reshape(x.shape)


def fast_gelu(x: AnyArray) -> AnyArray:
    return x * np.exp(0.851 * (x - np.abs(x))) / (1.0 + np.exp(-1.702 * np.abs(x)))


# Arithmetic, comparisons and quantisation, chosen by `elewiseType`.


_CAST, _MULS, _COS, _SIN, _NEG, _QUANT, _NOT, _ADD, _MUL, _DIV = range(1, 11)
_AND, _OR, _LESS, _GREATER, _SUB, _EQUAL, _QUANT_CHANNEL, _DEQUANT_CHANNEL = range(11, 19)
_DYNAMIC_QUANT, _TANH = 19, 20

_ONE: dict[int, Callable[[AnyArray], AnyArray]] = {_COS: np.cos, _SIN: np.sin, _TANH: np.tanh}
_TWO: dict[int, Callable[[AnyArray, AnyArray], AnyArray]] = {
    _ADD: np.add,
    _MUL: np.multiply,
    _SUB: np.subtract,
}
_JUDGED: dict[int, Callable[[AnyArray, AnyArray], AnyArray]] = {
    _AND: np.logical_and,
    _OR: np.logical_or,
    _LESS: np.less,
    _GREATER: np.greater,
    _EQUAL: np.equal,
}


def elewise(call: Call) -> list[Result]:
    """One of twenty functions, chosen by `elewiseType`."""
    kind = call.whole("elewiseType", 0)
    x = call.at(0, "x")
    # All inputs must broadcast to a result of bounded size before anything is computed.
    spread(*(tensor.values for tensor in call.inputs if tensor.values.size))
    if kind == _CAST:
        return [_cast(call, x)]
    if kind == _MULS:
        factor = call.group("mulsParam").number("varAttr", 0.0)
        return [Result(real(x) * factor, call.out_dtype(x.dtype))]
    if kind in _ONE:
        # Arguments are reduced modulo pi first: that costs digits in proportion to the argument.
        size = np.maximum(1.0, np.abs(real(x))) if kind != _TANH else None
        return [
            Result(_ONE[kind](real(x)), call.out_dtype(x.dtype), 2 if size is not None else 1, size)
        ]
    if kind == _NEG:
        return [Result(-x.values, call.out_dtype(x.dtype), exact=True)]
    if kind == _NOT:
        return [Result(~(x.values != 0), call.out_dtype("bool"), exact=True)]
    if kind in _TWO:
        return [_arithmetic(call, _TWO[kind], x, call.at(1, "y"))]
    if kind == _DIV:
        return [Result(real(x) / real(call.at(1, "y")), call.out_dtype(x.dtype))]
    if kind in _JUDGED:
        # Logical operators compare with zero, comparisons take the values themselves.
        y = call.at(1, "y")
        left, right = (x.values, y.values) if kind > _OR else (x.values != 0, y.values != 0)
        return [Result(_JUDGED[kind](left, right), call.out_dtype("int8"), exact=True)]
    if kind == _QUANT:
        group = call.group("quantParam")
        scale, offset = group.number("inputScale", 1.0), group.whole("inputOffset", 0)
        return [Result(quantised(real(x), np.asarray(scale), np.asarray(offset)), "int8")]
    if kind == _QUANT_CHANNEL:
        scale, offset = real(call.at(1, "scale")), _offset(call)
        return [Result(quantised(real(x), scale, offset), call.out_dtype("int8"))]
    if kind == _DEQUANT_CHANNEL:
        scale = call.at(1, "scale")
        values = (real(x) - _offset(call)) * real(scale)
        return [Result(values, call.out_dtype(scale.dtype))]
    if kind == _DYNAMIC_QUANT:
        asymmetric = call.group("quantParam").flag("asymmetric", False)
        return dynamically_quantised(real(x), asymmetric)
    raise Unfit(f"elewiseType {kind} is not known")


def _cast(call: Call, x: Tensor) -> Result:
    wanted = call.whole("outTensorType", -1)
    usual = ACL_DTYPES.get(wanted, "")
    dtype = call.out_dtype(usual)
    if not dtype:
        raise Unfit(f"outTensorType {wanted} is no element type that is known")
    # Conversion to integers truncates, as in C.
    if is_float(x.dtype) and not is_float(dtype):
        return Result(np.trunc(x.values), dtype)
    return Result(x.values, dtype, exact=not is_float(x.dtype) and not is_float(dtype))


def _arithmetic(
    call: Call, function: Callable[[AnyArray, AnyArray], AnyArray], x: Tensor, y: Tensor
) -> Result:
    dtype = call.out_dtype(x.dtype)
    if is_float(x.dtype) or is_float(y.dtype):
        return Result(function(real(x), real(y)), dtype)
    # Wide integers, so that sums and products of narrow ones do not overflow on the way.
    wide = np.int64 if x.dtype != "uint64" else np.uint64
    return Result(function(x.values.astype(wide), y.values.astype(wide)), dtype, exact=True)


def _offset(call: Call) -> AnyArray:
    """The third input; an empty one means none."""
    if len(call.inputs) < 3 or not call.inputs[2].values.size:
        return np.zeros(())
    return real(call.inputs[2])


def quantised(values: AnyArray, scale: AnyArray, offset: AnyArray) -> AnyArray:
    """The nearest step of an int8 scale, clamped to what int8 holds."""
    return np.clip(np.rint(values / scale + offset), -128, 127)


def dynamically_quantised(values: AnyArray, asymmetric: bool = False) -> list[Result]:
    """Rows quantised with a scale of their own, and an offset if they are not symmetric."""
    high, low = values.max(-1, keepdims=True), values.min(-1, keepdims=True)
    if asymmetric:
        scale = (high - low) / 255.0
        offset = -(high + low) / (2.0 * scale)
        steps = np.rint(np.clip(values / scale + offset, -128, 127))
        return [
            Result(_whole(steps), "int8"),
            Result(scale[..., 0], "float32"),
            Result(offset[..., 0], "float32", 2, ((np.abs(high) + np.abs(low)) / scale)[..., 0]),
        ]
    size = np.maximum(np.abs(high), np.abs(low))
    steps = np.rint(values * 127.0 / size)
    return [Result(_whole(steps), "int8"), Result((size / 127.0)[..., 0], "float32")]


def _whole(steps: AnyArray) -> AnyArray:
    """A row of zeros has scale 0 and stays a row of zeros."""
    return np.where(np.isnan(steps), 0.0, steps)


DEFINITIONS: dict[str, Definition] = {
    "Elewise": elewise,
    "Activation": activation,
}
