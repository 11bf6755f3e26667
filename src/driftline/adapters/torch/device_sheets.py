"""Figures of device tensors on their way to the host: nobody waits for them.

Kernels write the smallest and the largest element of a tensor, and how many of its elements are
zero or nearly so, into sheets on the device; a sheet travels in one copy. Judges nothing.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

from typing import Any

import torch

from driftline.adapters.torch.origins import Origin
from driftline.adapters.torch.screen import Reading, from_extremes
from driftline.numerics.dtypes import Pattern

TOGETHER = 512
"""Readings that travel to the host in one copy."""
_REDUCED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Count:
    """Elements that are zero or below the normal numbers of their format.

    Attributes:
        elements: Of how many; reals, for complex ones.
        small: How many; -1 while the figure is on its way.
    """

    __slots__ = ("elements", "small")

    def __init__(self, elements: int) -> None:
        self.elements = elements
        self.small = -1

    def arrived(self, count: float, _: float) -> None:
        self.small = int(count)

    def put_into(self, reading: Reading) -> Reading:
        """What was read of a tensor, with this count."""
        return reading._replace(elements=self.elements, zero=self.small, subnormal=0)


def count_small(tensor: torch.Tensor, pattern: Pattern, out: torch.Tensor) -> None:
    """Count into a cell on the same device; a NaN is not small."""
    small = tensor.abs() < pattern.value(pattern.normal)
    torch.sum(small, dim=tuple(range(small.dim())), dtype=torch.int64, out=out)


class Value:
    """One state of a storage: its extremes, on the device and, later, here."""

    __slots__ = ("asked", "before", "count", "origin", "pattern", "reading", "single")

    def __init__(
        self,
        pattern: Pattern,
        count: int,
        origin: Origin = Origin.UNKNOWN,
        before: Value | None = None,
        *,
        asked: bool = True,
    ) -> None:
        self.pattern = pattern
        self.count = count
        self.asked = asked
        self.origin = origin
        self.before = before
        self.reading: Reading | None = None
        self.single = count == 1

    def arrived(self, low: float, high: float) -> None:
        earlier = self.before.reading if self.before is not None else None
        self.reading = from_extremes(self.pattern, self.count, low, high)
        if earlier is not None and earlier.nonfinite and not self.reading.nonfinite:
            self.reading = earlier  # only a part of it was written
        if self.before is not None:
            self.origin = max(self.origin, self.before.origin)
        self.before = None


class Sheet:
    """Room for extremes on one device, in one type: kernels write straight into it."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.rows = torch.empty((TOGETHER, 2), device=device, dtype=dtype)
        cells = self.rows.view(-1).unbind(0)
        self.places = list(zip(cells[0::2], cells[1::2], strict=True))
        self.values: list[Value | Count] = []

    @property
    def full(self) -> bool:
        return len(self.values) >= TOGETHER

    def take(self, tensor: torch.Tensor, value: Value) -> None:
        torch.aminmax(tensor, out=self.places[len(self.values)])
        self.values.append(value)

    def take_count(self, tensor: torch.Tensor, pattern: Pattern, count: Count) -> None:
        count_small(tensor, pattern, self.places[len(self.values)][0])
        self.values.append(count)


class Flight:
    """Sheets on their way to the host, and the calls that wait for them."""

    def __init__(self, sheets: list[Sheet], values: list[Value | Count], calls: list[Any]) -> None:
        self.sheets = sheets
        self.values = values
        self.calls = calls
        self.hosts: list[torch.Tensor] = []
        self.arrivals: list[Any] = []
        for sheet in sheets:
            used = sheet.rows[: len(sheet.values)]
            if used.is_cuda:
                host = torch.empty(used.shape, dtype=used.dtype, pin_memory=True)
                host.copy_(used, non_blocking=True)
                arrival = torch.cuda.Event()
                arrival.record(torch.cuda.current_stream(used.device))
                self.arrivals.append(arrival)
            else:  # no events here: the copy waits
                host = used.cpu()
            self.hosts.append(host)

    def arrived(self, *, wait: bool) -> bool:
        for arrival in self.arrivals:
            if wait:
                arrival.synchronize()
            elif not arrival.query():
                return False
        return True

    def extremes(self) -> dict[int, list[float]]:
        found: dict[int, list[float]] = {}
        for sheet, host in zip(self.sheets, self.hosts, strict=True):
            found.update(zip(map(id, sheet.values), host.double().tolist(), strict=True))
        return found


def reals_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers in a type that every kernel has."""
    shown = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return shown if shown.dtype in _REDUCED else shown.to(torch.float32)
