"""How sure a finding is: halves of the tokens, false-alarm rates, what the devices explain.

The comparison has acquitted sites whose error only one half of the tokens shows; here the halves
say how sure the others are, and how often a clean site would be suspected. Decides no status.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, cast

from driftline.alignment.plan import Plan
from driftline.comparison.evidence.error_stats import (
    F64,
    Effect,
    chosen_rows,
    effect_of,
    halves,
    is_readable,
    read_rows,
    sums,
)
from driftline.comparison.evidence.second_look import Look, lean_of
from driftline.comparison.table.row import Row
from driftline.comparison.verdict.noise import NoiseFloor, Variant, margin_of
from driftline.comparison.verdict.own_error import ReplayResult
from driftline.comparison.verdict.status import SiteStatus
from driftline.diagnosis.causes.case_builder import Runs
from driftline.diagnosis.causes.named_cause import NamedCause
from driftline.diagnosis.causes.precision import TF32, convolves
from driftline.numerics.dtypes import DTYPES
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run


class Confirmation(NamedTuple):
    """What a second look says of a culprit.

    Attributes:
        halves: How far outside each half of the tokens is, in units of the limit.
        effect: The effect on all tokens that were looked at.
    """

    halves: tuple[float, float]
    effect: Effect


def confirmed(
    look: Look | None, standing: SiteStatus, floor: NoiseFloor | None
) -> Confirmation | None:
    """What a second look at the tensor that made a site suspect says in units of its limit.

    Args:
        look: The second look; None if the tensor's values are missing.
        standing: How the site stands.
        floor: What trusted runs do there.
    """
    if look is None:
        return None
    first, second = look.halves
    if standing.leaning:
        key = standing.call.worst.key
        return Confirmation((lean_of(first, key, floor), lean_of(second, key, floor)), look.effect)
    # An infinite ratio is not made less certain by halves.
    if not math.isfinite(standing.ratio):
        return Confirmation((standing.ratio, standing.ratio), look.effect)
    limit = standing.call.error / standing.ratio if standing.ratio > 0.0 else math.inf
    return Confirmation((first.error / limit, second.error / limit), look.effect)


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
        f"ran on {_listed(elsewhere)}, and kernels of another device round differently"
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
