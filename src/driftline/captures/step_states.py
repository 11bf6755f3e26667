"""Weights and gradients of a program around its updates, as digests, figures and samples.

Read while nothing else runs on them: gradients just before an optimizer uses them, weights before
and after it, and those of every model that is called when they are not as they were last seen. How
a framework's tensor is read is asked of its own reader.
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
"""Bytes of a tensor that is read as a whole; of a larger one only samples are looked at."""
_SHARE = 20
"""After the first steps, reading may take one part in so many of the time since it began."""

_MOST_PASSES = 4
"""Calls of a model in one step before which its weights are looked at: programs that change them in
between (LBFGS, sharpness-aware steps) do so before the second one; others accumulate gradients."""
_SHORT = 0.001
"""Seconds of a call below which it is not looked at in steps that are not captured."""
_TIMED_AGAIN = 64
_MOST_CALLS = 1_000_000
_MOST_SLOTS = 32
_LARGEST_DIGEST = 1 << 21
"""Bytes of a tensor that is read as a whole for its digest: faster than to pick out some of it."""
_SAMPLED_DIGEST = 1 << 16
"""Bytes of a larger one that are read."""

Named = tuple[str, Any]
"""A tensor with its path."""


class TensorReader(Protocol):
    """How tensors of a framework are read."""

    def host(self, tensor: Any) -> Snapshot | None:
        """The bytes of a tensor that is in host memory, or its local part; None of any other."""
        ...

    def fetch(self, tensors: Sequence[Any]) -> list[TensorState | None]:
        """States of those that are not in host memory, in one transfer."""
        ...

    def described(self, tensor: Any) -> tuple[str, tuple[int, ...]]:
        """Name of the number format, and sizes."""
        ...


class StepStates:
    """Writes what updates do to weights.

    Args:
        session: Says which steps are looked at.
        file: Takes the lines.
        path_of: `site.name` of a parameter; empty for one of no model that was seen.
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
        # What was last written of a weight: its digest, or its samples where it has none.
        self._seen: dict[str, Any] = {}
        # The last step in which a model was called, and how often in it.
        self._calls: dict[str, tuple[int, int]] = {}
        # The optimizer whose update is under way.
        self._updating = ""
        self._last_left_out = -1
        self._begun = time.monotonic()
        self._spent = 0.0
        self._left_out = 0

    # --- what the training facts tell

    def model_called(self, parameters: Callable[[], Iterable[Any]], site: str, step: int) -> None:
        """A model is about to be called: its weights may not be those of the last update."""
        # Where nothing is trained, weights are described once, with the model.
        if not self._session.clock.trains:
            return
        last_step, calls = self._calls.get(site, (-1, 0))
        call = calls if last_step == step else 0
        self._calls[site] = step, call + 1
        # A model that is first called late (an average of weights) is looked at then.
        is_first_ever = last_step < 0
        if call >= _MOST_PASSES or not (is_first_ever or self._wanted(step)):
            return
        weights = [
            (path, parameter) for parameter in parameters() if (path := self._path_of(parameter))
        ]
        # A closure calls the model while its optimizer moves the weights.
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
        """An optimizer is given these; None stands for no gradient."""
        if self._wanted(step):
            self._timed(self._write, gradients, StateKey(step, "gradients", "before", owner))

    def after_update(self, weights: Sequence[Named], owner: str, step: int) -> None:
        self._updating = ""
        if self._wanted(step):
            self._timed(self._write, weights, StateKey(step, "weights", "after", owner))

    def averages(self, averages: Sequence[Named], step: int) -> None:
        """Averages of weights that a program keeps beside its models, before a step."""
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
        # A large model that takes small steps: reading it must not be what the program does.
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
        """Write weights, if one of them is not as it was last written."""
        # Digests tell nearly always, in a tenth of the time that figures and samples take.
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
        """Write names that are new; groups may be added while a program runs."""
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
        """The digest that the state of a tensor in host memory would have; None of any other."""
        shot = self._reader.host(tensor)
        if shot is None or shot.repeats != 1:
            return None
        is_read = 0 < shot.length <= _LARGEST_TENSOR
        return kernel.digest_at(shot.address, shot.length) if is_read else None

    def _states(self, tensors: Sequence[Any]) -> list[TensorState | None]:
        """What is kept of each tensor; None for one that is absent or cannot be read."""
        states: list[TensorState | None] = [None] * len(tensors)
        elsewhere: list[int] = []
        for index, tensor in enumerate(tensors):
            if tensor is None:
                continue
            shot = self._reader.host(tensor)
            if shot is None:
                elsewhere.append(index)
            # Sparse, packed and lazy ones have no bytes to read.
            elif shot.length > 0 and shot.repeats == 1:
                states[index] = host_state(shot)
        if elsewhere:
            fetched = self._reader.fetch([tensors[index] for index in elsewhere])
            for index, state in zip(elsewhere, fetched, strict=True):
                states[index] = state
        return states


class CallDigests:
    """Digests of what models take and give, in every step that takes longer than a millisecond.

    Args:
        session: Counts what is written.
        file: Takes the lines.
        reader: Reads the framework's tensors.
    """

    def __init__(self, session: Session, file: FactsFile, reader: TensorReader) -> None:
        self._session = session
        self._file = file
        self._reader = reader
        # Seconds of the last call of each model.
        self._took: dict[str, float] = {}
        self._left = _MOST_CALLS

    def begins(self, frame: Frame) -> bool:
        """Whether an outermost call is looked at."""
        # The first steps are captured as a whole, and have digests in the index.
        if frame.step < EVERY_STEP or frame.recompute or frame.place.root.helper or self._left <= 0:
            return False
        # A model of short calls is timed again now and then: it may be given more to do.
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
    """A digest of a host tensor; of a large one that of an even sample of its elements."""
    if shot is None or shot.length <= 0 or shot.repeats > 1:
        return ""
    about = f"{shot.dtype}{list(shot.shape)}"
    if shot.length <= _LARGEST_DIGEST:
        return f"{about} {kernel.digest_at(shot.address, shot.length)}"
    stride = -(-shot.length // _SAMPLED_DIGEST) | 1  # odd, so that no column is always taken
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
