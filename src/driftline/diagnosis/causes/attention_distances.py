"""What an attention adds to its scores for every distance: learned tables, buckets, slopes.

The amounts are not known, so they are solved for: an attention is smooth in them, and there are
many more outputs than distances. Numbers that move all scores of a head alike make no difference.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol, TypeVar

import numpy as np

from driftline.diagnosis.causes.case import F64

_STEPS = 25
_ENOUGH = 3
"""Outputs that there must be for each amount."""


class _Attention(Protocol):
    """What is needed of an attention; see `attention_model.Attention`."""

    @property
    def q(self) -> F64: ...
    @property
    def k(self) -> F64: ...
    @property
    def v(self) -> F64: ...
    @property
    def by_distance(self) -> F64 | None: ...
    def weights(self) -> F64: ...
    def output(self) -> F64: ...


Some = TypeVar("Some", bound=_Attention)


def at_distances(table: F64, queries: int, keys: int) -> F64:
    """[heads, queries, keys] of amounts by distance, whose middle is that of no distance."""
    middle = (table.shape[1] - 1) // 2
    apart = np.arange(keys)[None] - np.arange(keys - queries, keys)[:, None]
    return table[:, np.clip(apart + middle, 0, table.shape[1] - 1)]


def with_distances(made: Some, wanted: F64) -> Some | None:
    """An attention with the amounts by distance that bring it nearest to an output.

    Args:
        made: Where the search begins.
        wanted: The output, heads joined.
    """
    sequences, queries, heads, width = made.q.shape
    keys = made.k.shape[1]
    count = 2 * keys - 1
    if sequences * queries * width < _ENOUGH * count or wanted.shape != made.output().shape:
        return None
    table = made.by_distance if made.by_distance is not None else np.zeros((heads, count))
    if table.shape != (heads, count):
        return None
    values = np.repeat(made.v, heads // made.v.shape[2], axis=2).transpose(0, 2, 1, 3)
    target = wanted.reshape(sequences, queries, heads, width).transpose(0, 2, 1, 3)
    best: Any = replace(made, by_distance=table)  # type: ignore[type-var]
    damping = np.full(heads, 1e-3)
    weights, left, rest = _off(best, values, target)
    for _ in range(_STEPS):
        moved = table + _step(weights, values, left, damping, count)
        other: Any = replace(best, by_distance=moved)
        found, off, after = _off(other, values, target)
        better = after < rest
        damping = np.where(better, damping / 5.0, damping * 8.0)
        table = np.where(better[:, None], moved, table)
        if better.any():
            best = replace(best, by_distance=table)
            weights = np.where(better[None, :, None, None], found, weights)
            left = np.where(better[None, :, None, None], off, left)
            rest = np.where(better, after, rest)
        if float(rest.sum()) <= 1e-14 * float(np.sum(target * target)):
            break
    return best


def _off(made: _Attention, values: F64, target: F64) -> tuple[F64, F64, F64]:
    """Weights, what they leave of the target, and the energy of that in every head."""
    weights = made.weights()
    left = target - np.matmul(weights, values)
    return weights, left, np.sum(left * left, axis=(0, 2, 3))


def _step(weights: F64, values: F64, left: F64, damping: F64, count: int) -> F64:
    """How the amounts of every head must change, to first order."""
    sequences, heads, queries, keys = weights.shape
    middle = keys - 1
    changes = np.zeros((heads, count))
    made = np.matmul(weights, values)
    for head in range(heads):
        slopes = np.zeros((sequences, queries, values.shape[-1], count))
        for query in range(queries):
            at = np.arange(keys) - (query + keys - queries) + middle
            apart = values[:, head] - made[:, head, query, None]
            moves = weights[:, head, query, :, None] * apart
            slopes[:, query][:, :, at] = moves.transpose(0, 2, 1)
        flat = slopes.reshape(-1, count)
        squares = flat.T @ flat
        most = float(np.trace(squares)) / count
        squares[np.diag_indices(count)] += damping[head] * np.diag(squares) + 1e-9 * most + 1e-300
        changes[head] = np.linalg.solve(squares, flat.T @ left[:, head].reshape(-1))
    return np.clip(changes, -3.0, 3.0)
