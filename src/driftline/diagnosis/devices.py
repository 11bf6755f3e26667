"""On which devices runs were made, and what these do to float32 by themselves.

Says nothing of sites: only what a person must know of the machines to read a finding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, cast

from driftline.comparison.row import Row
from driftline.diagnosis.causes.precision import TF32, convolves
from driftline.diagnosis.floor import Variant
from driftline.diagnosis.naming import Naming, Runs
from driftline.runs.run import Run

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
    """What to do where no trusted run was made on the candidate's device; empty where one was.

    Kernels of another device add in other orders and fuse other things: what they do is not in the
    interval of such runs.
    """
    here = devices_of(candidate)
    there = [
        devices_of(variant.run)
        for variant in variants
        if variant.run is not None and variant.name in used
    ]
    if not here or not there or any(not each or each & here for each in there):
        return ""
    elsewhere = {name for each in there for name in each}
    return (
        f"noise runs made on {_listed(here)}, where the candidate ran: those given ran on "
        f"{_listed(elsewhere)}, and kernels of another device round otherwise"
    )


def by_device(naming: Naming, runs: Runs, row: Row) -> Naming:
    """A cause, and whether fewer digits than float32 has come from torch's own choice of TF32."""
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
        said = facts.get("tf32")
        if isinstance(said, list):
            return frozenset(each for each in cast("list[Any]", said) if isinstance(each, str))
    return frozenset()


def _listed(names: AbstractSet[str]) -> str:
    return " and ".join(sorted(names))
