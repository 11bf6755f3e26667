"""Buffer for the tensors of operators that run before a model's first call.

A program that builds a model runs thousands of operators before it calls the model: weights are
initialised, cast and copied. These operators are of no interest, and in another number format
random weights differ without a fault. But in a program without a model, they are all that can be
captured. Which case it is becomes known only at the first call of a model or at the end. Until then
tensors are copied into this buffer, up to a limit. This file knows no sink.
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
"""Largest size of the buffer, whose tensors are lost if the program is killed."""
MOST_TENSORS = 20_000


class BufferedTensor(NamedTuple):
    """One tensor of an operator, with the arguments of `CaptureSession.emit`.

    Attributes:
        outside: Whether the operator ran outside all modules.
        address: Address of the tensor in the run.
        tensor: The tensor.
    """

    outside: bool
    address: TensorAddress
    tensor: torch.Tensor


class BuildPhaseBuffer:
    """Buffered tensors, in the order in which they were added."""

    def __init__(self) -> None:
        self._waiting: list[BufferedTensor] = []
        self._bytes = 0
        self._process = os.getpid()

    @property
    def full(self) -> bool:
        return self._bytes > MOST_BYTES or len(self._waiting) > MOST_TENSORS

    def keep(self, waiting: BufferedTensor) -> None:
        """Add a copy of a tensor, because an in-place operator may follow; call it undisturbed."""
        self._forget_parent()
        copy = waiting.tensor.detach().clone()
        self._bytes += copy.numel() * copy.element_size()
        self._waiting.append(waiting._replace(tensor=copy))

    def release(self) -> list[BufferedTensor]:
        """Return all buffered tensors and empty the buffer."""
        self._forget_parent()
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        return waiting

    def _forget_parent(self) -> None:
        """Empty the buffer in a forked child."""
        if self._process != os.getpid():
            # The copies belong to the parent's capture, which writes them itself.
            self.__init__()


def a_model_is_there() -> bool:
    """Whether any module with parameters is alive; takes some 10 ms."""
    return any(
        # `isinstance` would read `__class__`, which may run the code of a lazy proxy.
        issubclass(type(thing), nn.Module) and thing.__dict__.get("_parameters")
        for thing in gc.get_objects()
    )
