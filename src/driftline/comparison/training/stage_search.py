"""The search for the first stage of a training step that differs although everything before agrees.

The limits grow with the divergence of the weights: the difference of the two ways that the weights
have moved since step 0, relative to the reference's way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from driftline.comparison.differences.difference import Difference
from driftline.comparison.training.step_errors import Change, StepErrors, relative_error
from driftline.comparison.training.training_report import Break, Stage

_LOSS_PER_DIVERGENCE = 3.0
"""The relative error of a loss may be this many times the divergence of the weights."""
_GRADIENTS_PER_DIVERGENCE = 10.0
"""The relative error of gradients may be this many times the divergence of the weights."""
_SAME_KERNELS = 4.0
"""The limit of gradients is divided by this when the losses are bitwise equal, because then the
same kernels computed them."""
_OTHER_LOSS = 20.0
"""The limit of a loss is divided by this when the weights are bitwise equal and the programs
compute the loss by other functions."""
_SAME_UPDATE = 1e-3
"""Relative error that an update may have if gradients and weights are equal, from other kernels."""
_SIGNS = 1.5
"""Adam's update depends on little more than the sign of a gradient. With a relative error e of the
gradient, a fraction of about e / pi of the signs change, and the update changes by 2 sqrt(e / pi),
which is less than 1.5 sqrt(e)."""
_CLEARLY = 2.0
"""An error must be this many times the expected one to count."""
_AVERAGES = 1e-5
"""Relative error that averages of weights may have if the weights are equal."""
_NEAR_ZERO = 0.01
"""Fraction of the first loss. A smaller loss is compared relative to this instead of to itself."""
_ORDINALS = ("second", "third", "fourth", "next")
_MOST_NAMES = 4
_SHORT = 200
"""A second cause is added to a sentence only if it has at most this many characters."""
_KINDS: dict[Stage, tuple[str, ...]] = {
    "input": (),
    "weights": ("average",),
    "loss": ("loss", "attribute", "order"),
    "gradients": ("parameter", "order", "clipping", "scaler", "loss"),
    "update": ("optimizer", "scheduler", "order"),
}
"""Kinds of differences that can explain a difference of each stage, the likeliest first."""


class Allowed(NamedTuple):
    """Relative errors of the loss and the gradients that rounding explains in step 0."""

    loss: float
    gradients: float


class StageSearch:
    """Examines the steps in order until a stage differs although everything before it agrees.

    Args:
        allowed: The errors that rounding explains in step 0.
        differences: The differences of the two programs.
        ranks_agree: For each side, the steps in which all ranks had the same gradients.
    """

    def __init__(
        self,
        allowed: Allowed,
        differences: Sequence[Difference],
        ranks_agree: tuple[set[int], set[int]],
    ) -> None:
        self._allowed = allowed
        self._differences = differences
        self._ranks_agree = ranks_agree
        self._begun = False
        self._first_loss = 0.0
        # The largest errors of gradients so far. They stay in an optimizer's state.
        self._gradients = 0.0
        self._by_path: dict[str, float] = {}

    def begun_apart(self, errors: StepErrors) -> bool:
        """Whether the weights differ before the first update, so that no stage can be judged."""
        first, self._begun = not self._begun, True
        return first and errors.distance > self._allowed.loss

    def look(self, errors: StepErrors) -> Break | None:
        """The first stage of this step that differs although everything before it agrees."""
        # Which parameters are updated is checked before gradients: it is decided by the optimizer's
        # settings.
        stages = (
            self._weights,
            self._passes,
            self._loss,
            self._updated,
            self._gradient,
            self._update,
        )
        for stage in stages:
            if (broken := stage(errors)) is not None:
                return broken
        return None

    def _break(
        self, errors: StepErrors, stage: Stage, words: str, error: float, why: str = ""
    ) -> Break:
        about = f" ({why})" if why else ""
        finding = f"{words}{about}{self._because(errors, stage)}"
        return Break(errors.step, stage, finding, error)

    def _because(self, errors: StepErrors, stage: Stage) -> str:
        """The differences of the programs that explain a stage, after a colon; empty if none do."""
        causes = [
            f"{difference.path}: {difference.change}"
            for kind in _KINDS[stage]
            for difference in self._differences
            if difference.kind == kind and self._explains(difference, stage, errors.step)
        ]
        # A second cause is added if it is short. The functions of a loss fill a line each.
        texts = [*causes[:1], *(text for text in causes[1:2] if len(text) <= _SHORT)]
        return f": {'; '.join(texts)}" if texts else ""

    def _explains(self, difference: Difference, stage: Stage, step: int) -> bool:
        if difference.step is not None and difference.step > step:
            return False
        if difference.kind == "attribute":
            # A module whose class is called a loss computes it; other attributes do not explain it.
            return stage == "loss" and "loss" in difference.class_name.lower()
        if difference.kind == "parameter":
            # The gradient of a tied weight is the sum over all its uses.
            return difference.relation == "tied"
        return difference.counts

    def _weights(self, errors: StepErrors) -> Break | None:
        step = errors.step
        for which, name in enumerate(("reference", "candidate")):
            lone = [path for path in errors.changed[which] if path not in errors.changed[1 - which]]
            if lone and not errors.changed[1 - which]:
                words = (
                    f"weights agree after the update of step {step - 1}, and something else "
                    f"changes them before step {step}, in the {name} only: {named(lone)}"
                )
                return self._break(errors, "weights", words, math.inf)
        most = max(_AVERAGES, 3.0 * errors.distance)
        apart = {
            path: error
            for path, (error, trained) in errors.others.items()
            if error > max(most, 3.0 * trained)
        }
        if apart and step > 0:
            averages = all(path.startswith("(average") for path in apart)
            what = "their averages" if averages else "weights that no optimizer updates"
            words = (
                f"the trained weights agree before step {step}, and {what} differ by "
                f"{max(apart.values()):.2g}: {named(apart)}"
            )
            why = "" if averages else "an average of weights, or a copy"
            return self._break(errors, "weights", words, max(apart.values()), why)
        return None

    def _passes(self, errors: StepErrors) -> Break | None:
        """Judge changes of the weights between two calls of the model in one step."""
        # The changes depend on the first backward pass, so its loss is judged before.
        if errors.passes and (broken := self._loss(errors, 1)) is not None:
            return broken._replace(call=1)
        most = self._gradients_allowed(errors, 1)
        for moved in errors.passes:
            number = _ORDINALS[min(moved.call, len(_ORDINALS)) - 1]
            stage: Stage = "update" if moved.in_update else "weights"
            by = "the optimizer" if moved.in_update else "the program itself"
            words = f"the first pass of step {errors.step} agrees, and {by} "
            if moved.lone is not None:
                name = ("reference", "candidate")[moved.lone]
                words += f"changes the weights before the {number} pass in the {name} only"
                error = math.inf
            elif moved.error > most * max(moved.norms) + _CLEARLY * moved.rounding:
                error = moved.error / (moved.norms[0] or 1.0)
                why = f"the move is {_factor(*reversed(moved.norms)) or f'off by {error:.2g}'}"
                words += f"moves the weights to other values before the {number} pass ({why})"
            else:
                continue
            # How far an optimizer such as SAM moves the weights is a setting of its groups.
            finding = words + self._because(errors, "update")
            return Break(errors.step, stage, finding, error, call=moved.call)
        return None

    def _loss(self, errors: StepErrors, most_passes: int | None = None) -> Break | None:
        first, second = (losses[:most_passes] for losses in errors.losses)
        if not first or not second:
            return None
        self._first_loss = self._first_loss or abs(first[0])
        most = max(self._allowed.loss, _LOSS_PER_DIVERGENCE * errors.apart(most_passes))
        if errors.weights == 0.0 and errors.distance == 0.0 and self._other_loss(errors.step):
            # The weights are bitwise equal, so only the loss functions can make a difference.
            most /= _OTHER_LOSS
        if len(first) != len(second):
            words = (
                f"there are {len(first)} backward passes in step {errors.step} of the reference "
                f"and {len(second)} in the candidate"
            )
            # Accumulation may split a batch in any way, but the sums of the losses must agree.
            if relative_error(sum(first), sum(second), self._floor) > most:
                return self._break(errors, "loss", words, math.inf)
            return None
        for a, b in zip(first, second, strict=True):
            error = relative_error(a, b, self._floor)
            if error > most:
                factor = _factor(abs(b), abs(a))
                words = (
                    f"the forward pass agrees in step {errors.step}, the loss differs: "
                    f"{a:.6g} → {b:.6g}"
                )
                return self._break(errors, "loss", words, error, factor)
        return None

    def _other_loss(self, step: int) -> bool:
        return any(
            difference.kind == "loss" and self._explains(difference, "loss", step)
            for difference in self._differences
        )

    @property
    def _floor(self) -> float:
        return _NEAR_ZERO * self._first_loss

    def _gradient(self, errors: StepErrors) -> Break | None:
        for which, name in enumerate(("reference", "candidate")):
            if lone := errors.lone_gradients[which]:
                words = (
                    f"the loss agrees in step {errors.step}, and {count_of(lone, 'parameter')} "
                    f"{'has' if len(lone) == 1 else 'have'} a gradient in the {name} only: "
                    f"{named(lone)}"
                )
                return self._structural(errors, "gradients", words)
        error = errors.gradients
        if error is None:
            return None
        most = self._gradients_allowed(errors)
        if error > most:
            reduced, other = (errors.step in steps for steps in self._ranks_agree)
            if reduced != other:
                name = "candidate" if reduced else "reference"
                words = (
                    f"the loss agrees in step {errors.step}, the gradients that the optimizer sees "
                    f"differ by {error:.2g}: they are not reduced over ranks in the {name}, where "
                    "every rank has its own"
                )
                return Break(errors.step, "gradients", words, error)
            why = _factor(errors.ratio, 1.0)
            words = (
                f"the loss agrees in step {errors.step}, the gradients that the optimizer sees "
                f"differ by {error:.2g}{_clipping_words(errors, most)}"
            )
            return self._break(errors, "gradients", words, error, why)
        self._gradients = max(self._gradients, error)
        return None

    def _gradients_allowed(self, errors: StepErrors, most_passes: int | None = None) -> float:
        apart = errors.apart(most_passes)
        most = max(self._allowed.gradients, _GRADIENTS_PER_DIVERGENCE * apart)
        # Bitwise equal weights and losses show that the same kernels ran.
        is_same = apart == errors.distance == 0.0 and errors.has_same_losses(most_passes)
        return most / _SAME_KERNELS if is_same else most

    def _structural(self, errors: StepErrors, stage: Stage, words: str) -> Break:
        """A break because only one side has something, with differences about frozen parameters."""
        causes = [
            f"{difference.path}: {difference.change}"
            for difference in self._differences
            if difference.relation == "requires_grad" or difference.kind == "optimizer"
        ]
        finding = words + (f"; {'; '.join(causes[:2])}" if causes else "")
        return Break(errors.step, stage, finding)

    def _updated(self, errors: StepErrors) -> Break | None:
        step = errors.step
        for which, name in enumerate(("reference", "candidate")):
            if lone := errors.lone_updates[which]:
                words = (
                    f"{count_of(lone, 'parameter')} {'is' if len(lone) == 1 else 'are'} updated in "
                    f"step {step} in the {name} only: {named(lone)}"
                )
                return self._structural(errors, "update", words)
        return None

    def _update(self, errors: StepErrors) -> Break | None:
        step = errors.step
        wrong = [change for change in errors.updates if self._is_wrong(change, errors.moved)]
        for change in errors.updates:
            if math.isfinite(change.gradient):
                before = self._by_path.get(change.path, 0.0)
                self._by_path[change.path] = max(before, change.gradient)
        if not wrong:
            return None
        norms = [math.hypot(*(change.norms[side] for change in wrong)) for side in (0, 1)]
        error = math.hypot(*(change.error for change in wrong)) / (norms[0] or 1.0)
        of = "" if len(wrong) == len(errors.updates) else f" of {len(errors.updates)}"
        words = (
            f"gradients agree in step {step}, weights differ after it, in "
            f"{count_of(wrong, 'parameter', of)}"
        )
        if of:
            words += f" ({named([change.path for change in wrong])})"
        why = f"the update is {_factor(norms[1], norms[0]) or f'off by {error:.2g}'}"
        for which, name in enumerate(("reference", "candidate")):
            if all(change.path in errors.zero_gradients[which] for change in wrong):
                # An optimizer skips a parameter without a gradient, and with it decay and momentum.
                why = (
                    f"their gradients are zeros in the {name} and absent on the other side, where "
                    "they are left as they are"
                )
        return self._break(errors, "update", words, error, why)

    def _is_wrong(self, change: Change, moved: float) -> bool:
        """Whether the error of its gradient does not explain the error of an update."""
        size = max(change.norms)
        # The optimizer's moves between two passes were judged before; their errors are allowed.
        history = max(self._by_path.get(change.path, 0.0), change.gradient, moved)
        if change.same_gradient and change.same_weights and history == 0.0:
            return change.error > _SAME_UPDATE * size + change.rounding
        # Without a gradient on either side, only weight decay moves a weight.
        if math.isnan(change.gradient):
            history = 0.0
        if history >= self._allowed.gradients:
            return False
        noise = _CLEARLY * (_SIGNS * math.sqrt(max(history, self._gradients)) * size)
        return change.error > noise + _CLEARLY * change.rounding + _SAME_UPDATE * size


# Sentences.


def _factor(second: float, first: float) -> str:
    """The ratio in words; empty if it is close to 1 or cannot be computed."""
    if not first or not second or not math.isfinite(second / first):
        return ""
    ratio = second / first
    if 0.95 < ratio < 1.05:
        return ""
    return f"{ratio:.3g} times as large"


def _clipping_words(errors: StepErrors, most: float) -> str:
    """Whether the norms of the gradients before clipping agree, in words."""
    first, second = errors.norms
    if not first or not second:
        return ""
    error = relative_error(first[-1], second[-1], 0.0)
    if error <= most:
        return ", and before clipping their norms agree"
    return f"; before clipping their norm is {first[-1]:.4g} → {second[-1]:.4g}"


def count_of(things: Sequence[Any], word: str, of: str = "") -> str:
    return f"{len(things)}{of} {word}{'' if len(things) == 1 and not of else 's'}"


def named(paths: Iterable[str]) -> str:
    listed = sorted(paths)
    more = f" and {len(listed) - _MOST_NAMES} more" if len(listed) > _MOST_NAMES else ""
    return ", ".join(listed[:_MOST_NAMES]) + more
