"""Tensors of the operators of an ATB dump, and the operation csv that a user names with -c.

Finds inputs and outputs by the dump's folders and decodes them as definitions need them. Does not
know what an operator computes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from driftline.errors import BadFile, BadInput
from driftline.formats.ascend.atb.dump import AtbRun
from driftline.formats.ascend.atb.folders import OperationFolder
from driftline.formats.ascend.atb.tables import Described, read_operations
from driftline.formats.ascend.types import NZ_FORMATS
from driftline.numerics.dtypes import DTYPES
from driftline.operators.definitions.call import Tensor
from driftline.operators.definitions.registry import definition_of, plain_name, tensor_of
from driftline.operators.result import OperatorCall
from driftline.runs.files.local_files import reason_of
from driftline.runs.records import Record, TensorKey

# A limit against malicious files; real ones have a few megabytes.
_LARGEST = 256 << 20
_NUMBER = re.compile(r"_(\d{1,9})\.csv$")


class ListedOperator(NamedTuple):
    """One line of an operation csv.

    Attributes:
        execution: Number of the execution, from the file's name.
        name: The name in the line.
        kind: The type alone.
        ids: Operation id.
        param: Its parameters; None if the line has none that can be read.
        damaged: Whether there are parameters that are not valid JSON.
        inputs: Types and shapes of the inputs.
        outputs: Types and shapes of the outputs.
    """

    execution: int
    name: str
    kind: str
    ids: str
    param: Mapping[str, Any] | None
    damaged: bool
    inputs: tuple[Described, ...]
    outputs: tuple[Described, ...]


def listed(path: Path) -> list[ListedOperator]:
    """The operators listed in an operation csv.

    Raises:
        BadInput: It lists none, or kernels.
        BadFile: It cannot be read.
    """
    try:
        with path.open("rb") as stream:
            raw = stream.read(_LARGEST + 1)
    except OSError as trouble:
        raise BadFile(f"{path} cannot be read: {reason_of(trouble)}") from None
    if len(raw) > _LARGEST:
        raise BadFile(f"{path} is larger than {_LARGEST >> 20} MiB")
    number = _NUMBER.search(path.name)
    lines = read_operations(raw.decode("utf-8", "replace"), int(number[1]) if number else 0)
    operators = [
        ListedOperator(
            line.execution,
            line.name,
            line.kind,
            line.ids,
            None if line.damaged else line.param,
            line.damaged,
            line.inputs,
            line.outputs,
        )
        for line in lines
        # Lines whose name equals their type are kernels, which have no parameters of their own.
        if line.name != line.kind and line.outputs
    ]
    if not operators and lines:
        raise BadInput(
            f"{path} lists kernels, not operators",
            hint="give -c the file in operation_io_tensors, not that in kernel_io_tensors",
        )
    if not operators:
        raise BadInput(
            f"{path} is no operation csv: no line of it has the 21 columns of one",
            hint="it is written by dump --type op, as operation_tensors_0.csv",
        )
    return operators


# Inputs and outputs of operators.


AnyArray = np.ndarray[Any, np.dtype[Any]]

IN_PLACE = {"KvCache": ("2",), "ReshapeAndCache": ("2", "3"), "SetValue": ("0", "1")}
"""Inputs that hold the result, for operators without their own output."""

Place = tuple[int, int, int, str]
"""Rank, process, execution, operation id."""


class Missing(Exception):
    """A needed tensor is missing; the message says which."""


class Dumped(NamedTuple):
    """A tensor of a dump.

    Attributes:
        slot: Its number.
        tensor: Its values.
        raw: Its values as stored, flat.
        shape: Its shape in ordinary order.
        tiled: It was stored in tiles, so it may be padded.
        path: Its file; of outputs only.
    """

    slot: str
    tensor: Tensor
    raw: AnyArray
    shape: tuple[int, ...]
    tiled: bool
    path: str


class InputTensors(NamedTuple):
    """The inputs of a call, and when they were taken."""

    tensors: tuple[Dumped, ...]
    moment: str


class Tensors:
    """Finds the tensors of operators in a dump."""

    def __init__(self, run: AtbRun) -> None:
        self._run = run
        self._folders: dict[tuple[int, int, int, str], OperationFolder] = {}
        for rank, process, step, folder in run.executed():
            self._folders[rank, process, step, folder.site] = folder
        self._records: dict[tuple[int, int, int, str], list[Record]] = {}
        for record in run.records:
            key = record.key
            self._records.setdefault((key.rank, key.process, key.step, key.site), []).append(record)
        # By identity: folders are mutable, and there is one object per folder.
        self._graphs: dict[int, bool] = {}

    def by_ids(self) -> dict[Place, OperationFolder]:
        """Every operation by its id."""
        return {
            (rank, process, step, folder.ids): folder
            for (rank, process, step, _), folder in self._folders.items()
            if folder.files
        }

    def parent(
        self, rank: int, process: int, step: int, folder: OperationFolder
    ) -> OperationFolder | None:
        above = folder.site.rpartition(".")[0]
        return self._folders.get((rank, process, step, above)) if above else None

    def is_graph(self, folder: OperationFolder) -> bool:
        """Whether a folder holds operators, and not only the kernels of one."""
        holds_operators = self._graphs.get(id(folder))
        # The answer is kept: the question comes up for every folder and its ancestors.
        if holds_operators is None:
            holds_operators = any(
                child.kind.endswith("Operation")
                or definition_of(child.kind.rpartition("_")[2]) is not None
                or self.is_graph(child)
                for child in folder.children.values()
            )
            self._graphs[id(folder)] = holds_operators
        return holds_operators

    def path_of(self, rank: int, process: int, step: int, folder: OperationFolder) -> str:
        """The folder of the outputs, below what was opened."""
        for record in self._records.get((rank, process, step, folder.site), ()):
            if record.key.port == "output":
                return self._run.source(record).rpartition("/")[0]
        return ""

    def _of(self, call: OperatorCall, port: str, moment: str) -> dict[str, Record]:
        records = self._records.get((call.rank, call.process, call.step, call.site), ())
        return {
            record.key.slot: record
            for record in records
            # Later visits of an operator in one execution are not told apart by the dump: only the
            # first is used.
            if record.key.port == port and record.key.moment == moment and not record.key.visit
        }

    def inputs(
        self, call: OperatorCall, folder: OperationFolder, line: ListedOperator | None = None
    ) -> InputTensors:
        """All inputs, from before the execution if that was dumped.

        Raises:
            Missing: One is not there.
            DriftlineError: One cannot be read.
        """
        moment = "before"
        records = self._of(call, "input", moment)
        # Inputs dumped after the execution are the second choice: an operator in place has changed
        # them.
        if not records:
            moment = "after"
            records = self._of(call, "input", moment)
        count = max((int(slot) + 1 for slot in records), default=0)
        if line is not None:
            count = max(count, len(line.inputs))
        tensors: list[Dumped] = []
        for number in range(count):
            record = records.get(str(number))
            if record is not None:
                tensors.append(self._read(record, folder, f"input {number}"))
                continue
            # An empty tensor has no file; the csv tells its type and shape.
            described = line.inputs[number] if line and number < len(line.inputs) else None
            if described is None or 0 not in described.shape or described.dtype not in DTYPES:
                raise Missing(f"input {number} is not in the dump")
            raw = np.empty(0, DTYPES[described.dtype].storage)
            empty = tensor_of(raw, described.dtype, described.shape)
            tensors.append(Dumped(str(number), empty, raw, described.shape, False, ""))
        return InputTensors(tuple(tensors), moment)

    def inputs_of_ranks(self, call: OperatorCall) -> InputTensors:
        """The inputs of the same operator on every rank, rank by rank.

        Raises:
            Missing: A rank is not in the dump.
            DriftlineError: An input cannot be read.
        """
        ranks = sorted(
            (place, folder)
            for place, folder in self._folders.items()
            if place[2] == call.step and place[3] == call.site and folder.files
        )
        wanted = call.param.get("rankSize", 0)
        # All ranks must be present, or the golden value of a collective cannot be known.
        if isinstance(wanted, int) and wanted and len(ranks) != wanted:
            raise Missing(f"it joins {wanted} ranks, and {len(ranks)} of them are in the dump")
        tensors: list[Dumped] = []
        moment = "before"
        for (rank, process, _, _), folder in ranks:
            own = self.inputs(call._replace(rank=rank, process=process), folder)
            tensors += own.tensors
            moment = own.moment
        return InputTensors(tuple(tensors), moment)

    def outputs(self, call: OperatorCall, folder: OperationFolder) -> tuple[Dumped, ...]:
        """All outputs after the execution; of an operator in place, the inputs it changed.

        Raises:
            Missing: There are none.
            DriftlineError: One cannot be read.
        """
        records = self._of(call, "output", "after")
        if not records:
            changed = self._of(call, "input", "after")
            slots = IN_PLACE.get(plain_name(call.op_type), ())
            if plain_name(call.op_type) == "ReshapeAndCache" and "3" not in changed:
                slots = ("1",)
            records = {
                str(position): changed[slot]
                for position, slot in enumerate(slots)
                if slot in changed
            }
        if not records:
            # Memory from before the execution is not the result, though it is under the output's
            # name.
            early = self._of(call, "output", "before")
            why = ", only what their memory held before the execution" if early else ""
            raise Missing(f"its outputs are not in the dump{why}")
        slots = sorted(records, key=int)
        return tuple(
            self._read(records[slot], folder, f"output {slot}")._replace(
                slot=slot, path=self._run.source(records[slot])
            )
            for slot in slots
        )

    def _read(self, record: Record, folder: OperationFolder, what: str) -> Dumped:
        if lost := self._run.lost(record):
            raise Missing(f"{what} cannot be read: {lost}")
        if record.kept != "full":
            kept = _KEPT.get(record.kept, "the description was")
            raise Missing(f"of {what} only {kept} dumped")
        raw = np.asarray(self._run.raw(record))
        tensor = tensor_of(raw, record.dtype, record.shape)
        tiled = any(
            file.header is not None and file.header.layout in NZ_FORMATS
            for file in _files(folder, record.key)
        )
        return Dumped(record.key.slot, tensor, raw, record.shape, tiled, "")

    def contradiction(
        self, rank: int, process: int, step: int, folder: OperationFolder, line: ListedOperator
    ) -> str:
        """A contradiction between the csv and the folder of an operator; empty if they agree."""
        if folder.kind != line.kind:
            return (
                f"the csv calls operation {line.ids} {line.kind}, the dump {folder.kind}: "
                "it is the csv of another dump"
            )
        records = self._records.get((rank, process, step, folder.site), ())
        for port, described in (("input", line.inputs), ("output", line.outputs)):
            for record in records:
                number = int(record.key.slot)
                # Lost tensors cannot contradict anything.
                if record.key.port != port or number >= len(described) or record.lost:
                    continue
                description = described[number]
                # Tiled tensors have other shapes in memory than in the csv: only plain ones are
                # compared.
                plain = description.layout in ("nd", "nchw", "") and not any(
                    file.header is not None and file.header.layout in NZ_FORMATS
                    for file in _files(folder, record.key)
                )
                if plain and (
                    description.shape != record.shape or description.dtype != record.dtype
                ):
                    return (
                        f"the csv says {port} {number} is {description.dtype} "
                        f"{list(description.shape)}, in the dump it is {record.dtype} "
                        f"{list(record.shape)}: "
                        "it is the csv of another dump"
                    )
        return ""


_KEPT = {"summary": "statistics were", "describe": "the description was"}


def _files(folder: OperationFolder, key: TensorKey) -> Iterator[Any]:
    for file in folder.files:
        if (file.port, file.slot, file.moment) == (key.port, key.slot, key.moment):
            yield file
