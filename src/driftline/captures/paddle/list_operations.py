"""Gradients of operations whose backward nodes cannot have a hook.

Paddle does not accept lists from a node's post hook (`backward_graph`), so nodes of operations that
take lists of tensors, and nodes of a `PyLayer`, are never hooked. The gradients that some of them
send are known without such a hook: `concat`, `stack` and `add_n` pass on parts of the result's
gradient, `einsum` multiplies it with the other operands, and the backward of a `PyLayer` is a
Python function. So the Python functions are wrapped while a session watches, and a hook on the
result gets its gradient. The graph is not changed.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false
from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import paddle
from paddle import _C_ops
from paddle.autograd import py_layer

from driftline.captures.paddle.backward_graph import node_of
from driftline.captures.paddle.tensors import grad_enabled, undisturbed

Sent = list[Any]
"""The gradients that a node sends along its edges, in their order; None for none."""

_ops: Any = _C_ops
_PyLayer: Any = py_layer.PyLayer
_PyLayerBackward: Any = py_layer.PyLayerBackward

_lock = threading.Lock()
_watching = 0
_plain: dict[str, Callable[..., Any]] = {}
_plain_backward: Callable[..., Any] = _PyLayerBackward.backward
# Weak references: the hook on the result keeps a sender alive until the graph is freed.
_senders: weakref.WeakValueDictionary[int, _Sender] = weakref.WeakValueDictionary()


class _Running(threading.local):
    layer: _Sender | None = None


_running = _Running()


class _Sender:
    """One call of such an operation; also the hook on its results, which keeps it alive."""

    __slots__ = ("__weakref__", "_divide", "_listeners")

    def __init__(self, divide: Callable[[Any], Sent] | None) -> None:
        self._divide = divide
        self._listeners: list[Callable[[Sent], None]] = []

    def listen(self, listener: Callable[[Sent], None]) -> None:
        self._listeners.append(listener)

    def leave(self, listener: Callable[[Sent], None]) -> None:
        if listener in self._listeners:
            self._listeners.remove(listener)

    def __call__(self, gradient: Any) -> None:
        """The hook on a result, which Paddle calls just before the node runs."""
        # The gradients that a PyLayer sends are known when its own backward has run.
        if self._divide is None:
            _running.layer = self
        elif self._listeners and gradient is not None:
            with undisturbed():
                self.tell(self._divide(gradient))

    def tell(self, sent: Sent) -> None:
        for listener in tuple(self._listeners):
            listener(sent)


def find(pointer: int) -> _Sender | None:
    """The call whose node has this pointer; None for nodes of other operations."""
    return _senders.get(pointer)


def watch() -> None:
    """Wrap these operations, until `unwatch` was called as often."""
    global _watching, _plain_backward
    with _lock:
        _watching += 1
        if _watching > 1:
            return
        for name, wrapped in _WRAPPED.items():
            _plain[name] = getattr(_ops, name)
            setattr(_ops, name, wrapped)
        _PyLayer.apply = classmethod(_apply)
        _plain_backward = _PyLayerBackward.backward
        _PyLayerBackward.backward = _backward


def unwatch() -> None:
    global _watching
    with _lock:
        _watching -= 1
        if _watching:
            return
        for name, wrapped in _WRAPPED.items():
            # If another library has wrapped our function since, ours stays and does nothing.
            if getattr(_ops, name) is wrapped:
                setattr(_ops, name, _plain[name])
        # The original `apply` is inherited, so the wrapper is only deleted.
        if vars(_PyLayer).get("apply") is not None:
            del _PyLayer.apply
        if _PyLayerBackward.backward is _backward:
            _PyLayerBackward.backward = _plain_backward


def _note(results: Any, divide: Callable[[Any], Sent] | None) -> None:
    """Remember the operation that has just returned these results. Never raises."""
    if not _watching or not grad_enabled():
        return
    try:
        tensors = results if isinstance(results, (list, tuple)) else (results,)
        sender: _Sender | None = None
        for tensor in tensors:
            node = node_of(tensor) if isinstance(tensor, paddle.Tensor) else None
            if node is not None:
                # Several results of one operation share one node, and one sender.
                sender = sender or _Sender(divide)
                _senders[node.node_ptr()] = sender
                tensor.register_hook(sender)
    except Exception:
        return  # its gradients are then unknown, which is reported where they are needed


def _concat(tensors: Any, axis: Any = 0, *rest: Any, **named: Any) -> Any:
    result = _plain["concat"](tensors, axis, *rest, **named)
    if paddle.in_dynamic_mode() and isinstance(tensors, (list, tuple)):
        _note(result, _cutting([tensor.shape for tensor in tensors], axis))
    return result


def _cutting(shapes: list[list[int]], axis: Any) -> Callable[[Any], Sent]:
    def divide(gradient: Any) -> Sent:
        along = int(axis)
        return list(paddle.split(gradient, [shape[along] for shape in shapes], axis=along))

    return divide


def _stack(tensors: Any, axis: Any = 0, *rest: Any, **named: Any) -> Any:
    result = _plain["stack"](tensors, axis, *rest, **named)
    if paddle.in_dynamic_mode():
        _note(result, lambda gradient: list(paddle.unbind(gradient, axis=int(axis))))
    return result


def _add_n(tensors: Any, *rest: Any, **named: Any) -> Any:
    result = _plain["add_n"](tensors, *rest, **named)
    if paddle.in_dynamic_mode() and isinstance(tensors, (list, tuple)):
        count = len(tensors)
        _note(result, lambda gradient: [gradient] * count)
    return result


def _einsum(operands: Any, equation: str, *rest: Any, **named: Any) -> Any:
    result = _plain["einsum"](operands, equation, *rest, **named)
    if paddle.in_dynamic_mode() and (labels := _labels(operands, equation)) is not None:
        # Detached, so that the hook does not keep the operands' own graph alive.
        held = [operand.detach() for operand in operands]
        _note(result[0], lambda gradient: _factors(gradient, held, labels))
    return result


def _labels(operands: Any, equation: str) -> list[str] | None:
    """The labels of the result and of each operand; None if the gradients are not plain products.

    Such calls are left to `GradientByDifference`.
    """
    operand_labels, arrow, out = equation.replace(" ", "").partition("->")
    parts = operand_labels.split(",")
    # A repeated label is a diagonal, whose gradient is no product.
    plain = all(part.isalpha() and len(set(part)) == len(part) for part in parts)
    if not plain or not arrow or "." in out or len(parts) != len(operands):
        return None
    # Gradients of complex factors need conjugates, which the product below does not have.
    if any(operand.is_complex() for operand in operands):
        return None
    return [out, *parts]


def _factors(gradient: Any, operands: list[Any], labels: list[str]) -> Sent:
    """The gradients of an einsum's operands: the result's gradient times all other factors."""
    sent: Sent = []
    for index, (operand, own) in enumerate(zip(operands, labels[1:], strict=True)):
        others = [factor for n, factor in enumerate(operands) if n != index]
        other_labels = [factor for n, factor in enumerate(labels) if n != index + 1]
        shared = "".join(label for label in own if any(label in factor for factor in other_labels))
        factor = _plain["einsum"]([gradient, *others], f"{','.join(other_labels)}->{shared}")[0]
        for axis, label in enumerate(own):
            if label not in shared:  # the label occurs in no other factor: it was summed over
                factor = factor.unsqueeze(axis)
        sent.append(factor.expand(operand.shape))
    return sent


_WRAPPED: dict[str, Callable[..., Any]] = {
    "concat": _concat,
    "stack": _stack,
    "add_n": _add_n,
    "einsum": _einsum,
}


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `PyLayer.apply`."""
    results = super(_PyLayer, cls).apply(*args, **kwargs)
    if paddle.in_dynamic_mode():
        _note(results, None)
    return results


def _backward(self: Any, *gradients: Any) -> Any:
    """Replaces the call of a PyLayer's own `backward`."""
    sender, _running.layer = _running.layer, None
    sent = _plain_backward(self, *gradients)
    if sender is not None:
        try:
            sender.tell(list(sent) if isinstance(sent, (list, tuple)) else [sent])
        except Exception:
            return sent
    return sent
