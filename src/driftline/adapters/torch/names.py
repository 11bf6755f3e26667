"""What torch modules are made of, for `adapters.names`: wrappers, classes, compiled graphs."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import nn

from driftline.adapters import names
from driftline.adapters.names import ROOT, ModuleNames, Place, Root

__all__ = ["ROOT", "ModuleNames", "Place", "Root"]

# Attribute under which a wrapper keeps what it wraps, by the wrapper's class name.
_WRAPPERS = {
    "OptimizedModule": "_orig_mod",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
}


def wrapped(module: nn.Module) -> nn.Module | None:
    """What a known wrapper wraps; None for any other module."""
    attribute = _WRAPPERS.get(type(module).__name__)
    return module._modules.get(attribute) if attribute else None


def unwrapped(module: nn.Module) -> nn.Module:
    while (inner := wrapped(module)) is not None:
        module = inner
    return module


def class_name_of(module: nn.Module) -> str:
    """The class the program wrote; `fully_shard` and `parametrize` put their own in front."""
    kind = type(module)
    sharded = any(base.__name__ == "FSDPModule" for base in kind.__bases__)
    if sharded or "parametrizations" in module._modules:
        return kind.__bases__[-1].__name__
    return kind.__name__


def is_transparent(module: nn.Module) -> bool:
    """Whether a wrapper's own call need not be looked at: the wrapped module's will be seen.

    It will not when a compiled module was bound to the plain call, before capture began, or comes
    from `torch.nn` itself, so that its call lies inside the compiled region. Then the wrapper
    speaks for it.
    """
    inner = wrapped(module)
    if inner is None:
        return False
    if type(module).__name__ != "OptimizedModule":
        return True
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


class TorchFamily:
    """torch's answers to `adapters.names.Family`."""

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
        """A graph that the compiler made and some backends call as a module.

        It has no parameters of its own, or is called inside a module without being part of its
        tree; a graph module that is somebody's model is neither. The graph of a `DataParallel`
        model is cut into several, each in a module of the compiler's own.
        """
        inner = unwrapped(module)
        if type(inner).__module__.startswith("torch._dynamo."):
            return True
        return isinstance(inner, torch.fx.GraphModule) and (
            called_by_module or not self.has_parameters(inner)
        )


FAMILY = TorchFamily()


def topmost(module: nn.Module) -> nn.Module:
    """The outermost model a module is part of; itself when it is part of none."""
    return cast(nn.Module, names.topmost(FAMILY, module))


def is_compiled(module: nn.Module) -> bool:
    """Whether calling this module runs a compiled region (`torch.compile(m)` or `m.compile()`)."""
    return type(module).__name__ == "OptimizedModule" or (
        getattr(module, "_compiled_call_impl", None) is not None
    )
