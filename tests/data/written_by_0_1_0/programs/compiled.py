"""The network compiled by the backend that is named, for `driftline dump --graph`."""

from __future__ import annotations

import sys

import torch
from network import IDS, build

network = torch.compile(build().eval(), backend=sys.argv[1])
with torch.no_grad():
    network(IDS)
