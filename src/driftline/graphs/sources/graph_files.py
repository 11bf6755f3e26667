"""Lines of `graphs.jsonl`: a compiled graph, its nodes, its kernels and the results of each kernel.

Lines hold descriptions only: the value of a node is the tensor at the node's site. This file does
not know how a graph is compiled or executed. Files may come from others, so damaged lines are
skipped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

# NaN is not JSON; a non-finite error is written as null.
_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
_LONGEST_LINE = 1 << 27
INSIDE = " inside "
"""Separates operator and kernel in the class of a tensor that is inside a fused kernel.

The tensor's value was recomputed outside of the kernel, from the kernel's inputs.
"""
PARAMETER = "parameter "
"""Start of the class of a node that stands for a parameter or buffer; its name follows."""


class Origin(NamedTuple):
    """The operator call that makes a node's result, counted while the program was traced.

    Attributes:
        operator: Name with its overload: `aten.silu.default`.
        nth: Number of the call among those of this operator, in any overload, in its module and
            phase.
        slot: Result of the call that is meant.
        total: Number of such calls.
    """

    operator: str
    nth: int
    slot: str = "0"
    total: int = 0

    @property
    def name(self) -> str:
        """The operator without its overload."""
        return self.operator.rpartition(".")[0]


class GraphNode(NamedTuple):
    """One node.

    Attributes:
        name: Name given by the compiler, unique in its graph. In the body of a control flow
            operator it begins with the body's name and a dot: `true_graph_0.sin`.
        site: Site of its value in the run: module, slash, name.
        module: Module whose forward made it.
        target: The operator, `placeholder`, or another callee.
        phase: forward, backward, or recompute for values that a backward graph computes again.
        inputs: Nodes that it reads, in order.
        shape: Shape of its value; None if it has no shape or a variable one.
        dtype: Type of its value.
        line: Source line: `file:number in function`.
        origins: Operator calls whose results it represents.
        of: For one of several results: the node that makes all of them, and the index.
        axes: For a view that only permutes axes: their order.
        calls: Modules whose calls contain it, outermost first; from its second call on, a module
            has the suffix `@n`.
        leaves: Whether it is returned to the program, and not only kept for the backward pass.
        operator: The operator that the compiler decomposed into it, if there is one.
        parameter: Name of the parameter or buffer of its module that it stands for.
    """

    name: str
    site: str
    module: str
    target: str
    phase: str = "forward"
    inputs: tuple[str, ...] = ()
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    line: str = ""
    origins: tuple[Origin, ...] = ()
    of: tuple[str, int] | None = None
    axes: tuple[int, ...] | None = None
    calls: tuple[str, ...] = ()
    leaves: bool = False
    operator: str = ""
    parameter: str = ""

    @property
    def body(self) -> str:
        """The body of a control flow operator that contains it; empty if there is none."""
        return self.name.rpartition(".")[0]


class Kept(NamedTuple):
    """A result that a kernel left in memory.

    Attributes:
        buffer: The compiler's name of the memory.
        site: Site of its value in the run.
        node: Node with this value; empty if no node has exactly this value.
        nodes: All nodes that were computed for it.
    """

    buffer: str
    site: str
    node: str = ""
    nodes: tuple[str, ...] = ()


class Kernel(NamedTuple):
    """A kernel, generated or from a library, and its results.

    Attributes:
        name: Its name.
        kept: Results that it left in memory.
        nodes: All nodes that it computes, kept or not.
    """

    name: str
    kept: tuple[Kept, ...] = ()
    nodes: tuple[str, ...] = ()


class NodeError(NamedTuple):
    """A node whose output is wrong for its inputs, in one step.

    Attributes:
        graph: Number of its graph.
        node: Name of the node in the graph.
        step: The step.
        error: relative_l2; infinite if it could not be measured.
        kernel: Whether the generated kernel differs from its nodes computed one by one. Otherwise
            the compiler's decomposition differs from the operator.
    """

    graph: int
    node: str
    step: int
    error: float
    kernel: bool = False

    def to_line(self) -> str:
        error = self.error if math.isfinite(self.error) else None
        data = {"off": self.graph, "node": self.node, "step": self.step, "error": error}
        return _encode({**data, "kernel": self.kernel}) + "\n"


class Graph(NamedTuple):
    """One compiled graph.

    Attributes:
        number: Number in the order of compilation, in its process.
        compile_id: Dynamo's id: the piece of code, and the index of its compilation.
        kind: forward, backward, or inference.
        engine: `fx`: nodes were executed one by one; `inductor`: kernels ran.
        backend: The backend that the program requested.
        base: The module that executed it; nodes outside of modules belong to it.
        nodes: Nodes, in order.
        kernels: Kernels, in order; empty for `fx`.
    """

    number: int
    compile_id: str
    kind: str
    engine: str
    backend: str = ""
    base: str = ""
    nodes: tuple[GraphNode, ...] = ()
    kernels: tuple[Kernel, ...] = ()

    @property
    def piece(self) -> str:
        """The piece of code; recompilations have the same piece."""
        return self.compile_id.partition("/")[0]

    def to_line(self) -> str:
        data: dict[str, Any] = {
            "graph": self.number,
            "compile_id": self.compile_id,
            "kind": self.kind,
            "engine": self.engine,
            "backend": self.backend,
            "base": self.base,
            "nodes": [_short(node) for node in self.nodes],
        }
        if self.kernels:
            data["kernels"] = [
                {
                    "name": kernel.name,
                    "kept": [_short(kept) for kept in kernel.kept],
                    "nodes": kernel.nodes,
                }
                for kernel in self.kernels
            ]
        return _encode(data) + "\n"


def rebased(graph: Graph, base: str) -> Graph:
    """The graph as another module executes it: equal layers share one compiled graph."""
    nodes = tuple(
        # Sites begin with their module, so moving the module moves the site.
        node._replace(
            module=_moved(node.module, graph.base, base),
            site=_moved(node.module, graph.base, base) + node.site[len(node.module) :],
            calls=tuple(_moved(call, graph.base, base) for call in node.calls),
        )
        for node in graph.nodes
    )
    sites = {old.site: new.site for old, new in zip(graph.nodes, nodes, strict=True)}
    kernels = tuple(
        kernel._replace(
            kept=tuple(kept._replace(site=_site_of(kept, sites)) for kept in kernel.kept)
        )
        for kernel in graph.kernels
    )
    return graph._replace(base=base, nodes=nodes, kernels=kernels)


def _moved(module: str, old: str, new: str) -> str:
    """A module's name with another base; modules outside of the old base stay."""
    # `@n` marks a repeated call and stays after the new name.
    if module.partition("@")[0] == old:
        return new + module[len(old) :]
    return new + module[len(old) :] if module.startswith(f"{old}.") else module


def _site_of(kept: Kept, sites: Mapping[str, str]) -> str:
    site, colon, buffer = kept.site.rpartition(":")
    return sites.get(kept.site) or f"{sites.get(site, site)}{colon}{buffer}"


def _short(value: Any) -> dict[str, Any]:
    """Fields that differ from their defaults."""
    # Defaults are omitted, because most fields of most nodes have them.
    defaults = value._field_defaults
    return {
        name: part
        for name, part in zip(value._fields, value, strict=True)
        if name not in defaults or part != defaults[name]
    }


def read_graphs(text: str) -> Iterator[Graph]:
    """The graphs of a file, in order; damaged lines are skipped."""
    for line in text.splitlines():
        # Errors are in the same file; their lines begin with a key of their own.
        if not line.strip() or len(line) > _LONGEST_LINE or line.startswith('{"off"'):
            continue
        try:
            yield _graph(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue


def read_errors(text: str) -> Iterator[NodeError]:
    """The faulty nodes of a file, in order; damaged lines are skipped."""
    for line in text.splitlines():
        if not line.startswith('{"off"') or len(line) > _LONGEST_LINE:
            continue
        try:
            data = json.loads(line)
            error = math.inf if data["error"] is None else float(data["error"])
            yield NodeError(
                int(data["off"]),
                str(data["node"]),
                int(data["step"]),
                error,
                bool(data.get("kernel", False)),
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue


def _graph(data: Mapping[str, Any]) -> Graph:
    return Graph(
        int(data["graph"]),
        str(data["compile_id"]),
        str(data["kind"]),
        str(data["engine"]),
        str(data.get("backend", "")),
        str(data.get("base", "")),
        tuple(_node(node) for node in data.get("nodes", ())),
        tuple(
            Kernel(
                str(kernel["name"]),
                tuple(_kept(kept) for kept in kernel.get("kept", ())),
                _texts(kernel.get("nodes", ())),
            )
            for kernel in data.get("kernels", ())
        ),
    )


def _node(data: Mapping[str, Any]) -> GraphNode:
    shape, of, axes = data.get("shape"), data.get("of"), data.get("axes")
    return GraphNode(
        str(data["name"]),
        str(data["site"]),
        str(data["module"]),
        str(data["target"]),
        str(data.get("phase", "forward")),
        _texts(data.get("inputs", ())),
        None if shape is None else _numbers(shape),
        str(data.get("dtype", "")),
        str(data.get("line", "")),
        tuple(
            Origin(str(origin[0]), int(origin[1]), str(origin[2]), int(origin[3]))
            for origin in data.get("origins", ())
        ),
        None if of is None else (str(of[0]), int(of[1])),
        None if axes is None else _numbers(axes),
        _texts(data.get("calls", ())),
        bool(data.get("leaves", False)),
        str(data.get("operator", "")),
        str(data.get("parameter", "")),
    )


def _kept(data: Mapping[str, Any]) -> Kept:
    return Kept(
        str(data["buffer"]),
        str(data["site"]),
        str(data.get("node", "")),
        _texts(data.get("nodes", ())),
    )


def _texts(values: object) -> tuple[str, ...]:
    return tuple(str(value) for value in cast("Sequence[object]", values))


def _numbers(values: object) -> tuple[int, ...]:
    return tuple(int(value) for value in cast("Sequence[int]", values))
