"""A torch model that is run twice and dumped as by torchair: as FX graph and as GE operators.

Both dumps are executions of the traced model. The GE operators have other names, other orders of
inputs and additional helpers; on request, several FX nodes are one fused operator. An error can be
planted in a node, and it propagates to all nodes that depend on it.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import fx

from driftline.formats.ascend.ge.graph_text import GraphNode
from support.ge import GeDump, write_fx

Plant = Mapping[str, Callable[[torch.Tensor], torch.Tensor]]


class Twins(NamedTuple):
    """The dumps of both executions.

    Attributes:
        fx: Folder of the FX dump.
        ge: Folder of the GE dump.
        names: Name of the GE operator by FX node; for fused nodes, that of the fused operator.
    """

    fx: Path
    ge: Path
    names: dict[str, str]


class _Call(NamedTuple):
    node: str
    target: str
    arguments: tuple[Any, ...]
    result: Any


class _Ge(NamedTuple):
    """A GE operator: its name, class, inputs with their producers, outputs and FX tensors."""

    name: str
    class_name: str
    sources: list[tuple[str, int]]
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    fx: tuple[str, ...]


def traced(model: Callable[..., Any], *inputs: torch.Tensor) -> fx.GraphModule:
    """The model as a graph of ATen operators."""
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.no_grad():
        return make_fx(model)(*inputs)


def write_twins(
    graph: fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    folder: Path,
    *,
    fused: Sequence[Sequence[str]] = (),
    plant: Plant | None = None,
    steps: int = 1,
) -> Twins:
    """Run a traced model twice and dump both executions.

    Args:
        graph: A graph that `traced` returned.
        inputs: Its arguments.
        folder: Folder in which `fx` and `ge` are written.
        fused: Groups of FX nodes, each of which becomes one GE operator, in the graph's order.
        plant: Functions by FX node that falsify the node's result in the GE execution.
        steps: Number of steps; each scales the inputs a little.
    """
    names: dict[str, str] = {}
    dump = GeDump(folder / "ge")
    for step in range(steps):
        given = [one * (1 + step / 8) if one.is_floating_point() else one for one in inputs]
        reference = _run(graph, given, {})
        place = folder / "fx" / "data_dump" / str(step + 1) / "gm_20240130064200000001_dump"
        for at, call in enumerate(reference):
            stamp = 20240130064201000001 + step * 100_000 + at
            arguments = [_saved(argument) for argument in call.arguments]
            write_fx(place, call.node, call.target, arguments, _arrays(call.result), stamp=stamp)
        operators, sources = _lowered(graph, _run(graph, given, dict(plant or {})))
        names = {fx.partition("-")[0]: one.name for one in operators for fx in one.fx if fx}
        if step == 0:
            nodes = [GraphNode(name, "Data", (), ("",)) for name in sources]
            nodes += [GraphNode(o.name, o.class_name, tuple(o.sources), o.fx) for o in operators]
            dump.graph_text(nodes)
        for one in _fuse(operators, [[names[node] for node in group] for group in fused]):
            written = [_array(value) for value in one.inputs], [_array(v) for v in one.outputs]
            dump.operator(one.class_name, one.name, *written, step=step)
    for group in fused:
        whole = "".join(names[node] for node in group)
        names.update(dict.fromkeys(group, whole))
    return Twins(folder / "fx", folder / "ge", names)


def _run(graph: fx.GraphModule, inputs: Sequence[torch.Tensor], plant: Plant) -> list[_Call]:
    calls: list[_Call] = []

    class Watching(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            if n.op == "call_function":
                if n.name in plant:
                    result = plant[n.name](result)
                arguments, _ = self.fetch_args_kwargs_from_env(n)
                calls.append(_Call(n.name, str(n.target), tuple(arguments), result))
            return result

    with torch.no_grad():
        Watching(graph).run(*inputs)
    return calls


def _lowered(graph: fx.GraphModule, calls: Sequence[_Call]) -> tuple[list[_Ge], list[str]]:
    """GE operators for the calls, and the names of the graph's inputs and attributes."""
    made: dict[str, tuple[str, int]] = {}
    outside = [node.name for node in graph.graph.nodes if node.op in ("placeholder", "get_attr")]
    made.update({name: (name, 0) for name in outside})
    counts: Counter[str] = Counter()
    operators: list[_Ge] = []
    nodes = {node.name: node for node in graph.graph.nodes}

    def named(word: str) -> str:
        counts[word] += 1
        return f"{word}_{counts[word]}"

    for call in calls:
        node = nodes[call.node]
        if node.target is operator.getitem:
            made[call.node] = (made[node.args[0].name][0], int(node.args[1]))
            continue
        read = [
            (made[argument.name], value)
            for argument, value in _flat(node.args, call.arguments)
            if isinstance(value, torch.Tensor)
        ]
        word = "".join(part.capitalize() for part in call.target.split(".")[1].split("_") if part)
        outputs = [v for v in _results(call.result) if isinstance(v, torch.Tensor)]
        if word == "Addmm":  # the bias is the last input of a GE operator
            word, read = "MatMulV2", [*read[1:], read[0]]
        if word == "Silu":  # two operators for one node; the first has no FX tensor of its own
            inner, (source, value) = named("Sigmoid"), read[0]
            half = torch.sigmoid(value)
            operators.append(_Ge(inner, "Sigmoid", [source], [value], [half], ("",)))
            word, read = "Mul", [(source, value), ((inner, 0), half)]
        name = named(word)
        fx_names = tuple(f"{call.node}-{call.target}.OUTPUT.{at}" for at in range(len(outputs)))
        operators.append(
            _Ge(name, word, [s for s, _ in read], [v for _, v in read], outputs, fx_names)
        )
        made[call.node] = (name, 0)
    return operators, outside


def _flat(arguments: Any, values: Any) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    for argument, value in zip(arguments, values, strict=True):
        if isinstance(argument, list | tuple):
            found += _flat(argument, value)
        else:
            found.append((argument, value))
    return found


def _fuse(operators: Sequence[_Ge], groups: Sequence[Sequence[str]]) -> list[_Ge]:
    """Replace each group of operators by one operator, at the place of the group's last."""
    group_of = {name: group for group in groups for name in group}
    by_name = {one.name: one for one in operators}
    written: list[_Ge] = []
    for one in operators:
        group = group_of.get(one.name)
        if group is None:
            written.append(one)
        elif one.name == group[-1]:
            members = [by_name[name] for name in group]
            inside = set(group)
            read = [
                (source, value)
                for member in members
                for source, value in zip(member.sources, member.inputs, strict=True)
                if source[0] not in inside
            ]
            seen = {s for other in operators if other.name not in inside for s in other.sources}
            read_inside = {s for member in members for s in member.sources}
            outputs = [
                value
                for member in members
                for at, value in enumerate(member.outputs)
                if (member.name, at) in seen or (member.name, at) not in read_inside
            ]
            sources, values = [s for s, _ in read], [v for _, v in read]
            whole = "".join(group)
            written.append(_Ge(whole, "AutomaticBufferFusionOp", sources, values, outputs, ("",)))
    return written


def _results(result: Any) -> tuple[Any, ...]:
    if isinstance(result, list | tuple):
        return tuple(cast("Sequence[Any]", result))
    return (result,)


def _arrays(result: Any) -> list[Any]:
    return [_array(value) for value in _results(result) if isinstance(value, torch.Tensor)]


def _saved(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return _array(argument)
    if isinstance(argument, list | tuple):
        return list(map(_saved, cast("Sequence[Any]", argument)))
    return (
        argument if isinstance(argument, int | float | str) or argument is None else str(argument)
    )


def _array(value: torch.Tensor) -> np.ndarray[Any, np.dtype[Any]]:
    plain = value.detach().float() if value.dtype is torch.bfloat16 else value.detach()
    return plain.contiguous().numpy()
