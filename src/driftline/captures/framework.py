"""The frameworks whose programs can be captured: where their adapters are, and what they provide.

One table instead of a list in every place that asks. This file loads no framework: a part is
imported by its address when it is used. `Engine` is the view of the saving hook: leaf layers, hooks
on them, tensors as host bytes; the hook itself knows no framework.
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
    """Where the parts of a framework's adapter are.

    Attributes:
        adapter: Module with `is_model`, `session_for`, `check_levels`, `facts` and, for the saving
            hook, `Engine`.
        module_calls: Module with `active`, the sessions that watch calls.
        session: Class of a session, as `module:class`.
        provenance: Module with `facts` and, where the framework knows it, `rank`.
    """

    adapter: str
    module_calls: str
    session: str
    provenance: str


# The order is the one in which a model's classes are asked. `launch.bootstrap` has the names once
# more, because it imports nothing; a test holds the two together.
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


def adapter_of(model: object) -> Any | None:
    """The adapter module of a model's framework; None for what is no model of any."""
    # The class hierarchy is enough to tell the framework, so that no other one is imported.
    packages = {kind.__module__.partition(".")[0] for kind in type(model).__mro__}
    for name, framework in FRAMEWORKS.items():
        if name in packages:
            adapter = importlib.import_module(framework.adapter)
            if adapter.is_model(model):
                return adapter
    return None


def engine_for(model: object) -> Engine | None:
    """The engine of a model's framework; None for what is no model, or has no saving hook."""
    engine = getattr(adapter_of(model), "Engine", None)
    return None if engine is None else engine()
