"""`driftline calibrate`: clean comparisons → `driftline.calibrate` → a thresholds file."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from driftline.cli import python_script as script
from driftline.cli.options import SELECTION, URLS, place
from driftline.errors import EXIT_FINE, AlreadyThere, BadInput

if TYPE_CHECKING:
    from driftline.comparison.tolerance.thresholds import Thresholds


@Parameter(name="*", group=SELECTION)
@dataclass(frozen=True)
class RowSelection:
    """Which rows of the comparisons count.

    Attributes:
        metric: What to put limits on; may be repeated. Default: relative_l2.
        site: Only sites that match, such as 'model.layers.*'; may be repeated.
        port: Only this side: input, output, ...; may be repeated.
    """

    metric: Annotated[list[str] | None, Parameter(metavar="NAME")] = None
    site: Annotated[list[str] | None, Parameter(metavar="GLOB")] = None
    port: Annotated[list[str] | None, Parameter(metavar="PORT")] = None


def calibrate(
    *tables: Annotated[Path, URLS, place("TABLE")],
    output: Annotated[Path | None, Parameter(name=("--output", "-o"), metavar="FILE.json")] = None,
    select: RowSelection = RowSelection(),
    quantile: Annotated[float, Parameter(metavar="X")] = 0.99,
    margin: Annotated[float, Parameter(metavar="X")] = 2.0,
    model: Annotated[str, Parameter(metavar="MODEL")] = "",
    seed: Annotated[int, Parameter(metavar="N")] = 0,
    force: bool = False,
) -> int:
    """Make limits for every layer from comparisons of runs that are known to be right.

        driftline compare cpu gpu -o clean
        driftline calibrate clean -o tiny-thresholds.json
        driftline compare cpu npu --thresholds tiny-thresholds.json

    The limit of a site, port and metric is a quantile of the values that the clean comparisons
    measured there, times a margin. Limits get better with more comparisons, and with comparisons
    that are more similar to the runs you will check.

    Args:
        tables: Folders that `driftline compare -o` wrote.
        output: The thresholds file to write.
        quantile: Quantile of the clean values of a layer; 1 is the worst value.
        margin: Factor on that quantile; for a cosine, on its distance from 1.
        model: Name of the model, written into the file.
        seed: Seed of the bootstrap that gives the confidence intervals.
        force: Replace an existing file.
    """
    if not tables:
        raise BadInput("`driftline calibrate` needs TABLE", hint="see driftline calibrate --help")
    if output is None:
        raise BadInput("`driftline calibrate` needs -o FILE.json", hint="it writes a file only")
    if output.is_dir():
        raise BadInput(f"{output} is a folder", hint=f"-o {output / 'thresholds.json'}")
    if output.exists() and not force and not script.is_script():
        raise AlreadyThere(f"{output} exists", hint="give another -o, or --force to replace")
    from driftline.comparison.table.files import open_table
    from driftline.comparison.tolerance.calibration import METRICS
    from driftline.comparison.tolerance.calibration import calibrate as calibrate_tables
    from driftline.comparison.tolerance.thresholds import Thresholds
    from driftline.reporting.terminal import printable

    opened = [script.part(open_table, path) for path in tables]
    for path, table in () if script.is_script() else zip(tables, opened, strict=True):
        if table.verdict == "fail":
            # Used anyway: only the user knows whether the limits or the runs were wrong.
            warning = printable(f"{path} did not pass when it was compared ({table.finding})")
            print(f"driftline: {warning}; it is used as a clean run all the same", file=sys.stderr)
    made = script.step(
        "thresholds",
        calibrate_tables,
        opened,
        metrics=select.metric or METRICS,
        quantile=quantile,
        margin=margin,
        sites=select.site or (),
        ports=select.port or (),
        model=model,
        seed=seed,
    )
    script.act(Thresholds.write, made, output)
    script.end(made)
    print(printable(_summary(made, output, tables=len(opened), margin=margin)))
    _refuse_unusable(made)
    return EXIT_FINE


def _summary(thresholds: Thresholds, output: Path, *, tables: int, margin: float) -> str:
    from driftline.reporting.formatting import counted

    samples = [entry.samples for entry in thresholds.entries]
    return (
        f"{output}: {counted(len(thresholds.entries), 'limit')} of "
        f"{', '.join(thresholds.metrics)} for {counted(len(thresholds.sites), 'site')}, "
        f"{thresholds.settings['statistic']} of {min(samples)} to {max(samples)} values each from "
        f"{counted(tables, 'table')}, times {margin:g}"
    )


def _refuse_unusable(thresholds: Thresholds) -> None:
    """Raise if the file that was written holds a limit that nothing can pass."""
    from driftline.reporting.formatting import counted

    unusable = [entry for entry in thresholds.entries if not entry.usable]
    if unusable:
        first = unusable[0]
        raise BadInput(
            f"{counted(len(unusable), 'limit')} could not be computed, such as {first.metric} of "
            f"'{first.site}' {first.port}: clean values are not finite; the others were written",
            hint="choose another --metric, or other sites",
        )
