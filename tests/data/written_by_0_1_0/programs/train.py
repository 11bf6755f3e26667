"""One step of training, so that gradients and what the optimizer gets can be captured."""

from __future__ import annotations

import argparse

import torch
from network import IDS, build

options = argparse.ArgumentParser()
options.add_argument("--dtype", default="float32")
options.add_argument("--fault", action="store_true")
chosen = options.parse_args()
network = build(chosen.dtype, fault=chosen.fault)
optimizer = torch.optim.SGD(network.parameters(), 0.1)
scores = network(IDS).float()
torch.nn.functional.cross_entropy(scores.flatten(0, 1), IDS.flatten()).backward()
optimizer.step()
