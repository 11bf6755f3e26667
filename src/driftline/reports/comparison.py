"""A comparison table → a view: what was found and where, the worst rows, what was not compared.

Only chooses and words; whether a row fails was decided in gating.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable

from driftline.comparison.metrics.catalogue import STANDARD
from driftline.comparison.row import Row, Status
from driftline.comparison.table import Table, is_kept
from driftline.reports.depth import along_depth, classes, where
from driftline.reports.view import Block, Grid, Heading, Line, Sentence, Tone, Tree, View
from driftline.reports.wording import counted, dtypes, shape

SHOWN_FAILING = 12
SHOWN_ROWS = 5
"""At least so many rows, failing or not: how close the others came is worth a line."""
SHOWN_OTHERS = 5
_TONES: dict[Status, Tone] = {
    "pass": "plain",
    "fail": "bad",
    "incomparable": "doubtful",
    "missing": "doubtful",
    "extra": "quiet",
    "unjudged": "plain",
}
_USUAL_METRICS = ("relative_l2", "cosine", "max_abs_error")
"""Shown beside the metric that decided, as far as the width goes."""


def view(table: Table, *, everything: bool = False) -> View:
    """What a person reads after `driftline compare`.

    Args:
        table: A judged table.
        everything: All rows rather than the worst, all missing ones rather than the first.
    """
    blocks: list[Block] = [headline(table)]
    if table.first is not None and table.reference.ordered:
        blocks.append(Tree("", (where(table),)))
    blocks += along_depth(table)
    coverage = table.coverage
    if coverage.compared:
        most = len(table.rows) if everything else None
        blocks.append(grid(table, most=most))
    share = f"coverage: {coverage}"
    blocks.append(Sentence(share, "plain" if coverage.share == 1 else "doubtful"))
    if allowed := _allowed(table):
        blocks.append(Sentence(allowed, "quiet"))
    others: tuple[tuple[Status, str], ...] = (
        ("incomparable", "Incomparable: on both sides, but not to be set against each other"),
        ("missing", "Missing: in the reference only"),
        ("extra", "Extra: in the candidate only"),
    )
    for status, title in others:
        if count := getattr(coverage, status):
            blocks.append(_others(table, status, f"{title} ({count})", count, everything))
    # Notes are alignment's, but for those that say whose they are.
    blocks += [
        Sentence(note if note.startswith("thresholds: ") else f"alignment: {note}", "doubtful")
        for note in table.notes
    ]
    if said := _recipes(table):
        blocks.append(Sentence(said, "doubtful"))
    for name, side in (("reference", table.reference), ("candidate", table.candidate)):
        blocks += [Sentence(f"{name} run: {loss}", "doubtful") for loss in side.losses]
    return View(tuple(blocks))


def headline(table: Table) -> Sentence:
    """The verdict and the finding."""
    tones: dict[str, Tone] = {"pass": "good", "fail": "bad"}
    return Sentence(
        f"{table.verdict.upper()}: {table.finding or 'nothing was said about it'}",
        tones.get(table.verdict, "doubtful"),
    )


def _allowed(table: Table) -> str:
    """What the rows were held to: gating's own sentence, or the limits that occur in the rows."""
    said = table.limits.get("said")
    if isinstance(said, str) and said:
        return said if said.startswith("limits") else f"limits: {said}"
    sources = sorted({row.limit_from for row in table.rows if row.limit_from})
    return "limits from: " + ", ".join(sources) if sources else ""


def grid(table: Table, *, most: int | None = None) -> Grid:
    """The worst of the rows that were compared.

    Args:
        table: A judged table.
        most: How many; those that fail, a dozen at most and a few in any case, if not given.
    """
    compared = table.coverage.compared
    failing = sum(row.status == "fail" for row in table.rows)
    count = max(SHOWN_ROWS, min(failing, SHOWN_FAILING)) if most is None else most
    shown = table.worst(count, compared=True)
    asked, usual = _metric_columns(table, shown)
    metrics = [*asked, *usual]
    ranks, steps = _several(table)
    recipes = any(row.reference_recipe or row.candidate_recipe for row in shown)
    headings = [
        Heading("status", kept=True),
        Heading("site", stretch=True, kept=True),
        Heading("port"),
        Heading("slot", stretch=True),
        *([Heading("step")] if steps else []),
        *([Heading("rank")] if ranks else []),
        Heading("decided by"),
        Heading("value", kept=True),
        Heading("limit", kept=True),
        *(Heading(name) for name in asked),
        *(Heading(name, essential=False) for name in usual),
        Heading("dtype", essential=False),
        Heading("shape", essential=False),
        Heading("class", essential=False),
        *([Heading("recipe", essential=False)] if recipes else []),
    ]
    lines = [
        Line(
            (
                row.status,
                _site(row),
                _beside(row.port, row.candidate_port),
                _beside(row.slot, row.candidate_slot),
                *((row.step,) if steps else ()),
                *((_rank(row),) if ranks else ()),
                row.decided_by or row.reason,
                row.metrics.get(row.decided_by),
                row.limit,
                *(row.metrics.get(name) for name in metrics),
                dtypes(row.reference_dtype, row.candidate_dtype),
                shape(row.reference_shape),
                classes(row),
                *((_recipe(row),) if recipes else ()),
            ),
            _TONES[row.status],
        )
        for row in shown
    ]
    title = f"Worst first ({failing} of {counted(compared, 'compared tensor')} failing)"
    return Grid(
        title, tuple(headings), tuple(lines), compared - len(shown), "--all shows every row"
    )


def _several(table: Table) -> tuple[bool, bool]:
    """Whether rows are of several processes, and of several steps."""
    rows = table.rows
    if is_kept(rows):
        return len(rows.processes) > 1, rows.several_steps
    ranks = len({(row.rank, row.key.process) for row in rows}) > 1
    return ranks, len({row.step for row in rows}) > 1


def _recipes(table: Table) -> str:
    """How many tensors were not compared as they are stored, and what was done to them."""
    if is_kept(table.rows) and not table.rows.has_recipes:
        return ""
    made = 0
    steps: dict[str, int] = {}
    for row in table.rows:
        if not row.reference_recipe and not row.candidate_recipe:
            continue
        made += 1
        text = f"{row.reference_recipe} then {row.candidate_recipe}"
        for kind in dict.fromkeys(re.findall(r"(?:^|then |\()([a-z]+)(?=\(| of)", text)):
            steps[kind] = steps.get(kind, 0) + 1
    if not made:
        return ""
    shown = ", ".join(f"{count} {kind}" for kind, count in steps.items())
    were = "tensor was" if made == 1 else "tensors were"
    return f"alignment: {made} {were} not compared as stored ({shown}); --format csv says each"


def _site(row: Row) -> str:
    """`ref site ~ cand site` where the candidate's tensor is elsewhere."""
    own = row.site + (f"#{row.visit}" if row.visit else "")
    other = row._replace(candidate_port="", candidate_slot="").candidate_name
    return f"{own} ~ {other}" if other else own


def _beside(own: str, other: str) -> str:
    return f"{own} ~ {other}" if other else own


def _recipe(row: Row) -> str:
    """What was done to either side first."""
    sides = (("reference", row.reference_recipe), ("candidate", row.candidate_recipe))
    if row.reference_recipe == row.candidate_recipe:
        return f"both: {row.reference_recipe}" if row.reference_recipe else ""
    return "; ".join(f"{side}: {recipe}" for side, recipe in sides if recipe)


def _rank(row: Row) -> str:
    return f"{row.rank}" + (f".p{row.key.process}" if row.key.process else "")


def _metric_columns(table: Table, shown: Iterable[Row]) -> tuple[list[str], list[str]]:
    """What a user asked for, and the usual; without the one that decides every row anyway."""
    rows = list(shown)
    deciding = {row.decided_by for row in rows}
    present = {name for row in rows for name in row.metrics if deciding != {name}}
    standard = {metric.name for metric in STANDARD}
    limited: Collection[str] = table.limits.get("metrics", ())
    asked = [
        column.name
        for column in table.columns
        if column.name in present and (column.name in limited or column.name not in standard)
    ]
    usual = [name for name in _USUAL_METRICS if name in present and name not in asked]
    return asked, usual


def _others(table: Table, status: Status, title: str, count: int, everything: bool) -> Grid:
    rows = (row for row in table.rows if row.status == status)
    shown = list(itertools.islice(rows, count if everything else SHOWN_OTHERS))
    return Grid(
        title,
        (Heading("tensor", stretch=True), Heading("reason", stretch=True)),
        tuple(Line((_tensor(row), row.reason or "-"), _TONES[row.status]) for row in shown),
        count - len(shown),
        "--all shows every one",
    )


def _tensor(row: Row) -> str:
    return f"{row.key} ~ {row.candidate_name}" if row.candidate_name else str(row.key)
