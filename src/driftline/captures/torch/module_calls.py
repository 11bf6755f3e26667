"""Intercept every call of a torch module: record what goes in before it runs, and what comes out.

`nn.Module.__call__` is wrapped once for all sessions. Hooks would not do: the global ones see no
keyword arguments before the call, fire for wrappers twice and cut compiled graphs. While Dynamo
traces, the wrapper is the plain call, so a compiled model is compiled to what it is without
capture.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportAttributeAccessIssue=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from driftline.captures.module_calls import (
    DEEP,
    fault,
    note_failure,
    optimizer_stepped,
    raise_recursion_limit,
    restore_recursion_limit,
    tell_taps,
)
from driftline.captures.torch import layers
from driftline.captures.torch.device.backend import Last
from driftline.captures.torch.layers import (
    PIPELINING,
    Place,
    explain,
    is_compiled,
    is_rehearsal,
    is_transparent,
    must_not_watch,
    unwrapped,
)
from driftline.captures.torch.operators.dispatch import break_graphs
from driftline.captures.torch.session import CaptureSession, Frame
from driftline.captures.torch.tensors import undisturbed

_lock = threading.Lock()
_sessions: tuple[CaptureSession, ...] = ()
_original: Callable[..., Any] = nn.Module.__call__
_left_below = False
"""Whether another library's wrapper calls ours: it was set while a session ran, and stayed."""
_optimizer_hook: Any = None
_fork_hook_set = False


class _Aside(threading.local):
    """What answers module calls in this thread instead of the sessions, while one is repeated."""

    answer: Callable[..., Any] | None = None


_aside = _Aside()

_eval_frame: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
_graph_task: Callable[[], int] = torch._C._current_graph_task_id
_tracing_state: Callable[[], Any] = torch._C._get_tracing_state
_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


def _set_eval_frame(callback: Any) -> Any:
    return None


if _eval_frame is not None:
    _set_eval_frame = _eval_frame.set_eval_frame


def _call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Replaces `nn.Module.__call__` while a session runs."""
    # Dynamo inlines this function: up to here it must do nothing that a trace cannot hold.
    if torch.compiler.is_compiling():
        return _original(self, *args, **kwargs)
    if _aside.answer is not None:
        return _aside.answer(_original, self, args, kwargs)
    # A stage that infers shapes runs its modules on fake tensors.
    if PIPELINING in sys.modules and is_rehearsal():
        with aside(_plainly):
            return _original(self, *args, **kwargs)
    sessions = _sessions
    # One session is the usual case; no closure is made for it.
    if len(sessions) == 1:
        if sessions[0].thread.quiet:
            return _original(self, *args, **kwargs)
        return _watched(sessions[0], _original, self, *args, **kwargs)
    call = _original
    for session in sessions:
        call = partial(_watched, session, call)
    return call(self, *args, **kwargs)


def _watched(
    session: CaptureSession, call: Callable[..., Any], self: nn.Module, /, *args: Any, **kwargs: Any
) -> Any:
    """Call a module while one session watches. The program's exceptions pass through."""
    # Inside a compiled program Dynamo looks at every frame it meets: not at those of the capture
    # itself.
    thread = session.thread
    compiler = _set_eval_frame(None)
    stack = thread.stack
    depth = len(stack)
    # Only inner calls take the short way, because an outermost one may end a step.
    if compiler is None and depth:
        place = session.names.known(self)
        if place is not None and place.last is not None and _is_usual(session, self, depth):
            return _watched_again(session, stack, place, call, self, args, kwargs)
    frame: Frame | None = None
    quiet = False
    try:
        frame = enter(session, stack, self, args, kwargs)
        quiet = _is_quiet(session, frame, depth)
    except Exception as error:
        fault(session, self, error)
    finally:
        if frame is None:  # also when the user's interrupt came just now
            del stack[depth:]
        if compiler is not None:
            _set_eval_frame(compiler)
    if frame is None:
        # A module outside the watched model is remembered, so that operators in it are not its own.
        if session.taps and not depth and session.is_outside_model(self):
            return _unwatched(session, call, self, args, kwargs)
        return call(self, *args, **kwargs)
    room = raise_recursion_limit() if depth % DEEP == DEEP - 1 else 0
    try:
        thread.quiet = quiet
        if session.stand_in is None:
            result = call(self, *args, **kwargs)
        else:
            result = session.stand_in(frame, call, args, kwargs)
    except BaseException as error:
        thread.quiet = False
        compiler = _set_eval_frame(None)
        try:
            if room:
                restore_recursion_limit(room)
            _raised(session, stack, depth, frame, error)
        finally:
            _set_eval_frame(compiler)
        raise
    thread.quiet = False
    if compiler is not None:
        compiler = _set_eval_frame(None)
    try:
        if room:
            restore_recursion_limit(room)
        leave(session, stack, frame, result)
    except Exception as error:
        fault(session, self, error)
    finally:
        if frame.around is not None:
            session.guarded(frame.site, frame.around.close)
        del stack[depth:]
        if compiler is not None:
            _set_eval_frame(compiler)
    return result


def _is_quiet(session: CaptureSession, frame: Frame | None, depth: int) -> bool:
    """Whether the parts of a model are called as they are: between the steps that are captured."""
    if frame is None or depth:
        return False
    return not frame.recompute and session.is_quiet(frame.step)


def _is_usual(session: CaptureSession, module: nn.Module, depth: int) -> bool:
    """Whether an inner call can take the short way of the previous call of its module."""
    return (
        session.running
        and not session.taps
        and session.stand_in is None
        and module._compiled_call_impl is None
        # At these depths the recursion limit has to be raised, which the short way does not do.
        and depth % DEEP != DEEP - 1
        and _graph_task() == -1
        and _tracing_state() is None
    )


def _watched_again(
    session: CaptureSession,
    stack: list[Frame],
    place: Place,
    call: Callable[..., Any],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """`_watched` for a module whose only output was taken on a device."""
    depth = len(stack)
    step = place.root.step
    last: Last = place.last
    backend = session.device_backend
    wanted = session.wants_step(step)
    frame = Frame(place, module, last.visits.next(step), step, recompute=False)
    stack.append(frame)
    if wanted and place.look.inputs_before:
        try:
            if not (
                last.argument is not None
                and not kwargs
                and len(args) == 1
                and type(args[0]) is torch.Tensor
                and not _function_modes()
                and not _dispatch_modes()
                and backend.take_last(last.argument, frame, args[0])
            ):
                _take_inputs(session, stack, frame, args, kwargs)
        except Exception as error:
            fault(session, module, error)
    try:
        result = call(module, *args, **kwargs)
    except BaseException as error:
        _raised(session, stack, depth, frame, error)
        raise
    try:
        session.steps_seen.add(step)
        out = result
        if type(out) is tuple and len(out) == 2 and out[1] is None:
            out = out[0]  # an attention, without its weights: the slot is the same
        if (
            # Anything unusual goes the long way, which decides again from the beginning.
            type(out) is not torch.Tensor
            or not wanted
            or _function_modes()
            or _dispatch_modes()
            or not backend.take_last(last, frame, out)
        ):
            leave(session, stack, frame, result)
    except Exception as error:
        fault(session, module, error)
    finally:
        del stack[depth:]
    return result


def _raised(
    session: CaptureSession, stack: list[Frame], depth: int, frame: Frame, error: BaseException
) -> None:
    """A module's call has ended with an exception, which goes on."""
    try:
        if len(stack) == depth + 1:
            session.guarded(frame.site, note_failure, session, frame, error)
    finally:
        if frame.around is not None:
            session.guarded(frame.site, frame.around.close)
        del stack[depth:]


def _unwatched(
    session: CaptureSession,
    call: Callable[..., Any],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call a module that is no part of the watched model; its class is kept in mind meanwhile."""
    thread = session.thread
    before = thread.unwatched_class
    thread.unwatched_class = before or type(module).__name__
    try:
        return call(module, *args, **kwargs)
    finally:
        thread.unwatched_class = before


def enter(
    session: CaptureSession,
    stack: list[Frame],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Frame | None:
    """A module is about to run: name it, count it, take its inputs."""
    if not session.running or must_not_watch():
        return None
    place = session.names.of(module, stack[-1].place if stack else None)
    if place is None:
        return None
    recompute = _graph_task() != -1
    # A transparent wrapper is skipped: the wrapped module speaks for itself.
    if place.wraps and is_transparent(module):
        if is_compiled(module):
            explain(session, place)
        return None
    # A recomputation belongs to the step whose backward pass asks for it.
    if not stack and not recompute:
        _enter_root(session, place, module)
    root = place.root
    step = session.clock.now if root.helper else root.step
    frame = Frame(
        place,
        module,
        session.count_visit(place.site, step, recompute=recompute),
        step,
        recompute=recompute,
    )
    stack.append(frame)
    session.steps_seen.add(step)
    session.execution_order.setdefault(place.site)
    if module._compiled_call_impl is not None or (place.wraps and is_compiled(module)):
        explain(session, place)
    _take_inputs(session, stack, frame, args, kwargs)
    return frame


def _take_inputs(
    session: CaptureSession,
    stack: list[Frame],
    frame: Frame,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Take what a module is given, as far as somebody wants it, and tell the taps."""
    place, module, taps = frame.place, frame.module, session.taps
    look, facts = place.look, session.model_facts
    digested = len(stack) == 1 and facts is not None and facts.digests_call(frame)
    # Flattening is skipped where nobody looks at the inputs.
    if not (digested or look.inputs_before or look.inputs_after or taps):
        return
    forward = unwrapped(module).forward if place.wraps else module.forward
    binding = layers.binding_of(forward)
    frame.inputs = layers.inputs(binding, args, kwargs, layers.cache_part(module, stack))
    if digested and facts is not None:
        session.guarded(frame.site, facts.note_tensors, frame, "input", frame.inputs)
    if look.inputs_before and frame.inputs and session.wants_step(frame.step):
        _take_all(session, frame, "input", frame.inputs, "before")
    if taps:
        tell_taps(session, frame, outermost=len(stack) == 1)


def _enter_root(session: CaptureSession, place: Place, module: nn.Module) -> None:
    """A model is about to run: its step begins, and it is described if it has changed."""
    session.begin_run()
    session.clock.enter(place, module)
    if session.model_facts is not None:
        session.guarded("model facts", session.model_facts.before_root, place, module)


def leave(session: CaptureSession, stack: list[Frame], frame: Frame, result: Any) -> None:
    """A module has run: take its outputs, and its inputs again where asked."""
    place = frame.place
    look, taps = place.look, session.taps
    facts = session.model_facts
    digested = frame.digests is not None and facts is not None
    if digested or look.outputs or look.inputs_after or taps:
        wanted = session.wants_step(frame.step)
        if look.inputs_after and wanted and frame.inputs:
            _take_all(session, frame, "input", frame.inputs, "after")
        # Most modules return one tensor; no container has to be walked.
        if isinstance(result, torch.Tensor):
            tensors = [("0", "", result)]
        else:
            tensors = layers.outputs(result, layers.cache_part(frame.module, stack))
        if digested and facts is not None:
            session.guarded(frame.site, facts.note_tensors, frame, "output", tensors)
        if look.outputs and wanted and tensors:
            _take_all(session, frame, "output", tensors, "after")
            # Only a plain call whose inputs nobody wants afterwards can take the short way.
            unusual = place.wraps or place.root.helper or look.inputs_after or digested
            if place.last is None and not unusual:
                visits = session.visits_of(place.site, recompute=False)
                place.last = session.device_backend.last_of(frame, tensors, visits)
        for tap in taps:
            session.guarded(frame.site, tap.on_forward, frame, frame.inputs, tensors)
    if len(stack) == 1:
        if session.model_facts is not None:
            session.guarded("model facts", session.model_facts.after_root, frame, result)
        session.root_done()


def _take_all(
    session: CaptureSession, frame: Frame, port: str, tensors: layers.Tensors, moment: str
) -> None:
    device_backend = session.device_backend
    if device_backend.known_tensors and not _function_modes() and not _dispatch_modes():
        # Nobody could see that a tensor is looked at: those like the last ones take no more.
        again = device_backend.take_again
        for index, (slot, alias, tensor) in enumerate(tensors):
            if not again(frame, port, slot, alias, tensor, moment):
                tensors = tensors[index:]
                break
        else:
            return
    with undisturbed():
        session.recorder.take_all(frame, port, tensors, moment)


def _plainly(call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
    return call(module, *args, **kwargs)


# --- switching on and off


def watch(session: CaptureSession) -> None:
    """Show a session every module call from now on."""
    global _sessions, _original, _left_below, _optimizer_hook, _fork_hook_set
    with _lock:
        if not _sessions:
            current = nn.Module.__call__
            # A wrapper that calls ours must not be called by it, too: they would never end.
            if current is not _call and not (_left_below and current is not _original):
                _original = current
                nn.Module.__call__ = _call
                _left_below = False
            _hide_from_compiler()
            _optimizer_hook = register_optimizer_step_post_hook(_optimizer_stepped)
            # Fork hooks cannot be removed, so it is set once per process.
            if not _fork_hook_set:
                os.register_at_fork(after_in_child=_after_fork)
                _fork_hook_set = True
        _sessions = (*_sessions, session)


def unwatch(session: CaptureSession) -> None:
    """Show it no more; the last one to leave restores the plain call."""
    global _sessions, _left_below, _optimizer_hook
    with _lock:
        if session not in _sessions:
            return
        _sessions = tuple(s for s in _sessions if s is not session)
        if not _sessions:
            # Somebody else may have wrapped the call after us; then ours stays below, doing
            # nothing.
            _left_below = nn.Module.__call__ is not _call
            if not _left_below:
                nn.Module.__call__ = _original
            if _optimizer_hook is not None:
                _optimizer_hook.remove()
                _optimizer_hook = None


@contextlib.contextmanager
def aside(answer: Callable[..., Any]) -> Generator[None]:
    """While a call is repeated for an experiment no session sees the calls of this thread.

    Args:
        answer: Called with the plain call, the module, its args and its kwargs; gives the result.
    """
    before = _aside.answer
    _aside.answer = answer
    try:
        yield
    finally:
        _aside.answer = before


def active() -> tuple[CaptureSession, ...]:
    return _sessions


def _hide_from_compiler() -> None:
    """Dynamo must not begin a graph at our wrapper; called inside a graph it is inlined."""
    codes = (_call.__code__, _watched.__code__, _watched_again.__code__, _unwatched.__code__)
    for code in codes:
        # The way to skip a code object has changed between torch versions.
        if hasattr(_eval_frame, "set_code_exec_strategy"):
            action = _eval_frame._FrameAction
            _eval_frame.set_code_exec_strategy(
                code, _eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT)
            )
        elif hasattr(_eval_frame, "skip_code"):
            _eval_frame.skip_code(code)


def _optimizer_stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
    optimizer_stepped(_sessions)


break_graphs(_optimizer_stepped)  # a step may be compiled, hooks and all


def _after_fork() -> None:
    for session in _sessions:
        session.after_fork()
