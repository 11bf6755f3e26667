"""The frameworks whose programs can be captured, and the addresses of their adapters.

This is the only list of them. The file loads no framework: each part is imported by its address
when it is used. `Engine` is the interface that the saving hook needs of a framework: leaf layers,
hooks on them, tensors as host bytes. The hook itself knows no framework.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from driftline.captures.recorder import Pending, Refusal, Snapshot
    from driftline.runs.sinks import JSON


class Framework(NamedTuple):
    """Addresses of the parts of a framework's adapter.

    Attributes:
        adapter: Module with `is_model`, `session_for`, `check_levels`, `facts` and, for the saving
            hook, `Engine`.
        module_calls: Module with `active`, which returns the sessions that watch calls.
        session: Class of a session, as `module:class`.
        provenance: Module with `facts` and, where the framework knows it, `rank`.
    """

    adapter: str
    module_calls: str
    session: str
    provenance: str


# A model's classes are compared with the frameworks in this order. `launch.bootstrap` repeats the
# names, because it must import nothing; a test checks that both lists agree.
FRAMEWORKS = {
    "torch": Framework(
        adapter="driftline.captures.torch.framework",
        module_calls="driftline.captures.torch.module_calls",
        session="driftline.captures.torch.session:CaptureSession",
        provenance="driftline.captures.torch.framework",
    ),
    "paddle": Framework(
        adapter="driftline.captures.paddle.framework",
        module_calls="driftline.captures.paddle.module_calls",
        session="driftline.captures.paddle.session:PaddleSession",
        provenance="driftline.captures.paddle.layers",
    ),
}


class Leaf(NamedTuple):
    """A layer without layers below it.

    Attributes:
        layer: The layer itself.
        site: Its path in the model.
        name: Its name in the saving hook's files: Paddle's own name, or the path of a torch module.
        called: Whether it is called at all; some layers only read the weights of their children.
    """

    layer: Any
    site: str
    name: str
    called: bool = True


class Engine(Protocol):
    """The saving hook's interface to one framework."""

    def is_model(self, model: object) -> bool: ...

    def leaves(self, model: Any) -> list[Leaf]:
        """The leaf layers of a model, in the order in which the model stores them."""
        ...

    def after_forward(self, layer: Any, look: Callable[[Any], None]) -> None:
        """Call `look` with the result of every call of a layer."""
        ...

    def parameters(self, leaf: Leaf) -> Iterator[tuple[str, str, Any]]:
        """(short name, name in files, parameter) of each parameter that gets a gradient."""
        ...

    def at_gradient(self, parameter: Any, look: Callable[[Any], None]) -> None:
        """Call `look` with each backward pass's gradient, before it is accumulated."""
        ...

    def tensors(self, output: Any) -> list[tuple[str, str, Any]]:
        """(slot, alias, tensor) of each tensor in a returned value."""
        ...

    def look(self, tensor: Any) -> Snapshot | Refusal | Pending: ...

    def undisturbed(self) -> AbstractContextManager[None]: ...

    def is_replay(self) -> bool:
        """Whether a compiler is tracing this forward, or gradient checkpointing is repeating it."""
        ...

    def rank(self) -> tuple[int, int] | None:
        """Rank and world size, if the program has initialised them in the framework."""
        ...

    def facts(self) -> dict[str, JSON]: ...


def adapter_of(model: object) -> Any | None:
    """The adapter module of a model's framework; None if it is a model of none of them."""
    # The packages of the model's classes name its framework, so that no other one is imported.
    packages = {kind.__module__.partition(".")[0] for kind in type(model).__mro__}
    for name, framework in FRAMEWORKS.items():
        if name in packages:
            adapter = importlib.import_module(framework.adapter)
            if adapter.is_model(model):
                return adapter
    return None


def engine_for(model: object) -> Engine | None:
    """The engine of a model's framework; None if it is no model or its adapter has no engine."""
    engine = getattr(adapter_of(model), "Engine", None)
    return None if engine is None else engine()
