"""Every token has what belongs to its neighbour: positions or a cache that are off by one."""

from __future__ import annotations

import numpy as np

from driftline.diagnosis.causes.case import Case, Clue


def shift(case: Case) -> Clue | None:
    """`c[t] = r[t - d]` along the tokens, for small d; the ends do not count."""
    if case.tokens is None or case.ratio < 2.0:
        return None
    axis = case.tokens
    length = case.r.shape[axis]
    best: Clue | None = None
    for by in (1, -1, 2, -2):
        if length < 4 * abs(by):
            continue
        inner = np.zeros(length, dtype=bool)
        inner[abs(by) : length - abs(by)] = True
        where = np.broadcast_to(
            inner.reshape([-1 if at == axis else 1 for at in range(case.r.ndim)]), case.r.shape
        )
        share = case.explained(np.roll(case.r, by, axis=axis), where)
        if best is None or share > best.score:
            side = "before" if by > 0 else "after"
            count = "the token" if abs(by) == 1 else f"{abs(by)} tokens"
            best = Clue(
                "shift", share, f"every token has what belongs to {count} {side} it", f"{by:+d}"
            )
    return best
