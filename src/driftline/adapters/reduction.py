"""How much of a wanted tensor is kept: all, a sample, ten numbers, a digest, or its shape."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, cast, get_args

from driftline.errors import BadInput, did_you_mean
from driftline.runs.record import Kept

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
