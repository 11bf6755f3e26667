"""`driftline opcheck`: is each operator right, given what went into it?"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

from driftline.cli import script
from driftline.cli.parsing import Option
from driftline.errors import (
    EXIT_COULD_NOT,
    EXIT_DIFFERENT,
    EXIT_FINE,
    BadInput,
    did_you_mean,
)

if TYPE_CHECKING:
    from driftline.operators.api import OperatorCheck
    from driftline.operators.result import Metric
    from driftline.reporting.views.operators import Report

Format = Literal["table", "json", "csv", "markdown", "github", "junit"]
_IDS = re.compile(r"\d+(_\d+)*")
_METRICS = ("abs", "cos_sim", "kl")


def opcheck(
    *,
    input: Annotated[Path | None, Option(names=("--input", "-i"), metavar="DIR")] = None,
    csv_path: Annotated[Path | None, Option(names=("--csv-path", "-c"), metavar="CSV")] = None,
    output: Annotated[Path | None, Option(names=("--output", "-o"), metavar="DIR")] = None,
    operation_ids: Annotated[
        list[str] | None,
        Option(names=("--operation-ids", "-ids"), metavar="ID", several=True, group="Selection"),
    ] = None,
    operation_name: Annotated[
        list[str] | None,
        Option(
            names=("--operation-name", "-opname"), metavar="NAME", several=True, group="Selection"
        ),
    ] = None,
    precision_metric: Annotated[
        list[str] | None,
        Option(names=("--precision-metric", "-metric", "--metric"), metavar="METRIC", several=True),
    ] = None,
    device_id: Annotated[
        str, Option(names=("--device-id", "-device"), metavar="DEVICE", group="Execution")
    ] = "",
    atb_rerun: Annotated[
        bool, Option(names=("--atb-rerun", "-rerun", "--rerun"), group="Execution")
    ] = False,
    repro: Annotated[Path | None, Option(metavar="DIR")] = None,
    import_: Annotated[
        list[str] | None, Option(metavar="MODULE", several=True, group="Execution")
    ] = None,
    format: Format = "table",
    all: bool = False,
    jobs: Annotated[int | None, Option(metavar="N", group="Execution")] = None,
    executor: Annotated[str | None, Option(metavar="ray[://HOST:PORT]", group="Execution")] = None,
) -> int:
    """Check single operators: their outputs against what they should be for their inputs.

        driftline opcheck -i ait_dump/tensors/0_4242/0 -c operation_tensors_0.csv -o result
        driftline opcheck -i ait_dump -opname self, linear --metric cos_sim kl
        driftline opcheck -i RUN --repro failing

    Each operator is computed again from its dumped inputs in float64 and rounded to the type of its
    output. An output passes when enough of its elements are within the bound of its type; what the
    bounds are is in docs/operators.md. Needs no device. Exit code 1: an operator is not right. 2:
    nothing could be checked.

    Args:
        input: An ATB dump or a folder inside it, or a run of `driftline dump --level ops`.
        csv_path: The operation csv of an ATB dump: checks what it lists. Without it, every operator
            that the folders hold.
        output: Where opcheck_result_{time}.csv goes; the current folder unless given.
        operation_ids: Only these operations, and what is inside them: 24_1,2_3_5.
        operation_name: Only types with this in their name, in any case: self,linear. With -ids too,
            both must match.
        precision_metric: More figures: abs (share within the bound, absolute), cos_sim, kl.
        device_id: Where -rerun executes: a number, cpu, or cuda:0.
        atb_rerun: Execute each operator again instead of trusting the dumped output. Tells results
            that change from run to run from inaccurate ones. Not for ATB dumps without an NPU.
        import_: Modules to import first, which define custom torch operators that the run calls.
        repro: Write a stand-alone script with its inputs for each operator that is not right, up to
            twenty.
        format: table for people; json, csv and markdown print the whole result; github (annotations
            and a step summary) and junit are for CI.
        all: Show every output, not only those that are not right (with -metric, the first twenty).
        jobs: Share the operators out among so many processes; the result is the same.
        executor: Share them out on a Ray cluster: the one this machine is in, or one elsewhere.
    """
    if input is None:
        raise BadInput(
            "`driftline opcheck` needs -i",
            hint="driftline opcheck -i ait_dump/tensors/0_4242/0 -c operation_tensors_0.csv",
        )
    if not input.exists():
        raise BadInput(f"there is no {input}", hint="-i takes the folder of a dump or a run")
    for folder, option in ((output, "-o"), (repro, "--repro")):
        if folder is not None and folder.exists() and not folder.is_dir():
            raise BadInput(f"{option} takes a folder, and {folder} is a file")
    from driftline.cli.progress import on_terminal
    from driftline.operators.api import check
    from driftline.reporting.terminal import printable
    from driftline.reporting.views.operators import report_of, verdict

    progress = on_terminal("operators")
    try:
        found = script.step(
            "found",
            check,
            input,
            csv=csv_path,
            ids=_ids(operation_ids),
            names=_words(operation_name),
            metrics=_metrics(precision_metric),
            rerun=atb_rerun,
            device=device_id,
            imports=tuple(import_ or ()),
            repro=repro,
            progress=progress,
            jobs=jobs,
            executor=executor,
        )
    finally:
        if progress is not None:
            progress.close()
    report = script.step("report", report_of, found)
    written = _written(report, format, output)
    script.end(script.part(verdict, report))
    _print(report, format, all)
    _files(found, format, written, repro)
    cover = report.coverage
    if cover.failed:
        return EXIT_DIFFERENT
    if cover.passed:
        return EXIT_FINE
    why = cover.reasons[0][0] if cover.reasons else "no reason is known"
    print(f"driftline: nothing could be checked: {printable(why)}", file=sys.stderr)
    return EXIT_COULD_NOT


def _print(report: Report, format: Format, everything: bool) -> None:
    from driftline.reporting import markdown, terminal, writers
    from driftline.reporting.views import operators

    if format in ("github", "junit"):
        from driftline.reporting.ci import of_operators
        from driftline.reporting.writers import checks

        checks(of_operators(report), format, sys.stdout)
    elif format == "json":
        writers.write_json(operators.document(report), sys.stdout, indent=1)
    elif format == "csv":
        operators.print_csv(report, sys.stdout)
    elif format == "markdown":
        sys.stdout.write(markdown.paint(operators.view(report, everything=everything)))
    else:
        terminal.show(operators.view(report, everything=everything))


def _written(report: Report, format: Format, output: Path | None) -> Path | None:
    """The csv, where one is wanted: people who print a table want it too."""
    from driftline.reporting.views.operators import write_csv

    if output is None and format != "table":
        return None
    return script.act(write_csv, report, output or Path())


def _files(found: OperatorCheck, format: Format, written: Path | None, repro: Path | None) -> None:
    """What was written where; to stderr where stdout is for a program."""
    says = sys.stdout if format in ("table", "markdown") else sys.stderr
    if written is not None:
        print(f"written to {written}", file=says)
    for each in found.scripts:
        print(f"reproducer: python {each}", file=says)
    for trouble in found.troubles:
        print(f"no reproducer: {trouble}", file=says)
    if repro is not None and not found.scripts and not found.troubles:
        print("no reproducer: there is nothing that is not right", file=says)


def _words(given: list[str] | None) -> tuple[str, ...]:
    from driftline.cli.dump_words import names_of

    return names_of(given)


def _ids(given: list[str] | None) -> tuple[str, ...]:
    ids = _words(given)
    for each in ids:
        if not _IDS.fullmatch(each):
            raise BadInput(
                f"-ids takes operation ids, and '{each}' is none", hint="such as -ids 24_1,2_3_5"
            )
    return ids


def _metrics(given: list[str] | None) -> tuple[Metric, ...]:
    words = _words(given)
    for word in words:
        if word not in _METRICS:
            raise BadInput(
                f"-metric takes abs, cos_sim and kl, not '{word}'",
                hint=did_you_mean(word, _METRICS),
            )
    return cast("tuple[Metric, ...]", tuple(dict.fromkeys(words)))
