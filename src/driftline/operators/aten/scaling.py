"""The size of the terms behind an element of a result: the unit of its rounding errors.

For products and sums it is the root of the sum of the squared terms, or the size of the partial
sums if that is larger: if terms cancel only at the end, the errors of the partial sums remain. For
terms that are added one after the other in their own type, it is the sum of their sizes. For
everything else, the inputs are changed at random by a rounding error each, several times: the scale
is three times the change of the result.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from driftline.numerics.dtypes import DTYPES
from driftline.operators.aten import kinds
from driftline.operators.aten.golden import Prepared

AnyArray = np.ndarray[Any, np.dtype[Any]]
# A fixed seed: the same dump must always get the same verdict.
_DRAWS = 8
_SURE = 3.0
_SEED = 20240229
_ONE_BY_ONE = (
    *("embedding_dense_backward", "index_add", "index_put", "_index_put_impl", "scatter_add"),
    *("_unsafe_index_put", "cumsum"),
)
_AROUND_ONE = ("gelu", "erfc", "expm1", "mish", "softplus", "log_sigmoid_forward", "elu", "silu")
"""Operators that compute the difference of two numbers near 1, times their argument."""
_FROM_ROWS = ("_log_softmax", "log_softmax", "logsumexp", "logcumsumexp")
"""Operators that subtract the logarithm of a sum from elements, which loses digits."""
_ROUGHLY = 4.0
"""Those numbers come from series and are off by more than one rounding."""


def scale_of(call: Prepared, slot: str, golden: torch.Tensor, dtype: torch.dtype) -> AnyArray:
    """The size of the terms behind each element of an output of this type."""
    name = kinds.plain_name(call.func)
    # Operators on lists of tensors have no single slot per input, so their terms are measured by
    # moving inputs.
    if not kinds.is_foreach(call.func):
        if name in kinds.LINEAR:
            return np.maximum(_squared(call, slot), _on_the_way(call, name, golden))
        if name == "native_layer_norm_backward" and slot in ("1", "2") and not call.elsewhere:
            return _of_norm(call, slot, dtype)
        if name in _ONE_BY_ONE:
            sizes = {s: _wide(t).abs() for s, t in call.tensors.items()}
            return call._replace(tensors=sizes).again("float64")[slot].abs().numpy()
    roundoff = DTYPES[str(dtype).removeprefix("torch.")].unit_roundoff
    scale = _moved(call, slot, golden, roundoff)
    source = call.tensors.get("self")
    # Rounding near 1 does not show in small random moves of the argument, so it is added.
    if name in _AROUND_ONE and source is not None and source.shape == golden.shape:
        around = _ROUGHLY * source.double().abs()
        scale = np.maximum(scale, around.nan_to_num(0.0, 0.0, 0.0).numpy())
    grad = call.tensors.get("grad_output")
    if name.removesuffix("_backward") in _AROUND_ONE and grad is not None and source is not None:
        around = _ROUGHLY * grad.double().abs() * (1 + source.double().abs())
        scale = np.maximum(scale, around.nan_to_num(0.0, 0.0, 0.0).numpy())
    if name in _FROM_ROWS and source is not None and source.dim():
        scale = np.maximum(scale, _row_size(source, call.param.get("dim"), golden))
    if "attention" in name:
        scale = _of_attention(call, slot, scale, roundoff, backward="backward" in name)
    return scale


_FACTORS = {
    "mm": ("self", "mat2"),
    "bmm": ("self", "mat2"),
    "addmm": ("mat1", "mat2"),
    "baddbmm": ("batch1", "batch2"),
}
_PARTS = 16
_SPREAD = 2.0
"""In one element of ten thousand the error of a sum is this many times the usual one."""


def _on_the_way(call: Prepared, name: str, golden: torch.Tensor) -> AnyArray:
    """The size of the partial sums of a matrix product, from the first term on."""
    left, right = (call.tensors.get(slot) for slot in _FACTORS.get(name, ("", "")))
    if left is None or right is None or left.is_complex() or not left.shape[-1]:
        return np.zeros(())
    # Sixteen partial sums sample the way well enough; every one costs a product of its part.
    step = -(-left.shape[-1] // _PARTS)
    total = torch.zeros(golden.shape, dtype=torch.float64)
    squares = torch.zeros_like(total)
    parts = range(0, left.shape[-1], step)
    for start in parts:
        some = slice(start, start + step)
        total += left[..., some].double() @ right[..., some, :].double()
        squares += total.square()
    size = _SPREAD * (squares / len(parts)).sqrt()
    alpha = call.param.get("alpha", 1)
    return (size * abs(alpha if isinstance(alpha, (int, float)) else 1)).numpy()


def _of_norm(call: Prepared, slot: str, dtype: torch.dtype) -> AnyArray:
    """Gradients of a layer norm's weight and bias, which a CPU adds up row by row in their type.

    Terms of one sign lose their last digits in the same direction: every partial sum counts.
    """
    terms = call.tensors["grad_out"].double()
    if slot == "1":
        inputs, mean, rstd = (call.tensors[n].double() for n in ("input", "mean", "rstd"))
        terms = terms * (inputs - mean) * rstd
    shape = [int(size) for size in call.param["normalized_shape"]]
    rows = terms.reshape(-1, *shape)
    smallest = len(rows) * torch.finfo(dtype).tiny  # whatever is less than that is rounded alike
    scale = rows.cumsum(0).abs().sum(0) + rows.abs().sum(0) + smallest
    return (scale / max(1, len(rows)) ** 0.5).numpy()


def _of_attention(
    call: Prepared, slot: str, scale: AnyArray, roundoff: float, *, backward: bool
) -> AnyArray:
    """Fused kernels compute the exponential as roughly as the inputs are, whatever the output type.

    The logarithm of the sum of exponentials is off by the relative error of that sum.
    """
    # The coarsest input decides how roughly the exponential is computed.
    read = [t.dtype for t in call.tensors.values() if t.is_floating_point()]
    units = [DTYPES[str(dtype).removeprefix("torch.")].unit_roundoff for dtype in read]
    if slot == "1" and not backward:
        scale = np.maximum(scale, 1.0)
    return scale * max(1.0, max(units, default=0.0) / roundoff)


def _row_size(source: torch.Tensor, dim: Any, golden: torch.Tensor) -> AnyArray:
    sizes = source.double().abs().nan_to_num(0.0, 0.0, 0.0)
    if isinstance(dim, int):
        sizes = sizes.amax(dim, keepdim=True)
        if sizes.dim() == golden.dim():
            return sizes.expand(golden.shape).numpy()
    return np.full(tuple(golden.shape), float(sizes.max()) if sizes.numel() else 0.0)


def _squared(call: Prepared, slot: str) -> AnyArray:
    squared = {s: _wide(t).abs().square() for s, t in call.tensors.items()}
    param = dict(call.param)
    for name in ("alpha", "beta"):
        if isinstance(param.get(name), (int, float)):
            param[name] = param[name] ** 2
    result = call._replace(tensors=squared, param=param).again("float64")[slot]
    return result.abs().sqrt().numpy()


def _moved(call: Prepared, slot: str, golden: torch.Tensor, roundoff: float) -> AnyArray:
    source = torch.Generator().manual_seed(_SEED)
    moved = torch.zeros(golden.shape, dtype=torch.float64)
    # Finer steps than this would be lost in float64 after a few operations.
    step = max(roundoff, 1e-9)
    base = golden.to(torch.complex128 if golden.is_complex() else torch.float64)
    # Integer inputs are not moved; without any float everything would stay in place.
    rounded = any(t.is_floating_point() or t.is_complex() for t in call.tensors.values())
    for _ in range(_DRAWS):
        tensors = {
            s: _jolted(t if rounded else t.double(), step, source) for s, t in call.tensors.items()
        }
        other = call._replace(tensors=tensors).again("float64")[slot]
        moved += ((other - base).abs() / step).nan_to_num(0.0, 0.0, 0.0).square()
    return _SURE * (moved / _DRAWS).sqrt().numpy()


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _jolted(tensor: torch.Tensor, step: float, source: torch.Generator) -> torch.Tensor:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
    signs = torch.randint(0, 2, tensor.shape, generator=source).double() * 2 - 1
    return wide * (1 + step * signs)
