"""Where two trainings diverge, in the order of a training step.

    weights -> forward -> loss -> gradients, clipping -> update -> weights of the next step

A stage is blamed when it differs by more than rounding explains although everything before it
agrees. The limits grow with the divergence of the weights, so that two correct trainings that drift
apart slowly are not blamed.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from driftline.comparison.differences.difference import Difference
from driftline.comparison.differences.find import names_of
from driftline.comparison.differences.models import ModelPair
from driftline.comparison.training.stage_search import Allowed, StageSearch, count_of, named
from driftline.comparison.training.step_errors import StepErrors, Trainings
from driftline.comparison.training.training_report import Break, TrainingReport
from driftline.numerics.dtypes import DTYPES
from driftline.runs.scope import RunScope, scope_of
from driftline.runs.sidecars.model_facts import read_model_facts
from driftline.runs.sidecars.step_facts import StepFacts, read_step_facts

if TYPE_CHECKING:
    from driftline.alignment.plan import Plan
    from driftline.runs.run import Run

# Relative errors of a loss, and of all gradients together, that rounding explains, by the coarsest
# number format of both programs. Rounding errors average out in a loss, but not in the gradients of
# deep models.
_LOSS = {"float64": 1e-8, "float32": 1e-4, "float16": 0.01, "bfloat16": 0.03}
_GRADIENTS = {"float64": 1e-5, "float32": 0.02, "float16": 0.3, "bfloat16": 0.5}
_COARSE = (0.1, 0.7)
"""The same two errors for formats of eight bits and fewer."""
_MOST_PROCESSES = 64


def training_report(
    reference: Run,
    candidate: Run,
    plan: Plan | None,
    differences: Sequence[Difference] | None,
) -> TrainingReport | None:
    """Compare two trainings step by step; None if there is nothing to report about training.

    Args:
        reference: The run that is assumed to be right.
        candidate: The run to test.
        plan: The alignment, which pairs sites whose names differ.
        differences: The differences of the two programs, which explain a finding.
    """
    scopes = scope_of(reference), scope_of(candidate)
    if not all(scope.has_modules for scope in scopes):
        return None
    sides = [_processes(reference), _processes(candidate)]
    over_budget = _over_budget(reference), _over_budget(candidate)
    thinned = _thinned(sides, over_budget)
    if not (_meshes(reference) == _meshes(candidate) and _same_layout(scopes, sides)):
        # Losses and weights of a rank belong to its part of the batch and its shards. With other
        # layouts only the rows of the table can be joined, and they are judged there.
        return _without_updates(_copies_part(sides), thinned)
    parted = _inputs_part(sides)
    if max(scope.updates for scope in scopes) <= 0:
        return _without_updates(parted, thinned)
    compared: set[int] = set()
    weights_off: dict[int, float] = {}
    breaks = [] if parted is None else [parted]
    for place in sides[0].keys() & sides[1].keys():
        steps, other_steps = sides[0][place], sides[1][place]
        first, second = (
            read_model_facts(run, *place, weights=False) for run in (reference, candidate)
        )
        pair = ModelPair(first, second, names_of(first, second, plan))
        allowed = _allowed(pair, (steps, other_steps))
        finder = StageSearch(allowed, differences or (), _ranks_agree(sides))
        for errors in Trainings(pair, steps, other_steps).steps():
            weights_off[errors.step] = max(errors.apart(), weights_off.get(errors.step, 0.0))
            if finder.begun_apart(errors):
                break
            if _is_whole(errors):
                compared.add(errors.step)
            if (broken := finder.look(errors)) is not None:
                breaks.append(broken)
                break
    lacking = "" if compared else _lacking(scopes, sides, over_budget)
    return TrainingReport(
        tuple(sorted(compared)),
        lacking,
        min(breaks, key=lambda broken: broken.position, default=None),
        weights_off,
        thinned,
    )


_Side = dict[tuple[int, int], StepFacts]


class _OverBudget(NamedTuple):
    """The first step that a capture left out because of its budget, and the capture's sentence."""

    step: int
    text: str


def _over_budget(run: Run) -> _OverBudget | None:
    """The earliest step that any process of a run left out because of its budget."""
    dropped: list[_OverBudget] = []
    for event in run.events():
        details: Any = event.get("details")
        if event.get("kind") == "thinned" and isinstance(details, dict):
            step: Any = cast("dict[str, Any]", details).get("step")
            if type(step) is int:
                dropped.append(_OverBudget(step, str(event.get("message", ""))))
    return min(dropped, default=None)


def _thinned(sides: Sequence[_Side], over_budget: Sequence[_OverBudget | None]) -> tuple[str, ...]:
    """What the captures left out of later steps, as sentences."""
    texts: list[str] = []
    for name, side, dropped in zip(("reference", "candidate"), sides, over_budget, strict=True):
        texts += [f"{name}: {dropped.text}"] if dropped is not None else []
        texts += [f"{name}: {text}" for facts in side.values() for text in facts.thinned[:1]]
    return tuple(texts)


def _processes(run: Run) -> _Side:
    """The facts about steps of every process of a run, by rank and process."""
    side: _Side = {}
    for about in run.processes()[:_MOST_PROCESSES]:
        rank, process = about.get("rank", 0), about.get("process", 0)
        if type(rank) is int and type(process) is int:
            side[rank, process] = read_step_facts(run, rank, process)
    return side


def _meshes(run: Run) -> set[str]:
    """The position of every rank in its device meshes."""
    return {
        f"{about.get('rank', 0)}: {mesh}"
        for about in run.processes()[:_MOST_PROCESSES]
        for mesh in about.get("meshes") or ()
    }


def _same_layout(scopes: Sequence[RunScope], sides: Sequence[_Side]) -> bool:
    """Whether each rank of one side does the same work as the same rank of the other side.

    It does not if the sides have different numbers of ranks, if a rank has other shards, or if
    other ranks hold a parameter.
    """
    if max(scopes[0].ranks, 1) != max(scopes[1].ranks, 1):
        return False
    if scopes[0].ranks <= 1:
        return True
    holders: list[dict[str, set[int]]] = [{}, {}]
    for own, side in zip(holders, sides, strict=True):
        for (rank, _), steps in side.items():
            for path in steps.parameters:
                own.setdefault(path, set()).add(rank)
    if any(holders[0][path] != holders[1][path] for path in holders[0].keys() & holders[1].keys()):
        return False
    for place in sides[0].keys() & sides[1].keys():
        first, second = (side[place].parameters for side in sides)
        if any(first[path].shape != second[path].shape for path in first.keys() & second.keys()):
            return False
    return True


def _is_whole(errors: StepErrors) -> bool:
    """Whether weights, loss and gradients of a step after an update were compared."""
    losses = all(errors.losses)
    return errors.step > 0 and losses and errors.gradients is not None and bool(errors.updates)


def _lacking(
    scopes: Sequence[RunScope],
    sides: Sequence[_Side],
    over_budget: Sequence[_OverBudget | None],
) -> str:
    """What the runs need for a verdict of pass, as a sentence."""
    names = ("reference", "candidate")
    for name, dropped in zip(names, over_budget, strict=True):
        # If only step 0 was captured, no step after an update can be compared.
        if dropped is not None and dropped.step <= 1:
            return (
                f"this is a training, and the {name} keeps no step after an update "
                f"({dropped.text}): dump it with a larger --budget"
            )
    for name, scope, side in zip(names, scopes, sides, strict=True):
        if scope.updates == 0:
            return f"the {name} made no update, and the other side did"
        if not any(steps.states for steps in side.values()):
            return (
                f"this is a training, and the {name} has no weights, gradients and loss after an "
                "update: dump it without --no-model-facts"
            )
    if min(scope.updates for scope in scopes) < 2:
        return (
            "this is a training, and only one update was made: of a pass the weights, loss and "
            "gradients of a step after an update are needed; let both programs run two steps"
        )
    return (
        "this is a training, and of no step after an update weights, loss and gradients of both "
        "sides could be compared: let both programs run the same steps, and name their "
        "parameters alike"
    )


# What is allowed.


def _allowed(pair: ModelPair, steps: Sequence[StepFacts]) -> Allowed:
    """The errors allowed in step 0, by the coarsest number format in which a program computes."""
    names = {parameter.dtype for facts in steps for parameter in facts.parameters.values()}
    for facts in (pair.reference, pair.candidate):
        for switch in ("autocast_cpu", "autocast_cuda"):
            values = [facts.process.get(switch)]
            values += [change.get("values", {}).get(switch) for change in facts.changes]
            names |= {str(value) for value in values if value not in (None, "off")}
        # In TF32, tensor cores keep ten bits of a float32's mantissa, as many as float16 has.
        tf32 = facts.process.get("tf32") or facts.process.get("float32_matmul_precision")
        if tf32 is True or tf32 in ("high", "medium"):
            names.add("float16")
    floating = [name for name in names if name in DTYPES and DTYPES[name].is_floating]
    coarsest = max(floating, key=lambda name: DTYPES[name].unit_roundoff, default="float32")
    loss, gradients = _COARSE
    return Allowed(_LOSS.get(coarsest, loss), _GRADIENTS.get(coarsest, gradients))


def _ranks_agree(sides: Sequence[_Side]) -> tuple[set[int], set[int]]:
    """For each side, the steps in which all ranks had the same gradients."""
    agreeing: tuple[set[int], set[int]] = (set(), set())
    for own, side in zip(agreeing, sides, strict=True):
        if len(side) < 2:
            continue
        by_step: dict[int, list[dict[str, str]]] = {}
        for steps in side.values():
            for state in steps.states:
                if state.key.what == "gradients":
                    digests = {path: tensor.digest for path, tensor in state.tensors.items()}
                    by_step.setdefault(state.key.step, []).append(digests)
        own |= {
            step
            for step, ranks in by_step.items()
            if len(ranks) > 1 and all(rank == ranks[0] for rank in ranks)
        }
    return agreeing


def _without_updates(parted: Break | None, thinned: tuple[str, ...]) -> TrainingReport | None:
    """The report if updates cannot be compared; None if there is nothing to report."""
    return TrainingReport(broken=parted, thinned=thinned) if parted or thinned else None


def _copies_part(sides: Sequence[_Side]) -> Break | None:
    """The first update after which ranks have different copies of a weight despite equal gradients.

    One side must be a single process: its shapes show which tensors are copies and which are
    shards.
    """
    single = next((index for index in (0, 1) if len(sides[index]) == 1), None)
    if single is None or len(sides[1 - single]) < 2:
        return None
    (alone,), ranks = sides[single].values(), sides[1 - single]
    weights = {place: _digests(steps, "weights") for place, steps in ranks.items()}
    gradients = {place: _digests(steps, "gradients") for place, steps in ranks.items()}
    # The parameters that every rank holds in full.
    copies = [
        path
        for path, parameter in alone.parameters.items()
        if all(parameter.shape == facts.shape_of(path) for facts in ranks.values())
    ]
    steps = sorted(set[int]().union(*weights.values()))
    for before, after in itertools.pairwise(steps):
        copies = [path for path in copies if len(_values(weights, before, path)) == 1]
        apart = [
            path
            for path in copies
            if len(_values(gradients, before, path)) == 1 and len(_values(weights, after, path)) > 1
        ]
        if apart:
            name = ("reference", "candidate")[1 - single]
            digests = [
                {place[0]: weights[place][step][apart[0]] for place in ranks}
                for step in (before, after)
            ]
            unmoved, whom = _odd_ranks(*digests)
            words = (
                f"gradients agree in step {before} on all ranks of the {name}, and the update "
                f"{whom}, in {count_of(apart, 'parameter')}: {named(apart)}"
            )
            return Break(before, "update", words, unmoved=unmoved)
    return None


def _odd_ranks(begun: Mapping[int, str], ended: Mapping[int, str]) -> tuple[tuple[int, ...], str]:
    """The ranks whose weight has not changed, and in words those ranks or the ones that differ."""
    usual = Counter(ended.values()).most_common(1)[0][0]
    still = tuple(rank for rank in begun if begun[rank] == ended[rank])
    odd = still or [rank for rank in ended if ended[rank] != usual]
    ranks = f"rank{'' if len(odd) == 1 else 's'} {', '.join(map(str, odd))}"
    return still, f"does not reach {ranks}" if still else f"leaves other weights on {ranks}"


def _digests(facts: StepFacts, what: str) -> dict[int, dict[str, str]]:
    """Digests of the weights at the beginning of each step, or of the gradients of its updates."""
    by_step: dict[int, dict[str, str]] = {}
    for state in facts.states:
        key = state.key
        if key.what == what and not key.call:
            digests = {path: tensor.digest for path, tensor in state.tensors.items()}
            # Weights before a step are written only if they differ from those after the last one.
            by_step.setdefault(key.step + (key.when == "after"), {}).update(digests)
    return by_step


def _values(
    ranks: Mapping[tuple[int, int], Mapping[int, Mapping[str, str]]], step: int, path: str
) -> set[str]:
    """The digests of a tensor on all ranks; empty if one of them is unknown."""
    digests = {by_step.get(step, {}).get(path, "") for by_step in ranks.values()}
    return set() if "" in digests else digests


def _inputs_part(sides: Sequence[_Side]) -> Break | None:
    """The first step in which inputs differ that were equal in an earlier step; None without one.

    Batches come from a data loader, not from the model, so if they were bitwise equal once, they
    should be equal in all steps. If the model computes its inputs (generated tokens) and an earlier
    output differs already, the inputs are not to blame.
    """
    for place in sides[0].keys() & sides[1].keys():
        calls = sides[0][place].calls, sides[1][place].calls
        equal: set[tuple[str, str]] = set()
        for call in sorted(calls[0].keys() & calls[1].keys(), key=lambda key: (key[1], key[0])):
            first, second = calls[0][call], calls[1][call]
            site, step = call
            for slot in first.keys() & second.keys():
                if first[slot] == second[slot]:
                    equal.add((site, slot))
                elif slot.startswith("input ") and (site, slot) in equal:
                    if _was_output(calls, call, site):
                        return None
                    name = slot.removeprefix("input ")
                    finding = (
                        f"the inputs differ in step {step}, and not before: '{name}' of {site} is "
                        "another tensor"
                    )
                    return Break(step, "input", finding)
    return None


def _was_output(calls: Sequence[Any], call: tuple[str, int], site: str) -> bool:
    """Whether an output of the same module already differed in an earlier step."""
    for earlier in calls[0].keys() & calls[1].keys():
        if earlier[1] < call[1] and earlier[0].partition("#")[0] == site.partition("#")[0]:
            first, second = calls[0][earlier], calls[1][earlier]
            if any(first[slot] != second.get(slot) for slot in first if slot.startswith("output ")):
                return True
    return False
