"""The public functions of diagnosis: two runs, and other evidence if there is any, give a finding.

They work with whatever evidence is given and say what more would help. They start no program;
runs and evidence may be folders or objects in memory.
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
    """Find where two runs begin to disagree, whether it is more than noise, and the kind of bug.

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
    # Gradients of different loss scales are brought to one scale first; otherwise every gradient of
    # a scaled run would look wrong.
    table = on_their_scales(table, plan.pairs, reference_run, candidate_run)
    opened_replay = None if replay is None else open_replay(replay)
    variants: list[Variant] = []
    for trusted in open_noise(noise):
        name = trusted.name
        # Names identify runs in the noise floor, so two folders with the same name must not
        # overwrite each other.
        while any(name == variant.name for variant in variants):
            name += "'"
        trusted_plan = align_runs(reference_run, trusted.run, options)
        # Noise runs are aligned and measured exactly as the candidate is: only then are their
        # errors comparable with its errors.
        measured = measure(trusted_plan, reference_run, trusted.run, threads=threads)
        measured = on_their_scales(measured, trusted_plan.pairs, reference_run, trusted.run)
        variants.append(Variant(name, measured, trusted.run, trusted_plan))
    repeated_runs = [_opened(source) for source in repeats]
    runs = Runs(reference_run, candidate_run, opened_replay, repeated_runs, plan)
    bisection = None if bisect is None else open_bisection(bisect)
    return Assembly(table, variants, runs, bisection).diagnosis()


def diagnose_table(table: Table, *, noise: Sequence[Table] = ()) -> Diagnosis:
    """The same from an existing comparison: no tensor is read, so no cause can be named.

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
