"""Time to write twenty thousand small tensors, and to open and read all of them again.

A run, one safetensors file and a folder of `.pt` files take turns in one process, with the same
arrays and the same file system. Reading copies all bytes into memory, even from formats that only
return views. The safetensors file is written in one call at the end, from tensors that must all be
kept in memory until then; a run is digested and journalled tensor by tensor.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from driftline.runs.reader import open_run
from driftline.runs.records import Record, TensorKey
from driftline.runs.writer import RunWriter

COUNT = 20_000
PT_COUNT = 2_000
"""Separate files are so slow that only a tenth of them is measured; the times are multiplied."""
ROUNDS = 3

Arrays = dict[str, np.ndarray[Any, Any]]


def make_arrays(count: int = COUNT) -> Arrays:
    """About 109 MB of float32 in tensors of up to 11 kB, all different."""
    rng = np.random.default_rng(0)
    return {
        f"model.layers.{i}.mlp": rng.standard_normal(int(rng.integers(1, 2724)), np.float32)
        for i in range(count)
    }


def write_run(path: Path, arrays: Arrays) -> None:
    writer = RunWriter(path, seal_at_exit=False)
    for name, array in arrays.items():
        record = Record(TensorKey.of(name, "output"), 0, "float32", array.shape, class_name="MLP")
        writer.put(record, array.view(np.uint8))
    writer.close()


def read_run(path: Path, into: np.ndarray[Any, Any]) -> int:
    total = 0
    for tensor in open_run(path).tensors():
        values = tensor.numpy()
        into[: values.size] = values
        total += values.nbytes
    return total


def write_safetensors(path: Path, arrays: Arrays) -> None:
    from safetensors.numpy import save_file

    save_file(arrays, path)


def read_safetensors(path: Path, into: np.ndarray[Any, Any]) -> int:
    from safetensors import safe_open

    total = 0
    with safe_open(path, "np") as file:
        for name in file.keys():  # noqa: SIM118 - not a dict
            values = file.get_tensor(name)
            into[: values.size] = values
            total += values.nbytes
    return total


def write_pt(path: Path, arrays: Arrays) -> None:
    import torch

    path.mkdir()
    for name, array in arrays.items():
        torch.save(torch.from_numpy(array), path / f"{name}.pt")


def read_pt(path: Path, into: np.ndarray[Any, Any]) -> int:
    import torch

    total = 0
    for file in path.iterdir():
        values = torch.load(file, weights_only=True).numpy()
        into[: values.size] = values
        total += values.nbytes
    return total


def run() -> list[dict[str, Any]]:
    """Measure the figures of this suite; returns one dictionary per figure."""
    arrays = make_arrays()
    total = sum(array.nbytes for array in arrays.values())
    few = dict(list(arrays.items())[:PT_COUNT])
    few_total = sum(array.nbytes for array in few.values())
    into = np.empty(4096, np.float32)
    ways: dict[str, tuple[Callable[..., None], Callable[..., int], Arrays, int, float]] = {
        "run": (write_run, read_run, arrays, total, 1.0),
        "safetensors": (write_safetensors, read_safetensors, arrays, total, 1.0),
        "pt": (write_pt, read_pt, few, few_total, COUNT / PT_COUNT),
    }
    written: dict[str, list[float]] = {way: [] for way in ways}
    read: dict[str, list[float]] = {way: [] for way in ways}
    cpu: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(ROUNDS):
            for way, (write, fetch, what, expected, times) in ways.items():
                path = Path(folder) / f"{way}{turn}"
                started, busy = time.perf_counter(), time.process_time()
                write(path, what)
                between, busy_between = time.perf_counter(), time.process_time()
                found = fetch(path, into)
                ended, busy_ended = time.perf_counter(), time.process_time()
                cpu.setdefault(way, []).append((busy_between - busy, busy_ended - busy_between))
                assert found == expected, f"{way}: {found} bytes came back of {expected}"
                written[way].append((between - started) * times)
                read[way].append((ended - between) * times)
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    size = f"{COUNT} tensors, {total / 1e6:.0f} MB, median of {ROUNDS}"
    middle = statistics.median
    # The notes have processor time too, because other work on the machine affects wall time.
    busy_write, busy_read = (middle(side) for side in zip(*cpu["run"], strict=True))
    wrote, got = f"{size}; {busy_write:.2f} s of CPU", f"{size}; {busy_read:.2f} s of CPU"
    figures = [
        _figure("write small tensors", middle(written["run"]), 0.6, "s", wrote),
        _figure("open and read small tensors", middle(read["run"]), 0.4, "s", got),
    ]
    for way in ("safetensors", "pt"):
        scaled = f", from {PT_COUNT} files" if way == "pt" else ", one file"
        for verb, times in (("write", written), ("read", read)):
            figures.append(_figure(f"{verb}: {way}", middle(times[way]), None, "s", size + scaled))
            ratio = middle(times["run"]) / middle(times[way])
            figures.append(_figure(f"{verb}: run / {way}", ratio, None, "x", "inside one run"))
    return figures


def _figure(what: str, value: float, goal: float | None, unit: str, note: str) -> dict[str, Any]:
    return {
        "what": what,
        "value": round(value, 3),
        "goal": goal,
        "better": "lower",
        "unit": unit,
        "note": note,
    }


if __name__ == "__main__":
    for figure in run():
        goal = "" if figure["goal"] is None else f"(goal {figure['goal']})"
        print(
            f"{figure['what']:32} {figure['value']:8} {figure['unit']:2} {goal:12} {figure['note']}"
        )
