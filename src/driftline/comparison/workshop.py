"""What a worker does for a comparison: opens the two runs, and measures the pairs it is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from driftline.comparison.engine import measure_pairs
from driftline.comparison.metrics.catalogue import requested
from driftline.comparison.parcel import pair_from_plain, record_from_plain, rows_to_plain
from driftline.errors import DriftlineError
from driftline.formats.opening import open_run
from driftline.numerics import kernel
from driftline.runs.run import Run

if TYPE_CHECKING:
    from driftline.executors.work import Say


class PairsWorkshop:
    """Measures pairs. Opened with paths, names of metrics, and what is outside by two dtypes."""

    def __init__(self, about: Mapping[str, Any]) -> None:
        self._paths: list[str] = about["paths"]
        self._names: list[str] = about["names"]
        self._probes: list[tuple[int, str, Any, str]] = [
            (side, place, record, digest) for side, place, record, digest in about["probes"]
        ]
        self._metrics = requested(about["metrics"])
        self._threads: int = about["threads"]
        outside = {(ours, theirs): (r, a) for ours, theirs, r, a in about["elementwise"]}
        self._outside = outside
        self._runs: dict[int, Run] = {}

    def absent(self) -> list[tuple[str, str]]:
        """Tries small tensors of every process of both runs: are they there, and are they the same?

        A probe without a tensor asks only whether the run can be opened.
        """
        found: list[tuple[str, str]] = []
        for side, place, record, digest in self._probes:
            path = self._paths[side]
            try:
                run = self._run(side)
                if record is None:
                    continue
                if kernel.digest(run.raw(record_from_plain(record))) != digest:
                    found.append((place, f"holds another '{path}': not the one that is compared"))
            except (DriftlineError, OSError, KeyError, ValueError) as trouble:
                found.append((place, f"cannot read '{path}': {_said(trouble)}"))
        return found

    def do(self, work: Sequence[Sequence[Any]], say: Say) -> Any:
        """The rows of some pairs."""
        del say
        pairs = [pair_from_plain(shown) for shown in work]
        rows = measure_pairs(
            pairs,
            self._run(0),
            self._run(1),
            metrics=self._metrics,
            elementwise=self._elementwise,
            threads=self._threads,
        )
        return rows_to_plain(rows)

    def _run(self, side: int) -> Run:
        if side not in self._runs:
            path = self._paths[side]
            other = self._runs.get(1 - side)
            same = other is not None and path == self._paths[1 - side]
            run = other if other is not None and same else open_run(path)
            run.name = self._names[side]
            self._runs[side] = run
        return self._runs[side]

    def _elementwise(self, ours: str, theirs: str) -> tuple[float, float]:
        return self._outside[ours, theirs]


def _said(trouble: Exception) -> str:
    if isinstance(trouble, KeyError):
        return "it has other tensors"
    return str(trouble) or type(trouble).__name__
