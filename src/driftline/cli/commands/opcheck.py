"""`driftline opcheck`: is each operator right, given what went into it?"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

from cyclopts import Parameter

from driftline.cli import python_script as script
from driftline.cli.options import (
    OPTIONS,
    OUTPUT,
    SELECTION,
    SEVERAL,
    SPEED,
    TableFormat,
    WorkerOptions,
    split_names,
)
from driftline.cli.progress import progress_bar
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

_IDS = re.compile(r"\d+(_\d+)*")
# No Literal: the words may be joined by commas, blanks or both, as in ait.
_METRICS = ("abs", "cos_sim", "kl")


@Parameter(name="*")
@dataclass(frozen=True)
class DumpOptions:
    """The dump that is checked.

    Attributes:
        input: An ATB dump or a folder inside it, or a run of `driftline dump --level ops`.
        csv_path: The operation csv of an ATB dump: checks what it lists. Without it, every operator
            that the folders hold.
        precision_metric: More figures: abs (share within the bound, absolute), cos_sim, kl.
    """

    input: Annotated[Path | None, Parameter(name=("--input", "-i"), metavar="DIR")] = None
    csv_path: Annotated[Path | None, Parameter(name=("--csv-path", "-c"), metavar="CSV")] = None
    precision_metric: Annotated[
        list[str] | None,
        SEVERAL,
        Parameter(name=("--precision-metric", "-metric", "--metric"), metavar="METRIC"),
    ] = None

    def folder(self) -> Path:
        """The dump.

        Raises:
            BadInput: There is none.
        """
        if self.input is None:
            raise BadInput(
                "`driftline opcheck` needs -i",
                hint="driftline opcheck -i ait_dump/tensors/0_4242/0 -c operation_tensors_0.csv",
            )
        if not self.input.exists():
            raise BadInput(
                f"there is no {self.input}", hint="-i takes the folder of a dump or a run"
            )
        return self.input

    def metrics(self) -> tuple[Metric, ...]:
        """Further figures."""
        words = split_names(self.precision_metric)
        for word in words:
            if word not in _METRICS:
                raise BadInput(
                    f"-metric takes abs, cos_sim and kl, not '{word}'",
                    hint=did_you_mean(word, _METRICS),
                )
        return cast("tuple[Metric, ...]", tuple(dict.fromkeys(words)))


@Parameter(name="*", group=SELECTION)
@dataclass(frozen=True)
class OperatorSelection:
    """Which operators are checked.

    Attributes:
        operation_ids: Only these operations, and what is inside them: 24_1,2_3_5.
        operation_name: Only types with this in their name, in any case: self,linear. With -ids too,
            both must match.
    """

    operation_ids: Annotated[
        list[str] | None, SEVERAL, Parameter(name=("--operation-ids", "-ids"), metavar="ID")
    ] = None
    operation_name: Annotated[
        list[str] | None, SEVERAL, Parameter(name=("--operation-name", "-opname"), metavar="NAME")
    ] = None

    def ids(self) -> tuple[str, ...]:
        """The ids, each of which could be one."""
        ids = split_names(self.operation_ids)
        for word in ids:
            if not _IDS.fullmatch(word):
                raise BadInput(
                    f"-ids takes operation ids, and '{word}' is none",
                    hint="such as -ids 24_1,2_3_5",
                )
        return ids


@Parameter(name="*", group=SPEED)
@dataclass(frozen=True)
class ExecutionOptions(WorkerOptions):
    """Where operators are executed.

    Attributes:
        device_id: Where -rerun executes: a number, cpu, or cuda:0.
        atb_rerun: Execute each operator again instead of trusting the dumped output. Tells results
            that change from run to run from inaccurate ones. Not for ATB dumps without an NPU.
        import_: Modules to import first, which define custom torch operators that the run calls.
    """

    device_id: Annotated[
        str, Parameter(name=("--device-id", "-device"), metavar="DEVICE", group=OPTIONS)
    ] = ""
    atb_rerun: Annotated[
        bool, Parameter(name=("--atb-rerun", "-rerun", "--rerun"), group=OPTIONS)
    ] = False
    import_: Annotated[list[str] | None, SEVERAL, Parameter(metavar="MODULE", group=OPTIONS)] = None


@Parameter(name="*", group=OUTPUT)
@dataclass(frozen=True)
class OperatorOutput:
    """Where the result goes.

    Attributes:
        output: Where opcheck_result_{time}.csv goes; the current folder unless given.
        repro: Write a stand-alone script with its inputs for each operator that is not right, up to
            twenty.
        format: table for people; json, csv and markdown print the whole result; github (annotations
            and a step summary) and junit are for CI.
        all: Show every output, not only those that are not right (with -metric, the first twenty).
    """

    output: Annotated[Path | None, Parameter(name=("--output", "-o"), metavar="DIR")] = None
    repro: Annotated[Path | None, Parameter(metavar="DIR")] = None
    format: TableFormat = "table"
    all: bool = False

    def check(self) -> None:
        """Refuse files where folders are needed."""
        for folder, option in ((self.output, "-o"), (self.repro, "--repro")):
            if folder is not None and folder.exists() and not folder.is_dir():
                raise BadInput(
                    f"{option} takes a folder, and {folder} is a file",
                    hint=f"give another {option}",
                )


def opcheck(
    *,
    dump: DumpOptions = DumpOptions(),
    select: OperatorSelection = OperatorSelection(),
    execution: ExecutionOptions = ExecutionOptions(),
    output: OperatorOutput = OperatorOutput(),
) -> int:
    """Check single operators: their outputs against what they should be for their inputs.

        driftline opcheck -i ait_dump/tensors/0_4242/0 -c operation_tensors_0.csv -o result
        driftline opcheck -i ait_dump -opname self, linear --metric cos_sim kl
        driftline opcheck -i RUN --repro failing

    Each operator is computed again from its dumped inputs in float64 and rounded to the type of its
    output. An output passes when enough of its elements are within the bound of its type; what the
    bounds are is in docs/operators.md. Needs no device. Exit code 1: an operator is not right. 2:
    nothing could be checked.
    """
    folder = dump.folder()
    output.check()
    from driftline.operators.api import check
    from driftline.reporting.views.operators import report_of, verdict

    with progress_bar("operators") as progress:
        checked = script.step(
            "found",
            check,
            folder,
            csv=dump.csv_path,
            ids=select.ids(),
            names=split_names(select.operation_name),
            metrics=dump.metrics(),
            rerun=execution.atb_rerun,
            device=execution.device_id,
            imports=tuple(execution.import_ or ()),
            repro=output.repro,
            progress=progress,
            jobs=execution.jobs,
            executor=execution.executor,
        )
    report = script.step("report", report_of, checked)
    csv_file = _write_csv(report, output)
    script.end(script.part(verdict, report))
    _print_report(report, output)
    _print_files(checked, csv_file, output)
    return _exit_code(report)


def _exit_code(report: Report) -> int:
    from driftline.reporting.terminal import printable

    coverage = report.coverage
    if coverage.failed:
        return EXIT_DIFFERENT
    if coverage.passed:
        return EXIT_FINE
    reason = coverage.reasons[0][0] if coverage.reasons else "no reason is known"
    print(f"driftline: nothing could be checked: {printable(reason)}", file=sys.stderr)
    return EXIT_COULD_NOT


def _print_report(report: Report, output: OperatorOutput) -> None:
    from driftline.reporting import writers
    from driftline.reporting.ci import of_operators
    from driftline.reporting.views import operators

    writers.write(
        output.format,
        sys.stdout,
        view=lambda: operators.view(report, everything=output.all),
        checks=lambda: of_operators(report),
        csv=lambda stream: operators.print_csv(report, stream),
        json=lambda stream: writers.write_json(operators.document(report), stream, indent=1),
    )


def _write_csv(report: Report, output: OperatorOutput) -> Path | None:
    """The csv, where one is wanted: people who print a table want it too."""
    from driftline.reporting.views.operators import write_csv

    if output.output is None and output.format != "table":
        return None
    return script.act(write_csv, report, output.output or Path())


def _print_files(checked: OperatorCheck, csv_file: Path | None, output: OperatorOutput) -> None:
    """What was written where; to stderr where stdout is for a program."""
    from driftline.reporting.writers import WRITERS

    # A table or a page may end with these lines; JSON may not.
    stream = sys.stdout if WRITERS[output.format].takes == "view" else sys.stderr
    if csv_file is not None:
        print(f"written to {csv_file}", file=stream)
    for path in checked.scripts:
        print(f"reproducer: python {path}", file=stream)
    for trouble in checked.troubles:
        print(f"no reproducer: {trouble}", file=stream)
    if output.repro is not None and not checked.scripts and not checked.troubles:
        print("no reproducer: there is nothing that is not right", file=stream)
