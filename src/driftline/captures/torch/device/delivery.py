"""The queue of records from devices to the sink, in the order in which they were taken.

The values of a device tensor arrive later. Host tensors that were taken after it wait behind it,
because a sink numbers records in the order in which it gets them. Summaries that have arrived are
delivered by the program's own thread at the end of a call, which takes microseconds. Whole tensors
are delivered by a separate thread, which waits for pauses of the model as long as there is room.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from driftline.captures.recorder import reduced
from driftline.captures.torch.device.memory import PendingSummary, StagedTensor
from driftline.captures.torch.device.places import abandon
from driftline.captures.torch.device.summaries import Constant, Group, SummaryTransfer
from driftline.numerics.fields import Summary
from driftline.numerics.kernel import bytes_at
from driftline.runs.records import Kept, Record, TensorKey
from driftline.runs.sinks import Bytes

HandOver = Callable[[Record, "Bytes | None"], None]
_QUIET = 0.003
"""Seconds without a new tensor after which the model is assumed to pause."""
# A queue of this length is emptied even in the middle of a call.
_MANY = 4096


class Waiting(NamedTuple):
    """A tensor in the queue: the fields of its record, and its pending values.

    Attributes:
        what: A pending summary, a staged tensor, bytes, or None if the record is complete.
    """

    key: TensorKey
    dtype: str
    shape: tuple[int, ...]
    alias: str
    class_name: str
    device: str
    kept: Kept
    digest: str
    stride: int
    summary: Summary | None
    placement: str
    lost: str
    what: PendingSummary | StagedTensor | Bytes | None

    @classmethod
    def of(cls, record: Record, data: Bytes | None) -> Waiting:
        """An entry of the queue for a complete record and its bytes."""
        return cls(
            record.key,
            record.dtype,
            record.shape,
            record.alias,
            record.class_name,
            record.device,
            record.kept,
            record.digest,
            record.sample_stride,
            record.summary,
            record.placement,
            record.lost,
            data,
        )

    def recorded(self) -> Record:
        """Its record, without pending values."""
        (key, dtype, shape, alias, class_name, device, kept, digest, stride, summary) = self[:10]
        return Record(
            key,
            0,
            dtype,
            shape,
            alias,
            class_name,
            device,
            kept,
            digest,
            None,
            stride,
            summary,
            self.placement,
            self.lost,
        )


class Repeat(NamedTuple):
    """A whole tensor like an earlier one; its record is made when its bytes have arrived."""

    constant: Constant
    step: int
    visit: int
    staged: StagedTensor


def _carrier(first: Waiting | Repeat | Group) -> SummaryTransfer | StagedTensor | None:
    """The transfer that brings the values of an entry; None if no values are pending."""
    if isinstance(first, Group):
        return first.transfer
    if isinstance(first, Repeat):
        return first.staged
    what = first.what
    if isinstance(what, PendingSummary):
        return what.transfer
    return what if isinstance(what, StagedTensor) else None


class Delivery:
    """The queue, and the thread that empties it.

    Args:
        hand_over: Passes a record and its bytes to the sink; may be called in our own thread.
        hand_over_group: Passes a group of summaries to the sink; may be called in our own thread.
        guarded: Calls a function so that exceptions become events.
        pressed: Whether the memory for waiting tensors is running out.
        failed: Called once when a device can no longer be used.

    Attributes:
        failure: Why pending values did not arrive; empty if no device has failed.
        lost: Number of tensors whose values did not arrive.
    """

    def __init__(
        self,
        hand_over: HandOver,
        hand_over_group: Callable[[Group], None],
        guarded: Callable[..., None],
        pressed: Callable[[], bool],
        failed: Callable[[], None],
    ) -> None:
        self._hand_over = hand_over
        self._hand_over_group = hand_over_group
        self._guarded = guarded
        self._pressed = pressed
        self._failed = failed
        self._queue: deque[Waiting | Repeat | Group | Callable[[], None]] = deque()
        self._tail: Group | None = None  # the group at the end of the queue, which may still grow
        self._tail_lock = threading.Lock()
        self._changed = threading.Condition(threading.Lock())
        self._emptying = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._last = 0.0
        self.failure = ""
        self.lost = 0

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, waiting: Waiting | Repeat | Group | Callable[[], None]) -> None:
        """Queue a tensor, or a function to be called after all earlier entries are delivered."""
        with self._tail_lock:
            self._queue.append(waiting)
            # An entry behind a group ends the group.
            self._tail = waiting if isinstance(waiting, Group) else None
        if self._thread is not None:
            self._last = time.monotonic()
        elif len(self._queue) >= _MANY:
            self.deliver(wait=False)

    def note(
        self, transfer: SummaryTransfer, constant: Constant, step: int, visit: int, slot: int
    ) -> None:
        """Queue a tensor whose summary is in a slot of a transfer; arguments as in `Group.add`."""
        with self._tail_lock:
            group = self._tail
            if group is not None and group.transfer is transfer:
                group.add(constant, step, visit, slot)
                return
        group = Group(transfer)
        group.add(constant, step, visit, slot)
        self.add(group)

    def in_background(self, prepare: Callable[[], object]) -> None:
        """Deliver in a separate thread from now on.

        Args:
            prepare: Called once in the calling thread, before the new thread starts.
        """
        if self._thread is None and not self._closing:
            prepare()
            thread = threading.Thread(target=self._work, name="driftline-delivery", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the interpreter is ending; `finish` delivers instead
                return
            self._thread = thread

    def sent(self) -> None:
        """Deliver now, because copies were started, a call is over or room is needed."""
        if self._thread is None:
            self.deliver(wait=False)
            return
        # Makes the thread deliver without waiting for a pause.
        self._last = 0.0
        with self._changed:
            self._changed.notify_all()

    def deliver(self, *, wait: bool) -> None:
        """Deliver entries in order, as far as their values have arrived.

        Args:
            wait: Wait for values that were sent but have not arrived.
        """
        # Two threads must not deliver at once; without `wait`, the second has nothing to do.
        if not self._emptying.acquire(blocking=wait):
            return
        try:
            while self._queue and self._one(wait=wait):
                pass
        finally:
            self._emptying.release()

    def drain(self, seconds: float = 600.0) -> None:
        """Wait until everything that was sent is delivered, or the time is over."""
        if self._thread is None:
            self.deliver(wait=True)
            return
        until = time.monotonic() + seconds
        self._last = 0.0
        while self._queue and self._thread.is_alive() and time.monotonic() < until:
            with self._changed:
                self._changed.notify_all()
                self._changed.wait(0.005)
        # An entry leaves the queue before it is delivered, so the last delivery may still be
        # running.
        left = max(0.0, until - time.monotonic())
        if threading.current_thread() is not self._thread and self._emptying.acquire(timeout=left):
            self._emptying.release()

    def finish(self) -> None:
        """Deliver everything and end the thread."""
        self._closing = True
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            with self._changed:
                self._changed.notify_all()
            thread.join()
            self._thread = None
        self.deliver(wait=True)
        if self._queue:  # these could never be sent
            self.fail("the device did not take what was left to do")
            self.deliver(wait=True)

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._queue:
                    if self._closing:
                        return
                    self._changed.wait(0.05)
                    continue
            # As long as there is room, delivery waits for a pause of the model.
            if not self._closing and not self._pressed():
                quiet = time.monotonic() - self._last
                if quiet < _QUIET:
                    time.sleep(_QUIET - quiet)
                    continue
            with self._emptying:
                moved = bool(self._queue) and self._one(wait=True)
            with self._changed:
                if moved:
                    self._changed.notify_all()
                elif not self._closing:
                    self._changed.wait(0.01)  # the first entry was not sent yet
                else:
                    return

    def _one(self, *, wait: bool) -> bool:
        """Deliver the first entry; False if its values were not sent or have not arrived."""
        first = self._queue[0]
        if not isinstance(first, (Group, Repeat, Waiting)):
            self._queue.popleft()
            self._guarded("delivery", first)
            return True
        carrier = _carrier(first)
        arrived = carrier is None or self._arrived(carrier, wait=wait)
        # Nothing behind this entry is delivered before it.
        if not arrived and not self.failure:
            return False
        # Another thread of the program may queue a tensor of the same transfer after its arrival.
        # It must not be added to a group that has left the queue.
        with self._tail_lock:
            self._queue.popleft()
            if self._tail is first:
                self._tail = None
        if not arrived:
            self._guarded("delivery", self._lose, first)
        elif isinstance(first, Group):
            self._guarded("summaries", self._hand_over_group, first)
        elif isinstance(first, Repeat):
            record = first.constant.recorded(first.step, first.visit)
            self._guarded(record.key.site, self._deliver_bytes, record, first.staged)
        else:
            self._guarded(first.key.site, self._deliver, first)
        return True

    def _arrived(self, carrier: SummaryTransfer | StagedTensor, *, wait: bool) -> bool:
        if isinstance(carrier, SummaryTransfer) and carrier.there:
            return True
        mark = carrier.mark
        if mark is None or self.failure:
            return False
        try:
            if not mark.query():
                if not wait:
                    return False
                mark.synchronize()
        except RuntimeError as error:
            # While the program records a CUDA graph, queries are refused with such a message.
            if "captur" not in str(error):
                self.fail(str(error))
            return False
        if isinstance(carrier, SummaryTransfer):
            carrier.there = True
        return True

    def fail(self, why: str) -> None:
        """Note that the device failed for this process; all pending values are lost."""
        if self.failure:
            return
        lines = why.strip().splitlines() or ["the device failed"]
        self.failure = lines[0][:200]
        # Freeing the memory of a failed device would raise again.
        abandon(list(self._queue))
        self._failed()

    def _lose(self, first: Waiting | Repeat | Group) -> None:
        if isinstance(first, Group):
            records = list(first.described())
        elif isinstance(first, Repeat):
            records = [first.constant.recorded(first.step, first.visit)]
            first.staged.done()
        else:
            records = [first.recorded()]
            if isinstance(first.what, StagedTensor):
                first.what.done()
        for record in records:
            self.lost += 1
            self._hand_over(record._replace(lost=f"lost on its way: {self.failure}"), None)

    def _deliver(self, waiting: Waiting) -> None:
        record, what = waiting.recorded(), waiting.what
        if isinstance(what, StagedTensor):
            self._deliver_bytes(record, what)
        elif isinstance(what, PendingSummary):
            digest, summary = what.transfer.result(what.slot, what.count, what.width)
            if record.kept == "digest":
                summary = None
            self._hand_over(record._replace(digest=digest, summary=summary), None)
        else:
            self._hand_over(record, what)

    def _deliver_bytes(self, record: Record, staged: StagedTensor) -> None:
        try:
            if record.kept in ("summary", "digest"):
                # The device has no kernel for this tensor, so the host reduces its bytes.
                digest, summary = reduced(record.dtype, record.kept, staged.address, staged.size)
                self._hand_over(record._replace(digest=digest, summary=summary), None)
            else:
                self._hand_over(record, bytes_at(staged.address, staged.size))
        # The region is returned even if the sink fails.
        finally:
            staged.done()
