"""Where the values of compiled graphs go: into the sessions that asked for them.

A graph is described once, when it is compiled; its values come with every execution. Knows the
session and the names of nodes, not who executes them.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn

from driftline.adapters.torch.dispatch import has_values
from driftline.adapters.torch.graphs.nodes import Naming
from driftline.adapters.torch.snapshot import is_zero
from driftline.adapters.torch.whereabouts import PROGRAM
from driftline.runs.graphs import Graph, GraphNode, Kernel

Write = Callable[[str], None]


class Compiled:
    """One graph of one session, and what is known of it.

    Attributes:
        graph: Its description.
        nodes: Its nodes by name.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes: dict[str, GraphNode] = {node.name: node for node in graph.nodes}


class Execution:
    """One execution of a graph in a step that is wanted."""

    __slots__ = ("_recorder", "step", "weights")

    def __init__(self, recorder: Recorder, step: int, weights: frozenset[int]) -> None:
        self._recorder = recorder
        self.step = step
        self.weights = weights

    @property
    def session(self) -> Any:
        return self._recorder.session

    def take(self, node: GraphNode, value: Any, class_name: str, site: str = "") -> None:
        """Show what a node gave; parameters and what only shows them are left out."""
        session, site = self._recorder.session, site or node.site
        tensors = [one for one in _tensors(value, "") if self._is_wanted(one[1])]
        if not tensors:
            return
        visit = self._recorder.count(site, self.step, node.phase)
        for slot, tensor in tensors:
            session.emit(
                site,
                "output",
                slot or "0",
                tensor,
                class_name=class_name,
                visit=visit,
                phase=node.phase,
                step=self.step,
            )

    def _is_wanted(self, tensor: torch.Tensor) -> bool:
        if not has_values(tensor):
            return False
        if tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, nn.Parameter):
            return True
        return is_zero(tensor) or tensor.untyped_storage().data_ptr() not in self.weights


class Recorder:
    """The graphs of one session.

    Args:
        session: The capture.
        write: Takes a line for the list of graphs; None where the sink keeps no lists.
    """

    def __init__(self, session: Any, write: Write | None) -> None:
        self.session = session
        self._write = write
        self._naming = Naming(session.names)
        self._visits: dict[tuple[str, str], tuple[int, int]] = {}
        self._bases: dict[str, str] = {}
        self.graphs = 0
        self.kernels = 0
        self.nodes = 0

    def describe(
        self, graph: torch.fx.Graph, compile_id: str, base: str, *, backward: bool
    ) -> tuple[GraphNode, ...]:
        piece = compile_id.partition("/")[0]
        return self._naming.describe(graph, base, piece, backward=backward)

    def base(self, compile_id: str) -> str:
        """Where nodes of no module belong: to the module that ran when the code was first met.

        Backward graphs are compiled later, when no module is running.
        """
        known = self._bases.get(compile_id)
        if known is None:
            frame = self.session.current_frame()
            known = self._bases[compile_id] = frame.site if frame is not None else PROGRAM
        return known

    def add(
        self,
        nodes: Sequence[GraphNode],
        compile_id: str,
        kind: str,
        engine: str,
        backend: str,
        kernels: Sequence[Kernel] = (),
    ) -> Compiled:
        graph = Graph(self.graphs, compile_id, kind, engine, backend, tuple(nodes), tuple(kernels))
        self.graphs += 1
        self.nodes += len(nodes)
        self.kernels += len(kernels)
        if self._write is not None:
            self._write(graph.to_line())
        return Compiled(graph)

    def execution(self) -> Execution | None:
        """An execution begins; None where its step is not wanted."""
        session = self.session
        if not session.running:
            return None
        frame = session.current_frame()
        step = frame.step if frame is not None else session.step
        if not session.wants_step(step):
            return None
        if frame is None and not session.execution_order:
            session.steps_seen.add(step)
            session.outside += 1
        return Execution(self, step, frozenset(self._weights()))

    def count(self, site: str, step: int, phase: str) -> int:
        last, count = self._visits.get((site, phase), (step, -1))
        visit = count + 1 if last == step else 0
        self._visits[site, phase] = (step, visit)
        return visit

    def _weights(self) -> Iterator[int]:
        for root in self.session.names.roots:
            module = root.module()
            if module is None:
                continue
            for tensor in (*module.parameters(), *module.buffers()):
                if type(tensor) in (torch.Tensor, nn.Parameter) and (
                    pointer := tensor.untyped_storage().data_ptr()
                ):
                    yield pointer


def _tensors(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(cast("Sequence[Any]", value)):
            yield from _tensors(part, f"{path}.{index}" if path else str(index))
