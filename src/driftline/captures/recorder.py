"""The recorder: snapshot, reduce and record selected tensors; write the events of a run.

To read a tensor, an adapter returns a `Snapshot`, a `Refusal` or a `Pending`. The recorder reduces
the tensor, builds its record and passes it to the sink, directly or through a device backend. Only
the adapter knows how a framework's tensor is read.
"""

from __future__ import annotations

import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

from driftline.captures.ladder import StepBudget
from driftline.captures.options import Reduction
from driftline.captures.selection import Selection
from driftline.numerics import kernel
from driftline.numerics.dtypes import DTYPES
from driftline.numerics.fields import Summary, repeat_summary
from driftline.numerics.kernel import bytes_at
from driftline.runs.records import Kept, Moment, Phase, Port, Record, TensorKey
from driftline.runs.sinks import Begins, TakesGroups
from driftline.units import size_text

if TYPE_CHECKING:
    from driftline.captures.calls import Frame
    from driftline.runs.sinks import Bytes, Group, Sink


ByteArray = npt.NDArray[np.uint8]


class Snapshot(NamedTuple):
    """The description of one tensor and, if its values were requested, its bytes in C order.

    Attributes:
        address: Memory address of its bytes, possibly in the program's live memory.
        length: Number of bytes; negative if only the description was requested.
        elements: Number of logical elements.
        placement: For a shard: how the full tensor is distributed over ranks.
        owner: Object that keeps the memory alive.
        repeats: Number of repetitions, for a view that repeats its elements and is too large to be
            written out. `address`, `length` and `elements` describe one repetition.
    """

    dtype: str
    shape: tuple[int, ...]
    address: int
    length: int
    device: str
    device_index: int | None
    elements: int
    placement: str
    owner: Any
    repeats: int = 1

    @property
    def data(self) -> ByteArray | None:
        """The flat bytes, not copied; None if only the description was requested."""
        return bytes_at(self.address, self.length) if self.length >= 0 else None


class Refusal(NamedTuple):
    """Why a tensor cannot be stored, as the end of the sentence "not stored: ..."."""

    reason: str


class Pending(NamedTuple):
    """A tensor that has no values yet: the result of a collective that may still be running.

    Attributes:
        when_there: Takes a function and calls it with the complete tensor, now or later.
        placement: As in a snapshot.
    """

    when_there: Callable[[Callable[[Any], None]], None]
    placement: str


def every_nth(shot: Snapshot, stride: int) -> ByteArray:
    """The bytes of elements 0, stride, 2*stride, ... of a snapshot."""
    data = shot.data
    assert data is not None
    width = DTYPES[shot.dtype].bits
    if stride == 1:
        return data
    if width < 8:  # a byte holds two elements, so it is unpacked before elements are chosen
        codes = np.stack((data & 0x0F, data >> 4), axis=1).reshape(-1)[::stride]
        padded = np.append(codes, np.uint8(0)) if codes.size % 2 else codes
        return (padded[0::2] | (padded[1::2] << 4)).astype(np.uint8)
    size = width // 8
    return np.ascontiguousarray(data.reshape(-1, size)[::stride]).reshape(-1)


def reduced(dtype: str, kept: Kept, address: int, length: int) -> tuple[str, Summary | None]:
    """Digest and, if `kept` is "summary", summary of a tensor's bytes in C order."""
    digest = kernel.digest_at(address, length)
    if kept != "summary":
        return digest, None
    element = DTYPES[dtype]
    return digest, kernel.summarize_at(address, length, element, count=length * 8 // element.bits)


class TensorAddress(NamedTuple):
    """The place of a tensor in a run: everything that is known before the tensor is read.

    Attributes:
        step: The step to which its call belongs.
        visit: Index of the call among the site's calls in that step.
        phase: forward, backward or recompute; empty for the port's default.
        moment: before or after the call; empty for the port's default.
        alias: Another name of the slot.
        class_name: Class of the module, or name of the operator.
    """

    site: str
    port: str
    slot: str
    step: int
    visit: int = 0
    phase: str = ""
    moment: str = ""
    alias: str = ""
    class_name: str = ""

    def key(self, rank: int) -> TensorKey:
        """The key of its record; the sink fills in the number of the process."""
        return TensorKey(
            self.site,
            cast(Port, self.port),
            self.slot,
            self.step,
            self.visit,
            rank,
            0,
            cast(Phase, self.phase),
            cast(Moment, self.moment),
        )


Look = Callable[..., Snapshot | Refusal | Pending]
"""Reads one tensor; with `values=False` it only describes the tensor."""

Tensors = Sequence[tuple[str, str, Any]]
"""Tensors of one port: (slot, alias, tensor)."""

# Estimated bytes of an index line with a summary, and without one.
_SUMMARY_BYTES, _RECORD_BYTES = 1200, 300
# Limited, because a long program has millions of digests; only recent tensors occur again.
_REMEMBERED_SUMMARIES = 512


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")


class DeviceBackend(Protocol):
    """Takes tensors that are not in host memory, and delivers their records later, in order.

    Attributes:
        under_way: Whether anything taken so far has not been delivered yet.
        degraded: Whether only summaries are kept from now on, for lack of memory.
    """

    @property
    def under_way(self) -> bool: ...

    @property
    def degraded(self) -> bool: ...

    def takes(self, tensor: Any) -> bool:
        """Whether this backend is responsible for a tensor."""
        ...

    def take(self, tensor: Any, address: TensorAddress, placement: str) -> bool:
        """Take a tensor; return False if the host has to copy it instead."""
        ...

    def take_again(
        self, frame: Frame, port: str, slot: str, alias: str, tensor: Any, moment: str
    ) -> bool:
        """Take a tensor of the same kind as the previous one from this place; False if it differs.

        The program's dispatch and function modes, if there are any, notice nothing of it.
        """
        ...

    def queue(self, record: Record, data: Bytes | None) -> None:
        """Queue a record, to be delivered after all earlier ones; its bytes are copied."""
        ...

    def queue_act(self, act: Callable[[], None]) -> None:
        """Queue a function, to be called after all earlier records are delivered."""
        ...

    def send(self) -> None:
        """Deliver what has arrived, without waiting."""
        ...

    def drain(self) -> None:
        """Wait for everything taken so far and deliver it."""
        ...

    def finish(self) -> None:
        """Deliver everything, end the capture on devices, and report what was left out."""
        ...


class Recorder:
    """Reduces tensors and writes them; see `CaptureSession` for the arguments.

    Attributes:
        lock: Held around everything that writes.
        tensors: Number of tensors passed to the sink.
        weight_bytes: Bytes that the sink wrote for parameters; a second step does not write them
            again.
        broken: Whether the sink failed to take even an event; nothing more is tried then.
        budget: Disk budget of the steps after the first; None if the user named steps.
        device_backend: Takes tensors of devices; the framework's session sets it.
        prepare: Called by the program's thread before another thread makes the sink, so that a fork
            never happens while that other thread is importing modules.
    """

    def __init__(
        self,
        sink: Sink | Callable[[], Sink],
        selection: Selection,
        reduction: Reduction,
        rank: int,
        look: Look,
    ) -> None:
        self._look = look
        self._make_sink = sink if callable(sink) else None
        self.sink: Sink | None = None if callable(sink) else sink
        self.lock = threading.RLock()
        self.tensors = self.weight_bytes = 0
        self.budget: StepBudget | None = None
        self.broken = False
        self.device_backend: DeviceBackend | None = None
        self.prepare: Callable[[], object] = lambda: None
        # Separate from `lock`: a device's thread may have to open the sink while `lock` is held.
        self._sink_lock = threading.RLock()
        self._selection = selection
        self._reduction = reduction
        self._rank = rank
        self._seen_events: set[tuple[str, str]] = set()
        self._summaries: OrderedDict[tuple[str, str, int], Summary] = OrderedDict()

    def after_fork(self) -> None:
        # Locks of the parent may be held by threads that do not exist in the child.
        self.lock = threading.RLock()
        self._sink_lock = threading.RLock()
        self.tensors = self.weight_bytes = 0

    def event(self, kind: str, message: str, **details: Any) -> None:
        """Write an event for the reader of the run."""
        self._open_sink().event(kind, message, **details)

    def event_once(self, kind: str, message: str, **details: Any) -> None:
        """Write an event, but only once for each kind, site and message."""
        key = (kind, f"{details.get('site', '')}\0{message}")
        if key not in self._seen_events:
            self._seen_events.add(key)
            self.event(kind, message, **details)

    def has_event(self, kind: str) -> bool:
        return any(noted == kind for noted, _ in self._seen_events)

    def guarded(self, where: str, act: Callable[..., Any], *args: Any) -> None:
        """Call a function of the capture; an exception becomes an event and is not raised."""
        try:
            act(*args)
        except Exception as error:
            self._fault(where, error)

    def _fault(self, where: str, error: Exception) -> None:
        """Report an exception of the capture's own code; called while it is being handled."""
        try:
            self.event_once(
                "capture-fault",
                f"capture failed: {type(error).__name__}: {_first_line(error)}",
                site=where,
                trace=traceback.format_exc(limit=-4),
            )
        except Exception:  # the sink itself is broken, so nothing can be reported
            self.broken = True

    def take_all(self, frame: Frame, port: str, tensors: Tensors, moment: str) -> None:
        """`take`, guarded, for the tensors of one port of a module call."""
        site, class_name, visit = frame.site, frame.class_name, frame.visit
        phase, step, take = frame.phase, frame.step, self.take
        # This loop runs for every tensor of every call, so it handles exceptions itself instead of
        # calling `guarded` for each tensor.
        for slot, alias, tensor in tensors:
            try:
                take(
                    TensorAddress(site, port, slot, step, visit, phase, moment, alias, class_name),
                    tensor,
                )
            except Exception as error:
                self._fault(site, error)

    def take(self, address: TensorAddress, tensor: Any, placement: str = "") -> None:
        """Reduce a selected tensor and pass it to the sink. It may raise, so call it guarded."""
        if self.broken:
            return
        kept = self._reduction.kept_in(address.step)
        device_backend = self.device_backend
        # A description needs no values, so it never goes through the device.
        if device_backend is not None and kept != "describe" and device_backend.takes(tensor):
            if device_backend.take(tensor, address, placement):
                return
            # Out of memory: a summary needs no copy of the tensor.
            if device_backend.degraded and kept in ("full", "sample"):
                kept = "summary"
        shot = self._look(tensor, values=kept != "describe")
        # The result of an asynchronous collective is recorded when it arrives, under this same key.
        if isinstance(shot, Pending):
            placed = shot.placement
            shot.when_there(lambda t: self.guarded(address.site, self.take, address, t, placed))
            return
        if isinstance(shot, Refusal):
            self.event_once(
                "refused",
                f"not stored: {shot.reason}",
                site=address.site,
                port=address.port,
                slot=address.slot,
            )
            return
        # The device of the tensor is known only from its snapshot.
        if not self._selection.takes_device(shot.device_index):
            return
        key = address.key(self._rank)
        if placement:
            shot = shot._replace(placement=placement)
        with self.lock:
            self._put(key, shot, kept, address.alias, address.class_name)

    def _put(self, key: TensorKey, shot: Snapshot, kept: Kept, alias: str, class_name: str) -> None:
        digest, summary, data, stride = "", None, None, 1
        if shot.repeats > 1:
            kept, digest, summary = self._reduce_expanded(key.site, shot, kept)
        elif kept == "full":
            data = shot.data
        elif kept != "describe":
            digest = kernel.digest_at(shot.address, shot.length)
            if kept == "summary":
                # The bytes are still in the processor's cache.
                summary = self._summary(digest, shot)
            elif kept == "sample":
                stride = self._reduction.stride(shot.elements)
                data = every_nth(shot, stride)
        record = Record(
            key,
            0,
            shot.dtype,
            shot.shape,
            alias,
            class_name,
            shot.device,
            kept,
            digest,
            None,
            stride,
            summary,
            shot.placement,
        )
        # Records keep their order: a host tensor waits for the device tensors taken before it.
        if self.device_backend is not None and self.device_backend.under_way:
            self.device_backend.queue(record, data)
        else:
            self.hand_over(record, data)

    def hand_over(self, record: Record, data: Bytes | None) -> None:
        """Pass a record to the sink; any thread may call this."""
        sink = self.sink or self._open_sink()
        # Parameters are stored once per run, so the size estimate counts them separately.
        if record.key.port == "param":
            before = sink.bytes_written
            sink.put(record, data)
            self.weight_bytes += sink.bytes_written - before
        else:
            sink.put(record, data)
        self.tensors += 1
        if self.budget is not None and record.key.step:
            size = _SUMMARY_BYTES if record.summary is not None else _RECORD_BYTES
            self.budget.charge(size if data is None else size + len(data))

    def hand_over_group(self, group: Group) -> None:
        """Pass several records without bytes to the sink; none of them may be a parameter's."""
        sink = self.sink or self._open_sink()
        if isinstance(sink, TakesGroups):
            sink.put_group(group)
        else:
            for record in group.records():
                sink.put(record, None)
        self.tensors += len(group)
        if self.budget is not None:
            self.budget.charge(len(group) * _SUMMARY_BYTES)

    def in_turn(self, act: Callable[[], None]) -> None:
        """Call a function after everything taken so far has been passed to the sink."""
        if self.device_backend is not None and self.device_backend.under_way:
            self.device_backend.queue_act(act)
        else:
            act()

    def call_done(self) -> None:
        """Pass on device tensors that have arrived; called when a model's call is over."""
        if self.device_backend is not None:
            self.device_backend.send()

    def drain(self) -> None:
        """Wait until everything taken so far has been passed to the sink."""
        if self.device_backend is not None:
            self.device_backend.drain()

    def finish(self) -> None:
        """Pass everything to the sink and end the capture on devices."""
        if self.device_backend is not None:
            self.device_backend.finish()

    def _reduce_expanded(
        self, site: str, shot: Snapshot, kept: Kept
    ) -> tuple[Kept, str, Summary | None]:
        """Reduction, digest and summary of a repeating view that is too large to be written out."""
        part = kernel.digest_at(shot.address, shot.length)
        # The prefix keeps it from equalling the digest of a tensor that has these bytes once.
        digest = f"repeated-{shot.repeats}-{part}"
        if kept in ("describe", "digest"):
            return kept, digest, None
        self.event_once(
            "expanded",
            f"{site} has a view that repeats {size_text(shot.length)} {shot.repeats} times; it is "
            "kept as a summary, because to write it out would fill the memory",
            site=site,
        )
        return "summary", digest, repeat_summary(self._summary(part, shot), shot.repeats)

    def _summary(self, digest: str, shot: Snapshot) -> Summary:
        """The summary of a snapshot, from a cache if the same bytes were summarised recently.

        Cache hits are common, because one module's output is the next one's input.
        """
        key = (digest, shot.dtype, shot.elements)
        summary = self._summaries.get(key)
        if summary is None:
            summary = kernel.summarize_at(
                shot.address, shot.length, DTYPES[shot.dtype], count=shot.elements
            )
            self._summaries[key] = summary
            # The oldest summary is removed, so that the cache stays small in long programs.
            if len(self._summaries) > _REMEMBERED_SUMMARIES:
                self._summaries.popitem(last=False)
        return summary

    def begin(self) -> None:
        """Make the sink, and let it register this process before there is a tensor."""
        sink = self._open_sink()
        if isinstance(sink, Begins):
            sink.begin()

    def _open_sink(self) -> Sink:
        with self._sink_lock:
            if self.sink is None:
                assert self._make_sink is not None
                self.sink = self._make_sink()
            return self.sink
