"""The Python doors: compare two live models without a disk, then capture one and look inside.

python two_models.py
"""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import torch
from torch import nn

import driftline


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.LayerNorm(64), nn.Linear(64, 8)).eval()


def main() -> None:
    inputs = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    reference = build()
    ported = copy.deepcopy(reference).to(torch.bfloat16)
    broken = copy.deepcopy(ported)
    broken[2].weight.data *= 2  # a scale applied twice

    for name, candidate in (("ported", ported), ("broken", broken)):
        # Inputs are cast to the model's own type; the limits are those of the coarser of the two.
        table = driftline.compare_models(reference, candidate, inputs)
        print(f"{name}: {table.verdict}, {table.finding}")

    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        with driftline.capture(reference, Path(folder) / "run"):
            reference(inputs)
        run = driftline.open_run(Path(folder) / "run")
        for tensor in run.tensors():
            print(tensor.key, tensor.dtype, tensor.shape)
        print("mean of the last output:", run.get(site="3", port="output").numpy().mean())


if __name__ == "__main__":
    main()
