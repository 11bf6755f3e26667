# pyright: reportPrivateUsage=false
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportAttributeAccessIssue=false
# pyright: reportUnknownMemberType=false
"""The structure of torch modules: wrappers, the module tree, flattened calls, compiled regions.

This file also determines which module calls are not watched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from driftline.captures import naming
from driftline.captures.flatten import (
    MAX_DEPTH,
    MAX_TENSORS,
    NO_CACHE,
    WHOLE_CACHE,
    Binding,
    Flatten,
    binding_of,
)
from driftline.captures.naming import ROOT, ModuleNames, Place, Root
from driftline.captures.torch.tensors import stored_dtype
from driftline.graphs.module_tree import ModuleNode, ModuleTree, Parameter

if TYPE_CHECKING:
    from driftline.captures.torch.session import CaptureSession
__all__ = [
    "MAX_DEPTH",
    "MAX_TENSORS",
    "NO_CACHE",
    "ROOT",
    "WHOLE_CACHE",
    "Binding",
    "ModuleNames",
    "Place",
    "Root",
    "Tensors",
    "binding_of",
    "cache_part",
    "inputs",
    "outputs",
]


# The attribute in which a wrapper stores the wrapped module, by the wrapper's class name.
_WRAPPERS = {
    "OptimizedModule": "_orig_mod",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
}


def wrapped(module: nn.Module) -> nn.Module | None:
    """The module inside a known wrapper; None for any other module."""
    # Recognised by name, so that no optional part of torch has to be imported.
    attribute = _WRAPPERS.get(type(module).__name__)
    return module._modules.get(attribute) if attribute else None


def unwrapped(module: nn.Module) -> nn.Module:
    while (inner := wrapped(module)) is not None:
        module = inner
    return module


def class_of(module: nn.Module) -> type:
    """The program's class of a module; `fully_shard` and `parametrize` derive classes from it."""
    kind = type(module)
    sharded = any(base.__name__ == "FSDPModule" for base in kind.__bases__)
    # In both cases the program's class is the last base.
    return kind.__bases__[-1] if sharded or "parametrizations" in module._modules else kind


def class_name_of(module: nn.Module) -> str:
    """The name of the program's class of a module."""
    return class_of(module).__name__


def is_transparent(module: nn.Module) -> bool:
    """Whether a wrapper's own call need not be watched, because the wrapped module's call is seen.

    The wrapped module's call is not seen if the compiled module was bound to the plain call before
    the capture began, or if it comes from `torch.nn` itself, so that its call is inside the
    compiled region. Then the wrapper is watched in its place.
    """
    inner = wrapped(module)
    if inner is None:
        return False
    if type(module).__name__ != "OptimizedModule":
        return True
    # The callable that Dynamo compiled: if it is the module's plain call, that call is seen.
    compiled = getattr(module, "_forward", None) or module.forward
    origin = getattr(compiled, "_torchdynamo_orig_callable", None)
    return (
        getattr(origin, "__self__", None) is inner
        and getattr(origin, "__func__", None) is nn.Module.__call__
    )


def children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module._modules.items():
        if child is not None:
            yield name, child


class TorchStructure:
    """Structure of torch modules; see `naming.ModuleStructure`."""

    kind = nn.Module
    table = "_modules"

    def wrapped(self, module: nn.Module) -> nn.Module | None:
        return wrapped(module)

    def class_name(self, module: nn.Module) -> str:
        return class_name_of(module)

    def children(self, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        return children(module)

    def has_parameters(self, module: nn.Module) -> bool:
        return next(module.parameters(), None) is not None

    def is_foreign(self, module: nn.Module, *, called_by_module: bool) -> bool:
        """Whether a module is a graph of the compiler that a backend calls, or a parametrization.

        A compiler's graph has no parameters, or is called inside a module without being part of its
        tree; neither is true of a graph module that is a model. The graph of a `DataParallel` model
        is divided into several, each in a module of the compiler.
        """
        inner = unwrapped(module)
        package = type(inner).__module__
        if package.startswith("torch._dynamo."):
            return True
        # A parametrization also runs when it is registered, or when a weight is read outside of a
        # model. It must not be taken for the program's first model.
        if not called_by_module and package.startswith("torch.nn.utils.parametriz"):
            return True
        return isinstance(inner, torch.fx.GraphModule) and (
            called_by_module or not self.has_parameters(inner)
        )


STRUCTURE = TorchStructure()


def topmost(module: nn.Module) -> nn.Module:
    """The outermost model that contains a module; the module itself if there is none."""
    return cast(nn.Module, naming.topmost(STRUCTURE, module))


def is_compiled(module: nn.Module) -> bool:
    """Whether calling this module runs a compiled region (`torch.compile(m)` or `m.compile()`)."""
    return type(module).__name__ == "OptimizedModule" or (
        getattr(module, "_compiled_call_impl", None) is not None
    )


# The module tree, as it is stored in the topology of a run.


def module_tree(names: ModuleNames, order: Iterable[str]) -> ModuleTree:
    """The tree of all models named so far; freed models are as they were last seen."""
    roots: list[ModuleNode] = []
    for root in names.roots:
        module = root.module()
        # A freed model keeps its last tree.
        if module is not None:
            root.tree = _node(module, names, set())
        if root.tree is not None:
            roots.append(root.tree)
    return ModuleTree(tuple(roots), tuple(order))


def _node(module: nn.Module, names: ModuleNames, seen: set[int]) -> ModuleNode:
    module = unwrapped(module)
    place = names.known(module)
    class_name = class_name_of(module)
    site = place.site if place else class_name
    ids = place.ids if place else None
    # A module that is used twice is listed in full only once.
    if id(module) in seen:
        return ModuleNode(site, class_name, ids, shared=True)
    seen.add(id(module))
    below = tuple((name, _node(child, names, seen)) for name, child in children(module))
    return ModuleNode(site, class_name, ids, _parameters(module), below)


def _parameters(module: nn.Module) -> tuple[Parameter, ...]:
    held = [(name, p, True) for name, p in module._parameters.items() if p is not None]
    held += [(name, b, False) for name, b in module._buffers.items() if b is not None]
    return tuple(
        Parameter(
            name,
            stored_dtype(tensor),
            # Asking a lazy parameter for its shape raises.
            tuple(tensor.shape) if not nn.parameter.is_lazy(tensor) else (),
            is_parameter and tensor.requires_grad,
        )
        for name, tensor, is_parameter in held
    )


# Calls as flat lists of named tensors; the rule is in `captures.flatten`.


Tensors = list[tuple[str, str, torch.Tensor]]

_FLATTEN = Flatten(torch.Tensor, (torch.dtype, torch.device, torch.Size))
inputs = _FLATTEN.inputs
outputs = _FLATTEN.outputs


def cache_part(module: nn.Module, stack: Sequence[object]) -> int:
    """The part of a key-value cache that belongs to a module: its own layer, or all for a root.

    Args:
        module: The module that is being called.
        stack: The running calls, including this one.
    """
    # The root gets the whole cache, and each of its layers uses a part of it.
    if len(stack) <= 1:
        return WHOLE_CACHE
    layer = module.__dict__.get("layer_idx")
    return layer if type(layer) is int else NO_CACHE


# Module calls that are not watched.


PIPELINING = "torch.distributed.pipelining.stage"
_REHEARSALS = frozenset({"_forward_metadata_inference", "_shape_inference"})
# A stage infers shapes a few frames above the module, and reading the whole stack would be slow.
_REHEARSAL_DEPTH = 12
_tracing_state: Callable[[], Any] = torch._C._get_tracing_state


def must_not_watch() -> bool:
    """Whether watching is useless or would change something: data workers, tracing of scripts."""
    if _tracing_state() is not None:
        return True
    worker = sys.modules.get("torch.utils.data._utils.worker")
    return worker is not None and worker._worker_info is not None


def is_rehearsal() -> bool:
    """Whether a pipeline stage only infers its output shapes, which is no call of the program."""
    # Frames 0 and 1 are this function and the wrapper that calls it; frame 2 is the program.
    frame = sys._getframe(2)
    for _ in range(_REHEARSAL_DEPTH):
        if frame.f_code.co_name in _REHEARSALS:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


# Compiled regions, whose inside is not captured.


def explain(session: CaptureSession, place: Place) -> None:
    if session.sees_graphs:
        return
    session.event_once(
        "compiled",
        "torch.compile: only inputs and outputs of compiled modules were seen, and modules where "
        "their graphs break; --graph auto records what runs inside",
        site=place.site,
    )


def compiled_graphs() -> int:
    """The number of graphs that torch.compile has made in this process so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0
