"""More of `parallel_programs.py`: schedules without an optimizer, experts, sharded optimizers.

Each for any even number of ranks, right and with one fault on the last rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parallel_programs import (
    HIDDEN,
    IDS,
    LEVELS,
    RANK,
    WORLD,
    Attention,
    Llama,
    Mlp,
    Norm,
    loss_of,
    tensor_plan,
    train,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import driftline

LAST = WORLD - 1

# --- schedules without an optimizer


def without_optimizer(path: Path, layers: int) -> None:
    model = Llama(0, layers, layers)
    with driftline.capture(model, path, levels=LEVELS, steps="*"):
        for _ in range(2):
            model.zero_grad()
            loss_of(model(IDS), IDS).backward()


def plain_4(path: Path) -> None:
    without_optimizer(path, 4)


def plain_16(path: Path) -> None:
    without_optimizer(path, 16)


def scheduled(path: Path, kind: Any, stages: list[int], of: int, *, wrong: bool = False) -> None:
    """Two layers in each stage, or one where a rank has two stages; four micro-batches or more."""
    each = 2 * WORLD // of
    models = nn.ModuleList(Llama(n * each, (n + 1) * each, 2 * WORLD) for n in stages)
    if wrong and RANK == LAST:
        models[-1].layers[-1].mlp.act = nn.GELU()
    parts = [
        PipelineStage(model, n, of, torch.device("cpu"))
        for model, n in zip(models, stages, strict=True)
    ]
    schedule = kind(parts if len(parts) > 1 else parts[0], max(4, WORLD), loss_fn=loss_of)
    with driftline.capture(models, path, levels=LEVELS, steps="*"):
        for _ in range(2):
            models.zero_grad()
            given = (IDS,) if 0 in stages else ()
            schedule.step(*given, **({"target": IDS} if of - 1 in stages else {}))


def gpipe(path: Path) -> None:
    scheduled(path, ScheduleGPipe, [RANK], WORLD)


def alternating(path: Path) -> None:
    scheduled(path, Schedule1F1B, [RANK], WORLD)


def two_stages_each(path: Path) -> None:
    scheduled(path, ScheduleInterleaved1F1B, [RANK, RANK + WORLD], 2 * WORLD)


def alternating_wrong(path: Path) -> None:
    """The last layer has another activation."""
    scheduled(path, Schedule1F1B, [RANK], WORLD, wrong=True)


# --- expert parallel


class Exchange(torch.autograd.Function):
    """Rows go to other ranks; their gradients come back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        ctx.splits = sent, received
        made = x.new_empty((sum(received), x.shape[1]))
        dist.all_to_all_single(made, x.contiguous(), received, sent)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        sent, received = ctx.splits
        made = gradient.new_empty((sum(sent), gradient.shape[1]))
        dist.all_to_all_single(made, gradient.contiguous(), sent, received)
        return made, None, None


class Experts(nn.Module):
    """As many experts as ranks, or all of them in one process; every token takes one."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.router = nn.Linear(HIDDEN, count, bias=False)
        every = [Mlp() for _ in range(count)]
        own = range(count) if WORLD == 1 else [RANK]
        self.experts = nn.ModuleDict({str(n): every[n] for n in own})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        score, choice = self.router(tokens).softmax(-1).max(-1)
        order = choice.argsort(stable=True)
        rows = tokens[order]
        sent = torch.bincount(choice, minlength=self.count).tolist()
        if WORLD == 1:
            parts = [self.experts[str(n)](part) for n, part in enumerate(rows.split(sent))]
            done = torch.cat(parts)
        else:
            counts = torch.empty(WORLD, dtype=torch.long)
            dist.all_to_all_single(counts, torch.tensor(sent))
            received = counts.tolist()
            done = self.experts[str(RANK)](Exchange.apply(rows, sent, received))
            done = Exchange.apply(done, received, sent)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        return (done[back] * score[:, None]).view_as(x)


class ExpertLayer(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.input_norm, self.self_attn = Norm(), Attention()
        self.post_norm, self.moe = Norm(), Experts(count)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_norm(x))
        return x + self.moe(self.post_norm(x))


class ExpertModel(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, HIDDEN)
        self.layers = nn.ModuleList(ExpertLayer(count) for _ in range(2))
        self.head = nn.Linear(HIDDEN, 64, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def routed(path: Path, *, wrong: bool = False) -> None:
    model = ExpertModel(WORLD)
    if wrong and RANK == LAST:
        model.layers[1].moe.experts[str(RANK)].act = nn.GELU()

    def synchronise() -> None:
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.grad.div_(WORLD)
            else:
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(WORLD)

    train(path, model, IDS.chunk(WORLD)[RANK], synchronise)


def experts_2(path: Path) -> None:
    train(path, ExpertModel(2), IDS)


def experts_8(path: Path) -> None:
    train(path, ExpertModel(8), IDS)


def experts(path: Path) -> None:
    routed(path)


def experts_wrong(path: Path) -> None:
    routed(path, wrong=True)


# --- a mesh of two axes, and an optimizer whose state is dealt out


def mesh(path: Path, *, wrong: bool = False) -> None:
    both = init_device_mesh("cpu", (WORLD // 2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(Llama(), both["tp"], tensor_plan())
    if wrong and RANK == LAST:
        model.layers[1].mlp.act = nn.GELU()
    for layer in model.layers:
        fully_shard(layer, mesh=both["dp"])
    fully_shard(model, mesh=both["dp"])
    train(path, model, IDS.chunk(WORLD // 2)[both.get_coordinate()[0]])


def mesh_wrong(path: Path) -> None:
    mesh(path, wrong=True)


def two_steps(path: Path) -> None:
    model = Llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with driftline.capture(model, path, levels=LEVELS, steps="*"):
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model(IDS), IDS).backward()
            optimizer.step()


def dealt_optimizer(path: Path, *, wrong: bool = False) -> None:
    model = DistributedDataParallel(Llama())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.01
    )
    weight = model.module.layers[1].mlp.up_proj.weight
    ids = IDS.chunk(WORLD)[RANK]
    with driftline.capture(model, path, levels=LEVELS, steps="*"):
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model(ids), ids).backward()
            before = weight.detach().clone()
            optimizer.step()
            if wrong and RANK == LAST:  # what another rank has updated never arrives here
                weight.detach().copy_(before)


def zero(path: Path) -> None:
    dealt_optimizer(path)


def zero_wrong(path: Path) -> None:
    dealt_optimizer(path, wrong=True)
