"""The finding in three sentences, and what more evidence would help."""

from __future__ import annotations

import math
from collections.abc import Sequence

from driftline.diagnosis.calls import Place
from driftline.diagnosis.finding import SiteFinding
from driftline.diagnosis.substituted import Substitution

_WHERE = {
    "forward": "output",
    "backward": "gradient",
    "optimizer": "gradient as the optimizer sees it",
    "param": "weights",
}


def where(site: SiteFinding, by: str, statistic: str, limit: str, fused: str = "") -> str:
    """The first sentence: who introduces error, by which evidence.

    Args:
        site: Where.
        by: The evidence.
        statistic: What was measured.
        limit: What it is held against.
        fused: Whose work it is together with the site's own, where one kernel or node does it all.
    """
    name = _name(site.site)
    of = f" ({site.class_name})" if site.class_name else ""
    of += f", inside the fusion of {fused}," if fused else ""
    off = f"{site.ratio:.3g}" if math.isfinite(site.ratio) else "infinitely many"
    if site.direction == "param":
        return f"{name}{of} is the first that is off: its weights differ from the reference's."
    what = _WHERE[site.direction]
    if by == "replay":
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
    if cause == "unknown":
        return f"What kind of error it is stays unknown: {sentence or 'nothing known fits'}."
    return f"It looks like {_ARTICLE.get(cause, cause)}: {sentence}."


_ARTICLE = {
    "scale": "a wrong scale",
    "offset": "a wrong offset or bias",
    "permutation": "a permutation",
    "transpose": "a transpose",
    "shift": "a shift along the tokens",
    "mask": "a wrong mask",
    "zeroed": "a zeroed region",
    "stale": "stale values",
    "saturation": "saturation",
    "low-precision": "lower precision than declared",
    "activation": "a wrong activation",
    "norm-precision": "a norm in low precision",
    "dropout": "dropout left on",
    "nondeterminism": "non-determinism",
    "nan": "a birth of NaN",
    "missing-reduction": "a missing reduction over ranks",
}


def share(explains: float | None, final: float, noise: float) -> str:
    """The third sentence: how much of the final output's error goes back to it."""
    if explains is None:
        return "How much of the final output's error it explains cannot be said."
    if not math.isfinite(final):
        return "The final output is not finite: all of that goes back to it, by order of execution."
    if explains < 0.05:
        return (
            f"The final output is off by {final:.2g}, which noise ({noise:.2g}) explains by itself."
        )
    return (
        f"It explains about {explains:.0%} of the final output's error ({final:.2g} against "
        f"{noise:.2g} of noise; an estimate, `driftline bisect` proves it)."
    )


def proven(proof: Substitution, site: str, culprits: Sequence[Place]) -> tuple[float | None, str]:
    """Share and third sentence where substitution has measured it."""
    runs = f"`driftline bisect`, {proof.executions} executions"
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
    """Two sentences when only a site that does not agree with itself is off."""
    return (
        "No site can be called guilty, and none of the error be called noise.",
        f"{_name(site)} is off beyond noise, but nothing can be concluded from it: {trouble}.",
    )


def clean(judged: int, unknown: int, worst: SiteFinding | None, by: str, final: float) -> list[str]:
    """Three sentences when no site is guilty."""
    first = f"No site of {judged} introduces error beyond noise"
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
