"""A second look at suspicions, false-alarm rates, and what the devices of the runs explain.

Sites that were judged without a replay are suspected because of sums over whole tensors. Here the
suspicion is tested again on each half of the tokens: what shows on one half only is an accident,
unless it is far outside (a single token is off, and that is enough). The same halves tell how
often a clean site would be suspected. Decides no status: that is `status`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, cast

import numpy as np

from driftline.alignment.plan import Plan
from driftline.comparison.table.row import Row
from driftline.diagnosis.causes.case_builder import NamedCause, Runs
from driftline.diagnosis.causes.precision import TF32, convolves
from driftline.diagnosis.error_stats import (
    F64,
    NOTHING,
    Effect,
    Places,
    chosen_rows,
    effect_of,
    halves,
    is_readable,
    read_rows,
    sums,
)
from driftline.diagnosis.evidence.noise import NoiseFloor, Variant, margin_of
from driftline.diagnosis.evidence.replay import GROSS, ReplayResult
from driftline.diagnosis.routing_changes import (
    ROUTING_NOISE,
    ROUTING_REACHES_ALL,
    Flip,
    rows_reached,
)
from driftline.diagnosis.status import SiteStatus
from driftline.numerics.dtypes import DTYPES
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run

# If this little of the error remains without the tokens that were routed elsewhere, the error
# belonged to those tokens.
_GONE = 0.3
"""Share of the error that may be left without the flipped tokens."""


class Confirmation(NamedTuple):
    """Result of a second look.

    Attributes:
        holds: Whether the suspicion stands.
        halves: How far outside each half is, in units of the limit.
        effect: The effect on all rows that were looked at.
        remark: Why it does not hold, if the halves are not the reason.
    """

    holds: bool
    halves: tuple[float, float]
    effect: Effect
    remark: str = ""


def confirmed(
    runs: Runs, standing: SiteStatus, floor: NoiseFloor | None, flips: Sequence[Flip] = ()
) -> Confirmation | None:
    """Take a second look at the tensor that made a site suspect; None if its values are missing.

    Tokens that a router sent to other experts, and what they reach, are left out if the error
    disappears with them; if it does not, they excuse nothing.
    """
    row = standing.call.worst
    sample = _sampled_rows(runs, row)
    if sample is None:
        return None
    reference, places, r, c = sample
    reached = rows_reached(flips, row.key.site, reference, reference.shape) if flips else None
    if reached is not None:
        kept = ~reached[places]
        # Fewer than four rows cannot be divided into halves that mean anything.
        if np.count_nonzero(kept) < 4:
            return Confirmation(False, (0.0, 0.0), NOTHING, ROUTING_REACHES_ALL)
        rest = effect_of(sums(r[kept], c[kept]))
        if rest.error <= _GONE * effect_of(sums(r, c)).error and not rest.nonfinite:
            r, c = r[kept], c[kept]
        else:
            reached = None  # what is off is elsewhere too
    remark = ROUTING_NOISE if reached is not None else ""
    row_sums = sums(r, c)
    effect, (first, second) = effect_of(row_sums), halves(row_sums)
    if standing.leaning:
        over = tuple(_lean(half, row.key, floor) for half in (first, second))
        return Confirmation(min(over) > 1.0, (over[0], over[1]), effect, remark)
    # An infinite ratio is not made less certain by halves, and very few rows have no halves worth
    # testing.
    if not math.isfinite(standing.ratio) or len(r) < 4:
        return Confirmation(True, (standing.ratio, standing.ratio), effect)
    limit = standing.call.error / standing.ratio if standing.ratio > 0.0 else math.inf
    over = first.error / limit, second.error / limit
    ratio = standing.ratio if reached is None else effect.error / limit
    # A gross excess stands even if one half is clean: one token that is far off is a fault.
    return Confirmation(min(over) > 1.0 or ratio > GROSS, over, effect, remark)


def _sampled_rows(runs: Runs, row: Row) -> tuple[Record, Places, F64, F64] | None:
    """The reference's record of a row, which rows were sampled, and both sides; None if missing."""
    pair = next((pair for pair in runs.plan.pairs if pair.reference.key == row.key), None)
    # Transformed pairs are skipped: their stored rows do not correspond one to one.
    if pair is None or pair.reference_recipe is not None or pair.candidate_recipe is not None:
        return None
    reference, candidate = pair.reference, pair.candidate
    if not is_readable(runs.reference, reference) or not is_readable(runs.candidate, candidate):
        return None
    if reference.shape != candidate.shape:
        return None
    places = chosen_rows(reference.shape)
    r = read_rows(runs.reference, reference, places)
    c = read_rows(runs.candidate, candidate, places)
    return None if r is None or c is None else (reference, places, r, c)


def _lean(half: Effect, key: TensorKey, floor: NoiseFloor | None) -> float:
    """How far the projection of a half lies outside the trusted span, in five standard errors."""
    span = floor.leans.get(key) if floor is not None else None
    if span is None or not half.projection_se > 0.0:
        return 0.0
    # The span always contains 0: being nearer to the reference than the trusted runs is no fault.
    low, high = min(span[0], 0.0), max(span[1], 0.0)
    return max(half.projection - high, low - half.projection, 0.0) / (5.0 * half.projection_se)


# False-alarm rates: counted on halves of the tokens, never assumed.


_TENSORS = 256
_ELEMENTS = 1 << 14
"""Elements read of one tensor: enough rows to compare its halves."""


class Rate(NamedTuple):
    """How often a clean site would be called guilty, and on how many tests that rests.

    Attributes:
        rate: Per clean site.
        by: replay, or noise runs.
        tested: How many tests were made.
        screened: How many were outside on one half or the other.
        confirmed: How many were outside on both; None where those are findings.
    """

    rate: float
    by: str
    tested: int
    screened: int
    confirmed: int | None = None

    def as_evidence(self) -> dict[str, Any]:
        return {
            "by": self.by,
            "tested": self.tested,
            "screened": self.screened,
            "confirmed": self.confirmed,
        }


def by_replay(judged: Iterable[ReplayResult]) -> Rate | None:
    """Rate from replays: a site outside on exactly one half is a false suspicion.

    A false alarm needs both halves, so the rate of one half is squared.
    """
    tested = [judgement for judgement in judged if not judgement.trouble]
    if not tested:
        return None
    split = sum((judgement.halves[0] > 1.0) != (judgement.halves[1] > 1.0) for judgement in tested)
    # One is added, so that no test without an accident claims a rate of zero.
    once = (split + 1) / (2 * len(tested))
    return Rate(_rounded(min(once * once, 1.0)), "replay", len(tested), split)


def by_noise(floor: NoiseFloor, variants: Sequence[Variant], reference: Run) -> Rate | None:
    """Rate from noise runs: each trusted run is tested against the others, on halves of the tokens.

    The margin is learnt from the others alone, so that the run under test has no influence on its
    own limit. None with a single run.
    """
    used = [variant for variant in variants if variant.name in floor.used]
    trusted = [(variant, variant.run) for variant in used if variant.run is not None]
    # A run whose tensors are not at hand cannot be tested, and a rate of a part of the runs would
    # be misleading.
    if len(trusted) < 2 or len(trusted) < len(used):
        return None
    errors = [floor.measured[variant.name] for variant, _ in trusted]
    margins = [
        margin_of([mapping for other, mapping in enumerate(errors) if other != number])
        for number in range(len(errors))
    ]
    partners = [_partners(variant.plan) for variant, _ in trusted]
    tested = screened = confirmed = 0
    for record in _chosen(reference, [set(mapping) for mapping in partners]):
        places = chosen_rows(record.shape, _ELEMENTS)
        r = read_rows(reference, record, places)
        if r is None or len(r) < 4:
            continue
        seen: list[tuple[float, float, float]] = []
        units: list[float] = []
        for (_, run), partner in zip(trusted, partners, strict=True):
            trusted_record = partner[record.key]
            c = (
                read_rows(run, trusted_record, places)
                if _fits(run, trusted_record, record)
                else None
            )
            if c is None:
                break
            seen.append(_errors(r, c))
            units.append(DTYPES[trusted_record.dtype].unit_roundoff)
        if len(seen) < len(trusted):
            continue
        for number, (_, first, second) in enumerate(seen):
            others = max(error for other, (error, _, _) in enumerate(seen) if other != number)
            # The same quarter of a unit that `NoiseFloor.excess` allows; the rate must use the
            # limit that is used in earnest.
            limit = margins[number] * others + 0.25 * units[number]
            over = first > limit, second > limit
            tested += 1
            screened += any(over)
            confirmed += all(over)
    if not tested:
        return None
    rate = _rounded((confirmed + 1) / (tested + 1))
    return Rate(rate, "noise runs", tested, screened, confirmed)


def _errors(r: F64, c: F64) -> tuple[float, float, float]:
    row_sums = sums(r, c)
    first, second = halves(row_sums)
    return effect_of(row_sums).error, first.error, second.error


def _partners(plan: Plan | None) -> dict[TensorKey, Record]:
    """Reference key -> record of the same tensor in a trusted run, if neither is transformed."""
    if plan is None:
        return {}
    return {
        pair.reference.key: pair.candidate
        for pair in plan.pairs
        if pair.reference_recipe is None and pair.candidate_recipe is None
    }


def _chosen(reference: Run, keys_by_run: Sequence[set[TensorKey]]) -> list[Record]:
    """Outputs that every trusted run has, each tensor once; an even sample if there are many."""
    seen: set[str] = set()
    chosen: list[Record] = []
    for record in reference.records:
        if record.key.port != "output" or not all(record.key in keys for keys in keys_by_run):
            continue
        # Equal bytes under several names (views, tied outputs) would count one accident several
        # times.
        if not is_readable(reference, record) or record.digest in seen:
            continue
        if record.digest:
            seen.add(record.digest)
        chosen.append(record)
    every = max(1, -(-len(chosen) // _TENSORS))
    return chosen[::every]


def _fits(run: Run, record: Record, reference: Record) -> bool:
    return record.shape == reference.shape and is_readable(run, record)


def _rounded(rate: float) -> float:
    return float(f"{rate:.3g}")


# Devices on which runs were made, and TF32, which CUDA uses for float32 on its own account.


_SWITCHES = {
    "convolutions": "torch.backends.cudnn.allow_tf32",
    "products": "torch.backends.cuda.matmul.allow_tf32",
}


def devices_of(run: Run) -> frozenset[str]:
    """Kinds of devices on which a run's results lay; empty where it does not say."""
    return frozenset(
        record.device.partition(":")[0]
        for record in run.records
        if record.key.port == "output" and record.device
    )


def noise_elsewhere(candidate: Run, variants: Sequence[Variant], used: Sequence[str]) -> str:
    """Advice where no noise run was made on the candidate's device; empty where one was.

    Kernels of another device add in other orders and fuse other operations: their noise is not
    inside the interval of such runs.
    """
    candidate_devices = devices_of(candidate)
    trusted_devices = [
        devices_of(variant.run)
        for variant in variants
        if variant.run is not None and variant.name in used
    ]
    if (
        not candidate_devices
        or not trusted_devices
        or any(not devices or devices & candidate_devices for devices in trusted_devices)
    ):
        return ""
    elsewhere = {name for devices in trusted_devices for name in devices}
    return (
        f"noise runs made on {_listed(candidate_devices)}, where the candidate ran: those given "
        f"ran on {_listed(elsewhere)}, and kernels of another device round otherwise"
    )


def by_device(naming: NamedCause, runs: Runs, row: Row) -> NamedCause:
    """A named cause, with a remark if torch's own choice of TF32 explains the missing digits."""
    if naming.cause != "low-precision" or naming.detail not in TF32:
        return naming
    pair = next((pair for pair in runs.plan.pairs if pair.reference.key == row.key), None)
    if pair is None:
        return naming
    what = "convolutions" if convolves(row.class_name) else "products"
    sides = [
        name
        for name, run, record in (
            ("reference", runs.reference, pair.reference),
            ("candidate", runs.candidate, pair.candidate),
        )
        if record.device.startswith("cuda") and what in _allowed(run)
    ]
    if len(sides) != 1:  # both do it, or neither is known to
        return naming
    why = (
        f"the {sides[0]} ran on CUDA with {_SWITCHES[what]} on, and torch then rounds what its "
        f"float32 {what} are given to TF32"
    )
    return naming._replace(sentence=f"{naming.sentence}; {why}")


def _allowed(run: Run) -> frozenset[str]:
    facts: Mapping[str, Any]
    for facts in (run.manifest, *run.processes()):
        operations = facts.get("tf32")
        if isinstance(operations, list):
            return frozenset(
                name for name in cast("list[Any]", operations) if isinstance(name, str)
            )
    return frozenset()


def _listed(names: AbstractSet[str]) -> str:
    return " and ".join(sorted(names))
