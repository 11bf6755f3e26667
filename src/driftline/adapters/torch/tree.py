"""The module tree of the models a session has met, as the value that topology keeps."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from driftline.adapters.torch.names import ModuleNames, children, class_name_of, unwrapped
from driftline.topology.tree import ModuleNode, ModuleTree, Parameter


def module_tree(names: ModuleNames, order: Iterable[str]) -> ModuleTree:
    """Everything that has been named so far; models that are gone are as they were last seen."""
    roots: list[ModuleNode] = []
    for root in names.roots:
        module = root.module()
        if module is not None:
            root.tree = _node(module, names, set())
        if root.tree is not None:
            roots.append(root.tree)
    return ModuleTree(tuple(roots), tuple(order))


def _node(module: nn.Module, names: ModuleNames, seen: set[int]) -> ModuleNode:
    module = unwrapped(module)
    place = names.known(module)
    class_name = class_name_of(module)
    site = place.site if place else class_name
    ids = place.ids if place else None
    if id(module) in seen:
        return ModuleNode(site, class_name, ids, shared=True)
    seen.add(id(module))
    below = tuple((name, _node(child, names, seen)) for name, child in children(module))
    return ModuleNode(site, class_name, ids, _parameters(module), below)


def _parameters(module: nn.Module) -> tuple[Parameter, ...]:
    held = [(name, p, True) for name, p in module._parameters.items() if p is not None]
    held += [(name, b, False) for name, b in module._buffers.items() if b is not None]
    return tuple(
        Parameter(
            name,
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape) if not nn.parameter.is_lazy(tensor) else (),
            is_parameter and tensor.requires_grad,
        )
        for name, tensor, is_parameter in held
    )
