"""Calls of Paddle layers as flat lists of named tensors; the rule is `adapters.flatten`'s."""

from __future__ import annotations

from typing import Any

import paddle
from paddle.base import core

from driftline.adapters.flatten import Flatten, Tensors, binding_of

__all__ = ["Tensors", "binding_of", "inputs", "outputs"]

_core: Any = core
_FLATTEN = Flatten(paddle.Tensor, (paddle.dtype, _core.Place))
inputs = _FLATTEN.inputs
outputs = _FLATTEN.outputs
