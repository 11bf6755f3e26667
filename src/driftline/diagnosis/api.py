"""The Python interface of diagnosis: two runs and other evidence become one finding.

It uses the evidence that is supplied and says which further evidence would help. It starts no
program, and all its arguments may be in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from driftline.alignment.align import AlignOptions
from driftline.comparison.differences.find import placed
from driftline.comparison.measure.scheduler import Progress
from driftline.comparison.options import CompareOptions, Execution
from driftline.comparison.pipeline import (
    Comparison,
    EvidenceSources,
    judge_again,
    open_source,
    prepare,
)
from driftline.comparison.table.table import Table
from driftline.comparison.tolerance.tolerance import Tolerance
from driftline.comparison.verdict.judge import kept_evidence
from driftline.comparison.verdict.noise import Variant, noise_floor
from driftline.comparison.verdict.status import Evidence as SiteEvidence
from driftline.diagnosis.causes.case_builder import Runs
from driftline.diagnosis.evidence.files import (
    Evidence,
    Replay,
    Substitution,
    open_bisection,
    open_noise,
    open_replay,
    renamed,
)
from driftline.diagnosis.evidence.replay import judge_replay
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
    """Find where two runs begin to disagree, whether that is more than noise, and the likely cause.

    Args:
        reference: The trusted run, or its path.
        candidate: The run to test.
        replay: A folder that `driftline replay` wrote, or a `Replay` in memory: results of the
            reference's modules on the candidate's inputs.
        noise: Trusted executions in the candidate's number format: folders that `driftline noise`
            wrote, or plain runs.
        repeats: Other executions of the candidate's own program, which show whether it is
            deterministic.
        bisect: The output of `driftline bisect --format json`: a file or the parsed object. It
            shows which fraction of the final error comes from a site.
        options: How the runs are aligned, if names are not enough.
        threads: Number of worker threads. Default: one per usable core.
        progress: Called with (pairs done, pairs in total).

    Raises:
        DriftlineError: A path is not a run, or evidence does not belong to these runs. Errors in
            the numbers raise nothing: they are the result.
    """
    asked = CompareOptions(options or AlignOptions(), execution=Execution(threads))
    comparison = prepare(reference, candidate, asked)
    gathered = gather_evidence(comparison, EvidenceSources(replay, noise, bisect))
    table = comparison.judged(progress=progress, evidence=gathered.evidence)
    again = [open_source(repeat) for repeat in repeats]
    runs = Runs(comparison.reference, comparison.candidate, gathered.replay, again, comparison.plan)
    diagnosis = Assembly(table, gathered.variants, runs, gathered.proof).diagnosis()
    return with_differences(diagnosis, table)


class GatheredEvidence(NamedTuple):
    """Opened evidence, with its sites renamed to the reference's names.

    Attributes:
        evidence: Evidence in the form that the judgement of sites expects.
        replay: The opened replay, with its tensors.
        variants: The trusted runs and their comparisons with the reference.
        proof: The result of a bisection.
    """

    evidence: SiteEvidence
    replay: Replay | None = None
    variants: Sequence[Variant] = ()
    proof: Substitution | None = None


NOTHING_GATHERED = GatheredEvidence(SiteEvidence())


def gather_evidence(comparison: Comparison, sources: EvidenceSources) -> GatheredEvidence:
    """Open evidence about two runs and judge each site by the replay.

    Args:
        comparison: The two runs.
        sources: Where the evidence is.

    Raises:
        DriftlineError: Evidence cannot be read, or is about other runs.
    """
    replay = None if sources.replay is None else open_replay(sources.replay)
    # Thresholds do not apply to trusted runs: their errors define what is normal.
    by_default = replace(comparison.options, tolerance=Tolerance())
    variants = compare_noise(comparison.reference, sources.noise, by_default)
    proof = None if sources.bisect is None else open_bisection(sources.bisect)
    # Findings use the reference's names; an experiment uses those of the candidate's program.
    if proof is not None:
        proof = renamed(proof, comparison.plan)
    replayed = {} if replay is None else judge_replay(comparison, replay)
    is_proven = proof is not None and proof.verdict == "found"
    evidence = SiteEvidence(
        replayed,
        noise_floor(variants) if variants else None,
        proof.site if proof is not None and is_proven else "",
        proof.explains if proof is not None and is_proven else 0.0,
    )
    return GatheredEvidence(evidence, replay, variants, proof)


def compare_noise(
    reference: Run, noise: Sequence[Evidence], options: CompareOptions
) -> list[Variant]:
    """Compare trusted runs with the reference in the same way as the candidate.

    Args:
        reference: The run that is right.
        noise: Folders that `driftline noise` wrote, or plain runs.
        options: The options of the candidate's comparison.

    Raises:
        DriftlineError: A path is not a run, or a run has nothing in common with the reference.
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
    """Diagnose from an existing comparison; no tensor is read, so no cause is named.

    Args:
        table: A table from `driftline.compare` or `open_table`.
        noise: Comparisons of trusted runs with the same reference.
    """
    variants = [
        Variant(table_of_noise.candidate.path or f"noise {index}", table_of_noise)
        for index, table_of_noise in enumerate(noise)
    ]
    evidence = None
    if variants:
        evidence = kept_evidence(table)._replace(floor=noise_floor(variants))
    judged = judge_again(table, evidence=evidence)
    return with_differences(Assembly(judged, variants, None).diagnosis(), judged)


def with_differences(diagnosis: Diagnosis, table: Table) -> Diagnosis:
    """The diagnosis with the differences between the models, placed relative to its first site."""
    if table.differences is None:
        return diagnosis
    home = diagnosis.first_site
    row = next((row for row in table.rows if home and str(row.key) == diagnosis.first_key), None)
    return replace(diagnosis, differences=placed(table.differences, table, row, home))
