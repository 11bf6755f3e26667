"""Which module of the model it was exported from a node belongs to, and how its values are called.

torch's exporter writes the modules around a node beside it (`pkg.torch.onnx.name_scopes`); the
older one, and others' exporters, put the path into the node's name (`/model/layers.0/mlp/Mul`).
Read from the file as it was exported: an optimiser keeps neither. Knows names and who reads whom;
how calls of torch's graph are counted is in `calls.py`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from typing import NamedTuple, cast

from driftline.adapters.onnxruntime.graph import Graph, Node

ROOT = "(root)"
_SCOPES = "pkg.torch.onnx.name_scopes"
_CLASSES = "pkg.torch.onnx.class_hierarchy"
_STACK = "pkg.torch.onnx.stack_trace"
_OUTPUT = re.compile(r"_output_(\d+)$|:(\d+)$")
_LONGEST = 1 << 16
_FARTHEST = 8
"""So many nodes that a quantiser put in are gone back to find one that the exporter wrote."""
_MOST = 64
"""So many nodes that say nothing of themselves are asked for those around them."""
_ROUNDING = ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


class Scope(NamedTuple):
    """Where a node stands.

    Attributes:
        modules: Paths of the modules around it, outermost first, the root not among them.
        classes: Their classes, the root's in front; empty where the exporter does not say.
        operator: The call it was made for: `linear_3` of torch's graph; empty if not known.
        target: What was called there: `aten.linear.default`.
        line: `file.py:12` of the program, if known.
    """

    modules: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    operator: str = ""
    target: str = ""
    line: str = ""

    @property
    def module(self) -> str:
        return self.modules[-1] if self.modules else ""


NOWHERE = Scope()


def scope_of(node: Node) -> Scope:
    """What an exporter left about the place of a node."""
    names, classes = _listed(node.about.get(_SCOPES)), _listed(node.about.get(_CLASSES))
    if names:
        # The last of both is the operator itself; a module that has no name is the root.
        paths = tuple(name for name in names[:-1] if name)
        kinds = tuple(kind.rpartition(".")[2] for kind in classes[:-1])
        if len(kinds) != len(names) - 1:
            kinds = ()
        elif names[0]:
            kinds = ("", *kinds)
        return Scope(
            paths, kinds, names[-1], classes[-1] if classes else "", _line(node.about.get(_STACK))
        )
    if "/" in node.name:
        return Scope(_around(node.name.split("/")[:-1]), operator=node.name.rpartition("/")[2])
    return NOWHERE


def _listed(text: str | None) -> list[str]:
    """A list of texts as Python writes it; nothing where it is something else."""
    if not text or len(text) > _LONGEST:
        return []
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return []
    if not isinstance(value, list):
        return []
    return [str(one) for one in cast("list[object]", value)]


def _line(stack: str | None) -> str:
    """The innermost line of the program in a stack."""
    found = _FRAME.findall(stack or "")
    if not found:
        return ""
    path, line = found[-1]
    return f"{path.rpartition('/')[2]}:{line}"


def _around(parts: list[str]) -> tuple[str, ...]:
    """`/model/layers.0/mlp` → model, model.layers.0, model.layers.0.mlp.

    Of a Sequential the older exporter writes both it and its part: `/layer1/layer1.0/conv`.
    """
    found: list[str] = []
    for part in filter(None, parts):
        holder, dot, number = part.rpartition(".")
        if found and dot and found[-1].rpartition(".")[2] == holder:
            found.append(f"{found[-1]}.{number}")
        else:
            found.append(f"{found[-1]}.{part}" if found else part)
    return tuple(found)


class Names:
    """How the values of a model are called in a run: `{module}/{value}`, the same at every level.

    Made from the file as it was exported, so that an optimised run and another one agree.
    """

    def __init__(self, graph: Graph) -> None:
        self.scopes = [scope_of(node) for node in graph.nodes]
        self.told = any(_SCOPES in node.about for node in graph.nodes)
        self._graph = graph
        if self.told:
            self._place_the_silent()
        self._sites: dict[str, str] = {}
        self._taken: set[str] = set()
        for number, node in enumerate(graph.nodes):
            scope = self.scopes[number]
            if self.told and scope is NOWHERE:
                scope = self._beside(node)
            for output, value in enumerate(node.outputs):
                if value:
                    self._name(value, scope, node, output)

    def _place_the_silent(self) -> None:
        """Nodes that a rewriter put in and said nothing of: in the module around their neighbours.

        A `Split` that was a sequence before. What rounds to integers and back stays outside.
        """
        silent = {
            number: node
            for number, node in enumerate(self._graph.nodes)
            if self.scopes[number] is NOWHERE and node.op not in _ROUNDING
        }
        found = {number: self._neighbourhood(number) for number in silent}
        for number, scope in found.items():
            self.scopes[number] = scope

    def _neighbourhood(self, number: int) -> Scope:
        """The innermost module that holds all neighbours of a node which say where they stand."""
        graph = self._graph
        scopes: list[Scope] = []
        for before in (True, False):
            waiting, seen = [number], {number}
            while waiting and len(seen) < _MOST:
                node = graph.nodes[waiting.pop()]
                nearby = graph.before(node) if before else graph.behind(node)
                for other in nearby:
                    if other in seen:
                        continue
                    seen.add(other)
                    if self.scopes[other] is NOWHERE:
                        waiting.append(other)
                    else:
                        scopes.append(self.scopes[other])
        return _common(scopes)

    def _beside(self, node: Node) -> Scope:
        """Where a node stands that a quantiser put in: with who made what it reads, or reads it.

        For its name only: what it makes is not what that module makes.
        """
        before = node
        for _ in range(_FARTHEST):
            makers = [self._graph.maker.get(v) for v in self._graph.data_inputs(before)[:1]]
            if not makers or makers[0] is None:
                break
            if self.scopes[makers[0]] is not NOWHERE:
                return self.scopes[makers[0]]
            before = self._graph.nodes[makers[0]]
        for value in node.outputs:
            for reader in self._graph.readers.get(value, ()):
                if self.scopes[reader] is not NOWHERE:
                    return self.scopes[reader]
        return NOWHERE

    def site(self, value: str, near: str = "") -> str:
        """The site of a value; one that an optimiser made stands in the module of another one.

        Args:
            value: Its name.
            near: A value of the exported file that it leads to.
        """
        if value not in self._sites:
            self._name(value, self.scope(near), None, 0)
        return self._sites[value]

    def scope(self, value: str) -> Scope:
        """Where the node stands that made a value in the exported file."""
        number = self._graph.maker.get(value)
        return self.scopes[number] if number is not None else NOWHERE

    def _name(self, value: str, scope: Scope, node: Node | None, output: int) -> None:
        label = value
        if "/" in value:
            label = _OUTPUT.sub(_numbered, value.rpartition("/")[2])
        elif not self.told and node is not None and scope.operator:
            label = scope.operator + (f".{output}" if output else "")
        if self.told or scope.modules:
            label = f"{scope.module or ROOT}/{label}"
        site, number = label, 1
        while site in self._taken:
            site, number = f"{label}~{number}", number + 1
        self._taken.add(site)
        self._sites[value] = site


def _common(scopes: Iterable[Scope]) -> Scope:
    """The modules that are around all of some nodes."""
    found: Scope | None = None
    for scope in scopes:
        if found is None:
            found = Scope(scope.modules, scope.classes)
            continue
        deep = 0
        for mine, other in zip(found.modules, scope.modules, strict=False):
            if mine != other:
                break
            deep += 1
        found = Scope(found.modules[:deep], found.classes[: deep + 1])
    return found if found is not None else NOWHERE


def _numbered(match: re.Match[str]) -> str:
    number = match[1] or match[2]
    return f".{number}" if number != "0" else ""
