"""Pairs of which a side has only a summary or a digest: what statistics and a sketch can show.

The sketch is linear, so the difference of two sketches is the sketch of the difference. Its norm
estimates `||c - r||` within about 16 %, also for permuted tensors. Such figures are marked as
estimates.

Dumps of other programs contain only max, min, mean and l2; other figures are NaN. These four can
prove a difference: `||c - r||` is at least as large as each of `|Δl2|`, `|Δmax|`, `|Δmin|` and
`√n |Δmean|`. They cannot prove that there is none. Summaries of the parts of a gathered tensor are
combined in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from driftline.alignment.plan import Pair
from driftline.alignment.recipe import Recipe, Source, Step
from driftline.comparison.evidence.replicas import describe_ranks
from driftline.comparison.measure.recipes import apply_recipe
from driftline.comparison.table.row import LOST, Number, Row
from driftline.errors import BadInput
from driftline.numerics import kernel
from driftline.numerics.definitions import estimate_l2, estimate_l2_distance
from driftline.numerics.dtypes import DTYPES
from driftline.numerics.fields import Summary
from driftline.runs.records import Record
from driftline.runs.run import Run

ESTIMATED = ("relative_l2", "cosine", "rmse")
FROM_STATISTICS = "from max, min, mean and l2 alone: the error is at least this large"


_PRINTED = 1e-6
"""Statistics in other programs' files have six decimals, so two of them may differ by this much."""


def measure_summaries(reference: Summary, candidate: Summary) -> dict[str, Number]:
    """Return the measurements that two summaries allow."""
    measured: dict[str, Number] = {}
    # Different counts of NaN or Inf prove a difference, at unknown positions.
    unlike = (
        abs(reference.nan - candidate.nan)
        + abs(reference.pos_inf - candidate.pos_inf)
        + abs(reference.neg_inf - candidate.neg_inf)
    )
    if not math.isnan(unlike):
        measured["one_sided"] = unlike  # a lower bound, because positions are unknown
    if reference.sketch and candidate.sketch and not unlike:
        distance = estimate_l2_distance(reference.sketch, candidate.sketch)
        measured["relative_l2"] = _relative(distance, reference, candidate)
        measured["cosine"] = _cosine(distance, reference, candidate)
        measured["rmse"] = distance / math.sqrt(reference.count) if reference.count else 0.0
    # Without sketches, only a lower bound of the error can be given.
    elif from_statistics(reference, candidate):
        bound = _least(reference, candidate)
        if not math.isnan(bound):
            measured["relative_l2"] = bound
    for side, summary in (("reference", reference), ("candidate", candidate)):
        figures = {
            "min": summary.min,
            "max": summary.max,
            "mean": summary.mean,
            "std": summary.std,
            "l2": summary.l2,
            "nan": summary.nan,
            "inf": summary.pos_inf + summary.neg_inf,
        }
        # NaN is a result if non-finite elements were counted, and means unknown if they were not.
        partial = math.isnan(summary.nan)
        for name, value in figures.items():
            if not (partial and math.isnan(value)):
                measured[f"{side}_{name}"] = value
    return measured


def from_statistics(reference: Summary, candidate: Summary) -> bool:
    """Return whether a side has four figures and no sketch; the other's sketch is then useless."""
    return math.isnan(reference.nan) or math.isnan(candidate.nan)


def _least(reference: Summary, candidate: Summary) -> float:
    """Return a lower bound of the relative L2 error; nan if the figures do not give one."""
    if math.isnan(reference.l2):
        return math.nan
    for summary in (reference, candidate):
        # Driftline's summaries exclude non-finite elements; those of other programs include them.
        if summary.nan > 0 or summary.pos_inf > 0 or summary.neg_inf > 0:
            return math.nan
    deltas = (
        abs(candidate.l2 - reference.l2),
        abs(candidate.max - reference.max),
        abs(candidate.min - reference.min),
        abs(candidate.mean - reference.mean) * math.sqrt(reference.count),
    )
    slack = (_PRINTED, _PRINTED, _PRINTED, _PRINTED * math.sqrt(reference.count))
    bounds = [max(0.0, d - s) for d, s in zip(deltas, slack, strict=True) if not math.isnan(d)]
    return max(bounds) / (reference.l2 + _PRINTED) if bounds else math.nan


def _relative(distance: float, reference: Summary, candidate: Summary) -> float:
    if reference.l2 == 0.0:
        return 0.0 if candidate.l2 == 0.0 else math.inf
    return distance / reference.l2


def _cosine(distance: float, reference: Summary, candidate: Summary) -> float:
    if reference.l2 == 0.0 or candidate.l2 == 0.0:
        return 1.0 if reference.l2 == candidate.l2 else 0.0
    # Quotients are computed first, because squares of huge or tiny norms overflow float64.
    size, other = reference.l2, candidate.l2
    apart = size - other
    rest = 0.5 * ((distance / size) * (distance / other) - (apart / size) * (apart / other))
    if math.isnan(rest):
        return math.nan
    return 1.0 - min(2.0, max(0.0, rest))


# Pairs of which a side has no values: a row by digest or summary, or the reason why there is none.


_SAME = {"relative_l2": 0.0, "cosine": 1.0, "max_abs_error": 0.0, "different": 0, "one_sided": 0}


def row_without_values(reference: Run, candidate: Run, pair: Pair, row: Row) -> Row:
    """Return the row of a pair of which a side has no values: by digest, by summary, or neither."""
    reference_record, candidate_record = pair.reference, pair.candidate
    known_apart = _digests(reference_record, candidate_record)
    if known_apart is False:
        return row.measured("digest", dict(_SAME))
    reference_summary, candidate_summary = (
        summary_of(reference, reference_record),
        summary_of(candidate, candidate_record),
    )
    lost = reference.lost(reference_record) or candidate.lost(candidate_record)
    if lost and (reference_summary is None or candidate_summary is None):
        return row._replace(status="incomparable", reason=f"{LOST}: {lost}")
    # Integers have no tolerance, because different bytes are different numbers.
    exact = not DTYPES[reference_record.dtype].is_floating
    if known_apart and (exact or reference_summary is None or candidate_summary is None):
        return row._replace(
            basis="digest",
            status="fail",
            reason="the bytes differ; the values were not kept, so how much is not known",
            severity=math.inf,
        )
    if reference_summary is not None and candidate_summary is not None:
        measured = measure_summaries(reference_summary, candidate_summary)
        remark = FROM_STATISTICS if from_statistics(reference_summary, candidate_summary) else ""
        return row.measured("summary", measured, estimated=ESTIMATED, reason=remark)
    kept = " and ".join(dict.fromkeys((reference_record.kept, candidate_record.kept)))
    why = f"nothing of it can be compared: kept as {kept}"
    if "describe" in kept:
        why += "; shapes agree" + (
            ", dtypes too" if reference_record.dtype == candidate_record.dtype else ""
        )
    elif reference_record.dtype != candidate_record.dtype:
        why += (
            f"; digests of {reference_record.dtype} and {candidate_record.dtype} say nothing about "
            "each other"
        )
    return row._replace(status="incomparable", reason=why, basis="describe")


def _digests(reference: Record, candidate: Record) -> bool | None:
    """Return whether digests prove the bytes different; None if they cannot be compared."""
    if not reference.digest or not candidate.digest or reference.dtype != candidate.dtype:
        return None
    # Digests of samples with different strides are about different elements.
    if "sample" in (reference.kept, candidate.kept) and (
        reference.kept != candidate.kept or reference.sample_stride != candidate.sample_stride
    ):
        return None
    # Digests of different hash functions never agree.
    if reference.digest.partition(":")[0] != candidate.digest.partition(":")[0]:
        return None
    return reference.digest != candidate.digest


def summary_of(run: Run, record: Record) -> Summary | None:
    """Return the stored summary, or one computed now from stored values; None without either."""
    if record.summary is not None:
        return record.summary
    if record.kept == "full" and not run.lost(record):
        count = math.prod(record.shape)
        return kernel.summarize(run.raw(record), DTYPES[record.dtype], count=count)
    return None


# Parts of a tensor with summaries only, compared with the whole or with other parts.


Cuts = tuple[Step, ...]
_FAR = 1e-3
BY_FIGURES = (
    "from min, max, mean and l2 of the parts together: the error is at least this large (sketches "
    "of parts do not add up to that of the whole)"
)


class Held(NamedTuple):
    """What is known about one part of a tensor.

    Attributes:
        summary: Summary of the record, or of a sum, which has only count, mean and sketch.
        ranks: Ranks that hold the part.
    """

    summary: Summary
    ranks: tuple[int, ...] = ()


Term = tuple[Summary, float, int]
"""A summary, the factor of its values, and the rank that holds it."""

Parts = Mapping[Cuts, Held]
"""Parts by their position in the whole; the whole itself is at ()."""


def needs_summaries(pair: Pair) -> bool:
    """Return whether a side must be computed from tensors whose values were not kept."""
    return any(
        record.kept == "summary" and record.summary is not None
        for recipe in (pair.reference_recipe, pair.candidate_recipe)
        if recipe is not None
        for record in recipe.records
    ) or any(record.kept == "summary" for record in (pair.reference, pair.candidate))


def measure_parts(reference: Run, candidate: Run, pair: Pair) -> tuple[dict[str, Number], str]:
    """Return the measurements that summaries of parts allow, with a remark.

    Raises:
        DriftlineError: The summaries allow none.
    """
    reference_parts, candidate_parts = (
        _parts(pair.reference_recipe or pair.reference),
        _parts(pair.candidate_recipe or pair.candidate),
    )
    if reference_parts is None and candidate_parts is None:
        raise BadInput("neither side has summaries")
    # A side with values is cut like the summaries of the other side.
    if reference_parts is None:
        reference_parts = _sliced(
            reference, pair.reference_recipe or pair.reference, candidate_parts or {}
        )
    if candidate_parts is None:
        candidate_parts = _sliced(
            candidate, pair.candidate_recipe or pair.candidate, reference_parts
        )
    return measured(reference_parts, candidate_parts)


def measured(reference: Parts, candidate: Parts) -> tuple[dict[str, Number], str]:
    """Return the measurements of two sides that are given in parts, with a remark."""
    metrics: dict[str, Number] = {}
    remark = ""
    reference_total, candidate_total = _together(reference), _together(candidate)
    unlike = sum(
        abs(a - b) for a, b in zip(_odd(reference_total), _odd(candidate_total), strict=True)
    )
    metrics["one_sided"] = unlike  # a lower bound, because positions are unknown
    # A NaN on one side only decides the row; other figures would mislead.
    if unlike:
        pass
    elif reference.keys() == candidate.keys() and _sketched(reference) and _sketched(candidate):
        off = {
            cuts: estimate_l2_distance(_sketch(held), _sketch(candidate[cuts]))
            for cuts, held in reference.items()
        }
        distance, size, other = (
            math.hypot(*off.values()),
            _l2(reference, reference_total),
            _l2(candidate, candidate_total),
        )
        remark = _whose(off, reference, candidate)
        metrics["relative_l2"] = _relative_of_norms(distance, size, other)
        metrics["cosine"] = _cosine_of_norms(distance, size, other)
        metrics["rmse"] = (
            distance / math.sqrt(reference_total.count) if reference_total.count else 0.0
        )
    else:
        bound = _least_of_parts(reference_total, candidate_total)
        if math.isnan(bound):
            raise BadInput(
                "only summaries of its parts were kept, cut differently from the other side's: "
                "they cannot be put together"
            )
        metrics["relative_l2"], remark = bound, BY_FIGURES
    for side, summary in (("reference", reference_total), ("candidate", candidate_total)):
        for name in ("min", "max", "mean", "std", "l2"):
            if not math.isnan(value := getattr(summary, name)):
                metrics[f"{side}_{name}"] = value
        metrics[f"{side}_nan"], metrics[f"{side}_inf"] = summary.nan, sum(_odd(summary)[1:])
    return metrics, remark


def _whose(off: Mapping[Cuts, float], reference: Parts, candidate: Parts) -> str:
    """Return a sentence about the ranks whose parts differ, if those of others agree."""
    far = {
        cuts: error / (_l2({cuts: reference[cuts]}, reference[cuts].summary) or 1.0)
        for cuts, error in off.items()
    }
    # A tenth of the worst error, because rounding differs between ranks too.
    bad = [cuts for cuts, error in far.items() if error > max(_FAR, max(far.values()) / 10)]
    who = sorted(
        {rank for cuts in bad for rank in (candidate[cuts].ranks or reference[cuts].ranks)}
    )
    if not bad or len(bad) == len(off):
        return ""
    verb = "is" if len(who) == 1 else "are"
    return f"the part of {describe_ranks(who)} {verb} off, those of the other ranks agree"


def _parts(source: Source) -> Parts | None:
    """Return the summary of each part; None if all values are stored.

    Raises:
        BadInput: A summary is missing, or the summaries cannot be combined.
    """
    records = source.records if isinstance(source, Recipe) else (source,)
    if all(record.kept == "full" for record in records):
        return None
    placed: dict[Cuts, list[Term]] = {}
    _place(source, (), 1.0, placed)
    return {cuts: _added(terms) for cuts, terms in placed.items()}


def _place(source: Source, cuts: Cuts, factor: float, placed: dict[Cuts, list[Term]]) -> None:
    if not isinstance(source, Recipe):
        if source.summary is None:
            raise BadInput(
                f"{source.key} was kept as {source.kept}; it can be joined with summaries only "
                "if it has one"
            )
        placed.setdefault(cuts, []).append((source.summary, factor, source.key.rank))
        return
    steps, offset = list(source.steps), 0
    joining = steps.pop(0) if steps and steps[0].kind in ("concat", "sum", "mean") else None
    for step in steps:
        # A summary contains its elements' values but not their positions.
        if step.kind != "times":
            raise BadInput(
                f"only summaries were kept, and {step} moves elements: a summary does not know them"
            )
        factor *= 1.0 if step.factor is None else step.factor
    if joining is not None and joining.kind == "mean":
        factor /= len(source.sources)
    for part in source.sources:
        inside = cuts
        if joining is not None and joining.kind == "concat":
            size = part.shape[joining.axis]
            inside = (*cuts, Step("split", joining.axis, offset, offset + size))
            offset += size
        _place(part, inside, factor, placed)


def _added(terms: Sequence[Term]) -> Held:
    """Return the sum of terms, of which only the mean and the sketch are known."""
    first, factor, _ = terms[0]
    ranks = tuple(rank for _, _, rank in terms)
    if len(terms) == 1 and factor == 1.0:
        return Held(first, ranks)
    if any(any(_odd(summary)) for summary, _, _ in terms):
        raise BadInput("a term is not finite, and only summaries were kept")
    if len(terms) == 1:
        low, high = sorted((first.min * factor, first.max * factor))
        return Held(
            first._replace(
                min=low,
                max=high,
                mean=first.mean * factor,
                std=first.std * abs(factor),
                l2=first.l2 * abs(factor),
                sketch=tuple(value * factor for value in first.sketch),
            ),
            ranks,
        )
    # Sketches are linear, so the sketch of a sum is the sum of the sketches.
    sketches = [[value * times for value in summary.sketch] for summary, times, _ in terms]
    total = tuple(map(sum, zip(*sketches, strict=True))) if all(sketches) else ()
    mean = sum(summary.mean * times for summary, times, _ in terms)
    unknown = math.nan
    figures = (unknown, unknown, mean, unknown, unknown)
    return Held(Summary(first.count, *figures, 0, 0, 0, 0, total), ranks)


def _sliced(run: Run, source: Source, like: Parts) -> Parts:
    """Return summaries of the parts into which the other side is divided."""
    made = apply_recipe(
        run, source if isinstance(source, Recipe) else Recipe((source,), (), source.shape)
    )
    if made.dtype.bits < 8:
        raise BadInput("packed elements cannot be cut as the summaries of the other side are")
    tensor = made.values.reshape(made.shape)
    parts: dict[Cuts, Held] = {}
    for cuts in like:
        part = tensor
        for cut in cuts:
            part = part[(slice(None),) * cut.axis + (slice(cut.start, cut.stop),)]
        flat = np.ascontiguousarray(part).reshape(-1)
        parts[cuts] = Held(kernel.summarize(flat, made.dtype, count=flat.size))
    return parts


def _together(parts: Parts) -> Summary:
    """Return the figures of the whole, without a sketch; unknown figures of sums are NaN."""
    summaries = [held.summary for held in parts.values() if held.summary.count]
    if not summaries:
        return next(iter(parts.values())).summary
    count = sum(summary.count for summary in summaries)
    nan, plus, minus = (sum(values) for values in zip(*map(_odd, summaries), strict=True))
    finite = [summary.count - sum(_odd(summary)) for summary in summaries]
    many = sum(finite)
    with_values = [(summary, n) for summary, n in zip(summaries, finite, strict=True) if n]
    mean = sum(summary.mean * n for summary, n in with_values) / many if many else math.nan
    # In units of the largest norm, because squares of huge or tiny norms overflow float64.
    largest = max((summary.l2 for summary, _ in with_values), default=0.0)
    unit = largest if 0.0 < largest < math.inf else 1.0
    square = sum((summary.l2 / unit) * (summary.l2 / unit) for summary, _ in with_values)
    # Computed from squares, because the deviations of parts with different means do not add up.
    spread = square / many - (mean / unit) * (mean / unit) if many else math.nan
    return Summary(
        count,
        min((summary.min for summary, _ in with_values), default=math.nan),
        max((summary.max for summary, _ in with_values), default=math.nan),
        mean,
        unit * math.sqrt(max(0.0, spread)) if not math.isnan(spread) else math.nan,
        unit * math.sqrt(square),
        sum(summary.zeros for summary in summaries),
        nan,
        plus,
        minus,
    )


def _odd(summary: Summary) -> tuple[int, int, int]:
    return summary.nan, summary.pos_inf, summary.neg_inf


def _sketched(parts: Parts) -> bool:
    return all(held.summary.sketch or not held.summary.count for held in parts.values())


def _sketch(held: Held) -> Sequence[float]:
    return held.summary.sketch or (0.0,) * 64


def _l2(parts: Parts, together: Summary) -> float:
    """Return the norm of a side; an estimate if only the sketch of a sum is known."""
    if not math.isnan(together.l2):
        return together.l2
    return estimate_l2([value for held in parts.values() for value in _sketch(held)])


def _relative_of_norms(distance: float, size: float, other: float) -> float:
    if size == 0.0:
        return 0.0 if other == 0.0 else math.inf
    return distance / size


def _cosine_of_norms(distance: float, size: float, other: float) -> float:
    if size == 0.0 or other == 0.0:
        return 1.0 if size == other else 0.0
    # Quotients are computed first, because squares of huge or tiny norms overflow float64.
    apart = size - other
    rest = 0.5 * ((distance / size) * (distance / other) - (apart / size) * (apart / other))
    return 1.0 - min(2.0, max(0.0, rest))


def _least_of_parts(reference: Summary, candidate: Summary) -> float:
    """Return a lower bound of the relative L2 error; nan if the figures do not give one."""
    deltas = (
        abs(candidate.l2 - reference.l2),
        abs(candidate.max - reference.max),
        abs(candidate.min - reference.min),
        abs(candidate.mean - reference.mean) * math.sqrt(reference.count),
    )
    bounds = [delta for delta in deltas if not math.isnan(delta)]
    if not bounds or math.isnan(reference.l2):
        return math.nan
    return _relative_of_norms(max(bounds), reference.l2, candidate.l2)
