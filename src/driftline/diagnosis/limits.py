"""How far from exact a trusted execution of a module may be: sizes, leans, worst tokens.

Takes effects of trusted executions on the same rows; knows no run and no site.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from driftline.diagnosis.calls import FINE
from driftline.diagnosis.effects import Effect

_ERROR = 1.35
_WORST_ROW = 2.5
_FEW_ROWS = 4.0
_IN_STEPS = 2.0
"""Times one rounding: a right norm in steps rounds the normalised value, the product with its
weight and the sum with its bias, each once (the root of 3)."""
_ROW_SCALE = 2.5
_NORM_LEAN, _OTHER_NORM_LEAN = 0.012, 0.35
"""Units of roundoff. A norm rounded once leans nowhere; in steps it does (the product of a rounded
value with a weight near one is a tie again and again), but then its noise is larger too: equal
noise is the same steps."""


_UNITS, _UNITS_LEAN = 32.0, 8.0
"""Of roundoff of a fine format, for other orders of summation."""
_ATTENTION, _ATTENTION_LEAN = 2.0, 0.75
"""Of an attention in a fine format: its scores are sums whose absolute error becomes a relative one
of what the softmax gives, so its error grows with the root of their length (CPU against CUDA 8
units with 40 tokens and heads of 16, 25 units with 1024 and 128). CUDA's fused kernel adds products
of three pieces and cuts off: it leans by 3.4 to 11.4 units there, and by more with wider heads. A
lean is never more than the error; three quarters of that are allowed."""


class Limits(NamedTuple):
    """How far from exact a trusted execution may be.

    Attributes:
        trusted: Effects of trusted executions on the same rows.
        unit: Unit roundoff of the candidate's format.
        error_floor: Relative error that is always allowed.
        lean_floor: Projection that is always allowed, in both directions.
        norm: Whether it is a norm in a coarse format: more roundings, no factor per row.
    """

    trusted: Sequence[Effect]
    unit: float
    error_floor: float
    lean_floor: float
    norm: bool = False

    @classmethod
    def of(
        cls,
        trusted: Sequence[Effect],
        unit: float,
        parts: int,
        complete: bool,
        allowed: float,
        norm: bool = False,
        attends: int = 0,
    ) -> Limits:
        """The limits of a site that has so many parts inside.

        Where it attends, `attends` is the length of its longest sum.
        Without a replay in the candidate's format the roundings inside a container are not known,
        and in float32 that replay is the exact one: both orders of summation are right, and the
        null has no width of its own. Then the rounding of its parts is estimated.
        """
        deep = math.sqrt(1.0 + parts)
        fine = unit <= FINE
        if fine:
            error, lean = _UNITS * unit * deep, _UNITS_LEAN * unit * deep
            if attends:
                error = max(error, _ATTENTION * math.sqrt(64.0 + attends) * unit * deep)
                lean = _ATTENTION_LEAN * error
        elif not complete:
            error, lean = 1.5 * unit * deep, 0.5 * unit * deep
        else:
            error, lean = 0.05 * unit, 0.05 * unit
        coarse_norm = norm and complete and not fine and not allowed
        return cls(trusted, unit, max(error, allowed), max(lean, allowed / 5.0), coarse_norm)

    def excesses(self, found: Effect, half: bool = False) -> dict[str, float]:
        """Each statistic in units of its limit; a half only has to bear out the whole."""
        times = 3.5 if half and self.norm else 5.0
        lean = self.lean_floor
        if self.norm:
            noise = math.sqrt(max(found.error**2 - found.projection**2, 0.0))
            same = any(abs(noise - each.error) < 0.08 * each.error for each in self.trusted)
            lean = (_NORM_LEAN if same else _OTHER_NORM_LEAN) * self.unit
        few = 1.0 + 3.0 / math.sqrt(max(found.elements, 1))
        error = max((each.error for each in self.trusted if not math.isnan(each.error)), default=0)
        row = max(
            (each.worst_row for each in self.trusted if not math.isnan(each.worst_row)), default=0
        )
        most = _ERROR * few * error + self.error_floor
        if self.norm:
            # The first of the trusted ones is the exact result rounded once.
            most = max(most, _IN_STEPS * few * self.trusted[0].error + self.error_floor)
        over = {
            "error": found.error / most if most > 0 else (math.inf if found.error > 0 else 0.0),
            "worst_row": found.worst_row / (_WORST_ROW * few * row + 2 * self.error_floor)
            if row or self.error_floor
            else (math.inf if found.worst_row > 0 else 0.0),
            "projection": self._outside(found, "projection", times, lean),
            "offset": self._outside(found, "offset", 8.0, 6.0 * self.lean_floor),
            "nonfinite": math.inf
            if found.nonfinite and not any(each.nonfinite for each in self.trusted)
            else 0.0,
        }
        if self.norm:
            scatter = max(each.row_scale for each in self.trusted)
            over["row_scale"] = found.row_scale / (_ROW_SCALE * few * scatter + self.error_floor)
        return {name: 0.0 if math.isnan(value) else value for name, value in over.items()}

    def span(self, statistic: str) -> tuple[float, float]:
        """What trusted executions have of a statistic."""
        values = [float(getattr(each, statistic)) for each in self.trusted]
        return min(values), max(values)

    def _outside(self, found: Effect, name: str, times: float, floor: float) -> float:
        value = float(getattr(found, name))
        if math.isnan(value) or found.rows < 2:
            return 0.0
        low, high = self.span(name)
        beyond = max(value - high, low - value, 0.0)
        error = max(float(getattr(each, name + "_se")) for each in (found, *self.trusted))
        # A standard error from few rows is itself uncertain.
        width = times * error * (1.0 + _FEW_ROWS / (found.rows - 1)) + floor
        return beyond / width if math.isfinite(width) and width > 0 else 0.0
