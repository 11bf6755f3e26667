"""`driftline calibrate`: words → `driftline.calibrate` → a thresholds file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from driftline.cli import script
from driftline.cli.parsing import Option
from driftline.errors import EXIT_FINE, AlreadyThere, BadInput


def calibrate(
    *tables: Annotated[Path, Option(metavar="TABLE", urls=True)],
    output: Annotated[Path | None, Option(names=("--output", "-o"), metavar="FILE.json")] = None,
    metric: Annotated[list[str] | None, Option(metavar="NAME")] = None,
    quantile: float = 0.99,
    margin: float = 2.0,
    site: Annotated[list[str] | None, Option(metavar="GLOB")] = None,
    port: list[str] | None = None,
    model: str = "",
    seed: int = 0,
    force: bool = False,
) -> int:
    """Make limits for every layer from comparisons of runs that are known to be right.

        driftline compare cpu gpu -o clean
        driftline calibrate clean -o tiny-thresholds.json
        driftline compare cpu npu --thresholds tiny-thresholds.json

    For every site, port and metric: a quantile of what the clean comparisons measured, times a
    margin. The more of them, and the more alike to what will be checked, the better.

    Args:
        tables: Folders that `driftline compare -o` wrote.
        output: The thresholds file to write.
        metric: What to put limits on; may be repeated. Default: relative_l2.
        quantile: Of a layer's clean values, counted towards the bad side.
        margin: How many times that is allowed; for a cosine, of its distance from 1.
        site: Only sites that match, such as 'model.layers.*'; may be repeated.
        port: Only this side: input, output, ...; may be repeated.
        model: Name of the model, written into the file.
        seed: Of the bootstrap that gives the confidence intervals.
        force: Replace a file that is there already.
    """
    if not tables:
        raise BadInput("`driftline calibrate` needs TABLE", hint="see driftline calibrate --help")
    if output is None:
        raise BadInput("`driftline calibrate` needs -o FILE.json", hint="it writes a file only")
    if output.is_dir():
        raise BadInput(f"{output} is a folder", hint=f"-o {output / 'thresholds.json'}")
    if output.exists() and not force and not script.asked():
        raise AlreadyThere(f"{output} exists", hint="give another -o, or --force to replace")
    from driftline.comparison.table.files import open_table
    from driftline.comparison.tolerance.calibration import METRICS
    from driftline.comparison.tolerance.calibration import calibrate as from_tables
    from driftline.comparison.tolerance.thresholds import Thresholds
    from driftline.reporting.formatting import counted
    from driftline.reporting.terminal import printable

    opened = [script.part(open_table, path) for path in tables]
    for path, table in () if script.asked() else zip(tables, opened, strict=True):
        if table.verdict == "fail":
            said = printable(f"{path} did not pass when it was compared ({table.finding})")
            print(f"driftline: {said}; it is taken for clean all the same", file=sys.stderr)
    made = script.step(
        "thresholds",
        from_tables,
        opened,
        metrics=metric or METRICS,
        quantile=quantile,
        margin=margin,
        sites=site or (),
        ports=port or (),
        model=model,
        seed=seed,
    )
    script.act(Thresholds.write, made, output)
    script.end(made)
    values = [entry.samples for entry in made.entries]
    print(
        printable(
            f"{output}: {counted(len(made.entries), 'limit')} of {', '.join(made.metrics)} for "
            f"{counted(len(made.sites), 'site')}, {made.settings['statistic']} of {min(values)} to "
            f"{max(values)} values each from {counted(len(opened), 'table')}, "
            f"times {margin:g}"
        )
    )
    unusable = [entry for entry in made.entries if not entry.usable]
    if unusable:
        first = unusable[0]
        raise BadInput(
            f"{counted(len(unusable), 'limit')} could not be had, {first.metric} of '{first.site}' "
            f"{first.port} for one: its clean values are not finite; the others were written",
            hint="choose another --metric, or other sites",
        )
    return EXIT_FINE
