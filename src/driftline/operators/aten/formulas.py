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


def _attended(given: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and the logarithm of the sum of its exponentials."""
    query, key, value = given["query"], given["key"], given["value"]
    heads = query.shape[1] // key.shape[1]
    if heads > 1:  # several query heads share one
        key, value = key.repeat_interleave(heads, 1), value.repeat_interleave(heads, 1)
    scale = given.get("scale")
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query @ key.transpose(-1, -2)) * scale
    bias = given.get("attn_bias")
    if bias is None:
        bias = given.get("attn_mask")
    if bias is not None:
        scores = scores + bias
    if given.get("is_causal"):
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def attention(given: Mapping[str, Any]) -> Results:
    found, sums = _attended(given)
    return {"0": found, "1": sums}


def attention_backward(given: Mapping[str, Any]) -> Results:
    names = ("query", "key", "value", "attn_bias")
    given = dict(given)
    for name in names:
        if isinstance(given.get(name), torch.Tensor) and given[name].is_floating_point():
            given[name] = given[name].detach().requires_grad_()
    gradient = given.get("grad_out")
    gradient = given["grad_out_"] if gradient is None else gradient
    with torch.enable_grad():
        found, _ = _attended(given)
        wanted = [given[name] for name in names if isinstance(given.get(name), torch.Tensor)]
        made = torch.autograd.grad(found, wanted, gradient)
    return {str(index): one for index, one in enumerate(made)}


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
