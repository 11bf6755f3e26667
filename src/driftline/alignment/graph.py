"""Pairs by the names a compiler's graph gives: GE against FX, a fused GE dump against an unfused.

The graph text beside a GE dump says which FX tensor an output stands for, and who reads whom. An
input is paired by its producer; where the graph is silent, by shape and order. What finds no
partner is left over with the reason. One FX tensor may have several partners: an operator that was
dumped by itself and within a fused one, say.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from driftline.alignment.fused_operators import match_fused
from driftline.alignment.fx_nodes import is_conversion, match_fx
from driftline.alignment.names import select
from driftline.alignment.operator_graph import OperatorGraph, graphs_in
from driftline.alignment.operators import Found, operators_of
from driftline.alignment.plan import Pair, Plan
from driftline.alignment.recipe import Recipe, Step, start
from driftline.errors import BadInput, DriftlineError
from driftline.runs.key import TensorKey
from driftline.runs.record import Record
from driftline.runs.run import Run, Storage

SEEN_WHOLE = 1 << 20
"""Bytes of a tensor that are read to settle which of two inputs of one shape is which."""

T = TypeVar("T", int, tuple[int, int])


class _Side(NamedTuple):
    """One run: its graphs and its records, by rank and process."""

    run: Run
    name: str
    graphs: dict[tuple[int, int], list[OperatorGraph]]
    records: dict[tuple[int, int], list[Record]]

    @property
    def kind(self) -> str:
        return next(graph.kind for graphs in self.graphs.values() for graph in graphs)


def align_graphs(
    reference: Run, candidate: Run, here: Sequence[Record], there: Sequence[Record]
) -> Plan | None:
    """Pair two runs by their graphs.

    Args:
        reference: What is right.
        candidate: What is in question.
        here: The records of the reference to look at.
        there: The same of the candidate.

    Returns:
        None when this rule has nothing to say: a run without a graph, or two FX dumps.

    Raises:
        BadInput: A GE dump against an FX dump, and nothing says which name is which.
    """
    ours, theirs = _side(reference, "reference", here), _side(candidate, "candidate", there)
    if ours is None or theirs is None or ours.kind == theirs.kind == "fx":
        return None
    pairs: list[Pair] = []
    notes: list[str] = []
    reasons: dict[tuple[str, TensorKey], str] = {}
    ranks = _partners(sorted(ours.records), sorted(theirs.records))
    for mine, other in ranks:
        if mine != other:
            notes.append(f"rank {mine[0]} of the reference is rank {other[0]} of the candidate")
        for first, second in _graph_partners(ours.graphs[mine], theirs.graphs[other], notes):
            _steps(ours, theirs, (mine, other), (first, second), pairs, notes, reasons)
    notes += _unpaired("rank", [mine[0] for mine in ours.records], [o[0] for o in theirs.records])
    if not pairs and ours.kind != theirs.kind:
        raise _silent(ours if ours.kind == "ge" else theirs)
    used_here = {pair.reference.key for pair in pairs}
    used_there = {pair.candidate.key for pair in pairs}
    pairs.sort(key=_execution)
    return Plan(
        tuple(pairs),
        tuple(record for record in here if record.key not in used_here),
        tuple(record for record in there if record.key not in used_there),
        tuple(dict.fromkeys(notes)),
        {
            (side, key): why
            for (side, key), why in reasons.items()
            if key not in (used_here if side == "reference" else used_there)
        },
    )


def narrowed(plan: Plan, sites: Sequence[str], ports: Sequence[str]) -> Plan:
    """Only what a selection asks for, by the name that either side gives it.

    Raises:
        BadInput: A glob or a port matches nothing on either side.
    """
    if not sites and not ports:
        return plan
    here = [*(pair.reference for pair in plan.pairs), *plan.missing]
    there = [*(pair.candidate for pair in plan.pairs), *plan.extra]
    select([*here, *there], sites, ports)  # says which glob matches nothing
    ours = {record.key for record in select(here, sites, ports, strict=False)}
    theirs = {record.key for record in select(there, sites, ports, strict=False)}
    return plan._replace(
        pairs=tuple(
            pair
            for pair in plan.pairs
            if pair.reference.key in ours or pair.candidate.key in theirs
        ),
        missing=tuple(record for record in plan.missing if record.key in ours),
        extra=tuple(record for record in plan.extra if record.key in theirs),
    )


def conversions(run: Run) -> list[tuple[Record, Record]]:
    """Input and output of every conversion (Cast, TransData) the graph does not know.

    A compiler put them in; nothing stands against them in another dump, but each should give what
    it got. One that makes integers or truth values of floats gives something else, and is left out.
    """
    side = _side(run, "run", run.records)
    if side is None:
        return []
    found: list[tuple[Record, Record]] = []
    for owner, graphs in side.graphs.items():
        for graph in (graph for graph in graphs if graph.kind == "ge"):
            for records in _by_step(side.records[owner], graph, graphs).values():
                for operator in operators_of(records, graph.prefix).values():
                    lone = is_conversion(operator.class_name) and not graph.members(operator.name)
                    if lone and operator.inputs and operator.outputs:
                        got, gave = operator.inputs[0], operator.outputs[0]
                        if not _cuts_off(got.dtype, gave.dtype):
                            found.append((got, gave))
    return sorted(found, key=lambda pair: pair[0].order)


def _cuts_off(got: str, gave: str) -> bool:
    """Whether a conversion between two types loses more than precision by what it is."""
    return gave != got and (gave == "bool" or ("float" in got and "float" not in gave))


def _silent(side: _Side) -> BadInput:
    named = any(
        fx is not None
        for graphs in side.graphs.values()
        for graph in graphs
        for node in graph.nodes.values()
        for fx in node.fx
    )
    if named:
        return BadInput(
            f"nothing that the graphs of {side.run.name} name is in both dumps",
            hint="are they of one model, step and rank? `driftline show` lists what is in each",
        )
    return BadInput(
        f"{side.run.name} has no graph text that says which FX tensor is which",
        hint="dynamo_original_graph_*.txt lies beside the dump's first folder; "
        "give the folder that holds both",
    )


def _execution(pair: Pair) -> tuple[int, int, int, int]:
    key = pair.reference.key
    return key.rank, key.process, pair.reference.order, pair.candidate.order


def _side(run: Run, name: str, records: Sequence[Record]) -> _Side | None:
    by_owner: dict[tuple[int, int], list[Record]] = defaultdict(list)
    for record in records:
        by_owner[record.key.rank, record.key.process].append(record)
    graphs = {owner: graphs_in(run.topology(*owner)) for owner in by_owner}
    if not graphs or not all(graphs.values()):
        return None
    return _Side(run, name, graphs, by_owner)


def _partners(ours: list[T], theirs: list[T]) -> list[tuple[T, T]]:
    """Equal numbers; a lone one goes with a lone one whatever it is called."""
    if len(ours) == len(theirs) == 1:
        return [(ours[0], theirs[0])]
    return [(one, one) for one in ours if one in theirs]


def _unpaired(what: str, ours: list[int], theirs: list[int]) -> list[str]:
    """Which numbers only one side has, where there is more than one to choose from."""
    if len(ours) == len(theirs) == 1:
        return []
    sides = (("reference", set(ours) - set(theirs)), ("candidate", set(theirs) - set(ours)))
    return [
        f"only the {side} has {what} {', '.join(map(str, sorted(numbers)))}"
        for side, numbers in sides
        if numbers
    ]


def _graph_partners(
    ours: list[OperatorGraph], theirs: list[OperatorGraph], notes: list[str]
) -> list[tuple[OperatorGraph, OperatorGraph]]:
    """By name, else one after the other in the order of their numbers."""
    names = {graph.name: graph for graph in theirs}
    if all(graph.name in names for graph in ours):
        return [(graph, names[graph.name]) for graph in ours]
    if len(ours) != len(theirs):
        notes.append(
            f"{len(ours)} graphs against {len(theirs)}: paired in the order of their numbers"
        )
    paired = list(zip(ours, theirs, strict=False))
    if len(paired) > 1 or len(ours) != len(theirs):
        notes.extend(f"graph {one.name} is taken for {other.name}" for one, other in paired)
    return paired


def _by_step(
    records: Sequence[Record], graph: OperatorGraph, graphs: Sequence[OperatorGraph]
) -> dict[int, list[Record]]:
    """The records of one of a run's graphs; the longest prefix that fits is the graph's own."""
    found: dict[int, list[Record]] = defaultdict(list)
    prefixes = sorted((one.prefix for one in graphs), key=len, reverse=True)
    for record in records:
        fitting = next((p for p in prefixes if record.key.site.startswith(p)), None)
        if fitting == graph.prefix and record.key.visit == 0:
            found[record.key.step].append(record)
    return found


def _steps(
    ours: _Side,
    theirs: _Side,
    owners: tuple[tuple[int, int], tuple[int, int]],
    graphs: tuple[OperatorGraph, OperatorGraph],
    pairs: list[Pair],
    notes: list[str],
    reasons: dict[tuple[str, TensorKey], str],
) -> None:
    here = _by_step(ours.records[owners[0]], graphs[0], ours.graphs[owners[0]])
    there = _by_step(theirs.records[owners[1]], graphs[1], theirs.graphs[owners[1]])
    notes += _unpaired("step", sorted(here), sorted(there))
    for mine, other in _partners(sorted(here), sorted(there)):
        if mine != other:
            notes.append(f"step {mine} of the reference is step {other} of the candidate")
        found = _found(ours, theirs, graphs, here[mine], there[other])
        for match in found.matches:
            pairs.append(
                Pair(
                    match.ours,
                    match.theirs,
                    "name" if match.same_name else "graph",
                    match.confidence,
                    candidate_recipe=_reshaped(match.theirs, match.ours.shape),
                )
            )
        reasons.update({("reference", key): why for key, why in found.ours.items()})
        reasons.update({("candidate", key): why for key, why in found.theirs.items()})


def _found(
    ours: _Side,
    theirs: _Side,
    graphs: tuple[OperatorGraph, OperatorGraph],
    here: list[Record],
    there: list[Record],
) -> Found:
    first, second = graphs
    mine, other = operators_of(here, first.prefix), operators_of(there, second.prefix)
    if first.kind == second.kind:
        return match_fused(mine, other, first if first.nodes else second)
    if first.kind == "ge":
        return match_fx(mine, other, first, _Bytes(theirs.run))
    turned = match_fx(other, mine, second, _Bytes(ours.run))
    return Found([match.turned for match in turned.matches], turned.theirs, turned.ours)


class _Bytes:
    """Whether two tensors of one run hold the same bytes; large ones are seen in 16 places."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def __call__(self, one: Record, other: Record) -> bool:
        if one.digest and other.digest:
            return one.digest == other.digest
        try:
            first, second = (_seen(self.run.raw(record)) for record in (one, other))
        except (DriftlineError, OSError, ValueError):
            return False
        return first == second


def _seen(values: Storage) -> bytes:
    if values.nbytes <= SEEN_WHOLE:
        return values.tobytes()
    starts = range(0, values.size, -(-values.size // 16))
    return b"".join(values[start : start + 1024].tobytes() for start in starts)


def _reshaped(record: Record, shape: tuple[int, ...]) -> Recipe | None:
    """Axes of one element are added or left out; any other shape is a finding."""
    if record.shape == shape or record.lost or math.prod(record.shape) != math.prod(shape):
        return None
    if [size for size in record.shape if size != 1] != [size for size in shape if size != 1]:
        return None
    return start(record).then(Step("reshape", numbers=shape), shape=shape)
