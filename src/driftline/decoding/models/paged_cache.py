"""A key-value cache in blocks for the paged attention of ibm-fms: which token is stored where.

ibm-fms has the operators (`spyre::paged_attn_store`, `…_compute`) in a plain form for CPU and CUDA;
the AIU's compiler replaces them by its own. The fp8 variants are in `fp8_attention`. Every sequence
has its own blocks; padding occupies places like tokens do, but is never read.
"""

# torch, transformers, fms and pyarrow are only partly annotated.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from driftline.decoding.models import fp8_attention
from driftline.decoding.models.fp8_attention import Scaled
from driftline.registry import require

if TYPE_CHECKING:
    import torch

PAGED = "paged"
PAGED_FP8 = "paged_fp8"
"""The attentions of a target that this is for; of the second keys and values are kept in fp8."""
MATH_FP8 = "math_fp8"
"""Kept in fp8, in no blocks."""
FP8 = (MATH_FP8, PAGED_FP8)
OF_FMS = (PAGED, *FP8)
"""Attentions that only models of ibm-fms have."""
BLOCK = 64
"""Tokens of a block, as on the AIU."""
_OPERATORS = "fms.utils.spyre.paged"
_NAME = "spyre_paged_attn"


class PagedCache(NamedTuple):
    """Keys and values of each layer [blocks, BLOCK, heads, size], and each sequence's blocks."""

    states: list[tuple[Any, Any]]
    table: torch.Tensor


def attention_lines(candidate: str, reference: str) -> list[str]:
    """A line where the attention of a candidate is one of ibm-fms, which then loads the models.

    >>> attention_lines("math_fp8", "math_fp8")
    ['ibm-fms loads the models; attention: math_fp8, of the reference: math_fp8']
    """
    if candidate not in OF_FMS:
        return []
    other = reference or "the usual one"
    return [f"ibm-fms loads the models; attention: {candidate}, of the reference: {other}"]


def fp8_arguments() -> dict[str, Any]:
    """Arguments that make a model of ibm-fms keep keys and values in fp8, in no blocks."""
    fp8_attention.register()
    return {"attn_name": fp8_attention.IN_A_ROW}


def paged_arguments(
    module: Any,
    ids: torch.Tensor,
    mask: torch.Tensor,
    cache: PagedCache | None,
    *,
    fp8: bool = False,
) -> tuple[dict[str, Any], PagedCache]:
    """Arguments of a model of ibm-fms besides ids and positions, and the cache with room for them.

    Args:
        module: The model.
        ids: int64 [batch, new].
        mask: bool [batch, all]: True where a token is real, of everything up to the last id.
        cache: What there is so far; None at first.
        fp8: Whether keys and values are kept in fp8.
    """
    import torch

    if fp8:
        fp8_attention.register()
    else:
        require(_OPERATORS, install="ibm-fms transformers")
    first = cache is None
    total, new = int(mask.shape[1]), int(ids.shape[1])
    cache = _with_room(_empty(module, ids, fp8=fp8) if cache is None else cache, total)
    places = torch.arange(total - new, total, device=ids.device)
    arguments: dict[str, Any] = {
        "attn_name": fp8_attention.IN_BLOCKS if fp8 else _NAME,
        "past_key_value_states": cache.states,
        "slot_mapping": cache.table[:, places // BLOCK] * BLOCK + places % BLOCK,
        "block_table": None if first else cache.table,
    }
    # The first call attends to what it is given; only later ones read the blocks.
    if not first:
        arguments["current_tkv_mask"] = torch.full_like(ids[:, 0], total)
        arguments["left_padded_prompt_mask"] = total - mask.sum(dim=1)
    return arguments, cache


def _empty(module: Any, ids: torch.Tensor, *, fp8: bool) -> PagedCache:
    """No blocks yet; of a model that is split over ranks each rank has some of the heads."""
    import torch

    layers: list[tuple[Any, Any]] = []
    for attention in module.modules():
        # Attention is known by its parts: its classes differ between versions of ibm-fms.
        if not (hasattr(attention, "kvheads") and hasattr(attention, "dense")):
            continue
        sizes = (attention.emb_kq_per_head, attention.emb_v_per_head)
        weights = attention.dense.weight
        nothing = [weights.new_zeros((0, BLOCK, attention.kvheads, size)) for size in sizes]
        if fp8:
            unknown = torch.ones(len(ids), device=ids.device)
            nothing = [Scaled(blocks.to(torch.float8_e4m3fn), unknown) for blocks in nothing]
        layers.append((nothing[0], nothing[1]))
    return PagedCache(layers, ids.new_zeros((len(ids), 0)))


def _with_room(cache: PagedCache, total: int) -> PagedCache:
    import torch

    batch, present = cache.table.shape
    # Rounded up: a block that is partly used is needed as a whole.
    more = -(-total // BLOCK) - present
    if more <= 0:
        return cache
    used = present * batch
    fresh = torch.arange(used, used + more * batch, device=cache.table.device)
    table = torch.cat([cache.table, fresh.view(batch, more)], dim=1)
    states = [
        (_longer(keys, more * batch), _longer(values, more * batch))
        for keys, values in cache.states
    ]
    return PagedCache(states, table)


def _longer(blocks: Any, more: int) -> Any:
    import torch

    if isinstance(blocks, Scaled):
        return Scaled(_longer(blocks.data, more), blocks.scale)
    return torch.cat([blocks, blocks.new_zeros((more, *blocks.shape[1:]))])
