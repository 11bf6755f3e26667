"""Samplers: which time follows, how noise levels are spaced, what a decoder is given."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from benchmarks.museum.cases.positions import Denoiser, Times
from benchmarks.museum.networks import Variant, case, drawn, read_once, run_case, trained

SAMPLER = ("--step", "*")


def denoiser(variant: Variant) -> nn.Module:
    Times.swapped, Times.shift = False, 0.0
    return trained(Denoiser(Times()), variant.dtype)


def noise_of(variant: Variant) -> Tensor:
    return drawn("noise", 2, 3, 16, 16).to(variant.dtype)


@case(
    "https://github.com/huggingface/diffusers/issues/12633",
    "the next time is reckoned from the number of steps, although times are spaced otherwise",
    "(program)",
    causes="input",
    dump=SAMPLER,
)
def next_time_reckoned(variant: Variant) -> None:
    model, x = denoiser(variant), noise_of(variant)
    signal = torch.cos(torch.linspace(0, 1.5, 1001)).square()
    times = torch.linspace(999, 0, 5).round().long()
    with torch.no_grad():
        for number, time in enumerate(times[:-1]):
            after = time - 1000 // 5 if variant.bad else times[number + 1]
            now, then = signal[time], signal[after.clamp(min=0)]
            noise = model(x, time.expand(2))
            picture = (x - (1 - now).sqrt() * noise) / now.clamp(min=0.01).sqrt()
            x = then.sqrt() * picture + (1 - then).sqrt() * noise


def shifted(sigmas: Tensor, by: float = 3.0) -> Tensor:
    return by * sigmas / (1 + (by - 1) * sigmas)


@case(
    "https://github.com/huggingface/diffusers/pull/13706",
    "noise levels are shifted, and spaced between ends that had been shifted already",
    "(program)",
    causes="input",
    dump=SAMPLER,
)
def levels_shifted_twice(variant: Variant) -> None:
    model, x = denoiser(variant), noise_of(variant)
    last = torch.tensor(0.02)
    sigmas = shifted(torch.linspace(1, float(shifted(last) if variant.bad else last), 4))
    with torch.no_grad():
        for now, then in pairwise(sigmas):
            x = x + (then - now) * model(x, (1000 * now).expand(2))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(4, 32, 3, padding=1)
        self.norm = nn.GroupNorm(8, 32)
        self.act = nn.SiLU()
        self.leave = nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, latent: Tensor) -> Tensor:
        return self.leave(self.act(self.norm(self.enter(latent))))


@case(
    "https://github.com/Project-MONAI/GenerativeModels/pull/214",
    "a latent is multiplied by its scale before it is decoded, and should be divided by it",
    "(program)",
    causes="input scale",
    formats="float32 bfloat16",
)
def latent_scaled_the_wrong_way(variant: Variant) -> None:
    scale = 0.18
    latent = drawn("latent", 2, 4, 12, 12)
    latent = latent * scale if variant.bad else latent / scale
    read_once(trained(Decoder(), variant.dtype), latent.to(variant.dtype))


if __name__ == "__main__":
    run_case()
