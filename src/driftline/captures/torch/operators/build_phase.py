"""Buffer for operators that run before it is known whether they matter: up to a model's first call.

A program that builds a model runs thousands of operators before it calls it: weights are drawn,
cast and copied. Nobody asks about those, and drawn in another number format they differ without a
fault. In a program that has no model, only operators, they are all there is. Only the first call or
the end decides which of the two it is; until then tensors are copied and kept here, up to a limit.
Knows no sink.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

import gc
import os
from typing import NamedTuple

import torch
from torch import nn

from driftline.captures.recorder import TensorAddress

MOST_BYTES = 64 << 20
"""As much as a run may lose when its program is killed."""
MOST_TENSORS = 20_000


class BufferedTensor(NamedTuple):
    """One tensor of an operator, as `CaptureSession.emit` wants it.

    Attributes:
        outside: It ran in no module.
    """

    outside: bool
    address: TensorAddress
    tensor: torch.Tensor


class BuildPhaseBuffer:
    """Tensors that wait, in the order they came."""

    def __init__(self) -> None:
        self._waiting: list[BufferedTensor] = []
        self._bytes = 0
        self._process = os.getpid()

    @property
    def full(self) -> bool:
        return self._bytes > MOST_BYTES or len(self._waiting) > MOST_TENSORS

    def keep(self, waiting: BufferedTensor) -> None:
        """Copy a tensor, since an in-place operator may follow; call it undisturbed."""
        self._forget_parent()
        copy = waiting.tensor.detach().clone()
        self._bytes += copy.numel() * copy.element_size()
        self._waiting.append(waiting._replace(tensor=copy))

    def release(self) -> list[BufferedTensor]:
        """All that waits; nothing does afterwards."""
        self._forget_parent()
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        return waiting

    def _forget_parent(self) -> None:
        """In a forked child: what waits was its parent's."""
        if self._process != os.getpid():
            # The copies belong to the parent's capture, which writes them itself.
            self.__init__()


def a_model_is_there() -> bool:
    """Whether any module with parameters is alive; takes some 10 ms."""
    return any(
        # By type, because `isinstance` would ask lazy proxies for their class.
        issubclass(type(thing), nn.Module) and thing.__dict__.get("_parameters")
        for thing in gc.get_objects()
    )
