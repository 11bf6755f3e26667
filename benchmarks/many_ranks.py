"""Many ranks on one machine: runs written by one process per rank, compared on Ray with failures.

    python -m benchmarks.many_ranks               64 ranks of 10^4, 10^5 and 10^6 tensors
    python -m benchmarks.many_ranks 64 100000     ranks, and tensors of one run

Each rank is a separate process, as with `torchrun`. It computes nothing and writes small tensors
through the writer that captures use. Both runs are then compared by one process, and on Ray with
two workers; two workers are killed while they work. The files of the two tables must be equal byte
for byte. Wall times are printed, and for the single process also processor time, so that their
growth with the number of tensors is visible.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

from benchmarks.scale import OUTPUT, measured
from driftline.runs.records import Port, Record, TensorKey
from driftline.runs.writer import RunWriter

FILES = ("table.json", "rows.csv", "rows.parquet")
RANKS = 64
COUNTS = (10_000, 100_000, 1_000_000)
WRITERS = os.cpu_count() or 1
"""Number of simultaneous rank processes; more would only wait for a core."""
KILLS = 2
BUSY = 2.5
"""Processor seconds after which a worker has begun its task; its imports take less."""


def write_rank(place: Path, rank: int, world_size: int, count: int, scale: float) -> None:
    """Write the files of one rank: inputs and outputs of modules, all tensors different."""
    base = np.random.default_rng(0).standard_normal(64 + count, np.float32)
    writer = RunWriter(place, rank=rank, world_size=world_size, seal_at_exit=False)
    for index in range(count):
        port: Port = "output" if index % 2 else "input"
        site = f"model.layers.{index // 26}.part{index % 26 // 2}"
        values = (base[index : index + 64] + np.float32(rank)) * np.float32(scale)
        record = Record(
            TensorKey.of(site, port, rank=rank), index, "float32", (64,), class_name="Linear"
        )
        writer.put(record, values.view(np.uint8))
    writer.close()


def write_runs(ranks: int, count: int) -> tuple[Path, Path, float]:
    """Write both runs; returns their folders and the wall time in seconds."""
    sides = OUTPUT / "ranks_reference", OUTPUT / "ranks_candidate"
    begin = time.perf_counter()
    for place, scale in zip(sides, ("1", "1.0000001"), strict=True):
        shutil.rmtree(place, ignore_errors=True)
        waiting = list(range(ranks))
        running: list[subprocess.Popen[bytes]] = []
        while waiting or running:
            while waiting and len(running) < WRITERS:
                words = ["rank", place, waiting.pop(0), ranks, count // ranks, scale]
                command = [sys.executable, "-m", "benchmarks.many_ranks", *map(str, words)]
                running.append(subprocess.Popen(command))
            process = running.pop(0)
            if process.wait():
                raise SystemExit(f"benchmarks: a rank ended with {process.returncode}")
    return *sides, time.perf_counter() - begin


def ray_workers(root: int) -> list[int]:
    """Process ids of Ray's workers among the descendants of `root`."""
    parents: dict[int, int] = {}
    workers: list[int] = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            parents[int(folder.name)] = int(
                (folder / "stat").read_text().rpartition(")")[2].split()[1]
            )
            if (folder / "cmdline").read_bytes().startswith(b"ray::RayWorker"):
                workers.append(int(folder.name))
        except OSError:
            continue  # the process has ended meanwhile

    def is_ours(pid: int) -> bool:
        while pid > 1:
            if pid == root:
                return True
            pid = parents.get(pid, 0)
        return False

    return sorted(pid for pid in workers if is_ours(pid))


def processor_seconds(pid: int) -> float:
    """Processor seconds that a process has used so far; 0 if it has ended."""
    try:
        times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    except OSError:
        return 0.0
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


class Killer(threading.Thread):
    """Kills a worker of Ray while it works, and later another one."""

    def __init__(self, root: int, busy: float) -> None:
        super().__init__(daemon=True)
        self._root = root
        self._busy = busy
        self.killed: list[int] = []
        self.over = False

    def run(self) -> None:
        while not self.over and len(self.killed) < KILLS:
            time.sleep(0.2)
            workers = ray_workers(self._root)
            # A worker that has just started has no task yet, so killing it would test nothing.
            busy = [pid for pid in workers if processor_seconds(pid) > self._busy]
            if not busy:
                continue
            victim = busy[len(self.killed) % len(busy)]
            try:
                os.kill(victim, signal.SIGKILL)
            except ProcessLookupError:
                continue
            self.killed.append(victim)


def compare_on_ray(reference: Path, candidate: Path, table: Path) -> tuple[float, str]:
    """Compare on Ray; returns the wall time, and a note on killed and lost workers."""
    words = [sys.executable, "-m", "driftline", "compare", str(reference), str(candidate)]
    options = ["--executor", "ray", "--jobs", "2", "-o", str(table), "--force"]
    begin = time.perf_counter()
    process = subprocess.Popen(
        [*words, *options], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    killer = Killer(process.pid, BUSY)
    killer.start()
    _, lines = process.communicate()
    wall = time.perf_counter() - begin
    killer.over = True
    killer.join()
    if process.returncode not in (0, 1):
        raise SystemExit(f"benchmarks: compare on Ray ended with {process.returncode}:\n{lines}")
    lost = sum("is lost; its work is done again" in line for line in lines.splitlines())
    return wall, f"{len(killer.killed)} workers killed, {lost} reported as lost"


def measure(ranks: int, count: int) -> bool:
    """Print one row; returns whether the tables are equal byte for byte."""
    reference, candidate, written = write_runs(ranks, count)
    alone, ray = OUTPUT / "ranks_alone", OUTPUT / "ranks_ray"
    one = measured(reference, candidate, "-q", "-o", str(alone), "--force")
    wall, kills = compare_on_ray(reference, candidate, ray)
    equal = all((alone / name).read_bytes() == (ray / name).read_bytes() for name in FILES)
    print(
        f"{ranks} ranks, {count:,} tensors a run: written in {written:.1f} s; one process "
        f"{one.wall:.1f} s ({one.processor:.1f} s of processor, {one.memory / 1e6:.0f} MB held); "
        f"Ray {wall:.1f} s, {kills}; tables {'equal to the byte' if equal else 'DIFFER'}",
        flush=True,
    )
    return equal


def main() -> None:
    words = sys.argv[1:]
    if words and words[0] == "rank":
        place, rank, world_size, count, scale = words[1:]
        write_rank(Path(place), int(rank), int(world_size), int(count), float(scale))
        return
    ranks = int(words[0]) if words else RANKS
    counts = tuple(int(float(word)) for word in words[1:]) or COUNTS
    OUTPUT.mkdir(parents=True, exist_ok=True)
    # A table that differs is a defect, so the command fails.
    tables_equal = [measure(ranks, count) for count in counts]
    if not all(tables_equal):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
