"""A linear layer on one process, and its rows shared out among several (torchrun).

python sharded.py
torchrun --nproc-per-node 2 sharded.py
torchrun --nproc-per-node 2 sharded.py --fault
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Mlp(nn.Module):
    """Split in the usual way: columns of `up`, rows of `down`, one sum at the end."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        up, down = nn.Linear(16, 64, bias=False), nn.Linear(64, 16, bias=False)
        width = 64 // world
        mine = slice(rank * width, (rank + 1) * width)
        self.up = nn.Linear(16, width, bias=False)
        self.down = nn.Linear(width, 16, bias=False)
        self.up.weight.data = up.weight.data[mine].clone()
        self.down.weight.data = down.weight.data[:, mine].clone()
        self.world = world

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.relu(self.up(x)))
        if self.world > 1 and "--fault" not in sys.argv:
            dist.all_reduce(y)
        return y


def main() -> None:
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    model = Mlp(rank, world).eval()
    inputs = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        y = model(inputs)
    if rank == 0:
        print(f"{y.norm():.4f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
