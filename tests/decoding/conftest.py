"""A stand-in for a device's compiler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture
def stand_in() -> Iterator[list[Any]]:
    """A backend named `sendnn` that runs graphs as they are; the list holds those it was given."""
    from torch._dynamo.backends import registry

    graphs: list[Any] = []

    def sendnn(graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    registry.register_backend(sendnn, name="sendnn")
    yield graphs
    registry._BACKENDS.pop("sendnn", None)
    registry._COMPILER_FNS.pop("sendnn", None)
    torch._dynamo.reset()
