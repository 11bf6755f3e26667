"""Intercept every call of a torch module: capture its inputs before it runs, then its outputs.

`nn.Module.__call__` is wrapped once for all sessions. Hooks are not sufficient: global hooks do not
get keyword arguments before the call, fire twice for wrappers and break compiled graphs. While
Dynamo traces, the wrapper only makes the plain call, so a model is compiled as it would be without
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
"""Whether another library wrapped our wrapper while a session ran, so that ours stayed below."""
_optimizer_hook: Any = None
_fork_hook_set = False


class _Aside(threading.local):
    """The function that handles module calls of this thread instead of the sessions.

    It is set while a call is repeated for an experiment.
    """

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
    # Dynamo inlines this function, so what it does while compiling must be traceable.
    if torch.compiler.is_compiling():
        return _original(self, *args, **kwargs)
    if _aside.answer is not None:
        return _aside.answer(_original, self, args, kwargs)
    # A pipeline stage that infers shapes runs its modules on fake tensors.
    if PIPELINING in sys.modules and is_rehearsal():
        with aside(_plainly):
            return _original(self, *args, **kwargs)
    sessions = _sessions
    # For one session, the usual case, no closure is needed.
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
    # In a compiled program Dynamo examines every Python frame. It is switched off for the frames of
    # the capture itself.
    thread = session.thread
    compiler = _set_eval_frame(None)
    stack = thread.stack
    depth = len(stack)
    # Only inner calls use the fast path, because an outermost call may end a step.
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
        if frame is None:  # also after a KeyboardInterrupt
            del stack[depth:]
        if compiler is not None:
            _set_eval_frame(compiler)
    if frame is None:
        # The class of a module outside the watched model is stored during its call, so that its
        # operators are not attributed to the model.
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
    """Whether this call's inner calls bypass the capture: it is in a step that is not captured."""
    if frame is None or depth:
        return False
    return not frame.recompute and session.is_quiet(frame.step)


def _is_usual(session: CaptureSession, module: nn.Module, depth: int) -> bool:
    """Whether an inner call can use the fast path, as a repetition of its module's last call."""
    return (
        session.running
        and not session.taps
        and session.stand_in is None
        and module._compiled_call_impl is None
        # At these depths the recursion limit has to be raised, which the fast path does not do.
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
    """Fast path of `_watched`, for a module whose only output was taken on a device last time."""
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
            out = out[0]  # an attention that returns no weights; the slot stays `0`
        if (
            # In every other case the slow path decides again from the beginning.
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
    """Clean up after a module call that raised an exception; the caller raises it again."""
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
    """Call a module outside the watched model; its class name is stored during the call."""
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
    """Name a module that is about to run, count the call and take its inputs.

    Returns:
        The call's frame, which is on the stack; None if the call is not watched.
    """
    if not session.running or must_not_watch():
        return None
    place = session.names.of(module, stack[-1].place if stack else None)
    if place is None:
        return None
    recompute = _graph_task() != -1
    # A transparent wrapper is skipped, because the wrapped module is captured.
    if place.wraps and is_transparent(module):
        if is_compiled(module):
            explain(session, place)
        return None
    # A recomputation begins no step: it belongs to the step whose backward pass requests it.
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
    """Take the inputs of a module if they are needed, and notify the taps."""
    place, module, taps = frame.place, frame.module, session.taps
    look, facts = place.look, session.model_facts
    digested = len(stack) == 1 and facts is not None and facts.digests_call(frame)
    # The inputs are not even flattened if nobody needs them.
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
    """Begin a step if this outermost call does, and describe the model if it has changed."""
    session.begin_run()
    session.clock.enter(place, module)
    if session.model_facts is not None:
        session.guarded("model facts", session.model_facts.before_root, place, module)


def leave(session: CaptureSession, stack: list[Frame], frame: Frame, result: Any) -> None:
    """Take the outputs of a module that has run, and its inputs again if requested."""
    place = frame.place
    look, taps = place.look, session.taps
    facts = session.model_facts
    digested = frame.digests is not None and facts is not None
    if digested or look.outputs or look.inputs_after or taps:
        wanted = session.wants_step(frame.step)
        if look.inputs_after and wanted and frame.inputs:
            _take_all(session, frame, "input", frame.inputs, "after")
        # Most modules return one tensor, so there is no container to flatten.
        if isinstance(result, torch.Tensor):
            tensors = [("0", "", result)]
        else:
            tensors = layers.outputs(result, layers.cache_part(frame.module, stack))
        if digested and facts is not None:
            session.guarded(frame.site, facts.note_tensors, frame, "output", tensors)
        if look.outputs and wanted and tensors:
            _take_all(session, frame, "output", tensors, "after")
            # The fast path handles only plain calls whose inputs are not captured after the call.
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
        # No mode of the program could notice that a tensor is read, so tensors of the same kind as
        # the previous ones can be taken without `undisturbed`.
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


# --- Watching module calls.


def watch(session: CaptureSession) -> None:
    """Let a session see every module call from now on."""
    global _sessions, _original, _left_below, _optimizer_hook, _fork_hook_set
    with _lock:
        if not _sessions:
            current = nn.Module.__call__
            # If another library's wrapper calls ours, ours must not call it: that would recurse
            # for ever.
            if current is not _call and not (_left_below and current is not _original):
                _original = current
                nn.Module.__call__ = _call
                _left_below = False
            _hide_from_compiler()
            _optimizer_hook = register_optimizer_step_post_hook(_optimizer_stepped)
            # A fork hook cannot be removed, so it is set once per process.
            if not _fork_hook_set:
                os.register_at_fork(after_in_child=_after_fork)
                _fork_hook_set = True
        _sessions = (*_sessions, session)


def unwatch(session: CaptureSession) -> None:
    """Stop showing module calls to a session; after the last one, restore the plain call."""
    global _sessions, _left_below, _optimizer_hook
    with _lock:
        if session not in _sessions:
            return
        _sessions = tuple(s for s in _sessions if s is not session)
        if not _sessions:
            # Another library may have wrapped our wrapper since; then ours stays, doing nothing.
            _left_below = nn.Module.__call__ is not _call
            if not _left_below:
                nn.Module.__call__ = _original
            if _optimizer_hook is not None:
                _optimizer_hook.remove()
                _optimizer_hook = None


@contextlib.contextmanager
def aside(answer: Callable[..., Any]) -> Generator[None]:
    """Hide this thread's module calls from all sessions, while a call is repeated as an experiment.

    Args:
        answer: Makes each call instead: gets the plain call, the module, its args and its kwargs,
            and returns the result.
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
    """Keep Dynamo from starting a graph at our wrapper; inside a graph the wrapper is inlined."""
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


# The step of an optimizer may be compiled, together with its hooks.
break_graphs(_optimizer_stepped)


def _after_fork() -> None:
    for session in _sessions:
        session.after_fork()
