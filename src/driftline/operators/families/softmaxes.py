"""Softmax, and the packed operators of training: softmax, its gradient, the attention mask.

Packed means: for each sequence, `headNum` square blocks of its own length, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from driftline.operators.families.calling import (
    AnyArray,
    Call,
    Definition,
    Result,
    bounded,
    fits,
    one_of,
    real,
)


def softmax(call: Call) -> list[Result]:
    """exp(x) / sum(exp(x)) over the named axes together."""
    x = call.at(0, "x")
    axes = tuple(one_of(axis, x.values.ndim, "axes") for axis in call.wholes("axes"))
    return [Result(softmax_of(real(x), axes), call.out_dtype(x.dtype))]


def softmax_of(values: AnyArray, axes: tuple[int, ...]) -> AnyArray:
    raised = np.exp(values - values.max(axes, keepdims=True))
    return raised / raised.sum(axes, keepdims=True)


def _blocks(call: Call, size: int, name: str) -> Iterator[slice]:
    """Where the rows of each block lie, each slice one sequence with all its heads."""
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
    found = np.empty_like(values)
    for place, length in zip(_blocks(call, values.size, "qSeqLen"), lengths, strict=True):
        found[place] = softmax_of(values[place].reshape(-1, length), (1,)).reshape(-1)
    return [Result(found.reshape(x.values.shape), call.out_dtype(x.dtype))]


def fast_softmax_grad(call: Call) -> list[Result]:
    """y · (dy - sum(y · dy)) for each row of the softmax y and the gradient dy behind it."""
    y, grad = call.at(0, "y"), call.at(1, "gradient")
    values, slopes = real(y).reshape(-1), real(grad).reshape(-1)
    fits(values.size == slopes.size, f"{values.size} results, but {slopes.size} gradients")
    lengths = call.wholes("qSeqLen")
    found, scale = np.empty_like(values), np.empty_like(values)
    for place, length in zip(_blocks(call, values.size, "qSeqLen"), lengths, strict=True):
        rows, dy = values[place].reshape(-1, length), slopes[place].reshape(-1, length)
        total = (rows * dy).sum(1, keepdims=True)
        spread = np.sqrt(((rows * dy) ** 2).sum(1, keepdims=True))
        found[place] = (rows * (dy - total)).reshape(-1)
        scale[place] = (np.abs(rows) * (np.abs(dy) + spread)).reshape(-1)
    terms = max(lengths) + 1
    return [Result(found.reshape(y.values.shape), call.out_dtype(y.dtype), terms, scale)]


def attention_mask(call: Call) -> list[Result]:
    """The corner of each sequence's mask, once for every head, packed."""
    mask = call.at(0, "mask")
    heads = call.whole("headNum", 1)
    found: list[AnyArray] = []
    for number, length in enumerate(call.wholes("seqLen")):
        fits(
            mask.values.ndim == 4 and number < mask.values.shape[0],
            f"the mask {list(mask.values.shape)} has no sequence {number}",
        )
        fits(length <= min(mask.values.shape[2:]), f"seqLen {length} is longer than the mask")
        bounded((sum(map(len, found)) + length * length) * max(heads, 1), "the result")
        corner = mask.values[number, 0, :length, :length].reshape(-1)
        found += [corner] * heads
    values = np.concatenate(found) if found else mask.values[:0].reshape(-1)
    return [Result(values, call.out_dtype(mask.dtype), exact=True)]


DEFINITIONS: dict[str, Definition] = {
    "FastSoftMax": fast_softmax,
    "FastSoftMaxGrad": fast_softmax_grad,
    "GenAttentionMask": attention_mask,
    "Softmax": softmax,
}
