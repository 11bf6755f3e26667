"""Matrix products: linear layers in floating point and int8, batched and strided products.

The scale behind the growing bound is the root of the sum of the squared products.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from driftline.operators.definitions.call import (
    ACL_DTYPES,
    AnyArray,
    Call,
    Definition,
    Result,
    Tensor,
    bounded,
    fits,
    real,
)

_EIN_SUM = 1
_PER_TOKEN = 2


Sized: TypeAlias = Callable[[], AnyArray]
"""Computes the size of the terms of a product, which costs as much as the product itself."""


def product(x: AnyArray, y: AnyArray) -> tuple[AnyArray, Sized, int]:
    """A matrix product, the size of its terms, and their number."""
    fits(x.ndim >= 1 and y.ndim >= 1, "a matrix product needs matrices")
    inner = y.shape[-2] if y.ndim > 1 else y.shape[0]
    if x.shape[-1] < inner and y.ndim > 1 and not y[..., x.shape[-1] :, :].any():
        y = y[..., : x.shape[-1], :]  # a weight that was stored in tiles is padded with zeros
        inner = x.shape[-1]
    fits(
        x.shape[-1] == inner,
        f"{list(x.shape)} times {list(y.shape)}: {x.shape[-1]} columns, but {inner} rows",
    )
    rows = x.shape[-2] if x.ndim > 1 else 1
    # The size of the product is checked before it is computed.
    batches = math.prod(np.broadcast_shapes(x.shape[:-2], y.shape[:-2]))
    bounded(batches * rows * (y.shape[-1] if y.ndim > 1 else 1), "the product")
    return np.matmul(x, y), lambda: np.sqrt(np.matmul(x * x, y * y)), int(inner)


def _turned(values: AnyArray, turn: bool) -> AnyArray:
    return np.swapaxes(values, -1, -2) if turn and values.ndim > 1 else values


def factors(call: Call, turn_x: bool, turn_y: bool) -> tuple[AnyArray, AnyArray]:
    """The first two inputs, transposed as asked; a weight of one batch is a plain matrix."""
    x, y = real(call.at(0, "x")), real(call.at(1, "weight"))
    if y.ndim == 3 and y.shape[0] == 1 and x.ndim != 3:
        y = y[0]
    return _turned(x, turn_x), _turned(y, turn_y)


def linear(call: Call) -> list[Result]:
    """x · weight (+ bias), with weights stored transposed unless the parameters say otherwise."""
    if call.whole("matmulType", 0) == _EIN_SUM:
        return _einsum(call)
    x, y = factors(call, call.flag("transposeA", False), call.flag("transposeB", True))
    # Integer weights or inputs mean the quantised layer, which has scales instead of a bias.
    if call.at(0).dtype == "int8" or call.at(1).dtype == "int8":
        return [_dequantised(call, x, y)]
    values, scale, terms = product(x, y)
    usual = call.at(0).dtype
    if call.flag("enAccum", False):
        added = call.at(2, "accumulated")
        usual = added.dtype
    elif call.flag("hasBias", len(call.inputs) > 2):
        added = call.at(2, "bias")
    else:
        return [Result(values, call.out_dtype(usual), terms, scale)]
    row = _row(added, values)
    dtype = call.out_dtype(usual)
    return [Result(values + row, dtype, terms + 1, lambda: np.hypot(scale(), row))]


def _row(added: Tensor, values: AnyArray) -> AnyArray:
    """A bias, which may be stored as a row of a matrix."""
    row = real(added)
    if row.ndim > 1 and row.size == row.shape[-1]:
        row = row.reshape(-1)
    fits(
        row.ndim <= values.ndim and row.shape[-1:] in ((values.shape[-1],), (1,), ()),
        f"a bias of {list(row.shape)} cannot be added to {list(values.shape)}",
    )
    return row


def _einsum(call: Call) -> list[Result]:
    """(m, b, k) and (b, k, n) give (m, b, n)."""
    x, y = real(call.at(0, "x")), real(call.at(1, "weight"))
    fits(x.ndim == y.ndim == 3, "the batched product needs three dimensions on both sides")
    if call.flag("transposeB", True):
        y = np.swapaxes(y, -1, -2)
    values, scale, terms = product(np.swapaxes(x, 0, 1), y)
    dtype = call.out_dtype(call.at(0).dtype)
    turned = np.swapaxes(values, 0, 1)
    return [Result(turned, dtype, terms, lambda: np.swapaxes(scale(), 0, 1))]


def _dequantised(call: Call, x: AnyArray, y: AnyArray) -> Result:
    """The int8 product is exact; its scale is per output channel, or one for all."""
    fits(x.shape[-1] == y.shape[-2], f"{list(x.shape)} times {list(y.shape)} does not fit")
    bounded(x.size // max(1, x.shape[-1]) * y.shape[-1], "the product")
    values = np.matmul(x, y)  # below 2**53 for any K that fits into memory
    place = 2
    per_token = call.whole("quantMode", 0) == _PER_TOKEN
    # Optional inputs are recognised by their number if no flag says so.
    if call.flag("hasBias", len(call.inputs) > 3 + per_token):
        values = values + _row(call.at(2, "bias"), values)
        place = 3
    values = values * unpacked_scale(call.at(place, "scale")).reshape(-1)
    if per_token:
        values = values * real(call.at(place + 1, "scale per token")).reshape(-1, 1)
    usual = ACL_DTYPES.get(call.whole("outDataType", 1), "float16")
    return Result(values, call.out_dtype(usual))


def unpacked_scale(scale: Tensor) -> AnyArray:
    """A scale of 64-bit integers holds the bits of a float32 in its lower half."""
    if scale.dtype in ("int64", "uint64"):
        # The upper half holds other fields of the hardware's format.
        low = scale.values.astype(np.int64) & 0xFFFFFFFF
        return low.astype(np.uint32).view(np.float32).astype(np.float64)
    return real(scale)


def linear_sparse(call: Call) -> list[Result]:
    """The int8 linear layer, if the weight is not really compressed."""
    x, y = call.at(0, "x"), call.at(1, "weight")
    turned = call.flag("transposeB", True)
    fits(
        y.values.ndim >= 2 and y.values.shape[-1 if turned else -2] == x.values.shape[-1],
        "the weight is compressed; how is known to the tool that compressed it only",
    )
    a, b = factors(call, call.flag("transposeA", False), turned)
    return [_dequantised(call, a, b)]


def matmul(call: Call) -> list[Result]:
    """x · y, either of them turned if asked."""
    x, y = factors(call, call.flag("transposeA", False), call.flag("transposeB", False))
    values, scale, terms = product(x, y)
    return [Result(values, call.out_dtype(call.at(0).dtype), terms, scale)]


def strided_batch_matmul(call: Call) -> list[Result]:
    """Products of blocks of two flat tensors, laid out by leading sizes and strides."""
    a, b = real(call.at(0, "A")).reshape(-1), real(call.at(1, "B")).reshape(-1)
    batch, heads = call.whole("batch", 1), call.whole("headNum", 1)
    turn_a = call.flag("transposeA", call.flag("transA", False))
    turn_b = call.flag("transposeB", call.flag("transB", False))
    names = ("m", "n", "k", "lda", "ldb", "ldc", "strideA", "strideB", "strideC")
    lists = [call.wholes(name) for name in names]
    # Every size comes from a file: positive sizes and a bounded result are required first.
    fits(
        all(len(numbers) >= batch for numbers in lists),
        f"every size and stride needs {batch} numbers",
    )
    rows = list(zip(*(numbers[:batch] for numbers in lists), strict=True))
    fits(heads > 0 and all(min(row[:3]) > 0 for row in rows), "every size must be positive")
    bounded(sum(m * n for m, n, *_ in rows) * heads, "the result")
    result = np.zeros(sum(m * n for m, n, *_ in rows) * heads)
    scale = np.zeros_like(result)
    start_a = start_b = start_c = 0
    for m, n, k, lda, ldb, ldc, stride_a, stride_b, stride_c in rows:
        for head in range(heads):
            shape_a, shape_b = ((k, m) if turn_a else (m, k)), ((n, k) if turn_b else (k, n))
            left = _turned(_block(a, start_a + head * stride_a, lda, shape_a), turn_a)
            right = _turned(_block(b, start_b + head * stride_b, ldb, shape_b), turn_b)
            values, sized, _ = product(left, right)
            sizes = sized()
            # Row by row, because rows of the result may be further apart than they are long.
            for row in range(m):
                start = start_c + head * stride_c + row * ldc
                fits(start + n <= result.size, "a block lies outside of the result")
                result[start : start + n], scale[start : start + n] = values[row], sizes[row]
        start_a, start_b, start_c = (
            start_a + m * k * heads,
            start_b + n * k * heads,
            start_c + m * n * heads,
        )
    terms = max((row[2] for row in rows), default=1)
    return [Result(result, call.out_dtype(call.at(0).dtype), terms, scale)]


def _block(values: AnyArray, start: int, leading: int, shape: tuple[int, int]) -> AnyArray:
    bounded(shape[0] * shape[1], "a block")
    places = start + np.arange(shape[0])[:, None] * leading + np.arange(shape[1])
    fits(
        not places.size or (places.min() >= 0 and places.max() < values.size),
        "a block lies outside of its tensor",
    )
    return values[places]


DEFINITIONS: dict[str, Definition] = {
    "Linear": linear,
    "LinearSparse": linear_sparse,
    "Matmul": matmul,
    "StridedBatchMatmul": strided_batch_matmul,
}
