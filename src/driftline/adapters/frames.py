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
