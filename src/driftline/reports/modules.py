"""The modules of a run: one line each, of equal layers only the first opened.

Knows trees and how many tensors each module has; nothing of the tensors themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from driftline.reports.view import Grid, Heading, Line
from driftline.runs.record import Record
from driftline.runs.run import Run
from driftline.topology.tree import ModuleNode, ModuleTree

SHOWN_MODULES = 80


def _tree(run: Run, rank: int, process: int) -> ModuleTree | None:
    kept = run.topology(rank, process)
    if kept is None:
        return None
    try:
        return ModuleTree.from_json(cast(Mapping[str, Any], kept))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return None  # damaged: the sites of the tensors are known without it


def modules_of(run: Run, records: Sequence[Record]) -> Iterator[tuple[str | None, str, str, int]]:
    """Ids, site, class and number of tensors of every module, or of every site without a tree."""
    counts = Counter(record.key.site for record in records)
    classes = {record.key.site: record.class_name for record in records}
    listed: set[str] = set()
    for rank, process in sorted({(r.key.rank, r.key.process) for r in records}) or [(0, 0)]:
        tree = _tree(run, rank, process)
        for node in tree.walk() if tree else ():
            if node.site not in listed:
                listed.add(node.site)
                yield node.ids, node.site, node.class_name, counts[node.site]
    for site in run.sites():
        if site in counts and site not in listed:
            yield None, site, classes[site], counts[site]


def module_grid(run: Run, records: Sequence[Record], *, everything: bool) -> Grid:
    """The modules of a run with their ids and tensors; sites where no tree was kept."""
    counts = Counter(record.key.site for record in records)
    lines: list[Line] = []
    listed: set[str] = set()
    for rank, process in sorted({(r.key.rank, r.key.process) for r in records}) or [(0, 0)]:
        tree = _tree(run, rank, process)
        for root in tree.roots if tree else ():
            if root.site not in listed:
                lines += _node_lines(root, root.site or "(root)", 0, counts, everything)
                listed.update(node.site for node in root.walk())
    classes = {record.key.site: record.class_name for record in records}
    lines += [
        Line((None, site or "(root)", classes[site], counts[site]))
        for site in dict.fromkeys(run.sites())
        if site not in listed and site in counts
    ]
    has_ids = any(line.values[0] is not None for line in lines)
    headings = (
        Heading("ids"),
        Heading("module", stretch=True),
        Heading("class"),
        Heading("tensors"),
    )
    shown = lines if everything else lines[:SHOWN_MODULES]
    if not has_ids:
        headings = headings[1:]
        shown = [Line(line.values[1:], line.tone) for line in shown]
    title = "Modules (ids are what `dump -ids` takes)" if has_ids else "Sites"
    return Grid(title, headings, tuple(shown), len(lines) - len(shown), "--all shows every one")


def _node_lines(
    node: ModuleNode, label: str, depth: int, counts: Mapping[str, int], everything: bool
) -> Iterator[Line]:
    """A module and what is below it; of equal numbered layers only the first is opened."""
    ids = node.ids if node.ids is None or node.ids else "-"
    remark = "  (shared)" if node.shared else ""
    tone = "plain" if counts.get(node.site) else "quiet"
    yield Line(
        (ids, "  " * depth + label + remark, node.class_name, counts.get(node.site, 0)), tone
    )
    children = list(node.children)
    at = 0
    while at < len(children):
        name, child = children[at]
        yield from _node_lines(child, name, depth + 1, counts, everything)
        alike = at + 1
        kind = _numbered(name)
        if kind is not None and not everything:
            pattern = _pattern(child)
            while (
                alike < len(children)
                and _numbered(children[alike][0]) == kind
                and _pattern(children[alike][1]) == pattern
            ):
                alike += 1
        if alike > at + 1:
            last_name, last = children[alike - 1]
            first_name, first = children[at + 1]
            inside = sum(
                counts.get(n.site, 0) for _, c in children[at + 1 : alike] for n in c.walk()
            )
            one = first_name == last_name
            span = first_name if one else f"{first_name} … {last_name}"
            ids_span = first.ids if one else f"{first.ids} … {last.ids}"
            yield Line(
                (ids_span, "  " * (depth + 1) + f"{span}  (like {name})", child.class_name, inside),
                "quiet",
            )
        at = alike


def _numbered(name: str) -> str | None:
    """The rest of a numbered name: '' of `3`, `Layer` of `3_Layer`; None without a number."""
    number, _, rest = name.partition("_")
    return rest if number.isdigit() else None


def _pattern(node: ModuleNode) -> tuple[Any, ...]:
    return (node.class_name, tuple((name, _pattern(child)) for name, child in node.children))
