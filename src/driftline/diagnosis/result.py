"""The result of a diagnosis: a verdict, a first site, a cause, and a status for every site.

Plain values and their JSON form (docs/diagnosis.md). Does not know how they are determined.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from driftline.comparison.differences.difference import Difference
from driftline.comparison.table.row import number_to_json
from driftline.comparison.table.table import Coverage
from driftline.comparison.verdict.decision import EXIT_CODES
from driftline.comparison.verdict.status import Status

SCHEMA = "driftline.diagnosis/1"

STATUSES: tuple[Status, ...] = (
    # Unknown stands before clean: what could not be judged deserves attention.
    *("introduced", "amplified", "inherited", "masked", "unknown", "clean"),
)
"""Worst first, as reports list them."""
Verdict: TypeAlias = Literal["pass", "fail", "incomplete", "incomparable"]
Direction: TypeAlias = Literal["forward", "backward", "optimizer", "param"]

_NOTHING: Mapping[str, Any] = {}


class SiteFinding(NamedTuple):
    """What is known about one site.

    Attributes:
        site: Its name in the reference.
        order: Its place among all sites, by when its first output was made.
        status: introduced, amplified, inherited, masked, clean or unknown.
        direction: forward, or backward for its gradients; param for weights that differ.
        class_name: Class of the module.
        error: Relative error of its output against the reference.
        error_in: The same of what it was given; NaN when not known.
        noise: Relative error that trusted arithmetic has there: by replay of this very module, by
            noise runs, or expected from formats and siblings.
        ratio: What it errs by (by itself, where it was replayed) over what is allowed; above 1 is
            outside.
        projection: `<e, r> / <r, r>` of that error.
        z: Projection over its standard error, clustered by token; NaN when values were not read.
        cause: For a site that introduces error: what kind it is, as far as known.
        inside: For a container that errs because of a part of it: which part.
        reason: In words.
    """

    site: str
    order: int
    status: Status
    direction: Direction = "forward"
    class_name: str = ""
    error: float = math.nan
    error_in: float = math.nan
    noise: float = math.nan
    ratio: float = math.nan
    projection: float = math.nan
    z: float = math.nan
    cause: str = ""
    inside: str = ""
    reason: str = ""

    def as_json(self) -> dict[str, Any]:
        """As docs/diagnosis.md has it; a number that is not known is null."""
        return {
            "site": self.site,
            "order": self.order,
            "status": self.status,
            "direction": self.direction,
            "class": self.class_name,
            "error": _number(self.error),
            "error_in": _number(self.error_in),
            "noise": _number(self.noise),
            "ratio": _number(self.ratio),
            "projection": _number(self.projection),
            "z": _number(self.z),
            "cause": self.cause or None,
            "inside": self.inside or None,
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Where two runs begin to disagree, and why.

    Attributes:
        verdict: pass: no site errs beyond noise. fail: one does. incomparable: nothing could be
            judged.
        sentences: The finding: where, what kind, how much of the final error it explains.
        sites: Every site, in order of execution.
        first_site: The first site that introduces error beyond noise; empty when there is none.
        first_key: The first tensor of it that is off.
        culprits: All such sites, innermost first, in order of execution.
        cause: What kind of error it is; `unknown` is an answer, `noise` that of a pass.
        confidence: From 0 to 1, that the first site is right.
        false_alarm_rate: How often a clean site would be called guilty; None when nothing tells.
        explains: Share of the final output's error energy that goes back to it; None if not known.
        evidence: What it rests on.
        coverage: How much of the two runs was compared with each other.
        needs: What more would help, with the command to get it.
        differences: What differs between the two models; None if a run has no facts about it.
    """

    verdict: Verdict
    sentences: tuple[str, ...]
    sites: tuple[SiteFinding, ...] = ()
    first_site: str = ""
    first_key: str = ""
    culprits: tuple[str, ...] = ()
    cause: str = "unknown"
    confidence: float = 0.0
    false_alarm_rate: float | None = None
    explains: float | None = None
    evidence: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    coverage: Coverage = field(default_factory=Coverage)
    needs: tuple[str, ...] = ()
    differences: tuple[Difference, ...] | None = None

    @property
    def introduced(self) -> bool:
        """Whether a site was found that introduces error by itself."""
        return bool(self.first_site)

    @property
    def exit_code(self) -> int:
        """0 pass, 1 fail, 2 too little or nothing could be judged."""
        # Scripts rely on these codes.
        return EXIT_CODES[self.verdict]

    def site(self, name: str, direction: Direction = "forward") -> SiteFinding:
        """The finding of one site.

        Raises:
            KeyError: There is none.
        """
        # A linear search: reports ask for few sites, and most findings are never looked up.
        for finding in self.sites:
            if finding.site == name and finding.direction == direction:
                return finding
        raise KeyError(name)

    def as_json(self) -> dict[str, Any]:
        """The document that docs/diagnosis.md specifies."""
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "first_site": self.first_site or None,
            "first_key": self.first_key or None,
            "introduced": self.introduced,
            "culprits": list(self.culprits),
            "cause": self.cause,
            "confidence": round(self.confidence, 4),
            "false_alarm_rate": self.false_alarm_rate,
            "explains": self.explains,
            "finding": list(self.sentences),
            "evidence": _plain(self.evidence),
            "sites": [site.as_json() for site in self.sites],
            "coverage": {**self.coverage.as_json(), "share": round(self.coverage.share, 6)},
            "needs": list(self.needs),
            **(
                {}
                if self.differences is None
                else {
                    "differences": [_plain(difference.as_json()) for difference in self.differences]
                }
            ),
        }

    def __str__(self) -> str:
        return " ".join(self.sentences)

    def _repr_html_(self) -> str:
        """What a notebook shows of it."""
        from driftline.reporting.notebook import diagnosis_html

        return diagnosis_html(self)


def _number(value: float) -> Any:
    return None if math.isnan(value) else number_to_json(float(value))


def _plain(value: Any) -> Any:
    """Evidence as JSON has it: non-finite numbers as words, NaN as null."""
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, Mapping):
        # JSON has no NaN or Inf, so every number inside the evidence goes through `_number` too.
        return {str(key): _plain(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType]
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    return value
