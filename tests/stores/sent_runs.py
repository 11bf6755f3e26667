"""A small run of several shards, the same each time."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from driftline.runs.records import Record, TensorKey
from driftline.runs.writer import RunWriter


def write_run(
    path: Path, *, shift: float = 0.0, large: int = 0, ranks: int = 1, shard_bytes: int = 1 << 20
) -> Path:
    """Small, middling and, if asked for, large tensors in several shards per rank."""
    for rank in range(ranks):
        draw = np.random.default_rng(rank)
        writer = RunWriter(path, rank=rank, world_size=ranks, shard_bytes=shard_bytes)
        sizes = [200] * 40 + [60_000] * 8 + [700_000] + ([large] if large else [])
        for at, count in enumerate(sizes):
            values = draw.standard_normal(count).astype(np.float32)
            if at >= 20:
                values += np.float32(shift)
            record = Record(TensorKey.of(f"layer.{at}", "output"), at, "float32", (count,))
            writer.put(record, values.view(np.uint8))
        writer.topology({"schema": 1, "modules": []})
        writer.event("note", "said by the program")
        writer.close()
    return path
