"""Gradients of layers and parameters, read without touching what autograd computes.

Nothing is put into the graph. After a layer's call its piece of the graph is walked, from the
outputs to the inputs, and hooks look at what passes:

- `grad_output`: what arrives at an output tensor, summed over all its consumers;
- `grad_input`: what this layer's own operations send back to an input tensor; not the input's
  total, to which other consumers add. An input that is handed through untouched gets none;
- `param_grad`: what one backward pass contributes to a parameter, before it is accumulated;
- `optimizer_grad`: what the optimizer is given: accumulated, reduced, clipped.

Gradients carry step and visit of the forward call they belong to. A second backward pass over one
call (`retain_graph`) takes the next free visit of its site.

Two things Paddle does not show: behind which operations a hook can stand is a list of ours
(`edges.py`), and of two inputs that are results of one operation (the parts of a split) it cannot
be told which one a gradient is for. Input gradients that cannot be had are named in an event.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import threading
import weakref
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from paddle.base import core

from driftline.adapters.backward import PassedCall, Visits
from driftline.adapters.paddle.edges import Edge, Held, edges_into, node_of
from driftline.adapters.paddle.parameters import ParameterGradients
from driftline.adapters.paddle.snapshot import grad_enabled, undisturbed

Named = Sequence[tuple[str, str, Any]]
"""Slot, alias and tensor, as `modules.py` hands them out."""

_eager: Any = core.eager
_UNKNOWN = "what its {} send back cannot be seen in Paddle"


class GradientTap:
    """Reads gradients of layers, of parameters, and of what the optimizer is given."""

    def __init__(self, session: Any) -> None:
        self.session = session
        self.active = False
        self.visits = Visits()
        self._parameters = ParameterGradients(session)
        self._calls = _Calls()
        self._lock = threading.Lock()
        self._pass = 0
        self._in_pass = False
        self._open: list[_Inflow] = []
        self._held = Held()

    def install(self) -> None:
        self.active = True
        self._parameters.install()

    def remove(self) -> None:
        self.active = False
        self._parameters.remove()
        with self._lock:
            self._open.clear()

    @contextmanager
    def around_root(self, module: Any) -> Generator[None]:
        """Called by `modules.py` around each call of a root layer."""
        calls = self._calls
        depth = len(calls.items)
        self._parameters.watch(module)
        try:
            yield
        finally:
            del calls.items[depth:]  # what an exception left
            if not depth:
                calls.met.clear()
            self._parameters.watch(module)  # layers may make parameters in their first call

    def before_forward(self, frame: Any, inputs: Named) -> None:
        """Remember where in the graph the inputs come from; an in-place op will hide it."""
        if not (self.active and grad_enabled() and self.session.wants_step(frame.step)):
            return
        calls = self._calls
        calls.serial += 1
        origins = [node_of(tensor) for _, _, tensor in inputs]
        for node in origins:
            if node is not None:
                calls.met.setdefault(node.node_ptr(), (calls.serial - 1, node))
        calls.items.append((frame, calls.serial, origins))

    def on_forward(self, frame: Any, inputs: Named, outputs: Named) -> None:
        if not self.active:
            return
        entry = self._calls.take(frame)
        if entry is None:
            return
        try:
            self._hook(frame, entry[1], entry[2], inputs, outputs)
        except Exception as error:
            self.lost(frame.site, error)

    def _hook(
        self, frame: Any, began: int, origins: list[Any], inputs: Named, outputs: Named
    ) -> None:
        calls = self._calls
        calls.serial += 1
        ends: list[tuple[str, str, Any, Any]] = []
        for slot, alias, tensor in outputs:
            # Hooks on a leaf would outlive this call's graph and pile up.
            if tensor.stop_gradient or tensor.is_leaf:
                continue
            node = node_of(tensor)
            if node is None:
                continue
            known = calls.met.get(node.node_ptr())
            handed_through = any(o is not None and o.node_ptr() == node.node_ptr() for o in origins)
            if known is not None and known[0] < began and not handed_through:
                continue  # made before this call, and not given to it: a cached tensor
            ends.append((slot, alias, tensor, node))
        wants = self.session.wants
        call = PassedCall[GradientTap](self, frame)
        if wants(frame.site, frame.class_name, "grad_output"):
            for slot, alias, tensor, _ in ends:
                tensor.register_hook(_OutputHook(call, slot, alias))
        if ends and wants(frame.site, frame.class_name, "grad_input"):
            self._hook_inputs(call, began, origins, inputs, [node for *_, node in ends])
        for *_, node in ends:
            calls.met.setdefault(node.node_ptr(), (calls.serial, node))

    def _hook_inputs(
        self,
        call: PassedCall[GradientTap],
        began: int,
        origins: list[Any],
        inputs: Named,
        ends: list[Any],
    ) -> None:
        sources: dict[int, _Inflow] = {}
        given: dict[int, Any] = {}
        shared: set[int] = set()
        for (slot, alias, tensor), node in zip(inputs, origins, strict=True):
            if node is None:
                continue
            pointer = node.node_ptr()
            if pointer not in sources:
                sources[pointer], given[pointer] = _Inflow(call, slot, alias), tensor
            elif not _same(given[pointer], tensor):
                shared.add(pointer)
        for pointer in shared:
            self._without(call, "inputs that are parts of one result")
            del sources[pointer]
        if not sources:
            return
        met = self._calls.met

        def is_older(pointer: int) -> bool:
            known = met.get(pointer)
            return known is not None and known[0] < began

        found, blind = edges_into(sources.keys(), ends, is_older)
        for pointer, names in blind.items():
            self._without(call, ", ".join(sorted(names)))
            del sources[pointer]
        for node, edges in found:
            watched = [(edge, sources[edge.source]) for edge in edges if edge.source in sources]
            if watched:
                for _, inflow in watched:
                    inflow.expected += 1
                node._register_post_hook(_InputHook(watched, self._held))

    def _without(self, call: PassedCall[GradientTap], what: str) -> None:
        self.session.event_once(
            "gradient-lost",
            f"an input gradient of {call.site} is not captured: {_UNKNOWN.format(what)}",
            site=call.site,
        )

    # --- a backward pass

    def passing(self) -> int:
        """The number of the backward pass that is under way."""
        with self._lock:
            if not self._in_pass:
                self._in_pass = True
                self._pass += 1
                reference = weakref.ref(self)

                def over() -> None:
                    tap = reference()
                    if tap is not None:
                        tap._pass_over()

                _eager._add_backward_final_hook(over)
            return self._pass

    def _pass_over(self) -> None:
        with self._lock:
            self._in_pass = False
            waiting, self._open = self._open, []
        self._held.let_go()
        for inflow in waiting:
            inflow.finish()

    def expect(self, inflow: _Inflow) -> None:
        """An input's gradient is incomplete: look again when this backward pass is over.

        Some of its paths may not run at all, when the loss does not depend on every output.
        """
        with self._lock:
            self._open.append(inflow)

    def emit(
        self,
        call: PassedCall[GradientTap],
        port: str,
        slot: str,
        alias: str,
        gradient: Any,
        task: int,
    ) -> None:
        self.session.emit(
            call.site,
            port,
            slot,
            gradient,
            alias=alias,
            class_name=call.class_name,
            visit=call.visit_in(task),
            phase="backward",
            step=call.step,
        )

    def lost(self, site: str, error: Exception) -> None:
        self.session.event_once(
            "gradient-lost", f"gradients of {site or 'the root'} not captured: {error}", site=site
        )


def _same(one: Any, other: Any) -> bool:
    """Whether two inputs are one tensor, given twice."""
    return one is other or (
        one.shape == other.shape and one._is_initialized() and one.data_ptr() == other.data_ptr()
    )


class _Calls(threading.local):
    """Calls under way in this thread, and nodes of the graph in the order they were met.

    Nodes are held until the outermost call is over: the address of a dead one is given to another.
    """

    def __init__(self) -> None:
        self.items: list[tuple[Any, int, list[Any]]] = []
        self.met: dict[int, tuple[int, Any]] = {}
        self.serial = 0

    def take(self, frame: Any) -> tuple[Any, int, list[Any]] | None:
        """The entry of `frame`; entries above it belong to calls that ended in an exception."""
        for index in range(len(self.items) - 1, -1, -1):
            if self.items[index][0] is frame:
                entry = self.items[index]
                del self.items[index:]
                return entry
        return None


class _OutputHook:
    """Shows what arrived at one output of a call."""

    __slots__ = ("_alias", "_call", "_slot")

    def __init__(self, call: PassedCall[GradientTap], slot: str, alias: str) -> None:
        self._call = call
        self._slot = slot
        self._alias = alias

    def __call__(self, gradient: Any) -> None:
        tap = self._call.tap()
        if tap is None or not tap.active or gradient is None:
            return
        try:
            tap.emit(self._call, "grad_output", self._slot, self._alias, gradient, tap.passing())
        except Exception as error:
            tap.lost(self._call.site, error)


class _Inflow:
    """One input of one call: adds up what comes back to it over `expected` edges of the graph."""

    __slots__ = ("_seen", "_sum", "_task", "alias", "call", "expected", "slot")

    def __init__(self, call: PassedCall[GradientTap], slot: str, alias: str) -> None:
        self.call = call
        self.slot = slot
        self.alias = alias
        self.expected = 0
        self._seen = 0
        self._sum: Any = None
        self._task = -1

    def arrived(self, gradient: Any) -> None:
        tap = self.call.tap()
        if tap is None or not tap.active:
            return
        task = tap.passing()
        if self.expected == 1:
            if gradient is not None:
                tap.emit(self.call, "grad_input", self.slot, self.alias, gradient, task)
            return
        if task != self._task:
            self._task, self._seen, self._sum = task, 0, None
        self._seen += 1
        if gradient is not None:
            # A copy, because the engine may go on adding into the tensor it handed us.
            with undisturbed():
                self._sum = gradient.clone() if self._sum is None else self._sum + gradient
        if self._seen == 1:
            tap.expect(self)
        if self._seen == self.expected:
            self.finish()

    def finish(self) -> None:
        """Hand out the sum, once; called when it is complete and again at the end of the pass."""
        total, self._sum = self._sum, None
        tap = self.call.tap()
        if total is None or tap is None or not tap.active:
            return
        try:
            tap.emit(self.call, "grad_input", self.slot, self.alias, total, self._task)
        except Exception as error:
            tap.lost(self.call.site, error)


class _InputHook:
    """After a node ran: shows what it sends along its edges to a call's inputs."""

    __slots__ = ("_edges", "_held")

    def __init__(self, edges: list[tuple[Edge, _Inflow]], held: Held) -> None:
        self._edges = edges
        self._held = held.append

    def __call__(self, sent: Any, _: Any) -> Any:
        for edge, inflow in self._edges:
            try:
                inflow.arrived(edge.of(sent))
            except Exception as error:
                tap = inflow.call.tap()
                if tap is not None:
                    tap.lost(inflow.call.site, error)
        # Paddle goes on with what a hook returns, the very same tensors, and never lets it go.
        given = list(sent)
        self._held(given)
        return given
