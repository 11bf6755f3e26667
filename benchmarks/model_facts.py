"""Cost of describing a model (docs/model-facts.md), on the CUDA device of this machine or its CPU.

The model is a Llama of 134 million parameters on a CPU, or of 1.1 billion in bfloat16 on a CUDA
device. The calls of the code that describes models are timed individually inside a capture without
tensors, because the difference between two long forward passes would be lost in noise. The time of
the clock itself is measured at the same places and subtracted.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

CALLS = 48
"""Number of forward passes in one capture."""
_RUNGS = 16
"""Steps captured completely; later steps have digests of the model's inputs and outputs."""
_PARTS = ("before_root", "digests_call", "after_root")
_DIGESTS = "note_tensors"
_BLOCKS, _BLOCK = 200, 500


def run(rounds: int = 5, *, small: bool = False) -> list[dict[str, Any]]:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = _tiny(device) if small else _model(device)
    tokens = torch.ones(1, 8, dtype=torch.long, device=device)
    count = sum(parameter.numel() for parameter in model.parameters())
    modules = sum(1 for _ in model.modules())
    note = f"{count / 1e6:.0f} million parameters, {modules} modules, {device}"
    first: dict[bool, list[float]] = {False: [], True: []}
    end: list[float] = []
    following: list[float] = []
    later: list[_Timed] = []
    with torch.no_grad():
        model(tokens)
        for _ in range(rounds):
            for weights in first:
                timed = _captured(model, tokens, weights=weights)
                first[weights].append(timed.calls[0])
                if weights:
                    end.append(timed.end)
                else:
                    later.append(timed)
                    following.append(timed.following)
    without, whole = (statistics.median(first[weights]) * 1e3 for weights in (False, True))
    cold, digests = (
        statistics.median(seconds for timed in later for seconds in timed.beyond_clock(steps)) * 1e6
        for steps in (range(2, _RUNGS), range(_RUNGS, CALLS))
    )
    return [
        _figure("model facts, before the first call, without weights", without, 100.0, "ms", note),
        _figure("model facts, before the first call, with weights", whole, None, "ms", note),
        _figure(
            "model facts, wait for the weights at the end",
            statistics.median(end) * 1e3,
            None,
            "ms",
            "the program was over at once",
        ),
        _figure(
            "model facts, every further call of the model",
            min(following) * 1e6,
            1.0,
            "us",
            "calls that follow each other",
        ),
        _figure(
            "model facts, the same after a forward pass",
            cold,
            None,
            "us",
            "nothing of ours is in the caches of the processor",
        ),
        _figure(
            f"model facts, the same from step {_RUNGS} on, with digests",
            digests,
            None,
            "us",
            "of calls that take a millisecond or longer",
        ),
    ]


class _Timed(NamedTuple):
    """Times of one capture.

    Attributes:
        calls: Seconds of the code for facts in each call, including the time of the clock. In odd
            calls only the time of the clock.
        following: Seconds of the code for facts if its calls follow each other directly.
        end: Seconds until the capture has ended.
    """

    calls: list[float]
    following: float
    end: float

    def beyond_clock(self, steps: Iterable[int]) -> Iterator[float]:
        """Seconds of these calls without the time of the clock."""
        chosen = set(steps)
        empty = statistics.median(self.calls[step] for step in chosen if step % 2)
        yield from (self.calls[step] - empty for step in chosen if not step % 2)


def _captured(model: Any, tokens: Any, *, weights: bool) -> _Timed:
    import driftline
    from driftline.captures.torch.model_facts import TorchFacts

    spent, number = [0.0], [0]
    asked: dict[str, tuple[Any, ...]] = {}
    kept = {name: getattr(TorchFacts, name) for name in (*_PARTS, _DIGESTS)}

    def timed(name: str) -> Callable[..., Any]:
        part = kept[name]

        def call(*args: Any) -> Any:
            is_empty = number[0] % 2
            # Only this thread's time counts: weights are read on another thread.
            begin = time.thread_time()
            result = _nothing(*args) if is_empty else part(*args)
            spent[0] += time.thread_time() - begin
            if number[0] < _RUNGS:
                asked[name] = args
            return part(*args) if is_empty else result

        return call

    calls: list[float] = []
    try:
        for name in kept:
            setattr(TorchFacts, name, timed(name))
        with tempfile.TemporaryDirectory(prefix="driftline-facts-") as folder:
            capture = driftline.capture(
                model, Path(folder) / "run", classes="NoSuchClass", weight_facts=weights
            )
            with capture:
                for number[0] in range(CALLS):
                    spent[0] = 0.0
                    model(tokens)
                    calls.append(spent[0])
                following = _following([(kept[name], asked[name]) for name in _PARTS])
                begin = time.perf_counter()
            return _Timed(calls, following, time.perf_counter() - begin)
    finally:
        for name, part in kept.items():
            setattr(TorchFacts, name, part)


def _nothing(*args: Any) -> None:
    del args


def _following(parts: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]) -> float:
    """Seconds of these calls together, repeated many times; the minimum of the repetitions."""
    empty = [(_nothing, args) for _, args in parts]
    return min(_block(parts) for _ in range(_BLOCKS)) - min(_block(empty) for _ in range(_BLOCKS))


def _block(parts: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]) -> float:
    begin = time.thread_time()
    for _ in range(_BLOCK):
        for part, args in parts:
            part(*args)
    return (time.thread_time() - begin) / _BLOCK


def _figure(what: str, value: float, goal: float | None, unit: str, note: str) -> dict[str, Any]:
    return {
        "what": what,
        "value": value,
        "goal": goal,
        "better": "lower",
        "unit": unit,
        "note": note,
    }


def _tiny(device: str) -> Any:
    from torch import nn

    return nn.Sequential(nn.Embedding(99, 16), nn.Linear(16, 16), nn.Linear(16, 99)).to(device)


def _model(device: str) -> Any:
    if device == "cuda":
        from benchmarks.gpu.model import llama

        return llama()
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        use_cache=False,
    )
    return LlamaForCausalLM(config).eval()
