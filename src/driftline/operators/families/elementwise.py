"""Arithmetic, comparisons and quantisation, element by element."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from driftline.operators.families.calling import (
    ACL_DTYPES,
    AnyArray,
    Call,
    Definition,
    Result,
    Tensor,
    Unfit,
    is_float,
    real,
    spread,
)

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
    spread(*(each.values for each in call.inputs if each.values.size))
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
    if is_float(x.dtype) and not is_float(dtype):
        return Result(np.trunc(x.values), dtype)
    return Result(x.values, dtype, exact=not is_float(x.dtype) and not is_float(dtype))


def _arithmetic(
    call: Call, function: Callable[[AnyArray, AnyArray], AnyArray], x: Tensor, y: Tensor
) -> Result:
    dtype = call.out_dtype(x.dtype)
    if is_float(x.dtype) or is_float(y.dtype):
        return Result(function(real(x), real(y)), dtype)
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
    """Rows with a scale of their own, and an offset if they are not symmetric."""
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


DEFINITIONS: dict[str, Definition] = {"Elewise": elewise}
