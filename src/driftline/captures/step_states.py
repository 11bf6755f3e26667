"""Weights and gradients of a program around its updates, as digests, figures and samples.

Gradients are read just before an optimizer uses them, and weights before and after its update. The
weights of a model are also read when it is called and they have changed since. A reader of the
framework reads the tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from driftline.captures.calls import Frame
from driftline.captures.ladder import EVERY_STEP
from driftline.captures.model_facts import FactsFile
from driftline.captures.recorder import Snapshot, every_nth
from driftline.numerics import kernel
from driftline.numerics.dtypes import DTYPES, DType, to_float64
from driftline.runs.sidecars.model_facts import line_of
from driftline.runs.sidecars.step_facts import (
    SAMPLES,
    STEPS,
    TENSORS_PER_LINE,
    Parameter,
    StateKey,
    TensorState,
    parameters_line,
    state_line,
)

if TYPE_CHECKING:
    from driftline.captures.session import Session

NO_NUMBERS = np.empty(0)
_LARGEST_TENSOR = 1 << 30
"""A tensor of more bytes is not read as a whole; only samples are read."""
_SHARE = 20
"""After the first steps, reading may take 1/20 of the time since it began."""

_MOST_PASSES = 4
"""Weights are read before at most this many calls of a model in one step. Programs that change them
between calls (LBFGS, sharpness-aware steps) do so before the second one; others accumulate
gradients."""
_SHORT = 0.001
"""Calls of fewer seconds get no digests in steps that are not captured."""
_TIMED_AGAIN = 64
_MOST_CALLS = 1_000_000
_MOST_SLOTS = 32
_LARGEST_DIGEST = 1 << 21
"""A tensor of up to this many bytes is read as a whole for its digest, which is faster than reading
parts of it."""
_SAMPLED_DIGEST = 1 << 16
"""About this many bytes of a larger tensor are read."""

Named = tuple[str, Any]
"""The path of a tensor, and the tensor."""


class TensorReader(Protocol):
    """Reads the tensors of a framework."""

    def host(self, tensor: Any) -> Snapshot | None:
        """The bytes of a tensor, or of its local part, in host memory; None for any other."""
        ...

    def fetch(self, tensors: Sequence[Any]) -> list[TensorState | None]:
        """The states of tensors that are not in host memory, in one transfer."""
        ...

    def described(self, tensor: Any) -> tuple[str, tuple[int, ...]]:
        """The name of the number format, and the shape."""
        ...


class StepStates:
    """Writes weights and gradients around updates.

    Args:
        session: The session, which decides about steps.
        file: The file to which lines are written.
        path_of: Returns `site.name` of a parameter; empty if it belongs to no described model.
        reader: Reads the framework's tensors.
    """

    def __init__(
        self,
        session: Session,
        file: FactsFile,
        path_of: Callable[[Any], str],
        reader: TensorReader,
    ) -> None:
        self._session = session
        self._path_of = path_of
        self._reader = reader
        self.after_fork(file)

    def after_fork(self, file: FactsFile) -> None:
        self._file = file
        self._listed: dict[str, list[str]] = {}
        # The digest of each weight when it was last written, or its samples if it has no digest.
        self._seen: dict[str, Any] = {}
        # The last step in which each model was called, and the number of calls in it.
        self._calls: dict[str, tuple[int, int]] = {}
        # The optimizer whose update is running.
        self._updating = ""
        self._last_left_out = -1
        self._begun = time.monotonic()
        self._spent = 0.0
        self._left_out = 0

    # --- called by the training facts

    def model_called(self, parameters: Callable[[], Iterable[Any]], site: str, step: int) -> None:
        """A model is about to be called: its weights may have changed since the last update."""
        # Without training, weights are described once, with the model.
        if not self._session.clock.trains:
            return
        last_step, calls = self._calls.get(site, (-1, 0))
        call = calls if last_step == step else 0
        self._calls[site] = step, call + 1
        # A model that is called late for the first time (an average of weights) is read then.
        is_first_ever = last_step < 0
        if call >= _MOST_PASSES or not (is_first_ever or self._wanted(step)):
            return
        weights = [
            (path, parameter) for parameter in parameters() if (path := self._path_of(parameter))
        ]
        # A closure calls the model while its optimizer changes the weights.
        owner = self._updating if call and self._updating else site
        key = StateKey(step, "weights", "before", owner, call)
        self._timed(self._write_changed, weights, key)

    def before_update(self, weights: Sequence[Named], owner: str, step: int) -> None:
        """An optimizer is about to change these weights."""
        self._updating = owner
        if self._wanted(step):
            self._name(owner, weights)
            key = StateKey(step, "weights", "before", owner)
            self._timed(self._write_changed, weights, key)

    def gradients(self, gradients: Sequence[Named], owner: str, step: int) -> None:
        """An optimizer is about to use these gradients; None means that there is none."""
        if self._wanted(step):
            self._timed(self._write, gradients, StateKey(step, "gradients", "before", owner))

    def after_update(self, weights: Sequence[Named], owner: str, step: int) -> None:
        self._updating = ""
        if self._wanted(step):
            self._timed(self._write, weights, StateKey(step, "weights", "after", owner))

    def averages(self, averages: Sequence[Named], step: int) -> None:
        """Averages of weights, before a step's update."""
        if self._wanted(step):
            key = StateKey(step, "weights", "before", "averages")
            self._timed(self._write_changed, averages, key)

    def clipped(self, step: int, norm: float | None) -> None:
        """Gradients were clipped; this was their norm."""
        if norm is not None and self._wanted(step):
            self._file.add(STEPS, line_of("clipped", step=step, norm=repr(norm)))

    def finish(self) -> None:
        if self._left_out:
            text = f"weights and gradients of {self._left_out} steps were left out to save time"
            self._file.add(STEPS, line_of("thinned", step=self._session.clock.now, text=text))

    # --- which steps

    def _is_slow(self) -> bool:
        return self._spent * _SHARE > time.monotonic() - self._begun

    def _wanted(self, step: int) -> bool:
        if not self._session.watches_state(step):
            return False
        # If a large model takes short steps, reading it would take too much of the time.
        if step >= EVERY_STEP and self._is_slow():
            self._left_out += self._last_left_out != step
            self._last_left_out = step
            return False
        return True

    def _timed(self, act: Callable[..., None], *args: Any) -> None:
        begun = time.monotonic()
        try:
            with self._session.undisturbed():
                act(*args)
        finally:
            self._spent += time.monotonic() - begun

    # --- reading and writing

    def _write_changed(self, weights: Sequence[Named], key: StateKey) -> None:
        """Write weights if one of them has changed since it was last written."""
        # Digests take a tenth of the time of figures and samples, and nearly always suffice.
        if all(self._digest(weight) == self._seen.get(path, "") for path, weight in weights):
            return
        tensors = self._states([weight for _, weight in weights])
        changed = any(
            tensor is not None and self._seen.get(path) != _identity(tensor)
            for (path, _), tensor in zip(weights, tensors, strict=True)
        )
        if changed:
            self._put(weights, tensors, key)

    def _write(self, tensors: Sequence[Any], key: StateKey) -> None:
        self._put(tensors, self._states([tensor for _, tensor in tensors]), key)

    def _put(
        self,
        named: Sequence[Any],
        tensors: Sequence[TensorState | None],
        key: StateKey,
    ) -> None:
        owner = key.owner
        paths = [path for path, _ in named]
        if key.what == "weights":
            self._name(owner, named)
            for path, tensor in zip(paths, tensors, strict=True):
                if tensor is not None:
                    self._seen[path] = _identity(tensor)
        numbers = {path: number for number, path in enumerate(self._listed.get(owner, ()))}
        ordered: list[TensorState | None] = [None] * len(numbers)
        for path, tensor in zip(paths, tensors, strict=True):
            if path in numbers:
                ordered[numbers[path]] = tensor
        for first in range(0, len(ordered), TENSORS_PER_LINE):
            part = ordered[first : first + TENSORS_PER_LINE]
            line = state_line(key, first, part)
            self._session.charge(len(line))
            self._file.add(STEPS, line)

    def _name(self, owner: str, named: Sequence[Any]) -> None:
        """Write new names, because groups may be added while a program runs."""
        listed = self._listed.setdefault(owner, [])
        known_paths = set(listed)
        fresh = [pair for pair in named if pair[0] not in known_paths]
        for first in range(0, len(fresh), TENSORS_PER_LINE):
            part = [
                Parameter(path, *self._reader.described(tensor))
                for path, tensor in fresh[first:][:TENSORS_PER_LINE]
            ]
            self._file.add(STEPS, parameters_line(owner, len(listed), part))
            listed += [parameter.path for parameter in part]

    def _digest(self, tensor: Any) -> str | None:
        """The digest that the state of a tensor in host memory has; None for any other tensor."""
        shot = self._reader.host(tensor)
        if shot is None or shot.repeats != 1:
            return None
        is_read = 0 < shot.length <= _LARGEST_TENSOR
        return kernel.digest_at(shot.address, shot.length) if is_read else None

    def _states(self, tensors: Sequence[Any]) -> list[TensorState | None]:
        """The state of each tensor; None for one that is missing or cannot be read."""
        states: list[TensorState | None] = [None] * len(tensors)
        elsewhere: list[int] = []
        for index, tensor in enumerate(tensors):
            if tensor is None:
                continue
            shot = self._reader.host(tensor)
            if shot is None:
                elsewhere.append(index)
            # Sparse, packed and lazy tensors have no bytes to read.
            elif shot.length > 0 and shot.repeats == 1:
                states[index] = host_state(shot)
        if elsewhere:
            fetched = self._reader.fetch([tensors[index] for index in elsewhere])
            for index, state in zip(elsewhere, fetched, strict=True):
                states[index] = state
        return states


class CallDigests:
    """Writes digests of models' inputs and outputs for calls that take longer than a millisecond.

    Args:
        session: The session, which counts the written bytes.
        file: The file to which lines are written.
        reader: Reads the framework's tensors.
    """

    def __init__(self, session: Session, file: FactsFile, reader: TensorReader) -> None:
        self._session = session
        self._file = file
        self._reader = reader
        # The duration in seconds of the last call of each model.
        self._took: dict[str, float] = {}
        self._left = _MOST_CALLS

    def begins(self, frame: Frame) -> bool:
        """Whether an outermost call gets digests."""
        # The first steps are captured, and their index has digests.
        if frame.step < EVERY_STEP or frame.recompute or frame.place.root.helper or self._left <= 0:
            return False
        # A model with short calls is timed again now and then, because its inputs may grow.
        if self._took.get(frame.site, 1.0) < _SHORT and frame.step % _TIMED_AGAIN:
            return False
        frame.digests = {}
        frame.begun = time.perf_counter()
        return True

    def note(self, frame: Frame, port: str, tensors: Sequence[tuple[str, str, Any]]) -> None:
        digests = frame.digests
        if digests is None:
            return
        if port == "output":
            self._took[frame.site] = time.perf_counter() - frame.begun
        with self._session.undisturbed():
            for slot, _, tensor in tensors[:_MOST_SLOTS]:
                digest = _digest(self._reader.host(tensor))
                if digest:
                    digests[f"{port} {slot}"] = digest

    def returned(self, frame: Frame) -> None:
        digests = frame.digests
        if digests and self._took.get(frame.site, 0.0) >= _SHORT:
            site = frame.site if not frame.visit else f"{frame.site}#{frame.visit}"
            line = line_of("call", site=site, step=frame.step, digests=digests)
            self._left -= 1
            self._session.charge(len(line))
            self._file.add(STEPS, line)


def _digest(shot: Snapshot | None) -> str:
    """A digest of a host tensor, or of an even sample of the elements of a large one."""
    if shot is None or shot.length <= 0 or shot.repeats > 1:
        return ""
    about = f"{shot.dtype}{list(shot.shape)}"
    if shot.length <= _LARGEST_DIGEST:
        return f"{about} {kernel.digest_at(shot.address, shot.length)}"
    stride = -(-shot.length // _SAMPLED_DIGEST) | 1  # odd, so that it varies over the columns
    return f"{about} sampled-{kernel.digest(every_nth(shot, stride))}"


def _identity(tensor: TensorState) -> Any:
    return tensor.digest or tensor.samples.tobytes()


def host_state(shot: Snapshot) -> TensorState | None:
    dtype, data = DTYPES[shot.dtype], shot.data
    if data is None or dtype.bits < 8:
        return None
    samples = _sampled(data, dtype, shot.elements)
    if shot.length > _LARGEST_TENSOR:
        return TensorState("", figures_of(samples), NO_NUMBERS, samples)
    summary = kernel.summarize_at(shot.address, shot.length, dtype, count=shot.elements)
    not_finite = summary.nan + summary.pos_inf + summary.neg_inf
    figures = (summary.l2, summary.mean, summary.std, summary.min, summary.max, float(not_finite))
    return TensorState(
        kernel.digest_at(shot.address, shot.length),
        tuple(map(float, figures)),
        np.asarray(summary.sketch, np.float64),
        samples,
    )


def _sampled(data: Any, dtype: DType, count: int) -> Any:
    stride = max(1, -(-count // SAMPLES))
    elements = data.reshape(-1, dtype.bits // 8)[::stride]
    raw = np.ascontiguousarray(elements).reshape(-1).view(np.dtype(dtype.storage))
    values: Any = to_float64(raw, dtype, len(elements))
    return np.abs(values) if values.dtype.kind == "c" else values


def figures_of(samples: Any) -> tuple[float, ...]:
    finite = samples[np.isfinite(samples)]
    if not finite.size:
        return (0.0, 0.0, 0.0, 0.0, 0.0, float(samples.size))
    return (
        float(np.linalg.norm(finite)),
        float(finite.mean()),
        float(finite.std()),
        float(finite.min()),
        float(finite.max()),
        float(samples.size - finite.size),
    )
