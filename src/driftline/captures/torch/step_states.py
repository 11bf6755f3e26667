# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false
"""Read torch tensors for `captures.step_states`, and find the averages of weights in a program.

Only samples and norms of device tensors are fetched, together.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from driftline.captures.recorder import Snapshot
from driftline.captures.step_states import NO_NUMBERS, figures_of
from driftline.captures.torch.tensors import dtype_name, recording, snapshot
from driftline.numerics.dtypes import DTYPES
from driftline.runs.sidecars.step_facts import SAMPLES, TensorState


class TorchReader:
    """Reads torch tensors; see `captures.step_states.TensorReader`."""

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
        # Only CUDA devices record graphs, and the query may fail without CUDA.
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
    """Samples and norms of tensors on devices."""
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


# Averages of weights.

_FEWEST = 8
"""Smallest number of elements of a tensor that can be recognised as an average."""
_CLEAR = 10.0
"""Smallest size of a move, in rounding errors, at which its direction is used."""
_STRAIGHT = 1e-3
_MOST_PLACES = 4096
_MOST_ASKED = 4
_NEVER = -2
_TABLES = (dict, OrderedDict, defaultdict, list)


class Move(NamedTuple):
    """An average of a weight, and its move since the last update.

    Attributes:
        path: `site.name` of the weight.
        number: Index among the averages of this weight.
        tensor: The average.
        rate: The fraction of the distance to the weight by which it moved; None if unknown.
    """

    path: str
    number: int
    tensor: torch.Tensor
    rate: float | None


class _Table:
    """A dictionary or list of tensors, which is kept itself because its tensors may be replaced."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def is_alone(self) -> bool:
        """Whether the program has dropped it, so that only this object refers to it."""
        return sys.getrefcount(self.held) <= 2


class _Place:
    """The place of a tensor that has the shape of a weight.

    Attributes:
        path: The weight of which it is an average; empty as long as that is unknown.
        number: Number of the average among those of that weight; 0 as long as it has none.
        samples: Some elements when it was last read.
        step: The step before which it was last read; `_NEVER` at first.
        table: The table that contains the tensor; None if it is not in one.
    """

    __slots__ = ("_key", "_tensor", "_unit", "number", "path", "samples", "step", "table")

    def __init__(self, tensor: torch.Tensor, table: _Table | None = None, key: Any = None) -> None:
        self._tensor = weakref.ref(tensor)
        self._unit = DTYPES[dtype_name(tensor.dtype)].unit_roundoff
        self.table = table
        self._key = key
        self.path = ""
        self.number = 0
        self.samples: Any = None
        self.step = _NEVER

    def tensor(self) -> torch.Tensor | None:
        if self.table is None:
            return self._tensor()
        held, key = self.table.held, self._key
        if type(held) is not list:
            value = dict.get(held, key)
        else:
            value = held[key] if key < len(held) else None
        return value if type(value) in (torch.Tensor, nn.Parameter) else None

    def readable(self) -> torch.Tensor | None:
        """The tensor, if it exists and has values."""
        tensor = self.tensor()
        return tensor if _address(tensor) else None

    def seen(self, samples: Any, step: int, weights: Sequence[tuple[str, Any]]) -> float:
        """Store new samples; return the rate at which it moved to a weight, or 0.0 if to none."""
        rate = 0.0
        is_first, is_next = self.step == _NEVER, self.step == step - 1
        if is_next and len(self.samples) == len(samples):
            about = [source for source in weights if self.path in ("", source[0])]
            path, rate = _followed(self.samples, samples, about, self._unit)
            self.path = path or self.path
        if not self.path and not is_first:
            # A table that is no average is released at once, because the program may have dropped
            # it.
            self.table = None
        self.samples, self.step = samples, step
        return rate


class Averages:
    """Finds averages of weights (EMA, SWA) and target networks that are never called.

    They are recognised by their moves. All living tensors with the shapes of weights are examined.
    Between two updates an average `a` of a weight `w` moves straight towards the weight,
    `a' - a = rate (w - a)`. Other models, gradients, momenta and stored states do not.

    Args:
        weights: Returns the parameters of the models that were seen, by path.
    """

    def __init__(self, weights: Callable[[], Sequence[tuple[str, torch.Tensor]]]) -> None:
        self._weights = weights
        self._places: list[_Place] = []

    def search(self, living: Sequence[Any], others: Container[int], step: int) -> None:
        """Search for tensors that may be averages, and read them for the first time.

        Args:
            living: Objects of the process; objects that are not tensors are skipped.
            others: Ids of tensors that are known to be something else.
            step: The step that is about to end.
        """
        self._places = [place for place in self._places if place.path]
        tensors = self._unlike_weights(living, others)
        if tensors and len(tensors) <= _MOST_PLACES:
            self._places += _places_of(tensors)
            self.look(step)

    def _unlike_weights(
        self, living: Sequence[Any], others: Container[int]
    ) -> tuple[torch.Tensor, ...]:
        """Tensors with the shapes of weights that are not weights and share no memory with them."""
        weights = self._weights()
        shapes = {weight.shape for _, weight in weights if weight.numel() >= _FEWEST}
        memory = {_address(tensor) for _, w in weights for tensor in (w, w.grad)}
        memory |= {_address(place.tensor()) for place in self._places}
        alike: list[torch.Tensor] = []
        for tensor in living:
            is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.shape in shapes
            if not is_plain or id(tensor) in others:
                continue
            address = _address(tensor)
            is_own = address and address not in memory
            if is_own and tensor.is_floating_point() and tensor.grad_fn is None:
                memory.add(address)
                alike.append(tensor)
        tensors = tuple(alike)
        alike.clear()  # otherwise this list would be taken for a table of the program
        return tensors

    def look(self, step: int) -> list[Move]:
        """The averages before a step, with the rates at which the last update moved them."""
        self._places = [p for p in self._places if p.table is None or not p.table.is_alone()]
        living = [(place, t) for place in self._places if (t := place.readable()) is not None]
        # Nothing is fetched while a CUDA graph is recorded.
        if not living or (any(tensor.is_cuda for _, tensor in living) and recording()):
            return []
        shapes = {tensor.shape for _, tensor in living}
        weights = [(path, w) for path, w in self._weights() if w.shape in shapes and _address(w)]
        if not weights:
            return []
        values = _samples([tensor for _, tensor in living] + [weight for _, weight in weights])
        sources: dict[torch.Size, list[tuple[str, Any]]] = {}
        for (path, weight), samples in zip(weights, values[len(living) :], strict=True):
            sources.setdefault(weight.shape, []).append((path, samples))
        rates = {
            id(place): place.seen(samples, step, sources.get(tensor.shape, ()))
            for (place, tensor), samples in zip(living, values[: len(living)], strict=True)
        }
        self._number([place for place, _ in living], rates)
        return [
            Move(place.path, place.number - 1, tensor, rates[id(place)] or None)
            for place, tensor in living
            if place.path
        ]

    def _number(self, places: Sequence[_Place], rates: Mapping[int, float]) -> None:
        """Number new averages of each weight, the fastest first."""
        fresh = [place for place in places if place.path and not place.number]
        for place in sorted(fresh, key=lambda place: -rates.get(id(place), 0.0)):
            numbers = [other.number for other in places if other.path == place.path]
            place.number = max(numbers) + 1


def _address(tensor: torch.Tensor | None) -> int:
    """Address of a tensor's values; 0 if it has no memory of its own, or its memory is freed."""
    if tensor is None or tensor.layout is not torch.strided or tensor.is_meta:
        return 0
    try:
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        end = (tensor.storage_offset() + last + 1) * tensor.element_size()
        return tensor.data_ptr() if end <= tensor.untyped_storage().nbytes() else 0
    except (RuntimeError, NotImplementedError):  # inside vmap, or in a graph that is traced
        return 0


def _places_of(tensors: tuple[torch.Tensor, ...]) -> list[_Place]:
    """The places of tensors: in tables with several of them, or alone."""
    counts = Counter(tensor.shape for tensor in tensors)
    # Finding the referrers of many tensors takes long, so tables are found by a few of them.
    fewest = min(counts, key=lambda shape: counts[shape])
    asked = tuple(tensor for tensor in tensors if tensor.shape == fewest)[:_MOST_ASKED]
    places: list[_Place] = []
    alone = {id(tensor) for tensor in tensors}
    for table in tuple(gc.get_referrers(*asked)):
        if type(table) not in _TABLES:
            continue
        entries = tuple(enumerate(table) if type(table) is list else dict.items(table))
        inside = [(key, value) for key, value in entries if id(value) in alone]
        if len(inside) > 1:
            holder = _Table(table)
            places += [_Place(value, holder, key) for key, value in inside]
            alone.difference_update(id(value) for _, value in inside)
    return places + [_Place(tensor) for tensor in tensors if id(tensor) in alone]


def _samples(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Some elements of each tensor, fetched together from each device."""
    pieces: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for index, tensor in enumerate(tensors):
        flat = _local(tensor).detach().reshape(-1)
        piece = flat[:: max(1, -(-flat.numel() // SAMPLES))]
        pieces.setdefault(piece.device, []).append((index, piece))
    values: list[Any] = [None] * len(tensors)
    for listed in pieces.values():
        numbers = torch.cat([piece.double() for _, piece in listed]).cpu().numpy()
        offset = 0
        for index, piece in listed:
            values[index] = numbers[offset : offset + len(piece)]
            offset += len(piece)
    return values


def _followed(
    before: Any, now: Any, weights: Sequence[tuple[str, Any]], unit: float
) -> tuple[str, float]:
    """The weight towards which a tensor has moved straight, and the rate; 0.0 if there is none."""
    moved = now - before
    size, rounding = float(np.linalg.norm(moved)), unit * float(np.linalg.norm(now))
    if not size > _CLEAR * rounding:
        return "", 0.0
    best = "", 0.0
    least = 2.0 * rounding + _STRAIGHT * size
    for path, weight in weights:
        way = weight - before
        length = float(way @ way)
        rate = float(moved @ way) / length if length else 0.0
        off = float(np.linalg.norm(moved - rate * way))
        if off <= least and 0.0 < rate < 1.0 + _STRAIGHT:
            best, least = (path, rate), off
    return best
