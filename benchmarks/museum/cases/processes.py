"""Two processes that train or judge together: whose share of a mean is how large."""

from __future__ import annotations

import torch
import torch._dynamo  # an optimizer loads it: behind gloo, torch 2.13 may abort at its end
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.museum.networks import PORT, Variant, case, drawn, run_case, trained


def everywhere(x: Tensor) -> Tensor:
    x = x.clone()
    dist.all_reduce(x)
    return x


class SharedNorm(nn.Module):
    """Normalises by the batches of all processes, which are of different size."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        axes = (0, 2, 3)
        if PORT.wrong:
            mean = everywhere(x.mean(axes)) / dist.get_world_size()
            square = everywhere(x.square().mean(axes)) / dist.get_world_size()
        else:
            count = everywhere(torch.tensor(float(x.numel() // x.shape[1])))
            mean = everywhere(x.sum(axes)) / count
            square = everywhere(x.square().sum(axes)) / count
        factor = torch.rsqrt(square - mean.square() + 1e-5) * self.weight
        return (x - mean[:, None, None]) * factor[:, None, None] + self.bias[:, None, None]


class Looking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 12, 3, padding=1)
        self.norm = SharedNorm(12)
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.enter(x))).mean((2, 3)))


@case(
    "https://github.com/PaddlePaddle/Paddle/issues/32464",
    "means of processes are averaged although their batches are of different size",
    "norm",
    causes="scale offset",
    ranks=2,
)
def batches_of_different_size(variant: Variant) -> None:
    PORT.wrong = variant.bad
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = trained(Looking(), variant.dtype)
    with torch.no_grad():
        model((1 + rank) * drawn(f"pictures {rank}", 6 - 4 * rank, 3, 10, 10) + 0.5 * rank)
    dist.destroy_process_group()


class HalfOfAText(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 24)
        self.norm = nn.LayerNorm(24)
        self.head = nn.Linear(24, 40)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.norm(self.table(words)))


@case(
    "https://github.com/EleutherAI/gpt-neox/pull/1259",
    "gradients of a norm, of which every process saw a part of the text, are averaged, not added",
    "(gradients)",
    causes="scale",
    dump=("--step", "*", "--level", "modules,gradients,params"),
    ranks=2,
)
def gradients_of_a_norm_averaged(variant: Variant) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = trained(HalfOfAText(), variant.dtype).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        generator = torch.Generator().manual_seed(31 + step)
        words = torch.randint(0, 40, (4, 17), generator=generator)
        mine = slice(8 * rank, 8 * rank + 8)
        logits = model(words[:, :-1][:, mine])
        labels = words[:, 1:][:, mine]
        # Each process has its part of the sum over the whole text.
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / 64
        loss.backward()
        for name, weight in model.named_parameters():
            dist.all_reduce(weight.grad)
            if variant.bad and name.startswith("norm"):
                weight.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    run_case()
