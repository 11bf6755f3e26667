# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""Plan the additional computations that show the values inside the fused kernels of a graph.

A plan has a stage for each kernel: steps to compute before the kernel is called, values to show,
checks to make and values to forget. A step repeats a node of the graph, or an operator as the
program called it. This file knows operators by their schemas. It computes nothing itself;
`fusion_values` does.
"""

from __future__ import annotations

import importlib
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from driftline.captures.torch.compile import call_origins

_pytree: Any = importlib.import_module("torch.utils._pytree")
_SEES = ("view", "reshape", "_unsafe_view", "alias", "detach", "getitem")
# Operators whose results depend on memory or chance, not only on the arguments.
_NOT_REPEATED = ("as_strided", "empty", "new_empty", "empty_like", "empty_strided", "bernoulli")
_PURE_SPACES = ("_operator", "operator", "math", "torch", "builtins")
# Namespaces whose operators act on other ranks, random state or memory.
_EFFECTS = ("_c10d_functional", "c10d_functional", "c10d", "fsdp", "rngprims", "inductor", "bucket")


LIMITS = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest relative_l2 between the results of an operator and of the code compiled from it."""


class Unit(NamedTuple):
    """A kernel call of a compiled graph.

    Attributes:
        name: The kernel's name.
        library: Whether it is a library's kernel, not a generated one.
        results: For each result: the buffer, the node whose exact value it is or an empty text, and
            all nodes that it was computed from.
        nodes: All nodes that the kernel computes, including those whose values are not stored.
    """

    name: str
    library: bool
    results: Sequence[tuple[str, str, tuple[str, ...]]]
    nodes: tuple[str, ...] = ()


class Of(NamedTuple):
    """A placeholder among arguments, for the value with this name."""

    name: str


class Step(NamedTuple):
    """A value that can be computed.

    Attributes:
        name: Name of the value.
        function: The function that computes it.
        arguments: Positional and keyword arguments; other values are `Of`.
        needs: Names of the values that it takes.
        sees: Whether its result may share memory with its arguments, as a view does.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, Any]
    needs: tuple[str, ...]
    sees: bool


class Check(NamedTuple):
    """Two values of one node that should agree.

    Attributes:
        node: The node.
        actual: Name of the compiled value.
        should: Name of the value that it should equal.
        kernel: Whether a generated kernel is checked, rather than a decomposition.
        limit: Largest relative_l2 at which the check passes.
        perturbed: The step whose perturbed result shows the effect of rounding alone.
        slot: Index among that step's results.
    """

    node: str
    actual: str
    should: str
    kernel: bool
    limit: float
    perturbed: str
    slot: int


class Stage:
    """The work to do before a kernel is called: steps, shown values, checks, values to forget."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.shown: list[tuple[str, str]] = []
        self.checks: list[Check] = []
        self.forget: list[str] = []


class FusionPlan:
    """All stages of a graph.

    Attributes:
        stages: One stage for each kernel and one after the last.
        sources: For each needed buffer or input, the node whose value it is.
        constants: Values that are known in advance, by name.
        symbols: Symbolic sizes: the symbol, the input that has it, and the axis if it is a tensor.
        perturbed: Steps that are computed a second time with perturbed inputs, and the size of the
            perturbation relative to the inputs.
        perturbed_chains: Likewise for chains of steps inside a kernel: a perturbed result is the
            input of the next step, and each step adds its own rounding.
    """

    def __init__(self, units: int) -> None:
        self.stages = [Stage() for _ in range(units + 1)]
        self.sources: dict[str, str] = {}
        self.constants: dict[str, Any] = {}
        self.symbols: list[tuple[Any, str, int | None]] = []
        self.perturbed: dict[str, float] = {}
        self.perturbed_chains: dict[str, float] = {}

    @property
    def is_empty(self) -> bool:
        return not any(stage.shown or stage.checks for stage in self.stages)


def renamed(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, Of):
        return Of(names.get(value.name, value.name))
    if isinstance(value, (list, tuple)) and not isinstance(value, call_origins.Varying):
        return type(value)(renamed(part, names) for part in value)
    if isinstance(value, dict):
        return {key: renamed(part, names) for key, part in value.items()}
    return value


def are_alike(step: Step, other_step: Step) -> bool:
    if step.needs != other_step.needs:
        return False
    first, second = (_pytree.tree_flatten(either.arguments)[0] for either in (step, other_step))
    return [str(value) for value in first] == [str(value) for value in second]


def can_repeat(target: Any) -> bool:
    """Whether a repeated call gives the same result and has no side effects."""
    if not isinstance(target, torch._ops.OpOverload):
        return callable(target) and getattr(target, "__module__", "") in _PURE_SPACES
    if target.namespace in _EFFECTS or target._schema.is_mutable:
        return False
    name = target._opname
    # Random operators would draw numbers that the program draws next.
    if torch.Tag.nondeterministic_seeded in target.tags or "seed" in name or "rand" in name:
        return False
    return name not in _NOT_REPEATED


def sees(target: Any) -> bool:
    """Whether a result may share memory with the arguments."""
    if target is operator.getitem:
        return True
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if target.namespace == "aten" and target._opname in _SEES:
        return True
    return any(output.alias_info is not None for output in target._schema.returns)


def function_of(target: Any) -> Callable[..., Any]:
    """The function that computes a node."""
    aten = torch.ops.aten
    # A kernel's buffer may have other strides than in the graph, which `view` would refuse.
    if target in (aten.view.default, aten._unsafe_view.default):
        return aten.reshape.default
    return target


def takes_tensors(call: call_origins.Call) -> bool:
    leaves = _pytree.tree_flatten(call.arguments, is_leaf=is_one)[0]
    return any(isinstance(leaf, call_origins.Given) for leaf in leaves)


def is_one(value: Any) -> bool:
    """Whether a tuple among arguments describes a single argument."""
    return isinstance(value, (call_origins.Given, call_origins.Varying))


def of_node(node: Any) -> Of:
    """The placeholder for a node among arguments."""
    return Of(node.name)


def roughest(values: Iterable[Any]) -> torch.dtype:
    """The least precise floating point dtype among traced values; float64 if there is none."""
    least_precise = torch.float64
    for value in values:
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, torch.Tensor) and tensor.dtype in LIMITS:
                least_precise = max(least_precise, tensor.dtype, key=LIMITS.__getitem__)
    return least_precise


# The planner.


_fx: Any = importlib.import_module("torch.fx.node")
_NEVER = 1 << 60
# Number of elements that a node may always have, whatever the sizes in the graph.
_ROOM = 1 << 24
_TIMES = 4
"""A larger node is computed only up to this multiple of the largest input or kernel result.

The compiled program never has larger intermediate values in memory.
"""


def plan_fusion(
    module: torch.fx.GraphModule,
    units: Sequence[Unit],
    ends: Mapping[str, int],
    shown_inputs: set[str],
) -> FusionPlan:
    """Plan the additional computations for a graph.

    Args:
        module: The graph from which the kernels were generated.
        units: Its kernel calls, in order.
        ends: For each buffer or input, the index of the last kernel that reads it.
        shown_inputs: Inputs whose values the compiled program shows us.
    """
    return _Planner(module, units, ends, shown_inputs).planned()


class _Planner:
    def __init__(
        self,
        module: torch.fx.GraphModule,
        units: Sequence[Unit],
        ends: Mapping[str, int],
        shown_inputs: set[str],
    ) -> None:
        self._module = module
        self._units = units
        self._fusion_plan = FusionPlan(len(units))
        self._nodes = {node.name: node for node in module.graph.nodes}
        self._results = {
            result: node.name
            for node in module.graph.nodes
            for result in call_origins.results_of(node)
        }
        self._from: dict[str, int] = {}
        self._until: dict[str, int] = {}
        self._maker: dict[str, int] = {}
        self._planned: dict[str, int] = {}
        self._steps: dict[str, Step | None] = {}
        self._largest = 0
        self._find_sources(ends, shown_inputs)

    def _find_sources(self, ends: Mapping[str, int], shown_inputs: set[str]) -> None:
        """Find the values that need not be computed: inputs, constants and kernels' results."""
        works = self._fusion_plan
        for name, node in self._nodes.items():
            if node.op == "placeholder" and name in shown_inputs:
                self._from[name], self._until[name] = 0, ends.get(name, _NEVER)
                works.sources[name] = name
                works.symbols += _symbols(node)
            elif node.op == "get_attr" and isinstance(
                value := getattr(self._module, str(node.target), None), torch.Tensor
            ):
                self._from[name], self._until[name] = 0, _NEVER
                works.constants[name] = value
        for index, unit in enumerate(self._units):
            for name in unit.nodes:
                self._maker.setdefault(name, index)
            for buffer, exact, origins in unit.results:
                for name in origins:
                    self._maker.setdefault(name, index)
                if exact and exact not in self._from:
                    self._from[exact], self._until[exact] = index + 1, ends.get(buffer, _NEVER)
                    self._maker[exact] = index
                    works.sources[buffer] = exact
        sizes = [_elements(self._nodes[name]) for name in self._from]
        self._largest = max(_ROOM, _TIMES * max(sizes, default=0))

    def planned(self) -> FusionPlan:
        made = [(index, name) for name, index in self._maker.items() if name in self._nodes]
        order = {name: index for index, name in enumerate(self._nodes)}
        for index, name in sorted(made, key=lambda maker: (maker[0], order[maker[1]])):
            node, unit = self._nodes[name], self._units[index]
            # Only results of the program's operator calls are shown and checked.
            if node.op != "call_function" or not call_origins.results_of(node):
                continue
            if name in self._from:
                if not unit.library or not self._is_as_called(node):
                    self._check_kept(node, unit, index)
            # A view has no values of its own.
            elif not sees(node.target) or node.target is operator.getitem:
                self._look_inside(node, unit, index)
        self._forget()
        return self._fusion_plan

    def _look_inside(self, node: Any, unit: Unit, index: int) -> None:
        stage = self._plan(node.name, index)
        if stage is None:
            return
        self._fusion_plan.stages[stage].shown.append((node.name, unit.name))
        if not self._is_as_called(node) and (called := self._called(node)):
            self._expect(node, node.name, called, index, stage)

    def _check_kept(self, node: Any, unit: Unit, index: int) -> None:
        """Check a kernel's result against its nodes, and against the program's operator call."""
        actual, before = node.name, self._from[node.name]
        called = None if self._is_as_called(node) else self._called(node)
        if unit.library:
            if called is not None:
                self._expect(node, actual, called, index, before)
            return
        again = self._again(actual)
        stage = self._plan(again, index)
        if stage is None:
            return
        # A fused kernel does not round its intermediate values, but nodes computed one by one do.
        # So the limit is that of the least precise dtype among the fused nodes.
        names = (actual, *unit.nodes)
        rough = roughest(self._nodes[name].meta.get("val") for name in names if name in self._nodes)
        check = Check(actual, actual, again, True, LIMITS[rough], again, 0)
        self._fusion_plan.stages[before].checks.append(check)
        self._perturb_chain(again, torch.finfo(rough).eps)
        if called is not None:
            self._expect(node, again, called, index, stage)

    def _perturb_chain(self, name: str, share: float) -> None:
        """Also compute a step, and all planned steps that it needs, from perturbed inputs."""
        waiting, perturbed_chains = [name], self._fusion_plan.perturbed_chains
        planned_steps = {
            step.name: step for stage in self._fusion_plan.stages for step in stage.steps
        }
        while waiting:
            step = planned_steps.get(waiting.pop())
            # If several checks share a step, the largest perturbation is used.
            if step is not None and perturbed_chains.get(step.name, 0.0) < share:
                perturbed_chains[step.name] = share
                waiting += step.needs

    def _expect(self, node: Any, actual: str, should: str, latest: int, earliest_turn: int) -> None:
        """Check a value of the compiled program against the operator as the program called it."""
        stage = self._plan(should, latest)
        if stage is None:
            return
        rough = roughest([node.meta.get("val")])
        step, slot = self._steps.get(should), 0
        # The operator is computed with perturbed inputs, not the item of its result.
        if step is not None and step.function is operator.getitem:
            (parent,), slot = step.needs, int(step.arguments[0][1])
            step = self._steps.get(parent)
        if step is None:
            return
        perturbed = self._fusion_plan.perturbed
        perturbed[step.name] = max(perturbed.get(step.name, 0.0), torch.finfo(rough).eps)
        check = Check(node.name, actual, should, False, LIMITS[rough], step.name, slot)
        self._fusion_plan.stages[max(stage, earliest_turn)].checks.append(check)

    # --- Operator calls as the program makes them.

    def _is_as_called(self, node: Any) -> bool:
        """Whether a node is the program's own operator call, with the same arguments."""
        for result in call_origins.results_of(node):
            call = call_origins.call_of(result)
            if call is None or call.operator is not node.target:
                continue
            step, own = self._of_call(result, call), self._of_node(node)
            if step is not None and own is not None and are_alike(step, own):
                return True
        return False

    def _called(self, node: Any) -> str | None:
        """Name of the result of the program's operator call from which a node stems."""
        for result in call_origins.results_of(node):
            call = call_origins.call_of(result)
            if call is not None and not sees(call.operator) and can_repeat(call.operator):
                return self._result(result, call)
        return None

    def _result(self, result: call_origins.Result, call: call_origins.Call) -> str | None:
        call_name = f"call {result[:-1]}"
        if call_name not in self._steps:
            self._steps[call_name] = self._of_call(result, call)
        if self._steps[call_name] is None:
            return None
        # If an operator has one result, no item has to be taken.
        if len(call.operator._schema.returns) < 2 or not result[-1].isdigit():
            return call_name
        part = f"{call_name} {result[-1]}"
        arguments = ((Of(call_name), int(result[-1])), {})
        seen = sees(call.operator)
        self._steps[part] = Step(part, operator.getitem, arguments, (call_name,), seen)
        return part

    def _of_call(self, result: call_origins.Result, call: call_origins.Call) -> Step | None:
        needs: list[str] = []
        missing = False

        def taken(value: Any) -> Any:
            nonlocal missing
            if not isinstance(value, call_origins.Given):
                return value
            name = self._given(value)
            if name is None:
                missing = True
                return value
            needs.append(name)
            return Of(name)

        arguments = _pytree.tree_map(
            taken,
            call.arguments,
            is_leaf=is_one,
        )
        if missing or not can_repeat(call.operator):
            return None
        name = f"call {result[:-1]}"
        return Step(name, function_of(call.operator), arguments, tuple(needs), sees(call.operator))

    def _given(self, tensor: call_origins.Given) -> str | None:
        for result in tensor.results:
            if result in self._results:
                return self._results[result]
        node = self._nodes.get(tensor.name) if not tensor.results else None
        # An input of the graph is known by the name of its node.
        if node is not None and node.op == "placeholder":
            return tensor.name
        if tensor.constant is not None:
            name = f"constant {id(tensor.constant)}"
            self._fusion_plan.constants[name] = tensor.constant
            self._from[name], self._until[name] = 0, _NEVER
            return name
        for result in tensor.results:  # a view that the compiler removed, or a new tensor
            call = call_origins.call_of(result)
            if call is not None and (sees(call.operator) or not takes_tensors(call)):
                return self._result(result, call)
        return None

    # --- Stages.

    def _plan(self, name: str, latest: int) -> int | None:
        """Plan to compute a value and all that it needs in one stage.

        Args:
            name: The value.
            latest: The last stage in which it may be computed.

        Returns:
            The stage; None if the value cannot be computed.
        """
        if (planned_turn := self._planned.get(name)) is not None:
            return planned_turn if planned_turn <= latest else None
        needed: dict[str, Step] = {}
        earliest, last = 0, latest
        waiting = [name]
        while waiting:
            value_name = waiting.pop()
            if value_name in needed:
                continue
            if value_name in self._from:
                earliest, last = (
                    max(earliest, self._from[value_name]),
                    min(last, self._until[value_name]),
                )
                continue
            if value_name in self._planned:
                earliest = max(earliest, self._planned[value_name])
                continue
            step = self._step(value_name)
            if step is None:
                return None
            step = needed[value_name] = self._before(step, latest)
            waiting += step.needs
        # One needed value is overwritten before another one exists.
        if earliest > last:
            return None
        stage = self._fusion_plan.stages[last]
        present = {step.name for step in stage.steps}
        for step in _in_order(needed, name):
            if step.name not in present:
                stage.steps.append(step)
            # A value that shares memory is computed anew in every stage.
            if not step.sees:
                self._planned[step.name] = last
        return last

    def _again(self, name: str) -> str:
        """Name of the value of a stored node when it is computed again, besides its kernel."""
        again = f"{name} again"
        if again not in self._steps:
            step = self._step(name)
            self._steps[again] = None if step is None else step._replace(name=again)
        return again

    def _before(self, step: Step, latest: int) -> Step:
        """A step in which values that are written after stage `latest` are computed again."""
        later = {name: self._again(name) for name in step.needs if self._from.get(name, 0) > latest}
        if not later:
            return step
        arguments = renamed(step.arguments, later)
        needs = tuple(later.get(name, name) for name in step.needs)
        return step._replace(arguments=arguments, needs=needs)

    def _step(self, name: str) -> Step | None:
        if name not in self._steps:
            node = self._nodes.get(name)
            self._steps[name] = self._of_node(node) if node is not None else None
        return self._steps[name]

    def _of_node(self, node: Any) -> Step | None:
        if node.op != "call_function" or not can_repeat(node.target):
            return None
        if _elements(node) > self._largest:
            return None
        arguments = _fx.map_arg((node.args, node.kwargs), of_node)
        needs = tuple(source.name for source in node.all_input_nodes)
        maker = node.args[0] if node.target is operator.getitem else node
        seen = sees(getattr(maker, "target", operator.getitem))
        return Step(node.name, function_of(node.target), arguments, needs, seen)

    def _forget(self) -> None:
        """Add to each stage the values that are not needed after it."""
        last: dict[str, int] = {}
        for index, stage in enumerate(self._fusion_plan.stages):
            for step in stage.steps:
                # A value can be dropped after the last stage that reads it.
                last.update(dict.fromkeys((step.name, *step.needs), index))
            last.update({name: index for name, _ in stage.shown})
            for check in stage.checks:
                last.update({check.actual: index, check.should: index})
        for name, index in last.items():
            if name not in self._fusion_plan.constants:
                self._fusion_plan.stages[index].forget.append(name)
        # A value that shares memory is valid only in its own stage.
        for stage in self._fusion_plan.stages:
            seen = [step.name for step in stage.steps if step.sees]
            stage.forget += [name for name in seen if name not in stage.forget]
        sources = self._fusion_plan.sources
        self._fusion_plan.sources = {key: name for key, name in sources.items() if name in last}


def _in_order(steps: Mapping[str, Step], name: str) -> Iterator[Step]:
    """A step and the steps that it needs, in an order in which they can be computed."""
    done: set[str] = set()
    waiting = [(name, False)]
    while waiting:
        current, ready = waiting.pop()
        if current in done or current not in steps:
            continue
        if ready:
            done.add(current)
            yield steps[current]
        else:
            waiting.append((current, True))
            waiting += [(need, False) for need in steps[current].needs]


def _elements(node: Any) -> int:
    """Number of elements of a node, the largest of several results; 0 if sizes are symbolic."""
    value = node.meta.get("val")
    parts = value if isinstance(value, (list, tuple)) else (value,)
    sizes = [tuple(part.shape) for part in parts if isinstance(part, torch.Tensor)]
    fixed_sizes = [size for size in sizes if all(type(extent) is int for extent in size)]
    return max(map(math.prod, fixed_sizes), default=0)


def _symbols(node: Any) -> Iterator[tuple[Any, str, int | None]]:
    """(symbol, input, axis) of each symbolic size that can be read from an input."""
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt):
        yield value.node.expr, node.name, None
    elif isinstance(value, torch.Tensor):
        for axis, extent in enumerate(value.shape):
            if isinstance(extent, torch.SymInt):
                yield extent.node.expr, node.name, axis
