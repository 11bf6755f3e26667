# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Paddle's backward graph: its nodes, the edges that lead to given nodes, and its passes.

A hook behind a node hands the node's results back to Paddle, which does not accept lists of tensors
there: the program's backward would raise. So only nodes of operations without lists of tensors, by
name, are ever hooked (`list_operations` covers some of the others). Knows nothing of calls and
sessions.
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

# The node that adds into a leaf's gradient; the graph ends there.
_LEAF = "GradNodeAccumulation"
_MOST_NODES = 20_000

# An argument that is a list of tensors, as the C++ declaration spells it.
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
"""Operations that take no list of tensors, by Paddle's names, for where its header is not there."""

# Not an operation of the header, but a node that Paddle makes for convolutions.
_EXTRA = ("Conv2dGradNodeFinal",)


def node_name(operation: str) -> str:
    """What Paddle calls the node of an operation.

    >>> node_name("layer_norm"), node_name("conv2d")
    ('LayerNormGradNode', 'Conv2dGradNode')
    """
    words = operation.split("_")
    return "".join(word[:1].upper() + word[1:] for word in words) + "GradNode"


@functools.cache
def hookable() -> frozenset[str]:
    """Names of nodes whose operations take no list of tensors, as the installed header says."""
    try:
        text = (Path(paddle.__file__).parent / _HEADER).read_text(encoding="utf-8")
    # A wheel without headers: the list above stands in for them.
    except OSError:
        text = ""
    declared = _DECLARED.findall(text)
    # By nodes: an operation and its in-place twin have one.
    with_lists = {node_name(name) for name, arguments in declared if _LIST.search(arguments)}
    plain = {node_name(name) for name in ([name for name, _ in declared] or USUAL)}
    return frozenset([*(plain - with_lists), *_EXTRA])


def node_of(tensor: Any) -> Any | None:
    """The node that made a tensor, as `tensor.grad_fn`; None for one that needs no gradient.

    Paddle 3.3 counts one reference too many on what `grad_fn` gives: the graph of every step, with
    its activations, would stay in memory for ever. It is taken back where it is there.
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
    """Whether `grad_fn` counts a reference that nobody holds; asked of a tensor made for it."""
    with paddle.enable_grad():
        leaf = paddle.to_tensor([1.0], place=paddle.CPUPlace(), stop_gradient=False)
        node = (leaf * 2.0).grad_fn
    held = sys.getrefcount(node)
    # Compared with a fresh object, because versions of Python count differently.
    return held == sys.getrefcount(object()) + 2  # the name `node`, and the one too many


class ReturnedLists:
    """What hooks behind nodes have returned to Paddle: emptied once the backward pass is over.

    Paddle 3.3 keeps a reference to the returned list for ever, and to what is in it.
    """

    def __init__(self) -> None:
        self._lists: list[list[Any]] = []

    def append(self, returned: list[Any]) -> None:
        self._lists.append(returned)

    def release(self) -> None:
        """Called when no hook is under way: Paddle has taken what it was given."""
        while self._lists:
            returned = self._lists.pop()
            returned.clear()
            # The list is referred to by the variable, the call, and Paddle's surplus only.
            if sys.getrefcount(returned) == sys.getrefcount(object()) + 2:
                _forget(returned)  # nobody else can reach it


class Edge(NamedTuple):
    """One edge out of a node.

    Attributes:
        position: Its place among the node's `next_functions`.
        width: How many those are.
        present: How many of them lead anywhere.
        before: How many of those come before this one.
        source: Pointer of the node it leads to.
    """

    position: int
    width: int
    present: int
    before: int
    source: int

    def of(self, sent: Any) -> Any:
        """What a node has sent along this edge; None when nothing.

        Arguments of an operation that can have no gradient stand among the results, and not among
        the next functions.

        Raises:
            ValueError: It cannot be told which of the results it is.
        """
        if len(sent) == self.width:
            gradient = sent[self.position]
            return gradient if gradient is not None and gradient._is_initialized() else None
        filled = [tensor for tensor in sent if tensor is not None and tensor._is_initialized()]
        if len(filled) == self.present:
            return filled[self.before]
        # Nothing was sent: a branch of the program that does not depend on its inputs.
        if not filled:
            return None
        raise ValueError(f"{len(sent)} results and {self.width} next functions do not match")


class TooMany(Exception):
    """The graph has more nodes than are looked at."""


def edges_into(
    sources: Collection[int],
    ends: list[Any],
    is_older: Callable[[int], bool] = lambda pointer: False,
    *,
    most: int = _MOST_NODES,
) -> list[tuple[Any, list[Edge]]]:
    """Nodes between `ends` and the sources that have an edge into a source, with those edges.

    Args:
        sources: Pointers of nodes.
        ends: Nodes to begin at.
        is_older: Whether the walk stops at a node, by its pointer.
        most: How many nodes are looked at.

    Raises:
        TooMany: There are more.
    """
    nodes_with_edges: list[tuple[Any, list[Edge]]] = []
    stack: list[Any] = []
    seen: set[int] = set()
    for node in ends:
        pointer = node.node_ptr()
        # A source is an end, too, where a module returns its input unchanged.
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
        # A graph of this size takes seconds to walk in Python; the caller reports the loss.
        if len(seen) > most:
            raise TooMany
    return nodes_with_edges


# Backward passes: from which tensors one begins, and when it is over.


_eager: Any = core.eager
_NAMES = ("run_backward", "run_partial_grad")


class Listener(Protocol):
    """Informed of every pass of the process; never raises."""

    def begins(self, roots: list[Any], *, partial: bool) -> None:
        """A pass, or one within a pass, is about to begin at these tensors.

        Args:
            roots: The tensors.
            partial: Whether it computes gradients of some tensors only, as `paddle.grad` does.
        """
        ...

    def over(self) -> None:
        """The outermost pass is over, or has failed."""
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
    """The number of the pass that is under way in this thread, or of its last one."""
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
            # Listeners learn of inner passes, which double differentiation starts.
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
