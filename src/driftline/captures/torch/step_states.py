# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false
"""How `captures.step_states` reads tensors of torch.

Of a device's tensors only samples and norms are fetched, in one transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from driftline.captures.recorder import Snapshot
from driftline.captures.step_states import NO_NUMBERS, figures_of
from driftline.captures.torch.tensors import recording, snapshot
from driftline.runs.sidecars.step_facts import SAMPLES, TensorState


class TorchReader:
    """See `captures.step_states.TensorReader`."""

    def host(self, tensor: Any) -> Snapshot | None:
        local = _local(tensor)
        if not isinstance(local, torch.Tensor) or local.device.type != "cpu":
            return None
        shot = snapshot(local.detach())
        return shot if isinstance(shot, Snapshot) else None

    def fetch(self, tensors: Sequence[Any]) -> list[TensorState | None]:
        states: list[TensorState | None] = [None] * len(tensors)
        on_devices = [
            (index, local.detach())
            for index, local in enumerate(map(_local, tensors))
            if isinstance(local, torch.Tensor) and local.device.type not in ("cpu", "meta")
        ]
        # Only CUDA records graphs, and torch without CUDA cannot even be asked.
        recorded = any(tensor.is_cuda for _, tensor in on_devices) and recording()
        if on_devices and not recorded:
            fetched = _device_states([tensor for _, tensor in on_devices])
            for (index, _), state in zip(on_devices, fetched, strict=True):
                states[index] = state
        return states

    def described(self, tensor: Any) -> tuple[str, tuple[int, ...]]:
        return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def _local(tensor: Any) -> Any:
    """This rank's part of a distributed tensor."""
    return getattr(tensor, "_local_tensor", tensor)


def _device_states(tensors: list[torch.Tensor]) -> list[TensorState]:
    """The same of tensors on devices: samples and norms, fetched together."""
    pieces: list[torch.Tensor] = []
    sizes: list[int] = []
    for tensor in tensors:
        flat = tensor.reshape(-1)
        piece = flat[:: max(1, -(-flat.numel() // SAMPLES))]
        piece = piece.abs() if piece.is_complex() else piece
        norm = torch.linalg.vector_norm(tensor.float() if tensor.dtype.itemsize < 4 else tensor)
        pieces += [norm.reshape(1).double().cpu(), piece.double().cpu()]
        sizes.append(piece.numel())
    numbers = torch.cat(pieces).numpy()
    states: list[TensorState] = []
    offset = 0
    for size in sizes:
        samples = numbers[offset + 1 : offset + 1 + size]
        figures = (float(numbers[offset]), *figures_of(samples)[1:])
        states.append(TensorState("", figures, NO_NUMBERS, samples))
        offset += 1 + size
    return states
