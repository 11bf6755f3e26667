"""What comes back to one input of one call, put together from what passes in the backward graph.

What the call's own operations send, as hooks show it, an `Inflow` adds up. `Rest` is for inputs
where one of them shows nothing: the input's total, less what everybody else sends to it. Nothing is
put into the graph; what cannot be told is said, never guessed.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from driftline.adapters.backward import PassedCall
from driftline.adapters.paddle import passes, senders
from driftline.adapters.paddle.edges import Edge, Held, hookable
from driftline.adapters.paddle.snapshot import undisturbed

if TYPE_CHECKING:
    from driftline.adapters.paddle.gradients import GradientTap

_MOST_TERMS, _LOOKED_AT = 14, 256
_UNSEEN = "operations of a pass that nobody saw begin"

Arrived = Callable[[Any], None]
"""Takes what came along one edge; None when nothing did."""
Failed = Callable[[Exception], None]


def shows(node: Any) -> bool:
    """Whether what a node sends can be seen."""
    return node.name() in hookable() or senders.find(node.node_ptr()) is not None


def look_at(node: Any, edges: list[tuple[Edge, Arrived]], held: Held, failed: Failed) -> Any:
    """Show what a node sends along some of its edges; gives what takes the hook away again."""
    watch = _Watch(edges, failed)
    if node.name() in hookable():
        return node._register_post_hook(_NodeHook(watch, held)).remove
    sender = senders.find(node.node_ptr())
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

    def __init__(self, watch: _Watch, held: Held) -> None:
        self._watch = watch
        self._held = held.append

    def __call__(self, sent: Any, _: Any) -> Any:
        self._watch(sent)
        # Paddle goes on with what a hook returns, the very same tensors, and never lets it go.
        given = list(sent)
        self._held(given)
        return given


class Rest:
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

    def begin(self, reached: list[tuple[Any, list[Edge]]], held: Held, failed: Failed) -> None:
        """A pass begins in which these edges lead to the input's origin."""
        own: list[tuple[Any, list[Edge]]] = []
        foreign: list[tuple[Any, list[Edge]]] = []
        for node, edges in reached:
            mine = [edge for edge in edges if edge.source == self.source]
            inside = [edge for edge in mine if (node.node_ptr(), edge.position) in self.edges]
            outside = [edge for edge in mine if edge not in inside]
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
        if self.is_part:
            watched += [(node, edges, self._mine) for node, edges in own]
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
                tap.emit(self.call, "grad_input", self.slot, self.alias, own, passes.number())
        except Exception as error:
            tap.lost(self.call.site, error)

    def _share(self, total: Any) -> Any | None:
        """What of the total is the call's own; None, and the reason in `_why`, if unknown."""
        if self._why is not None or not self._expected:
            return total if self._why is None else None
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
            for one in others:
                total = total if one is None else total - one
        return total


def _addressed_here(total: Any, own: list[Any], others: list[Any]) -> list[Any] | None:
    """Those of the others that are terms of a total, of which some of our own are the rest.

    None if more than one choice of terms gives the total, or none does.
    """
    terms = [(one, False) for one in own] + [(one, True) for one in others]
    terms = [(one, far) for one, far in terms if one is not None and one.shape == total.shape]
    if len(terms) > _MOST_TERMS:
        return None
    goal, *values = (_some_of(one) for one in (total, *(one for one, _ in terms)))
    allowed = np.abs(values).sum(axis=0) * (0.02 if total.element_size() == 2 else 1e-5)
    fitting: list[tuple[int, ...]] = []
    for count in range(len(terms) + 1):
        for chosen in itertools.combinations(range(len(terms)), count):
            apart = np.abs(sum((values[at] for at in chosen), np.zeros_like(goal)) - goal)
            if bool((apart <= allowed).all()):
                fitting.append(chosen)
    if len(fitting) != 1:
        return None
    return [terms[at][0] for at in fitting[0] if terms[at][1]]


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
