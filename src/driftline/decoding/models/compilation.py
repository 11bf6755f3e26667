"""How a model is executed: compiled part by part, and with how many threads.

Layers inside a compiled graph have no visible output. A model compiled as a whole shows only its
logits; compiled block by block, the output of every block can be captured. `backend_graphs` counts
the graphs of each part.
"""

# torch, transformers, fms and pyarrow are only partly annotated.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

import copy
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, cast

from driftline.decoding.models.backend_graphs import compile_unit, undo_unit
from driftline.decoding.models.decoder import DecoderModel
from driftline.decoding.models.targets import ready

if TYPE_CHECKING:
    from torch import nn

Unit = Literal["block", "leaf", "model"]
"""The part that becomes one graph: a block of layers, each single layer, or the whole model."""
_GRAPHS = 1 << 16
"""Graphs of one function; more than any model has layers and shapes."""


def compile_parts(model: DecoderModel, unit: Unit) -> int:
    """Compile the parts of a model instead of the whole; returns their number.

    A model whose target is not compiled stays as it is.
    """
    backend = ready(model.target).backend
    if not backend or unit == "model":
        return 0
    undo_unit(model.module)
    _own_modules(model.module)
    chosen = _blocks(model.module) if unit == "block" else _leaves(model.module)
    parts = {id(part) for part in chosen}
    # A part that has several names is one part: it is compiled once, under the first.
    named: list[tuple[str, nn.Module]] = list(cast(Any, model.module).named_modules())
    model.units = [
        compile_unit(part, site, backend, dynamic=model.target.dynamic)
        for site, part in named
        if id(part) in parts
    ]
    return len(model.units)


def _own_modules(module: nn.Module) -> None:
    """Replace modules that a library may share among its models by copies.

    Some libraries have one activation module for all models: compiling it for one model would
    compile it for all.
    """
    copies: dict[int, nn.Module] = {}
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if not any(True for _ in child.children()) and not child.state_dict():
                copies.setdefault(id(child), copy.deepcopy(child))
                setattr(parent, name, copies[id(child)])


@contextmanager
def room_for_graphs() -> Generator[None]:
    """Let torch.compile make a graph of every part, while the models run.

    All blocks share one `forward`. After eight graphs of one function, torch.compile would stop
    compiling and run the others without it, and their outputs would look like compiled ones.
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
    for part in module.modules():
        if part is not module and not any(True for _ in part.children()):
            yield part


SMALL = 4_000_000
"""Weights of a model that several threads do not make faster: on a busy machine of two cores the
tiny models of our tests took ten times as long with two threads as with one."""


@contextmanager
def suitable_threads(model: DecoderModel) -> Generator[None]:
    """Let torch use one thread for a small model while the block runs."""
    import torch

    before = torch.get_num_threads()
    if sum(weights.numel() for weights in model.module.parameters()) < SMALL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
