"""Evidence from a replay: does a site introduce an error, given the candidate's own input?

The candidate's output is compared with that of the reference's module on the same input, in wide
arithmetic (exact) and in the candidate's format (native). Limits say how far from exact a trusted
execution may be. This file also finds inputs of another kind, for which a replay means nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from driftline.alignment.plan import Plan
from driftline.comparison.evidence.error_stats import (
    Effect,
    Sums,
    chosen_rows,
    effect_of,
    halves,
    index,
    is_readable,
    joined,
    read_rows,
    rounded,
    rows_and_channels,
    sums,
    without_worst,
)
from driftline.comparison.evidence.routing_changes import sites_with_choices
from driftline.comparison.pipeline import Comparison
from driftline.comparison.verdict.growth import quantised_sites
from driftline.comparison.verdict.module_kinds import attends
from driftline.comparison.verdict.own_error import CHOICES, ReplayResult, too_coarse
from driftline.comparison.verdict.sites import FINE, ancestors, parts_of
from driftline.diagnosis.evidence.files import Replay, ReplayedSite
from driftline.diagnosis.evidence.other_function import FINEST, another_function
from driftline.errors import BadInput
from driftline.numerics.dtypes import DTYPES
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run


def inputs_of_other_kinds(plan: Plan, sites: Mapping[str, ReplayedSite]) -> dict[str, str]:
    """Sites whose input is of another kind than the reference's, by the candidate's names.

    A boolean mask says which keys may be seen; a float mask is added to the scores. A replay with
    the wrong kind is another computation, unless the replay found that both masks are equivalent.
    """
    troubles: dict[str, str] = {}
    for pair in plan.pairs:
        key = pair.candidate.key
        kinds = [DTYPES.get(record.dtype) for record in (pair.reference, pair.candidate)]
        if key.port != "input" or None in kinds:
            continue
        about = sites.get(key.site)
        if about is not None and key.slot in about.masks:
            continue
        floats = [kind is not None and kind.is_floating for kind in kinds]
        if floats[0] != floats[1]:
            troubles[key.site] = (
                f"it was given another kind of '{key.slot}' ({pair.candidate.dtype}, in the "
                f"reference {pair.reference.dtype}), so its replay is another computation"
            )
    return troubles


# Limits: how far from exact a trusted execution of a module may be.


# Factors on the errors of trusted executions: on the size and on the worst row. The third one
# widens a standard error that comes from few rows.
_ERROR = 1.35
_WORST_ROW = 2.5
_FEW_ROWS = 4.0
_IN_STEPS = 2.0
"""Allowed error of code that computes in steps, in units of one rounding. A correct norm in steps
rounds the normalised value, the product with its weight and the sum with its bias (the root of 3).
Other code for a function does so too: a GELU written out rounds the cubic, tanh and the product."""
_ROW_SCALE = 2.5
_NORM_LEAN, _OTHER_NORM_LEAN = 0.012, 0.35
"""Allowed bias of a norm in units of roundoff, if its noise equals a trusted one's and if not. A
norm that is rounded once has no bias. In steps it has one (the product of a rounded value with a
weight near one is often a tie) and larger noise, so equal noise means the same steps."""

_UNITS, _UNITS_LEAN = 32.0, 8.0
"""Allowed error and bias of a fine format in units of roundoff: orders of summation differ."""
_ATTENTION, _ATTENTION_LEAN = 2.0, 0.75
"""Allowed error and bias of an attention in a fine format. Its scores are sums whose absolute error
becomes a relative error after the softmax, so the error grows with the root of their length (CPU
against CUDA: 8 units with 40 tokens and heads of 16, 25 units with 1024 and 128). CUDA's fused
kernel adds products of three pieces and truncates: its bias there is 3.4 to 11.4 units, more with
wider heads. A bias is never larger than the error; three quarters of the error are allowed."""


class Limits(NamedTuple):
    """How far from exact a trusted execution may be.

    Attributes:
        trusted: Effects of trusted executions on the same rows.
        unit: Unit roundoff of the candidate's format.
        error_floor: Relative error that is always allowed.
        lean_floor: Projection that is always allowed, in both directions.
        norm: Whether it is a norm in a coarse format: more roundings, no factor per row.
        rewritten: Whether the candidate's code differs from the reference's and may round in steps.
    """

    trusted: Sequence[Effect]
    unit: float
    error_floor: float
    lean_floor: float
    norm: bool = False
    rewritten: bool = False

    @classmethod
    def of(
        cls,
        trusted: Sequence[Effect],
        unit: float,
        parts: int,
        complete: bool,
        allowed: float,
        norm: bool = False,
        attends: int = 0,
    ) -> Limits:
        """The limits of a site that contains `parts` other sites.

        For an attention, `attends` is the length of its longest sum.

        The rounding of the parts is estimated in two cases. Without a replay in the candidate's
        format, the roundings inside a container are not known. In float32 that replay is the exact
        one: several orders of summation are correct, but the trusted execution shows only one.
        """
        deep = math.sqrt(1.0 + parts)
        fine = unit <= FINE
        if fine:
            error, lean = _UNITS * unit * deep, _UNITS_LEAN * unit * deep
            if attends:
                error = max(error, _ATTENTION * math.sqrt(64.0 + attends) * unit * deep)
                lean = _ATTENTION_LEAN * error
        elif not complete:
            error, lean = 1.5 * unit * deep, 0.5 * unit * deep
        else:
            error, lean = 0.05 * unit, 0.05 * unit
        coarse_norm = norm and complete and not fine and not allowed
        return cls(trusted, unit, max(error, allowed), max(lean, allowed / 5.0), coarse_norm)

    def excesses(self, effect: Effect, half: bool = False) -> dict[str, float]:
        """Each statistic in units of its limit; a `half` only has to support all rows' result."""
        times = 3.5 if half and self.norm else 5.0
        lean = self._lean_limit(effect)
        # Statistics of few elements scatter, so the limit is widened by their standard error.
        few = 1.0 + 3.0 / math.sqrt(max(effect.elements, 1))
        error = _largest([trusted.error for trusted in self.trusted])
        row = _largest([trusted.worst_row for trusted in self.trusted])
        most = _ERROR * few * error + self.error_floor
        if self.norm or self.rewritten:
            # The first trusted effect is that of the exact result rounded once.
            most = max(most, _IN_STEPS * few * self.trusted[0].error + self.error_floor)
        over = {
            "error": effect.error / most if most > 0 else (math.inf if effect.error > 0 else 0.0),
            "worst_row": effect.worst_row / (_WORST_ROW * few * row + 2 * self.error_floor)
            if row or self.error_floor
            else (math.inf if effect.worst_row > 0 else 0.0),
            "projection": self._outside(effect, "projection", times, lean),
            "offset": self._outside(effect, "offset", 8.0, 6.0 * self.lean_floor),
            # An element that is finite on one side only is a fault: the format may not overflow.
            "nonfinite": math.inf if effect.nonfinite else 0.0,
        }
        if self.norm:
            scatter = max(trusted_effect.row_scale for trusted_effect in self.trusted)
            over["row_scale"] = effect.row_scale / (_ROW_SCALE * few * scatter + self.error_floor)
        # A statistic that could not be computed is no evidence.
        return {name: 0.0 if math.isnan(value) else value for name, value in over.items()}

    def _lean_limit(self, effect: Effect) -> float:
        """The projection that is allowed in addition to that of trusted executions."""
        if not self.norm:
            return self.lean_floor
        noise = math.sqrt(max(effect.error**2 - effect.projection**2, 0.0))
        # Equal noise means the same sequence of roundings, and then the same bias is expected.
        same = any(abs(noise - trusted.error) < 0.08 * trusted.error for trusted in self.trusted)
        return (_NORM_LEAN if same else _OTHER_NORM_LEAN) * self.unit

    def span(self, statistic: str) -> tuple[float, float]:
        """Smallest and largest value of a statistic among trusted executions."""
        values = [float(getattr(effect, statistic)) for effect in self.trusted]
        return min(values), max(values)

    def _outside(self, effect: Effect, name: str, times: float, floor: float) -> float:
        value = float(getattr(effect, name))
        if math.isnan(value) or effect.rows < 2:
            return 0.0
        low, high = self.span(name)
        beyond = max(value - high, low - value, 0.0)
        error = max(float(getattr(other, name + "_se")) for other in (effect, *self.trusted))
        # A standard error from few rows is itself uncertain.
        width = times * error * (1.0 + _FEW_ROWS / (effect.rows - 1)) + floor
        return beyond / width if math.isfinite(width) and width > 0 else 0.0


def _largest(values: Sequence[float]) -> float:
    """The largest value; NaN, which means not measured, is ignored."""
    return max((value for value in values if not math.isnan(value)), default=0.0)


# Judging sites: their outputs are compared with those of the reference's module on the same input.


GROSS = 4.0
"""Times the limit: above it one half of the rows suffices, as a wrong token is in one half only."""

# Share of the worst tokens that is left out if a router inside the site may choose either way.
_FLIPS = 0.08
_NORM = re.compile(r"(?i)norm")


class _Stream(NamedTuple):
    """Sums of the outputs of all calls of a site that have the same slot and width."""

    candidate: list[Sums]
    native: list[Sums]
    once: list[Sums]


def judge(
    candidate: Run,
    replay: Replay,
    *,
    allowed: Mapping[str, float] | None = None,
    rewritten: frozenset[str] = frozenset(),
) -> dict[str, ReplayResult]:
    """Judge every site of the candidate that was to be replayed.

    Args:
        candidate: The run whose inputs were replayed.
        replay: Results of the reference's modules on those inputs.
        allowed: Relative error that a site may have whatever its dtype is, by site: it computes
            with integers although its outputs are floats.
        rewritten: Sites whose class differs from the reference's.
    """
    exact = index(replay.exact)
    none: Mapping[TensorKey, Record] = {}
    native = index(replay.native) if replay.native is not None else none
    by_site: dict[str, list[Record]] = {}
    coarsest: dict[str, float] = {}
    for record in candidate.records:
        dtype = DTYPES.get(record.dtype)
        if record.key.phase != "forward" or dtype is None or not dtype.is_floating:
            # Backward passes are not replayed, and integers have no rounding to judge.
            continue
        name = record.key.site
        if record.key.port in ("input", "output", "param"):
            coarsest[name] = max(coarsest.get(name, 0.0), dtype.unit_roundoff)
        if record.key.port == "output":
            by_site.setdefault(name, []).append(record)
    context = _Context(
        candidate,
        replay,
        exact,
        native,
        coarsest,
        parts_of(by_site),
        _norms(candidate),
        _attending(candidate),
        sites_with_choices(candidate),
        _handed_to_parts(candidate, exact, by_site),
        allowed or {},
        rewritten,
    )
    judged: dict[str, ReplayResult] = {}
    for name, records in by_site.items():
        about = replay.sites.get(name)
        if about is not None and about.differs:
            judged[name] = ReplayResult(True, "border", math.inf, reason=about.differs)
        elif about is not None and about.trouble:
            failed = about.reproduced is False
            judged[name] = ReplayResult(False, trouble=about.trouble, failed=failed)
        elif any(record.key in exact for record in records):
            judgement = _judged_site(context, name, records, about)
            end = _end_of(about, context.coarsest[name]) if not context.choices.get(name) else None
            judgement = judgement._replace(steps=_replayed_steps(records, exact), end=end)
            # Calls after a weight update were not replayed, so this site is not acquitted: other
            # evidence may convict it.
            if judgement.introduced or about is None or not about.updated:
                judged[name] = judgement
    return judged


def judge_replay(comparison: Comparison, replay: Replay) -> dict[str, ReplayResult]:
    """Judge every replayed site of a comparison's candidate; results have the reference's names.

    Raises:
        BadInput: The replay was made for another run.
    """
    candidate, plan = comparison.candidate, comparison.plan
    own = str(candidate.manifest.get("id") or "")
    if own and replay.of and own != replay.of:
        raise BadInput(
            f"the replay was made for another run than '{candidate.name}'",
            hint="driftline replay CAND makes one for this run",
        )
    classes: dict[str, set[str]] = {}
    for record in candidate.records:
        classes.setdefault(record.class_name, set()).add(record.key.site)
    allowed = quantised_sites(comparison.reference, candidate, classes)
    rewritten = frozenset(
        pair.candidate.key.site
        for pair in plan.pairs
        if pair.reference.class_name != pair.candidate.class_name
    )
    judged = judge(candidate, replay, allowed=allowed, rewritten=rewritten)
    if not judged and not any(about.updated for about in replay.sites.values()):
        raise BadInput(
            "the replay has no tensor in common with the candidate",
            hint='it was made for another run: driftline replay CAND --exec "..." -o REPLAY',
        )
    # A replay with a mask of another kind is another computation, so its values are not used.
    for site, why in inputs_of_other_kinds(plan, replay.sites).items():
        if site in judged:
            judged[site] = ReplayResult(False, trouble=why)
    # Findings use the reference's names and steps.
    names: dict[str, str] = {}
    steps: dict[int, int] = {}
    for pair in plan.pairs:
        if pair.candidate.key.port == "output":
            names[pair.candidate.key.site] = pair.reference.key.site
            steps[pair.candidate.key.step] = pair.reference.key.step
    results: dict[str, ReplayResult] = {}
    for site, judgement in judged.items():
        if judgement.steps is not None:
            own_steps = tuple(steps[step] for step in judgement.steps if step in steps)
            judgement = judgement._replace(steps=own_steps)
        name = names.get(site, site)
        if site not in names:
            outer = next((outer for outer in ancestors(site) if outer in names), "")
            judgement, name = _of_container(site, judgement, replay), names.get(outer, site)
        # Two modules of the candidate may correspond to one that the reference calls twice.
        results[name] = max(results.get(name, judgement), judgement, key=_gravity)
    return results


def _of_container(site: str, judgement: ReplayResult, replay: Replay) -> ReplayResult:
    """The container's result that follows from a part without a partner in the reference.

    The container's own code was repeated with the outputs of this part. If those are wrong or
    unknown, the same holds for the container.
    """
    about = replay.sites.get(site)
    if judgement.introduced:
        reason = judgement.reason or "the trusted module gives something else on the same input"
        return judgement._replace(reason=f"its part '{site}': {reason}")
    if judgement.trouble and about is not None and about.status != "skipped":
        return ReplayResult(False, trouble=f"its part '{site}': {judgement.trouble}")
    # The reference program has no such part, so its container was repeated without it.
    return judgement._replace(excess=0.0, trouble="")


def _gravity(judgement: ReplayResult) -> tuple[bool, bool, float]:
    return judgement.introduced, bool(judgement.trouble), judgement.excess


_ONE_RUN = 2.0
"""Allowed noise of a correct execution, in units of the noise of one trusted execution."""


def _end_of(about: ReplayedSite | None, unit: float) -> tuple[float, float] | None:
    """Error of the model's output and the error that noise explains; None if not measured."""
    if about is None or about.end is None:
        return None
    error, noise, elements = about.end
    few = 1.0 + 3.0 / math.sqrt(max(elements, 1))
    return error, _ONE_RUN * few * noise + unit


def _replayed_steps(
    records: Sequence[Record], exact: Mapping[TensorKey, Record]
) -> tuple[int, ...] | None:
    """Steps in which all calls of a site were replayed; None if these are all steps."""
    calls: dict[tuple[int, int, int, int], bool] = {}
    for record in records:
        key = record.key
        call = key.rank, key.process, key.step, key.visit
        calls[call] = calls.get(call, False) or key in exact
    if all(calls.values()):
        return None
    left = {step for (_, _, step, _), replayed in calls.items() if not replayed}
    return tuple(sorted({step for _, _, step, _ in calls} - left))


class _Context(NamedTuple):
    """Facts about all sites that are needed to judge one of them.

    Attributes:
        candidate: The run whose inputs were replayed.
        replay: Results of the reference's modules on those inputs.
        exact: Records of the exact replay, by key.
        native: Records of the replay in the candidate's format, by key.
        coarsest: Unit roundoff of the coarsest format at each site.
        parts: How many sites each site contains.
        norms: Sites that are norms.
        attending: Length of the longest sum of each attention.
        choices: How many discrete choices each site contains.
        passed_on: Tensors that a container's own code passed to its parts.
        allowed: Relative error that a site may have whatever its dtype is.
        rewritten: Sites whose class differs from the reference's.
    """

    candidate: Run
    replay: Replay
    exact: Mapping[TensorKey, Record]
    native: Mapping[TensorKey, Record]
    coarsest: Mapping[str, float]
    parts: Mapping[str, int]
    norms: frozenset[str]
    attending: Mapping[str, int]
    choices: Mapping[str, int]
    passed_on: Mapping[str, Sequence[Record]]
    allowed: Mapping[str, float]
    rewritten: frozenset[str]


def _norms(candidate: Run) -> frozenset[str]:
    return frozenset(
        record.key.site
        for record in candidate.records
        if record.key.port == "output" and _NORM.search(record.class_name)
    )


def _judged_site(
    context: _Context, name: str, records: Sequence[Record], about: ReplayedSite | None
) -> ReplayResult:
    """Judge one site that was replayed."""
    exact, native = context.exact, context.native
    unit, passed_on = context.coarsest[name], context.passed_on.get(name, ())
    tensors = [*records, *passed_on]
    parts = context.parts.get(name, 0)
    applied = "" if about is None else about.applied
    # In this case other evidence judges the tensors that the site passes to its parts.
    blind = parts > 0 and not passed_on and applied != "whole"
    streams = _streams(context.candidate, context.replay, tensors, exact, native, unit)
    noise = None if streams or about is None else about.noise
    near = frozenset[str]() if about is None else about.near
    # The replay does not store values that are as good as the candidate's, only their noise.
    if noise and all(
        output.digest in near or _is_its_own(output, exact, native) for output in tensors
    ):
        return _as_trusted(noise, unit)._replace(own_code_only=blind, after_parts=bool(passed_on))
    # If own code was repeated with answered parts, the parts did not run: it counts as a leaf.
    alone = applied == "own code"
    choices = 0 if alone else context.choices.get(name, 0)
    if choices > 1:
        # A token that is routed differently early affects all later choices.
        return ReplayResult(False, trouble=CHOICES)
    settings = _SiteSettings(
        about is None or not about.format_cost,
        unit,
        0 if alone else parts,
        context.allowed.get(name, 0.0),
        choices > 0,
        name in context.norms,
        context.attending.get(name, 0),
        not parts and name in context.rewritten,
    )
    judgement = _site(streams, settings)
    # In a fine format the output error itself would show another function.
    if not judgement.introduced and not parts and unit > FINEST:
        judgement = _with_hidden_function(context, records, judgement)
    if about is not None and _is_by_format(judgement, about.format_cost):
        judgement = judgement._replace(reason=too_coarse(_format_of(unit), about.format_cost))
    return judgement._replace(own_code_only=blind, after_parts=bool(passed_on))


def _with_hidden_function(
    context: _Context, records: Sequence[Record], judgement: ReplayResult
) -> ReplayResult:
    """Convict a leaf whose output is within noise but is a similar, wrong function of its input."""
    other = another_function(
        context.candidate, context.replay, records, context.exact, context.native
    )
    if other is None:
        return judgement
    return judgement._replace(
        introduced=True, statistic="function", excess=other.excess, halves=other.halves
    )


def _is_by_format(judgement: ReplayResult, cost: float) -> bool:
    """Whether the rounding of a site's buffers alone gives a trusted module the same error."""
    effect = judgement.effect
    return judgement.introduced and effect is not None and 0.0 < effect.error <= _ERROR * cost


def _format_of(unit: float) -> str:
    """The name of the number format that has this unit roundoff."""
    return next((name for name in _FORMATS if DTYPES[name].unit_roundoff == unit), "float32")


def _is_its_own(
    record: Record, exact: Mapping[TensorKey, Record], native: Mapping[TensorKey, Record]
) -> bool:
    """Whether the replay in the candidate's format gave the candidate's bytes, by digest."""
    made = native.get(record.key) or exact.get(record.key)
    return made is None or (bool(made.digest) and made.digest == record.digest)


def _as_trusted(noise: Effect, unit: float) -> ReplayResult:
    """The result of a site that equals the trusted module, or is as good: it has the same error."""
    error = 0.0 if math.isnan(noise.error) else noise.error
    excess = Limits.of([noise], unit, 0, complete=True, allowed=0.0).excesses(noise)["error"]
    return ReplayResult(False, "error", excess, (excess, excess), noise, error, error, error, unit)


def _attending(candidate: Run) -> dict[str, int]:
    """Length of the longest sum of each attention site: its tokens or its channels."""
    lengths: dict[str, int] = {}
    for record in candidate.records:
        key = record.key
        if (
            key.port in ("input", "output")
            and len(record.shape) >= 3
            and attends(record.class_name)
        ):
            lengths[key.site] = max(lengths.get(key.site, 0), *record.shape[-2:])
    return lengths


def _handed_to_parts(
    candidate: Run, exact: Mapping[TensorKey, Record], sites: Mapping[str, object]
) -> dict[str, list[Record]]:
    """Inputs of parts that the replay computed too, by the container whose code computes them."""
    by_owner: dict[str, list[Record]] = {}
    for record in candidate.records:
        if record.key.port == "input" and record.key in exact:
            owner = next((outer for outer in ancestors(record.key.site) if outer in sites), None)
            if owner is not None:
                by_owner.setdefault(owner, []).append(record)
    return by_owner


def _streams(
    candidate: Run,
    replay: Replay,
    records: Sequence[Record],
    exact: Mapping[TensorKey, Record],
    native: Mapping[TensorKey, Record],
    unit: float,
) -> dict[tuple[str, int], _Stream]:
    streams: dict[tuple[str, int], _Stream] = {}
    coarse = _format_of(unit)
    # All calls of a site share one budget of elements, so that its cost does not depend on the
    # number of calls.
    budget = max(1, len(records))
    seen: set[tuple[str, str]] = set()
    for record in records:
        exact_record = exact.get(record.key)
        if exact_record is None or exact_record.shape != record.shape:
            continue
        if not is_readable(candidate, record) or not is_readable(replay.exact, exact_record):
            continue
        if record.digest and (record.digest, exact_record.digest) in seen:
            continue  # equal bytes under another name are no further evidence
        seen.add((record.digest, exact_record.digest))
        places = chosen_rows(record.shape, max(4096, (1 << 20) // budget))
        r = read_rows(replay.exact, exact_record, places)
        c = read_rows(candidate, record, places)
        if r is None or c is None:
            continue
        _, channels = rows_and_channels(record.shape)
        slot = record.key.slot
        if record.key.port == "input":
            slot = f"{record.key.site}/input/{slot}"
        stream = streams.setdefault((slot, channels), _Stream([], [], []))
        stream.candidate.append(sums(r, c))
        stream.once.append(sums(r, rounded(r, coarse)))
        trusted = native.get(record.key)
        if trusted is not None and replay.native is not None and trusted.shape == record.shape:
            # The digests are equal, so the trusted output need not be read.
            if trusted.digest and trusted.digest == record.digest:
                stream.native.append(stream.candidate[-1])
            else:
                n = read_rows(replay.native, trusted, places)
                if n is not None:
                    stream.native.append(sums(r, n))
    return streams


_FORMATS = (
    *("float32", "float16", "bfloat16", "float64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
)


class _SiteSettings(NamedTuple):
    """Facts about a site that do not depend on its values.

    Attributes:
        format_is_right: Whether the candidate's format is precise enough for the site's buffers; if
            not, a trusted execution in that format does not set limits.
        unit: Unit roundoff of the site's coarsest format.
        parts: Number of sites inside it that ran when it was repeated.
        allowed: Relative error that it may have whatever its dtype is.
        choosing: Whether the site contains a discrete choice.
        norm: Whether it is a norm.
        attends: Length of the longest sum of an attention; 0 for other sites.
        rewritten: Whether it is a leaf whose class differs from the reference's.
    """

    format_is_right: bool
    unit: float
    parts: int
    allowed: float
    choosing: bool
    norm: bool
    attends: int
    rewritten: bool


def _site(streams: Mapping[tuple[str, int], _Stream], about: _SiteSettings) -> ReplayResult:
    if not streams:
        return ReplayResult(False, trouble="no values of it were kept, or not of its replay")
    judgements = [
        _judged(stream, about)._replace(slot=slot) for (slot, _), stream in streams.items()
    ]
    return max(judgements, key=lambda judgement: (judgement.introduced, judgement.excess))


def _judged(stream: _Stream, about: _SiteSettings) -> ReplayResult:
    """Judge one output.

    If the site contains a discrete choice (a router picks experts), rounding decides choices
    between near equals, and the token is then far off without any fault. Such a site is judged
    without the tokens of largest error, which are left out of the trusted executions as well.
    """
    allowed = about.allowed
    own = joined(stream.candidate)
    if about.choosing:
        own = without_worst(own, _FLIPS)
    effect, (first, second) = effect_of(own), halves(own)
    # A trusted execution of only some calls would have other rows, so it is not used.
    complete = len(stream.native) == len(stream.candidate) and about.format_is_right
    nulls = [joined(stream.once), *([joined(stream.native)] if complete else [])]
    if about.choosing:
        nulls = [without_worst(null, _FLIPS) for null in nulls]
    if complete and effect_of(nulls[-1]).error > 0.1 * allowed:
        allowed = 0.0  # the trusted module computes with integers too, so its error sets the limit
    settings = about.unit, about.parts, complete, allowed, about.norm, about.attends
    rewritten = about.rewritten and complete and about.unit > FINE and not allowed

    def limits_of(trusted: Sequence[Effect]) -> Limits:
        return Limits.of(trusted, *settings)._replace(rewritten=rewritten)

    limits = limits_of([effect_of(null) for null in nulls])
    over = limits.excesses(effect)
    half = [halves(null) for null in nulls]
    over_first = limits_of([a for a, _ in half]).excesses(first, half=True)
    over_second = limits_of([b for _, b in half]).excesses(second, half=True)
    confirmed = {
        name: min(over[name], over_first[name], over_second[name])
        for name in over
        if over[name] > 1.0
    }
    # A statistic that both halves confirm has precedence over one that is further outside on all
    # rows.
    statistic = max(over, key=lambda name: (confirmed.get(name, 0.0) > 1.0, over[name]))
    widest = max(limits.trusted, key=lambda trusted: trusted.error).error
    is_introduced = confirmed.get(statistic, 0.0) > 1.0
    gross = statistic in ("error", "worst_row", "nonfinite") and over[statistic] > GROSS
    low, high = limits.span(statistic)
    # If a trusted execution is itself wrong by much more than roundings, it cannot acquit the site.
    most = _MOST_NOISE * about.unit * math.sqrt(1.0 + about.parts)
    if not is_introduced and not gross and not allowed and about.unit > FINE and widest > most:
        return ReplayResult(False, noise=widest, trouble=_too_wide(widest, about.unit))
    return ReplayResult(
        is_introduced or gross,
        statistic,
        over[statistic],
        (over_first[statistic], over_second[statistic]),
        effect,
        low,
        high,
        widest,
        about.unit,
    )


_MOST_NOISE = 16.0
"""Largest error of a trusted execution of one module, in units of roundoff, that is meaningful."""


def _too_wide(error: float, unit: float) -> str:
    return (
        f"a trusted execution of it in this format is itself off by {error:.2g}, "
        f"{error / unit:.0f} units of roundoff: a fault could hide in that"
    )
