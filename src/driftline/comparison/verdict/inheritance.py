"""Reasons to widen the limit of a row: formats, integer codes and cancelled gradients before it.

There are three reasons, all found in rows alone:
the coarsest format that came before the row in its process (`Inherited`);
operators that compute with integers on one side and with floats on the other (`Quantised`);
gradients that cancelled (`CancelledGradients`). What remains of such a gradient is partly rounding.
A backward pass is linear, so everything computed from it has the same relative error. A gradient
is treated as computed from a cancelled one in two cases: it comes later in the same backward pass
and is as small (cancelled gradients are smaller than all others), or it belongs to a parameter of a
module that received such a gradient.

Limits are only widened, never narrowed: a row within its own limit is within any other.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from driftline.comparison.evidence.rules import GRADIENTS, is_bias
from driftline.comparison.table.row import Row
from driftline.comparison.table.table import is_spooled
from driftline.comparison.tolerance.defaults import (
    METRIC,
    QUANTISED,
    ROUNDINGS,
    WEIGHT_ROUNDINGS,
    float_rounding,
    rounding_to_steps,
    step_of,
)
from driftline.comparison.tolerance.tolerance import (
    AS_CANCELLED,
    AS_ITS_GRADIENT,
    INTEGER_STEP,
    SUMMED_GRADIENTS,
    WHAT_CANCELS,
)
from driftline.numerics.dtypes import DTYPES, DType, coarser

_PORTS = ("grad_output", "grad_input", *GRADIENTS)
_GROWN = 4
"""Factor by which the relative error may grow on the way; the measured growth was 1.2 over two
blocks."""
_LARGER = 16
"""Factor by which the norm of such a gradient may grow on the way through one module."""
_MOSTLY = 0.02
"""Relative error above which a gradient is mostly rounding, and its results cannot be judged."""
_LATER, _CLEAR = 4, 0.05
"""Factor on the gradients' error, for the error of later steps; and the largest gradient error that
is taken into account."""
_TWO_ROUNDINGS = 10.0
"""Largest relative error between two tensors that consist of rounding alone."""
_BEYOND = 100
"""Multiple of the cancelled gradient's error above which rounding is no longer an explanation."""


class CancelledGradients:
    """The cancelled gradients of the current step, and the sites that received them."""

    def __init__(self) -> None:
        self._moment = (-1, -1, -1)
        self._given: dict[str, float] = {}
        self._off, self._size = 0.0, 0.0
        self._unclear: set[tuple[int, int, int, str]] = set()
        self._moved: dict[tuple[int, int], tuple[int, float]] = {}

    def remember(self, judged: Row) -> None:
        """Record a gradient that has cancelled, or that was computed from one."""
        if judged.key.port == "optimizer_grad" and self._moment == _moment(judged):
            # The gradients that an optimizer receives change the weights of all later steps.
            whose = judged.key.rank, judged.key.process
            first, off = self._moved.get(whose, (judged.key.step, 0.0))
            self._moved[whose] = first, max(off, self._off)
        if not _is_gradient(judged) or judged.key.port in GRADIENTS:
            return
        if judged.limit_from.endswith(WHAT_CANCELS):
            off = max(float(judged.metrics[METRIC]), self._origin(judged) or 0.0)
        elif judged.limit_from.endswith(AS_CANCELLED):
            off = self._origin(judged) or 0.0
        else:
            return
        if self._moment != _moment(judged):
            self._moment = _moment(judged)
            self._given.clear()
            self._size = 0.0
        self._off = off
        self._size = max(self._size, reference_norm(judged))
        if judged.key.port == "grad_output":
            self._given[judged.key.site] = off

    def judged(self, row: Row) -> Row:
        """Return a failing row, judged by the cancelled gradient it was computed from, if any."""
        off, value = self._origin(row), float(row.metrics.get(METRIC, 0.0))
        if row.decided_by != METRIC:
            return row
        if off is None:
            return self._of_later_step(row, value)
        source = f"{row.limit_from}, {AS_CANCELLED}"
        # The row is mostly rounding, so it can be shown neither right nor wrong.
        if off > _MOSTLY:
            if not value <= _BEYOND * off:
                return row
            reason = f"{METRIC} {value:.3g}: made of one that cancels, and is mostly rounding"
            return row.judged("incomparable", reason, decided_by=METRIC, limit_from=source)
        if not value <= _GROWN * off:
            return row
        return row.judged(
            "pass",
            f"{METRIC} {value:.3g}: made of one that cancels, and is off by {off:.3g}",
            decided_by=METRIC,
            limit=_GROWN * off,
            limit_from=source,
            severity=value / (_GROWN * off),
        )

    def _of_later_step(self, row: Row, value: float) -> Row:
        """Return a row of a later step, whose weights were changed by such gradients."""
        step, off = self._moved.get((row.key.rank, row.key.process), (row.key.step, 0.0))
        place = (*_moment(row), row.key.site)
        # Errors of the gradients count only up to a limit; otherwise a fault may hide behind them.
        most = _LATER * min(off, _CLEAR)
        if place in self._unclear and row.key.port in GRADIENTS and is_bias(row.key.slot):
            most = _TWO_ROUNDINGS  # a sum of the arriving gradient, which may cancel
        if row.key.step <= step or not value <= most:
            return row
        if row.key.port == "grad_output":
            self._unclear.add(place)
        reason = (
            f"{METRIC} {value:.3g}: in step {step} its weights were given gradients that cancel, "
            f"and are off by {off:.3g}"
        )
        return row.judged("incomparable", reason, decided_by=METRIC, limit_from=row.limit_from)

    def _origin(self, row: Row) -> float | None:
        """Return the error of the cancelled gradient that a row was computed from; or None."""
        if not _is_gradient(row) or self._moment != _moment(row):
            return None
        if row.key.port not in GRADIENTS and 0.0 < reference_norm(row) <= _LARGER * self._size:
            return self._off
        error, site = self._given.get(row.key.site), row.key.site
        # A part of a module inherits what its module received.
        while error is None and site:
            site = site.rpartition(".")[0]
            error = self._given.get(site)
        return error


def _is_gradient(row: Row) -> bool:
    """Whether a row is the gradient of a module, or of an operator of the backward pass."""
    return row.key.port in _PORTS or ("/" in row.key.site and row.key.phase == "backward")


def _moment(row: Row) -> tuple[int, int, int]:
    return row.key.rank, row.key.process, row.key.step


def reference_norm(row: Row) -> float:
    """Norm of the reference; 0.0 if it is zero, not finite or unknown."""
    norm = float(row.metrics.get("reference_l2", 0.0))
    return norm if math.isfinite(norm) else 0.0


# Operators that compute with integers on one side of a comparison and with floats on the other.


_CODES = ("int8", "int4", "uint4")
"""Integer types that are codes when compared with floats; wider ones may be ids and lengths."""

_NO_TYPES: Mapping[str, str] = {}

_Call = tuple[int, int, int, str]
_Sizes = tuple[int, ...]
_Codes = dict[_Call, list[tuple[_Sizes, str]]]
"""Integer tensors without a partner, by the site of their own side."""
_Floats = dict[_Call, set[_Sizes]]


def quantised_row(row: Row) -> str:
    """Return the type of the codes that a recipe converted to numbers; empty if there are none."""
    for dtype, recipe in (
        (row.reference_dtype, row.reference_recipe),
        (row.candidate_dtype, row.candidate_recipe),
    ):
        if "dequantise" in recipe and "unpack" in recipe:
            return "int8" if "unpack(axis 0, 0:4)" in recipe else "int4"  # codes per word
        if dtype in QUANTISED and "dequantise" in recipe:
            return dtype
    return ""


def quantised_limit(row: Row, code_type: str) -> float:
    """Return the relative error that rounding to codes explains in a row.

    With a single scale it follows from that scale; with several, from the width of the integers.
    Small floats have relative steps, which no scale changes.
    """
    roundings = WEIGHT_ROUNDINGS if row.key.port == "param" else ROUNDINGS
    if DTYPES[code_type].is_floating:
        return roundings * float_rounding(DTYPES[code_type])
    step = max(
        step_of(row.reference_recipe),
        step_of(row.candidate_recipe),
        float(row.metrics.get(INTEGER_STEP, 0.0)),
    )
    count = math.prod(row.reference_shape or ())
    if step and count and (norm := reference_norm(row)):
        return roundings * rounding_to_steps(step, count, norm)
    return QUANTISED[code_type]


def _explained_by_codes(row: Row, code_type: str) -> float:
    """Return the operator error that the codes of its output or weight explain; else 0.0."""
    if row.key.port == "output" and step_of(row.candidate_recipe):
        return quantised_limit(row, code_type)
    if row.key.port == "param" and (row.metrics.get(INTEGER_STEP) or DTYPES[code_type].is_floating):
        # The part of a weight that was rounded away is missing in every result of that weight.
        error = float(row.metrics.get(METRIC, math.inf))
        return ROUNDINGS * min(error, quantised_limit(row, code_type))
    return 0.0


class Quantised:
    """The reference's sites that are quantised on one side, by step."""

    def __init__(
        self,
        rows: Sequence[Row],
        rounded: Collection[str] = (),
        types: Mapping[str, str] = _NO_TYPES,
    ) -> None:
        """Find the sites.

        Args:
            rows: All rows.
            rounded: Sites that compute with codes but have floats as inputs and outputs.
            types: Types of the codes of these sites, where they are known.
        """
        self._rounded = rounded
        self._types = types
        self._known: dict[_Call, str] = {}
        self._explained: dict[_Call, float] = {}
        # The counts taken while the rows were written show that no row has codes.
        if is_spooled(rows) and not rows.has_recipes and rows.dtypes.isdisjoint(_CODES):
            return
        codes: _Codes = {}
        floats: _Floats = {}
        extra: list[Row] = []
        for row in rows:
            if row.status == "extra":
                extra.append(row)
            elif row.status == "missing":
                _sort(row.reference_dtype, row.reference_shape, row, _ours(row), codes, floats)
            elif code_type := quantised_row(row) or _against_float(row):
                self._known.setdefault(_ours(row), code_type)
                if explained := _explained_by_codes(row, code_type):
                    before = self._explained.get(_ours(row), 0.0)
                    self._explained[_ours(row)] = max(before, explained)
        if codes or any(row.candidate_dtype in _CODES for row in extra):
            self._match_lone_codes(rows, extra, codes, floats)

    def _match_lone_codes(
        self, rows: Sequence[Row], extra: Sequence[Row], codes: _Codes, floats: _Floats
    ) -> None:
        """Record operators that have codes on one side and floats of the same sizes on the other.

        Args:
            rows: All rows.
            extra: The rows that only the candidate has.
            codes: Integer tensors of the reference without a partner.
            floats: Floating-point tensors of the reference without a partner.
        """
        # Rows that only the candidate has use the candidate's names.
        partner: dict[_Call, _Call] = {}
        for row in rows:
            if row.status not in ("extra", "missing"):
                partner.setdefault(_theirs(row), _ours(row))
        their_codes: _Codes = {}
        their_floats: _Floats = {}
        for row in extra:
            _sort(
                row.candidate_dtype,
                row.candidate_shape,
                row,
                partner.get(_ours(row)),
                their_codes,
                their_floats,
            )
        for integers, others in ((codes, their_floats), (their_codes, floats)):
            for call, matrices in integers.items():
                for sizes, dtype in matrices:
                    if sizes in others.get(call, ()):
                        self._known.setdefault(call, dtype)

    def sites(self) -> dict[str, float]:
        """Return the relative error that each of these sites may have."""
        allowed: dict[str, float] = {}
        for call, code_type in self._known.items():
            site = call[-1]
            explained = self._explained.get(call, QUANTISED[code_type])
            allowed[site] = max(allowed.get(site, 0.0), explained)
        return allowed

    def at(self, row: Row) -> str:
        """Return the type of the codes of a row's own site; empty for an ordinary site."""
        if row.key.site in self._rounded:
            return self._known.get(_ours(row)) or self._types.get(row.key.site, "int8")
        return self._known.get(_ours(row), "") if self._known else ""


def _sort(
    dtype: str,
    shape: _Sizes | None,
    row: Row,
    call: _Call | None,
    codes: dict[_Call, list[tuple[_Sizes, str]]],
    floats: dict[_Call, set[_Sizes]],
) -> None:
    """Add a matrix without a partner to the codes or floats; vectors are not operands."""
    if call is None or shape is None or len(shape) < 2 or "mask" in row.key.slot:
        return
    # Codes and floats of one operator have the same sizes, in any order.
    sizes = tuple(sorted(shape))  # weights may be transposed
    if dtype in _CODES:
        codes.setdefault(call, []).append((sizes, dtype))
    elif dtype in DTYPES and DTYPES[dtype].is_floating:
        floats.setdefault(call, set()).add(sizes)


def _against_float(row: Row) -> str:
    """Return the type of codes that face floats but have no scale; empty if there are none."""
    reference, candidate = row.reference_dtype, row.candidate_dtype
    if row.status != "incomparable" or "mask" in row.key.slot:
        return ""
    for code, other in ((reference, candidate), (candidate, reference)):
        if code in _CODES and other in DTYPES and DTYPES[other].is_floating:
            return code
    return ""


def _ours(row: Row) -> _Call:
    return (row.key.rank, row.key.process, row.key.step, row.key.site)


def _theirs(row: Row) -> _Call:
    key = row.key
    return (
        key.rank if row.candidate_rank is None else row.candidate_rank,
        key.process,
        key.step if row.candidate_step is None else row.candidate_step,
        row.candidate_site or key.site,
    )


# What a row inherits from rows that were computed before it: their format and their rounding.


class Inheritance(NamedTuple):
    """A limit of relative L2 that a row may have by inheritance, and a short reason."""

    limit: float
    reason: str


class Inherited:
    """The formats and rounding of the rows so far, separately for each rank and process."""

    def __init__(self, quantised: Quantised | None = None, *, in_turn: bool = False) -> None:
        """in_turn: Whether rows are sorted by step, so that finished steps can be forgotten."""
        self._quantised = quantised
        self._in_turn = in_turn
        self._moment = (-1, -1, -1)
        self._codes: dict[tuple[int, int], str] = {}
        self._coarsest: dict[tuple[int, int], DType] = {}
        self._arrived: dict[tuple[int, int, int, str], tuple[float, float]] = {}
        self.rounding = CancelledGradients()

    def format_of(self, row: Row, own: DType | None) -> DType | None:
        """Return the coarsest format that a row's values went through, including its own.

        Logits that were converted to float32 at the end of a bfloat16 model still have bfloat16's
        rounding error. Parameters have no inputs, so they keep their own format.
        """
        if own is None or row.key.port == "param":
            return own
        place = (row.key.rank, row.key.process)
        # If a model computes in bfloat16 anywhere, all later values have its rounding error.
        before = self._coarsest.get(place)
        self._coarsest[place] = own if before is None else coarser(before, own)
        return self._coarsest[place]

    def codes_of(self, row: Row) -> str:
        """Return the integer type that the row's operator or earlier ones used; else empty.

        The results of such operators are floats again, but contain the error of rounding to the few
        steps of that integer.
        """
        place = (row.key.rank, row.key.process)
        if self._quantised is None or row.key.port == "param":
            return ""
        if row.key.port == "output" and (own := self._quantised.at(row)):
            self._codes[place] = max(self._codes.get(place, own), own, key=QUANTISED.__getitem__)
        return self._codes.get(place, "")

    def remember(self, judged: Row) -> None:
        """Record the gradient that arrived at a module, for the gradients of its parameters."""
        self.rounding.remember(judged)
        # Rows over their limit are recorded too: the size of a sum's terms does not depend on it,
        # and a wrong gradient is reported by its own row.
        if judged.key.port != "grad_output" or judged.limit is None:
            return
        # Rows are sorted by step, so gradients of a finished step are not needed any more.
        if self._in_turn and self._moment != _module(judged)[:3]:
            self._moment = _module(judged)[:3]
            self._arrived.clear()
        norm = reference_norm(judged)
        limit, square = self._arrived.get(_module(judged), (0.0, 0.0))
        self._arrived[_module(judged)] = (max(limit, judged.limit), square + norm * norm)

    def for_gradient(self, row: Row) -> Inheritance | None:
        """Return the error that a parameter's gradient may inherit from the gradient it sums.

        The limit is that of the gradient that arrived (float16 gradients near the smallest step
        lose digits that no later product restores). A bias's gradient is the sum of what arrived.
        If that sum cancels (the gradient of an attention key's bias is nothing but rounding), the
        rounding error is a fraction of the terms, not of the small sum.
        """
        if row.key.port not in ("param_grad", "optimizer_grad"):
            return None
        limit, square = self._arrived.get(_module(row), (0.0, 0.0))
        left = reference_norm(row)
        if is_bias(row.key.slot) and left:
            share = limit * math.sqrt(square) / left
            if share > limit:
                return Inheritance(share, SUMMED_GRADIENTS)
        return Inheritance(limit, AS_ITS_GRADIENT) if limit else None


class Unrelated(Inherited):
    """Tensors of a file, which were not computed from each other in the file's order."""

    def format_of(self, row: Row, own: DType | None) -> DType | None:
        del row
        return own

    def remember(self, judged: Row) -> None:
        del judged


def _module(row: Row) -> tuple[int, int, int, str]:
    return (row.key.rank, row.key.process, row.key.step, row.key.site)
