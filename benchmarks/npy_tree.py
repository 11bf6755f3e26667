"""Two folders of 20 000 `.npy` files: `driftline.compare` against `np.load` and numpy per pair.

The numpy side is a careful script. It loads both files, widens them to float64 and measures most
figures of driftline's table (it omits ULPs and the positions of non-finite elements). Small files
show the work per file, larger ones the work per value. Most files are hard links to 140 files,
which cost the same to open and read but save disk space. The value is a ratio of wall times, the
best of some rounds in which both sides take turns. Driftline reads ahead on a second core. The note
also has the processor time of both sides, which is more reliable on a busy machine.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

COUNT = 20_000
SCRIPTED = 2_000
"""Number of pairs that the numpy side measures; its time is multiplied."""
DISTINCT = 140
SIZES = (("16 kB", 4096), ("256 kB", 65536))
ROUNDS = 3


def make_tree(root: Path, count: int, elements: int, scale: float) -> None:
    values = np.random.default_rng(0).standard_normal(elements + DISTINCT).astype(np.float32)
    made: list[Path] = []
    for at in range(count):
        folder = root / f"layers.{at // 20}"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"op{at % 20}.npy"
        if at < DISTINCT:
            array = values[at : at + elements].reshape(4, -1) * np.float32(1 + scale * (at % 7))
            np.save(path, array)
            made.append(path)
        else:
            path.hardlink_to(made[at % DISTINCT])


def scripted(ours: Path, theirs: Path, count: int) -> list[tuple[Any, ...]]:
    """Figures of each pair, as a user's script would compute them."""
    rows: list[tuple[Any, ...]] = []
    for at in range(count):
        name = f"layers.{at // 20}/op{at % 20}.npy"
        r = np.load(ours / name).astype(np.float64).ravel()
        c = np.load(theirs / name).astype(np.float64).ravel()
        e = c - r
        size = np.abs(e)
        scale = np.abs(r)
        relative = np.divide(size, scale, out=np.zeros_like(size), where=scale > 0)
        norm_r, norm_c = np.linalg.norm(r), np.linalg.norm(c)
        rows.append(
            (
                np.linalg.norm(e) / norm_r,
                np.dot(r, c) / (norm_r * norm_c),
                size.max(),
                size.mean(),
                np.sqrt(np.mean(e * e)),
                relative.max(),
                relative.mean(),
                np.dot(e, r) / np.dot(r, r),
                np.mean(size > 1e-5 + 1.3e-6 * scale),
                np.count_nonzero(e),
                np.count_nonzero(np.isfinite(r) != np.isfinite(c)),
                size.argmax(),
                *(r.min(), r.max(), r.mean(), r.std(), norm_r),
                *(np.isnan(r).sum(), np.isinf(r).sum()),
                *(c.min(), c.max(), c.mean(), c.std(), norm_c),
                *(np.isnan(c).sum(), np.isinf(c).sum()),
            )
        )
    return rows


def run() -> list[Any]:
    return [_measured(size, elements) for size, elements in SIZES]


def _measured(size: str, elements: int) -> dict[str, Any]:
    from driftline.comparison.pipeline import compare

    root = Path(tempfile.mkdtemp(prefix="driftline-npy-"))
    try:
        ours, theirs = root / "a", root / "b"
        make_tree(ours, COUNT, elements, 0.0)
        make_tree(theirs, COUNT, elements, 1e-7)
        script: list[tuple[float, float]] = []
        driftline: list[tuple[float, float]] = []
        rows: list[tuple[Any, ...]] = []
        found: dict[str, Any] = {}
        for _ in range(ROUNDS):
            begin = time.perf_counter(), time.process_time()
            rows = scripted(ours, theirs, SCRIPTED)
            wall, processor = time.perf_counter() - begin[0], time.process_time() - begin[1]
            script.append((wall * COUNT / SCRIPTED, processor * COUNT / SCRIPTED))
            begin = time.perf_counter(), time.process_time()
            table = compare(ours, theirs)
            driftline.append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
            found = {row.key.site: row for row in table.rows}
        assert len(found) == COUNT
        for at in range(0, SCRIPTED, 97):
            row = found[f"layers.{at // 20}/op{at % 20}"]
            assert np.isclose(row.metrics["relative_l2"], rows[at][0], rtol=1e-9), row.key
            assert np.isclose(row.metrics["cosine"], rows[at][1], rtol=1e-9), row.key
        we, they = min(driftline)[0], min(script)[0]
        our_work, their_work = (min(one[1] for one in side) for side in (driftline, script))
        return {
            "what": f"20 000 npy files of {size} against others",
            "value": they / we,
            "goal": 5.0,
            "better": "higher",
            "unit": "x",
            "note": f"{we:.2f} s against {they:.2f} s of np.load and numpy; "
            f"processor time {our_work:.2f} against {their_work:.2f} s",
        }
    finally:
        shutil.rmtree(root, ignore_errors=True)
