"""Intercept every call of a Paddle layer: capture its inputs before it runs, then its outputs.

`Layer.__call__` is wrapped once for all sessions. Hooks are not sufficient: Paddle has no global
hooks for all layers, and it calls a layer with a hook in another way. While a static graph is made
or a layer is translated to one, the wrapper only makes the plain call, so the graph is the same as
without capture.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false
from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import paddle
from paddle.base import core, framework
from paddle.base.dygraph import base

from driftline.captures.calls import Frame
from driftline.captures.module_calls import (
    DEEP,
    fault,
    note_failure,
    optimizer_stepped,
    raise_recursion_limit,
    restore_recursion_limit,
    tell_taps,
)
from driftline.captures.naming import Place, unwrapped
from driftline.captures.paddle import layers, optimizers
from driftline.captures.paddle.layers import STRUCTURE, is_static
from driftline.captures.paddle.session import PaddleSession
from driftline.captures.paddle.tensors import undisturbed

_Layer: Any = paddle.nn.Layer
_core: Any = core
_lock = threading.Lock()
_sessions: tuple[PaddleSession, ...] = ()
_original: Callable[..., Any] = _Layer.__call__
_fork_hook_set = False


def _never() -> bool:
    return False


def _unset(callback: Any) -> Any:
    return None


_in_backward: Callable[[], bool] = _core.eager._is_run_in_backward
_in_dynamic: Callable[[], bool] = framework.in_dygraph_mode
_in_tracing: Callable[[], bool] = base.in_to_static_mode
# Not every version of Paddle has this function.
_in_translation: Callable[[], bool] = getattr(base, "in_sot_simulation_mode", _never)
_set_eval_frame: Callable[[Any], Any] = getattr(_core, "set_eval_frame", _unset)


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `Layer.__call__` while a session runs."""
    # This is `is_plain_call`, inlined because Paddle translates this function too.
    if _in_translation() or _in_tracing() or not _in_dynamic():
        return _original(self, *args, **kwargs)
    call = _original
    for session in _sessions:
        call = partial(_watched, session, call)
    return call(self, *args, **kwargs)


def is_plain_call() -> bool:
    """Whether a static graph is being made, so that a call computes nothing yet."""
    return _in_translation() or _in_tracing() or not _in_dynamic()


def in_backward() -> bool:
    """Whether a backward pass is running; a forward in it is a recomputation."""
    return bool(_in_backward())


def _watched(
    session: PaddleSession, call: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any
) -> Any:
    """Call a layer while one session watches. The program's exceptions pass through."""
    # After a graph break Paddle examines every Python frame. It is switched off for the frames of
    # the capture itself.
    translator = _set_eval_frame(None)
    stack = session.thread.stack
    depth = len(stack)
    frame: Frame | None = None
    try:
        frame = _enter(session, stack, self, args, kwargs)
    except Exception as error:
        fault(session, self, error)
    finally:
        if frame is None:  # also after a KeyboardInterrupt
            del stack[depth:]
        _set_eval_frame(translator)
    if frame is None:
        return call(self, *args, **kwargs)
    room = raise_recursion_limit() if depth % DEEP == DEEP - 1 else 0
    try:
        result = call(self, *args, **kwargs)
    except BaseException as error:
        if room:
            restore_recursion_limit(room)
        # If an exception skipped the cleanup of inner calls, their frames are still on the stack.
        if len(stack) == depth + 1:
            session.guarded(frame.site, note_failure, session, frame, error)
        if frame.around is not None:
            session.guarded(frame.site, frame.around.close)
        del stack[depth:]
        raise
    translator = _set_eval_frame(None)
    try:
        if room:
            restore_recursion_limit(room)
        _leave(session, frame, result)
    except Exception as error:
        fault(session, self, error)
    finally:
        if frame.around is not None:
            session.guarded(frame.site, frame.around.close)
        del stack[depth:]
        _set_eval_frame(translator)
    return result


def _enter(
    session: PaddleSession,
    stack: list[Frame],
    layer: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Frame | None:
    """Name a layer that is about to run, count the call and take its inputs.

    Returns:
        The call's frame, which is on the stack; None if the call is not watched.
    """
    # Workers of a data loader run layers for preprocessing, not the model.
    if not session.running or _is_data_worker():
        return None
    place = session.names.of(layer, stack[-1].place if stack else None)
    if place is None or place.wraps:  # a wrapper calls the wrapped layer, which is captured instead
        return None
    recompute = _in_backward()
    clock = session.clock
    # A recomputation begins no step: it belongs to the step whose backward pass requests it.
    if not stack and not recompute:
        session.begin_run()
        clock.enter(place, layer)
        if session.model_facts is not None:
            session.guarded("model facts", session.model_facts.before_root, place, layer)
    step = clock.step_of(place.root)
    visit = session.count_visit(place.site, step, recompute=recompute)
    frame = Frame(place, layer, visit, step, recompute=recompute)
    stack.append(frame)
    session.steps_seen.add(step)
    session.execution_order.setdefault(place.site)
    if is_static(layer):
        _explain_static(session, place)
    look, facts = place.look, session.model_facts
    digested = len(stack) == 1 and facts is not None and facts.digests_call(frame)
    # The inputs are flattened only if they are needed.
    if digested or look.inputs_before or look.inputs_after or session.taps:
        frame.inputs = layers.inputs(layers.binding_of(_forward(layer)), args, kwargs)
        if digested and facts is not None:
            session.guarded(frame.site, facts.note_tensors, frame, "input", frame.inputs)
        if look.inputs_before and frame.inputs and session.wants_step(step):
            _take_all(session, frame, "input", frame.inputs, "before")
    if session.taps:
        tell_taps(session, frame, outermost=len(stack) == 1)
    return frame


def _leave(session: PaddleSession, frame: Frame, result: Any) -> None:
    """Take the outputs of a layer that has run, and its inputs again if requested."""
    look, taps = frame.place.look, session.taps
    outermost = len(session.thread.stack) == 1
    facts = session.model_facts
    digested = frame.digests is not None
    if digested or look.outputs or look.inputs_after or taps:
        wanted = session.wants_step(frame.step)
        if look.inputs_after and wanted and frame.inputs:
            _take_all(session, frame, "input", frame.inputs, "after")
        tensors = layers.outputs(result)
        if digested and facts is not None:
            session.guarded(frame.site, facts.note_tensors, frame, "output", tensors)
        if look.outputs and wanted and tensors:
            _take_all(session, frame, "output", tensors, "after")
        for tap in taps:
            session.guarded(frame.site, tap.on_forward, frame, frame.inputs, tensors)
    if outermost:
        if facts is not None:
            session.guarded("model facts", facts.after_root, frame, result)
        session.root_done()


def _take_all(
    session: PaddleSession, frame: Frame, port: str, tensors: layers.Tensors, moment: str
) -> None:
    with undisturbed():
        session.recorder.take_all(frame, port, tensors, moment)


def _forward(layer: Any) -> Callable[..., Any]:
    """The forward as the program wrote it, which a static region keeps in `dygraph_function`."""
    forward = unwrapped(STRUCTURE, layer).forward
    return getattr(forward, "dygraph_function", None) or forward


def _is_data_worker() -> bool:
    worker = sys.modules.get("paddle.io.dataloader.worker")
    return worker is not None and getattr(worker, "_worker_info", None) is not None


def _explain_static(session: PaddleSession, place: Place) -> None:
    session.event_once(
        "compiled",
        "this layer runs as a static graph (paddle.jit.to_static): its inputs and outputs are "
        "captured, the layers inside only where the graph breaks; to see all of them call "
        "paddle.jit.enable_to_static(False) first",
        site=place.site,
    )


# --- Watching layer calls.


def watch(session: PaddleSession) -> None:
    """Let a session see every layer call from now on."""
    global _sessions, _original, _fork_hook_set
    with _lock:
        if not _sessions:
            # The wrapper must not be wrapped again.
            if _Layer.__call__ is not _call:
                _original = _Layer.__call__
                _Layer.__call__ = _call
            optimizers.watch(_optimizer_stepped)
            # A fork hook cannot be removed, so it is set once per process.
            if not _fork_hook_set:
                os.register_at_fork(after_in_child=_after_fork)
                _fork_hook_set = True
        _sessions = (*_sessions, session)


def unwatch(session: PaddleSession) -> None:
    """Stop showing layer calls to a session; after the last one, restore the plain call."""
    global _sessions
    with _lock:
        if session not in _sessions:
            return
        _sessions = tuple(s for s in _sessions if s is not session)
        if not _sessions:
            # Another library may have wrapped our wrapper since; then ours stays, doing nothing.
            if _Layer.__call__ is _call:
                _Layer.__call__ = _original
            optimizers.unwatch(_optimizer_stepped)


def active() -> tuple[PaddleSession, ...]:
    return _sessions


def _optimizer_stepped() -> None:
    optimizer_stepped(_sessions)


def _after_fork() -> None:
    for session in _sessions:
        session.after_fork()
