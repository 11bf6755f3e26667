"""What widens the limit of a row: the formats, codes and cancelled gradients that it is made of.

Three sources, all looked up in rows alone:
the coarsest format that came before it in its process (`Inherited`);
operators that compute with integers on one side and with floats on the other (`Quantised`);
gradients that cancelled (`CancelledGradients`). What is left of such a gradient is rounding in
part, and a backward pass is linear: all that is computed of it is off by the same share. A gradient
is made of such a one if it comes after it in the same backward pass and is as small (what cancelled
is smaller than all else), or if it is of a parameter of a module that was given such a gradient.

Widens limits, and never narrows one: a row that holds its own limit holds any other.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

from driftline.comparison.evidence.rules import GRADIENTS, is_bias
from driftline.comparison.table.row import Row
from driftline.comparison.table.table import is_spooled
from driftline.comparison.tolerance.defaults import (
    METRIC,
    QUANTISED,
    ROUNDINGS,
    WEIGHT_ROUNDINGS,
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
"""Times so much the share may grow on the way: measured, 1.2 over two blocks."""
_LARGER = 16
"""Times so large it may become on the way through one module."""
_MOSTLY = 0.02
"""Gradients that are off by more are mostly rounding: nothing can be said of what they make."""
_LATER, _CLEAR = 4, 0.05
"""Times so much as gradients were off, steps after them may be; at most so far that is believed."""
_TWO_ROUNDINGS = 10.0
"""Two tensors that are nothing but rounding are no farther apart."""
_BEYOND = 100
"""Times so much as the first of them: no rounding any more."""


class CancelledGradients:
    """What cancelled in the step under way, and who was given it."""

    def __init__(self) -> None:
        self._moment = (-1, -1, -1)
        self._given: dict[str, float] = {}
        self._off, self._size = 0.0, 0.0
        self._unclear: set[tuple[int, int, int, str]] = set()
        self._moved: dict[tuple[int, int], tuple[int, float]] = {}

    def remember(self, judged: Row) -> None:
        """Note a gradient that has cancelled, or is made of one."""
        if judged.key.port == "optimizer_grad" and self._moment == _moment(judged):
            # What an optimizer was given moves the weights of all later steps.
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
        """A failing row, judged by what it is made of if that is known."""
        off, value = self._origin(row), float(row.metrics.get(METRIC, 0.0))
        if row.decided_by != METRIC:
            return row
        if off is None:
            return self._of_later_step(row, value)
        source = f"{row.limit_from}, {AS_CANCELLED}"
        # Mostly rounding: neither right nor wrong can be shown.
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
        """Weights that were moved by such gradients are elsewhere, and so is what they compute."""
        step, off = self._moved.get((row.key.rank, row.key.process), (row.key.step, 0.0))
        place = (*_moment(row), row.key.site)
        # Far gradients are believed only up to a point: beyond, a fault may hide behind
        # them.
        most = _LATER * min(off, _CLEAR)
        if place in self._unclear and row.key.port in GRADIENTS and is_bias(row.key.slot):
            most = _TWO_ROUNDINGS  # a sum of what arrived, which may cancel
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
        """How far off the gradient that cancelled was, if a row is made of it."""
        if not _is_gradient(row) or self._moment != _moment(row):
            return None
        if row.key.port not in GRADIENTS and 0.0 < reference_norm(row) <= _LARGER * self._size:
            return self._off
        error, site = self._given.get(row.key.site), row.key.site
        # A part of a module is made of what its module was given.
        while error is None and site:
            site = site.rpartition(".")[0]
            error = self._given.get(site)
        return error


def _is_gradient(row: Row) -> bool:
    """Whether a row is a gradient: of a module, or of an operator of the backward pass."""
    return row.key.port in _PORTS or ("/" in row.key.site and row.key.phase == "backward")


def _moment(row: Row) -> tuple[int, int, int]:
    return row.key.rank, row.key.process, row.key.step


def reference_norm(row: Row) -> float:
    """Norm of the reference; 0.0 when it is zero, not finite or not known."""
    norm = float(row.metrics.get("reference_l2", 0.0))
    return norm if math.isfinite(norm) else 0.0


# Which operators of a comparison compute with integers on one side and with floats on the
# other.


_CODES = ("int8", "int4", "uint4")
"""Integers that beside floats are codes; wider ones are ids and lengths as well."""

_Call = tuple[int, int, int, str]
_Sizes = tuple[int, ...]
_Codes = dict[_Call, list[tuple[_Sizes, str]]]
"""Lone integers, by their own side's site."""
_Floats = dict[_Call, set[_Sizes]]


def quantised_row(row: Row) -> str:
    """The integer type that a recipe made numbers of; empty when there is none."""
    for dtype, recipe in (
        (row.reference_dtype, row.reference_recipe),
        (row.candidate_dtype, row.candidate_recipe),
    ):
        if "dequantise" in recipe and "unpack" in recipe:
            return "int8" if "unpack(axis 0, 0:4)" in recipe else "int4"  # codes to a word
        if dtype in QUANTISED and "dequantise" in recipe:
            return dtype
    return ""


def quantised_limit(row: Row, code_type: str) -> float:
    """Relative error that rounding to integers explains in a row.

    With one scale it follows from that scale; with many, from the width of the integers.
    """
    step = max(
        step_of(row.reference_recipe),
        step_of(row.candidate_recipe),
        float(row.metrics.get(INTEGER_STEP, 0.0)),
    )
    count = math.prod(row.reference_shape or ())
    if step and count and (norm := reference_norm(row)):
        roundings = WEIGHT_ROUNDINGS if row.key.port == "param" else ROUNDINGS
        return roundings * rounding_to_steps(step, count, norm)
    return QUANTISED[code_type]


def _explained_by_codes(row: Row, code_type: str) -> float:
    """Error of an operator that the codes of its output or its weight explain; else 0.0."""
    if row.key.port == "output" and step_of(row.candidate_recipe):
        return quantised_limit(row, code_type)
    if row.key.port == "param" and row.metrics.get(INTEGER_STEP):
        # What was rounded away of a weight is missing in what is computed with it.
        error = float(row.metrics.get(METRIC, math.inf))
        return ROUNDINGS * min(error, quantised_limit(row, code_type))
    return 0.0


class Quantised:
    """The reference's sites that are quantised on one side, by step."""

    def __init__(self, rows: Sequence[Row], rounded: Collection[str] = ()) -> None:
        """rounded: Sites that compute with integers though what they take and give is floats."""
        self._rounded = rounded
        self._known: dict[_Call, str] = {}
        self._explained: dict[_Call, float] = {}
        # Known from what was counted while rows were written: none has codes.
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
        """Note operators that have codes on one side and floats of the same sizes on the other.

        Args:
            rows: All rows.
            extra: Those that only the candidate has.
            codes: Lone integers of the reference.
            floats: Lone floats of the reference.
        """
        # Lone integers of the candidate stand under the candidate's names.
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
        """Relative error that every such site may have."""
        allowed: dict[str, float] = {}
        for call, code_type in self._known.items():
            site = call[-1]
            explained = self._explained.get(call, QUANTISED[code_type])
            allowed[site] = max(allowed.get(site, 0.0), explained)
        return allowed

    def at(self, row: Row) -> str:
        """The integer type of a row's own site; empty for an ordinary one."""
        if row.key.site in self._rounded:
            return self._known.get(_ours(row), "int8")
        return self._known.get(_ours(row), "") if self._known else ""


def _sort(
    dtype: str,
    shape: _Sizes | None,
    row: Row,
    call: _Call | None,
    codes: dict[_Call, list[tuple[_Sizes, str]]],
    floats: dict[_Call, set[_Sizes]],
) -> None:
    """Put a lone matrix where it belongs; whole numbers of one axis are no operand."""
    if call is None or shape is None or len(shape) < 2 or "mask" in row.key.slot:
        return
    # Codes and floats of one operator have the same sizes in some order.
    sizes = tuple(sorted(shape))  # weights may be transposed
    if dtype in _CODES:
        codes.setdefault(call, []).append((sizes, dtype))
    elif dtype in DTYPES and DTYPES[dtype].is_floating:
        floats.setdefault(call, set()).add(sizes)


def _against_float(row: Row) -> str:
    """Codes that stand against a float and could not be made numbers, for want of a scale."""
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


# What a row inherits from rows that were computed before it: their format, and their rounding.


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
        self.rounding = CancelledGradients()

    def format_of(self, row: Row, own: DType | None) -> DType | None:
        """The coarsest format a row's values went through, its own included.

        Logits that were cast up to float32 at the end of a bfloat16 model still carry bfloat16's
        drift. Parameters are computed from nothing.
        """
        if own is None or row.key.port == "param":
            return own
        place = (row.key.rank, row.key.process)
        # A model that computes in bfloat16 anywhere carries its rounding from there on.
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
        # Also what is over its limit: how large a sum's terms are does not hang on that, and a
        # wrong gradient is told by its own row.
        if judged.key.port != "grad_output" or judged.limit is None:
            return
        # Step after step: what arrived in a step that is over is asked for no more.
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
        return Inheritance(limit, AS_ITS_GRADIENT) if limit else None


class Unrelated(Inherited):
    """Tensors of a file: they were not computed from each other in the order they are there."""

    def format_of(self, row: Row, own: DType | None) -> DType | None:
        del row
        return own

    def remember(self, judged: Row) -> None:
        del judged


def _module(row: Row) -> tuple[int, int, int, str]:
    return (row.key.rank, row.key.process, row.key.step, row.key.site)
