"""What a comparison covers besides tensors: calls of leaf modules, steps, elements, ranks.

This file holds the values and their JSON form. `verdict/coverage.py` counts them, and
`verdict/decision.py` decides whether they are enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

from driftline.comparison.table.row import JSON

_MOST_STEPS = 1000
"""Largest number of steps that a file lists one by one."""


class LeafShare(NamedTuple):
    """Number of calls of leaf modules on one side, and how many of them are covered.

    Attributes:
        side: reference or candidate.
        calls: Number of calls of leaf modules.
        covered: Number of covered calls; fractional if a container stands for some calls.
    """

    side: str = ""
    calls: int = 0
    covered: float = 0.0

    @property
    def share(self) -> float:
        return self.covered / self.calls if self.calls else 1.0


class Covered(NamedTuple):
    """What a comparison covers.

    Attributes:
        leaves: Covered calls of leaf modules, on the side that decides.
        unseen: A compiled region of that side that stands for more than a small part of the model.
        borders: Inputs or outputs of the model that both sides hold but that were not compared.
        steps: Steps in which something was compared.
        missing_steps: Steps that only the reference has.
        extra_steps: Steps that only the candidate has.
        ran: Number of steps that ran on either side, captured or not; 0 if unknown.
        elements: Number of elements that were compared.
        elements_left_out: Number of elements of compared tensors without a partner, of both sides.
        left_out: Rows or tokens that were left out, in words.
        unseen_ranks: Ranks of which nothing was compared, in words.
    """

    leaves: LeafShare = LeafShare()
    unseen: str = ""
    borders: tuple[str, ...] = ()
    steps: tuple[int, ...] = ()
    missing_steps: tuple[int, ...] = ()
    extra_steps: tuple[int, ...] = ()
    ran: tuple[int, int] = (0, 0)
    elements: int = 0
    elements_left_out: int = 0
    left_out: tuple[str, ...] = ()
    unseen_ranks: tuple[str, ...] = ()

    def as_json(self) -> dict[str, JSON]:
        """Return the JSON of a table file's `coverage`, except for its tensor counts."""
        return {
            "leaves": {
                "side": self.leaves.side,
                "calls": self.leaves.calls,
                "covered": round(self.leaves.covered, 3),
                "share": round(self.leaves.share, 6),
                "unseen": self.unseen or None,
            },
            "steps": {
                "compared": list(self.steps[:_MOST_STEPS]),
                "count": len(self.steps),
                "only_reference": list(self.missing_steps[:_MOST_STEPS]),
                "only_candidate": list(self.extra_steps[:_MOST_STEPS]),
                "ran": {"reference": self.ran[0] or None, "candidate": self.ran[1] or None},
            },
            "elements": {"compared": self.elements, "left_out": self.elements_left_out},
            "left_out": list(self.left_out),
            "ranks_not_compared": list(self.unseen_ranks),
            "borders_not_compared": list(self.borders),
        }

    @classmethod
    def from_json(cls, shown: Any) -> Covered | None:
        """The inverse of `as_json`, for the steps that a file lists; None for files without it.

        Raises:
            ValueError: A value is not a number.
        """
        if not isinstance(shown, Mapping) or "leaves" not in shown:
            return None
        facts = cast("Mapping[str, Any]", shown)
        leaves, steps, elements = facts["leaves"], facts["steps"], facts["elements"]
        ran = steps["ran"]
        return cls(
            LeafShare(str(leaves["side"]), int(leaves["calls"]), float(leaves["covered"])),
            str(leaves.get("unseen") or ""),
            tuple(map(str, facts["borders_not_compared"])),
            tuple(map(int, steps["compared"])),
            tuple(map(int, steps["only_reference"])),
            tuple(map(int, steps["only_candidate"])),
            (int(ran["reference"] or 0), int(ran["candidate"] or 0)),
            int(elements["compared"]),
            int(elements["left_out"]),
            tuple(map(str, facts["left_out"])),
            tuple(map(str, facts["ranks_not_compared"])),
        )


def spans(numbers: Iterable[int], word: str = "step") -> str:
    """Return numbers in words, with neighbours joined to ranges.

    >>> spans([0]), spans([1, 2, 3, 7])
    ('step 0', 'steps 1-3, 7')
    """
    ordered = sorted(numbers)
    ranges: list[list[int]] = []
    for number in ordered:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in ranges[:_MOST_SPANS]]
    more = ", ..." if len(ranges) > _MOST_SPANS else ""
    return f"{word}{'' if len(ordered) == 1 else 's'} {', '.join(shown)}{more}"


_MOST_SPANS = 8
