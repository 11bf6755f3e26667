"""Read a Paddle tensor as host bytes, without a copy if possible, or refuse it with a reason.

The snapshot of a plain host tensor refers to live memory, so it must be read or copied before the
program continues. Callers hold `undisturbed()`, so that nothing here becomes part of the program's
graph. This file knows nothing about names and sinks.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import math
from types import TracebackType
from typing import Any

from paddle.base import framework

from driftline.captures.recorder import Refusal, Snapshot
from driftline.numerics.dtypes import DTYPES

_CPU = "cpu"
_NOTHING = -1
# A cache, because converting a dtype to text is slow and is needed for every tensor.
_NAMES: dict[Any, str] = {}
_tracer: Any = framework._dygraph_tracer


def grad_enabled() -> bool:
    """Whether Paddle is recording what a backward pass needs."""
    tracer = _tracer()
    return tracer is not None and bool(tracer._has_grad)


class undisturbed:
    """A context in which autograd records nothing."""

    __slots__ = ("_had", "_tracer")

    def __enter__(self) -> None:
        self._tracer = _tracer()
        if self._tracer is not None:
            self._had = self._tracer._has_grad
            if self._had:
                self._tracer._has_grad = False

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._tracer is not None and self._had:
            self._tracer._has_grad = True


def dtype_name(dtype: Any) -> str:
    """Our name of a Paddle dtype; empty if we do not understand its bytes."""
    name = _NAMES.get(dtype)
    if name is None:
        name = str(dtype).removeprefix("paddle.")
        name = _NAMES[dtype] = name if name in DTYPES else ""
    return name


def snapshot(tensor: Any, *, values: bool = True) -> Snapshot | Refusal:
    """Snapshot of one tensor.

    Args:
        tensor: Any Paddle tensor of a dynamic program.
        values: Whether its bytes are needed, or only dtype, shape and device.
    """
    placement = ""
    # This rank holds only a part of a distributed tensor, described by the placement.
    if tensor.is_dist():
        placement = _placement(tensor)
        tensor = tensor._local_value()
    if not tensor.is_dense():
        kind = "selected rows" if tensor.is_selected_rows() else "sparse tensors"
        return Refusal(f"{kind} are not stored")
    dtype = dtype_name(tensor.dtype)
    if not dtype:
        return Refusal(f"{tensor.dtype} elements are not understood")
    shape = tuple(int(size) for size in tensor.shape)
    elements = math.prod(shape)
    place = tensor.place
    device, index = (_CPU, None) if place.is_cpu_place() else _device(place)
    address, length, owner = 0, _NOTHING, tensor
    if values:
        length = elements * (DTYPES[dtype].bits // 8)
        # An empty tensor needs no storage.
        if length:
            # A tensor that was never filled has no address.
            if not tensor._is_initialized():
                return Refusal("its storage has been freed or was never filled")
            owner = _in_order(tensor, on_host=device == _CPU)
            address = owner.data_ptr()
    return Snapshot(dtype, shape, address, length, device, index, elements, placement, owner)


def _in_order(tensor: Any, *, on_host: bool) -> Any:
    """The tensor itself, or a copy of it, with its values in host memory in C order."""
    if not on_host:
        tensor = tensor.detach().cpu()
    return tensor if tensor.is_contiguous() else tensor.detach().contiguous()


def _device(place: Any) -> tuple[str, int | None]:
    """Name and index of a device, such as `gpu:0` and 0; pinned host memory has no index."""
    text = str(place).removeprefix("Place(").removesuffix(")")
    name, _, number = text.partition(":")
    return text, int(number) if number.isdigit() and "pinned" not in name else None


def _placement(tensor: Any) -> str:
    placements = ", ".join(str(placement) for placement in tensor.placements)
    shape = tuple(int(size) for size in tensor.shape)
    return f"[{placements}] of {shape} over mesh {tuple(tensor.process_mesh.shape)}"
