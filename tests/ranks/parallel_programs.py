"""A small Llama trained in every parallel way, and in some wrong ones; each captured by itself.

python parallel_programs.py FOLDER one
torchrun --nproc-per-node 4 parallel_programs.py FOLDER tp sp ...
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import driftline

HIDDEN, INNER, HEADS, SHARED, LAYERS, WORDS = 32, 48, 8, 4, 2, 64
HEAD = HIDDEN // HEADS
LEVELS = ("modules", "gradients", "params")
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
RANK = int(os.environ.get("RANK", "0"))
IDS = torch.randint(0, WORDS, (8, 12), generator=torch.Generator().manual_seed(1))


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


def turned(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions."""
    at = torch.arange(x.shape[-2], dtype=x.dtype)[:, None]
    angle = at * 10000.0 ** (-torch.arange(0, HEAD, 2, dtype=x.dtype) / HEAD)
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.k_proj = nn.Linear(HIDDEN, SHARED * HEAD, bias=False)
        self.v_proj = nn.Linear(HIDDEN, SHARED * HEAD, bias=False)
        self.o_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            each(x).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
        y = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, HIDDEN, bias=False)
        self.act = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_norm, self.self_attn = Norm(), Attention()
        self.post_norm, self.mlp = Norm(), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_norm(x))
        return x + self.mlp(self.post_norm(x))


class Llama(nn.Module):
    """The whole model, or the layers from `first` to `last` of it, counted from 0."""

    def __init__(self, first: int = 0, last: int = LAYERS, layers: int = LAYERS) -> None:
        super().__init__()
        torch.manual_seed(0)
        every = [Layer() for _ in range(layers)]
        embed, norm, head = (
            nn.Embedding(WORDS, HIDDEN),
            Norm(),
            nn.Linear(HIDDEN, WORDS, bias=False),
        )
        self.embed = embed if first == 0 else None
        self.layers = nn.ModuleList(every[first:last])
        self.norm, self.head = (norm, head) if last == layers else (None, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


def loss_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def train(
    path: Path,
    model: nn.Module,
    ids: torch.Tensor,
    before_step: Callable[[], None] | None = None,
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with driftline.capture(model, path, levels=LEVELS):
        loss_of(model(ids), ids).backward()
        if before_step is not None:
            before_step()
        optimizer.step()


# --- tensor parallel


def tensor_plan(**changed: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for n in range(LAYERS):
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
            found[f"layers.{n}.{name}"] = ColwiseParallel()
        found[f"layers.{n}.mlp.gate_proj"] = found[f"layers.{n}.mlp.up_proj"] = ColwiseParallel()
        found[f"layers.{n}.self_attn.o_proj"] = RowwiseParallel()
        found[f"layers.{n}.mlp.down_proj"] = RowwiseParallel()
    return {**found, **{name.replace("__", "."): how for name, how in changed.items()}}


def sequence_plan() -> dict[str, Any]:
    whole = {"desired_input_layouts": (Replicate(),), "input_layouts": (Shard(1),)}
    found: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for n in range(LAYERS):
        for name in ("self_attn", "mlp"):
            found[f"layers.{n}.{name}"] = PrepareModuleInput(**whole)
        for name in ("input_norm", "post_norm"):
            found[f"layers.{n}.{name}"] = SequenceParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            found[f"layers.{n}.{name}"] = RowwiseParallel(output_layouts=Shard(1))
    return {**tensor_plan(), **found}


def one(path: Path) -> None:
    train(path, Llama(), IDS)


def tp(path: Path) -> None:
    train(path, parallelize_module(Llama(), mesh(), tensor_plan()), IDS)


def sp(path: Path) -> None:
    train(path, parallelize_module(Llama(), mesh(), sequence_plan()), IDS)


def no_reduce(path: Path) -> None:
    """The output of one attention is never added up."""
    plan = tensor_plan(layers__1__self_attn__o_proj=RowwiseParallel(output_layouts=Partial()))
    train(path, parallelize_module(Llama(), mesh(), plan), IDS)


def wrong_cut(path: Path) -> None:
    """One weight is cut into columns instead of rows."""
    model = Llama()
    whole = model.layers[1].self_attn.q_proj.weight.detach().clone()
    parallelize_module(model, mesh(), tensor_plan())
    weight = model.layers[1].self_attn.q_proj.weight
    assert isinstance(weight, DTensor)
    with torch.no_grad():
        weight.to_local().copy_(whole.chunk(WORLD, 1)[RANK].T)
    train(path, model, IDS)


def odd_gradient(path: Path) -> None:
    """One rank's gradient of one norm is a little off: less than any limit of a comparison."""
    model = parallelize_module(Llama(), mesh(), tensor_plan())

    def spoil() -> None:
        gradient = model.layers[1].post_norm.weight.grad
        if RANK == 2:
            gradient.mul_(1 + 2e-5)

    train(path, model, IDS, spoil)


# --- tensor and sequence parallel, written by hand


class Spread(torch.autograd.Function):
    """Every rank's tokens, on every rank; gradients are added up and dealt out again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(WORLD)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total.chunk(WORLD, 1)[RANK]


class Dealt(torch.autograd.Function):
    """The ranks' terms added up, and each rank's tokens of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total.chunk(WORLD, 1)[RANK]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(gradient) for _ in range(WORLD)]
        dist.all_gather(parts, gradient.contiguous())
        return torch.cat(parts, 1)


class HandMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()
        self.up, self.down = nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN, bias=False)

    def cut(self) -> None:
        for module, name, axis in (
            (self.up, "weight", 0),
            (self.up, "bias", 0),
            (self.down, "weight", 1),
        ):
            part = getattr(module, name).detach().chunk(WORLD, axis)[RANK].clone()
            setattr(module, name, nn.Parameter(part))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        y = self.down(F.gelu(self.up(Spread.apply(y) if WORLD > 1 else y)))
        return x + (Dealt.apply(y) if WORLD > 1 else y)


def by_hand(path: Path, forgotten: int | None = None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(HandMlp(), HandMlp())
    x, target = torch.randn(2, 4, 12, HIDDEN)
    if WORLD > 1:
        for layer in model:
            layer.cut()
        x, target = (each.chunk(WORLD, 1)[RANK] for each in (x, target))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with driftline.capture(model, path, levels=LEVELS):
        ((model(x) - target).square().sum() / 100).backward()
        for n, layer in enumerate(model):
            if WORLD > 1 and n != forgotten:
                dist.all_reduce(layer.norm.weight.grad)
        optimizer.step()


def hand(path: Path) -> None:
    by_hand(path)


def hand_forgotten(path: Path) -> None:
    by_hand(path, forgotten=1)


# --- other data on every rank


def ddp(path: Path) -> None:
    """Rows are dealt out as torch's sampler deals them."""
    train(path, DistributedDataParallel(Llama()), IDS[RANK::WORLD])


def not_averaged(path: Path) -> None:
    """No rank hears of the others' gradients."""
    train(path, Llama(), IDS.chunk(WORLD)[RANK])


def fsdp(path: Path) -> None:
    model = Llama()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh("fsdp"))
    fully_shard(model, mesh=mesh("fsdp"))
    train(path, model, IDS.chunk(WORLD)[RANK])


def fsdp_tp(path: Path) -> None:
    both = init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(Llama(), both["tp"], tensor_plan())
    for layer in model.layers:
        fully_shard(layer, mesh=both["dp"])
    fully_shard(model, mesh=both["dp"])
    train(path, model, IDS.chunk(2)[both.get_coordinate()[0]])


# --- pipelines


def four_layers(path: Path) -> None:
    train(path, Llama(0, 4, 4), IDS)


def pipeline(path: Path) -> None:
    """Every rank counts its layers from 0, and the batch comes in two parts."""
    each = 4 // WORLD
    model = Llama(RANK * each, (RANK + 1) * each, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stage = PipelineStage(model, RANK, WORLD, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=loss_of)
    with driftline.capture(model, path, levels=LEVELS):
        if RANK == 0:
            schedule.step(IDS)
        elif RANK == WORLD - 1:
            schedule.step(target=IDS)
        else:
            schedule.step()
        optimizer.step()


# --- collectives


class Meeting(nn.Module):
    """Begins an all-reduce, and gives its result before it is there."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return all_reduce(x, "sum", dist.group.WORLD)


def late(path: Path) -> None:
    """The others begin the all-reduce only when they have heard from rank 0, which has begun it."""
    model, x, word = Meeting(), torch.full((3,), RANK + 1.0), torch.zeros(1)
    with driftline.capture(model, path):
        if RANK:
            dist.recv(word, 0)
        y = model(x)
        if not RANK:
            for other in range(1, WORLD):
                dist.send(word, other)
        y.add_(100.0)


_MESHES: dict[str, Any] = {}


def mesh(name: str = "tp") -> Any:
    if name not in _MESHES:
        _MESHES[name] = init_device_mesh("cpu", (WORLD,), mesh_dim_names=(name,))
    return _MESHES[name]


def main() -> None:
    sys.modules["parallel_programs"] = sys.modules["__main__"]
    import more_programs
    import schedule_programs

    folder, *wanted = sys.argv[1:]
    torch.set_num_threads(1)
    if WORLD > 1:
        dist.init_process_group("gloo")
    for name in wanted:
        _MESHES.clear()
        {**globals(), **vars(more_programs), **vars(schedule_programs)}[name](Path(folder) / name)
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
