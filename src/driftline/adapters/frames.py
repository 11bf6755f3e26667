"""A module call under way, as sessions and taps of every framework talk about it."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, NamedTuple

from driftline.adapters.names import Place
from driftline.runs.key import Phase


class Frame:
    """A module call that is under way."""

    __slots__ = (
        "around",
        "class_name",
        "inputs",
        "module",
        "phase",
        "place",
        "recompute",
        "site",
        "step",
        "visit",
    )

    def __init__(
        self, place: Place, module: Any, visit: int, step: int, *, recompute: bool
    ) -> None:
        self.place = place
        self.site = place.site
        self.module = module
        self.class_name = place.class_name
        self.visit = visit
        self.step = step
        self.phase: Phase = "recompute" if recompute else "forward"
        self.recompute = recompute
        self.inputs: list[tuple[str, str, Any]] = []
        self.around: ExitStack | None = None


class Look(NamedTuple):
    """What is wanted of one place's own calls."""

    inputs_before: bool
    inputs_after: bool
    outputs: bool


class Visits:
    """Counts the calls of one place in each step."""

    __slots__ = ("_count", "_step")

    def __init__(self) -> None:
        self._step = -1
        self._count = 0

    def next(self, step: int) -> int:
        """The number of the call that begins now: 0 for the first one of a step."""
        if step == self._step:
            self._count += 1
        else:
            self._step, self._count = step, 0
        return self._count
