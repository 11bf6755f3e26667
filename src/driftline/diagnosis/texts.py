"""The texts of a diagnosis: its three sentences, its evidence document, and what to run next.

This file has only words and layout; the caller passes all numbers and verdicts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from driftline.comparison.table.table import Table
from driftline.comparison.verdict.growth import jump_along_depth
from driftline.comparison.verdict.noise import NoiseFloor
from driftline.comparison.verdict.own_error import ReplayResult
from driftline.comparison.verdict.sites import Place, Site
from driftline.comparison.verdict.status import SiteStatus
from driftline.diagnosis.causes.named_cause import NamedCause
from driftline.diagnosis.causes.registry import CAUSES
from driftline.diagnosis.confirmation import Confirmation
from driftline.diagnosis.evidence.files import Substitution
from driftline.diagnosis.result import SiteFinding

if TYPE_CHECKING:
    from driftline.diagnosis.causes.case_builder import Runs


_WHERE = {
    "forward": "output",
    "backward": "gradient",
    "optimizer": "gradient as the optimizer sees it",
    "param": "weights",
}


_DROWNED = 0.3
"""Noise above this relative error hides any error of a site."""


def where(site: SiteFinding, by: str, statistic: str, limit: str, fused: str = "") -> str:
    """The first sentence: which site introduces error, by which evidence.

    Args:
        site: The site.
        by: Name of the evidence.
        statistic: The measured statistic, in words.
        limit: The limit of the statistic, in words.
        fused: The operations that one kernel or node computes together with the site's own.
    """
    name = _name(site.site)
    of = f" ({site.class_name})" if site.class_name else ""
    of += f", inside the fusion of {fused}," if fused else ""
    off = f"{site.ratio:.3g}" if math.isfinite(site.ratio) else "infinitely many"
    # Weights are equal or they differ, so no ratio is needed.
    if site.direction == "param":
        return f"{name}{of} is the first that is off: its weights differ from the reference's."
    what = _WHERE[site.direction]
    if by in ("bisect", "pattern"):
        return f"{name}{of} introduces error: {site.reason}."
    if by == "replay" and site.reason and not math.isfinite(site.ratio):
        return f"{name}{of} introduces error: {site.reason}."
    if by in ("replay", "recomputed"):
        return (
            f"{name}{of} introduces error: on the very input it was given, its {statistic} is "
            f"{off} times {limit}."
        )
    return (
        f"{name}{of} is the first whose {what} is off beyond noise while what it was given is not: "
        f"{off} times {limit}."
    )


def kind(cause: str, sentence: str) -> str:
    """The second sentence: what kind of error it is."""
    # An unknown cause is reported as unknown: a guess would send the reader to the wrong code.
    if cause == "unknown":
        return f"What kind of error it is stays unknown: {sentence or 'nothing known fits'}."
    noun = CAUSES[cause].noun if cause in CAUSES else ""
    return f"It looks like {noun or cause}: {sentence}."


def share(explains: float | None, final: float, noise: float) -> str:
    """The third sentence: how much of the final output's error the site causes."""
    if explains is None:
        return "How much of the final output's error it explains is not known."
    if not math.isfinite(final):
        return "The final output is not finite: all of that goes back to it, by order of execution."
    # Noise that is about as large as the result hides the effect of the site.
    if explains < 0.05 and noise > _DROWNED:
        return (
            f"How much of the final output's error ({final:.2g}) it explains is not known: noise "
            f"is as large there ({noise:.2g})."
        )
    if explains < 0.05:
        return (
            f"The final output is off by {final:.2g}, which noise ({noise:.2g}) explains by itself."
        )
    return (
        f"It explains about {explains:.0%} of the final output's error ({final:.2g} against "
        f"{noise:.2g} of noise; an estimate, `driftline bisect` proves it)."
    )


def proven(proof: Substitution, site: str, culprits: Sequence[Place]) -> tuple[float | None, str]:
    """Share and third sentence if a bisection has measured the share."""
    runs = f"`driftline bisect`, {proof.executions} executions"
    # Two of the outcomes name no block.
    if proof.verdict == "same":
        return 0.0, f"The final output has no error ({runs})."
    if proof.verdict == "spread":
        return None, f"No single block brings the final output back ({runs})."
    falls = f"{proof.metric} of the end falls from {proof.before:.2g} to {proof.after:.2g}"
    named = _name(proof.site)
    if not proof.is_about(site):
        also = any(place.site == proof.site for place in culprits)
        what = f"{named}, which introduces error too" if also else named
        return None, (
            f"Substitution does not bear it out: {proof.explains:.0%} of the final output's error "
            f"goes back to {what} ({runs})."
        )
    where = "it" if proof.site == site else named
    share = None if math.isnan(proof.explains) else round(proof.explains, 4)
    return share, (
        f"It explains {proof.explains:.0%} of the final output's error: with {where} corrected, "
        f"{falls} ({runs})."
    )


def undecided(site: str, trouble: str) -> tuple[str, ...]:
    """Two sentences if a site is off beyond noise and its evidence is inconclusive."""
    return (
        "No site can be called guilty, and none of the error be called noise.",
        f"{_name(site)} is off beyond noise, but nothing can be concluded from it: {trouble}.",
    )


def clean(judged: int, unknown: int, worst: SiteFinding | None, by: str, final: float) -> list[str]:
    """One to three sentences if no site is guilty."""
    first = f"No site of {judged} introduces error beyond noise"
    # The first sentence includes the number of sites that could not be judged; otherwise a pass
    # would claim too much.
    first += f" ({unknown} more could not be judged)." if unknown else "."
    second = ""
    if worst is not None and math.isfinite(worst.ratio) and worst.ratio > 0.0:
        second = (
            f"The nearest to its limit is {_name(worst.site)} with {worst.ratio:.2g} of it, "
            f"judged by {by}."
        )
    third = f"The final output is off by {final:.2g}." if math.isfinite(final) else ""
    return [sentence for sentence in (first, second, third) if sentence]


def _name(site: str) -> str:
    return "the model itself" if site in ("(root)", "") else f"'{site}'"


# The `evidence` entry of a diagnosis.


def of_all(
    sites: Mapping[Place, Site], statuses: Mapping[Place, SiteStatus], floor: NoiseFloor | None
) -> dict[str, Any]:
    """Evidence that does not depend on which site is guilty."""
    evidence: dict[str, Any] = {
        "judged_by": dict(Counter(standing.by for standing in statuses.values())),
        "inputs_by": dict(
            Counter(
                call.known_by
                for site in sites.values()
                if site.place.direction != "param"
                for call in site.calls
            )
        ),
    }
    if floor is not None:
        evidence["noise_runs"] = {
            "used": list(floor.used),
            "excluded": [{"run": name, "reason": why} for name, why in floor.excluded],
            "margin": floor.margin,
        }
    jump = jump_along_depth(sites)
    if jump is not None:
        evidence["jump"] = jump._asdict()
    return evidence


def of_culprit(
    standing: SiteStatus,
    judged: ReplayResult | None,
    again: Confirmation | None,
    naming: NamedCause | None,
) -> dict[str, Any]:
    """Evidence against the first culprit."""
    evidence: dict[str, Any] = {"by": standing.by}
    if judged is not None and judged.effect is not None:
        evidence["replay"] = {
            "statistic": judged.statistic,
            "value": getattr(judged.effect, judged.statistic, math.nan),
            "trusted_low": judged.low,
            "trusted_high": judged.high,
            "times_its_limit": judged.excess,
            "halves": list(judged.halves),
            "unit_roundoff": judged.unit,
            "rows": judged.effect.rows,
            "slot": judged.slot,
        }
    if standing.by == "growth":
        evidence["growth"] = {
            "error_in": standing.call.error_in,
            "error": standing.call.error,
            "expected": standing.noise,
            "longest_sum": standing.call.length,
            "unit_roundoff": standing.call.unit,
            "inputs_by": standing.call.known_by,
        }
    if again is not None:
        evidence["halves"] = list(again.halves)
    if naming is not None:
        evidence["cause"] = {
            "sentence": naming.sentence,
            "explained": naming.score,
            "detail": naming.detail,
            "others": [list(other) for other in naming.others],
            "tensor": naming.picture,
        }
    return evidence


# Suggestions: which further evidence would help, each with its command.


_REPLAY = 'driftline replay CAND --exec "python reference.py" -o REPLAY, then --replay REPLAY'
_BISECT = (
    "driftline bisect --exec CANDIDATE --reference-run REF --format json > FILE, then --bisect FILE"
)
_NOISE = 'driftline noise --exec "python reference.py" -o NOISE, then --noise NOISE'


def needs(
    runs: Runs | None,
    table: Table,
    floor: NoiseFloor | None,
    judged: Mapping[str, ReplayResult],
    standing: SiteStatus | None,
    unproven: bool = True,
    elsewhere: str = "",
) -> tuple[str, ...]:
    """One sentence for each suggestion, most useful first.

    Args:
        runs: The runs; None if only a table is known.
        table: The comparison.
        floor: The noise floor, if noise runs were given.
        judged: Replay results by site.
        standing: Status of the first culprit, if there is one.
        unproven: Whether no bisection was given.
        elsewhere: Advice about the device of noise runs, if they ran on another one.
    """
    sentences: list[str] = []
    rows = [row for row in table.rows if row.compared]
    has_inputs = any(row.key.port == "input" for row in rows)
    # Replay is the strongest evidence, so it is suggested before noise runs.
    if not judged:
        # Without inputs a replay is impossible, so the advice to dump them comes first.
        if runs is not None and not has_inputs:
            sentences.append(
                "no inputs were captured, so nothing can be replayed and what goes into a site is "
                "guessed from what was made before it: dump without --port, or with --port input"
            )
        sentences.append(f"replay tells what each module adds by itself: {_REPLAY}")
    if floor is None and not judged:
        sentences.append(f"noise runs tell what the number format alone does: {_NOISE}")
    if floor is not None:
        # An excluded noise run weakens the interval, so the reader should replace it.
        for name, why in floor.excluded:
            sentences.append(f"another noise run for '{name}', which was left out: {why}")
        if len(floor.used) == 1:
            sentences.append(f"one noise run gives no interval; two or more do: {_NOISE}")
    if elsewhere:
        sentences.append(elsewhere)
    unknown = [judgement for judgement in judged.values() if judgement.trouble]
    if unknown:
        sentences.append(
            f"{len(unknown)} of {len(judged)} replayed sites say nothing, the first because "
            f"{unknown[0].trouble}"
        )
    summaries = sum(row.basis in ("summary", "digest", "describe") for row in rows)
    # Summaries suffice for sizes of errors, but detectors of causes need values.
    if summaries:
        sentences.append(
            f"{summaries} of {len(rows)} tensors were compared without their values: sizes and "
            "statuses can be told, kinds of bugs cannot; dump with --keep full"
        )
    if runs is None:
        sentences.append("a table has no tensors: give the two runs to have the kind of bug named")
    if standing is not None and unproven:
        sentences.append(f"substitution proves it: {_BISECT}")
    return tuple(sentences)
