"""The watch for tensors on a device: nothing is waited for while the program runs.

The smallest and the largest element of each output are taken on the device, by one kernel, on the
program's own stream; some hundred of them travel to the host together, in a copy nobody waits for,
and are judged when they have arrived, in the order of the calls. The rule is the one for the CPU
(`judging.py`), on less: a count is "at least one". A finding names its place as exactly, a little
later. Its inputs are held meanwhile, as far as they fit into a limit, and are kept if nobody has
overwritten them.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from driftline.adapters.torch.judging import LOGARITHMS, Input, Numbers, judge
from driftline.adapters.torch.origins import ByStorage, Origin, is_whole
from driftline.adapters.torch.reporting import Call, Part, Reporter
from driftline.adapters.torch.screen import Reading, from_extremes, pattern_of, plain, read
from driftline.numerics.peaks import Pattern

TOGETHER = 512
"""Readings that travel to the host in one copy."""
ASK_EVERY = 64
"""Calls between two questions whether a copy has arrived."""
HELD = 256 << 20
"""Bytes of inputs that are held, at most, for calls whose readings are still on their way."""
_REDUCED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class _Value:
    """One state of a storage: its extremes, on the device and, later, here."""

    __slots__ = ("before", "count", "extremes", "origin", "pattern", "reading", "single")

    def __init__(
        self,
        pattern: Pattern,
        count: int,
        extremes: torch.Tensor | None,
        origin: Origin = Origin.UNKNOWN,
        before: _Value | None = None,
    ) -> None:
        self.pattern = pattern
        self.count = count
        self.extremes = extremes
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
        self.extremes = self.before = None


class _Waiting:
    """A call whose readings are on their way."""

    __slots__ = ("allowed", "begun", "call", "held", "inputs", "name", "numbers", "outputs", "size")

    def __init__(
        self, call: Call, name: str, numbers: Numbers | None, *, allowed: bool, begun: int
    ) -> None:
        self.call = call
        self.begun = begun
        self.name = name
        self.numbers = numbers
        self.allowed = allowed
        self.inputs: list[tuple[str, str, torch.dtype, tuple[int, ...], _Value | None]] = []
        self.outputs: list[tuple[str, torch.dtype, tuple[int, ...], _Value]] = []
        self.held: dict[str, tuple[torch.Tensor, int | None]] = {}
        self.size = 0


class DeviceWatch:
    """Readings of device tensors, from the call to the verdict."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._values: ByStorage[_Value] = ByStorage()
        self._gathering: list[_Value] = []
        self._calls: list[_Waiting] = []
        self._flights: deque[tuple[list[Any], list[_Value], list[_Waiting]]] = deque()
        self._held = 0
        self._since = 0
        self.added = 0
        self._judged = 0
        self._troubled = -1

    def unwritten(self, tensor: torch.Tensor) -> None:
        """Memory was allocated; what stands there means nothing until it is written."""
        pattern = pattern_of(tensor.dtype)
        if pattern is not None:
            self._values.put(tensor, _Value(pattern, tensor.numel(), None, Origin.RAW))

    def add(
        self,
        call: Call,
        name: str,
        inputs: Sequence[tuple[str, str, torch.Tensor]],
        outputs: Sequence[tuple[str, torch.Tensor]],
        numbers: Numbers | None,
        allowed: bool,
        begun: int = -1,
    ) -> None:
        """A call has been made; its readings are sent for.

        Args:
            begun: For a module: how many calls there were when it began; those since are inside it.
        """
        with self._reporter.lock:
            waiting = _Waiting(call, name, numbers, allowed=allowed, begun=begun)
            self.added += 1
            for slot, alias, tensor in inputs:
                value = self._input(tensor)
                shape = tuple(tensor.shape)
                waiting.inputs.append((slot, alias, tensor.dtype, shape, value))
                self._hold(waiting, slot, tensor)
            for slot, tensor in outputs:
                value = self._output(tensor)
                if value is not None:
                    waiting.outputs.append((slot, tensor.dtype, tuple(tensor.shape), value))
            self._calls.append(waiting)
            self._since += 1
            if len(self._gathering) >= TOGETHER or self._held > HELD // 2:
                self._send()
            if self._since >= ASK_EVERY:
                self._since = 0
                self._collect(wait=False)

    def step_may_be_over(self) -> None:
        """A module call has ended: what has arrived is judged."""
        if self._flights:
            with self._reporter.lock:
                self._collect(wait=False)

    def finish(self) -> None:
        """Judge everything; the only place where a device is waited for."""
        with self._reporter.lock:
            self._send()
            self._collect(wait=True)

    # --- readings

    def _input(self, tensor: torch.Tensor) -> _Value | None:
        value = plain(tensor)
        pattern = pattern_of(value.dtype) if value is not None else None
        if value is None or pattern is None or not value.numel():
            return None
        if value.is_cpu:  # a number beside device tensors
            known = _Value(pattern, value.numel(), None)
            known.reading = read(value, pattern)
            return known
        known = self._values.get(value)
        if known is None or (known.origin is Origin.RAW and known.extremes is None):
            origin = known.origin if known is not None else Origin.UNKNOWN
            known = self._ask(value, pattern, origin, None)
            self._values.put(value, known)
        return known

    def _output(self, tensor: torch.Tensor) -> _Value | None:
        value = plain(tensor)
        pattern = pattern_of(value.dtype) if value is not None else None
        if value is None or pattern is None or not value.numel() or value.is_cpu:
            return None
        before = None if is_whole(value) else self._values.get(value)
        known = self._ask(value, pattern, Origin.UNKNOWN, before)
        self._values.put(value, known)
        return known

    def _ask(
        self, tensor: torch.Tensor, pattern: Pattern, origin: Origin, before: _Value | None
    ) -> _Value:
        shown = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        if shown.dtype not in _REDUCED:
            shown = shown.to(torch.float32)
        extremes = torch.stack(torch.aminmax(shown.detach()))
        value = _Value(pattern, tensor.numel() * pattern.reals, extremes, origin, before)
        self._gathering.append(value)
        return value

    # --- inputs for replay

    def _hold(self, waiting: _Waiting, slot: str, tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self._held + size > HELD:
            return
        try:
            version: int | None = tensor._version
        except RuntimeError:  # inference mode counts no versions
            version = None
        waiting.held[slot] = tensor.detach(), version
        waiting.size += size
        self._held += size

    # --- on their way

    def _send(self) -> None:
        values, self._gathering = self._gathering, []
        calls, self._calls = self._calls, []
        if not values and not calls:
            return
        copies: list[Any] = []
        groups: dict[tuple[torch.device, torch.dtype], list[_Value]] = {}
        for value in values:
            assert value.extremes is not None
            groups.setdefault((value.extremes.device, value.extremes.dtype), []).append(value)
        for (device, _), members in groups.items():
            asked = [one.extremes for one in members if one.extremes is not None]
            together = torch.stack(asked).to(torch.float64)
            if device.type == "cuda":
                host = torch.empty(together.shape, dtype=torch.float64, pin_memory=True)
                host.copy_(together, non_blocking=True)
                arrival = torch.cuda.Event()
                arrival.record(torch.cuda.current_stream(device))
                copies.append((arrival, host, members))
            else:  # no events here: the copy waits
                copies.append((None, together.cpu(), members))
        self._flights.append((copies, values, calls))

    def _collect(self, *, wait: bool) -> None:
        while self._flights:
            copies, values, calls = self._flights[0]
            for arrival, _, _ in copies:
                if arrival is not None:
                    if wait:
                        arrival.synchronize()
                    elif not arrival.query():
                        return
            self._flights.popleft()
            extremes: dict[int, list[float]] = {}
            for _, host, members in copies:
                extremes.update(zip(map(id, members), host.tolist(), strict=True))
            for value in values:  # in their order: one may be a part of the one before
                value.arrived(*extremes[id(value)])
            for waiting in calls:
                self._judge(waiting)

    def _judge(self, waiting: _Waiting) -> None:
        reporter, call = self._reporter, waiting.call
        self._held -= waiting.size
        outputs = [
            Part(slot, None, value.reading, dtype, shape)
            for slot, dtype, shape, value in waiting.outputs
        ]
        readings = [one.reading for one in outputs if one.reading is not None]
        for reading in readings:
            if not reading.nonfinite:
                key = (call.site, reading.pattern.name)
                if reading.peak > reporter.device_peaks.get(key, -1.0):
                    reporter.device_peaks[key] = reading.peak
        judged = [
            Input(
                slot,
                value.reading,
                Origin.MEANT if value.single and value.origin is Origin.UNKNOWN else value.origin,
                waiting.name in LOGARITHMS and value.reading.peak == 1.0,
            )
            for slot, _, _, _, value in waiting.inputs
            if value is not None and value.reading is not None
        ]
        verdict = judge(
            waiting.name,
            judged,
            readings,
            waiting.numbers,
            reporter.options.types,
            allowed=waiting.allowed,
        )
        if verdict.origin is not Origin.UNKNOWN:
            for *_, value in waiting.outputs:
                if value.reading is not None and value.reading.nonfinite:
                    value.origin = max(value.origin, verdict.origin)
        for slot, *_, value in waiting.inputs:
            if slot in verdict.entered and value is not None:
                value.origin = Origin.MADE
        if verdict.types or verdict.propagates:
            self._troubled = self._judged
        self._judged += 1
        if verdict.types:
            inputs = [
                Part(slot, _unchanged(waiting.held.get(slot)), _seen(value), dtype, shape, alias)
                for slot, alias, dtype, shape, value in waiting.inputs
            ]
            reporter.report(verdict, call, inputs, outputs, exact=False)
        else:
            reporter.note(verdict, call.site)

    def _origin(self, value: _Value, waiting: _Waiting) -> Origin:
        if value.origin is not Origin.UNKNOWN:
            return value.origin
        if value.single:
            return Origin.MEANT  # a number that the program wrote down
        # What functions do between modules is not seen: it may be the consequence.
        return Origin.MADE if waiting.begun >= 0 and self._troubled >= 0 else Origin.UNKNOWN


def _seen(value: _Value | None) -> Reading | None:
    return value.reading if value is not None else None


def _unchanged(held: tuple[torch.Tensor, int | None] | None) -> torch.Tensor | None:
    """A tensor that was held, if nobody has written to it since."""
    if held is None or held[1] is None:
        return None
    tensor, version = held
    return tensor if tensor._version == version else None
