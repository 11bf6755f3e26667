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
from driftline.alignment.settling import after_matching, before_matching
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
        masks: Files of the positions that count (shape [batch, tokens]), or `captured`.
        step_map: `REFERENCE=CANDIDATE` step numbers, such as `0=1`, several with commas.
    """

    sites: tuple[str, ...] = ()
    ports: tuple[str, ...] = ()
    maps: tuple[str, ...] = ()
    mapping_file: Path | None = None
    plan_file: Path | None = None
    structural: bool = True
    placements: tuple[str, ...] = ()
    masks: tuple[str, ...] = ()
    step_map: tuple[str, ...] = ()


def align_runs(reference: Run, candidate: Run, options: AlignOptions = AlignOptions()) -> Plan:  # noqa: B008 - a tuple
    """Say which tensor of one run belongs to which of the other.

    Raises:
        DriftlineError: A run without tensors, a glob that matches nothing, a map or plan that
            cannot be read, or two runs that have nothing in common.
    """
    for run in (reference, candidate):
        if not len(run):
            raise BadInput(f"run '{run.name}' holds no tensor", hint="was anything captured?")
    if reference.manifest.get("graphs") and candidate.manifest.get("graphs"):
        from driftline.alignment.graph import align_graphs, narrowed

        by_graph = align_graphs(reference, candidate, reference.records, candidate.records)
        if by_graph is not None:
            return narrowed(by_graph, options.sites, options.ports)
    seen = before_matching(reference, candidate, options)
    here, there = seen.reference.records, seen.candidate.records
    if options.sites or options.ports:
        here = select(here, options.sites, options.ports)
        # A glob that matches in the reference only is a finding, not a mistake.
        there = select(there, options.sites, options.ports, strict=False)
    plan = align_by_name(here, there)
    return after_matching(plan, seen, options)
