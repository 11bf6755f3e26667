"""The queue from devices to the sink, in the order in which things happened.

What was taken from a device is not there yet; what came after it from the host has to queue behind
it, because a sink numbers what it is given. Summaries are handed over by the program's own thread
at the end of a call, those that have arrived: that takes microseconds. Whole tensors are handed
over by a thread of their own, which lets the model run first as long as there is room.
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
"""Seconds without a new tensor after which the model is taken to be doing something else."""
# A queue of this length is emptied even in the middle of a call.
_MANY = 4096


class Waiting(NamedTuple):
    """A tensor in the queue: its record's fields, and what is still to come.

    Attributes:
        what: A pending summary, a staged tensor, bytes, or None when the record is complete.
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
        """A record that is complete, and its bytes."""
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
        """Its record, as far as it is known."""
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
    """A whole tensor like one that came before: its record is made when its bytes are here."""

    constant: Constant
    step: int
    visit: int
    staged: StagedTensor


def _carrier(first: Waiting | Repeat | Group) -> SummaryTransfer | StagedTensor | None:
    """What brings the values of something in the queue; None if they are here."""
    if isinstance(first, Group):
        return first.transfer
    if isinstance(first, Repeat):
        return first.staged
    what = first.what
    if isinstance(what, PendingSummary):
        return what.transfer
    return what if isinstance(what, StagedTensor) else None


class Delivery:
    """The queue, and who empties it.

    Args:
        hand_over: Takes a record and its bytes; may be called from a thread of our own.
        hand_over_group: Takes summaries that have no records yet; likewise.
        guarded: Does something so that it cannot raise.
        pressed: Whether the room for what waits is running out.
        failed: Told once when a device can be used no more.

    Attributes:
        failure: Why what was on its way did not come; empty as long as it does.
        lost: How many tensors that were.
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
        self._tail: Group | None = None  # the group at the end of the queue: more may be added
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
        """Queue a tensor, or something to be done when all before it is handed over."""
        with self._tail_lock:
            self._queue.append(waiting)
            # Whatever comes behind a group ends it.
            self._tail = waiting if isinstance(waiting, Group) else None
        if self._thread is not None:
            self._last = time.monotonic()
        elif len(self._queue) >= _MANY:
            self.deliver(wait=False)

    def note(
        self, transfer: SummaryTransfer, constant: Constant, step: int, visit: int, slot: int
    ) -> None:
        """Queue a tensor whose summary a transfer brings; `Group.add` says what of it."""
        with self._tail_lock:
            group = self._tail
            if group is not None and group.transfer is transfer:
                group.add(constant, step, visit, slot)
                return
        group = Group(transfer)
        group.add(constant, step, visit, slot)
        self.add(group)

    def in_background(self, prepare: Callable[[], object]) -> None:
        """From now on a thread hands over; what it needs is prepared by the program's own."""
        if self._thread is None and not self._closing:
            prepare()
            thread = threading.Thread(target=self._work, name="driftline-delivery", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the interpreter is ending: `finish` does it
                return
            self._thread = thread

    def sent(self) -> None:
        """Copies have been started, a call is over, or somebody needs room: go on."""
        if self._thread is None:
            self.deliver(wait=False)
            return
        # No pause is waited for: the call is over.
        self._last = 0.0
        with self._changed:
            self._changed.notify_all()

    def deliver(self, *, wait: bool) -> None:
        """Hand over what has arrived; or everything that was sent, after waiting for it."""
        # Two threads must not hand over at once; whoever comes second has nothing to do.
        if not self._emptying.acquire(blocking=wait):
            return
        try:
            while self._queue and self._one(wait=wait):
                pass
        finally:
            self._emptying.release()

    def drain(self, seconds: float = 600.0) -> None:
        """Return when everything that was sent has been handed over."""
        if self._thread is None:
            self.deliver(wait=True)
            return
        until = time.monotonic() + seconds
        self._last = 0.0
        while self._queue and self._thread.is_alive() and time.monotonic() < until:
            with self._changed:
                self._changed.notify_all()
                self._changed.wait(0.005)
        # The last one leaves the queue before it is handed over: that may still be under way.
        left = max(0.0, until - time.monotonic())
        if threading.current_thread() is not self._thread and self._emptying.acquire(timeout=left):
            self._emptying.release()

    def finish(self) -> None:
        """Hand everything over and end the thread."""
        self._closing = True
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            with self._changed:
                self._changed.notify_all()
            thread.join()
            self._thread = None
        self.deliver(wait=True)
        if self._queue:  # they were never sent: nobody could
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
            # As long as there is room, writing waits for a pause of the model.
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
                    self._changed.wait(0.01)  # the first one was not sent yet
                else:
                    return

    def _one(self, *, wait: bool) -> bool:
        """Hand the first one over; False if it has not arrived, or was not even sent."""
        first = self._queue[0]
        if not isinstance(first, (Group, Repeat, Waiting)):
            self._queue.popleft()
            self._guarded("delivery", first)
            return True
        carrier = _carrier(first)
        arrived = carrier is None or self._arrived(carrier, wait=wait)
        # Order is kept: nothing behind it is handed over before it.
        if not arrived and not self.failure:
            return False
        # What a transfer brings can be asked for again when it has arrived, by another thread of
        # the program: nothing may be added to a group that has left the queue.
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
            if "captur" not in str(error):  # the program records a graph: nobody may ask
                self.fail(str(error))
            return False
        if isinstance(carrier, SummaryTransfer):
            carrier.there = True
        return True

    def fail(self, why: str) -> None:
        """The device is gone for this process, and with it what was on its way."""
        if self.failure:
            return
        lines = why.strip().splitlines() or ["the device failed"]
        self.failure = lines[0][:200]
        # Freeing memory of a failed device would raise again.
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
                # No kernel of the device could: the host reduces them as it does its own.
                digest, summary = reduced(record.dtype, record.kept, staged.address, staged.size)
                self._hand_over(record._replace(digest=digest, summary=summary), None)
            else:
                self._hand_over(record, bytes_at(staged.address, staged.size))
        # The region is given back even when the sink fails.
        finally:
            staged.done()
