"""More of `parallel_programs.py`: stages in turns, heads that ranks share, meshes flattened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import parallel_programs as programs
import torch
import torch.distributed as dist
from parallel_programs import IDS, LEVELS, RANK, WORLD, Llama, loss_of, tensor_plan, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble
from torch.distributed.tensor.parallel import parallelize_module

import driftline


def eight_layers(path: Path) -> None:
    train(path, Llama(0, 8, 8), IDS)


def in_turns(path: Path, stages: list[int], kind: Any, micro: int) -> None:
    """Every rank has two models of one layer each, and an optimizer for each."""
    models = nn.ModuleList(Llama(n, n + 1, 8) for n in stages)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in models]
    parts = [
        PipelineStage(each, n, 8, torch.device("cpu"))
        for each, n in zip(models, stages, strict=True)
    ]
    schedule = kind(parts, micro, loss_fn=loss_of)
    with driftline.capture(models, path, levels=LEVELS):
        given = (IDS,) if 0 in stages else ()
        schedule.step(*given, **({"target": IDS} if 7 in stages else {}))
        for optimizer in optimizers:
            optimizer.step()


def interleaved(path: Path) -> None:
    in_turns(path, [RANK, RANK + 4], ScheduleInterleaved1F1B, 4)


def turned_back(path: Path) -> None:
    """The last stage is on the first rank; gradients of weights come in a pass of their own."""
    in_turns(path, [RANK, 7 - RANK], ScheduleZBVZeroBubble, 8)


# --- heads that ranks share, by hand


class Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def cut(module: Any, axis: int, parts: int = WORLD, which: int = RANK) -> None:
    module.weight = nn.Parameter(module.weight.detach().chunk(parts, axis)[which].clone())


def shared_heads(path: Path, *, forgotten: bool = False) -> None:
    """Two heads of keys and values: neighbours hold the same one."""
    before, programs.SHARED = programs.SHARED, 2
    model = Llama()
    programs.SHARED = before
    for layer in model.layers if WORLD > 1 else ():
        attention, mlp = layer.self_attn, layer.mlp
        for module in (attention.q_proj, mlp.gate_proj, mlp.up_proj):
            cut(module, 0)
        for module in (attention.o_proj, mlp.down_proj):
            cut(module, 1)
        for module in (attention.k_proj, attention.v_proj):
            cut(module, 0, 2, RANK // 2)
        for module in (attention, mlp):
            module.register_forward_pre_hook(lambda _, args: (Copied.apply(args[0]),))
            module.register_forward_hook(lambda _, args, out: Added.apply(out))

    def synchronise() -> None:
        for layer in model.layers:
            for module in (layer.self_attn.k_proj, layer.self_attn.v_proj):
                every = [torch.empty_like(module.weight.grad) for _ in range(WORLD)]
                dist.all_gather(every, module.weight.grad)
                module.weight.grad.copy_(every[RANK // 2 * 2] + every[RANK // 2 * 2 + 1])

    train(path, model, IDS, synchronise if WORLD > 1 and not forgotten else None)


def shared_heads_forgotten(path: Path) -> None:
    shared_heads(path, forgotten=True)


def flattened(path: Path) -> None:
    """FSDP over two axes as one, on a model that tensor parallelism has cut already."""
    whole = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "cp", "tp"))
    whole["dp", "cp"]._flatten("dp_cp")
    model = parallelize_module(Llama(), whole["tp"], tensor_plan())
    for layer in model.layers:
        fully_shard(layer, mesh=whole["dp_cp"])
    fully_shard(model, mesh=whole["dp_cp"])
    train(path, model, IDS.chunk(2)[whole.get_coordinate()[0]])


def flat_pieces(path: Path) -> None:
    """The first FSDP: what is left of a weight on a rank is a stretch of it, or nothing."""
    model = FullyShardedDataParallel(Llama(), device_id=torch.device("cpu"), use_orig_params=True)
    train(path, model, IDS.chunk(WORLD)[RANK])
