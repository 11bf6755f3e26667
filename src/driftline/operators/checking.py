"""`check(path)`: every operator of a dump or a run, checked; what `driftline opcheck` prints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from driftline.operators.rows import Coverage, Metric, OutputRow, coverage
from driftline.operators.sources import Ask, open_source


class OperatorCheck(NamedTuple):
    """What was found.

    Attributes:
        rows: One per output, or per operator that could not be checked.
        coverage: How many operators were checked, how many not, and why.
        remarks: What else is worth knowing.
    """

    rows: tuple[OutputRow, ...]
    coverage: Coverage
    remarks: tuple[str, ...]

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
) -> OperatorCheck:
    """Check the operators of an ATB dump, or of a run captured at operator level.

    Args:
        path: The dump, a folder inside it, or the run.
        csv: Operation csv of an ATB dump that says what to check.
        ids: Only these operations, and what is inside them.
        names: Only types with one of these in their name, in any case; with `ids`, both must match.
        metrics: Figures besides the verdict: abs, cos_sim, kl.
        rerun: Execute each operator again instead of taking what was dumped.
        device: Where to.

    Raises:
        DriftlineError: There is nothing that can be checked.
    """
    table = None if csv is None else Path(csv)
    ask = Ask(tuple(ids), tuple(names), tuple(metrics), rerun, device, table)
    source = open_source(Path(path), ask)
    calls = [checked.rows for checked in source]
    rows = tuple(row for call in calls for row in call)
    return OperatorCheck(rows, coverage(calls, source.filtered), tuple(source.remarks))
