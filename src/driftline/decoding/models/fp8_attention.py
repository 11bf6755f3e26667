"""Attention over keys and values stored in fp8, in plain operators, for models of ibm-fms.

This is what the AIU's software means by `math_fp8` and `paged_fp8`. In each layer a text has one
scale for keys and one for values, computed in the first call so that the largest element becomes
200 or 100. Elements are divided by it, rounded to float8_e4m3fn and stored; the computation uses
the stored number times the scale, in the model's own number format. In the paged form the first
call computes with the unrounded numbers. Knows nothing about loading or the placement of blocks.
"""

# torch, transformers, fms and pyarrow are only partly annotated.
# pyright: reportMissingImports=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from driftline.errors import BadInput
from driftline.registry import require

if TYPE_CHECKING:
    import torch

KEYS_TO = 200.0
VALUES_TO = 100.0
"""What the largest key and value of a text become: room for later ones, as fp8 ends at 448."""
LEAST_SCALE = 1e-5
LARGEST = 448.0
"""The largest number of float8_e4m3fn; what is beyond becomes this."""
IN_A_ROW = "driftline_fp8"
IN_BLOCKS = "driftline_fp8_in_blocks"
"""Names under which ibm-fms knows the two; it looks for `paged` and `sdpa` in names."""


class Scaled(NamedTuple):
    """Keys or values in fp8, [batch, heads, tokens, size] or in blocks, and [batch] scales."""

    data: torch.Tensor
    scale: torch.Tensor


@functools.cache
def register() -> None:
    """Tell ibm-fms of both, once.

    Raises:
        NotInstalled: It is not there.
    """
    attention = require("fms.modules.attention", install="ibm-fms transformers")
    plain = attention.get_attention_type(attn_name="sdpa_causal")["compute_prefill"]

    def in_blocks(query: torch.Tensor, keys: Any, values: Any, *rest: Any, **words: Any) -> Any:
        _no_sinks(words)
        stored = (keys, values)
        if isinstance(keys, Scaled):
            stored = (restored(scaled, query.dtype) for scaled in stored)
        return plain(query, *stored, *rest, **words)

    attention.register_attention_op(IN_A_ROW, _store_in_a_row, _attend)
    attention.register_attention_op(IN_BLOCKS, _store_in_blocks, in_blocks)


def scale_of(numbers: torch.Tensor, largest: float) -> torch.Tensor:
    """[batch] scales in fp32, found in the number format of the numbers, as the device does."""
    import torch

    peak = numbers.abs().amax(dim=(1, 2, 3))
    return (peak / largest).clamp(min=LEAST_SCALE).to(torch.float32)


def rounded(numbers: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers over their scale, in this number format and then in fp8."""
    import torch

    shrunk = (numbers / scale.view(-1, 1, 1, 1)).to(dtype)
    return shrunk.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def restored(kept: Scaled, dtype: torch.dtype) -> torch.Tensor:
    """The numbers as they are computed with."""
    return (kept.data.to(dtype) * kept.scale.view(-1, 1, 1, 1)).to(dtype)


def _store_in_a_row(
    keys: torch.Tensor, values: torch.Tensor, old_keys: Any, old_values: Any, **_words: Any
) -> tuple[Scaled, Scaled, Scaled, Scaled]:
    """ibm-fms gives [batch, tokens, heads, size]; what to compute with, and what to keep."""
    k = _longer(keys, old_keys, KEYS_TO)
    v = _longer(values, old_values, VALUES_TO)
    return k, v, k, v


def _longer(new: torch.Tensor, old: Scaled | None, largest: float) -> Scaled:
    import torch

    scale = scale_of(new, largest) if old is None else old.scale
    data = rounded(new, scale, torch.float32).transpose(1, 2)
    return Scaled(data.contiguous() if old is None else torch.cat([old.data, data], dim=2), scale)


def _store_in_blocks(
    keys: torch.Tensor, values: torch.Tensor, old_keys: Scaled, old_values: Scaled, **words: Any
) -> tuple[Any, Any, Scaled, Scaled]:
    """Blocks are [blocks, tokens of a block, heads, size]; scales hold from the first call on."""
    k, all_keys = _in_blocks(keys, old_keys, KEYS_TO, words)
    v, all_values = _in_blocks(values, old_values, VALUES_TO, words)
    return k, v, all_keys, all_values


def _in_blocks(
    new: torch.Tensor, old: Scaled, largest: float, words: dict[str, Any]
) -> tuple[torch.Tensor | Scaled, Scaled]:
    """What to compute with, every token of each text in a row; and all blocks."""
    import torch

    table = words["block_table"]
    # Without a table it is the first call: scales are found then, and stay.
    scale = scale_of(new, largest) if table is None else old.scale
    data = rounded(new, scale, new.dtype)  # the device's operator divides in that format
    # Bytes: putting and taking fp8 by index is not there on every device.
    places = old.data.view(torch.uint8).flatten(0, 1).clone()
    places[words["slot_mapping"].flatten()] = data.view(torch.uint8).flatten(0, 1)
    blocks = Scaled(places.view(old.data.shape).view(torch.float8_e4m3fn), scale)
    if table is None:
        return new, blocks
    size = old.data.shape[1]
    index = torch.arange(words["mask"].shape[-1], device=table.device)
    row = places[table[:, index // size] * size + index % size].view(torch.float8_e4m3fn)
    return Scaled(row.transpose(1, 2), scale), blocks


def _attend(
    query: torch.Tensor,
    keys: Scaled | torch.Tensor,
    values: Scaled | torch.Tensor,
    nheads: int,
    kvheads: int,
    _dropout: float,
    factor: float | None,
    **words: Any,
) -> torch.Tensor:
    """Attention written out, [batch, tokens, heads, size]."""
    _no_sinks(words)
    k = restored(_kept(keys, KEYS_TO), query.dtype)
    v = restored(_kept(values, VALUES_TO), query.dtype)
    # Grouped queries: several heads share one head of keys and values.
    if nheads != kvheads:
        k = k.repeat_interleave(nheads // kvheads, dim=1)
        v = v.repeat_interleave(nheads // kvheads, dim=1)
    # Half of the factor on either side: in fp16 a product of large numbers would overflow.
    half = math.sqrt(1 / math.sqrt(query.shape[-1]) if factor is None else factor)
    scores = (query.transpose(1, 2) * half) @ (k.transpose(-2, -1) * half)
    scores = scores + _bias(words.get("mask"), scores)
    return (scores.softmax(dim=-1) @ v).transpose(1, 2).contiguous()


def _no_sinks(words: dict[str, Any]) -> None:
    if words.get("sinks") is not None:
        raise BadInput(
            "attention in fp8 is not there for models whose attention has sinks",
            hint="take another attention, such as --attn_type sdpa",
        )


def _kept(numbers: Scaled | torch.Tensor, largest: float) -> Scaled:
    """Without a cache nothing was stored: then they are rounded now."""
    if isinstance(numbers, Scaled):
        return numbers
    return _longer(numbers, None, largest)


def _bias(mask: torch.Tensor | None, scores: torch.Tensor) -> torch.Tensor:
    """What is added to the scores, [batch, 1, new, all]; without a mask the past is seen."""
    import torch

    if mask is None:
        new, total = scores.shape[-2:]
        seen = torch.ones((new, total), dtype=torch.bool, device=scores.device)
        mask = seen.tril(diagonal=total - new).unsqueeze(0)
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=scores.dtype).masked_fill(~mask, -torch.inf)
    return mask.unsqueeze(1).to(scores.dtype) if mask.dim() == 3 else mask.to(scores.dtype)
