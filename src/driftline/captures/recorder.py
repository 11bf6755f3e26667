"""From a wanted tensor to the sink: snapshot, reduction, record; and the events of a run.

`Snapshot`, `Refusal` and `Pending` are what an adapter answers when asked to read a tensor. The
recorder reduces the tensor, builds its record and hands it over, directly or through a device
backend. How a framework's tensor is read is the adapter's own business.
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
    """One tensor's description and, unless only described, its bytes in C order.

    Attributes:
        address: Where its bytes are, possibly in live memory.
        length: How many bytes; negative when only the description was wanted.
        elements: How many, logically.
        placement: For a shard: how the whole is spread over its ranks.
        owner: Keeps the memory alive.
        repeats: For a view that repeats its elements, too large to be written out: how often.
            `address`, `length` and `elements` are those of one repetition.
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
        """The flat bytes, not copied; None when only the description was wanted."""
        return bytes_at(self.address, self.length) if self.length >= 0 else None


class Refusal(NamedTuple):
    """Why a tensor cannot be stored, as the end of the sentence "not stored: ..."."""

    reason: str


class Pending(NamedTuple):
    """A tensor that has no values yet: the result of a collective that may still be under way.

    Attributes:
        when_there: Called with a function, hands it the tensor with its values, now or later.
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
    if width < 8:  # two elements a byte: a sample of bytes is a sample of pairs, so unpack first
        codes = np.stack((data & 0x0F, data >> 4), axis=1).reshape(-1)[::stride]
        padded = np.append(codes, np.uint8(0)) if codes.size % 2 else codes
        return (padded[0::2] | (padded[1::2] << 4)).astype(np.uint8)
    size = width // 8
    return np.ascontiguousarray(data.reshape(-1, size)[::stride]).reshape(-1)


def reduced(dtype: str, kept: Kept, address: int, length: int) -> tuple[str, Summary | None]:
    """Digest and, where it is kept, summary of a tensor's bytes in C order."""
    digest = kernel.digest_at(address, length)
    if kept != "summary":
        return digest, None
    element = DTYPES[dtype]
    return digest, kernel.summarize_at(address, length, element, count=length * 8 // element.bits)


class TensorAddress(NamedTuple):
    """Where in a run a tensor belongs: everything that is known of it before it is read.

    Attributes:
        step: The step its call belongs to.
        visit: Which call of the site in that step.
        phase: forward, backward or recompute; empty for the usual one of the port.
        moment: before or after the call; empty for the usual one of the port.
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
        """The key of its record; the sink tells processes of one rank apart."""
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
"""Looks at one tensor; `values=False` describes it only."""

Tensors = Sequence[tuple[str, str, Any]]
"""Tensors of one port: (slot, alias, tensor)."""

# Bytes of a line of the index with a summary, and without.
_SUMMARY_BYTES, _RECORD_BYTES = 1200, 300
# Bounded, because a long program sees millions of digests; only recent tensors come again.
_REMEMBERED_SUMMARIES = 512


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")


class DeviceBackend(Protocol):
    """Takes in what is not in host memory, and hands it over later, in its turn.

    Attributes:
        under_way: Whether anything taken before now has not been handed over.
        degraded: For lack of memory only summaries are kept from now on.
    """

    @property
    def under_way(self) -> bool: ...

    @property
    def degraded(self) -> bool: ...

    def takes(self, tensor: Any) -> bool:
        """Whether a tensor is its business."""
        ...

    def take(self, tensor: Any, address: TensorAddress, placement: str) -> bool:
        """Take it in; False when it has to go over the host."""
        ...

    def take_again(
        self, frame: Frame, port: str, slot: str, alias: str, tensor: Any, moment: str
    ) -> bool:
        """Take a tensor like the last one of its place; False if it is not alike.

        Runs nothing that the program's modes could see, if there are any.
        """
        ...

    def queue(self, record: Record, data: Bytes | None) -> None:
        """Hand a record over when all before it is; its bytes are copied."""
        ...

    def queue_act(self, act: Callable[[], None]) -> None:
        """Do something then."""
        ...

    def send(self) -> None:
        """Hand over what has come; nothing is waited for."""
        ...

    def drain(self) -> None:
        """Hand over everything."""
        ...

    def finish(self) -> None:
        """The same for good, and say what was left out."""
        ...


class Recorder:
    """Reduces tensors and writes them; see `CaptureSession` for the arguments.

    Attributes:
        lock: Held around everything that writes.
        tensors: How many were handed to the sink.
        weight_bytes: What parameters took of the sink; a second step finds them there.
        broken: The sink could not even take an event; nothing more is tried.
        budget: How much disk steps after the first may take; None where steps were named.
        device_backend: Takes tensors of devices; the framework's session sets it.
        prepare: Called by the program's thread before another one makes the sink: a fork must not
            find it in the middle of an import.
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
        """Note something for the reader of the run."""
        self._open_sink().event(kind, message, **details)

    def event_once(self, kind: str, message: str, **details: Any) -> None:
        """The same, but only the first time for this kind and site."""
        key = (kind, f"{details.get('site', '')}\0{message}")
        if key not in self._seen_events:
            self._seen_events.add(key)
            self.event(kind, message, **details)

    def has_event(self, kind: str) -> bool:
        return any(noted == kind for noted, _ in self._seen_events)

    def guarded(self, where: str, act: Callable[..., Any], *args: Any) -> None:
        """Do something for the capture's sake; what goes wrong is an event, not an exception."""
        try:
            act(*args)
        except Exception as error:
            self._fault(where, error)

    def _fault(self, where: str, error: Exception) -> None:
        """Note an exception of the capture's own while it is being handled."""
        try:
            self.event_once(
                "capture-fault",
                f"capture failed: {type(error).__name__}: {_first_line(error)}",
                site=where,
                trace=traceback.format_exc(limit=-4),
            )
        except Exception:  # the sink itself is broken; there is nobody left to tell
            self.broken = True

    def take_all(self, frame: Frame, port: str, tensors: Tensors, moment: str) -> None:
        """`take`, guarded, for the tensors of one port of a module call."""
        site, class_name, visit = frame.site, frame.class_name, frame.visit
        phase, step, take = frame.phase, frame.step, self.take
        # The loop is inlined rather than guarded per tensor: it runs for every tensor of
        # every call.
        for slot, alias, tensor in tensors:
            try:
                take(
                    TensorAddress(site, port, slot, step, visit, phase, moment, alias, class_name),
                    tensor,
                )
            except Exception as error:
                self._fault(site, error)

    def take(self, address: TensorAddress, tensor: Any, placement: str = "") -> None:
        """Reduce a wanted tensor and hand it to the sink. May raise: call it guarded."""
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
        # The result of an asynchronous collective is recorded when it arrives, under this
        # same key.
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
        # Only the snapshot knows on which device the tensor lives.
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
                summary = self._summary(digest, shot)  # at once: the bytes are still in the cache
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
        # Records keep their order: a host tensor waits behind the device tensors taken
        # before it.
        if self.device_backend is not None and self.device_backend.under_way:
            self.device_backend.queue(record, data)
        else:
            self.hand_over(record, data)

    def hand_over(self, record: Record, data: Bytes | None) -> None:
        """Give a record to the sink: the last thing that happens to it here, in any thread."""
        sink = self.sink or self._open_sink()
        # Parameters are stored once per run; the size estimate has to count them
        # separately.
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
        """The same for several records without bytes, none of them of a parameter."""
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
        """Do something when everything taken before now has been handed over."""
        if self.device_backend is not None and self.device_backend.under_way:
            self.device_backend.queue_act(act)
        else:
            act()

    def call_done(self) -> None:
        """A model has run: what has come of what it left elsewhere is handed over."""
        if self.device_backend is not None:
            self.device_backend.send()

    def drain(self) -> None:
        """Return when everything taken has been handed over."""
        if self.device_backend is not None:
            self.device_backend.drain()

    def finish(self) -> None:
        """The same, for good."""
        if self.device_backend is not None:
            self.device_backend.finish()

    def _reduce_expanded(
        self, site: str, shot: Snapshot, kept: Kept
    ) -> tuple[Kept, str, Summary | None]:
        """What is kept of a view that repeats its elements and is too large to be written out."""
        part = kernel.digest_at(shot.address, shot.length)
        # A kind of its own: it must never equal the digest of a tensor that has these bytes once.
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
        """One module's output is the next one's input: what was summarised is not read again."""
        key = (digest, shot.dtype, shot.elements)
        summary = self._summaries.get(key)
        if summary is None:
            summary = kernel.summarize_at(
                shot.address, shot.length, DTYPES[shot.dtype], count=shot.elements
            )
            self._summaries[key] = summary
            # The oldest summary goes first; the cache stays bounded in long programs.
            if len(self._summaries) > _REMEMBERED_SUMMARIES:
                self._summaries.popitem(last=False)
        return summary

    def begin(self) -> None:
        """Make the sink, and let it leave a trace of this process before there is a tensor."""
        sink = self._open_sink()
        if isinstance(sink, Begins):
            sink.begin()

    def _open_sink(self) -> Sink:
        with self._sink_lock:
            if self.sink is None:
                assert self._make_sink is not None
                self.sink = self._make_sink()
            return self.sink
