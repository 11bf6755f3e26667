"""Formulas for operators that have no CPU kernel: attention, batch norm and products of a GPU.

Needs only torch, since reproducing scripts contain this file.
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
    arguments: Mapping[str, Any],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """Scores before the softmax, key and value for every query head, and the scale."""
    query, key, value = arguments["query"], arguments["key"], arguments["value"]
    heads = query.shape[1] // key.shape[1]
    if heads > 1:  # several query heads share one
        key, value = key.repeat_interleave(heads, 1), value.repeat_interleave(heads, 1)
    scale = arguments.get("scale")
    # The default scale of attention, as torch defines it.
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query @ key.transpose(-1, -2)) * scale
    bias = arguments.get("attn_bias")
    if bias is not None:
        scores = scores + bias
    if arguments.get("is_causal"):
        # Lower triangle: a query sees the keys up to its own position.
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    return scores, key, value, scale


def attention(arguments: Mapping[str, Any]) -> Results:
    """Attention and the logarithm of the sum of its exponentials."""
    scores, _, value, _ = _scored(arguments)
    return {"0": scores.softmax(-1) @ value, "1": scores.logsumexp(-1)}


def attention_backward(arguments: Mapping[str, Any]) -> Results:
    """Gradients of query, key, value and bias, computed from the forward result as kernels do."""
    scores, key, value, scale = _scored(arguments)
    gradient = arguments.get("grad_out")
    gradient = arguments["grad_out_"] if gradient is None else gradient
    share = scores.softmax(-1)
    # The softmax's own gradient needs the sum over the row of gradient times output.
    inner = (gradient * arguments["out"]).sum(-1, keepdim=True)
    moved = share * (gradient @ value.transpose(-1, -2) - inner)
    # Several query heads share one key head: its gradient is the sum over them.
    shared = arguments["key"].shape[1]

    def together(made: torch.Tensor) -> torch.Tensor:
        return made.unflatten(1, (shared, -1)).sum(2)

    gradients = {
        "0": moved @ key * scale,
        "1": together(moved.transpose(-1, -2) @ arguments["query"] * scale),
        "2": together(share.transpose(-1, -2) @ gradient),
    }
    bias = arguments.get("attn_bias")
    if bias is not None:
        gradients["3"] = moved.sum_to_size(bias.shape)
    return gradients


def batch_norm(arguments: Mapping[str, Any]) -> Results:
    results = torch.ops.aten.native_batch_norm.default(
        arguments["input"],
        arguments["weight"],
        arguments["bias"],
        arguments["running_mean"],
        arguments["running_var"],
        arguments["training"],
        arguments["exponential_average_factor"],
        arguments["epsilon"],
    )
    made = {str(index): tensor for index, tensor in enumerate(results)}
    # Running statistics are updated in place and are outputs as well.
    written = {name: arguments[name] for name in ("running_mean", "running_var")}
    return made | {name: tensor for name, tensor in written.items() if tensor is not None}


def batch_norm_backward(arguments: Mapping[str, Any]) -> Results:
    gradients = torch.ops.aten.native_batch_norm_backward.default(
        arguments["grad_output"],
        arguments["input"],
        arguments["weight"],
        arguments["running_mean"],
        arguments["running_var"],
        arguments["save_mean"],
        arguments["save_var"],
        True,
        arguments["epsilon"],
        [True, True, True],
    )
    return {str(index): gradient for index, gradient in enumerate(gradients)}


def scaled_product(arguments: Mapping[str, Any]) -> Results:
    product = (arguments["self"] * arguments["scale_a"]) @ (
        arguments["mat2"] * arguments["scale_b"]
    )
    if arguments.get("bias") is not None:
        product = product + arguments["bias"]
    if arguments.get("scale_result") is not None:
        product = product * arguments["scale_result"]
    return {"0": product}


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
    # Overloads share a formula, so only the plain name counts.
    short = str(func._schema.name).partition("::")[2]
    with torch.no_grad():
        return FORMULAS[short](dict(zip(names, args, strict=True)))


def has_formula(func: Any) -> bool:
    space, _, short = str(func._schema.name).partition("::")
    return space == "aten" and short in FORMULAS
