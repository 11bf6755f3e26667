"""What `driftline metrics` has found for one model and shape, and the figures people look at."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from driftline.decoding.out_files import METRICS


class Outcome(NamedTuple):
    """What one model and shape gave.

    Attributes:
        prefix: What its files begin with.
        folder: Where they are.
        skipped: Everything was there already.
        tokens: How many tokens were kept.
        rounds: How many rounds.
        columns: The documented metrics and companions of all kept tokens, by name.
        first_other: Seed, prompt and position of the first token that the candidate would have
            chosen otherwise; None if there is none, or it is not known.
        companions: Whether scores over the whole vocabulary are there.
    """

    prefix: str
    folder: Path
    skipped: bool = False
    tokens: int = 0
    rounds: int = 0
    columns: Mapping[str, np.ndarray[Any, np.dtype[Any]]] = MappingProxyType({})
    first_other: tuple[int, int, int] | None = None
    companions: bool = True


class Figure(NamedTuple):
    """One metric over all kept tokens."""

    name: str
    mean: float
    p99: float
    largest: float


def figures(outcome: Outcome) -> list[Figure]:
    """The documented metrics, and total variation if it is known, in short."""
    names = [*METRICS, *(["total_variation"] if outcome.companions else [])]
    return [
        Figure(name, float(values.mean()), float(np.percentile(values, 99.0)), float(values.max()))
        for name, values in ((name, outcome.columns[name]) for name in names)
    ]
