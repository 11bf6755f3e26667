"""The result of a diagnosis: a verdict, a first site, a cause, and a status for each site.

This file has plain values and their JSON form (docs/diagnosis.md). It does not know how they are
determined.
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
    # `unknown` comes before `clean`: a site that could not be judged deserves attention.
    *("introduced", "amplified", "inherited", "masked", "unknown", "clean"),
)
"""All statuses, the worst first, in the order of reports."""
Verdict: TypeAlias = Literal["pass", "fail", "incomplete", "incomparable"]
Direction: TypeAlias = Literal["forward", "backward", "optimizer", "param"]

_NOTHING: Mapping[str, Any] = {}


class SiteFinding(NamedTuple):
    """What is known about one site.

    Attributes:
        site: Its name in the reference.
        order: Its place among all sites, in the order of their first outputs.
        status: introduced, amplified, inherited, masked, clean or unknown.
        direction: forward; backward or optimizer for its gradients; param for weights that differ.
        class_name: Class of the module.
        error: Relative error of its output against the reference.
        error_in: Relative error of its input against the reference; NaN if not known.
        noise: Relative error of trusted arithmetic at this site: measured by replay of the module
            or by noise runs, or expected from formats and siblings.
        ratio: Its error (that of the module itself, if it was replayed) divided by the allowed
            error; above 1 it is outside.
        projection: `<e, r> / <r, r>` of its error.
        z: Projection divided by its standard error, clustered by token; NaN if values were not
            read.
        cause: The kind of error, if the site introduces error and the kind is known.
        inside: The part that causes the error of a container.
        reason: The reason for the status, in words.
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
        """The JSON object of docs/diagnosis.md; a number that is not known is null."""
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
        verdict: pass, fail, incomplete or incomparable; the same as that of the table of the two
            runs.
        sentences: The finding in sentences: the place, the kind of error, and how much of the final
            error it explains.
        sites: The finding for every site, in order of execution.
        first_site: The first site that introduces error beyond noise; empty if there is none.
        first_key: The first tensor of that site that is off.
        culprits: The innermost sites that introduce error beyond noise, in order of execution.
        cause: The kind of error; `unknown` if it could not be determined, `noise` for a pass.
        confidence: Confidence from 0 to 1 that the first site is the right one.
        false_alarm_rate: How often a correct site would be called guilty; None if that is unknown.
        explains: Fraction of the final output's squared error that comes from the first site; None
            if that is unknown.
        evidence: The evidence that the diagnosis is based on.
        coverage: How many tensors of the two runs were compared with each other.
        needs: Further evidence that would help, with the commands that produce it.
        differences: The differences of the two models; None if a run has no facts about its model.
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
        """Whether a site introduces error by itself."""
        return bool(self.first_site)

    @property
    def exit_code(self) -> int:
        """0 for pass, 1 for fail, 2 if too little or nothing could be judged."""
        # Scripts depend on these codes.
        return EXIT_CODES[self.verdict]

    def site(self, name: str, direction: Direction = "forward") -> SiteFinding:
        """The finding for one site.

        Args:
            name: The reference's name of the site.
            direction: forward, backward, optimizer or param.

        Raises:
            KeyError: There is no such site.
        """
        # A linear search suffices: reports look up only a few sites.
        for finding in self.sites:
            if finding.site == name and finding.direction == direction:
                return finding
        raise KeyError(name)

    def as_json(self) -> dict[str, Any]:
        """The JSON document that docs/diagnosis.md specifies."""
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
        """The HTML that a notebook displays."""
        from driftline.reporting.notebook import diagnosis_html

        return diagnosis_html(self)


def _number(value: float) -> Any:
    return None if math.isnan(value) else number_to_json(float(value))


def _plain(value: Any) -> Any:
    """Evidence as JSON values: infinite numbers become words, NaN becomes null."""
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, Mapping):
        # JSON has no NaN or Inf, so all numbers inside the evidence are converted too.
        return {str(key): _plain(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType]
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    return value
