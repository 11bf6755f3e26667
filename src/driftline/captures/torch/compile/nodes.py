"""Describe the nodes of a compiled graph: module, source line, shape and original operator call.

The descriptions are read from the `meta` of each node, which the compiler fills. This file executes
nothing and changes nothing.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import importlib
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from driftline.captures.torch.compile import call_origins
from driftline.captures.torch.layers import ROOT, ModuleNames
from driftline.captures.torch.tensors import dtype_name
from driftline.graphs.sources.graph_files import GraphNode, Origin

_FILE = re.compile(r'File "([^"\n]+)", line (\d+), in ([^\n]+)')
_TORCH = re.compile(r"[/\\](torch|torchgen)[/\\]")
_OWN = re.compile(r"[/\\]driftline[/\\]captures[/\\]")
_SOURCE = re.compile(r"^(?:[LG]\['?[^\]]*'?\]|self)\.?")
_BRACKETS = re.compile(r"\['?([^'\]]+)'?\]")


CONTROL_FLOW = ("cond", "while_loop", "invoke_subgraph")


class Owner(NamedTuple):
    """A parameter or buffer: the site of its module, and its name in the module."""

    site: str
    name: str


class _Piece(NamedTuple):
    """Values that are equal for all nodes of a graph; see `Naming.describe`."""

    base: str
    number: str
    owners: Sequence[Owner | None]
    within: str
    backward: bool


def compile_id() -> str:
    """Dynamo's name of the code being compiled: `0/0`, `0/1` for its recompilation, `1/0`, ..."""
    guards: Any = importlib.import_module("torch._guards")
    current = guards.CompileContext.current_compile_id()
    return str(current) if current is not None else "-"


class Naming:
    """Names the nodes of one process's graphs.

    Graphs of different pieces of a program may have equally named nodes in one module. Such nodes
    of the later piece get an `@` and the number of the piece. A recompilation is the same piece.

    Args:
        names: The modules of the program.
    """

    def __init__(self, names: ModuleNames) -> None:
        self._names = names
        self._owners: dict[tuple[str, bool], str] = {}

    def describe(
        self,
        graph: torch.fx.Graph,
        base: str,
        piece: str,
        owners: Sequence[Owner | None] = (),
        *,
        backward: bool,
        within: str = "",
    ) -> tuple[GraphNode, ...]:
        """The nodes of a graph, without its output; nodes of control flow bodies come before them.

        Args:
            graph: The graph as it was traced.
            base: Site of nodes that belong to no module: the module that is running.
            piece: Number of the compiled piece of the program.
            owners: For each input of the piece, the parameter or buffer that it is.
            backward: Whether it is a backward graph, whose forward nodes are recomputed.
            within: Prefix of the nodes' names in the body of a control flow operator, with a dot.
        """
        leaving = _leaving(graph) if not within else set()
        piece_of = _Piece(base, piece, owners, within, backward)
        nodes: dict[str, GraphNode] = {}
        for node in graph.nodes:
            if node.op == "output":
                continue
            body = body_of(node)
            # The only user of a body is its control flow operator.
            if body is not None:
                (caller,) = node.users
                inner = f"{within}{node.name}."
                around = self._module(caller.meta, base)
                for inner_node in self.describe(
                    body.graph, around, piece, backward=backward, within=inner
                ):
                    nodes[inner_node.name] = inner_node
            made = self._node(node, piece_of, nodes, leaves=node in leaving)
            nodes[made.name] = made
        return tuple(nodes.values())

    def _module(self, meta: Mapping[str, Any], base: str) -> str:
        """The innermost module around a node."""
        calls = self._calls(_stack(meta), base)
        return calls[-1].partition("@")[0] if calls else base

    def _node(
        self,
        node: Any,
        piece: _Piece,
        nodes: Mapping[str, GraphNode],
        *,
        leaves: bool,
    ) -> GraphNode:
        base, _, owners, within, backward = piece
        meta: Mapping[str, Any] = node.meta
        target = _target(node)
        of = None
        if node.target is operator.getitem and isinstance(node.args[0], torch.fx.Node):
            source = nodes.get(within + node.args[0].name)
            if source is not None and isinstance(node.args[1], int):
                of = source.name, int(node.args[1])
        phase = "forward"
        if backward:
            # The value of a placeholder was saved by the forward pass, not computed here.
            again = node.op != "placeholder" and meta.get("partitioner_tag") == "is_forward"
            phase = "recompute" if again else "backward"
        calls = tuple(self._calls(_stack(meta) or _stack_of_results(node), base))
        module = calls[-1].partition("@")[0] if calls else base
        shape, dtype = _value(meta)
        owner = owner_of(node, owners)
        if owner is not None:
            module = owner.site
        name = within + node.name
        return GraphNode(
            name,
            self._site(module, name, piece.number, backward=backward),
            module,
            target,
            phase,
            tuple(within + source_node.name for source_node in node.all_input_nodes),
            shape,
            dtype,
            _line(meta.get("stack_trace")),
            call_origins.of_node(node) or _of_control_flow(node),
            of,
            _axes(node, shape),
            calls,
            leaves,
            _taken_apart(meta, target),
            owner.name if owner is not None else "",
        )

    def _site(self, module: str, name: str, piece: str, *, backward: bool) -> str:
        site = f"{module}/{name}"
        # The first piece keeps the plain name; a later piece with the same name gets a number.
        owner = self._owners.setdefault((site, backward), piece)
        return site if owner == piece else f"{site}@{piece}"

    def _calls(self, stack: Mapping[str, Any], base: str) -> list[str]:
        """Sites of the modules around a node, outermost first; a repeated call has an `@`."""
        sites: list[str] = []
        for key, (path, _) in stack.items():
            text, _, again = str(key).partition("@")
            place = self._names._places.get(int(text)) if text.isdigit() else None
            site = place.site if place is not None else _by_path(str(path), base)
            # A wrapper has the same site as the module that it wraps.
            if site and (not sites or sites[-1].partition("@")[0] != site):
                sites.append(f"{site}@{again}" if again else site)
        return sites


def body_of(node: Any) -> torch.fx.GraphModule | None:
    """The graph that a node refers to, if it is the body of a control flow operator.

    Graphs of other operators (such as the score function of an attention) are not bodies, because
    they are compiled into the operator's kernel.
    """
    if node.op != "get_attr" or len(node.users) != 1:
        return None
    (caller,) = node.users
    if str(caller.target) not in CONTROL_FLOW:
        return None
    body = getattr(node.graph.owning_module, str(node.target), None)
    return body if isinstance(body, torch.fx.GraphModule) else None


def _of_control_flow(node: Any) -> tuple[Origin, ...]:
    """The origin of a control flow operator or of one of its results.

    The compiler does not trace these as other operators, so they have no stamp. They are counted in
    their graph instead.
    """
    caller, slot = node, "0"
    if node.target is operator.getitem and isinstance(node.args[0], torch.fx.Node):
        caller, slot = node.args[0], str(node.args[1])
    name = str(caller.target)
    if caller.op != "call_function" or name not in CONTROL_FLOW:
        return ()
    alike = [
        other for other in caller.graph.nodes if other.op == caller.op and str(other.target) == name
    ]
    return (Origin(f"control.{name}.default", alike.index(caller), slot, len(alike)),)


def owners_of(names: ModuleNames, inputs: Sequence[Any]) -> list[Owner | None]:
    """For each input of a piece of the program, the parameter or buffer that it is, or None."""
    owner_by_id: dict[int, Owner] = {}
    for root in names.roots:
        module = root.module()
        for part in module.modules() if module is not None else ():
            place = names._places.get(id(part))
            for name, tensor in (*part._parameters.items(), *part._buffers.items()):
                if place is not None and tensor is not None:
                    owner_by_id.setdefault(id(tensor), Owner(place.site, name))
    return [owner_by_id.get(id(tensor_given)) for tensor_given in inputs]


def owner_of(node: Any, owners: Sequence[Owner | None]) -> Owner | None:
    """The parameter or buffer that a placeholder is, or None.

    The compiler's description of the placeholder has its position among the inputs of the piece.
    """
    if not is_plain_input(node):
        return None
    place = getattr(node.meta["desc"], "idx", None)
    return owners[place] if isinstance(place, int) and place < len(owners) else None


def is_plain_input(node: Any) -> bool:
    """Whether a node is an input of the piece of the program that was compiled."""
    return node.op == "placeholder" and type(node.meta.get("desc")).__name__ == "PlainAOTInput"


def _stack(meta: Mapping[str, Any]) -> Mapping[str, Any]:
    return (
        meta.get("nn_module_stack")
        or meta.get("fwd_nn_module_stack")
        or meta.get(call_origins.STACK)
        or {}
    )


def _stack_of_results(node: Any) -> Mapping[str, Any]:
    """The modules around a node that a compiler pass inserted, found from its results' nodes.

    A pass copies the modules of the values that it replaces, but not to a node with several
    results.
    """
    stacks = [_stack(user.meta) for user in node.users if user.target is operator.getitem]
    is_same = len(stacks) == len(node.users) and all(stack == stacks[0] for stack in stacks)
    return stacks[0] if stacks and is_same else {}


def _by_path(path: str, base: str) -> str:
    """The site of a module by the compiler's name for it, such as `L['self'].layers.0`."""
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
    """The operator from whose decomposition a node comes; empty if it is that operator itself."""
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
    """The innermost line of a stack trace that belongs to the program."""
    if not isinstance(trace, str):
        return ""
    frames = [frame for frame in _FILE.findall(trace) if not _OWN.search(frame[0])]
    # If there is none, a line inside torch is used.
    program_frames = [frame for frame in frames if not _TORCH.search(frame[0])] or frames
    return (
        f"{program_frames[-1][0]}:{program_frames[-1][1]} in {program_frames[-1][2]}"
        if program_frames
        else ""
    )


def _axes(node: Any, shape: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """The order of axes of a view that only permutes them; None for any other node."""
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
        first, other = (int(axis) % rank for axis in node.args[1:3])
        axes[first], axes[other] = axes[other], axes[first]
        return tuple(axes)
    return None


def _leaving(graph: torch.fx.Graph) -> set[Any]:
    """Outputs that are returned to the program, not only saved for the backward pass."""
    last = next(iter(reversed(graph.nodes)))  # in torch 2.11 `reversed` returns no iterator
    returned = last.args[0] if last.args else ()
    outputs = list(returned) if isinstance(returned, (list, tuple)) else [returned]
    # The compiler either marks the visible outputs or describes each output.
    seen = last.meta.get("user_visible_output_idxs")
    described = last.meta.get("desc")
    if seen is not None:
        outputs = [outputs[index] for index in seen if index < len(outputs)]
    elif isinstance(described, (list, tuple)) and len(described) == len(outputs):
        outputs = [
            output
            for output, what in zip(outputs, described, strict=True)
            if not type(what).__name__.startswith("SavedFor")
        ]
    return {output for output in outputs if isinstance(output, torch.fx.Node)}
