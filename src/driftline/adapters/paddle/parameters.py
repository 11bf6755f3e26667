"""Parameters and buffers: whose they are, their values when asked for, the gradients they get.

Knows which layer owns a parameter, when a root is called, when an optimizer steps. How a tensor is
copied, summarised or stored it does not know: the session's `emit` does that.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import weakref
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

from driftline.adapters.backward import Contributions, Owner
from driftline.adapters.paddle import optimizers
from driftline.adapters.paddle.names import FAMILY

_AS_ELSEWHERE = {"_mean": "running_mean", "_variance": "running_var"}
"""What other frameworks call the buffers of a batch norm."""


def layers_of(root: Any) -> Iterator[Any]:
    """A layer and all below it, each once, in the order of `named_sublayers`."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        layer = waiting.pop()
        if id(layer) in seen:
            continue
        seen.add(id(layer))
        yield layer
        waiting.extend(child for _, child in reversed([*FAMILY.children(layer)]))


class ParameterTap:
    """Every parameter and buffer at the first call of its root.

    Values are taken before the root runs, under the port `param`; the slot is the name inside the
    owning layer. A tied tensor is written once, at its first owner.
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
            except Exception as error:  # the user's program goes on whatever happens here
                self._session.event_once("parameters-lost", f"parameters not captured: {error}")
        yield

    def before_forward(self, frame: Any, inputs: Any) -> None:
        pass  # parameters belong to the whole call

    def on_forward(self, frame: Any, inputs: Any, outputs: Any) -> None:
        pass

    def _write(self, root: Any) -> None:
        session = self._session
        step: int = session.step
        if not session.wants_step(step):
            return
        for layer in layers_of(root):
            site: str = session.site_of(layer)
            class_name = FAMILY.class_name(layer)
            if not session.wants(site, class_name, "param"):
                continue
            for name, tensor in (*layer._parameters.items(), *layer._buffers.items()):
                if tensor is None or self._is_written(tensor):
                    continue
                if not tensor._is_initialized():  # an LSTM has a buffer that is never filled
                    continue
                self._written[id(tensor)] = weakref.ref(tensor)
                alias = _AS_ELSEWHERE.get(name, "")
                session.emit(
                    site, "param", name, tensor, alias=alias, class_name=class_name, step=step
                )
        self._done.add(root)

    def _is_written(self, tensor: Any) -> bool:
        known = self._written.get(id(tensor))
        return known is not None and known() is tensor


class ParameterGradients:
    """`param_grad` at every backward pass, `optimizer_grad` at every optimizer step."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._owners: dict[int, tuple[weakref.ref[Any], Owner]] = {}
        self._hooked: set[int] = set()
        self._handles: list[Any] = []
        self._active = False
        self._given = Contributions(session)

    def install(self) -> None:
        self._active = True
        optimizers.watch_gradients(self._at_optimizer)

    def remove(self) -> None:
        self._active = False
        optimizers.unwatch_gradients(self._at_optimizer)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def watch(self, root: Any) -> None:
        """Hook the parameters of `root` that are new; cheap when there are none."""
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
        # The id of a dead parameter may be given to a new one: the reference decides.
        if entry is None or entry[0]() is not parameter:
            owner = Owner(self._session.site_of(layer), name, FAMILY.class_name(layer))
            entry = self._owners[id(parameter)] = (weakref.ref(parameter), owner)
            self._hooked.discard(id(parameter))
        # A frozen parameter cannot carry a hook; it may be thawed between two calls.
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
                known = entry is not None and entry[0]() is parameter
                owner = (
                    entry[1]
                    if entry is not None and known
                    else Owner("(optimizer)", str(position), type(optimizer).__name__)
                )
                self._given.take("optimizer_grad", owner, gradient)
        except Exception as error:
            self._session.event_once("gradient-lost", f"optimizer gradients not captured: {error}")
