# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
"""Record the results of inductor's kernels, just after each kernel has written them.

Inductor writes a Python program that calls its kernels. Lines are added to it that pass each
kernel's results to the recorder, before their memory is reused. `CompiledProgram` is such a program
at run time; `Scheduled` is a program that is being written. The functions at the end replace
methods of inductor while a capture watches.
"""

from __future__ import annotations

import importlib
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from driftline.captures.patching import PatchSet
from driftline.captures.torch.compile.fusion_plan import FusionPlan, Unit, plan_fusion
from driftline.captures.torch.compile.fusion_values import FusionValues
from driftline.captures.torch.compile.graph_recorder import Compiled, Execution, GraphRecorder
from driftline.captures.torch.compile.nodes import compile_id
from driftline.captures.torch.operators.dispatch import hide_from_compiler
from driftline.graphs.sources.graph_files import GraphNode, Kept, Kernel


def is_called(scheduler: Any, node: Any) -> bool:
    """Whether the program written so far calls the kernel of a scheduled node."""
    if node is scheduler.current_node:
        return True
    # A node is done when all of its buffers exist.
    names = node.get_buffer_names()
    return all(name in scheduler.available_buffer_names for name in names)


def kernel_name(lines: list[Any], done: list[Any]) -> str:
    """Name of the kernel of these nodes, which was called last: generated, or a library's."""
    for line in reversed(lines):
        # The last call in the lines of the program is the kernel of these nodes.
        if type(line).__name__ == "KernelCallLine":
            if not any(node.is_extern() for node in done):
                return str(line.kernel_name)
            break
    for node in done:
        inner = getattr(node, "node", None)
        for attribute in ("python_kernel_name", "op_overload"):
            name = getattr(inner, attribute, None)
            if name:
                return str(name)
    return type(getattr(done[0], "node", done[0])).__name__


def nodes_of(graph: Any, node: Any) -> list[str]:
    """Names of all nodes that a scheduled node computes, even if their values are not stored."""
    places = {
        node_of_graph.name: index for index, node_of_graph in enumerate(graph.module.graph.nodes)
    }
    origins = {
        origin.name
        for output in node.get_outputs()
        for origin in output.node.get_origins()
        if origin.name in places
    }
    return sorted(origins, key=places.__getitem__)


def results(graph: Any, wrapper: Any, node: Any) -> list[tuple[str, str, str, tuple[str, ...]]]:
    """(buffer, variable, exact origin, all origins) of each stored result of a scheduled node."""
    ir: Any = importlib.import_module("torch._inductor.ir")
    places = {origin.name: index for index, origin in enumerate(graph.module.graph.nodes)}
    kept_results: list[tuple[str, str, str, tuple[str, ...]]] = []
    for output in node.get_outputs():
        buffer = output.node
        name = buffer.get_name()
        # A buffer that was optimised away, or whose memory was reused, cannot be read.
        gone = (graph.removed_buffers, graph.inplaced_to_remove, wrapper.freed)
        if any(name in names for names in gone):
            continue
        layout = buffer.layout
        # These layouts have no memory of their own.
        if isinstance(layout, (ir.NoneLayout, ir.MultiOutputLayout)):
            continue
        variable = name
        # A mutation is written into another buffer, which has to be read instead.
        if isinstance(layout, ir.MutationLayoutSHOULDREMOVE):
            variable = layout.get_buffer().get_name()
        exact = buffer.get_origin_node()
        origins = sorted(
            {origin.name for origin in buffer.get_origins() if origin.name in places},
            key=places.__getitem__,
        )
        named = exact.name if exact is not None and exact.name in places else ""
        if named or origins:
            kept_results.append((name, variable, named, tuple(origins)))
    return kept_results


# Programs at run time, and programs that are being written.


class CompiledProgram:
    """The program of one compiled graph, and its current execution in each thread.

    Attributes:
        shown: The recorders that get its values, with their descriptions of the graph.
        first: The first value that every execution shows.
        silent: Inputs that are not recorded, because they are parameters.
        part_of: For the body of a control flow operator: the program that executes it.
        within: Prefix of the names in such a body.
        fusion_plan: Additional computations; None if there are none.
    """

    def __init__(self) -> None:
        self.shown: list[tuple[GraphRecorder, Compiled]] = []
        self.first = ""
        self.silent: set[str] = set()
        self.part_of: CompiledProgram | None = None
        self.within = ""
        self.fusion_plan: FusionPlan | None = None
        self._thread = threading.local()

    def take(self, buffer: str, value: Any) -> None:
        """Record a value that a kernel has written, or an input of the graph."""
        executions, fusion_values = self._under_way(buffer)
        if fusion_values is not None:
            fusion_values.give(buffer, value)
        if buffer not in self.silent:
            for execution in executions:
                execution.take_kept(buffer, value)

    def called(self, unit: int) -> None:
        """Compute the next stage of the fusion plan, after kernel `unit`; -1 means the inputs."""
        if self.fusion_plan is None:
            return
        fusion_values = self._under_way("")[1]
        if fusion_values is not None:
            fusion_values.stage(unit + 1)

    def _under_way(self, buffer: str) -> tuple[list[Execution], FusionValues | None]:
        """The current executions of this thread, one for each recorder, and their fusion values."""
        under_way = getattr(self._thread, "executions", None)
        # No line marks the beginning of a program, so its first buffer begins a new execution.
        if under_way is None or (buffer and buffer == self.first):
            executions = [
                execution
                for recorder, compiled in self.shown
                if (execution := recorder.execution(compiled)) is not None
            ]
            under_way = executions, self._fusion_values(executions)
            self._thread.executions = under_way
        return under_way

    def _fusion_values(self, executions: list[Execution]) -> FusionValues | None:
        if self.fusion_plan is None or not executions:
            return None

        def show(node: str, kernel: str, value: Any) -> None:
            for execution in executions:
                execution.take_inside(node, kernel, value)

        def tell(node: str, error: float, kernel: bool) -> None:
            for execution in executions:
                execution.take_error(node, error, kernel=kernel)

        return FusionValues(self.fusion_plan, show, tell)


class Scheduled:
    """A graph whose program is being written.

    Attributes:
        number: Number of the program.
        inputs: Inputs whose values the program shows.
        waiting: Scheduled nodes whose kernels are not called yet.
        units: Kernels in the order of their calls.
        ends: For each buffer or input, the index of the last kernel that reads it.
        bodies: Bodies of control flow operators, with the prefixes of their names.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.inputs: list[str] = []
        self.waiting: list[Any] = []
        self.units: list[Unit] = []
        self.ends: dict[str, int] = {}
        self.bodies: list[tuple[str, Scheduled]] = []


# Watching: inductor's methods are replaced while a capture watches.


# The lines find this module in `sys.modules`, because the program is a separate file and may
# outlive the capture.
_LINE = "__import__('sys').modules[{module!r}].kept({graph}, {buffer!r}, {variable})"
_DONE = "__import__('sys').modules[{module!r}].called({graph}, {unit})"
MODULE = "torch._inductor.graph"
# Caches are switched off, because a cached program lacks these lines.
_CACHES = {
    "torch._functorch.config": ("enable_autograd_cache", "enable_remote_autograd_cache"),
    "torch._inductor.config": ("fx_graph_cache", "fx_graph_remote_cache"),
}
_lock = threading.Lock()
_watchers: tuple[Watcher, ...] = ()
_settings: list[tuple[Any, str, Any]] = []
_patches = PatchSet()
_under_way: weakref.WeakKeyDictionary[Any, Scheduled] = weakref.WeakKeyDictionary()
_graphs: dict[int, CompiledProgram] = {}


class Watcher(Protocol):
    """A tap whose recorder gets the results of kernels."""

    session: Any
    recorder: GraphRecorder
    fusion: bool


def kept(graph: int, buffer: str, value: Any) -> None:
    """Record a value that a kernel has written; compiled programs call this. Never raises."""
    program = _graphs.get(graph)
    if program is None or not _watchers:
        return
    if program.part_of is not None:
        program, buffer = program.part_of, program.within + buffer
    # The program passes values to all recorders; the first session guards the call.
    for watcher in _watchers[:1]:
        watcher.session.guarded("inductor", program.take, buffer, value)


def called(graph: int, unit: int) -> None:
    """Note that a kernel has written all its results; compiled programs call this. Never raises."""
    program = _graphs.get(graph)
    if program is not None and _watchers:
        _watchers[0].session.guarded("inductor", program.called, unit)


# --- Watching.


def forget_graphs() -> None:
    """Switch AOTAutograd's cache off; call it before the first graph.

    A graph that is found in the cache would not reach inductor.
    """
    with _lock:
        if not _settings:
            _no_caches("torch._functorch.config")


def _no_caches(module: str) -> None:
    for name in _CACHES[module]:
        _set(importlib.import_module(module), name, False)


def install(watcher: Watcher) -> bool:
    """Show a watcher the kernels of graphs that are compiled from now on.

    Returns:
        False if this version of torch lacks a method that has to be replaced.
    """
    global _watchers
    with _lock:
        if not _watchers:
            scheduler: Any = importlib.import_module("torch._inductor.scheduler").Scheduler
            graph: Any = importlib.import_module(MODULE).GraphLowering
            places = (
                (scheduler, "enter_context", _enter),
                (scheduler, "free_buffers", _free),
                (graph, "codegen", _codegen),
                *(((graph, "run_node", _run_node),) if not watcher.fusion else ()),
            )
            if not all(hasattr(owner, name) for owner, name, _ in places):
                return False
            _no_caches("torch._inductor.config")
            for owner, name, make in places:
                _patches.replace(owner, name, make)
        if not watcher.fusion:
            config: Any = importlib.import_module("torch._inductor.config")
            # Settings that together keep inductor from fusing anything.
            _set(config, "max_fusion_size", 1)
            _set(config.cpp, "max_horizontal_fusion_size", 1)
            _set(config, "epilogue_fusion", False)
            _set(config, "prologue_fusion", False)
        _watchers = (*_watchers, watcher)
    return True


def remove(watcher: Watcher) -> None:
    global _watchers
    with _lock:
        _watchers = tuple(other for other in _watchers if other is not watcher)
        if _watchers:
            return
        _patches.restore()
        for config, name, before in reversed(_settings):
            setattr(config, name, before)
        _settings.clear()
        _graphs.clear()


def _set(config: Any, name: str, value: Any) -> None:
    if hasattr(config, name):
        _settings.append((config, name, getattr(config, name)))
        setattr(config, name, value)


# --- Replacements for methods of inductor.


def _codegen(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the method that turns a whole graph into a program."""

    def codegen(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _watchers:
            return original(self, *args, **kwargs)
        _watchers[0].session.guarded("inductor", _no_cuda_graph, self)
        result = original(self, *args, **kwargs)
        for watcher in _watchers:
            watcher.session.guarded("inductor", _describe, self)
            break
        return result

    return codegen


def _no_cuda_graph(lowering: Any) -> None:
    """Let the program call its kernels one by one, instead of making a CUDA graph of them.

    A CUDA graph replays kernels without returning to Python, and owns their memory.
    """
    if importlib.import_module("torch._inductor.config").triton.cudagraphs:
        lowering.disable_cudagraphs_reason = "Driftline reads what each kernel has written"
        for watcher in _watchers:
            watcher.session.event_once(
                "cuda-graph",
                "the program's CUDA graphs were not made: the same kernels were called one by one, "
                "so that each result could be read",
            )


def _enter(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the method by which the scheduler goes to its next node."""

    def enter_context(self: Any, node: Any) -> Any:
        if _watchers:
            if not all(watcher.fusion for watcher in _watchers):
                self.flush()  # the nodes scheduled so far get their own kernel
            _watchers[0].session.guarded("inductor", _comes, self, node)
        return original(self, node)

    return enter_context


def _free(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the method that frees unused buffers after a kernel call."""

    def free_buffers(self: Any) -> Any:
        if _watchers:
            _watchers[0].session.guarded("inductor", _called, self)
        return original(self)

    return free_buffers


def _run_node(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the method that lowers a node of the graph; without fusion its value is stored."""

    def run_node(self: Any, node: Any) -> Any:
        result = original(self, node)
        if _watchers and not all(watcher.fusion for watcher in _watchers):
            _watchers[0].session.guarded("inductor", _realise, result)
        return result

    return run_node


def _realise(value: Any) -> None:
    if isinstance(value, (list, tuple)):
        for part in value:
            _realise(part)
    elif type(value).__name__ == "TensorBox":
        value.realize()


# --- Scheduling.


def _comes(scheduler: Any, node: Any) -> None:
    scheduled = _under_way.get(scheduler)
    if scheduled is None:
        scheduled = _under_way[scheduler] = _begun()
    scheduled.waiting.append(node)


def _begun() -> Scheduled:
    """Begin a graph at its first node; write the lines that show its inputs."""
    number = len(_graphs)
    # Numbers are in the text of compiled programs, so a number in use is not assigned again.
    while number in _graphs:
        number += 1
    _graphs[number] = CompiledProgram()
    scheduled = Scheduled(number)
    graph: Any = importlib.import_module("torch._inductor.virtualized").V.graph
    wrapper = graph.wrapper_code
    # If the program is split into parts for CUDA graphs, each part is a function, in which the
    # inputs have no names.
    own = getattr(wrapper, "partition_signatures", None) is None
    if own and not _within(graph) and not graph.cpp_wrapper and hasattr(wrapper, "lines"):
        owned = {
            name
            for watcher in _watchers
            for name in watcher.recorder.parameters(
                graph.module.graph, compile_id(), backward=graph.is_backward
            )
        }
        _graphs[number].silent = owned
        for name in graph.graph_input_names:
            scheduled.inputs.append(name)
            wrapper.writeline(_line(number, name, name))
        wrapper.writeline(_DONE.format(module=__name__, graph=number, unit=-1))
    return scheduled


def _line(graph: int, buffer: str, variable: str) -> str:
    return _LINE.format(module=__name__, graph=graph, buffer=buffer, variable=variable)


def _within(lowering: Any) -> str:
    """Prefix of the names in a control flow body: the names of the bodies around it, with dots."""
    parent = getattr(lowering, "parent", None)
    if parent is None:
        return ""
    name = str(lowering.name).removeprefix(f"{parent.name}_") if parent.name else lowering.name
    return f"{_within(parent)}{name}."


def _called(scheduler: Any) -> None:
    """Add lines for the results of all nodes whose kernels are called by the program so far."""
    scheduled = _under_way.get(scheduler)
    if scheduled is None:
        return
    virtual: Any = importlib.import_module("torch._inductor.virtualized").V
    graph = virtual.graph
    wrapper = graph.wrapper_code
    # In a program in C++ no Python function can be called.
    if graph.cpp_wrapper or not hasattr(wrapper, "lines"):
        for watcher in _watchers:
            watcher.session.event_once(
                "kernels-unseen",
                "inductor writes this program in C++ (cpp_wrapper), where kernels are not recorded",
            )
        return
    done = [node for node in scheduled.waiting if is_called(scheduler, node)]
    if not done:
        return
    scheduled.waiting = [node for node in scheduled.waiting if node not in done]
    name = kernel_name(wrapper.lines, done)
    kept_results: list[tuple[str, str, tuple[str, ...]]] = []
    nodes: dict[str, None] = {}
    for node in done:
        nodes.update(dict.fromkeys(nodes_of(graph, node)))
        # The lines directly follow the kernel's call, because the next kernel may reuse the memory.
        for buffer, variable, exact, origins in results(graph, wrapper, node):
            kept_results.append((buffer, exact, origins))
            wrapper.writeline(_line(scheduled.number, buffer, variable))
        scheduled.ends.update(dict.fromkeys(node.last_usage, len(scheduled.units)))
    line = _DONE.format(module=__name__, graph=scheduled.number, unit=len(scheduled.units))
    wrapper.writeline(line)
    library = all(node.is_extern() for node in done)
    scheduled.units.append(Unit(name, library, kept_results, tuple(nodes)))


def _describe(lowering: Any) -> None:
    """Describe a graph whose program is written: its nodes, kernels and their stored results."""
    scheduled = _under_way.pop(getattr(lowering, "scheduler", None), None)
    if scheduled is None:
        return
    program = _graphs[scheduled.number]
    if within := _within(lowering):
        # The nodes of a body are listed with those of the graph that executes it, which is
        # described later.
        outermost = lowering
        while (parent := getattr(outermost, "parent", None)) is not None:
            outermost = parent
        outer = _under_way.get(outermost.scheduler)
        if outer is not None:
            program.part_of, program.within = _graphs[outer.number], within
            outer.bodies.append((within, scheduled))
        return
    parts = [("", scheduled), *scheduled.bodies]
    kind = "backward" if lowering.is_backward else "forward"
    if lowering.is_inference:
        kind = "inference"
    for watcher in _watchers:
        recorder = watcher.recorder
        nodes = recorder.describe(
            lowering.module.graph,
            compile_id(),
            recorder.base(compile_id()),
            backward=lowering.is_backward,
        )
        by_name = {node.name: node for node in nodes}
        kernels = tuple(
            Kernel(
                unit.name,
                tuple(_kept(by_name, within, *result) for result in unit.results),
                tuple(within + node for node in unit.nodes),
            )
            for within, part in parts
            for unit in part.units
        )
        compiled = recorder.add(nodes, compile_id(), kind, "inductor", "inductor", kernels)
        program.shown.append((recorder, compiled))
        # The first value that every execution shows.
        program.first = next(iter((*scheduled.inputs, *compiled.kept)), "")
    if scheduled.inputs:
        shown_inputs = set(scheduled.inputs)
        fusion_plan = plan_fusion(lowering.module, scheduled.units, scheduled.ends, shown_inputs)
        program.fusion_plan = None if fusion_plan.is_empty else fusion_plan


def _kept(
    nodes: dict[str, GraphNode], within: str, buffer: str, exact: str, origins: tuple[str, ...]
) -> Kept:
    """Describe a stored result of a kernel.

    If it is the value of a node, it has the node's site; otherwise the site is made of that of its
    last node and the buffer's name.
    """
    names = tuple(within + name for name in origins)
    if exact:
        return Kept(within + buffer, nodes[within + exact].site, within + exact, names)
    return Kept(within + buffer, f"{nodes[names[-1]].site}:{buffer}", "", names)


hide_from_compiler(kept, called)
