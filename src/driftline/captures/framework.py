"""What a framework must provide, and which framework a model belongs to.

`Engine` is the view of the saving hook: leaf layers, hooks on them, tensors as host bytes. Each
framework implements it in its own `framework.py`; the hook itself knows no framework.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from driftline.captures.recorder import Pending, Refusal, Snapshot
from driftline.runs.sinks import JSON

FRAMEWORKS = ("torch", "paddle")


class Leaf(NamedTuple):
    """A layer without layers below it.

    Attributes:
        layer: The layer itself.
        site: Its path in the model.
        name: What the seed's files call it: Paddle's own name, or the path of a torch module.
        called: Somebody calls it. Some layers only read the weights of those below them.
    """

    layer: Any
    site: str
    name: str
    called: bool = True


class Engine(Protocol):
    """One framework, as the saving hook sees it."""

    def is_model(self, model: object) -> bool: ...

    def leaves(self, model: Any) -> list[Leaf]:
        """In the order in which the model holds them."""
        ...

    def after_forward(self, layer: Any, look: Callable[[Any], None]) -> None:
        """Call `look` with what every call of a layer returns."""
        ...

    def parameters(self, leaf: Leaf) -> Iterator[tuple[str, str, Any]]:
        """Short name, name for files, and the parameter, of those a backward pass reaches."""
        ...

    def at_gradient(self, parameter: Any, look: Callable[[Any], None]) -> None:
        """Call `look` with what each backward pass contributes, before it is accumulated."""
        ...

    def tensors(self, output: Any) -> list[tuple[str, str, Any]]:
        """Slot, alias and tensor of everything in a returned value."""
        ...

    def look(self, tensor: Any) -> Snapshot | Refusal | Pending: ...

    def undisturbed(self) -> AbstractContextManager[None]: ...

    def is_replay(self) -> bool:
        """Whether this forward is a compiler's, or the second one of gradient checkpointing."""
        ...

    def rank(self) -> tuple[int, int] | None:
        """Rank and world size, if the program has told the framework."""
        ...

    def facts(self) -> dict[str, JSON]: ...


def engine_for(model: object) -> Engine | None:
    """The engine of a model's framework; None for what is no model of any."""
    # The class hierarchy is enough to tell the framework, so that no other one is imported.
    families = {kind.__module__.partition(".")[0] for kind in type(model).__mro__}
    for framework in FRAMEWORKS:
        if framework in families:
            engine = importlib.import_module(f"driftline.captures.{framework}.framework").Engine()
            if engine.is_model(model):
                return engine
    return None
