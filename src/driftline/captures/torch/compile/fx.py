"""Execute compiled graphs node by node with torch's own operators.

AOTAutograd splits Dynamo's graph into forward and backward, without decomposing operators. Then
each node is executed, in order, by the operator that it names. The program's own backend is not
called, so the values are those of the graph, not those of code that a compiler made of it.
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
    """Compile a graph to a function that executes it node by node, instead of the backend.

    Args:
        graph: The graph as Dynamo passes it to backends.
        inputs: Its example inputs.
        backend: Name of the program's own backend.
        recorders: Returns the recorders that get the values.
    """
    # Imported here because they load the compiler, which is loaded when this is called.
    common: Any = importlib.import_module("torch._dynamo.backends.common")
    partitioners: Any = importlib.import_module("torch._functorch.partitioners")
    bases: list[tuple[GraphRecorder, str]] = []
    for recorder in recorders():
        # Done now, while the running module is known; graphs are described later.
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
    """Remove unused forward nodes from a backward graph.

    With `fallback_random` torch leaves random operators in it. If they were executed again, they
    would draw random numbers that the program draws next.
    """
    for node in reversed(module.graph.nodes):
        idle = node.op == "call_function" and not node.users
        if idle and node.meta.get("partitioner_tag") == "is_forward":
            module.graph.erase_node(node)
    module.recompile()


def _boxed(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function to take its arguments as one list, which it empties to free them early."""

    def boxed(arguments: list[Any]) -> Any:
        values = list(arguments)
        arguments.clear()
        return call(*values)

    boxed.__dict__["_boxed_call"] = True  # tells AOTAutograd about this calling convention
    hide_from_compiler(boxed)
    return boxed


class ByNodes(fx.Interpreter):
    """A compiled graph that passes the value of every node to the recorders when it is called."""

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
        # In a step that is not captured the plain graph runs.
        if not executions:
            return self._plain(*arguments)
        return _Run(self.module, executions).run(*arguments)


class _Run(fx.Interpreter):
    """One execution of a graph; two threads may execute a graph at the same time.

    Args:
        module: The graph.
        executions: The executions that get the values, one for each recorder.
        within: Prefix of the nodes' names, in the body of a control flow operator.
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
        """A function that executes a control flow body and passes on its nodes' values too."""

        def run(*arguments: Any) -> Any:
            return _Run(body, self._executions, within).run(*arguments)

        hide_from_compiler(run)
        return run


hide_from_compiler(ByNodes.__call__, _Run.run_node)
