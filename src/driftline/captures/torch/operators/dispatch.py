# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""Observe operators with a dispatch mode that sees every operator and changes nothing.

The file has three parts. The first follows forward-mode differentiation: inside a level
(`torch.func.jvp`, dual levels) torch chooses the formula of a tangent at each operator, and if any
dispatch mode is on it chooses another one, with other last bits; so our mode is switched off. The
second finds other functions and nodes that are sensitive to modes. The third is the mode itself,
which is put below all modes of the program.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch.autograd import forward_ad
from torch.utils import _python_dispatch

from driftline.captures.patching import PatchSet

_forward_ad: Any = forward_ad
_open = False
_opened: Callable[[], None] | None = None
_closed: Callable[[], None] | None = None
_level_patches = PatchSet()


def is_open() -> bool:
    """Whether a forward-mode level is open. Levels belong to the process, not to a thread."""
    return _open


def _doors() -> tuple[Any, str, str]:
    """The module and names of the functions with which torch opens and closes a level.

    torch looks these functions up by name at each call. If there is an inner pair, it is used,
    because compiled graphs, and programs that imported the outer pair by name before us, call it
    too.
    """
    inner: Any = sys.modules.get("torch._functorch.predispatch")
    names = ("_enter_dual_level_impl", "_exit_dual_level_impl")
    if inner is not None and all(hasattr(inner, name) for name in names):
        return (inner, *names)
    return _forward_ad, "enter_dual_level", "exit_dual_level"


def follow(opened: Callable[[], None], closed: Callable[[], None]) -> None:
    """Call `opened` before the outermost level is opened, and `closed` after it is closed."""
    global _open, _opened, _closed
    _opened, _closed = opened, closed
    # A level may be open already when a capture begins.
    _open = _forward_ad._current_level >= 0
    where, enter_name, exit_name = _doors()
    enter, leave = getattr(where, enter_name), getattr(where, exit_name)

    def watched_enter() -> int:
        # Only the outermost level matters; inner levels make no difference.
        global _open
        if _open or _opened is None:
            return enter()
        _open = True
        _opened()
        try:
            return enter()
        # Opening failed, so no level will be closed later.
        except BaseException:
            _now_closed()
            raise

    def watched_leave(*, level: int | None = None) -> None:
        inmost = _forward_ad._current_level if level is None else level
        leave(level=level)
        if inmost == 0 and _open:
            _now_closed()

    _level_patches.replace(where, enter_name, lambda _: watched_enter)
    _level_patches.replace(where, exit_name, lambda _: watched_leave)


def _now_closed() -> None:
    global _open
    _open = False
    if _closed is not None:
        _closed()


def unfollow() -> None:
    """Stop the calls and restore torch's functions."""
    global _opened, _closed
    _opened = _closed = None
    _level_patches.restore()


# Mode-sensitive functions: if any mode is on, torch computes them in another way, and the results
# differ in their last bits.


FUNCTIONS = ("cond", "eigvalsh", "matrix_norm", "matrix_rank", "norm", "svdvals")
"""Functions of `torch.linalg` that compute eigenvalues or singular values.

If a mode is on, they compute the vectors too.
"""
_BY_SINGULAR_VALUES = ("nuc", 2, -2)
_NORMS = ("linalg_matrix_norm", "linalg_norm")

_NODES = frozenset({"ProdBackward0", "ProdBackward1", "CumprodBackward0", "LinalgDetBackward0"})
_MASKED_FILL = "MaskedFillBackward1"  # sensitive only if the filled value has a gradient


def is_mode_sensitive(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of one of `FUNCTIONS` is mode-sensitive: norms only for some orders."""
    if name not in _NORMS:
        return True
    order = kwargs.get("ord", args[1] if len(args) > 1 else None)
    return order in _BY_SINGULAR_VALUES


def mode_sensitive_node(outputs: Sequence[Any]) -> str:
    """Name of a node in a graph whose gradient would change in its last bits; empty if none."""
    # Tensors have a `grad_fn`, gradient edges a `node`.
    nodes = [
        getattr(output, "grad_fn", None) or getattr(output, "node", None) for output in outputs
    ]
    waiting = [node for node in nodes if node is not None]
    seen: set[Any] = set(waiting)
    while waiting:
        node = waiting.pop()
        following = node.next_functions
        name = type(node).__name__
        # The second edge is that of the filled value, whose gradient would change.
        if name in _NODES or (name == _MASKED_FILL and following[1][0] is not None):
            return name
        for output, _ in following:
            if output is not None and output not in seen:
                seen.add(output)
                waiting.append(output)
    return ""


# The mode.


# Private parts of torch, which are not in its type stubs.
_stack: Any = _python_dispatch

_NOT_THERE = frozenset({"FakeTensor", "FunctionalTensor", "ProxyTensor"})
"""Classes of tensors that a compiler uses while tracing; they have shapes but no values."""
_TANGENTS = "forward-mode differentiation (torch.func.jvp, dual levels)"


def hide_from_compiler(*functions: Any, callees: bool = True) -> None:
    """Keep Dynamo from compiling functions and, with `callees`, everything that they call."""
    # A build of torch may lack Dynamo, or have another interface.
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    for function in functions:
        code = inspect.unwrap(function).__code__
        if hasattr(frames, "set_code_exec_strategy"):
            skip = frames._FrameAction.SKIP
            below = skip if callees else frames._FrameAction.DEFAULT
            frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, below))
        elif hasattr(frames, "skip_code"):
            frames.skip_code(code)


def break_graphs(*hooks: Any) -> None:
    """Let the compiler call hooks instead of compiling them into a program.

    If a hook were traced, it might run once too often, because Dynamo begins anew at code that it
    cannot compile.
    """
    hide_from_compiler(*hooks)
    for hook in hooks:
        hook.__dict__["_torchdynamo_disable"] = True  # as `torch.compiler.disable` does


class Watcher(Protocol):
    """Runs operators and observes them."""

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def around_backward(self) -> AbstractContextManager[None]: ...

    def unseen(self, what: str) -> None:
        """Report operators that are not observed, because torch would compute them differently."""
        ...


@contextmanager
def watching(watcher: Watcher, *, lasting: bool = False) -> Generator[None]:
    """Show every operator of this thread to a watcher, once, inside the block.

    Args:
        watcher: The watcher.
        lasting: Whether the mode stays on after the block, because the watch lasts until the end of
            the process. So what a server's thread does with the model's output is seen too.
    """
    if lasting:
        begin_watching(watcher)
        yield
        return
    # The mode has to be off in the whole block, because tangents would change.
    if is_open():
        watcher.unseen(_TANGENTS)
        on = _sees(watcher)  # another thread may have opened the level since
        if on:
            end_watching(watcher)
        try:
            yield
        finally:
            if on:
                begin_watching(watcher)
        return
    if not begin_watching(watcher):  # already on: recomputation calls modules in a backward pass
        yield
        return
    try:
        yield
    finally:
        end_watching(watcher)


def begin_watching(watcher: Watcher) -> bool:
    """Show every operator of this thread to a watcher from now on.

    If a forward-mode level is open, the mode is taken off if it is on. Watching then begins when
    the level is closed, or, in a thread that did not open the level, with the next module call.

    The mode is put below all modes of the program. A program pops the topmost mode, not a certain
    one, so in any other place ours could be popped instead of the program's own.

    Returns:
        False if the watcher already sees the operators, or a level is open.
    """
    if is_open():
        watcher.unseen(_TANGENTS)
        if _sees(watcher):
            end_watching(watcher)
        _waiting.add(watcher)
        return False
    _waiting.discard(watcher)
    if _sees(watcher):
        return False
    # Our mode has to be below the program's modes, so these are taken off and put back.
    above = _take_off()
    _stack._push_mode(_OperatorMode(watcher))
    _put_back(above)
    return True


def _sees(watcher: Watcher) -> bool:
    size = _stack._len_torch_dispatch_stack()
    return any(_is_of(_stack._get_dispatch_stack_at(index), watcher) for index in range(size))


def end_watching(watcher: Watcher) -> None:
    """Remove the watcher's mode from this thread's stack of modes, at any position."""
    _waiting.discard(watcher)
    _put_back([mode for mode in _take_off() if not _is_of(mode, watcher)])


def _take_off() -> list[Any]:
    """Pop all modes of this thread, except those of torch's own; return them, lowest first."""
    modes: list[Any] = []
    # torch's own modes are in separate slots and cannot be popped here.
    while (mode := _stack._get_current_dispatch_mode()) is not None and not _is_infra(mode):
        modes.append(_stack._pop_mode())
    modes.reverse()
    return modes


def _put_back(modes: Sequence[Any]) -> None:
    for mode in modes:
        _stack._push_mode(mode)


def _is_infra(mode: Any) -> bool:
    """Whether it is one of torch's own modes, which are in separate slots below all others."""
    return getattr(mode, "_mode_key", None) is not None


def _is_of(mode: Any, watcher: Watcher) -> bool:
    return isinstance(mode, _OperatorMode) and mode.watcher is watcher


class _OperatorMode(_python_dispatch.TorchDispatchMode):
    """Passes every operator to the watcher; torch switches the mode off meanwhile."""

    supports_higher_order_operators = True

    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self.watcher = watcher

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch's own method loads Dynamo at the first operator, which takes seconds.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Tensors without values cannot be recorded.
        if types and any(kind.__name__ in _NOT_THERE for kind in types):
            return func(*args, **(kwargs or {}))
        return self.watcher.call(func, args, kwargs or {})


hide_from_compiler(_OperatorMode.__torch_dispatch__)


def has_values(tensor: torch.Tensor) -> bool:
    if type(tensor).__name__ in _NOT_THERE or tensor.is_meta:
        return False
    # Reading a tensor while a CUDA graph is recorded would break the recording.
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


# The function with which `backward` and `grad` call the engine; torch looks it up at each call.
# Tensor hooks would be too late, because the backward of the loss itself runs operators too.
_ENGINE = "_engine_run_backward"
_autograd: Any = torch.autograd
_linalg: Any = torch.linalg
_function_patches = PatchSet()
_watchers: tuple[Watcher, ...] = ()
_original: Callable[..., Any] | None = None
_lock = threading.Lock()


def _run_backward(*args: Any, **kwargs: Any) -> Any:
    assert _original is not None
    if not _watchers or torch.compiler.is_compiling():
        return _original(*args, **kwargs)
    # The graph is searched before the pass, because no mode may be on when a sensitive node runs.
    with ExitStack() as around:
        mode_sensitive = mode_sensitive_node(args[0] if args else kwargs.get("t_outputs", ()))
        for watcher in _watchers:
            if mode_sensitive:
                watcher.unseen(f"the backward pass of a graph with {mode_sensitive}")
            else:
                around.enter_context(watcher.around_backward())
        if mode_sensitive:
            around.enter_context(_unwatched())
        return _original(*args, **kwargs)


@contextmanager
def _unwatched() -> Generator[None]:
    """Switch our modes off inside the block.

    They may be on inside another backward pass (reentrant checkpointing).
    """
    modes: list[Any] = []
    while isinstance(_stack._get_current_dispatch_mode(), _OperatorMode):
        modes.append(_stack._pop_mode())
    try:
        yield
    finally:
        for mode in reversed(modes):
            _stack._push_mode(mode)


class _Waiting(threading.local):
    """Watchers of this thread whose mode is off while a forward-mode level is open."""

    def __init__(self) -> None:
        self._watchers: list[Watcher] = []

    def add(self, watcher: Watcher) -> None:
        if watcher not in self._watchers:
            self._watchers.append(watcher)

    def discard(self, watcher: Watcher) -> None:
        if watcher in self._watchers:
            self._watchers.remove(watcher)

    def take(self) -> list[Watcher]:
        watchers, self._watchers = self._watchers, []
        return watchers


_waiting = _Waiting()


def _level_opened() -> None:
    """Switch our modes off before a level is opened; they would change the tangents."""
    for watcher in _watchers:
        watcher.unseen(_TANGENTS)
    # All modes are taken off, and only the program's own are put back.
    modes = _take_off()
    for mode in modes:
        if isinstance(mode, _OperatorMode):
            _waiting.add(mode.watcher)
    _put_back([mode for mode in modes if not isinstance(mode, _OperatorMode)])


def _level_closed() -> None:
    for watcher in _waiting.take():
        if watcher in _watchers:
            begin_watching(watcher)


hide_from_compiler(watching, begin_watching, end_watching, _sees, _unwatched, mode_sensitive_node)
hide_from_compiler(_level_opened, _level_closed)
hide_from_compiler(_run_backward, callees=False)  # a backward pass may call compiled regions


def _apart(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of torch to run without our modes if they would change its last bits."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not _watchers:
            return function(*args, **kwargs)
        if not is_mode_sensitive(function.__name__, args, kwargs):
            return function(*args, **kwargs)
        for watcher in _watchers:
            watcher.unseen(f"torch.linalg.{function.__name__.removeprefix('linalg_')}")
        with _unwatched():
            return function(*args, **kwargs)

    hide_from_compiler(call, callees=False)
    return functools.update_wrapper(call, function)


def watch_mode_sensitive(watcher: Watcher) -> bool:
    """Run every backward pass in `watcher.around_backward`, and sensitive functions without modes.

    Call it before `begin_watching`.

    Returns:
        False if this version of torch does not allow to wrap backward passes.
    """
    global _watchers, _original
    with _lock:
        # torch's functions are wrapped for the first watcher only.
        if not _watchers:
            for name in FUNCTIONS:
                _function_patches.replace(_linalg, name, _apart)
            follow(_level_opened, _level_closed)
            _original = getattr(_autograd, _ENGINE, None)
            if _original is not None:
                setattr(_autograd, _ENGINE, _run_backward)
        _watchers = (*_watchers, watcher)
        return _original is not None


def unwatch_mode_sensitive(watcher: Watcher) -> None:
    global _watchers, _original
    with _lock:
        if watcher not in _watchers:
            return
        _watchers = tuple(other for other in _watchers if other is not watcher)
        if _watchers:
            return
        _function_patches.restore()
        unfollow()
        # If another library has wrapped our function since, ours stays and does nothing.
        if getattr(_autograd, _ENGINE, None) is _run_backward:
            setattr(_autograd, _ENGINE, _original)
            _original = None
