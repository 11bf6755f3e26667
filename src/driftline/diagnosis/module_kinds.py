"""Kinds of modules by name, and the length of the longest sum in a module.

The number of terms of a sum decides how much rounding is to be expected. It comes from the weights
of the module tree (a Linear adds up its input channels, a convolution its window), from the class
where there are no weights (softmax, means, matrix products), and from the input shapes. A site of
which nothing is known counts as a sum of one term.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from driftline.comparison.table.row import Row
from driftline.diagnosis.sites import Lengths
from driftline.graphs.module_tree import ModuleTree
from driftline.runs.run import Run

Shape = tuple[int, ...]

# `Conv1D` of transformers is a matrix product, torch's `Conv1d` a convolution: only the case of the
# last letter differs.
_LOOKS_UP = re.compile(r"(?i)embedding|gather|take")
_CONVOLVES = re.compile(r"(?i)conv(?!1d$)|conv\dd$")
_MULTIPLIES = re.compile(r"(?i)linear|matmul|gemm|\bb?mm\b|addb?mm|einsum|dense|conv1d$")
_ALONG_ROW = re.compile(r"(?i)norm|softmax|mean|\bsum\b|reduce")
_ATTENDS = re.compile(r"(?i)attention|attn|sdpa")


def attends(class_name: str) -> bool:
    """Whether a module is an attention, judged by its class name.

    >>> attends("LlamaSdpaAttention"), attends("LlamaMLP")
    (True, False)
    """
    return bool(_ATTENDS.search(class_name))


def lengths_of(run: Run | None) -> Lengths:
    """A function that gives the length of the longest sum in a call, from a run's module trees."""
    held: Mapping[str, Shape] = {} if run is None else _weights(run)

    def length(site: str, class_name: str, ins: Sequence[Row], outs: Sequence[Row]) -> int:
        input_shapes = [row.reference_shape for row in ins if row.reference_shape]
        output_shapes = [row.reference_shape for row in outs if row.reference_shape]
        return max(1, sum_length(class_name, held.get(site), input_shapes, output_shapes))

    return length


def sum_length(
    class_name: str,
    weight: Shape | None,
    input_shapes: Sequence[Shape],
    output_shapes: Sequence[Shape],
) -> int:
    """Number of terms of the longest sum of a call.

    Args:
        class_name: Of the module or operator.
        weight: The shape of its weight; None if it holds none.
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
    # Embeddings and gathers copy rows: nothing is added up, whatever the size of the weight.
    if _LOOKS_UP.search(class_name):
        return 1
    if weight is not None and len(weight) >= 2:
        if _CONVOLVES.search(class_name) and len(weight) >= 3:
            return math.prod(weight[1:])
        # Which axis is added up differs between libraries; the input's channels tell.
        return row if row in weight else max(weight[-2:])
    if weight is not None and len(weight) == 1:
        # A weight of one axis belongs to a norm, whose mean runs over that axis.
        return weight[0]
    if _MULTIPLIES.search(class_name):
        return input_shapes[0][-1] if input_shapes else row
    if _ALONG_ROW.search(class_name):
        return row or max((shape[-1] for shape in output_shapes), default=1)
    if _ATTENDS.search(class_name):
        # Scores are sums over a head's channels, results over the tokens that it sees.
        tokens = max(
            (shape[-2] for shape in (*input_shapes, *output_shapes) if len(shape) >= 3), default=1
        )
        return max(tokens, row)
    return 1


def _weights(run: Run) -> Mapping[str, Shape]:
    """Shape of the weight of every module, by site."""
    shapes: dict[str, Shape] = {}
    for rank, process in sorted({(r.key.rank, r.key.process) for r in run.records}):
        tree = run.topology(rank, process)
        if not tree:
            continue
        try:
            nodes = list(ModuleTree.from_json(tree).walk())
        # Trees come from files of any origin; a damaged one only means that lengths are guessed
        # from shapes.
        except (AttributeError, KeyError, TypeError, ValueError):
            continue
        for node in nodes:
            for parameter in node.parameters:
                if parameter.name == "weight" and all(type(n) is int for n in parameter.shape):
                    shapes.setdefault(node.site, parameter.shape)
    return shapes
