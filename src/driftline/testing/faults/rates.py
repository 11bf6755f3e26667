"""Rates from the results of many trials: which trials count, and which goals are missed.

A result is a JSON object: `job` (architecture, format, seed, kind, amount, length, implementation,
batch, set), `changed`, `error`, `clean_error`, `effect`, and one outcome for each method. Prints
nothing.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

Result: TypeAlias = Mapping[str, Any]
# The project's promises; benchmarks and docs state the measured rates.
GOALS: Mapping[tuple[str, str], float] = {
    ("replay", "detected"): 0.99,
    ("replay", "exact"): 0.95,
    ("replay", "named"): 0.85,
    ("noise", "exact"): 0.85,
}
"""For faults above the noise: method and statement → fraction that must be right."""
SUB_NOISE_GOAL = 0.90
ROWS_PER_ALARM = 10_000
MEANT = 0.05
"""Faults that change their module's output by fewer units of roundoff are not counted."""


class Job(NamedTuple):
    """The trial of a result; the last fields may be missing in older files."""

    architecture: str
    format: str
    seed: int
    kind: str
    amount: float
    length: int
    implementation: str = ""
    batch: int = 4
    group: str = ""


class Sorted(NamedTuple):
    """Results sorted by their use.

    Attributes:
        broken: Trials that raised an error.
        clean: Fault-free pairs.
        groups: Fault-free pairs of special sets, by the set's name.
        unchanged: Plants that changed no bit.
        above: Faults with more output error than the floor of their format.
        below: The others: excluded from the goals for loud faults.
        floors: Format → 99.9th percentile of the output error of fault-free pairs.
    """

    broken: list[Result]
    clean: list[Result]
    groups: dict[str, list[Result]]
    unchanged: list[Result]
    above: list[Result]
    below: list[Result]
    floors: dict[str, float]


class Alarms(NamedTuple):
    """False alarms of one method on fault-free pairs."""

    pairs: int
    runs: int
    rows: int
    flagged: int

    @property
    def per_10_000(self) -> float:
        """Rows flagged in 10 000."""
        return 10_000 * self.flagged / self.rows if self.rows else math.nan

    @property
    def allowed(self) -> bool:
        """No run, and no more than one row in 10 000."""
        return not self.runs and self.flagged * ROWS_PER_ALARM <= self.rows


def job_of(result: Result) -> Job:
    """The trial of a result."""
    return Job(*result["job"])


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that this share of all does not exceed; 0 without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def sort_out(results: Sequence[Result]) -> Sorted:
    """Sort results by the goals they count for."""
    # A trial that raised an error says nothing about a method.
    sound = [r for r in results if "broken" not in r]
    # Special sets are judged on their own and must not set the noise floor.
    clean = [r for r in sound if not job_of(r).kind and not job_of(r).group]
    groups: dict[str, list[Result]] = defaultdict(list)
    for result in sound:
        if not job_of(result).kind and job_of(result).group:
            groups[job_of(result).group].append(result)
    # A fault smaller than what healthy runs differ by cannot be asked for.
    floors = {
        name: percentile((r["clean_error"] for r in clean if job_of(r).format == name), 0.999)
        for name in {job_of(r).format for r in sound}
    }
    faults = [r for r in sound if job_of(r).kind]
    changed = [r for r in faults if r["changed"]]
    return Sorted(
        broken=[r for r in results if "broken" in r],
        clean=clean,
        groups=dict(groups),
        unchanged=[r for r in faults if not r["changed"]],
        above=[r for r in changed if r["error"] > floors[job_of(r).format]],
        below=[r for r in changed if not r["error"] > floors[job_of(r).format]],
        floors=floors,
    )


def is_hidden(result: Result) -> bool:
    """Whether the module at fault is inside a compiled one: no run has a tensor of it."""
    return result.get("seen") is False


def rate(results: Sequence[Result], method: str, what: str) -> float:
    """Fraction of trials for which a method's statement is right; NaN if it judged none.

    The cause is counted only if the faulty module is visible at all.
    """
    asked = [r for r in results if what != "named" or not is_hidden(r)]
    judged = [r[method] for r in asked if method in r]
    return sum(bool(outcome[what]) for outcome in judged) / len(judged) if judged else math.nan


def mean(results: Sequence[Result], method: str, what: str) -> float:
    """A count of a method, over trials; NaN where it judged none."""
    judged = [r[method] for r in results if method in r]
    return sum(outcome.get(what, 0) for outcome in judged) / len(judged) if judged else math.nan


def alarms(clean: Sequence[Result], method: str) -> Alarms:
    """False alarms of a method on fault-free pairs."""
    outcomes = [r[method] for r in clean if method in r]
    return Alarms(
        pairs=len(outcomes),
        runs=sum(bool(outcome["detected"]) for outcome in outcomes),
        rows=sum(outcome["rows"] for outcome in outcomes),
        flagged=sum(outcome["flagged"] for outcome in outcomes),
    )


def by_kind(results: Iterable[Result]) -> dict[str, list[Result]]:
    """Results of each kind of fault, sorted by name."""
    groups: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        groups[job_of(result).kind].append(result)
    return dict(sorted(groups.items()))


def counts_by_kind(results: Iterable[Result]) -> Counter[str]:
    """How many results each kind has."""
    return Counter(job_of(result).kind for result in results)


def shortfalls(results: Sequence[Result]) -> list[tuple[str, str, float]]:
    """Method, statement and rate wherever a goal is missed."""
    missed: list[tuple[str, str, float]] = []
    for (method, what), goal in GOALS.items():
        value = rate(results, method, what)
        if value < goal:
            missed.append((method, what, value))
    return missed


def sub_noise(results: Iterable[Result]) -> tuple[list[Result], list[Result]]:
    """Faults that are meant to be smaller than noise: those that are large enough to mean anything
    in their format, and those that are not."""
    meant = [r for r in results if r.get("sub_noise")]
    # Older files have no effect; such faults are kept.
    enough = [r for r in meant if r.get("effect") is None or r["effect"] >= MEANT * r["unit"]]
    return enough, [r for r in meant if not any(r is kept for kept in enough)]
