"""Losses and what updates weights: terms, lengths, rates, means of weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.museum.cases.training import ALL_STEPS, language, sentences
from benchmarks.museum.networks import PORT, Variant, case, drawn, loss_of, run_case, trained


class Guess(nn.Module):
    """A picture as a mean and the logarithm of a spread, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(40, 32)
        self.mean, self.log_spread = nn.Linear(32, 8), nn.Linear(32, 8)
        self.leave = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 40))

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inside = F.relu(self.enter(x))
        mean, log_spread = self.mean(inside), 0.3 * self.log_spread(inside)
        return self.leave(mean + log_spread.exp() * noise), mean, log_spread


@case(
    "https://github.com/FluxML/model-zoo/pull/147",
    "the distance from a normal distribution adds a square where it should take away a logarithm",
    "(loss)",
    causes="loss scale",
    dump=ALL_STEPS,
)
def square_for_a_logarithm(variant: Variant) -> None:
    model = trained(Guess(), variant.dtype).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002)
    for step in range(3):
        x, noise = drawn(f"x {step}", 16, 40), drawn(f"noise {step}", 16, 8)
        again, mean, log_spread = model(x, noise)
        last = log_spread.square() if variant.bad else -2 * log_spread
        apart = 0.5 * (mean.square() + (2 * log_spread).exp() - 1 + last)
        loss = (again - x).square().sum(-1).mean() + apart.sum(-1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


class Finder(nn.Module):
    """Whether something is there, at every place of a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 16, 3, padding=1)
        self.leave = nn.Conv2d(16, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(F.silu(self.enter(x)))


@case(
    "https://github.com/liuyuisanai/Focal-Loss/issues/4",
    "places without anything have the weight of those with something, not what is left of one",
    "(loss)",
    causes="loss scale",
    dump=ALL_STEPS,
)
def one_weight_for_both_classes(variant: Variant) -> None:
    model = trained(Finder(), variant.dtype).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(3):
        there = (drawn(f"there {step}", 2, 4, 10, 10) > 1).float()
        logits = model(drawn(f"picture {step}", 2, 3, 10, 10))
        right = torch.where(there > 0, logits, -logits).sigmoid()
        weights = 0.25 if variant.bad else torch.where(there > 0, 0.25, 0.75)
        (-weights * (1 - right).square() * right.log()).sum().div(100).backward()
        optimizer.step()
        optimizer.zero_grad()


@case(
    "https://github.com/PaddlePaddle/PaddleFormers/pull/4909",
    "sums over answers leave their last word out, the lengths they are divided by count it",
    "(loss)",
    causes="scale loss",
    dump=ALL_STEPS,
)
def last_word_counted(variant: Variant) -> None:
    model = language(variant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    lengths = torch.tensor([9, 4, 6, 12])
    for step in range(3):
        words, _ = sentences(step)
        logits = model(words)[:, :-1].float().log_softmax(-1)
        said = logits.gather(-1, words[:, 1:, None])[..., 0]
        # Answers stand at the end; the very last word is left out.
        places = torch.arange(said.shape[1], 0, -1)[None]
        counted = (places <= lengths[:, None]) & (places > 1)
        means = (said * counted).sum(1) / (lengths if variant.bad else lengths - 1)
        chosen, rejected = means.chunk(2)
        (-F.logsigmoid(2 * (chosen - rejected)).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


class RootDescent(torch.optim.Optimizer):
    """Steps are divided by the root of a mean of squares; epsilon is added below the root."""

    def __init__(self, weights: list[Tensor], lr: float = 0.01) -> None:
        super().__init__(weights, {"lr": lr, "keep": 0.9, "eps": 1e-3})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        del closure
        for group in self.param_groups:
            for weight in group["params"]:
                state, keep = self.state[weight], group["keep"]
                square = keep * state.get("square", 0.0) + (1 - keep) * weight.grad.square()
                state["square"] = square
                if PORT.wrong:
                    root = square.sqrt() + group["eps"]
                else:
                    root = (square + group["eps"]).sqrt()
                weight.sub_(group["lr"] * weight.grad / root)


@case(
    "https://github.com/jax-ml/jax/pull/1427",
    "epsilon is added to the root of the mean of squares instead of below it",
    "(optimizer)",
    causes="scale",
    dump=ALL_STEPS,
)
def epsilon_outside_the_root(variant: Variant) -> None:
    PORT.wrong = variant.bad
    model = language(variant)
    optimizer = RootDescent(list(model.parameters()))
    for step in range(3):
        words, labels = sentences(step)
        loss_of(model(words), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


@case(
    "https://github.com/EvolvingLMMs-Lab/OneVision-Encoder/pull/82",
    "the learning rate goes on with every micro-batch instead of with every step",
    "(optimizer)",
    causes="scale",
    differences="lr",
    dump=ALL_STEPS,
)
def rate_goes_on_too_fast(variant: Variant) -> None:
    model = language(variant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 + step) / 10)
    for step in range(3):
        for part in range(2):
            words, labels = sentences(step, part)
            (loss_of(model(words), labels) / 2).backward()
            if part == 1:
                optimizer.step()
                optimizer.zero_grad()
            if part == 1 or variant.bad:
                schedule.step()


class Pair(nn.Module):
    """A student, and the running mean of what it has been."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 6))
        self.teacher = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 6))
        for weight in self.teacher.parameters():
            weight.requires_grad_(False)

    def forward(self, x: Tensor, again: Tensor) -> tuple[Tensor, Tensor]:
        return self.student(x), self.teacher(again)

    @torch.no_grad()
    def follow(self, keep: float) -> None:
        pairs = zip(self.teacher.parameters(), self.student.parameters(), strict=True)
        for mean, weight in pairs:
            if PORT.wrong:
                mean.copy_((1 - keep) * mean + keep * weight)
            else:
                mean.copy_(keep * mean + (1 - keep) * weight)


@case(
    "https://github.com/marin-community/levanter/pull/883",
    "a running mean of weights keeps the share that it should take in",
    # A step's weights are compared as its result; their first use is as good an answer.
    "(optimizer) teacher teacher.0",
    causes="scale weights",
    dump=ALL_STEPS,
)
def mean_of_weights_backwards(variant: Variant) -> None:
    PORT.wrong = variant.bad
    model = trained(Pair(), variant.dtype).train()
    with torch.no_grad():
        model.teacher.load_state_dict(model.student.state_dict())
    optimizer = torch.optim.SGD(model.student.parameters(), lr=0.1)
    for step in range(3):
        x = drawn(f"x {step}", 16, 20)
        said, taught = model(x, x + 0.1 * drawn(f"noise {step}", 16, 20))
        labels = drawn(f"labels {step}", 16, 6).argmax(-1)
        loss = F.cross_entropy(said, labels) + (said - taught.detach()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.follow(0.95)


if __name__ == "__main__":
    run_case()
