"""Which steps of two runs can be compared: both models see the same tokens, with equal weights."""

from __future__ import annotations

import math
from collections.abc import Mapping

from driftline.comparison.row import Row
from driftline.comparison.table import Table
from driftline.diagnosis.calls import ROOTS, Place, Site, error_of
from driftline.tolerance.defaults import LIMITS, coarsest


def comparable_steps(sites: Mapping[Place, Site], table: Table) -> tuple[dict[Place, Site], str]:
    """Sites without the steps that say nothing about single modules any more, and a note.

    Those are the ones from which on the models were given different tokens, or had learnt
    different weights: a module is not to blame for what training has made of it.
    """
    tokens, weights = _other_tokens(sites, table), _other_weights(sites, table)
    if tokens is None and weights is None:
        return dict(sites), ""
    if tokens is not None and (weights is None or tokens <= weights):
        return _before(sites, tokens), (
            f"from step {tokens} on the two models were given different tokens: "
            "those steps say nothing about numbers and were left out"
        )
    assert weights is not None
    return _before(sites, weights), (
        f"the gradients of step {weights - 1} differ, so from step {weights} on the two models "
        "have different weights: those steps say nothing about single modules and were left out"
    )


def _before(sites: Mapping[Place, Site], step: int) -> dict[Place, Site]:
    kept: dict[Place, Site] = {}
    for place, site in sites.items():
        site.calls = [call for call in site.calls if call.step < step]
        if site.calls:
            kept[place] = site
    return kept


def _other_tokens(sites: Mapping[Place, Site], table: Table) -> int | None:
    other: set[int] = set()
    for place, site in sites.items():
        if place.site in ROOTS and place.direction == "forward":
            other |= {call.step for call in site.calls if call.changed_codes}
    for row in table.rows:
        is_given = row.key.site in ROOTS and row.key.port == "input"
        is_code = row.reference_dtype.startswith(("int", "uint"))
        if is_given and is_code and row.metrics.get("different"):
            other.add(row.key.step)
    return min(other, default=None)


def _other_weights(sites: Mapping[Place, Site], table: Table) -> int | None:
    """The step after the first whose gradients are off, if there is one: they have been learnt."""
    # What an optimizer was given is what it learnt; without one, gradients may only be gathered.
    off = [row for row in table.rows if row.key.port == "optimizer_grad" and _is_off(row)]
    first = min((row.key.step for row in off), default=None)
    last = max((call.step for site in sites.values() for call in site.calls), default=-1)
    return None if first is None or first >= last else first + 1


def _is_off(row: Row) -> bool:
    dtype = coarsest((row.reference_dtype, row.candidate_dtype))
    return row.compared and dtype is not None and error_of(row) > LIMITS.get(dtype.name, math.inf)
