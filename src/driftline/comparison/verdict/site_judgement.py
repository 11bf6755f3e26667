"""The judgement of sites, and the statuses of rows that follow from it.

A row over the limit of its number format is not a fault if its inputs bring that error; a row
within the limit is one if its site made the error. Sites are therefore judged by the error that
they add (`settled_rows.judge_sites`). Rows follow: those of a site that adds error fail, those
before it are explained, and those after it keep the status of their own limit.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from driftline.comparison.table.row import Row, Tensors, tensors_of
from driftline.comparison.tolerance.defaults import METRIC
from driftline.comparison.tolerance.tolerance import (
    ADDED,
    ADDED_ALLOWED,
    EXPLAINED,
    MOVED_APART,
)
from driftline.comparison.verdict.certain_failures import CertainFailure, gradient_excess
from driftline.comparison.verdict.dataflow import (
    Transfer,
    has_other_shape,
    identity_of,
)
from driftline.comparison.verdict.growth import ALONE, FAULT, Growth
from driftline.comparison.verdict.patterns import (
    Pattern,
)
from driftline.comparison.verdict.sites import (
    ROOTS,
    Place,
    Site,
    error_of,
    innermost,
    is_given,
    place_of,
)
from driftline.comparison.verdict.status import NO_EVIDENCE, Evidence, SiteStatus, is_borne_out
from driftline.comparison.verdict.verdict import execution

_MOST_HIDING = 0.1
"""Fraction of the sites that may hide a fault; with more, two runs cannot decide."""
_LOOKS = 16
"""Number of suspects that get a second look; if there are more, the first ones decide anyway."""
_BEFORE = "what it was given was wrong before"
_Moment: TypeAlias = tuple[str, int, int, int]
"""Direction, rank, process and step."""
Moment: TypeAlias = tuple[int, int, int, int]
"""Step, order, rank and process; it sorts in the order of execution."""
_STEP = 2.0
"""Factor on the square root of a gradient's error, for the error that a parameter may have. An
optimizer that divides by the size of a gradient turns signs where the gradient is only rounding,
and the fraction of such elements grows with the gradient's error."""
_JUMP = 2.0
"""Multiple of the first culprit's jump from which a larger jump elsewhere is mentioned."""
_TIES = 0.25
"""Fraction of integer codes that may differ because rounding decided choices at near ties."""


@dataclass(frozen=True)
class SiteJudgement:
    """The judgement of every site of a table.

    Attributes:
        sites: All sites that can be judged, in order of execution.
        transfers: What the own code of each site made.
        growth: Their errors compared with the expected errors.
        statuses: Their statuses.
        culprits: The innermost sites that introduce error, in order of execution.
        evidence: The evidence besides the two runs.
        note: Why steps were left out; empty if none were.
        left_out: The first step that was left out, if any.
        hiding: Number of sites at which a fault of `FAULT` would not show, and of all judged.
        drowning: Number of sites at which the error that arrives would hide such a fault.
        pattern: The fault that the first culprit shares with its siblings, if it does.
        certain: A failure that does not depend on what sites add, before any culprit. Only for NaN
            or Inf may the first culprit be to blame.
    """

    sites: Mapping[Place, Site]
    transfers: Mapping[Place, Sequence[Transfer]]
    growth: Mapping[Place, Growth]
    statuses: Mapping[Place, SiteStatus]
    culprits: tuple[Place, ...]
    evidence: Evidence = NO_EVIDENCE
    note: str = ""
    left_out: int | None = None
    hiding: tuple[int, int] = (0, 0)
    drowning: int = 0
    pattern: Pattern | None = None
    certain: CertainFailure | None = None

    def overruled(self, certain: CertainFailure) -> SiteJudgement:
        """Return the judgement in which a certain failure decides; later faults are inherited."""
        if certain.kind != "inputs" and self.culprits:
            begins = min(execution(self.statuses[place].call.worst) for place in self.culprits)
            # A site that went wrong earlier may have caused the failure.
            if begins < execution(certain.row):
                return self
            # This very site made the NaN or Inf: it stays guilty, and its cause is searched for.
            if certain.kind == "nonfinite" and begins == execution(certain.row):
                return replace(self, certain=certain)
        statuses = {
            place: standing._replace(status="inherited", reason=_BEFORE)
            if standing.status == "introduced"
            else standing
            for place, standing in self.statuses.items()
        }
        return replace(self, statuses=statuses, culprits=(), pattern=None, certain=certain)

    @property
    def first(self) -> SiteStatus | None:
        """Status of the first culprit; None without one."""
        return self.statuses[self.culprits[0]] if self.culprits else None

    @property
    def power(self) -> str:
        """At how many sites a fault would have shown, as a sentence."""
        hidden, judged = self.hiding
        seen = f"all {judged}" if not hidden else f"{judged - hidden} of {judged}"
        if judged == 1:
            seen = "the one" if not hidden else "no"
        return f"a fault of {FAULT:.0%} would show at {seen} site{'' if judged == 1 else 's'}"

    @property
    def largest_jump(self) -> str:
        """Sentence about a jump much larger than that of the first culprit; else empty."""
        first = self.first
        if first is None or not math.isfinite(first.ratio):
            return ""
        # A site after the culprit receives an error and may still make it many times larger.
        names = innermost(
            place.site
            for place, standing in self.statuses.items()
            if place.direction == "forward"
            and standing.status in ("introduced", "amplified")
            and math.isfinite(standing.ratio)
        )
        places = [*(Place("forward", name) for name in names), *self.culprits]
        place = max(places, key=lambda place: self.statuses[place].jump)
        standing = self.statuses[place]
        if place == self.culprits[0] or standing.jump < _JUMP * first.jump:
            return ""
        grown = f"{standing.call.error_in:.2g} to {standing.call.error:.2g}"
        return f"crosses the limit here; the largest jump is at '{place.site}' ({grown})"

    @property
    def undecided(self) -> str:
        """Sentence about a site that seems off but cannot be judged; empty if there is none."""
        suspects = [place for place, standing in self.statuses.items() if standing.suspected]
        if not suspects:
            return ""
        first = min(suspects, key=lambda place: self.sites[place].order)
        return (
            f"'{first.site}' is off beyond noise, but nothing can be concluded from it: "
            f"{self.statuses[first].reason}"
        )

    @property
    def unlocated(self) -> str:
        """Sentence if the final output is off beyond noise but no site is guilty; else empty."""
        if self.culprits:
            return ""
        return self._beyond_trusted_runs() or self._beyond_replay()

    def _beyond_replay(self) -> str:
        ends = [
            own.end
            for name, own in self.evidence.replayed.items()
            if name in ROOTS and own.end is not None
        ]
        for error, allowed in ends:
            if error > allowed:
                return (
                    f"not located: the final output is off by {error:.3g}, where the trusted model "
                    f"in this format explains {allowed:.3g}, and no site is to blame"
                )
        return ""

    def _beyond_trusted_runs(self) -> str:
        floor = self.evidence.floor
        if floor is None or not floor.used:
            return ""
        forward = [site for place, site in self.sites.items() if place.direction == "forward"]
        if not forward:
            return ""
        # The root is the end of the model, even if a later output (of a loss) was captured.
        last = max(forward, key=lambda site: (site.name in ROOTS, site.order))
        rows = last.worst.outs
        excess, row = max(
            ((floor.excess(row) or 0.0, row) for row in rows), key=lambda entry: entry[0]
        )
        if not excess > 1.0:
            return ""
        return (
            f"not located: the final output is off by {error_of(row):.3g}, {excess:.3g} times what "
            "trusted runs allow, and no site is to blame: replay says what each adds by itself"
        )

    @property
    def is_too_noisy(self) -> bool:
        """Whether the error that arrives would hide a fault at too many sites, or at the end."""
        ends = [standing for place, standing in self.statuses.items() if place.site in ROOTS]
        lost = any(standing.drowns for standing in ends)
        return lost or self.drowning > _MOST_HIDING * self.hiding[1]

    def suspects(self) -> list[SiteStatus]:
        """Return the first culprits that two runs or noise runs convict.

        Replay, recomputation and weights are exact, so their culprits need no second look.
        """
        standings = [self.statuses[place] for place in self.culprits[:_LOOKS]]
        return [standing for standing in standings if standing.by in ("noise", "growth")]

    @property
    def needs_second_look(self) -> bool:
        """Whether tensors could acquit a suspect, because its error is not gross."""
        return any(
            not is_borne_out(standing, 0.0, standing.call.error) for standing in self.suspects()
        )

    @property
    def begins(self) -> Moment | None:
        """The moment of the first row that a culprit is guilty of, or that certainly fails."""
        firsts = [self.statuses[place].call.worst for place in self.culprits]
        if self.certain is not None:
            firsts.append(self.certain.row)
        return min(map(execution, firsts), default=None)

    def rows(self, rows: Iterable[Row], before: Moment | None = None) -> Iterator[Row]:
        """Yield the table's rows, with the status that follows from the judgement of the sites.

        Args:
            rows: Rows judged by their own limits.
            before: When error was added in a step that was judged before these rows, if it was.
        """
        convicted: dict[Tensors, SiteStatus] = {}
        for place in self.culprits:
            standing = self.statuses[place]
            convicted[tensors_of(standing.call.worst)] = standing
        begins = min(filter(None, (self.begins, before)), default=None)
        explained = _Explanations(self)
        for row in rows:
            # A tensor that only the candidate has may have the key of a pair.
            judged = row.compared or has_other_shape(row)
            standing = convicted.get(tensors_of(row)) if convicted and judged else None
            if standing is not None:
                says_more = row.status != "fail" or standing.by == "recomputed"
                yield _convicted(row, standing) if says_more else row
            # A row after a fault keeps the status of its own limit.
            elif row.status != "fail" or (begins is not None and execution(row) >= begins):
                yield row
            elif self.left_out is not None and row.key.step >= self.left_out:
                yield excused(row, self.note) if is_by_format(row) else row
            elif row.decided_by == "different":
                yield _tie(row) if explained.made_before.largest("forward", row) > 0.0 else row
            elif not is_by_format(row):
                yield row
            elif (brought := explained.error(row)) is not None:
                yield excused(row, _brought(brought))
            else:
                # A weight that a site takes as an input belongs to no site that could be a culprit,
                # and it does not excuse what is computed from it.
                begins = min(filter(None, (begins, execution(row))))
                yield row


class _Explanations:
    """Errors of inputs that explain rows over the limit of their format."""

    def __init__(self, judgement: SiteJudgement) -> None:
        self._sites = judgement.sites
        self.made_before = _MadeBefore(judgement.sites)
        self._brought: dict[Tensors, float] = {}
        self._names: dict[tuple[object, ...], float] = {}
        for place, made in judgement.transfers.items():
            if place.direction == "param" or judgement.statuses[place].status == "introduced":
                continue
            for transfer in made:
                arrived = transfer.call.error_in
                arrived = 0.0 if math.isnan(arrived) else arrived
                self._add(place, transfer, max(arrived, transfer.moved))
        self._outputs: dict[tuple[object, ...], Row] = {}
        learnt = _Learnt(judgement.sites)
        for place, site in judgement.sites.items():
            for row in (row for call in site.calls for row in call.outs):
                if place.direction == "forward":
                    self._outputs[*_moment("forward", row), place.site, row.key.slot] = row
                if place.direction == "param":
                    gradient = learnt.gradient(row)
                    apart = float(row.metrics.get(MOVED_APART, 0.0))
                    # Beyond what the signs explain, it may have the error of any tensor of its
                    # format.
                    allowed = max(_STEP * math.sqrt(gradient), apart + (row.limit or 0.0))
                    if error_of(row) <= allowed:
                        self._brought[tensors_of(row)] = max(gradient, apart)

    def _add(self, place: Place, transfer: Transfer, brought: float) -> None:
        """Record the outputs of a site that adds no error of its own."""
        for row in transfer.call.outs:
            tensors = tensors_of(row)
            self._brought[tensors] = max(self._brought.get(tensors, 0.0), brought)
            # A tensor that is only passed on was made elsewhere, rightly or not.
            if not transfer.is_same:
                name = (*_moment(place.direction, row), *identity_of(row))
                self._names[name] = max(self._names.get(name, 0.0), brought)

    def error(self, row: Row) -> float | None:
        """Return the error that explains a row; None if nothing does."""
        if (error := self._brought.get(tensors_of(row))) is not None:
            return error
        place = place_of(row)
        if place is None:
            return None
        before = self.made_before.largest(place.direction, row)
        # The first gradient of a backward pass comes from the loss, and that from the output.
        if row.key.port == "grad_output" and (place.site in ROOTS or before == 0.0):
            made = self._outputs.get((*_moment("forward", row), place.site, row.key.slot))
            explains = made is not None and gradient_excess(row, made) <= 1.0
            return error_of(made) if made is not None and explains else None
        if place.site in ROOTS:
            return None
        # The result of a judged site is explained by what the site adds, or not at all. Its inputs
        # were made by other sites. The same holds for rows of a site without a captured result,
        # such as the first module of a backward pass.
        if place in self._sites and not is_given(row):
            return None
        # The same tensor under another name: gradients arrive at a part before its container.
        same = self._names.get((*_moment(place.direction, row), *identity_of(row)))
        if same is not None:
            return same
        # A tensor that no captured container passed on was made from something captured before it.
        return before if error_of(row) <= ALONE * before else None


class _Learnt:
    """Largest error of the gradients that an optimizer received before a step."""

    def __init__(self, sites: Mapping[Place, Site]) -> None:
        self._errors: dict[tuple[str, str, int, int], list[tuple[int, float]]] = {}
        for place, site in sites.items():
            if place.direction not in ("backward", "optimizer"):
                continue
            for call in site.calls:
                for row in call.outs:
                    if row.key.port != "grad_input":
                        self._errors.setdefault(_parameter(row), []).append(
                            (row.key.step, float(row.metrics.get(METRIC, 0.0)))
                        )

    def gradient(self, row: Row) -> float:
        """Return the largest gradient error of the row's parameter; 0 before any update."""
        errors = self._errors.get(_parameter(row), ())
        # A parameter may have been captured after the update of its step.
        end = row.key.step + (row.key.moment == "after")
        return max((error for step, error in errors if step < end), default=0.0)


def _parameter(row: Row) -> tuple[str, str, int, int]:
    return row.key.site, row.key.slot, row.key.rank, row.key.process


class _MadeBefore:
    """Largest error of any output up to a moment of a step, separately for each direction."""

    def __init__(self, sites: Mapping[Place, Site]) -> None:
        made: dict[_Moment, list[tuple[int, float]]] = {}
        for place, site in sites.items():
            for call in site.calls:
                for row in call.outs:
                    moment = _moment(place.direction, row)
                    made.setdefault(moment, []).append((row.order, error_of(row)))
        self._made: dict[_Moment, tuple[list[int], list[float]]] = {}
        for moment, entries in made.items():
            entries.sort()
            errors = list(itertools.accumulate((error for _, error in entries), max))
            self._made[moment] = [order for order, _ in entries], errors

    def largest(self, direction: str, row: Row) -> float:
        """Return the largest error of any output before a row; 0 if there is none."""
        orders, errors = self._made.get(_moment(direction, row), ((), ()))
        position = bisect_left(orders, row.order)
        return errors[position - 1] if position else 0.0


def _moment(direction: str, row: Row) -> _Moment:
    return direction, row.key.rank, row.key.process, row.key.step


def is_by_format(row: Row) -> bool:
    """Return whether a failing row only exceeds the limit of its number format."""
    return (
        row.decided_by == METRIC
        and row.limit_from not in ("exact", "user", "thresholds", "always")
        and math.isfinite(row.severity)
    )


def _brought(error: float) -> str:
    if math.isinf(error):
        return "other choices were made before it, at near ties"
    return f"what it was made of is off by {error:.3g}, and its site adds no error"


def _tie(row: Row) -> Row:
    """Pass codes that were chosen by different numbers: choices between near equals may differ."""
    different = float(row.metrics.get("different", math.inf))
    if row.key.site in ROOTS and row.key.port == "input":
        return row
    if different > _TIES * math.prod(row.reference_shape or ()):
        return row
    return row.judged(
        "pass",
        f"{row.reason}: chosen by numbers that differ within what is explained",
        decided_by=row.decided_by,
        limit=row.limit,
        limit_from=f"{row.limit_from}, {EXPLAINED}",
        severity=1.0,
    )


def excused(row: Row, why: str) -> Row:
    """Return a row over the limit of its format as passed, with the reason why it passes."""
    value = float(row.metrics[METRIC])
    return row.judged(
        "pass",
        f"{METRIC} {value:.3g}, over {row.limit:g} for {row.limit_from}: {why}",
        decided_by=METRIC,
        limit=row.limit,
        limit_from=f"{row.limit_from}, {EXPLAINED}",
        severity=1.0,
    )


def _convicted(row: Row, standing: SiteStatus) -> Row:
    """Return the failing row of a site that adds error, if its own limit passes it or says less."""
    if standing.by == "recomputed" and ADDED in row.metrics:
        added, allowed = float(row.metrics[ADDED]), float(row.metrics[ADDED_ALLOWED])
        return row.judged(
            "fail",
            f"its site adds {added:.3g} by itself, {allowed:.3g} explained by "
            f"{_SOURCES[standing.by]}: {standing.reason}",
            decided_by=ADDED,
            limit=allowed,
            limit_from=standing.by,
            severity=standing.ratio,
        )
    if not row.compared:
        return row.judged(
            "fail",
            standing.reason,
            decided_by="shape",
            limit=None,
            limit_from=standing.by,
            severity=math.inf,
        )
    value, call = float(row.metrics.get(METRIC, math.nan)), standing.call
    limit = call.error / standing.ratio if standing.ratio > 0.0 else 0.0
    explained = f"{limit:.3g} explained by {_SOURCES[standing.by]}"
    if standing.by == "pattern":
        explained = _SOURCES[standing.by]
    if standing.by == "growth" and call.error_in > 0.0:
        explained += f", which is off by {call.error_in:.2g}"
    return row.judged(
        "fail",
        f"{METRIC} {value:.3g}, {explained}",
        decided_by=METRIC,
        limit=limit,
        limit_from=standing.by,
        severity=standing.ratio,
    )


_SOURCES = {
    "growth": "its number format and what its site was given",
    "noise": "trusted runs",
    "replay": "the trusted module on the same input",
    "recomputed": "its number format, on the same input",
    "weights": "one rounding",
    "bisect": "nothing: substitution proves it",
    "pattern": "no rounding, because its siblings are off in the same direction",
}
