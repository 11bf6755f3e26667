"""A cache that lies in blocks, for the paged attention of ibm-fms: which token is stored where.

ibm-fms brings the operators (`spyre::paged_attn_store`, `…_compute`) in a plain form for CPU and
CUDA, which the AIU's compiler replaces by its own. Every sequence has blocks of its own; padding
takes places as tokens do, and is not looked at.
"""

# torch and fms are only partly annotated.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from driftline.registry import require

if TYPE_CHECKING:
    import torch

PAGED = "paged"
"""The attention of a target that this is for."""
BLOCK = 64
"""Tokens of a block, as on the AIU."""
_OPERATORS = "fms.utils.spyre.paged"
_NAME = "spyre_paged_attn"


class PagedCache(NamedTuple):
    """Keys and values of each layer [blocks, BLOCK, heads, size], and each sequence's blocks."""

    states: list[tuple[torch.Tensor, torch.Tensor]]
    table: torch.Tensor


def paged_arguments(
    module: Any, ids: torch.Tensor, mask: torch.Tensor, cache: PagedCache | None
) -> tuple[dict[str, Any], PagedCache]:
    """What a model of ibm-fms is told beside ids and positions, and the cache with room for them.

    Args:
        module: The model.
        ids: int64 [batch, new].
        mask: bool [batch, all]: True where a token is real, of everything up to the last id.
        cache: What there is so far; None at first.
    """
    import torch

    require(_OPERATORS, install="driftline[fms]")
    first = cache is None
    total, new = int(mask.shape[1]), int(ids.shape[1])
    cache = _with_room(_empty(module, ids) if cache is None else cache, total)
    places = torch.arange(total - new, total, device=ids.device)
    words: dict[str, Any] = {
        "attn_name": _NAME,
        "past_key_value_states": cache.states,
        "slot_mapping": cache.table[:, places // BLOCK] * BLOCK + places % BLOCK,
        "block_table": None if first else cache.table,
    }
    if not first:
        words["current_tkv_mask"] = torch.full_like(ids[:, 0], total)
        words["left_padded_prompt_mask"] = total - mask.sum(dim=1)
    return words, cache


def _empty(module: Any, ids: torch.Tensor) -> PagedCache:
    config = module.config
    heads = int(getattr(config, "kvheads", 0) or config.nheads)
    size = int(getattr(config, "head_dim", 0) or config.emb_dim // config.nheads)
    weights = next(module.parameters())
    nothing = weights.new_zeros((0, BLOCK, heads, size))
    return PagedCache([(nothing, nothing)] * int(config.nlayers), ids.new_zeros((len(ids), 0)))


def _with_room(cache: PagedCache, total: int) -> PagedCache:
    import torch

    batch, there = cache.table.shape
    more = -(-total // BLOCK) - there
    if more <= 0:
        return cache
    known = cache.states[0][0].shape[0]
    fresh = torch.arange(known, known + more * batch, device=cache.table.device)
    table = torch.cat([cache.table, fresh.view(batch, more)], dim=1)
    states: list[tuple[torch.Tensor, torch.Tensor]] = []
    for keys, values in cache.states:
        room = keys.new_zeros((more * batch, *keys.shape[1:]))
        states.append((torch.cat([keys, room]), torch.cat([values, room])))
    return PagedCache(states, table)
