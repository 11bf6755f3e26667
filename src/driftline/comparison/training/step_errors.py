"""How far two trainings are apart, step by step: weights, loss, gradients and updates.

A sketch is a linear function of a tensor, so the sketch of an update is the difference of two
sketches. For tensors on devices only samples were stored, and they are used instead. This file
measures and does not judge.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from driftline.comparison.differences.models import ModelPair
from driftline.numerics.dtypes import DTYPES
from driftline.runs.sidecars.model_facts import ModelFacts
from driftline.runs.sidecars.step_facts import F64, State, StepFacts, TensorState

OPTIMIZER = "optimizer "
"""Prefix of the owner of weights that an optimizer updates."""
_AGREEING = 0.1
"""Elements of two gradients agree if their relative difference is at most this."""
_MEANING = 1e-4
"""Elements of a gradient may be only rounding if they are below this fraction of the largest."""
_FEWEST = 4
"""With fewer clear elements than this, two updates are not compared."""

Weights = Mapping[str, TensorState]


class Change(NamedTuple):
    """One parameter's gradient and update in one step, on both sides.

    Attributes:
        path: `site.name`, by the reference's name.
        gradient: Relative error of the gradient; NaN if a side has none.
        same_gradient: Whether the gradients are bitwise equal.
        same_weights: Whether the weights before the update are bitwise equal.
        error: Norm of the difference of the updates.
        norms: Norms of the updates.
        rounding: Norm of the error that rounding to the weights' format may cause; infinite if the
            updates cannot be compared.
    """

    path: str
    gradient: float
    same_gradient: bool
    same_weights: bool
    error: float
    norms: tuple[float, float]
    rounding: float


class Pass(NamedTuple):
    """A change of weights between two calls of the model in the same step.

    Attributes:
        call: The call of the model after the change, counted from 0 in the step.
        in_update: Whether an optimizer changed them, which calls the model from its closure.
        lone: The only side (0 or 1) that changed them; None if both did.
        error: Norm of the difference of the changes.
        norms: Norms of the changes.
        rounding: Norm of the error that rounding to the weights' format may cause.
        apart: The divergence of the weights after the change.
    """

    call: int
    in_update: bool
    lone: int | None
    error: float = 0.0
    norms: tuple[float, float] = (0.0, 0.0)
    rounding: float = 0.0
    apart: float = 0.0


@dataclass(slots=True)
class StepErrors:
    """The errors of one step of two trainings.

    Pairs are (reference, candidate). The divergence of the weights is the error of the way that
    they have moved since step 0, relative to the reference's way.

    Attributes:
        step: The number of the step.
        weights: Divergence of the weights at its beginning; 0.0 if they are bitwise equal.
        changed: For each side, paths of weights that something other than an update changed before
            this step.
        passes: Changes of weights between two calls of a model in this step.
        losses: For each side, the losses of its backward passes.
        gradients: Relative error of all gradients together; None if none were compared.
        ratio: Norm of the candidate's gradients divided by that of the reference's.
        lone_gradients: For each side, the parameters for which only it has a gradient.
        zero_gradients: The same for gradients that are zero, where the other side may have None.
        norms: For each side, the norms of the gradients that clipping measured.
        updates: The update of each parameter.
        lone_updates: For each side, the parameters that only it updates.
        distance: Relative error of the trained weights themselves.
        others: For weights that no optimizer updates (averages, teachers), by path: their relative
            error, and that of the trained weights from which they may be computed.
    """

    step: int
    weights: float = 0.0
    changed: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))
    passes: list[Pass] = field(default_factory=list[Pass])
    losses: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    gradients: float | None = None
    ratio: float = 1.0
    lone_gradients: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))
    zero_gradients: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))
    norms: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    updates: list[Change] = field(default_factory=list[Change])
    lone_updates: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))
    distance: float = 0.0
    others: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])

    @property
    def moved(self) -> float:
        """The largest relative error of an optimizer's changes between two passes."""
        moves = [move.error / (move.norms[0] or 1.0) for move in self.passes if move.in_update]
        return max(moves, default=0.0)

    def apart(self, most_passes: int | None = None) -> float:
        """The largest divergence of the weights in the first passes, or in all."""
        later = self.passes if most_passes is None else self.passes[: most_passes - 1]
        return max((self.weights, *(move.apart for move in later)))

    def has_same_losses(self, most_passes: int | None = None) -> bool:
        """Whether the losses of the first passes, or of all, exist and are bitwise equal."""
        first, second = (losses[:most_passes] for losses in self.losses)
        return bool(first) and first == second


class Trainings:
    """The steps of one process of either side.

    Args:
        pair: The two models, which maps the candidate's names to the reference's.
        reference: The facts about steps of the reference's process.
        candidate: The facts about steps of the candidate's process.
    """

    def __init__(self, pair: ModelPair, reference: StepFacts, candidate: StepFacts) -> None:
        self._names = pair
        self._facts = (reference, candidate)
        self._losses = (_losses(pair.reference), _losses(pair.candidate))
        self._dtypes = {
            path: (parameter.dtype, other.dtype)
            for path, parameter in reference.parameters.items()
            if (other := _renamed(candidate.parameters, pair).get(path)) is not None
        }

    def steps(self) -> Iterator[StepErrors]:
        """The errors of every step that both sides recorded, in order."""
        by_step = [_by_step(facts) for facts in self._facts]
        now: tuple[dict[str, TensorState], dict[str, TensorState]] = ({}, {})
        first: tuple[dict[str, TensorState], dict[str, TensorState]] = ({}, {})
        trained: set[str] = set()
        seen = -1
        for step in sorted({*by_step[0], *by_step[1]}):
            errors = StepErrors(step)
            states = [side.get(step, ()) for side in by_step]
            own = [self._sorted(side, which) for which, side in enumerate(states)]
            common = step in by_step[0] and step in by_step[1]
            if common and any(parts.passes for parts in own):
                errors.passes.extend(self._passes(now, first, own))
            for which, parts in enumerate(own):
                for path, tensor in parts.before.items():
                    # The weights after the last update were recorded, and weights before a step are
                    # written only when they have changed since: something else changed them.
                    if common and seen == step - 1 and path in trained:
                        errors.changed[which].append(path)
                    now[which][path] = tensor
                    first[which].setdefault(path, tensor)
            trained |= own[0].after.keys() & own[1].after.keys()
            if common:
                self._measure(errors, now, first, own, trained)
                seen = step
                yield errors
            for which, parts in enumerate(own):
                now[which].update(parts.after)

    def _sorted(self, states: Sequence[State], which: int) -> _Parts:
        parts = _Parts({}, {}, {}, {}, {})
        for state in states:
            tensors = state.tensors if which == 0 else _renamed(state.tensors, self._names)
            if not self._names.same_framework:
                # Sketches and samples of a matrix that is stored transposed describe other
                # elements.
                tensors = {p: t for p, t in tensors.items() if self._names.lies_alike(p)}
            key = state.key
            if key.what == "gradients":
                parts.gradients.update(tensors)
            elif key.call:
                changed = parts.passes.setdefault(key.call, _Changed(key.owner, {}))
                changed.tensors.update(tensors)
            elif key.when == "after":
                parts.after.update(tensors)
            else:
                parts.before.update(tensors)
                if not key.owner.startswith(OPTIMIZER):
                    parts.begin.update(tensors)
        return parts

    def _passes(
        self,
        now: tuple[Weights, Weights],
        start: tuple[Weights, Weights],
        own: Sequence[_Parts],
    ) -> Iterator[Pass]:
        """The changes of weights between two calls of a model in a step, call by call."""
        weights = {**now[0], **own[0].begin}, {**now[1], **own[1].begin}
        # In step 0 the weights at its beginning are the first ones.
        begun = {**weights[0], **start[0]}, {**weights[1], **start[1]}
        for call in sorted({*own[0].passes, *own[1].passes}):
            first, second = (parts.passes.get(call) for parts in own)
            if first is None or second is None:
                changed = first or second
                assert changed is not None
                in_update = changed.owner.startswith(OPTIMIZER)
                yield Pass(call, in_update, 0 if second is None else 1)
                return
            changes = [
                self._change(
                    path,
                    (weights[0][path], weights[1][path]),
                    (first.tensors[path], second.tensors[path]),
                    (None, None),
                )
                for path in first.tensors.keys() & second.tensors.keys()
                if path in weights[0] and path in weights[1]
            ]
            changes = [change for change in changes if math.isfinite(change.rounding)]
            weights[0].update(first.tensors)
            weights[1].update(second.tensors)
            yield Pass(
                call,
                first.owner.startswith(OPTIMIZER) and second.owner.startswith(OPTIMIZER),
                None,
                math.hypot(*(change.error for change in changes)),
                (
                    math.hypot(*(change.norms[0] for change in changes)),
                    math.hypot(*(change.norms[1] for change in changes)),
                ),
                math.hypot(*(change.rounding for change in changes)),
                _divergence(weights, begun, first.tensors.keys() & second.tensors.keys()),
            )

    def _measure(
        self,
        errors: StepErrors,
        now: tuple[Weights, Weights],
        first: tuple[Weights, Weights],
        own: Sequence[_Parts],
        trained: set[str],
    ) -> None:
        step = errors.step
        for which, losses in enumerate(self._losses):
            errors.losses[which].extend(losses.get(step, ()))
            errors.norms[which].extend(self._facts[which].norms.get(step, ()))
        errors.weights = _divergence(now, first, trained)
        errors.distance = _distance(now, trained)
        for path in own[0].before.keys() & own[1].before.keys() - trained:
            # The path of an average ends with the path of the weight that it averages.
            partner = next((tail for tail in _tails(path) if tail in trained), None)
            source = trained if partner is None else (partner,)
            errors.others[path] = _distance(now, (path,)), _distance(now, source)
        self._measure_gradients(errors, own[0].gradients, own[1].gradients)
        for side, other in ((0, 1), (1, 0)):
            # A parameter that the other side does not update at all is reported as a lone update.
            for path, tensor in own[side].gradients.items():
                if path not in own[other].gradients and path in own[other].after:
                    lone = errors.lone_gradients if tensor.norm > 0.0 else errors.zero_gradients
                    lone[side].append(path)
        for path in own[0].after.keys() & own[1].after.keys():
            if path in now[0] and path in now[1]:
                befores = now[0][path], now[1][path]
                afters = own[0].after[path], own[1].after[path]
                grads = own[0].gradients.get(path), own[1].gradients.get(path)
                errors.updates.append(self._change(path, befores, afters, grads))
        if own[0].after and own[1].after:
            for side, other in ((0, 1), (1, 0)):
                errors.lone_updates[side].extend(
                    path
                    for path in own[side].after.keys() - own[other].after.keys()
                    if _is_moved(now[side].get(path), own[side].after[path])
                )

    def _measure_gradients(self, errors: StepErrors, first: Weights, second: Weights) -> None:
        square = size = other = 0.0
        for path in first.keys() & second.keys():
            a, b = _vectors(first[path], second[path])
            if a is None or b is None:
                continue
            same = first[path].digest and first[path].digest == second[path].digest
            square += 0.0 if same else float(np.sum((a - b) ** 2))
            size += float(a @ a)
            other += float(b @ b)
        if first.keys() & second.keys():
            errors.gradients = _ratio(math.sqrt(square), math.sqrt(size))
            errors.ratio = _ratio(math.sqrt(other), math.sqrt(size)) if size else 1.0

    def _change(
        self,
        path: str,
        befores: tuple[TensorState, TensorState],
        afters: tuple[TensorState, TensorState],
        gradients: tuple[TensorState | None, TensorState | None],
    ) -> Change:
        gradient, same_gradient, clear = _gradient_error(*gradients)
        if clear is None:
            (a0, b0), (a1, b1) = _vectors(*befores), _vectors(*afters)
        else:
            # Optimizers that divide by the size of a gradient make full steps even from gradients
            # that are only rounding. Therefore only elements with clear gradients are compared.
            sampled = [tensor.samples for tensor in (*befores, *afters)]
            fits = clear.any() and all(len(samples) == len(clear) for samples in sampled)
            a0, b0, a1, b1 = (samples[clear] if fits else None for samples in sampled)
        same_weights, same_after = _are_same(*befores), _are_same(*afters)
        vectors = (a0, b0, a1, b1)
        if any(v is None for v in vectors) or len({len(v) for v in vectors if v is not None}) > 1:
            return Change(path, gradient, same_gradient, same_weights, 0.0, (0.0, 0.0), math.inf)
        assert a0 is not None and b0 is not None and a1 is not None and b1 is not None
        moved, other = a1 - a0, b1 - b0
        error = 0.0 if same_weights and same_after else float(np.linalg.norm(moved - other))
        unit = max(
            (DTYPES[name].unit_roundoff for name in self._dtypes.get(path, ()) if name in DTYPES),
            default=2.0**-8,
        )
        # One rounding on either side, before and after.
        rounding = 2.0 * unit * float(np.linalg.norm(a0))
        norms = float(np.linalg.norm(moved)), float(np.linalg.norm(other))
        return Change(path, gradient, same_gradient, same_weights, error, norms, rounding)


def relative_error(first: float, second: float, floor: float) -> float:
    """The difference of two losses or norms, relative to the larger one.

    Args:
        first: The reference's value.
        second: The candidate's value.
        floor: If both are smaller than this, their difference is relative to it instead.
    """
    if first == second or (math.isnan(first) and math.isnan(second)):
        return 0.0
    if not (math.isfinite(first) and math.isfinite(second)):
        return math.inf
    return abs(first - second) / max(abs(first), abs(second), floor, 1e-300)


def _are_same(first: TensorState, second: TensorState) -> bool:
    return bool(first.digest) and first.digest == second.digest


def _gradient_error(
    first: TensorState | None, second: TensorState | None
) -> tuple[float, bool, npt.NDArray[np.bool_] | None]:
    """The relative error of two gradients, whether they are bitwise equal, and the clear elements.

    The clear elements are None if the gradients are equal or one of them is missing.
    """
    error = math.nan
    if first is None or second is None:
        return error, False, None
    same = _are_same(first, second)
    g, h = _vectors(first, second)
    if g is not None and h is not None:
        gap = 0.0 if same else float(np.linalg.norm(g - h))
        error = _ratio(gap, float(np.linalg.norm(g)))
    return error, same, None if same else _clear_elements(first.samples, second.samples)


def _clear_elements(first: F64, second: F64) -> npt.NDArray[np.bool_]:
    """The sampled elements whose gradients agree and are larger than rounding; none if too few."""
    if len(first) != len(second):
        return np.zeros(0, np.bool_)
    size = np.maximum(np.abs(first), np.abs(second))
    largest = float(size.max(initial=0.0))
    clear = (np.abs(first - second) <= _AGREEING * size) & (size > _MEANING * largest)
    few = np.count_nonzero(clear) < min(_FEWEST, len(first))
    return np.zeros(len(first), np.bool_) if few else clear


class _Changed(NamedTuple):
    """Weights that were recorded between two calls of a model, and what changed them."""

    owner: str
    tensors: dict[str, TensorState]


class _Parts(NamedTuple):
    """The tensors that one side recorded in one step, by the reference's names.

    Attributes:
        begin: Weights before the step that no optimizer's update recorded.
        passes: Weights that changed before a further call of the model, by the call's number.
        before: All weights before the step or its update.
        gradients: Gradients that the optimizers read.
        after: Weights after the update.
    """

    begin: dict[str, TensorState]
    passes: dict[int, _Changed]
    before: dict[str, TensorState]
    gradients: dict[str, TensorState]
    after: dict[str, TensorState]


def _by_step(facts: StepFacts) -> dict[int, list[State]]:
    steps: dict[int, list[State]] = {}
    for state in facts.states:
        steps.setdefault(state.key.step, []).append(state)
    return steps


def _renamed(tensors: Mapping[str, Any], pair: ModelPair) -> dict[str, Any]:
    return {pair.renamed_path(path): tensor for path, tensor in tensors.items()}


def _losses(facts: ModelFacts) -> dict[int, list[float]]:
    losses: dict[int, list[float]] = {}
    for record in facts.training:
        step = record.get("step", 0)
        if record.get("kind") == "loss" and type(step) is int:
            try:
                losses.setdefault(step, []).append(float(record.get("value", "nan")))
            except (TypeError, ValueError):
                continue
    return losses


def _vectors(first: TensorState, second: TensorState) -> tuple[F64 | None, F64 | None]:
    """The sketches of two tensors, or else their samples; None if they cannot be compared."""
    for a, b in ((first.sketch, second.sketch), (first.samples, second.samples)):
        if len(a) and len(a) == len(b) and np.isfinite(a).all() and np.isfinite(b).all():
            return a, b
    return None, None


def _divergence(
    now: tuple[Weights, Weights], first: tuple[Weights, Weights], paths: Iterable[str]
) -> float:
    """The error of the way that weights have moved, relative to the reference's way.

    A difference that existed from the beginning, such as rounding to another format, does not
    count.
    """
    square = way = 0.0
    for path in paths:
        if any(path not in side for side in (*now, *first)):
            continue
        same = now[0][path].digest and now[0][path].digest == now[1][path].digest
        a, b = _vectors(now[0][path], now[1][path])
        a0, b0 = _vectors(first[0][path], first[1][path])
        if a is None or b is None or a0 is None or b0 is None or len(a) != len(a0):
            continue
        square += 0.0 if same else float(np.sum(((b - b0) - (a - a0)) ** 2))
        way += float(np.sum((a - a0) ** 2))
    return _ratio(math.sqrt(square), math.sqrt(way))


def _distance(now: tuple[Weights, Weights], paths: Iterable[str]) -> float:
    square = size = 0.0
    for path in paths:
        if path not in now[0] or path not in now[1]:
            continue
        a, b = _vectors(now[0][path], now[1][path])
        if a is not None and b is not None:
            same = now[0][path].digest and now[0][path].digest == now[1][path].digest
            square += 0.0 if same else float(np.sum((a - b) ** 2))
            size += float(a @ a)
    return _ratio(math.sqrt(square), math.sqrt(size))


def _tails(path: str) -> Iterator[str]:
    """The ends of a path after each of its dots, the longest first."""
    while "." in path:
        path = path.partition(".")[2]
        yield path


def _is_moved(before: TensorState | None, after: TensorState) -> bool:
    if before is None:
        return False
    if before.digest and after.digest:
        return before.digest != after.digest
    a, b = _vectors(before, after)
    return a is not None and b is not None and bool(np.any(a != b))


def _ratio(part: float, total: float) -> float:
    if part == 0.0:
        return 0.0
    return part / total if total else math.inf
