"""What an attention adds to its scores for every distance: learned tables, buckets, slopes.

The amounts are not known, so they are solved for: an attention is smooth in them, and there are
many more outputs than distances. Numbers that move all scores of a head alike make no difference.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from driftline.diagnosis.causes.case import F64

_STEPS = 25
_ENOUGH = 3
"""Outputs that there must be for each amount."""


def at_distances(table: F64, queries: int, keys: int) -> F64:
    """[heads, queries, keys] of amounts by distance, whose middle is that of no distance."""
    middle = (table.shape[1] - 1) // 2
    apart = np.arange(keys)[None] - np.arange(keys - queries, keys)[:, None]
    return table[:, np.clip(apart + middle, 0, table.shape[1] - 1)]


def solved_distances(
    weigh: Callable[[F64], F64], values: F64, target: F64, table: F64
) -> F64 | None:
    """The amounts by distance that bring an attention nearest to an output; None with too few.

    Args:
        weigh: The attention's weights, [sequences, heads, queries, keys], with some amounts.
        values: What is weighed, [sequences, heads, keys, width].
        target: The output, [sequences, heads, queries, width].
        table: Where the search begins, [heads, distances].
    """
    if target[:, 0].size < _ENOUGH * table.shape[1]:
        return None

    def off(amounts: F64) -> tuple[F64, F64, F64]:
        """Weights, what they leave of the target, and the energy of that in every head."""
        weights = weigh(amounts)
        left = target - np.matmul(weights, values)
        return weights, left, np.sum(left * left, axis=(0, 2, 3))

    damping = np.full(len(table), 1e-3)
    weights, left, rest = off(table)
    for _ in range(_STEPS):
        proposed = table + _step(weights, values, left, damping)
        others = off(proposed)
        better = others[2] < rest
        damping = np.where(better, damping / 5.0, damping * 8.0)
        chosen = better[None, :, None, None]
        table = np.where(better[:, None], proposed, table)
        weights, left = (
            np.where(chosen, b, a) for a, b in zip((weights, left), others[:2], strict=True)
        )
        rest = np.where(better, others[2], rest)
        if float(rest.sum()) <= 1e-14 * float(np.sum(target * target)):
            break
    return table


def _step(weights: F64, values: F64, left: F64, damping: F64) -> F64:
    """How the amounts of every head must change, to first order."""
    sequences, heads, queries, keys = weights.shape
    middle, count = keys - 1, 2 * keys - 1
    changes = np.zeros((heads, count))
    made = np.matmul(weights, values)
    for head in range(heads):
        slopes = np.zeros((sequences, queries, values.shape[-1], count))
        for query in range(queries):
            places: npt.NDArray[np.intp] = np.arange(keys) - (query + keys - queries) + middle
            apart = values[:, head] - made[:, head, query, None]
            moves = weights[:, head, query, :, None] * apart
            slopes[:, query][:, :, places] = moves.transpose(0, 2, 1)
        flat = slopes.reshape(-1, count)
        squares = flat.T @ flat
        most = float(np.trace(squares)) / count
        squares[np.diag_indices(count)] += damping[head] * np.diag(squares) + 1e-9 * most + 1e-300
        changes[head] = np.linalg.solve(squares, flat.T @ left[:, head].reshape(-1))
    return np.clip(changes, -3.0, 3.0)
