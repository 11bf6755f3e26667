# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""Gradients of Paddle layers and parameters, read without touching what autograd computes.

The gradient of a call's input is put together from what passes in the backward graph. What the
call's own operations send, as hooks show it, is added up by `GradientSum`. `GradientByDifference`
is for inputs where an operation shows nothing: the input's total, less what all others send to it.
Nothing is put into the graph; what cannot be determined is reported, never guessed.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from driftline.captures.gradients import CallGradients, GradientSum, PassedCall
from driftline.captures.paddle import backward_graph, list_operations
from driftline.captures.paddle.backward_graph import (
    Edge,
    ReturnedLists,
    TooMany,
    edges_into,
    hookable,
    node_of,
)
from driftline.captures.paddle.optimizers import ParameterGradients
from driftline.captures.paddle.tensors import grad_enabled, undisturbed

# More terms would mean more than 2**14 choices, too many to try during a backward pass.
_MOST_TERMS, _LOOKED_AT = 14, 256
_UNSEEN = "operations of a pass that nobody saw begin"

Arrived = Callable[[Any], None]
"""Takes what came along one edge; None when nothing did."""
Failed = Callable[[Exception], None]


def shows(node: Any) -> bool:
    """Whether what a node sends can be seen."""
    return node.name() in hookable() or list_operations.find(node.node_ptr()) is not None


def look_at(
    node: Any, edges: list[tuple[Edge, Arrived]], held: ReturnedLists, failed: Failed
) -> Any:
    """Show what a node sends along some of its edges; gives what takes the hook away again."""
    watch = _Watch(edges, failed)
    if node.name() in hookable():
        return node._register_post_hook(_NodeHook(watch, held)).remove
    sender = list_operations.find(node.node_ptr())
    assert sender is not None
    sender.listen(watch)
    return lambda: sender.leave(watch)


class _Watch:
    """Takes what a node sends apart, edge by edge."""

    __slots__ = ("_edges", "_failed")

    def __init__(self, edges: list[tuple[Edge, Arrived]], failed: Failed) -> None:
        self._edges = edges
        self._failed = failed

    def __call__(self, sent: Any) -> None:
        for edge, arrived in self._edges:
            try:
                arrived(edge.of(sent))
            except Exception as error:
                self._failed(error)


class _NodeHook:
    """Called after a node ran."""

    __slots__ = ("_held", "_watch")

    def __init__(self, watch: _Watch, held: ReturnedLists) -> None:
        self._watch = watch
        self._held = held.append

    def __call__(self, sent: Any, _: Any) -> Any:
        self._watch(sent)
        # Paddle goes on with what a hook returns, the very same tensors, and never lets it go.
        returned = list(sent)
        self._held(returned)
        return returned


class GradientByDifference:
    """One input of one call, by its total: the hook on the input itself.

    Which edges lead to it from outside of the call is known when a backward pass begins. None: the
    total is the call's own. All of them seen: they are taken off. Of two inputs that are results of
    one operation (parts of a split) edges do not say which one they lead to: where others send
    something to one of them, too, the terms of each total are found by adding up.
    """

    __slots__ = (
        "__weakref__",
        "_expected",
        "_others",
        "_own",
        "_remove",
        "_why",
        "alias",
        "call",
        "edges",
        "is_part",
        "slot",
        "source",
    )

    def __init__(
        self,
        call: PassedCall[GradientTap],
        slot: str,
        alias: str,
        source: int,
        edges: set[tuple[int, int]],
        *,
        is_part: bool,
    ) -> None:
        self.call = call
        self.slot = slot
        self.alias = alias
        self.source = source
        self.edges = edges
        self.is_part = is_part
        self._expected = 0
        self._others: list[Any] = []
        self._own: list[Any] = []
        self._why: str | None = _UNSEEN
        self._remove: list[Callable[[], None]] = []

    def begin(
        self, reached: list[tuple[Any, list[Edge]]], held: ReturnedLists, failed: Failed
    ) -> None:
        """A pass begins in which these edges lead to the input's origin."""
        own: list[tuple[Any, list[Edge]]] = []
        foreign: list[tuple[Any, list[Edge]]] = []
        for node, edges in reached:
            edges_here = [edge for edge in edges if edge.source == self.source]
            inside = [edge for edge in edges_here if (node.node_ptr(), edge.position) in self.edges]
            outside = [edge for edge in edges_here if edge not in inside]
            own += [(node, inside)] if inside else []
            foreign += [(node, outside)] if outside else []
        if not own:
            return  # a pass within a pass, over another graph
        self.forget()
        self._why = None
        self._expected = sum(len(edges) for _, edges in foreign)
        if not foreign:
            return
        watched = [(node, edges, self._foreign) for node, edges in foreign]
        # Of parts of one result the call's own terms are needed too, to tell the parts apart.
        if self.is_part:
            watched += [(node, edges, self._mine) for node, edges in own]
        # One operation that shows nothing makes the difference unknown.
        blind = [node.name() for node, *_ in watched if not shows(node)]
        if blind:
            self._why = blind[0].removesuffix("GradNode")
            return
        for node, edges, arrived in watched:
            arrivals: list[tuple[Edge, Arrived]] = [(edge, arrived) for edge in edges]
            self._remove.append(look_at(node, arrivals, held, failed))

    def forget(self) -> None:
        """The pass is over."""
        for remove in self._remove:
            remove()
        self._remove, self._others, self._own = [], [], []
        self._expected, self._why = 0, _UNSEEN

    def _foreign(self, gradient: Any) -> None:
        self._others.append(_copied(gradient))

    def _mine(self, gradient: Any) -> None:
        self._own.append(_copied(gradient))

    def __call__(self, gradient: Any) -> None:
        tap = self.call.tap()
        if tap is None or not tap.active or gradient is None:
            return
        try:
            own = self._share(gradient)
            if own is None:
                tap.without(self.call, self._why or "neighbours")
            else:
                tap.emit(
                    self.call, "grad_input", self.slot, self.alias, own, backward_graph.number()
                )
        except Exception as error:
            tap.lost(self.call.site, error)

    def _share(self, total: Any) -> Any | None:
        """What of the total is the call's own; None, and the reason in `_why`, if unknown."""
        if self._why is not None or not self._expected:
            return total if self._why is None else None
        # A neighbour that did not run sent nothing, or was not seen; the difference would be a
        # guess.
        if len(self._others) != self._expected:
            self._why = "neighbours that did not run"
            return None
        others: list[Any] | None = self._others
        if self.is_part:
            self._why = "inputs that are parts of one result"
            others = _addressed_here(total, self._own, self._others)
        if others is None:
            return None
        with undisturbed():
            for gradient in others:
                total = total if gradient is None else total - gradient
        return total


def _addressed_here(total: Any, own: list[Any], others: list[Any]) -> list[Any] | None:
    """Those of the others that are terms of a total, of which some of our own are the rest.

    None if more than one choice of terms gives the total, or none does.
    """
    terms = [(tensor, False) for tensor in own] + [(tensor, True) for tensor in others]
    terms = [
        (tensor, far) for tensor, far in terms if tensor is not None and tensor.shape == total.shape
    ]
    # Every further term doubles the number of choices.
    if len(terms) > _MOST_TERMS:
        return None
    goal, *values = (_some_of(tensor) for tensor in (total, *(tensor for tensor, _ in terms)))
    # Rounding of the sum: 16-bit formats keep three digits, float32 seven.
    allowed = np.abs(values).sum(axis=0) * (0.02 if total.element_size() == 2 else 1e-5)
    fitting: list[tuple[int, ...]] = []
    for count in range(len(terms) + 1):
        for chosen in itertools.combinations(range(len(terms)), count):
            apart = np.abs(sum((values[index] for index in chosen), np.zeros_like(goal)) - goal)
            if bool((apart <= allowed).all()):
                fitting.append(chosen)
    # Two choices that both fit would name different gradients.
    if len(fitting) != 1:
        return None
    return [terms[index][0] for index in fitting[0] if terms[index][1]]


def _some_of(tensor: Any) -> Any:
    """Some of its elements, evenly, as float64."""
    flat = tensor.astype("float32").flatten()
    return flat[:: max(flat.shape[0] // _LOOKED_AT, 1)].numpy().astype(np.float64)


def _copied(gradient: Any) -> Any:
    """A copy, because the engine may go on adding into the tensor it handed us."""
    if gradient is None:
        return None
    with undisturbed():
        return gradient.clone()


# The tap: hooks of a session's calls.


Named = Sequence[tuple[str, str, Any]]
"""Slot, alias and tensor, as `module_calls` hands them out."""

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
        self._open: list[tuple[GradientSum[Any], int]] = []
        self._held = ReturnedLists()
        self._on_leaves: list[tuple[int, Any]] = []
        self._differences: weakref.WeakSet[GradientByDifference] = weakref.WeakSet()

    def install(self) -> None:
        self.active = True
        list_operations.watch()
        backward_graph.watch(self)
        self._parameters.install()

    def remove(self) -> None:
        if self.active:
            list_operations.unwatch()
            backward_graph.unwatch(self)
        self.active = False
        self._parameters.remove()
        with self._lock:
            self._open.clear()

    @contextmanager
    def around_root(self, module: Any) -> Generator[None]:
        """Called by `module_calls` around each call of a root layer."""
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
                # A node is numbered by the first call that saw it, which may be older than this
                # one.
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
            met_before = calls.met.get(node.node_ptr())
            handed_through = any(o is not None and o.node_ptr() == node.node_ptr() for o in origins)
            if met_before is not None and met_before[0] < began and not handed_through:
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
        parts_by_node = _parts_by_node(inputs, origins)
        if not parts_by_node:
            return
        met = self._calls.met

        def is_older(pointer: int) -> bool:
            met_node = met.get(pointer)
            return met_node is not None and met_node[0] < began

        try:
            reached = edges_into(parts_by_node.keys(), ends, is_older)
        except TooMany:
            self.without(call, "more operations than are looked at")
            return
        # Where several inputs share a node, or a node shows nothing, sums cannot be assigned to
        # one.
        unclear = {pointer for pointer, parts in parts_by_node.items() if len(parts) > 1}
        unclear |= {edge.source for node, edges in reached if not shows(node) for edge in edges}
        sums = {
            pointer: GradientSum(call, *parts[0][:2])
            for pointer, parts in parts_by_node.items()
            if pointer not in unclear
        }
        for node, edges in reached:
            watched = [(edge, sums[edge.source]) for edge in edges if edge.source in sums]
            for _, gradient_sum in watched:
                gradient_sum.expected += 1
            if watched:
                arrivals = [(edge, gradient_sum.arrived) for edge, gradient_sum in watched]
                look_at(node, arrivals, self._held, functools.partial(self.lost, call.site))
        for pointer in unclear:
            self._hook_unclear(call, pointer, parts_by_node[pointer], reached)

    def _hook_unclear(
        self,
        call: PassedCall[GradientTap],
        pointer: int,
        parts: list[tuple[str, str, Any]],
        reached: list[tuple[Any, list[Edge]]],
    ) -> None:
        """Inputs whose gradient is known by its total only."""
        own = {
            (node.node_ptr(), edge.position)
            for node, edges in reached
            for edge in edges
            if edge.source == pointer
        }
        for slot, alias, tensor in parts if own else ():
            difference = GradientByDifference(
                call, slot, alias, pointer, own, is_part=len(parts) > 1
            )
            self._hook_total(difference, tensor)

    def _hook_total(self, difference: GradientByDifference, tensor: Any) -> None:
        # An in-place operation has given the tensor another origin; its hook would see the wrong
        # total.
        now = node_of(tensor)
        if now is None or now.node_ptr() != difference.source:
            self.without(difference.call, "an input that was changed in place")
            return
        handle = tensor.register_hook(difference)
        if tensor.is_leaf:  # which outlives this call's graph
            self._on_leaves.append((difference.call.step, handle))
            while self._on_leaves[0][0] < difference.call.step:
                self._on_leaves.pop(0)[1].remove()
        self._differences.add(difference)

    def begins(self, roots: list[Any], *, partial: bool) -> None:
        """A backward pass begins: who else sends something to inputs that are known by totals?"""
        del partial
        differences = list(self._differences)
        if not differences or not self.active:
            return
        try:
            nodes = [node for node in map(node_of, roots) if node is not None]
            reached = edges_into(
                {difference.source for difference in differences}, nodes, most=_WHOLE_GRAPH
            )
            for difference in differences:
                difference.begin(
                    reached, self._held, functools.partial(self.lost, difference.call.site)
                )
        except TooMany:
            return  # the hooks on the inputs say that nobody has seen it
        except Exception as error:
            self.lost(differences[0].call.site, error)

    def without(self, call: PassedCall[GradientTap], what: str) -> None:
        """An input gradient of a call cannot be had."""
        self.session.event_once(
            "gradient-lost",
            f"an input gradient of {call.site} is not captured: {_UNKNOWN.format(what)}",
            site=call.site,
        )

    # --- a backward pass

    def task(self) -> int:
        return backward_graph.number()

    def over(self) -> None:
        with self._lock:
            waiting, self._open = self._open, []
        # Before the sums are emitted, so that hooks of this pass do not stay for the next.
        for difference in list(self._differences):
            difference.forget()
        self._held.release()
        for gradient_sum, task in waiting:
            gradient_sum.finish(task)

    def expect(self, gradient_sum: GradientSum[Any], task: int) -> None:
        with self._lock:
            self._open.append((gradient_sum, task))


def _parts_by_node(inputs: Named, origins: list[Any]) -> dict[int, list[tuple[str, str, Any]]]:
    """The inputs of a call by the node that made them; several may be parts of one result."""
    parts_by_node: dict[int, list[tuple[str, str, Any]]] = {}
    for (slot, alias, tensor), node in zip(inputs, origins, strict=True):
        # Inputs that need no gradient have no origin.
        if node is not None:
            same_node = parts_by_node.setdefault(node.node_ptr(), [])
            # One tensor that is given twice has one gradient.
            if not any(_same(tensor_before, tensor) for *_, tensor_before in same_node):
                same_node.append((slot, alias, tensor))
    return parts_by_node


def _same(tensor: Any, other: Any) -> bool:
    """Whether two inputs are one tensor, given twice."""
    return tensor is other or (
        tensor.shape == other.shape
        and tensor._is_initialized()
        and tensor.data_ptr() == other.data_ptr()
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
            tap.emit(
                self._call,
                "grad_output",
                self._slot,
                self._alias,
                gradient,
                backward_graph.number(),
            )
        except Exception as error:
            tap.lost(self._call.site, error)
