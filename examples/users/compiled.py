"""The same model by its modules, and as one graph that a compiler has taken.

python compiled.py
python compiled.py --compile
"""

from __future__ import annotations

import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8)).eval()
inputs = torch.randn(4, 32)
if "--compile" in sys.argv:
    # Quick, and a graph all the same; your own backend's name stands here.
    model = torch.compile(model, backend="aot_eager")
with torch.no_grad():
    print(f"{model(inputs).norm():.4f}")
