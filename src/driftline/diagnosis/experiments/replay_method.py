"""How thoroughly a replay is done: options that the command passes to the program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class ReplayMethod:
    """How modules are replayed.

    Attributes:
        most_held: Bytes of results held in the program at a time, to repeat the code of modules
            with parts.
        partial: Go on where the two models differ; what differs is left out.
        check_each: Prove for every call that it reproduces its own output, not once for calls of
            one class with the same shapes.
        keep_all: Keep all values, also of calls that give the captured run's own results to the
            bit.
    """

    most_held: int = 4 << 30
    partial: bool = False
    check_each: bool = False
    keep_all: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, entries: Mapping[str, Any]) -> ReplayMethod:
        """Read the method from an experiment's plan, which has other entries too."""
        return cls(
            int(entries["most_held"]),
            bool(entries["partial"]),
            bool(entries["check_each"]),
            bool(entries["keep_all"]),
        )


USUAL = ReplayMethod()
