# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
"""The device backend of a capture: tensors are taken on the device, and recorded when they arrive.

`TorchDeviceBackend` implements `captures.recorder.DeviceBackend`. A place (site, port and slot)
mostly has the same kind of tensor in every call. The previous one is remembered, and a tensor of
the same kind is taken without being described again. This keeps the cost per tensor in
microseconds.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from driftline.captures.calls import Visits
from driftline.captures.options import Budgets, Reduction
from driftline.captures.recorder import Refusal, Snapshot, TensorAddress
from driftline.captures.selection import Selection
from driftline.captures.torch import tensors as snapshots
from driftline.captures.torch.device.delivery import Delivery, Repeat, Waiting
from driftline.captures.torch.device.memory import (
    DeviceMemory,
    PendingSummary,
    StagedTensor,
    Transfers,
)
from driftline.captures.torch.device.places import abandon, is_accelerator
from driftline.captures.torch.device.recent import RecentTensors
from driftline.captures.torch.device.summaries import (
    Constant,
    Reading,
    SummaryBatch,
    compile_ahead,
    kind_of,
)
from driftline.captures.torch.distributed import placement_of_plain
from driftline.numerics.gpu import launcher
from driftline.runs.records import Kept, Record, TensorKey

if TYPE_CHECKING:
    from driftline.captures.calls import Frame
    from driftline.captures.recorder import Recorder, Tensors
    from driftline.runs.sinks import Bytes


class KnownTensor(NamedTuple):
    """The kind of the previous tensor of a place, and how it was taken.

    Attributes:
        reading: The prepared launch of the kernel; None if the tensor's bytes are kept.
    """

    dtype: torch.dtype
    shape: torch.Size
    index: int  # pyright: ignore[reportIncompatibleMethodOverride] - nobody looks things up in it
    stream: int
    alias: str
    constant: Constant
    batch: SummaryBatch
    reading: Reading | None
    transfers: Transfers
    size: int
    kept: str
    place: int


class Last:
    """The only output of a module's previous call, and its only argument, for the fast path.

    Attributes:
        visits: Counts the module's calls.
        argument: The only argument; None if inputs are not captured, or there are several.
    """

    __slots__ = ("argument", "changes", "key", "known", "visits")

    def __init__(self, key: tuple[str, ...], visits: Visits, argument: Last | None = None) -> None:
        self.key = key
        self.visits = visits
        self.argument = argument
        self.known: KnownTensor | None = None
        self.changes = -1


# Limits the memory used by programs in which places never occur again.
_MOST_KNOWN = 100_000
_MOST_VISITS = 64
"""Number of a place's calls in a step that are remembered one by one if their tensors differ.

A loop of thousands of calls would otherwise fill the memory with places that no later step has.
"""
_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0)


class TorchDeviceBackend:
    """The device side of a recorder; see `recorder.DeviceBackend` for the contract of its methods.

    Attributes:
        budgets: Memory that may be used; set before the first tensor.
        pretends: For tests: CPU tensors are treated like those of a device.
        device_memory: Summarises and copies tensors; None before the first device tensor.
        known_tensors: The previous tensor of each place for which there is a fast path.
    """

    def __init__(
        self,
        recorder: Recorder,
        selection: Selection,
        reduction: Reduction,
        rank: int,
    ) -> None:
        self._recorder = recorder
        self._selection = selection
        self._reduction = reduction
        self._rank = rank
        self.budgets = Budgets()
        self.pretends = False
        self._over = threading.Event()
        self._compiling: threading.Thread | None = None
        self.forget()

    def begin(self) -> None:
        """Begin the capture: a thread compiles kernels while the program loads its model."""
        if torch.version.cuda is None or launcher.interpreted():
            return
        self._over = threading.Event()
        self._compiling = threading.Thread(
            target=compile_ahead, args=(self._over,), name="driftline-kernels", daemon=True
        )
        with contextlib.suppress(RuntimeError):  # the interpreter is ending
            self._compiling.start()
            atexit.register(self._stop_compiling)

    def end(self) -> None:
        """End the capture: no more kernels are compiled."""
        self._over.set()
        # The program continues at once; a kernel that is being compiled is waited for at exit.
        if self._compiling is not None and not self._compiling.is_alive():
            atexit.unregister(self._stop_compiling)

    def _stop_compiling(self) -> None:
        """Wait for the compiling thread when the interpreter ends.

        A thread that is inside the compiler at that time would abort the process: Python ends
        threads by an exception that C++ code may not let through.
        """
        self._over.set()
        if self._compiling is not None:
            self._compiling.join()

    def after_fork(self) -> None:
        """Start anew in a forked child, which cannot use its parent's devices."""
        # The parent's objects are never freed here: that would call the driver, which fails in a
        # forked child.
        abandon(self.device_memory, self.delivery, self.known_tensors)
        self.forget()

    def forget(self) -> None:
        """Set the initial state, as before the first tensor."""
        self._lock = threading.RLock()  # never held by the delivery thread
        self.device_memory: DeviceMemory | None = None
        recorder = self._recorder
        self.delivery = Delivery(
            recorder.hand_over,
            recorder.hand_over_group,
            recorder.guarded,
            self._pressed,
            self._failed,
        )
        self._still = False
        self._replays = 0
        self.known_tensors: dict[tuple[str, ...], KnownTensor] = {}
        self._changes = 0
        self._known: dict[tuple[str, ...], tuple[Snapshot, torch.dtype]] = {}
        self._recent = RecentTensors(self._changed_unseen)
        self._places: dict[tuple[str, ...], int] = {}

    def _pressed(self) -> bool:
        return self.device_memory is not None and self.device_memory.pressure

    def _failed(self) -> None:
        """Abandon the objects of a failed device, which must not be freed."""
        abandon(self.device_memory, self.known_tensors)

    @property
    def under_way(self) -> bool:
        return len(self.delivery) > 0

    @property
    def degraded(self) -> bool:
        return self.device_memory is not None and self.device_memory.degraded

    def takes(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda or self.pretends or is_accelerator(tensor)

    def take_again(
        self, frame: Frame, port: str, slot: str, alias: str, tensor: torch.Tensor, moment: str
    ) -> bool:
        like = self.known_tensors.get((frame.site, port, slot, moment, frame.phase))
        return (
            like is not None
            and like.alias == alias
            and self._again(like, frame.step, frame.visit, tensor)
        )

    def last_of(self, frame: Frame, tensors: Tensors, visits: Visits) -> Last | None:
        """The argument of `take_last` for later calls; None if the output has no fast path."""
        key = (frame.site, "output", "0", "after", "forward")
        like = self.known_tensors.get(key) if len(tensors) == 1 else None
        if like is None or like.alias:
            return None
        argument = None
        if len(frame.inputs) == 1:
            slot, alias, _ = frame.inputs[0]
            key_of_input = (frame.site, "input", slot, "before", "forward")
            like = self.known_tensors.get(key_of_input)
            if like is not None and like.alias == alias:
                argument = Last(key_of_input, visits)
        return Last(key, visits, argument)

    def take_last(self, last: Last, frame: Frame, tensor: torch.Tensor) -> bool:
        """`take_again` for the only output of a forward call, or for its only argument."""
        # The key is looked up again only if `known_tensors` has changed.
        if last.changes != self._changes:
            last.changes, last.known = self._changes, self.known_tensors.get(last.key)
        like = last.known
        return like is not None and self._again(like, frame.step, frame.visit, tensor)

    def _again(self, like: KnownTensor, step: int, visit: int, tensor: torch.Tensor) -> bool:
        # Later steps may keep less of a tensor than the first one did.
        if like.kept != self._reduction.kept_in(step):
            return False
        recent = self._recent.find(tensor, like.place)
        if recent is None or recent.dtype is not like.dtype or recent.shape != like.shape:
            return self._read_again(like, step, visit, tensor)
        what = recent.what
        with self._lock:
            if isinstance(what, PendingSummary):
                return like.kept != "full" and self._noted(like, step, visit, what)
            if like.kept != "full" or not what.again():
                return False
            self.delivery.add(Repeat(like.constant, step, visit, what))
            return True

    def _read_again(self, like: KnownTensor, step: int, visit: int, tensor: torch.Tensor) -> bool:
        """Read a tensor if it is of the same kind as the previous one; False otherwise."""
        index = like.index
        try:
            address = snapshots.address_alike(tensor, like.dtype, like.shape, index)
        # A tensor inside vmap or a traced graph has no single address.
        except RuntimeError:
            return False
        if (
            not address
            # The kernel reads 16 bytes at a time.
            or address & 15
            or (_stream(index) if index >= 0 else 0) != like.stream
            or (tensor.grad_fn is not None and placement_of_plain(tensor))
        ):
            return False
        # The launch and the queueing share one lock, because rows and queue must have the same
        # order.
        with self._lock:
            if like.reading is None:
                return self._carried_again(like, tensor, address, step, visit)
            what = self._summarised_again(like, like.reading, tensor, address)
            return what is not None and self._noted(like, step, visit, what)

    def _noted(self, like: KnownTensor, step: int, visit: int, what: PendingSummary) -> bool:
        """Queue a tensor whose summary is pending."""
        self.delivery.note(what.transfer, like.constant, step, visit, what.slot)
        return True

    def _summarised_again(
        self, like: KnownTensor, reading: Reading, tensor: torch.Tensor, address: int
    ) -> PendingSummary | None:
        """Launch the summary of a tensor like the previous one; None if that is not possible."""
        # A launch by the C library checks by itself whether a graph is being recorded.
        if like.index >= 0 and not reading.at and snapshots.recording():
            return None
        batch = like.batch
        slot = batch.take_known(reading, like.stream, address)
        if slot < 0:
            return None
        constant = like.constant
        what = PendingSummary(batch.transfer, slot, constant.count, constant.width)
        self._recent.add(tensor, like.place, what, what)
        return what

    def _carried_again(
        self, like: KnownTensor, tensor: torch.Tensor, address: int, step: int, visit: int
    ) -> bool:
        """Stage the bytes of a tensor like the previous one; False if that is not possible."""
        assert self.device_memory is not None
        # In a call in which everything is read, digests are needed too; the slow path makes them.
        if self.device_memory.degraded or self._recent.reads_all:
            return False
        # Only on the CPU may torch make the copy: on a device its copy would become part of a graph
        # that is being recorded.
        insist = like.index < 0
        staged = like.transfers.put(tensor, address, like.size, like.stream, insist=insist)
        if staged is None:
            return False
        self._recent.add(tensor, like.place, staged, None)
        self.delivery.add(Repeat(like.constant, step, visit, staged))
        return True

    def take(self, tensor: torch.Tensor, address: TensorAddress, placement: str) -> bool:
        place = _place_of(address)
        if not placement and (
            self._take_like(self.known_tensors.get(place), tensor, address)
            or (
                0 < address.visit < _MOST_VISITS
                and self._take_like(
                    self.known_tensors.get(_place_of_visit(place, address)), tensor, address
                )
            )
        ):
            return True
        device_memory = self.device_memory or self._new_device_memory()
        # After a failure no tensor is taken any more.
        if self.delivery.failure:
            return True
        try:
            return self._take(device_memory, tensor, address, placement)
        except RuntimeError as error:
            # If the device still works, the error is ours and must be reported.
            if device_memory.is_sound:
                raise
            self.delivery.fail(str(error))
            return True

    def _take_like(
        self, like: KnownTensor | None, tensor: torch.Tensor, address: TensorAddress
    ) -> bool:
        return (
            like is not None
            and like.alias == address.alias
            # Overloads of one operator share a place, so the names have to be compared.
            and like.constant.record.class_name == address.class_name
            and self._again(like, address.step, address.visit, tensor)
        )

    def _take(
        self,
        device_memory: DeviceMemory,
        tensor: torch.Tensor,
        address: TensorAddress,
        placement: str,
    ) -> bool:
        site, port, slot = address.site, address.port, address.slot
        place = (site, port, slot, address.moment)
        described = self._known.get(place)
        if described is not None and not placement and snapshots.as_before(tensor, *described):
            shot = described[0]
        else:
            shot = snapshots.on_device(tensor)
            if shot is None:
                return False
            if isinstance(shot, Refusal):
                self._recorder.event_once(
                    "refused", f"not stored: {shot.reason}", site=site, port=port, slot=slot
                )
                return True
            if not self._selection.takes_device(shot.device_index):
                return True
            if placement:
                shot = shot._replace(placement=placement)
            # Only a tensor that is read as it is can be recognised by its description.
            if shot.owner is tensor and not shot.placement and not tensor.is_complex():
                if len(self._known) > _MOST_KNOWN:
                    self._known.clear()
                    self.known_tensors.clear()
                    self._changes += 1
                self._known[place] = shot._replace(owner=None), tensor.dtype
            tensor = shot.owner
        key = address.key(self._rank)
        with self._lock:  # also because two threads must not both set up the same device
            if not device_memory.can_use(tensor):
                return False
            return self._taken(device_memory, key, shot, tensor, address.alias, address.class_name)

    def _new_device_memory(self) -> DeviceMemory:
        with self._lock:  # several threads may call this at the same time
            if self.device_memory is None:
                self.device_memory = DeviceMemory(self.budgets, self._recorder.event_once)
            return self.device_memory

    def _remember(
        self,
        device_memory: DeviceMemory,
        key: TensorKey,
        shot: Snapshot,
        tensor: torch.Tensor,
        alias: str,
        class_name: str,
    ) -> None:
        """Remember the kind of a place's tensor, so that the next one can use the fast path."""
        kept = self._reduction.kept_in(key.step)
        kind = kind_of(shot.dtype)
        # These tensors, such as complex ones or those without a kernel, always use the slow path.
        if (
            kind is None
            or kind.reals > 1
            or shot.placement
            or not shot.elements
            or kept not in ("full", "summary", "digest")
            or device_memory.degraded
        ):
            return
        device = device_memory.device_of(tensor)
        if device.without_kernels:
            return
        batch = device.batch()
        place = _place_of(key)
        own = _place_of_visit(place, key) if key.visit else place
        for other in (place, own):
            like = self.known_tensors.get(other)
            if (
                like is not None
                and like.constant.record.class_name == class_name
                and like.batch is batch
                and (like.dtype, like.shape, like.alias) == (tensor.dtype, tensor.shape, alias)
                and like.kept == kept
            ):
                return  # it is remembered already; the fast path failed for a passing reason
        # Calls of one step may differ, as those of operators do, and would replace each other. So
        # later calls get an entry of their own.
        if key.visit and place in self.known_tensors:
            if key.visit >= _MOST_VISITS:
                return
            place = own
        self._changes += 1
        self.known_tensors[place] = KnownTensor(
            tensor.dtype,
            tensor.shape,
            device.place.index,
            device.place.stream(),
            alias,
            Constant(key, shot, alias, class_name, kept, kind.width),
            batch,
            None if kept == "full" else batch.reading(kind, shot.elements),
            device.transfers,
            shot.elements * kind.width,
            kept,
            self._place_number(key),
        )

    def _taken(
        self,
        device_memory: DeviceMemory,
        key: TensorKey,
        shot: Snapshot,
        tensor: torch.Tensor,
        alias: str,
        class_name: str,
    ) -> bool:
        kept = self._reduction.kept_in(key.step)
        findable = self._is_findable(device_memory, tensor, kept)
        what = self._taken_before(tensor, key, kept) if findable else None
        again = what is not None
        stride, lost = 1, ""
        if what is not None:
            self._remember(device_memory, key, shot, tensor, alias, class_name)
        elif kept in ("full", "sample") and not device_memory.degraded:
            values: torch.Tensor | None = tensor
            if kept == "sample":
                stride = self._reduction.stride(shot.elements)
                if stride > 1:
                    values = device_memory.every_nth(tensor, stride)
            carried: StagedTensor | str | None = None
            if values is not None:
                size = values.numel() * values.element_size()
                carried = device_memory.carry(values, size, self._send)
            # The budget is used up, and the tensor is dropped.
            if isinstance(carried, str):
                lost = carried
            elif carried is not None:
                what = carried
                self.delivery.in_background(self._recorder.prepare)
                self._remember(device_memory, key, shot, tensor, alias, class_name)
        if what is None and not lost:
            # There was no memory for the bytes, so a summary is kept instead.
            if kept in ("full", "sample"):
                kept, stride = "summary", 1
            what = device_memory.summarise(tensor, shot.dtype)
            if what is not None:
                self._remember(device_memory, key, shot, tensor, alias, class_name)
            else:
                what = self._carry_to_summarise(device_memory, tensor, shot.elements)
                if what is None:
                    return False
        if findable and what is not None and not again:
            digest = what if isinstance(what, PendingSummary) else None
            if digest is None and self._recent.compares:
                digest = device_memory.summarise(tensor, shot.dtype)
            self._recent.add(tensor, self._place_number(key), what, digest)
        self.delivery.add(
            Waiting(
                key,
                shot.dtype,
                shot.shape,
                alias,
                class_name,
                shot.device,
                kept,
                "",
                stride,
                None,
                shot.placement,
                lost,
                what,
            )
        )
        return True

    def _is_findable(self, device_memory: DeviceMemory, tensor: torch.Tensor, kept: Kept) -> bool:
        """Whether a second occurrence of this tensor need not be read again.

        It must be read if samples are kept; if its elements are not in C order, because they are
        read from a copy; and if the device computes no digests, which prove that two tensors are
        equal.
        """
        digests = not device_memory.device_of(tensor).without_kernels
        return digests and kept != "sample" and tensor.is_contiguous() and tensor.numel() > 0

    def _taken_before(
        self, tensor: torch.Tensor, key: TensorKey, kept: Kept
    ) -> PendingSummary | StagedTensor | None:
        """The pending transfer of a tensor that was already taken in this call; None if none."""
        recent = self._recent.find(tensor, self._place_number(key))
        what = None if recent is None else recent.what
        if isinstance(what, StagedTensor):
            return what if what.again() else None
        # A summary cannot replace the bytes.
        return None if kept == "full" else what

    def _place_number(self, key: TensorKey) -> int:
        return self._places.setdefault(_place_of(key), len(self._places))

    def _changed_unseen(self, number: int) -> None:
        """Report a place whose tensor seemed unchanged but had been written to."""
        place = next(place for place, other in self._places.items() if other == number)
        self._recorder.event_once(
            "changed-unseen",
            "what this was given is what another module gave, and in earlier steps it was not read "
            "again; by now something writes to it without telling torch (a collective, a kernel of "
            "another library), so values of steps before this one may be those before the write",
            site=place[0],
            port=place[1],
            slot=place[2],
        )

    def _carry_to_summarise(
        self, device_memory: DeviceMemory, tensor: torch.Tensor, elements: int
    ) -> StagedTensor | None:
        """Copy a tensor's bytes, to be reduced on the host when they arrive.

        Returns:
            The staged tensor; None if the host has to copy the tensor by itself.
        """
        if device_memory.degraded or not elements:
            return None
        size = tensor.numel() * tensor.element_size()
        carried = device_memory.carry(tensor, size, self._send)
        if not isinstance(carried, StagedTensor):
            return None
        self.delivery.in_background(self._recorder.prepare)
        return carried

    # --- records of host tensors, and actions

    def queue(self, record: Record, data: Bytes | None) -> None:
        """Queue a record behind those that wait for a device; its bytes are copied."""
        self.delivery.add(Waiting.of(record, None if data is None else data.copy()))

    def queue_act(self, act: Callable[[], None]) -> None:
        self.delivery.add(act)

    # --- sending

    def send(self) -> None:
        """Start the copies of what was taken, and deliver what has arrived."""
        self._send()
        self._recent.next_call()

    def _send(self) -> None:
        device_memory = self.device_memory
        if device_memory is None or self._still:
            return
        try:
            # If operators are captured, our own copies must not be recorded as the program's.
            with self._lock, snapshots.undisturbed():
                device_memory.send()
        except RuntimeError as error:
            if device_memory.is_sound:
                raise
            self.delivery.fail(str(error))
        self.delivery.sent()

    def drain(self) -> None:
        """Wait until everything taken is delivered; return at once while a graph is recorded."""
        if self._still:
            return
        self.send()
        self.delivery.drain()

    def finish(self) -> None:
        """Deliver everything, end the delivery thread and report what was left out."""
        self._still = False  # a graph that was being recorded has been abandoned
        self._recorder.guarded("sending", self.send)
        self.delivery.finish()
        if self.delivery.failure:
            self._recorder.event(
                "device-failed",
                f"{self.delivery.failure}: what was on its way is lost, nothing after it was taken",
                tensors=self.delivery.lost,
            )
        if self._replays:
            self._recorder.event(
                "cuda-graph",
                f"CUDA graphs were replayed {self._replays} times: modules inside them are not "
                "called then, and were not seen; run the program without CUDA graphs to see them",
                replays=self._replays,
            )
        device_memory = self.device_memory
        if device_memory is None:
            return
        if device_memory.is_sound:
            device_memory.close()
        else:
            self._failed()
        device_memory.report(self._recorder.event)

    # --- CUDA graphs, and memory

    def recording_begins(self) -> None:
        """Stop all queries: while a CUDA graph is recorded, no thread may query a device."""
        self._recorder.guarded("CUDA graph", self.drain)
        self._still = True

    def recording_ends(self) -> None:
        self._still = False

    def graph_replayed(self) -> None:
        self._replays += 1

    def memory_wanted(self) -> None:
        """Release device memory, because the program has none left."""
        if self.device_memory is not None:
            self.device_memory.memory_wanted()


def _place_of(address: TensorAddress | TensorKey) -> tuple[str, ...]:
    """The parts of an address that are equal in all steps and visits."""
    return address.site, address.port, address.slot, address.moment, address.phase


def _place_of_visit(place: tuple[str, ...], address: TensorAddress | TensorKey) -> tuple[str, ...]:
    """The parts of an address that are equal in all steps."""
    return *place, str(address.visit)
