"""`driftline bisect`: the block whose correction brings the end result back."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

from driftline.cli import dump_words as words
from driftline.cli import script
from driftline.cli.parsing import Option
from driftline.diagnosis.experiments.bisect import Bisection, Try
from driftline.diagnosis.experiments.bisect import bisect as search
from driftline.errors import EXIT_DIFFERENT, EXIT_FINE


def bisect(
    *program: str,
    exec_: Annotated[str, Option(metavar="COMMAND")] = "",
    reference_run: Annotated[Path, Option(metavar="RUN")] = Path("ref"),
    metric: Annotated[str, Option(metavar="NAME")] = "relative_l2",
    output_site: Annotated[str, Option(metavar="SITE")] = "",
    slot: Annotated[str, Option(metavar="SLOT")] = "",
    format_: Literal["table", "json"] = "table",
) -> int:
    """Search the block that makes the error of the end result, by replacing outputs.

        driftline dump -o ref --exec "python infer.py --dtype float32"
        driftline bisect --reference-run ref --exec "python infer.py --dtype bfloat16"

    The candidate program is run several times; each time the modules up to some point give what
    the reference's gave. Where the error of the end falls, there it was made. Halving needs few
    runs: about 10 for a model of 32 layers down to one Linear.

    Args:
        program: The candidate program and its arguments, after two dashes.
        exec_: The candidate program as one text; no pipes or redirection.
        reference_run: A dump of the reference with whole outputs. Default: ./ref.
        metric: How the end result is measured: any metric of `driftline compare`.
        output_site: The module whose output is the end result. Default: the model itself.
        slot: Which tensor of it. Default: the first one of floating point.
        format_: json prints everything that was tried.
    """
    quiet = format_ == "json"
    outcome = script.step(
        "found",
        search,
        words.command_of(exec_, program, "bisect"),
        reference_run,
        metric=metric,
        output_site=output_site,
        slot=slot,
        tell=None if quiet else _tell,
    )
    script.end(outcome)
    if quiet:
        print(json.dumps(outcome.to_json(), indent=1))
    else:
        for line in report(outcome):
            print(line)
    return EXIT_FINE if outcome.verdict == "same" else EXIT_DIFFERENT


def _tell(one: Try) -> None:
    what = f"{one.replaced} replaced, up to {one.upto}" if one.upto else "as it is"
    print(f"driftline: {what}: {one.value:.3g}", file=sys.stderr)


def report(found: Bisection) -> list[str]:
    """The answer in a few sentences."""
    runs = f"{len(found.tries)} executions"
    what = f"{found.metric} of '{found.slot}'"
    if found.verdict == "same":
        return [f"no error: {what} is {found.baseline:.3g} as the program is ({runs})"]
    if found.verdict == "spread":
        around = f", {found.path[-1]} the most" if found.path else ""
        return [
            f"no single block: {what} is {found.baseline:.3g}, and replacing blocks takes it away "
            f"bit by bit{around} ({runs})"
        ]
    own = "the code of the module itself, not its parts" if found.own_code else "this module"
    return [
        f"{found.site}: {own}",
        f"  {what}: {found.baseline:.3g} as the program is; {found.before:.3g} with everything "
        f"before it replaced, {found.after:.3g} with it as well",
        f"  explains {found.explains:.0%} of the end's error ({runs})",
    ]
