"""How operators are noticed: a dispatch mode that sees each one and is in nobody's way.

Knows torch's mode stack and Dynamo's habits. What is done with an operator is its watcher's part.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch.utils import _python_dispatch

# Private parts of torch, of which the stubs know nothing.
_stack: Any = _python_dispatch

_NOT_THERE = frozenset({"FakeTensor", "FunctionalTensor", "ProxyTensor"})
"""Tensors of a compiler at work: they have shapes, no values."""


def hide_from_compiler(*functions: Any, callees: bool = True) -> None:
    """Keep Dynamo from compiling these when they run inside its programs, and what they call."""
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    for function in functions:
        code = inspect.unwrap(function).__code__
        if hasattr(frames, "set_code_exec_strategy"):
            skip = frames._FrameAction.SKIP
            below = skip if callees else frames._FrameAction.DEFAULT
            frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, below))
        elif hasattr(frames, "skip_code"):
            frames.skip_code(code)


class Watcher(Protocol):
    """Runs an operator, and looks at it while doing so."""

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def around_backward(self) -> AbstractContextManager[None]: ...

    def backward_unseen(self, reason: str) -> None: ...


@contextmanager
def watching(watcher: Watcher) -> Generator[None]:
    """Show every operator of this thread to `watcher`, once, until the block is left."""
    for index in range(_stack._len_torch_dispatch_stack()):
        mode = _stack._get_dispatch_stack_at(index)
        if isinstance(mode, _OperatorMode) and mode.watcher is watcher:
            yield  # recomputation calls modules inside a backward pass
            return
    with _OperatorMode(watcher):
        yield


class _OperatorMode(_python_dispatch.TorchDispatchMode):
    """Hands every operator to the watcher; torch takes the mode off while it does so."""

    supports_higher_order_operators = True

    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self.watcher = watcher

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Torch's own way loads Dynamo at the first operator: seconds, in a program without it.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and any(kind.__name__ in _NOT_THERE for kind in types):
            return func(*args, **(kwargs or {}))
        return self.watcher.call(func, args, kwargs or {})


hide_from_compiler(_OperatorMode.__torch_dispatch__)


def has_values(tensor: torch.Tensor) -> bool:
    if type(tensor).__name__ in _NOT_THERE or tensor.is_meta:
        return False
    # Reading a tensor while a CUDA graph is recorded would break the recording.
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


# The one function through which `backward` and `grad` reach the engine, found by name at each call.
# Tensor hooks would start too late: the backward of the loss itself is an operator too.
_ENGINE = "_engine_run_backward"
_autograd: Any = torch.autograd
_DELICATE = frozenset({"ProdBackward0", "ProdBackward1", "CumprodBackward0"})
_MASKED_FILL = "MaskedFillBackward1"  # only where the value filled in has a gradient
_watchers: tuple[Watcher, ...] = ()
_original: Callable[..., Any] | None = None
_lock = threading.Lock()


def _run_backward(*args: Any, **kwargs: Any) -> Any:
    assert _original is not None
    if not _watchers or torch.compiler.is_compiling():
        return _original(*args, **kwargs)
    with ExitStack() as around:
        delicate = _delicate_node(args[0] if args else kwargs.get("t_outputs", ()))
        for watcher in _watchers:
            if delicate:
                watcher.backward_unseen(f"torch computes {delicate} differently when it is watched")
            else:
                around.enter_context(watcher.around_backward())
        if delicate:
            around.enter_context(_unwatched())
        return _original(*args, **kwargs)


def _delicate_node(outputs: Sequence[Any]) -> str:
    """The first node of a graph whose gradient would change in its last bits; empty if none.

    A few formulas choose another, composite way as soon as any dispatch mode is on. All operators
    of torch's own test database were tried, with a mode that does nothing: these are the ones.
    """
    # Tensors have a `grad_fn`, gradient edges a `node`.
    nodes = [getattr(one, "grad_fn", None) or getattr(one, "node", None) for one in outputs]
    waiting = [node for node in nodes if node is not None]
    seen: set[Any] = set(waiting)
    while waiting:
        node = waiting.pop()
        following = node.next_functions
        name = type(node).__name__
        if name in _DELICATE or (name == _MASKED_FILL and following[1][0] is not None):
            return name
        for one, _ in following:
            if one is not None and one not in seen:
                seen.add(one)
                waiting.append(one)
    return ""


@contextmanager
def _unwatched() -> Generator[None]:
    """Take our modes off: inside another backward pass (reentrant checkpointing) they may be on."""
    taken: list[Any] = []
    while isinstance(_stack._get_current_dispatch_mode(), _OperatorMode):
        taken.append(_stack._pop_mode())
    try:
        yield
    finally:
        for mode in reversed(taken):
            _stack._push_mode(mode)


hide_from_compiler(watching, _unwatched, _delicate_node)
hide_from_compiler(_run_backward, callees=False)  # a backward pass may call compiled regions


def watch_backward(watcher: Watcher) -> bool:
    """Enclose every backward pass in `watcher.around_backward`; False where that is impossible."""
    global _watchers, _original
    with _lock:
        if _original is None:
            _original = getattr(_autograd, _ENGINE, None)
            if _original is None:
                return False
            setattr(_autograd, _ENGINE, _run_backward)
        _watchers = (*_watchers, watcher)
    return True


def unwatch_backward(watcher: Watcher) -> None:
    global _watchers, _original
    with _lock:
        _watchers = tuple(one for one in _watchers if one is not watcher)
        # Somebody else may have wrapped it after us; then ours stays below, doing nothing.
        if not _watchers and getattr(_autograd, _ENGINE, None) is _run_backward:
            setattr(_autograd, _ENGINE, _original)
            _original = None
