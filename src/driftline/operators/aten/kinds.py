"""Kinds of aten operators: exact, rounded with a number of terms, or without a checkable result.

Knows operators by name. Executes nothing.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

_EXACT = """
    _to_copy abs alias all amax amin any arange argmax argmin argsort as_strided_copy
    as_strided_scatter bitwise_and bitwise_not bitwise_or bitwise_xor block_diag bucketize cat ceil
    channel_shuffle clamp clamp_max clamp_min clone column_stack concat constant_pad_nd
    conj_physical contiguous copy cummax cummin detach_copy diag_embed diagonal_scatter embedding
    embedding_renorm eq expand_copy eye fill flip floor fmax fmin full full_like gather ge
    greater gt hardtanh heaviside hstack im2col index index_copy index_fill index_select isfinite
    isin isinf isnan isneginf isposinf kthvalue le leaky_relu less lift lift_fresh
    lift_fresh_copy logical_and logical_not logical_or logical_xor lt masked_fill masked_scatter
    masked_select max max_pool2d_with_indices max_pool3d_with_indices maximum median min minimum
    mode narrow_copy ne neg new_full new_ones new_zeros nonzero one_hot ones ones_like permute_copy
    pin_memory pixel_shuffle pixel_unshuffle positive reflection_pad1d reflection_pad2d relu repeat
    repeat_interleave replication_pad1d replication_pad2d replication_pad3d reshape_copy roll rot90
    round scalar_tensor scatter searchsorted select_backward select_copy select_scatter
    sgn sign signbit slice_backward slice_copy slice_scatter sort split_copy split_with_sizes_copy
    squeeze_copy stack t_copy take threshold threshold_backward topk transpose_copy tril
    tril_indices triu triu_indices trunc unbind_copy unfold_copy unique_consecutive _unique
    _unique2 unsqueeze_copy upsample_nearest1d upsample_nearest2d upsample_nearest3d view_copy where
    zero zeros zeros_like _copy_from _pin_memory _reshape_copy diagonal_copy swapaxes_copy
    _conj_physical real_copy view_as_real_copy view_as_complex_copy unsafe_chunk unsafe_split
    vstack _index_put_impl index_put _unsafe_index _unsafe_index_put
"""
EXACT = frozenset(_EXACT.split())
"""These only move, select or compare. `index_put` does so unless it accumulates."""

BY_INDEX = {
    "topk": (0, 1),
    "sort": (0, 1),
    "max": (0, 1),
    "min": (0, 1),
    "kthvalue": (0, 1),
    "median": (0, 1),
    "nanmedian": (0, 1),
    "mode": (0, 1),
    "cummax": (0, 1),
    "cummin": (0, 1),
    "argmax": (None, 0),
    "argmin": (None, 0),
    "argsort": (None, 0),
}
"""Operators whose output at the second place says where a value was: equal values are as good."""

_SWITCHES = ("dropout_p", "dropout", "p")
_TRAINING = ("train", "training", "is_training")
_UNFILLED_NAMES = "empty empty_like empty_strided empty_permuted new_empty new_empty_strided resize"
_UNFILLED = frozenset(_UNFILLED_NAMES.split())
_OVER_DIM = ("dim", "normalized_shape", "dims", "axis")
# Parts of names of operators that add up many terms; for others a short formula is assumed.
_LONG = (
    *("sum", "mean", "norm", "var", "std", "softmax", "logsumexp", "prod", "cumsum", "cumprod"),
    *("attention", "dense_backward", "scatter_add", "index_add", "scatter_reduce", "loss", "pool"),
    *("cdist", "trace", "fft", "interpolate", "upsample", "rnn", "lstm", "gru", "einsum", "grad"),
    *("index_put", "backward", "dist", "grid"),
)


def plain_name(func: Any) -> str:
    """`add` for `aten.add_.Tensor`, `aten.add.out` and `aten._foreach_add_.List`."""
    name = str(func._schema.name).partition("::")[2]
    name = name.removeprefix("_foreach_")
    # In-place variants end with an underscore, double underscores belong to special methods.
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def is_foreach(func: Any) -> bool:
    return "::_foreach_" in str(func._schema.name)


def no_answer(func: Any, param: Mapping[str, Any]) -> str:
    """Why the operator's result cannot be checked; empty if it can."""
    if plain_name(func) in _UNFILLED:
        return "it returns memory that was not written"
    if torch.Tag.nondeterministic_seeded in func.tags and not _switched_off(func, param):
        return "it draws random numbers"
    return ""


def _switched_off(func: Any, param: Mapping[str, Any]) -> bool:
    """Whether dropout drops nothing, or is in evaluation mode."""
    names = {argument.name for argument in func._schema.arguments}
    if any(name in names and param.get(name) is False for name in _TRAINING):
        return True
    return any(
        name in names and isinstance(param.get(name), (int, float)) and not param[name]
        for name in _SWITCHES
    )


def is_exact(func: Any, param: Mapping[str, Any], dtype: torch.dtype) -> bool:
    """Whether an output of the operator has no rounding."""
    # Integers and booleans are never rounded.
    if not (dtype.is_floating_point or dtype.is_complex):
        return True
    name = plain_name(func)
    if name not in EXACT:
        return False
    if name in ("index_put", "_index_put_impl", "_unsafe_index_put"):
        return not param.get("accumulate")
    if name == "scatter":
        return "reduce" not in param
    # These have the name of an exact operator, but compute or round.
    return name not in ("arange", "median", "round", "leaky_relu")


_AMBIGUOUS = {
    "_linalg_svd": ("0", "2"),
    "_linalg_eigh": ("1",),
    "linalg_eig": ("0", "1"),
    "linalg_qr": ("0", "1"),
    "geqrf": ("0", "1"),
    "linalg_lstsq": ("1", "2", "3"),
    "_linalg_eigvals": ("0",),
    "_embedding_bag": ("1", "2", "3"),  # what is left of them depends on the kernel
    "_embedding_bag_forward_only": ("1", "2", "3"),
    "_ctc_loss": ("1",),  # written in part
}


def is_ambiguous(func: Any, slot: str) -> bool:
    """Whether another output may be right too, such as vectors of the opposite sign."""
    return slot in _AMBIGUOUS.get(plain_name(func), ())


def is_stepped(func: Any) -> bool:
    """Whether rounding before the last step may change the result by a whole step."""
    return plain_name(func) in _STEPPED


def terms_of(func: Any, args: Sequence[Any], output: torch.Tensor) -> int:
    """Number of terms in the sum behind an element of the result; 4 for a short formula."""
    name = plain_name(func)
    named = {a.name: value for a, value in zip(func._schema.arguments, args, strict=True)}
    floats = _float_tensors(args)
    product = _product_terms(name, named)
    # Products know their length from shapes; everything else is judged by name.
    if product:
        return max(4, product)
    # Reductions without floating-point inputs have no rounding to speak of.
    if not floats:
        return 4
    largest = max(floats, key=lambda t: t.numel())
    if not any(word in name for word in _LONG):
        return 4
    return max(4, _summed_terms(name, named, largest, output))


def _float_tensors(args: Sequence[Any]) -> list[torch.Tensor]:
    """Floating-point tensors among arguments, also those inside lists."""
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    for value in args:
        if isinstance(value, (list, tuple)):
            members = cast("Sequence[Any]", value)
            tensors += [member for member in members if isinstance(member, torch.Tensor)]
    return [t for t in tensors if t.is_floating_point() or t.is_complex()]


def _summed_terms(
    name: str, named: Mapping[str, Any], largest: torch.Tensor, output: torch.Tensor
) -> int:
    """Length of the sum of an operator that adds up many terms."""
    if name.endswith(("batch_norm", "batch_norm_backward")) or "group_norm" in name:
        return largest.numel() // max(1, largest.shape[1] if largest.dim() > 1 else 1)
    if "upsample" in name or "interpolate" in name or "grid_sample" in name:
        # Positions between elements are rounded, and may be as large as the picture.
        return (2 * max((int(size) for size in output.shape), default=1)) ** 2
    if "attention" in name:
        sizes = [named[n].shape for n in ("query", "key") if isinstance(named.get(n), torch.Tensor)]
        return max((max(shape[-2:]) for shape in sizes), default=4)
    if "backward" in name or "index_put" in name or "scatter" in name or "index_add" in name:
        # A backward pass adds up over all elements to which its output was broadcast.
        row = int(largest.shape[-1]) if largest.dim() else 1
        return largest.numel() // max(1, min(output.numel(), row))
    dims = next((named[n] for n in _OVER_DIM if named.get(n) is not None), None)
    if dims is not None and largest.dim():
        if "normalized_shape" in named:
            return math.prod(cast("Sequence[int]", dims))
        along = dims if isinstance(dims, (list, tuple)) else [dims]
        if along:
            shape = largest.shape
            return math.prod(shape[int(d)] for d in along if -len(shape) <= d < len(shape))
    return largest.numel() // max(1, output.numel())


def _product_terms(name: str, named: Mapping[str, Any]) -> int:
    """Inner length of a matrix product or a convolution; 0 for anything else."""
    for left in ("mat1", "batch1", "self", "input", "mat", "tensor", "vec1"):
        if isinstance(named.get(left), torch.Tensor):
            break
    else:
        return 0
    first = cast("torch.Tensor", named[left])
    if name in (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "addbmm",
        "mv",
        "addmv",
        "matmul",
        "linear",
        "dot",
    ):
        chosen = named.get("mat", first) if name == "addmv" else first
        return int(chosen.shape[-1]) if chosen.dim() else 1
    if name in ("_int_mm", "_scaled_mm", "_grouped_mm", "vdot", "addr", "_addmm_activation"):
        return int(first.shape[-1]) if first.dim() else 1
    weight = named.get("weight")
    if "conv" in name and isinstance(weight, torch.Tensor) and weight.dim() > 2:
        if "backward" in name:
            grad = named.get("grad_output")
            return max(weight.numel(), grad.numel() if isinstance(grad, torch.Tensor) else 0)
        return int(weight[0].numel()) * (int(weight.shape[0]) if named.get("transposed") else 1)
    return 0


_STEPS = "arange ceil div floor floor_divide fmod remainder round trunc median linspace frac"
_STEPPED = frozenset(_STEPS.split())
_SUMS = "mm bmm addmm baddbmm mv addmv matmul linear dot convolution sum index_add"
LINEAR = frozenset(_SUMS.split())
"""Sums of products: with every input squared they give the sum of the squared terms."""
