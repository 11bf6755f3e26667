"""What a site adds by itself: its output against the reference's module on the very same input.

The null is not zero: the trusted module in the candidate's format errs too, and leans. An effect
counts when it lies outside what trusted executions span (the module replayed in that format, and
its exact result rounded once), widened by standard errors and a small share of the format's
roundoff; and only if it does so on both halves of the rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from driftline.diagnosis.artefacts import Replay
from driftline.diagnosis.calls import ancestors, parts_of
from driftline.diagnosis.choices import choosers
from driftline.diagnosis.effects import (
    Effect,
    Sums,
    effect_of,
    halves,
    joined,
    sums,
    without_worst,
)
from driftline.diagnosis.functions import FINEST, another_function
from driftline.diagnosis.lengths import attends
from driftline.diagnosis.limits import Limits
from driftline.diagnosis.reading import (
    chosen_rows,
    index,
    is_readable,
    read_rows,
    rounded,
    rows_and_channels,
)
from driftline.numerics.dtypes import DTYPES
from driftline.runs.key import TensorKey
from driftline.runs.record import Record
from driftline.runs.run import Run

GROSS = 4.0
"""Times its limit: so far outside that one half of the rows is enough (a single token is off)."""

_FLIPS = 0.08
_CHOICES = "choices inside it (of experts) may fall either way by rounding; its parts are judged"
_NORM = re.compile(r"(?i)norm")


class Judgement(NamedTuple):
    """What replay says of one site.

    Attributes:
        introduced: Whether it errs by itself more than trusted executions do.
        statistic: What is furthest outside: error, projection, offset, worst_row or nonfinite.
        excess: That, in units of its limit; above 1 is outside.
        halves: The same on either half of the rows.
        found: The candidate's effect.
        low: The least that trusted executions have of that statistic (error: of noise).
        high: The most they have.
        noise: Relative error of the trusted execution that errs most.
        unit: Unit roundoff of the candidate's format.
        slot: Which output.
        own_code_only: Whether its output alone was looked at while its own code was repeated: what
            it hands to its parts is then not known from here.
        after_parts: Whether what it hands to its parts was looked at, too: an error of its output
            is then made after that.
        trouble: Why nothing can be said; empty otherwise.
        failed: Whether that is because it does not give its own output on its own inputs.
    """

    introduced: bool
    statistic: str = ""
    excess: float = 0.0
    halves: tuple[float, float] = (0.0, 0.0)
    found: Effect | None = None
    low: float = math.nan
    high: float = math.nan
    noise: float = math.nan
    unit: float = 0.0
    slot: str = "0"
    own_code_only: bool = False
    after_parts: bool = False
    trouble: str = ""
    failed: bool = False

    @property
    def is_open(self) -> bool:
        """Whether nothing is said of it, and other evidence may convict it.

        Choices that fall either way and random numbers err without any fault. A module that does
        not agree with itself is not guilty by any evidence: what it should give is not known.
        """
        return self.is_suspect and not self.failed

    @property
    def is_suspect(self) -> bool:
        """Whether other evidence may at least suspect it."""
        return bool(self.trouble) and self.trouble != _CHOICES and "random" not in self.trouble


class _Stream(NamedTuple):
    """Outputs of a site that are one thing again and again: the same slot, as wide."""

    candidate: list[Sums]
    native: list[Sums]
    once: list[Sums]


def judge(
    candidate: Run, replay: Replay, *, allowed: Mapping[str, float] | None = None
) -> dict[str, Judgement]:
    """A judgement for every site of the candidate that was to be replayed.

    Args:
        candidate: The run whose inputs were replayed.
        replay: What the reference made of them.
        allowed: Relative error that a site may have whatever its dtype says: integer arithmetic
            behind a float interface.
    """
    exact = index(replay.exact)
    none: Mapping[TensorKey, Record] = {}
    native = index(replay.native) if replay.native is not None else none
    by_site: dict[str, list[Record]] = {}
    coarsest: dict[str, float] = {}
    for record in candidate.records:
        dtype = DTYPES.get(record.dtype)
        if record.key.phase != "forward" or dtype is None or not dtype.is_floating:
            continue
        name = record.key.site
        if record.key.port in ("input", "output", "param"):
            coarsest[name] = max(coarsest.get(name, 0.0), dtype.unit_roundoff)
        if record.key.port == "output":
            by_site.setdefault(name, []).append(record)
    parts = parts_of(by_site)
    norms = {
        record.key.site
        for record in candidate.records
        if record.key.port == "output" and _NORM.search(record.class_name)
    }
    attending = _attending(candidate)
    choices_in = choosers(candidate)
    handed = _handed_to_parts(candidate, exact, by_site)
    judged: dict[str, Judgement] = {}
    for name, records in by_site.items():
        about = replay.sites.get(name)
        if about is not None and about.trouble:
            failed = about.reproduced is False
            judged[name] = Judgement(False, trouble=about.trouble, failed=failed)
        elif any(record.key in exact for record in records):
            unit, given = coarsest[name], handed.get(name, ())
            found = _streams(candidate, replay, [*records, *given], exact, native, unit)
            noise = None if found or about is None else about.noise
            near = frozenset[str]() if about is None else about.near
            if noise and all(
                each.digest in near or _is_its_own(each, exact, native)
                for each in (*records, *given)
            ):
                judged[name] = _as_trusted(noise, unit, bool(given))
                continue
            alone = about is not None and about.applied == "own code"
            inside = 0 if alone else parts.get(name, 0)
            most = (allowed or {}).get(name, 0.0)
            choices = 0 if alone else choices_in.get(name, 0)
            if choices > 1:
                # One token that goes another way early is seen by all later ones.
                judged[name] = Judgement(False, trouble=_CHOICES)
                continue
            about_it = _About(
                unit, inside, most, choices > 0, name in norms, attending.get(name, 0)
            )
            judgement = _site(found, about_it)
            if not judgement.introduced and unit > FINEST and not parts.get(name, 0):
                there = [r for r in records if is_readable(replay.exact, exact.get(r.key))]
                other = another_function(candidate, replay, there, exact, native)
                if other is not None:
                    _, excess, both = other
                    judgement = judgement._replace(
                        introduced=True, statistic="function", excess=excess, halves=both
                    )
            whole = about is not None and about.applied == "whole"
            blind = parts.get(name, 0) > 0 and not given and not whole
            judged[name] = judgement._replace(own_code_only=blind, after_parts=bool(given))
    return judged


def _is_its_own(
    record: Record, exact: Mapping[TensorKey, Record], native: Mapping[TensorKey, Record]
) -> bool:
    """Whether a replay gave, in the candidate's format, what the candidate has; by digests."""
    made = native.get(record.key) or exact.get(record.key)
    return made is None or (bool(made.digest) and made.digest == record.digest)


def _as_trusted(noise: Effect, unit: float, given: bool) -> Judgement:
    """Of a site that does what the trusted module does in its format, to the bit or as good as it.

    Whatever is measured of it is measured of that module as well, and lies in its interval.
    """
    error = 0.0 if math.isnan(noise.error) else noise.error
    excess = Limits.of([noise], unit, 0, complete=True, allowed=0.0).excesses(noise)["error"]
    return Judgement(
        False,
        "error",
        excess,
        (excess, excess),
        noise,
        error,
        error,
        error,
        unit,
        after_parts=given,
    )


def _attending(candidate: Run) -> dict[str, int]:
    """Sites that are an attention, and the longest sum of each: its tokens, or its channels."""
    found: dict[str, int] = {}
    for record in candidate.records:
        key = record.key
        if (
            key.port in ("input", "output")
            and len(record.shape) >= 3
            and attends(record.class_name)
        ):
            found[key.site] = max(found.get(key.site, 0), *record.shape[-2:])
    return found


def _handed_to_parts(
    candidate: Run, exact: Mapping[TensorKey, Record], sites: Mapping[str, object]
) -> dict[str, list[Record]]:
    """Inputs of parts that a replay made too: results of the own code of what contains them."""
    found: dict[str, list[Record]] = {}
    for record in candidate.records:
        if record.key.port == "input" and record.key in exact:
            owner = next((each for each in ancestors(record.key.site) if each in sites), None)
            if owner is not None:
                found.setdefault(owner, []).append(record)
    return found


def _streams(
    candidate: Run,
    replay: Replay,
    records: Sequence[Record],
    exact: Mapping[TensorKey, Record],
    native: Mapping[TensorKey, Record],
    unit: float,
) -> dict[tuple[str, int], _Stream]:
    streams: dict[tuple[str, int], _Stream] = {}
    coarse = next((name for name in _FORMATS if DTYPES[name].unit_roundoff == unit), "float32")
    budget = max(1, len(records))
    seen: set[tuple[str, str]] = set()
    for record in records:
        ours = exact.get(record.key)
        if ours is None or ours.shape != record.shape:
            continue
        if not is_readable(candidate, record) or not is_readable(replay.exact, ours):
            continue
        if record.digest and (record.digest, ours.digest) in seen:
            continue  # the same bytes under another name are no further evidence
        seen.add((record.digest, ours.digest))
        places = chosen_rows(record.shape, max(4096, (1 << 20) // budget))
        r = read_rows(replay.exact, ours, places)
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


class _About(NamedTuple):
    """What is known of a site whatever its values are.

    Attributes:
        unit: Unit roundoff of the coarsest format that takes part.
        parts: How many sites lie in it and were computed with it.
        allowed: Relative error that it may have whatever its dtype says.
        choosing: Whether something inside chooses.
        norm: Whether it is a norm.
        attends: The longest sum of an attention; 0 for others.
    """

    unit: float
    parts: int
    allowed: float
    choosing: bool
    norm: bool
    attends: int


def _site(streams: Mapping[tuple[str, int], _Stream], about: _About) -> Judgement:
    if not streams:
        return Judgement(False, trouble="no values of it were kept, or not of its replay")
    judgements = [
        _judged(stream, about)._replace(slot=slot) for (slot, _), stream in streams.items()
    ]
    return max(judgements, key=lambda found: (found.introduced, found.excess))


def _judged(stream: _Stream, about: _About) -> Judgement:
    """The judgement of one output.

    Where something inside chooses (a router picks experts), a choice between near equals falls one
    way or the other by rounding, and that token is then far off without any fault: the tokens that
    err most are left out there, of the trusted executions as well.
    """
    allowed = about.allowed
    own = joined(stream.candidate)
    if about.choosing:
        own = without_worst(own, _FLIPS)
    whole, (first, second) = effect_of(own), halves(own)
    # A trusted run of only some calls would be a null of other rows.
    complete = len(stream.native) == len(stream.candidate)
    nulls = [joined(stream.once), *([joined(stream.native)] if complete else [])]
    if about.choosing:
        nulls = [without_worst(null, _FLIPS) for null in nulls]
    if complete and effect_of(nulls[-1]).error > 0.1 * allowed:
        allowed = 0.0  # the trusted module computes with integers too, and says what that costs
    known = about.unit, about.parts, complete, allowed, about.norm, about.attends
    limits = Limits.of([effect_of(null) for null in nulls], *known)
    over = limits.excesses(whole)
    half = [halves(null) for null in nulls]
    over_first = Limits.of([a for a, _ in half], *known).excesses(first, half=True)
    over_second = Limits.of([b for _, b in half], *known).excesses(second, half=True)
    confirmed = {
        name: min(over[name], over_first[name], over_second[name])
        for name in over
        if over[name] > 1.0
    }
    statistic = max(over, key=lambda name: (confirmed.get(name, 0.0) > 1.0, over[name]))
    gross = statistic in ("error", "worst_row", "nonfinite") and over[statistic] > GROSS
    low, high = limits.span(statistic)
    return Judgement(
        confirmed.get(statistic, 0.0) > 1.0 or gross,
        statistic,
        over[statistic],
        (over_first[statistic], over_second[statistic]),
        whole,
        low,
        high,
        max(limits.trusted, key=lambda each: each.error).error,
        about.unit,
    )
