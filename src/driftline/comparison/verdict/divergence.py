"""Where the drift starts: the first failing row in execution order, and which module to look at.

A module's inputs are recorded before its children run, and its output after them. So the first
failing output belongs to the deepest module that computed it. A failing *input* with no failing
output before it was computed by the code of an enclosing module, between the calls of its children.
If an output barely exceeds its limit and its input was barely within its own, the drift did not
start there; the module that computed the input is named.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from driftline.comparison.table.row import Row, other_inputs_from
from driftline.comparison.verdict.dataflow import has_other_shape, makers_of_other_shapes
from driftline.comparison.verdict.verdict import RowCounts, execution

ROOT = ("(root)", "")
"""Names of the outermost module in captures; they are no prefix of the other sites' names."""

_NEARLY_ALL = 0.8
_MOST_FUSED = 12
_IDENTITY = ("relative_l2", "reference_l2", "candidate_l2")
_SELVES = {**dict.fromkeys(ROOT, "the model itself"), "(program)": "the program itself"}
_ABSENT = ("only in the reference", "no site of ")
"""Prefixes of the reasons of rows whose module does not exist in the candidate."""
_PLACES = {
    "output": "its output",
    "grad_input": "the gradient of its input",
    "grad_output": "the gradient that arrives at its output",
    "param_grad": "the gradient of its parameter",
    "optimizer_grad": "the gradient that the optimizer sees of",
}


class Divergence(NamedTuple):
    """The first failing row, the site to look at, and the finding as a sentence."""

    first: Row | None
    site: str
    finding: str


def find_divergence(
    rows: Sequence[Row],
    *,
    ordered: bool = True,
    counts: RowCounts | None = None,
    follow: bool = True,
) -> Divergence:
    """Find where the drift starts; without a failing row, say how close the worst row came.

    Args:
        rows: Judged rows.
        ordered: Whether their order is the order of execution.
        counts: Counts taken while the rows were judged; counted now if None.
        follow: Whether to search for the origin among rows that are barely within their limits. If
            sites were judged, the first failing row is where error is added.
    """
    if counts is None:
        counts = RowCounts()
        for row in rows:
            counts.take(row)
    first, compared = counts.first, counts.compared
    if first is None:
        return Divergence(None, "", _all_fine(counts))
    if ordered:
        site, where = _locate_origin(first, rows, follow=follow)
    else:
        what = "differs" if compared == 1 else "is the first in the file that differs"
        site, where = first.key.site, f"'{first.key.site}' {what}"
    scope = counts.failed
    if ordered and (after := other_inputs_from(rows, first)) is not None:
        scope += (
            f"; from step {after} on the model is given other inputs, and what is off there follows"
        )
    return Divergence(first, site, f"{where}{_computed(first)}: {first.reason}; {scope}")


def _computed(first: Row) -> str:
    """Return the program line that computes a row and the fusion it belongs to, in words."""
    remarks: list[str] = []
    if first.line:
        remarks.append(f"computed at {first.line}")
    if first.fused:
        remarks.append(f"inside the fusion of {_shortened(first.fused)}")
        # A compiled graph has line numbers; an exported graph was fused by another program.
        if first.line and not first.culprit:
            remarks.append("--no-fusion takes them apart")
    if first.culprit:
        remarks.insert(0, f"wrong for its own inputs: {first.culprit}")
    return f" ({'; '.join(remarks)})" if remarks else ""


def _shortened(fused: str) -> str:
    words = fused.split(", ")
    if len(words) <= _MOST_FUSED:
        return fused
    return f"{', '.join(words[:_MOST_FUSED])} and {len(words) - _MOST_FUSED} more"


def _locate_origin(first: Row, rows: Sequence[Row], *, follow: bool) -> tuple[str, str]:
    """Return the site to look at, and a sentence about it."""
    key = first.key
    name = _named(key.site, first)
    when = f" in step {key.step}" if key.step else ""
    rank = key.rank if first.candidate_rank is None else first.candidate_rank
    when += f" on rank {rank}" if rank else ""
    # A conversion that the compiler inserted is compared with its own input.
    if key.port == "input" and first.candidate_port == "output" and not first.candidate_site:
        return key.site, f"the drift starts at {name}{when}, in its output: not what it was given"
    if key.port == "param":
        return key.site, f"the parameter '{key.slot}' of {name} differs already{when}"
    if follow and key.port == "output":
        arrived = _inherited_drift(first, _nearly_outside(first, rows))
        if arrived is not None:
            return _locate_maker(arrived, first, rows, when)
    # An output computed from a different input is not the module's own error.
    if key.port == "output" and (maker := makers_of_other_shapes(rows).get(key.site)) is not None:
        handed = next(
            row
            for row in rows
            if (row.key.site, row.key.port) == (key.site, "input") and has_other_shape(row)
        )
        shapes = [list(shape or ()) for shape in (handed.reference_shape, handed.candidate_shape)]
        return maker, (
            f"the drift starts inside {_around(maker, rows)}{when}, in its own code before it "
            f"calls {name}: input '{handed.key.slot}' has shape {shapes[0]}, in the candidate "
            f"{shapes[1]}"
        )
    if key.port != "input":
        # Runs of other tools may have ports that are not listed.
        what = _PLACES.get(key.port, f"its {key.port}") + (
            f" '{key.slot}'" if key.slot != "0" else ""
        )
        return key.site, f"the drift starts at {name}{when}, in {what}"
    parent = _enclosing(first, rows)
    if parent is None:
        return key.site, f"the inputs differ already{when}: '{key.slot}' of {name}"
    # Modules that only the reference calls computed it; the candidate left them out.
    if lone := _alone_before(first, rows):
        return parent, (
            f"the drift starts inside {_around(parent, rows)}{when}, before it calls {name}: input "
            f"'{key.slot}' is off, and {lone} before it in the reference only"
        )
    # If no outputs were captured, another child of the parent may have computed it.
    whose = "in its own code " if any(row.key.port == "output" for row in rows) else ""
    return parent, (
        f"the drift starts inside {_around(parent, rows)}{when}, {whose}before it "
        f"calls {name}: input '{key.slot}' is off and no captured output that could feed it is"
    )


def _alone_before(failing: Row, rows: Sequence[Row]) -> str:
    """Return, in words, modules that only the reference called just before a failing row.

    They ran after the last compared output. Containers are named instead of their parts. Empty if
    there are none.
    """
    alone: list[str] = []
    for row in rows:
        key = row.key
        if key.port != "output" or not (row.order < failing.order and _belongs(row, failing)):
            continue
        if row.status == "missing" and row.reason.startswith(_ABSENT):
            alone = [site for site in alone if not site.startswith(f"{key.site}.")] + [key.site]
        elif row.compared:
            alone.clear()
    if not alone:
        return ""
    more = f" and {len(alone) - 1} more run" if len(alone) > 1 else " runs"
    return f"'{alone[0]}'{more}"


def _belongs(row: Row, other: Row) -> bool:
    place = other.key
    return (row.key.step, row.key.rank, row.key.process) == (place.step, place.rank, place.process)


def _nearly_outside(failing: Row, rows: Sequence[Row]) -> list[Row]:
    """Return the passing rows before a failing row, in its step, that are near their limits."""
    key, least = failing.key, _NEARLY_ALL * failing.severity
    place = (key.step, key.rank, key.process)
    return [
        row
        for row in rows
        if row.status == "pass"
        and least <= row.severity < math.inf
        and place == (row.key.step, row.key.rank, row.key.process)
        and row.order < failing.order
    ]


def _inherited_drift(output: Row, near: Sequence[Row]) -> Row | None:
    """Return the input that brought nearly all of an output's drift; None if the module made it."""
    key = output.key
    inputs = [
        row
        for row in near
        if row.key.port == "input"
        and (row.key.site, row.key.visit, row.key.phase) == (key.site, key.visit, key.phase)
        and row.order < output.order
    ]
    return max(inputs, key=lambda row: row.severity, default=None)


def _maker_of(arrived: Row, near: Sequence[Row]) -> Row | None:
    """Return the last output before an input that is the same tensor, judged by its figures."""
    same = [
        row
        for row in near
        if row.key.port == "output"
        and row.order < arrived.order
        and all(row.metrics.get(name) == arrived.metrics.get(name) for name in _IDENTITY)
    ]
    return max(same, key=execution, default=None)


def _locate_maker(arrived: Row, failing: Row, rows: Sequence[Row], when: str) -> tuple[str, str]:
    """Return the site that computed a nearly failing input, traced back as far as possible."""
    near = _nearly_outside(failing, rows)
    after = f"only just inside its limit; the first outside is {_named(failing.key.site, failing)}"
    while (maker := _maker_of(arrived, near)) is not None:
        before = _inherited_drift(maker, near)
        if before is None:
            site = maker.key.site
            return site, f"the drift starts at {_named(site, maker)}{when}, in its output, {after}"
        arrived = before
    name = _named(arrived.key.site, arrived)
    parent = _enclosing(arrived, rows)
    slot = arrived.key.slot
    if parent is None:
        return arrived.key.site, f"the inputs differ already{when}: '{slot}' of {name}, {after}"
    return parent, (
        f"the drift starts inside {_around(parent, rows)}{when}, in its own code before it "
        f"calls {name}: input '{slot}' is {after}"
    )


def _enclosing(first: Row, rows: Sequence[Row]) -> str | None:
    """Return the nearest compared module around a site.

    None for the outermost module: an error of its input existed before the model ran.
    """
    entered = {
        row.key.site
        for row in rows
        if row.key.rank == first.key.rank and row.key.process == first.key.process
    }
    site = first.key.site
    if site in ROOT:
        return None
    module, _, operator = site.rpartition("/")
    if module and first.class_name.startswith(f"{operator}."):
        # An operator. Views and other operators without rows may run before it.
        return module if execution(first) > min(map(execution, rows)) else None
    while site := site.rpartition(".")[0]:
        if site in entered:
            return site
    return next((root for root in ROOT if root in entered), None)


def _around(module: str, rows: Sequence[Row]) -> str:
    """Return the name and class of a module that contains something."""
    own = next((row for row in rows if row.key.site == module and row.class_name), None)
    if own is not None and own.by == "graph":
        # The module has no partner of its own: its inputs were paired with a node of another
        # module.
        own = own._replace(candidate_class="", candidate_site="")
    return _named(module, own)


def _named(site: str, row: Row | None) -> str:
    shown = _SELVES.get(site, f"'{site}'")
    if row is None:
        return shown
    # Only for the site's own row, because the row's partner says nothing about other modules.
    place = f"'{row.candidate_site}'" if row.candidate_site and row.key.site == site else ""
    other = " ".join(filter(None, (row.candidate_class, place)))
    about = filter(None, (row.class_name, f"in the candidate {other}" if other else ""))
    words = ", ".join(about)
    return f"{shown} ({words})" if words else shown


def _all_fine(counts: RowCounts) -> str:
    # A pass based on some of the tensors must not read like one based on all of them.
    compared, rows = counts.compared, counts.rows
    share = f"{compared}" if compared == rows else f"{compared} of {rows}"
    share += " tensor compared" if rows == 1 else " tensors compared"
    if counts.inside:
        share += f", {counts.inside} more inside a fusion"
    # Figures of a dump without counts of NaN and Inf can show a difference, but not its absence.
    if counts.bare:
        return f"{share}, {counts.bare} by max, min, mean and l2 alone; no difference shows"
    worst = counts.closest
    if counts.explained:
        share += f", {counts.explained} over the limit of the format as their inputs explain"
    if worst is None or worst.severity == 0.0:
        return f"{share}, no other differs" if counts.explained else f"{share}, none differs"
    sources = {"user": "asked for", "thresholds": "allowed by its threshold"}
    whose = sources.get(worst.limit_from, f"allowed for {worst.limit_from}")
    about = "estimated " if worst.decided_by in worst.estimated else ""
    others = "no other" if counts.explained else "none"
    return (
        f"{share}, {others} outside its limit; the closest is '{worst.key.site}' "
        f"{worst.key.port} with {about}{worst.decided_by} {worst.metrics[worst.decided_by]:.3g} "
        f"of {worst.limit:g} {whose}"
    )
