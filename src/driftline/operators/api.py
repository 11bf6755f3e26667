"""The public function `check(path)`: every operator of a dump or a run, checked.

Opens the source, collects its rows, and writes scripts for failing operators. `driftline opcheck`
prints what it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from driftline.errors import DriftlineError
from driftline.execution.jobs import Executor, chosen
from driftline.operators.result import Coverage, Metric, OutputRow, coverage
from driftline.operators.source import Checked, CheckOptions, Source, open_source

SCRIPTS = 20
"""Most scripts that are written: each holds the tensors of a call, and the first ones matter."""


class OperatorCheck(NamedTuple):
    """The result of a check.

    Attributes:
        rows: One per output, or per operator that could not be checked.
        coverage: How many operators were checked, how many not, and why.
        remarks: Further sentences about the source.
        name: The path that was checked, as the caller gave it.
        kind: Kind of source.
        metrics: Further figures that were requested.
        scripts: Reproducers that were written.
        troubles: Reasons why other reproducers were not written.
    """

    rows: tuple[OutputRow, ...]
    coverage: Coverage
    remarks: tuple[str, ...]
    name: str = ""
    kind: str = ""
    metrics: tuple[Metric, ...] = ()
    scripts: tuple[Path, ...] = ()
    troubles: tuple[str, ...] = ()

    @property
    def failing(self) -> list[OutputRow]:
        """The outputs that are not right, in order."""
        return [row for row in self.rows if row.status == "fail"]


def check(
    path: str | Path,
    *,
    csv: str | Path | None = None,
    ids: Sequence[str] = (),
    names: Sequence[str] = (),
    metrics: Sequence[Metric] = (),
    rerun: bool = False,
    device: str = "",
    imports: Sequence[str] = (),
    repro: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
    jobs: int | None = None,
    executor: str | Executor | None = None,
) -> OperatorCheck:
    """Check the operators of an ATB dump, or of a run captured at operator level.

    Args:
        path: The dump, a folder inside it, or the run.
        csv: Operation csv of an ATB dump with the operators to check.
        ids: Only these operations and their inner operations.
        names: Only types with one of these in their name, in any case; with `ids`, both must match.
        metrics: Further figures: abs, cos_sim, kl.
        rerun: Execute each operator again, and check the new outputs.
        device: Device for `rerun`.
        imports: Modules to import first, if the run calls custom torch operators that they define.
        repro: Folder for stand-alone scripts of failing operators, at most twenty.
        progress: Called with (operators done, operators in total).
        jobs: Number of worker processes; the result is the same.
        executor: `ray` or `ray://HOST:PORT`: use the workers of a Ray cluster.

    Raises:
        DriftlineError: There is nothing that can be checked.
    """
    table = None if csv is None else Path(csv)
    options = CheckOptions(
        tuple(ids), tuple(names), tuple(metrics), rerun, device, table, tuple(imports)
    )
    source = open_source(Path(path), options)
    calls: list[tuple[OutputRow, ...]] = []
    scripts: list[Path] = []
    troubles: list[str] = []
    left_out = 0
    results: Iterable[Checked] = source
    # With workers the rows come back in the order of the source, so everything below stays the
    # same.
    if (who := chosen(jobs, executor)) is not None:
        from driftline.operators.workers import check_all

        results, progress = check_all(source, Path(path), options, who, progress), None
    for checked in results:
        calls.append(checked.rows)
        if repro is not None and any(row.status == "fail" for row in checked.rows):
            # Scripts are written while the dump is read: its tensors are released call by call.
            if len(scripts) < SCRIPTS:
                _reproduce(source, checked, Path(repro), scripts, troubles)
            else:
                left_out += 1
        if progress is not None:
            progress(len(calls), len(source))
    if left_out:
        troubles.append(f"{left_out} more operators; choose them with -ids or -opname")
    return OperatorCheck(
        tuple(row for call in calls for row in call),
        coverage(calls, source.filtered),
        tuple(source.remarks),
        str(path),
        source.kind,
        options.metrics,
        tuple(scripts),
        tuple(troubles),
    )


def _reproduce(
    source: Source, checked: Checked, folder: Path, scripts: list[Path], troubles: list[str]
) -> None:
    from driftline.operators.repro import write

    where = f"{checked.call.site} ({checked.call.op_type})"
    try:
        reproduction = source.reproduction(checked)
        if reproduction is None:
            troubles.append(f"{where} has no definition that could be written down")
        else:
            scripts.append(write(reproduction, folder))
    # A script that cannot be written must not hide the result of the check.
    except DriftlineError as trouble:
        troubles.append(f"{where}: {trouble}")
