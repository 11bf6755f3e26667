"""Parts of a model that a backend of `torch.compile` runs, and the graphs that really reached it.

`torch.compile` silently falls back to plain Python: it makes no graph of a layer of `torch.nn`
itself, unless a function outside torch calls it. An output that no backend computed must not be
taken for the backend's, so every unit counts the graphs that its backend has compiled.
"""

# torch's own annotations are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

if TYPE_CHECKING:
    import torch
    from torch import nn


class CompiledUnit:
    """One part of a model that is compiled by itself; its graphs are given to this object.

    Attributes:
        site: The part's path in the model; empty for the model itself.
        backend: Name of the backend.
        graphs: Graphs that the backend has compiled.
        first_graphs: Those of the first call; if there are several, Python runs the code between.
        calls: How often the part was called.
        hands_on: Whether every call so far returned its input: there was nothing to compile.
    """

    def __init__(self, site: str, backend: str) -> None:
        from torch import _dynamo

        self.site = site
        self.backend = backend
        self.graphs = self.first_graphs = self.calls = 0
        self.hands_on = True
        self._compiler: Any = cast(Any, _dynamo).lookup_backend(backend)

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        """Compile one graph, as `torch.compile` asks its backend to."""
        compiled = self._compiler(graph, inputs, **options)
        # Counted afterwards: where a backend fails, torch may be set to go on without it.
        self.graphs += 1
        return compiled

    @property
    def __name__(self) -> str:
        return self.backend

    @property
    def missed(self) -> bool:
        """Whether the part computed something, and the backend never saw it."""
        return self.calls > 0 and not self.graphs and not self.hands_on

    def called(self, arguments: Any, returned: Any) -> None:
        """Record a call of the part with its arguments and result."""
        self.calls += 1
        if self.calls == 1:
            self.first_graphs = self.graphs
        if not self.graphs and self.hands_on:
            places = {_place(tensor) for tensor in _tensors(arguments)}
            self.hands_on = all(_place(tensor) in places for tensor in _tensors(returned))


class GraphCount(NamedTuple):
    """The units of a model in numbers.

    Attributes:
        backend: Name of the backend; empty for a model that is not compiled.
        graphs: Number of graphs that it compiled.
        units: Number of parts that were called and had something to compile.
        missed: Sites of parts of which no graph reached it.
        broken: Sites of parts that reached it in several graphs.
    """

    backend: str
    graphs: int
    units: int
    missed: tuple[str, ...]
    broken: tuple[str, ...]

    @property
    def text(self) -> str:
        """`sendnn compiled 14 graphs, of 12 of 12 parts`."""
        graphs = f"{self.graphs} graph{'' if self.graphs == 1 else 's'}"
        return (
            f"{self.backend} compiled {graphs}, of {self.units - len(self.missed)} of "
            f"{self.units} part{'' if self.units == 1 else 's'}"
        )


def count_graphs(units: Iterable[CompiledUnit]) -> GraphCount:
    """How many graphs of which units reached the backend, up to now."""
    called = [unit for unit in units if unit.calls and not (unit.hands_on and not unit.graphs)]
    return GraphCount(
        called[0].backend if called else "",
        sum(unit.graphs for unit in called),
        len(called),
        tuple(unit.site for unit in called if unit.missed),
        tuple(unit.site for unit in called if unit.first_graphs > 1),
    )


def compile_unit(part: nn.Module, site: str, backend: str, *, dynamic: bool) -> CompiledUnit:
    """Have a part's `forward` compiled by itself, in place.

    `nn.Module.compile` is not used: it compiles the frames below the call, and torch makes no graph
    of frames of its own layers. Hooks stay outside of the graph, so outputs can be captured.
    """
    import torch

    unit = CompiledUnit(site, backend)
    forward = part.forward

    def call(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    # Graphs are kept with the code: of one code for all parts only a few would be made.
    call.__code__ = call.__code__.replace(co_qualname=f"driftline_unit({site})")
    compiled = torch.compile(call, backend=cast(Any, unit), dynamic=True if dynamic else None)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        returned = compiled(*args, **kwargs)
        unit.called((args, kwargs), returned)
        return returned

    part.forward = run
    return unit


def undo_unit(part: nn.Module) -> None:
    """Let a part run its own `forward` again."""
    vars(part).pop("forward", None)


def _tensors(tree: Any) -> list[torch.Tensor]:
    import torch
    from torch.utils import _pytree

    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    """The memory of a tensor's values: a view of the same values counts as the same tensor."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
