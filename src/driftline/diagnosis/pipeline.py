"""The diagnosis itself: from a judged table to causes, shares, rates and sentences.

The verdict, the statuses of sites and the culprits are those of the comparison; what is added here
is what kind of bug it is, how sure that is, and what more would help. Opens no file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from driftline.comparison.evidence.second_look import ROUTERS, SecondLook
from driftline.comparison.table.table import Coverage, Table
from driftline.comparison.verdict.dataflow import explained, final_error
from driftline.comparison.verdict.noise import NoiseFloor, Variant
from driftline.comparison.verdict.sites import ROOTS, Place, Site, sites_of
from driftline.comparison.verdict.status import NO_EVIDENCE, SiteStatus
from driftline.diagnosis import confirmation, texts
from driftline.diagnosis.causes.case_builder import Runs
from driftline.diagnosis.causes.differences import by_difference
from driftline.diagnosis.causes.families.updates import name_update
from driftline.diagnosis.causes.named_cause import NamedCause, name_cause, name_certain
from driftline.diagnosis.confirmation import (
    Confirmation,
    Rate,
    by_device,
    confirmed,
    noise_elsewhere,
)
from driftline.diagnosis.evidence.files import Substitution
from driftline.diagnosis.result import Diagnosis, SiteFinding
from driftline.diagnosis.texts import needs

# Each second look reads two tensors; beyond this many suspicions the first ones decide anyway.
_SECOND_LOOKS = 16
# How far each kind of evidence can be trusted at best. Replay compares the same computation on the
# same input; growth only compares siblings.
_TRUST = {
    "replay": 0.97,
    "recomputed": 0.97,
    "bisect": 0.97,
    "noise": 0.85,
    "growth": 0.6,
    "pattern": 0.8,
    "weights": 0.99,
}
_SHOWN = {
    "replay": "replay",
    "recomputed": "its function in float64 on the same input",
    "bisect": "substitution",
    "noise": "the noise runs",
    "growth": "the growth of the error in its siblings",
    "pattern": "what its siblings have in common",
    "weights": "the weights themselves",
}


class Assembly:
    """One diagnosis under construction; `diagnosis()` gives the result."""

    def __init__(
        self,
        table: Table,
        variants: Sequence[Variant],
        runs: Runs | None,
        proof: Substitution | None = None,
    ) -> None:
        self.table = table
        self.variants = variants
        self.runs = runs
        self.proof = proof
        judgement = table.judgement
        self.judgement = judgement
        evidence = NO_EVIDENCE if judgement is None else judgement.evidence
        self.sites: Mapping[Place, Site] = {} if judgement is None else judgement.sites
        self.notes = [judgement.note] if judgement is not None and judgement.note else []
        self.notes += [note for note in table.notes if note.startswith(ROUTERS)]
        self.floor: NoiseFloor | None = evidence.floor
        self.judged = evidence.replayed
        self.look: SecondLook | None = None
        if runs is not None:
            self.look = SecondLook(runs.reference, runs.candidate, runs.plan)
        self.seen: dict[Place, Confirmation] = {}

    def diagnosis(self) -> Diagnosis:
        coverage, judgement = Coverage.of(self.table.rows), self.judgement
        if judgement is None:
            return self._by_rows(coverage)
        statuses, culprits = judgement.statuses, judgement.culprits
        self._look_at(culprits[:_SECOND_LOOKS], statuses)
        order = {place: position for position, place in enumerate(self.sites)}
        first = culprits[0] if culprits else None
        named: dict[Place, NamedCause] = {}
        if self.runs is not None:
            # Causes are named for the first three culprits only, because each requires reading
            # several tensors, and later ones are mostly consequences.
            for place in culprits[:3]:
                judged = self.judged.get(place.site) if place.direction == "forward" else None
                # Replay gave no result here, so its values must not be used as exact ones.
                if judged is not None and judged.trouble:
                    judged = None
                naming = name_cause(self.runs, self.sites, place, statuses[place], judged)
                row = statuses[place].call.worst
                naming = by_device(naming, self.runs, row)
                named[place] = by_difference(naming, self.runs, self.table, row, place.site)
        findings = tuple(
            self._finding(place, statuses[place], order[place], named.get(place))
            for place in self.sites
        )
        final, final_noise = final_error(self.sites, self.floor, first)
        rate = self._rate()
        if first is None:
            gathered = self._evidence(statuses, None, named, final, final_noise, rate)
            if self.table.verdict in ("pass", "incomplete"):
                suspects = [place for place, entry in statuses.items() if entry.suspected]
                if suspects:
                    return self._undecided(suspects, findings, gathered, coverage, rate)
                return self._clean(findings, statuses, final, gathered, coverage, rate)
            return self._by_rows(coverage, findings, gathered)
        if self._parts_in_training(first):
            gathered = self._evidence(statuses, None, {}, final, final_noise, rate)
            return self._by_rows(coverage, findings, gathered, self._shared_cause(named))
        share, third_sentence = explained(final, final_noise), ""
        # A measured share from bisection replaces the estimate.
        if self.proof is not None:
            share, third_sentence = texts.proven(self.proof, first.site, culprits)
        gathered = self._evidence(statuses, first, named, final, final_noise, rate)
        standing, finding = statuses[first], findings[order[first]]
        naming = named.get(first, NamedCause("unknown", "no tensor was read"))
        return Diagnosis(
            "fail",
            (
                self._where(first, standing, finding),
                texts.kind(naming.cause, naming.sentence),
                third_sentence or texts.share(share, final, final_noise),
            ),
            findings,
            first.site,
            str(standing.call.worst.key),
            tuple(dict.fromkeys(place.site for place in culprits)),
            naming.cause,
            self._confidence(first, standing),
            rate.rate if rate is not None else None,
            share,
            gathered,
            coverage,
            self._needs(standing),
        )

    def _parts_in_training(self, first: Place) -> bool:
        """Whether the two trainings diverge outside of all modules, before the first guilty one.

        Then that module has other weights, and what it does with them is not the cause.
        """
        broken = None if self.table.training is None else self.table.training.broken
        return broken is not None and self.table.first_site == broken.site != first.site

    def _shared_cause(self, named: Mapping[Place, NamedCause]) -> NamedCause | None:
        """The change that the gradients of all modules have in common when the optimizer reads
        them; None if there is none."""
        broken = None if self.table.training is None else self.table.training.broken
        # A vector has too few numbers for some causes: one that is unknown contradicts none.
        explained = {place: naming for place, naming in named.items() if naming.cause != "unknown"}
        causes = {naming.cause for naming in explained.values()}
        is_shared = len(explained) > 1 and len(causes) == 1
        if broken is None or broken.stage != "gradients" or not is_shared:
            return None
        if any(place.direction != "optimizer" for place in named):
            return None
        place, naming = next(iter(explained.items()))
        others = " and ".join(f"'{other.site}'" for other in [*explained][1:])
        return naming._replace(
            sentence=f"at '{place.site}' {naming.sentence}; {others} show the same kind of change"
        )

    def _where(self, place: Place, standing: SiteStatus, finding: SiteFinding) -> str:
        """The first sentence; for a certain failure, such as NaN or Inf, that of the comparison."""
        if self.judgement is not None and self.judgement.certain is not None:
            return _sentence(self.table.finding)
        sentence = texts.where(
            finding,
            standing.by,
            self._statistic(place),
            self._limit(place, standing),
            standing.call.worst.fused,
        )
        jump = "" if self.judgement is None else self.judgement.largest_jump
        return f"{sentence.removesuffix('.')}; {jump}." if jump else sentence

    def _needs(self, standing: SiteStatus | None) -> tuple[str, ...]:
        elsewhere = ""
        if self.runs is not None and self.floor is not None:
            elsewhere = noise_elsewhere(self.runs.candidate, self.variants, self.floor.used)
        unproven = self.proof is None
        return needs(self.runs, self.table, self.floor, self.judged, standing, unproven, elsewhere)

    def _by_rows(
        self,
        coverage: Coverage,
        findings: tuple[SiteFinding, ...] = (),
        gathered: Mapping[str, Any] | None = None,
        naming: NamedCause | None = None,
    ) -> Diagnosis:
        """A diagnosis with the finding of the comparison, if no site is to blame."""
        table = self.table
        needs: tuple[str, ...] = ()
        if table.verdict == "incomparable":
            needs = ("dump tensors that both runs have, with --keep full or summary",)
        naming = naming or self._cause_by_rows()
        certain = None if self.judgement is None else self.judgement.certain
        if certain is not None and self.runs is not None and table.verdict == "fail":
            naming = name_certain(self.runs, certain)
        sentences = [_sentence(table.finding), *map(_sentence, self.notes)]
        if naming.sentence:
            sentences.insert(1, texts.kind(naming.cause, naming.sentence))
        return Diagnosis(
            table.verdict if table.verdict != "unjudged" else "incomparable",
            tuple(sentences),
            findings,
            table.first_site,
            "" if table.first is None else str(table.first.key),
            cause=naming.cause,
            evidence=gathered or {},
            coverage=coverage,
            needs=needs or self._needs(None),
        )

    def _cause_by_rows(self) -> NamedCause:
        """The cause if no site of the model is to blame.

        It may be an update whose gradients agree, a later input that the program computed itself,
        or the first tensor of a file over its limit, which has no site and no inputs.
        """
        first, training = self.table.first, self.table.training
        if self.runs is None or first is None:
            return NamedCause("unknown")
        if training is not None and training.broken is not None:
            broken = training.broken
            if broken.unmoved:
                sentence = "the weights on those ranks are those from before the update"
                return NamedCause("stale", sentence, 1.0)
            if broken.stage == "weights" and self.table.verdict == "fail":
                sentence = "something other than an optimizer's update changes weights"
                return NamedCause("weights", sentence, 1.0)
            is_update = broken.stage == "update" and self.table.verdict == "fail"
            return name_update(self.runs, broken.step) if is_update else NamedCause("unknown")
        if self.judgement is not None:
            is_input = first.key.port == "input" and first.key.site in ROOTS
            if is_input and self.table.verdict == "fail" and self.table.first_site in ROOTS:
                return NamedCause("input", "the program gives the model other inputs", 1.0)
            return NamedCause("unknown")
        sites = sites_of(self.table.rows, self.table.structure)
        for place, site in sites.items():
            call = next((call for call in site.calls if first in call.outs), None)
            if call is not None:
                standing = SiteStatus("introduced", "limit", first.severity, math.nan, call)
                return name_cause(self.runs, sites, place, standing, None)
        return NamedCause("unknown")

    def _look_at(self, culprits: Sequence[Place], statuses: Mapping[Place, SiteStatus]) -> None:
        """Examine each half of the tokens of the tensors that convict the culprits."""
        for place in culprits if self.look is not None else ():
            standing = statuses[place]
            # Replay has examined halves already, and weights are exact.
            if standing.by not in ("noise", "growth"):
                continue
            assert self.look is not None
            again = confirmed(self.look.at(standing.call.worst), standing, self.floor)
            if again is not None:
                self.seen[place] = again

    def _undecided(
        self,
        suspects: Sequence[Place],
        findings: tuple[SiteFinding, ...],
        gathered: dict[str, Any],
        coverage: Coverage,
        rate: Rate | None,
    ) -> Diagnosis:
        """The result if no site is guilty, but one that cannot be judged is off beyond noise."""
        first = min(suspects, key=lambda place: self.sites[place].order)
        gathered["suspects"] = [place.site for place in suspects]
        return Diagnosis(
            "incomplete",
            texts.undecided(first.site, self.judged[first.site].trouble),
            findings,
            false_alarm_rate=rate.rate if rate is not None else None,
            evidence=gathered,
            coverage=coverage,
            needs=self._needs(None),
        )

    def _finding(
        self, place: Place, standing: SiteStatus, order: int, naming: NamedCause | None
    ) -> SiteFinding:
        call = standing.call
        row = call.worst
        judged = self.judged.get(place.site) if place.direction == "forward" else None
        # The effect measured by replay comes first: it is the error of this site alone.
        effect = judged.effect if judged is not None else None
        if effect is None and place in self.seen:
            effect = self.seen[place].effect
        return SiteFinding(
            place.site,
            order,
            standing.status,
            place.direction,
            self.sites[place].class_name,
            call.error,
            call.error_in,
            standing.noise,
            standing.ratio,
            effect.projection if effect else float(row.metrics.get("projection", math.nan)),
            effect.z if effect else math.nan,
            naming.cause if naming is not None else "",
            standing.inside,
            standing.reason,
        )

    def _statistic(self, place: Place) -> str:
        judged = self.judged.get(place.site)
        return _STATISTICS.get(judged.statistic, "error") if judged is not None else "error"

    def _limit(self, place: Place, standing: SiteStatus) -> str:
        judged = self.judged.get(place.site) if place.direction == "forward" else None
        if standing.by == "recomputed":
            return "what its number format explains"
        if standing.by == "replay" and judged is not None:
            if not judged.introduced:
                return "what any site of its number format may add"
            return "what the trusted module's own arithmetic allows"
        if standing.by == "noise" and self.floor is not None:
            count = len(self.floor.used)
            return f"what {count} trusted runs allow" if count > 1 else "what a trusted run allows"
        return "what its input and its format explain"

    def _confidence(self, place: Place, standing: SiteStatus) -> float:
        trust = _TRUST.get(standing.by, 0.5)
        # Confidence rises with the distance from the limit, up to fifty times the limit.
        far = 1.0 - 0.5 * math.exp(-(min(standing.ratio, 50.0) - 1.0))
        judged = self.judged.get(place.site) if standing.by == "replay" else None
        halves = judged.halves if judged is not None else None
        if standing.by != "replay" and place in self.seen:
            halves = self.seen[place].halves
        # If only one half supports it (a gross error), it is less certain which site is to blame.
        if halves is not None and min(halves) <= 1.0:
            trust *= 0.8
        if self.proof is not None:
            # Substitution either proves the site or contradicts it, which halves the trust.
            bears_out = self.proof.is_about(place.site)
            trust, far = (max(trust, 0.99), 1.0) if bears_out else (trust / 2.0, far)
        return round(max(0.0, min(1.0, trust * far)), 4)

    def _rate(self) -> Rate | None:
        """The false-alarm rate, measured on the available evidence; None if that is impossible."""
        if self.judged:
            return confirmation.by_replay(self.judged.values())
        if self.floor is None or self.runs is None:
            return None
        return confirmation.by_noise(self.floor, self.variants, self.runs.reference)

    def _evidence(
        self,
        statuses: Mapping[Place, SiteStatus],
        first: Place | None,
        named: Mapping[Place, NamedCause],
        final: float,
        noise: float,
        rate: Rate | None,
    ) -> dict[str, Any]:
        gathered = texts.of_all(self.sites, statuses, self.floor)
        gathered |= {
            "final_error": final,
            "final_noise": noise,
            "explains_by": "estimate: final error against noise, as energies",
        }
        judgement = self.judgement
        if judgement is not None and judgement.pattern is not None:
            gathered["pattern"] = judgement.pattern.sentence
        if self.notes:
            gathered["notes"] = list(self.notes)
        if rate is not None:
            gathered["false_alarms"] = rate.as_evidence()
        if self.proof is not None:
            gathered["bisect"] = self.proof.as_evidence()
            if first is not None and self.proof.is_about(first.site):
                gathered["explains_by"] = "substitution: the end's error with the site corrected"
        if first is not None:
            judged = self.judged.get(first.site) if first.direction == "forward" else None
            gathered |= texts.of_culprit(
                statuses[first], judged, self.seen.get(first), named.get(first)
            )
        return gathered

    def _clean(
        self,
        findings: tuple[SiteFinding, ...],
        statuses: Mapping[Place, SiteStatus],
        final: float,
        gathered: dict[str, Any],
        coverage: Coverage,
        rate: Rate | None,
    ) -> Diagnosis:
        unknown = sum(finding.status == "unknown" for finding in findings)
        judged = len(findings) - unknown
        # A suspicion that the second look dropped is no measure of how near the limit is.
        within_limit = [
            finding
            for finding in findings
            if math.isfinite(finding.ratio) and finding.ratio <= 1.0 and not finding.reason
        ]
        worst = max(within_limit, key=lambda finding: finding.ratio, default=None)
        by = ""
        if worst is not None:
            by = _SHOWN[statuses[Place(worst.direction, worst.site)].by]
        trusts = [_TRUST.get(standing.by, 0.5) for standing in statuses.values()]
        sentences = texts.clean(judged, unknown, worst, by, final)
        is_pass = self.table.verdict == "pass"
        # Why it is no pass is the first thing to know.
        if not is_pass:
            sentences = [_sentence(self.table.finding), *sentences]
        return Diagnosis(
            "pass" if is_pass else "incomplete",
            tuple(sentences),
            findings,
            cause="noise" if is_pass else "unknown",
            confidence=round(min(trusts) * coverage.share, 4),
            false_alarm_rate=rate.rate if rate is not None else None,
            evidence=gathered,
            coverage=coverage,
            needs=self._needs(None),
        )


def _sentence(words: str) -> str:
    """A finding of a comparison as a sentence of its own."""
    return f"{words[:1].upper()}{words[1:]}."


_STATISTICS = {
    "error": "error",
    "projection": "lean (signed projection of the error)",
    "offset": "offset",
    "worst_row": "worst token's error",
    "nonfinite": "number of non-finite values",
    "function": "likeness to another function",
    "row_scale": "scatter of a factor per token",
}
