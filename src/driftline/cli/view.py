"""`driftline view`: words → `driftline.view` → a page on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from driftline.cli import script
from driftline.cli.parsing import Option
from driftline.cli.progress import on_terminal
from driftline.errors import EXIT_FINE, BadInput

_EVIDENCE = "Evidence"
_HOW = "What belongs together"
_WHERE = "The page"


def view(
    subject: Annotated[Path, Option(metavar="REF|TABLE", urls=True)],
    candidate: Annotated[Path | None, Option(metavar="CAND", urls=True)] = None,
    /,
    *,
    port: Annotated[int | None, Option(metavar="N", group=_WHERE)] = None,
    open: Annotated[bool, Option(group=_WHERE)] = False,
    title: Annotated[str, Option(group=_WHERE)] = "",
    thresholds: Annotated[Path | None, Option(metavar="FILE.json", group=_EVIDENCE)] = None,
    replay: Annotated[Path | None, Option(metavar="DIR", group=_EVIDENCE)] = None,
    noise: Annotated[list[Path] | None, Option(metavar="DIR", group=_EVIDENCE, urls=True)] = None,
    no_diagnosis: Annotated[bool, Option(group=_EVIDENCE)] = False,
    map: Annotated[list[str] | None, Option(metavar="REF=CAND", group=_HOW)] = None,
    site: Annotated[list[str] | None, Option(metavar="GLOB", group=_HOW)] = None,
    plan: Annotated[Path | None, Option(metavar="FILE.toml", group=_HOW)] = None,
    threads: int | None = None,
) -> int:
    """Look at two runs in a browser: the report's page, and every tensor behind it.

        driftline view ref cand
        driftline view table --open

    Prints the address of a page that only this machine can reach, and serves it until Ctrl-C. The
    page reads tensors when they are looked at: slices, statistics, error maps at any zoom, both
    sides' values. Runs may be larger than memory, and may still be written: reload the page to see
    what is new.

    Args:
        subject: What is right: a run or a dump of another program; or a comparison, alone, whose
            runs still lie where they were.
        candidate: What is in question; it is compared with the reference first.
        port: Where to listen; the next free one is taken. Default: 8412.
        open: Open the page in the browser of this machine.
        title: Of the page; the names of the two runs if not given.
        thresholds: Limits of each layer, or of the tokens of a decoder.
        replay: What `driftline replay` wrote.
        noise: What `driftline noise` wrote, or another trusted run; may be repeated.
        no_diagnosis: Do not look for the cause.
        map: Sites that are called differently, such as 'model.*=*'; may be repeated.
        site: Only sites that match; may be repeated.
        plan: Set against each other what this saved plan says, and nothing else.
        threads: Worker threads. Default: one per usable core.
    """
    if threads is not None and threads < 1:
        raise BadInput(f"--threads {threads} cannot do anything", hint="give 1 or more")
    from driftline.alignment.align import AlignOptions
    from driftline.reporting.viewer.api import view as serve_view

    progress = None if script.asked() else on_terminal("pairs")
    try:
        script.act(
            serve_view,
            subject,
            candidate,
            port=port,
            browser=open,
            thresholds=thresholds,
            replay=replay,
            noise=noise or (),
            options=script.part(
                AlignOptions, sites=tuple(site or ()), maps=tuple(map or ()), plan_file=plan
            ),
            diagnosis=not no_diagnosis,
            title=title,
            threads=threads,
            progress=progress,
        )
    finally:
        if progress is not None:
            progress.close()
    script.end()
    return EXIT_FINE
