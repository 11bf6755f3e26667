# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Paddle's backward graph: its nodes, the edges that lead to given nodes, and its passes.

A node's post hook returns the node's results to Paddle. Paddle does not accept lists of tensors
from it, and the program's backward would raise. So only nodes whose operations take no lists of
tensors are hooked, by name; `list_operations` covers some of the others. This file knows nothing
about calls and sessions.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import re
import sys
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import paddle
from paddle.base import core

from driftline.captures.patching import PatchSet

# The node that accumulates a leaf's gradient, at which the graph ends.
_LEAF = "GradNodeAccumulation"
_MOST_NODES = 20_000

# An argument that is a list of tensors, as written in a C++ declaration.
_LIST = re.compile(r"vector<[^<>]*Tensor")
_HEADER = "include/paddle/phi/api/include/api.h"
_DECLARED = re.compile(r"^PADDLE_API\s+.*?\s(\w+)\((.*?)\);", re.M | re.S)
_USUAL = """
abs add as_strided assign batch_norm bce_loss bmm cast ceil celu clip conv2d conv2d_transpose
conv3d cos cross_entropy_with_softmax cumsum depthwise_conv2d diagonal divide dropout
elementwise_pow elu embedding erf exp expand expand_as expm1 fft_c2c fill flash_attn flatten
flip floor fmax fmin fused_softmax_mask fused_softmax_mask_upper_triangle gather gather_nd gelu
group_norm hardshrink hardsigmoid hardswish hardtanh huber_loss index_add index_sample
index_select instance_norm kldiv_loss label_smooth layer_norm leaky_relu lerp log log10 log1p
log2 log_softmax logcumsumexp logit logsigmoid logsumexp masked_fill masked_select matmul max
maximum mean mean_all memory_efficient_attention min minimum mish multiply mv norm p_norm pad
pad3d pixel_shuffle pixel_unshuffle pool2d pow prelu put_along_axis reciprocal relu relu6
repeat_interleave reshape rms_norm roll round rsqrt scale scatter scatter_nd_add selu sigmoid
sign silu sin slice softmax softplus softshrink softsign split split_with_num sqrt square
squeeze stanh strided_slice subtract sum swiglu swish take_along_axis tanh tanh_shrink
temporal_shift thresholded_relu tile topk trace transpose tril triu unbind unfold unsqueeze
unstack view_dtype view_shape where
"""
USUAL = tuple(_USUAL.split())
"""Operations that take no list of tensors, by Paddle's names; used if there is no header."""

# This node, which Paddle makes for convolutions, belongs to no operation of the header.
_EXTRA = ("Conv2dGradNodeFinal",)


def node_name(operation: str) -> str:
    """Paddle's name of the backward node of an operation.

    >>> node_name("layer_norm"), node_name("conv2d")
    ('LayerNormGradNode', 'Conv2dGradNode')
    """
    words = operation.split("_")
    return "".join(word[:1].upper() + word[1:] for word in words) + "GradNode"


@functools.cache
def hookable() -> frozenset[str]:
    """Names of nodes whose operations take no list of tensors, from Paddle's installed header."""
    try:
        text = (Path(paddle.__file__).parent / _HEADER).read_text(encoding="utf-8")
    # A wheel may have no headers; then the list above is used.
    except OSError:
        text = ""
    declared = _DECLARED.findall(text)
    # Node names are compared, because an operation and its in-place variant share a node.
    with_lists = {node_name(name) for name, arguments in declared if _LIST.search(arguments)}
    plain = {node_name(name) for name in ([name for name, _ in declared] or USUAL)}
    return frozenset([*(plain - with_lists), *_EXTRA])


def node_of(tensor: Any) -> Any | None:
    """The node that made a tensor (`tensor.grad_fn`); None if the tensor needs no gradient.

    Paddle 3.3 counts one reference too many for the object that `grad_fn` returns. So the graph of
    every step, with its activations, would stay in memory for ever. In versions that do this, the
    surplus reference is released.
    """
    if tensor.stop_gradient:
        return None
    node = tensor.grad_fn
    if node is not None and _surplus():
        _forget(node)
    return node


_forget: Any = ctypes.pythonapi.Py_DecRef
_forget.argtypes, _forget.restype = [ctypes.py_object], None


@functools.cache
def _surplus() -> bool:
    """Whether `grad_fn` returns an object with a surplus reference, tested with a new tensor."""
    with paddle.enable_grad():
        leaf = paddle.to_tensor([1.0], place=paddle.CPUPlace(), stop_gradient=False)
        node = (leaf * 2.0).grad_fn
    held = sys.getrefcount(node)
    # Compared with a new object, because versions of Python count differently. The two additional
    # references are the variable `node` and the surplus one.
    return held == sys.getrefcount(object()) + 2


class ReturnedLists:
    """The lists that post hooks have returned to Paddle, to be emptied after the backward pass.

    Paddle 3.3 keeps a reference to a returned list for ever, and so to the tensors in it.
    """

    def __init__(self) -> None:
        self._lists: list[list[Any]] = []

    def append(self, returned: list[Any]) -> None:
        self._lists.append(returned)

    def release(self) -> None:
        """Empty and release all lists; call it when no hook is running."""
        while self._lists:
            returned = self._lists.pop()
            returned.clear()
            # If the only references are the variable and Paddle's surplus one, the list can be
            # freed.
            if sys.getrefcount(returned) == sys.getrefcount(object()) + 2:
                _forget(returned)


class Edge(NamedTuple):
    """One edge from a node to a next node.

    Attributes:
        position: Its index among the node's `next_functions`.
        width: Number of the node's `next_functions`.
        present: Number of these that are not None.
        before: Number of those that come before this edge.
        source: Pointer of the node to which the edge leads.
    """

    position: int
    width: int
    present: int
    before: int
    source: int

    def of(self, sent: Any) -> Any:
        """The gradient that a node has sent along this edge; None if none.

        Arguments of an operation that cannot have a gradient may be among the results, but not
        among the next functions.

        Raises:
            ValueError: It is unknown which of the results belongs to the edge.
        """
        if len(sent) == self.width:
            gradient = sent[self.position]
            return gradient if gradient is not None and gradient._is_initialized() else None
        filled = [tensor for tensor in sent if tensor is not None and tensor._is_initialized()]
        if len(filled) == self.present:
            return filled[self.before]
        # Nothing was sent, because a branch of the program does not depend on its inputs.
        if not filled:
            return None
        raise ValueError(f"{len(sent)} results and {self.width} next functions do not match")


class TooMany(Exception):
    """The graph has more nodes than the limit."""


def edges_into(
    sources: Collection[int],
    ends: list[Any],
    is_older: Callable[[int], bool] = lambda pointer: False,
    *,
    most: int = _MOST_NODES,
) -> list[tuple[Any, list[Edge]]]:
    """Find the nodes between `ends` and the sources that have an edge to a source.

    Args:
        sources: Pointers of the source nodes.
        ends: Nodes at which the walk begins.
        is_older: Whether the walk stops at a node, by its pointer.
        most: Largest number of nodes to visit.

    Returns:
        The nodes, each with its edges to sources.

    Raises:
        TooMany: There are more nodes.
    """
    nodes_with_edges: list[tuple[Any, list[Edge]]] = []
    stack: list[Any] = []
    seen: set[int] = set()
    for node in ends:
        pointer = node.node_ptr()
        # If a module returns its input unchanged, an end is also a source.
        if pointer not in seen and pointer not in sources and node.name() != _LEAF:
            seen.add(pointer)
            stack.append(node)
    while stack:
        node = stack.pop()
        following = node.next_functions
        present = sum(function is not None for function in following)
        edges: list[Edge] = []
        before = 0
        for position, after in enumerate(following):
            if after is None:
                continue
            pointer = after.node_ptr()
            if pointer in sources:
                edges.append(Edge(position, len(following), present, before, pointer))
            elif pointer not in seen and not is_older(pointer) and after.name() != _LEAF:
                seen.add(pointer)
                stack.append(after)
            before += 1
        if edges:
            nodes_with_edges.append((node, edges))
        # Walking a larger graph takes too long in Python; the caller reports the loss.
        if len(seen) > most:
            raise TooMany
    return nodes_with_edges


# Backward passes: the tensors at which a pass begins, and its end.


_eager: Any = core.eager
_NAMES = ("run_backward", "run_partial_grad")


class Listener(Protocol):
    """Is notified of every pass of the process; never raises."""

    def begins(self, roots: list[Any], *, partial: bool) -> None:
        """Called just before a pass, or a pass within a pass, begins.

        Args:
            roots: The tensors at which it begins.
            partial: Whether it computes gradients of some tensors only, as `paddle.grad` does.
        """
        ...

    def over(self) -> None:
        """Called when the outermost pass is over or has failed."""
        ...


class _Pass(threading.local):
    depth = 0
    number = 0


_lock = threading.Lock()
_listeners: list[Listener] = []
_patches = PatchSet()
_numbers = itertools.count(1)
_pass = _Pass()


def number() -> int:
    """The number of the pass that is running in this thread, or of the thread's last one."""
    return _pass.number


def watch(listener: Listener) -> None:
    with _lock:
        if not _listeners:
            for name in _NAMES:
                telling = functools.partial(_telling, partial=name != _NAMES[0])
                _patches.replace(_eager, name, telling)
        _listeners.append(listener)


def unwatch(listener: Listener) -> None:
    with _lock:
        if listener not in _listeners:
            return
        _listeners.remove(listener)
        if not _listeners:
            _patches.restore()


def _telling(plain: Callable[..., Any], *, partial: bool) -> Callable[..., Any]:
    def run(roots: Any, *args: Any, **kwargs: Any) -> Any:
        if not _pass.depth:
            _pass.number = next(_numbers)
        for listener in tuple(_listeners):
            # Listeners are also notified of inner passes, which double differentiation starts.
            listed = [*roots] if isinstance(roots, (list, tuple)) else [roots]
            listener.begins(listed, partial=partial)
        _pass.depth += 1
        try:
            return plain(roots, *args, **kwargs)
        finally:
            _pass.depth -= 1
            if not _pass.depth:
                for listener in tuple(_listeners):
                    listener.over()

    return run
