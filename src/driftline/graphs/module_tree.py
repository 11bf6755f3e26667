"""The module tree of a run: the place, class and parameters of each module.

A value and its JSON form. This file does not know who builds the tree and where it is stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter or buffer that a module itself holds."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    trainable: bool = False


@dataclass(frozen=True, slots=True)
class ModuleNode:
    """One module.

    Attributes:
        site: Its site in the run.
        class_name: Its class.
        ids: Child indices from the root, joined by `_`, as `-ids` accepts them. Empty for a root;
            None if there is no such path (for later models of a process).
        parameters: Its own parameters and buffers, without those of its children.
        children: Children in the order of registration, with the names that the parent gives them.
        shared: Whether the same object appeared before, at another place of the tree.
    """

    site: str
    class_name: str
    ids: str | None = None
    parameters: tuple[Parameter, ...] = ()
    children: tuple[tuple[str, ModuleNode], ...] = ()
    shared: bool = False

    def walk(self) -> Iterator[ModuleNode]:
        """This node and all nodes below it, parents first."""
        yield self
        for _, child in self.children:
            yield from child.walk()

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {"site": self.site, "class": self.class_name, "ids": self.ids}
        # Empty fields are omitted, because trees of large models have thousands of nodes.
        if self.shared:
            data["shared"] = True
        if self.parameters:
            data["parameters"] = [
                {"name": p.name, "dtype": p.dtype, "shape": list(p.shape), "trainable": p.trainable}
                for p in self.parameters
            ]
        if self.children:
            data["children"] = [{"name": name, **child.to_json()} for name, child in self.children]
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(
            str(data["site"]),
            str(data["class"]),
            data.get("ids"),
            tuple(
                Parameter(p["name"], p["dtype"], tuple(p["shape"]), bool(p.get("trainable")))
                for p in data.get("parameters", ())
            ),
            tuple((str(c["name"]), cls.from_json(c)) for c in data.get("children", ())),
            bool(data.get("shared")),
        )


@dataclass(frozen=True, slots=True)
class ModuleTree:
    """All models of one process, and the order in which their modules were first called."""

    roots: tuple[ModuleNode, ...] = ()
    order: tuple[str, ...] = field(default=())

    def walk(self) -> Iterator[ModuleNode]:
        for root in self.roots:
            yield from root.walk()

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "roots": [root.to_json() for root in self.roots],
            "order": list(self.order),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(
            tuple(ModuleNode.from_json(root) for root in data.get("roots", ())),
            tuple(str(site) for site in data.get("order", ())),
        )
