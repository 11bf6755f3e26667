"""Where the drift starts: the first failing row in execution order, and which module to look at.

A module's inputs are recorded before its children run and its output after them, so the first
failing output belongs to the deepest module that made it. A failing *input* with no failing output
before it was computed by the code of an enclosing module, between the calls of its children. An
output that fails only just, from an input that held only just, did not start there: the input's
maker is named.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from driftline.comparison.table.row import Row, other_inputs_from
from driftline.comparison.verdict.dataflow import has_other_shape, makers_of_other_shapes
from driftline.comparison.verdict.verdict import RowCounts, execution

ROOT = ("(root)", "")
"""How adapters call the outermost module; its name is no prefix of the others' names."""

_NEARLY_ALL = 0.8
_MOST_FUSED = 12
_IDENTITY = ("relative_l2", "reference_l2", "candidate_l2")
_SELVES = {**dict.fromkeys(ROOT, "the model itself"), "(program)": "the program itself"}
_ABSENT = ("only in the reference", "no site of ")
"""Begin the reasons of rows for whose module the candidate has none."""
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
    """Find where the drift starts; without a failing row, say how close the worst one came.

    Args:
        rows: Judged.
        ordered: Whether their order is one of execution.
        counts: What was counted while they were judged; counted now when not given.
        follow: Whether to look for the origin among rows that hold their limits only just; where
            sites were judged, the first row that fails is where error is added.
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
    """Which line of the program computes it, and what else the kernel does that computed it."""
    remarks: list[str] = []
    if first.line:
        remarks.append(f"computed at {first.line}")
    if first.fused:
        remarks.append(f"inside the fusion of {_shortened(first.fused)}")
        # A compiled graph knows its lines, an exported one was fused elsewhere.
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
    """The site to look at, and a sentence about it."""
    key = first.key
    name = _named(key.site, first)
    when = f" in step {key.step}" if key.step else ""
    rank = key.rank if first.candidate_rank is None else first.candidate_rank
    when += f" on rank {rank}" if rank else ""
    # A conversion of the compiler is held against what it was given.
    if key.port == "input" and first.candidate_port == "output" and not first.candidate_site:
        return key.site, f"the drift starts at {name}{when}, in its output: not what it was given"
    if key.port == "param":
        return key.site, f"the parameter '{key.slot}' of {name} differs already{when}"
    if follow and key.port == "output":
        arrived = _inherited_drift(first, _nearly_outside(first, rows))
        if arrived is not None:
            return _locate_maker(arrived, first, rows, when)
    # What it made of another thing is no error of its own.
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
        # Another writer's run may have ports of its own.
        what = _PLACES.get(key.port, f"its {key.port}") + (
            f" '{key.slot}'" if key.slot != "0" else ""
        )
        return key.site, f"the drift starts at {name}{when}, in {what}"
    parent = _enclosing(first, rows)
    if parent is None:
        return key.site, f"the inputs differ already{when}: '{key.slot}' of {name}"
    # Calls of the reference alone made it: the candidate has left them out.
    if lone := _alone_before(first, rows):
        return parent, (
            f"the drift starts inside {_around(parent, rows)}{when}, before it calls {name}: input "
            f"'{key.slot}' is off, and {lone} before it in the reference only"
        )
    # Where no outputs were kept, another child of the parent may have made it.
    whose = "in its own code " if any(row.key.port == "output" for row in rows) else ""
    return parent, (
        f"the drift starts inside {_around(parent, rows)}{when}, {whose}before it "
        f"calls {name}: input '{key.slot}' is off and no captured output that could feed it is"
    )


def _alone_before(failing: Row, rows: Sequence[Row]) -> str:
    """Which modules only the reference has called between what was compared last and a failing row.

    In words, containers instead of their parts; empty if there is none.
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
    """Rows before a failing one, of its step, that hold their limits by less than it breaks its."""
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
    """The input that an output got nearly all its drift from; None when it made its own."""
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
    """The last output before an input that is the same tensor, as far as numbers tell."""
    same = [
        row
        for row in near
        if row.key.port == "output"
        and row.order < arrived.order
        and all(row.metrics.get(name) == arrived.metrics.get(name) for name in _IDENTITY)
    ]
    return max(same, key=execution, default=None)


def _locate_maker(arrived: Row, failing: Row, rows: Sequence[Row], when: str) -> tuple[str, str]:
    """Whose output an input was that is nearly as far off, followed back as far as that goes."""
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
    """The nearest module around a site that took part in the comparison and was entered before it.

    None for the outermost module: what is wrong with its input was wrong before the model ran.
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
        # An operator; views, and whatever else has no row, may be before it.
        return module if execution(first) > min(map(execution, rows)) else None
    while site := site.rpartition(".")[0]:
        if site in entered:
            return site
    return next((root for root in ROOT if root in entered), None)


def _around(module: str, rows: Sequence[Row]) -> str:
    """A module that something is in, by name and class."""
    own = next((row for row in rows if row.key.site == module and row.class_name), None)
    if own is not None and own.by == "graph":
        # It has no partner of its own: what it takes was made by a node of somebody else.
        own = own._replace(candidate_class="", candidate_site="")
    return _named(module, own)


def _named(site: str, row: Row | None) -> str:
    shown = _SELVES.get(site, f"'{site}'")
    if row is None:
        return shown
    # Only for a site's own row: of the module around it, the row's partner is not known.
    place = f"'{row.candidate_site}'" if row.candidate_site and row.key.site == site else ""
    other = " ".join(filter(None, (row.candidate_class, place)))
    about = filter(None, (row.class_name, f"in the candidate {other}" if other else ""))
    words = ", ".join(about)
    return f"{shown} ({words})" if words else shown


def _all_fine(counts: RowCounts) -> str:
    # A pass that rests on part of the tensors must not read like one that rests on all of them.
    compared, rows = counts.compared, counts.rows
    share = f"{compared}" if compared == rows else f"{compared} of {rows}"
    share += " tensor compared" if rows == 1 else " tensors compared"
    if counts.inside:
        share += f", {counts.inside} more inside a fusion"
    # Figures of a dump that counts no NaN and no Inf: they can show a difference, not its absence.
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
