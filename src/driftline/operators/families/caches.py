"""Keys and values written into caches; in place, so the result is the cache."""

from __future__ import annotations

import numpy as np

from driftline.operators.families.calling import (
    AnyArray,
    Call,
    Definition,
    Result,
    Tensor,
    fits,
)

_KEY_ONLY, _TILED = 1, 2


def kv_cache(call: Call) -> list[Result]:
    """New tokens put behind the earlier ones of each sequence, in one layer of the cache."""
    new, layer, cache = call.at(0, "new tokens"), call.at(1, "layer"), call.at(2, "cache")
    number = int(layer.values.reshape(-1)[0])
    values = cache_with(cache.values, new.values, number, call.at(3), call.at(4))
    return [Result(values, call.out_dtype(cache.dtype), exact=True)]


def cache_with(
    cache: AnyArray, new: AnyArray, layer: int, offsets: Tensor, lengths: Tensor
) -> AnyArray:
    """A cache of (layers, batch, longest, hidden) with the new tokens in it."""
    fits(
        cache.ndim == 4 and 0 <= layer < cache.shape[0],
        f"the cache {list(cache.shape)} has no layer {layer}",
    )
    found = cache.copy()
    rows = new.reshape(-1, cache.shape[3]) if new.size % cache.shape[3] == 0 else new
    at = 0
    ends = offsets.values.reshape(-1).tolist()
    sizes = lengths.values.reshape(-1).tolist()
    fits(
        len(ends) == len(sizes) <= cache.shape[1] and sum(sizes) <= rows.shape[0],
        f"{len(sizes)} sequences of {sum(sizes)} tokens do not fit the cache or the new tokens",
    )
    for batch, (end, size) in enumerate(zip(ends, sizes, strict=True)):
        fits(end - size >= 0 and end <= cache.shape[2], f"token offset {end} leaves the cache")
        found[layer, batch, end - size : end] = rows[at : at + size]
        at += size
    return found


def reshape_and_cache(call: Call) -> list[Result]:
    """Each token's keys and values at its slot of a cache in blocks; slot -1 is left out."""
    fits(call.whole("compressType", 0) == 0, "a compressed cache is not defined here")
    form = call.whole("kvCacheCfg", 0)
    if form == _KEY_ONLY:
        pairs = [(call.at(0, "key"), call.at(1, "key cache"))]
        slots = call.at(2, "slots")
    else:
        pairs = [
            (call.at(0, "key"), call.at(2, "key cache")),
            (call.at(1, "value"), call.at(3, "value cache")),
        ]
        slots = call.at(4, "slots")
    places = slots.values.reshape(-1).astype(np.int64)
    return [
        Result(
            _slotted(cache.values, new.values, places, tiled=form == _TILED),
            call.out_dtype(cache.dtype, number),
            exact=True,
        )
        for number, (new, cache) in enumerate(pairs)
    ]


def _slotted(cache: AnyArray, new: AnyArray, places: AnyArray, *, tiled: bool) -> AnyArray:
    fits(cache.ndim >= 3 and new.shape[0] >= places.size, "fewer tokens than slots")
    found = np.moveaxis(cache, 2, 1).copy() if tiled else cache.copy()
    flat = found.reshape(-1, *found.shape[2:])
    used = places >= 0
    fits(
        not used.any() or places.max() < flat.shape[0],
        f"slot {places.max(initial=0)} of {flat.shape[0]} does not exist",
    )
    rows = new[: places.size][used]
    fits(
        not rows.size or rows[0].size == flat[0].size,
        f"a token has {rows[0].size if rows.size else 0} elements, a slot {flat[0].size}",
    )
    flat[places[used]] = rows.reshape(-1, *flat.shape[1:])
    return np.moveaxis(found, 1, 2) if tiled else found


DEFINITIONS: dict[str, Definition] = {
    "KvCache": kv_cache,
    "ReshapeAndCache": reshape_and_cache,
}
