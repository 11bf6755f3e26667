"""`register_hook` of `ait llm`: the tree of dumps it writes, in the folder given."""

from __future__ import annotations

import sys

import torch
from network import IDS, build

from driftline import DumpConfig, register_hook

network = build().eval()
register_hook(network, DumpConfig(dump_path=sys.argv[1], module_list=[torch.nn.Linear]))
with torch.no_grad():
    network(IDS)
