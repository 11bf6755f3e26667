"""Growth of time and memory of `driftline compare` with bytes and with tensors.

    python -m benchmarks scale                    all figures
    python -m benchmarks.scale bytes 1 10         some sizes, in GB of both sides together
    python -m benchmarks.scale tensors 1000 10000
    python -m benchmarks.scale output 100000      tensors, with each way to write the table
    python -m benchmarks.scale jobs 2             --jobs 2 compared with threads
    python -m benchmarks.scale disk               with a cold page cache

Bytes: tensors of 256 MiB of float32. Each side is one file of 1 GiB. A large run has it many times,
as hard links with other names: each byte is mapped and measured as often as it is listed, and comes
from the page cache. Thus these figures are the work itself and its memory; `disk` shows the cost of
reading. Tensors: 64 floats each, 2000 per rank, so a million tensors are 500 ranks.

Seconds are processor time (user and system, all cores together), which other load affects least,
and wall time. Memory is that besides mapped files (RssAnon), the page tables, and the mapped pages;
the maximum of each is sampled every 20 ms.

Jobs: the ratio is that of wall times, so it is meaningful only on a machine with that many free
cores. Meaningful on any machine are the processor seconds of one process, of all processes, and of
the process that distributes the work, whose part cannot be shared.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from driftline.runs.records import Port, Record, TensorKey
from driftline.runs.writer import RunWriter

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "bench-output" / "scale"
GIB = 1 << 30
SIZES = (1, 10, 100)
COUNTS = (1_000, 10_000, 100_000, 1_000_000)
PER_RANK = 2_000
TENSOR = 256 << 20
LINEAR = 1.25
"""Allowed growth of time, relative to linear growth."""
CONSTANT = 1.25
HELD = 4_096
"""Number of tensors up to which a whole comparison is held in memory."""


class Measured(NamedTuple):
    """Times in seconds and memory in bytes of one comparison."""

    wall: float
    processor: float
    memory: int
    tables: int
    mapped: int
    own: float
    """Processor seconds of the first process alone."""


def run() -> list[dict[str, Any]]:
    """Measure all figures of this suite, as described in the module's docstring."""
    return [*_grown("GB", SIZES), *_grown("tensors", COUNTS), *jobs(2)]


def _grown(unit: str, amounts: tuple[int, ...]) -> list[dict[str, Any]]:
    figures: list[dict[str, Any]] = []
    before: tuple[int, Measured] | None = None
    for amount in amounts:
        made = make_bytes(amount) if unit == "GB" else make_tensors(amount)
        found = measured(*made)
        note = (
            f"{found.processor:.2f} s of processor; {found.memory / 1e6:.0f} MB held, "
            f"{found.tables / 1e6:.0f} MB page tables, {found.mapped / 1e9:.1f} GB mapped"
        )
        figures.append(_figure(f"compare, {amount:,} {unit}", found.wall, None, "s", note))
        if before is not None:
            times = amount / before[0]
            growth = found.processor / before[1].processor / times
            figures.append(
                _figure(f"  time beyond {times:.0f}x of the last", growth, LINEAR, "x", "")
            )
            memory = found.memory / before[1].memory
            held = unit == "tensors" and before[0] < HELD  # intended, because it is faster
            goal = None if held else CONSTANT
            figures.append(_figure("  memory against the last", memory, goal, "x", ""))
        before = amount, found
        if unit == "tensors":
            for path in made:
                shutil.rmtree(path, ignore_errors=True)
    return figures


def _figure(what: str, value: float, goal: float | None, unit: str, note: str) -> dict[str, Any]:
    return {
        "what": what,
        "value": value,
        "goal": goal,
        "better": "lower",
        "unit": unit,
        "note": note,
    }


# ---- runs


def make_bytes(gigabytes: int) -> tuple[Path, Path]:
    """Two runs of this many GB together; all shards of a side are links to one file."""
    count = round(gigabytes * 1e9 / 2 / TENSOR)
    sides: list[Path] = []
    for number, side in enumerate(("reference", "candidate")):
        first = OUTPUT / f"one_{side}"
        if not (first / "ready").exists():
            _write_one(first, number)
        place = OUTPUT / f"{gigabytes}GB_{side}"
        shutil.rmtree(place, ignore_errors=True)
        (place / "rank0").mkdir(parents=True)
        shutil.copyfile(first / "run.json", place / "run.json")
        lines = (first / "rank0" / "index.jsonl").read_text().splitlines()
        with (place / "rank0" / "index.jsonl").open("w") as index:
            for order in range(count):
                shard, at = divmod(order, len(lines))
                name = f"tensors-{shard:05d}.safetensors"
                if at == 0:
                    os.link(first / "rank0" / "tensors-00000.safetensors", place / "rank0" / name)
                line = lines[at].replace("tensors-00000.safetensors", name)
                line = line.replace(f'"order":{at},', f'"order":{order},')
                index.write(line.replace('"site":"', f'"site":"part{shard}.') + "\n")
        facts = (first / "rank0" / "process.json").read_text()
        facts = facts.replace(f'"tensors": {len(lines)}', f'"tensors": {count}')
        (place / "rank0" / "process.json").write_text(facts)
        sides.append(place)
    return sides[0], sides[1]


def _write_one(place: Path, number: int) -> None:
    shutil.rmtree(place, ignore_errors=True)
    writer = RunWriter(place, seal_at_exit=False, shard_bytes=2 * GIB)
    draw = np.random.default_rng(0)
    for at in range(GIB // TENSOR):
        values = draw.standard_normal(TENSOR // 4, np.float32)
        values *= np.float32(1 + 1e-7 * number)
        record = Record(TensorKey.of(f"layer{at}", "output"), at, "float32", (TENSOR // 4,))
        writer.put(record, values.view(np.uint8))
    writer.close()
    (place / "ready").touch()


def make_tensors(count: int) -> tuple[Path, Path]:
    """Two runs of this many small tensors each; all tensors of a run are different."""
    sides = OUTPUT / f"{count}_reference", OUTPUT / f"{count}_candidate"
    per_rank = min(count, PER_RANK)
    base = np.random.default_rng(0).standard_normal(64 + per_rank, np.float32)
    for number, place in enumerate(sides):
        shutil.rmtree(place, ignore_errors=True)
        for rank in range(count // per_rank):
            writer = RunWriter(place, rank=rank, world_size=count // per_rank, seal_at_exit=False)
            for at in range(per_rank):
                port: Port = "output" if at % 2 else "input"
                site = f"model.layers.{at // 26}.part{at % 26 // 2}"
                values = (base[at : at + 64] + np.float32(rank)) * np.float32(1 + 1e-7 * number)
                key = TensorKey.of(site, port, rank=rank)
                record = Record(key, at, "float32", (64,), class_name="Linear")
                writer.put(record, values.view(np.uint8))
            writer.close()
    return sides


# ---- measuring


def measured(reference: Path, candidate: Path, *options: str) -> Measured:
    """Run and measure the whole command, as a user starts it."""
    words = [sys.executable, "-m", "driftline", "compare", str(reference), str(candidate)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.perf_counter()
    process = subprocess.Popen([*words, *options], stdout=subprocess.DEVNULL)
    watch = _Watch(process.pid)
    watch.start()
    code = process.wait()
    wall = time.perf_counter() - begin
    watch.over = True
    watch.join()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if code not in (0, 1):
        raise SystemExit(f"benchmarks: {' '.join(words)} ended with {code}")
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Measured(wall, processor, watch.memory, watch.tables, watch.mapped, watch.own)


class _Watch(threading.Thread):
    """Samples the memory and the processor time of a process; keeps the largest values."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._status = Path(f"/proc/{pid}/status")
        self._stat = Path(f"/proc/{pid}/stat")
        self._tick = 1 / os.sysconf("SC_CLK_TCK")
        self.over = False
        self.own = 0.0
        self.memory = self.tables = self.mapped = 0

    def run(self) -> None:
        while not self.over:
            with contextlib.suppress(OSError, KeyError, ValueError):
                lines = self._status.read_text().splitlines()
                facts = dict(line.split(":", 1) for line in lines)
                kilobytes = {
                    name: int(facts[name].split()[0]) * 1024
                    for name in ("RssAnon", "VmPTE", "RssFile")
                }
                self.memory = max(self.memory, kilobytes["RssAnon"])
                self.tables = max(self.tables, kilobytes["VmPTE"])
                self.mapped = max(self.mapped, kilobytes["RssFile"])
                times = self._stat.read_text().rpartition(")")[2].split()[11:13]
                self.own = sum(map(int, times)) * self._tick
            time.sleep(0.02)


WAYS: dict[str, list[str]] = {
    "-q": ["-q"],
    "to a terminal": [],
    "-o DIR": ["-q", "-o", str(OUTPUT / "table"), "--force"],
    "--csv FILE": ["-q", "--csv", str(OUTPUT / "rows.csv"), "--force"],
    "--format json": ["--format", "json"],
    "all rows fail": ["--max", "relative_l2=1e-12"],
    "--jobs 2": ["-q", "--jobs", "2"],
    "--shard 1/2": ["--shard", "1/2", "-o", str(OUTPUT / "parts"), "--force"],
    "--site": ["--site", "*.layers.3.*"],
}


def output(count: int) -> list[dict[str, Any]]:
    """Measure the memory of each way to write a table."""
    pair = make_tensors(count)
    figures: list[dict[str, Any]] = []
    for way, options in WAYS.items():
        found = measured(*pair, *options)
        note = f"{found.processor:.2f} s of processor, {found.wall:.1f} s of the wall"
        what = f"compare, {count:,} tensors, {way}"
        figures.append(_figure(what, found.memory / 1e6, None, "MB", note))
    return figures


class Shared(NamedTuple):
    """A comparison whose pairs are distributed to workers."""

    called: str
    count: int
    elements: int
    options: tuple[str, ...]


METRIC = """import numpy as np


def spread(reference, candidate):
    return float(np.median(np.abs(candidate - reference)))
"""
SHARED = (
    Shared("800 pairs of 256 kB, --metric kl", 800, 1 << 15, ("--metric", "kl")),
    Shared("4 000 pairs of 32 kB, a metric of one's own", 4_000, 1 << 12, ("--metric", "METRIC")),
    Shared("20 000 pairs of 16 kB", 20_000, 1 << 11, ()),
    Shared("100 000 pairs of 512 bytes", 100_000, 64, ()),
)


def jobs(workers: int) -> list[dict[str, Any]]:
    """Measure the wall time of one process divided by that of several (see the module)."""
    figures: list[dict[str, Any]] = []
    OUTPUT.mkdir(parents=True, exist_ok=True)
    metric = OUTPUT / "own_metric.py"
    metric.write_text(METRIC)
    for work in SHARED:
        pair = make_pairs(work.count, work.elements)
        options = [word.replace("METRIC", f"{metric}:spread") for word in work.options]
        one = measured(*pair, "-q", *options)
        many = measured(*pair, "-q", "--jobs", str(workers), *options)
        least = many.own + (many.processor - many.own) / workers
        note = (
            f"walls {one.wall:.2f} and {many.wall:.2f} s; processor {one.processor:.2f} s, with "
            f"jobs {many.processor:.2f}, of that {many.own:.2f} in the first process: on "
            f"{workers} free cores {one.processor / least:.2f}x of one core's work"
        )
        what = f"--jobs {workers}, {work.called}"
        figures.append({**_figure(what, one.wall / many.wall, None, "x", note), "better": "higher"})
        for path in pair:
            shutil.rmtree(path, ignore_errors=True)
    return figures


def make_pairs(count: int, elements: int) -> tuple[Path, Path]:
    """Two runs of one rank, with tensors of equal size."""
    sides = OUTPUT / "pairs_reference", OUTPUT / "pairs_candidate"
    base = np.random.default_rng(0).standard_normal(elements + count, np.float32)
    for number, place in enumerate(sides):
        shutil.rmtree(place, ignore_errors=True)
        writer = RunWriter(place, seal_at_exit=False)
        for at in range(count):
            values = base[at : at + elements] * np.float32(1 + 1e-7 * number)
            key = TensorKey.of(f"model.part{at}", "output")
            shape = (elements // 64, 64)
            record = Record(key, at, "float32", shape, class_name="Linear")
            writer.put(record, values.view(np.uint8))
        writer.close()
    return sides


def disk() -> None:
    """Measure files that are not in the page cache: a plain read, and a comparison."""
    paths = OUTPUT / "one_reference", OUTPUT / "one_candidate"
    make_bytes(1)
    files = [path / "rank0" / "tensors-00000.safetensors" for path in paths]
    for what in ("read", "compare"):
        for file in files:
            _forget(file)
        begin = time.perf_counter()
        if what == "read":
            for file in files:
                with file.open("rb", buffering=0) as stream:
                    while stream.read(8 << 20):
                        pass
            took = time.perf_counter() - begin
        else:
            took = measured(OUTPUT / "1GB_reference", OUTPUT / "1GB_candidate").wall
        size = sum(file.stat().st_size for file in files) * (1 if what == "read" else 0.5)
        print(f"cold, {what}: {took:.2f} s, {size / took / 1e9:.2f} GB/s")


def _forget(file: Path) -> None:
    """Ask the system to drop a file from its cache."""
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    words = sys.argv[1:]
    if words and words[0] == "disk":
        disk()
        return
    from benchmarks.__main__ import show

    amounts = tuple(int(float(word)) for word in words[1:])
    if words and words[0] == "bytes":
        show(_grown("GB", amounts or SIZES))  # type: ignore[arg-type]
    elif words and words[0] == "tensors":
        show(_grown("tensors", amounts or COUNTS))  # type: ignore[arg-type]
    elif words and words[0] == "output":
        show(output(*(amounts or (100_000,))))  # type: ignore[arg-type]
    elif words and words[0] == "jobs":
        show(jobs(*(amounts or (2,))))  # type: ignore[arg-type]
    else:
        show(run())  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
