"""The interface of an evidence rule, and the context in which rules look things up.

A rule is asked about single rows that exceed their limits. It may read the two runs, and returns
what it measured there under the names of its columns; `judge` decides later what that excuses.
Rules do not ask for other rows, because a shard of a comparison has few of them. They use pairs
instead, which every shard knows.
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
"""Errors that reading a tensor may raise; its row then stays as it was measured."""
LARGEST_DECODED = 1 << 24
"""Largest number of elements of a pair that is decoded; each side takes 8 bytes per element."""

_NOTHING: Mapping[str, Number] = {}


class EvidenceRule(Protocol):
    """One kind of evidence. A rule is created per context, so it may cache what it read."""

    def wants(self, row: Row) -> bool:
        """Return whether the rule may add something to a row; reads no tensor."""
        ...

    def look(self, row: Row, pair: Pair) -> Mapping[str, Number]:
        """Return the metrics to add to a row; empty if there are none.

        Raises:
            DriftlineError, OSError, ValueError: A tensor cannot be read; the row stays as it was.
        """
        ...


class EvidenceContext:
    """Two runs and the pairs between them, for look-ups by evidence rules.

    Attributes:
        pairs: All pairs of the plan, or of one process of it.
        runs: The reference and the candidate.
    """

    def __init__(self, rows: Sequence[Row], pairs: Sequence[Pair], *runs: Run) -> None:
        """Index the pairs of some rows.

        Args:
            rows: The rows about which rules will be asked.
            pairs: All pairs of the plan, or of one process of it.
            runs: The reference and the candidate.
        """
        self.pairs = pairs
        self.runs = (runs[0], runs[1])
        keys = {row.key for row in rows}
        calls = {call_address(key) for key in keys}
        # Only the rows' pairs are indexed: a plan has 10^5 pairs, and few exceed their limits.
        self._by_row: dict[tuple[object, ...], Pair] = {}
        self._by_call: dict[tuple[object, ...], list[Pair]] = {}
        for pair in pairs:
            key = pair.reference.key
            if key in keys:
                self._by_row[both_keys(paired(pair))] = pair
            if (call := call_address(key)) in calls:
                self._by_call.setdefault(call, []).append(pair)

    def pair_of(self, row: Row) -> Pair | None:
        """Return the pair that a row is about."""
        return self._by_row.get(both_keys(row))

    def pairs_of_call(self, key: TensorKey) -> Sequence[Pair]:
        """Return the pairs of all inputs and outputs of the call that a tensor belongs to."""
        return self._by_call.get(call_address(key), ())

    def values(self, pair: Pair) -> tuple[F64, F64] | None:
        """Return both sides of a pair as flat float64; None if they are too large or unreadable."""
        if math.prod(pair.reference.shape) > LARGEST_DECODED:
            return None
        try:
            reference, candidate = self.opened(pair).decoded()
        except UNREADABLE:
            return None
        return reference.reshape(-1), candidate.reshape(-1)

    def opened(self, pair: Pair) -> ValuePair:
        """Return the values of a pair after its recipes.

        Raises:
            DriftlineError, OSError, ValueError: They cannot be read, or cannot be compared.
        """
        if reason := pair.trouble or incompatibility(pair):
            raise ValueError(reason)
        if has_recipe(pair):
            # Imported on use, because most pairs have no recipe.
            from driftline.comparison.measure.recipes import open_recipes

            return open_recipes(*self.runs, pair)
        reference, candidate = self.runs
        return open_arrays(reference, pair.reference, candidate, pair.candidate)


def add_evidence(
    rows: Sequence[Row], context: EvidenceContext, rules: Sequence[EvidenceRule]
) -> Sequence[Row]:
    """Return rows with the metrics of all rules; each rule sees what earlier rules added."""
    updated = list(rows)
    # The outer loop is over rules, because a later rule may skip rows that an earlier one handled.
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
    """Return the identity of a pair: the addresses of both sides, as a row stores them."""
    # One tensor may have partners on several ranks, which differ in the candidate's address.
    return (row.key, *row[4:10])


def call_address(key: TensorKey) -> tuple[object, ...]:
    """Return what all tensors of one call of a module have in common."""
    return key.rank, key.process, key.step, key.site, key.visit


def relative_error(reference: F64, candidate: F64) -> float:
    """Return the relative L2 of two arrays of values."""
    size = float(np.linalg.norm(reference))
    difference = float(np.linalg.norm(candidate - reference))
    return difference / size if size else (math.inf if difference else 0.0)
