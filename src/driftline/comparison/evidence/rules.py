"""Which rows need evidence, and which rules look for it.

A row that is over the limit of its own format may be so for a reason that only the runs can show: a
bias that moves by itself, a sum that cancels, an optimizer that makes steps of rounding. The
predicates here are cheap and read no tensor; what reads tensors and graphs is loaded only where one
of them is true.
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
"""Ports of parameters' gradients."""
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
"""Of leaves that were computed again (`recomputed.py`); what they decide, `verdict` says."""
BEYOND_OUTPUTS = "beyond_outputs"
BEYOND_OUTPUTS_COLUMN = Column(
    BEYOND_OUTPUTS, "none", "relative L2 of a loss's gradient without what the output explains"
)
MOVED_APART_COLUMN = Column(
    MOVED_APART, "none", "relative L2 of a parameter that turned signs of its gradients explain"
)
_MODEL = ("(root)", "", "(program)")
"""Names that captures give to the model itself."""
_FEW = 16
"""So many roundings are nobody's fault."""
_ROUNDINGS, _SHARE = 2.0, 0.25
"""A leaf is computed again from so many roundings, and this share of its format's limit, on: less
convicts nobody, and a comparison need not wait for it."""


def needs_evidence(row: Row) -> bool:
    """Whether any evidence is looked for."""
    return any(source.applies(row) for source in SOURCES if not source.needs_weights)


def needs_or_is_leaf(row: Row) -> bool:
    """The same where weights are in the runs: leaves can be computed again."""
    return any(source.applies(row) for source in SOURCES)


def _has_weights(pairs: Sequence[Pair]) -> bool:
    return any(pair.reference.key.port == "param" for pair in pairs)


def any_needs_evidence(
    largest: Mapping[tuple[str, str], float], *, after_the_first_step: bool
) -> bool:
    """Whether `needs_evidence` can be true of any row, by the largest error of each two types."""
    for types, error in largest.items():
        dtype = coarsest(types)
        if dtype is None:
            continue
        if error > (_few(dtype) if after_the_first_step else LIMITS[dtype.name]):
            return True
    return False


def is_output_over_limit(row: Row) -> bool:
    """An output of a later step that differs by more than a few roundings."""
    if row.key.port != "output" or row.key.phase == "backward":
        return False
    if row.key.step == 0 or row.basis != "values":
        return False
    dtype = coarsest((row.reference_dtype, row.candidate_dtype))
    if dtype is None:
        return False
    return _few(dtype) < row.metrics.get(METRIC, 0.0) < math.inf


def is_operator_over_limit(row: Row) -> bool:
    """A row that no limit of its format holds, of an operator or a node."""
    if row.key.port not in ("input", "output", "param") or "/" not in row.key.site:
        return False
    return _is_far(row)


def is_sum_over_limit(row: Row) -> bool:
    """As `is_operator_over_limit`, of a result, or of the gradient of a norm's parameters."""
    if row.key.port in GRADIENTS:
        # Sizes are in summaries, too.
        return "Norm" in row.class_name and _is_over_limit(row)
    return row.key.port == "output" and is_operator_over_limit(row)


def is_cancelled_over_limit(row: Row) -> bool:
    """A gradient that a norm or a softmax sends back, and that no limit of its format holds."""
    if row.key.port != "grad_input":
        return False
    return ("Norm" in row.class_name or row.class_name.endswith("Softmax")) and _is_far(row)


def is_arriving_gradient_off(row: Row) -> bool:
    """A gradient that arrives at the output of the model, and that no limit of its format holds."""
    return row.key.port == "grad_output" and row.key.site in _MODEL and _is_far(row)


def is_updated_parameter_over_limit(row: Row) -> bool:
    """A parameter after an update that no limit of its format holds."""
    if row.key.port != "param" or not (row.key.step or row.key.moment == "after"):
        return False
    return _is_over_limit(row)


def is_leaf_beyond_rounding(row: Row) -> bool:
    """An output of a module that differs by more than its own rounding could make it."""
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
    """Whether a parameter is a layer's bias; `b_0` is Paddle's name of it."""
    return slot in ("bias", "b_0")


def _few(dtype: DType) -> float:
    return min(_FEW * dtype.unit_roundoff, LIMITS[dtype.name])


def has_many_scales(row: Row) -> bool:
    """A weight that was made numbers of integers, with a tensor of scales."""
    recipes = f"{row.reference_recipe} {row.candidate_recipe}"
    return row.key.port == "param" and row.basis == "values" and "dequantise(" in recipes


def _is_far(row: Row) -> bool:
    return row.basis == "values" and _is_over_limit(row)


def _is_over_limit(row: Row) -> bool:
    dtype = coarsest((row.reference_dtype, row.candidate_dtype))
    return dtype is not None and LIMITS[dtype.name] < row.metrics.get(METRIC, 0.0) < math.inf


# --- the table of rules


class EvidenceSource(NamedTuple):
    """A rule of evidence.

    Attributes:
        rule: The class of the rule (`context.EvidenceRule`), loaded when a row needs it.
        applies: Whether the rule may have something to look up for a row; cheap, reads no tensor.
        columns: Columns that are shown wherever a row has them.
        needs_weights: Whether it needs weights in the runs.
    """

    rule: Address
    applies: Callable[[Row], bool]
    columns: tuple[Column, ...] = ()
    needs_weights: bool = False


_HERE = "driftline.comparison.evidence"
# Sums before optimizers: a sum that is known leaves nothing to follow through an optimizer.
SOURCES: tuple[EvidenceSource, ...] = (
    # The column of this one is shown only where it decides.
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
    """Rows with what is known of biases that move by themselves, and of sums that cancel.

    Args:
        rows: Measured; all rows of a plan, or some.
        pairs: All pairs of the plan.
        reference: The one run.
        candidate: The other.
    """
    if not is_spooled(rows):
        return _looked_up(rows, pairs, reference, candidate)
    if not _may_be_asked(rows):
        return rows
    if isinstance(pairs, tuple):  # all of them are held already
        return like_storage(rows, _looked_up(list(rows), pairs, reference, candidate))
    leaves = "param" in rows.ports
    return rows.changed_by_process(_OfOneProcess(pairs, reference, candidate, leaves=leaves))


def _looked_up(
    rows: Sequence[Row], pairs: Sequence[Pair], reference: Run, candidate: Run
) -> Sequence[Row]:
    needs = needs_or_is_leaf if _has_weights(pairs) else needs_evidence
    if not any(map(needs, rows)):
        return rows
    # Loaded only here: what reads graphs and tensors is not needed where all rows hold.
    from driftline.comparison.evidence.context import EvidenceContext, add_evidence

    context = EvidenceContext([row for row in rows if needs(row)], pairs, reference, candidate)
    return add_evidence(rows, context, [source.rule.load()(context) for source in SOURCES])


def _may_be_asked(rows: RowSpool) -> bool:
    """Whether any row of a long table is one that evidence is looked for."""
    if "param" in rows.ports:
        return any(map(needs_or_is_leaf, rows))
    kinds = (*GRADIENTS, "grad_input", "grad_output")
    if not rows.has_operators and rows.ports.isdisjoint(kinds):
        return False
    if not any_needs_evidence(rows.largest, after_the_first_step=rows.after_the_first_step):
        return False  # known without reading them again
    return any(map(needs_evidence, rows))


class _OfOneProcess:
    """Looks up what rows of one process need; a step or a sum is of one process alone."""

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
            return rows  # what is alone comes at the end
        if not any(map(self._needs, rows)):
            return rows  # the pairs are not gathered
        pairs = list(self._next[1])
        self._next = next(self._processes, None)
        return _looked_up(rows, pairs, *self._runs)
