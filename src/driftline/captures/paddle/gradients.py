# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""Gradients of Paddle layers and parameters, read without changing what autograd computes.

The gradient of a call's input is computed from gradients that nodes of the backward graph send.
`GradientSum` adds up those of the call's own operations, which hooks show. If hooks cannot show
those of one operation, `GradientByDifference` takes the input's total gradient and subtracts what
all other operations send to the input. Nothing is inserted into the graph. Gradients that cannot be
determined are reported, never guessed.
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

# More terms would mean more than 2**14 combinations, too many to try during a backward pass.
_MOST_TERMS, _LOOKED_AT = 14, 256
_UNSEEN = "operations of a pass that nobody saw begin"

Arrived = Callable[[Any], None]
"""Takes the gradient that was sent along one edge; None for none."""
Failed = Callable[[Exception], None]


def shows(node: Any) -> bool:
    """Whether the gradients that a node sends can be observed."""
    return node.name() in hookable() or list_operations.find(node.node_ptr()) is not None


def look_at(
    node: Any, edges: list[tuple[Edge, Arrived]], held: ReturnedLists, failed: Failed
) -> Any:
    """Observe the gradients that a node sends along some of its edges.

    Args:
        node: A node for which `shows` is true.
        edges: The edges, each with the function that gets its gradient.
        held: Takes the lists that the hook returns to Paddle.
        failed: Gets exceptions.

    Returns:
        A function that ends the observation.
    """
    watch = _Watch(edges, failed)
    if node.name() in hookable():
        return node._register_post_hook(_NodeHook(watch, held)).remove
    sender = list_operations.find(node.node_ptr())
    assert sender is not None
    sender.listen(watch)
    return lambda: sender.leave(watch)


class _Watch:
    """Distributes the gradients that a node sends to the functions of its edges."""

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
    """The post hook of a node, which Paddle calls after the node has run."""

    __slots__ = ("_held", "_watch")

    def __init__(self, watch: _Watch, held: ReturnedLists) -> None:
        self._watch = watch
        self._held = held.append

    def __call__(self, sent: Any, _: Any) -> Any:
        self._watch(sent)
        # Paddle continues with the returned list, which holds the same tensors, and never frees it.
        returned = list(sent)
        self._held(returned)
        return returned


class GradientByDifference:
    """The gradient of one input of one call, as a difference; also the hook on the input.

    When a backward pass begins, the edges that lead to the input from outside the call are known.
    If there are none, the input's total gradient is the call's own. If all of them can be observed,
    their gradients are subtracted. If two inputs are results of one operation (parts of a split),
    an edge does not say to which of them it leads. Then, if others send gradients too, the terms
    of each total are found by trying which of them add up to it.
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
        """Prepare for a backward pass.

        Args:
            reached: Nodes of the pass with their edges into nodes that made watched inputs.
            held: Takes the lists that hooks return to Paddle.
            failed: Gets exceptions.
        """
        own: list[tuple[Any, list[Edge]]] = []
        foreign: list[tuple[Any, list[Edge]]] = []
        for node, edges in reached:
            edges_here = [edge for edge in edges if edge.source == self.source]
            inside = [edge for edge in edges_here if (node.node_ptr(), edge.position) in self.edges]
            outside = [edge for edge in edges_here if edge not in inside]
            own += [(node, inside)] if inside else []
            foreign += [(node, outside)] if outside else []
        if not own:
            return  # the pass is over another graph, such as a pass within a pass
        self.forget()
        self._why = None
        self._expected = sum(len(edges) for _, edges in foreign)
        if not foreign:
            return
        watched = [(node, edges, self._foreign) for node, edges in foreign]
        # For parts of one result the call's own terms are needed too, to distinguish the parts.
        if self.is_part:
            watched += [(node, edges, self._mine) for node, edges in own]
        # If one operation cannot be observed, the difference is unknown.
        blind = [node.name() for node, *_ in watched if not shows(node)]
        if blind:
            self._why = blind[0].removesuffix("GradNode")
            return
        for node, edges, arrived in watched:
            arrivals: list[tuple[Edge, Arrived]] = [(edge, arrived) for edge in edges]
            self._remove.append(look_at(node, arrivals, held, failed))

    def forget(self) -> None:
        """Remove the hooks and reset the state after a pass."""
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
        """The call's own part of the total; None, with the reason in `_why`, if it is unknown."""
        if self._why is not None or not self._expected:
            return total if self._why is None else None
        # A neighbour may have sent nothing, or may not have been observed; the difference would be
        # a guess.
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
    """The gradients of other operations that are terms of a total; its other terms are our own.

    None if no combination of terms gives the total, or more than one does.
    """
    terms = [(tensor, False) for tensor in own] + [(tensor, True) for tensor in others]
    terms = [
        (tensor, far) for tensor, far in terms if tensor is not None and tensor.shape == total.shape
    ]
    # Every additional term doubles the number of combinations.
    if len(terms) > _MOST_TERMS:
        return None
    goal, *values = (_some_of(tensor) for tensor in (total, *(tensor for tensor, _ in terms)))
    # The rounding error of the sum: 16-bit formats have about three digits, float32 seven.
    allowed = np.abs(values).sum(axis=0) * (0.02 if total.element_size() == 2 else 1e-5)
    fitting: list[tuple[int, ...]] = []
    for count in range(len(terms) + 1):
        for chosen in itertools.combinations(range(len(terms)), count):
            apart = np.abs(sum((values[index] for index in chosen), np.zeros_like(goal)) - goal)
            if bool((apart <= allowed).all()):
                fitting.append(chosen)
    # Two combinations that both fit would give different gradients.
    if len(fitting) != 1:
        return None
    return [terms[index][0] for index in fitting[0] if terms[index][1]]


def _some_of(tensor: Any) -> Any:
    """An even sample of a tensor's elements, as float64."""
    flat = tensor.astype("float32").flatten()
    return flat[:: max(flat.shape[0] // _LOOKED_AT, 1)].numpy().astype(np.float64)


def _copied(gradient: Any) -> Any:
    """A copy of a gradient, because the engine may add to the original later."""
    if gradient is None:
        return None
    with undisturbed():
        return gradient.clone()


# The tap, which hooks the tensors of a session's calls.


Named = Sequence[tuple[str, str, Any]]
"""(slot, alias, tensor) of each tensor, as `module_calls` passes them to taps."""

_WHOLE_GRAPH = 400_000
"""Largest number of nodes visited in a whole backward graph; takes about a second in Python."""
_UNKNOWN = "what its {} send back cannot be seen in Paddle"


class GradientTap(CallGradients):
    """Captures gradients of layers and of parameters, and the gradients that optimizers use."""

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
        """A context around each outermost layer call."""
        calls = self._calls
        depth = len(calls.items)
        self._parameters.watch(module)
        try:
            yield
        finally:
            del calls.items[depth:]  # entries that an exception left
            if not depth:
                calls.met.clear()
            self._parameters.watch(module)  # layers may create parameters in their first call

    def before_forward(self, frame: Any, inputs: Named) -> None:
        """Remember the nodes of the inputs, because an in-place operation would replace them."""
        if not (self.active and grad_enabled() and self.session.wants_step(frame.step)):
            return
        calls = self._calls
        calls.serial += 1
        origins = [node_of(tensor) for _, _, tensor in inputs]
        for node in origins:
            if node is not None:
                # A node keeps the number from when it was first seen.
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
            # Hooks on a leaf would outlive this call's graph and accumulate.
            if tensor.stop_gradient or tensor.is_leaf:
                continue
            node = node_of(tensor)
            if node is None:
                continue
            met_before = calls.met.get(node.node_ptr())
            handed_through = any(o is not None and o.node_ptr() == node.node_ptr() for o in origins)
            if met_before is not None and met_before[0] < began and not handed_through:
                continue  # a cached tensor: made before this call, and not an input of it
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
        # If several inputs share a node, or a node cannot be observed, there is no simple sum.
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
        """Hook inputs that share a node or get gradients from a node that cannot be observed."""
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
        # After an in-place operation the tensor has another node, and its hook would get the wrong
        # total.
        now = node_of(tensor)
        if now is None or now.node_ptr() != difference.source:
            self.without(difference.call, "an input that was changed in place")
            return
        handle = tensor.register_hook(difference)
        if tensor.is_leaf:  # a leaf outlives this call's graph, so its hook must be removed
            self._on_leaves.append((difference.call.step, handle))
            while self._on_leaves[0][0] < difference.call.step:
                self._on_leaves.pop(0)[1].remove()
        self._differences.add(difference)

    def begins(self, roots: list[Any], *, partial: bool) -> None:
        """Find the other operations that send gradients to inputs which are hooked by totals."""
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
            return  # the hooks on the inputs report that the pass was not seen
        except Exception as error:
            self.lost(differences[0].call.site, error)

    def without(self, call: PassedCall[GradientTap], what: str) -> None:
        """Report an input gradient of a call that cannot be determined."""
        self.session.event_once(
            "gradient-lost",
            f"an input gradient of {call.site} is not captured: {_UNKNOWN.format(what)}",
            site=call.site,
        )

    # --- Backward passes.

    def task(self) -> int:
        return backward_graph.number()

    def over(self) -> None:
        with self._lock:
            waiting, self._open = self._open, []
        # Done before the sums are emitted, so that no hook of this pass remains for the next.
        for difference in list(self._differences):
            difference.forget()
        self._held.release()
        for gradient_sum, task in waiting:
            gradient_sum.finish(task)

    def expect(self, gradient_sum: GradientSum[Any], task: int) -> None:
        with self._lock:
            self._open.append((gradient_sum, task))


def _parts_by_node(inputs: Named, origins: list[Any]) -> dict[int, list[tuple[str, str, Any]]]:
    """The inputs of a call by the node that made them; a node may have made several inputs."""
    parts_by_node: dict[int, list[tuple[str, str, Any]]] = {}
    for (slot, alias, tensor), node in zip(inputs, origins, strict=True):
        # Inputs that need no gradient have no node.
        if node is not None:
            same_node = parts_by_node.setdefault(node.node_ptr(), [])
            # A tensor that is passed twice has one gradient.
            if not any(_same(tensor_before, tensor) for *_, tensor_before in same_node):
                same_node.append((slot, alias, tensor))
    return parts_by_node


def _same(tensor: Any, other: Any) -> bool:
    """Whether two inputs are the same tensor."""
    return tensor is other or (
        tensor.shape == other.shape
        and tensor._is_initialized()
        and tensor.data_ptr() == other.data_ptr()
    )


class _Calls(threading.local):
    """The current calls of this thread, and the nodes of the graph in the order they were seen.

    Nodes are kept until the outermost call is over, because a new node may get the address of a
    dead one.
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
    """A hook on one output of a call, which captures the output's gradient."""

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
