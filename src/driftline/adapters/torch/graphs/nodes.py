"""The nodes of a compiled graph in our words: module, line, shape, and what they stem from.

Reads what the compiler left in each node's `meta`; executes nothing and changes nothing.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from typing import Any

import torch

from driftline.adapters.torch.graphs import stamps
from driftline.adapters.torch.names import ROOT, ModuleNames
from driftline.adapters.torch.snapshot import dtype_name
from driftline.runs.graphs import GraphNode

_FILE = re.compile(r'File "([^"\n]+)", line (\d+), in ([^\n]+)')
_TORCH = re.compile(r"[/\\](torch|torchgen)[/\\]")
_OWN = re.compile(r"[/\\]driftline[/\\](adapters|launch)[/\\]")
_SOURCE = re.compile(r"^(?:[LG]\['?[^\]]*'?\]|self)\.?")
_BRACKETS = re.compile(r"\['?([^'\]]+)'?\]")


class Naming:
    """Names the nodes of one process's graphs.

    Two graphs of different pieces of a program may hold nodes of one name in one module. The later
    one's get the number of their piece behind an `@`; a recompilation is the same piece.

    Args:
        names: The modules of the program.
    """

    def __init__(self, names: ModuleNames) -> None:
        self._names = names
        self._owners: dict[tuple[str, bool], str] = {}

    def describe(
        self, graph: torch.fx.Graph, base: str, piece: str, *, backward: bool
    ) -> tuple[GraphNode, ...]:
        """The nodes of a graph, but for its output.

        Args:
            graph: As it was traced.
            base: Where nodes of no module belong: the module under way.
            piece: Which piece of the program was compiled.
            backward: A backward graph; what it holds of the forward pass is computed again.
        """
        leaving = _leaving(graph)
        found: dict[str, GraphNode] = {}
        for node in graph.nodes:
            if node.op != "output":
                found[node.name] = self._node(
                    node, base, piece, found, leaves=node in leaving, backward=backward
                )
        return tuple(found.values())

    def _node(
        self,
        node: Any,
        base: str,
        piece: str,
        found: Mapping[str, GraphNode],
        *,
        leaves: bool,
        backward: bool,
    ) -> GraphNode:
        meta: Mapping[str, Any] = node.meta
        target = _target(node)
        of = None
        if node.target is operator.getitem and isinstance(node.args[0], torch.fx.Node):
            source = found.get(node.args[0].name)
            if source is not None and isinstance(node.args[1], int):
                of = source.name, int(node.args[1])
        own: Any = meta.get("nn_module_stack")
        phase = "forward"
        if backward:
            # What a placeholder holds was saved by the forward pass, not computed here.
            again = node.op != "placeholder" and meta.get("partitioner_tag") == "is_forward"
            phase = "recompute" if again else "backward"
        stack = own or meta.get("fwd_nn_module_stack") or meta.get(stamps.STACK) or {}
        calls = tuple(self._calls(stack, base))
        module = calls[-1].partition("@")[0] if calls else base
        shape, dtype = _value(meta)
        return GraphNode(
            node.name,
            self._site(module, node.name, piece, backward=backward),
            module,
            target,
            phase,
            tuple(one.name for one in node.all_input_nodes),
            shape,
            dtype,
            _line(meta.get("stack_trace")),
            stamps.of_node(node),
            of,
            _axes(node, shape),
            calls,
            leaves,
            _taken_apart(meta, target),
        )

    def _site(self, module: str, name: str, piece: str, *, backward: bool) -> str:
        site = f"{module}/{name}"
        owner = self._owners.setdefault((site, backward), piece)
        return site if owner == piece else f"{site}@{piece}"

    def _calls(self, stack: Mapping[str, Any], base: str) -> list[str]:
        """Sites of the modules around a node, outermost first; a repeated call has an `@`."""
        found: list[str] = []
        for key, (path, _) in stack.items():
            text, _, again = str(key).partition("@")
            place = self._names._places.get(int(text)) if text.isdigit() else None
            site = place.site if place is not None else _by_path(str(path), base)
            if site and (not found or found[-1].partition("@")[0] != site):
                found.append(f"{site}@{again}" if again else site)
        return found


def _by_path(path: str, base: str) -> str:
    """A module by the text under which the compiler found it: `L['self'].layers.0`."""
    below = _SOURCE.sub("", path)
    below = _BRACKETS.sub(r".\1", below).replace("._modules.", ".").lstrip(".")
    if not below:
        return base
    return below if base == ROOT else f"{base}.{below}"


def _target(node: Any) -> str:
    if node.op != "call_function":
        return node.op if node.op in ("placeholder", "get_attr") else str(node.target)
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target)
    return str(getattr(node.target, "__name__", node.target))


def _taken_apart(meta: Mapping[str, Any], target: str) -> str:
    """The operator that a node was made for, where it is not that operator itself."""
    operator = meta.get("original_aten")
    if not isinstance(operator, torch._ops.OpOverload) or str(operator) == target:
        return ""
    return str(operator)


def _value(meta: Mapping[str, Any]) -> tuple[tuple[int, ...] | None, str]:
    value = meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None, ""
    dtype = dtype_name(value.dtype)
    if not all(type(size) is int for size in value.shape):
        return None, dtype
    return tuple(int(size) for size in value.shape), dtype


def _line(trace: object) -> str:
    """The innermost line of a stack trace that is the program's own."""
    if not isinstance(trace, str):
        return ""
    found = [one for one in _FILE.findall(trace) if not _OWN.search(one[0])]
    theirs = [one for one in found if not _TORCH.search(one[0])] or found
    return f"{theirs[-1][0]}:{theirs[-1][1]} in {theirs[-1][2]}" if theirs else ""


def _axes(node: Any, shape: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """The order of axes of a view that only moves them."""
    name = str(node.target)
    if shape is None or not name.startswith("aten."):
        return None
    rank = len(shape)
    if name == "aten.t.default":
        return tuple(reversed(range(rank)))
    if name == "aten.permute.default":
        return tuple(int(axis) % rank for axis in node.args[1])
    if name == "aten.transpose.int" and rank:
        axes = list(range(rank))
        one, other = (int(axis) % rank for axis in node.args[1:3])
        axes[one], axes[other] = axes[other], axes[one]
        return tuple(axes)
    return None


def _leaving(graph: torch.fx.Graph) -> set[Any]:
    """Nodes that the program gets back; what is only saved for the backward pass is not."""
    last = next(reversed(graph.nodes))
    given = last.args[0] if last.args else ()
    outputs = list(given) if isinstance(given, (list, tuple)) else [given]
    seen = last.meta.get("user_visible_output_idxs")
    described = last.meta.get("desc")
    if seen is not None:
        outputs = [outputs[index] for index in seen if index < len(outputs)]
    elif isinstance(described, (list, tuple)) and len(described) == len(outputs):
        outputs = [
            one
            for one, what in zip(outputs, described, strict=True)
            if not type(what).__name__.startswith("SavedFor")
        ]
    return {one for one in outputs if isinstance(one, torch.fx.Node)}
