"""`-rerun` for ATB dumps: operators are executed again by the library itself.

If an Ascend machine has the library's checker (`libopchecker.so`), it registers one torch class for
all operators; the inputs of the dump go through it three times. Attention and operators that join
ranks need more than their inputs: for those the dump's own outputs are checked, and the row says
so. Does not know what an operator should give.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from driftline import settings
from driftline.errors import BadInput
from driftline.numerics.dtypes import DTYPES
from driftline.operators.atb.matching import rows_of
from driftline.operators.atb.tensors import IN_PLACE, Dumped, InputTensors
from driftline.operators.definitions.registry import plain_name, tensor_of
from driftline.operators.result import Figures, Metric, OperatorCall, OutputRow
from driftline.registry import require

LIBRARY = "libopchecker.so"
_RANKS = ("AllGather", "AllReduce", "Broadcast", "LinearParallel")
_ATTENTION = ("PagedAttention", "SelfAttention")
_HINT = "leave -rerun out: what the dump holds is checked, without a device"


class AtbRerun:
    """The library's own operators on one device.

    Args:
        device: As the user gave it: a number of an NPU, or what torch calls a device.

    Raises:
        BadInput: The library or the device is not there; says what it takes.
    """

    def __init__(self, device: str) -> None:
        place = settings.opcheck_library()
        if not place:
            raise BadInput(
                f"-rerun executes operators of the ATB library on its device, with {LIBRARY}; "
                f"{settings.OPCHECK_LIBRARY} does not say where that is",
                hint=_HINT,
            )
        path = Path(place) / LIBRARY if Path(place).is_dir() else Path(place)
        if not path.is_file():
            raise BadInput(f"{settings.OPCHECK_LIBRARY}: there is no {path}", hint=_HINT)
        require("torch", install="torch")
        import torch

        from driftline.operators.aten.golden import sentence

        # A bare number is an NPU, as in the ATB tools.
        name = f"npu:{device or 0}" if not device or device.isdigit() else device
        if name.startswith("npu"):
            with contextlib.suppress(ImportError):
                importlib.import_module("torch_npu")
        try:
            # A small computation is the only reliable test that a device works.
            torch.zeros(1, device=name).add_(1)
        except Exception as trouble:
            raise BadInput(
                f"there is no device {name} here: {sentence(trouble)}", hint=_HINT
            ) from None
        try:
            torch.classes.load_library(str(path))
            self._kind: Any = torch.classes.OperationTorch.OperationTorch
        except Exception as trouble:
            raise BadInput(f"{path} cannot be used: {sentence(trouble)}", hint=_HINT) from None
        self.device = name

    def rows(
        self,
        call: OperatorCall,
        inputs: InputTensors,
        outputs: Sequence[Dumped],
        rows: Sequence[OutputRow],
        metrics: Collection[Metric],
    ) -> list[OutputRow]:
        """The rows of a call, judged by what the library gives for the same inputs.

        Args:
            call: The operator.
            inputs: What it read.
            outputs: What the dump holds of its results.
            rows: What was found about those.
            metrics: Figures to compute besides.
        """
        why = self._not_again(call, inputs)
        if why:
            return [
                row._replace(figures=_also(row.figures, f"not executed again: {why}"))
                for row in rows
            ]
        from driftline.operators.aten.calls import raw_of
        from driftline.operators.aten.calls import tensor_of as torch_tensor_of
        from driftline.operators.aten.rerun import compared_with_reruns

        again = self._executions(call, inputs)
        held = {output.slot: output for output in outputs}
        updated: list[OutputRow] = []
        for row in rows:
            output = held.get(row.slot)
            if output is None or row.status == "not checked":
                updated.append(row)
                continue

            def judged(other: Any, output: Dumped = output) -> Figures:
                kind = output.tensor.dtype
                if str(other.dtype).removeprefix("torch.") != kind:
                    return Figures("fail", f"executed again it gives {other.dtype}")
                raw = raw_of(other).view(DTYPES[kind].storage)
                values = tensor_of(raw, kind, tuple(other.shape))
                rerun_output = output._replace(tensor=values, raw=raw, shape=tuple(other.shape))
                made = rows_of(call, inputs, [rerun_output], metrics)
                return next(made_row.figures for made_row in made if made_row.slot == output.slot)

            actual = torch_tensor_of(output.raw, output.tensor.dtype, output.shape)
            figures = compared_with_reruns(
                row.figures, again, row.slot, actual, judged, self.device
            )
            updated.append(row._replace(figures=figures))
        return updated

    def _not_again(self, call: OperatorCall, inputs: InputTensors) -> str:
        name = plain_name(call.op_type)
        if name in _RANKS:
            # Such operators read state of the library that a dump does not contain.
            return "it joins ranks"
        if name in _ATTENTION:
            return "attention takes more of the library than its inputs"
        if any(dumped.tiled for dumped in inputs.tensors):
            return "an input is stored in tiles"
        return ""

    def _executions(self, call: OperatorCall, inputs: InputTensors) -> Any:
        from driftline.operators.aten.calls import tensor_of as torch_tensor_of
        from driftline.operators.aten.golden import sentence
        from driftline.operators.aten.rerun import EXECUTIONS, Reruns

        results: list[dict[str, Any]] = []
        try:
            for _ in range(EXECUTIONS):
                arguments = [
                    # New tensors for each execution: operators in place change their inputs.
                    torch_tensor_of(tensor.raw, tensor.tensor.dtype, tensor.shape).to(self.device)
                    for tensor in inputs.tensors
                ]
                operation = self._kind(call.op_type)
                operation.set_param(json.dumps(dict(call.param)))
                made = operation.execute(arguments)
                # Operators in place return nothing; their result is in the inputs they wrote.
                places = IN_PLACE.get(plain_name(call.op_type), ())
                if places and not made:  # what it has written into
                    made = [
                        arguments[int(place)] for place in places if int(place) < len(arguments)
                    ]
                results.append(
                    {str(position): tensor.cpu() for position, tensor in enumerate(made)}
                )
        except Exception as trouble:
            return Reruns([], sentence(trouble))
        return Reruns(results)


def _also(figures: Figures, words: str) -> Figures:
    return figures._replace(reason="; ".join(filter(None, (figures.reason, words))))
