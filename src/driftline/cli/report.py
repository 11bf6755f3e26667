"""`driftline report`: words → `driftline.report` → one HTML file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from driftline.cli import script
from driftline.cli.parsing import Option
from driftline.cli.progress import on_terminal
from driftline.errors import EXIT_FINE, AlreadyThere, BadInput

_EVIDENCE = "Evidence"
_HOW = "What belongs together"
_WHERE = "Output"


def report(
    subject: Annotated[Path, Option(metavar="TABLE|REF", urls=True)],
    candidate: Annotated[Path | None, Option(metavar="CAND", urls=True)] = None,
    /,
    *,
    output: Annotated[
        Path, Option(names=("--output", "-o"), metavar="FILE.html", group=_WHERE)
    ] = Path("report.html"),
    title: Annotated[str, Option(group=_WHERE)] = "",
    pictures: Annotated[int, Option(metavar="N", group=_WHERE)] = 32,
    tokenizer: Annotated[str, Option(metavar="PATH", group=_WHERE)] = "",
    force: Annotated[bool, Option(group=_WHERE)] = False,
    quiet: Annotated[bool, Option(names=("--quiet", "-q"), group=_WHERE)] = False,
    thresholds: Annotated[Path | None, Option(metavar="FILE.json", group=_EVIDENCE)] = None,
    replay: Annotated[Path | None, Option(metavar="DIR", group=_EVIDENCE)] = None,
    noise: Annotated[list[Path] | None, Option(metavar="DIR", group=_EVIDENCE, urls=True)] = None,
    repeat: Annotated[list[Path] | None, Option(metavar="RUN", group=_EVIDENCE, urls=True)] = None,
    bisect: Annotated[Path | None, Option(metavar="FILE.json", group=_EVIDENCE)] = None,
    no_diagnosis: Annotated[bool, Option(group=_EVIDENCE)] = False,
    map: Annotated[list[str] | None, Option(metavar="REF=CAND", group=_HOW)] = None,
    site: Annotated[list[str] | None, Option(metavar="GLOB", group=_HOW)] = None,
    plan: Annotated[Path | None, Option(metavar="FILE.toml", group=_HOW)] = None,
    threads: Annotated[int | None, Option()] = None,
) -> int:
    """Write a comparison as one HTML file: to look at, to attach to a bug, to keep.

        driftline report ref cand -o report.html
        driftline report table -o report.html

    The file opens from disk, without a network and without Driftline. It holds the verdict, the
    error along the depth, every row, and pictures of the worst tensors. Exit code 0 if it was
    written, whatever it says.

    Args:
        subject: A comparison (`driftline compare -o`), a folder of `driftline metrics`,
            `layer-metrics` or `validate`, a file of `opcheck --format json`; or the reference, if a
            candidate follows.
        candidate: What is in question; it is compared with the reference first.
        output: The file to write.
        title: Of the page; the names of the two runs if not given.
        pictures: How many tensors get histograms and heat maps; the worst ones.
        tokenizer: Of a decoder: folder or id of its tokenizer, for the text of tokens.
        force: Replace a file that is there already.
        quiet: Print nothing.
        thresholds: Limits of each layer, or of the tokens of a decoder.
        replay: What `driftline replay` wrote.
        noise: What `driftline noise` wrote, or another trusted run; may be repeated.
        repeat: Another execution of the candidate's own program; may be repeated.
        bisect: What `driftline bisect --format json` printed.
        no_diagnosis: Do not look for the cause.
        map: Sites that are called differently, such as 'model.*=*'; may be repeated.
        site: Only sites that match; may be repeated.
        plan: Set against each other what this saved plan says, and nothing else.
        threads: Worker threads. Default: one per usable core.
    """
    if threads is not None and threads < 1:
        raise BadInput(f"--threads {threads} cannot do anything", hint="give 1 or more")
    if pictures < 0:
        raise BadInput(f"--pictures {pictures} is no number of pictures", hint="give 0 or more")
    if output.is_dir():
        raise AlreadyThere(f"{output} is a folder", hint="give the name of a file with -o")
    if output.exists() and not force and not script.asked():  # before the work is done
        raise AlreadyThere(f"{output} exists", hint="give another -o, or --force")
    from driftline.alignment.align import AlignOptions
    from driftline.reporting.html.report import report as write_report

    progress = None if quiet else on_terminal("pairs")
    try:
        options = None
        if site or map or plan is not None:
            options = AlignOptions(sites=tuple(site or ()), maps=tuple(map or ()), plan_file=plan)
        written = script.step(
            "written",
            write_report,
            subject,
            candidate,
            output,
            thresholds=thresholds,
            replay=replay,
            noise=noise or (),
            repeats=repeat or (),
            bisect=bisect,
            options=options,
            diagnosis=not no_diagnosis,
            pictures=pictures,
            tokenizer=tokenizer,
            title=title,
            force=force,
            threads=threads,
            progress=progress,
        )
    finally:
        if progress is not None:
            progress.close()
    script.end(written)
    if not quiet:
        size = Path(written).stat().st_size
        shown = f"{size / 1e6:.1f} MB" if size >= 100_000 else f"{size / 1e3:.0f} kB"
        print(
            f"driftline: the report is in {written} ({shown}); open it in a browser",
            file=sys.stderr,
        )
    return EXIT_FINE
