"""The operator calls of a run, with their tensors: what the run lists, joined to what it holds.

Knows runs. Neither torch nor what an operator means.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from driftline.errors import BadInput
from driftline.operators.rows import OperatorCall
from driftline.runs.calls import CALLS, Call, CallTensor, read_calls
from driftline.runs.record import Record
from driftline.runs.run import Run

HOW = "driftline dump --level ops -o RUN -- python program.py"
"""What captures operators so that they can be checked."""

_Key = tuple[int, int, str, int, int, str, str, str]


class ListedCall(NamedTuple):
    """A call and the records of its tensors.

    Attributes:
        call: As rows name it.
        inputs: What went in, as listed.
        outputs: What came out, as listed.
        read: Records of what went in, by slot; those that the run holds.
        made: The same of what came out.
        trouble: Why nothing more is known of it; empty as a rule.
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
        BadInput: The run does not hold what it takes; says what does.
    """
    held = _held(run)
    found: list[ListedCall] = []
    places = sorted({(r.key.rank, r.key.process) for r in run.records})
    for rank, process in places:
        if CALLS not in run.sheets(rank, process):
            continue
        for call in read_calls(run.sheet(CALLS, rank, process)):
            if call.kind == "operator":
                found.append(_joined(call, rank, process, held))
    if not found:
        raise BadInput(
            f"{run.name} does not list its operators with their parameters",
            hint=f"capture inputs and outputs whole: {HOW}",
        )
    return [*found, *_unlisted(held, found)]


def _unlisted(held: Mapping[_Key, Record], found: Sequence[ListedCall]) -> list[ListedCall]:
    """Operators whose tensors are there and whose line is not: cut off, or damaged."""
    calls = (one.call for one in found)
    listed = {(c.rank, c.process, c.site, c.step, c.visit, c.phase) for c in calls}
    lost: dict[tuple[Any, ...], Record] = {}
    for key, record in held.items():
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
    for one in call.inputs:
        record = held.get((*place, "input", one.slot)) or held.get((*place, "param", one.slot))
        if record is not None:
            read[one.slot] = record
    made = {
        one.slot: record
        for one in call.outputs
        if (record := held.get((*place, "output", one.slot))) is not None
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


def why_missing(one: CallTensor) -> str:
    """Why an input is not in the run, and what to do about it."""
    if isinstance(one.source, str) and not one.source.startswith("("):
        return "it read a parameter that the run does not hold; capture without --port"
    return (
        f"its input {one.slot.partition('.')[0]} is not in the run; sparse, quantised and nested "
        "tensors are not kept"
    )
