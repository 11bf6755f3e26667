"""What Paddle layers are made of, for `adapters.names`: wrappers, classes, static regions."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import paddle

Layer: Any = paddle.nn.Layer

# Attribute under which a wrapper keeps what it wraps, by the wrapper's class name.
_WRAPPERS = {
    "DataParallel": "_layers",
    "TensorParallel": "_layers",
    "SegmentParallel": "_layers",
    "ShardingParallel": "_layers",
    "GroupShardedStage2": "_layer",
    "GroupShardedStage3": "_layer",
}


class PaddleFamily:
    """Paddle's answers to `adapters.names.Family`."""

    kind: type = Layer
    table = "_sub_layers"

    def wrapped(self, module: Any) -> Any | None:
        attribute = _WRAPPERS.get(type(module).__name__)
        return module._sub_layers.get(attribute) if attribute else None

    def class_name(self, module: Any) -> str:
        return type(module).__name__

    def children(self, module: Any) -> Iterator[tuple[str, Any]]:
        for name, child in module._sub_layers.items():
            if child is not None:
                yield name, child

    def has_parameters(self, module: Any) -> bool:
        return bool(module.parameters())

    def is_foreign(self, module: Any, *, called_by_module: bool) -> bool:
        return False


FAMILY = PaddleFamily()


def is_static(layer: Any) -> bool:
    """Whether calling this layer runs a static graph (`paddle.jit.to_static(layer)`)."""
    forward = layer.__dict__.get("forward") or type(layer).forward
    return type(forward).__module__.startswith("paddle.jit.") or hasattr(
        forward, "concrete_program"
    )
