"""Norms and softmaxes: alone, after the addition of a residual, quantised, or packed."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from driftline.operators.definitions.call import (
    AnyArray,
    Call,
    Definition,
    Result,
    Unfit,
    bounded,
    fits,
    one_of,
    real,
)
from driftline.operators.definitions.elementwise import dynamically_quantised, quantised

_NORM, _PRE, _POST = 1, 2, 3
_INT8 = 2
_GEMMA = 1


def rms_norm(call: Call) -> list[Result]:
    """x / sqrt(mean(x²) + epsilon) · gamma over the last dimension."""
    kind = call.whole("layerType", 0)
    if kind == _NORM:
        return _rms_alone(call.group("normParam"))
    if kind in (_PRE, _POST):
        return _rms_behind_residual(
            call.group("preNormParam" if kind == _PRE else "postNormParam"), pre=kind == _PRE
        )
    raise Unfit(f"layerType {kind} is not known")


def _rms_alone(call: Call) -> list[Result]:
    x = call.at(0, "x")
    # Without gamma the result can be shown but not judged.
    if len(call.inputs) == 1 and not call.whole("quantType", 0):
        values, _ = _rms(real(x), np.ones(x.values.shape[-1:]), call.number("epsilon", 1e-5))
        return [Result(values, call.out_dtype(x.dtype), note="gamma is not there; 1 was taken")]
    gamma = real(call.at(1, "gamma"))
    # Gemma stores its weights minus one.
    if call.whole("modelType", 0) == _GEMMA:
        gamma = gamma + 1.0
    values, rstd = _rms(real(x), gamma, call.number("epsilon", 1e-5))
    quantised_by = call.whole("quantType", 0)
    if call.whole("dynamicQuantType", 0):
        if len(call.inputs) > 2:
            values = values + real(call.at(2, "beta"))
        return dynamically_quantised(values)
    if quantised_by == _INT8:
        return [_int8(call, values + real(call.at(2, "beta")), 3)]
    fits(quantised_by == 0, f"quantType {quantised_by} is not known")
    dtype = call.out_dtype(x.dtype)
    # Intermediate results in float16, where the parameters ask for it, cost two more roundings.
    rough = call.whole("precisionMode", 0) == 1
    outputs = [Result(values, dtype, 2, np.abs(values)) if rough else Result(values, dtype)]
    if call.flag("rstd", False):
        outputs.append(Result(rstd, call.out_dtype("float32", 1)))
    return outputs


def _rms_behind_residual(call: Call, *, pre: bool) -> list[Result]:
    x, residual = call.at(0, "x"), call.at(1, "residual")
    total = real(x) + real(residual)
    # The addition is rounded before the norm: its terms' size passes through the norm.
    size = np.abs(real(x)) + np.abs(real(residual))
    place = 2
    if call.flag("hasBias", False):
        bias = real(call.at(2, "bias"))
        total, size, place = total + bias, size + np.abs(bias), 3
    gamma = real(call.at(place, "gamma"))
    values, rstd = _rms(total, gamma, call.number("epsilon", 1e-5))
    scale = size * rstd * np.abs(gamma)
    if call.whole("quantType", 0) == _INT8:
        outputs = [_int8(call, values + real(call.at(place + 1, "beta")), place + 2)]
    else:
        outputs = [Result(values, call.out_dtype(x.dtype), 2, scale)]
    if pre:
        outputs.append(Result(total, call.out_dtype(x.dtype, 1), 2, size))
    return outputs


def _rms(x: AnyArray, gamma: AnyArray, epsilon: float) -> tuple[AnyArray, AnyArray]:
    width = x.shape[-1] if x.ndim else 0
    fits(width > 0 and gamma.size == width, f"gamma has {gamma.size} elements, rows have {width}")
    rstd = 1.0 / np.sqrt(np.mean(x * x, -1, keepdims=True) + epsilon)
    return x * rstd * gamma.reshape(-1), rstd


def _int8(call: Call, values: AnyArray, place: int) -> Result:
    scale, offset = real(call.at(place, "scale")), real(call.at(place + 1, "offset"))
    return Result(quantised(values, scale, offset), call.out_dtype("int8"))


def layer_norm(call: Call) -> list[Result]:
    """(x - mean) / sqrt(variance + epsilon) · gamma + beta."""
    kind = call.whole("layerType", 0)
    if kind == _NORM:
        return _layer_alone(call.group("normParam"))
    if kind in (_PRE, _POST):
        return _layer_behind_residual(
            call.group("preNormParam" if kind == _PRE else "postNormParam"), pre=kind == _PRE
        )
    raise Unfit(f"layerType {kind} is not known")


def _layer_alone(call: Call) -> list[Result]:
    x = call.at(0, "x")
    values = real(x)
    axis = one_of(call.whole("beginNormAxis", 0), max(values.ndim, 1), "beginNormAxis")
    normed, scale = _layer(call, values, np.abs(values), axis, 1)
    if call.whole("dynamicQuantType", 0):
        return dynamically_quantised(normed)
    if call.whole("quantType", 0) == _INT8:
        return [_int8(call, normed, 3)]
    return [Result(normed, call.out_dtype(x.dtype), 2, scale)]


def _layer_behind_residual(call: Call, *, pre: bool) -> list[Result]:
    x, residual = call.at(0, "x"), call.at(1, "residual")
    added = real(residual) * call.number("zoomScaleValue", 1.0)
    total = real(x) + added
    size = np.abs(real(x)) + np.abs(added)
    normed, scale = _layer(call, total, size, max(total.ndim - 1, 0), 2)
    dtype = call.out_dtype(x.dtype)
    plain = Result(normed, dtype, 2, scale)
    if pre:
        return [plain, Result(total, call.out_dtype(x.dtype, 1), 2, size)]
    if call.whole("quantType", 0) == _INT8:
        return [_int8(call, normed, 4), plain._replace(dtype=call.out_dtype(x.dtype, 1))]
    return [plain]


def _layer(
    call: Call, x: AnyArray, size: AnyArray, axis: int, place: int
) -> tuple[AnyArray, AnyArray]:
    axes = tuple(range(axis, x.ndim))
    width = math.prod(x.shape[axis:])
    gamma, beta = real(call.at(place, "gamma")), real(call.at(place + 1, "beta"))
    fits(
        gamma.size == beta.size == width,
        f"gamma and beta have {gamma.size} and {beta.size} elements, what is normed has {width}",
    )
    gamma, beta = gamma.reshape(x.shape[axis:]), beta.reshape(x.shape[axis:])
    mean = x.mean(axes, keepdims=True)
    rstd = 1.0 / np.sqrt(((x - mean) ** 2).mean(axes, keepdims=True) + call.number("epsilon", 1e-5))
    # If both are large, x - mean cancels, so rounding is proportional to their sizes.
    scale = (size + np.abs(mean)) * rstd * np.abs(gamma) + np.abs(beta)
    return (x - mean) * rstd * gamma + beta, scale


# Softmax, and the packed operators of training: softmax, its gradient, the attention mask.


def softmax(call: Call) -> list[Result]:
    """exp(x) / sum(exp(x)) over the named axes together."""
    x = call.at(0, "x")
    axes = tuple(one_of(axis, x.values.ndim, "axes") for axis in call.wholes("axes"))
    return [Result(softmax_of(real(x), axes), call.out_dtype(x.dtype))]


def softmax_of(values: AnyArray, axes: tuple[int, ...]) -> AnyArray:
    raised = np.exp(values - values.max(axes, keepdims=True))
    return raised / raised.sum(axes, keepdims=True)


def _blocks(call: Call, size: int, name: str) -> Iterator[slice]:
    """The elements of each block; a block is one sequence with all its heads."""
    heads = call.whole("headNum", 1)
    start = 0
    for length in call.wholes(name):
        fits(length > 0 and heads > 0, f"{name} {length} and headNum {heads} must be positive")
        yield slice(start, start + heads * length * length)
        start += heads * length * length
    fits(start == size, f"{name} and headNum give {start} elements, the tensor has {size}")


def fast_softmax(call: Call) -> list[Result]:
    x = call.at(0, "x")
    values = real(x).reshape(-1)
    lengths = call.wholes("qSeqLen")
    result = np.empty_like(values)
    for place, length in zip(_blocks(call, values.size, "qSeqLen"), lengths, strict=True):
        result[place] = softmax_of(values[place].reshape(-1, length), (1,)).reshape(-1)
    return [Result(result.reshape(x.values.shape), call.out_dtype(x.dtype))]


def fast_softmax_grad(call: Call) -> list[Result]:
    """y · (dy - sum(y · dy)) for each row of the softmax y and its gradient dy."""
    y, grad = call.at(0, "y"), call.at(1, "gradient")
    values, slopes = real(y).reshape(-1), real(grad).reshape(-1)
    fits(values.size == slopes.size, f"{values.size} results, but {slopes.size} gradients")
    lengths = call.wholes("qSeqLen")
    gradient, scale = np.empty_like(values), np.empty_like(values)
    for place, length in zip(_blocks(call, values.size, "qSeqLen"), lengths, strict=True):
        rows, dy = values[place].reshape(-1, length), slopes[place].reshape(-1, length)
        total = (rows * dy).sum(1, keepdims=True)
        # The sum runs over the whole row, so its errors reach every element of it.
        spread = np.sqrt(((rows * dy) ** 2).sum(1, keepdims=True))
        gradient[place] = (rows * (dy - total)).reshape(-1)
        scale[place] = (np.abs(rows) * (np.abs(dy) + spread)).reshape(-1)
    terms = max(lengths) + 1
    return [Result(gradient.reshape(y.values.shape), call.out_dtype(y.dtype), terms, scale)]


def attention_mask(call: Call) -> list[Result]:
    """The corner of each sequence's mask, once for every head, packed."""
    mask = call.at(0, "mask")
    heads = call.whole("headNum", 1)
    corners: list[AnyArray] = []
    for number, length in enumerate(call.wholes("seqLen")):
        fits(
            mask.values.ndim == 4 and number < mask.values.shape[0],
            f"the mask {list(mask.values.shape)} has no sequence {number}",
        )
        fits(length <= min(mask.values.shape[2:]), f"seqLen {length} is longer than the mask")
        bounded((sum(map(len, corners)) + length * length) * max(heads, 1), "the result")
        corner = mask.values[number, 0, :length, :length].reshape(-1)
        corners += [corner] * heads
    values = np.concatenate(corners) if corners else mask.values[:0].reshape(-1)
    return [Result(values, call.out_dtype(mask.dtype), exact=True)]


DEFINITIONS: dict[str, Definition] = {
    "LayerNorm": layer_norm,
    "RmsNorm": rms_norm,
    "FastSoftMax": fast_softmax,
    "FastSoftMaxGrad": fast_softmax_grad,
    "GenAttentionMask": attention_mask,
    "Softmax": softmax,
}
