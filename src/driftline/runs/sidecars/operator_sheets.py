"""Side tables of a process: operators, kernels and times, in the format of ATB's own dumps.

Programs that read ATB's tables can read these, too: `|` separates cells, `;` the tensors of a cell,
`,` sizes. This file knows names and text, but no folders.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from driftline.registry import Address
from driftline.runs.sidecars.calls import CALLS, GRAPHS, Call, CallTensor

OPERATIONS = "operation_tensors_{}.csv"
KERNELS = "kernel_tensors_{}.csv"
STATISTIC = "operation_statistic_{}.txt"
TIMES = "operation_statistic_{}.csv"
ONNX = "model.onnx"
FOLDERS = {
    "operation_tensors": "operation_io_tensors",
    "kernel_tensors": "kernel_io_tensors",
    "operation_statistic": "cpu_profiling",
}
"""Folder of each kind in a dump of ait; it contains a folder with the process's number."""
# Their syntax and readers belong to ATB; given by address, because runs import no format.
READ_OPERATIONS = Address("driftline.formats.ascend.atb.tables:read_operations")
READ_TIMES = Address("driftline.formats.ascend.atb.tables:read_profile")
_NAME = re.compile(r"(operation_tensors|kernel_tensors|operation_statistic)_(\d{1,9})\.(csv|txt)")
HEADER = (
    "CaseNum|CaseName|OpName|OpParam|InNum|InDType|InFormat|InShape|OutNum|OutDType|OutFormat|"
    "OutShape|DataGenType|DataGenRange|InTensorFile|OutTensorFile|TestType|TestLevel|FromModel|"
    "SocVersion|ExpectedError"
)
TIME_COLUMNS = "site,operator,calls,total_us,self_us,device_us"
_DTYPES = {"float32": "float", "float64": "double", "bfloat16": "bf16"}
"""Types that have another name in ATB than in torch."""
_SEPARATORS = re.compile(r"[|;\r\n]")
_OTHER = re.compile(r"[^0-9A-Za-z_]+")


def kind_of_sheet(name: str) -> str | None:
    """Kind of a side table: `kernel_tensors` for `kernel_tensors_0.csv`; None for other files."""
    match = _NAME.fullmatch(name)
    return match[1] if match else None


def sheets_among(names: Sequence[str]) -> list[str]:
    """Names of the side tables among a process's files, lists of calls and graphs first."""
    listed = [name for name in names if name in (CALLS, GRAPHS)]
    return listed + [name for name in names if kind_of_sheet(name) is not None]


class Described(NamedTuple):
    """A tensor in a cell."""

    dtype: str
    shape: tuple[int, ...]
    file: str = ""


def operation_row(
    number: int,
    name: str,
    param: Mapping[str, Any],
    inputs: Sequence[Described],
    outputs: Sequence[Described],
) -> str:
    """One line of an operation or kernel csv.

    Args:
        number: Number of the line, from 1.
        name: The operator with its ids, or the kernel.
        param: Content of OpParam.
        inputs: Inputs; their file is empty if the values were not stored.
        outputs: Outputs.
    """
    # A separator inside a name would shift every following cell.
    name = _SEPARATORS.sub("_", name)
    return "|".join(
        (
            *(str(number), f"{name}{number}", name),
            json.dumps(dict(param), separators=(",", ":"), ensure_ascii=True),
            *_cells(inputs),
            *_cells(outputs),
            # Columns that ATB's own test tools need; their values have no meaning here.
            *(";".join("customize" for _ in inputs) or "customize", " "),
            ";".join(_SEPARATORS.sub("_", tensor.file) for tensor in inputs),
            ";".join(_SEPARATORS.sub("_", tensor.file) for tensor in outputs),
            *(" ", " ", " ", " ", "NO_ERROR"),
        )
    )


def _cells(tensors: Sequence[Described]) -> tuple[str, str, str, str]:
    return (
        str(len(tensors)),
        ";".join(_DTYPES.get(tensor.dtype, tensor.dtype) for tensor in tensors),
        ";".join("nd" for _ in tensors),
        ";".join(",".join(map(str, tensor.shape)) for tensor in tensors),
    )


def operation_sheet(calls: Iterable[Call], file_of: Mapping[tuple[int, str, str], str]) -> str:
    """The operation csv of one execution.

    Args:
        calls: The calls of one step, in any order.
        file_of: File of the values by call, port and slot; missing if they were not stored.
    """
    lines = [HEADER]
    ordered = sorted(calls, key=lambda call: call.number)
    for number, call in enumerate(ordered, 1):
        # Bound as a default, because a closure would see the loop's last call.
        def described(port: str, tensors: Sequence[CallTensor], call: Call = call) -> Any:
            return [
                Described(
                    tensor.dtype, tensor.shape, file_of.get((call.number, port, tensor.slot), "")
                )
                for tensor in tensors
            ]

        param = {"site": call.site, "visit": call.visit, "phase": call.phase, **call.param}
        lines.append(
            operation_row(
                number,
                call.name,
                param if call.kind == "operator" else {**param, "kind": "module"},
                described("input", call.inputs),
                described("output", call.outputs),
            )
        )
    return "\n".join(lines) + "\n"


class Timed(NamedTuple):
    """Times of one operator at one site, summed over its calls, in µs."""

    site: str
    operator: str
    calls: int
    total: float
    own: float
    device: float


def added(first: Iterable[Timed], second: Iterable[Timed]) -> tuple[Timed, ...]:
    """Merge two lists of times: times of the same operator at the same site are summed."""
    totals: dict[tuple[str, str], Timed] = {}
    for timed in (*first, *second):
        total = totals.get(timed[:2])
        if total is not None:
            own, device = total.own + timed.own, total.device + timed.device
            timed = Timed(
                *timed[:2], total.calls + timed.calls, total.total + timed.total, own, device
            )
        totals[timed[:2]] = timed
    return tuple(totals.values())


def statistic_text(timed: Sequence[Timed]) -> str:
    """Times by operator, in blocks, in the format of `operation_statistic_{n}.txt`."""
    rows: dict[str, list[Timed]] = {}
    for row in timed:
        rows.setdefault(statistic_name(row.operator), []).append(row)
    blocks: list[str] = []
    for name, of_operator in rows.items():
        total, own, device = (
            sum(getattr(t, n) for t in of_operator) for n in ("total", "own", "device")
        )
        # Without a device, the time of the operator itself is the execution time.
        executed = device or own
        blocks.append(
            f"{name}:\n[execute] totalTime:{total:.3f}, kernelExecuteTime:{executed:.3f}, "
            f"selfTime:{own:.3f}, callCount:{sum(t.calls for t in of_operator)}\n\n"
        )
    return "".join(blocks)


def statistic_name(operator: str) -> str:
    """Operator name in letters, digits and `_`, as these tables write it.

    >>> statistic_name("aten::addmm")
    'aten_addmm'
    """
    return _OTHER.sub("_", operator) or "_"


def times_table(timed: Sequence[Timed]) -> str:
    """Times by site and operator, as CSV."""
    lines = [TIME_COLUMNS]
    for row in timed:
        site, operator = (
            f'"{text}"' if "," in text or '"' in text else text
            for text in (row.site.replace('"', "'"), row.operator)
        )
        lines.append(
            f"{site},{operator},{row.calls},{row.total:.3f},{row.own:.3f},{row.device:.3f}"
        )
    return "\n".join(lines) + "\n"
