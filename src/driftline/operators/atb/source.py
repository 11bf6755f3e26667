"""The operators of an ATB dump, with their inputs and outputs.

Inputs are taken from before the execution if the dump has them, outputs from after it. What cannot
be checked becomes a row with its reason. What an operator should compute is in `definitions`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from driftline.errors import BadFile, BadInput, DriftlineError
from driftline.formats.ascend.atb import dump
from driftline.formats.ascend.atb.folders import OperationFolder
from driftline.operators.atb.matching import rows_of
from driftline.operators.atb.tensors import ListedOperator, Missing, Place, Tensors, listed
from driftline.operators.definitions.registry import definition_of, plain_name
from driftline.operators.result import OperatorCall, OutputRow, unchecked
from driftline.operators.source import Checked, CheckOptions, Reproduction

_RANKS = ("AllGather", "AllReduce", "Broadcast", "LinearParallel")
_NOT_AGAIN = ("IndexAdd",)
"""Operators that change an input in place, so that executing them again gives another result."""


class _Operator(NamedTuple):
    """An operator to be checked: its folder, and its line in a csv."""

    call: OperatorCall
    folder: OperationFolder | None
    line: ListedOperator | None = None
    trouble: str = ""


class AtbSource:
    """The operators of an ATB dump, by an operation csv or by walking its folders."""

    kind = "ATB dump"

    def __init__(self, path: Path, options: CheckOptions) -> None:
        self._again = None
        if options.rerun:
            # The library is loaded first: without it the dump need not be read.
            from driftline.operators.atb.rerun import AtbRerun

            self._again = AtbRerun(options.device)
        self.path = path
        self.options = options
        self.run = dump.open(path)
        self.filtered = 0
        self.remarks: Sequence[str] = ()
        remarks: list[str] = []
        if self._again is not None:
            remarks.append(f"executed again by the ATB library on {self._again.device}")
        elif options.device:
            remarks.append("-device has no effect without -rerun: nothing is executed on it")
        self._tensors = Tensors(self.run)
        self._inner: Counter[str] = Counter()
        self._graphs: Counter[str] = Counter()
        operators = list(self._walked() if options.csv is None else self._listed(options.csv))
        self._operators = [operator for operator in operators if self._wanted(operator)]
        self.remarks = (*remarks, *self._remark(operators))

    def __len__(self) -> int:
        return len(self._operators)

    def __iter__(self) -> Iterator[Checked]:
        return map(self.at, range(len(self._operators)))

    def call(self, number: int) -> OperatorCall:
        """One of the operators, by its place."""
        return self._operators[number].call

    def at(self, number: int) -> Checked:
        """The same, checked."""
        operator = self._operators[number]
        rows = tuple(self._rows(operator))
        self.run.release()
        return Checked(operator.call, rows)

    def _wanted(self, operator: _Operator) -> bool:
        wanted = self.options.wants(operator.call.op_type, operator.call.ids)
        self.filtered += not wanted
        return wanted

    def _remark(self, operators: Sequence[_Operator]) -> list[str]:
        remarks: list[str] = []
        # Remarks say what is not listed as an operator, so that counts can be understood.
        if self._graphs:
            kinds = ", ".join(sorted(self._graphs))
            count = sum(self._graphs.values())
            are = "1 graph is" if count == 1 else f"{count} graphs are"
            remarks.append(f"{are} checked by the operators inside ({kinds})")
        if self._inner:
            count = sum(self._inner.values())
            are = "1 kernel is" if count == 1 else f"{count} kernels are"
            remarks.append(f"{are} checked as part of the operator around")
        if not operators:
            raise BadInput(
                f"{self.path} holds no operator's tensors",
                hint="dump them with --type tensor; inputs and outputs are both needed",
            )
        if not self._operators:
            raise BadInput(
                f"-ids and -opname leave none of {len(operators)} operators of {self.path}",
                hint="types: " + ", ".join(sorted({e.call.op_type for e in operators})[:8]),
            )
        return remarks

    def _walked(self) -> Iterator[_Operator]:
        for rank, process, step, folder in self.run.executed():
            if not folder.files:
                continue
            parent = self._tensors.parent(rank, process, step, folder)
            # Kernels are checked as part of their operator, graphs by the operators inside.
            if parent is not None and not self._tensors.is_graph(parent):
                self._inner[folder.kind] += 1
            elif self._tensors.is_graph(folder) and definition_of(type_of(folder.kind)) is None:
                self._graphs[folder.kind] += 1
            else:
                yield self._operator(rank, process, step, folder)

    def _operator(
        self,
        rank: int,
        process: int,
        step: int,
        folder: OperationFolder,
        line: ListedOperator | None = None,
    ) -> _Operator:
        call = OperatorCall(
            folder.site,
            type_of(folder.kind),
            folder.ids,
            step,
            rank,
            process,
            path=self._tensors.path_of(rank, process, step, folder),
        )
        # The parameter file of the operator itself is preferred; lists may have been cut off.
        try:
            param = self.run.own_param(folder)
        except BadFile as trouble:
            if line is None or line.param is None:
                return _Operator(call, folder, line, f"its parameters are damaged: {trouble}")
            param = None
        if param is None:
            param = line.param if line is not None else None
            param = self.run.listed_param(folder.site, rank, process) if param is None else param
        return _Operator(call._replace(param=dict(param or {})), folder, line)

    def _listed(self, csv: Path) -> Iterator[_Operator]:
        lines = listed(csv)
        places = self._tensors.by_ids()
        own = csv.resolve().parent.name.rpartition("_")[2]  # it is in a folder of its process
        pids = self.run.pids()
        # The csv of one process says nothing about the operators of another.
        if own in pids.values():
            places = {key: place for key, place in places.items() if pids[key[0], key[1]] == own}
        listed_ids = {(line.execution, line.ids) for line in lines}
        executions = {step for _, _, step, _ in places}
        # A csv may list executions that were not dumped; if none matches, all lines are tried.
        relevant = [line for line in lines if line.execution in executions] or lines
        single_execution = len(executions) == 1
        matched = 0
        by_id: dict[str, list[tuple[Place, OperationFolder]]] = {}
        for place, folder in places.items():
            by_id.setdefault(place[3], []).append((place, folder))
        for line in relevant:
            hits = [
                hit
                for hit in by_id.get(line.ids, ())
                if single_execution or hit[0][2] == line.execution
            ]
            # Ids are reused by other graphs: the type decides if it can.
            hits = [hit for hit in hits if hit[1].kind == line.kind] or hits
            if not hits:
                call = OperatorCall(line.name, type_of(line.kind), line.ids, line.execution)
                yield _Operator(call, None, line, "the csv lists it, the dump does not have it")
            for (rank, process, step, _), folder in hits:
                operator = self._operator(rank, process, step, folder, line)
                trouble = operator.trouble or self._tensors.contradiction(
                    rank, process, step, folder, line
                )
                matched += not trouble.startswith("the csv")
                yield operator._replace(trouble=trouble)
        if not matched:
            raise BadInput(
                f"none of the {len(listed_ids)} operators in {csv} is in {self.path}: "
                "it is the csv of another dump",
                hint="its folder and number belong to -i: operation_io_tensors/PID/"
                "operation_tensors_0.csv goes with tensors/DEVICE_PID/0",
            )

    def _rows(self, operator: _Operator) -> list[OutputRow]:
        call, folder = operator.call, operator.folder
        # A reason found while listing is kept: reading tensors cannot remove it.
        if operator.trouble or folder is None:
            return [unchecked(call, operator.trouble)]
        if definition_of(call.op_type) is None:
            return [unchecked(call, f"there is no golden implementation of {call.op_type}")]
        if operator.line is not None and operator.line.damaged and not call.param:
            return [unchecked(call, "its parameters in the csv are damaged")]
        try:
            inputs = self._inputs(operator)
            outputs = self._tensors.outputs(call, folder)
        except Missing as why:
            return [unchecked(call, str(why))]
        except DriftlineError as trouble:
            return [unchecked(call, f"a tensor cannot be read: {trouble}")]
        rows = rows_of(call, inputs, outputs, self.options.metrics)
        if self._again is not None:
            rows = self._again.rows(call, inputs, outputs, rows, self.options.metrics)
        return rows

    def _inputs(self, operator: _Operator) -> Any:
        call, folder = operator.call, operator.folder
        assert folder is not None
        if plain_name(call.op_type) in _RANKS:
            return self._tensors.inputs_of_ranks(call)
        inputs = self._tensors.inputs(call, folder, operator.line)
        # Adding twice would give another result than the dumped one.
        if plain_name(call.op_type) in _NOT_AGAIN and inputs.moment == "after":
            raise Missing(
                "its input was changed in place and dumped after the execution only; "
                "dump with -time 2 or 3"
            )
        return inputs

    def reproduction(self, checked: Checked) -> Reproduction | None:
        """Inputs, dumped outputs and definition of a failing operator."""
        from driftline.operators.repro import reproduction_of

        operator = next(entry for entry in self._operators if entry.call is checked.call)
        if operator.folder is None:
            return None
        inputs = self._inputs(operator)
        outputs = self._tensors.outputs(operator.call, operator.folder)
        failing = [row.slot for row in checked.rows if row.status == "fail"]
        return reproduction_of(operator.call, inputs, outputs, failing)


def type_of(kind: str) -> str:
    """The operator's type in a folder's name, which may begin with a name from the model.

    >>> type_of("LinearOperation"), type_of("qkv_LinearOperation"), type_of("Decoder_layer")
    ('LinearOperation', 'LinearOperation', 'Decoder_layer')
    """
    last = kind.rpartition("_")[2]
    return last if definition_of(kind) is None and definition_of(last) is not None else kind


def described(param: Mapping[str, Any]) -> str:
    """Parameters as ait's csv files have them."""
    import json

    return json.dumps(param, separators=(",", ":"), ensure_ascii=False, default=str)
