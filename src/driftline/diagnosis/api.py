"""The door to diagnosis: two runs, and whatever other evidence there is, become one finding.

Works with what it is given and says what more it would need. Starts no program; everything may be
in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from driftline.alignment.align import AlignOptions, align_runs
from driftline.comparison.measure.scheduler import Progress, measure
from driftline.comparison.pipeline import on_their_scales
from driftline.comparison.table.table import Table
from driftline.diagnosis.causes.case_builder import Runs
from driftline.diagnosis.evidence.files import (
    Evidence,
    Replay,
    open_bisection,
    open_noise,
    open_replay,
)
from driftline.diagnosis.evidence.noise import Variant
from driftline.diagnosis.pipeline import Assembly
from driftline.diagnosis.result import Diagnosis
from driftline.formats.registry import open_run
from driftline.runs.run import Run

if TYPE_CHECKING:
    from _typeshed import StrPath


def diagnose(
    reference: Run | StrPath,
    candidate: Run | StrPath,
    *,
    replay: Replay | StrPath | None = None,
    noise: Sequence[Evidence] = (),
    repeats: Sequence[Evidence] = (),
    bisect: Mapping[str, Any] | StrPath | None = None,
    options: AlignOptions | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Diagnosis:
    """Say where two runs begin to disagree, whether that is more than noise, and what kind it is.

    Args:
        reference: What is right: a run, or the path of one.
        candidate: What is in question.
        replay: The reference's modules applied to the candidate's inputs: what `driftline replay`
            wrote, or the same in memory.
        noise: Trusted executions in the candidate's number format: what `driftline noise` wrote,
            or plain runs.
        repeats: Other executions of the candidate's own program, to see non-determinism.
        bisect: What `driftline bisect --format json` printed: a file of it, or the object. It
            proves how much of the end's error goes back to a site.
        options: How the runs belong together, where names do not say it.
        threads: Worker threads; one per usable core when not given.
        progress: Called with (pairs done, pairs in all).

    Raises:
        DriftlineError: A path that is no run, evidence that does not belong to these runs. Error
            that is found is no exception.
    """
    reference_run, candidate_run = _opened(reference), _opened(candidate)
    options = options or AlignOptions()
    plan = align_runs(reference_run, candidate_run, options)
    table = measure(plan, reference_run, candidate_run, threads=threads, progress=progress)
    table = on_their_scales(table, plan.pairs, reference_run, candidate_run)
    opened_replay = None if replay is None else open_replay(replay)
    variants: list[Variant] = []
    for trusted in open_noise(noise):
        name = trusted.name
        while any(name == variant.name for variant in variants):
            name += "'"
        trusted_plan = align_runs(reference_run, trusted.run, options)
        measured = measure(trusted_plan, reference_run, trusted.run, threads=threads)
        measured = on_their_scales(measured, trusted_plan.pairs, reference_run, trusted.run)
        variants.append(Variant(name, measured, trusted.run, trusted_plan))
    repeated_runs = [_opened(source) for source in repeats]
    runs = Runs(reference_run, candidate_run, opened_replay, repeated_runs, plan)
    bisection = None if bisect is None else open_bisection(bisect)
    return Assembly(table, variants, runs, bisection).diagnosis()


def diagnose_table(table: Table, *, noise: Sequence[Table] = ()) -> Diagnosis:
    """The same from a comparison that was made before: no tensor is read, so no cause is named.

    Args:
        table: What `driftline.compare` gave, or `open_table` read.
        noise: Comparisons of trusted runs with the same reference.
    """
    variants = [
        Variant(noise_table.candidate.path or f"noise {number}", noise_table)
        for number, noise_table in enumerate(noise)
    ]
    return Assembly(table, variants, None).diagnosis()


def _opened(source: Run | StrPath) -> Run:
    return source if isinstance(source, Run) else open_run(source)
