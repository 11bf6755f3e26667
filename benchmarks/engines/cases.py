"""What every row of the table of engines is made of: a case, and what was measured of it."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from driftline.comparison.table.table import Table


class Measured(NamedTuple):
    """What came of one case.

    Attributes:
        pairs: Tensors of the reference that were compared.
        inside: Further ones that are inside a fusion which was compared.
        tensors: Tensors that the reference has.
        coverage: Share of the calls of leaves that were compared; None where none is counted.
        verdict: Of the clean pair.
        fault: What was planted.
        named: Where the faulty pair's finding says it begins, or the verdict where it says nothing.
        right: Whether that is where it was planted.
        cost: Time of the capture over that of the run without it.
    """

    pairs: int
    inside: int
    tensors: int
    coverage: float | None
    verdict: str
    fault: str
    named: str
    right: bool
    cost: float


class Case(NamedTuple):
    """One engine with one model; `measure` gets an empty folder."""

    engine: str
    model: str
    measure: Callable[[Path], Measured]


def counted(table: Table) -> tuple[int, int, int]:
    """How many tensors of the reference were compared, how many are inside a fusion that was, and
    how many there are.
    """
    compared = {row.key for row in table.rows if row.compared}
    alone = [row for row in table.rows if row.status in ("missing", "incomparable")]
    inside = {row.key for row in alone if "inside a fusion" in row.reason} - compared
    return len(compared), len(inside), len(compared | {row.key for row in alone})


def covered_share(table: Table) -> float | None:
    """The share of leaf calls that were compared, of the side that has fewer of them."""
    leaves = table.covered.leaves if table.covered is not None else None
    return leaves.covered / leaves.calls if leaves is not None and leaves.calls else None


def measured(
    clean: Table, faulty: Table, fault: str, places: tuple[str, ...], cost: float
) -> Measured:
    """A row of the table.

    Args:
        clean: The comparison of a sound pair.
        faulty: The same with one fault.
        fault: What the fault is, in words.
        places: Sites that may rightly be named for it; one whose work is in the same fused node is
            right as well.
        cost: Time of the capture over that of the run without it.
    """
    pairs, inside, tensors = counted(clean)
    named = faulty.first_site or (faulty.first.key.site if faulty.first is not None else "")
    return Measured(
        pairs,
        inside,
        tensors,
        covered_share(clean),
        clean.verdict,
        fault,
        named or faulty.verdict,
        faulty.verdict == "fail" and _is_right(faulty, named, places),
        cost,
    )


def _is_right(table: Table, named: str, places: tuple[str, ...]) -> bool:
    fused = {
        part.partition(":")[0].strip()
        for row in table.rows
        if row.key.site == named
        for part in row.fused.split(";")
    }
    return not {named, named.partition("/")[0], *fused}.isdisjoint(places)


def seconds(call: Callable[[], object], repeats: int = 1) -> float:
    """The shortest of some executions."""
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begin)
    return best


def cpu_seconds(call: Callable[[], object]) -> float:
    """CPU seconds of this process and of those it has started and awaited."""

    def now() -> float:
        whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        return sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, whose))

    begin = now()
    call()
    return now() - begin
