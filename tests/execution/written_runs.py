"""Runs to share out, and an executor that does all work in this process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from driftline.comparison.table.table import Table
from driftline.execution import codec
from driftline.execution.jobs import Finished, Job, Printed, Task, done, open_worker, result_of
from driftline.runs.writer import RunWriter
from driftline.testing.runs import record_into

FILES = ("table.json", "rows.csv", "rows.parquet")


class Here:
    """Packs, unpacks and does every task as a worker would, last one first, in this process."""

    def __init__(self, workers: int = 2, *, elsewhere: bool = False) -> None:
        self.workers = workers
        self.elsewhere = elsewhere
        self.jobs: list[Job] = []
        self.tasks: list[Task] = []

    def run(
        self, job: Job, tasks: Sequence[Task], finished: Finished, said: Printed | None = None
    ) -> None:
        self.jobs.append(job)
        self.tasks += tasks
        worker = open_worker(job.worker, codec.unpack(codec.pack(job.about)))
        for at in reversed(range(len(tasks))):
            work = codec.unpack(codec.pack(tasks[at].content()))
            lines: list[str] = []
            answer: Any = codec.unpack(codec.pack(done(worker, work, lines.append)))
            for line in lines if said is not None else ():
                said(at, line)
            finished(at, result_of(answer, tasks[at].called))


def write_run(
    place: Path, shift: float, *, ranks: int = 1, layers: int = 12, seed: int = 3
) -> Path:
    """A run with small, large, square, shared, sampled, summarised, broken and lone tensors."""
    for rank in range(ranks):
        rng = np.random.default_rng(seed + rank)
        noise = np.random.default_rng(100 + rank)
        writer = RunWriter(place, rank=rank, world_size=ranks, seal_at_exit=False)

        def put(
            name: str,
            *shape: int,
            keep: Any = "full",
            writer: RunWriter = writer,
            rng: np.random.Generator = rng,
            noise: np.random.Generator = noise,
            **more: Any,
        ) -> np.ndarray[Any, Any]:
            values = rng.standard_normal(shape).astype(np.float32)
            values += np.float32(shift) * noise.standard_normal(shape).astype(np.float32)
            record_into(writer, name, values, keep=keep, **more)
            return values

        for layer in range(layers):
            out = put(f"layers.{layer}", 17, 33 + layer)
            record_into(writer, f"layers.{layer}.again", out)  # the same bytes under another name
        put("square", 24, 24)
        put("large", 300, 400)
        put("sampled", 900, keep="sample", stride=7)
        put("summarised", 64, keep="summary")
        put("described", 5, keep="describe")
        broken = put("before.broken", 40)
        broken[3], broken[5] = np.nan, np.inf if shift else 2.0
        record_into(writer, "broken", broken)
        put("only.there" if shift else "only.here", 8)
        put("shape", 3, 4) if shift else put("shape", 4, 3)
        record_into(writer, "huge", rng.standard_normal(50) * 1e200 * (1 + shift))
        record_into(writer, "counts", rng.integers(0, 9, 77))
        writer.close()
    return place


def written(table: Table, place: Path) -> list[bytes]:
    """The files of a table, as bytes."""
    table.write(place, force=True)
    return [(place / name).read_bytes() for name in FILES]
