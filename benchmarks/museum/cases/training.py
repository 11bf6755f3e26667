"""Training: losses, accumulation, clipping, optimizers, running statistics."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.museum.networks import (
    Language,
    Rotation,
    Variant,
    case,
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


if __name__ == "__main__":
    run_case()
