"""The recorded calls of a program as a graph: modules contain operators, and memory gives the
edges.

The graph shows only the forward pass of one step. Operators of the backward pass are not nested in
modules and are left out, as are later operators outside of modules, which belong to the optimizer.
This file knows the lines of `calls.jsonl`, but not where they are stored.
"""

from __future__ import annotations

from collections.abc import Sequence

from driftline.graphs.model import DEEPEST, Graph, GraphNode, TensorInfo
from driftline.runs.sidecars.calls import Call, CallTensor


def calls_graph(calls: Sequence[Call], step: int | None = None) -> Graph | None:
    """The graph of one step; None if no call of a forward pass is listed.

    Args:
        calls: Calls of one process.
        step: The step; None for the first step that has calls.
    """
    steps = sorted({call.step for call in calls if call.phase == "forward"})
    if not steps:
        return None
    chosen = steps[0] if step is None else step
    backward = [call.number for call in calls if call.step == chosen and call.phase != "forward"]
    listed = _forward_calls(calls, chosen, backward)
    if not listed:
        return None
    builder = _GraphBuilder(listed)
    tops = [call for call in listed if builder.parent(call) is None]
    nodes = tuple(builder.node(call) for call in tops)
    notes: list[str] = []
    if backward:
        notes.append("the operators of backward passes and optimizers are not in the graph")
    if len(steps) > 1:
        notes.append(f"this is step {chosen} of {len(steps)}")
    graph = Graph("program", "Program", nodes, (), (), builder.tensors, "aten", tuple(notes))
    modules = [index for index, call in enumerate(tops) if call.kind == "module"]
    return _of_model(graph, builder, tops, modules[0]) if len(modules) == 1 else graph


def _forward_calls(calls: Sequence[Call], step: int, backward: Sequence[int]) -> list[Call]:
    """The calls of a step's forward pass in order, without those of the optimizer."""
    listed = [call for call in calls if call.phase == "forward" and call.step == step]
    # Numbers give the order of the calls, whatever the order of the lines.
    listed.sort(key=lambda call: call.number)
    if not backward or not any(call.kind == "module" for call in listed):
        return listed
    # Operators outside of modules that start after the backward pass belong to the optimizer.
    turn = min(backward)
    return [c for c in listed if c.number < turn or c.inside is not None or c.kind == "module"]


def _of_model(graph: Graph, builder: _GraphBuilder, tops: Sequence[Call], index: int) -> Graph:
    """The graph of a program with a single model; the parts of the model are the first level."""
    root, nodes = tops[index], graph.nodes
    if nodes[index].children:
        nodes = (*nodes[:index], *nodes[index].children, *nodes[index + 1 :])
    inputs = dict.fromkeys(builder.name_of(tensor) for tensor in root.inputs)
    # Operators after the model, such as a loss, make outputs of the program as well.
    after = tops[index + 1 :]
    read = {builder.name_of(tensor) for call in after for tensor in call.inputs}
    last = [name for call in after for name in builder.made(call) if name not in read]
    outputs = dict.fromkeys((*builder.made(root), *last))
    return graph._replace(
        name=root.class_name,
        kind=root.class_name,
        nodes=nodes,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
    )


class _GraphBuilder:
    """Makes nodes from calls, and names their tensors."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.tensors: dict[str, TensorInfo] = {}
        self._calls = {call.number: call for call in calls}
        self._children: dict[int, list[Call]] = {}
        self._above: dict[int, int] = {}
        depth: dict[int, int] = {}
        for call in calls:
            above = call.inside
            # If a killed program did not list the parent, or the parent is too deep for a graph,
            # the next enclosing call becomes the parent.
            if above is None or above not in depth or depth[above] >= DEEPEST - 2:
                above = self._above.get(above) if above in depth else None
            depth[call.number] = depth[above] + 1 if above is not None else 0
            if above is not None:
                self._above[call.number] = above
                self._children.setdefault(above, []).append(call)

    def parent(self, call: Call) -> int | None:
        """The module call that contains a call."""
        return self._above.get(call.number)

    def node(self, call: Call) -> GraphNode:
        # A module without listed operators (it only makes views) is a node itself.
        children = tuple(self.node(child) for child in self._children.get(call.number, ()))
        # A tensor that is passed twice is one edge.
        inputs = tuple(dict.fromkeys(self.name_of(tensor) for tensor in call.inputs))
        return GraphNode(
            _name(call),
            call.class_name,
            inputs,
            tuple(dict.fromkeys(self.made(call))),
            call.param,
            children,
            call.site,
            call.visit,
        )

    def made(self, call: Call) -> list[str]:
        if call.kind == "module":
            return [self.name_of(tensor) for tensor in call.outputs]
        # Operators make new tensors, so their outputs are named after the call.
        return [
            self._named(f"{_name(call)}_output_{tensor.slot}", tensor) for tensor in call.outputs
        ]

    def name_of(self, tensor: CallTensor) -> str:
        source = tensor.source
        if source is None:
            return self._named("(outside)", tensor)
        if isinstance(source, str):
            return self._named(source, tensor)
        maker = self._calls.get(source[0])
        if maker is None:  # the maker belongs to an earlier step, or is not listed
            return self._named(f"call_{source[0]}_output_{source[1]}", tensor)
        name = f"{_name(maker)}_output_{source[1]}"
        return name if name in self.tensors else self._named(name, tensor)

    def _named(self, name: str, tensor: CallTensor) -> str:
        self.tensors.setdefault(name, TensorInfo(tensor.dtype, tensor.shape))
        return name


def _name(call: Call) -> str:
    return f"{call.name}#{call.visit}" if call.kind == "module" and call.visit else call.name
