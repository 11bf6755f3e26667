"""Five steps of training; the same with a gradient that is scaled twice in one layer, and with a
learning rate that jumps in step 3.

python train.py
python train.py --fault
python train.py --jump
"""

from __future__ import annotations

import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(32, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
dice = torch.Generator().manual_seed(1)
if "--fault" in sys.argv:
    model[1].weight.register_hook(lambda gradient: 2 * gradient)
for step in range(5):
    if "--jump" in sys.argv and step == 3:
        optimizer.param_groups[0]["lr"] = 5.0
    tokens = torch.randint(0, 32, (8, 6), generator=dice)
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"{loss.item():.4f}")
