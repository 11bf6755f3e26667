"""Pairs by the names in a compiler's graph: dumps of GE (Ascend's graph engine) and of torch FX.

Two GE dumps: operators with equal names are pairs; a fused operator stands for the operators whose
names are joined in its own. Its inputs are those that no member made, its outputs those that others
read. GE against FX: outputs are paired by the FX names in the graph, inputs by their producers.

The rule knows graphs, names and shapes. It reads bytes only to distinguish two inputs of the same
shape.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from driftline.alignment.plan import Pair, Plan
from driftline.alignment.recipe import Recipe, Step, start
from driftline.alignment.rules.names import select
from driftline.alignment.sites.operators import Match, Matching, Operator, at_slot, operators_of
from driftline.errors import BadInput, DriftlineError
from driftline.graphs.sources.compiler_text import Input, OperatorGraph, graphs_in
from driftline.numerics.dtypes import DTYPES
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run, Storage

WITHOUT_EDGES = 0.7
"""Confidence if no graph has the edges, so that only shape and order are left."""


def match_fused(
    operators: Mapping[str, Operator], others: Mapping[str, Operator], graph: OperatorGraph
) -> Matching:
    """Pair the tensors of two GE dumps, either of which may have fused operators.

    Args:
        operators: Operators of the reference, by name.
        others: Operators of the candidate.
        graph: The graph of either side; one is enough.
    """
    matching = Matching([], {}, {})
    from_candidate = Matching([], {}, {})
    for operator in operators.values():
        twin = others.get(operator.name)
        if twin is not None:
            _same_name(operator, twin, matching)
        else:
            _fused(operator, others, graph, matching)
    # The second pass starts from the candidate's side, because either dump may be the fused one;
    # its matches are flipped back to reference order.
    for operator in others.values():
        if operator.name not in operators:
            _fused(operator, operators, graph, from_candidate)
    matching.matches.extend(
        match._replace(record=match.partner, partner=match.record)
        for match in from_candidate.matches
    )
    # "Inside a fused operator" explains more than "no operator of this name", so it is preferred.
    matching.reasons.update(from_candidate.partner_reasons)
    matching.partner_reasons.update(
        {
            key: why
            for key, why in from_candidate.reasons.items()
            if key not in matching.partner_reasons
        }
    )
    return matching


def _same_name(operator: Operator, twin: Operator, matching: Matching) -> None:
    for records, partners in ((operator.inputs, twin.inputs), (operator.outputs, twin.outputs)):
        for record in records:
            partner = at_slot(partners, record.key.slot)
            if partner is not None:
                matching.matches.append(Match(record, partner, same_name=True))


def _fused(
    operator: Operator, others: Mapping[str, Operator], graph: OperatorGraph, matching: Matching
) -> None:
    members = graph.members(operator.name, others)
    dumped = [name for name in members if name in others]
    if not dumped or members == [operator.name]:
        # A name that cannot be split into operators of the other dump has no fused meaning.
        for record in operator.records:
            matching.reasons.setdefault(record.key, "the other dump has no operator of this name")
        return
    # Edges decide only if every member is in the graph text; half a graph would misplace inputs.
    has_edges = all(name in graph.nodes for name in members)
    shown = len(operator.inputs)
    inputs, outputs = _ends(members, dumped, others, graph if has_edges else None, shown)
    matched = [
        *_matched(operator.inputs, inputs, has_edges),
        *_matched(operator.outputs, outputs, has_edges),
    ]
    matching.matches.extend(matched)
    matched_keys = {match.record.key for match in matched}
    used_keys = {match.partner.key for match in matched}
    for record in operator.records:
        if record.key not in matched_keys:
            why = f"no tensor of {', '.join(dumped)} fits it"
            matching.reasons.setdefault(record.key, why)
    for record in (record for name in dumped for record in others[name].records):
        if record.key not in used_keys:
            matching.partner_reasons.setdefault(
                record.key, f"inside the fused operator {operator.name}"
            )


def _ends(
    members: list[str],
    dumped: list[str],
    others: Mapping[str, Operator],
    graph: OperatorGraph | None,
    shown: int,
) -> tuple[list[Record | None], list[Record | None]]:
    """Inputs and outputs of the members as one operator; None for tensors that were not dumped."""
    if graph is None:
        inputs: list[Record | None] = [item for name in dumped for item in others[name].inputs]
        return inputs, list(others[dumped[-1]].outputs)
    read = [
        at_slot(others[item.node].inputs, str(item.position)) if item.node in others else None
        for item in graph.inputs_of(members, shown)
    ]
    made = [
        at_slot(others[name].outputs, str(output)) if name in others else None
        for name, output in graph.outputs_of(members)
    ]
    return read, made


def _matched(records: list[Record], partners: list[Record | None], has_edges: bool) -> list[Match]:
    """Match in order if both sides have equally many; otherwise the next free tensor of a shape."""
    if has_edges and len(records) == len(partners):
        return [
            Match(option, other) for option, other in zip(records, partners, strict=True) if other
        ]
    free = [record for record in partners if record is not None]
    # Without edges, shape is the only evidence. The first free tensor of a shape is the likeliest,
    # because both dumps list operands in call order.
    matches: list[Match] = []
    for record in records:
        partner = next((option for option in free if option.shape == record.shape), None)
        if partner is not None:
            matches.append(Match(record, partner, WITHOUT_EDGES))
            free.remove(partner)
    return matches


# --- GE operators against FX nodes


Same = Callable[[Record, Record], bool]
"""Whether two tensors of the FX dump hold the same bytes; used only if shapes are ambiguous."""

CONVERSIONS = ("Cast", "TransData")
IN_ORDER = 0.9
"""Confidence of inputs that are paired by shape and order only."""


def match_fx(
    ge: Mapping[str, Operator], fx: Mapping[str, Operator], graph: OperatorGraph, same: Same
) -> Matching:
    """Pair the tensors of GE operators with those of FX nodes (the partners)."""
    matching = Matching([], {}, {})
    for operator in ge.values():
        members = graph.members(operator.name)
        if not members:
            _explain(matching, operator.records, _unknown(operator))
            continue
        _inputs(operator, members, fx, graph, same, matching)
        _outputs(operator, members, fx, graph, matching)
        if len(members) > 1:
            _explain_inside(operator, members, fx, graph, matching)
    for node in fx.values():
        for record in node.records:
            matching.partner_reasons.setdefault(
                record.key, "no tensor of the GE dump corresponds to it"
            )
    return matching


def _explain_inside(
    operator: Operator,
    members: list[str],
    fx: Mapping[str, Operator],
    graph: OperatorGraph,
    matching: Matching,
) -> None:
    for node in (fx.get(graph.owner(name)) for name in members):
        for record in node.records if node is not None else ():
            matching.partner_reasons.setdefault(
                record.key, f"inside the fused operator {operator.name}"
            )


def _unknown(operator: Operator) -> str:
    if is_conversion(operator.class_name):
        return "a conversion that the compiler put in; FX has no such node"
    return "the graph has no operator of this name"


def is_conversion(class_name: str) -> bool:
    """Whether an operator only changes type or layout, so that its output equals its input."""
    return any(word in class_name for word in CONVERSIONS)


def _explain(matching: Matching, records: Sequence[Record], why: str) -> None:
    for record in records:
        matching.reasons.setdefault(record.key, why)


def _outputs(
    operator: Operator,
    members: list[str],
    fx: Mapping[str, Operator],
    graph: OperatorGraph,
    matching: Matching,
) -> None:
    # A GE operator stands for the last FX node that it replaced, so its outputs are that node's,
    # unless the graph shows that others leave the group too.
    made = [(members[-1], output) for output in range(len(operator.outputs))]
    if len(members) > 1:
        seen = graph.outputs_of(members)
        made = seen if len(seen) == len(operator.outputs) else made
    for record, tensor in zip(operator.outputs, made, strict=True):
        name = graph.fx_tensor(tensor)
        if name is None:
            _explain(matching, [record], "no FX tensor corresponds to it")
            continue
        node = fx.get(name[0])
        partner = at_slot(node.outputs, name[1]) if node is not None else None
        if partner is None:
            _explain(matching, [record], f"the FX dump has no output {name[1]} of {name[0]}")
        else:
            matching.matches.append(Match(record, partner))


def _inputs(
    operator: Operator,
    members: list[str],
    fx: Mapping[str, Operator],
    graph: OperatorGraph,
    same: Same,
    matching: Matching,
) -> None:
    read = graph.inputs_of(members, len(operator.inputs))
    # A dump may omit operands that the graph lists; then positions mean nothing.
    has_positions = len(read) == len(operator.inputs)
    places: list[Input | None] = list(read) if has_positions else [None] * len(operator.inputs)
    wanted: dict[str, list[tuple[Record, Input | None]]] = defaultdict(list)
    first = next((owner for name in members if (owner := graph.owner(name))), "")
    for record, place in zip(operator.inputs, places, strict=True):
        owner = graph.owner(place.node) if place is not None else first
        # GE decomposes one FX node into several steps; tensors between these steps do not exist in
        # FX.
        if place is not None and graph.is_inner(place.source, owner):
            why = f"a step on the way to {owner}" if owner else "no FX node reads it"
            _explain(matching, [record], f"{why}; FX has no such tensor")
        elif owner not in fx:
            _explain(
                matching, [record], f"the FX dump has no node {owner}" if owner else "of no FX node"
            )
        else:
            wanted[owner].append((record, place))
    for owner, takers in wanted.items():
        _assign(takers, fx[owner].inputs, fx, graph, same, matching)


def _assign(
    takers: list[tuple[Record, Input | None]],
    offered: list[Record],
    fx: Mapping[str, Operator],
    graph: OperatorGraph,
    same: Same,
    matching: Matching,
) -> None:
    """Give each GE input one of an FX node's inputs, those of known producers first."""
    free = list(offered)
    chosen: dict[int, Match] = {}
    for index, (record, place) in enumerate(takers):
        made = _made_by(place, fx, graph)
        if made is None:
            continue
        # Known producers come first: what they leave is often the only tensor of its shape.
        alike = [
            option for option in free if (option.shape, option.dtype) == (made.shape, made.dtype)
        ]
        if len(alike) > 1:
            alike = [option for option in alike if same(option, made)]
        if alike:
            chosen[index] = Match(record, alike[0])
            free.remove(alike[0])
    # The second pass must count rivals before it assigns any; otherwise the last one looks
    # unambiguous.
    left = list(free)
    for index, (record, _) in enumerate(takers):
        if index not in chosen:
            partner = next((option for option in free if _agree(option, record)), None)
            if partner is None:
                _explain(matching, [record], "no FX input of this shape is left for it")
                continue
            others = sum(_agree(option, record) for option in left)
            chosen[index] = Match(record, partner, 1.0 if others == 1 else IN_ORDER)
            free.remove(partner)
    matching.matches.extend(chosen[index] for index in sorted(chosen))
    for option in free:
        matching.partner_reasons.setdefault(
            option.key, "an argument of the FX call that GE has no input for"
        )


def _made_by(
    place: Input | None, fx: Mapping[str, Operator], graph: OperatorGraph
) -> Record | None:
    """The FX tensor that the producer of a GE input stands for."""
    name = graph.fx_tensor(place.source) if place is not None else None
    node = fx.get(name[0]) if name is not None else None
    return at_slot(node.outputs, name[1]) if node is not None and name is not None else None


def _agree(offered: Record, record: Record) -> bool:
    """Whether shape and kind of number agree, because a weight is never an index."""
    # An index may be signed in one dump and unsigned in the other: int and uint count as one kind.
    dtype, offered_dtype = DTYPES.get(record.dtype), DTYPES.get(offered.dtype)
    if dtype is None or offered_dtype is None:
        return False
    kinds = {"uint": "int"}
    return offered.shape == record.shape and (
        kinds.get(dtype.kind, dtype.kind) == kinds.get(offered_dtype.kind, offered_dtype.kind)
    )


# --- whole runs


READ_WHOLE = 1 << 20
"""Tensors up to this many bytes are read completely to distinguish two inputs of one shape."""

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
    reference: Run,
    candidate: Run,
    reference_records: Sequence[Record],
    candidate_records: Sequence[Record],
) -> Plan | None:
    """Pair two runs by their graphs.

    Args:
        reference: The reference run.
        candidate: The candidate run.
        reference_records: The records of the reference that may be paired.
        candidate_records: The records of the candidate that may be paired.

    Returns:
        None if the rule does not apply: a run without a graph, or two FX dumps.

    Raises:
        BadInput: A GE dump and an FX dump have no graph that connects their names.
    """
    reference_side, candidate_side = (
        _side(reference, "reference", reference_records),
        _side(candidate, "candidate", candidate_records),
    )
    if (
        reference_side is None
        or candidate_side is None
        or reference_side.kind == candidate_side.kind == "fx"
    ):
        return None
    pairs: list[Pair] = []
    notes: list[str] = []
    reasons: dict[tuple[str, TensorKey], str] = {}
    ranks = _partners(sorted(reference_side.records), sorted(candidate_side.records))
    for owner, other in ranks:
        if owner != other:
            notes.append(f"rank {owner[0]} of the reference is rank {other[0]} of the candidate")
        # Graphs are matched before steps, because one process may run several graphs in each step.
        for first, second in _graph_partners(
            reference_side.graphs[owner], candidate_side.graphs[other], notes
        ):
            _steps(
                reference_side,
                candidate_side,
                (owner, other),
                (first, second),
                pairs,
                notes,
                reasons,
            )
    notes += _unpaired(
        "rank",
        [owner[0] for owner in reference_side.records],
        [o[0] for o in candidate_side.records],
    )
    # Two GE dumps still have names; GE against FX has only the graph, so no pairs at all is an
    # error that the user can correct.
    if not pairs and reference_side.kind != candidate_side.kind:
        raise _nothing_matched(reference_side if reference_side.kind == "ge" else candidate_side)
    used_reference = {pair.reference.key for pair in pairs}
    used_candidate = {pair.candidate.key for pair in pairs}
    pairs.sort(key=_execution)
    return Plan(
        tuple(pairs),
        tuple(record for record in reference_records if record.key not in used_reference),
        tuple(record for record in candidate_records if record.key not in used_candidate),
        tuple(dict.fromkeys(notes)),
        {
            (side, key): why
            for (side, key), why in reasons.items()
            if key not in (used_reference if side == "reference" else used_candidate)
        },
    )


def narrowed(plan: Plan, sites: Sequence[str], ports: Sequence[str]) -> Plan:
    """The selected part of a plan; a site may have either side's name.

    Raises:
        BadInput: A glob or a port matches nothing on either side.
    """
    if not sites and not ports:
        return plan
    reference_records = [*(pair.reference for pair in plan.pairs), *plan.missing]
    candidate_records = [*(pair.candidate for pair in plan.pairs), *plan.extra]
    select(
        [*reference_records, *candidate_records], sites, ports
    )  # raises if a glob matches nothing
    # Selection comes last, because a site may have either side's name.
    reference_keys = {
        record.key for record in select(reference_records, sites, ports, strict=False)
    }
    candidate_keys = {
        record.key for record in select(candidate_records, sites, ports, strict=False)
    }
    return plan._replace(
        pairs=tuple(
            pair
            for pair in plan.pairs
            if pair.reference.key in reference_keys or pair.candidate.key in candidate_keys
        ),
        missing=tuple(record for record in plan.missing if record.key in reference_keys),
        extra=tuple(record for record in plan.extra if record.key in candidate_keys),
    )


def conversions(run: Run) -> list[tuple[Record, Record]]:
    """Input and output of every conversion (Cast, TransData) that is not in the graph text.

    The compiler inserted these. They have no partner in another dump, but each should return its
    input. Conversions of floats to integers or truth values change the value and are left out.
    """
    side = _side(run, "run", run.records)
    if side is None:
        return []
    conversion_pairs: list[tuple[Record, Record]] = []
    for owner, graphs in side.graphs.items():
        for graph in (graph for graph in graphs if graph.kind == "ge"):
            for records in _by_step(side.records[owner], graph, graphs).values():
                # A conversion that the graph lists has a partner by name and is compared there.
                for operator in operators_of(records, graph.prefix).values():
                    lone = is_conversion(operator.class_name) and not graph.members(operator.name)
                    if lone and operator.inputs and operator.outputs:
                        got, gave = operator.inputs[0], operator.outputs[0]
                        if not _loses_values(got.dtype, gave.dtype):
                            conversion_pairs.append((got, gave))
    return sorted(conversion_pairs, key=lambda pair: pair[0].order)


def _loses_values(got: str, gave: str) -> bool:
    """Whether a conversion between two types loses more than precision."""
    # Casting floats to integers or truth values is meant to change them, so equality is not
    # expected.
    return gave != got and (gave == "bool" or ("float" in got and "float" not in gave))


def _nothing_matched(side: _Side) -> BadInput:
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
        hint="dynamo_original_graph_*.txt is next to the dump's first folder; "
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


def _partners(numbers: list[T], others: list[T]) -> list[tuple[T, T]]:
    """Pairs of equal numbers; a single number on each side is a pair even if they differ."""
    if len(numbers) == len(others) == 1:
        return [(numbers[0], others[0])]
    return [(number, number) for number in numbers if number in others]


def _unpaired(what: str, reference: list[int], candidate: list[int]) -> list[str]:
    """Notes on numbers that only one side has; none if each side has a single number."""
    if len(reference) == len(candidate) == 1:
        return []
    sides = (
        ("reference", set(reference) - set(candidate)),
        ("candidate", set(candidate) - set(reference)),
    )
    return [
        f"only the {side} has {what} {', '.join(map(str, sorted(numbers)))}"
        for side, numbers in sides
        if numbers
    ]


def _graph_partners(
    graphs: list[OperatorGraph], others: list[OperatorGraph], notes: list[str]
) -> list[tuple[OperatorGraph, OperatorGraph]]:
    """Graphs paired by name, otherwise in the order of their numbers."""
    names = {graph.name: graph for graph in others}
    if all(graph.name in names for graph in graphs):
        return [(graph, names[graph.name]) for graph in graphs]
    if len(graphs) != len(others):
        notes.append(
            f"{len(graphs)} graphs against {len(others)}: paired in the order of their numbers"
        )
    paired = list(zip(graphs, others, strict=False))
    if len(paired) > 1 or len(graphs) != len(others):
        notes.extend(f"graph {own.name} is taken for {other.name}" for own, other in paired)
    return paired


def _by_step(
    records: Sequence[Record], graph: OperatorGraph, graphs: Sequence[OperatorGraph]
) -> dict[int, list[Record]]:
    """The records of one of a run's graphs, by step; the longest matching prefix is the graph's."""
    by_step: dict[int, list[Record]] = defaultdict(list)
    prefixes = sorted((option.prefix for option in graphs), key=len, reverse=True)
    # Prefixes may contain each other (`graph1_` and `graph1_2_`), so the longest one is used.
    for record in records:
        fitting = next((p for p in prefixes if record.key.site.startswith(p)), None)
        if fitting == graph.prefix and record.key.visit == 0:
            by_step[record.key.step].append(record)
    return by_step


def _steps(
    reference: _Side,
    candidate: _Side,
    owners: tuple[tuple[int, int], tuple[int, int]],
    graphs: tuple[OperatorGraph, OperatorGraph],
    pairs: list[Pair],
    notes: list[str],
    reasons: dict[tuple[str, TensorKey], str],
) -> None:
    reference_steps = _by_step(reference.records[owners[0]], graphs[0], reference.graphs[owners[0]])
    candidate_steps = _by_step(candidate.records[owners[1]], graphs[1], candidate.graphs[owners[1]])
    notes += _unpaired("step", sorted(reference_steps), sorted(candidate_steps))
    for step, other in _partners(sorted(reference_steps), sorted(candidate_steps)):
        if step != other:
            notes.append(f"step {step} of the reference is step {other} of the candidate")
        matching = _match_step(
            reference, candidate, graphs, reference_steps[step], candidate_steps[other]
        )
        for match in matching.matches:
            pairs.append(
                Pair(
                    match.record,
                    match.partner,
                    "name" if match.same_name else "graph",
                    match.confidence,
                    candidate_recipe=_reshaped(match.partner, match.record.shape),
                )
            )
        reasons.update({("reference", key): why for key, why in matching.reasons.items()})
        reasons.update({("candidate", key): why for key, why in matching.partner_reasons.items()})


def _match_step(
    reference: _Side,
    candidate: _Side,
    graphs: tuple[OperatorGraph, OperatorGraph],
    reference_records: list[Record],
    candidate_records: list[Record],
) -> Matching:
    first, second = graphs
    operators, other = (
        operators_of(reference_records, first.prefix),
        operators_of(candidate_records, second.prefix),
    )
    if first.kind == second.kind:
        return match_fused(operators, other, first if first.nodes else second)
    if first.kind == "ge":
        return match_fx(operators, other, first, _SameBytes(candidate.run))
    # FX to GE is solved as GE to FX and flipped, because the matcher starts from GE operators.
    flipped = match_fx(other, operators, second, _SameBytes(reference.run))
    return Matching(
        [match.flipped for match in flipped.matches], flipped.partner_reasons, flipped.reasons
    )


class _SameBytes:
    """Whether two tensors of one run hold the same bytes; large ones are compared in 16 places."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def __call__(self, first: Record, second: Record) -> bool:
        if first.digest and second.digest:
            return first.digest == second.digest
        try:
            samples = [_sample(self.run.raw(record)) for record in (first, second)]
        except (DriftlineError, OSError, ValueError):
            return False
        return samples[0] == samples[1]


def _sample(values: Storage) -> bytes:
    # A large tensor is sampled at 16 places: enough to distinguish two inputs of one operator, with
    # less than a megabyte read.
    if values.nbytes <= READ_WHOLE:
        return values.tobytes()
    starts = range(0, values.size, -(-values.size // 16))
    return b"".join(values[start : start + 1024].tobytes() for start in starts)


def _reshaped(record: Record, shape: tuple[int, ...]) -> Recipe | None:
    """Add or drop axes of size one; any other difference of shape is a finding."""
    if record.shape == shape or record.lost or math.prod(record.shape) != math.prod(shape):
        return None
    if [size for size in record.shape if size != 1] != [size for size in shape if size != 1]:
        return None
    return start(record).then(Step("reshape", numbers=shape), shape=shape)
