"""A model that is compiled part by part, so that what lies between the parts can be seen.

Inside a compiled graph no layer has an output of its own. Compiled as a whole, a model shows its
logits only; compiled block by block, every block shows what it gives.
"""

# torch's own annotations are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, cast

from driftline.decoding.decoder import DecoderModel
from driftline.decoding.targets import ready

if TYPE_CHECKING:
    from torch import nn

Unit = Literal["block", "leaf", "model"]
"""What is one graph: a block of layers, each single layer, or all of it."""
_GRAPHS = 1 << 16
"""Graphs of one function; more than any model has layers and shapes."""


def compile_parts(model: DecoderModel, unit: Unit) -> int:
    """Compile the parts of a model instead of the whole; how many there are.

    A model whose target is not compiled stays as it is.
    """
    backend = ready(model.target).backend
    if not backend or unit == "model":
        return 0
    # What `nn.Module.compile` sets; without it a call is the plain one.
    cast(Any, model.module)._compiled_call_impl = None
    parts = list(_blocks(model.module) if unit == "block" else _leaves(model.module))
    for part in parts:
        part.compile(backend=backend, dynamic=True if model.target.dynamic else None)
    return len(parts)


@contextmanager
def room_for_graphs() -> Generator[None]:
    """Let torch.compile make a graph of every part, while the models run.

    All blocks share one `forward`. After eight graphs of one function it would stop compiling and
    run the others as they are, and their outputs would be taken for a compiled model's.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:  # nothing here is compiled
        yield
        return
    config: Any = dynamo.config
    limits = [
        name for name in ("recompile_limit", "accumulated_recompile_limit") if hasattr(config, name)
    ]
    with config.patch({name: max(getattr(config, name), _GRAPHS) for name in limits}):
        yield


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The members of lists of modules, and the layers outside of them."""
    from torch import nn

    for child in module.children():
        if isinstance(module, nn.ModuleList) or not any(True for _ in child.children()):
            yield child
        else:
            yield from _blocks(child)


def _leaves(module: nn.Module) -> Iterator[nn.Module]:
    for each in module.modules():
        if each is not module and not any(True for _ in each.children()):
            yield each
