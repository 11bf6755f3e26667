"""Lockstep: run two models alternately and compare them tensor by tensor.

The reference runs in a separate thread, the candidate in the caller's; only one of them runs at a
time. A model runs as long as copies of tensors that the other has not reached fit into a small
buffer, and then waits for the other. The two tensors of a pair are compared at once, where they
are, so that neither all activations nor a run have to be stored. Each model draws the same random
numbers as if it ran alone. The result is `PairMoments`, which other code interprets.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false
from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Generator
from typing import Any, Literal

import torch
from torch import nn

from driftline.captures.model_facts import FactOptions
from driftline.captures.options import Reduction
from driftline.captures.recorder import Refusal, TensorAddress
from driftline.captures.selection import Selection
from driftline.captures.torch import tensors as snapshots
from driftline.captures.torch.device import accelerator
from driftline.captures.torch.device.memory import spare_memory
from driftline.captures.torch.device.places import Place, place_of
from driftline.captures.torch.session import CaptureSession
from driftline.numerics import kernel
from driftline.numerics.dtypes import DTYPES
from driftline.numerics.fields import PairMoments
from driftline.numerics.gpu.launcher import CannotLaunch
from driftline.numerics.gpu.pairs import can_pair, moments_of, pair_on_device
from driftline.runs.memory import MemorySink
from driftline.runs.records import Record, TensorKey
from driftline.runs.sinks import Bytes

Name = Literal["reference", "candidate"]
Elementwise = Callable[[str, str], tuple[float, float]]
_OTHER: dict[Name, Name] = {"reference": "candidate", "candidate": "reference"}
MOST_WAITING = 1 << 30
"""Largest total size of tensors that wait for their partners; beyond it lockstep is given up."""
AHEAD = 512 << 20
"""Largest total size of copies on a device by which one model may be ahead of the other.

It may be less if memory is short. A switch between the models takes longer than most copies.
"""
AHEAD_ON_HOST = 4 << 20
"""The same limit in host memory; tensors that fit into the caches are copied faster than threads
switch."""


class Steps:
    """Records of both models and the figures of their pairs.

    Attributes:
        reference: Records of the reference, without values.
        candidate: Records of the candidate, without values.
        moments: Figures by key, for tensors that both models have with the same shape.
        apart: Why the models cannot be compared from moments alone; empty if they can.
    """

    def __init__(self) -> None:
        self.reference = MemorySink(name="reference")
        self.candidate = MemorySink(name="candidate")
        self.moments: dict[TensorKey, PairMoments] = {}
        self.apart = ""


class _Meeting:
    """The state that both threads share: the model whose turn it is, waiting tensors, figures."""

    def __init__(self, steps: Steps, elementwise: Elementwise) -> None:
        self.steps = steps
        self._elementwise = elementwise
        self._turn = threading.Condition()
        self._now: Name = "reference"
        self._over: set[Name] = set()
        self._waiting: dict[Name, dict[TensorKey, tuple[str, torch.Tensor]]] = {
            "reference": {},
            "candidate": {},
        }
        self._bytes = 0
        self._spare: dict[torch.device, int] = {}
        self._places: dict[torch.device, Place] = {}
        self._chance: dict[Name, list[torch.Tensor]] = {}
        self._rows: list[tuple[TensorKey, int, torch.Tensor]] = []

    # --- Turns.

    def begin(self, side: Name) -> None:
        """Wait for the first turn; both models start with the same random state."""
        with self._turn:
            self._turn.wait_for(lambda: self._now == side or _OTHER[side] in self._over)
        torch.manual_seed(0)

    def end(self, side: Name) -> None:
        """Let the other model continue alone, because this one is done or has failed."""
        with self._turn:
            self._over.add(side)
            self._now = _OTHER[side]
            self._turn.notify_all()

    def _hand_over(self, side: Name) -> None:
        other = _OTHER[side]
        with self._turn:
            if other in self._over:
                return
            # Both threads share torch's generators, so each restores its own state when it
            # continues.
            self._chance[side] = _random_states()
            self._now = other
            self._turn.notify_all()
            self._turn.wait_for(lambda: self._now == side)
        _restore(self._chance[side])
        self._spare.clear()  # the other model may have used memory

    # --- Tensors.

    def arrive(self, side: Name, record: Record, tensor: torch.Tensor) -> None:
        """Take a tensor that a model has reached; return when it is compared or a copy waits."""
        key = record.key
        self._sink(side).put(record, None)
        partner = self._waiting[_OTHER[side]].pop(key, None)
        if partner is not None:
            self._bytes -= partner[1].nbytes
            pair = (partner, (record.dtype, tensor))
            self._measure(key, *(pair if side == "candidate" else pair[::-1]))
            return
        if self.steps.apart:
            return
        ahead = self._copied_ahead(tensor)
        self._waiting[side][key] = record.dtype, tensor if ahead is None else ahead
        self._bytes += tensor.nbytes
        if ahead is not None:
            return
        self._hand_over(side)
        held = self._waiting[side].get(key)
        # The partner did not arrive. The program may change the tensor now, so it is copied.
        if held is not None and held[1] is tensor:
            if self._bytes > MOST_WAITING:
                self._give_up("too many tensors have no partner at the same place")
                return
            try:
                self._waiting[side][key] = held[0], tensor.clone()
            except torch.OutOfMemoryError:
                self._give_up("there is no memory for tensors that wait for their partner")

    def _copied_ahead(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A copy that waits while its model continues; None if the model itself has to wait."""
        size = self._bytes + tensor.nbytes
        if tensor.is_cpu:
            return tensor.clone() if size <= AHEAD_ON_HOST else None
        if size > AHEAD or size > self._spare_on(tensor.device):
            return None
        try:
            return tensor.clone()
        except torch.OutOfMemoryError:
            self._spare[tensor.device] = 0
            return None

    def _spare_on(self, device: torch.device) -> int:
        spare = self._spare.get(device)
        if spare is None:
            place = self._places.get(device)
            if place is None:
                place = self._places[device] = place_of(device)
            free = spare_memory(place)
            spare = self._spare[device] = AHEAD if free is None else self._bytes + free
        return spare

    def _sink(self, side: Name) -> MemorySink:
        return self.steps.reference if side == "reference" else self.steps.candidate

    def _give_up(self, why: str) -> None:
        self.steps.apart = self.steps.apart or why
        for waiting in self._waiting.values():
            waiting.clear()
        self._bytes = 0

    def _measure(
        self,
        key: TensorKey,
        reference: tuple[str, torch.Tensor],
        candidate: tuple[str, torch.Tensor],
    ) -> None:
        r, c = reference[1], candidate[1]
        # Tensors of different shapes cannot be compared, and the models differ in structure.
        if r.shape != c.shape:
            self.steps.apart = f"{key.site} has other shapes"
            return
        rtol, atol = self._elementwise(reference[0], candidate[0])
        # Figures are computed on the candidate's device.
        if r.device != c.device and c.is_cuda:
            r = r.to(c.device)
        if can_pair(r, c) and c.is_cuda:
            with contextlib.suppress(CannotLaunch):  # then they are computed on the host
                self._rows.append((key, c.numel(), pair_on_device(r, c, rtol=rtol, atol=atol)))
                return
        reference_host, candidate_host = (t.detach().cpu().contiguous() for t in (r, c))
        self.steps.moments[key] = kernel.pair_moments(
            _raw(reference_host),
            DTYPES[reference[0]],
            _raw(candidate_host),
            DTYPES[candidate[0]],
            count=math.prod(r.shape),
            atol=atol,
            rtol=rtol,
        )

    def fetch(self) -> None:
        """Copy all figures from devices to the host, in one copy per device."""
        # A copy for each pair would wait for the device each time.
        by_device: dict[torch.device, list[int]] = {}
        for index, (_, _, row) in enumerate(self._rows):
            by_device.setdefault(row.device, []).append(index)
        for places in by_device.values():
            rows = torch.stack([self._rows[index][2] for index in places]).cpu()
            for index, row in zip(places, rows, strict=True):
                key, count, _ = self._rows[index]
                self.steps.moments[key] = moments_of(row, count)


class _Side:
    """A device backend that passes one model's tensors to the comparison.

    It implements `captures.recorder.DeviceBackend`.
    """

    under_way = degraded = False

    def __init__(self, meeting: _Meeting, side: Name, session: CaptureSession) -> None:
        self._meeting = meeting
        self._side: Name = side
        self._session = session

    def takes(self, tensor: Any) -> bool:
        return isinstance(tensor, torch.Tensor)

    def take(self, tensor: torch.Tensor, address: TensorAddress, placement: str) -> bool:
        shot = snapshots.on_device(tensor)
        # Shards would have to be joined before they can be compared.
        if shot is None or isinstance(shot, Refusal) or shot.placement or placement:
            self._meeting.steps.apart = f"a tensor of {address.site} has no plain values"
            return False
        record = Record(
            address.key(0),
            0,
            shot.dtype,
            shot.shape,
            address.alias,
            address.class_name,
            shot.device,
        )
        self._session.recorder.tensors += 1
        self._meeting.arrive(self._side, record, shot.owner)
        return True

    def take_again(self, *_: Any) -> bool:
        return False

    def queue(self, record: Record, data: Bytes | None) -> None:
        """Do nothing; it is never called, because nothing is ever under way."""

    def queue_act(self, act: Callable[[], None]) -> None:
        act()

    def send(self) -> None:
        """Do nothing, because everything has been compared already."""

    drain = finish = send


def in_step(
    reference: tuple[nn.Module, Callable[[], Any]],
    candidate: tuple[nn.Module, Callable[[], Any]],
    elementwise: Elementwise,
    *,
    selection: Selection | None = None,
) -> Steps:
    """Run two models in lockstep.

    Args:
        reference: The reference model and a function that calls it.
        candidate: The candidate model and a function that calls it. The models share no module.
        elementwise: Returns the rtol and atol of two dtypes, to count elements outside of them.
        selection: Which tensors are compared; by default all of modules.

    Raises:
        Exception: The exception of a model; if both raised, that of the reference.
    """
    steps = Steps()
    meeting = _Meeting(steps, elementwise)
    raised: dict[Name, BaseException] = {}
    sessions: dict[Name, CaptureSession] = {}

    def run(side: Name, model: nn.Module, call: Callable[[], Any]) -> None:
        try:
            meeting.begin(side)
            call()
        except BaseException as error:  # carried to the caller
            raised[side] = error
        finally:
            meeting.end(side)

    surroundings = _surroundings()

    def run_reference() -> None:
        with surroundings():
            run("reference", *reference)

    for side, (model, _) in (("reference", reference), ("candidate", candidate)):
        name: Name = "reference" if side == "reference" else "candidate"
        sink = steps.reference if name == "reference" else steps.candidate
        session = CaptureSession(sink, selection, Reduction(), model=model)
        session.recorder.device_backend = _Side(meeting, name, session)
        session.describe_models(FactOptions())
        sessions[name] = session
    states = _random_states()
    thread = threading.Thread(target=run_reference, name="driftline-reference", daemon=True)
    with torch.no_grad():
        for session in sessions.values():
            session.start()
        try:
            thread.start()
            run("candidate", *candidate)
            thread.join()
        finally:
            # The last session stops first, so that each finds its own replacements in place.
            for session in reversed(list(sessions.values())):
                session.stop()
            # The caller's random state is restored.
            _restore(states)
    # The reference's error is raised first, because the candidate's is often a consequence of it.
    for side in ("reference", "candidate"):
        if side in raised:
            raise raised[side]
    meeting.fetch()
    return steps


def can_be_in_step(reference: nn.Module, candidate: nn.Module) -> bool:
    """Whether two models have the same module names and share no module."""
    reference_modules = dict(reference.named_modules(remove_duplicate=False))
    candidate_modules = dict(candidate.named_modules(remove_duplicate=False))
    return list(reference_modules) == list(candidate_modules) and not (
        {id(module) for module in reference_modules.values()}
        & {id(module) for module in candidate_modules.values()}
    )


def _raw(tensor: torch.Tensor) -> Any:
    flat = tensor.reshape(-1)
    # An empty tensor cannot be viewed as bytes.
    return flat.view(torch.uint8).numpy() if flat.numel() else flat.to(torch.uint8).numpy()


def _random_states() -> list[torch.Tensor]:
    return [torch.get_rng_state(), *accelerator.random_states()]


def _restore(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    accelerator.set_random_states(states[1:])


def _surroundings() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Copy this thread's modes, autocast and stream into a context for another thread."""
    inference = torch.is_inference_mode_enabled()
    modes = list(torch.overrides._get_current_function_mode_stack())
    casts = [
        (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        for kind in accelerator.autocast_kinds()
        if torch.amp.is_autocast_available(kind)
    ]
    stream = accelerator.current_stream()

    @contextlib.contextmanager
    def applied() -> Generator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.no_grad())
            for kind, dtype, enabled in casts:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            if stream is not None:
                stack.enter_context(stream)
            for mode in modes:
                stack.enter_context(mode)
            yield

    return applied
