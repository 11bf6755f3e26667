"""What must be done to stored tensors before two of them can be set against each other.

A recipe is data: sources and steps, so that a plan can be printed, saved and edited. Carrying one
out is `comparison.cooking`'s part.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from driftline.runs.record import Record

StepKind = Literal[
    "concat",  # sources joined along `axis`: q, k and v against a fused qkv; shards of a tensor
    "split",  # elements `start` to `stop` along `axis`: one part of a fused tensor
    "transpose",  # axes in the order `numbers`
    "reshape",  # to the shape `numbers`
    "trim",  # the first `stop` elements along `axis` (from `start`): pads, surplus rows of a batch
    "select",  # positions `numbers` along `axis`: rows, or interleaved parts of a fused tensor
    "sum",  # sources added up: partial results of ranks
    "dequantise",  # (values - zero point) * scale; sources are values, scale[, zero point]
]


class Step(NamedTuple):
    """One thing to do; which fields mean something depends on `kind`."""

    kind: StepKind
    axis: int = 0
    start: int = 0
    stop: int = 0
    numbers: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.kind in ("split", "trim"):
            return f"{self.kind}(axis {self.axis}, {self.start}:{self.stop})"
        if self.kind in ("transpose", "reshape"):
            return f"{self.kind}({','.join(map(str, self.numbers))})"
        if self.kind == "select":
            return f"select(axis {self.axis}, {len(self.numbers)} positions)"
        return f"concat(axis {self.axis})" if self.kind == "concat" else self.kind


class Recipe(NamedTuple):
    """One side of a pair that is not a stored tensor as it is.

    Attributes:
        sources: Records of that side's run, the pair's own record first.
        steps: Done in this order; a step that joins sources comes first.
        shape: What comes out.
    """

    sources: tuple[Record, ...]
    steps: tuple[Step, ...]
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return " then ".join(map(str, self.steps))
