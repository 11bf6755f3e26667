"""The network's first block on two ranks: up is split by rows, down by columns. For torchrun."""

from __future__ import annotations

import torch
import torch.distributed as dist
from network import IDS, build
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
network = build().eval()
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
for layer in network.layers:
    parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
with torch.no_grad():
    network(IDS)
dist.destroy_process_group()
