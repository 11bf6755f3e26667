# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""Paddle's optimizers and parameters: the ends of steps, the gradients used, parameter values.

Paddle has no hooks for optimizers, and every optimizer may define its own `step`. So `step` is
wrapped in every class that defines it, including classes that are made later, and the outermost
call counts. Parallel wrappers and `minimize` call `_apply_optimize` directly, which counts as a
step if it is called outside `step`. Gradients are read after clipping and before weight decay,
because this is what torch's optimizers receive.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import paddle
from paddle.base import core

from driftline.captures.gradients import Contributions, Owner
from driftline.captures.paddle.layers import STRUCTURE
from driftline.captures.recorder import TensorAddress

_Optimizer: Any = paddle.optimizer.Optimizer
_core: Any = core
_OURS = "_driftline_original"

Stepped = Callable[[], None]
Given = Callable[[Any, list[tuple[Any, Any]]], None]
"""A function that takes an optimizer and its (parameter, gradient) pairs."""


class Updates(Protocol):
    """Is notified of every update of any optimizer; never raises."""

    def around_update(self, optimizer: Any) -> AbstractContextManager[None]:
        """A context that is entered around an update."""
        ...

    def given(self, optimizer: Any, pairs: list[tuple[Any, Any]]) -> None:
        """Called with the parameters and gradients that an update is about to use."""
        ...


_lock = threading.Lock()
_stepped: list[Stepped] = []
_given: list[Given] = []
_updates: list[Updates] = []
_wrapped: list[tuple[Any, str]] = []


class _Depth(threading.local):
    value = 0


_depth = _Depth()


def watch(stepped: Stepped) -> None:
    """Call `stepped` after every step of any optimizer."""
    _add(_stepped, stepped)


def unwatch(stepped: Stepped) -> None:
    _drop(_stepped, stepped)


def watch_gradients(listener: Given) -> None:
    """Call `listener` with the gradients of every step, before they are used."""
    _add(_given, listener)


def unwatch_gradients(listener: Given) -> None:
    _drop(_given, listener)


def watch_updates(listener: Updates) -> None:
    """Enter the listener's context around every update, and call `given` with its gradients."""
    _add(_updates, listener)
    _add(_given, listener.given)


def unwatch_updates(listener: Updates) -> None:
    _drop(_given, listener.given)
    _drop(_updates, listener)


def in_backward() -> bool:
    """Whether a backward pass is running."""
    return bool(_core.eager._is_run_in_backward())


def _add(listeners: list[Any], listener: Any) -> None:
    with _lock:
        # Optimizers are wrapped only while there is a listener.
        if not (_stepped or _given or _updates):
            _wrap_all()
        listeners.append(listener)


def _drop(listeners: list[Any], listener: Any) -> None:
    with _lock:
        if listener in listeners:
            listeners.remove(listener)
        if not (_stepped or _given or _updates):
            _unwrap_all()


def _wrap_all() -> None:
    _wrap(_Optimizer, "__init__", _on_making)
    _wrap(_Optimizer, "_apply_optimize", _on_applying)
    _wrap(_Optimizer, "append_regularization_ops", _on_regularizing)
    for kind in _with_subclasses(_Optimizer):
        _wrap_step(kind)


def _wrap_step(kind: Any) -> None:
    if "step" in vars(kind) and not hasattr(vars(kind)["step"], _OURS):
        _wrap(kind, "step", _on_step)


def _wrap(kind: Any, name: str, instead: Callable[..., Any]) -> None:
    # Only methods that the class itself defines; inherited ones are wrapped in their own class.
    original = vars(kind).get(name)
    if original is None or not callable(original):
        return

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return instead(original, self, *args, **kwargs)

    setattr(call, _OURS, original)
    setattr(kind, name, call)
    _wrapped.append((kind, name))


def _unwrap_all() -> None:
    # In reverse order, so that a class that was wrapped twice gets its original back.
    for kind, name in reversed(_wrapped):
        # If another library has wrapped our method since, ours stays and does nothing.
        original = getattr(vars(kind).get(name), _OURS, None)
        if original is not None:
            setattr(kind, name, original)
    _wrapped.clear()


def _with_subclasses(kind: Any) -> Iterable[Any]:
    yield kind
    for below in kind.__subclasses__():
        yield from _with_subclasses(below)


def _on_making(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap `step` of an optimizer's classes when it is made; a class may be new."""
    with _lock:
        if _stepped or _given or _updates:
            for kind in type(self).__mro__:
                if issubclass(kind, _Optimizer):
                    _wrap_step(kind)
    return original(self, *args, **kwargs)


def _on_step(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    with _around_update(self):
        _depth.value += 1
        try:
            result = original(self, *args, **kwargs)
        finally:
            _depth.value -= 1
    # An optimizer may call the `step` of another one; the outermost call ends the step.
    if _depth.value == 0:
        _tell_stepped()
    return result


def _on_applying(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    with _around_update(self):
        result = original(self, *args, **kwargs)
    # Parameter groups are applied one by one; only the first one counts as a step.
    group = kwargs.get("param_group_idx", args[3] if len(args) > 3 else 0)
    if _depth.value == 0 and group == 0 and paddle.in_dynamic_mode():
        _tell_stepped()
    return result


def _on_regularizing(
    original: Callable[..., Any], self: Any, pairs: Any, *args: Any, **kwargs: Any
) -> Any:
    if _given and isinstance(pairs, list) and paddle.in_dynamic_mode():
        for listener in tuple(_given):
            listener(self, pairs)
    return original(self, pairs, *args, **kwargs)


@contextmanager
def _around_update(optimizer: Any) -> Generator[None]:
    """Enter the listeners' contexts around an update that is not part of another one."""
    with ExitStack() as around:
        if _depth.value == 0 and paddle.in_dynamic_mode():
            for listener in tuple(_updates):
                around.enter_context(listener.around_update(optimizer))
        yield


def _tell_stepped() -> None:
    for stepped in tuple(_stepped):
        stepped()


# Parameters and buffers: their owners, their values and their gradients.


_TORCH_NAMES = {"_mean": "running_mean", "_variance": "running_var"}
"""torch's names for the buffers of a batch norm, which become aliases."""


def layers_of(root: Any) -> Iterator[Any]:
    """A layer and all layers below it, each once, in the order of `named_sublayers`."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        layer = waiting.pop()
        if id(layer) in seen:
            continue
        seen.add(id(layer))
        yield layer
        # Reversed because the list is a stack, and children must come in their own order.
        waiting.extend(child for _, child in reversed([*STRUCTURE.children(layer)]))


class ParameterTap:
    """Captures every parameter and buffer at the first captured call of its model.

    Values are taken before the model runs, with the port `param`; the slot is the name in the
    layer. A tied tensor is written once, for its first layer.
    """

    def __init__(self, session: Any) -> None:
        self._session = session
        self._done: weakref.WeakSet[Any] = weakref.WeakSet()
        self._written: dict[int, weakref.ref[Any]] = {}
        self._active = False

    def install(self) -> None:
        self._active = True

    def remove(self) -> None:
        self._active = False

    @contextmanager
    def around_root(self, module: Any) -> Generator[None]:
        if self._active and module not in self._done:
            try:
                self._write(module)
            except Exception as error:  # the user's program must continue in any case
                self._session.event_once("parameters-lost", f"parameters not captured: {error}")
        yield

    def before_forward(self, frame: Any, inputs: Any) -> None:
        pass  # parameters are taken once for the whole model

    def on_forward(self, frame: Any, inputs: Any, outputs: Any) -> None:
        pass

    def _write(self, root: Any) -> None:
        session = self._session
        step: int = session.step
        if not session.wants_step(step):
            return
        for layer in layers_of(root):
            site: str = session.site_of(layer)
            class_name = STRUCTURE.class_name(layer)
            if not session.wants(site, class_name, "param"):
                continue
            for name, tensor in (*layer._parameters.items(), *layer._buffers.items()):
                if tensor is None or self._is_written(tensor):
                    continue
                if not tensor._is_initialized():  # such as a buffer of an LSTM, which stays empty
                    continue
                self._written[id(tensor)] = weakref.ref(tensor)
                alias = _TORCH_NAMES.get(name, "")
                address = TensorAddress(
                    site, "param", name, step, alias=alias, class_name=class_name
                )
                session.emit(address, tensor)
        # A model that was called in a step that is not captured is tried again in a later step.
        self._done.add(root)

    def _is_written(self, tensor: Any) -> bool:
        reference = self._written.get(id(tensor))
        return reference is not None and reference() is tensor


class ParameterGradients:
    """Captures `param_grad` in every backward pass and `optimizer_grad` in every optimizer step."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._owners: dict[int, tuple[weakref.ref[Any], Owner]] = {}
        self._hooked: set[int] = set()
        self._handles: list[Any] = []
        self._active = False
        self._given = Contributions(session)

    def install(self) -> None:
        self._active = True
        watch_gradients(self._at_optimizer)

    def remove(self) -> None:
        self._active = False
        unwatch_gradients(self._at_optimizer)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def watch(self, root: Any) -> None:
        """Hook the parameters of `root` that are new."""
        if not self._active:
            return
        try:
            for layer in layers_of(root):
                for name, parameter in layer._parameters.items():
                    if parameter is not None:
                        self._learn(layer, name, parameter)
        except Exception as error:
            self._session.event_once("gradient-lost", f"parameter gradients not captured: {error}")

    def _learn(self, layer: Any, name: str, parameter: Any) -> None:
        entry = self._owners.get(id(parameter))
        # A new parameter may have the id of a dead one, so the reference is compared.
        if entry is None or entry[0]() is not parameter:
            owner = Owner(self._session.site_of(layer), name, STRUCTURE.class_name(layer))
            entry = self._owners[id(parameter)] = (weakref.ref(parameter), owner)
            self._hooked.discard(id(parameter))
        # A frozen parameter cannot have a hook, but may be made trainable between two calls.
        if id(parameter) not in self._hooked and not parameter.stop_gradient:
            self._hooked.add(id(parameter))
            self._hook(parameter, entry[1])

    def _hook(self, parameter: Any, owner: Owner) -> None:
        reference = weakref.ref(self)

        def arrived(gradient: Any) -> None:
            me = reference()
            if gradient is not None and me is not None and me._active:
                me._given.take("param_grad", owner, gradient)

        self._handles.append(parameter.register_hook(arrived))

    def _at_optimizer(self, optimizer: Any, pairs: list[tuple[Any, Any]]) -> None:
        try:
            for position, (parameter, gradient) in enumerate(pairs):
                if gradient is None:
                    continue
                entry = self._owners.get(id(parameter))
                is_same = entry is not None and entry[0]() is parameter
                owner = (
                    entry[1]
                    if entry is not None and is_same
                    # A tensor of no watched model is named by its position in the optimizer.
                    else Owner("(optimizer)", str(position), type(optimizer).__name__)
                )
                self._given.take("optimizer_grad", owner, gradient)
        except Exception as error:
            self._session.event_once("gradient-lost", f"optimizer gradients not captured: {error}")
