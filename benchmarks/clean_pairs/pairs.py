"""Which clean pairs are tried, and what makes a candidate differ from its reference.

A clean pair is one model computed twice, rightly both times: in another number format, with other
kernels, threads or memory layout. Everything follows from the pair's fields to the bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from benchmarks.clean_pairs.models import ARCHITECTURES, LONG, Size, buildable, made
from driftline.testing.faults import Specimen
from driftline.testing.faults.variants import compiled_blocks, in_format, other_attention


class Pair(NamedTuple):
    """One clean pair.

    Attributes:
        architecture: A name of `ARCHITECTURES`.
        candidate: A name of `CANDIDATES`: what is different about the candidate.
        layers: Blocks, where the architecture lets that be chosen.
        tokens: Of each sequence, likewise.
        weights: A name of `WEIGHTS`.
        seed: Of weights and inputs.
        steps: Training steps; 0 is a forward pass alone.
        optimizer: Of these steps.
        params: Whether the runs hold the weights.
        padding: Pads on the left of the first sequence.
    """

    architecture: str
    candidate: str
    layers: int = 4
    tokens: int = 32
    weights: str = "default"
    seed: int = 0
    steps: int = 0
    optimizer: str = ""
    params: bool = False
    padding: bool = False

    @property
    def name(self) -> str:
        """Says all of it; results are kept under this name."""
        training = f", {self.steps} steps of {self.optimizer}" if self.steps else ""
        extras = (", params" if self.params else "") + (", left pads" if self.padding else "")
        size = f"{self.layers} layers, {self.tokens} tokens"
        return (
            f"{self.architecture} {self.candidate}: {size}, {self.weights}{training}{extras}, "
            f"seed {self.seed}"
        )

    @property
    def family(self) -> str:
        """The package that the architecture comes from."""
        return ARCHITECTURES[self.architecture].family

    @property
    def kind(self) -> str:
        """What the report groups it by."""
        return f"{self.candidate}, training" if self.steps else self.candidate

    @property
    def size(self) -> Size:
        """Of model and inputs."""
        batch = 1 if self.tokens >= LONG else 2
        return Size(self.layers, self.tokens, batch)


# What is different about a candidate.


class WeightOnlyLinear(nn.Module):
    """A linear layer whose weights are eight-bit codes with a scale for each output channel."""

    codes: torch.Tensor
    scales: torch.Tensor

    def __init__(self, module: Any) -> None:
        super().__init__()
        weight = module.weight.data
        if type(module).__name__ == "Conv1D":
            weight = weight.t()
        scales = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
        self.register_buffer("codes", torch.round(weight / scales).to(torch.int8))
        self.register_buffer("scales", scales)
        self.bias = module.bias

    @property
    def weight(self) -> torch.Tensor:
        """What the codes mean; some models ask for its type."""
        return self.codes * self.scales

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)


def _int8(source: Specimen) -> Specimen:
    linears = [
        name
        for name, module in source.model.named_modules()
        if type(module).__name__ in ("Linear", "Conv1D")
    ]
    for name in linears:
        source.model.set_submodule(name, WeightOnlyLinear(source.model.get_submodule(name)))
    return source


def _format(name: str) -> Callable[[Specimen], Specimen]:
    return lambda source: Specimen(*in_format(source.model, source.inputs, name))


def _channels_last(source: Specimen) -> Specimen:
    inputs = {
        key: value.to(memory_format=torch.channels_last)
        if isinstance(value, torch.Tensor) and value.dim() == 4
        else value
        for key, value in source.inputs.items()
    }
    return Specimen(source.model.to(memory_format=torch.channels_last), inputs)


def _sdpa(source: Specimen) -> Specimen:
    return source._replace(model=other_attention(source.model))


def _compiled(source: Specimen) -> Specimen:
    compiled_blocks(source.model)
    return source


def _whole_compiled(source: Specimen) -> Specimen:
    source.model.compile()
    return source


CANDIDATES: Mapping[str, Callable[[Specimen], Specimen]] = {
    "bf16": _format("bf16"),
    "fp16": _format("fp16"),
    "bf16 autocast": lambda source: source,
    "int8 weights": _int8,
    "two threads": lambda source: source,
    "sdpa": _sdpa,
    "sdpa in bf16": lambda source: _format("bf16")(_sdpa(source)),
    "channels_last": _channels_last,
    "compiled blocks": _compiled,
    "compiled": _whole_compiled,
}
"""By name: takes a copy of the reference and may change it."""


def sides(pair: Pair) -> tuple[Specimen, Specimen]:
    """The reference in float32, and the candidate."""
    reference = made(pair.architecture, pair.size, pair.seed, pair.weights)
    if pair.padding:
        mask = torch.ones_like(reference.inputs["input_ids"])
        mask[0, : pair.tokens // 3] = 0
        reference.inputs["attention_mask"] = mask
    copied = Specimen(copy.deepcopy(reference.model), dict(reference.inputs))
    return reference, CANDIDATES[pair.candidate](copied)


# The set.

_DEEP = ("llama", "qwen2", "gpt2")
_GAINS = ("default", "gain 1", "gain 2", "gain 2, q and k x2")
_WITHOUT_SDPA = ("mamba", "t5", "bloom", "whisper", "gemma2")
_MIXED_ONLY = ("raft",)
"""Makes float32 tensors on its way: it runs in 16 bits by autocast, and not otherwise."""


def _depths() -> Iterator[Pair]:
    """Depth and gains: where flat limits accuse the last layers."""
    for architecture in _DEEP:
        for layers in (2, 8, 24):
            for weights in _GAINS:
                for candidate in ("bf16", "fp16"):
                    yield Pair(architecture, candidate, layers, weights=weights)
    for architecture in ("llama", "qwen2"):
        for weights in _GAINS:
            for candidate in ("bf16", "fp16"):
                yield Pair(architecture, candidate, 80, 16, weights)
    for weights in _GAINS:
        yield Pair("gpt2", "bf16", 80, 16, weights)
    for seed in range(1, 4):
        for weights in _GAINS:
            yield Pair("llama", "bf16", 8, 64, weights, seed)
    for architecture in ("bert", "gemma2", "vit", "perceptron"):
        for weights in _GAINS:
            yield Pair(architecture, "bf16", 24, weights=weights)


def _texts() -> Iterator[Pair]:
    """Every text model in every format."""
    for architecture, known in ARCHITECTURES.items():
        if known.kind not in ("decoder", "encoder", "seq2seq"):
            continue
        yield Pair(architecture, "bf16")
        yield Pair(architecture, "bf16", weights="gain 1")
        yield Pair(architecture, "fp16", weights="gain 2")
        yield Pair(architecture, "int8 weights")
        yield Pair(architecture, "int8 weights", weights="gain 1")
        yield Pair(architecture, "two threads", weights="gain 1")
        yield Pair(architecture, "bf16 autocast", weights="gain 1")
        if architecture not in _WITHOUT_SDPA:
            yield Pair(architecture, "sdpa")
            yield Pair(architecture, "sdpa in bf16", weights="gain 1")


def _others() -> Iterator[Pair]:
    """Models of images, of sound and of our own."""
    for architecture, known in ARCHITECTURES.items():
        if known.kind not in ("images", "other"):
            continue
        for candidate in ("bf16", "fp16", "int8 weights", "two threads", "bf16 autocast"):
            if candidate in ("bf16", "fp16") and architecture in _MIXED_ONLY:
                continue
            yield Pair(architecture, candidate)
        if architecture not in _MIXED_ONLY:
            yield Pair(architecture, "bf16", weights="gain 1")
        if known.kind == "images" or known.family == "diffusers":
            yield Pair(architecture, "channels_last")


def _lengths() -> Iterator[Pair]:
    """From 16 to 16 000 tokens."""
    for architecture in ("llama", "gpt2", "bert"):
        for tokens in (16, 128, 512, 2048):
            yield Pair(architecture, "bf16", 2, tokens)
            yield Pair(architecture, "fp16", 2, tokens, "gain 1")
    for architecture in ("llama", "gpt2"):
        yield Pair(architecture, "bf16", 2, 16_000)
        yield Pair(architecture, "fp16", 2, 16_000, "gain 1")


def _pads_and_routers() -> Iterator[Pair]:
    """Pads on the left, and routers that choose between experts that are nearly as good."""
    for architecture in ("llama", "gpt2", "qwen2", "opt"):
        for candidate in ("bf16", "sdpa", "sdpa in bf16"):
            yield Pair(architecture, candidate, 8, padding=True)
    for architecture in ("mixtral", "qwen2_moe"):
        for seed in range(1, 6):
            for candidate in ("bf16", "fp16"):
                yield Pair(architecture, candidate, 6, 64, "gain 1", seed)


def _compilations() -> Iterator[Pair]:
    for architecture in ("llama", "gpt2", "bert", "vit"):
        yield Pair(architecture, "compiled blocks", 2)
    for architecture in ("llama", "perceptron", "hourglass"):
        yield Pair(architecture, "compiled", 2)


def _trainings() -> Iterator[Pair]:
    """Two or three steps with gradients and an optimizer."""
    chosen = ("llama", "gpt2", "bert", "vit", "t5", "resnet18", "perceptron", "hourglass")
    for architecture in (*chosen, "recurrent", "convnext", "deit", "translator"):
        for optimizer in ("SGD", "AdamW"):
            yield Pair(architecture, "bf16 autocast", 2, steps=2, optimizer=optimizer)
            yield Pair(architecture, "two threads", 2, steps=2, optimizer=optimizer)
        yield Pair(architecture, "bf16", 2, steps=2, optimizer="SGD")
    for architecture in ("llama", "gpt2", "bert", "vit"):
        yield Pair(architecture, "sdpa", 4, steps=3, optimizer="AdamW")
        yield Pair(architecture, "sdpa in bf16", 2, steps=2, optimizer="AdamW")


def clean_pairs() -> list[Pair]:
    """All clean pairs that can be made here, every second one with weights in the runs."""
    here = set(buildable())
    listed: Iterable[Iterator[Pair]] = (
        *(_depths(), _texts(), _others(), _lengths()),
        *(_pads_and_routers(), _compilations(), _trainings()),
    )
    pairs = [p for part in listed for p in part if p.architecture in here]
    # Not by turns: candidates come in turns, too.
    return [p._replace(params=sum(p.name.encode()) % 2 == 0) for p in dict.fromkeys(pairs)]
