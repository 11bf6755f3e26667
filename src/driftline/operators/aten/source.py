"""The seam for runs of `driftline dump --level ops`: replay of aten calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from driftline.errors import BadInput
from driftline.operators.sources import Ask, Checked, Reproduction
from driftline.runs.run import Run


class AtenSource:
    """Aten calls of a run, replayed on the CPU in float64."""

    kind = "aten calls"

    def __init__(self, run: Run, ask: Ask) -> None:
        del ask
        self.filtered = 0
        self.remarks: Sequence[str] = ()
        raise BadInput(
            f"{run.name} is no ATB dump, and calls of torch operators cannot be replayed yet",
            hint="give -i the folder of an ATB dump",
        )

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Iterator[Checked]:
        return iter(())

    def reproduction(self, checked: Checked) -> Reproduction | None:
        del checked
        return None
