"""Cost of capture: a 134M-parameter Llama on one CPU thread, with and without capture.

Each round runs the plain program and each variant once, in a shuffled order, so that other load on
the machine slows all of them equally. A figure is the median of the rounds' ratios; its note has a
95 % interval from resampled rounds. Run it on an idle machine: on a busy one, the plain forward
itself varies by tens of percent.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROUNDS = 15
FEWEST, LONGEST = 5, 120.0
"""Smallest number of rounds, and the seconds after which no further rounds are run."""
RESAMPLES = 2000


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Variant:
    """One way to run the program, and its measured times."""

    def __init__(self, name: str, call: Callable[[], float]) -> None:
        self.name = name
        self.call = call
        self.times: list[float] = []


def _in_turns(variants: list[Variant], rounds: int) -> None:
    order = random.Random(1)
    for variant in variants:
        variant.call()  # warm-up: first use of memory, lazy imports
    begin = time.monotonic()
    for done in range(rounds):
        if done >= FEWEST and time.monotonic() - begin > LONGEST:
            return
        for variant in order.sample(variants, len(variants)):
            variant.times.append(variant.call())


def _ratio(times: list[float], plain: list[float]) -> tuple[float, str]:
    """The median ratio of the rounds, and a note with an interval from resampled rounds."""
    ratios = [a / b for a, b in zip(times, plain, strict=True)]
    chance = random.Random(2)
    medians = sorted(
        statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES)
    )
    low, high = medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)]
    best = min(times) / min(plain)
    return statistics.median(ratios), f"95 % in {low:.3f}..{high:.3f}, best {best:.3f}"


def timed_passes(model: Any, tokens: Any) -> tuple[Callable[[], float], Callable[[], float]]:
    """A forward pass, and a forward and backward pass; both functions return their seconds."""
    import torch

    def forward() -> float:
        with torch.no_grad():
            begin = time.perf_counter()
            model(tokens)
            return time.perf_counter() - begin

    def both_ways() -> float:
        model.zero_grad(set_to_none=True)
        begin = time.perf_counter()
        model(tokens, labels=tokens).loss.backward()
        return time.perf_counter() - begin

    return forward, both_ways


def _training(tokens: int) -> Callable[..., float]:
    """A function that trains a small transformer and returns the seconds, including capture.

    Args:
        tokens: Length of each of 8 sequences; with 36 a step takes about 5 ms on one core.
    """
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self, width: int = 96) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
            self.embed = nn.Embedding(256, width)
            self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(width, 256)

        def forward(self, ids: Any) -> Any:
            return self.head(self.layers(self.embed(ids)))

    def train(steps: int, place: Path | None = None) -> float:
        from driftline.captures.torch.framework import capture

        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        batches = [torch.randint(0, 256, (8, tokens)) for _ in range(8)]
        begin = time.perf_counter()
        with contextlib.nullcontext() if place is None else capture(model, place):
            for step in range(steps):
                ids = batches[step % len(batches)]
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
                optimizer.step()
        took = time.perf_counter() - begin
        if place is not None:
            shutil.rmtree(place)
        return took

    return train


def training_steps(rounds: int = 5, steps: int = 1000) -> dict[str, Any]:
    """Measure the cost of capture with its default steps in a training of many short steps."""
    folder = Path(tempfile.mkdtemp(prefix="driftline-bench-", dir="."))
    train = _training(36)
    try:
        with _one_thread():
            plain = Variant("plain", lambda: train(steps))
            watched = Variant("watched", lambda: train(steps, folder / "run"))
            _in_turns([plain, watched], rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    value, note = _ratio(watched.times, plain.times)
    return {
        "what": f"{steps} training steps, captured by default",
        "value": value,
        "goal": 1.1,
        "better": "lower",
        "unit": "x plain",
        "note": f"{note}; a plain step takes {min(plain.times) / steps * 1e3:.1f} ms",
    }


def run(rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """Measure all figures of this suite, as described in the module's docstring."""
    import torch

    from benchmarks.programs.infer_llama import build, prompt
    from driftline.captures.torch.framework import capture
    from driftline.runs.memory import MemorySink

    model = build("float32")
    tokens = prompt()
    folder = Path(tempfile.mkdtemp(prefix="driftline-bench-", dir="."))
    facts: dict[str, float] = {}
    numbers = iter(range(1_000_000))

    forward, both_ways = timed_passes(model, tokens)

    def watched(call: Callable[[], float], name: str, **options: Any) -> Callable[[], float]:
        def timed() -> float:
            """Time only the step: a run is opened and closed once, not per step."""
            sink = MemorySink()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", r".*no site matches .\(nowhere\)")
                with capture(model, sink, **options):
                    took = call()
            facts[name] = sink.tensors_written
            return took

        return timed

    def to_disk() -> float:
        """Time the step and the writing of all its bytes, until the run is sealed."""
        place = folder / f"run{next(numbers)}"
        watching = capture(model, place)
        session = watching.session.start()
        begin = time.perf_counter()
        with torch.no_grad():
            model(tokens)
        session.stop()
        took = time.perf_counter() - begin
        assert session.sink is not None
        facts["bytes"] = session.sink.bytes_written
        shutil.rmtree(place)
        return took

    try:
        with _one_thread():
            plain = Variant("plain", forward)
            nothing = Variant("nothing", watched(forward, "nothing", sites="(nowhere)"))
            summary = Variant("summary", watched(forward, "summary", keep="summary"))
            disk = Variant("disk", to_disk)
            operators = Variant(
                "ops", watched(forward, "ops", keep="summary", levels=("ops",), ports="output")
            )
            _in_turns([plain, nothing, summary, disk, operators], rounds)
            backward = Variant("backward", both_ways)
            gradients = Variant(
                "gradients",
                watched(both_ways, "gradients", keep="summary", levels=("modules", "gradients")),
            )
            _in_turns([backward, gradients], max(5, rounds // 2))
    finally:
        shutil.rmtree(folder, ignore_errors=True)

    def figure(what: str, variant: Variant, base: Variant, goal: float | None) -> dict[str, Any]:
        value, note = _ratio(variant.times, base.times)
        if variant.name in facts:
            note += f"; {facts[variant.name]:.0f} tensors"
        return {
            "what": what,
            "value": value,
            "goal": goal,
            "better": "lower",
            "unit": "x plain",
            "note": note,
        }

    return [
        {
            "what": "plain forward of the 134M Llama",
            "value": statistics.median(plain.times),
            "goal": None,
            "better": "lower",
            "unit": "s",
            "note": f"spread {min(plain.times):.3f}..{max(plain.times):.3f}",
        },
        figure("forward, watched but nothing wanted", nothing, plain, None),
        figure("forward, summaries of all modules, in + out", summary, plain, 1.15),
        figure("forward + backward, summaries", gradients, backward, 1.25),
        figure("forward, full tensors to disk", disk, plain, 1.6),
        {
            "what": "full tensors to disk, per step",
            "value": facts["bytes"] / 1e6,
            "goal": 120,
            "better": "lower",
            "unit": "MB",
            "note": "repeated bytes are stored once",
        },
        figure("forward, operator outputs, summaries", operators, plain, 1.5),
        training_steps(max(FEWEST, rounds // 3)),
    ]


if __name__ == "__main__":
    from benchmarks.__main__ import show

    show(run())  # type: ignore[arg-type]
