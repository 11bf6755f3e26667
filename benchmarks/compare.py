"""`driftline compare` of two module dumps, whole command, against the bare read of the same files.

The dumps have 507 pairs, like those of a 134M-parameter Llama (inputs, outputs and parameters of
all modules, 128 tokens): 0.70 GB of float32 against 0.35 GB of bfloat16, with a warm page cache.
The bare read maps the shards and reads each byte once. It is timed without Python's start, which
the command's time includes, and also as a whole process. Both run in turns, and a random 1 % of the
rows is checked with numpy.

The bare read depends on how the page cache stores the shards. Files that were written in large
pieces are in large folios, of which one page fault maps up to 2 MB. Files that were read from a
disk are in smaller ones, 64 to 500 KB per fault, and take up to three times as long. Both cases are
measured: the first with the files as a dump leaves them, the second after they were dropped from
the cache and read again. The notes say how much one fault mapped. (Populating the map, or `pread`
into a small buffer, is slower.)

Modules are loaded from cached bytecode, as for an installed package. Finally two tensors of 1 GiB
are compared in one process, and its memory besides the mapped files is measured.
"""

from __future__ import annotations

import csv
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from driftline.formats.registry import open_run
from driftline.runs.records import Port, Record, TensorKey
from driftline.runs.writer import RunWriter

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "bench-output" / "compare"
ROUNDS = 7
GIB = 1 << 30

HIDDEN, INNER, LAYERS, VOCABULARY, TOKENS = 768, 2048, 12, 32000, 128

FLOOR = """
import mmap, resource, sys, time
import numpy as np
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
size = 0
begin = time.perf_counter()
for path in sys.argv[1:]:
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    words = np.frombuffer(mapped, np.uint64, len(mapped) // 8)
    np.bitwise_xor.reduce(words)
    size += len(mapped)
took = time.perf_counter() - begin
print(took, size / max(1, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults))
"""

MEMORY = """
import sys, threading, time
from pathlib import Path

def above_files():
    lines = Path("/proc/self/status").read_text().splitlines()
    facts = dict(line.split(":", 1) for line in lines)
    return int(facts["RssAnon"].split()[0]) * 1024

import driftline
from driftline.formats.registry import open_run
peak, going = 0, True

def watch():
    global peak
    while going:
        peak = max(peak, above_files())
        time.sleep(0.005)

watcher = threading.Thread(target=watch)
watcher.start()
table = driftline.compare(sys.argv[1], sys.argv[2])
going = False
watcher.join()
assert len(table.rows) == 1 and table.rows[0].compared, table.rows
print(peak)
"""


def tensors() -> list[tuple[str, Port, str, tuple[int, ...]]]:
    """Site, port, slot and shape of each tensor of the dump."""
    wide, inner = (1, TOKENS, HIDDEN), (1, TOKENS, INNER)
    made: list[tuple[str, Port, str, tuple[int, ...]]] = [
        ("model.embed_tokens", "param", "weight", (VOCABULARY, HIDDEN)),
        ("model.norm", "param", "weight", (HIDDEN,)),
        ("lm_head", "param", "weight", (VOCABULARY, HIDDEN)),
    ]
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            made.append((f"{layer}.{name}", "param", "weight", (HIDDEN,)))
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            made.append((f"{layer}.self_attn.{name}", "param", "weight", (HIDDEN, HIDDEN)))
        for name, shape in (
            ("gate_proj", (INNER, HIDDEN)),
            ("up_proj", (INNER, HIDDEN)),
            ("down_proj", (HIDDEN, INNER)),
        ):
            made.append((f"{layer}.mlp.{name}", "param", "weight", shape))
        for name, takes, gives in (
            ("input_layernorm", wide, wide),
            ("self_attn.q_proj", wide, wide),
            ("self_attn.k_proj", wide, wide),
            ("self_attn.v_proj", wide, wide),
            ("self_attn.o_proj", wide, wide),
            ("self_attn", wide, wide),
            ("post_attention_layernorm", wide, wide),
            ("mlp.gate_proj", wide, inner),
            ("mlp.up_proj", wide, inner),
            ("mlp.act_fn", inner, inner),
            ("mlp.down_proj", inner, wide),
            ("mlp", wide, wide),
            ("", wide, wide),
        ):
            site = f"{layer}.{name}".rstrip(".")
            made += [(site, "input", "hidden_states", takes), (site, "output", "0", gives)]
        for slot in ("cos", "sin"):
            made.append((f"{layer}.self_attn", "input", slot, (1, TOKENS, HIDDEN // 12)))
            made.append((layer, "input", slot, (1, TOKENS, HIDDEN // 12)))
        made += [
            (f"{layer}.self_attn", "input", "position_ids", (1, TOKENS)),
            (layer, "input", "position_ids", (1, TOKENS)),
            (layer, "input", "mask", (1, 1, TOKENS, TOKENS)),
        ]
    return made


def make_dumps() -> tuple[Path, Path]:
    """The two runs, made once and kept, because drawing a gigabyte takes a few seconds."""
    ours, theirs = OUTPUT / "reference", OUTPUT / "candidate"
    if (OUTPUT / "ready").exists():
        return ours, theirs
    shutil.rmtree(OUTPUT, ignore_errors=True)
    OUTPUT.mkdir(parents=True)
    rng = np.random.default_rng(0)
    writers = RunWriter(ours, seal_at_exit=False), RunWriter(theirs, seal_at_exit=False)
    for site, port, slot, shape in tensors():
        values = rng.standard_normal(math.prod(shape), np.float32)
        both = ("float32", values), ("bfloat16", values.astype(ml_dtypes.bfloat16))
        for writer, (dtype, array) in zip(writers, both, strict=True):
            key = TensorKey.of(site, port, slot)
            writer.put(Record(key, 0, dtype, shape, class_name="Linear"), array.view(np.uint8))
    for writer in writers:
        writer.close()
    (OUTPUT / "ready").touch()
    return ours, theirs


def make_gibibytes() -> tuple[Path, Path]:
    """Two runs of one tensor each, 1 GiB of float32."""
    paths = OUTPUT / "large_reference", OUTPUT / "large_candidate"
    if not (OUTPUT / "large_ready").exists():
        block = np.random.default_rng(1).standard_normal(GIB // 4 // 16, np.float32)
        for number, path in enumerate(paths):
            shutil.rmtree(path, ignore_errors=True)
            values = np.tile(block * np.float32(1 + 1e-6 * number), 16)
            writer = RunWriter(path, seal_at_exit=False)
            record = Record(TensorKey.of("large", "output"), 0, "float32", (16384, 16384))
            writer.put(record, values.view(np.uint8))
            writer.close()
        (OUTPUT / "large_ready").touch()
    return paths


def command(ours: Path, theirs: Path, table: Path) -> float:
    """Wall time of the whole command, including Python's start."""
    words = [sys.executable, "-m", "driftline", "compare", str(ours), str(theirs)]
    begin = time.perf_counter()
    done = subprocess.run(
        [*words, "--csv", str(table), "--force"],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
    )
    took = time.perf_counter() - begin
    if done.returncode != 0:
        raise SystemExit(
            f"benchmarks: {' '.join(words)} ended with {done.returncode}: {done.stderr}"
        )
    return took


def shards_of(*runs: Path) -> list[Path]:
    return sorted(path for run in runs for path in run.rglob("*.safetensors"))


def as_written(*runs: Path) -> None:
    """Rewrite the shards, so that they are in the page cache as a dump leaves them."""
    for path in shards_of(*runs):
        copy = path.with_suffix(".copy")
        with path.open("rb") as source, copy.open("wb") as goal:
            while piece := source.read(64 << 20):
                goal.write(piece)
            os.fsync(goal.fileno())
        copy.replace(path)


def as_read(*runs: Path) -> None:
    """Drop the shards from the page cache and read them again from disk."""
    for path in shards_of(*runs):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while file.read(1 << 20):
                pass


def floor(*runs: Path) -> tuple[float, float, float]:
    """Seconds of reading all mapped bytes, seconds of the process, and bytes per page fault."""
    shards = [str(path) for path in shards_of(*runs)]
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", FLOOR, *shards],
        capture_output=True,
        text=True,
        check=True,
        env=environment(),
    )
    whole = time.perf_counter() - begin
    alone, per_fault = map(float, done.stdout.split())
    return alone, whole, per_fault


def environment() -> dict[str, str]:
    """Environment in which bytecode is cached, next to the dumps rather than in the sources."""
    ours = {**os.environ, "PYTHONPYCACHEPREFIX": str(OUTPUT / "bytecode")}
    ours.pop("PYTHONDONTWRITEBYTECODE", None)
    return ours


def check(ours: Path, theirs: Path, table: Path) -> int:
    """Recompute a random 1 % of the rows (at least 5) with numpy; returns their number."""
    with table.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    reference, candidate = open_run(ours), open_run(theirs)
    chosen = np.random.default_rng().choice(len(rows), max(5, len(rows) // 100), replace=False)
    for row in (rows[at] for at in chosen):
        address = {"site": row["site"], "port": row["port"], "slot": row["slot"]}
        r = reference.get(**address).float64().reshape(-1)
        c = candidate.get(**address).float64().reshape(-1)
        expected = {
            "relative_l2": np.linalg.norm(c - r) / np.linalg.norm(r),
            "max_abs_error": np.abs(c - r).max(),
            "cosine": (r @ c) / np.linalg.norm(r) / np.linalg.norm(c),
            "candidate_std": c.std(),
        }
        for name, value in expected.items():
            if not math.isclose(float(row[name]), value, rel_tol=1e-6):
                raise SystemExit(f"benchmarks: {row['site']} {name} is {row[name]}, not {value}")
    return len(chosen)


def in_turns(ours: Path, theirs: Path) -> tuple[float, float, float, float]:
    """Median seconds of the bare read, its process and the command; bytes per page fault."""
    table = OUTPUT / "rows.csv"
    command(ours, theirs, table)
    reads: list[float] = []
    processes: list[float] = []
    commands: list[float] = []
    per_fault = 0.0
    for _ in range(ROUNDS):
        alone, whole, per_fault = floor(ours, theirs)
        reads.append(alone)
        processes.append(whole)
        commands.append(command(ours, theirs, table))
    read, process, took = (statistics.median(times) for times in (reads, processes, commands))
    return read, process, took, per_fault


def run() -> list[dict[str, Any]]:
    """Measure the figures of this suite; returns one dictionary per figure."""
    ours, theirs = make_dumps()
    as_written(ours, theirs)
    read, process, took, per_fault = in_turns(ours, theirs)
    checked = check(ours, theirs, OUTPUT / "rows.csv")
    as_read(ours, theirs)
    slow_read, _, slow_took, slow_fault = in_turns(ours, theirs)
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, *map(str, make_gibibytes())],
        capture_output=True,
        text=True,
        check=True,
    )
    return [
        {
            "what": f"compare {len(tensors())} pairs, whole command",
            "value": took,
            "goal": 0.5,
            "better": "lower",
            "unit": "s",
            "note": f"the bare read takes {read:.3f} s ({per_fault / 1024:.0f} KB per page fault)"
            f"; {checked} rows checked against numpy",
        },
        {
            "what": "the same, of files that came from a disk",
            "value": slow_took,
            "goal": 0.5,
            "better": "lower",
            "unit": "s",
            "note": f"the bare read takes {slow_read:.3f} s ({slow_fault / 1024:.0f} KB per page "
            "fault)",
        },
        {
            "what": "the first, against a whole process that starts numpy and reads",
            "value": took / process,
            "goal": None,
            "better": "lower",
            "unit": "x",
            "note": f"that process takes {process:.3f} s",
        },
        {
            "what": "memory beside the mapped files, two tensors of 1 GiB",
            "value": int(done.stdout) / 1e6,
            "goal": 300.0,
            "better": "lower",
            "unit": "MB",
            "note": "anonymous resident memory, whole process",
        },
    ]


if __name__ == "__main__":
    from benchmarks.__main__ import show

    show(run())  # type: ignore[arg-type]
