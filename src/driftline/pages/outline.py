"""The sites of a table as a tree: what a reader unfolds to come to a layer.

Made from the names themselves, so that it is there for every dump; classes of modules that hold no
tensor come from the run's own tree where there is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np

ROOT = "(root)"
_DEEPEST = 48
"""Levels of a name; what lies deeper keeps the rest of its name in one piece."""


def path_of(site: str) -> list[str]:
    """A site's name, level by level.

    >>> path_of("layers.0.mlp/aten.mm"), path_of("bert/layer_0/MatMul"), path_of("(root)")
    (['layers', '0', 'mlp', 'aten.mm'], ['bert', 'layer_0', 'MatMul'], [])
    """
    if site == ROOT:
        return []
    head, *operators = site.split("/")
    parts = [*(head.split(".") if not head.startswith("(") else [head]), *operators]
    if len(parts) <= _DEEPEST:
        return parts
    return [*parts[: _DEEPEST - 1], ".".join(parts[_DEEPEST - 1 :])]


def outline(
    sites: Iterable[tuple[str, str]], roots: Iterable[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """The tree of these sites, parents first.

    Args:
        sites: Site and class, in order of execution; a site may come again.
        roots: The module tree of the run, as its topology has it: classes of what holds no tensor.
    """
    known = dict(_classes(roots))
    names: list[str] = [ROOT]
    owners: list[str | None] = [None]
    parents: list[int] = [-1]
    classes: list[str] = [known.get(ROOT, "")]
    places: dict[tuple[int, str], int] = {}
    for site, class_name in sites:
        at = 0
        so_far = ""
        for part in path_of(site):
            so_far = f"{so_far}.{part}" if so_far else part
            found = places.get((at, part))
            if found is None:
                found = places[at, part] = len(names)
                names.append(part)
                owners.append(None)
                parents.append(at)
                classes.append(known.get(so_far, ""))
            at = found
        owners[at] = site
        classes[at] = class_name or classes[at]
    order = _parents_first(parents)
    place = {old: new for new, old in enumerate(order)}
    return {
        "count": len(names),
        "name": [names[old] for old in order],
        "site": [owners[old] for old in order],
        "parent": np.asarray(
            [place[parents[old]] if parents[old] >= 0 else -1 for old in order], np.int32
        ),
        "class": [classes[old] for old in order],
    }


def _parents_first(parents: list[int]) -> list[int]:
    """Depth first, children in the order in which they ran."""
    children: dict[int, list[int]] = {}
    for at, parent in enumerate(parents):
        children.setdefault(parent, []).append(at)
    order: list[int] = []
    waiting = [0]
    while waiting:
        at = waiting.pop()
        order.append(at)
        waiting += reversed(children.get(at, []))
    return order


def _classes(roots: Iterable[Mapping[str, Any]]) -> Iterable[tuple[str, str]]:
    below: list[Any] = list(roots)
    while below:
        node = below.pop()
        if not isinstance(node, Mapping):
            continue
        about = cast("Mapping[str, Any]", node)
        yield str(about.get("site", "")), str(about.get("class", ""))
        children = about.get("children")
        below += cast("list[Any]", children) if isinstance(children, list) else []
