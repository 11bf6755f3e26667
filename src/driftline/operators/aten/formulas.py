"""Operators that have no kernel on a CPU, as formulas: attention, batch norm and products of a GPU.

Stands alone with torch, since a reproducer carries this file in it.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

Results = dict[str, torch.Tensor]


def _scored(
    given: Mapping[str, Any],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """Scores before the softmax, key and value for every query head, and the scale."""
    query, key, value = given["query"], given["key"], given["value"]
    heads = query.shape[1] // key.shape[1]
    if heads > 1:  # several query heads share one
        key, value = key.repeat_interleave(heads, 1), value.repeat_interleave(heads, 1)
    scale = given.get("scale")
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query @ key.transpose(-1, -2)) * scale
    bias = given.get("attn_bias")
    if bias is not None:
        scores = scores + bias
    if given.get("is_causal"):
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    return scores, key, value, scale


def attention(given: Mapping[str, Any]) -> Results:
    """Attention and the logarithm of the sum of its exponentials."""
    scores, _, value, _ = _scored(given)
    return {"0": scores.softmax(-1) @ value, "1": scores.logsumexp(-1)}


def attention_backward(given: Mapping[str, Any]) -> Results:
    """Gradients of query, key, value and bias; as kernels do, from what the forward pass gave."""
    scores, key, value, scale = _scored(given)
    gradient = given.get("grad_out")
    gradient = given["grad_out_"] if gradient is None else gradient
    share = scores.softmax(-1)
    inner = (gradient * given["out"]).sum(-1, keepdim=True)
    moved = share * (gradient @ value.transpose(-1, -2) - inner)
    shared = given["key"].shape[1]

    def together(made: torch.Tensor) -> torch.Tensor:
        return made.unflatten(1, (shared, -1)).sum(2)

    found = {
        "0": moved @ key * scale,
        "1": together(moved.transpose(-1, -2) @ given["query"] * scale),
        "2": together(share.transpose(-1, -2) @ gradient),
    }
    bias = given.get("attn_bias")
    if bias is not None:
        found["3"] = moved.sum_to_size(bias.shape)
    return found


def batch_norm(given: Mapping[str, Any]) -> Results:
    found = torch.ops.aten.native_batch_norm.default(
        given["input"],
        given["weight"],
        given["bias"],
        given["running_mean"],
        given["running_var"],
        given["training"],
        given["exponential_average_factor"],
        given["epsilon"],
    )
    made = {str(index): one for index, one in enumerate(found)}
    written = {name: given[name] for name in ("running_mean", "running_var")}
    return made | {name: one for name, one in written.items() if one is not None}


def batch_norm_backward(given: Mapping[str, Any]) -> Results:
    found = torch.ops.aten.native_batch_norm_backward.default(
        given["grad_output"],
        given["input"],
        given["weight"],
        given["running_mean"],
        given["running_var"],
        given["save_mean"],
        given["save_var"],
        True,
        given["epsilon"],
        [True, True, True],
    )
    return {str(index): one for index, one in enumerate(found)}


def scaled_product(given: Mapping[str, Any]) -> Results:
    found = (given["self"] * given["scale_a"]) @ (given["mat2"] * given["scale_b"])
    if given.get("bias") is not None:
        found = found + given["bias"]
    if given.get("scale_result") is not None:
        found = found * given["scale_result"]
    return {"0": found}


FORMULAS: dict[str, Callable[[Mapping[str, Any]], Results]] = {
    "_scaled_dot_product_flash_attention": attention,
    "_scaled_dot_product_efficient_attention": attention,
    "_scaled_dot_product_cudnn_attention": attention,
    "_scaled_dot_product_fused_attention_overrideable": attention,
    "_scaled_dot_product_flash_attention_backward": attention_backward,
    "_scaled_dot_product_efficient_attention_backward": attention_backward,
    "_scaled_dot_product_cudnn_attention_backward": attention_backward,
    "cudnn_batch_norm": batch_norm,
    "cudnn_batch_norm_backward": batch_norm_backward,
    "_scaled_mm": scaled_product,
}
"""By name, without namespace and overload."""


def computed(func: Any, args: list[Any]) -> Results:
    """What the formula of an operator gives."""
    names = [argument.name for argument in func._schema.arguments]
    short = str(func._schema.name).partition("::")[2]
    with torch.no_grad():
        return FORMULAS[short](dict(zip(names, args, strict=True)))


def has_formula(func: Any) -> bool:
    space, _, short = str(func._schema.name).partition("::")
    return space == "aten" and short in FORMULAS
