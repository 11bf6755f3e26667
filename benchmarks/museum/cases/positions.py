"""Positions: slopes, angles, tables, and what is made of them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.museum.networks import (
    VOCABULARY,
    Language,
    Mixer,
    Rotation,
    Variant,
    case,
    read_once,
    run_case,
    trained,
    turned,
    words_of,
)


class SlopedMixer(Mixer):
    """Scores fall with the distance of a token, by another slope in every head."""

    def __init__(self, slopes: Tensor) -> None:
        super().__init__(heads=len(slopes), groups=len(slopes))
        self.register_buffer("slopes", slopes, persistent=False)

    def bias(self, queries: int, keys: int) -> Tensor:
        distance = torch.arange(keys)[None] - torch.arange(keys - queries, keys)[:, None]
        return super().bias(queries, keys) + self.slopes.float()[:, None, None] * distance


def slopes_of(heads: int) -> list[float]:
    """The published slopes: a geometric series, then every second one of twice as many heads."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (number + 1) / power) for number in range(power)]
    more = [2 ** (-8 * (number + 1) / (2 * power)) for number in range(0, 2 * power, 2)]
    return slopes + more[: heads - power]


@case(
    "https://github.com/ml-explore/mlx/pull/3071",
    "slopes of linear biases are one geometric series although the heads are no power of two",
    "stack.0.mixer",
    causes="positions",
    differences="slopes",
    formats="float32 bfloat16",
)
def slopes_of_six_heads(variant: Variant) -> None:
    series = [2 ** (-8 * (number + 1) / 6) for number in range(6)]
    slopes = torch.tensor(series if variant.bad else slopes_of(6))
    model = trained(Language(lambda: SlopedMixer(slopes)), variant.dtype)
    read_once(model, words_of(2, 40))


@case(
    "https://github.com/paiml/aprender/pull/2143",
    "the exponent of the slopes starts at zero instead of one",
    "stack.0.mixer",
    causes="positions",
    differences="slopes",
)
def slopes_begin_at_one(variant: Variant) -> None:
    first = 0 if variant.bad else 1
    slopes = torch.tensor([2 ** (-8 * (number + first) / 8) for number in range(6)])
    read_once(trained(Language(lambda: SlopedMixer(slopes)), variant.dtype), words_of(2, 40))


@case(
    "https://github.com/Dao-AILab/flash-attention/pull/846",
    "slopes are cast with the model and lose their digits",
    "stack.0.mixer",
    causes="low-precision",
    differences="slopes",
    formats="float32 float16",
)
def slopes_in_half_precision(variant: Variant) -> None:
    exact = torch.tensor(slopes_of(12))
    model = trained(Language(lambda: SlopedMixer(exact)), variant.dtype)
    for layer in model.stack:
        layer.mixer.slopes = exact.to(variant.dtype) if variant.bad else exact
    read_once(model, words_of(1, 400))


class PartMixer(Mixer):
    """Only the first half of every head turns."""

    wrong = ""

    def turn(self, q: Tensor, k: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        if self.wrong == "pairs":
            # The angles are filled up with zeros, and features are paired over the whole head.
            cos, sin = angles
            cos = torch.cat([cos, torch.ones_like(cos)], -1)
            sin = torch.cat([sin, torch.zeros_like(sin)], -1)
            return turned(q, cos, sin), turned(k, cos, sin)
        return turned(q, *angles), turned(k, *angles)


@case(
    "https://github.com/ml-explore/mlx-lm/pull/1698",
    "the share of a head that turns is ignored: all of it turns",
    "rotation stack.0.mixer",
    causes="positions",
    differences="frequencies",
)
def part_of_a_head_ignored(variant: Variant) -> None:
    PartMixer.wrong = ""
    model = Language(PartMixer, rotation=Rotation(12 if variant.bad else 6))
    read_once(trained(model, variant.dtype), words_of(2, 30))


@case(
    "https://github.com/labscommunity/cascadia/pull/69",
    "features are paired over the whole head although only half of it turns",
    "stack.0.mixer",
    causes="permutation",
    formats="float32 bfloat16",
)
def part_of_a_head_paired_wrongly(variant: Variant) -> None:
    PartMixer.wrong = "pairs" if variant.bad else ""
    model = Language(PartMixer, rotation=Rotation(6))
    read_once(trained(model, variant.dtype), words_of(2, 30))


def stretched(
    frequencies: Tensor, factor: float = 8.0, low: float = 1.0, high: float = 4.0
) -> Tensor:
    """Slow rotations are slowed down further, fast ones stay, those between are blended."""
    length = 64.0
    waves = 2 * math.pi / frequencies
    blend = ((length / waves - low) / (high - low)).clamp(0, 1)
    return frequencies * (blend + (1 - blend) / factor)


@case(
    "https://github.com/ggml-org/llama.cpp/pull/8676",
    "frequencies are not scaled as the checkpoint's configuration asks for",
    "rotation",
    causes="positions",
    differences="frequencies",
    formats="float32 bfloat16",
)
def frequencies_not_stretched(variant: Variant) -> None:
    rotation = Rotation(12)
    if not variant.bad:
        rotation.frequencies = stretched(rotation.frequencies)
    model = trained(Language(rotation=rotation), variant.dtype)
    model.rotation.float()
    read_once(model, words_of(1, 200))


class Encoder(nn.Module):
    """Positions are counted from behind the padding's number."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first
        self.table = nn.Embedding(VOCABULARY, 48)
        self.place_table = nn.Embedding(64, 48)
        self.norm = nn.LayerNorm(48)
        self.mixer = Mixer()
        self.head = nn.Linear(48, 16)

    def forward(self, words: Tensor) -> Tensor:
        places = torch.arange(words.shape[1])[None].expand_as(words) + self.first
        x = self.norm(self.table(words) + self.place_table(places))
        return self.head(x + self.mixer(x))


@case(
    "https://github.com/huggingface/sentence-transformers/pull/3879",
    "positions of packed sequences start at 0, the model counts from behind the padding's number",
    "place_table (root)",
    causes="shift",
    differences="first",
)
def places_without_offset(variant: Variant) -> None:
    read_once(trained(Encoder(0 if variant.bad else 2), variant.dtype), words_of(2, 40))


class Times(nn.Module):
    """A number between 0 and 1000 as sines and cosines, and a small network over them."""

    swapped, shift = False, 0.0

    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.size = size
        self.first = nn.Linear(size, 64)
        self.act = nn.SiLU()
        self.second = nn.Linear(64, 48)

    def forward(self, times: Tensor, dtype: torch.dtype) -> Tensor:
        half = self.size // 2
        steps = torch.arange(half).float() / (half - self.shift)
        angles = times[:, None].float() * torch.exp(-math.log(10000.0) * steps)
        parts = [angles.sin(), angles.cos()] if self.swapped else [angles.cos(), angles.sin()]
        return self.second(self.act(self.first(torch.cat(parts, -1).to(dtype))))


class Denoiser(nn.Module):
    def __init__(self, times: Times) -> None:
        super().__init__()
        self.times = times
        self.enter = nn.Conv2d(3, 48, 3, padding=1)
        self.norm = nn.GroupNorm(8, 48)
        self.act = nn.SiLU()
        self.leave = nn.Conv2d(48, 3, 3, padding=1)

    def forward(self, picture: Tensor, times: Tensor) -> Tensor:
        x = self.enter(picture) + self.times(times, picture.dtype)[:, :, None, None]
        return self.leave(self.act(self.norm(x)))


def denoise(variant: Variant, times: Times) -> None:
    picture = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(7))
    model = trained(Denoiser(times), variant.dtype)
    read_once(model, picture.to(variant.dtype), torch.tensor([17, 801]))


@case(
    "https://github.com/flashinfer-ai/flashinfer/pull/3819",
    "sines and cosines of the time step have changed places",
    "times times.first",
    causes="permutation",
    differences="swapped",
    formats="float32 bfloat16",
)
def sines_before_cosines(variant: Variant) -> None:
    Times.swapped, Times.shift = variant.bad, 0.0
    denoise(variant, Times())


@case(
    "https://github.com/kohya-ss/sd-scripts/pull/1187",
    "frequencies of the time step are spaced over one step too few",
    "times times.first",
    causes="positions",
    differences="shift",
)
def times_spaced_wrongly(variant: Variant) -> None:
    Times.swapped, Times.shift = False, 1.0 if variant.bad else 0.0
    denoise(variant, Times())


class Patches(nn.Module):
    """Patches of a picture with a learned table of places that is resized to the picture."""

    def __init__(self, corners: bool = False, sharp: float = -0.75) -> None:
        super().__init__()
        self.corners, self.sharp = corners, sharp
        self.patch = nn.Conv2d(3, 48, 4, 4)
        self.place_table = nn.Parameter(torch.zeros(1, 48, 6, 6))
        self.norm = nn.LayerNorm(48)
        self.mixer = Mixer()
        self.head = nn.Linear(48, 10)

    def places(self, rows: int, columns: int) -> Tensor:
        return F.interpolate(
            self.place_table.float(),
            (rows, columns),
            mode="bilinear",
            align_corners=self.corners,
        )

    def forward(self, picture: Tensor) -> Tensor:
        x = self.patch(picture)
        x = x + self.places(x.shape[2], x.shape[3]).to(x.dtype)
        x = self.norm(x.flatten(2).transpose(1, 2))
        return self.head((x + self.mixer(x)).mean(1))


class SharpPatches(Patches):
    """The same with cubic weights, whose one free number differs between libraries."""

    def places(self, rows: int, columns: int) -> Tensor:
        table = self.place_table.float()
        return self._along(self._along(table, rows, 2), columns, 3)

    def _along(self, table: Tensor, count: int, axis: int) -> Tensor:
        size, a = table.shape[axis], self.sharp
        middle = (torch.arange(count) + 0.5) * size / count - 0.5
        start = middle.floor()
        result = torch.zeros(())
        for step in range(-1, 3):
            distance = (middle - start - step).abs()
            near = (a + 2) * distance**3 - (a + 3) * distance**2 + 1
            far = a * distance**3 - 5 * a * distance**2 + 8 * a * distance - 4 * a
            weight = torch.where(distance <= 1, near, far)
            taken = table.index_select(axis, (start + step).clamp(0, size - 1).long())
            shape = [1, 1, 1, 1]
            shape[axis] = count
            result = result + taken * weight.view(shape)
        return result


def look(model: nn.Module, variant: Variant) -> None:
    picture = torch.randn(2, 3, 32, 40, generator=torch.Generator().manual_seed(9))
    read_once(trained(model, variant.dtype), picture.to(variant.dtype))


@case(
    "https://github.com/ggml-org/llama.cpp/pull/25781",
    "the table of places is resized with half-pixel corners, the reference pins the corners",
    "(root) norm",
    differences="corners",
    formats="float32 bfloat16",
)
def corners_of_the_place_table(variant: Variant) -> None:
    look(Patches(corners=not variant.bad), variant)


@case(
    "https://github.com/Blaizzy/mlx-vlm/issues/1241",
    "cubic weights are those of another library",
    "(root) norm",
    differences="sharp",
)
def cubic_weights_of_another_library(variant: Variant) -> None:
    look(SharpPatches(sharp=-0.5 if variant.bad else -0.75), variant)


class CrossMixer(Mixer):
    """Attends to another sequence; distances between two sequences mean nothing."""

    def __init__(self, biased: bool) -> None:
        super().__init__()
        self.biased = biased
        self.distance_table = nn.Embedding(16, 4)

    def bias(self, queries: int, keys: int) -> Tensor:
        if not self.biased:
            return torch.zeros(queries, keys)
        distance = torch.arange(keys)[None] - torch.arange(queries)[:, None]
        return self.distance_table.weight[distance.clamp(-8, 7) + 8].float().permute(2, 0, 1)


@case(
    "https://github.com/huggingface/transformers/pull/8518",
    "a bias by distance is added where one sequence attends to another",
    "stack.0.mixer",
    causes="positions",
    differences="biased",
)
def distance_between_two_sequences(variant: Variant) -> None:
    read_once(trained(Language(lambda: CrossMixer(variant.bad)), variant.dtype), words_of(2, 20))


if __name__ == "__main__":
    run_case()
