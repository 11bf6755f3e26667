"""Which steps of two runs can be compared: those in which both models saw the same tokens."""

from __future__ import annotations

from collections.abc import Mapping

from driftline.comparison.table import Table
from driftline.diagnosis.calls import ROOTS, Place, Site


def comparable_steps(sites: Mapping[Place, Site], table: Table) -> tuple[dict[Place, Site], str]:
    """Sites without the steps from which on the models were given different tokens, and a note."""
    other: set[int] = set()
    for place, site in sites.items():
        if place.site in ROOTS and place.direction == "forward":
            other |= {call.step for call in site.calls if call.changed_codes}
    for row in table.rows:
        is_given = row.key.site in ROOTS and row.key.port == "input"
        is_code = row.reference_dtype.startswith(("int", "uint"))
        if is_given and is_code and row.metrics.get("different"):
            other.add(row.key.step)
    if not other:
        return dict(sites), ""
    first = min(other)
    kept: dict[Place, Site] = {}
    for place, site in sites.items():
        site.calls = [call for call in site.calls if call.step < first]
        if site.calls:
            kept[place] = site
    return kept, (
        f"from step {first} on the two models were given different tokens: "
        "those steps say nothing about numbers and were left out"
    )
