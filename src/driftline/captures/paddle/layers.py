# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""The structure of Paddle layers: wrappers, the layer tree, flattened calls, static regions.

The file also reads the facts about Paddle's own state that are stored with a run.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import paddle
from paddle.base import core

from driftline.captures.flatten import Flatten, Tensors, binding_of
from driftline.captures.naming import ModuleNames, unwrapped
from driftline.captures.paddle.tensors import dtype_name
from driftline.graphs.module_tree import ModuleNode, ModuleTree, Parameter
from driftline.runs.sinks import JSON

__all__ = ["Tensors", "binding_of", "inputs", "outputs"]


Layer: Any = paddle.nn.Layer

# Attribute in which a wrapper stores the wrapped layer, by the wrapper's class name.
_WRAPPERS = {
    "DataParallel": "_layers",
    "TensorParallel": "_layers",
    "SegmentParallel": "_layers",
    "ShardingParallel": "_layers",
    "GroupShardedStage2": "_layer",
    "GroupShardedStage3": "_layer",
}


class PaddleStructure:
    """Structure of Paddle layers; see `naming.ModuleStructure`."""

    kind: type = Layer
    table = "_sub_layers"

    def wrapped(self, module: Any) -> Any | None:
        # Wrappers are recognised by name, so that no optional part of Paddle has to be imported.
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


STRUCTURE = PaddleStructure()


def is_static(layer: Any) -> bool:
    """Whether calling this layer runs a static graph (`paddle.jit.to_static(layer)`)."""
    # After `enable_to_static(False)` such a layer calls the forward that the program wrote.
    translator = sys.modules.get("paddle.jit.dy2static.program_translator")
    if translator is not None:
        switch: Any = translator.ProgramTranslator()
        if not getattr(switch, "enable_to_static", True):
            return False
    # `to_static` replaces the forward of an instance, or of a class.
    forward = layer.__dict__.get("forward") or type(layer).forward
    return type(forward).__module__.startswith("paddle.jit.") or hasattr(
        forward, "concrete_program"
    )


# The layer tree, as it is stored in a run's topology.


def layer_tree(names: ModuleNames, order: Iterable[str]) -> ModuleTree:
    """The tree of all named layers."""
    roots: list[ModuleNode] = []
    for root in names.roots:
        layer = root.module()
        # For a model that was freed, the tree that was last read is used.
        if layer is not None:
            root.tree = _node(layer, names, set())
        if root.tree is not None:
            roots.append(root.tree)
    return ModuleTree(tuple(roots), tuple(order))


def _node(layer: Any, names: ModuleNames, seen: set[int]) -> ModuleNode:
    layer = unwrapped(STRUCTURE, layer)
    place = names.known(layer)
    class_name = STRUCTURE.class_name(layer)
    site = place.site if place else class_name
    ids = place.ids if place else None
    # A layer that is used twice is described in full only once.
    if id(layer) in seen:
        return ModuleNode(site, class_name, ids, shared=True)
    seen.add(id(layer))
    below = tuple((name, _node(child, names, seen)) for name, child in STRUCTURE.children(layer))
    return ModuleNode(site, class_name, ids, _parameters(layer), below)


def _parameters(layer: Any) -> tuple[Parameter, ...]:
    held = [(name, p, True) for name, p in layer._parameters.items() if p is not None]
    held += [(name, b, False) for name, b in layer._buffers.items() if b is not None]
    return tuple(
        Parameter(
            name,
            dtype_name(tensor.dtype),
            tuple(int(size) for size in tensor.shape),
            is_parameter and not tensor.stop_gradient,
        )
        for name, tensor, is_parameter in held
    )


# Calls as flat lists of named tensors; `captures.flatten` has the rules.


_core: Any = core
_FLATTEN = Flatten(paddle.Tensor, (paddle.dtype, _core.Place))
inputs = _FLATTEN.inputs
outputs = _FLATTEN.outputs


# Facts: the parts of Paddle's own state that can change a number.


_DETERMINISTIC = "FLAGS_cudnn_deterministic"


def facts() -> dict[str, JSON]:
    """Facts about Paddle's state; reading them draws no random number."""
    deterministic = False
    with contextlib.suppress(ValueError):  # a Paddle build without CUDA has no such flag
        deterministic = bool(paddle.get_flags([_DETERMINISTIC])[_DETERMINISTIC])
    return {
        "framework": "paddle",
        "devices": [str(paddle.device.get_device())],
        "seed": int(_core.default_cpu_generator().initial_seed()),
        "default_dtype": str(paddle.get_default_dtype()),
        "deterministic": deterministic,
    }


def rank() -> tuple[int, int] | None:
    """Rank and world size from `paddle.distributed`; None if the program has not initialised it."""
    distributed: Any = paddle.distributed
    if not distributed.is_initialized():
        return None
    return int(distributed.get_rank()), int(distributed.get_world_size())
