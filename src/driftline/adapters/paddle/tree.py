"""The layer tree of the models a session has met, as the value that topology keeps."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from driftline.adapters.names import ModuleNames, unwrapped
from driftline.adapters.paddle.names import FAMILY
from driftline.adapters.paddle.snapshot import dtype_name
from driftline.topology.tree import ModuleNode, ModuleTree, Parameter


def layer_tree(names: ModuleNames, order: Iterable[str]) -> ModuleTree:
    """Everything that has been named so far; models that are gone are as they were last seen."""
    roots: list[ModuleNode] = []
    for root in names.roots:
        layer = root.module()
        if layer is not None:
            root.tree = _node(layer, names, set())
        if root.tree is not None:
            roots.append(root.tree)
    return ModuleTree(tuple(roots), tuple(order))


def _node(layer: Any, names: ModuleNames, seen: set[int]) -> ModuleNode:
    layer = unwrapped(FAMILY, layer)
    place = names.known(layer)
    class_name = FAMILY.class_name(layer)
    site = place.site if place else class_name
    ids = place.ids if place else None
    if id(layer) in seen:
        return ModuleNode(site, class_name, ids, shared=True)
    seen.add(id(layer))
    below = tuple((name, _node(child, names, seen)) for name, child in FAMILY.children(layer))
    return ModuleNode(site, class_name, ids, _parameters(layer), below)


def _parameters(layer: Any) -> tuple[Parameter, ...]:
    held = [(name, p, True) for name, p in layer._parameters.items() if p is not None]
    held += [(name, b, False) for name, b in layer._buffers.items() if b is not None]
    return tuple(
        Parameter(
            name,
            dtype_name(tensor.dtype),
            tuple(int(size) for size in tensor.shape),
            is_parameter and not tensor.stop_gradient,
        )
        for name, tensor, is_parameter in held
    )
