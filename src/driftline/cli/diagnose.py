"""`driftline diagnose`: words → `driftline.diagnose` → a finding and an exit code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from driftline.cli import script
from driftline.cli.parsing import Option
from driftline.cli.progress import on_terminal
from driftline.errors import AlreadyThere, BadInput

_EVIDENCE = "Evidence"
_HOW = "What belongs together"
_WHERE = "Output"


def diagnose(
    reference: Annotated[Path, Option(metavar="REF|TABLE", urls=True)],
    candidate: Annotated[Path | None, Option(metavar="CAND", urls=True)] = None,
    /,
    *,
    replay: Annotated[Path | None, Option(metavar="DIR", group=_EVIDENCE)] = None,
    noise: Annotated[list[Path] | None, Option(metavar="DIR", group=_EVIDENCE, urls=True)] = None,
    repeat: Annotated[list[Path] | None, Option(metavar="RUN", group=_EVIDENCE, urls=True)] = None,
    bisect: Annotated[Path | None, Option(metavar="FILE", group=_EVIDENCE)] = None,
    map: Annotated[list[str] | None, Option(metavar="REF=CAND", group=_HOW)] = None,
    site: Annotated[list[str] | None, Option(metavar="GLOB", group=_HOW)] = None,
    plan: Annotated[Path | None, Option(metavar="FILE.toml", group=_HOW)] = None,
    format: Annotated[
        Literal["table", "json", "markdown", "github", "junit"], Option(group=_WHERE)
    ] = "table",
    repro: Annotated[Path | None, Option(metavar="DIR", group=_WHERE)] = None,
    all: Annotated[bool, Option(group=_WHERE)] = False,
    quiet: Annotated[bool, Option(names=("--quiet", "-q"), group=_WHERE)] = False,
    force: Annotated[bool, Option(group=_WHERE)] = False,
    threads: int | None = None,
) -> int:
    """Say where the drift starts, whether it was introduced there, and what kind of bug it is.

        driftline diagnose ref cand
        driftline diagnose ref cand --replay replay --noise noise

    Works with what it is given: two runs, trusted runs in the candidate's number format
    (`driftline noise`), the reference's modules on the candidate's inputs (`driftline replay`).
    Also takes a folder that `driftline compare -o` wrote. Exit code 1 if a site introduces error,
    2 if nothing could be judged.

    Args:
        reference: What is right: a run or a dump of another program; or a comparison, alone.
        candidate: What is in question.
        replay: What `driftline replay CAND` wrote.
        noise: What `driftline noise` wrote, or one trusted run; may be repeated.
        repeat: Another execution of the candidate's own program; may be repeated.
        bisect: What `driftline bisect --format json` printed: proves what a site explains.
        map: Sites that are called differently, such as 'model.*=*'; may be repeated.
        site: Only sites that match; may be repeated.
        plan: Set against each other what this saved plan says, and nothing else.
        format: table for people; json and markdown for programs and reviews; github (annotations
            and a step summary) and junit for CI.
        repro: Write a small program that shows the guilty module by itself, with its input.
        all: Show every site rather than those that matter.
        quiet: Print nothing; the exit code says it.
        force: Replace output that is there already.
        threads: Worker threads. Default: one per usable core.
    """
    if threads is not None and threads < 1:
        raise BadInput(f"--threads {threads} cannot do anything", hint="give 1 or more")
    if repro is not None and repro.exists() and not force and not script.asked():
        raise AlreadyThere(f"{repro} exists", hint="give another --repro, or --force")
    if candidate is None:
        if bisect is not None:
            raise BadInput("--bisect belongs to two runs", hint="give the two runs: REF CAND")
        found = _of_table(reference, replay, noise, repro)
    else:
        from driftline.alignment.align import AlignOptions
        from driftline.diagnosis.api import diagnose as diagnose_runs
        from driftline.formats.registry import open_run

        ours, theirs = script.part(open_run, reference), script.part(open_run, candidate)
        options = None
        if site or map or plan is not None:
            options = AlignOptions(sites=tuple(site or ()), maps=tuple(map or ()), plan_file=plan)
        progress = None if quiet else on_terminal("pairs")
        try:
            found = script.step(
                "diagnosis",
                diagnose_runs,
                ours,
                theirs,
                replay=replay,
                noise=noise or (),
                repeats=repeat or (),
                bisect=bisect,
                options=options,
                threads=threads,
                progress=progress,
            )
        finally:
            if progress is not None:
                progress.close()
        if repro is not None:
            from driftline.diagnosis.repro import write_repro

            try:
                written = script.step(
                    "written",
                    write_repro,
                    found,
                    ours,
                    theirs,
                    repro,
                    replay=replay,
                    force=force,
                )
            except BadInput as nothing:  # the finding stands, and so does its exit code
                written = f"{nothing}; nothing is written to {repro}"
            script.end(found, written)
            print(f"driftline: {written}", file=sys.stderr)
    script.end(found)
    if not quiet:
        from driftline.reporting import writers

        writers.diagnosis(found, format, sys.stdout, everything=all)
    return found.exit_code


def _of_table(path: Path, replay: Path | None, noise: list[Path] | None, repro: Path | None):
    from driftline.comparison.table.files import is_table, open_table
    from driftline.diagnosis.api import diagnose_table

    if not is_table(path):
        raise BadInput(
            f"there is only one run: {path}", hint="driftline diagnose REF CAND, or a comparison"
        )
    if replay is not None or repro is not None:
        raise BadInput("a comparison holds no tensors", hint="give the two runs: REF CAND")
    tables = [script.part(open_table, each) for each in noise or ()]
    return script.step("diagnosis", diagnose_table, script.part(open_table, path), noise=tables)
