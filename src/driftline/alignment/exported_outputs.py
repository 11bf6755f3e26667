"""Modules that give several tensors, against a graph in which only some of them are used.

An exported graph knows what leaves a module, not what its code returns: what nobody uses is not
there, and the first that is left is not the first of a tuple. So the place in the tuple is no
evidence. Which one it is, its maker says, or that no other looks like it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from driftline.alignment.exported_graph import ROOT, ExportedGraph
from driftline.alignment.plan import Pair, Plan, Rule
from driftline.alignment.recipe import Recipe, Step
from driftline.runs.record import Record

MADE, LOOK = 0.95, 0.9
"""Confidence of a tensor by its maker, and of one by its look."""
_RECURRENT = ("LSTM", "GRU", "RNN")
_Call = tuple[int, int, int, str, int]


class Left:
    """What is paired and what is not, while rules are tried."""

    def __init__(self, plan: Plan) -> None:
        self.pairs = list(plan.pairs)
        self.found: list[Pair] = []
        self.here = {id(record): record for record in plan.missing}
        self.there = {id(record): record for record in plan.extra}

    def take(self, ours: Record, theirs: Record, confidence: float, by: Rule = "graph") -> None:
        pair = Pair(ours, theirs, by, confidence)
        self.found.append(pair)
        self.pairs.append(pair)
        self.here.pop(id(ours), None)
        self.there.pop(id(theirs), None)

    def take_decoded(self, codes: Record, value: Record, recipe: Recipe, codes_first: bool) -> None:
        if codes_first:
            pair = Pair(codes, value, "graph", 1.0, reference_recipe=recipe)
        else:
            pair = Pair(value, codes, "graph", 1.0, candidate_recipe=recipe)
        self.found.append(pair)
        self.pairs.append(pair)
        self.here.pop(id(pair.reference), None)
        self.there.pop(id(pair.candidate), None)


def without_places(plan: Plan, graph: ExportedGraph, *, exported_first: bool) -> Plan:
    """The plan without pairs that only the place in a tuple of several outputs has made."""
    alone = plan.extra if exported_first else plan.missing
    models = [pair.candidate if exported_first else pair.reference for pair in plan.pairs]
    given = Counter(_call(record) for record in (*models, *alone) if _is_output(record, graph))
    loose = {
        id(pair)
        for pair, model in zip(plan.pairs, models, strict=True)
        if _is_output(model, graph) and given[_call(model)] > 1
    }
    gone = [pair for pair in plan.pairs if id(pair) in loose]
    return plan._replace(
        pairs=tuple(pair for pair in plan.pairs if id(pair) not in loose),
        missing=(*plan.missing, *(pair.reference for pair in gone)),
        extra=(*plan.extra, *(pair.candidate for pair in gone)),
    )


def take_outputs(left: Left, *, by_look: bool) -> None:
    """Outputs of one call that hold what is paired elsewhere.

    Args:
        left: What is paired already, and what is not.
        by_look: Those of whose shape and type each side has one are pairs, too.
    """
    twins: dict[tuple[int, str], set[str]] = defaultdict(set)
    for pair in left.pairs:
        if pair.reference.digest and pair.candidate.digest:
            twins[pair.reference.key.step, pair.reference.digest].add(pair.candidate.digest)
    here, there = _by_call(left.here.values()), _by_call(left.there.values())
    made = set[str]().union(*twins.values())
    for call, mine in here.items():
        others = list(there.get(call, ()))
        for record in list(mine):
            digests = twins.get((record.key.step, record.digest), set())
            same = [one for one in others if one.digest in digests and one.shape == record.shape]
            if same:
                left.take(record, same[0], MADE)
                mine.remove(record)
                others.remove(same[0])
        looks = Counter(map(_look, mine)), Counter(map(_look, others))
        for record in mine if by_look else ():
            look = _look(record)
            unknown = (record.key.step, record.digest) not in twins and not either_way(record)
            if unknown and looks[0][look] == looks[1][look] == 1:
                other = next(one for one in others if _look(one) == look)
                if other.digest not in made:
                    left.take(record, other, LOOK)


def take_turned(left: Left, *, exported_first: bool) -> None:
    """What a recurrent layer gives, batch first here and time first there.

    ONNX has time first, with a transposition on either side, which exporters take out between two
    layers.
    """
    here, there = _by_call(left.here.values()), _by_call(left.there.values())
    models, graphs = (there, here) if exported_first else (here, there)
    for call, given in models.items():
        values = list(graphs.get(call, ()))
        for model in given:
            turned = (*model.shape[1::-1], *model.shape[2:])
            fitting = [one for one in values if one.shape == turned and one.dtype == model.dtype]
            if not _is_recurrent(model) or either_way(model) or len(fitting) != 1:
                continue
            if sum(one.shape == model.shape for one in given) == 1:
                step = Step("transpose", numbers=(1, 0, 2))
                recipe = Recipe((fitting[0],), (step,), model.shape)
                left.take_decoded(fitting[0], model, recipe, exported_first)
                values.remove(fitting[0])


def _is_recurrent(record: Record) -> bool:
    return record.class_name in _RECURRENT and len(record.shape) == 3


def either_way(record: Record) -> bool:
    """Whether its shape does not say if time or the batch comes first."""
    return _is_recurrent(record) and record.shape[0] == record.shape[1]


def _is_output(record: Record, graph: ExportedGraph) -> bool:
    key = record.key
    inner = key.site != ROOT and key.site not in graph.nodes and "/" not in key.site
    return inner and key.port == "output" and key.phase == "forward"


def _by_call(records: Iterable[Record]) -> Mapping[_Call, list[Record]]:
    found: dict[_Call, list[Record]] = defaultdict(list)
    for record in records:
        key = record.key
        if key.port == "output" and "/" not in key.site and key.phase == "forward":
            found[_call(record)].append(record)
    return found


def _call(record: Record) -> _Call:
    key = record.key
    return (key.rank, key.process, key.step, key.site, key.visit)


def _look(record: Record) -> tuple[tuple[int, ...], str]:
    return record.shape, record.dtype
