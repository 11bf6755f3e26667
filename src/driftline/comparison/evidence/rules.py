"""The evidence rules, and the conditions under which each is applied to a row.

A row may exceed the limit of its format for a reason that only the runs can show: a bias that
drifts freely, a sum that cancels, an optimizer whose steps follow rounding errors. The predicates
in this file are cheap and read no tensor. Code that reads tensors and graphs is imported only if a
predicate is true.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from driftline.alignment.plan import Pair
from driftline.comparison.table.row import Column, Row
from driftline.comparison.table.table import is_spooled, like_storage
from driftline.comparison.tolerance.defaults import LIMITS, METRIC, coarsest
from driftline.comparison.tolerance.tolerance import (
    ADDED,
    ADDED_ALLOWED,
    BEYOND,
    BEYOND_ROUNDING,
    MOVED_APART,
)
from driftline.numerics.dtypes import DType
from driftline.registry import Address
from driftline.runs.run import Run

if TYPE_CHECKING:
    from driftline.comparison.table.row_spool import RowSpool


GRADIENTS = ("optimizer_grad", "param_grad")
"""Ports of parameter gradients."""
SUMMED = "summed_l2"
CANCELLED = "cancelled_l2"
BEYOND_COLUMN = Column(BEYOND, "lower", "relative L2 without what a bias of no gradient adds")
SUMMED_COLUMN = Column(SUMMED, "none", "norm of what was added up to get the reference")
CANCELLED_COLUMN = Column(CANCELLED, "none", "what rounding explains of gradients that cancel")
BEYOND_ROUNDING_COLUMN = Column(
    BEYOND_ROUNDING, "lower", "relative L2 without elements whose gradient is rounding"
)
ADDED_PROJECTION = "added_projection"
ADDED_BY_OWN_WEIGHTS = "added_by_own_weights"
ADDED_COLUMNS = (
    Column(ADDED, "none", "||c - f|| / ||f||, f the reference's leaf on the candidate's input"),
    Column(ADDED_ALLOWED, "none", "what the candidate's number formats explain of added_error"),
    Column(ADDED_PROJECTION, "none", "<c - f, f> / <f, f>"),
    Column(ADDED_BY_OWN_WEIGHTS, "none", "added_error with the candidate's weights in f"),
)
"""Columns of recomputed leaves (`recomputed.py`); `verdict` decides by them."""
BEYOND_OUTPUTS = "beyond_outputs"
BEYOND_OUTPUTS_COLUMN = Column(
    BEYOND_OUTPUTS, "none", "relative L2 of a loss's gradient without what the output explains"
)
MOVED_APART_COLUMN = Column(
    MOVED_APART, "none", "relative L2 of a parameter that turned signs of its gradients explain"
)
_MODEL = ("(root)", "", "(program)")
"""Names of the model itself in captures."""
_FEW = 16
"""Number of roundings that are never treated as a fault."""
_ROUNDINGS, _SHARE = 2.0, 0.25
"""A leaf is recomputed if its error exceeds this many roundings and this fraction of its format's
limit. A smaller error convicts no site, so recomputing it would only cost time."""


def needs_evidence(row: Row) -> bool:
    """Return whether any rule that needs no weights may apply."""
    return any(source.applies(row) for source in SOURCES if not source.needs_weights)


def needs_or_is_leaf(row: Row) -> bool:
    """Return whether any rule may apply; for runs with weights, where leaves can be recomputed."""
    return any(source.applies(row) for source in SOURCES)


def _has_weights(pairs: Sequence[Pair]) -> bool:
    return any(pair.reference.key.port == "param" for pair in pairs)


def any_needs_evidence(
    largest: Mapping[tuple[str, str], float], *, after_the_first_step: bool
) -> bool:
    """Return whether `needs_evidence` may hold for any row, by the largest errors per dtype."""
    for types, error in largest.items():
        dtype = coarsest(types)
        if dtype is None:
            continue
        if error > (_few(dtype) if after_the_first_step else LIMITS[dtype.name]):
            return True
    return False


def is_output_over_limit(row: Row) -> bool:
    """Return whether an output of a later step differs by more than a few roundings."""
    if row.key.port != "output" or row.key.phase == "backward":
        return False
    if row.key.step == 0 or row.basis != "values":
        return False
    dtype = coarsest((row.reference_dtype, row.candidate_dtype))
    if dtype is None:
        return False
    return _few(dtype) < row.metrics.get(METRIC, 0.0) < math.inf


def is_operator_over_limit(row: Row) -> bool:
    """Return whether a row of an operator or a node exceeds the limit of its format."""
    if row.key.port not in ("input", "output", "param") or "/" not in row.key.site:
        return False
    return _is_far(row)


def is_sum_over_limit(row: Row) -> bool:
    """Return whether an operator's result, or a norm's parameter gradient, exceeds its limit."""
    if row.key.port in GRADIENTS:
        # Summaries contain norms too, so values are not required.
        return "Norm" in row.class_name and _is_over_limit(row)
    return row.key.port == "output" and is_operator_over_limit(row)


def is_cancelled_over_limit(row: Row) -> bool:
    """Return whether the input gradient of a norm or a softmax exceeds the limit of its format."""
    if row.key.port != "grad_input":
        return False
    return ("Norm" in row.class_name or row.class_name.endswith("Softmax")) and _is_far(row)


def is_arriving_gradient_off(row: Row) -> bool:
    """Return whether a gradient arriving at the model's output exceeds the limit of its format."""
    return row.key.port == "grad_output" and row.key.site in _MODEL and _is_far(row)


def is_updated_parameter_over_limit(row: Row) -> bool:
    """Return whether a parameter after an update exceeds the limit of its format."""
    if row.key.port != "param" or not (row.key.step or row.key.moment == "after"):
        return False
    return _is_over_limit(row)


def is_leaf_beyond_rounding(row: Row) -> bool:
    """Return whether a module's output differs by more than its own rounding explains."""
    if row.key.port != "output" or row.key.phase != "forward" or row.basis != "values":
        return False
    if "/" in row.key.site or row.metrics.get("one_sided"):
        return False
    dtype = coarsest((row.reference_dtype, row.candidate_dtype))
    if dtype is None:
        return False
    least = max(_ROUNDINGS * dtype.unit_roundoff, _SHARE * LIMITS[dtype.name])
    return least < row.metrics.get(METRIC, 0.0) < math.inf


def is_bias(slot: str) -> bool:
    """Return whether a parameter is a layer's bias; `b_0` is Paddle's name for it."""
    return slot in ("bias", "b_0")


def _few(dtype: DType) -> float:
    return min(_FEW * dtype.unit_roundoff, LIMITS[dtype.name])


def has_many_scales(row: Row) -> bool:
    """Return whether a row is a weight that was dequantised with a tensor of scales."""
    recipes = f"{row.reference_recipe} {row.candidate_recipe}"
    return row.key.port == "param" and row.basis == "values" and "dequantise(" in recipes


def _is_far(row: Row) -> bool:
    return row.basis == "values" and _is_over_limit(row)


def _is_over_limit(row: Row) -> bool:
    dtype = coarsest((row.reference_dtype, row.candidate_dtype))
    return dtype is not None and LIMITS[dtype.name] < row.metrics.get(METRIC, 0.0) < math.inf


# --- the table of rules


class EvidenceSource(NamedTuple):
    """One rule of evidence.

    Attributes:
        rule: Class of the rule (`context.EvidenceRule`), imported when a row needs it.
        applies: Whether the rule may have something to add to a row; cheap, reads no tensor.
        columns: Columns to show if a row has them.
        needs_weights: Whether the rule needs weights in the runs.
    """

    rule: Address
    applies: Callable[[Row], bool]
    columns: tuple[Column, ...] = ()
    needs_weights: bool = False


_HERE = "driftline.comparison.evidence"
# Sums come before optimizers: if a sum is known, the optimizer's arithmetic need not be followed.
SOURCES: tuple[EvidenceSource, ...] = (
    # The column of this rule is shown only where it decides.
    EvidenceSource(Address(f"{_HERE}.loose_bias:BiasShift"), is_output_over_limit),
    EvidenceSource(
        Address(f"{_HERE}.cancelling:SummedElements"), is_sum_over_limit, (SUMMED_COLUMN,)
    ),
    EvidenceSource(
        Address(f"{_HERE}.optimizer_rounding:OptimizerRounding"),
        is_operator_over_limit,
        (SUMMED_COLUMN, BEYOND_ROUNDING_COLUMN),
    ),
    EvidenceSource(
        Address(f"{_HERE}.cancelling:CancelledInModule"),
        is_cancelled_over_limit,
        (CANCELLED_COLUMN,),
    ),
    EvidenceSource(
        Address(f"{_HERE}.loss_gradient:LossGradient"),
        is_arriving_gradient_off,
        (BEYOND_OUTPUTS_COLUMN,),
    ),
    EvidenceSource(
        Address(f"{_HERE}.optimizer_rounding:TurnedSigns"),
        is_updated_parameter_over_limit,
        (MOVED_APART_COLUMN,),
        needs_weights=True,
    ),
    EvidenceSource(
        Address(f"{_HERE}.integer_steps:IntegerSteps"), has_many_scales, needs_weights=True
    ),
    EvidenceSource(
        Address(f"{_HERE}.recomputed:RecomputedLeaf"),
        is_leaf_beyond_rounding,
        ADDED_COLUMNS,
        needs_weights=True,
    ),
)
COLUMNS = tuple(dict.fromkeys(column for source in SOURCES for column in source.columns))


# --- looking it up


def with_evidence(
    rows: Sequence[Row], pairs: Sequence[Pair], reference: Run, candidate: Run
) -> Sequence[Row]:
    """Return rows with the evidence of all rules that apply.

    Args:
        rows: Measured rows; all rows of a plan, or some.
        pairs: All pairs of the plan.
        reference: The reference run.
        candidate: The candidate run.
    """
    if not is_spooled(rows):
        return _looked_up(rows, pairs, reference, candidate)
    if not _may_be_asked(rows):
        return rows
    if isinstance(pairs, tuple):  # all pairs are in memory already
        return like_storage(rows, _looked_up(list(rows), pairs, reference, candidate))
    leaves = "param" in rows.ports
    return rows.changed_by_process(_OfOneProcess(pairs, reference, candidate, leaves=leaves))


def _looked_up(
    rows: Sequence[Row], pairs: Sequence[Pair], reference: Run, candidate: Run
) -> Sequence[Row]:
    needs = needs_or_is_leaf if _has_weights(pairs) else needs_evidence
    if not any(map(needs, rows)):
        return rows
    # Imported on use: code that reads graphs and tensors is not needed if all rows pass.
    from driftline.comparison.evidence.context import EvidenceContext, add_evidence

    context = EvidenceContext([row for row in rows if needs(row)], pairs, reference, candidate)
    return add_evidence(rows, context, [source.rule.load()(context) for source in SOURCES])


def _may_be_asked(rows: RowSpool) -> bool:
    """Return whether any row of a long table needs evidence."""
    if "param" in rows.ports:
        return any(map(needs_or_is_leaf, rows))
    kinds = (*GRADIENTS, "grad_input", "grad_output")
    if not rows.has_operators and rows.ports.isdisjoint(kinds):
        return False
    if not any_needs_evidence(rows.largest, after_the_first_step=rows.after_the_first_step):
        return False  # known without reading the rows again
    return any(map(needs_evidence, rows))


class _OfOneProcess:
    """Adds evidence to the rows of one process; steps and sums never span processes."""

    def __init__(
        self, pairs: Sequence[Pair], reference: Run, candidate: Run, *, leaves: bool
    ) -> None:
        self._runs = (reference, candidate)
        self._needs = needs_or_is_leaf if leaves else needs_evidence
        self._processes: Iterator[tuple[tuple[int, int], Iterator[Pair]]] = itertools.groupby(
            pairs, key=lambda pair: (pair.reference.key.rank, pair.reference.key.process)
        )
        self._next = next(self._processes, None)

    def __call__(self, rows: Sequence[Row]) -> Sequence[Row]:
        place = (rows[0].key.rank, rows[0].key.process)
        while self._next is not None and self._next[0] < place:
            self._next = next(self._processes, None)
        if self._next is None or self._next[0] != place:
            return rows  # the end of the table has rows without partners
        if not any(map(self._needs, rows)):
            return rows  # avoids collecting the pairs
        pairs = list(self._next[1])
        self._next = next(self._processes, None)
        return _looked_up(rows, pairs, *self._runs)
