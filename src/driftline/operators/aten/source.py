# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
"""The operator calls of a run as a source of checks: what the run lists, joined to its tensors.

Opening a source needs torch, listing the calls does not. Does not know what an operator means.
"""

from __future__ import annotations

import importlib
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from driftline.errors import BadInput
from driftline.operators.result import OperatorCall
from driftline.operators.source import Checked, CheckOptions, Reproduction
from driftline.registry import require
from driftline.runs.records import Record
from driftline.runs.run import Run
from driftline.runs.sidecars.calls import CALLS, Call, CallTensor, read_calls

HOW = "driftline dump --level ops -o RUN -- python program.py"
"""The command that captures operators so that they can be checked."""

_Key = tuple[int, int, str, int, int, str, str, str]


class ListedCall(NamedTuple):
    """A call and the records of its tensors.

    Attributes:
        call: The call in result rows.
        inputs: The inputs in the list.
        outputs: The outputs in the list.
        read: Records of the inputs that the run holds, by slot.
        made: Records of the outputs that the run holds, by slot.
        trouble: Why nothing more is known of it; usually empty.
    """

    call: OperatorCall
    inputs: tuple[CallTensor, ...]
    outputs: tuple[CallTensor, ...]
    read: Mapping[str, Record]
    made: Mapping[str, Record]
    trouble: str = ""


def calls_of(run: Run) -> list[ListedCall]:
    """The operator calls of a run, in the order in which they ended.

    Raises:
        BadInput: The run does not hold what is needed; the hint says how to capture it.
    """
    held = _held(run)
    calls: list[ListedCall] = []
    places = sorted({(r.key.rank, r.key.process) for r in run.records})
    for rank, process in places:
        # Calls are listed per process; a process without a list captured modules only.
        if CALLS not in run.sheets(rank, process):
            continue
        for call in read_calls(run.sheet(CALLS, rank, process)):
            if call.kind == "operator":
                calls.append(_joined(call, rank, process, held))
    if not calls:
        raise BadInput(
            f"{run.name} does not list its operators with their parameters",
            hint=f"capture inputs and outputs whole: {HOW}",
        )
    return [*calls, *_unlisted(held, calls)]


def _unlisted(held: Mapping[_Key, Record], listed_calls: Sequence[ListedCall]) -> list[ListedCall]:
    """Operators whose tensors are present but whose line is missing or damaged."""
    calls = (entry.call for entry in listed_calls)
    listed = {(c.rank, c.process, c.site, c.step, c.visit, c.phase) for c in calls}
    lost: dict[tuple[Any, ...], Record] = {}
    for key, record in held.items():
        # Every operator whose tensors exist is shown, even if its line was lost with the end of the
        # file.
        if key[:6] not in listed:
            lost.setdefault(key[:6], record)
    return [
        ListedCall(
            OperatorCall(site, record.class_name, "", step, rank, process, visit, phase, {}),
            *((), (), {}, {}),
            f"its line in {CALLS} is missing or damaged",
        )
        for (rank, process, site, step, visit, phase), record in lost.items()
    ]


def _held(run: Run) -> dict[_Key, Record]:
    held: dict[_Key, Record] = {}
    ports: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    for record in run.records:
        key = record.key
        if "/" not in key.site or key.port not in ("input", "output", "param"):
            continue
        ports[key.port] += 1
        kept[record.kept] += 1
        place = (key.rank, key.process, key.site, key.step, key.visit, key.phase)
        held[(*place, key.port, key.slot)] = record
    if not held:
        framework = run.facts.framework
        if framework not in ("", "torch"):
            raise BadInput(
                f"{run.name} holds no operators: those of {framework} are not captured",
                hint=f"compare its modules, or check a run of torch: {HOW}",
            )
        # Each refusal below names the option that left the data out, so that the next capture
        # succeeds.
        raise BadInput(f"{run.name} holds no operators, only modules", hint=f"capture them: {HOW}")
    if not kept["full"]:
        raise BadInput(
            f"{run.name} has no values of operators: of each tensor only its "
            f"{kept.most_common(1)[0][0]} was kept",
            hint=f"leave --keep out, or give --keep full: {HOW}",
        )
    for port, others in (("input", ports["input"] + ports["param"]), ("output", ports["output"])):
        if not others:
            raise BadInput(
                f"{run.name} holds no {port}s of operators",
                hint=f"leave --port, -stp and -time out: {HOW}",
            )
    return held


def _joined(call: Call, rank: int, process: int, held: Mapping[_Key, Record]) -> ListedCall:
    place = (rank, process, call.site, call.step, call.visit, call.phase)
    read: dict[str, Record] = {}
    for tensor in call.inputs:
        # Parameters are captured once under a port of their own, not with every call.
        # Where arguments are files, they are known by their position.
        keys = ((port, slot) for port in ("input", "param") for slot in (tensor.slot, tensor.alias))
        record = next((held[(*place, *key)] for key in keys if (*place, *key) in held), None)
        if record is not None:
            read[tensor.slot] = record
    made = {
        tensor.slot: record
        for tensor in call.outputs
        if (record := held.get((*place, "output", tensor.slot))) is not None
    }
    shown = OperatorCall(
        call.site,
        call.class_name,
        call.ids,
        call.step,
        rank,
        process,
        call.visit,
        call.phase,
        call.param,
    )
    return ListedCall(shown, call.inputs, call.outputs, read, made)


def why_missing(tensor: CallTensor) -> str:
    """Why an input is not in the run, and what to do about it."""
    if isinstance(tensor.source, str) and not tensor.source.startswith("("):
        return "it read a parameter that the run does not hold; capture without --port"
    return (
        f"its input {tensor.slot.partition('.')[0]} is not in the run; sparse, quantised and "
        "nested tensors are not kept"
    )


# The source of aten calls.


_VIEWS = "views and fresh memory have no values of their own: they are not among the operators"


class AtenSource:
    """Aten calls of a run, replayed on the CPU in float64."""

    kind = "aten calls"

    def __init__(self, run: Run, options: CheckOptions) -> None:
        self.run = run
        self.options = options
        listed = calls_of(run)
        # Reading the list needs no torch, so a run without operators is refused before torch is
        # imported.
        require("torch", install="torch")
        for module in options.imports:
            _imported(module)
        from driftline.operators.aten.rerun import device_of

        self.device = device_of(options.device) if options.rerun else ""
        if options.csv is not None:
            listed = _named_by_csv(listed, options.csv)
        self._listed = [
            entry for entry in listed if options.wants(entry.call.op_type, entry.call.ids)
        ]
        self.filtered = len(listed) - len(self._listed)
        if not self._listed:
            raise BadInput(
                f"-ids and -opname leave none of {len(listed)} operators of {run.name}",
                hint="types: " + ", ".join(sorted({entry.call.op_type for entry in listed})[:8]),
            )
        self.remarks: Sequence[str] = self._remarked()

    def _remarked(self) -> list[str]:
        remarks = [_VIEWS]
        if self.options.device and not self.options.rerun:
            remarks.append("-device has no effect without -rerun: nothing is executed on it")
        if self.options.rerun:
            remarks.append(f"executed again on {self.device}, in its own types")
        return remarks

    def __len__(self) -> int:
        return len(self._listed)

    def __iter__(self) -> Iterator[Checked]:
        return map(self.at, range(len(self._listed)))

    def call(self, number: int) -> OperatorCall:
        """One of the calls, by its place."""
        return self._listed[number].call

    def at(self, number: int) -> Checked:
        """The same, replayed."""
        from driftline.operators.aten.check import rows_of

        entry = self._listed[number]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch has told the program already
            rows = tuple(rows_of(self.run, entry, self.options, self.device))
        # Tensors are released in batches: releasing after every call would read shared files again.
        if number % 256 == 255:
            self.run.release()
        return Checked(entry.call, rows)

    def reproduction(self, checked: Checked) -> Reproduction | None:
        """The inputs, what the program gave, and how to execute the call, as a script."""
        from driftline.operators.aten.repro import reproduction_of

        listed_call = next(entry for entry in self._listed if entry.call is checked.call)
        failing = [row.slot for row in checked.rows if row.status == "fail"]
        return reproduction_of(self.run, listed_call, failing)


def _named_by_csv(calls: Sequence[ListedCall], csv: Path) -> list[ListedCall]:
    """The calls that the operation csv of a torch dump names by site and visit.

    Raises:
        BadInput: It names none of them.
    """
    from driftline.operators.atb.tensors import listed

    lines = listed(csv)
    named = {(param.get("site"), param.get("visit")) for line in lines if (param := line.param)}
    chosen = [entry for entry in calls if (entry.call.site, entry.call.visit) in named]
    if not chosen:
        raise BadInput(
            f"{csv} lists {len(lines)} operators, and none of those that were dumped",
            hint="an operation csv belongs to the process that its folder is named after",
        )
    return chosen


def _imported(module: str) -> None:
    """Import a module of the user that defines custom operators."""
    try:
        importlib.import_module(module)
    except Exception as trouble:
        raise BadInput(
            f"--import {module}: {type(trouble).__name__}: {trouble}",
            hint="name a module as Python does; its folder must be on PYTHONPATH",
        ) from None
