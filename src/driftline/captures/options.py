"""Options of a capture: levels, memory budgets, and how much of each tensor is kept.

Pure values that are checked when they are made. This file knows no framework and loads none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self, cast, get_args

from driftline.captures.selection import patterns
from driftline.errors import BadInput, did_you_mean
from driftline.runs.records import Kept

LEVELS = ("modules", "ops", "gradients", "params")


def checked_levels(levels: str | Iterable[str]) -> tuple[str, ...]:
    """Check one level or several and return them as a tuple."""
    # A string with commas, a list and a tuple are all accepted.
    chosen = patterns(levels)
    for level in chosen:
        if level not in LEVELS:
            raise BadInput(f"there is no level '{level}'", hint=did_you_mean(level, LEVELS))
    return chosen


# Memory budgets: how much memory capture may use for tensors of devices.


WhenFull = Literal["wait", "drop"]
# Bytes; users change them with `device_budget` and `host_budget`.
DEVICE_BUDGET = 1 << 30
HOST_BUDGET = 2 << 30


class Budgets(NamedTuple):
    """Memory budgets in bytes, and what happens when they are used up.

    Attributes:
        device: Bytes of clones on each device; 0 makes none.
        host: Bytes of pinned host memory, where they land.
        when_full: The program waits, or tensors are dropped and counted.
    """

    device: int = DEVICE_BUDGET
    host: int = HOST_BUDGET
    when_full: WhenFull = "wait"


def budgets_from(
    device: int | None = None, host: int | None = None, when_full: str = "wait"
) -> Budgets:
    """Check budgets and fill in the defaults.

    Raises:
        BadInput: A budget or `when_full` is invalid.
    """
    for name, value in (("device_budget", device), ("host_budget", host)):
        # `bool` is a subclass of int, but True as a number of bytes is a mistake.
        if value is not None and (type(value) is not int or value < 0):
            raise BadInput(f"{name} is a number of bytes, not {value!r}")
    if when_full not in get_args(WhenFull):
        raise BadInput(
            f"when_full is wait or drop, not '{when_full}'",
            hint=did_you_mean(when_full, get_args(WhenFull)),
        )
    return Budgets(
        DEVICE_BUDGET if device is None else device,
        HOST_BUDGET if host is None else host,
        "drop" if when_full == "drop" else "wait",
    )


# Reductions: all of a tensor is kept, or a sample, a summary, a digest, or only its description.


KEPT: tuple[Kept, ...] = get_args(Kept)
# Shells interpret parentheses, so `sample:100` and `sample=100` are accepted too.
_SAMPLE = re.compile(r"sample\((\d+)\)|sample[:=](\d+)")
DEFAULT_SAMPLE = 1024


@dataclass(frozen=True, slots=True)
class Reduction:
    """How much of each tensor is kept.

    Attributes:
        kept: full, sample, summary, digest or describe.
        sample: For `sample`: about how many elements of a tensor are kept, evenly spaced.
        later: What is kept in steps after step 0, if that is less.
    """

    kept: Kept = "full"
    sample: int = DEFAULT_SAMPLE
    later: Kept | None = None

    def __post_init__(self) -> None:
        if self.kept not in KEPT:
            raise BadInput(
                f"there is no reduction '{self.kept}'", hint=did_you_mean(self.kept, KEPT)
            )
        if self.later is not None and self.later not in KEPT:
            raise BadInput(
                f"there is no reduction '{self.later}'",
                hint=did_you_mean(self.later, KEPT),
            )
        if self.sample < 1:
            raise BadInput("a sample needs at least one element")

    @classmethod
    def parse(cls, text: str) -> Self:
        """`full`, `summary`, `digest`, `describe`, `sample` or `sample(n)`.

        >>> Reduction.parse("sample(100)")
        Reduction(kept='sample', sample=100, later=None)
        """
        match = _SAMPLE.fullmatch(text.replace(" ", ""))
        if match:
            return cls("sample", int(match[1] or match[2]))
        return cls(cast(Kept, text))

    def kept_in(self, step: int) -> Kept:
        """What is kept in a step.

        >>> [Reduction("full", later="summary").kept_in(step) for step in (0, 1)]
        ['full', 'summary']
        """
        return self.kept if self.later is None or step == 0 else self.later

    def with_ladder(self) -> Reduction:
        """This reduction for steps of the ladder: later steps keep summaries, or less."""
        return replace(self, later="summary") if self.kept in ("full", "sample") else self

    def stride(self, count: int) -> int:
        """Distance between the elements that a sample keeps.

        >>> Reduction("sample", 10).stride(101)
        11
        """
        # Rounded up, so that a sample may be smaller than requested but never larger.
        return max(1, -(-count // self.sample)) if self.kept == "sample" else 1

    def __str__(self) -> str:
        return f"sample({self.sample})" if self.kept == "sample" else self.kept

    def to_json(self) -> dict[str, Any]:
        later = {} if self.later is None else {"later": self.later}
        return {"keep": str(self), **later}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        reduction = cls.parse(str(data.get("keep", "full")))
        return replace(reduction, later=cast("Kept | None", data.get("later")))
