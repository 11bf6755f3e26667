"""The `model_tree.json` of an `ait llm` dump → classes, order, and a run's topology."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from driftline.formats.ait_names import site_of

DEEPEST = 200


class Place(NamedTuple):
    """Where a module stands: its class, and when a walk through the tree enters and leaves it."""

    class_name: str
    entered: int
    left: int


def places_of(roots: Sequence[Any]) -> dict[str, Place]:
    """Site → place, for every module of the trees."""
    found: dict[str, Place] = {}
    clock = 0

    def walk(node: Any, depth: int) -> None:
        nonlocal clock
        if not isinstance(node, dict) or depth > DEEPEST:
            return
        module = cast("dict[str, Any]", node)
        clock += 1
        entered = clock
        for child in _children(module):
            walk(child, depth + 1)
        clock += 1
        found[site_of(str(module.get("name", "")))] = Place(
            str(module.get("type", "")), entered, clock
        )

    for root in roots:
        walk(root, 0)
    return found


def topology_of(roots: Sequence[Any]) -> dict[str, Any]:
    """The trees in the form of a run's `topology.json`."""

    def converted(node: dict[str, Any], ids: str | None, above: str, depth: int) -> dict[str, Any]:
        site = site_of(str(node.get("name", "")))
        data: dict[str, Any] = {"site": site, "class": str(node.get("type", "")), "ids": ids}
        prefix = f"{above}." if above and above != "(root)" else ""
        name = site.removeprefix(prefix)
        children: list[dict[str, Any]] = []
        if depth < DEEPEST:
            for at, child in enumerate(_children(node)):
                if isinstance(child, dict):
                    own = None if ids is None else f"{ids}_{at}" if ids else str(at)
                    children.append(converted(cast("dict[str, Any]", child), own, site, depth + 1))
        if children:
            data["children"] = children
        return {"name": name, **data} if depth else data

    trees = [cast("dict[str, Any]", root) for root in roots if isinstance(root, dict)]
    return {
        "schema": 1,
        "roots": [converted(root, "" if at == 0 else None, "", 0) for at, root in enumerate(trees)],
        "order": [],
    }


def _children(node: dict[str, Any]) -> list[Any]:
    children = node.get("children")
    return cast("list[Any]", children) if isinstance(children, list) else []
