"""`driftline diagnose`: two runs and evidence → `driftline.diagnose` → a finding and exit code."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from driftline.cli import python_script as script
from driftline.cli.options import (
    OUTPUT,
    URLS,
    AlignmentOptions,
    DiagnosisFormat,
    EvidenceOptions,
    ExitOptions,
    RepeatEvidenceOptions,
    ThreadOptions,
    place,
)
from driftline.cli.progress import progress_bar
from driftline.errors import AlreadyThere, BadInput

if TYPE_CHECKING:
    from driftline.diagnosis.result import Diagnosis
    from driftline.runs.run import Run


@Parameter(name="*", group=OUTPUT)
@dataclass(frozen=True)
class DiagnosisOutput(ExitOptions):
    """Where the finding goes.

    Attributes:
        format: table for people; json and markdown for programs and reviews; github (annotations
            and a step summary) and junit for CI.
        repro: Write a small program that runs only the faulty module, on its input.
        all: Show every site, not only those that matter.
        quiet: Print nothing; the exit code gives the result.
        force: Replace existing output.
    """

    format: DiagnosisFormat = "table"
    repro: Annotated[Path | None, Parameter(metavar="DIR")] = None
    all: bool = False
    quiet: Annotated[bool, Parameter(name=("--quiet", "-q"))] = False
    force: bool = False


def diagnose(
    reference: Annotated[Path, URLS, place("REF|TABLE")],
    candidate: Annotated[Path | None, URLS, place("CAND")] = None,
    /,
    *,
    evidence: EvidenceOptions = EvidenceOptions(),
    repeats: RepeatEvidenceOptions = RepeatEvidenceOptions(),
    alignment: AlignmentOptions = AlignmentOptions(),
    output: DiagnosisOutput = DiagnosisOutput(),
    workers: ThreadOptions = ThreadOptions(),
) -> int:
    """Say where the drift starts, whether it was introduced there, and what kind of bug it is.

        driftline diagnose ref cand
        driftline diagnose ref cand --replay replay --noise noise

    Two runs are enough. Two kinds of evidence make the answer more certain: trusted runs in the
    candidate's number format (`driftline noise`), and the reference's modules applied to the
    candidate's inputs (`driftline replay`). A folder that `driftline compare -o` wrote can replace
    the two runs. Exit code 1 if a site introduces error, 2 if nothing could be judged.

    Args:
        reference: The trusted run, or a dump of another program; or a comparison, without CAND.
        candidate: The run to test.
    """
    threads = workers.count()
    repro = output.repro
    if repro is not None and repro.exists() and not output.force and not script.is_script():
        raise AlreadyThere(f"{repro} exists", hint="give another --repro, or --force")
    # A comparison holds figures but no tensors, so fewer kinds of evidence apply to it.
    if candidate is None:
        if repeats.bisect is not None:
            raise BadInput("--bisect needs two runs", hint="give the two runs: REF CAND")
        diagnosis = _diagnose_table(reference, evidence, repro)
    else:
        from driftline.diagnosis.api import diagnose as diagnose_runs
        from driftline.formats.registry import open_run

        runs = script.part(open_run, reference), script.part(open_run, candidate)
        with progress_bar("pairs", quiet=output.quiet) as progress:
            diagnosis = script.step(
                "diagnosis",
                diagnose_runs,
                *runs,
                replay=evidence.replay,
                noise=evidence.noise or (),
                repeats=repeats.repeat or (),
                bisect=repeats.bisect,
                options=alignment.align_options(),
                threads=threads,
                progress=progress,
            )
        if repro is not None:
            _write_repro(diagnosis, runs, repro, replay=evidence.replay, force=output.force)
    script.end(diagnosis)
    if not output.quiet:
        from driftline.reporting import writers

        writers.diagnosis(
            diagnosis,
            output.format,
            sys.stdout,
            everything=output.all,
            allow_incomplete=output.allow_incomplete,
        )
    return output.exit_code(diagnosis.verdict)


def _diagnose_table(path: Path, evidence: EvidenceOptions, repro: Path | None) -> Diagnosis:
    from driftline.comparison.table.files import is_table, open_table
    from driftline.diagnosis.api import diagnose_table

    if not is_table(path):
        raise BadInput(
            f"there is only one run: {path}", hint="driftline diagnose REF CAND, or a comparison"
        )
    if evidence.replay is not None or repro is not None:
        raise BadInput("a comparison holds no tensors", hint="give the two runs: REF CAND")
    noise = [script.part(open_table, table) for table in evidence.noise or ()]
    return script.step("diagnosis", diagnose_table, script.part(open_table, path), noise=noise)


def _write_repro(
    diagnosis: Diagnosis,
    runs: tuple[Run, Run],
    repro: Path,
    *,
    replay: Path | None,
    force: bool,
) -> None:
    from driftline.diagnosis.repro import write_repro

    try:
        written = script.step(
            "written", write_repro, diagnosis, *runs, repro, replay=replay, force=force
        )
    except BadInput as error:  # the finding and its exit code are still valid
        written = f"{error}; nothing is written to {repro}"
    script.end(diagnosis, written)
    print(f"driftline: {written}", file=sys.stderr)
