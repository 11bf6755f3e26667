"""Golden outputs of an ATB operator compared with the dumped ones: one row per output."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import numpy as np

from driftline.operators.atb.tensors import Dumped, InputTensors
from driftline.operators.definitions.call import Result, Unfit, scale_of
from driftline.operators.definitions.indexing import from_tiles
from driftline.operators.definitions.registry import results
from driftline.operators.judging import judge
from driftline.operators.result import Figures, Metric, OperatorCall, OutputRow, unchecked

AnyArray = np.ndarray[Any, np.dtype[Any]]


def rows_of(
    call: OperatorCall,
    inputs: InputTensors,
    outputs: Sequence[Dumped],
    metrics: Collection[Metric] = (),
) -> list[OutputRow]:
    """One row for every output of the dump or of the definition."""
    formats = formats_of(outputs)
    try:
        golden = results(
            call.op_type, call.param, [dumped.tensor for dumped in inputs.tensors], formats
        )
    except Unfit as why:
        return [unchecked(call, str(why))]
    rows = [
        OutputRow(
            call,
            output.slot,
            output.tensor.dtype,
            output.shape,
            _figures(golden, inputs, output, metrics),
            output.path,
        )
        for output in outputs
    ]
    # Outputs that only the definition has are listed too, so that nothing missing looks checked.
    slots = {int(dumped.slot) for dumped in outputs}
    for number in range(len(golden)):
        if number not in slots:
            figures = Figures("not checked", f"output {number} is not in the dump")
            shape = golden[number].values.shape
            rows.append(OutputRow(call, str(number), golden[number].dtype, shape, figures))
    return rows


def formats_of(outputs: Sequence[Dumped]) -> list[str]:
    """Element types of outputs by number; empty for an output that is missing."""
    formats = {int(output.slot): output.tensor.dtype for output in outputs}
    return [formats.get(number, "") for number in range(max(formats, default=-1) + 1)]


def _figures(
    golden: Sequence[Result], inputs: InputTensors, output: Dumped, metrics: Collection[Metric]
) -> Figures:
    number = int(output.slot)
    # A dump may hold more outputs than the operator defines, such as workspace memory.
    if number >= len(golden):
        return Figures("not checked", f"the definition has no output {number}")
    # Padding of tiles may come in through an input as well.
    tiled = output.tiled or any(dumped.tiled for dumped in inputs.tensors)
    result = fitted(golden[number], output.shape, tiled=tiled)
    figures = judge(
        result.values,
        output.tensor.values,
        output.tensor.dtype,
        terms=result.terms,
        scale=lambda: scale_of(result),
        exact=result.exact,
        metrics=metrics,
    )
    # A failure that the definition or the dump explains is no failure of the operator.
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


def _in_place(inputs: InputTensors, output: Dumped) -> bool:
    return any(
        dumped.raw.nbytes == output.raw.nbytes
        and dumped.tensor.dtype == output.tensor.dtype
        and np.array_equal(dumped.raw.view(np.uint8), output.raw.view(np.uint8))
        for dumped in inputs.tensors
    )


def fitted(result: Result, shape: tuple[int, ...], *, tiled: bool) -> Result:
    """A golden output in the shape of the dumped one, if only padding or axes of size 1 differ."""
    values = result.values
    if values.shape == shape:
        return result

    # The scale of the terms must follow every change of shape, but is computed only if needed.
    def also(change: Callable[[AnyArray], AnyArray]) -> Result:
        def scale() -> AnyArray | None:
            size = scale_of(result)
            return None if size is None else change(size)

        lazily = None if result.scale is None else cast("Callable[[], AnyArray]", scale)
        return result._replace(values=change(values), scale=lazily)

    # Tiles have four axes; the plain tensor has fewer.
    if tiled and values.ndim == 4 and len(shape) != 4:
        return fitted(also(from_tiles), shape, tiled=True)
    if _sizes(values.shape) == _sizes(shape):
        return also(lambda array: array.reshape(shape))
    if tiled and values.ndim == len(shape):
        part = tuple(slice(0, size) for size in shape)
        if all(size <= full for size, full in zip(shape, values.shape, strict=True)):
            return also(lambda array: array[part])
    return result


def _sizes(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)
