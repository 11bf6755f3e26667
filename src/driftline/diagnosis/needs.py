"""What more evidence would help, each with the command that gets it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from driftline.comparison.table import Table
from driftline.diagnosis.floor import Floor
from driftline.diagnosis.replayed import Judgement
from driftline.diagnosis.statuses import Standing

if TYPE_CHECKING:
    from driftline.diagnosis.naming import Runs

_REPLAY = 'driftline replay CAND --exec "python reference.py" -o REPLAY, then --replay REPLAY'
_BISECT = (
    "driftline bisect --exec CANDIDATE --reference-run REF --format json > FILE, then --bisect FILE"
)
_NOISE = 'driftline noise --exec "python reference.py" -o NOISE, then --noise NOISE'


def needs(
    runs: Runs | None,
    table: Table,
    floor: Floor | None,
    judged: Mapping[str, Judgement],
    standing: Standing | None,
    unproven: bool = True,
    elsewhere: str = "",
) -> tuple[str, ...]:
    """One sentence each, most useful first; `elsewhere` is where noise runs should be made."""
    said: list[str] = []
    rows = [row for row in table.rows if row.compared]
    has_inputs = any(row.key.port == "input" for row in rows)
    if not judged:
        if runs is not None and not has_inputs:
            said.append(
                "no inputs were captured, so nothing can be replayed and what goes into a site is "
                "guessed from what was made before it: dump without --port, or with --port input"
            )
        said.append(f"replay tells what each module adds by itself: {_REPLAY}")
    if floor is None and not judged:
        said.append(f"noise runs tell what the number format alone does: {_NOISE}")
    if floor is not None:
        for name, why in floor.excluded:
            said.append(f"another noise run for '{name}', which was left out: {why}")
        if len(floor.used) == 1:
            said.append(f"one noise run gives no interval; two or more do: {_NOISE}")
    if elsewhere:
        said.append(elsewhere)
    unknown = [found for found in judged.values() if found.trouble]
    if unknown:
        said.append(
            f"{len(unknown)} of {len(judged)} replayed sites say nothing, the first because "
            f"{unknown[0].trouble}"
        )
    summaries = sum(row.basis in ("summary", "digest", "describe") for row in rows)
    if summaries:
        said.append(
            f"{summaries} of {len(rows)} tensors were compared without their values: sizes and "
            "statuses can be told, kinds of bugs cannot; dump with --keep full"
        )
    if runs is None:
        said.append("a table has no tensors: give the two runs to have the kind of bug named")
    if standing is not None and unproven:
        said.append(f"substitution proves it: {_BISECT}")
    return tuple(said)
