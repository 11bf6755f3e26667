"""Executes a call again in its own types, to separate inaccuracy from results that change.

The same inputs are used several times, on the requested device. `golden` computes what the result
should be, and `judging` compares.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from driftline.errors import BadInput
from driftline.operators.aten.calls import raw_of
from driftline.operators.aten.golden import Prepared, as_array, sentence
from driftline.operators.result import Figures

# Two executions may agree by chance; a third makes that unlikely at little cost.
EXECUTIONS = 3


def device_of(text: str) -> str:
    """Where -rerun executes.

    Raises:
        BadInput: There is no such device.
    """
    # A bare number is an accelerator, as in other tools.
    accelerator = torch.accelerator.current_accelerator() or "cuda"
    name = f"{accelerator}:{text}" if text.isdigit() else text or "cpu"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).add_(1)
    except Exception as trouble:
        raise BadInput(
            f"there is no device {name} here: {sentence(trouble)}",
            hint="-device cpu is always there",
        ) from None
    # Meta tensors have no values, so nothing could be compared.
    if device.type == "meta":
        raise BadInput("nothing can be executed on the device meta", hint="-device cpu")
    return str(device)


class Reruns(NamedTuple):
    """Results of executing a call again several times, or why that was not possible."""

    results: list[dict[str, torch.Tensor]]
    trouble: str = ""


def executions(call: Prepared, device: str) -> Reruns:
    """Execute a call again in its own types, each time from the same inputs."""
    try:
        return Reruns([call.again("own", device) for _ in range(EXECUTIONS)])
    except Exception as why:
        return Reruns([], sentence(why))


def compared_with_reruns(
    figures: Figures,
    again: Reruns,
    slot: str,
    actual: torch.Tensor,
    judged: Callable[[torch.Tensor], Figures],
    device: str,
) -> Figures:
    """Whether a failure is inaccuracy, or a result that changes between executions.

    Args:
        figures: The result for the program's output.
        again: The executions.
        slot: Which output.
        actual: The program's output.
        judged: Compares another result with the golden values.
        device: The device of the executions.
    """
    if again.trouble:
        return Figures("not checked", f"it cannot be executed again on {device}: {again.trouble}")
    results = [outputs[slot] for outputs in again.results if slot in outputs]
    # A rerun with another set of outputs is another overload of the operator.
    if len(results) != EXECUTIONS:
        return Figures("not checked", "executed again, it gives no such output")
    rerun_figures = judged(results[0])
    changes = not all(_same(results[0], other) for other in results[1:])
    same = _same(results[0], actual)
    if changes:
        spread = max(_apart(results[0], other) for other in results[1:])
        words = f"not deterministic: from one time to the next on {device}, up to {spread:g} apart"
    elif same:
        # Four outcomes: wrong in both, wrong only in the run, wrong only now, and right in both.
        words = f"deterministic: the same again on {device}"
    else:
        spread = _apart(results[0], actual)
        words = f"executed again on {device} it is another result, by up to {spread:g}"
    if figures.status == "fail" and rerun_figures.status == "fail":
        kind = "and inaccurate" if changes else "inaccurate"
        return rerun_figures._replace(reason=f"{words}; {kind}: {rerun_figures.reason}")
    if figures.status == "fail":
        kind = "" if changes else ", and right: the operator does not give what the run holds"
        return figures._replace(reason=f"{words}{kind}; in the run: {figures.reason}")
    if rerun_figures.status == "fail":
        return rerun_figures._replace(
            reason=f"{words}; right in the run, here: {rerun_figures.reason}"
        )
    if changes or not same:
        return rerun_figures._replace(reason=f"{words}; both are right")
    return rerun_figures


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    # By bits: NaN and the sign of zero must agree as well.
    return bool(np.array_equal(raw_of(a), raw_of(b)))


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    first, second = as_array(a, a.dtype), as_array(b, a.dtype)
    kind = complex if np.iscomplexobj(first) else float
    with np.errstate(all="ignore"):
        off = np.abs(first.astype(kind) - second.astype(kind))
    return float(np.nan_to_num(off, nan=0.0).max(initial=0.0))
