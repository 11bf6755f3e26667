"""The table of docs/gpu.md: every row is a ratio measured inside one run, in turns.

A figure is the median of the rounds' ratios. Without a CUDA device there is nothing to measure,
which is said.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROUNDS = 12
Figure = dict[str, Any]


def run(rounds: int = ROUNDS) -> list[Figure]:
    """Measure everything; empty without a device."""
    import torch

    if not torch.cuda.is_available():
        print("  there is no CUDA device here")
        return []
    from benchmarks.gpu.model import llama

    print(f"  {torch.cuda.get_device_name()}, torch {torch.__version__}")
    model = llama()
    folder = Path(tempfile.mkdtemp(prefix="driftline-gpu-"))
    try:
        parts: list[Callable[[], list[Figure]]] = [
            lambda: summaries(model, folder, (8, 1024), 1.25, rounds),
            lambda: summaries(model, folder, (1, 512), 1.5, rounds),
            lambda: summaries(model, folder, (1, 1), 1.6, rounds),
            lambda: summaries(model, folder, (8, 1024), None, rounds, ports="output"),
            lambda: summaries(model, folder, (1, 1), None, rounds, ports="output"),
            lambda: summaries(model, folder, (8, 1024), 2.0, 3, levels="ops"),
            lambda: training(model, folder, rounds),
            lambda: whole_tensors(model, folder, rounds),
            comparison,
            lambda: side_by_side(model),
            lambda: first_step(folder),
            lambda: replay(folder),
            lambda: several_processes(folder),
        ]
        figures: list[Figure] = []
        for part in parts:
            # Shown at once, because the whole takes minutes and time on a device is scarce.
            for row in part():
                print(f"    {row['what']}: {row['value']:.3g} {row['unit']}", flush=True)
                figures.append(row)
        return figures
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def figure(
    what: str, value: float, goal: float | None, unit: str, note: str, better: str = "lower"
) -> Figure:
    return {
        "what": what,
        "value": value,
        "goal": goal,
        "better": better,
        "unit": unit,
        "note": note,
    }


def in_turns(variants: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    order = random.Random(1)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for call in variants.values():
        call()
        call()
    for _ in range(rounds):
        for name in order.sample(list(variants), len(variants)):
            times[name].append(variants[name]())
    return times


def ratio(times: list[float], plain: list[float]) -> tuple[float, str]:
    ratios = sorted(a / b for a, b in zip(times, plain, strict=True))
    low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
    return statistics.median(ratios), f"{low:.2f}..{high:.2f}"


def passes(model: Any, tokens: Any, steps: int) -> Callable[[], float]:
    """Forward passes one after the other, as a program makes them; seconds of one."""
    import torch

    def call() -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        with torch.no_grad():
            for _ in range(steps):
                model(tokens)
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / steps

    return call


def captured(
    model: Any, folder: Path, plain: Callable[[], float], **options: Any
) -> Callable[[], float]:
    """The same as `plain`, with summaries of all steps going into a run on disk.

    What a program pays once (kernels, the model's description, its weights) is over by then.
    """
    import driftline

    numbers = iter(range(1_000_000))

    def call() -> float:
        place = folder / f"run{next(numbers)}"
        with driftline.capture(
            model, place, keep="summary", steps="*", weight_facts=False, **options
        ):
            for _ in range(2):
                plain()
            took = plain()
        shutil.rmtree(place)
        return took

    return call


def summaries(
    model: Any,
    folder: Path,
    shape: tuple[int, int],
    goal: float | None,
    rounds: int,
    **options: Any,
) -> list[Figure]:
    """Summaries of all inputs and outputs of modules, with the model's facts, or as asked for."""
    from benchmarks.gpu.model import tokens

    steps = 4 if shape[0] * shape[1] > 1000 else 16
    plain = passes(model, tokens(*shape), steps)
    capture = captured(model, folder, plain, **options)
    times = in_turns({"plain": plain, "summaries": capture}, rounds)
    value, spread = ratio(times["summaries"], times["plain"])
    note = f"plain {statistics.median(times['plain']) * 1e3:.1f} ms, {spread}"
    what = "outputs" if "ports" in options else options.get("levels", "inputs and outputs")
    row = f"summaries of {what}, {shape[0]} x {shape[1]} tokens"
    return [figure(row, value, goal, "x plain", note)]


def training(model: Any, folder: Path, rounds: int) -> list[Figure]:
    """Forward and backward passes of 4 x 1024 tokens, without and with gradients."""
    import torch

    from benchmarks.gpu.model import tokens

    ids = tokens(4, 1024)

    def plain() -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(2):
            model(ids, labels=ids).loss.backward()
            for parameter in model.parameters():
                parameter.grad = None
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / 2

    variants = {
        "plain": plain,
        "modules": captured(model, folder, plain),
        "gradients": captured(model, folder, plain, levels=("modules", "gradients")),
    }
    times = in_turns(variants, max(3, rounds // 3))
    rows: list[Figure] = []
    for name, goal in (("modules", 1.35), ("gradients", None)):
        value, spread = ratio(times[name], times["plain"])
        note = f"plain {statistics.median(times['plain']) * 1e3:.1f} ms, {spread}"
        rows.append(figure(f"forward and backward, {name}, 4 x 1024", value, goal, "x plain", note))
    return rows


def whole_tensors(model: Any, folder: Path, rounds: int) -> list[Figure]:
    """Full tensors of 1 x 512 tokens: until the last one is in pinned memory, then to the disk."""
    import torch

    import driftline
    from benchmarks.gpu.model import tokens

    given = tokens(1, 512)
    plain = passes(model, given, 1)
    numbers = iter(range(1_000_000))
    rates: list[float] = []
    later: list[float] = []

    def captured() -> float:
        place = folder / f"run{next(numbers)}"
        with driftline.capture(
            model, place, ports="output", steps="*", weight_facts=False
        ) as capture:
            plain()
            capture.session.flush()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            with torch.no_grad():
                model(given)
            torch.cuda.synchronize()  # every queue: also the one that copies
            took = time.perf_counter() - begin
            capture.session.flush()
            sink = capture.session.sink
            assert sink is not None
            rates.append(sink.bytes_written / 2 / (time.perf_counter() - begin) / 1e9)
            for _ in range(2):
                later.append(plain())
                capture.session.flush()
        shutil.rmtree(place)
        return took

    times = in_turns({"plain": plain, "full": captured}, rounds)
    value, spread = ratio(times["full"], times["plain"])
    note = f"plain {statistics.median(times['plain']) * 1e3:.1f} ms, {spread}"
    usual = statistics.median(later) / statistics.median(times["plain"])
    return [
        figure("full tensors to pinned memory, 1 x 512", value, 2.3, "x plain", note),
        figure("the same, when memory has been pinned before", usual, 2.3, "x plain", note),
        figure(
            "the same to the disk, sealed bytes",
            statistics.median(rates),
            None,
            "GB/s",
            "forward, copies and writing together",
            better="higher",
        ),
    ]


def comparison() -> list[Figure]:
    """Two tensors of 0.5 GB on the device: all figures that the standard metrics need."""
    import torch

    dtypes = (torch.bfloat16, torch.float32, torch.float8_e4m3fn)
    return [row for dtype in dtypes for row in _pair_rate(dtype)]


def _pair_rate(dtype: Any) -> list[Figure]:
    import torch

    from driftline.numerics.gpu.pairs import pair_on_device

    count = (1 << 29) // dtype.itemsize
    drawn = torch.randn(count, device="cuda", dtype=torch.bfloat16)
    reference = drawn.to(dtype)
    candidate = drawn.mul_(1.01).to(dtype)
    del drawn
    took: list[float] = []
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(4):  # one after the other, as the layers of two models are compared
            pair_on_device(reference, candidate, rtol=0.016, atol=1e-5)
        end.record()
        torch.cuda.synchronize()
        took.append(begin.elapsed_time(end) / 4e3)
    size = 2 * reference.nbytes
    rate = size / statistics.median(took) / 1e12
    note = f"{statistics.median(took) * 1e3:.2f} ms for {size / 1e9:.1f} GB"
    name = str(dtype).removeprefix("torch.")
    row = f"compare on the device, 2 x 0.5 GB {name}"
    return [figure(row, rate, 2.5, "TB/s", note, better="higher")]


_FORWARD = """
import sys, time
import torch
from benchmarks.gpu.model import llama, tokens
model, ids = llama(), tokens(int(sys.argv[2]), int(sys.argv[3]))
torch.cuda.synchronize()
begin = time.perf_counter()
with torch.no_grad():
    model(ids)
torch.cuda.synchronize()
open(sys.argv[1], "w").write(str(time.perf_counter() - begin))
"""


def _surroundings(folder: Path) -> dict[str, str]:
    """The environment of a program that imports this folder, with a kernel cache of its own."""
    root = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": paths, "TRITON_CACHE_DIR": str(folder / "kernels")}


def _first_forward(folder: Path, shape: tuple[int, int], *command: str) -> float:
    """Seconds of the first forward pass of a program, run by a command of Driftline if given."""
    program = folder / "forward.py"
    program.write_text(_FORWARD)
    surroundings = _surroundings(folder)
    words = [sys.executable, str(program), str(folder / "took"), *map(str, shape)]
    if command:
        words = [sys.executable, "-m", "driftline", *command, "--", *words]
    subprocess.run(words, env=surroundings, check=True, capture_output=True, timeout=300)
    return float((folder / "took").read_text())


def first_step(folder: Path) -> list[Figure]:
    """What the first forward pass of a program takes longer for summaries of it."""
    shape = (8, 1024)
    plain = _first_forward(folder, shape)
    # Twice captured: kernels are compiled in the first program, and in the cache of the second.
    cold, warm = (
        _first_forward(
            folder, shape, "dump", "-o", str(folder / name), "--keep", "summary", "--no-weights"
        )
        for name in ("cold", "warm")
    )
    note = f"{plain:.2f} s without capture, {cold:.2f} s with kernels still to be compiled"
    return [figure("first step, kernels in the cache", warm - plain, 0.5, "s more", note)]


def replay(folder: Path) -> list[Figure]:
    """The forward pass of a program while each module is applied to a candidate's inputs, too."""
    shape, run = (1, 512), str(folder / "candidate")
    plain = _first_forward(folder, shape)
    _first_forward(folder, shape, "dump", "-o", run, "--no-weights")
    took = _first_forward(folder, shape, "replay", run, "-o", str(folder / "replayed"))
    note = f"{plain:.2f} s alone; reading the candidate and writing what is kept included"
    return [figure("replay of a forward pass, 1 x 512 tokens", took - plain, None, "s more", note)]


_STEPS = """
import os, sys, time
import torch
from benchmarks.gpu.model import llama, tokens
model, ids = llama(), tokens(1, 512)
def steps(count):
    torch.cuda.synchronize()
    begin = time.perf_counter()
    with torch.no_grad():
        for _ in range(count):
            model(ids)
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / count
steps(5)
folder, count = sys.argv[2], int(sys.argv[3])
open(os.path.join(folder, str(os.getpid())), "w").close()
while len(os.listdir(folder)) < count:  # until all of them can begin
    time.sleep(0.01)
took = steps(40)
open(sys.argv[1], "w").write(str(took))
"""


def several_processes(folder: Path, count: int = 4) -> list[Figure]:
    """Programs that share one device at the same time, all captured or none."""
    program = folder / "steps.py"
    program.write_text(_STEPS)
    surroundings = _surroundings(folder)

    def together(name: str, *, captured: bool) -> float:
        begun = folder / f"{name}-begun"
        begun.mkdir()
        started: list[subprocess.Popen[bytes]] = []
        for number in range(count):
            took = str(folder / f"{name}{number}")
            words = [sys.executable, str(program), took, str(begun), str(count)]
            if captured:
                run = ["-o", str(folder / f"{name}-run{number}"), "--keep", "summary"]
                words = [
                    sys.executable,
                    "-m",
                    "driftline",
                    "dump",
                    *run,
                    "--step",
                    "*",
                    "--",
                    *words,
                ]
            started.append(subprocess.Popen(words, env=surroundings, stdout=subprocess.DEVNULL))
        if any(process.wait(timeout=300) for process in started):
            raise RuntimeError(f"one of the {count} programs failed")
        times = [float((folder / f"{name}{number}").read_text()) for number in range(count)]
        return statistics.median(times)

    plain, captured = together("alone", captured=False), together("watched", captured=True)
    note = f"plain {plain * 1e3:.1f} ms a step"
    what = f"summaries of inputs and outputs, 1 x 512 tokens, {count} processes on one device"
    return [figure(what, captured / plain, None, "x plain", note)]


def side_by_side(model: Any) -> list[Figure]:
    """Two models in step, against running one after the other."""
    import copy

    import torch

    import driftline
    from benchmarks.gpu.model import tokens

    other, ids = copy.deepcopy(model), tokens(8, 1024)

    def one_after_the_other() -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        with torch.no_grad():
            model(ids)
            other(ids)
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    def in_step() -> float:
        begin = time.perf_counter()
        driftline.lockstep(model, other, (ids,))
        return time.perf_counter() - begin

    times = in_turns({"plain": one_after_the_other, "lockstep": in_step}, 3)
    value, spread = ratio(times["lockstep"], times["plain"])
    note = f"both {statistics.median(times['plain']) * 1e3:.0f} ms, {spread}"
    return [figure("lockstep, 8 x 1024 tokens", value, 1.3, "x both", note)]
