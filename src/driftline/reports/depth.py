"""Where in a model a comparison went wrong: the first divergence as a tree, error by depth."""

from __future__ import annotations

import math

from driftline.comparison.row import Row
from driftline.comparison.table import Table
from driftline.reports.view import Branch, Curve
from driftline.reports.wording import number

_NEIGHBOURS = 3
_ERROR = "relative_l2"
_FEWEST = 3
"""Sites that make a line worth drawing."""
_SIDES = (
    ("", ("output",)),
    (" backward", ("grad_input", "grad_output")),
)
"""Words for a direction, and the ports that tell of it; rows are in the order in which they ran."""


def where(table: Table) -> Branch:
    """The path to the first divergence, with the modules that ran around it on the last level."""
    first = table.first
    assert first is not None
    home = table.first_site or first.site
    parts = home.split(".") if home else [""]
    parent = ".".join(parts[:-1])
    known = {row.site: None for row in table.rows if _belongs(row, first)}  # in their order
    siblings = [site for site in known if site.rpartition(".")[0] == parent and site]
    if home not in siblings:
        siblings.append(home)
    at = siblings.index(home)
    near = siblings[max(0, at - _NEIGHBOURS) : at + _NEIGHBOURS + 1]
    shown = {*near, *(".".join(parts[:depth]) for depth in range(1, len(parts)))}
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
    branches = tuple(
        _leaf(site, worst.get(site), heats.get(site), site == home, parent) for site in near
    )
    for depth in range(len(parts) - 1, 0, -1):
        # A container of numbered children (`layers`) is no place of its own: `layers.3` is.
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


def along_depth(table: Table) -> list[Curve]:
    """How the error runs from the first site to the last, forward and backward."""
    if not table.reference.ordered:
        return []
    chosen = table.first or next((row for row in table.rows if row.compared), None)
    if chosen is None:
        return []
    # For each direction: the error of its sites, and how near to their limits they came.
    errors: list[dict[str, float]] = [{} for _ in _SIDES]
    nearness: list[dict[str, float]] = [{} for _ in _SIDES]
    side_of = {port: side for side, (_, ports) in enumerate(_SIDES) for port in ports}
    for row in table.rows:
        side = side_of.get(row.port)
        if side is None or not row.compared or not _belongs(row, chosen):
            continue
        _note(nearness[side], row.site, row.severity)
        if _ERROR in row.metrics:  # what is compared exactly has no such number
            _note(errors[side], row.site, float(row.metrics[_ERROR]))
    curves: list[Curve] = []
    for side, (direction, _) in enumerate(_SIDES):
        found = errors[side] or nearness[side]
        metric = _ERROR if errors[side] else "value over limit"
        if len(found) >= _FEWEST and any(found.values()):
            curves.append(_curve(found, direction, table, metric))
    return curves


def _note(found: dict[str, float], site: str, value: float) -> None:
    before = found.get(site)
    found[site] = value if before is None else _larger(before, value)


def classes(row: Row) -> str:
    """The class at a site; both where the candidate's is another one."""
    other = row.candidate_class
    return f"{row.class_name} → {other}" if other else row.class_name


def _curve(found: dict[str, float], direction: str, table: Table, metric: str) -> Curve:
    finite = [value for value in found.values() if math.isfinite(value)]
    span = f"{number(min(finite))} to {number(max(finite))}" if finite else "not finite"
    sites = list(found)
    home = table.first_site or (table.first.site if table.first else "")
    # The site itself, or where what runs inside it begins.
    at = next((n for n, site in enumerate(sites) if site == home), None)
    if at is None and home:
        at = next((n for n, site in enumerate(sites) if site.startswith(f"{home}.")), None)
    title = f"{metric} along the depth{direction}: {len(sites)} sites, {span}"
    return Curve(title, tuple(found.values()), at, home if at is not None else "")


def _belongs(row: Row, first: Row) -> bool:
    ours, theirs = row.key, first.key
    return (ours.rank, ours.process, ours.step) == (theirs.rank, theirs.process, theirs.step)


def _heat(heats: dict[str, float], shown: set[str], row: Row) -> None:
    """The worst value over limit of every site and of everything that lies inside it."""
    site = row.site
    while site:
        if site in shown:
            _note(heats, site, row.severity)
        site = site.rpartition(".")[0]


def _larger(one: float, other: float) -> float:
    """NaN is beyond every number."""
    if math.isnan(one) or math.isnan(other):
        return math.nan
    return max(one, other)


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
