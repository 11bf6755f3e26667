"""The door to diagnosis: two runs, and whatever other evidence there is, become one finding.

Works with what it is given and says what more it would need. Starts no program; everything may be
in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from driftline.alignment.align import AlignOptions
from driftline.comparison.measure.scheduler import Progress
from driftline.comparison.options import CompareOptions, Execution
from driftline.comparison.pipeline import open_source, prepare
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
    asked = CompareOptions(options or AlignOptions(), execution=Execution(threads))
    comparison = prepare(reference, candidate, asked)
    table = comparison.judged(progress=progress)
    played = None if replay is None else open_replay(replay)
    variants = compare_noise(comparison.reference, noise, asked)
    again = [open_source(repeat) for repeat in repeats]
    runs = Runs(comparison.reference, comparison.candidate, played, again, comparison.plan)
    proof = None if bisect is None else open_bisection(bisect)
    return Assembly(table, variants, runs, proof).diagnosis()


def compare_noise(
    reference: Run, noise: Sequence[Evidence], options: CompareOptions
) -> list[Variant]:
    """Trusted runs compared with the reference as the candidate is: what they show is normal.

    Args:
        reference: What is right.
        noise: What `driftline noise` wrote, or plain runs.
        options: As for the candidate.

    Raises:
        DriftlineError: A path that is no run, or one that has nothing in common with the reference.
    """
    variants: list[Variant] = []
    for trusted in open_noise(noise):
        name = trusted.name
        # Two runs of one name are two variants.
        while any(name == variant.name for variant in variants):
            name += "'"
        comparison = prepare(reference, trusted.run, options)
        variants.append(Variant(name, comparison.judged(), trusted.run, comparison.plan))
    return variants


def diagnose_table(table: Table, *, noise: Sequence[Table] = ()) -> Diagnosis:
    """The same from a comparison that was made before: no tensor is read, so no cause is named.

    Args:
        table: What `driftline.compare` gave, or `open_table` read.
        noise: Comparisons of trusted runs with the same reference.
    """
    variants = [
        Variant(each.candidate.path or f"noise {at}", each) for at, each in enumerate(noise)
    ]
    return Assembly(table, variants, None).diagnosis()
