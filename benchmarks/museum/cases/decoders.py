"""Decoders and encoders: residuals, scores, sinks, experts, and which token is taken."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.museum.cases.norms import packed
from benchmarks.museum.networks import (
    PORT,
    VOCABULARY,
    Gated,
    Language,
    Layer,
    Mixer,
    RootNorm,
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


class NormAfter(nn.Module):
    """A layer whose norms follow the sums; the second sum begins with what was normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer, self.first = Mixer(), nn.LayerNorm(48)
        self.feed, self.second = Gated(), nn.LayerNorm(48)

    def forward(self, x: Tensor, *rest: object) -> Tensor:
        total = x + self.mixer(x)
        normal = self.first(total)
        return self.second((total if PORT.wrong else normal) + self.feed(normal))


@case(
    "https://github.com/NVIDIA-NeMo/Speech/pull/4350",
    "with norms behind the sums, the residual is taken from before the norm",
    "stack.0",
    causes="stale scale",
    formats="float32 bfloat16",
)
def residual_from_before_the_norm(variant: Variant) -> None:
    PORT.wrong = variant.bad
    model = Language(norm=lambda: nn.LayerNorm(48))
    model.stack = nn.ModuleList(NormAfter() for _ in range(3))
    read_once(trained(model, variant.dtype), words_of(2, 32))


class SideBySide(Layer):
    """Attention and feed-forward read the same input, where the checkpoint asks for it."""

    def __init__(self, parallel: bool) -> None:
        super().__init__(Mixer(), lambda: nn.LayerNorm(48), Gated)
        self.parallel = parallel

    def forward(
        self, x: Tensor, angles: tuple[Tensor, Tensor] | None = None, past: list | None = None
    ) -> Tensor:
        mixed = x + self.mixer(self.before(x), angles, past)
        return mixed + self.feed(self.between(x if self.parallel else mixed))


@case(
    "https://github.com/deepspeedai/DeepSpeed/pull/2446",
    "an engine runs attention and feed-forward side by side although the checkpoint does not",
    "stack.0",
    causes="setting",
    differences="parallel",
    formats="float32 bfloat16",
)
def parallel_residual_not_asked_for(variant: Variant) -> None:
    model = Language(norm=lambda: nn.LayerNorm(48), rotation=Rotation(12))
    model.stack = nn.ModuleList(SideBySide(variant.bad) for _ in range(3))
    read_once(trained(model, variant.dtype), words_of(2, 32))


class Stretched(Mixer):
    """Scores are multiplied by the square of a factor that follows from the longer context."""

    def turn(self, q: Tensor, k: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        factor = 1.0 if PORT.wrong else (0.1 * 0.707 * math.log(40) + 1) ** 2
        return turned(q, *angles) * factor, turned(k, *angles)


@case(
    "https://github.com/onnxruntime/mobius/pull/548",
    "the factor of scores that goes with stretched positions is left out",
    "stack.0.mixer",
    causes="scale",
    formats="float32 bfloat16",
)
def factor_of_stretched_scores(variant: Variant) -> None:
    PORT.wrong = variant.bad
    read_once(trained(Language(Stretched, rotation=Rotation(12)), variant.dtype), words_of(2, 32))


class Sinking(Mixer):
    """Every head has one more score, without a value, that takes up part of the softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.zeros(4))

    def shares(self, scores: Tensor) -> Tensor:
        if PORT.wrong:
            return scores.softmax(-1)
        sinks = (1.0 + self.sinks.float())[:, None, None].expand(*scores.shape[:-1], 1)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]


@case(
    "https://github.com/NVIDIA/TransformerEngine/issues/2541",
    "the learned sink of every head is dropped on its way to the softmax",
    "stack.0.mixer",
    causes="scale mask",
)
def sinks_dropped(variant: Variant) -> None:
    PORT.wrong = variant.bad
    read_once(trained(Language(Sinking, rotation=Rotation(12)), variant.dtype), words_of(2, 32))


class Bucketed(Mixer):
    """Both directions have eight buckets; far distances share the last one of their direction."""

    def __init__(self) -> None:
        super().__init__()
        self.distance_table = nn.Embedding(16, 4)

    def bias(self, queries: int, keys: int) -> Tensor:
        distance = torch.arange(keys)[None] - torch.arange(queries)[:, None]
        far = distance.abs()
        wide = 4 + (torch.log(far.clamp(min=1) / 4) / math.log(20 / 4) * 4).long()
        if not PORT.wrong:
            wide = wide.clamp(max=7)
        bucket = torch.where(far < 4, far, wide) + 8 * (distance > 0)
        return self.distance_table.weight[bucket.clamp(max=15)].float().permute(2, 0, 1)


@case(
    "https://github.com/huggingface/candle/pull/1312",
    "buckets of far distances run on into those of the other direction",
    "stack.0.mixer",
    causes="positions",
)
def buckets_without_a_last_one(variant: Variant) -> None:
    PORT.wrong = variant.bad
    read_once(trained(Language(Bucketed), variant.dtype), words_of(2, 48))


class Open(Mixer):
    def bias(self, queries: int, keys: int) -> Tensor:
        return torch.zeros(queries, keys)


class GridRotation(nn.Module):
    """Half of the angles follow the row of a patch, half its column."""

    def __init__(self, size: int) -> None:
        super().__init__()
        frequencies = 100.0 ** (-torch.arange(0, size // 2, 2).float() / (size // 2))
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, places: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        rows, columns = places.float().unbind(-1)
        if PORT.wrong:
            rows, columns = columns, rows
        parts = [side[..., None] * self.frequencies.float() for side in (rows, columns)]
        angles = torch.cat([*parts, *parts], -1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


class Picture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 48, 4, 4)
        self.rotation = GridRotation(12)
        self.stack = nn.ModuleList(Layer(Open(), lambda: RootNorm(48), Gated) for _ in range(2))
        self.head = nn.Linear(48, 10)

    def forward(self, picture: Tensor) -> Tensor:
        x = self.patch(picture)
        places = torch.cartesian_prod(torch.arange(x.shape[2]), torch.arange(x.shape[3]))
        angles = self.rotation(places[None], x.dtype)
        x = x.flatten(2).transpose(1, 2)
        for layer in self.stack:
            x = layer(x, angles)
        return self.head(x.mean(1))


@case(
    "https://github.com/Meituan-AutoML/VisionLLaMA/issues/4",
    "rows and columns of patches have changed places in the rotation",
    "rotation",
    causes="permutation positions",
    formats="float32 bfloat16",
)
def rows_and_columns_swapped(variant: Variant) -> None:
    PORT.wrong = variant.bad
    read_once(trained(Picture(), variant.dtype), drawn("picture", 2, 3, 32, 40).to(variant.dtype))


class Corrected(nn.Module):
    """A learned correction helps to choose experts; their weights do not contain it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(48, 6, bias=False)
        self.register_buffer("correction", 0.3 * drawn("correction", 6))
        self.experts = nn.ModuleList(Gated(48, 32) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        scores = self.router(flat).float().sigmoid()
        corrected = scores + self.correction.float()
        chosen = corrected.topk(2, -1).indices
        weights = (corrected if PORT.wrong else scores).gather(-1, chosen).to(x.dtype)
        result = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            result.index_add_(0, rows, expert(flat[rows]) * weights[rows, place, None])
        return result.view_as(x)


@case(
    "https://github.com/MetaX-MACA/vLLM-metax/issues/270",
    "weights of experts contain the correction that is meant for choosing them",
    "stack.0.feed",
    causes="scale",
)
def correction_in_the_weights(variant: Variant) -> None:
    PORT.wrong = variant.bad
    model = Language(feed=Corrected, rotation=Rotation(12))
    read_once(trained(model, variant.dtype), words_of(2, 32))


class SplitGate(nn.Module):
    """Gates and what they let through lie next to each other."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1) if PORT.wrong else (x[..., ::2], x[..., 1::2])
        return F.silu(gate) * up


class FusedFeed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(48, 192, bias=False)
        self.act = SplitGate()
        self.down = nn.Linear(96, 48, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate_up(x)))


@case(
    "https://github.com/ROCm/ATOM/pull/885",
    "gates lie beside what they let through, the activation reads two halves",
    "stack.0.feed.act",
    causes="permutation",
    formats="float32 bfloat16",
)
def gates_read_as_a_half(variant: Variant) -> None:
    PORT.wrong = variant.bad
    model = Language(feed=FusedFeed, rotation=Rotation(12))
    read_once(trained(model, variant.dtype), words_of(2, 32))


class SummedNorm(RootNorm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        squares = wide.square().sum(-1, keepdim=True)
        size = squares if PORT.wrong else squares / x.shape[-1]
        return (wide * torch.rsqrt(size + self.eps) * self.weight.float()).to(x.dtype)


@case(
    "https://github.com/tenstorrent/tt-mlir/pull/8798",
    "a norm divides by the root of the sum of squares in place of their mean",
    "stack.0.before",
    causes="scale",
    formats="float32 bfloat16",
)
def squares_not_averaged(variant: Variant) -> None:
    PORT.wrong = variant.bad
    model = Language(norm=lambda: SummedNorm(48), rotation=Rotation(12))
    read_once(trained(model, variant.dtype), words_of(2, 32))


class Pooled(Language):
    """The text is what stands at its end, which is a token of its own."""

    end = 90

    def forward(self, words: Tensor, past: list[list] | None = None, begin: int = 0) -> Tensor:
        x = self.table(words)
        for layer in self.stack:
            x = layer(x)
        place = words.argmax(-1) if PORT.wrong else (words == self.end).int().argmax(-1)
        return self.head(self.last(x)[torch.arange(len(words)), place])


@case(
    "https://github.com/huggingface/transformers/issues/24650",
    "the largest number is taken for the end of a text, and new tokens have larger ones",
    "",
    causes="stale shift permutation",
    formats="float32 bfloat16",
)
def end_is_the_largest_number(variant: Variant) -> None:
    PORT.wrong = variant.bad
    words = words_of(3, 24) % Pooled.end
    words[:, 5], words[:, 15:] = VOCABULARY - 1, Pooled.end
    read_once(trained(Pooled(), variant.dtype), words)


@case(
    "https://github.com/pie-project/pie/pull/491",
    "zero points of four bits are packed again without the order that the kernel reads",
    "stack.1.feed.up",
    causes="permutation offset",
    differences="zeros",
)
def zero_points_in_another_order(variant: Variant) -> None:
    model = trained(Language(rotation=Rotation(12), layers=2), variant.dtype)
    for layer in model.stack:
        layer.feed.up = packed(layer.feed.up, "")
    if variant.bad:
        last = model.stack[1].feed.up
        order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
        last.zeros = last.zeros.view(-1, 8, last.zeros.shape[-1])[:, order].flatten(0, 1)
    read_once(model, words_of(2, 32))


if __name__ == "__main__":
    run_case()
