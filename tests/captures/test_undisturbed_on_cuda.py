"""Twelve programs on a GPU, in five surroundings and in a CUDA graph: watched, no bit changes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import driftline
from driftline.runs.memory import MemorySink

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]

Program = tuple[nn.Module, tuple[Any, ...]]


class InPlace(nn.Module):
    """Each part writes into what the part before gave."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(self.first(x)) * 1.5
        y.data.add_(0.25)  # a write that torch does not count
        return y[:, ::2].transpose(0, 1)


class Experts(nn.Module):
    """Tokens go where their router sends them: shapes depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(64, 4)
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.router(x).argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(-1)
            out[rows] = expert(x[rows]).to(out.dtype)
        return out


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        heads = [t.unflatten(-1, (4, 16)).transpose(1, 2) for t in (q, k, v)]
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Cached(nn.Module):
    """A key-value cache that grows over its calls, as a decoder's does."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache = x.new_zeros(8, *x.shape)
        for place in range(8):
            x = self.step(x)
            cache[place].copy_(x)
        return cache.mean(0)


class Shared(nn.Module):
    """One module called several times, with weights that two names hold."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(100, 64), nn.Linear(64, 100, bias=False)
        self.head.weight = self.table.weight
        self.norm = nn.LayerNorm(64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.norm(self.table(ids))))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(33, 33)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(x.float())
        return torch.fft.irfft(spectrum * self.mix(spectrum.abs().to(x.dtype)).float())


def vectors(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).cuda()


PROGRAMS: dict[str, Callable[[], Program]] = {
    "perceptron": lambda: (
        nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)),
        (vectors(32, 64),),
    ),
    "convolutions with batch norms": lambda: (
        nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3)),
        (vectors(4, 3, 32, 32),),
    ),
    "channels last": lambda: (
        nn.Sequential(nn.Conv2d(8, 16, 3), nn.SiLU(), nn.AvgPool2d(2)),
        (vectors(4, 8, 32, 32).to(memory_format=torch.channels_last),),
    ),
    "transformer with dropout": lambda: (
        nn.TransformerEncoderLayer(64, 4, 128, dropout=0.2, batch_first=True),
        (vectors(2, 16, 64),),
    ),
    "attention": lambda: (Attention(), (vectors(2, 16, 64),)),
    "group norm": lambda: (
        nn.Sequential(nn.Conv1d(16, 32, 3), nn.GroupNorm(4, 32), nn.Softmax(-1)),
        (vectors(3, 16, 50),),
    ),
    "in place": lambda: (InPlace(), (vectors(32, 64),)),
    "experts": lambda: (Experts(), (vectors(64, 64),)),
    "cache": lambda: (Cached(), (vectors(32, 64),)),
    "shared weights": lambda: (
        Shared(),
        (torch.randint(0, 100, (4, 20), generator=torch.Generator().manual_seed(1)).cuda(),),
    ),
    "spectrum": lambda: (Complex(), (vectors(8, 64),)),
    "odd sizes": lambda: (
        nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 1), nn.Flatten(0)),
        (vectors(17, 7),),
    ),
}


@contextlib.contextmanager
def side_stream() -> Iterator[None]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


SURROUNDINGS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "training": contextlib.nullcontext,
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cuda", torch.bfloat16),
    "stream": side_stream,
}


def results(
    make: Callable[[], Program], surroundings: Callable[[], Any], keep: str
) -> list[torch.Tensor]:
    """Outputs of three calls, then gradients and buffers where there are any."""
    torch.manual_seed(0)
    model, inputs = make()
    model = model.cuda()
    sink = MemorySink()
    levels = ("modules", "gradients", "params")
    watch = driftline.capture(model, sink, keep=keep, levels=levels, steps="*") if keep else None
    with watch or contextlib.nullcontext():
        with surroundings():
            given = [t.clone() for t in inputs]
            outputs = [model(*given) for _ in range(3)]
        if outputs[-1].requires_grad:
            outputs[-1].float().square().mean().backward()
    torch.cuda.synchronize()
    if keep:
        assert not [event for event in sink.run().events() if event["kind"] == "capture-fault"]
    after = [p.grad for p in model.parameters() if p.grad is not None] + list(model.buffers())
    return [tensor.detach().clone() for tensor in (*outputs, *after, torch.rand(3, device="cuda"))]


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("surroundings", SURROUNDINGS)
def test_a_watched_program_gives_the_bits_it_gives_alone(name: str, surroundings: str) -> None:
    make, around = PROGRAMS[name], SURROUNDINGS[surroundings]
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        plain, again = results(make, around, ""), results(make, around, "")
        # What is not repeatable by itself says nothing; most has to be.
        steady = [torch.equal(a, b) for a, b in zip(plain, again, strict=True)]
        assert sum(steady) > len(steady) // 2
        for keep in ("summary", "full"):
            watched = results(make, around, keep)
            for number, same in enumerate(steady):
                assert not same or torch.equal(plain[number], watched[number]), (keep, number)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "experts"])
def test_a_graph_that_was_recorded_while_watched_replays_the_bits_of_one_that_was_not(
    name: str,
) -> None:
    def replayed(watch: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model, inputs = PROGRAMS[name]()
        model = model.cuda().eval()
        sink = MemorySink()
        watching = driftline.capture(model, sink, keep="summary") if watch else None
        with torch.no_grad(), watching or contextlib.nullcontext():
            with side_stream():
                model(*inputs)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = model(*inputs)
            graph.replay()
            torch.cuda.synchronize()
        if watch:
            kinds = {event["kind"] for event in sink.run().events()}
            assert "capture-fault" not in kinds
        return out.clone()

    assert torch.equal(replayed(False), replayed(True))
