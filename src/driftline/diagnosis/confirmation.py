"""Confidence in a finding: halves of the tokens, false-alarm rates, effects of devices.

The comparison has already acquitted sites whose error appears in only one half of the tokens. Here
the halves show how certain the other findings are, and how often a clean site would be suspected.
This file does not decide the status of a site.
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
    """The result of a second look at a culprit.

    Attributes:
        halves: Error of each half of the tokens, in units of the limit.
        effect: The effect on all tokens that were read.
    """

    halves: tuple[float, float]
    effect: Effect


def confirmed(
    look: Look | None, standing: SiteStatus, floor: NoiseFloor | None
) -> Confirmation | None:
    """The second look at the tensor that made a site suspect, in units of its limit.

    Args:
        look: The second look; None if the tensor's values are missing.
        standing: The status of the site.
        floor: The noise of trusted runs at each tensor.
    """
    if look is None:
        return None
    first, second = look.halves
    if standing.leaning:
        key = standing.call.worst.key
        return Confirmation((lean_of(first, key, floor), lean_of(second, key, floor)), look.effect)
    # If the ratio is infinite, that of both halves counts as infinite too.
    if not math.isfinite(standing.ratio):
        return Confirmation((standing.ratio, standing.ratio), look.effect)
    limit = standing.call.error / standing.ratio if standing.ratio > 0.0 else math.inf
    return Confirmation((first.error / limit, second.error / limit), look.effect)


# False-alarm rates. They are counted on halves of the tokens, never assumed.


_TENSORS = 256
_ELEMENTS = 1 << 14
"""Number of elements read of one tensor: enough rows to compare its halves."""


class Rate(NamedTuple):
    """How often a clean site would be called guilty, and the number of tests behind that rate.

    Attributes:
        rate: False alarms per clean site.
        by: Source of the tests: replay, or noise runs.
        tested: Number of tests.
        screened: Number of tests that were outside the limit; by replay on exactly one half, by
            noise runs on at least one.
        confirmed: Number of tests that were outside on both halves; None by replay, where those are
            findings.
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
    """Rate from replays, in which a site that is outside on exactly one half is falsely suspected.

    A false alarm requires both halves, so the rate of one half is squared.
    """
    tested = [judgement for judgement in judged if not judgement.trouble]
    if not tested:
        return None
    split = sum((judgement.halves[0] > 1.0) != (judgement.halves[1] > 1.0) for judgement in tested)
    # One is added, so that the rate is not zero if no site was falsely suspected.
    once = (split + 1) / (2 * len(tested))
    return Rate(_rounded(min(once * once, 1.0)), "replay", len(tested), split)


def by_noise(floor: NoiseFloor, variants: Sequence[Variant], reference: Run) -> Rate | None:
    """Rate from noise runs: each trusted run is tested against the others, on halves of the tokens.

    The margin is computed from the others only, so that the run under test has no influence on its
    own limit. None if there is only one run, or if a run's tensors cannot be read.
    """
    used = [variant for variant in variants if variant.name in floor.used]
    trusted = [(variant, variant.run) for variant in used if variant.run is not None]
    # A run whose tensors are not available cannot be tested, and the rate of some of the runs would
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
            # `NoiseFloor.excess` allows the same quarter of a unit; the rate must use the limit
            # with which sites are judged.
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
    """Records of a trusted run by the reference's key, of pairs without a transformation."""
    if plan is None:
        return {}
    return {
        pair.reference.key: pair.candidate
        for pair in plan.pairs
        if pair.reference_recipe is None and pair.candidate_recipe is None
    }


def _chosen(reference: Run, keys_by_run: Sequence[set[TensorKey]]) -> list[Record]:
    """Outputs that all trusted runs have, each tensor once; an even sample if there are many."""
    seen: set[str] = set()
    chosen: list[Record] = []
    for record in reference.records:
        if record.key.port != "output" or not all(record.key in keys for keys in keys_by_run):
            continue
        # Equal bytes under several names (views, tied outputs) would count one exceedance several
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


# Devices of runs, and TF32, which torch may use for float32 on CUDA.


_SWITCHES = {
    "convolutions": "torch.backends.cudnn.allow_tf32",
    "products": "torch.backends.cuda.matmul.allow_tf32",
}


def devices_of(run: Run) -> frozenset[str]:
    """Kinds of devices that held a run's outputs; empty if the run does not name them."""
    return frozenset(
        record.device.partition(":")[0]
        for record in run.records
        if record.key.port == "output" and record.device
    )


def noise_elsewhere(candidate: Run, variants: Sequence[Variant], used: Sequence[str]) -> str:
    """Advice if no noise run was made on the candidate's device; empty otherwise.

    Kernels of different devices add in different orders and fuse different operations, so the noise
    of the candidate's device may be outside the interval of such runs.
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
    """The named cause, with a remark if torch's use of TF32 explains the missing digits."""
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
    if len(sides) != 1:  # TF32 explains a difference only if exactly one side allows it
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
