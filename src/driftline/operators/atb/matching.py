"""The golden outputs of a call meet the dumped ones: one row per output."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import numpy as np

from driftline.operators.atb.tensors import Dumped, Given
from driftline.operators.definitions.call import Result, Unfit, scale_of
from driftline.operators.definitions.indexing import from_tiles
from driftline.operators.definitions.registry import results
from driftline.operators.judging import judge
from driftline.operators.result import Figures, Metric, OperatorCall, OutputRow, unchecked

AnyArray = np.ndarray[Any, np.dtype[Any]]


def rows_of(
    call: OperatorCall, inputs: Given, outputs: Sequence[Dumped], metrics: Collection[Metric] = ()
) -> list[OutputRow]:
    """One row for every output that the dump or the definition has."""
    formats = formats_of(outputs)
    try:
        found = results(call.op_type, call.param, [each.tensor for each in inputs.tensors], formats)
    except Unfit as why:
        return [unchecked(call, str(why))]
    rows = [
        OutputRow(
            call,
            output.slot,
            output.tensor.dtype,
            output.shape,
            _figures(found, inputs, output, metrics),
            output.path,
        )
        for output in outputs
    ]
    there = {int(each.slot) for each in outputs}
    for number in range(len(found)):
        if number not in there:
            figures = Figures("not checked", f"output {number} is not in the dump")
            shape = found[number].values.shape
            rows.append(OutputRow(call, str(number), found[number].dtype, shape, figures))
    return rows


def formats_of(outputs: Sequence[Dumped]) -> list[str]:
    """Element types of outputs by their number; empty for one that is not there."""
    there = {int(each.slot): each.tensor.dtype for each in outputs}
    return [there.get(number, "") for number in range(max(there, default=-1) + 1)]


def _figures(
    found: Sequence[Result], inputs: Given, output: Dumped, metrics: Collection[Metric]
) -> Figures:
    number = int(output.slot)
    if number >= len(found):
        return Figures("not checked", f"the definition has no output {number}")
    tiled = output.tiled or any(each.tiled for each in inputs.tensors)
    result = fitted(found[number], output.shape, tiled=tiled)
    figures = judge(
        result.values,
        output.tensor.values,
        output.tensor.dtype,
        terms=result.terms,
        scale=lambda: scale_of(result),
        exact=result.exact,
        metrics=metrics,
    )
    if figures.status == "fail":
        if result.note:
            return figures._replace(status="not checked", reason=result.note)
        if inputs.moment == "after" and _in_place(inputs, output):
            return figures._replace(
                status="not checked",
                reason="its input was dumped after the execution and equals its output, so it "
                "worked in place; dump with -time 2 or 3",
            )
    return figures


def _in_place(inputs: Given, output: Dumped) -> bool:
    return any(
        each.raw.nbytes == output.raw.nbytes
        and each.tensor.dtype == output.tensor.dtype
        and np.array_equal(each.raw.view(np.uint8), output.raw.view(np.uint8))
        for each in inputs.tensors
    )


def fitted(result: Result, shape: tuple[int, ...], *, tiled: bool) -> Result:
    """A golden output in the shape of the dumped one, where only padding or ones differ."""
    values = result.values
    if values.shape == shape:
        return result

    def also(change: Callable[[AnyArray], AnyArray]) -> Result:
        def scale() -> AnyArray | None:
            found = scale_of(result)
            return None if found is None else change(found)

        lazily = None if result.scale is None else cast("Callable[[], AnyArray]", scale)
        return result._replace(values=change(values), scale=lazily)

    if tiled and values.ndim == 4 and len(shape) != 4:
        return fitted(also(from_tiles), shape, tiled=True)
    if _sizes(values.shape) == _sizes(shape):
        return also(lambda each: each.reshape(shape))
    if tiled and values.ndim == len(shape):
        part = tuple(slice(0, size) for size in shape)
        if all(size <= full for size, full in zip(shape, values.shape, strict=True)):
            return also(lambda each: each[part])
    return result


def _sizes(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)
