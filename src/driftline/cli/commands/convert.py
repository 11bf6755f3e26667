"""`driftline convert`: a dump of any kind into a run, or a run into files of another kind."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from driftline.cli import python_script as script
from driftline.cli.options import URLS, place
from driftline.cli.progress import progress_bar
from driftline.errors import EXIT_DIFFERENT, EXIT_FINE, BadInput

# At most this many omitted tensors are named; beyond that, reasons are counted.
MOST_SHOWN = 20


def convert(
    path: Annotated[Path, URLS, place("PATH")],
    /,
    *,
    output: Annotated[Path | None, URLS, Parameter(name=("--output", "-o"), metavar="DIR")] = None,
    to: Literal["run", "npy", "pt", "safetensors", "ait"] = "run",
    force: bool = False,
) -> int:
    """Write a dump as a run, or a run as files that other programs read.

        driftline convert tree/ait_dump -o run
        driftline convert run -o files --to npy

    The source can be anything that `driftline show` shows. Tensors are converted one by one, so a
    dump may be larger than memory. A run also gets summaries, module trees and events. The result
    is written under another name until it is complete. Exit code 1 if a tensor could not be read,
    or if the target format cannot hold it; each such tensor is named.

    Args:
        path: A run, a dump of another program, or a tensor file.
        output: Folder of the result.
        to: run, or files: npy and pt write a file per tensor, safetensors a file per rank and step,
            each with a list of the keys; ait writes the tree of `ait llm dump`.
        force: Replace an earlier result.
    """
    from driftline.formats.convert import convert as conversion
    from driftline.reporting.formatting import counted, size

    if output is None:
        raise BadInput("`driftline convert` needs -o DIR", hint="see driftline convert --help")
    with progress_bar("tensors") as progress:
        done = script.step(
            "done", conversion.convert, path, output, to=to, force=force, progress=progress
        )
    script.end(done)
    print(f"{done.path}: {counted(done.tensors, 'tensor')}, {size(done.size)}, as {to}")
    if not done.left_out:
        return EXIT_FINE
    # Every dump keeps later steps as summaries unless steps were named; nothing was lost.
    if done.tensors and all(
        key.step and reason == "only its summary was kept" for key, reason in done.left_out
    ):
        number = counted(len(done.left_out), "tensor")
        words = "of later steps left out: only summaries were kept; dump --step '*' keeps values"
        print(f"driftline: {number} {words}", file=sys.stderr)
        return EXIT_FINE
    fate = "left out"
    if to == "run":
        fate = f"{'has' if len(done.left_out) == 1 else 'have'} no values in it"
    print(f"driftline: {counted(len(done.left_out), 'tensor')} {fate}:", file=sys.stderr)
    for key, reason in done.left_out[:MOST_SHOWN]:
        print(f"  {key}  {reason}", file=sys.stderr)
    if len(done.left_out) > MOST_SHOWN:
        for reason, count in done.skipped.items():
            print(f"  in all {counted(count, 'tensor')}: {reason}", file=sys.stderr)
    return EXIT_DIFFERENT
