"""What of a program can be captured: calls of modules, of operators, gradients, parameters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self, cast, get_args

from driftline.captures.selection import patterns
from driftline.errors import BadInput, did_you_mean
from driftline.runs.records import Kept

LEVELS = ("modules", "ops", "gradients", "params")


def known_levels(levels: str | Iterable[str]) -> tuple[str, ...]:
    """Levels as given, one or several, each of which exists."""
    chosen = patterns(levels)
    for level in chosen:
        if level not in LEVELS:
            raise BadInput(f"there is no level '{level}'", hint=did_you_mean(level, LEVELS))
    return chosen


# How much memory capture may use for tensors of devices. Loads nothing.


WhenFull = Literal["wait", "drop"]
DEVICE_BUDGET = 1 << 30
HOST_BUDGET = 2 << 30


class Budgets(NamedTuple):
    """Bytes, and what is done when they are used up.

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
    """Budgets as given, each of which can be meant.

    Raises:
        BadInput: One cannot.
    """
    for name, value in (("device_budget", device), ("host_budget", host)):
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


# How much of a wanted tensor is kept: all, a sample, ten numbers, a digest, or its shape.


KEPT: tuple[Kept, ...] = get_args(Kept)
_SAMPLE = re.compile(r"sample\((\d+)\)|sample[:=](\d+)")
DEFAULT_SAMPLE = 1024


@dataclass(frozen=True, slots=True)
class Reduction:
    """What is kept of each tensor.

    Attributes:
        kept: full, sample, summary, digest or describe.
        sample: For `sample`: about how many elements of a tensor are kept, evenly spaced.
    """

    kept: Kept = "full"
    sample: int = DEFAULT_SAMPLE

    def __post_init__(self) -> None:
        if self.kept not in KEPT:
            raise BadInput(
                f"there is no reduction '{self.kept}'", hint=did_you_mean(self.kept, KEPT)
            )
        if self.sample < 1:
            raise BadInput("a sample needs at least one element")

    @classmethod
    def parse(cls, text: str) -> Self:
        """`full`, `summary`, `digest`, `describe`, `sample` or `sample(n)`.

        >>> Reduction.parse("sample(100)")
        Reduction(kept='sample', sample=100)
        """
        match = _SAMPLE.fullmatch(text.replace(" ", ""))
        if match:
            return cls("sample", int(match[1] or match[2]))
        return cls(cast(Kept, text))

    def stride(self, count: int) -> int:
        """Every how manieth element a sample keeps.

        >>> Reduction("sample", 10).stride(101)
        11
        """
        return max(1, -(-count // self.sample)) if self.kept == "sample" else 1

    def __str__(self) -> str:
        return f"sample({self.sample})" if self.kept == "sample" else self.kept

    def to_json(self) -> dict[str, Any]:
        return {"keep": str(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls.parse(str(data.get("keep", "full")))
