"""Gradients of modules and parameters, read without touching what autograd computes.

Full backward hooks put identity nodes around a module: gradients then add up in another order and
are no longer bitwise equal, and an in-place activation raises. Here nothing is put into the graph.
After a module's call its piece of the graph is walked, from the outputs to the inputs, and hooks on
the nodes of that piece look at what passes:

- `grad_output`: what arrives at an output tensor, summed over all its consumers;
- `grad_input`: what this module's own operations send back to an input tensor; not the input's
  total, to which other consumers add. An input that is handed through untouched gets none;
- `param_grad`: what one backward pass contributes to a parameter, before it is accumulated;
- `optimizer_grad`: `.grad` as `Optimizer.step` finds it: accumulated, reduced, clipped.

Gradients carry step and visit of the forward call they belong to. A second backward pass over one
call (`retain_graph`, double backward) takes the next free visit of its site.

Hooks hold names and counts, no tensors or nodes beyond the pass they belong to, so a graph lives
exactly as long as without them. Nothing here may raise into the user's backward.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from driftline.adapters.backward import CallGradients, Inflow, PassedCall
from driftline.adapters.torch.dispatch import hide_from_compiler
from driftline.adapters.torch.parameters import ParameterGradients

Named = Sequence[tuple[str, str, torch.Tensor]]
"""Slot, alias and tensor, as `modules.py` hands them out."""
Gradients = tuple[torch.Tensor | None, ...]
_Entry = tuple[Any, int, list[tuple[int, int]]]
"""A call under way: frame, next sequence number, sequence and output number behind each input."""

# Private parts of torch, of which the stubs know nothing.
_C: Any = torch._C
_autograd: Any = torch.autograd

_LEAF = 2**64 - 1
"""Sequence number of every AccumulateGrad node; all other nodes count up within their thread."""


class GradientTap(CallGradients):
    """Reads gradients of modules, of parameters, and of what the optimizer is given.

    `modules.py` calls `around_root` around a root's call, `before_forward` before and `on_forward`
    after each module's. Between the last two only numbers are kept: an exception in between leaves
    nothing alive.
    """

    def __init__(self, session: Any) -> None:
        super().__init__(session)
        self._calls = _CallStack()
        self._parameters = ParameterGradients(session)
        self._lock = threading.Lock()
        self._open: dict[int, list[Inflow[Any]]] = {}

    def install(self) -> None:
        self.active = True
        self._parameters.install()

    def remove(self) -> None:
        self.active = False
        self._parameters.remove()
        with self._lock:
            self._open.clear()

    @contextmanager
    def around_root(self, module: nn.Module) -> Generator[None]:
        """Called by `modules.py` around each call of a root module."""
        calls = self._calls.items
        depth = len(calls)
        self._parameters.watch(module)
        try:
            yield
        finally:
            del calls[depth:]  # what an exception left
            self._parameters.watch(module)  # lazy parameters exist only now

    def before_forward(self, frame: Any, inputs: Named) -> None:
        """Remember where in the graph the inputs come from; an in-place op will hide it."""
        if not (self.active and torch.is_grad_enabled() and self.session.wants_step(frame.step)):
            return
        origins: list[tuple[int, int]] = []
        try:
            for _, _, tensor in inputs:
                node = tensor.grad_fn if tensor.requires_grad else None
                origins.append((-1, 0) if node is None else (node._sequence_nr(), tensor.output_nr))
        except Exception as error:
            self.lost(frame.site, error)
            return
        self._calls.items.append((frame, _autograd._get_sequence_nr(), origins))

    def on_forward(self, frame: Any, inputs: Named, outputs: Named) -> None:
        if not self.active:
            return
        entry = self._calls.take(frame)
        if entry is None:
            return
        try:
            self._hook(entry, inputs, outputs)
        except Exception as error:
            self.lost(frame.site, error)

    def _hook(self, entry: _Entry, inputs: Named, outputs: Named) -> None:
        frame, first, origins = entry
        ends: dict[Any, list[tuple[int, str, str]]] = {}
        for slot, alias, tensor in outputs:
            if not tensor.requires_grad or _is_transformed(tensor):
                continue
            # Hooks on a node that outlives this call's graph would pile up: a leaf's (DDP keeps it;
            # what arrives there is its `param_grad`) or a cached tensor's.
            node, output = tensor.grad_fn, tensor.output_nr
            if node is None:
                continue
            number = node._sequence_nr()
            if number >= first or (number, output) in origins:
                ends.setdefault(node, []).append((output, slot, alias))
        if not ends:
            return
        wants = self.session.wants
        site, class_name = frame.site, frame.class_name
        want_output: bool = wants(site, class_name, "grad_output")
        want_input: bool = wants(site, class_name, "grad_input")
        if not (want_output or want_input):
            return
        call = PassedCall[GradientTap](self, frame)
        if want_output:
            for node, slots in ends.items():
                node.register_prehook(_OutputHook(call, slots))
        if want_input:
            self._hook_inputs(call, entry, inputs, [*ends])

    def _hook_inputs(
        self, call: PassedCall[GradientTap], entry: _Entry, inputs: Named, ends: list[Any]
    ) -> None:
        _, first, origins = entry
        sources: dict[tuple[Any, int], Inflow[Any]] = {}
        for (slot, alias, tensor), (number, output) in zip(inputs, origins, strict=True):
            if number >= 0:
                sources.setdefault((number, output), Inflow(call, slot, alias))
            elif tensor.is_leaf and tensor.requires_grad:
                sources.setdefault((get_gradient_edge(tensor).node, 0), Inflow(call, slot, alias))
        if not sources:
            return
        for node, edges in _edges_into(sources, ends, first):
            for _, inflow in edges:
                inflow.expected += 1
            node.register_hook(_InputHook(edges))

    def expect(self, inflow: Inflow[Any], task: int) -> None:
        with self._lock:
            waiting = self._open.get(task)
            if waiting is not None:
                waiting.append(inflow)
                return
            self._open[task] = [inflow]
        engine = _autograd.Variable._execution_engine
        engine.queue_callback(lambda: self._finish(task))

    def _finish(self, task: int) -> None:
        with self._lock:
            waiting = self._open.pop(task, [])
        for inflow in waiting:
            inflow.finish(task)

    def task(self) -> int:
        return _C._current_graph_task_id()


class _CallStack(threading.local):
    """Calls under way in this thread."""

    def __init__(self) -> None:
        self.items: list[_Entry] = []

    def take(self, frame: Any) -> _Entry | None:
        """The entry of `frame`; entries above it belong to calls that ended in an exception."""
        items = self.items
        for index in range(len(items) - 1, -1, -1):
            if items[index][0] is frame:
                entry = items[index]
                del items[index:]
                return entry
        return None


class _OutputHook:
    """Before a node runs: shows what arrived at a call's outputs."""

    __slots__ = ("_call", "_slots")

    def __init__(self, call: PassedCall[GradientTap], slots: list[tuple[int, str, str]]) -> None:
        self._call = call
        self._slots = slots

    def __call__(self, gradients: Gradients) -> None:
        tap = self._call.tap()
        if tap is None or not tap.active:
            return
        try:
            task = _C._current_graph_task_id()
            for number, slot, alias in self._slots:
                gradient = gradients[number]
                if gradient is not None:
                    tap.emit(self._call, "grad_output", slot, alias, gradient, task)
        except Exception as error:
            tap.lost(self._call.site, error)


class _InputHook:
    """After a node ran: shows what it sends along its edges to a call's inputs."""

    __slots__ = ("_edges",)

    def __init__(self, edges: list[tuple[int, Inflow[Any]]]) -> None:
        self._edges = edges

    def __call__(self, gradients: Gradients, _: Gradients) -> None:
        for index, inflow in self._edges:
            try:
                inflow.arrived(gradients[index])
            except Exception as error:
                tap = inflow.call.tap()
                if tap is not None:
                    tap.lost(inflow.call.site, error)


hide_from_compiler(_OutputHook.__call__, _InputHook.__call__)


def _edges_into(
    sources: dict[tuple[Any, int], Inflow[Any]], ends: list[Any], first: int
) -> list[tuple[Any, list[tuple[int, Inflow[Any]]]]]:
    """Nodes between `ends` and `sources` that have an edge into a source, with those edges.

    Sources are known by sequence number and output number, leaves by node. Nodes numbered below
    `first` were made before the module was called: the walk stops there, so it costs what the
    module itself put into the graph.
    """
    found: list[tuple[Any, list[tuple[int, Inflow[Any]]]]] = []
    seen = {node for node in ends if first <= node._sequence_nr() != _LEAF}
    stack = [*seen]
    while stack:
        node = stack.pop()
        hits: list[tuple[int, Inflow[Any]]] | None = None
        for index, (following, output) in enumerate(node.next_functions):
            if following is None:
                continue
            number = following._sequence_nr()
            if number == _LEAF:
                inflow = sources.get((following, output))
            elif number >= first:
                if following not in seen:
                    seen.add(following)
                    stack.append(following)
                continue
            else:
                inflow = sources.get((number, output))
            if inflow is not None:
                hits = hits or []
                hits.append((index, inflow))
        if hits:
            found.append((node, hits))
    return found


def _is_transformed(tensor: torch.Tensor) -> bool:
    """Inside `torch.func` transforms tensors are wrappers around values that do not exist yet."""
    return bool(_C._functorch.is_functorch_wrapped_tensor(tensor))
