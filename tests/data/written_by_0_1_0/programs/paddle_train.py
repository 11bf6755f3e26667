"""The network in Paddle with torch's weights (`weights.npz`); `--hook` saves by the saving hook."""

from __future__ import annotations

import sys

import numpy as np
import paddle
from paddle import nn


class Block(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.act = nn.GELU()
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


class Network(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.LayerList([Block() for _ in range(2)])
        self.head = nn.Linear(8, 11, bias_attr=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


network, weights = Network(), np.load("weights.npz")
for name, parameter in network.named_parameters():
    value = weights[name]
    turned = value.ndim == 2 and "embed" not in name
    parameter.set_value(np.ascontiguousarray(value.T) if turned else value)
if "--hook" in sys.argv:
    from driftline import register_saving_hook

    network = register_saving_hook(network, path=sys.argv[-1], target_class_names=["LayerNorm"])
optimizer = paddle.optimizer.SGD(0.1, parameters=network.parameters())
ids = paddle.to_tensor([[1, 5, 9], [2, 4, 10]])
scores = network(ids)
paddle.nn.functional.cross_entropy(scores.flatten(0, 1), ids.flatten()).backward()
optimizer.step()
