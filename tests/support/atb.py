"""A writer of ATB tensor files and dump trees, for tests and for twins of a model.

The files equal those of the probes of each generation, as far as a reader can see:

    matmul = Operation("LinearOperation", inputs=[Value("x", x), Value("w", w)],
                       outputs=[Value("y", y)], param={"transposeB": True})
    layer = Operation("Decoder_layer", [Value("x", x)], [Value("y", y)], children=[matmul])
    dump = AtbDump(folder, "G3")
    dump.execute([layer], execution=0, first_id=1)      # tensors/0_4242/0/1_Decoder_layer/…
    dump.topology("ToyModel", [layer], first_id=1)      # model/ and layer/
    dump.operation_csv([layer], execution=0, first_id=1)

`support.atb_twins` uses it to write whole dumps of a small model. This file knows no reader.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from support.atb_files import (
    ACL_CODES,
    ND,
    NZ,
    AnyArray,
    Keep,
    Operation,
    Placed,
    Value,
    bin_bytes,
    graph_json,
    model_names,
    own_names,
    placed,
    statistics,
    write_bin,
)

__all__ = [
    "ACL_CODES",
    "ND",
    "NZ",
    "AtbDump",
    "Generation",
    "Operation",
    "Placed",
    "Value",
    "bin_bytes",
    "placed",
    "statistics",
    "write_bin",
]

Generation = Literal["G0", "G1", "G2", "G2t", "G3", "G4"]

CSV_NAMES = {"float32": "float", "float64": "double", "bfloat16": "bf16"}
CSV_HEADER = (
    "CaseNum|CaseName|OpName|OpParam|InNum|InDType|InFormat|InShape|OutNum|OutDType|OutFormat|"
    "OutShape|DataGenType|DataGenRange|InTensorFile|OutTensorFile|TestType|TestLevel|FromModel|"
    "SocVersion|ExpectedError"
)
STATISTIC_HEADER = (
    "Device and PID,Execution Count,Op Name,Op Type,Op Id,Input/Output,Index,Dtype,Format,Shape,"
    "Max,Min,Mean,Norm,Tensor Path"
)


@dataclass
class AtbDump:
    """The dump of one process.

    Attributes:
        output: The output folder, as a user would pass it.
        generation: The generation of the probe; see the table in docs/formats.md.
        device: Device number.
        pid: Process id.
        stamp: Time in the name of the root folder, for generations that have one.
        time: 0 before, 1 after, 2 both, 3 inputs before and outputs after.
        keep: Whether values, descriptions or statistics are written.
    """

    output: Path
    generation: Generation = "G3"
    device: int = 0
    pid: int = 4242
    stamp: str = "20240701_120000"
    time: int = 3
    keep: Keep = "data"
    _statistics: dict[int, list[str]] = field(default_factory=dict[int, list[str]])

    @property
    def root(self) -> Path:
        names = {
            "G0": "",
            "G1": "",
            "G2": "ait_dump",
            "G2t": f"ait_dump_{self.stamp}",
            "G3": f"msit_dump_{self.stamp}",
            "G4": "atb_dump_data",
        }
        return self.output / names[self.generation]

    @property
    def process(self) -> Path:
        """The folder of this process's executions."""
        if self.generation == "G0":
            return self.root / "tensors" / f"thread_{self.pid}"
        tensors = "data" if self.generation == "G4" else "tensors"
        return self.root / tensors / f"{self.device}_{self.pid}"

    def execution(self, number: int) -> Path:
        return self.process / str(number)

    def _beside(self, what: str) -> Path:
        if self.generation == "G4":
            return self.root / "info" / what / f"{self.device}_{self.pid}"
        return self.root / what / str(self.pid)

    def execute(
        self, operations: Sequence[Operation], execution: int = 0, first_id: int = 0
    ) -> None:
        """Write the tensors and parameters of one execution of these operations."""
        base = self.execution(execution)
        for operation, ids, folder in placed(operations, first_id):
            self._tensors(operation, base / folder, ids, execution)
            if operation.param is not None:
                self.param(folder, operation.param, execution)
            for index, kernel in enumerate(operation.kernels):
                inner = Operation(kernel, operation.inputs, operation.outputs)
                self._tensors(inner, base / folder / f"{index}_{kernel}", (*ids, index), execution)

    def _tensors(
        self, operation: Operation, folder: Path, ids: tuple[int, ...], execution: int
    ) -> None:
        capital = "Tensor" if self.generation == "G0" else "tensor"
        for side, values in (("in", operation.inputs), ("out", operation.outputs)):
            for index, value in enumerate(values):
                name = f"{side}{capital}{index}"
                if side == "in" and index < len(operation.parameters):
                    name += f"_{operation.parameters[index]}"
                for moment in self._moments(side):
                    content = value.values
                    if side == "out" and moment == "before":
                        content = np.zeros_like(content)  # the memory's content is arbitrary
                    path = folder / moment / f"{name}.bin"
                    if self.generation != "G4" or self.keep == "data":
                        write_bin(path, content, keep=self.keep, layout=value.layout)
                    if self.generation == "G4":
                        self._statistic(operation, path, ids, execution, side, index, content)

    def _moments(self, side: str) -> tuple[str, ...]:
        if self.time == 3 or self.generation == "G4":
            return ("before",) if side == "in" else ("after",)
        return (("before",), ("after",), ("before", "after"))[self.time]

    def param(self, folder: str, value: Mapping[str, Any], execution: int = 0) -> None:
        path = self.execution(execution) / folder / "op_param.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_compact(value))

    def tiling(self, folder: str, content: bytes, execution: int = 0) -> Path:
        """Write raw tiling bytes of a kernel, whose folder is `folder`."""
        base = self.execution(execution)
        if self.generation == "G3":
            base = self.root / "tiling" / f"{self.device}_{self.pid}" / str(execution)
        elif self.generation == "G2":
            base = self.output / "tensors" / f"{self.device}_{self.pid}" / str(execution)
        path = base / folder / "kernel_tilingdata.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    def topology(
        self,
        model: str,
        operations: Sequence[Operation],
        first_id: int = 0,
        *,
        weights: Sequence[str] = (),
        first_node: int | None = None,
    ) -> None:
        """Write the layer file of each outermost operation, and the model file.

        Args:
            model: Name of the model; if it is empty, only layer files are written.
            operations: The outermost operations.
            first_id: Id of the first operation.
            weights: Names of the tensors that are weights.
            first_node: Number of the first operation in the model file, if it differs from its id
                (an operation that the model does not know shifts only the ids).
        """
        for index, operation in enumerate(operations):
            name = f"{operation.kind}_{first_id + index}"
            names = own_names(name, operation)
            content = {
                "opName": name,
                "opType": operation.kind,
                "param": operation.param if operation.param is not None else "",
                **graph_json(operation, (first_id + index,), names),
            }
            self._json("layer", name, content)
        if not model:
            return
        names = model_names(model, operations, weights)
        nodes: list[dict[str, Any]] = []
        shown = first_id if first_node is None else first_node
        for index, operation in enumerate(operations):
            graph = graph_json(operation, (first_id + index,), names)
            node: dict[str, Any] = {"opName": f"{operation.kind}_{shown + index}"}
            node |= {key: graph.pop(key) for key in ("inTensors", "outTensors") if key in graph}
            nodes.append({**node, "opType": operation.kind, **graph})
        groups = {
            "inTensors": "_input_",
            "outTensors": "_output_",
            "internalTensors": "_internal_",
            "weightTensors": "_weight_",
        }
        content: dict[str, Any] = {"modelName": model}
        for key, middle in groups.items():
            content[key] = [name for name in names.values() if name.startswith(model + middle)]
        self._json("model", model, {**content, "nodes": nodes})

    def _json(self, what: str, name: str, content: Mapping[str, Any]) -> None:
        path = self._beside(what) / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_compact(content))

    def operation_csv(
        self, operations: Sequence[Operation], execution: int = 0, first_id: int = 0
    ) -> Path:
        """Write the list of leaf operations; its paths have the same errors as the probe's."""
        lines = [CSV_HEADER]
        when = "before" if self.time in (0, 2, 3) else "after"
        for operation, ids, folder in placed(operations, first_id):
            if operation.children:
                continue
            name = "_".join((operation.kind, *map(str, ids)))
            base = f"/somewhere/else/tensors/{self.device}_{self.pid}/{execution}/{folder}/{when}"
            cells = [str(len(lines)), f"{name}{len(lines)}", name]
            cells.append(_compact(operation.param or {}).strip())
            cells += [*_columns(operation.inputs), *_columns(operation.outputs)]
            cells += ["customize", " "]
            for side, values in (("in", operation.inputs), ("out", operation.outputs)):
                cells.append(";".join(f"{base}/{side}tensor{n}.bin" for n in range(len(values))))
            lines.append("|".join([*cells, " ", " ", " ", " ", "NO_ERROR"]))
        path = self._beside("operation_io_tensors") / f"operation_tensors_{execution}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in lines))
        return path

    def profile(self, text: str, execution: int = 0) -> Path:
        """Write raw text of cpu_profiling."""
        path = self._beside("cpu_profiling") / f"operation_statistic_{execution}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def _statistic(
        self,
        operation: Operation,
        path: Path,
        ids: tuple[int, ...],
        execution: int,
        side: str,
        index: int,
        values: AnyArray,
    ) -> None:
        """Add a row to the newest probe's statistic.csv, which is written again as a whole."""
        figures = statistics(values).values() if self.keep == "statistics" else ["N/A"] * 4
        name = path.parent.parent.relative_to(self.execution(execution)).as_posix()
        dtype = CSV_NAMES.get(values.dtype.name, values.dtype.name)
        cells = [f"{self.device}_{self.pid}", str(execution), name, operation.kind]
        cells += ["_".join(map(str, ids)), "Input" if side == "in" else "Output", str(index)]
        cells += [dtype, "ND", "x".join(map(str, values.shape)), *figures]
        cells.append(str(path) if self.keep == "data" else "N/A")
        rows = self._statistics.setdefault(execution, [STATISTIC_HEADER])
        rows.append(",".join(cells))
        csv = self.execution(execution) / "statistic.csv"
        csv.parent.mkdir(parents=True, exist_ok=True)
        csv.write_text("".join(f"{row}\n" for row in rows))


def _columns(values: Sequence[Value]) -> list[str]:
    names = [value.values.dtype.name for value in values]
    return [
        str(len(values)),
        ";".join(CSV_NAMES.get(name, name) for name in names),
        ";".join("nd" if value.layout == ND else "fractal_nz" for value in values),
        ";".join(",".join(map(str, value.values.shape)) for value in values),
    ]


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":")) + "\n"
