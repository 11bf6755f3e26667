"""Where a program's graphs are handed to its backend: graphs are recorded on this way.

Dynamo calls the backend in one place, whatever it is called and whenever `torch.compile` was. What
the compiler raises is the program's own error and passes through as it is; what goes wrong in
recording becomes an event, and the program's own backend compiles the graph instead.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import nn

from driftline.adapters.torch.dispatch import hide_from_compiler
from driftline.adapters.torch.names import unwrapped

MODULE = "torch._dynamo.output_graph"
_METHOD = "call_user_compiler"
_output_graph: Any = None
_original: Callable[..., Any] | None = None
_listeners: tuple[Listener, ...] = ()
_lock = threading.Lock()


class Listener(Protocol):
    """Wants to know of graphs that are compiled."""

    def backend(
        self, name: str, inputs: Sequence[Any], models: Sequence[nn.Module]
    ) -> Callable[..., Any] | None:
        """What compiles in place of the backend of this name; None leaves it to the backend.

        Args:
            name: The backend's.
            inputs: What the graph is compiled for.
            models: Models that the compiled code calls, if it is not part of one itself.
        """
        ...

    def not_recorded(self, error: Exception) -> None:
        """Our own way of compiling failed: the backend does it."""
        ...

    def failed(self, name: str, error: BaseException) -> None:
        """The program's backend could not compile a graph."""
        ...


def install(listener: Listener) -> bool:
    """Tell a listener of every graph from now on; False where torch has no such place."""
    global _output_graph, _original, _listeners
    with _lock:
        module: Any = importlib.import_module(MODULE)
        _output_graph = getattr(module, "OutputGraph", None)
        if not hasattr(_output_graph, _METHOD):
            return False
        if _original is None:
            _original = getattr(_output_graph, _METHOD)
            setattr(_output_graph, _METHOD, _call)
        _listeners = (*_listeners, listener)
        return True


def remove(listener: Listener) -> None:
    global _original, _listeners
    with _lock:
        _listeners = tuple(one for one in _listeners if one is not listener)
        if _listeners or _original is None:
            return
        if getattr(_output_graph, _METHOD) is _call:
            setattr(_output_graph, _METHOD, _original)
            _original = None


def _call(self: Any, graph: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """What stands in for the place where Dynamo calls a backend."""
    original = _original
    assert original is not None
    if not _listeners or getattr(self, "export", False) or self.compiler_fn is None:
        return original(self, graph, inputs, *args, **kwargs)
    backend = self.compiler_fn
    name = name_of(backend)
    models = _models(self, graph)
    ours = [
        (one, found)
        for one in _listeners
        if (found := one.backend(name, inputs, models)) is not None
    ]
    for listener, instead in ours:
        self.compiler_fn = instead
        try:
            return original(self, graph, inputs, *args, **kwargs)
        except Exception as error:
            # A restart of the analysis is no failure: Dynamo traces again, and comes back.
            if _is_restart(error):
                raise
            listener.not_recorded(error)
        finally:
            self.compiler_fn = backend
    try:
        return original(self, graph, inputs, *args, **kwargs)
    except BaseException as error:
        if not _is_restart(error):
            for listener in _listeners:
                listener.failed(name, error)
        raise


def _models(output: Any, graph: Any) -> list[nn.Module]:
    """Models among the names that the compiled code sees, of which it calls a module.

    A function around a model is compiled with all that the model does: nobody else meets it.
    """
    stacks = [node.meta.get("nn_module_stack") or {} for node in graph.graph.nodes]
    met = {str(key).partition("@")[0] for stack in stacks for key in stack}
    seen: list[nn.Module] = []
    for scope in (getattr(output, "local_scope", {}), getattr(output, "global_scope", {})):
        for value in list(scope.values()):
            if isinstance(value, nn.Module) and str(id(unwrapped(value))) in met:
                seen.append(value)
    return seen


def _is_restart(error: BaseException) -> bool:
    return any(kind.__name__ == "RestartAnalysis" for kind in type(error).__mro__)


def name_of(backend: Any) -> str:
    """What a program would write for a backend."""
    inner = getattr(backend, "_torchdynamo_orig_backend", None) or backend
    # The graphs of a distributed model come by way of what cuts them at its buckets.
    cutting = getattr(getattr(inner, "__self__", None), "backend_compile_fn", None)
    if cutting is not None and cutting is not backend:
        return name_of(cutting)
    for name in ("compiler_name", "__name__"):
        found = getattr(inner, name, None)
        if isinstance(found, str) and found:
            return found
    return type(inner).__name__


hide_from_compiler(_call)
