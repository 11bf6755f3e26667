"""Training: losses, accumulation, clipping, optimizers, running statistics."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.museum.networks import (
    PORT,
    Language,
    Rotation,
    Variant,
    case,
    drawn,
    loss_of,
    run_case,
    trained,
    words_of,
)

ALL_STEPS = ("--step", "*", "--level", "modules,gradients,params")


def sentences(step: int, part: int = 0) -> tuple[Tensor, Tensor]:
    """Words and labels of a batch; parts of one batch have labels of very different length."""
    words = words_of(4, 24, f"batch {step} {part}")
    labels = words.roll(-1, 1)
    labels[:, -1] = -100
    labels[:, : 3 + 14 * part] = -100
    return words, labels


def language(variant: Variant) -> nn.Module:
    return trained(Language(rotation=Rotation(12), layers=2), variant.dtype).train()


@case(
    "https://github.com/ml-explore/mlx-lm/pull/1413",
    "means of micro-batches are averaged although they count different numbers of tokens",
    "(loss)",
    causes="scale",
    dump=ALL_STEPS,
)
def micro_batches_weighted_alike(variant: Variant) -> None:
    model = language(variant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(3):
        parts = [sentences(step, part) for part in range(2)]
        counts = [(labels != -100).sum() for _, labels in parts]
        for (words, labels), count in zip(parts, counts, strict=True):
            share = 0.5 if variant.bad else count / sum(counts)
            (loss_of(model(words), labels) * share).backward()
        optimizer.step()
        optimizer.zero_grad()


@case(
    "https://github.com/ByteDance-Seed/VeOmni/pull/963",
    "losses of micro-batches are added up and not divided by their number",
    "(loss)",
    causes="scale",
    dump=ALL_STEPS,
)
def micro_batches_not_divided(variant: Variant) -> None:
    model = language(variant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for step in range(3):
        for part in range(2):
            words, labels = sentences(step, part)
            (loss_of(model(words), labels) / (1 if variant.bad else 2)).backward()
        optimizer.step()
        optimizer.zero_grad()


@case(
    "https://github.com/Lightning-AI/pytorch-lightning/issues/9599",
    "gradients are clipped while they still carry the scale of mixed precision",
    "(gradients)",
    causes="scale",
    dump=ALL_STEPS,
)
def clipped_before_unscaled(variant: Variant) -> None:
    model = language(variant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scale = 1024.0
    for step in range(3):
        words, labels = sentences(step)
        (loss_of(model(words), labels) * scale).backward()
        if variant.bad:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for weight in model.parameters():
            weight.grad /= scale
        if not variant.bad:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@case(
    "https://github.com/huggingface/accelerate/issues/113",
    "gradients are divided by the scale of mixed precision twice",
    "(gradients)",
    causes="scale",
    dump=ALL_STEPS,
)
def unscaled_twice(variant: Variant) -> None:
    model = language(variant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scale = 256.0
    for step in range(3):
        words, labels = sentences(step)
        (loss_of(model(words), labels) * scale).backward()
        for weight in model.parameters():
            weight.grad /= scale * scale if variant.bad else scale
        optimizer.step()
        optimizer.zero_grad()


class Decayed(torch.optim.Optimizer):
    """Adam with weight decay, written out; `mode` is where it goes wrong."""

    def __init__(self, weights: list[Tensor], mode: str = "", lr: float = 0.01) -> None:
        super().__init__(weights, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-6, "decay": 0.2})
        self.mode = mode

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        del closure
        for group in self.param_groups:
            for weight in group["params"]:
                self._update(weight, group)

    def _update(self, weight: Tensor, group: dict) -> None:
        state, first, second = self.state[weight], *group["betas"]
        gradient, decay = weight.grad, group["lr"] * group["decay"]
        if self.mode == "coupled":
            gradient = gradient + group["decay"] * weight
        elif self.mode != "late":
            weight.mul_(1 - decay)
        number = state["number"] = state.get("number", 0) + 1
        mean = state["mean"] = first * state.get("mean", 0.0) + (1 - first) * gradient
        square = second * state.get("square", 0.0) + (1 - second) * gradient.square()
        state["square"] = square
        unbiased = 1 - second**number
        if self.mode == "eps":
            root = (square.sqrt() + group["eps"]) / unbiased**0.5
        else:
            root = (square / unbiased).sqrt() + group["eps"]
        weight.sub_(group["lr"] * mean / (1 - first**number) / root)
        if self.mode == "late":
            weight.mul_(1 - decay)


def optimised(variant: Variant, mode: str, scale: float = 1.0) -> None:
    model = language(variant)
    optimizer = Decayed(list(model.parameters()), mode if variant.bad else "")
    for step in range(3):
        words, labels = sentences(step)
        (loss_of(model(words), labels) * scale).backward()
        optimizer.step()
        optimizer.zero_grad()


@case(
    "https://github.com/nntrainer/nntrainer/pull/3565",
    "weight decay goes through the gradient's moments instead of straight to the weight",
    "(optimizer)",
    differences="mode",
    dump=ALL_STEPS,
)
def decay_through_the_gradient(variant: Variant) -> None:
    optimised(variant, "coupled")


@case(
    "https://github.com/karpathy/nanochat/pull/353",
    "epsilon is added before the second moment is corrected",
    "(optimizer)",
    differences="mode",
    dump=ALL_STEPS,
)
def epsilon_before_correction(variant: Variant) -> None:
    optimised(variant, "eps", scale=1e-3)


@case(
    "https://github.com/huggingface/transformers/issues/14539",
    "weight decay acts on the updated weight",
    "(optimizer)",
    differences="mode",
    dump=ALL_STEPS,
)
def decay_after_the_update(variant: Variant) -> None:
    optimised(variant, "late")


@case(
    "https://github.com/huggingface/transformers/pull/37830",
    "labels are shifted by the model and once more by the loss",
    "(loss)",
    causes="shift loss",
    dump=ALL_STEPS,
)
def labels_shifted_twice(variant: Variant) -> None:
    model = language(variant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(3):
        words, labels = sentences(step)
        if variant.bad:
            labels = labels.roll(-1, 1)
            labels[:, -1] = -100
        loss_of(model(words), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


class Pictures(nn.Module):
    def __init__(self, momentum: float) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16, momentum=momentum)
        self.act = nn.ReLU()
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.act(self.norm(self.enter(x))).mean((2, 3)))


@case(
    "https://github.com/pytorch/vision/issues/8250",
    "momentum of batch norms is that of another framework, where it means the opposite",
    "norm",
    causes="scale",
    differences="momentum",
    dump=("--step", "*"),
)
def momentum_of_another_framework(variant: Variant) -> None:
    model = trained(Pictures(0.99 if variant.bad else 0.01), variant.dtype)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        model.train()
        for _ in range(3):
            model(3 * torch.randn(8, 3, 12, 12, generator=generator))
        model.eval()
        model(torch.randn(8, 3, 12, 12, generator=generator))


class Momentum(torch.optim.Optimizer):
    """Descent that looks ahead along its momentum."""

    def __init__(self, weights: list[Tensor], lr: float = 0.02, keep: float = 0.9) -> None:
        super().__init__(weights, {"lr": lr, "keep": keep})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        del closure
        for group in self.param_groups:
            rate, keep = group["lr"], group["keep"]
            for weight in group["params"]:
                state = self.state[weight]
                speed = keep * state.get("speed", 0.0) + weight.grad
                state["speed"] = speed
                ahead = -keep * speed if PORT.wrong else keep * speed
                weight.sub_(rate * (weight.grad + ahead))


@case(
    "https://github.com/PaddlePaddle/Paddle/pull/12231",
    "the look ahead along the momentum has the wrong sign",
    "(optimizer)",
    causes="scale",
    dump=ALL_STEPS,
)
def look_ahead_backwards(variant: Variant) -> None:
    PORT.wrong = variant.bad
    model = language(variant)
    optimizer = Momentum(list(model.parameters()))
    for step in range(3):
        words, labels = sentences(step)
        loss_of(model(words), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


@case(
    "https://github.com/huggingface/transformers/issues/581",
    "the gradient of every weight is clipped by its own norm instead of that of all",
    "(gradients)",
    causes="scale",
    dump=ALL_STEPS,
)
def clipped_one_by_one(variant: Variant) -> None:
    model = language(variant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        words, labels = sentences(step)
        loss_of(model(words), labels).backward()
        weights = list(model.parameters())
        for together in [[weight] for weight in weights] if variant.bad else [weights]:
            torch.nn.utils.clip_grad_norm_(together, 0.05)
        optimizer.step()
        optimizer.zero_grad()


@case(
    "https://github.com/HikariTJU/LD/issues/74",
    "the distance from a teacher is averaged over classes, which it is a sum over",
    "(loss)",
    causes="scale loss",
    dump=ALL_STEPS,
)
def teacher_averaged_over_classes(variant: Variant) -> None:
    model = language(variant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(3):
        words, _ = sentences(step)
        logits = model(words)
        teacher = drawn(f"teacher {step}", *logits.shape)
        apart = F.kl_div(
            (logits.float() / 2).log_softmax(-1), (teacher / 2).softmax(-1), reduction="none"
        )
        apart = apart.mean(-1) if variant.bad else apart.sum(-1)
        (4 * apart.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


class Tracking(nn.Module):
    """Normalises by a batch, and keeps what is normal for the time after training."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = self.running_mean, self.running_var
        if self.training:
            mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
            count = x.numel() / x.shape[1]
            seen = variance if PORT.wrong else variance * count / (count - 1)
            self.running_mean.lerp_(mean.detach(), 0.3)
            self.running_var.lerp_(seen.detach(), 0.3)
        normal = (x - mean[:, None, None]) * torch.rsqrt(variance[:, None, None] + 1e-5)
        return normal * self.weight[:, None, None] + self.bias[:, None, None]


class Tracked(Pictures):
    def __init__(self) -> None:
        super().__init__(0.3)
        self.norm = Tracking(16)


@case(
    "https://github.com/PaddlePaddle/Paddle/pull/68159",
    "the variance that is kept for later is that of the batch, without the correction for its size",
    "norm",
    causes="scale",
    differences="running_var",
    dump=("--step", "*"),
)
def variance_without_correction(variant: Variant) -> None:
    PORT.wrong = variant.bad
    model = trained(Tracked(), variant.dtype)
    generator = torch.Generator().manual_seed(13)
    with torch.no_grad():
        model.train()
        for _ in range(4):
            model(3 * torch.randn(2, 3, 4, 4, generator=generator))
        model.eval()
        model(torch.randn(2, 3, 4, 4, generator=generator))


if __name__ == "__main__":
    run_case()
