"""`driftline opcheck`: is the output of each operator right for its inputs?"""

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
        csv_path: The operation csv of an ATB dump: check only the operators in it. Default: every
            operator in the folders.
        precision_metric: Further figures: abs (fraction of elements within the absolute bound),
            cos_sim, kl.
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
        operation_ids: Only these operations and their inner operations: 24_1,2_3_5.
        operation_name: Only types whose name contains this, in any case: self,linear. If -ids is
            given too, both must match.
    """

    operation_ids: Annotated[
        list[str] | None, SEVERAL, Parameter(name=("--operation-ids", "-ids"), metavar="ID")
    ] = None
    operation_name: Annotated[
        list[str] | None, SEVERAL, Parameter(name=("--operation-name", "-opname"), metavar="NAME")
    ] = None

    def ids(self) -> tuple[str, ...]:
        """The ids, checked for their form."""
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
        device_id: Device on which -rerun executes: a number, cpu, or cuda:0.
        atb_rerun: Execute each operator again, and check the new outputs instead of the dumped
            ones. Separates results that change between executions from inaccurate results. ATB
            dumps need an NPU for this.
        import_: Modules to import first, if the run calls custom torch operators that they define.
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
        output: Folder of opcheck_result_{time}.csv. Default: the current folder.
        repro: Write a stand-alone script with its inputs for each failing operator, up to twenty.
        format: table for people; json, csv and markdown print the whole result; github (annotations
            and a step summary) and junit are for CI.
        all: Show every output. Default: only failing outputs; with -metric the first twenty.
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
    """Check single operators: is each output right for the inputs of the operator?

        driftline opcheck -i ait_dump/tensors/0_4242/0 -c operation_tensors_0.csv -o result
        driftline opcheck -i ait_dump -opname self, linear --metric cos_sim kl
        driftline opcheck -i RUN --repro failing

    Each operator is computed again in float64 from its dumped inputs, and the result is rounded to
    the type of its output. An output passes if enough of its elements are within the bound of its
    type; docs/operators.md lists the bounds. No device is needed. Exit code 1 if an operator is
    not right, 2 if nothing could be checked.
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
    """Write the csv if -o is given or a table is printed; returns its path."""
    from driftline.reporting.views.operators import write_csv

    if output.output is None and output.format != "table":
        return None
    return script.act(write_csv, report, output.output or Path())


def _print_files(checked: OperatorCheck, csv_file: Path | None, output: OperatorOutput) -> None:
    """Print which files were written; to stderr if stdout is for a program."""
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
        print("no reproducer: no operator fails", file=stream)
