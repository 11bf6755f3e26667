"""Random elements are zero and all others larger by the same factor: dropout left on."""

from __future__ import annotations

import numpy as np

from driftline.diagnosis.causes.case import Case, Clue


def dropout(case: Case) -> Clue | None:
    """`c = 0` at a share p of scattered places, `c = r / (1 - p)` elsewhere."""
    live = (case.r != 0.0) & case.finite
    empty = (case.c == 0.0) & live
    count = int(np.count_nonzero(live))
    p = float(np.count_nonzero(empty)) / max(count, 1)
    if count < 64 or not 0.005 <= p <= 0.95:
        return None
    kept = live & ~empty
    r, c = case.r[kept], case.c[kept]
    factor = float(np.sum(c * r) / max(float(np.sum(r * r)), 1e-300))
    if abs(factor * (1.0 - p) - 1.0) > 0.25 * p + 3.0 * np.sqrt(p / count):
        return None
    if factor <= 1.0:
        return None
    share = case.explained(np.where(empty, 0.0, case.r * factor))
    rows = case.rows(empty.astype(np.float64))
    spread = float(rows.mean(axis=0).max()) if len(rows) > 8 else 0.0
    if spread > 0.98 and p < 0.9:
        return None  # whole channels: that is a tile, not chance
    return Clue(
        "dropout",
        share,
        f"{p:.1%} of the elements are zero, the others {factor:.4g} times as large: "
        f"dropout of {1.0 - 1.0 / factor:.2g}",
        f"p={1.0 - 1.0 / factor:.2g}",
    )
