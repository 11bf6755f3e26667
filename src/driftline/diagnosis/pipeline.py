"""The diagnosis itself: from evidence to statuses, culprits, causes, shares, rates and sentences.

Takes measured tables and opened evidence; opens no file. The order of the steps matters: statuses
first, then a second look at every suspicion, then causes of the sites that remain.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from driftline.comparison.table.table import Coverage, Table
from driftline.diagnosis import confirmation, texts
from driftline.diagnosis.causes.case_builder import NamedCause, Runs, name_cause
from driftline.diagnosis.confirmation import (
    Confirmation,
    Rate,
    by_device,
    confirmed,
    noise_elsewhere,
)
from driftline.diagnosis.dataflow import explained, final_error
from driftline.diagnosis.evidence.files import Replay, Substitution
from driftline.diagnosis.evidence.growth import growths, quantised_sites
from driftline.diagnosis.evidence.noise import NoiseFloor, Variant, noise_floor
from driftline.diagnosis.evidence.replay import ReplayResult, inputs_of_other_kinds, judge
from driftline.diagnosis.module_kinds import lengths_of
from driftline.diagnosis.result import Diagnosis, SiteFinding
from driftline.diagnosis.routing_changes import ROUTING_REACHES_ALL, Flip, flips
from driftline.diagnosis.sites import (
    DIRECTIONS,
    Place,
    comparable_steps,
    flow_of,
    innermost,
    sites_of,
)
from driftline.diagnosis.status import SiteStatus, site_statuses
from driftline.diagnosis.texts import needs
from driftline.errors import BadInput

# Each second look reads two tensors; beyond this many suspicions the first ones decide anyway.
_SECOND_LOOKS = 16
# How far each kind of evidence can be trusted at best. Replay compares the same computation on the
# same input; growth only compares siblings.
_TRUST = {"replay": 0.97, "noise": 0.85, "growth": 0.6, "weights": 0.99}
_SHOWN = {
    "replay": "replay",
    "noise": "the noise runs",
    "growth": "the growth of the error in its siblings",
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
        # Findings use the reference's names, an experiment those of the candidate's program.
        self.proof = proof if runs is None or proof is None else _renamed(proof, runs)
        self.replay = runs.replay if runs is not None else None
        flow = None if runs is None else flow_of(runs.reference, runs.candidate, runs.plan)
        lengths = lengths_of(None if runs is None else runs.reference)
        self.sites, why = comparable_steps(sites_of(table, flow, lengths), table)
        self.notes = [why] if why else []
        self.floor: NoiseFloor | None = noise_floor(variants) if variants else None
        self.judged: dict[str, ReplayResult] = {}
        self.seen: dict[Place, Confirmation] = {}
        self.flips: list[Flip] | None = None
        self.allowed: Mapping[str, float] = {}
        if runs is not None:
            self.allowed = quantised_sites(runs.reference, runs.candidate)
        if runs is not None and runs.replay is not None:
            self.judged = self._replayed(runs, runs.replay)

    def _replayed(self, runs: Runs, replay: Replay) -> dict[str, ReplayResult]:
        own = str(runs.candidate.manifest.get("id") or "")
        if own and replay.of and own != replay.of:
            raise BadInput(
                f"the replay was made for another run than '{runs.candidate.name}'",
                hint="driftline replay CAND makes one for this run",
            )
        judged = judge(runs.candidate, replay, allowed=self.allowed)
        if not judged:
            raise BadInput(
                "the replay has no tensor in common with the candidate",
                hint='it was made for another run: driftline replay CAND --exec "..." -o REPLAY',
            )
        # A replay with a mask of another kind is another computation, whatever numbers it gave.
        for site, why in inputs_of_other_kinds(runs.plan, replay.sites).items():
            if site in judged:
                judged[site] = ReplayResult(False, trouble=why)
        # Findings go by the reference's names.
        names = {
            pair.candidate.key.site: pair.reference.key.site
            for pair in runs.plan.pairs
            if pair.candidate.key.port == "output"
        }
        return {names.get(site, site): judgement for site, judgement in judged.items()}

    def diagnosis(self) -> Diagnosis:
        coverage = Coverage.of(self.table.rows)
        if not self.sites:
            why = self.notes[0] if self.notes else "no tensor could be set against another"
            what = (
                "run both programs on the same inputs"
                if self.notes
                else ("dump tensors that both runs have, with --keep full or summary")
            )
            sentences = (f"Nothing could be judged: {why}.",)
            return Diagnosis("incomparable", sentences, coverage=coverage, needs=(what,))
        growth = growths(self.sites, self.allowed)
        statuses = site_statuses(self.sites, growth, self.floor, self.judged)
        statuses, culprits = self._looked_at_again(statuses)
        order = {place: position for position, place in enumerate(self.sites)}
        first = culprits[0] if culprits else None
        named: dict[Place, NamedCause] = {}
        if self.runs is not None:
            # Causes are named for the first three culprits only: each costs reading several
            # tensors, and later ones are mostly consequences.
            for place in culprits[:3]:
                judged = self.judged.get(place.site) if place.direction == "forward" else None
                # Replay had nothing to say here, so its reference values must not be used as exact
                # ones.
                if judged is not None and judged.trouble:
                    judged = None
                naming = name_cause(self.runs, self.sites, place, statuses[place], judged)
                named[place] = by_device(naming, self.runs, statuses[place].call.worst)
        findings = tuple(
            self._finding(place, statuses[place], order[place], named.get(place))
            for place in self.sites
        )
        final, final_noise = final_error(self.sites, self.floor, first)
        rate = self._rate()
        if first is None:
            # Without a culprit there are two endings: a site that contradicts itself makes the
            # result undecided, otherwise the run is clean.
            suspects = self._suspects(statuses)
            gathered = self._evidence(statuses, None, named, final, final_noise, rate)
            if suspects:
                return self._undecided(suspects, findings, gathered, coverage, rate)
            return self._clean(findings, statuses, final, gathered, coverage, rate)
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
                texts.where(
                    finding,
                    standing.by,
                    self._statistic(first),
                    self._limit(first, standing),
                    standing.call.worst.fused,
                ),
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

    def _needs(self, standing: SiteStatus | None) -> tuple[str, ...]:
        elsewhere = ""
        if self.runs is not None and self.floor is not None:
            elsewhere = noise_elsewhere(self.runs.candidate, self.variants, self.floor.used)
        unproven = self.proof is None
        return needs(self.runs, self.table, self.floor, self.judged, standing, unproven, elsewhere)

    def _suspects(self, statuses: Mapping[Place, SiteStatus]) -> list[Place]:
        """Sites that do not reproduce their own output and are off by other evidence as well."""
        suspects: list[Place] = []
        for place, standing in statuses.items():
            other = standing.suspected
            if other is None:
                continue
            again = None
            if self.runs is not None:
                again = confirmed(self.runs, other, self.floor, self._flips(self.runs))
            if again is None or again.holds:
                suspects.append(place)
        return suspects

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
            "incomparable",
            texts.undecided(first.site, self.judged[first.site].trouble),
            findings,
            false_alarm_rate=rate.rate if rate is not None else None,
            evidence=gathered,
            coverage=coverage,
            needs=self._needs(None),
        )

    def _looked_at_again(
        self, statuses: dict[Place, SiteStatus]
    ) -> tuple[dict[Place, SiteStatus], list[Place]]:
        """Statuses and culprits without suspicions that only one half of the tokens supports.

        Repeats until no culprit is dropped: dropping one may bring another to the front.
        """
        while True:
            culprits = self._culprits(statuses)
            doubtful = None
            for place in culprits[:_SECOND_LOOKS] if self.runs is not None else ():
                # Replay has looked at halves already, and weights are exact.
                if statuses[place].by not in ("noise", "growth") or place in self.seen:
                    continue
                assert self.runs is not None
                again = confirmed(self.runs, statuses[place], self.floor, self._flips(self.runs))
                if again is not None:
                    self.seen[place] = again
                    if not again.holds:
                        doubtful = place
                        break
            if doubtful is None:
                return statuses, culprits
            reason = self.seen[doubtful].remark or "seen on one half of the tokens only"
            status = "unknown" if reason == ROUTING_REACHES_ALL else "clean"
            statuses = {
                **statuses,
                doubtful: statuses[doubtful]._replace(status=status, reason=reason),
            }

    def _flips(self, runs: Runs) -> list[Flip]:
        """Changed expert choices; searched once, and mentioned in the notes."""
        if self.flips is None:
            self.flips = flips(runs.reference, runs.candidate, runs.plan)
            if self.flips:
                tokens = sum(int(flip.rows.sum()) for flip in self.flips)
                self.notes.append(
                    f"routers sent {tokens} tokens to other experts at a near tie, first "
                    f"'{self.flips[0].router}': errors of those tokens alone were not counted"
                )
        return self.flips

    def _culprits(self, statuses: Mapping[Place, SiteStatus]) -> list[Place]:
        """Innermost sites that introduce error, in order of execution."""
        guilty = [place for place, standing in statuses.items() if standing.status == "introduced"]
        inner: list[Place] = []
        for direction in DIRECTIONS:
            names = innermost(place.site for place in guilty if place.direction == direction)
            inner += [Place(direction, name) for name in names]
        inner.sort(key=lambda place: self.sites[place].order)
        return inner

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
        if standing.by == "replay" and judged is not None:
            return "what the trusted module's own arithmetic allows"
        if standing.by == "noise" and self.floor is not None:
            count = len(self.floor.used)
            return f"what {count} trusted runs allow" if count > 1 else "what a trusted run allows"
        return "what its input and its format explain"

    def _confidence(self, place: Place, standing: SiteStatus) -> float:
        trust = _TRUST.get(standing.by, 0.5)
        # Confidence rises with the distance from the limit; beyond fifty times it no longer
        # changes.
        far = 1.0 - 0.5 * math.exp(-(min(standing.ratio, 50.0) - 1.0))
        judged = self.judged.get(place.site) if standing.by == "replay" else None
        halves = judged.halves if judged is not None else None
        if standing.by != "replay" and place in self.seen:
            halves = self.seen[place].halves
        # Only one half supports it (a gross error): less certain which site is to blame.
        if halves is not None and min(halves) <= 1.0:
            trust *= 0.8
        if self.proof is not None:
            # Substitution either proves the site or contradicts it; a contradiction halves the
            # trust.
            bears_out = self.proof.is_about(place.site)
            trust, far = (max(trust, 0.99), 1.0) if bears_out else (trust / 2.0, far)
        return round(max(0.0, min(1.0, trust * far)), 4)

    def _rate(self) -> Rate | None:
        """False-alarm rate, measured on the evidence at hand; None if it cannot be measured."""
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
        if judged == 0:
            sentences = ("Nothing could be judged: no site's evidence holds.",)
            return Diagnosis(
                "incomparable", sentences, findings, coverage=coverage, evidence=gathered
            )
        trusts = [_TRUST.get(standing.by, 0.5) for standing in statuses.values()]
        return Diagnosis(
            "pass",
            tuple(texts.clean(judged, unknown, worst, by, final)),
            findings,
            cause="noise",
            confidence=round(min(trusts) * coverage.share, 4),
            false_alarm_rate=rate.rate if rate is not None else None,
            evidence=gathered,
            coverage=coverage,
            needs=self._needs(None),
        )


def _renamed(proof: Substitution, runs: Runs) -> Substitution:
    """The bisection with the reference's name of its site, as findings use those names."""
    for pair in runs.plan.pairs:
        if pair.candidate.key.port == "output" and pair.candidate.key.site == proof.site:
            return proof._replace(site=pair.reference.key.site)
    return proof


_STATISTICS = {
    "error": "error",
    "projection": "lean (signed projection of the error)",
    "offset": "offset",
    "worst_row": "worst token's error",
    "nonfinite": "number of non-finite values",
    "function": "likeness to another function",
    "row_scale": "scatter of a factor per token",
}
