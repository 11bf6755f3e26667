"""A framework of one screen; a recipe of docs/contributing.md teaches Driftline to capture it."""

from __future__ import annotations

from typing import Any

import numpy as np


class Module:
    """A module with parts below it and weights of its own."""

    def __init__(self, **parts: Module) -> None:
        self.parts = parts
        self.weights: dict[str, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, x: Any) -> Any:
        for part in self.parts.values():
            x = part(x)
        return x


class Dense(Module):
    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weights["weight"] = weight

    def forward(self, x: Any) -> Any:
        return np.asarray(x @ self.weights["weight"])
