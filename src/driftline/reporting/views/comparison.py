"""The view of a comparison: the first divergence as a tree, the error by depth, the worst rows."""

from __future__ import annotations

import itertools
import math
import re
import shlex
import sys
from collections.abc import Collection, Iterable
from typing import cast

from driftline.comparison.evidence.rules import COLUMNS
from driftline.comparison.metrics.catalogue import STANDARD
from driftline.comparison.table.row import Row, Status
from driftline.comparison.table.table import Table, is_spooled
from driftline.reporting.formatting import counted, dtypes, number, shape
from driftline.reporting.view import (
    Block,
    Branch,
    Curve,
    Grid,
    Heading,
    Line,
    Sentence,
    Tone,
    Tree,
    View,
)
from driftline.reporting.views import differences

_NEIGHBOURS = 3
_ERROR = "relative_l2"
_FEWEST = 3
"""The smallest number of sites for which a line is drawn."""
_SIDES = (
    ("", ("output",)),
    (" backward", ("grad_input", "grad_output")),
)
"""Titles of the directions, and their ports; rows are in execution order."""


def where(table: Table) -> Branch:
    """The path to the first divergence, with the modules that ran around it on the last level."""
    first = table.first
    assert first is not None
    home = table.first_site or first.site
    parts = home.split(".") if home else [""]
    parent = ".".join(parts[:-1])
    executed = {row.site: None for row in table.rows if _belongs(row, first)}  # in their order
    siblings = [site for site in executed if site.rpartition(".")[0] == parent and site]
    if home not in siblings:
        siblings.append(home)
    position = siblings.index(home)
    near = siblings[max(0, position - _NEIGHBOURS) : position + _NEIGHBOURS + 1]
    shown = {*near, *(".".join(parts[:depth]) for depth in range(1, len(parts)))}
    worst, heats = _worst_and_heats(table, first, shown)
    branches = tuple(
        _leaf(site, worst.get(site), heats.get(site), site == home, parent) for site in near
    )
    for depth in range(len(parts) - 1, 0, -1):
        # A container of numbered children (`layers`) gets no own level: `layers.3` does.
        if depth > 1 and not parts[depth - 1].isdigit() and parts[depth].isdigit():
            continue
        site = ".".join(parts[:depth])
        label = parts[depth - 1]
        if label.isdigit() and depth > 1:
            label = f"{parts[depth - 2]}.{label}"
        row = worst.get(site)
        cells = (row.class_name,) if row and row.class_name else ()
        branches = (Branch(label, "", "quiet", branches, cells, heats.get(site)),)
    return branches[0] if len(branches) == 1 else Branch("(model)", "", "quiet", branches)


def _worst_and_heats(
    table: Table, first: Row, shown: set[str]
) -> tuple[dict[str, Row], dict[str, float]]:
    """The worst row of each shown site, and the largest value over limit of its parts."""
    worst: dict[str, Row] = {}
    heats: dict[str, float] = {}
    for row in table.rows:
        if not _belongs(row, first):
            continue
        if row.site in shown and (
            row.site not in worst or _badness(row) > _badness(worst[row.site])
        ):
            worst[row.site] = row
        if row.compared:
            _heat(heats, shown, row)
    return worst, heats


def along_depth(table: Table) -> list[Curve]:
    """Curves of the error from the first site to the last, forward and backward."""
    if not table.reference.ordered:
        return []
    chosen = table.first or next((row for row in table.rows if row.compared), None)
    if chosen is None:
        return []
    # For each direction: error and value over limit of its sites.
    errors: list[dict[str, float]] = [{} for _ in _SIDES]
    nearness: list[dict[str, float]] = [{} for _ in _SIDES]
    side_of = {port: side for side, (_, ports) in enumerate(_SIDES) for port in ports}
    for row in table.rows:
        side = side_of.get(row.port)
        if side is None or not row.compared or not _belongs(row, chosen):
            continue
        _note(nearness[side], row.site, row.severity)
        if _ERROR in row.metrics:  # exactly compared tensors have no such number
            _note(errors[side], row.site, float(row.metrics[_ERROR]))
    curves: list[Curve] = []
    for side, (direction, _) in enumerate(_SIDES):
        values = errors[side] or nearness[side]
        metric = _ERROR if errors[side] else "value over limit"
        if len(values) >= _FEWEST and any(values.values()):
            curves.append(_curve(values, direction, table, metric))
    return curves


def _note(values: dict[str, float], site: str, value: float) -> None:
    before = values.get(site)
    values[site] = value if before is None else _larger(before, value)


def classes(row: Row) -> str:
    """The class at a site; both classes if they differ."""
    other = row.candidate_class
    return f"{row.class_name} → {other}" if other else row.class_name


def _curve(values: dict[str, float], direction: str, table: Table, metric: str) -> Curve:
    finite = [value for value in values.values() if math.isfinite(value)]
    span = f"{number(min(finite))} to {number(max(finite))}" if finite else "not finite"
    sites = list(values)
    home = table.first_site or (table.first.site if table.first else "")
    # The site itself, or else the first site inside it.
    position = next((n for n, site in enumerate(sites) if site == home), None)
    if position is None and home:
        position = next((n for n, site in enumerate(sites) if site.startswith(f"{home}.")), None)
    title = f"{metric} along the depth{direction}: {len(sites)} sites, {span}"
    return Curve(title, tuple(values.values()), position, home if position is not None else "")


def _belongs(row: Row, first: Row) -> bool:
    key, other = row.key, first.key
    return (key.rank, key.process, key.step) == (other.rank, other.process, other.step)


def _heat(heats: dict[str, float], shown: set[str], row: Row) -> None:
    """Update the worst value over limit of a row's site and of all sites around it."""
    site = row.site
    while site:
        if site in shown:
            _note(heats, site, row.severity)
        site = site.rpartition(".")[0]


def _larger(value: float, other: float) -> float:
    """The larger of two values; NaN counts as the largest."""
    if math.isnan(value) or math.isnan(other):
        return math.nan
    return max(value, other)


def _badness(row: Row) -> tuple[bool, bool, float]:
    severity = math.inf if math.isnan(row.severity) else row.severity
    return row.status == "fail", row.compared, severity


def _leaf(site: str, row: Row | None, heat: float | None, is_first: bool, parent: str) -> Branch:
    label = site[len(parent) + 1 :] if parent else site or "(model)"
    status = "in a fusion" if row is not None and row.inside_fusion else row and row.status
    cells = (classes(row), status or "", _figure(row)) if row else ("", "not compared", "")
    tone = "bad" if is_first or (row is not None and row.status == "fail") else "plain"
    return Branch(label, "◀ starts here" if is_first else "", tone, (), cells, heat)


def _figure(row: Row) -> str:
    value = row.metrics.get(row.decided_by)
    return "" if value is None else number(value)


# A comparison table → a view: the finding and its place, the worst rows, what was not compared.


SHOWN_FAILING = 12
SHOWN_ROWS = 5
"""At least this many rows are shown, failing or not: the closest passing rows are of interest."""
SHOWN_OTHERS = 5
SHOWN_SELECTED = 40
"""Most rows that are shown for a selection by site, port or step."""
_TONES: dict[Status, Tone] = {
    "pass": "plain",
    "fail": "bad",
    "incomparable": "doubtful",
    "missing": "doubtful",
    "extra": "quiet",
    "unjudged": "plain",
}
_USUAL_METRICS = ("relative_l2", "cosine", "max_abs_error")
"""Shown next to the deciding metric if the width allows."""


def view(table: Table, *, everything: bool = False) -> View:
    """The view that `driftline compare` prints.

    Args:
        table: A judged table.
        everything: Show all rows, not only the worst, and all missing ones, not only the first.
    """
    blocks: list[Block] = [
        headline(table),
        *differences.remark(table.differences, table.verdict),
        *_step_commands(table),
    ]
    if table.first is not None and table.reference.ordered:
        blocks.append(Tree("", (where(table),)))
    blocks += differences.blocks(table.differences, everything=everything)
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
        ("incomparable", "Incomparable: on both sides, but they cannot be compared"),
        ("missing", "Missing: in the reference only"),
        ("extra", "Extra: in the candidate only"),
    )
    for status, title in others:
        if count := getattr(coverage, status):
            blocks.append(_others(table, status, f"{title} ({count})", count, everything))
    # Notes come from alignment, except those with a prefix of their own.
    blocks += [
        Sentence(note if note.startswith("thresholds: ") else f"alignment: {note}", "doubtful")
        for note in table.notes
    ]
    if words := _recipes(table):
        blocks.append(Sentence(words, "doubtful"))
    for name, side in (("reference", table.reference), ("candidate", table.candidate)):
        blocks += [Sentence(f"{name} run: {loss}", "doubtful") for loss in side.losses]
    return View(tuple(blocks))


def table_text(table: Table) -> str:
    """A comparison as the terminal shows it, for `print(table)`."""
    from driftline.reporting.terminal import paint, width_of

    blocks = (
        block._replace(how_to_see="table.rows has every one") if isinstance(block, Grid) else block
        for block in view(table).blocks
    )
    return paint(View(tuple(blocks)), width=width_of(sys.stdout)).rstrip("\n")


def rows_view(table: Table, *, everything: bool = False) -> View:
    """Some rows of a comparison, as `driftline show TABLE --site GLOB` prints them.

    Args:
        table: A judged table with only those rows.
        everything: Show all of them, not only the worst.
    """
    compared = table.coverage.compared
    blocks: list[Block] = [headline(table)]
    if compared:
        blocks.append(grid(table, most=compared if everything else min(compared, SHOWN_SELECTED)))
    rest = len(table.rows) - compared
    if rest:
        shown = [row for row in table.rows if not row.compared]
        headings = (Heading("status"), Heading("tensor", stretch=True), Heading("reason"))
        lines = tuple(
            Line((row.status, _tensor(row), row.reason or "-"), _TONES[row.status]) for row in shown
        )
        blocks.append(Grid(f"Not compared ({rest})", headings, lines))
    return View(tuple(blocks))


def headline(table: Table) -> Sentence:
    """The verdict and the finding."""
    tones: dict[str, Tone] = {"pass": "good", "fail": "bad"}
    return Sentence(
        f"{table.verdict.upper()}: {table.finding or 'no finding'}",
        tones.get(table.verdict, "doubtful"),
    )


def _step_commands(table: Table) -> list[Sentence]:
    """Commands that capture the step in which the drift begins in full, if only summaries exist."""
    first = table.first
    parted = table.training.broken if table.training is not None else None
    if table.verdict != "fail":
        return []
    step = first.step if first is not None else 0
    levels = ""
    if parted is not None and table.finding.startswith(parted.finding):
        step = parted.step
        levels = " --level modules gradients params"
    elif first is None or first.basis not in ("summary", "digest"):
        return []
    if not step:
        return []
    lines = [f"step {step} in full:"]
    for side in (table.reference, table.candidate):
        words = side.about.get("command")
        if not isinstance(words, list) or not words or not side.path:
            return []
        command = shlex.join(map(str, cast("list[object]", words)))
        folder = shlex.quote(f"{side.path.rstrip('/')}.step{step}")
        lines.append(f"driftline dump --step {step}{levels} -o {folder} -- {command}")
    return [Sentence(line, "quiet") for line in lines]


def _allowed(table: Table) -> str:
    """The limits of the rows: the judge's sentence, or the sources that occur in the rows."""
    words = table.limits.get("said")
    if isinstance(words, str) and words:
        return words if words.startswith("limits") else f"limits: {words}"
    sources = sorted({row.limit_from for row in table.rows if row.limit_from})
    return "limits from: " + ", ".join(sources) if sources else ""


def grid(table: Table, *, most: int | None = None) -> Grid:
    """The worst of the rows that were compared.

    Args:
        table: A judged table.
        most: How many rows. Default: the failing ones, at most a dozen and at least a few.
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
                _both_names(row.port, row.candidate_port),
                _both_names(row.slot, row.candidate_slot),
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
    if is_spooled(rows):
        return len(rows.processes) > 1, rows.several_steps
    ranks = len({(row.rank, row.key.process) for row in rows}) > 1
    return ranks, len({row.step for row in rows}) > 1


def _recipes(table: Table) -> str:
    """How many tensors were compared after a recipe, with the kinds of its steps."""
    if is_spooled(table.rows) and not table.rows.has_recipes:
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
    """The site; `ref site ~ cand site` if the candidate's tensor has another site."""
    own = row.site + (f"#{row.visit}" if row.visit else "")
    other = row._replace(candidate_port="", candidate_slot="").candidate_name
    return f"{own} ~ {other}" if other else own


def _both_names(own: str, other: str) -> str:
    return f"{own} ~ {other}" if other else own


def _recipe(row: Row) -> str:
    """The recipes of both sides as text."""
    sides = (("reference", row.reference_recipe), ("candidate", row.candidate_recipe))
    if row.reference_recipe == row.candidate_recipe:
        return f"both: {row.reference_recipe}" if row.reference_recipe else ""
    return "; ".join(f"{side}: {recipe}" for side, recipe in sides if recipe)


def _rank(row: Row) -> str:
    return f"{row.rank}" + (f".p{row.key.process}" if row.key.process else "")


def _metric_columns(table: Table, shown: Iterable[Row]) -> tuple[list[str], list[str]]:
    """The requested and the usual metrics, without the metric that decides every row."""
    rows = list(shown)
    deciding = {row.decided_by for row in rows}
    present = {name for row in rows for name in row.metrics if deciding != {name}}
    standard = {metric.name for metric in STANDARD}
    # Few rows have figures of evidence: these are shown only if they decide.
    standard |= {column.name for column in COLUMNS} - deciding
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
