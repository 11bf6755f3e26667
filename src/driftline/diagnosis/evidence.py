"""What a finding rests on, laid out for the reader: the `evidence` of a diagnosis."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from driftline.diagnosis.calls import Place, Site
from driftline.diagnosis.confirming import Confirmation
from driftline.diagnosis.floor import Floor
from driftline.diagnosis.growth import jump_along_depth
from driftline.diagnosis.naming import Naming
from driftline.diagnosis.replayed import Judgement
from driftline.diagnosis.statuses import Standing


def of_all(
    sites: Mapping[Place, Site], found: Mapping[Place, Standing], floor: Floor | None
) -> dict[str, Any]:
    """What does not depend on who is guilty."""
    evidence: dict[str, Any] = {
        "judged_by": dict(Counter(standing.by for standing in found.values())),
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
    standing: Standing,
    judged: Judgement | None,
    again: Confirmation | None,
    naming: Naming | None,
) -> dict[str, Any]:
    """What speaks against the first culprit."""
    evidence: dict[str, Any] = {"by": standing.by}
    if judged is not None and judged.found is not None:
        evidence["replay"] = {
            "statistic": judged.statistic,
            "value": getattr(judged.found, judged.statistic, math.nan),
            "trusted_low": judged.low,
            "trusted_high": judged.high,
            "times_its_limit": judged.excess,
            "halves": list(judged.halves),
            "unit_roundoff": judged.unit,
            "rows": judged.found.rows,
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
