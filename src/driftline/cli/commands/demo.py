"""`driftline demo`: the tour, from an installed package and nothing else."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from driftline.cli import python_script as script
from driftline.cli.options import OUTPUT
from driftline.errors import EXIT_FINE


def demo(
    *,
    output: Annotated[Path, Parameter(name=("--output", "-o"), metavar="DIR", group=OUTPUT)] = Path(
        "driftline-demo"
    ),
    force: Annotated[bool, Parameter(group=OUTPUT)] = False,
    copy: Annotated[Path | None, Parameter(metavar="DIR", group=OUTPUT)] = None,
) -> int:
    """Take a tour: two small programs, a planted fault, a report.

        driftline demo

    Takes less than a minute. With torch installed, a small Llama runs in float32 and in bfloat16
    with a wrong activation in one layer; without torch, a network in numpy does the same. Exit code
    0 if the fault was named.

    Args:
        output: Folder for the program, the runs and the report.
        force: Replace an earlier tour.
        copy: Only copy the program of the tour, infer.py, to this folder and run nothing.
    """
    from driftline.testing import demo as tours

    if copy is not None:
        program = script.step("program", tours.copy_program, copy, force=force)
        script.end(program)
        print(f"driftline: the program is in {program}", file=sys.stderr)
        return EXIT_FINE
    begun = time.monotonic()
    tour = script.step("tour", tours.tour, output, force=force)
    script.end(tour)
    print(f"\nThe planted fault was named: {tour.culprit} ({time.monotonic() - begun:.0f} s).")
    print(f"\nWhat to try next, in the folder {output}:")
    width = max(len(command) for command, _ in tour.next_steps)
    for command, meaning in tour.next_steps:
        print(f"  {command:<{width}}  {meaning}")
    return EXIT_FINE
