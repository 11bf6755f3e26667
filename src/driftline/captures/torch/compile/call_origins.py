"""The origin of a traced graph's nodes: the operator calls of the program whose results they are.

When a compiler traces a program, it decomposes operators (a softmax becomes six nodes) and removes
nodes. It keeps the name of a node's original operator, but not which call of it. So every call is
counted here before it is decomposed, and the nodes that compute its results are stamped with the
operator and the number of the call. Thereby graphs with and without decomposition refer to the same
calls.

Stamps are in a node's `meta`, which the compiler copies and otherwise ignores. If a pass replaces a
stamped node by another, the new node gets the stamp too, because it computes the same value.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import importlib
import itertools
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch

from driftline.graphs.sources.graph_files import Origin

STAMP = "driftline_origins"
STACK = "driftline_modules"
"""Key of the modules around a stamped node; a node that replaces it does not have them."""
# Older traces are forgotten, so that a program that always recompiles does not fill the memory.
_MOST_TRACES = 512
_proxy: Any = None
_traceback: Any = importlib.import_module("torch.fx.traceback")
_pytree: Any = importlib.import_module("torch.utils._pytree")
_autograd: Any = torch.autograd
_numbers = itertools.count()
_original: Any = None
_replace: Any = None
_users = 0
_lock = threading.Lock()


class _Thread(threading.local):
    depth = 0


_thread = _Thread()


class Call(NamedTuple):
    """An operator call of the program, before it is decomposed.

    Attributes:
        operator: The operator.
        arguments: Positional and keyword arguments; a tensor is a `Given`, a symbolic size a
            `Varying`.
    """

    operator: Any
    arguments: tuple[Any, Any]


class Given(NamedTuple):
    """A tensor argument of a call.

    Attributes:
        results: The results of calls that it is; none for an input of the graph.
        name: Name of its node.
        constant: Its value, if that is known while tracing.
    """

    results: tuple[Result, ...]
    name: str
    constant: torch.Tensor | None = None


class Varying(NamedTuple):
    """A number that depends on sizes of the inputs."""

    formula: Any


Result = tuple[int, str, str, int, str]
"""(trace, place, operator without overload, index of the call, slot of the result)."""


class _Counts:
    """The operator calls of one trace so far.

    Attributes:
        calls: Number of calls by place (phase and module) and operator.
        taken: Calls with their arguments, by place, operator and index.
        made: The module of each autograd node, by sequence number, for its backward operators.
        backward: Whether the backward pass has begun, after which no forward operator follows.
    """

    __slots__ = ("backward", "calls", "made", "taken")

    def __init__(self) -> None:
        self.calls: dict[tuple[str, str], int] = {}
        self.taken: dict[tuple[str, str, int], Call] = {}
        self.made: dict[int, str] = {}
        self.backward = False

    def place(self) -> str:
        """Phase and module of the operator that is being traced."""
        meta: dict[str, Any] = _traceback.current_meta
        numbers = meta.get("grad_fn_seq_nr")
        # Operators of a gradient formula are traced with the sequence number of their forward node.
        if meta.get("in_grad_fn", 0) and numbers:
            self.backward = True
            return f"backward {self.made.get(numbers[-1], '')}"
        if self.backward:  # sums of gradients belong to no operator of the forward pass
            return "backward +"
        stack = meta.get("nn_module_stack")
        module = str(next(reversed(stack))).partition("@")[0] if stack else ""
        # The number of the autograd node just made precedes the next number.
        self.made[_autograd._get_sequence_nr() - 1] = module
        return f"forward {module}"


_traces: OrderedDict[int, _Counts] = OrderedDict()


def install() -> bool:
    """Begin to stamp nodes; return False if this version of torch lacks a function we wrap."""
    global _proxy, _original, _replace, _users
    with _lock:
        _users += 1
        if _original is not None:
            return True
        _replace = torch.fx.Node.replace_all_uses_with
        torch.fx.Node.replace_all_uses_with = _replaced
        _proxy = importlib.import_module("torch.fx.experimental.proxy_tensor")
        if not all(hasattr(_proxy, name) for name in ("proxy_call", "get_proxy_slot")):
            return False
        _original = _proxy.proxy_call
        _proxy.proxy_call = _call
        return True


def remove() -> None:
    global _original, _users
    with _lock:
        _users -= 1
        if _users or _original is None:
            return
        if torch.fx.Node.replace_all_uses_with is _replaced:
            torch.fx.Node.replace_all_uses_with = _replace
        if _proxy.proxy_call is _call:
            _proxy.proxy_call = _original
        _original = None


def of_node(node: Any) -> tuple[Origin, ...]:
    """The calls whose results a node computes, for the list of graphs."""
    origins: list[Origin] = []
    for operator, slot, nth, place, trace in node.meta.get(STAMP, ()):
        counts = _traces.get(trace)
        total = counts.calls.get((place, name_of(operator)), 0) if counts is not None else 0
        origins.append(Origin(operator, nth, slot, total))
    return tuple(origins)


def results_of(node: Any) -> list[Result]:
    """The results of calls that a node computes."""
    return [
        (trace, place, name_of(operator), nth, slot)
        for operator, slot, nth, place, trace in node.meta.get(STAMP, ())
    ]


def call_of(result: Result) -> Call | None:
    """The call that has a result; None if its trace is forgotten."""
    trace, place, name, nth, _ = result
    counts = _traces.get(trace)
    return counts.taken.get((place, name, nth)) if counts is not None else None


def name_of(operator: str) -> str:
    """An operator's name without its overload, which may differ in a program not compiled."""
    return operator.rpartition(".")[0]


def _call(mode: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `proxy_call`, which traces one operator call."""
    original = _original or _proxy.proxy_call
    # Only the outermost call is the program's own; inner calls are its decomposition.
    if _thread.depth:
        return original(mode, func, *args, **kwargs)
    _thread.depth = 1
    try:
        result = original(mode, func, *args, **kwargs)
    finally:
        _thread.depth = 0
    if result is not NotImplemented:
        try:
            _stamp(mode.tracer, func, result, args, kwargs)
        except Exception:  # the compiler continues, and the node has no origin
            return result
    return result


def _replaced(self: Any, replace_with: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `Node.replace_all_uses_with`, by which a pass replaces a node by another."""
    result = _replace(self, replace_with, *args, **kwargs)
    # If the node is still used, it was not replaced, but another node was inserted after it.
    if result and not self.users and STAMP in self.meta and _can_stand_in(self, replace_with):
        stamps = replace_with.meta.get(STAMP, [])
        new = [stamp for stamp in self.meta[STAMP] if stamp not in stamps]
        replace_with.meta[STAMP] = [*stamps, *new]
        if STACK in self.meta:
            replace_with.meta.setdefault(STACK, self.meta[STACK])
    return result


def _can_stand_in(old: Any, new: Any) -> bool:
    """Whether the new node has the value of the old one, judged by kind, dtype and rank."""
    if not isinstance(new, torch.fx.Node) or new.op != "call_function":
        return False
    before, after = old.meta.get("val"), new.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        # Values other than tensors cannot be compared, so the pass is trusted.
        return True
    return before.dtype == after.dtype and before.dim() == after.dim()


def _stamp(tracer: Any, func: Any, result: Any, args: Any, kwargs: Any) -> None:
    trace = tracer.__dict__.get(STAMP)
    if trace is None:
        trace = tracer.__dict__[STAMP] = next(_numbers)
        _traces[trace] = _Counts()
        # The oldest trace is removed first.
        while len(_traces) > _MOST_TRACES:
            _traces.popitem(last=False)
    counts = _traces.get(trace)
    if counts is None:
        return
    operator, place = str(func), counts.place()
    key = (place, name_of(operator))
    nth = counts.calls.get(key, 0)
    counts.calls[key] = nth + 1
    # The last two of all arguments are the call's positional and its keyword arguments; depending
    # on torch's version, `pre_dispatch` comes before them.
    counts.taken[(*key, nth)] = Call(func, _given(tracer, (*args, *kwargs.values())[-2:]))
    for slot, tensor in _tensors(result, ""):
        held = _proxy.get_proxy_slot(tensor, tracer, None)
        proxy = getattr(held, "proxy", held)
        node = getattr(proxy, "node", None)
        if node is not None:
            # A new list each time, because shallow copies of a node's `meta` share the list.
            before = node.meta.get(STAMP, [])
            node.meta[STAMP] = [*before, [operator, slot or "0", nth, place, trace]]
            if stack := _traceback.current_meta.get("nn_module_stack"):
                node.meta[STACK] = stack


def _given(tracer: Any, arguments: Any) -> Any:
    """The arguments of a call, described without keeping the tensors of the trace alive."""

    def described(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            held = _proxy.get_proxy_slot(value, tracer, None)
            node = getattr(getattr(held, "proxy", held), "node", None)
            if node is None:
                return Given((), "")
            # A placeholder has no origin; its stamps would be those of another trace.
            results = () if node.op == "placeholder" else tuple(results_of(node))
            return Given(results, node.name, getattr(held, "constant", None))
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return Varying(value.node.expr)
        return value

    return _pytree.tree_map(described, arguments)


def _tensors(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(cast("Sequence[Any]", value)):
            yield from _tensors(part, f"{path}.{index}" if path else str(index))
