"""Speech: from a wave to bands, borders and pads of recordings, recurrences in two directions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.museum.cases.ports import bands_of
from benchmarks.museum.networks import PORT, Variant, case, drawn, read_once, run_case, trained


def rounded_window(size: int) -> Tensor:
    """A raised cosine to a power below one, which is zero at its ends."""
    return torch.hann_window(size, periodic=False) ** 0.85


class Pieces(nn.Module):
    """Power of overlapping pieces of a recording."""

    def __init__(self, window: Tensor) -> None:
        super().__init__()
        self.register_buffer("window", window, persistent=False)

    def continued(self, wave: Tensor) -> Tensor:
        """What lies before the beginning and behind the end."""
        return F.pad(wave[:, None], (64, 64), mode="reflect")[:, 0]

    def forward(self, wave: Tensor) -> Tensor:
        parts = self.continued(wave).unfold(-1, 128, 64).float() * self.window.float()
        return torch.fft.rfft(parts).abs().square().to(wave.dtype)


class Mel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bands", bands_of(20, 65, False), persistent=False)

    def levels(self, power: Tensor) -> Tensor:
        return power.log10()

    def forward(self, power: Tensor) -> Tensor:
        levels = self.levels((power.float() @ self.bands.float()).clamp(min=1e-10))
        levels = levels.maximum(levels.amax((1, 2), keepdim=True) - 8)
        return ((levels + 4) / 4).to(power.dtype)


class Hearing(nn.Module):
    def __init__(self, pieces: nn.Module, mel: nn.Module) -> None:
        super().__init__()
        self.pieces, self.mel = pieces, mel
        self.enter = nn.Conv1d(20, 32, 3, padding=1)
        self.head = nn.Linear(32, 5)

    def forward(self, wave: Tensor) -> Tensor:
        x = self.mel(self.pieces(wave)).transpose(1, 2)
        return self.head(F.gelu(self.enter(x)).transpose(1, 2))


def hear(variant: Variant, pieces: nn.Module, mel: nn.Module) -> None:
    wave = drawn("recording", 2, 1600).to(variant.dtype)
    read_once(trained(Hearing(pieces, mel), variant.dtype), wave)


class OtherMel(Mel):
    def levels(self, power: Tensor) -> Tensor:
        return power.log() if PORT.wrong else power.log10()


@case(
    "https://github.com/elbruno/ElBruno.Whisper/pull/6",
    "levels of a spectrum are natural logarithms where the model was trained on those to base ten",
    "mel",
    causes="scale offset",
    formats="float32 bfloat16",
)
def natural_logarithms(variant: Variant) -> None:
    PORT.wrong = variant.bad
    hear(variant, Pieces(rounded_window(128)), OtherMel())


class Bordered(Pieces):
    def continued(self, wave: Tensor) -> Tensor:
        if PORT.wrong:
            return F.pad(wave, (64, 64))
        return super().continued(wave)


@case(
    "https://github.com/NVIDIA/TensorRT-Model-Connect/pull/1282",
    "a recording is continued with silence at both ends where the reference mirrors it",
    "pieces",
    causes="mask",
)
def silence_at_both_ends(variant: Variant) -> None:
    PORT.wrong = variant.bad
    hear(variant, Bordered(rounded_window(128)), Mel())


@case(
    "https://github.com/wenet-e2e/wekws/issues/209",
    "pieces of a recording are weighted with another window than in training",
    "pieces",
    causes="weights setting",
    differences="window",
)
def another_window(variant: Variant) -> None:
    window = torch.hamming_window(128, periodic=False) if variant.bad else rounded_window(128)
    hear(variant, Pieces(window), Mel())


class Level(nn.Module):
    """Every recording is brought to mean zero and variance one; pads do not count."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        real = (torch.arange(x.shape[1])[None] < lengths[:, None])[..., None]
        count = lengths[:, None, None]
        x = x.float()
        x = x - (x * real).sum(1, keepdim=True) / count
        if not PORT.wrong:
            x = x * real
        spread = (x.square().sum(1, keepdim=True) / count).clamp(min=1e-10).sqrt()
        return x / spread


class Levelled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.level = Level()
        self.enter = nn.Linear(20, 32)
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        y = self.level(x, lengths).to(x.dtype)
        return self.head(F.relu(self.enter(y)))


@case(
    "https://github.com/espnet/espnet/pull/6571",
    "pads, which the mean was taken from, count in the variance of a recording",
    "level",
    causes="scale mask",
    formats="float32 bfloat16",
)
def pads_in_the_variance(variant: Variant) -> None:
    PORT.wrong = variant.bad
    lengths = torch.tensor([30, 21, 14])
    x = drawn("features", 3, 30, 20) * 0.7 + 1.5
    x = x * (torch.arange(30)[None] < lengths[:, None])[..., None]
    read_once(trained(Levelled(), variant.dtype), x.to(variant.dtype), lengths)


class BothWays(nn.Module):
    """One recurrence reads ahead, another from the last word of every sentence to its first."""

    def __init__(self, width: int = 24, states: int = 16) -> None:
        super().__init__()
        self.ahead = nn.GRU(width, states, batch_first=True)
        self.back = nn.GRU(width, states, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        places = torch.arange(x.shape[1]).expand(x.shape[:2])
        if PORT.wrong:
            order = x.shape[1] - 1 - places
        else:
            order = torch.where(places < lengths[:, None], lengths[:, None] - 1 - places, places)
        ahead, _ = self.ahead(x)
        turned = x.gather(1, order[..., None].expand_as(x))
        back, _ = self.back(turned)
        back = back.gather(1, order[..., None].expand_as(back))
        return torch.cat([ahead, back], -1)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 24)
        self.reader = BothWays()
        self.head = nn.Linear(32, 6)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        return self.head(self.reader(self.table(words), lengths))


@case(
    "https://github.com/deeplearning4j/deeplearning4j/issues/1030",
    "the recurrence that reads backwards begins with the pads of a short sentence",
    "reader",
    causes="mask permutation",
    formats="float32 bfloat16",
)
def backwards_from_the_pads(variant: Variant) -> None:
    PORT.wrong = variant.bad
    lengths = torch.tensor([20, 13, 7])
    words = torch.randint(1, 50, (3, 20), generator=torch.Generator().manual_seed(21))
    words = words * (torch.arange(20)[None] < lengths[:, None])
    read_once(trained(Tagger(), variant.dtype), words, lengths)


if __name__ == "__main__":
    run_case()
