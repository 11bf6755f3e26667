"""Which rows of a layer's output belong to a token that counts, by the output's shape.

A row is the last dimension. Rows of padding never count; in later iterations rows of earlier tokens
do not count again, which a key-value cache gives at every step. Where a shape does not say which of
two axes is the tokens', a row counts only if it does either way: no pad slips through.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Mask = np.ndarray[Any, np.dtype[np.bool_]]
CACHE = "past_key_values"


class Span(NamedTuple):
    """The text of one call.

    Attributes:
        real: [batch, tokens], True where a token is no padding, from the first to the last token.
        given: How many tokens the cache held already; the others are what the model was given.
        new: The first position that no earlier call has computed.
    """

    real: Mask
    given: int = 0
    new: int = 0

    @property
    def counts(self) -> Mask:
        """[batch, tokens]: real and new."""
        mask = self.real.copy()
        mask[:, : self.new] = False
        return mask


def counting_rows(shape: tuple[int, ...], slot: str, span: Span) -> Mask | None:
    """Which rows count, [shape without its last axis]; None if all do.

    Args:
        shape: Of the output.
        slot: Which output it is: caches are told from others by it.
        span: The text.
    """
    lead = shape[:-1]
    everything = span.counts
    cached = len(shape) == 4 and _holds(slot, lead[2], everything.shape[1])
    # A cache with a window holds the last tokens only.
    mask = everything[:, -lead[2] :] if cached else everything[:, span.given :]
    if mask.all() or not lead:
        return None
    batch, tokens = mask.shape
    if cached:
        return _spread(mask, lead, (2,))
    if len(lead) == 1:
        if lead[0] == batch * tokens:  # tokens of all prompts in one axis
            return mask.reshape(-1)
        return _anywhere(mask)[0] if lead[0] == tokens else None
    axes = tuple(axis for axis in range(1, len(lead)) if lead[axis] == tokens)
    if lead[0] not in (1, batch) or not axes:
        return None
    return _spread(mask, lead, axes)


def is_cache(slot: str) -> bool:
    """Whether an output is part of a key-value cache: transformers say so, fms nests them.

    >>> is_cache("past_key_values.3.0"), is_cache("1.3.0"), is_cache("1.0"), is_cache("1")
    (True, True, True, False)
    """
    parts = slot.split(".")
    return parts[0] == CACHE or (len(parts) >= 2 and all(part.isdigit() for part in parts))


def _holds(slot: str, size: int, tokens: int) -> bool:
    """Whether an output is a cache of so many tokens."""
    if size == tokens:
        return is_cache(slot)
    parts = slot.split(".")
    return 0 < size < tokens and parts[0] == CACHE and parts[-1] in ("0", "1")


def _anywhere(mask: Mask) -> Mask:
    """[1, tokens]: what counts for any prompt."""
    return np.logical_or.reduce(mask, axis=0, keepdims=True)


def _spread(mask: Mask, lead: tuple[int, ...], axes: tuple[int, ...]) -> Mask:
    """The mask at the size of the leading axes; every one of `axes` may be the tokens'."""
    if lead[0] == 1 and mask.shape[0] > 1:  # one for all prompts: counts if it does for any
        mask = _anywhere(mask)
    found = np.ones(lead, dtype=np.bool_)
    for axis in axes:
        shape = [1] * len(lead)
        shape[0], shape[axis] = mask.shape
        found &= mask.reshape(shape)
    return found
