"""The steps that are looked at when nobody names any: a ladder that gets wider with time.

Which steps are rungs depends on a step's number only, so that two runs keep the same ones. Step 0
is kept in full, later rungs as summaries; between rungs the hooks of a model are off. Knows no
framework and no tensor.
"""

from __future__ import annotations

from collections.abc import Iterable

LADDER = "ladder"
"""What a selection of steps says instead of numbers."""
BUDGET = 1 << 30
"""Bytes of disk that all steps after the first may take."""
EVERY_STEP = 16
"""As many steps at the beginning are all rungs."""


def is_rung(step: int) -> bool:
    """Whether a step is on the ladder: 0 to 15, then powers of two and their successors.

    The successor is there because of the update in between: what a step's update did shows in the
    next step.

    >>> [step for step in range(14, 140) if is_rung(step)]
    [14, 15, 16, 17, 32, 33, 64, 65, 128, 129]
    """
    if step < EVERY_STEP:
        return step >= 0
    return step & (step - 1) == 0 or (step - 1) & (step - 2) == 0


def takes_ladder(levels: Iterable[str], graph: str | None = None) -> bool:
    """Whether later steps are captured where no steps were named.

    Operators and compiled graphs are recorded to be executed again, which summaries cannot be; of
    these step 0 is enough.
    """
    return "ops" not in levels and not graph


class StepBudget:
    """How much disk the steps after the first may take; whole rungs are dropped, the latest first.

    One for all models of a process. A rung is begun only if the largest one so far would fit, so
    that none is there in part.

    Attributes:
        used: Bytes that later steps have taken.
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
        """A later step has taken so many bytes."""
        self.used += size

    def allows(self, step: int) -> bool:
        """Whether a rung may be captured; asked in the order in which steps run."""
        if step <= self._rung:
            return step == 0 or self.dropped is None or step < self.dropped
        self._largest = max(self._largest, self.used - self._before)
        self._rung, self._before = step, self.used
        if self.dropped is None and self.used + self._largest > self.budget:
            self.dropped = step
        return self.dropped is None
