"""What inductor's kernels compute, read where each kernel has written it.

The scheduler writes a program that calls one kernel after the other. Right behind each call, before
memory is given back, a line is added that shows us the kernel's results; the kernels and the order
of their calls stay what they are. Which node of the graph a result is the value of, inductor itself
says: `origin_node`, if one has exactly this value, and `origins`, all that went into it.

Everything here leans on private parts of inductor, each of which is looked for first; where one is
missing nothing is recorded, and the run says so. Programs that inductor writes in C++ have no place
for such a line. Its caches of compiled graphs are off meanwhile: a graph that is found there is
never scheduled, and one that is put there would take our lines with it.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import importlib
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from driftline.adapters.torch.dispatch import hide_from_compiler
from driftline.adapters.torch.graphs.kernels import is_called, kernel_name, nodes_of, results
from driftline.adapters.torch.graphs.nodes import compile_id
from driftline.adapters.torch.graphs.programmes import Programme, Scheduled
from driftline.adapters.torch.graphs.recorder import Recorder
from driftline.adapters.torch.graphs.working_steps import Unit
from driftline.adapters.torch.graphs.workings import workings_of
from driftline.runs.graphs import GraphNode, Kept, Kernel

_LINE = "__import__('sys').modules[{module!r}].kept({graph}, {buffer!r}, {variable})"
_DONE = "__import__('sys').modules[{module!r}].called({graph}, {unit})"
MODULE = "torch._inductor.graph"
_CACHES = {
    "torch._functorch.config": ("enable_autograd_cache", "enable_remote_autograd_cache"),
    "torch._inductor.config": ("fx_graph_cache", "fx_graph_remote_cache"),
}
_lock = threading.Lock()
_watchers: tuple[Watcher, ...] = ()
_settings: list[tuple[Any, str, Any]] = []
_replaced: list[tuple[Any, str, Any, Any]] = []
_under_way: weakref.WeakKeyDictionary[Any, Scheduled] = weakref.WeakKeyDictionary()
_graphs: dict[int, Programme] = {}


class Watcher(Protocol):
    """Whose recorder is shown what kernels compute."""

    session: Any
    recorder: Recorder
    fusion: bool


def kept(graph: int, buffer: str, value: Any) -> None:
    """Called by compiled programs: a kernel has written this. Never raises."""
    programme = _graphs.get(graph)
    if programme is None or not _watchers:
        return
    if programme.part_of is not None:
        programme, buffer = programme.part_of, programme.within + buffer
    for watcher in _watchers[:1]:
        watcher.session.shielded("inductor", programme.take, buffer, value)


def called(graph: int, unit: int) -> None:
    """Called by compiled programs: a kernel has written all it writes. Never raises."""
    programme = _graphs.get(graph)
    if programme is not None and _watchers:
        _watchers[0].session.shielded("inductor", programme.called, unit)


# --- switching on and off


def forget_graphs() -> None:
    """Before the first graph: one that is found in a cache would never reach inductor."""
    with _lock:
        if not _settings:
            _no_caches("torch._functorch.config")


def _no_caches(module: str) -> None:
    for name in _CACHES[module]:
        _set(importlib.import_module(module), name, False)


def install(watcher: Watcher) -> bool:
    """Show a watcher the kernels of graphs that are compiled from now on."""
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
                original = getattr(owner, name)
                ours = make(original)
                _replaced.append((owner, name, original, ours))
                setattr(owner, name, ours)
        if not watcher.fusion:
            config: Any = importlib.import_module("torch._inductor.config")
            _set(config, "max_fusion_size", 1)
            _set(config.cpp, "max_horizontal_fusion_size", 1)
            _set(config, "epilogue_fusion", False)
            _set(config, "prologue_fusion", False)
        _watchers = (*_watchers, watcher)
    return True


def remove(watcher: Watcher) -> None:
    global _watchers
    with _lock:
        _watchers = tuple(one for one in _watchers if one is not watcher)
        if _watchers:
            return
        for owner, name, original, ours in reversed(_replaced):
            if getattr(owner, name) is ours:
                setattr(owner, name, original)
        _replaced.clear()
        for config, name, before in reversed(_settings):
            setattr(config, name, before)
        _settings.clear()
        _graphs.clear()


def _set(config: Any, name: str, value: Any) -> None:
    if hasattr(config, name):
        _settings.append((config, name, getattr(config, name)))
        setattr(config, name, value)


# --- what stands in for inductor's own


def _codegen(original: Callable[..., Any]) -> Callable[..., Any]:
    """A whole graph is turned into a program."""

    def codegen(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _watchers:
            return original(self, *args, **kwargs)
        _watchers[0].session.shielded("inductor", _no_cuda_graph, self)
        result = original(self, *args, **kwargs)
        for watcher in _watchers:
            watcher.session.shielded("inductor", _describe, self)
            break
        return result

    return codegen


def _no_cuda_graph(lowering: Any) -> None:
    """Have kernels called one by one: a CUDA graph replays them without us, and owns its memory."""
    if importlib.import_module("torch._inductor.config").triton.cudagraphs:
        lowering.disable_cudagraphs_reason = "Driftline reads what each kernel has written"
        for watcher in _watchers:
            watcher.session.event_once(
                "cuda-graph",
                "the program's CUDA graphs were not made: the same kernels were called one by one, "
                "so that each result could be read",
            )


def _enter(original: Callable[..., Any]) -> Callable[..., Any]:
    """The scheduler comes to the next of its nodes."""

    def enter_context(self: Any, node: Any) -> Any:
        if _watchers:
            if not all(watcher.fusion for watcher in _watchers):
                self.flush()  # what was scheduled so far becomes a kernel of its own
            _watchers[0].session.shielded("inductor", _comes, self, node)
        return original(self, node)

    return enter_context


def _free(original: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel was called: memory that nobody reads any more is about to be given back."""

    def free_buffers(self: Any) -> Any:
        if _watchers:
            _watchers[0].session.shielded("inductor", _called, self)
        return original(self)

    return free_buffers


def _run_node(original: Callable[..., Any]) -> Callable[..., Any]:
    """A node of the graph is translated; without fusion its value is to be in memory."""

    def run_node(self: Any, node: Any) -> Any:
        result = original(self, node)
        if _watchers and not all(watcher.fusion for watcher in _watchers):
            _watchers[0].session.shielded("inductor", _realise, result)
        return result

    return run_node


def _realise(value: Any) -> None:
    if isinstance(value, (list, tuple)):
        for part in value:
            _realise(part)
    elif type(value).__name__ == "TensorBox":
        value.realize()


# --- scheduling


def _comes(scheduler: Any, node: Any) -> None:
    scheduled = _under_way.get(scheduler)
    if scheduled is None:
        scheduled = _under_way[scheduler] = _begun()
    scheduled.waiting.append(node)


def _begun() -> Scheduled:
    """A graph whose first node comes; before it, the program shows us what it was given."""
    number = len(_graphs)
    while number in _graphs:
        number += 1
    _graphs[number] = Programme()
    scheduled = Scheduled(number)
    graph: Any = importlib.import_module("torch._inductor.virtualized").V.graph
    wrapper = graph.wrapper_code
    # Parts that are to become CUDA graphs are functions of their own: inputs have no names there.
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
    """What comes before the names in a body of control flow: those that lead to it, and dots."""
    parent = getattr(lowering, "parent", None)
    if parent is None:
        return ""
    name = str(lowering.name).removeprefix(f"{parent.name}_") if parent.name else lowering.name
    return f"{_within(parent)}{name}."


def _called(scheduler: Any) -> None:
    """Add lines for the results of all nodes whose kernel has been called by now."""
    scheduled = _under_way.get(scheduler)
    if scheduled is None:
        return
    virtual: Any = importlib.import_module("torch._inductor.virtualized").V
    graph = virtual.graph
    wrapper = graph.wrapper_code
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
    found: list[tuple[str, str, tuple[str, ...]]] = []
    nodes: dict[str, None] = {}
    for node in done:
        nodes.update(dict.fromkeys(nodes_of(graph, node)))
        for buffer, variable, exact, origins in results(graph, wrapper, node):
            found.append((buffer, exact, origins))
            wrapper.writeline(_line(scheduled.number, buffer, variable))
        scheduled.ends.update(dict.fromkeys(node.last_usage, len(scheduled.units)))
    line = _DONE.format(module=__name__, graph=scheduled.number, unit=len(scheduled.units))
    wrapper.writeline(line)
    library = all(node.is_extern() for node in done)
    scheduled.units.append(Unit(name, library, found, tuple(nodes)))


def _describe(lowering: Any) -> None:
    """A graph has become a program: say which results its kernels keep, and of which nodes."""
    scheduled = _under_way.pop(getattr(lowering, "scheduler", None), None)
    if scheduled is None:
        return
    programme = _graphs[scheduled.number]
    if within := _within(lowering):
        # Its nodes are listed with those of the graph that executes it, which comes later.
        whole = lowering
        while (parent := getattr(whole, "parent", None)) is not None:
            whole = parent
        outer = _under_way.get(whole.scheduler)
        if outer is not None:
            programme.part_of, programme.within = _graphs[outer.number], within
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
                tuple(_kept(by_name, within, *one) for one in unit.results),
                tuple(within + node for node in unit.nodes),
            )
            for within, part in parts
            for unit in part.units
        )
        compiled = recorder.add(nodes, compile_id(), kind, "inductor", "inductor", kernels)
        programme.shown.append((recorder, compiled))
        programme.first = next(iter((*scheduled.inputs, *compiled.kept)), "")
    if scheduled.inputs:
        known = set(scheduled.inputs)
        workings = workings_of(lowering.module, scheduled.units, scheduled.ends, known)
        programme.workings = None if workings.is_empty else workings


def _kept(
    nodes: dict[str, GraphNode], within: str, buffer: str, exact: str, origins: tuple[str, ...]
) -> Kept:
    """What a kernel kept: at its node's own site, if it is the value of one, or at a buffer's."""
    names = tuple(within + name for name in origins)
    if exact:
        return Kept(within + buffer, nodes[within + exact].site, within + exact, names)
    return Kept(within + buffer, f"{nodes[names[-1]].site}:{buffer}", "", names)


hide_from_compiler(kept, called)
