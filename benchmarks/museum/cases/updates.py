"""Trainings: counts of steps, moments, sums of gradients, means of weights, losses of processes."""

from __future__ import annotations

import math

import torch
import torch._dynamo  # an optimizer loads it: behind gloo, torch 2.13 may abort at its end
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.museum.cases.losses import Pair
from benchmarks.museum.cases.training import ALL_STEPS, language, sentences
from benchmarks.museum.networks import (
    PORT,
    Variant,
    case,
    drawn,
    loss_of,
    read_once,
    run_case,
    trained,
)


class Moments(torch.optim.Optimizer):
    """Adam, written out; one count of steps for all weights."""

    def __init__(self, weights: list[Tensor], lr: float = 0.01) -> None:
        super().__init__(weights, {"lr": lr, "betas": (0.9, 0.99), "eps": 1e-6})
        self.count = 0

    def counted(self) -> int:
        """The number of the step, as a weight's update uses it."""
        return self.count

    def corrected(self, state: dict, name: str, divisor: float) -> Tensor:
        """A moment without its bias towards zero."""
        return state[name] / divisor

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        del closure
        self.count += 1
        for group in self.param_groups:
            first, second = group["betas"]
            for weight in group["params"]:
                state, gradient, count = self.state[weight], weight.grad, self.counted()
                state["mean"] = first * state.get("mean", 0.0) + (1 - first) * gradient
                square = second * state.get("square", 0.0) + (1 - second) * gradient.square()
                state["square"] = square
                mean = self.corrected(state, "mean", 1 - first**count)
                root = self.corrected(state, "square", 1 - second**count).sqrt()
                weight.sub_(group["lr"] * mean / (root + group["eps"]))


def optimised(variant: Variant, optimizer_class: type[Moments]) -> None:
    PORT.wrong = variant.bad
    model = language(variant)
    optimizer = optimizer_class(list(model.parameters()))
    for step in range(3):
        words, labels = sentences(step)
        loss_of(model(words), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


class CountedByWeight(Moments):
    def counted(self) -> int:
        number = self.count
        if PORT.wrong:
            self.count += 1
        return number


@case(
    "https://github.com/flashlight/flashlight/issues/143",
    "the count of steps goes on with every weight of a step: only the first is corrected rightly",
    "(optimizer)",
    causes="scale",
    dump=ALL_STEPS,
)
def steps_counted_by_weights(variant: Variant) -> None:
    optimised(variant, CountedByWeight)


class CorrectedInPlace(Moments):
    def corrected(self, state: dict, name: str, divisor: float) -> Tensor:
        result = super().corrected(state, name, divisor)
        if PORT.wrong:
            state[name] = result
        return result


@case(
    "https://github.com/frgfm/holocron/issues/1",
    "moments are corrected in place, so that the correction goes into the next steps as well",
    "(optimizer)",
    causes="scale",
    dump=ALL_STEPS,
)
def corrected_in_place(variant: Variant) -> None:
    optimised(variant, CorrectedInPlace)


class Followed(Pair):
    """A student and a running mean of it; the mean follows faster in the beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0.9

    @torch.no_grad()
    def follow_step(self, step: int) -> None:
        share = 1 - min(self.most, (1 + step) / (4 + step))
        if PORT.wrong:
            self.most = share
        for mean, weight in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            mean.lerp_(weight, share)


@case(
    "https://github.com/huggingface/diffusers/issues/1864",
    "the share that a running mean takes in is kept as the limit of the shares of later steps",
    # A step's weights are compared as its result; their first use is as good an answer.
    "(optimizer) teacher teacher.0",
    causes="scale weights",
    dump=ALL_STEPS,
)
def share_kept_as_the_limit(variant: Variant) -> None:
    PORT.wrong = variant.bad
    model = trained(Followed(), variant.dtype).train()
    with torch.no_grad():
        model.teacher.load_state_dict(model.student.state_dict())
    optimizer = torch.optim.SGD(model.student.parameters(), lr=0.2)
    for step in range(6):
        x = drawn(f"x {step}", 16, 20)
        said, taught = model(x, x + 0.1 * drawn(f"noise {step}", 16, 20))
        labels = drawn(f"labels {step}", 16, 6).argmax(-1)
        loss = F.cross_entropy(said, labels) + (said - taught.detach()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.follow_step(step)


@case(
    "https://github.com/tatsu-lab/alpaca_farm/issues/57",
    "gradients are cleared before every micro-batch: only those of the last one arrive",
    "(gradients)",
    causes="scale missing-reduction",
    dump=ALL_STEPS,
)
def only_the_last_micro_batch(variant: Variant) -> None:
    model = language(variant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(3):
        for part in range(2):
            if variant.bad or part == 0:
                optimizer.zero_grad()
            words, labels = sentences(step, part)
            (loss_of(model(words), labels) / 2).backward()
        optimizer.step()


@case(
    "https://github.com/deepspeedai/DeepSpeed/issues/1800",
    "gradients of micro-batches are summed up in bfloat16",
    "(gradients)",
    causes="low-precision",
    dump=ALL_STEPS,
)
def gradients_summed_in_bfloat16(variant: Variant) -> None:
    model = language(variant)
    weights = list(model.parameters())
    optimizer = torch.optim.SGD(weights, lr=0.05)
    dtype = torch.bfloat16 if variant.bad else torch.float32
    for step in range(2):
        sums = [torch.zeros_like(weight, dtype=dtype) for weight in weights]
        for part in range(4):
            words, labels = sentences(4 * step + part)
            (loss_of(model(words), labels) / 4).backward()
            for total, weight in zip(sums, weights, strict=True):
                total += weight.grad.to(dtype)
                weight.grad = None
        for total, weight in zip(sums, weights, strict=True):
            weight.grad = total.to(weight.dtype)
        optimizer.step()
        optimizer.zero_grad()


class TwoTowers(nn.Module):
    """How well pictures and texts fit; a learned logarithm says how sharply."""

    def __init__(self) -> None:
        super().__init__()
        self.picture, self.text = nn.Linear(40, 16), nn.Linear(24, 16)
        self.logit_scale = nn.Parameter(torch.zeros(1))

    def forward(self, pictures: Tensor, texts: Tensor) -> Tensor:
        first = F.normalize(self.picture(pictures), dim=-1)
        second = F.normalize(self.text(texts), dim=-1)
        scale = self.logit_scale if PORT.wrong else self.logit_scale.exp()
        return scale * first @ second.T


@case(
    "https://github.com/BAAI-DCAI/M3D/issues/52",
    "likeness is multiplied by the logarithm of a scale, and should be by the scale",
    "",
    causes="scale",
    formats="float32 bfloat16",
)
def logarithm_of_the_scale(variant: Variant) -> None:
    PORT.wrong = variant.bad
    model = trained(TwoTowers())
    with torch.no_grad():
        model.logit_scale.fill_(math.log(1 / 0.07))
    pictures, texts = drawn("pictures", 8, 40), drawn("texts", 8, 24)
    read_once(model.to(variant.dtype), pictures.to(variant.dtype), texts.to(variant.dtype))


@case(
    "https://github.com/MakazhanAlpamys/Soup/issues/723",
    "tokens that do not count take part in the mean that ratios of the others are centred by",
    "(loss)",
    causes="mask loss",
    dump=ALL_STEPS,
)
def centred_by_hidden_tokens(variant: Variant) -> None:
    model = language(variant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(3):
        words, _ = sentences(step)
        logits = model(words)[:, :-1].float().log_softmax(-1)
        said = logits.gather(-1, words[:, 1:, None])[..., 0]
        counted = torch.arange(said.shape[1])[None] < torch.tensor([[23], [9], [15], [6]])
        ratios = said - said.detach() + 0.5 * drawn(f"older {step}", *said.shape)
        if variant.bad:
            centre = ratios.mean(0, keepdim=True)
        else:
            centre = (ratios * counted).sum(0, keepdim=True) / counted.sum(0, keepdim=True)
        gain = drawn(f"gain {step}", 4, 1)
        (-((ratios - centre).exp() * gain * counted).sum() / counted.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()


class Entropy(torch.autograd.Function):
    """Cross-entropy of logits whose classes may be shared out over processes."""

    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor, is_shared: bool) -> Tensor:
        count = logits.shape[-1]
        begin = dist.get_rank() * count if is_shared else 0
        inside = (labels >= begin) & (labels < begin + count)
        hot = F.one_hot((labels - begin).clamp(0, count - 1), count) * inside[..., None]
        largest = logits.amax(-1, keepdim=True)
        if is_shared:
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        weights = (logits - largest).exp()
        sums = torch.stack([weights.sum(-1), ((logits - largest) * hot).sum(-1)])
        if is_shared:
            dist.all_reduce(sums)
        ctx.save_for_backward(weights / sums[0][..., None] - hot)
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        (apart,) = ctx.saved_tensors
        return gradient[..., None] * apart, None, None


class Words(nn.Module):
    """Two matrices over words, which all processes have whole."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 24)
        self.middle = nn.Linear(24, 24)
        self.head = nn.Linear(24, 40, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(F.gelu(self.middle(self.table(words))))


def text_of(step: int) -> Tensor:
    return torch.randint(0, 40, (4, 13), generator=torch.Generator().manual_seed(51 + step))


@case(
    "https://github.com/NVIDIA/Megatron-LM/issues/7452",
    "logits that every process has whole are given to a loss that adds the sums of processes",
    "(loss)",
    causes="scale loss",
    dump=ALL_STEPS,
    ranks=2,
)
def whole_logits_taken_for_shares(variant: Variant) -> None:
    dist.init_process_group("gloo")
    model = trained(Words(), variant.dtype).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        words = text_of(step)
        logits = model(words[:, :-1])
        Entropy.apply(logits, words[:, 1:], variant.bad).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


class GivenToAll(torch.autograd.Function):
    """What all processes read alike; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Score(nn.Module):
    """The loss of every word; each process has half of the classes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(20, 24))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = x if PORT.wrong else GivenToAll.apply(x)
        return Entropy.apply(x @ self.weight.T, labels, True)


class Scored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 24)
        self.middle = nn.Linear(24, 24)
        self.score = Score()

    def forward(self, words: Tensor) -> Tensor:
        x = F.gelu(self.middle(self.table(words[:, :-1])))
        return self.score(x, words[:, 1:])


@case(
    "https://github.com/apple/ml-cross-entropy/pull/42",
    "classes are shared by processes, and the gradient of what they are read from is not summed",
    "score",
    causes="missing-reduction scale",
    dump=ALL_STEPS,
    ranks=2,
)
def gradient_of_half_of_the_classes(variant: Variant) -> None:
    PORT.wrong = variant.bad
    dist.init_process_group("gloo")
    model = trained(Scored(), variant.dtype).train()
    with torch.no_grad():
        model.score.weight.copy_(drawn("classes", 40, 24).chunk(2)[dist.get_rank()] / 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model(text_of(step)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    run_case()
