"""What describing a model costs: docs/model-facts.md, on whatever device this machine has.

A Llama of 134 million parameters on a CPU, of 1.1 billion in bfloat16 on a CUDA device. The calls
of the part that describes models are timed one by one inside a capture that takes no tensors, so no
difference of two long forward passes has to be told from noise.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CALLS = 40
"""Forward passes under one capture; the cost of a later one is their median."""
_PARTS = ("before_root", "digests_call", "after_root")


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
    later: list[float] = []
    with torch.no_grad():
        model(tokens)
        for _ in range(rounds):
            for weights in first:
                timed, closing = _captured(model, tokens, weights=weights)
                first[weights].append(timed[0])
                if weights:
                    end.append(closing)
                else:
                    later += timed[1:]
    without, whole = (statistics.median(first[weights]) * 1e3 for weights in (False, True))
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
            statistics.median(later) * 1e6,
            1.0,
            "us",
            "between forward passes, caches cold; timing itself is 1 us of it",
        ),
    ]


def _captured(model: Any, tokens: Any, *, weights: bool) -> tuple[list[float], float]:
    """Seconds of each call's part for facts, and of the capture's end."""
    import driftline
    from driftline.captures.torch.model_facts import TorchFacts

    spent = [0.0]
    kept = {name: getattr(TorchFacts, name) for name in _PARTS}

    def timed(part: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            # Of this thread alone: weights are read on another, and machines have other work.
            begin = time.thread_time()
            result = part(*args, **kwargs)
            spent[0] += time.thread_time() - begin
            return result

        return call

    calls: list[float] = []
    try:
        for name, part in kept.items():
            setattr(TorchFacts, name, timed(part))
        with tempfile.TemporaryDirectory(prefix="driftline-facts-") as folder:
            capture = driftline.capture(
                model, Path(folder) / "run", classes="NoSuchClass", weight_facts=weights
            )
            with capture:
                for _ in range(CALLS):
                    spent[0] = 0.0
                    model(tokens)
                    calls.append(spent[0])
                begin = time.perf_counter()
            return calls, time.perf_counter() - begin
    finally:
        for name, part in kept.items():
            setattr(TorchFacts, name, part)


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
