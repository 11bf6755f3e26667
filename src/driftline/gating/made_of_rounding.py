"""Gradients that are made of one that cancelled: as far off as that one, and no farther.

What is left of a gradient that cancels is rounding in part, and a backward pass is linear: all that
is computed of it is off by the same share. That is looked up in rows alone: a gradient is made of
such a one if it comes after it in the same backward pass and is as small (what cancelled is smaller
than all else), or if it is of a parameter of a module, or a part of one, that was given such a
gradient from behind. Other gradients of the step keep their limits.
"""

from __future__ import annotations

import math

from driftline.comparison.row import Row
from driftline.gating.far import GRADIENTS, is_bias
from driftline.tolerance.defaults import METRIC
from driftline.tolerance.scales import AS_CANCELLED, WHAT_CANCELS

_PORTS = ("grad_output", "grad_input", *GRADIENTS)
_GROWN = 4
"""Times so much the share may grow on the way: measured, 1.2 over two blocks."""
_LARGER = 16
"""Times so large it may become on the way through one module."""
_MOSTLY = 0.02
"""Gradients that are off by more are mostly rounding: nothing can be said of what they make."""
_LATER, _CLEAR = 4, 0.05
"""Times so much as gradients were off, steps after them may be; at most so far that is believed."""
_TWO_ROUNDINGS = 10.0
"""Two tensors that are nothing but rounding are no farther apart."""
_BEYOND = 100
"""Times so much as the first of them: no rounding any more."""


class MadeOfRounding:
    """What cancelled in the step under way, and who was given it."""

    def __init__(self) -> None:
        self._moment = (-1, -1, -1)
        self._given: dict[str, float] = {}
        self._off, self._size = 0.0, 0.0
        self._unclear: set[tuple[int, int, int, str]] = set()
        self._moved: dict[tuple[int, int], tuple[int, float]] = {}

    def remember(self, judged: Row) -> None:
        """Note a gradient that has cancelled, or is made of one."""
        if judged.key.port == "optimizer_grad" and self._moment == _moment(judged):
            whose = judged.key.rank, judged.key.process
            first, off = self._moved.get(whose, (judged.key.step, 0.0))
            self._moved[whose] = first, max(off, self._off)
        if not _is_gradient(judged) or judged.key.port in GRADIENTS:
            return
        if judged.limit_from.endswith(WHAT_CANCELS):
            off = max(float(judged.metrics[METRIC]), self._origin(judged) or 0.0)
        elif judged.limit_from.endswith(AS_CANCELLED):
            off = self._origin(judged) or 0.0
        else:
            return
        if self._moment != _moment(judged):
            self._moment = _moment(judged)
            self._given.clear()
            self._size = 0.0
        self._off = off
        self._size = max(self._size, reference_norm(judged))
        if judged.key.port == "grad_output":
            self._given[judged.key.site] = off

    def judged(self, row: Row) -> Row:
        """A failing row, judged by what it is made of if that is known."""
        off, value = self._origin(row), float(row.metrics.get(METRIC, 0.0))
        if row.decided_by != METRIC:
            return row
        if off is None:
            return self._of_later_step(row, value)
        source = f"{row.limit_from}, {AS_CANCELLED}"
        if off > _MOSTLY:
            if not value <= _BEYOND * off:
                return row
            reason = f"{METRIC} {value:.3g}: made of one that cancels, and is mostly rounding"
            return row.judged("incomparable", reason, decided_by=METRIC, limit_from=source)
        if not value <= _GROWN * off:
            return row
        return row.judged(
            "pass",
            f"{METRIC} {value:.3g}: made of one that cancels, and is off by {off:.3g}",
            decided_by=METRIC,
            limit=_GROWN * off,
            limit_from=source,
            severity=value / (_GROWN * off),
        )

    def _of_later_step(self, row: Row, value: float) -> Row:
        """Weights that were moved by such gradients are elsewhere, and so is what they compute."""
        step, off = self._moved.get((row.key.rank, row.key.process), (row.key.step, 0.0))
        place = (*_moment(row), row.key.site)
        most = _LATER * min(off, _CLEAR)
        if place in self._unclear and row.key.port in GRADIENTS and is_bias(row.key.slot):
            most = _TWO_ROUNDINGS  # a sum of what arrived, which may cancel
        if row.key.step <= step or not value <= most:
            return row
        if row.key.port == "grad_output":
            self._unclear.add(place)
        reason = (
            f"{METRIC} {value:.3g}: in step {step} its weights were given gradients that cancel, "
            f"and are off by {off:.3g}"
        )
        return row.judged("incomparable", reason, decided_by=METRIC, limit_from=row.limit_from)

    def _origin(self, row: Row) -> float | None:
        """How far off the gradient that cancelled was, if a row is made of it."""
        if not _is_gradient(row) or self._moment != _moment(row):
            return None
        if row.key.port not in GRADIENTS and 0.0 < reference_norm(row) <= _LARGER * self._size:
            return self._off
        found, site = self._given.get(row.key.site), row.key.site
        while found is None and site:
            site = site.rpartition(".")[0]
            found = self._given.get(site)
        return found


def _is_gradient(row: Row) -> bool:
    """Whether a row is a gradient: of a module, or of an operator of the backward pass."""
    return row.key.port in _PORTS or ("/" in row.key.site and row.key.phase == "backward")


def _moment(row: Row) -> tuple[int, int, int]:
    return row.key.rank, row.key.process, row.key.step


def reference_norm(row: Row) -> float:
    """Norm of the reference; 0.0 when it is zero, not finite or not known."""
    norm = float(row.metrics.get("reference_l2", 0.0))
    return norm if math.isfinite(norm) else 0.0
