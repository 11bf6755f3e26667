"""What a session and its taps talk about: a module call under way, and who wants to hear of it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from driftline.adapters.frames import Frame, Look

__all__ = ["Frame", "Look", "Tap", "Tensors"]

Tensors = list[tuple[str, str, torch.Tensor]]
"""Tensors of one port: (slot, alias, tensor)."""


class Tap(Protocol):
    """Something that notices tensors and hands them to `CaptureSession.emit`.

    `around_root` encloses a call that no other module made; `before_forward` and `on_forward` come
    just before and after every call, the latter not when the call raises.
    """

    def install(self) -> None: ...

    def remove(self) -> None: ...

    def around_root(self, module: nn.Module) -> AbstractContextManager[None]: ...

    def before_forward(self, frame: Frame, inputs: Tensors) -> None: ...

    def on_forward(self, frame: Frame, inputs: Tensors, outputs: Tensors) -> None: ...
