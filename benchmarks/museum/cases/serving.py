"""Engines that serve models: states between chunks, penalties, windows, adapters, packed scales."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.museum.cases.attention import Windowed
from benchmarks.museum.networks import (
    PORT,
    Gated,
    Language,
    Mixer,
    Rotation,
    Variant,
    case,
    drawn,
    read_once,
    run_case,
    trained,
    turned,
    words_of,
)


class Scan(nn.Module):
    """A short convolution and a state that decays; both go on where the last chunk ended."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.enter = nn.Linear(width, width)
        self.short = nn.Conv1d(width, width, 4, groups=width)
        self.rate = nn.Linear(width, width)
        self.leave = nn.Linear(width, width)

    def forward(self, x: Tensor, angles: object = None, past: list | None = None) -> Tensor:
        inside = self.enter(x).transpose(1, 2)
        before, state = inside.new_zeros(*inside.shape[:2], 3), x.new_zeros(x.shape[0], x.shape[2])
        if past and not PORT.wrong:
            before, state = past.pop()
        inside = torch.cat([before, inside], -1)
        y = F.silu(self.short(inside)).transpose(1, 2)
        decay, outputs = self.rate(x).sigmoid(), []
        for step in range(x.shape[1]):
            state = decay[:, step] * state + (1 - decay[:, step]) * y[:, step]
            outputs.append(state)
        if past is not None:
            past.append((inside[..., -3:], state))
        return self.leave(torch.stack(outputs, 1))


@case(
    "https://github.com/huggingface/transformers/pull/46741",
    "the second chunk of a text begins with an empty state",
    "stack.0.mixer",
    causes="stale mask scale",
    dump=("--step", "*"),
)
def second_chunk_forgets_the_first(variant: Variant) -> None:
    PORT.wrong = variant.bad
    model = trained(Language(Scan, layers=2), variant.dtype)
    words, past = words_of(2, 32), [[] for _ in range(2)]
    with torch.no_grad():
        model(words[:, :20], past)
        model(words[:, 20:], past, 20)


class Penalty(nn.Module):
    """Words that were said already become less likely, whatever the sign of their logit."""

    def forward(self, logits: Tensor, words: Tensor) -> Tensor:
        said = logits.gather(1, words)
        less = said / 1.3
        if not PORT.wrong:
            less = torch.where(said < 0, said * 1.3, less)
        return logits.scatter(1, words, less)


class Speaker(Language):
    def __init__(self) -> None:
        super().__init__(rotation=Rotation(12), layers=2)
        self.penalty = Penalty()

    def forward(self, words: Tensor, past: list[list] | None = None, begin: int = 0) -> Tensor:
        return self.penalty(super().forward(words, past, begin)[:, -1], words)


@case(
    "https://github.com/huggingface/transformers/issues/2302",
    "the penalty for repeated words divides their logits also where these are negative",
    "penalty",
    causes="scale",
    formats="float32 bfloat16",
)
def penalty_that_rewards(variant: Variant) -> None:
    PORT.wrong = variant.bad
    read_once(trained(Speaker(), variant.dtype), words_of(2, 24))


class HeadNorm(nn.Module):
    """Every head has a root mean square of one."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        axes = (1, 3) if PORT.wrong else (3,)
        return (wide * torch.rsqrt(wide.square().mean(axes, keepdim=True) + 1e-6)).to(x.dtype)


class HeadsNormed(Mixer):
    def __init__(self) -> None:
        super().__init__()
        self.query_norm, self.key_norm = HeadNorm(), HeadNorm()

    def turn(self, q: Tensor, k: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.query_norm(turned(q, *angles)), self.key_norm(turned(k, *angles))


@case(
    "https://github.com/vllm-project/vllm/pull/16311",
    "queries are normalised over all heads together instead of head by head",
    "stack.0.mixer.query_norm",
    causes="scale",
)
def heads_normalised_together(variant: Variant) -> None:
    PORT.wrong = variant.bad
    read_once(trained(Language(HeadsNormed, rotation=Rotation(12)), variant.dtype), words_of(2, 32))


@case(
    "https://github.com/huggingface/transformers/pull/31775",
    "of layers with and without a window every second one is local, and it is the other one",
    "stack.0.mixer",
    causes="mask",
    differences="window",
    formats="float32 bfloat16",
)
def windows_in_the_other_layers(variant: Variant) -> None:
    model = Language(rotation=Rotation(12), layers=4)
    for number, layer in enumerate(model.stack):
        is_local = number % 2 == (1 if variant.bad else 0)
        layer.mixer = Windowed(8 if is_local else 10**6)
    read_once(trained(model, variant.dtype), words_of(2, 48))


class Nested(nn.Module):
    """A matrix as codes with a scale for every sixteen inputs; the scales are codes themselves."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        groups = linear.weight.detach().float().view(linear.out_features, -1, 16)
        scales = groups.abs().amax(-1) / 127
        self.register_buffer("codes", (groups / scales[..., None]).round().to(torch.int8))
        self.offset = float(scales.mean())
        self.step = float((scales - self.offset).abs().max() / 127)
        codes = ((scales - self.offset) / self.step).round()
        self.register_buffer("scale_codes", codes.to(torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        scales = self.scale_codes.float()
        if not PORT.wrong:
            scales = scales * self.step + self.offset
        weight = (self.codes.float() * scales[..., None]).flatten(1)
        return F.linear(x, weight.to(x.dtype))


@case(
    "https://github.com/bitsandbytes-foundation/bitsandbytes/pull/1549",
    "scales that are packed themselves are used as they are packed",
    "stack.0.feed.up",
    causes="scale weights",
)
def scales_not_unpacked(variant: Variant) -> None:
    PORT.wrong = variant.bad
    model = trained(Language(rotation=Rotation(12), layers=2), variant.dtype)
    for layer in model.stack:
        layer.feed.up = Nested(layer.feed.up)
    read_once(model, words_of(2, 32))


class Biased(Gated):
    """A feed-forward whose matrices have biases."""

    def __init__(self) -> None:
        super().__init__(48, 96)
        self.up = nn.Linear(48, 96)


def adapted(layer: nn.Module, scale: float, bias_scale: float, transposed: bool = False) -> None:
    """Let a matrix take up its adapter of rank four."""
    linear = layer.feed.up
    rows, columns = linear.weight.shape
    down, up = drawn("down", 4, columns) / 7, drawn("up", rows, 4) / 2
    delta = (down.reshape(columns, 4) @ up.reshape(4, rows)).T if transposed else up @ down
    with torch.no_grad():
        linear.weight += scale * delta
        linear.bias += bias_scale * 0.2 * drawn("bias", rows)


@case(
    "https://github.com/huggingface/peft/pull/2489",
    "the bias of an adapter is merged without the adapter's factor",
    "stack.1.feed.up",
    causes="offset",
    differences="up.bias",
    formats="float32 bfloat16",
)
def bias_of_an_adapter(variant: Variant) -> None:
    model = trained(Language(feed=Biased, rotation=Rotation(12), layers=2))
    adapted(model.stack[1], 4.0, 1.0 if variant.bad else 4.0)
    read_once(model.to(variant.dtype), words_of(2, 32))


@case(
    "https://github.com/paiml/aprender/pull/2138",
    "an adapter is merged as if its matrices lay the other way round",
    "stack.1.feed.up",
    causes="weights permutation transpose",
    differences="up.weight",
    formats="float32 bfloat16",
)
def adapter_the_other_way_round(variant: Variant) -> None:
    model = trained(Language(feed=Biased, rotation=Rotation(12), layers=2))
    adapted(model.stack[1], 4.0, 4.0, transposed=variant.bad)
    read_once(model.to(variant.dtype), words_of(2, 32))


if __name__ == "__main__":
    run_case()
