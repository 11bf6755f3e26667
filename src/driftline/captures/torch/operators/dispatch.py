# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""How operators are observed: a dispatch mode that sees each one and changes nothing.

Three parts. Forward-mode differentiation: inside a level (`torch.func.jvp`, dual levels) torch
chooses the formulas of tangents anew at each operator, and chooses others, with other last bits, as
soon as any dispatch mode is on; so the mode goes off. Mode-sensitive functions and nodes, for the
same reason. And the mode itself with its place below all modes of the program.
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
    """Whether a level is open. Levels belong to the process, not to a thread."""
    return _open


def _doors() -> tuple[Any, str, str]:
    """Where torch opens and closes a level: a module, and two names that it looks up each time.

    The inner pair, where there is one: compiled graphs and programs that imported the outer one by
    name before us come through it too.
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
        # Only the outermost level matters; inner ones change nothing more.
        global _open
        if _open or _opened is None:
            return enter()
        _open = True
        _opened()
        try:
            return enter()
        # Opening failed, so no level is there to be closed later.
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
    """Call nobody any more; torch gets its own functions back."""
    global _opened, _closed
    _opened = _closed = None
    _level_patches.restore()


# Mode-sensitive functions: torch computes them in another way, with other last bits, under a mode.


# Their results differ in the last bits with a mode on, whatever the mode does.
FUNCTIONS = ("cond", "eigvalsh", "matrix_norm", "matrix_rank", "norm", "svdvals")
"""Of `torch.linalg`: they take eigenvalues or singular values and, when watched, vectors too."""
_BY_SINGULAR_VALUES = ("nuc", 2, -2)
_NORMS = ("linalg_matrix_norm", "linalg_norm")

_NODES = frozenset({"ProdBackward0", "ProdBackward1", "CumprodBackward0", "LinalgDetBackward0"})
_MASKED_FILL = "MaskedFillBackward1"  # only where the value filled in has a gradient


def is_mode_sensitive(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of one of `FUNCTIONS` is: norms only where they need singular values."""
    if name not in _NORMS:
        return True
    order = kwargs.get("ord", args[1] if len(args) > 1 else None)
    return order in _BY_SINGULAR_VALUES


def mode_sensitive_node(outputs: Sequence[Any]) -> str:
    """The first node of a graph whose gradient would change in its last bits; empty if none."""
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
        # The gradient of the filled value is the one that changes.
        if name in _NODES or (name == _MASKED_FILL and following[1][0] is not None):
            return name
        for output, _ in following:
            if output is not None and output not in seen:
                seen.add(output)
                waiting.append(output)
    return ""


# The mode.


# Private parts of torch, of which the stubs know nothing.
_stack: Any = _python_dispatch

_NOT_THERE = frozenset({"FakeTensor", "FunctionalTensor", "ProxyTensor"})
"""Tensors of a compiler at work: they have shapes, no values."""
_TANGENTS = "forward-mode differentiation (torch.func.jvp, dual levels)"


def hide_from_compiler(*functions: Any, callees: bool = True) -> None:
    """Keep Dynamo from compiling these when they run inside its programs, and what they call."""
    # Dynamo may be missing from a build of torch, or have another interface.
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
    """Have the compiler run these hooks, rather than take them into a program that it compiles.

    Traced, a hook may run once too often: Dynamo begins anew where it meets what it cannot compile.
    """
    hide_from_compiler(*hooks)
    for hook in hooks:
        hook.__dict__["_torchdynamo_disable"] = True  # what `torch.compiler.disable` leaves, too


class Watcher(Protocol):
    """Runs an operator, and looks at it while doing so."""

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def around_backward(self) -> AbstractContextManager[None]: ...

    def unseen(self, what: str) -> None:
        """Something is left alone, since torch computes it differently when it is watched."""
        ...


@contextmanager
def watching(watcher: Watcher, *, lasting: bool = False) -> Generator[None]:
    """Show every operator of this thread to `watcher`, once, until the block is left.

    Args:
        watcher: Who is shown them.
        lasting: The watch ends with the process, so the mode may stay: what a server's thread does
            with the model's output is seen too.
    """
    if lasting:
        begin_watching(watcher)
        yield
        return
    # Tangents would change: the mode has to be off for the whole block.
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
    if not begin_watching(watcher):  # recomputation calls modules inside a backward pass
        yield
        return
    try:
        yield
    finally:
        end_watching(watcher)


def begin_watching(watcher: Watcher) -> bool:
    """Show every operator of this thread to `watcher` from now on; False when it sees them already.

    Where a forward-mode level is open it begins when that is left; in a thread that did not open
    it, and whose mode is taken off here if it is on, with the next call of a module.

    The mode goes below all modes of the program. A mode is taken off by whoever takes one off, not
    by name: ours, lying anywhere else, could go in place of the program's own.
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
    # Ours has to be below the program's modes, so those come off first and go back on.
    above = _take_off()
    _stack._push_mode(_OperatorMode(watcher))
    _put_back(above)
    return True


def _sees(watcher: Watcher) -> bool:
    size = _stack._len_torch_dispatch_stack()
    return any(_is_of(_stack._get_dispatch_stack_at(index), watcher) for index in range(size))


def end_watching(watcher: Watcher) -> None:
    """Take the watcher's mode off this thread's stack, wherever it is in it."""
    _waiting.discard(watcher)
    _put_back([mode for mode in _take_off() if not _is_of(mode, watcher)])


def _take_off() -> list[Any]:
    """All modes of this thread but those of torch's own compilers, the lowest first."""
    modes: list[Any] = []
    # Modes of the compiler have places of their own and cannot be popped here.
    while (mode := _stack._get_current_dispatch_mode()) is not None and not _is_infra(mode):
        modes.append(_stack._pop_mode())
    modes.reverse()
    return modes


def _put_back(modes: Sequence[Any]) -> None:
    for mode in modes:
        _stack._push_mode(mode)


def _is_infra(mode: Any) -> bool:
    """Torch keeps these in places of their own, below all others."""
    return getattr(mode, "_mode_key", None) is not None


def _is_of(mode: Any, watcher: Watcher) -> bool:
    return isinstance(mode, _OperatorMode) and mode.watcher is watcher


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
        # Shapes without values have nothing to record.
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
_linalg: Any = torch.linalg
_function_patches = PatchSet()
_watchers: tuple[Watcher, ...] = ()
_original: Callable[..., Any] | None = None
_lock = threading.Lock()


def _run_backward(*args: Any, **kwargs: Any) -> Any:
    assert _original is not None
    if not _watchers or torch.compiler.is_compiling():
        return _original(*args, **kwargs)
    # The graph is walked before the pass: no mode may be on when a sensitive node runs.
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
    """Take our modes off: inside another backward pass (reentrant checkpointing) they may be on."""
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
    """Tangents are about to be computed: their formulas are others as soon as a mode is on."""
    for watcher in _watchers:
        watcher.unseen(_TANGENTS)
    # All modes come off, and only the program's own go back.
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
    """A function of torch that is run without our modes where they would change its last bits."""

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
    """Enclose every backward pass in `watcher.around_backward`; mode-sensitive functions run alone.

    To be called before `begin_watching`.

    False where backward passes cannot be enclosed.
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
        # Somebody else may have wrapped it after us; then ours stays below, doing nothing.
        if getattr(_autograd, _ENGINE, None) is _run_backward:
            setattr(_autograd, _ENGINE, _original)
            _original = None
