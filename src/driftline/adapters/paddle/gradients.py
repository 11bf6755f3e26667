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

import functools
import threading
import weakref
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from driftline.adapters.backward import CallGradients, Inflow, PassedCall
from driftline.adapters.paddle import passes, senders
from driftline.adapters.paddle.edges import Held, TooMany, edges_into, node_of
from driftline.adapters.paddle.inflow import Rest, look_at, shows
from driftline.adapters.paddle.parameters import ParameterGradients
from driftline.adapters.paddle.snapshot import grad_enabled

Named = Sequence[tuple[str, str, Any]]
"""Slot, alias and tensor, as `modules.py` hands them out."""

_WHOLE_GRAPH = 400_000
"""Nodes of a whole backward graph that are looked at; about a second of Python."""
_UNKNOWN = "what its {} send back cannot be seen in Paddle"


class GradientTap(CallGradients):
    """Reads gradients of layers, of parameters, and of what the optimizer is given."""

    def __init__(self, session: Any) -> None:
        super().__init__(session)
        self._parameters = ParameterGradients(session)
        self._calls = _Calls()
        self._lock = threading.Lock()
        self._open: list[tuple[Inflow[Any], int]] = []
        self._held = Held()
        self._on_leaves: list[tuple[int, Any]] = []
        self._rests: weakref.WeakSet[Rest] = weakref.WeakSet()

    def install(self) -> None:
        self.active = True
        senders.watch()
        passes.watch(self)
        self._parameters.install()

    def remove(self) -> None:
        if self.active:
            senders.unwatch()
            passes.unwatch(self)
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
        given: dict[int, list[tuple[str, str, Any]]] = {}
        for (slot, alias, tensor), node in zip(inputs, origins, strict=True):
            if node is not None:
                known = given.setdefault(node.node_ptr(), [])
                if not any(_same(one, tensor) for *_, one in known):
                    known.append((slot, alias, tensor))
        if not given:
            return
        met = self._calls.met

        def is_older(pointer: int) -> bool:
            known = met.get(pointer)
            return known is not None and known[0] < began

        try:
            reached = edges_into(given.keys(), ends, is_older)
        except TooMany:
            self.without(call, "more operations than are looked at")
            return
        unclear = {pointer for pointer, parts in given.items() if len(parts) > 1}
        unclear |= {edge.source for node, edges in reached if not shows(node) for edge in edges}
        inflows = {p: Inflow(call, *parts[0][:2]) for p, parts in given.items() if p not in unclear}
        for node, edges in reached:
            watched = [(edge, inflows[edge.source]) for edge in edges if edge.source in inflows]
            for _, inflow in watched:
                inflow.expected += 1
            if watched:
                arrivals = [(edge, inflow.arrived) for edge, inflow in watched]
                look_at(node, arrivals, self._held, functools.partial(self.lost, call.site))
        for pointer in unclear:
            own = {
                (node.node_ptr(), edge.position)
                for node, edges in reached
                for edge in edges
                if edge.source == pointer
            }
            is_part = len(given[pointer]) > 1
            for slot, alias, tensor in given[pointer] if own else ():
                self._hook_total(Rest(call, slot, alias, pointer, own, is_part=is_part), tensor)

    def _hook_total(self, rest: Rest, tensor: Any) -> None:
        now = node_of(tensor)
        if now is None or now.node_ptr() != rest.source:
            self.without(rest.call, "an input that was changed in place")
            return
        handle = tensor.register_hook(rest)
        if tensor.is_leaf:  # which outlives this call's graph
            self._on_leaves.append((rest.call.step, handle))
            while self._on_leaves[0][0] < rest.call.step:
                self._on_leaves.pop(0)[1].remove()
        self._rests.add(rest)

    def begins(self, roots: list[Any]) -> None:
        """A backward pass begins: who else sends something to inputs that are known by totals?"""
        rests = list(self._rests)
        if not rests or not self.active:
            return
        try:
            nodes = [node for node in map(node_of, roots) if node is not None]
            reached = edges_into({rest.source for rest in rests}, nodes, most=_WHOLE_GRAPH)
            for rest in rests:
                rest.begin(reached, self._held, functools.partial(self.lost, rest.call.site))
        except TooMany:
            return  # the hooks on the inputs say that nobody has seen it
        except Exception as error:
            self.lost(rests[0].call.site, error)

    def without(self, call: PassedCall[GradientTap], what: str) -> None:
        """An input gradient of a call cannot be had."""
        self.session.event_once(
            "gradient-lost",
            f"an input gradient of {call.site} is not captured: {_UNKNOWN.format(what)}",
            site=call.site,
        )

    # --- a backward pass

    def task(self) -> int:
        return passes.number()

    def over(self) -> None:
        with self._lock:
            waiting, self._open = self._open, []
        for rest in list(self._rests):
            rest.forget()
        self._held.let_go()
        for inflow, task in waiting:
            inflow.finish(task)

    def expect(self, inflow: Inflow[Any], task: int) -> None:
        with self._lock:
            self._open.append((inflow, task))


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
            tap.emit(self._call, "grad_output", self._slot, self._alias, gradient, passes.number())
        except Exception as error:
            tap.lost(self._call.site, error)
