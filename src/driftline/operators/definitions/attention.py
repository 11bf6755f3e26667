"""Attention operators: rotary embeddings, writing into key and value caches, attention itself.

Attention runs over packed sequences, over a cache by sequence, or over a cache in blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np

from driftline.operators.definitions.call import (
    AnyArray,
    Call,
    Definition,
    Result,
    Tensor,
    Unfit,
    fits,
    real,
)


def rope(call: Call) -> list[Result]:
    """x · cos + turned(x) · sin for queries and keys, head by head.

    `rotaryCoeff` 2 turns the two halves of a head, 4 the two halves of each half, any other value
    neighbouring elements.
    """
    coefficient = call.whole("rotaryCoeff", 4)
    cos, sin = call.at(2, "cos"), call.at(3, "sin")
    return [
        _rotated(call, call.at(number, name), real(cos), real(sin), coefficient, number)
        for number, name in ((0, "query"), (1, "key"))
    ]


def _rotated(
    call: Call, x: Tensor, cos: AnyArray, sin: AnyArray, coefficient: int, number: int
) -> Result:
    width = cos.shape[-1] if cos.ndim else 0
    fits(cos.shape == sin.shape, f"cos {list(cos.shape)} and sin {list(sin.shape)} differ")
    # Heads of odd width have no halves to turn.
    fits(
        width > 0 and x.values.size % cos.size == 0 and width % 2 == 0,
        f"{list(x.values.shape)} cannot be split into heads of {width}",
    )
    tokens = cos.size // width
    heads = real(x).reshape(tokens, -1, width)
    cos, sin = cos.reshape(tokens, 1, width), sin.reshape(tokens, 1, width)
    chunk = {2: width, 4: width // 2}.get(coefficient, 2)
    fits(width % chunk == 0 and chunk % 2 == 0, f"heads of {width} cannot be rotated in halves")
    turned = turned_by_halves(heads, chunk)
    values = heads * cos + turned * sin
    # Two products are added: the size of both is what their rounding errors are relative to.
    scale = np.hypot(heads * cos, turned * sin).reshape(x.values.shape)
    dtype = call.out_dtype(x.dtype, number)
    return Result(values.reshape(x.values.shape), dtype, 2, scale)


def turned_by_halves(heads: AnyArray, chunk: int) -> AnyArray:
    """(-second half, first half) of every chunk."""
    parts = heads.reshape(*heads.shape[:-1], -1, 2, chunk // 2)
    return np.stack([-parts[..., 1, :], parts[..., 0, :]], -2).reshape(heads.shape)


def rope_grad(call: Call) -> list[Result]:
    """g · (cos + (second half of sin, - first half of sin)), element by element.

    This is what the operator's maker tests it against; it is not the derivative of `rope`, in which
    the elements of the gradient themselves would be turned.
    """
    cos, sin = real(call.at(2, "cos")), real(call.at(3, "sin"))
    fits(cos.ndim == 2 and cos.shape == sin.shape, "cos and sin must be two equal matrices")
    lengths = call.wholes("qSeqLen", [cos.shape[0]])
    fits(
        all(0 <= length <= cos.shape[0] for length in lengths) and cos.shape[1] % 2 == 0,
        f"qSeqLen {lengths} is longer than cos and sin ({cos.shape[0]})",
    )
    cos = np.concatenate([cos[:length] for length in lengths])
    sin = np.concatenate([sin[:length] for length in lengths])
    tokens, width = cos.shape
    turned = -turned_by_halves(sin, width)
    factor, spread = (cos + turned)[:, None], np.hypot(cos, turned)[:, None]
    gradients: list[Result] = []
    for number, name in ((0, "query gradient"), (1, "key gradient")):
        x = call.at(number, name)
        fits(
            x.values.shape[0] == tokens and x.values.shape[-1] % width == 0,
            f"{list(x.values.shape)} cannot be split into {tokens} tokens and heads of {width}",
        )
        heads = real(x).reshape(tokens, -1, width)
        scale = (np.abs(heads) * spread).reshape(x.values.shape)
        dtype = call.out_dtype(x.dtype, number)
        gradients.append(Result((heads * factor).reshape(x.values.shape), dtype, 2, scale))
    return gradients


# Caches: keys and values are written in place, so the result is the cache.


_KEY_ONLY, _TILED = 1, 2


def kv_cache(call: Call) -> list[Result]:
    """One layer of the cache, with new tokens after the earlier ones of each sequence."""
    new, layer, cache = call.at(0, "new tokens"), call.at(1, "layer"), call.at(2, "cache")
    number = int(layer.values.reshape(-1)[0])
    values = cache_with(cache.values, new.values, number, call.at(3), call.at(4))
    # Everything outside of the new tokens must stay as it was, so the whole cache is compared.
    return [Result(values, call.out_dtype(cache.dtype), exact=True)]


def cache_with(
    cache: AnyArray, new: AnyArray, layer: int, offsets: Tensor, lengths: Tensor
) -> AnyArray:
    """A cache of (layers, batch, longest, hidden) with the new tokens in it."""
    fits(
        cache.ndim == 4 and 0 <= layer < cache.shape[0],
        f"the cache {list(cache.shape)} has no layer {layer}",
    )
    filled = cache.copy()
    # New tokens may come with any leading axes; only the hidden size matters.
    rows = new.reshape(-1, cache.shape[3]) if new.size % cache.shape[3] == 0 else new
    start = 0
    ends = offsets.values.reshape(-1).tolist()
    sizes = lengths.values.reshape(-1).tolist()
    fits(
        len(ends) == len(sizes) <= cache.shape[1] and sum(sizes) <= rows.shape[0],
        f"{len(sizes)} sequences of {sum(sizes)} tokens do not fit the cache or the new tokens",
    )
    for batch, (end, size) in enumerate(zip(ends, sizes, strict=True)):
        fits(end - size >= 0 and end <= cache.shape[2], f"token offset {end} leaves the cache")
        filled[layer, batch, end - size : end] = rows[start : start + size]
        start += size
    return filled


def reshape_and_cache(call: Call) -> list[Result]:
    """A cache in blocks, with each token's keys and values in its slot; slot -1 is skipped."""
    fits(call.whole("compressType", 0) == 0, "a compressed cache is not defined here")
    # The two caches come as pairs of inputs whose positions depend on `kvCacheCfg`.
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
    filled = np.moveaxis(cache, 2, 1).copy() if tiled else cache.copy()
    flat = filled.reshape(-1, *filled.shape[2:])
    # Slots come from a dump: a negative one means padding, a large one a damaged file.
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
    # Only used slots are written; a slot of -1 belongs to padding.
    flat[places[used]] = rows.reshape(-1, *flat.shape[1:])
    return np.moveaxis(filled, 1, 2) if tiled else filled


# Attention.


_NO_MASK, _NORM, _ALIBI, _NORM_COMPRESS = 0, 1, 2, 3
_ALIBI_COMPRESS, _ALIBI_SQRT, _ALIBI_LEFT, _SLIDING, _CAUSAL = 4, 5, 6, 7, 9
_PLAIN = (_NORM, _ALIBI, _SLIDING)
_SLOPED = (_ALIBI_COMPRESS, _ALIBI_SQRT, _ALIBI_LEFT)
_HIDDEN = -3e38
"""The factor for masks of zeros and ones."""
# Scores of all queries at once would take the square of the tokens in memory.
_ROWS_AT_ONCE = 256
_PACKED = 3
_BYPASS = 1


class Setting(NamedTuple):
    """The parameters of an attention operator, evaluated."""

    heads: int
    kv_heads: int
    scale: float
    low: float | None
    high: float | None


Mask: TypeAlias = Callable[[int, slice], AnyArray]
"""A function that gives what is added to the scores of one head, for some rows of queries."""


class _Piled(NamedTuple):
    """The outputs of all sequences, concatenated, and the sizes of their terms."""

    values: list[AnyArray]
    scales: list[AnyArray]


def _setting(call: Call) -> Setting:
    heads = call.whole("headNum", 0)
    fits(heads > 0, f"headNum {heads} must be positive")
    kv_heads = call.whole("kvHeadNum", 0) or heads
    # Grouped attention: several query heads share a head of keys and values.
    fits(heads % kv_heads == 0, f"{heads} heads cannot share {kv_heads} heads of keys")
    # Variants without a definition are refused with a reason: a wrong golden value would be worse.
    fits(call.whole("scaleType", 0) == 0, "scaling with log n is not defined here")
    fits(call.whole("inputLayout", 0) == 0, "the layout BNSD is not defined here")
    q_scale = call.number("qScale", 1.0) or 1.0
    clamped = call.whole("clampType", 0) == 1
    return Setting(
        heads,
        kv_heads,
        call.number("qkScale", 1.0) * q_scale,
        call.number("clampMin", 0.0) if clamped else None,
        call.number("clampMax", 0.0) if clamped else None,
    )


def attend(
    q: AnyArray, k: AnyArray, v: AnyArray, mask: Mask | None, setting: Setting
) -> tuple[AnyArray, AnyArray]:
    """Attention of one sequence, each (tokens, heads, size); the result and its terms' size."""
    shared = setting.heads // setting.kv_heads
    attended = np.empty((q.shape[0], setting.heads, v.shape[-1]))
    scale = np.empty_like(attended)
    for head in range(setting.heads):
        keys, values = k[:, head // shared], v[:, head // shared]
        for start in range(0, q.shape[0], _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            scores = q[rows, head] @ keys.T * setting.scale
            if setting.low is not None:
                scores = np.clip(scores, setting.low, setting.high)
            size = 1.0 + np.abs(scores)
            if mask is not None:
                scores = scores + mask(head, rows)
            # The largest score is subtracted so that the exponentials cannot overflow.
            raised = np.exp(scores - scores.max(-1, keepdims=True))
            shares = raised / raised.sum(-1, keepdims=True)
            attended[rows, head] = shares @ values
            # A score has a rounding error in proportion to its size, and so has its softmax.
            scale[rows, head] = np.sqrt((shares * size) ** 2 @ values**2)
    return attended, scale


def causal(rows: int, columns: int) -> Mask:
    """A mask that hides the keys after each query, if both end with the same token."""
    later = np.triu(np.full((rows, columns), -np.inf), columns - rows + 1)
    return lambda head, part: later[part]


class Masking(NamedTuple):
    """The mask of an operator: its kind, its tensor, and the slopes of its heads."""

    kind: int
    tensor: Tensor | None = None
    slopes: AnyArray | None = None

    def of(self, batch: int, batches: int, rows: int, columns: int) -> Mask | None:
        """The mask of one sequence; None if nothing is hidden."""
        if self.kind in _SLOPED:
            return self._sloped(rows, columns)
        if self.kind in (_NORM_COMPRESS, _CAUSAL):
            return causal(rows, columns)
        if self.kind == _NO_MASK or self.tensor is None:
            return None
        # Masks come with two to four axes; all are brought to (heads or 1, rows, columns).
        values = real(self.tensor)
        if values.ndim == 4:
            values = values[min(batch, values.shape[0] - 1)]
        elif values.ndim == 3 and self.kind != _ALIBI and values.shape[0] == batches > 1:
            values = values[batch : batch + 1]
        elif values.ndim == 2:
            values = values[None]
        if self.kind == _NORM and values.shape[-1] < columns:
            return causal(rows, columns)  # a small one stands for the whole triangle
        shape = list(self.tensor.values.shape)
        fits(
            values.ndim == 3 and values.shape[1] >= rows and values.shape[2] >= columns,
            f"the mask {shape} is too small for {rows} by {columns}",
        )
        biases = values[:, :rows, :columns]
        # A mask without negative numbers marks what is hidden; it is turned into what is added.
        if self.kind != _ALIBI and values.min(initial=0.0) >= 0.0:
            biases = biases * _HIDDEN
        return lambda head, part: biases[min(head, biases.shape[0] - 1), part]

    def _sloped(self, rows: int, columns: int) -> Mask:
        """Biases that fall with the distance, from a corner of the mask and a slope per head."""
        values = None if self.tensor is None else real(self.tensor)
        slopes = self.slopes
        if values is None or slopes is None or values.ndim != 2 or min(values.shape) < 2:
            raise Unfit("a packed mask needs its corner as a matrix, and a slope for each head")
        behind = np.arange(rows)[:, None] + (columns - rows) - np.arange(columns)
        if self.kind == _ALIBI_LEFT:
            bias = np.broadcast_to(np.arange(columns) * values[-1, 1], behind.shape)
        elif self.kind == _ALIBI_SQRT:
            bias = np.sqrt(np.maximum(behind, 0)) * values[1, 0]
        else:
            bias = behind * values[1, 0]
        hidden = behind < 0
        return lambda head, part: np.where(hidden[part], -np.inf, bias[part] * slopes[head])


def _masking(call: Call, place: int) -> tuple[Masking, int]:
    """The mask at a position among the inputs, and the next position."""
    kind = call.whole("maskType", 0)
    if kind in (_NO_MASK, _CAUSAL):
        return Masking(kind), place
    is_defined = kind in _PLAIN or kind in _SLOPED or kind == _NORM_COMPRESS
    fits(is_defined, f"maskType {kind} packs its mask in a way that is not defined here")
    return Masking(kind, call.at(place, "mask")), place + 1


def _lengths(tensor: Tensor) -> tuple[list[int], list[int]]:
    """Lengths of queries and of keys; a single row serves for both."""
    values = tensor.values.astype(np.int64)
    if values.ndim == 2 and values.shape[0] == 2:
        return values[0].tolist(), values[1].tolist()
    return values.reshape(-1).tolist(), values.reshape(-1).tolist()


def self_attention(call: Call) -> list[Result]:
    """softmax(q · k · scale + mask) · v for each sequence."""
    fits(call.whole("quantType", 0) == 0, "quantised queries and keys are not defined here")
    kind = call.whole("calcType", 0)
    fits(kind <= _PACKED, f"calcType {kind} is not defined here")
    fits(not call.whole("cacheType", 0), "a cache of a sliding window is not defined here")
    if kind == _PACKED:
        return _packed(call)
    return _cached(call)


def _packed(call: Call) -> list[Result]:
    setting = _setting(call)
    # With `mlaVHeadSize` keys and values share one tensor: values are its first channels.
    merged = call.whole("mlaVHeadSize", 0)
    query, key = call.at(0, "query"), call.at(1, "key")
    masking, place = _masking(call, 2 if merged else 3)
    if masking.kind in _SLOPED:
        slopes = real(call.at(place + 1, "slopes")).reshape(-1)
        fits(slopes.size == setting.heads, f"{slopes.size} slopes for {setting.heads} heads")
        masking = masking._replace(slopes=slopes)
    q = _by_heads(query, setting.heads)
    k = _by_heads(key, setting.kv_heads)
    v = k[..., :merged] if merged else _by_heads(call.at(2, "value"), setting.kv_heads)
    q_lengths, k_lengths = _lengths(call.at(place, "sequence lengths"))
    fits(
        sum(q_lengths) == q.shape[0] and sum(k_lengths) == k.shape[0],
        f"sequence lengths {q_lengths} do not add up to {q.shape[0]} tokens",
    )
    piled = _Piled([], [])
    at_q = at_k = 0
    for batch, (rows, columns) in enumerate(zip(q_lengths, k_lengths, strict=True)):
        if rows and columns:
            part = masking.of(batch, len(q_lengths), rows, columns)
            _add(piled, q[at_q : at_q + rows], (k, v), slice(at_k, at_k + columns), part, setting)
        at_q, at_k = at_q + rows, at_k + columns
    return [_result(call, query, piled, max(k_lengths, default=1))]


def _cached(call: Call) -> list[Result]:
    """Over a cache of (layers, batch, longest, hidden); new keys are written unless bypassed."""
    setting = _setting(call)
    query = call.at(0, "query")
    bypass = call.whole("kvcacheCfg", 0) == _BYPASS
    place = 1 if bypass else 3
    k_cache, v_cache = call.at(place, "key cache"), call.at(place + 1, "value cache")
    # Positions of later inputs depend on whether a mask is given.
    masking, place = _masking(call, place + 2)
    fits(masking.kind not in _SLOPED, "a packed mask belongs to packed sequences (calcType 3)")
    offsets, lengths = call.at(place, "token offsets"), call.at(place + 1, "sequence lengths")
    layer_at = call.at(place + 2, "layer")
    fits(k_cache.values.ndim == 4, f"a cache of {k_cache.values.ndim} dimensions is not defined")
    keys, values = real(k_cache), real(v_cache)
    layer = int(layer_at.values.reshape(-1)[0])
    fits(0 <= layer < keys.shape[0], f"layer {layer} of {keys.shape[0]} does not exist")
    if not bypass:
        keys = cache_with(keys, real(call.at(1)), layer, offsets, lengths)
        values = cache_with(values, real(call.at(2)), layer, offsets, lengths)
    ends, sizes = offsets.values.reshape(-1).tolist(), lengths.values.reshape(-1).tolist()
    q = _by_heads(query, setting.heads)
    fits(sum(sizes) == q.shape[0], f"sequence lengths {sizes} are not {q.shape[0]} tokens")
    piled, start = _Piled([], []), 0
    for batch, (end, rows) in enumerate(zip(ends, sizes, strict=True)):
        fits(0 <= end <= keys.shape[2], f"token offset {end} lies outside of the cache")
        if rows:
            k = keys[layer, batch].reshape(keys.shape[2], setting.kv_heads, -1)
            v = values[layer, batch].reshape(values.shape[2], setting.kv_heads, -1)
            part = masking.of(batch, len(sizes), rows, end)
            _add(piled, q[start : start + rows], (k, v), slice(0, end), part, setting)
        start += rows
    return [_result(call, query, piled, max(ends, default=1))]


def paged_attention(call: Call) -> list[Result]:
    """One token of each sequence, over a cache whose blocks a table names."""
    setting = _setting(call)
    quant = call.whole("quantType", 0)
    fits(quant in (0, 1), f"quantType {quant} is not defined here")
    fits(call.whole("compressType", 0) == 0, "a compressed cache is not defined here")
    fits(call.whole("calcType", 0) == 0, "speculative decoding is not defined here")
    query, keys = call.at(0, "query"), call.at(1, "key cache")
    merged = call.whole("mlaVHeadSize", 0)
    place = 2 if merged else 3
    tables, lengths = call.at(place, "block table"), call.at(place + 1, "context lengths")
    kind = call.whole("maskType", 0)
    fits(kind in (0, 1, 2), f"maskType {kind} is not defined here")
    masking, place = _masking(call, place + 2)
    fits(keys.values.ndim == 4, f"a cache of {keys.values.ndim} dimensions is not defined here")
    k = real(keys)
    v = k[..., :merged] if merged else real(call.at(2, "value cache"))
    if quant:
        k, v = _descaled(call, k, v, place)
    # A single token per sequence: decoding, not prefill.
    q = _by_heads(query, setting.heads)
    sizes = lengths.values.reshape(-1).astype(np.int64).tolist()
    table = tables.values.astype(np.int64).reshape(len(sizes), -1)
    fits(len(sizes) == q.shape[0], f"{len(sizes)} context lengths for {q.shape[0]} tokens")
    piled, block = _Piled([], []), k.shape[1]
    for token, size in enumerate(sizes):
        # The blocks of a sequence in order, the last one cut to the context's length.
        used = table[token, : -(-size // block)]
        fits(
            size > 0 and used.size * block >= size and used.min() >= 0 and used.max() < k.shape[0],
            f"the block table of token {token} leaves the cache",
        )
        own = tuple(cache[used].reshape(-1, *cache.shape[2:])[:size] for cache in (k, v))
        part = masking.of(token, len(sizes), 1, size)
        _add(piled, q[token : token + 1], (own[0], own[1]), slice(0, size), part, setting)
    return [_result(call, query, piled, max(sizes, default=1))]


def _descaled(call: Call, k: AnyArray, v: AnyArray, place: int) -> tuple[AnyArray, AnyArray]:
    """An int8 cache multiplied by scales, after adding offsets, for every channel."""
    offset = call.flag("hasQuantOffset", False)
    parts: list[AnyArray] = []
    for values in (k, v):
        scale = real(call.at(place, "scale of the cache")).reshape(values.shape[2:])
        place += 1
        if offset:
            values = values + real(call.at(place, "offset of the cache")).reshape(values.shape[2:])
            place += 1
        parts.append(values * scale)
    return parts[0], parts[1]


def _by_heads(tensor: Tensor, heads: int) -> AnyArray:
    values = real(tensor)
    if values.ndim == 4:
        values = values.reshape(-1, *values.shape[2:])
    if values.ndim == 3 and values.shape[1] == heads:
        return values
    if values.ndim == 3:
        values = values.reshape(-1, values.shape[-1])
    fits(
        values.ndim == 2 and values.shape[1] % heads == 0,
        f"{list(tensor.values.shape)} cannot be split into {heads} heads",
    )
    return values.reshape(values.shape[0], heads, -1)


def _add(
    piled: _Piled,
    q: AnyArray,
    cache: tuple[AnyArray, AnyArray],
    place: slice,
    mask: Mask | None,
    setting: Setting,
) -> None:
    values, scale = attend(q, cache[0][place], cache[1][place], mask, setting)
    piled.values.append(values)
    piled.scales.append(scale)


def _result(call: Call, query: Tensor, piled: _Piled, terms: int) -> Result:
    values, scale = np.concatenate(piled.values), np.concatenate(piled.scales)
    shape = query.values.shape
    wide = values.shape[-1]
    if len(shape) == 2:
        shape = (shape[0], values.shape[1] * wide)
    elif shape[-1] * values.shape[1] * values.shape[0] != query.values.size:
        shape = (*shape[:-1], values.shape[1] * wide)
    else:
        shape = (*shape[:-1], wide)
    dtype = call.out_dtype(query.dtype)
    return Result(values.reshape(shape), dtype, terms, scale.reshape(shape))


DEFINITIONS: dict[str, Definition] = {
    "PagedAttention": paged_attention,
    "SelfAttention": self_attention,
    "Rope": rope,
    "RopeGrad": rope_grad,
    "KvCache": kv_cache,
    "ReshapeAndCache": reshape_and_cache,
}
