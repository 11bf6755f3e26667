"""What a row inherits from rows that were computed before it: their format, and their rounding.

Fed with the rows of a table in execution order. Knows no tensors and gives no verdict; it only says
how much wider a limit has to be for a row to have got its drift from elsewhere.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from driftline.comparison.row import Row
from driftline.gating.far import is_bias
from driftline.gating.made_of_rounding import MadeOfRounding, reference_norm
from driftline.gating.quantised import Quantised
from driftline.numerics.dtypes import DType, coarser
from driftline.tolerance.defaults import QUANTISED
from driftline.tolerance.scales import SUMMED_GRADIENTS


class Inheritance(NamedTuple):
    """A limit of relative L2 that a row may have by inheritance, and the reason in a few words."""

    limit: float
    reason: str


class Inherited:
    """The rounding met so far, kept apart by rank and process."""

    def __init__(self, quantised: Quantised | None = None, *, in_turn: bool = False) -> None:
        """in_turn: Whether rows come step after step, so that what is over can be forgotten."""
        self._quantised = quantised
        self._in_turn = in_turn
        self._moment = (-1, -1, -1)
        self._codes: dict[tuple[int, int], str] = {}
        self._coarsest: dict[tuple[int, int], DType] = {}
        self._arrived: dict[tuple[int, int, int, str], tuple[float, float]] = {}
        self.rounding = MadeOfRounding()

    def format_of(self, row: Row, own: DType | None) -> DType | None:
        """The coarsest format a row's values went through, its own included.

        Logits that were cast up to float32 at the end of a bfloat16 model still carry bfloat16's
        drift. Parameters are computed from nothing.
        """
        if own is None or row.key.port == "param":
            return own
        place = (row.key.rank, row.key.process)
        before = self._coarsest.get(place)
        self._coarsest[place] = own if before is None else coarser(before, own)
        return self._coarsest[place]

    def codes_of(self, row: Row) -> str:
        """The integer type that operators before this row, or its own, computed in; else empty.

        Their results are floats again, and carry the rounding to that integer's few steps.
        """
        place = (row.key.rank, row.key.process)
        if self._quantised is None or row.key.port == "param":
            return ""
        if row.key.port == "output" and (own := self._quantised.at(row)):
            self._codes[place] = max(self._codes.get(place, own), own, key=QUANTISED.__getitem__)
        return self._codes.get(place, "")

    def remember(self, judged: Row) -> None:
        """Note what arrived at a module from behind; parameters' gradients are made of that."""
        self.rounding.remember(judged)
        if judged.key.port != "grad_output" or judged.status != "pass" or judged.limit is None:
            return
        if self._in_turn and self._moment != _module(judged)[:3]:
            self._moment = _module(judged)[:3]
            self._arrived.clear()
        norm = reference_norm(judged)
        limit, square = self._arrived.get(_module(judged), (0.0, 0.0))
        self._arrived[_module(judged)] = (max(limit, judged.limit), square + norm * norm)

    def for_gradient(self, row: Row) -> Inheritance | None:
        """How far off a parameter's gradient may be because of the gradient it is made of.

        It is as wide as what arrived was allowed to be (float16 gradients near the smallest step
        lose digits that no later product gives back). A bias's gradient is the sum of what arrived,
        and where that sum cancels (the bias of an attention key has no gradient but rounding), its
        rounding is a share of what was added up, not of what is left.
        """
        if row.key.port not in ("param_grad", "optimizer_grad"):
            return None
        limit, square = self._arrived.get(_module(row), (0.0, 0.0))
        left = reference_norm(row)
        if is_bias(row.key.slot) and left:
            share = limit * math.sqrt(square) / left
            if share > limit:
                return Inheritance(share, SUMMED_GRADIENTS)
        return Inheritance(limit, "as the gradient it is made of") if limit else None


class Unrelated(Inherited):
    """Tensors of a file: they were not computed from each other in the order they lie there."""

    def format_of(self, row: Row, own: DType | None) -> DType | None:
        del row
        return own

    def remember(self, judged: Row) -> None:
        del judged


def _module(row: Row) -> tuple[int, int, int, str]:
    return (row.key.rank, row.key.process, row.key.step, row.key.site)
