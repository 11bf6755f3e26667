"""The Python door to comparison: `driftline.compare(reference, candidate)` gives a judged table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from driftline.alignment.door import AlignOptions, align_runs
from driftline.alignment.plan import Plan
from driftline.comparison.engine import Elementwise, Progress, measure
from driftline.comparison.metrics.catalogue import requested
from driftline.comparison.table import Table
from driftline.gating.judge import judge
from driftline.runs.run import Run
from driftline.tolerance.defaults import elementwise
from driftline.tolerance.limits import Limit, Tolerance, limits_from

if TYPE_CHECKING:
    from _typeshed import StrPath

Source: TypeAlias = "Run | StrPath"
"""A run, or the path of one or of a foreign dump."""
Limits: TypeAlias = Mapping[str, float] | Sequence[Limit] | None


def compare(
    reference: Source,
    candidate: Source,
    *,
    metrics: Sequence[str] = (),
    limits: Limits = None,
    rtol: float | None = None,
    atol: float | None = None,
    min_coverage: float = 0.0,
    sites: Sequence[str] = (),
    ports: Sequence[str] = (),
    maps: Sequence[str] = (),
    plan: Plan | StrPath | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Table:
    """Compare two runs tensor by tensor.

    Args:
        reference: What is right: a run, or the path of one (or of a file of tensors).
        candidate: What is in question.
        metrics: Measured besides the standard ones: `kl`, a plug-in's name, `file.py:function`.
        limits: Metric → worst value that passes, in place of the limits of the coarser dtype.
        rtol: With `atol`, every element must keep `|c - r| <= atol + rtol |r|`.
        atol: See `rtol`.
        min_coverage: The share of all tensors that must have been compared for a pass.
        sites: Globs; only sites that match one of them. All, when none is given.
        ports: Only these ports. All, when none is given.
        maps: `REFERENCE=CANDIDATE` for sites that are called differently; see `align`.
        plan: What `align` gave, or the path of a saved plan; nothing else is paired then.
        threads: Worker threads; one per usable core when not given.
        progress: Called with (pairs done, pairs in all).

    Raises:
        DriftlineError: A path, metric, glob or limit that cannot mean anything, or two runs that
            share no name. Numbers that differ are no exception: they are rows.
    """
    wanted = requested([metrics] if isinstance(metrics, str) else metrics)
    columns = [metric.column for metric in wanted]
    if limits is None or isinstance(limits, Mapping):
        allowed = limits_from(limits, columns)
    else:
        allowed = tuple(limits)
    tolerance = Tolerance(allowed, rtol, atol, min_coverage)
    ours, theirs = open_source(reference), open_source(candidate)
    if not isinstance(plan, Plan):
        plan = align(ours, theirs, sites=sites, ports=ports, maps=maps, plan=plan)
    table = measure(
        plan,
        ours,
        theirs,
        metrics=wanted,
        elementwise=_constant(rtol, atol) if tolerance.elementwise else elementwise,
        threads=threads,
        progress=progress,
    )
    return judge(table, tolerance)


def _constant(rtol: float | None, atol: float | None) -> Elementwise:
    return lambda reference, candidate: (rtol or 0.0, atol or 0.0)


def align(
    reference: Source,
    candidate: Source,
    *,
    sites: Sequence[str] = (),
    ports: Sequence[str] = (),
    maps: Sequence[str] = (),
    mapping: StrPath | None = None,
    plan: StrPath | None = None,
    structural: bool = True,
) -> Plan:
    """What `compare` would set against what; nothing is read but the two indexes.

    Args:
        reference: What is right: a run, or the path of one (or of a file of tensors).
        candidate: What is in question.
        sites: Globs; only sites that match one of them. All, when none is given.
        ports: Only these ports. All, when none is given.
        maps: `REFERENCE=CANDIDATE`, such as `model.*=*`; a star stands for the same text on both
            sides.
        mapping: A file of such pairs, or the folder of an `op_mapping_file.json`.
        plan: A saved plan; it wins over every rule.
        structural: Whether tensors that are called differently may be paired by class, shape and
            dataflow.

    Raises:
        DriftlineError: A path that is no run, a glob that matches nothing, nothing in common.
    """
    options = AlignOptions(
        sites=(sites,) if isinstance(sites, str) else tuple(sites),
        ports=(ports,) if isinstance(ports, str) else tuple(ports),
        maps=(maps,) if isinstance(maps, str) else tuple(maps),
        mapping_file=None if mapping is None else Path(mapping),
        plan_file=None if plan is None else Path(plan),
        structural=structural,
    )
    return align_runs(open_source(reference), open_source(candidate), options)


def open_source(source: Source) -> Run:
    """A run as it is, or opened from its path, in whatever format it is."""
    if isinstance(source, Run):
        return source
    from driftline.formats.opening import open_run

    return open_run(source)
