"""Single files of an ATB dump, and the operations they come from; used by `support.atb`.

This file knows the bytes of a tensor file and the tensor names of topology files, but no folders.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from driftline.formats.ascend.tiled_layouts import ROWS

AnyArray = np.ndarray[Any, np.dtype[Any]]
Keep = Literal["data", "description", "statistics"]
ND = 2
NZ = 29

ACL_CODES: dict[str, int] = {
    "float32": 0,
    "float16": 1,
    "int8": 2,
    "int32": 3,
    "uint8": 4,
    "int16": 6,
    "uint16": 7,
    "uint32": 8,
    "int64": 9,
    "uint64": 10,
    "float64": 11,
    "bool": 12,
    "complex64": 16,
    "complex128": 17,
    "bfloat16": 27,
    "float8_e5m2": 35,
    "float8_e4m3fn": 36,
    "float8_e8m0fnu": 37,
}
"""aclDataType of numpy's and ml_dtypes' types; for other types pass `code`."""


class Value(NamedTuple):
    """A tensor of an execution: its name in topology files, its values, and its layout."""

    name: str
    values: AnyArray
    layout: int = ND


@dataclass
class Operation:
    """One operation of a program, with its inputs and outputs.

    Attributes:
        kind: Its type, which is also its name in folders.
        inputs: The inputs, in order.
        outputs: The outputs, in order.
        param: Content of `op_param.json`; None for a container.
        children: Operations inside; a container has no kernels.
        kernels: Names of the kernels that a leaf runs; each is dumped with the leaf's tensors.
        parameters: Names of the inputs, for files named `intensor0_{name}.bin` (since 2026-05).
    """

    kind: str
    inputs: Sequence[Value]
    outputs: Sequence[Value]
    param: Mapping[str, Any] | None = None
    children: Sequence[Operation] = ()
    kernels: Sequence[str] = ()
    parameters: Sequence[str] = ()


class Placed(NamedTuple):
    """An operation with its ids, from the outermost to its own, and its folder."""

    operation: Operation
    ids: tuple[int, ...]
    folder: str

    @property
    def name(self) -> str:
        return "_".join((self.operation.kind, *map(str, self.ids)))


def placed(operations: Sequence[Operation], first_id: int = 0) -> Iterator[Placed]:
    """Yield all operations with their ids and folders, parents first."""

    def below(operation: Operation, ids: tuple[int, ...], parent: str) -> Iterator[Placed]:
        folder = f"{parent}{ids[-1]}_{operation.kind}"
        yield Placed(operation, ids, folder)
        for index, child in enumerate(operation.children):
            yield from below(child, (*ids, index), f"{folder}/")

    for index, operation in enumerate(operations):
        yield from below(operation, (first_id + index,), "")


def bin_bytes(
    values: AnyArray,
    *,
    keep: Keep = "data",
    layout: int = ND,
    code: int | None = None,
    dims: Sequence[int] | None = None,
    points_to: str = "",
) -> bytes:
    """The bytes of one tensor file.

    Args:
        values: What to store; uint8 payload bytes if `code` is that of a packed or unknown type.
        keep: Whether to store the data, or only the header with or without statistics.
        layout: aclFormat; `values` must already be in that order.
        code: aclDataType, if it differs from that of `values`.
        dims: Sizes, if they differ from those of `values`.
        points_to: Write the name of the file that has the data, and no data.
    """
    sizes = values.shape if dims is None else dims
    payload = np.ascontiguousarray(values).tobytes() if keep == "data" and not points_to else b""
    has_data = keep == "data" and not points_to
    lines = ["$Version=1.0", f"$Object.Count={int(has_data)}", f"$Object.Length={len(payload)}"]
    lines.append(f"format={layout}")
    lines.append(f"dtype={ACL_CODES[values.dtype.name] if code is None else code}")
    lines.append("dims=" + ",".join(map(str, sizes)))
    if keep == "statistics":
        lines += [f"{name}={text}" for name, text in statistics(values).items()]
    if points_to:
        lines.append(f"data={points_to}")
    if has_data:
        lines.append(f"$Object.data=0,{len(payload)}")
    lines.append("$End=1")
    return "".join(f"{line}\n" for line in lines).encode("ascii") + payload


def statistics(values: AnyArray) -> dict[str, str]:
    """max, min, mean and l2norm, each with six decimals as in the probe's files."""
    wide = values.astype(np.float64).reshape(-1)
    if not wide.size:
        return dict.fromkeys(("max", "min", "mean", "l2norm"), "N/A")
    figures = (wide.max(), wide.min(), wide.mean(), math.sqrt(float(wide @ wide)))
    return {
        name: f"{figure:.6f}"
        for name, figure in zip(("max", "min", "mean", "l2norm"), figures, strict=True)
    }


def write_bin(path: Path, values: AnyArray, **how: Any) -> Path:
    """Write `bin_bytes` into a new file, with its folders.

    An existing file is an error, because the probe would append to it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as stream:
        stream.write(bin_bytes(values, **how))
    return path


def graph_json(
    operation: Operation, ids: tuple[int, ...], names: Mapping[str, str]
) -> dict[str, Any]:
    """Tensor names and nodes of an operation, as in topology files; without empty lists."""
    own = "_".join((operation.kind, *map(str, ids)))
    inner = {**names, **_internal_names(own, operation, names)}
    content: dict[str, Any] = {
        "inTensors": [names[value.name] for value in operation.inputs],
        "outTensors": [names[value.name] for value in operation.outputs],
        "internalTensors": [inner[name] for name in inner if name not in names],
        "nodes": [
            {
                "opName": "_".join((child.kind, *map(str, (*ids, index)))),
                "opType": child.kind,
                "param": child.param if child.param is not None else "",
                **graph_json(child, (*ids, index), inner),
            }
            for index, child in enumerate(operation.children)
        ],
    }
    return {key: value for key, value in content.items() if value}


def _internal_names(own: str, operation: Operation, known: Mapping[str, str]) -> dict[str, str]:
    inside = dict.fromkeys(
        value.name
        for child in operation.children
        for value in (*child.inputs, *child.outputs)
        if value.name not in known
    )
    return {name: f"{own}_internal_{n}" for n, name in enumerate(inside)}


def own_names(own: str, operation: Operation) -> dict[str, str]:
    names = {value.name: f"{own}_input_{n}" for n, value in enumerate(operation.inputs)}
    return names | {value.name: f"{own}_output_{n}" for n, value in enumerate(operation.outputs)}


def model_names(
    model: str, operations: Sequence[Operation], weights: Sequence[str]
) -> dict[str, str]:
    made = [value.name for operation in operations for value in operation.outputs]
    used = dict.fromkeys(value.name for operation in operations for value in operation.inputs)
    last = {value.name for value in operations[-1].outputs} if operations else set[str]()
    names: dict[str, str] = {}
    counts = {"input": 0, "weight": 0, "internal": 0, "output": 0}
    for name in dict.fromkeys((*used, *made)):
        group = "weight" if name in weights else "input" if name not in made else "internal"
        if name in last:
            group = "output"
        names[name] = f"{model}_{group}_{counts[group]}"
        counts[group] += 1
    return names


def nd_to_nz(matrix: AnyArray, width: int = 16) -> AnyArray:
    """A tensor in ATB's layout `(batch, N1, M, C0)`, padded with zeros."""
    *batch, rows, columns = matrix.shape
    padded = np.zeros(
        (math.prod(batch), -(-rows // ROWS) * ROWS, -(-columns // width) * width), matrix.dtype
    )
    padded[:, :rows, :columns] = matrix.reshape(-1, rows, columns)
    tiles = padded.reshape(len(padded), padded.shape[1], -1, width)
    return np.ascontiguousarray(tiles.swapaxes(1, 2))
