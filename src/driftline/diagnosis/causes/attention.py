"""Mistakes inside an attention, found by recomputing it from its queries, keys and values.

Only used if the plain softmax attention, recomputed from what the parts gave, equals what the
reference has. Then every known mistake (scale, mask, rotation, heads) is made on purpose and
compared with the candidate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from driftline.diagnosis.causes.case import F64, Case, Clue

# Two sequences of 256 tokens show every mistake; more would only cost time, which grows with the
# square of the tokens.
_SEQUENCES = 2
_TOKENS = 256
_FITS = 0.02
"""Relative error of the recomputed attention that still counts as the same."""
# Widths of heads, the common ones first: the first that reproduces the reference is taken.
_WIDTHS = (16, 32, 64, 128, 8, 24, 40, 48, 80, 96, 256)
_FACTORS = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1.05, 1.1, 1.2, 1.3, 1.5, 2.0, 4.0)
# Names of the projections in the model libraries we know.
_NAMES = {
    "q": ("q_proj", "query", "q", "q_lin", "wq"),
    "k": ("k_proj", "key", "k", "k_lin", "wk"),
    "v": ("v_proj", "value", "v", "v_lin", "wv"),
    "qkv": ("c_attn", "qkv", "qkv_proj", "query_key_value", "in_proj", "wqkv"),
}
_Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Attention:
    """One way to compute an attention; a mistake is a copy with one field changed.

    Attributes:
        q: Queries, [sequences, tokens, heads, width].
        k: Keys, with as many or fewer heads.
        v: Values.
        cos: Rotation, [tokens, width]; None without one.
        scale: Of the scores.
        seen: Which key each query may see, [tokens, tokens].
        pads: Which keys are padding, [sequences, tokens]; None without.
        interleaved: Rotate neighbours rather than halves.
        tiled: Queries share keys in turns rather than in blocks.
        late: By how many tokens the keys' positions are late.
    """

    q: F64
    k: F64
    v: F64
    scale: float
    seen: _Mask
    cos: F64 | None = None
    sin: F64 | None = None
    pads: _Mask | None = None
    interleaved: bool = False
    tiled: bool = False
    late: int = 0

    def output(self) -> F64:
        """Heads joined, [sequences, tokens, heads x width]."""
        groups = self.q.shape[2] // self.k.shape[2]
        # Rotation comes before sharing of heads: keys are rotated once each.
        q = self._turned(self.q, 0)
        k, v = self._turned(self.k, self.late), self.v
        if groups > 1:
            k, v = (_shared(tensor, groups, self.tiled) for tensor in (k, v))
        scores = np.einsum("bqhd,bkhd->bhqk", q, k) * self.scale
        allowed = self.seen[None, None]
        if self.pads is not None:
            allowed = allowed & ~self.pads[:, None, None, :]
        # Finite, so that a row in which everything is hidden gives a mean and not NaN.
        scores = np.where(allowed, scores, -1e30)
        scores -= scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores)
        weights /= weights.sum(axis=-1, keepdims=True)
        made = np.einsum("bhqk,bkhd->bqhd", weights, v)
        return made.reshape(*made.shape[:2], -1)

    def _turned(self, x: F64, late: int) -> F64:
        if self.cos is None or self.sin is None:
            return x
        cos, sin = np.roll(self.cos, late, axis=0), np.roll(self.sin, late, axis=0)
        half = x.shape[-1] // 2
        if self.interleaved:
            turned = np.stack([-x[..., 1::2], x[..., 0::2]], axis=-1).reshape(x.shape)
            cos, sin = (np.repeat(table[:, :half], 2, axis=-1) for table in (cos, sin))
        else:
            turned = np.concatenate([-x[..., half:], x[..., :half]], axis=-1)
        return x * cos[None, :, None] + turned * sin[None, :, None]


class _Mistake(NamedTuple):
    cause: str
    what: str
    made: Attention


def attention(case: Case) -> Clue | None:
    """The mistake that turns the right attention into the candidate's."""
    # Small ratios are noise, for which any mistake fits as well as another.
    if case.r.ndim != 3 or not case.parts or case.ratio < 1.5:
        return None
    sequences, tokens = min(case.r.shape[0], _SEQUENCES), min(case.r.shape[1], _TOKENS)
    if tokens < 4:
        return None
    few = replace(case, r=case.r[:sequences, :tokens], c=case.c[:sequences, :tokens], inputs={})
    right = _matching_attention(few, sequences, tokens)
    if right is None:
        return None
    base = right.output()
    best: Clue | None = None
    for mistake in _mistakes(right):
        # The difference to the recomputed attention is added to the reference, so that errors of
        # recomputing cancel.
        score = few.explained(few.r + mistake.made.output() - base)
        if best is None or score > best.score:
            best = Clue(mistake.cause, score, mistake.what, "attention")
    scaled = _scaled(few, right, base)
    if scaled is not None and (best is None or scaled.score > best.score):
        best = scaled
    return best


def _matching_attention(case: Case, sequences: int, tokens: int) -> Attention | None:
    """The attention that gives what the reference has; None if no variant does."""
    projections = _queries_keys_values(case.parts, sequences, tokens)
    if projections is None:
        return None
    # Models with rotary embeddings pass their tables as inputs; without them there is no rotation.
    cos, sin = (_table(case.parts, number, tokens) for number in (0, 1))
    widths = (cos.shape[-1],) if cos is not None else _WIDTHS
    pads = case.pads[:sequences, :tokens] if case.pads is not None else None
    ahead = np.tri(tokens, dtype=np.bool_)
    size = float(np.sum(case.r**2))
    for width in widths:
        if any(tensor.shape[-1] % width for tensor in projections):
            continue
        q, k, v = (tensor.reshape(sequences, tokens, -1, width) for tensor in projections)
        if q.shape[2] % k.shape[2]:
            continue
        for seen in (ahead, np.ones_like(ahead)):
            recomputed = Attention(q, k, v, 1.0 / math.sqrt(width), seen, cos, sin, pads)
            made = recomputed.output()
            # Parts that are called like those of an attention may be of something else.
            if made.shape != case.r.shape:
                return None
            left = made - case.r
            if pads is not None:
                # What padding tokens give is nobody's concern and differs between implementations.
                left = np.where(pads[..., None], 0.0, left)
            if float(np.sum(left * left)) <= max(_FITS, 3.0 * case.noise) ** 2 * size:
                return recomputed
    return None


def _queries_keys_values(
    parts: Mapping[str, F64], sequences: int, tokens: int
) -> tuple[F64, F64, F64] | None:
    # Only the last part of a site's name tells which projection it is.
    by_name = {name.rpartition(".")[2]: values for name, values in parts.items()}

    def of(kind: str) -> F64 | None:
        for name in _NAMES[kind]:
            values = by_name.get(name)
            if values is not None and values.ndim == 3:
                return values[:sequences, :tokens]
        return None

    q, k, v = of("q"), of("k"), of("v")
    if q is not None and k is not None and v is not None:
        return q, k, v
    joined = of("qkv")
    if joined is None or joined.shape[-1] % 3:
        return None
    third = joined.shape[-1] // 3
    return joined[..., :third], joined[..., third : 2 * third], joined[..., 2 * third :]


def _table(parts: Mapping[str, F64], number: int, tokens: int) -> F64 | None:
    values = parts.get(f"position_embeddings.{number}")
    if values is None or values.ndim < 2 or values.shape[-2] < tokens:
        return None
    return values.reshape(-1, *values.shape[-2:])[0, :tokens]


def _mistakes(right: Attention) -> Iterator[_Mistake]:
    tokens = right.seen.shape[0]
    causal = not right.seen.all()
    if causal:
        yield _Mistake(
            "mask",
            "it is the attention without its causal mask: tokens see what comes after them",
            replace(right, seen=np.ones_like(right.seen)),
        )
        behind = np.tri(tokens, k=-1, dtype=np.bool_)
        behind[0, 0] = True
        yield _Mistake(
            "shift",
            "it is the attention one key late: tokens do not see themselves",
            replace(right, seen=behind),
        )
        yield _Mistake(
            "mask",
            "it is the attention with a mask off by one: tokens see the next one",
            replace(right, seen=np.tri(tokens, k=1, dtype=np.bool_)),
        )
    else:
        yield _Mistake(
            "mask",
            "it is the attention with a causal mask that does not belong there",
            replace(right, seen=np.tri(tokens, dtype=np.bool_)),
        )
    if right.pads is not None and right.pads.any():
        yield _Mistake("mask", "it is the attention that sees padding", replace(right, pads=None))
    yield _Mistake(
        "shift",
        "it is the attention with keys and values of the token before",
        replace(right, k=np.roll(right.k, 1, axis=1), v=np.roll(right.v, 1, axis=1)),
    )
    if right.q.shape == right.k.shape:
        yield _Mistake(
            "permutation",
            "it is the attention with queries and keys exchanged",
            replace(right, q=right.k, k=right.q),
        )
        yield _Mistake(
            "permutation",
            "it is the attention with keys and values exchanged",
            replace(right, k=right.v, v=right.k),
        )
    elif right.k.shape[2] > 1:
        yield _Mistake(
            "permutation",
            "it is the attention with key heads shared in turns rather than in blocks",
            replace(right, tiled=True),
        )
    if right.cos is not None:
        yield _Mistake(
            "permutation",
            "it is the attention whose rotation takes neighbours for halves",
            replace(right, interleaved=True),
        )
        yield _Mistake(
            "shift",
            "it is the attention whose keys are rotated to the position before",
            replace(right, late=1),
        )


def _scaled(case: Case, right: Attention, base: F64) -> Clue | None:
    """Another factor of the scores: the best of a few, refined by a search over thirds."""

    def made(factor: float) -> F64:
        return case.r + replace(right, scale=right.scale * factor).output() - base

    def left(factor: float) -> float:
        # Not the score: that is cut off at 1, where a search would lose its way.
        rest = np.where(case.finite, case.c - made(factor), 0.0)
        return float(np.sum(rest * rest))

    width = right.q.shape[-1]
    best = min((*_FACTORS, math.sqrt(width), width**-0.5), key=left)
    low, high = best / 1.15, best * 1.15
    for _ in range(12):
        a, b = low + (high - low) / 3, high - (high - low) / 3
        if left(a) > left(b):
            low = a
        else:
            high = b
    best = (low + high) / 2
    return Clue(
        "scale",
        case.explained(made(best)),
        f"it is the attention with its scores scaled by {best:.4g} times the right factor",
        "attention",
    )


def _shared(x: F64, groups: int, tiled: bool) -> F64:
    if tiled:
        return np.concatenate([x] * groups, axis=2)
    return np.repeat(x, groups, axis=2)
