# pyright: reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
"""The error check for tensors on a device.

It waits for the device only at the end, and to read the parameters of a module whose output is not
finite.

Kernels write the smallest and the largest element of each tensor into batches on the device, and
for some operators also how many elements are zero or subnormal. A batch is copied to the host at
once. When its numbers have arrived, the calls that needed them are judged by the same rules as on
the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from driftline.captures.torch.device.places import HostPlace, Mark, Place, place_of
from driftline.captures.torch.errcheck.inspect import (
    UNREAD,
    ByStorage,
    Origin,
    Reading,
    from_extremes,
    is_mask,
    is_whole,
    pattern_of,
    plain,
    read,
    shape_of,
    tensors_in,
)
from driftline.captures.torch.errcheck.reporter import Call, Part, Reporter
from driftline.captures.torch.errcheck.rules import (
    LOGARITHMS,
    UNDERFLOWS,
    Input,
    Numbers,
    Verdict,
    judge,
    judge_module,
)
from driftline.captures.torch.operators.schema import WatchedOperator
from driftline.numerics.dtypes import Pattern

# A larger batch would delay the verdicts, and a smaller one would need a copy for every few calls.
BATCH_SIZE = 512
"""Number of readings that are copied to the host together."""
# Types for which every device has a kernel that finds the extremes.
_REDUCED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Count:
    """The number of elements of a tensor that are zero or subnormal.

    Attributes:
        elements: The number of all elements; a complex one counts as two.
        small: How many are zero or subnormal; -1 until the number has arrived.
    """

    __slots__ = ("elements", "small")

    def __init__(self, elements: int) -> None:
        self.elements = elements
        self.small = -1

    def arrived(self, count: float, _: float) -> None:
        self.small = int(count)

    def put_into(self, reading: Reading) -> Reading:
        """The reading of a tensor with this count added."""
        return reading._replace(elements=self.elements, zero=self.small, subnormal=0)


def count_small(tensor: torch.Tensor, pattern: Pattern, out: torch.Tensor) -> None:
    """Write the number of zero and subnormal elements to `out` on the same device.

    NaN is not counted.
    """
    small = tensor.abs() < pattern.value(pattern.normal)
    torch.sum(small, dim=tuple(range(small.dim())), dtype=torch.int64, out=out)


class Flag:
    """Whether a tensor is a mask or holds positions, by the rule of `inspect.is_mask`.

    Attributes:
        up: The answer; False until it has arrived.
    """

    __slots__ = ("up",)

    def __init__(self) -> None:
        self.up = False

    def arrived(self, answer: float, _: float) -> None:
        self.up = bool(answer)


class Tests(NamedTuple):
    """What is read of a call's inputs besides their extremes, by argument."""

    counts: dict[str, Count]
    masks: dict[str, Flag]


class Value:
    """One state of a tensor's storage, and its extremes once they have arrived from the device.

    Attributes:
        pattern: The number format.
        count: The number of real elements.
        origin: What is known about the origin of its elements that are not finite.
        before: The earlier state of a storage of which only a part was written; None once the
            extremes have arrived.
        asked: Whether the extremes were requested. False if the storage was only allocated, or
            given to a collective.
        reading: The extremes; None until they have arrived.
        single: Whether it is a single number that takes no part in autograd.
        call: The number of the call that wrote it; -1 if no watched call did.
        version: torch's count of changes to the tensor; None if torch keeps none.
        inner: The state of the same memory before it was read again: the result of an operation
            inside the module, or the contents before unwatched code changed them.
    """

    __slots__ = (
        *("asked", "before", "call", "count", "inner", "origin", "pattern", "reading", "single"),
        "version",
    )

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
        self.call = -1
        self.version: int | None = None
        self.inner: Value | None = None

    def arrived(self, low: float, high: float) -> None:
        earlier = self.before.reading if self.before is not None else None
        self.reading = from_extremes(self.pattern, self.count, low, high)
        if earlier is not None and earlier.nonfinite and not self.reading.nonfinite:
            self.reading = earlier  # only a part of it was written
        if self.before is not None:
            self.origin = max(self.origin, self.before.origin)
        self.before = None


class FigureBatch:
    """Memory on one device for numbers of one type. Kernels write into it directly."""

    def __init__(self, place: Place, dtype: torch.dtype) -> None:
        self.place = place
        # Allocated once: an allocation for each tensor would change how the program's memory is
        # laid out.
        self.rows = place.empty((BATCH_SIZE, 2), dtype)
        cells = self.rows.view(-1).unbind(0)
        self.places = list(zip(cells[0::2], cells[1::2], strict=True))
        self.values: list[Value | Count | Flag] = []

    @property
    def full(self) -> bool:
        return len(self.values) >= BATCH_SIZE

    def take(self, tensor: torch.Tensor, value: Value) -> None:
        torch.aminmax(tensor, out=self.places[len(self.values)])
        self.values.append(value)

    def take_count(self, tensor: torch.Tensor, pattern: Pattern, count: Count) -> None:
        count_small(tensor, pattern, self.places[len(self.values)][0])
        self.values.append(count)

    def take_mask(self, tensor: torch.Tensor, flag: Flag) -> None:
        self.places[len(self.values)][0].copy_(is_mask(tensor))
        self.values.append(flag)


class FigureTransfer:
    """Batches that are being copied to the host, and the calls that wait for them."""

    def __init__(
        self, batches: list[FigureBatch], values: list[Value | Count | Flag], calls: list[Any]
    ) -> None:
        self.batches = batches
        self.values = values
        self.calls = calls
        self.hosts: list[torch.Tensor] = []
        self.arrivals: list[Mark] = []
        for batch in batches:
            used = batch.rows[: len(batch.values)]
            # Only copies into pinned memory are asynchronous.
            room = batch.place.pinned(used.numel() * used.element_size())
            host = room.view(used.dtype).view(used.shape)
            self.arrivals.append(batch.place.copy_here([(host, used)]))
            self.hosts.append(host)

    def arrived(self, *, wait: bool) -> bool:
        for arrival in self.arrivals:
            if wait:
                arrival.synchronize()
            elif not arrival.query():
                return False
        return True

    def extremes(self) -> dict[int, list[float]]:
        figures: dict[int, list[float]] = {}
        for batch, host in zip(self.batches, self.hosts, strict=True):
            figures.update(zip(map(id, batch.values), host.double().tolist(), strict=True))
        return figures


def reals_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers as reals, in a type that the kernels of every device support."""
    shown = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return shown if shown.dtype in _REDUCED else shown.to(torch.float32)


# From a call to its verdict.


POLL_EVERY = 64
"""Number of calls between two checks whether a copy has arrived."""
MOST_HELD = 256 << 20
"""At most this many bytes of inputs are kept for calls whose readings have not arrived yet."""
_ORDINARY = (torch.Tensor, torch.nn.Parameter)


class WatchedCall(NamedTuple):
    """A call whose tensors are on a device, with what the rules need to know about it.

    Attributes:
        call: The call as the report describes it.
        name: The operator without its namespace; empty for a module.
        numbers: The numbers among the operator's arguments; may be None for a module.
        allowed: Whether the user allows this call to produce any value.
        begun: For a module, the number of calls when it began, so that later ones are inside it;
            -1 for an operator.
        module: The module itself. Its parameters are read when its output is not finite.
        reason: The reason to report with a finding, in place of the rule's own.
    """

    call: Call
    name: str
    numbers: Numbers | None
    allowed: bool
    begun: int = -1
    module: torch.nn.Module | None = None
    reason: str = ""


class _Waiting:
    """A call whose readings have not arrived yet."""

    __slots__ = ("about", "given", "held", "inputs", "made", "masks", "outputs", "size")

    def __init__(self, about: WatchedCall) -> None:
        self.about = about
        self.inputs: list[tuple[str, str, torch.dtype, tuple[int, ...], Value | None]] = []
        self.outputs: list[tuple[str, torch.dtype, tuple[int, ...], Value]] = []
        self.held: dict[str, tuple[torch.Tensor, int | None]] = {}
        self.given: dict[str, Count] = {}
        self.made: dict[str, Count] = {}
        self.masks: dict[str, Flag] = {}
        self.size = 0


class DeviceWatch:
    """Reads the tensors of calls on devices, and judges the calls when the readings arrive."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._values: ByStorage[Value] = ByStorage()
        self._gathering: list[Value | Count | Flag] = []
        self._counting = UNDERFLOWS if "underflow" in reporter.options.types else frozenset[str]()
        self._calls: list[_Waiting] = []
        self._batches: dict[tuple[torch.device, torch.dtype], FigureBatch] = {}
        self._spare: dict[tuple[torch.device, torch.dtype], list[FigureBatch]] = {}
        self._transfers: deque[FigureTransfer] = deque()
        self._places: dict[torch.device, Place] = {}
        self._held = 0
        self._since = 0
        self.added = 0
        self._judged = 0
        self._troubled = -1

    def unread(self, tensor: torch.Tensor, origin: Origin) -> None:
        """Memory was allocated or given to a collective: it must be read when a call uses it."""
        pattern = pattern_of(tensor.dtype)
        if pattern is not None:
            before = self._values.get(tensor)
            # Values that follow from a finding keep that origin, even if the memory is allocated
            # again.
            if before is None or before.origin is not Origin.MADE:
                self._values.put(tensor, Value(pattern, tensor.numel(), origin, asked=False))

    def add(
        self,
        watched: WatchedCall,
        inputs: Sequence[tuple[str, str, torch.Tensor]],
        outputs: Sequence[tuple[str, torch.Tensor]],
        before: Tests | None = None,
    ) -> None:
        """Request the readings of a call that has been made.

        Args:
            watched: The call.
            inputs: Name, position and tensor of each input.
            outputs: Slot and tensor of each output.
            before: What was requested, before the call, of the inputs that it overwrote.
        """
        name = watched.name
        with self._reporter.lock:
            waiting = _Waiting(watched)
            self.added += 1
            counted, masked = before or Tests({}, {})
            for slot, alias, tensor in inputs:
                value = self._input(tensor, watched.begun)
                shape = shape_of(tensor)
                waiting.inputs.append((slot, alias, tensor.dtype, shape, value))
                self._hold(waiting, slot, tensor)
                if name in self._counting:
                    count = counted.get(slot) or self.count(tensor)
                    if count is not None:
                        waiting.given[slot] = count
                if name in LOGARITHMS:
                    flag = masked.get(slot) or self.mask(tensor)
                    if flag is not None:
                        waiting.masks[slot] = flag
            for slot, tensor in outputs:
                value = self._output(tensor, watched.begun)
                if value is not None:
                    waiting.outputs.append((slot, tensor.dtype, shape_of(tensor), value))
                    count = self.count(tensor) if name in self._counting else None
                    if count is not None:
                        waiting.made[slot] = count
            self._calls.append(waiting)
            self._since += 1
            # Inputs that are kept for a report must not fill the device's memory.
            if len(self._gathering) >= BATCH_SIZE or self._held > MOST_HELD // 2:
                self._send()
            if self._since >= POLL_EVERY:
                self._since = 0
                self._collect(wait=False)

    def step_may_be_over(self) -> None:
        """A module call has ended: judge the calls whose readings have arrived."""
        if self._transfers:
            with self._reporter.lock:
                self._collect(wait=False)

    def finish(self) -> None:
        """Wait for all readings and judge all calls."""
        with self._reporter.lock:
            self._send()
            self._collect(wait=True)

    # --- readings

    def _input(self, tensor: torch.Tensor, begun: int) -> Value | None:
        value = plain(tensor)
        pattern = pattern_of(value.dtype) if value is not None else None
        if value is None or pattern is None or not value.numel():
            return None
        if value.is_cpu:  # an operator may combine a number on the host with device tensors
            state = Value(pattern, value.numel())
            state.reading = read(value, pattern)
            return state
        state = self._values.get(value)
        # Unwatched code may change tensors between modules. Operators are not checked for this,
        # because torch counts an operator's change only after the call has been observed.
        changed = state is not None and begun >= 0 and state.version != _version(value)
        # A state whose extremes were never requested must be read now.
        if state is None or not state.asked or changed:
            earlier, origin = state, state.origin if state is not None else Origin.UNKNOWN
            state = self._ask(value, pattern, origin, None)
            state.inner = earlier
            state.single = state.single and not tensor.requires_grad
            self._values.put(value, state)
        return state

    def _output(self, tensor: torch.Tensor, begun: int) -> Value | None:
        value = plain(tensor)
        pattern = pattern_of(value.dtype) if value is not None else None
        if value is None or pattern is None or not value.numel() or value.is_cpu:
            return None
        # A partial write leaves the rest of the storage as it was.
        earlier = self._values.get(value)
        before = None if is_whole(value) else earlier
        state = self._ask(value, pattern, Origin.UNKNOWN, before)
        state.call = self.added
        if begun >= 0 and earlier is not None and earlier.call > begun:
            state.inner = earlier
        if is_whole(value) or (before is not None and before.asked):
            self._values.put(value, state)
        # Otherwise the rest of the storage was never read, so it is read when a call uses it.
        return state

    def _ask(
        self, tensor: torch.Tensor, pattern: Pattern, origin: Origin, before: Value | None
    ) -> Value:
        shown = reals_of(tensor)
        batch = self._batch(shown.device, shown.dtype)
        value = Value(pattern, tensor.numel() * pattern.reals, origin, before)
        value.version = _version(tensor)
        batch.take(shown, value)
        self._gathering.append(value)
        if batch.full:
            self._send()
        return value

    def count(self, tensor: torch.Tensor) -> Count | None:
        """Request how many elements are zero or subnormal now; None if that cannot be read."""
        value = plain(tensor)
        pattern = pattern_of(value.dtype) if value is not None else None
        if value is None or pattern is None or not value.numel() or value.is_cpu:
            return None
        with self._reporter.lock:
            count = Count(value.numel() * pattern.reals)
            batch = self._batch(value.device, torch.int64)
            batch.take_count(reals_of(value), pattern, count)
            self._gathering.append(count)
            if batch.full:
                self._send()
        return count

    def mask(self, tensor: torch.Tensor) -> Flag | None:
        """Request whether the tensor is a mask now; None if that cannot be read."""
        value = plain(tensor)
        if value is None or pattern_of(value.dtype) is None or not value.numel() or value.is_cpu:
            return None
        with self._reporter.lock:
            flag = Flag()
            batch = self._batch(value.device, torch.int64)
            batch.take_mask(value, flag)
            self._gathering.append(flag)
            if batch.full:
                self._send()
        return flag

    def before(
        self, operator: WatchedOperator, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tests:
        """Request counts and masks of the inputs that a call is about to overwrite."""
        tests = Tests({}, {})
        counting, masking = operator.short in self._counting, operator.short in LOGARITHMS
        if not counting and not masking:
            return tests
        for index, name in operator.overwrites:
            value = args[index] if index < len(args) else kwargs.get(name)
            for slot, tensor in tensors_in(value, name):
                count = self.count(tensor) if counting else None
                if count is not None:
                    tests.counts[slot] = count
                flag = self.mask(tensor) if masking else None
                if flag is not None:
                    tests.masks[slot] = flag
        return tests

    def _batch(self, device: torch.device, dtype: torch.dtype) -> FigureBatch:
        key = (device, dtype)
        batch = self._batches.get(key)
        if batch is None:
            spare = self._spare.get(key)
            batch = spare.pop() if spare else FigureBatch(self._place(device), dtype)
            self._batches[key] = batch
        return batch

    def _place(self, device: torch.device) -> Place:
        place = self._places.get(device)
        if place is None:
            try:
                place = place_of(device)
            except (RuntimeError, NotImplementedError):  # a device without asynchronous copies
                place = HostPlace(device)
            self._places[device] = place
        return place

    # --- inputs for replay

    def _hold(self, waiting: _Waiting, slot: str, tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        # A finding without its tensors is still reported, but it cannot be replayed.
        if self._held + size > MOST_HELD or type(tensor) not in _ORDINARY:
            return
        version = _version(tensor)
        # Detached, so that the autograd graph is not kept alive longer than the program keeps it.
        waiting.held[slot] = tensor if tensor.grad_fn is None else tensor.detach(), version
        waiting.size += size
        self._held += size

    # --- copies to the host

    def _send(self) -> None:
        values, self._gathering = self._gathering, []
        calls, self._calls = self._calls, []
        batches, self._batches = list(self._batches.values()), {}
        if values or calls:
            self._transfers.append(FigureTransfer(batches, values, calls))

    def _collect(self, *, wait: bool) -> None:
        while self._transfers and self._transfers[0].arrived(wait=wait):
            transfer = self._transfers.popleft()
            extremes = transfer.extremes()
            # In order, because a state may depend on the one before it.
            for value in transfer.values:
                value.arrived(*extremes[id(value)])
            for batch in transfer.batches:
                batch.values = []
                key = (batch.rows.device, batch.rows.dtype)
                self._spare.setdefault(key, []).append(batch)
            for waiting in transfer.calls:
                self._judge(waiting)

    def _judge(self, waiting: _Waiting) -> None:
        reporter, about = self._reporter, waiting.about
        self._held -= waiting.size
        outputs = [
            Part(slot, None, value.reading, dtype, shape)
            for slot, dtype, shape, value in waiting.outputs
        ]
        readings = [
            made.put_into(output.reading)
            if (made := waiting.made.get(output.name))
            else output.reading
            for output in outputs
            if output.reading is not None
        ]
        self._note_headroom(about.call.site, readings)
        operands, parameters = self._judged_inputs(waiting), list[Part]()
        types = reporter.options.types
        if about.begun < 0:
            verdict = judge(
                about.name, operands, readings, about.numbers, types, allowed=about.allowed
            )
        else:
            if any(reading.nonfinite for reading in readings):
                parameters = _bad_parameters(about.module)
            operands += [Input(part.name, part.reading) for part in parameters if part.reading]
            verdict = judge_module(
                operands,
                list(zip(readings, map(_inner_origin, waiting.outputs), strict=True)),
                types,
                numbers=about.numbers,
                inside=self._troubled >= about.begun,
                earlier=self._troubled >= 0,
                allowed=about.allowed,
            )
        _learn_origins(waiting, verdict)
        if verdict.types or verdict.propagates:
            self._troubled = self._judged
        self._judged += 1
        if verdict.types:
            inputs = [
                Part(slot, _unchanged(waiting.held.get(slot)), _seen(value), dtype, shape, alias)
                for slot, alias, dtype, shape, value in waiting.inputs
            ]
            if about.reason:
                verdict = verdict._replace(reason=about.reason)
                outputs = [out for out in outputs if out.reading and out.reading.nonfinite]
            reporter.report(verdict, about.call, [*inputs, *parameters], outputs, exact=False)
        else:
            reporter.note(verdict, about.call.site)

    def _note_headroom(self, site: str, readings: Sequence[Reading]) -> None:
        """Remember the largest magnitude at a site; readings that are not finite are left out."""
        peaks = self._reporter.device_peaks
        for reading in readings:
            if not reading.nonfinite:
                key = (site, reading.pattern.name)
                if reading.peak > peaks.get(key, -1.0):
                    peaks[key] = reading.peak

    def _judged_inputs(self, waiting: _Waiting) -> list[Input]:
        """The inputs of a call in the form that the rules take."""
        judged = [
            Input(
                slot,
                count.put_into(value.reading)
                if (count := waiting.given.get(slot))
                else value.reading,
                self._reporter.origin(_origin(value), single=value.single),
                (flag := waiting.masks.get(slot)) is not None and flag.up,
            )
            for slot, _, _, _, value in waiting.inputs
            if value is not None and value.reading is not None
        ]
        if waiting.made:  # inputs without a reading, such as integers, may be masks
            judged += [Input(slot, UNREAD) for slot, *_, value in waiting.inputs if value is None]
        return judged


def _inner_origin(output: tuple[str, torch.dtype, tuple[int, ...], Value]) -> Origin:
    """The origin that operations inside the module gave to one of its outputs."""
    inner = output[3].inner
    return Origin.UNKNOWN if inner is None else inner.origin


def _origin(value: Value) -> Origin:
    """The known origin of an input. An unwatched change since then does not weaken it."""
    return value.origin if value.inner is None else max(value.origin, value.inner.origin)


def _bad_parameters(module: torch.nn.Module | None) -> list[Part]:
    """A module's own parameters that are not finite; they are judged like inputs.

    Reading them waits for the device, so it is done only for a module whose output is not finite.
    """
    parts: list[Part] = []
    for name, parameter in module.named_parameters(recurse=False) if module is not None else ():
        value = plain(parameter)
        pattern = pattern_of(value.dtype) if value is not None else None
        if value is not None and pattern is not None and value.numel():
            reading = read(value.detach().cpu(), pattern)
            if reading.nonfinite:
                parts.append(Part(name, parameter, reading, parameter.dtype, shape_of(parameter)))
    return parts


def _version(tensor: torch.Tensor) -> int | None:
    try:
        return tensor._version
    except RuntimeError:  # inference mode counts no versions
        return None


def _learn_origins(waiting: _Waiting, verdict: Verdict) -> None:
    """Pass a verdict's origin on to the outputs, which calls judged later may take as inputs."""
    if verdict.origin is not Origin.UNKNOWN:
        for *_, value in waiting.outputs:
            if value.reading is not None and value.reading.nonfinite:
                value.origin = max(value.origin, verdict.origin)
    for slot, *_, value in waiting.inputs:
        if slot in verdict.entered and value is not None:
            value.origin = Origin.MADE


def _seen(value: Value | None) -> Reading | None:
    return value.reading if value is not None else None


def _unchanged(held: tuple[torch.Tensor, int | None] | None) -> torch.Tensor | None:
    """A kept tensor, if it has not been changed since."""
    if held is None or held[1] is None:
        return None
    tensor, version = held
    return tensor if tensor._version == version else None
