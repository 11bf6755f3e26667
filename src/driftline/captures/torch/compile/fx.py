"""Compiled graphs executed node by node by torch's own operators.

The graph that Dynamo found is split into forward and backward by AOTAutograd, without decomposing
operators, and each node is then executed as the operator it names, in order. The backend that the
program asked for is not called: this shows what the graph means, not what a compiler made of it.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from driftline.captures.torch.compile.graph_recorder import Compiled, Execution, GraphRecorder
from driftline.captures.torch.compile.nodes import body_of, compile_id
from driftline.captures.torch.operators.dispatch import hide_from_compiler

Announce = Callable[[], Sequence[GraphRecorder]]


def compile_by_nodes(
    graph: fx.GraphModule, inputs: Sequence[Any], backend: str, recorders: Announce
) -> Callable[..., Any]:
    """What stands in for a backend.

    Args:
        graph: As Dynamo gives it to backends.
        inputs: Its example inputs.
        backend: Name of the backend that the program asked for.
        recorders: Who is shown the values, asked when a graph is described.
    """
    # Imported here: they load the compiler, which is there when this is called.
    common: Any = importlib.import_module("torch._dynamo.backends.common")
    partitioners: Any = importlib.import_module("torch._functorch.partitioners")
    bases: list[tuple[GraphRecorder, str]] = []
    for recorder in recorders():
        # Now, while the module that runs is known; graphs are described later.
        recorder.meet(compile_id(), inputs)
        bases.append((recorder, recorder.base(compile_id())))

    def kind(name: str, *, backward: bool = False) -> Callable[..., Any]:
        def compiler(module: fx.GraphModule, example: Sequence[Any]) -> Callable[..., Any]:
            if backward:
                _without_idle(module)
            shown = [
                (
                    recorder,
                    recorder.add(
                        recorder.describe(module.graph, compile_id(), base, backward=backward),
                        compile_id(),
                        name,
                        "fx",
                        backend,
                    ),
                )
                for recorder, base in bases
            ]
            return _boxed(ByNodes(module, shown))

        return compiler

    compiler = common.aot_autograd(
        fw_compiler=kind("forward"),
        bw_compiler=kind("backward", backward=True),
        inference_compiler=kind("inference"),
        # The default partition recomputes nothing, so every node runs once.
        partition_fn=partitioners.default_partition,
        keep_inference_input_mutations=True,
    )
    return compiler(graph, inputs)


def _without_idle(module: fx.GraphModule) -> None:
    """Take forward nodes out of a backward graph that nobody reads.

    With `fallback_random` torch leaves random operators there: executed again for nothing, they
    would draw numbers that the program draws next.
    """
    for node in reversed(module.graph.nodes):
        idle = node.op == "call_function" and not node.users
        if idle and node.meta.get("partitioner_tag") == "is_forward":
            module.graph.erase_node(node)
    module.recompile()


def _boxed(call: Callable[..., Any]) -> Callable[..., Any]:
    """Takes its arguments as one list, which is emptied: so nothing lives longer than it must."""

    def boxed(arguments: list[Any]) -> Any:
        values = list(arguments)
        arguments.clear()
        return call(*values)

    boxed.__dict__["_boxed_call"] = True  # says so to AOTAutograd
    hide_from_compiler(boxed)
    return boxed


class ByNodes(fx.Interpreter):
    """Executes a graph and shows every value."""

    def __init__(self, module: fx.GraphModule, shown: list[tuple[GraphRecorder, Compiled]]) -> None:
        super().__init__(module)
        self._shown = shown
        self._plain = module

    def __call__(self, *arguments: Any) -> Any:
        executions = [
            execution
            for recorder, compiled in self._shown
            if (execution := recorder.execution(compiled)) is not None
        ]
        # A step that nobody wants runs the plain graph.
        if not executions:
            return self._plain(*arguments)
        return _Run(self.module, executions).run(*arguments)


class _Run(fx.Interpreter):
    """One execution; a graph may be under way in two threads.

    Args:
        module: The graph.
        executions: Who is shown the values.
        within: What comes before the names of nodes, in the body of a control flow operator.
    """

    def __init__(self, module: Any, executions: list[Execution], within: str = "") -> None:
        super().__init__(module)
        self._executions = executions
        self._within = within

    def run_node(self, n: fx.Node) -> Any:
        body = body_of(n)
        if body is not None:
            return self._shown(body, f"{self._within}{n.name}.")
        value = super().run_node(n)
        # An item of a tuple is recorded with the tuple.
        if n.op != "output" and n.target is not operator.getitem:
            for execution in self._executions:
                execution.take_node(self._within + n.name, value)
        return value

    def _shown(self, body: fx.GraphModule, within: str) -> Callable[..., Any]:
        """A body that shows its nodes, too, as often as its operator executes it."""

        def run(*arguments: Any) -> Any:
            return _Run(body, self._executions, within).run(*arguments)

        hide_from_compiler(run)
        return run


hide_from_compiler(ByNodes.__call__, _Run.run_node)
