"""Kinds of modules by name, the length of the longest sum in a module, and steps of optimizers.

The number of terms of a sum determines how much rounding to expect. It comes from the weights of
the module tree (a Linear sums over its input channels, a convolution over its window), from the
class if there are no weights (softmax, means, matrix products), and from the input shapes. A site
about which nothing is known counts as a sum of one term.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from driftline.comparison.table.row import Row
from driftline.comparison.table.structure import Shape, Stride
from driftline.graphs.module_tree import ModuleNode, ModuleTree
from driftline.runs.run import Run
from driftline.runs.sidecars.model_facts import read_model_facts

# `Conv1D` of transformers is a matrix product and torch's `Conv1d` a convolution. Only the case of
# the last letter differs.
_LOOKS_UP = re.compile(r"(?i)embedding|gather|take")
_CONVOLVES = re.compile(r"(?i)conv(?!1d$)|conv\dd$")
_MULTIPLIES = re.compile(r"(?i)linear|matmul|gemm|\bb?mm\b|addb?mm|einsum|dense|conv1d$")
_ALONG_ROW = re.compile(r"(?i)norm|softmax|mean|\bsum\b|reduce")
_SMOOTH = re.compile(r"(?i)norm|softmax|gelu|silu|swish|mish|tanh|sigmoid|softplus|linear|embed")
_ATTENDS = re.compile(r"(?i)attention|attn|sdpa")


def is_smooth(class_name: str) -> bool:
    """Whether a module's function has a derivative without jumps, judged by its class name.

    >>> is_smooth("LayerNorm"), is_smooth("ReLU")
    (True, False)
    """
    return bool(_SMOOTH.search(class_name))


def is_norm(class_name: str) -> bool:
    """Whether a module divides groups of elements by their norm, judged by its class name.

    >>> is_norm("LlamaRMSNorm"), is_norm("BatchNorm2d")
    (True, False)
    """
    return "norm" in class_name.lower() and "batch" not in class_name.lower()


def attends(class_name: str) -> bool:
    """Whether a module is an attention, judged by its class name.

    >>> attends("LlamaSdpaAttention"), attends("LlamaMLP")
    (True, False)
    """
    return bool(_ATTENDS.search(class_name))


def length_of(
    class_name: str, weight: Shape | None, ins: Sequence[Row], outs: Sequence[Row]
) -> int:
    """Return the length of the longest sum in a call, by its class, weight, inputs and outputs."""
    input_shapes = [row.reference_shape for row in ins if row.reference_shape]
    output_shapes = [row.reference_shape for row in outs if row.reference_shape]
    return max(1, sum_length(class_name, weight, input_shapes, output_shapes))


def sum_length(
    class_name: str,
    weight: Shape | None,
    input_shapes: Sequence[Shape],
    output_shapes: Sequence[Shape],
) -> int:
    """Return the number of terms of the longest sum of a call.

    Args:
        class_name: Class of the module or operator.
        weight: Shape of its weight; None if it has none.
        input_shapes: Shapes of the inputs.
        output_shapes: Shapes of the outputs.

    >>> sum_length("Linear", (256, 64), [(2, 40, 64)], [(2, 40, 256)])
    64
    >>> sum_length("Conv1D", (64, 256), [(2, 40, 64)], [(2, 40, 256)])
    64
    >>> sum_length("Conv2d", (8, 3, 16, 16), [(1, 3, 64, 64)], [(1, 8, 4, 4)])
    768
    >>> sum_length("Softmax", None, [(1, 8, 40, 40)], [(1, 8, 40, 40)])
    40
    >>> sum_length("SiLU", None, [(1, 8)], [(1, 8)])
    1
    """
    row = max((shape[-1] for shape in input_shapes), default=0)
    # Embeddings and gathers copy rows, so nothing is summed, whatever the size of the weight.
    if _LOOKS_UP.search(class_name):
        return 1
    if weight is not None and len(weight) >= 2:
        if _CONVOLVES.search(class_name) and len(weight) >= 3:
            return math.prod(weight[1:])
        # Libraries differ in which axis is summed over; the input's channels show which one it is.
        return row if row in weight else max(weight[-2:])
    if weight is not None and len(weight) == 1:
        # A weight of one axis belongs to a norm, which averages over that axis.
        return weight[0]
    if _MULTIPLIES.search(class_name):
        return input_shapes[0][-1] if input_shapes else row
    if _ALONG_ROW.search(class_name):
        return row or max((shape[-1] for shape in output_shapes), default=1)
    if _ATTENDS.search(class_name):
        # Scores are sums over a head's channels, and results are sums over the visible tokens.
        tokens = max(
            (shape[-2] for shape in (*input_shapes, *output_shapes) if len(shape) >= 3), default=1
        )
        return max(tokens, row)
    return 1


class ModuleFacts(NamedTuple):
    """Facts of the module trees about a run's modules, by site.

    Attributes:
        weights: Shape of the weight.
        inside: Number of called modules that it contains, at any depth.
    """

    weights: dict[str, Shape]
    inside: dict[str, int]


def module_facts(run: Run, places: Iterable[tuple[int, int]]) -> ModuleFacts:
    """Return the facts of the module trees of some processes of a run.

    Args:
        run: The run.
        places: Rank and process of each.
    """
    facts = ModuleFacts({}, {})
    for rank, process in sorted(places):
        tree = run.topology(rank, process)
        if not tree:
            continue
        try:
            modules = ModuleTree.from_json(tree)
            nodes = list(modules.walk())
        # Trees come from files of any origin. Without a valid tree, lengths are estimated from
        # shapes.
        except (AttributeError, KeyError, TypeError, ValueError):
            continue
        called = frozenset(modules.order)
        for root in modules.roots:
            _count_inside(root, called, facts.inside)
        for node in nodes:
            for parameter in node.parameters:
                if parameter.name == "weight" and all(type(n) is int for n in parameter.shape):
                    facts.weights.setdefault(node.site, parameter.shape)
    return facts


def strides_of(run: Run, places: Iterable[tuple[int, int]]) -> dict[str, Stride]:
    """Return how far optimizers move parameters in a step; empty if no process recorded it.

    Args:
        run: The run.
        places: Ranks and processes.
    """
    strides: dict[str, Stride] = {}
    for rank, process in sorted(places):
        # Weights are read only if the program trains.
        if not any(record.get("kind") == "optimizer" for record in _training(run, rank, process)):
            continue
        facts = read_model_facts(run, rank, process)
        norms = {
            path: (math.prod(values.shape), summary.l2)
            for path, values in facts.weights.items()
            if values.basis == "all" and (summary := values.summary) is not None
        }
        for record in facts.training:
            if record.get("kind") != "optimizer":
                continue
            by_gradient = str(record.get("class", "")).rpartition(".")[2] == "SGD"
            for path, rate in _rates(record):
                count, size = norms.get(path, (0, math.nan))
                length = rate if by_gradient else rate * math.sqrt(count)
                if size >= 0.0 and length >= strides.get(path, _STILL).length:
                    strides[path] = Stride(length, size, by_gradient)
    return strides


_STILL = Stride(0.0, 0.0, False)


def _training(run: Run, rank: int, process: int) -> list[dict[str, Any]]:
    return read_model_facts(run, rank, process, weights=False).training


def _rates(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield each parameter of an optimizer and its learning rate; momentum raises the rate."""
    groups = record.get("groups")
    for group in cast("list[Any]", groups) if isinstance(groups, list) else ():
        try:
            values, names = group["values"], group["names"]
            rate = float(values["lr"]) / (1.0 - float(values.get("momentum", 0.0)))
        except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError):
            continue  # a damaged record, or one of an optimizer that has no such rate
        if isinstance(names, list) and 0.0 <= rate < math.inf:
            yield from ((str(name), rate) for name in cast("list[Any]", names))


def _count_inside(node: ModuleNode, called: frozenset[str], inside: dict[str, int]) -> int:
    """Count the called modules in a module; lists of modules are never called themselves."""
    count = sum(
        _count_inside(child, called, inside) + (not called or child.site in called)
        for _, child in node.children
    )
    inside.setdefault(node.site, count)
    return count
