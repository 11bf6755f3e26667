"""Record the values of compiled graphs in a session.

A graph is described once, when it is compiled; its values are recorded at every execution. This
file knows the session and the names of nodes, but not how the nodes are executed.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn

from driftline.captures.recorder import TensorAddress
from driftline.captures.torch.compile.nodes import (
    Naming,
    Owner,
    is_plain_input,
    owner_of,
    owners_of,
)
from driftline.captures.torch.operators.dispatch import has_values
from driftline.captures.torch.operators.sites import PROGRAM
from driftline.graphs.sources.graph_files import (
    INSIDE,
    PARAMETER,
    Graph,
    GraphNode,
    Kept,
    Kernel,
    NodeError,
    rebased,
)

Write = Callable[[str], None]
# Limits the table for programs in which backward passes never run.
_MOST_MADE = 200_000
_C: Any = torch._C
_autograd: Any = torch.autograd


class Compiled:
    """One graph in one session.

    Attributes:
        graph: Its description.
        nodes: Its nodes by name.
        kept: For each buffer, the kernel that fills it and the description of its value.
        elsewhere: Descriptions of the same graph for other modules that execute it, by site; layers
            of equal structure share one compiled graph.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes: dict[str, GraphNode] = {node.name: node for node in graph.nodes}
        self.kept: dict[str, tuple[str, Kept]] = {
            kept.buffer: (kernel.name, kept) for kernel in graph.kernels for kept in kernel.kept
        }
        self.elsewhere: dict[str, Compiled] = {graph.base: self}


class Execution:
    """One execution of a graph in a step that is captured."""

    __slots__ = ("_recorder", "compiled", "step")

    def __init__(self, recorder: GraphRecorder, compiled: Compiled, step: int) -> None:
        self._recorder = recorder
        self.compiled = compiled
        self.step = step

    def take_node(self, name: str, value: Any) -> None:
        """Record the value of a node."""
        node = self.compiled.nodes.get(name)
        if node is not None:
            what = f"{PARAMETER}{node.parameter}" if node.parameter else node.target
            self._take(node, node.site, value, what)

    def take_kept(self, buffer: str, value: Any) -> None:
        """Record what a kernel wrote, or an input of the graph; never raises."""
        kernel, kept = self.compiled.kept.get(buffer, ("", None))
        if kept is None:
            self._recorder.session.guarded(buffer, self.take_node, buffer, value)
            return
        node = self.compiled.nodes.get(kept.node or kept.nodes[-1])
        if node is not None:
            guarded = self._recorder.session.guarded
            guarded(kept.site, self._take, node, kept.site, value, kernel)

    def take_inside(self, name: str, kernel: str, value: Any) -> None:
        """Record the value of a node inside a fused kernel; never raises."""
        node = self.compiled.nodes.get(name)
        # A recomputed value was recorded in the forward pass already.
        if node is not None and node.phase != "recompute":
            what = f"{node.target}{INSIDE}{kernel}"
            self._recorder.inside += 1
            self._recorder.session.guarded(node.site, self._take, node, node.site, value, what)

    def take_error(self, name: str, error: float, *, kernel: bool) -> None:
        """Record the error of a node's value: its distance from the correct one for its inputs."""
        node = self.compiled.nodes.get(name)
        if node is not None:
            number = self.compiled.graph.number
            operator = node.origins[0].operator if node.origins else node.target
            # The first error of a node is reported; later steps repeat it.
            self._recorder.off.setdefault((node.site, node.phase), (operator, node.line, error))
            self._recorder.write(NodeError(number, name, self.step, error, kernel).to_line())

    def _take(self, node: GraphNode, site: str, value: Any, class_name: str) -> None:
        tensors = [named for named in _tensors(value, "") if has_values(named[1])]
        if not tensors:
            return
        visit = self._recorder.count(site, self.step, node.phase)
        for slot, tensor in tensors:
            address = TensorAddress(
                site, "output", slot or "0", self.step, visit, node.phase, class_name=class_name
            )
            self._recorder.session.emit(address, tensor)


class GraphRecorder:
    """The graphs of one session.

    Args:
        session: The capture.
        write: Writes a line of the list of graphs; None if the sink stores no lists.
    """

    def __init__(self, session: Any, write: Write | None) -> None:
        self.session = session
        self._write = write
        self._naming = Naming(session.names)
        self._visits: dict[tuple[str, str], tuple[int, int]] = {}
        self._bases: dict[str, str] = {}
        self._owners: dict[str, Sequence[Owner | None]] = {}
        self._parts: dict[tuple[str, bool], int] = {}
        self._made: dict[int, str] = {}
        self._lines = 0
        self.off: dict[tuple[str, str], tuple[str, str, float]] = {}
        self.inside = 0
        self.graphs = 0
        self.kernels = 0
        self.nodes = 0

    def totals(self) -> str:
        """Numbers of graphs and nodes, as text for an event."""
        return f"graphs: {self.graphs}, nodes: {self.nodes}"

    def meet(
        self, compile_id: str, inputs: Sequence[Any], models: Sequence[nn.Module] = ()
    ) -> None:
        """Prepare for graphs of a piece of the program that is about to be compiled.

        Args:
            compile_id: Dynamo's name of the piece.
            inputs: The inputs for which it is compiled.
            models: Models that it calls.
        """
        self.base(compile_id)
        # Outside of module calls nothing else would name these models.
        if self.session.current_frame() is None:
            for model in models:
                self.session.names.of(model, None)
        self._owners[compile_id] = owners_of(self.session.names, inputs)

    def describe(
        self, graph: torch.fx.Graph, compile_id: str, base: str, *, backward: bool
    ) -> tuple[GraphNode, ...]:
        piece = compile_id.partition("/")[0]
        part = self._parts.get((compile_id, backward), 0)
        self._parts[compile_id, backward] = part + 1
        if part:  # the piece was split; its parts may have equally named nodes in one module
            piece += f".{part}"
        owners = self._known_owners(graph, compile_id, backward=backward)
        return self._naming.describe(graph, base, piece, owners, backward=backward)

    def parameters(self, graph: torch.fx.Graph, compile_id: str, *, backward: bool) -> set[str]:
        """Names of the graph inputs that are parameters or buffers of modules."""
        owners = self._known_owners(graph, compile_id, backward=backward)
        return {node.name for node in graph.nodes if owner_of(node, owners) is not None}

    def _known_owners(
        self, graph: torch.fx.Graph, compile_id: str, *, backward: bool
    ) -> Sequence[Owner | None]:
        """The parameters or buffers that are the inputs of a graph, by position.

        If a piece was split into several graphs, the inputs of each are numbered anew, and their
        positions would name the wrong parameters. Then there are none.
        """
        owners = self._owners.get(compile_id, ())
        if not backward and len(owners) != sum(is_plain_input(node) for node in graph.nodes):
            owners = self._owners[compile_id] = ()
        return owners

    def base(self, compile_id: str) -> str:
        """Site of nodes that belong to no module: the module that ran when the code was first seen.

        It is remembered, because backward graphs are compiled later, when no module is running.
        """
        base_site = self._bases.get(compile_id)
        if base_site is None:
            frame = self.session.current_frame()
            base_site = self._bases[compile_id] = frame.site if frame is not None else PROGRAM
        return base_site

    def add(
        self,
        nodes: Sequence[GraphNode],
        compile_id: str,
        kind: str,
        engine: str,
        backend: str,
        kernels: Sequence[Kernel] = (),
    ) -> Compiled:
        base = self.base(compile_id)
        graph = Graph(
            self._lines, compile_id, kind, engine, backend, base, tuple(nodes), tuple(kernels)
        )
        self.graphs += 1
        self.nodes += len(nodes)
        self.kernels += len(kernels)
        return self._listed(graph)

    def _listed(self, graph: Graph) -> Compiled:
        self._lines += 1
        self.write(graph.to_line())
        return Compiled(graph)

    def write(self, line: str) -> None:
        """Write a line of the list of graphs."""
        if self._write is not None:
            self._write(line)

    def execution(self, compiled: Compiled) -> Execution | None:
        """Begin an execution of a graph; None if its step is not captured."""
        session = self.session
        if not session.running:
            return None
        frame = session.current_frame()
        site = self._caller(compiled.graph, frame.site if frame is not None else "")
        step = frame.step if frame is not None else session.step
        # A compiled training step calls no module, so the step clock is notified here.
        if frame is None and compiled.graph.kind == "forward":
            session.clock.trained_by_graph()
        if not session.wants_step(step):
            return None
        # In a program whose modules are all compiled, steps are noted here.
        if frame is None and not session.execution_order:
            session.steps_seen.add(step)
            session.outside += 1
        at_site = compiled.elsewhere.get(site)
        if at_site is None:
            # Each of several layers that share one compiled graph gets its own description.
            at_site = compiled.elsewhere[site] = self._listed(
                rebased(compiled.graph, site)._replace(number=self._lines)
            )
        return Execution(self, at_site, step)

    def _caller(self, graph: Graph, now: str) -> str:
        """The site of the module that executes a graph.

        No module executes a backward graph. It belongs to the module that executed the forward
        graph and thereby made the autograd node. That node got its sequence number just before the
        forward graph was executed.
        """
        if graph.kind == "backward":
            node = _C._current_autograd_node()
            return self._made.get(node._sequence_nr() if node is not None else -1, graph.base)
        if graph.kind == "forward":
            if len(self._made) >= _MOST_MADE:
                self._made.clear()
            # The autograd node got its number just before this graph is executed.
            self._made[_autograd._get_sequence_nr() - 1] = now or graph.base
        return now or graph.base

    def count(self, site: str, step: int, phase: str) -> int:
        last, count = self._visits.get((site, phase), (step, -1))
        visit = count + 1 if last == step else 0
        self._visits[site, phase] = (step, visit)
        return visit


def _tensors(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(cast("Sequence[Any]", value)):
            yield from _tensors(part, f"{path}.{index}" if path else str(index))
