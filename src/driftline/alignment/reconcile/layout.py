"""Layout: weights that are stored transposed, tensors that differ in shape only, padding to tiles.

The class and framework of a weight determine how it is stored. For a weight that an operator
library takes as the input of a product, its sizes show that, or for a square weight the operator's
parameter (`transposeB`, which is on by default in ATB). Values are never read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

from driftline.alignment.normalise.view import shapes_of, with_steps
from driftline.alignment.plan import Pair
from driftline.alignment.recipe import Step
from driftline.alignment.sites.operators import OperatorSteps
from driftline.alignment.sites.site_graph import enclosing, main_tensor
from driftline.runs.records import Record

Layout = Literal["out_in", "in_out", "rows", ""]


class OperandLayouts:
    """Layouts of the weights that a run's operators take as inputs."""

    def __init__(self, steps: OperatorSteps) -> None:
        self._steps = steps
        self._any = steps.run.facts.operator_sites

    def is_operand(self, record: Record) -> bool:
        """Whether an input is the weight of a product, or is passed on to a product."""
        return self._operand(record) is not None

    def of(self, record: Record) -> Layout:
        """Layout of an operand; empty if it is no weight of a product, or if nothing shows it."""
        operand = self._operand(record)
        if operand is None:
            return ""
        calls, flow = self._steps.at(operand)
        call = calls[operand.key.site]
        # For unequal sides, the operator's number of features shows which axis is the output.
        if operand.shape[0] != operand.shape[1]:
            return "out_in" if operand.shape[0] == call.features else "in_out"
        param = flow.params.get(call.site)
        if param is None:
            return ""
        return "in_out" if param.get("transposeB", True) is False else "out_in"

    def _operand(self, record: Record) -> Record | None:
        """The weight that a product takes: this input, or the inner input to which it is passed."""
        key = record.key
        if not self._any or (key.port, key.phase, len(record.shape)) != ("input", "forward", 2):
            return None
        calls, _ = self._steps.at(record)
        if key.site not in calls:  # the input of a container, or of an operation's kernel
            around = (calls[site] for site in enclosing(key.site) if site in calls)
            operator = next(around, None)
            inner = self._steps.taken(record)
            if operator is not None:
                inner = next((r for r in operator.records if _same_place(r, record)), None)
            if inner is None or inner.key.site not in calls or inner.shape != record.shape:
                return None
            record = inner
        call = calls[record.key.site]
        # The activation of a product is an input too, but not a weight.
        if call.kind != "linear" or record is main_tensor(call.records, "input"):
            return None
        # Both sizes must fit, because a third input may be a bias or a scale with two axes.
        return record if sorted(record.shape) == sorted((call.features, call.width)) else None


def _same_place(first: Record, second: Record) -> bool:
    return (first.key.port, first.key.slot) == (second.key.port, second.key.slot)


Shape = tuple[int, ...]

WEIGHT_PORTS = ("param", "param_grad", "optimizer_grad")
_TILE = 16
"""Ascend's private formats pad the last two axes of a matrix to multiples of this size."""

# Classes whose weight is [out, in] in PyTorch, and [in, out] in Paddle. No others are assumed.
_OUT_IN = (
    "Linear",
    "NonDynamicallyQuantizableLinear",
    "LoraLayer",
    "Bilinear",
    "MultiheadAttention",
)
_IN_OUT = (
    "Linear",
    "ColumnParallelLinear",
    "RowParallelLinear",
    "ColumnSequenceParallelLinear",
    "RowSequenceParallelLinear",
)


def layout(framework: str, class_name: str) -> Layout:
    """Layout of a weight by its class: [out, in], [in, out] or rows of a table; empty if unknown.

    >>> layout("torch", "Linear"), layout("paddle", "Linear"), layout("torch", "Conv1D")
    ('out_in', 'in_out', 'in_out')
    """
    if "Embedding" in class_name:
        return "rows"
    if class_name == "Conv1D":  # Hugging Face's Conv1D (GPT-2) is a linear layer
        return "in_out"
    if framework == "torch" and class_name in _OUT_IN:
        return "out_in"
    if framework == "paddle" and class_name in _IN_OUT:
        return "in_out"
    return ""


def is_weight(record: Record) -> bool:
    """Whether a tensor is a parameter or its gradient; in a file of tensors, the name shows it."""
    key = record.key
    if key.port in WEIGHT_PORTS:
        return True
    return not record.class_name and key.site.rpartition(".")[2].endswith("weight")


def are_weights(pair: Pair) -> bool:
    """Whether a pair consists of parameters."""
    return is_weight(pair.reference) or is_weight(pair.candidate)


class Layouts:
    """Determines which weights of two runs are stored transposed to each other."""

    def __init__(
        self,
        frameworks: tuple[str, str],
        operands: tuple[OperandLayouts, OperandLayouts],
        pairs: Iterable[Pair],
    ) -> None:
        self._frameworks = frameworks
        self._operands = operands
        straight: set[tuple[str, str]] = set()
        crossed: set[tuple[str, str]] = set()
        for pair in pairs:
            reference_shape, candidate_shape = shapes_of(pair)
            # Matrices with unequal sides show how their classes store weights; square ones of the
            # same classes follow them.
            if (
                len(reference_shape) == 2
                and reference_shape[0] != reference_shape[1]
                and self.are_weights(pair)
            ):
                classes = (pair.reference.class_name, pair.candidate.class_name)
                if reference_shape == candidate_shape:
                    straight.add(classes)
                elif reference_shape == candidate_shape[::-1]:
                    crossed.add(classes)
        # Classes that occurred both ways decide nothing.
        self._crossed = crossed - straight

    def are_weights(self, pair: Pair) -> bool:
        """Whether a pair consists of parameters, which an operator may take as inputs."""
        if are_weights(pair):
            return True
        reference_operands, candidate_operands = self._operands
        return reference_operands.is_operand(pair.reference) and candidate_operands.is_operand(
            pair.candidate
        )

    def transposed(self, pair: Pair) -> bool | None:
        """Whether one weight of a pair is stored transposed; None if nothing shows it."""
        reference_layout, candidate_layout = (
            operands.of(record) or layout(framework, record.class_name)
            for framework, operands, record in zip(
                self._frameworks, self._operands, (pair.reference, pair.candidate), strict=True
            )
        )
        if reference_layout and candidate_layout:
            return reference_layout != candidate_layout
        classes = (pair.reference.class_name, pair.candidate.class_name)
        return True if classes in self._crossed else None


def transposed(pair: Pair, layouts: Layouts) -> Pair | None:
    """The pair with the candidate's weight transposed; None if that is not how they differ.

    A matrix with unequal sides is transposed unless the classes show equal layouts. A square matrix
    is transposed only if classes or operators, or other matrices of the same classes, show it.
    """
    reference_shape, candidate_shape = shapes_of(pair)
    if (
        len(reference_shape) != 2
        or reference_shape != candidate_shape[::-1]
        or not layouts.are_weights(pair)
    ):
        return None
    says = layouts.transposed(pair)
    if says is False or (says is None and reference_shape[0] == reference_shape[1]):
        return None
    return with_steps(pair, "candidate", Step("transpose", numbers=(1, 0)), shape=reference_shape)


def reshaped(pair: Pair) -> Pair | None:
    """The candidate reshaped to the reference, if axes were only merged, split, or are 1."""
    reference_shape, candidate_shape = shapes_of(pair)
    if reference_shape == candidate_shape or math.prod(reference_shape) != math.prod(
        candidate_shape
    ):
        return None
    if not (merges(reference_shape, candidate_shape) or merges(candidate_shape, reference_shape)):
        return None
    return with_steps(
        pair, "candidate", Step("reshape", numbers=reference_shape), shape=reference_shape
    )


def merges(fine: Shape, coarse: Shape) -> bool:
    """Whether `coarse` is `fine` with neighbouring axes merged; axes of size 1 are ignored.

    >>> merges((2, 5, 8), (10, 8)), merges((2, 5, 8), (8, 10)), merges((4, 6), (6, 4))
    (True, False, False)
    """
    # Products of empty shapes are all 0, so the axes themselves must agree.
    if 0 in fine or 0 in coarse:
        return [size for size in fine if size != 1] == [size for size in coarse if size != 1]
    sizes = iter([size for size in fine if size != 1])
    for goal in (size for size in coarse if size != 1):
        product = 1
        while product < goal:
            size = next(sizes, None)
            if size is None:
                return False
            product *= size
        if product != goal:
            return False
    return next(sizes, None) is None


def cropped(pair: Pair) -> Pair | None:
    """The padded side trimmed to the other, if the surplus is the padding of a tiled format.

    Such padding is always at the end of the last two axes, so the start is kept.
    """
    reference_shape, candidate_shape = shapes_of(pair)
    length = min(len(reference_shape), len(candidate_shape))
    if length < 1:
        return None
    reference_merged, candidate_merged = (
        _with_merged_front(reference_shape, length),
        _with_merged_front(candidate_shape, length),
    )
    kept: dict[str, list[Step]] = {"reference": [], "candidate": []}
    for axis, (a, b) in enumerate(zip(reference_merged, candidate_merged, strict=True)):
        if a == b:
            continue
        longer, shorter = max(a, b), min(a, b)
        # Tiles pad to the next multiple only; any other surplus is a difference of the programs.
        if axis < length - 2 or longer != -(-shorter // _TILE) * _TILE or not shorter:
            return None
        kept["reference" if a > b else "candidate"].append(Step("trim", axis, 0, shorter))
    if not kept["reference"] and not kept["candidate"]:
        return None
    shape = tuple(min(a, b) for a, b in zip(reference_merged, candidate_merged, strict=True))
    for side, original, merged in (
        ("reference", reference_shape, reference_merged),
        ("candidate", candidate_shape, candidate_merged),
    ):
        steps = kept[side]
        if original != merged:
            steps = [Step("reshape", numbers=merged), *steps]
        if steps:
            pair = with_steps(pair, side, *steps, shape=shape)
    return pair


def _with_merged_front(shape: Shape, length: int) -> Shape:
    """The shape with its first axes merged, so that `length` axes are left."""
    surplus = len(shape) - length
    return (math.prod(shape[: surplus + 1]), *shape[surplus + 1 :])
