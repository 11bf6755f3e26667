"""What a session and its taps talk about: a module call under way, and who wants to hear of it."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import NamedTuple, Protocol

import torch
from torch import nn

from driftline.adapters.torch.names import Place
from driftline.runs.key import Phase

Tensors = list[tuple[str, str, torch.Tensor]]
"""Tensors of one port: (slot, alias, tensor)."""


class Frame:
    """A module call that is under way."""

    __slots__ = (
        "around",
        "class_name",
        "inputs",
        "module",
        "phase",
        "place",
        "recompute",
        "site",
        "step",
        "visit",
    )

    def __init__(
        self, place: Place, module: nn.Module, visit: int, step: int, *, recompute: bool
    ) -> None:
        self.place = place
        self.site = place.site
        self.module = module
        self.class_name = place.class_name
        self.visit = visit
        self.step = step
        self.phase: Phase = "recompute" if recompute else "forward"
        self.recompute = recompute
        self.inputs: Tensors = []
        self.around: ExitStack | None = None


class Look(NamedTuple):
    """What is wanted of one place's own calls."""

    inputs_before: bool
    inputs_after: bool
    outputs: bool


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
