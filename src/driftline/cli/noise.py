"""`driftline noise`: the same program executed otherwise, in ways that are all right."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

from driftline.captures.selection import Selection, patterns
from driftline.cli import dump_words as words
from driftline.cli import script
from driftline.cli.parsing import Option
from driftline.diagnosis.experiments.noise import Variant
from driftline.diagnosis.experiments.noise import noise as run_noise
from driftline.errors import EXIT_FINE

_WHICH = "Which tensors"


def noise(
    *program: str,
    exec_: Annotated[str, Option(metavar="COMMAND")] = "",
    like: Annotated[Path | None, Option(metavar="RUN")] = None,
    dtype: Annotated[Literal["float32", "bfloat16", "float16"] | None, Option()] = None,
    variant: Annotated[
        list[Literal["plain", "fused", "eager", "math", "dither", "dither2", "threads"]] | None,
        Option(several=True),
    ] = None,
    site: Annotated[list[str] | None, Option(several=True, metavar="GLOB", group=_WHICH)] = None,
    class_: Annotated[list[str] | None, Option(several=True, metavar="GLOB", group=_WHICH)] = None,
    step: Annotated[list[str] | None, Option(several=True, metavar="GLOB", group=_WHICH)] = None,
    keep: Annotated[str, Option(metavar="full|summary|digest|sample", group=_WHICH)] = "full",
    output: Annotated[Path, Option(names=("--output", "-o"), metavar="DIR")] = Path("noise"),
    force: bool = False,
) -> int:
    """Run the trusted program in other ways that are all right: how much noise is normal?

        driftline noise --like cand --exec "python infer.py --dtype float32" -o noise
        driftline diagnose ref cand --noise noise

    The program is run once for each variant, in the candidate's number format: as it is, with norms
    and activations rounded once (as fused kernels do), with eager attention, with SDPA's math
    kernel, and with inputs and embeddings moved by one unit in the last place. A variant that
    cannot be made is listed with its reason.

    Args:
        program: The program and its arguments, after two dashes.
        exec_: The program as one text; no pipes or redirection.
        like: The run whose number format the variants take.
        dtype: That format, given by name. Default: bfloat16.
        variant: Only these. Default: all but threads.
        site: Only module paths that match.
        class_: Only classes that match.
        step: Steps as numbers, ranges (3-5, 3-) or globs; '*' is all of them. Default: step 0.
        keep: How much of each tensor.
        output: Folder of the runs. Default: ./noise.
        force: Replace an experiment that is there already.
    """
    made = script.step(
        "variants",
        run_noise,
        words.command_of(exec_, program, "noise"),
        output,
        dtype=dtype or "",
        like=like,
        ways=tuple(variant or ()),
        selection=Selection(
            sites=patterns(site), classes=patterns(class_), steps=words.steps_of("", step)
        ),
        keep=keep,
        force=force,
    )
    script.end(made)
    for line in summary(made, output):
        print(line, file=sys.stderr)
    return EXIT_FINE


def summary(made: list[Variant], output: Path) -> list[str]:
    """What is said at the end."""
    good = [variant for variant in made if variant.status == "made"]
    lines = [f"driftline: {len(good)} of {len(made)} variants in {output}"]
    lines += [f"  {v.name}" + (f": {v.status}, {v.reason}" if v.reason else "") for v in made]
    lines.append(f"  next: driftline diagnose REF CAND --noise {shlex.quote(str(output))}")
    return lines
