"""Failures that are certain whatever error sites add. Each has its own sentence.

    the inputs differ           nothing computed from them can be judged
    a container's code passes   positions, token ids or masks are wrong before any arithmetic
    other codes to a part
    integers are misread        a node decodes them with another scale or zero point
    NaN or Inf                  on one side only, or no finite number on either side
    a wrong gradient arrives    the loss differs, and the model is not to blame

This file reads judged rows once, in order, and no tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, TypeAlias

from driftline.comparison.evidence.rules import BEYOND_OUTPUTS
from driftline.comparison.table.row import Row
from driftline.comparison.tolerance.defaults import LIMITS, METRIC, coarsest
from driftline.comparison.verdict.verdict import execution
from driftline.numerics.dtypes import DTYPES

Kind: TypeAlias = Literal["inputs", "codes", "integers", "nonfinite", "gradient"]
ROOTS = ("(root)", "", "(program)")
"""Names that different captures give to the model itself."""

_FINE = 2.0**-20
_CAST, _ORDERS = 4.0, 16.0
"""Units of roundoff by which the inputs of two programs may differ. Inputs in a coarse format were
rounded a few times; those in a fine format may have been computed in another order."""
_TIES = 0.25
"""Fraction of codes that may differ if rounding decided choices at near ties."""
_TIED_FLAGS = 0.02
"""The same for booleans. If a token goes to another expert, only two flags among those of all
experts change, and few comparisons with a number are that close."""
_LOSS = 8.0
"""The error of a loss's gradient may be this many times that of the output, if no better bound is
known."""
_MOST_NAMED = 4

_NOTHING: Mapping[str, str] = {}
_Moment: TypeAlias = tuple[int, int, int]
"""Rank, process, step."""


class CertainFailure(NamedTuple):
    """A reason why a table fails whatever error its sites add.

    Attributes:
        kind: What is wrong.
        row: The row that shows it.
        site: The site to look at.
        sentence: The finding.
    """

    kind: Kind
    row: Row
    site: str
    sentence: str


def certain_failure(
    rows: Iterable[Row], misread: Mapping[str, str] = _NOTHING, culprit: Row | None = None
) -> CertainFailure | None:
    """The first certain failure in the order of the list above; None if there is none.

    Args:
        rows: The rows.
        misread: Sites that decode integers to other numbers than were encoded, with sentences.
        culprit: The row that shows that a site adds error, if one was convicted.
    """
    watch = _Watch(culprit)
    reader: Row | None = None
    for row in rows:
        watch.take(row)
        if misread and row.compared and row.key.site in misread:
            reader = _earlier(reader, row)
    failure = watch.failure()
    if reader is None or (failure is not None and failure.kind in ("inputs", "codes")):
        return failure
    site = reader.key.site
    return CertainFailure("integers", reader, site, f"'{site}' {misread[site]}")


class _Watch:
    """What is remembered of the rows so far."""

    def __init__(self, culprit: Row | None = None) -> None:
        self._culprit = culprit
        self._inputs: list[Row] = []
        # Inputs of the model that only one side gets, and sites that get any such input. A name
        # that both models get in some step does not count.
        self._lone_inputs: list[Row] = []
        self._shared_inputs: set[str] = set()
        self._given_more: set[tuple[_Moment, str]] = set()
        self._codes: Row | None = None
        self._container = ""
        self._one_sided: Row | None = None
        self._one_sided_in = ""
        self._nothing: Row | None = None
        self._has_outputs = False
        self._arriving: list[Row] = []
        self._outputs: dict[tuple[_Moment, str], Row] = {}
        self._entered: dict[_Moment, set[str]] = {}
        self._given: set[tuple[_Moment, str]] = set()
        # Moments in which a float result differs.
        self._computed: set[_Moment] = set()
        self._first_step: int | None = None
        self._trains = False

    def take(self, row: Row) -> None:
        key = row.key
        if key.port in ("param_grad", "optimizer_grad", "grad_output"):
            self._trains = True
        if key.phase == "recompute":
            return
        if self._first_step is None or key.step < self._first_step:
            self._first_step = key.step
        if _has_other_shape(row) and key.site in ROOTS:
            self._inputs.append(row)
        if not row.compared:
            self._of_one_program(row)
            return
        if row.decided_by == "one_sided" and row.status == "fail":
            self._of_one_side(row)
        elif holds_nothing_finite(row):
            self._nothing = _earlier(self._nothing, row)
        if key.site in ROOTS:
            self._of_root(row)
        elif key.port == "input":
            self._inner_input(row)
        if key.port in ("input", "output"):
            self._has_outputs = self._has_outputs or key.port == "output"
            self._enter(row)

    def _of_one_program(self, row: Row) -> None:
        """Record an input that only one side gets."""
        site = row.key.site
        if row.status in ("missing", "extra") and row.key.port == "input" and "/" not in site:
            self._given_more.add((_moment(row), site))
            if site in ROOTS:
                self._lone_inputs.append(row)

    def _of_one_side(self, row: Row) -> None:
        """Record NaN or Inf on one side; if it is first seen at an input, no part computed it."""
        self._one_sided = _earlier(self._one_sided, row)
        if self._one_sided is not row:
            return
        self._one_sided_in = ""
        if row.key.port == "input" and row.key.site not in ROOTS:
            entered = self._entered.get(_moment(row), set[str]())
            self._one_sided_in = _enclosing(row.key.site, entered) or ""

    def _enter(self, row: Row) -> None:
        moment, site = _moment(row), row.key.site
        self._entered.setdefault(moment, set()).add(site)
        if not _is_float(row):
            return
        if row.key.port == "input":
            self._given.add((moment, site))
        # A cast embedding has no float inputs, and no choice depends on its rounding.
        elif row.metrics.get(METRIC, 0.0) > 0.0 and (moment, site) in self._given:
            self._computed.add(moment)

    def _of_root(self, row: Row) -> None:
        key = row.key
        if key.port == "input":
            self._shared_inputs |= {key.slot, row.candidate_slot}
            if input_differs(row):
                self._inputs.append(row)
        elif key.port == "output" and _is_float(row):
            self._outputs[_moment(row), key.slot] = row
        elif key.port == "grad_output" and _is_float(row):
            self._arriving.append(row)

    def _inner_input(self, row: Row) -> None:
        """Record wrong codes that a container's own code made and that rounding cannot explain."""
        different = row.metrics.get("different", 0)
        if self._codes is not None or not different or _is_float(row) or row.status != "fail":
            return
        moment = _moment(row)
        entered = self._entered.get(moment, set[str]())
        if any(_moment(input_row) == moment for input_row in self._inputs):
            return
        share = different / max(math.prod(row.reference_shape or ()), 1)
        # A router or a codebook chooses by computed numbers, and may choose differently at a tie.
        most = _TIED_FLAGS if row.reference_dtype == row.candidate_dtype == "bool" else _TIES
        if moment in self._computed and share <= most:
            return
        container = _enclosing(row.key.site, entered)
        if container is not None:
            self._codes, self._container = row, container

    def failure(self) -> CertainFailure | None:
        inputs = [row for row in self._inputs if self._counts(row)]
        if inputs:
            return _of_inputs(inputs)
        if (lone := self._by_lone_inputs()) is not None:
            return lone
        if self._codes is not None:
            return _of_codes(self._codes, self._container)
        if self._one_sided is not None or self._nothing is not None:
            # If no outputs were captured, any part may have computed them.
            container = self._one_sided_in if self._has_outputs else ""
            return _of_nonfinite(self._one_sided, self._nothing, container)
        for row in self._arriving:
            made = self._outputs.get((_moment(row), row.key.slot))
            if (beyond := gradient_excess(row, made)) > 1.0:
                return _of_gradient(row, made, beyond)
        return None

    def _by_lone_inputs(self) -> CertainFailure | None:
        """The failure that only one side gives the model an input, if the first site that is off
        gets it.

        An additional input alone is no failure: a mask of one program may hide nothing. But a site
        that gets it and is off has not computed another function of the same inputs.
        """
        shown = [row for row in (self._codes, self._one_sided, self._culprit) if row is not None]
        if not shown:
            return None
        row = min(shown, key=execution)
        moment, site = _moment(row), row.key.site
        # The input of a part was computed by the code around it.
        if row.key.port == "input":
            site = _enclosing(site, self._entered.get(moment, set())) or site
        lone_rows = [
            lone
            for lone in self._lone_inputs
            if _moment(lone) == moment
            and self._counts(lone)
            and lone.key.slot not in self._shared_inputs
        ]
        if not lone_rows or (moment, site) not in self._given_more:
            return None
        return _of_lone_inputs(lone_rows, row)

    def _counts(self, row: Row) -> bool:
        """Whether an input comes from outside; a decoder later gets what it generated itself."""
        return row.key.step == self._first_step or self._trains


# --- what counts as different


def input_differs(row: Row) -> bool:
    """Whether an input of a model differs by more than a cast or an order of summation."""
    dtype = coarsest((row.reference_dtype, row.candidate_dtype))
    if dtype is None or not (_is_float(row) and _is_float_name(row.candidate_dtype)):
        # A mask of booleans and one of floats express the same in different ways.
        same_kind = _is_float_name(row.reference_dtype) == _is_float_name(row.candidate_dtype)
        return same_kind and bool(row.metrics.get("different", 0))
    error = float(row.metrics.get(METRIC, 0.0))
    if row.metrics.get("one_sided"):
        return True
    units = _ORDERS if dtype.unit_roundoff <= _FINE else _CAST
    return not error <= min(units * dtype.unit_roundoff, LIMITS[dtype.name])


def holds_nothing_finite(row: Row) -> bool:
    """Whether neither side has a finite element, so that nothing was compared.

    A tensor of minus infinities may be a mask of an operator or an input, but not the result of a
    module.
    """
    metrics = row.metrics
    # This is called for every row, and most rows have no such element.
    if not metrics.get("reference_nan") and not metrics.get("reference_inf"):
        return False
    count = math.prod(row.reference_shape) if row.reference_shape is not None else 0
    if not count or not _is_float(row) or not _is_float_name(row.candidate_dtype):
        return False
    nans: list[float] = []
    for side in ("reference", "candidate"):
        nan, inf = metrics.get(f"{side}_nan"), metrics.get(f"{side}_inf")
        if nan is None or inf is None or nan + inf < count:
            return False
        nans.append(nan)
    is_result = row.key.port not in ("input", "param") and "/" not in row.key.site
    return min(nans) > 0 or is_result


def gradient_excess(row: Row, made: Row | None) -> float:
    """The error of a gradient at the model's output, divided by the error that is explained.

    Args:
        row: The row of the gradient.
        made: The row of the output; None if it was not compared.
    """
    dtype = coarsest((row.reference_dtype, row.candidate_dtype))
    error = float(row.metrics.get(METRIC, math.nan))
    if dtype is None or math.isnan(error):
        return 0.0
    # If other parts of the model read the output, its gradient comes from them, in their format.
    own = row.limit if row.decided_by == METRIC and row.limit is not None else 0.0
    limit = max(LIMITS[dtype.name], own)
    output_format = None
    if made is not None:
        output_format = coarsest((made.reference_dtype, made.candidate_dtype))
    # The gradient of a loss in float32 is as inexact as the output from which the loss is computed.
    if output_format is not None:
        limit = max(limit, LIMITS[output_format.name])
    if BEYOND_OUTPUTS in row.metrics:
        return min(error, float(row.metrics[BEYOND_OUTPUTS])) / limit
    if made is None:
        return 0.0
    output = float(made.metrics.get(METRIC, math.nan))
    if not math.isfinite(output):
        return 0.0
    # The gradient of a cross entropy changes by less than its largest element times the change of
    # the logits.
    size = float(row.metrics.get("reference_l2", 0.0))
    largest = max(abs(float(row.metrics.get(f"reference_{end}", 0.0))) for end in ("min", "max"))
    moved = output * float(made.metrics.get("reference_l2", 0.0))
    explained = largest * moved / size if size > 0.0 else math.inf
    return error / max(limit, _LOSS * output, explained)


# --- sentences


def _of_inputs(rows: list[Row]) -> CertainFailure:
    first = min(rows, key=lambda row: (row.key.step, row.order))
    when = f" in step {first.key.step}" if first.key.step else ""
    slots = list(dict.fromkeys(row.key.slot for row in rows))
    others = [f"'{slot}'" for slot in slots if slot != first.key.slot]
    more = ""
    if others:
        rest = len(others) - _MOST_NAMED
        more = f"; so do {', '.join(others[:_MOST_NAMED])}" + (f" and {rest} more" * (rest > 0))
    sentence = (
        f"the inputs differ already{when}: '{first.key.slot}' of the model itself"
        f"{_difference(first)}{more}; give both programs the same inputs"
    )
    return CertainFailure("inputs", first, first.key.site, sentence)


def _of_lone_inputs(rows: list[Row], first: Row) -> CertainFailure:
    alone = [
        f"{', '.join(slots)} in the {side} only"
        for side, status in (("reference", "missing"), ("candidate", "extra"))
        if (slots := [f"'{row.key.slot}'" for row in rows if row.status == status])
    ]
    sentence = (
        f"the inputs differ already: the model is given {' and '.join(alone)}; give both programs "
        f"the same inputs; what is off first is the {first.key.port} of "
        f"{_quoted(first.key.site)}"
    )
    return CertainFailure("inputs", first, rows[0].key.site, sentence)


def _difference(row: Row) -> str:
    if not row.compared:
        shapes = [list(shape or ()) for shape in (row.reference_shape, row.candidate_shape)]
        return f" has shape {shapes[0]}, in the candidate {shapes[1]}"
    if _is_float(row):
        return f", relative_l2 {float(row.metrics.get(METRIC, math.nan)):.3g}"
    count = math.prod(row.reference_shape or ())
    return f", {int(row.metrics.get('different', 0))} of {count} elements differ"


def _of_codes(row: Row, container: str) -> CertainFailure:
    sentence = f"the drift starts {_in_own_code(container, row)}{_difference(row)}"
    return CertainFailure("codes", row, container, sentence)


def _in_own_code(container: str, row: Row) -> str:
    """The place of an input that a container's own code made, in words."""
    return (
        f"inside {_quoted(container)}, in its own code before it calls '{row.key.site}': "
        f"input '{row.key.slot}'"
    )


def _quoted(site: str) -> str:
    return "the model itself" if site in ROOTS else f"'{site}'"


def _of_nonfinite(one_sided: Row | None, nothing: Row | None, container: str) -> CertainFailure:
    first = nothing if one_sided is None else one_sided
    if one_sided is not None and nothing is not None:
        first = min(one_sided, nothing, key=lambda row: (row.key.step, row.order))
    assert first is not None
    name = _quoted(first.key.site)
    if first is one_sided and container:
        sentence = f"NaN or Inf begins {_in_own_code(container, first)}: {first.reason}"
        return CertainFailure("nonfinite", first, container, sentence)
    if first is one_sided:
        sentence = f"NaN or Inf begins at {name}, {first.key.port}: {first.reason}"
    else:
        sentence = (
            f"neither side has a finite number in {name}, {first.key.port} '{first.key.slot}': "
            "there is nothing to compare; look for NaN in the reference first"
        )
    return CertainFailure("nonfinite", first, first.key.site, sentence)


def _of_gradient(row: Row, made: Row | None, beyond: float) -> CertainFailure:
    output = float(made.metrics.get(METRIC, math.nan)) if made is not None else math.nan
    agrees = f", while the output itself is off by {output:.3g} only" if output == output else ""
    return CertainFailure(
        "gradient",
        row,
        row.key.site,
        "a wrong gradient arrives at the model's output: its relative_l2 is "
        f"{float(row.metrics[METRIC]):.3g}{agrees}; look at the loss and at what is computed "
        "behind the model",
    )


# --- small things


def _is_float(row: Row) -> bool:
    return _is_float_name(row.reference_dtype)


def _is_float_name(name: str) -> bool:
    dtype = DTYPES.get(name)
    return dtype is not None and dtype.is_floating


def _has_other_shape(row: Row) -> bool:
    """Whether a row is an input that could not be compared because the shapes differ."""
    return (
        row.status == "incomparable"
        and row.key.port == "input"
        and row.reference_shape is not None
        and row.candidate_shape is not None
        and row.reference_shape != row.candidate_shape
    )


def _moment(row: Row) -> _Moment:
    return row.key.rank, row.key.process, row.key.step


def _earlier(first: Row | None, row: Row) -> Row:
    if first is None or (row.key.step, row.order) < (first.key.step, first.order):
        return row
    return first


def _enclosing(site: str, entered: set[str]) -> str | None:
    """The nearest site around another one among those that ran."""
    while "." in site:
        site = site.rpartition(".")[0]
        if site in entered:
            return site
    return next((root for root in ROOTS if root in entered), None)
