"""Norms, activations, state spaces: constants, offsets and formats."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.museum.networks import (
    Gated,
    Language,
    RootNorm,
    Rotation,
    Variant,
    case,
    read_once,
    run_case,
    trained,
    words_of,
)


@case(
    "https://github.com/linkedin/Liger-Kernel/issues/74",
    "the weight of a norm is the distance from one, and one is not added",
    "stack.0.before",
    causes="scale",
    differences="offset",
    formats="float32 bfloat16",
)
def one_not_added(variant: Variant) -> None:
    offset = 0.0 if variant.bad else 1.0
    model = Language(norm=lambda: RootNorm(48, offset=offset), rotation=Rotation(12))
    read_once(trained(model, variant.dtype), words_of(2, 32))


@case(
    "https://github.com/utensils/mold/pull/1078",
    "one is added to the weight of a norm that the conversion had added it to already",
    "stack.0.before",
    causes="scale",
    differences="weight",
)
def one_added_twice(variant: Variant) -> None:
    model = trained(
        Language(norm=lambda: RootNorm(48, offset=1.0), rotation=Rotation(12)), variant.dtype
    )
    if variant.bad:
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() == 1:
                    weight += 1.0
    read_once(model, words_of(2, 32))


@case(
    "https://github.com/mindspore-lab/mindone/pull/225",
    "epsilon of a layer norm is the framework's default, a hundredth of the checkpoint's",
    "last stack.0.before",
    causes="scale",
    differences="eps",
)
def epsilon_of_another_framework(variant: Variant) -> None:
    eps = 1e-7 if variant.bad else 1e-5
    model = trained(Language(norm=lambda: nn.LayerNorm(48, eps=eps)), variant.dtype)
    with torch.no_grad():
        model.table.weight *= 0.01
    read_once(model, words_of(2, 32))


class Spatial(nn.Module):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 32, 3, padding=1)
        self.norm = nn.GroupNorm(8, 32, eps=eps)
        self.proj = nn.Conv2d(32, 32, 1)
        self.leave = nn.Conv2d(32, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        return self.leave(x + self.proj(self.norm(x)))


@case(
    "https://github.com/ml-explore/mlx-examples/issues/1434",
    "epsilon of a group norm is 1e-5 where the reference has 1e-6",
    "norm",
    causes="scale",
    differences="eps",
)
def epsilon_of_a_group_norm(variant: Variant) -> None:
    picture = 0.02 * torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(3))
    model = trained(Spatial(1e-5 if variant.bad else 1e-6), variant.dtype)
    with torch.no_grad():
        model.enter.bias.zero_()
    read_once(model, picture.to(variant.dtype))


class NarrowNorm(RootNorm):
    """The mean of squares is taken in the model's own format."""

    narrow = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.narrow:
            return super().forward(x)
        squares = torch.zeros(x.shape[:-1], dtype=x.dtype)
        for feature in range(x.shape[-1]):
            squares = squares + x[..., feature].square()
        inverse = torch.rsqrt(squares / x.shape[-1] + self.eps)[..., None]
        return x * inverse * self.weight


@case(
    "https://github.com/sgl-project/sglang/pull/27540",
    "the mean of squares is summed in bfloat16, and a few features are a hundred times the others",
    "stack.0.before stack.0.between",
    causes="norm-precision low-precision",
    differences="narrow",
    formats="float32 bfloat16",
)
def squares_summed_in_bfloat16(variant: Variant) -> None:
    NarrowNorm.narrow = variant.bad
    model = trained(
        Language(norm=lambda: NarrowNorm(48), rotation=Rotation(12), layers=4), variant.dtype
    )
    with torch.no_grad():
        model.table.weight[:, :2] *= 32  # a power of two: the same in every format
    read_once(model, words_of(2, 32))


class QuickGelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class Plain(nn.Module):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(48, 96), act, nn.Linear(96, 48)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


@case(
    "https://github.com/mlfoundations/open_clip/issues/771",
    "a checkpoint trained with the quick form of GELU is run with the exact one",
    "stack.0.feed.act",
    causes="activation",
    differences="GELU",
    formats="float32 bfloat16",
)
def quick_gelu(variant: Variant) -> None:
    act = nn.GELU if variant.bad else QuickGelu
    model = Language(norm=lambda: nn.LayerNorm(48), feed=lambda: Plain(act()))
    read_once(trained(model, variant.dtype), words_of(2, 32))


class Scan(nn.Module):
    """A small state space: a state decays by a learned rate and takes in the input."""

    narrow = False

    def __init__(self, width: int = 48, states: int = 8) -> None:
        super().__init__()
        self.log_rate = nn.Parameter(torch.zeros(width, states))
        self.enter = nn.Linear(width, width)
        self.gate = nn.Linear(width, states)
        self.leave = nn.Linear(width, width)

    def forward(self, x: Tensor, *rest: object) -> Tensor:
        rate = self.log_rate if self.narrow else self.log_rate.float()
        decay = torch.exp(-torch.exp(rate)).float()
        inside, gates = self.enter(x).float(), self.gate(x).float()
        state = torch.zeros(x.shape[0], x.shape[2], decay.shape[1])
        outputs = []
        for step in range(x.shape[1]):
            state = state * decay + inside[:, step, :, None] * gates[:, step, None]
            outputs.append(state.sum(-1))
        return self.leave(torch.stack(outputs, 1).to(x.dtype))


@case(
    "https://github.com/ml-explore/mlx-lm/pull/1028",
    "the exponential of a decay rate is taken in bfloat16",
    "stack.0.mixer",
    causes="low-precision",
    differences="narrow",
    formats="float32 bfloat16",
)
def decay_rate_in_bfloat16(variant: Variant) -> None:
    Scan.narrow = variant.bad
    model = trained(Language(Scan), variant.dtype)
    with torch.no_grad():
        for layer in model.stack:
            layer.mixer.log_rate.copy_(-4.0 - layer.mixer.log_rate.abs())
    read_once(model, words_of(1, 120))


class Experts(nn.Module):
    """The two best of six experts, weighted."""

    def __init__(self, share: bool, factor: float) -> None:
        super().__init__()
        self.share, self.factor = share, factor
        self.router = nn.Linear(48, 6, bias=False)
        self.experts = nn.ModuleList(Gated(48, 32) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).float().sigmoid().topk(2, -1)
        if self.share:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = (weights * self.factor).to(x.dtype)
        result = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            result.index_add_(0, rows, expert(flat[rows]) * weights[rows, place, None])
        return result.view_as(x)


@case(
    "https://github.com/pytorch/torchtitan/issues/1448",
    "weights of the chosen experts are not made to sum to one",
    "stack.0.feed",
    causes="scale",
    differences="share",
)
def experts_not_normalised(variant: Variant) -> None:
    model = Language(feed=lambda: Experts(not variant.bad, 1.0), rotation=Rotation(12))
    read_once(trained(model, variant.dtype), words_of(2, 32))


@case(
    "https://github.com/sgl-project/sglang-jax/pull/1282",
    "the factor of routed experts is skipped where their weights are not normalised",
    "stack.0.feed",
    causes="scale",
    differences="factor",
    formats="float32 bfloat16",
)
def factor_of_experts_skipped(variant: Variant) -> None:
    factor = 1.0 if variant.bad else 2.5
    model = Language(feed=lambda: Experts(False, factor), rotation=Rotation(12))
    read_once(trained(model, variant.dtype), words_of(2, 32))


class Packed(nn.Module):
    """A matrix as codes with a scale and a zero point for every group of sixteen inputs."""

    def __init__(self, weight: Tensor, scales: Tensor, zeros: Tensor) -> None:
        super().__init__()
        self.register_buffer("codes", weight)
        self.register_buffer("scales", scales)
        self.register_buffer("zeros", zeros)

    def forward(self, x: Tensor) -> Tensor:
        groups = self.codes.view(self.codes.shape[0], -1, 16).float()
        weight = (groups - self.zeros[..., None]) * self.scales[..., None]
        return F.linear(x, weight.flatten(1).to(x.dtype))


def packed(linear: nn.Linear, zero: str) -> Packed:
    """The four-bit form of a matrix; `zero` says what happens to its zero points."""
    groups = linear.weight.detach().float().view(linear.out_features, -1, 16)
    low, high = groups.amin(-1), groups.amax(-1)
    scales = (high - low) / 15
    zeros = (-low / scales).round().clamp(0, 15)
    codes = ((groups / scales[..., None]).round() + zeros[..., None]).clamp(0, 15)
    if zero == "one more":
        zeros = zeros + 1
    if zero == "wraps":
        zeros = torch.where(zeros <= 5, torch.full_like(zeros, 15), zeros)
    return Packed(codes.flatten(1).to(torch.uint8), scales, zeros)


def packed_model(zero: str, dtype: torch.dtype) -> nn.Module:
    model = trained(Language(rotation=Rotation(12), layers=2), dtype)
    for number, layer in enumerate(model.stack):
        wrong = zero if number == 1 else ""
        layer.feed.up = packed(layer.feed.up, wrong)
        layer.feed.down = packed(layer.feed.down, wrong)
    return model


@case(
    "https://github.com/vllm-project/vllm/pull/38966",
    "zero points are stored as they are and read as if one had been taken away",
    "stack.1.feed.up",
    causes="offset",
    differences="zeros",
)
def zero_points_one_too_large(variant: Variant) -> None:
    read_once(packed_model("one more" if variant.bad else "", variant.dtype), words_of(2, 32))


@case(
    "https://github.com/ModelCloud/GPTQModel/issues/2350",
    "zero points below one wrap round to fifteen",
    "stack.1.feed.up",
    causes="offset",
    differences="zeros",
)
def zero_points_wrap_round(variant: Variant) -> None:
    read_once(packed_model("wraps" if variant.bad else "", variant.dtype), words_of(2, 32))


class Scaled(nn.Module):
    """A matrix in eight-bit floats with one scale for every block of sixteen rows."""

    def __init__(self, linear: nn.Linear, mode: str) -> None:
        super().__init__()
        self.mode = mode
        rows = linear.weight.detach().float().view(-1, 16, linear.in_features)
        exact = rows.abs().amax((1, 2)) / 448
        scales = 2.0 ** torch.ceil(torch.log2(exact))
        used = exact if mode == "rounded later" else scales
        self.register_buffer("codes", (rows / used[:, None, None]).to(torch.float8_e4m3fn))
        self.register_buffer("scales", scales)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.codes.float()
        if self.mode != "ignored":
            weight = weight * self.scales[:, None, None]
        return F.linear(x, weight.flatten(0, 1).to(x.dtype))


def scaled_model(mode: str, dtype: torch.dtype) -> nn.Module:
    model = trained(Language(rotation=Rotation(12), layers=2), dtype)
    for number, layer in enumerate(model.stack):
        layer.feed.up = Scaled(layer.feed.up, mode if number == 1 else "")
    return model


@case(
    "https://github.com/Lightricks/LTX-2/pull/172",
    "eight-bit weights are cast up without their scales",
    "stack.1.feed.up",
    causes="scale",
    differences="mode",
)
def scales_ignored(variant: Variant) -> None:
    read_once(scaled_model("ignored" if variant.bad else "", variant.dtype), words_of(2, 32))


@case(
    "https://github.com/huggingface/transformers/pull/46763",
    "scales are rounded to powers of two after the weights were divided by the exact ones",
    "stack.1.feed.up",
    causes="scale",
    differences="codes mode",
)
def scales_rounded_later(variant: Variant) -> None:
    mode = "rounded later" if variant.bad else ""
    read_once(scaled_model(mode, variant.dtype), words_of(2, 32))


if __name__ == "__main__":
    run_case()
