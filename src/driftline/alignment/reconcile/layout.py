"""How a matrix lies that an operator library takes as an input of a product: its operator says it.

By its sizes; of a square one by the operator's parameter (`transposeB`, which ATB has on unless it
is turned off). Never asks the values.
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
    """The layouts of a run's operands."""

    def __init__(self, steps: OperatorSteps) -> None:
        self._steps = steps
        self._any = steps.run.facts.operator_sites

    def is_operand(self, record: Record) -> bool:
        """Whether an input is the matrix of a product, or is handed on to one."""
        return self._operand(record) is not None

    def of(self, record: Record) -> Layout:
        """How it lies; empty for what is no matrix of a product, or where nothing says it."""
        operand = self._operand(record)
        if operand is None:
            return ""
        calls, flow = self._steps.at(operand)
        call = calls[operand.key.site]
        if operand.shape[0] != operand.shape[1]:
            return "out_in" if operand.shape[0] == call.features else "in_out"
        param = flow.params.get(call.site)
        if param is None:
            return ""
        return "in_out" if param.get("transposeB", True) is False else "out_in"

    def _operand(self, record: Record) -> Record | None:
        """The matrix that a product takes: this input, or the one that it is handed on as."""
        key = record.key
        if not self._any or (key.port, key.phase, len(record.shape)) != ("input", "forward", 2):
            return None
        calls, _ = self._steps.at(record)
        if key.site not in calls:  # a container's, or that of an operation's kernel
            around = (calls[site] for site in enclosing(key.site) if site in calls)
            whole = next(around, None)
            inner = self._steps.taken(record)
            if whole is not None:
                inner = next((r for r in whole.records if _same_place(r, record)), None)
            if inner is None or inner.key.site not in calls or inner.shape != record.shape:
                return None
            record = inner
        call = calls[record.key.site]
        if call.kind != "linear" or record is main_tensor(call.records, "input"):
            return None
        return record if sorted(record.shape) == sorted((call.features, call.width)) else None


def _same_place(ours: Record, theirs: Record) -> bool:
    return (ours.key.port, ours.key.slot) == (theirs.key.port, theirs.key.slot)


# Layout: weights that lie transposed, tensors of which only the shape differs, padding to
# tiles.


Shape = tuple[int, ...]

WEIGHT_PORTS = ("param", "param_grad", "optimizer_grad")
_TILE = 16
"""Private formats pad the last two axes of a matrix to whole tiles of this size."""

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
    """How a matrix of this class lies: [out, in], [in, out], rows of a table; empty: not known.

    >>> layout("torch", "Linear"), layout("paddle", "Linear"), layout("torch", "Conv1D")
    ('out_in', 'in_out', 'in_out')
    """
    if "Embedding" in class_name:
        return "rows"
    if class_name == "Conv1D":  # the one of Hugging Face: a matrix, called by its first use
        return "in_out"
    if framework == "torch" and class_name in _OUT_IN:
        return "out_in"
    if framework == "paddle" and class_name in _IN_OUT:
        return "in_out"
    return ""


def is_weight(record: Record) -> bool:
    """Whether a tensor is a parameter (or its gradient); a file of tensors says so by the name."""
    key = record.key
    if key.port in WEIGHT_PORTS:
        return True
    return not record.class_name and key.site.rpartition(".")[2].endswith("weight")


def are_weights(pair: Pair) -> bool:
    """Whether a pair is of parameters."""
    return is_weight(pair.reference) or is_weight(pair.candidate)


class Layouts:
    """Which matrices of two runs lie transposed to each other."""

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
            here, there = shapes_of(pair)
            if len(here) == 2 and here[0] != here[1] and self.are_weights(pair):
                classes = (pair.reference.class_name, pair.candidate.class_name)
                if here == there:
                    straight.add(classes)
                elif here == there[::-1]:
                    crossed.add(classes)
        self._crossed = crossed - straight

    def are_weights(self, pair: Pair) -> bool:
        """Whether a pair is of parameters; an operator may have its own as further inputs."""
        if are_weights(pair):
            return True
        here, there = self._operands
        return here.is_operand(pair.reference) and there.is_operand(pair.candidate)

    def transposed(self, pair: Pair) -> bool | None:
        """Whether a matrix of this pair lies transposed; None when nothing says it."""
        ours, theirs = (
            operands.of(record) or layout(framework, record.class_name)
            for framework, operands, record in zip(
                self._frameworks, self._operands, (pair.reference, pair.candidate), strict=True
            )
        )
        if ours and theirs:
            return ours != theirs
        classes = (pair.reference.class_name, pair.candidate.class_name)
        return True if classes in self._crossed else None


def transposed(pair: Pair, layouts: Layouts) -> Pair | None:
    """The candidate's weight turned; None where that is not what keeps the two apart.

    Unequal sides are turned unless the classes say that both lie alike; a square matrix only when
    the classes or operators, or the unequal matrices of the same classes, say that it lies the
    other way.
    """
    here, there = shapes_of(pair)
    if len(here) != 2 or here != there[::-1] or not layouts.are_weights(pair):
        return None
    says = layouts.transposed(pair)
    if says is False or (says is None and here[0] == here[1]):
        return None
    return with_steps(pair, "candidate", Step("transpose", numbers=(1, 0)), shape=here)


def reshaped(pair: Pair) -> Pair | None:
    """The candidate in the reference's shape, where axes were only merged, split, or are 1."""
    here, there = shapes_of(pair)
    if here == there or math.prod(here) != math.prod(there):
        return None
    if not (merges(here, there) or merges(there, here)):
        return None
    return with_steps(pair, "candidate", Step("reshape", numbers=here), shape=here)


def merges(fine: Shape, coarse: Shape) -> bool:
    """Whether `coarse` is `fine` with neighbouring axes merged; axes of 1 do not count.

    >>> merges((2, 5, 8), (10, 8)), merges((2, 5, 8), (8, 10)), merges((4, 6), (6, 4))
    (True, False, False)
    """
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
    """The padded side cut to the other, where the surplus is what tiles of a private format need.

    Such padding is at the end of the last two axes, so what to keep is no question.
    """
    here, there = shapes_of(pair)
    length = min(len(here), len(there))
    if length < 1:
        return None
    ours, theirs = _led(here, length), _led(there, length)
    kept: dict[str, list[Step]] = {"reference": [], "candidate": []}
    for axis, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a == b:
            continue
        longer, shorter = max(a, b), min(a, b)
        if axis < length - 2 or longer != -(-shorter // _TILE) * _TILE or not shorter:
            return None
        kept["reference" if a > b else "candidate"].append(Step("trim", axis, 0, shorter))
    if not kept["reference"] and not kept["candidate"]:
        return None
    shape = tuple(min(a, b) for a, b in zip(ours, theirs, strict=True))
    for side, whole, led in (("reference", here, ours), ("candidate", there, theirs)):
        steps = kept[side]
        if whole != led:
            steps = [Step("reshape", numbers=led), *steps]
        if steps:
            pair = with_steps(pair, side, *steps, shape=shape)
    return pair


def _led(shape: Shape, length: int) -> Shape:
    """The shape with its first axes merged until so many are left."""
    surplus = len(shape) - length
    return (math.prod(shape[: surplus + 1]), *shape[surplus + 1 :])
