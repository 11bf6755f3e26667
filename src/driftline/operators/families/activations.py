"""Activation functions, element by element, and the two that halve their input."""

from __future__ import annotations

import math

import numpy as np

from driftline.operators.families.calling import (
    AnyArray,
    Call,
    Definition,
    Result,
    Unfit,
    fits,
    one_of,
    real,
)

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
    axis = one_of(call.whole("dim", -1), x.ndim, "dim")
    values = np.concatenate([grad * b * slope, grad * a * sig], axis)
    scale = np.concatenate([np.abs(grad * b) * (1.0 + np.abs(a)), np.abs(grad * a)], axis)
    return [Result(values, call.out_dtype(call.at(1).dtype), 2, scale)]


def sigmoid(x: AnyArray) -> AnyArray:
    """1 / (1 + exp(-x)) without overflow."""
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


DEFINITIONS: dict[str, Definition] = {"Activation": activation}
