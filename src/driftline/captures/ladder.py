"""The ladder: the steps that are captured by default, further and further apart.

Whether a step is a rung of the ladder depends only on its number, so that two runs capture the same
steps. Step 0 is kept in full, later rungs as summaries. Between rungs the capture of a model is
off. This file knows no framework and no tensor.
"""

from __future__ import annotations

from collections.abc import Iterable

LADDER = "ladder"
"""The word that a selection of steps contains instead of numbers."""
BUDGET = 1 << 30
"""Disk budget, in bytes, of all steps after the first together."""
EVERY_STEP = 16
"""Number of steps at the beginning that are all rungs."""


def is_rung(step: int) -> bool:
    """Whether a step is on the ladder: 0 to 15, then powers of two and their successors.

    The successors are included because the effect of a step's parameter update appears in the next
    step.

    >>> [step for step in range(14, 140) if is_rung(step)]
    [14, 15, 16, 17, 32, 33, 64, 65, 128, 129]
    """
    if step < EVERY_STEP:
        return step >= 0
    return step & (step - 1) == 0 or (step - 1) & (step - 2) == 0


def takes_ladder(levels: Iterable[str], graph: str | None = None) -> bool:
    """Whether the ladder is used by default with these levels.

    Operators and compiled graphs are recorded so that they can be executed again, for which
    summaries are not enough. With them only step 0 is captured.
    """
    return "ops" not in levels and not graph


class StepBudget:
    """Disk budget of the steps after the first; once a rung does not fit, no later one is captured.

    All models of a process share one. A rung is captured only if one as large as the largest so far
    would still fit, so that no rung is captured in part.

    Attributes:
        used: Bytes that the steps after the first have taken.
        dropped: The first rung that was left out; None as long as all fit.
    """

    def __init__(self, budget: int = BUDGET) -> None:
        self.budget = budget
        self.used = 0
        self.dropped: int | None = None
        self._rung = 0
        self._before = 0
        self._largest = 0

    def charge(self, size: int) -> None:
        """Count bytes that a step after the first has taken."""
        self.used += size

    def allows(self, step: int) -> bool:
        """Whether a rung may be captured; must be called in the order in which steps run."""
        if step <= self._rung:
            return step == 0 or self.dropped is None or step < self.dropped
        self._largest = max(self._largest, self.used - self._before)
        self._rung, self._before = step, self.used
        if self.dropped is None and self.used + self._largest > self.budget:
            self.dropped = step
        return self.dropped is None
