"""Steps that are taken beside the kernels of a graph, and which operators they may repeat.

Knows operators by their schemas; plans nothing and computes nothing.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from driftline.adapters.torch.graphs import stamps

_pytree: Any = importlib.import_module("torch.utils._pytree")
_SEES = ("view", "reshape", "_unsafe_view", "alias", "detach", "getitem")
_NOT_REPEATED = ("as_strided", "empty", "new_empty", "empty_like", "empty_strided", "bernoulli")
_PURE_SPACES = ("_operator", "operator", "math", "torch", "builtins")
_EFFECTS = ("_c10d_functional", "c10d_functional", "c10d", "fsdp", "rngprims", "inductor", "bucket")


LIMITS = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""relative_l2 by which an operator and what a compiler made of it may be apart."""


class Unit(NamedTuple):
    """A kernel, in the order of calls.

    Attributes:
        name: Its name.
        library: It is one of a library, and nothing was generated.
        results: For each result: the buffer, the node whose value it is if one is, and all nodes
            that went into it.
        nodes: All nodes that it computes, also those of which nothing is kept.
    """

    name: str
    library: bool
    results: Sequence[tuple[str, str, tuple[str, ...]]]
    nodes: tuple[str, ...] = ()


class Of(NamedTuple):
    """In place of an argument: the value of this name."""

    name: str


class Step(NamedTuple):
    """Something that can be computed.

    Attributes:
        name: Of its value.
        function: What is called.
        arguments: Positional and by name; values are `Of`.
        needs: Names of values that it takes.
        sees: It shows memory of what it takes.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, Any]
    needs: tuple[str, ...]
    sees: bool


class Check(NamedTuple):
    """Two values of one node that should agree.

    Attributes:
        node: Which.
        ours: What the compiler made of it.
        should: The value that it should have.
        kernel: Whether a generated kernel is asked, not a decomposition.
        limit: They may be so far apart.
        shaken: The step that says how much rounding alone does to it.
        slot: Which of that step's results.
    """

    node: str
    ours: str
    should: str
    kernel: bool
    limit: float
    shaken: str
    slot: int


class Turn:
    """What is done before a kernel is called, in this order."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.shown: list[tuple[str, str]] = []
        self.checks: list[Check] = []
        self.forget: list[str] = []


class Workings:
    """All turns of a graph.

    Attributes:
        turns: One for each kernel and one after the last.
        sources: By buffer or input: the nodes whose value it is, as far as they are needed.
        constants: Values that are known already.
        symbols: Sizes that vary: symbol, the input that tells it, and which of its axes.
        shaken: Steps that are also taken with inputs that are off by this share of themselves.
        twins: The same for all steps inside of a kernel: from inputs that are off to a result that
            is, each step rounding anew.
    """

    def __init__(self, units: int) -> None:
        self.turns = [Turn() for _ in range(units + 1)]
        self.sources: dict[str, str] = {}
        self.constants: dict[str, Any] = {}
        self.symbols: list[tuple[Any, str, int | None]] = []
        self.shaken: dict[str, float] = {}
        self.twins: dict[str, float] = {}

    @property
    def is_empty(self) -> bool:
        return not any(turn.shown or turn.checks for turn in self.turns)


def renamed(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, Of):
        return Of(names.get(value.name, value.name))
    if isinstance(value, (list, tuple)) and not isinstance(value, stamps.Varying):
        return type(value)(renamed(part, names) for part in value)
    if isinstance(value, dict):
        return {key: renamed(part, names) for key, part in value.items()}
    return value


def are_alike(one: Step, other: Step) -> bool:
    if one.needs != other.needs:
        return False
    first, second = (_pytree.tree_flatten(step.arguments)[0] for step in (one, other))
    return [str(value) for value in first] == [str(value) for value in second]


def can_repeat(target: Any) -> bool:
    """Whether calling something again gives the same, and changes nothing."""
    if not isinstance(target, torch._ops.OpOverload):
        return callable(target) and getattr(target, "__module__", "") in _PURE_SPACES
    if target.namespace in _EFFECTS or target._schema.is_mutable:
        return False
    name = target._opname
    if torch.Tag.nondeterministic_seeded in target.tags or "seed" in name or "rand" in name:
        return False
    return name not in _NOT_REPEATED


def sees(target: Any) -> bool:
    """Whether a result may share memory with what was taken."""
    if target is operator.getitem:
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if target.namespace == "aten" and target._opname in _SEES:
        return True
    return any(one.alias_info is not None for one in target._schema.returns)


def function_of(target: Any) -> Callable[..., Any]:
    """What computes a node; memory of kernels may lie otherwise than the graph believes."""
    aten = torch.ops.aten
    if target in (aten.view.default, aten._unsafe_view.default):
        return aten.reshape.default
    return target


def takes_tensors(call: stamps.Call) -> bool:
    leaves = _pytree.tree_flatten(call.arguments, is_leaf=is_one)[0]
    return any(isinstance(one, stamps.Given) for one in leaves)


def is_one(value: Any) -> bool:
    """Whether a tuple among arguments stands for one of them."""
    return isinstance(value, (stamps.Given, stamps.Varying))


def of_node(node: Any) -> Of:
    """In place of a node among arguments."""
    return Of(node.name)


def roughest(values: Iterable[Any]) -> torch.dtype:
    """The least precise type of floating point among traced values; float64 where none is."""
    found = torch.float64
    for value in values:
        for one in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(one, torch.Tensor) and one.dtype in LIMITS:
                found = max(found, one.dtype, key=LIMITS.__getitem__)
    return found
