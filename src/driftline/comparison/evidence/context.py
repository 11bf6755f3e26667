"""What a rule of evidence is, and what it is given to look things up in.

A rule is asked about single rows that are over their limit. It may read the two runs, and says what
it measured there, under the names of its columns; `judge` decides later what that excuses. No rule
asks for other rows: a shard of a comparison has few of them. All of them are about pairs instead,
which every shard knows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from driftline.alignment.plan import Pair
from driftline.comparison.measure.operands import F64, ValuePair, open_arrays
from driftline.comparison.measure.pair_rows import has_recipe, incompatibility, paired
from driftline.comparison.table.row import Number, Row
from driftline.errors import DriftlineError
from driftline.runs.records import TensorKey
from driftline.runs.run import Run

UNREADABLE = (DriftlineError, OSError, ValueError)
"""What reading a tensor may raise; the row it was read for then stays as it was measured."""
LARGEST_DECODED = 1 << 24
"""Elements of a pair that is decoded for evidence: both sides take 8 bytes for each."""

_NOTHING: Mapping[str, Number] = {}


class EvidenceRule(Protocol):
    """Looks up one kind of evidence; made for one context, so that it may remember what it read."""

    def wants(self, row: Row) -> bool:
        """Whether it has anything to look up for a row. Reads no tensor."""
        ...

    def look(self, row: Row, pair: Pair) -> Mapping[str, Number]:
        """The metrics it adds to a row; empty where it has nothing to say.

        Raises:
            DriftlineError, OSError, ValueError: A tensor cannot be read: the row stays as it was.
        """
        ...


class EvidenceContext:
    """Two runs and the pairs between them, as rules of evidence ask for them.

    Attributes:
        pairs: All pairs of the plan, or of one process of it.
        runs: The reference and the candidate.
    """

    def __init__(self, rows: Sequence[Row], pairs: Sequence[Pair], *runs: Run) -> None:
        """Indexes the pairs of some rows.

        Args:
            rows: Those that rules will ask about.
            pairs: All pairs of the plan, or of one process of it.
            runs: The reference and the candidate.
        """
        self.pairs = pairs
        self.runs = (runs[0], runs[1])
        keys = {row.key for row in rows}
        calls = {call_address(key) for key in keys}
        # Only what rules will ask for: a plan has 10^5 pairs, and few are over their limit.
        self._by_row: dict[tuple[object, ...], Pair] = {}
        self._by_call: dict[tuple[object, ...], list[Pair]] = {}
        for pair in pairs:
            key = pair.reference.key
            if key in keys:
                self._by_row[both_keys(paired(pair))] = pair
            if (call := call_address(key)) in calls:
                self._by_call.setdefault(call, []).append(pair)

    def pair_of(self, row: Row) -> Pair | None:
        """The pair that a row is about."""
        return self._by_row.get(both_keys(row))

    def pairs_of_call(self, key: TensorKey) -> Sequence[Pair]:
        """What else went into and came out of the call that gave a tensor."""
        return self._by_call.get(call_address(key), ())

    def values(self, pair: Pair) -> tuple[F64, F64] | None:
        """Both sides of a pair, flat, as float64; None where they are too large or unreadable."""
        if math.prod(pair.reference.shape) > LARGEST_DECODED:
            return None
        try:
            reference, candidate = self.opened(pair).decoded()
        except UNREADABLE:
            return None
        return reference.reshape(-1), candidate.reshape(-1)

    def opened(self, pair: Pair) -> ValuePair:
        """The values of a pair after its recipes.

        Raises:
            DriftlineError, OSError, ValueError: They cannot be read, or not set against each other.
        """
        if reason := pair.trouble or incompatibility(pair):
            raise ValueError(reason)
        if has_recipe(pair):
            # Most pairs have none, and need not load what carries recipes out.
            from driftline.comparison.measure.recipes import open_recipes

            return open_recipes(*self.runs, pair)
        reference, candidate = self.runs
        return open_arrays(reference, pair.reference, candidate, pair.candidate)


def add_evidence(
    rows: Sequence[Row], context: EvidenceContext, rules: Sequence[EvidenceRule]
) -> Sequence[Row]:
    """Rows with what the rules know of them; each rule sees what those before it have added."""
    updated = list(rows)
    # Rule after rule, not row after row: a later rule may spare itself what an earlier one
    # found.
    for rule in rules:
        for index, row in enumerate(updated):
            if not rule.wants(row) or (pair := context.pair_of(row)) is None:
                continue
            try:
                evidence = rule.look(row, pair)
            except UNREADABLE:
                evidence = _NOTHING
            if evidence:
                updated[index] = row._replace(metrics={**row.metrics, **evidence})
    return updated


def both_keys(row: Row) -> tuple[object, ...]:
    """What tells a pair from all others: the addresses of both sides, as a row has them."""
    # One tensor may have partners on several ranks; the candidate's address tells them apart.
    return (row.key, *row[4:10])


def call_address(key: TensorKey) -> tuple[object, ...]:
    """What all tensors of one call of a module have in common."""
    return key.rank, key.process, key.step, key.site, key.visit


def relative_error(reference: F64, candidate: F64) -> float:
    """Relative L2 of opened values."""
    size = float(np.linalg.norm(reference))
    difference = float(np.linalg.norm(candidate - reference))
    return difference / size if size else (math.inf if difference else 0.0)
