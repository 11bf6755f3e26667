"""The door to alignment: two runs and what the user said become one plan.

Rules are tried strongest first; each sees only what the stronger ones left over. What is not needed
is not imported: runs whose names agree never pay for the rest. Values are never read here, and no
rule knows another.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from driftline.alignment.names import align_by_name, select
from driftline.alignment.plan import Plan
from driftline.errors import BadInput
from driftline.runs.run import Run


class AlignOptions(NamedTuple):
    """What the user said about how two runs belong together.

    Attributes:
        sites: Globs; only sites that match one of them. All, when none is given.
        ports: Only these ports. All, when none is given.
        maps: `REFERENCE=CANDIDATE`, globs whose stars stand for the same text on both sides.
        mapping_file: A file (or the folder of an `op_mapping_file.json`) that says the same.
        plan_file: A saved, perhaps edited, plan; it wins over every rule.
        structural: Whether what names leave over may be paired by class, shape and dataflow.
        placements: `SITE=shard(1)`: how tensors lie over ranks.
        masks: Files of positions that count.
    """

    sites: tuple[str, ...] = ()
    ports: tuple[str, ...] = ()
    maps: tuple[str, ...] = ()
    mapping_file: Path | None = None
    plan_file: Path | None = None
    structural: bool = True
    placements: tuple[str, ...] = ()
    masks: tuple[Path, ...] = ()


def align_runs(reference: Run, candidate: Run, options: AlignOptions = AlignOptions()) -> Plan:  # noqa: B008 - a tuple
    """Say which tensor of one run belongs to which of the other.

    Raises:
        DriftlineError: A run without tensors, a glob that matches nothing, a map or plan that
            cannot be read, or two runs that have nothing in common.
    """
    for run in (reference, candidate):
        if not len(run):
            raise BadInput(f"run '{run.name}' holds no tensor", hint="was anything captured?")
    here, there = reference.records, candidate.records
    if options.sites or options.ports:
        here = select(here, options.sites, options.ports)
        # A glob that matches in the reference only is a finding, not a mistake.
        there = select(there, options.sites, options.ports, strict=False)
    return align_by_name(here, there)
