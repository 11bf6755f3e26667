"""Shards of a tensor that is several in one: each rank has its piece of q, of k and of v.

Joined rank after rank such pieces do not lie as in the whole tensor. The user can say what the
parts are; of sites called like a fused one, values tell, if only one of the ways agrees and plain
joining is far off.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from driftline.alignment.interleaving import rows_of, share_off
from driftline.runs.record import Record
from driftline.runs.run import Run

AGREE, APART = 0.05, 0.5
FUSED = re.compile(
    r"(w?_?qkv|query_key_value|c_attn|w_?pack|in_proj|kv|key_value|gate_?up|up_gate|w13|fc1|"
    r"wi|dense_h_to_4h|linear_fc1)(_?(proj|linear|layer|operation))*"
)
_WAYS = ((1, 1, 1), (1, 1), *((share, 1, 1) for share in (2, 3, 4, 5, 6, 7, 8, 12, 16)))


def positions(sizes: Sequence[int], parts: Sequence[int]) -> tuple[int, ...] | None:
    """Where the elements of the whole lie among joined shards; None if the shards have no parts so.

    >>> positions([4, 4], [1, 1])
    (0, 1, 4, 5, 2, 3, 6, 7)
    """
    unit = sum(parts)
    if any(size % unit for size in sizes):
        return None
    found: list[int] = []
    for which in range(len(parts)):
        begin = 0
        for size in sizes:
            first = begin + sum(parts[:which]) * size // unit
            found.extend(range(first, first + parts[which] * size // unit))
            begin += size
    return tuple(found)


def is_called_fused(site: str) -> bool:
    """Whether a name says that a projection is several in one.

    >>> is_called_fused("layers.0.attn.qkv_proj"), is_called_fused("layers.0.attn.q_proj")
    (True, False)
    """
    last = site.rpartition(".")[2].lower()
    return FUSED.fullmatch(re.sub(r"^\d+_", "", last)) is not None


def parts_by_values(
    run: Run, shards: Sequence[Record], other: Run, whole: Record
) -> tuple[int, ...]:
    """The parts that make shards along the last axis agree with the whole; empty if none need be.

    Args:
        run: The sharded run.
        shards: Of one tensor, in the order of ranks.
        other: The run that has it whole.
        whole: The tensor there.
    """
    target = rows_of(other, whole)
    pieces = [rows_of(run, shard) for shard in shards]
    if target is None or any(piece is None for piece in pieces):
        return ()
    known = [piece for piece in pieces if piece is not None]
    count = min(len(target), *map(len, known))
    joined = np.concatenate([piece[:count] for piece in known], axis=1)
    if not count or joined.shape[1] != target.shape[1]:
        return ()
    if not share_off(joined, target[:count]) > APART:
        return ()
    fitting: list[tuple[int, ...]] = []
    for parts in _WAYS:
        places = positions([piece.shape[1] for piece in known], parts)
        if places is not None and share_off(joined[:, places], target[:count]) < AGREE:
            fitting.append(parts)
    return fitting[0] if len(fitting) == 1 else ()
