"""A fault planted in a tensor: what is right, what the candidate has, what both were given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from driftline.diagnosis.causes.case import Case
from driftline.diagnosis.causes.registry import best_clue


class Sides(NamedTuple):
    """What a site should give, what it gives, and what it was given.

    Attributes:
        right: The reference's output.
        wrong: The candidate's.
        inputs: What it was given.
        parts: What its parts gave before.
        more: Further fields of the case.
    """

    right: Tensor
    wrong: Tensor
    inputs: Mapping[str, Tensor] = {}
    parts: Mapping[str, Tensor] = {}
    more: Mapping[str, Any] = {}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def case_of(sides: Sides, coarse: bool) -> Case:
    """The case in float32, or with a candidate in bfloat16 that differs by rounding as well."""

    def numbers(x: Tensor) -> Any:
        return x.to(torch.float32).double().numpy()

    def read(x: Tensor) -> Any:
        """As the candidate has it."""
        return numbers(x.bfloat16() if coarse else x)

    given = {**sides.inputs, **sides.parts}
    unit = 2.0**-8 if coarse else 2.0**-24
    wrong = sides.wrong.bfloat16() if coarse else sides.wrong
    return Case(
        numbers(sides.right),
        numbers(wrong),
        noise=2.0 * unit,
        unit=unit,
        dtype="bfloat16" if coarse else "float32",
        site="part",
        class_name="Part",
        inputs={name: read(x) for name, x in sides.inputs.items()},
        parts={name: read(x) for name, x in given.items()},
        right_parts={name: numbers(x) for name, x in given.items()},
        **sides.more,
    )


def named(sides: Sides, coarse: bool = False) -> tuple[str, str]:
    clue, clues = best_clue(case_of(sides, coarse))
    if clue is None:
        return "unknown", str([(each.cause, each.score, each.sentence) for each in clues[:3]])
    return clue.cause, clue.sentence
