"""One listed call becomes rows: its inputs are read, it is executed, its outputs are judged."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from driftline.captures.torch.operators.schema import Operator
from driftline.errors import DriftlineError
from driftline.operators.aten import kinds
from driftline.operators.aten.calls import Unfit, operator_of, tensor_of
from driftline.operators.aten.formulas import has_formula
from driftline.operators.aten.golden import (
    Golden,
    Prepared,
    as_array,
    as_good,
    fitted,
    golden_of,
    placeholders,
    sentence,
)
from driftline.operators.aten.rerun import compared_with_reruns, executions
from driftline.operators.aten.scaling import scale_of
from driftline.operators.aten.source import ListedCall, why_missing
from driftline.operators.judging import judge
from driftline.operators.result import Figures, OutputRow, unchecked
from driftline.operators.source import CheckOptions
from driftline.runs.records import Record
from driftline.runs.run import Run
from driftline.runs.sidecars.calls import CallTensor
from driftline.runs.verify import is_damaged

DAMAGED = (
    "damaged: bytes of its tensors are not those that were captured; driftline show --verify names "
    "them"
)


class Loaded(NamedTuple):
    """A call with everything needed to execute it, and its recorded outputs."""

    prepared: Prepared
    actual: dict[str, torch.Tensor]


def load(run: Run, listed: ListedCall) -> Loaded:
    """Read the tensors of a call.

    Raises:
        Unfit: Something is missing, or cannot be executed again.
    """
    func = operator_of(listed.call.op_type)
    operator = Operator(func)
    # Calls without an answer are refused before their tensors are read.
    why = kinds.no_answer(func, listed.call.param)
    if why:
        raise Unfit(why)
    if operator.silent:
        raise Unfit("a view: it has no values of its own")
    if operator.in_flight:
        raise Unfit("it takes the tensors of other ranks")
    tensors: dict[str, torch.Tensor] = {}
    for tensor in listed.inputs:
        record = listed.read.get(tensor.slot)
        if record is None:
            if tensor.slot.partition(".")[0] not in operator.unread:
                # An argument that is only written to may be missing; memory is made for it below.
                raise Unfit(why_missing(tensor))
            continue
        tensors[tensor.slot] = _tensor(run, record, tensor)
    _refuse_scratch(func, operator, listed)
    actual = {slot: _tensor(run, record, None) for slot, record in listed.made.items()}
    outputs = {slot: (tuple(made.shape), made.dtype) for slot, made in actual.items()}
    tensors |= placeholders(func, operator, list(tensors), outputs)
    elsewhere = any(record.device not in ("", "cpu") for record in listed.made.values())
    return Loaded(Prepared(func, operator, listed.call.param, tensors, elsewhere), actual)


def _refuse_scratch(func: Any, operator: Operator, listed: ListedCall) -> None:
    """Refuse a backward pass that reads memory left by its forward pass, which is not kept."""
    if has_formula(func):
        return
    for argument in func._schema.arguments:
        written = argument.alias_info is not None and argument.alias_info.is_write
        supplied = written or listed.call.param.get(argument.name) is not None
        if not supplied and argument.name in operator.unread and str(argument.type) == "Tensor":
            raise Unfit(f"it reads scratch memory of its forward pass ({argument.name})")


def _tensor(run: Run, record: Record, listed: CallTensor | None) -> torch.Tensor:
    if record.kept != "full":
        raise Unfit(f"of {record.key.port} {record.key.slot} only its {record.kept} was kept")
    if lost := run.lost(record):  # the same words for all of a file that is gone
        raise Unfit(f"its values are lost: {lost}")
    try:
        raw = np.asarray(run.raw(record))
        if is_damaged(raw, record):
            raise Unfit(DAMAGED)
        values = tensor_of(raw, record.dtype, record.shape)
        if listed is not None and record.key.port == "param" and listed.order:
            if sorted(listed.order) != list(range(values.dim())):
                raise Unfit("the order of the axes of a parameter makes no sense")
            values = values.permute([listed.order.index(n) for n in range(len(listed.order))])
    except DriftlineError as trouble:
        raise Unfit(f"a tensor cannot be read: {trouble}") from None
    return values


def rows_of(run: Run, listed: ListedCall, options: CheckOptions, device: str) -> list[OutputRow]:
    """The rows of a call; one row without a slot if it could not be checked as a whole."""
    if listed.trouble:
        return [unchecked(listed.call, listed.trouble)]
    if not listed.outputs:
        return [unchecked(listed.call, "it gives no tensor")]
    try:
        loaded = load(run, listed)
        if not loaded.actual:
            raise Unfit("what it gave is not in the run")
        # A damaged or hostile file may ask for a result of any size.
        listed_elements = sum(t.numel() for t in loaded.prepared.tensors.values())
        listed_elements += sum(t.numel() for t in loaded.actual.values())
        loaded.prepared.check_size(listed_elements)
        golden = golden_of(loaded.prepared)
    except Unfit as why:
        return [unchecked(listed.call, str(why))]
    again = executions(loaded.prepared, device) if device else None
    rows: list[OutputRow] = []
    for output in listed.outputs:
        actual = loaded.actual.get(output.slot)
        if actual is None:
            figures = Figures("not checked", "what it gave is not in the run")
        elif output.slot not in golden.outputs:
            figures = Figures("not checked", "executed again, it gives no such output")
        else:
            figures = _judged(loaded.prepared, golden, output.slot, actual, options)
            if again is not None:

                def judged_again(other: torch.Tensor, slot: str = output.slot) -> Figures:
                    return _judged(loaded.prepared, golden, slot, other, options)

                figures = compared_with_reruns(
                    figures, again, output.slot, actual, judged_again, device
                )
        rows.append(OutputRow(listed.call, output.slot, output.dtype, output.shape, figures))
    return rows


def _judged(
    call: Prepared, golden: Golden, slot: str, actual: torch.Tensor, options: CheckOptions
) -> Figures:
    """`judged`, but an error becomes a row that is not checked."""
    try:
        return judged(call, golden, slot, actual, options)
    except Exception as trouble:  # one operator must not end the check of the others
        return Figures("not checked", f"it cannot be judged: {sentence(trouble)}")


def judged(
    call: Prepared, golden: Golden, slot: str, actual: torch.Tensor, options: CheckOptions
) -> Figures:
    """Compare one output with what it should be."""
    dtype = actual.dtype
    right = fitted(call, slot, golden.outputs[slot], actual)
    if right.layout is not torch.strided:
        return Figures("not checked", "it gives a sparse tensor")
    name = str(dtype).removeprefix("torch.")
    exact = kinds.is_exact(call.func, call.param, dtype)
    produced = as_array(actual, dtype)

    def scale() -> np.ndarray[tuple[int, ...], np.dtype[np.float64]] | None:
        try:
            return scale_of(call, slot, right, dtype)
        except Exception:  # no float64 kernel: the size of the result itself has to do
            return None

    terms = 1 if exact else kinds.terms_of(call.func, call.arguments(), right)
    figures = judge(
        as_array(right, dtype),
        produced,
        name,
        terms=terms,
        scale=scale,
        exact=exact,
        metrics=options.metrics,
    )
    # Singular vectors, for example, are right with either sign.
    if figures.status == "fail" and kinds.is_ambiguous(call.func, slot):
        return Figures("not checked", "its result is one of several that are right")
    if figures.status == "fail" and right.shape == actual.shape:
        figures = _second_look(call, golden, slot, actual, figures, exact, options)
    if golden.note and figures.status != "not checked":
        reason = f"{figures.reason}; {golden.note}" if figures.reason else golden.note
        figures = figures._replace(reason=reason)
    return figures


def _second_look(
    call: Prepared,
    golden: Golden,
    slot: str,
    actual: torch.Tensor,
    figures: Figures,
    exact: bool,
    options: CheckOptions,
) -> Figures:
    """Accept indices of equal values, and results that are exact in the type itself."""
    if not actual.dtype.is_floating_point and as_good(call, slot, golden.outputs, actual):
        return figures._replace(status="pass", reason="other places, with equal values")
    if not exact and not kinds.is_stepped(call.func):
        return figures
    try:
        own = call.again("own")[slot]
    except Exception:
        return figures
    name = str(actual.dtype).removeprefix("torch.")
    again = judge(
        as_array(own, actual.dtype),
        as_array(actual, actual.dtype),
        name,
        exact=exact,
        metrics=options.metrics,
    )
    if again.status != "pass":
        return figures
    return again._replace(reason="equal in its own type, where a number is rounded first")
