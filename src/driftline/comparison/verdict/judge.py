"""Judge a measured table with a tolerance: statuses of rows, a verdict and an exit code.

A row passes because a number is within its limit, never because a test is missing. This file reads
no tensor, so judging the same table again with another tolerance is fast.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from driftline.comparison.evidence.replicas import GAP, SAME
from driftline.comparison.evidence.rules import (
    BEYOND_COLUMN,
    CANCELLED,
    COLUMNS,
    SUMMED,
)
from driftline.comparison.table.row import NO_THRESHOLD, Column, Row
from driftline.comparison.table.table import Table, is_spooled, like_storage
from driftline.comparison.tolerance.defaults import (
    LIMITS,
    METRIC,
    QUANTISED,
    WEIGHT_ROUNDINGS,
    coarsest,
    is_exact,
    with_smallest_steps,
)
from driftline.comparison.tolerance.tolerance import (
    BEYOND,
    BEYOND_ROUNDING,
    GIVEN,
    HALF,
    NEAR_SMALLEST_STEP,
    REST,
    SUMMED_ELEMENTS,
    TURNED,
    WHAT_CANCELS,
    WORST_PLACE,
    WORST_SCALE,
    Tolerance,
)
from driftline.comparison.training.training_report import judged_by_training
from driftline.comparison.verdict.certain_failures import (
    CertainFailure,
    certain_failure,
    holds_nothing_finite,
)
from driftline.comparison.verdict.coverage import covered_by
from driftline.comparison.verdict.decision import EXIT_CODES, Facts, decide
from driftline.comparison.verdict.divergence import Divergence, find_divergence
from driftline.comparison.verdict.growth import with_containers
from driftline.comparison.verdict.inheritance import (
    Inheritance,
    Inherited,
    Quantised,
    Unrelated,
    quantised_limit,
    quantised_row,
    reference_norm,
)
from driftline.comparison.verdict.settled_rows import SettledRows
from driftline.comparison.verdict.site_judgement import SiteJudgement
from driftline.comparison.verdict.status import NO_EVIDENCE, Evidence
from driftline.comparison.verdict.verdict import RowCounts
from driftline.errors import BadFile, BadInput
from driftline.numerics.dtypes import DTYPES, DType

if TYPE_CHECKING:
    from driftline.comparison.tolerance.thresholds import Thresholds

_WRITTEN_INTO = (
    "one side took it before the call, the other after it: the operator may have written into it"
)

_THRESHOLDS_NOTE = "thresholds: "
"""Prefix of the notes of a table that are about thresholds."""
_WHOSE = {"user": "asked for", "exact": "exact", "thresholds": "by its threshold"}


_EVIDENCE_COLUMNS = (
    *COLUMNS,
    Column(HALF, "none", "relative L2 on the half of the tokens where it is smaller"),
    Column(REST, "none", "relative L2 without tokens that a router sent elsewhere"),
    Column(TURNED, "none", "relative L2 of a gradient of which only the signs are left"),
    Column(GIVEN, "none", "relative L2 of what a norm is given, normalised on both sides"),
)
"""Columns that a table has only if one of its rows has them."""


def judge(
    table: Table, tolerance: Tolerance | None = None, evidence: Evidence | None = None
) -> Table:
    """Return the table with a status for every row, a verdict, and where the drift starts.

    Args:
        table: The measured table.
        tolerance: The limits. By default those of the number formats, and sites are judged by the
            error that they add.
        evidence: Evidence about its sites; by default the evidence that the table contains.

    Raises:
        BadInput: The tolerance has thresholds, but for no layer of this table.
        BadFile: The evidence in the table is damaged.
    """
    allowed = tolerance or Tolerance()
    if evidence is None:
        evidence = kept_evidence(table)
    elif shown := evidence.as_json():
        table = table.changed(evidence=shown)
    judged = judged_by_training(
        _judge_table(table, allowed, evidence),
        lambda other: _judge_table(other, allowed, evidence),
        explicit=allowed.explicit,
    )
    if allowed.thresholds is None:
        return judged
    return _with_threshold_notes(judged, allowed.thresholds)


def kept_evidence(table: Table) -> Evidence:
    """Return the evidence that a table contains from an earlier judgement.

    Raises:
        BadFile: The evidence is damaged.
    """
    if not table.evidence:
        return NO_EVIDENCE
    try:
        return Evidence.from_json(table.evidence)
    except (KeyError, TypeError, ValueError) as trouble:
        raise BadFile(f"the evidence of this table is damaged: {trouble}") from trouble


def _judge_table(table: Table, allowed: Tolerance, evidence: Evidence) -> Table:
    columns = {column.name: column for column in table.columns}
    ordered = table.reference.ordered
    in_turn = is_spooled(table.rows) and table.rows.in_turn
    # Tensors of a file have no order: nothing is upstream of anything.
    structure = table.structure
    quantised = Quantised(table.rows, structure.quantised, structure.codes) if ordered else None
    inherited = Unrelated() if quantised is None else Inherited(quantised, in_turn=in_turn)
    counts = RowCounts()
    # Rows are counted while they are judged, so that a long table is read from its file only once.
    rows = like_storage(table.rows, counts.watch(_judged(table.rows, allowed, columns, inherited)))
    if ordered and not allowed.explicit and counts.failing:
        from driftline.comparison.verdict.zero_gradient import (
            excuse_zero_gradients,  # only where something fails
        )

        excused = excuse_zero_gradients(rows)
        if excused is not rows:
            rows = excused
            # Statuses have changed, so rows are counted again.
            counts = RowCounts(counts.calls)
            for row in rows:
                counts.take(row)
        if BEYOND in counts.deciding and BEYOND not in columns:
            table = table.changed(columns=(*table.columns, BEYOND_COLUMN))
    for column in _EVIDENCE_COLUMNS:
        if column.name not in columns and _has(rows, column.name):
            table = table.changed(columns=(*table.columns, column))
    judgement = certain = None
    # Sites are not judged if the user set limits, or for files, whose tensors no sites computed.
    if quantised is not None and not allowed.explicit:
        structure = table.structure
        if integer_sites := quantised.sites():
            merged = {**with_containers(integer_sites)}
            for site, error in structure.quantised.items():
                # Combine the steps of a site's output with those of its weights.
                merged[site] = math.hypot(merged.get(site, 0.0), error)
            structure = structure._replace(quantised=merged)
        settled = SettledRows(rows, structure, evidence)
        begun = settled.judgement.first if settled.judgement is not None else None
        culprit = begun.call.worst if begun is not None else None
        certain = settled.overruled(certain_failure(rows, structure.misread, culprit))
        if counts.failing or settled.may_differ or certain is not None:
            counts = RowCounts(counts.calls)
            rows = like_storage(rows, counts.watch(_with_certain(settled, certain)))
        judgement = settled.judgement
    table = table.changed(rows=rows, judgement=judgement)
    divergence = find_divergence(rows, ordered=ordered, counts=counts, follow=judgement is None)
    divergence = _reworded(divergence, rows, counts, judgement, certain)
    covered = covered_by(counts.calls, table.reference, table.candidate)
    sides = (table.reference, table.candidate)
    decision = decide(Facts(counts, table.coverage, divergence, allowed, judgement, covered, sides))
    return table.changed(
        verdict=decision.verdict,
        first=divergence.first,
        first_site=divergence.site,
        finding=decision.finding,
        limits={**allowed.as_json(), "said": str(allowed)},
        covered=covered,
    )


def _reworded(
    divergence: Divergence,
    rows: Sequence[Row],
    counts: RowCounts,
    judgement: SiteJudgement | None,
    certain: CertainFailure | None,
) -> Divergence:
    """Return the divergence with a finding that includes the judgement of sites."""
    if certain is not None:
        first = next((row for row in rows if row.key == certain.row.key), certain.row)
        return Divergence(first, certain.site, f"{certain.sentence}; {counts.failed}")
    if judgement is None:
        return divergence
    finding = divergence.finding
    # If nothing differs at all, any fault would have shown, so this need not be said.
    differs = counts.explained or (counts.closest is not None and counts.closest.severity > 0.0)
    if divergence.first is None and differs:
        finding += f"; {judgement.power}"
    if judgement.pattern is not None:
        finding = f"{judgement.pattern.sentence}; {finding}"
    if jump := judgement.largest_jump:
        finding += f"; {jump}"
    return divergence._replace(finding=finding)


def _with_certain(rows: Iterable[Row], certain: CertainFailure | None) -> Iterator[Row]:
    """Yield the rows; the one that shows the certain failure fails."""
    for row in rows:
        if certain is None or row.status != "pass" or row.key != certain.row.key:
            yield row
        else:
            yield row.judged(
                "fail",
                certain.sentence,
                decided_by=row.decided_by,
                limit=row.limit,
                limit_from=row.limit_from,
                severity=math.inf,
            )


def _with_threshold_notes(judged: Table, thresholds: Thresholds) -> Table:
    """Return a judged table with notes about thresholds that are missing, invalid or unused.

    Raises:
        BadInput: There is no threshold for any layer of the table.
    """
    # Imported only if there are thresholds, because most comparisons use the limits of dtypes.
    from driftline.comparison.tolerance.thresholds import LayerNames

    name = thresholds.path or "the thresholds"
    if not thresholds.sites:
        raise BadInput(
            f"{name} has thresholds for the model as a whole ({', '.join(thresholds.metrics)}), "
            "none for layers",
            hint="`driftline validate` applies those; make others with --layer_io or calibrate",
        )
    layers = LayerNames({row.key.site for row in judged.rows})
    absent = [site for site in thresholds.sites if layers.find(site) is None]
    if len(absent) == len(thresholds.sites):
        model = f" ('{thresholds.model_id}')" if thresholds.model_id else ""
        raise BadInput(
            f"{name} has no threshold for a layer of this comparison: it seems to be for another "
            f"model{model}",
            hint=f"it has '{thresholds.sites[0]}', the comparison "
            f"'{next(iter(row.key.site for row in judged.rows), '')}'",
        )
    # The table may have been judged before, so notes about other thresholds are removed.
    notes = [note for note in judged.notes if not note.startswith(_THRESHOLDS_NOTE)]
    notes += [f"{_THRESHOLDS_NOTE}{note}" for note in thresholds.notes]
    broken = [entry for entry in thresholds.entries if not entry.usable]
    if broken:
        notes.append(
            f"{_THRESHOLDS_NOTE}{len(broken)} thresholds are no number, {broken[0].metric} of "
            f"'{broken[0].site}' for one; they let nothing pass"
        )
    if absent:
        notes.append(
            f"{_THRESHOLDS_NOTE}{len(absent)} of {len(thresholds.sites)} layers with a threshold "
            f"are not in the comparison, '{absent[0]}' for one"
        )
    silent = sum(row.reason.startswith(NO_THRESHOLD) for row in judged.rows)
    if silent:
        notes.append(
            f"{_THRESHOLDS_NOTE}{silent} tensors that were compared have none, and are not judged"
        )
    return judged.changed(notes=tuple(notes))


def exit_code(table: Table) -> int:
    """Return 0 for pass, 1 for fail, and 2 if too little was compared."""
    return EXIT_CODES[table.verdict]


def _has(rows: Sequence[Row], metric: str) -> bool:
    names: set[str] | None = getattr(rows, "metric_names", None)
    return any(metric in row.metrics for row in rows) if names is None else metric in names


def _judged(
    rows: Iterable[Row], allowed: Tolerance, columns: dict[str, Column], inherited: Inherited
) -> Iterator[Row]:
    """Yield judged rows. They are in order of execution, so earlier rows are upstream."""
    for row in rows:
        own = coarsest((row.reference_dtype, row.candidate_dtype))
        working = inherited.format_of(row, own)
        if not row.compared or (row.basis == "digest" and not row.metrics):
            yield row  # its status was decided when it was measured
        else:
            judged = _judge(row, allowed, columns, own, working, inherited)
            inherited.remember(judged)
            if row.by == "moment" and judged.status == "fail":
                judged = row.judged("incomparable", f"{judged.reason}; {_WRITTEN_INTO}")
            if row.status == "unjudged" and row.reason:  # a remark from the measurement
                judged = judged._replace(
                    reason="; ".join(filter(None, (judged.reason, row.reason)))
                )
            yield judged


def _fails_always(row: Row) -> Row | None:
    """Return the failing row if it fails with any tolerance; else None."""
    # NaN or Inf on one side only fails with any limit.
    one_sided = row.metrics.get("one_sided", 0)
    if one_sided:
        where = _place(row, "one_sided_at")
        return row.judged(
            "fail",
            f"NaN or Inf on one side only: {one_sided} elements{where}; {_counts(row)}",
            decided_by="one_sided",
            limit=0.0,
            limit_from="always",
            severity=math.inf,
        )
    # Without a finite element nothing was compared.
    if holds_nothing_finite(row):
        return row.judged(
            "fail",
            f"neither side has a finite number; {_counts(row)}",
            decided_by="reference_nan",
            limit=0.0,
            limit_from="always",
            severity=math.inf,
        )
    # Copies of one tensor must agree with each other, however near the reference they are.
    gap = float(row.metrics.get(GAP, 0.0))
    if gap > (allowed_gap := SAME.get(row.candidate_dtype, 0.0)):
        return row.judged(
            "fail",
            decided_by=GAP,
            limit=allowed_gap,
            limit_from="replicas",
            severity=gap / allowed_gap if allowed_gap else math.inf,
        )
    return None


_ONE_SCALE = "the weights of one scale, in roundings to it"


def _worst_place(row: Row) -> str:
    """Return the worst outputs and inputs of a weight, such as `(output 5, inputs 32 to 47)`."""
    ends = [row.metrics.get(name) for name in WORST_PLACE]
    if None in ends:
        return ""
    outputs, inputs = (
        f"{word} {first:.0f}" if first == last else f"{word}s {first:.0f} to {last:.0f}"
        for word, first, last in (("output", *ends[:2]), ("input", *ends[2:]))
    )
    return f" ({outputs}, {inputs})"


def _judge(
    row: Row,
    allowed: Tolerance,
    columns: dict[str, Column],
    own: DType | None,
    working: DType | None,
    inherited: Inherited,
) -> Row:
    """Return a compared row with a new judgement."""
    # A mask is True or 0.0 where something may be seen, so the numbers cannot be compared.
    if not allowed.explicit and row.key.port == "input" and _is_mask_of_two_kinds(row):
        return row.judged("incomparable", "a mask of booleans on one side, of floats on the other")
    if (failing := _fails_always(row)) is not None:
        return failing
    exact = is_exact(row.reference_dtype), is_exact(row.candidate_dtype)
    codes = quantised_row(row)
    # With an explicit rtol, integers are compared as numbers, too.
    if all(exact) and not codes and not allowed.elementwise:
        return _exact(row)
    if allowed.explicit:
        judged = _explicit(row, allowed, columns)
    # Integers with scales are rounded to the steps of a scale, not to those of a float format.
    elif codes:
        judged = _judge_codes(row, columns.get(METRIC, Column(METRIC, "lower")), codes)
    elif own is None or working is None:
        judged = row.judged("incomparable", "no limit is known for these dtypes")
    else:
        column = columns.get(METRIC, Column(METRIC, "lower"))
        judged = _judge_by_format(row, column, own, working, inherited)
    packed = "lowfloat" in row.reference_recipe or "lowfloat" in row.candidate_recipe
    if exact[0] != exact[1] and not codes and not packed:  # the numbers compare, the types do not
        note = f"{row.reference_dtype} against {row.candidate_dtype}, compared as numbers"
        return judged._replace(reason=f"{judged.reason}; {note}" if judged.reason else note)
    return judged


def _judge_codes(row: Row, column: Column, codes: str) -> Row:
    """Judge a row of integers with scales by the error of rounding to their steps."""
    # The row's limit includes an arriving error. What the site adds is judged by its steps alone.
    limit = quantised_limit(row, codes)
    if row.key.port != "param":
        limit = max(QUANTISED[codes], limit)
    is_part = row.metrics.get(WORST_SCALE, 0.0) > WEIGHT_ROUNDINGS
    place = _worst_place(row) if is_part else ""
    judged = _held(row, column, limit, f"{codes} with scales{place}")
    # One wrong scale or zero point among many changes the whole weight only a little.
    if judged.status == "pass" and is_part:
        column = Column(WORST_SCALE, "lower")
        return _held(row, column, WEIGHT_ROUNDINGS, f"{_ONE_SCALE}{place}")
    return judged


def _judge_by_format(
    row: Row, column: Column, own: DType, working: DType, inherited: Inherited
) -> Row:
    """Judge a row of floats by its format's limit, or by a wider one if there is a reason."""
    source = working.name if working.name == own.name else f"{working.name} upstream"
    limit = LIMITS[working.name]
    upstream = inherited.codes_of(row)
    if upstream and QUANTISED[upstream] > limit:
        limit, source = QUANTISED[upstream], f"{upstream} upstream"
    judged = _held(row, column, limit, source)
    if judged.status != "fail" or not reference_norm(row):
        return judged
    # The first sufficient reason is reported.
    for limit, why in _wider(row, working, inherited):
        excused = _held(row, column, limit, f"{source}, {why}")
        if excused.status == "pass":
            return excused
    return inherited.rounding.judged(_beyond_rounding(judged))


def _is_mask_of_two_kinds(row: Row) -> bool:
    types = (row.reference_dtype, row.candidate_dtype)
    if "bool" not in types:
        return False
    other = DTYPES.get(types[types.index("bool") - 1])
    return other is not None and other.is_floating


def _wider(row: Row, working: DType, inherited: Inherited) -> Iterator[Inheritance]:
    """Yield limits that are wider than the format's own, with their reasons."""
    # If the candidate is zero everywhere, that is a finding, whatever its format can represent.
    if row.metrics.get("candidate_l2"):
        count = math.prod(row.reference_shape or ())
        steps = with_smallest_steps(working, count, reference_norm(row))
        yield Inheritance(steps, NEAR_SMALLEST_STEP)
    if (made_of := inherited.for_gradient(row)) is not None:
        yield made_of
    if row.metrics.get(CANCELLED):
        share = float(row.metrics[CANCELLED]) / reference_norm(row)
        yield Inheritance(share, WHAT_CANCELS)
    # The terms of a sum are larger than the sum, and rounding is proportional to the terms.
    summed = float(row.metrics.get(SUMMED, 0.0))
    if summed > reference_norm(row) and row.metrics.get("candidate_l2"):
        from driftline.comparison.evidence.cancelling import CANCELLING_ROUNDINGS, is_cancelling

        if is_cancelling(row):
            share = CANCELLING_ROUNDINGS * working.unit_roundoff * summed / reference_norm(row)
            yield Inheritance(share, WHAT_CANCELS)
        else:
            share = LIMITS[working.name] * summed / reference_norm(row)
            yield Inheritance(share, SUMMED_ELEMENTS)


def _beyond_rounding(row: Row) -> Row:
    """Pass a failing row if it differs only where an optimizer made steps from rounding."""
    left, limit = float(row.metrics.get(BEYOND_ROUNDING, math.inf)), row.limit
    if limit is None or not left <= limit:
        return row
    return row.judged(
        "pass",
        f"{METRIC} {float(row.metrics[METRIC]):.3g} lies in elements whose gradient is nothing but "
        "rounding, of which an optimizer makes whole steps",
        decided_by=BEYOND_ROUNDING,
        limit=limit,
        limit_from=row.limit_from,
        severity=left / limit,
    )


def _exact(row: Row) -> Row:
    """Judge integers and booleans, of which every element must be equal."""
    count = row.metrics.get("different")
    # Of summaries, a different sketch is proof, and an equal one is strong evidence.
    if count is None:
        return _held(row, Column(METRIC, "lower"), 0.0, "exact")
    if count == 0:
        return row.judged("pass", decided_by="different", limit=0.0, limit_from="exact")
    return row.judged(
        "fail",
        f"{count} of {_elements(row)} differ{_place(row, 'first_different_at')}",
        decided_by="different",
        limit=0.0,
        limit_from="exact",
        severity=math.inf,
    )


def _explicit(row: Row, allowed: Tolerance, columns: dict[str, Column]) -> Row:
    """Judge a row by all its given limits; the row shows the one that it exceeds most."""
    judged: list[Row] = []
    for limit, source in allowed.limits_of(row):
        column = columns.get(limit.metric, Column(limit.metric, "lower"))
        hold = _unlimited if math.isnan(limit.value) else _held
        judged.append(hold(row, column, limit.value, source))
    if not judged:
        return row.judged("incomparable", NO_THRESHOLD)
    unknown = next((result for result in judged if result.status == "incomparable"), None)
    worst = max(judged, key=lambda result: (result.status == "fail", result.severity))
    return worst if worst.status == "fail" or unknown is None else unknown


def _unlimited(row: Row, column: Column, limit: float, source: str) -> Row:
    """Judge a row by a threshold that is NaN: nothing can pass it, and NaN fails."""
    broken = f"the threshold of {column.name} is no number"
    value = row.metrics.get(column.name)
    if value is None or not math.isnan(float(value)):
        return row.judged("incomparable", broken)
    return row.judged(
        "fail",
        f"{column.name} nan, and {broken}",
        decided_by=column.name,
        limit=limit,
        limit_from=source,
        severity=math.inf,
    )


def _held(row: Row, column: Column, limit: float, source: str) -> Row:
    """Judge a row by one limit on one metric."""
    value = row.metrics.get(column.name)
    if value is None:
        kept = row.basis
        if kept == "values":
            return row.judged("incomparable", f"{column.name} was not measured")
        return row.judged(
            "incomparable", f"{column.name} needs the values; only the {kept} was kept"
        )
    number = float(value)
    holds = column.holds(number, limit)
    reason = ""
    if not holds:
        about = "estimated " if column.name in row.estimated else ""
        sign = {"higher": ">=", "zero": "within +-"}.get(column.direction, "<=")
        whose = _WHOSE.get(source, f"for {source}")
        where = _place(row, "max_abs_error_at", "largest error")
        shown, bound = f"{value:.3g}", f"{limit:g}"
        if shown == f"{limit:.3g}":  # 0.99999 is below 1, and must not read as 1
            shown, bound = f"{value:.16g}", f"{limit:.16g}"
        reason = f"{about}{column.name} {shown}, allowed {sign} {bound} {whose}{where}"
    return row.judged(
        "pass" if holds else "fail",
        reason,
        decided_by=column.name,
        limit=limit,
        limit_from=source,
        severity=_severity(column, number, limit),
    )


_LOUDEST = 6000.0
"""Larger numbers of decibels are no finite factor in float64."""


def _severity(column: Column, value: float, limit: float) -> float:
    """Return value over limit; 1 is the limit for any metric, and NaN gives infinity."""
    if math.isnan(value):
        return math.inf
    if column.direction == "higher":
        if column.unit == "dB":  # 20 dB are a factor of ten in the noise
            return (
                10.0 ** ((limit - min(value, _LOUDEST)) / 20.0) if value > -_LOUDEST else math.inf
            )
        # Distance from perfect agreement, so that 0.99 and 0.999 are ten times apart.
        if limit < 1.0 and value <= 1.0:
            return (1.0 - value) / (1.0 - limit)
        return 0.0 if value >= limit else math.inf
    size = abs(value) if column.direction == "zero" else value
    if limit > 0.0:
        return size / limit
    return 0.0 if size <= limit else math.inf


def _place(row: Row, name: str, what: str = "first") -> str:
    """Return a flat index as a position in the tensor, such as `, first at (0, 3, 17)`."""
    flat = row.metrics.get(name)
    shape = row.reference_shape
    if flat is None or shape is None or row.basis != "values":
        return ""
    position: list[str] = []
    rest = int(flat)
    if (row.reference_dtype + row.candidate_dtype).count("complex"):
        rest //= 2  # positions count real and imaginary parts
    for size in reversed(shape):
        rest, coordinate = divmod(rest, size) if size else (rest, 0)
        position.append(str(coordinate))
    return f", {what} at ({', '.join(reversed(position))})" if position else ""


def _counts(row: Row) -> str:
    sides = [
        f"{side} {int(row.metrics.get(f'{side}_nan', 0))} NaN "
        f"{int(row.metrics.get(f'{side}_inf', 0))} Inf"
        for side in ("reference", "candidate")
    ]
    return ", ".join(sides)


def _elements(row: Row) -> str:
    count = math.prod(row.reference_shape or ())
    return f"{count} element" + ("" if count == 1 else "s")
