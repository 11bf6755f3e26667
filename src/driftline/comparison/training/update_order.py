"""Where two trainings part, in the order in which a step happens.

    weights -> forward -> loss -> gradients, clipping -> update -> weights of the next step

A stage is blamed when it differs by more than arithmetic explains although everything before it
agrees. What arithmetic explains grows with the way by which weights are apart already, so that two
sound trainings that drift apart little by little blame nothing.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from driftline.comparison.differences.difference import Difference
from driftline.comparison.differences.find import names_of
from driftline.comparison.differences.models import ModelPair
from driftline.comparison.training.step_errors import Change, StepErrors, Trainings, relative_error
from driftline.comparison.training.training_report import Break, Stage, TrainingReport
from driftline.numerics.dtypes import DTYPES
from driftline.runs.scope import RunScope, scope_of
from driftline.runs.sidecars.model_facts import read_model_facts
from driftline.runs.sidecars.step_facts import StepFacts, read_step_facts

if TYPE_CHECKING:
    from driftline.alignment.plan import Plan
    from driftline.runs.run import Run

# Relative error up to which arithmetic explains a loss, and all gradients together, by the number
# format that both programs can rely on. A loss averages; gradients of deep models do not.
_LOSS = {"float64": 1e-8, "float32": 1e-4, "float16": 0.01, "bfloat16": 0.03}
_GRADIENTS = {"float64": 1e-5, "float32": 0.02, "float16": 0.3, "bfloat16": 0.5}
_COARSE = (0.1, 0.7)
"""The same for formats of eight bits and fewer."""
_LOSS_BY_WAY, _GRADIENTS_BY_WAY = 3.0, 10.0
"""Times so much as weights are apart, of their way, a loss and gradients may be."""
_SAME_KERNELS = 4.0
"""Gradients of a loss that is equal to the bit may be off by so many times less."""
_OTHER_LOSS = 20.0
"""A loss that other functions compute from equal weights may be off by so many times less."""
_SAME_UPDATE = 1e-3
"""Relative error of an update that equal gradients and weights may have: other kernels, no more."""
_SIGNS = 1.5
"""Adam's update is little more than the sign of a gradient: of gradients that are off by e, about
e / pi of the elements change it, which is 2 sqrt(e / pi) of the update."""
_CLEARLY = 2.0
_AVERAGES = 1e-5
_NEAR_ZERO = 0.01
"""Share of the first loss below which a loss is not compared relative to itself."""
_ORDINALS = ("second", "third", "fourth", "next")
_MOST_NAMES = 4
_SHORT = 200
_MOST_PROCESSES = 64
_KINDS: dict[Stage, tuple[str, ...]] = {
    "input": (),
    "weights": ("average",),
    "loss": ("loss", "attribute", "order"),
    "gradients": ("parameter", "order", "clipping", "scaler", "loss"),
    "update": ("optimizer", "scheduler", "order"),
}
"""Differences of two programs that explain each stage, the likeliest first."""


class Allowed(NamedTuple):
    """What arithmetic explains at step 0."""

    loss: float
    gradients: float


def training_report(
    reference: Run,
    candidate: Run,
    plan: Plan | None,
    differences: Sequence[Difference] | None,
) -> TrainingReport | None:
    """What two trainings say of each other; None where one of the runs is of no training.

    Args:
        reference: What is right.
        candidate: The run to test.
        plan: What belongs together, where names do not say it.
        differences: What differs between the two programs.
    """
    scopes = scope_of(reference), scope_of(candidate)
    if not all(scope.has_modules for scope in scopes):
        return None
    sides = [_processes(reference), _processes(candidate)]
    over_budget = _over_budget(reference), _over_budget(candidate)
    thinned = _thinned(sides, over_budget)
    if not (_meshes(reference) == _meshes(candidate) and _same_layout(scopes, sides)):
        # The loss of a rank is that of its rows, its weights may be shards: only rows are joined.
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
        finder = _Finder(allowed, differences or (), _ranks_agree(sides))
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
    """What the budget of a capture left out: the first such step, and the capture's sentence."""

    step: int
    text: str


def _over_budget(run: Run) -> _OverBudget | None:
    """The earliest step that the budget of any of a run's processes left out."""
    dropped: list[_OverBudget] = []
    for event in run.events():
        details: Any = event.get("details")
        if event.get("kind") == "thinned" and isinstance(details, dict):
            step: Any = cast("dict[str, Any]", details).get("step")
            if type(step) is int:
                dropped.append(_OverBudget(step, str(event.get("message", ""))))
    return min(dropped, default=None)


def _thinned(sides: Sequence[_Side], over_budget: Sequence[_OverBudget | None]) -> tuple[str, ...]:
    """What either side's capture left out of later steps, in words."""
    texts: list[str] = []
    for name, side, dropped in zip(("reference", "candidate"), sides, over_budget, strict=True):
        texts += [f"{name}: {dropped.text}"] if dropped is not None else []
        texts += [f"{name}: {text}" for facts in side.values() for text in facts.thinned[:1]]
    return tuple(texts)


def _processes(run: Run) -> _Side:
    """What every process of a run kept of its steps, by rank and process."""
    side: _Side = {}
    for about in run.processes()[:_MOST_PROCESSES]:
        rank, process = about.get("rank", 0), about.get("process", 0)
        if type(rank) is int and type(process) is int:
            side[rank, process] = read_step_facts(run, rank, process)
    return side


def _meshes(run: Run) -> set[str]:
    """Where every rank stands, by its device meshes."""
    return {
        f"{about.get('rank', 0)}: {mesh}"
        for about in run.processes()[:_MOST_PROCESSES]
        for mesh in about.get("meshes") or ()
    }


def _same_layout(scopes: Sequence[RunScope], sides: Sequence[_Side]) -> bool:
    """Whether a rank of one side does the work of the same rank of the other.

    It does not where there are more ranks on one side, where ranks hold other shards, or where a
    parameter of one rank lies with another rank on the other side.
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
    """Whether a step after an update was compared in its weights, loss and gradients."""
    losses = all(errors.losses)
    return errors.step > 0 and losses and errors.gradients is not None and bool(errors.updates)


def _lacking(
    scopes: Sequence[RunScope],
    sides: Sequence[_Side],
    over_budget: Sequence[_OverBudget | None],
) -> str:
    """What must be added for a pass, in words."""
    names = ("reference", "candidate")
    for name, dropped in zip(names, over_budget, strict=True):
        # Of step 0 alone nothing can be compared after an update.
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
    """By the coarsest number format that either program computes in."""
    names = {parameter.dtype for facts in steps for parameter in facts.parameters.values()}
    for facts in (pair.reference, pair.candidate):
        for switch in ("autocast_cpu", "autocast_cuda"):
            values = [facts.process.get(switch)]
            values += [change.get("values", {}).get(switch) for change in facts.changes]
            names |= {str(value) for value in values if value not in (None, "off")}
        # Tensor cores keep ten bits of a float32.
        tf32 = facts.process.get("tf32") or facts.process.get("float32_matmul_precision")
        if tf32 is True or tf32 in ("high", "medium"):
            names.add("float16")
    floating = [name for name in names if name in DTYPES and DTYPES[name].is_floating]
    coarsest = max(floating, key=lambda name: DTYPES[name].unit_roundoff, default="float32")
    loss, gradients = _COARSE
    return Allowed(_LOSS.get(coarsest, loss), _GRADIENTS.get(coarsest, gradients))


def _ranks_agree(sides: Sequence[_Side]) -> tuple[set[int], set[int]]:
    """Steps in which all ranks of a side were given the same gradients."""
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
    """A report where no update can be followed."""
    return TrainingReport(broken=parted, thinned=thinned) if parted or thinned else None


def _copies_part(sides: Sequence[_Side]) -> Break | None:
    """The first update after which a rank's copies of weights are others than those of its peers,
    though all ranks gave their optimizers equal gradients. Against one process alone, whose shapes
    tell a copy from a shard.
    """
    single = next((index for index in (0, 1) if len(sides[index]) == 1), None)
    if single is None or len(sides[1 - single]) < 2:
        return None
    (alone,), ranks = sides[single].values(), sides[1 - single]
    weights = {place: _digests(steps, "weights") for place, steps in ranks.items()}
    gradients = {place: _digests(steps, "gradients") for place, steps in ranks.items()}
    # What every rank holds in full, and begins with alike.
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
                f"{whom}, in {_count(apart, 'parameter')}: {_named(apart)}"
            )
            return Break(before, "update", words, unmoved=unmoved)
    return None


def _odd_ranks(begun: Mapping[int, str], ended: Mapping[int, str]) -> tuple[tuple[int, ...], str]:
    """Ranks that have the weight they began with; in words, those or the ranks unlike most."""
    usual = Counter(ended.values()).most_common(1)[0][0]
    still = tuple(rank for rank in begun if begun[rank] == ended[rank])
    odd = still or [rank for rank in ended if ended[rank] != usual]
    ranks = f"rank{'' if len(odd) == 1 else 's'} {', '.join(map(str, odd))}"
    return still, f"does not reach {ranks}" if still else f"leaves other weights on {ranks}"


def _digests(facts: StepFacts, what: str) -> dict[int, dict[str, str]]:
    """Digests of weights with which a step begins, or of gradients that its updates are given."""
    by_step: dict[int, dict[str, str]] = {}
    for state in facts.states:
        key = state.key
        if key.what == what and not key.call:
            digests = {path: tensor.digest for path, tensor in state.tensors.items()}
            # Weights before a step are written only where they are not those after the last one.
            by_step.setdefault(key.step + (key.when == "after"), {}).update(digests)
    return by_step


def _values(
    ranks: Mapping[tuple[int, int], Mapping[int, Mapping[str, str]]], step: int, path: str
) -> set[str]:
    """What the ranks hold of a tensor; nothing where a rank's is not known."""
    digests = {by_step.get(step, {}).get(path, "") for by_step in ranks.values()}
    return set() if "" in digests else digests


def _inputs_part(sides: Sequence[_Side]) -> Break | None:
    """The first step after step 0 whose model was given something else; all before are equal.

    Inputs that are equal to the bit in one step are so in all: tokens and images are not computed
    by the model. Where they are (generated tokens), the outputs before them differ, too.
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
    """Whether an output of an earlier call differed already."""
    for earlier in calls[0].keys() & calls[1].keys():
        if earlier[1] < call[1] and earlier[0].partition("#")[0] == site.partition("#")[0]:
            first, second = calls[0][earlier], calls[1][earlier]
            if any(first[slot] != second.get(slot) for slot in first if slot.startswith("output ")):
                return True
    return False


# The search.


class _Finder:
    """Looks at one step after the other until one does not follow from what came before it.

    Args:
        allowed: What arithmetic explains at step 0.
        differences: What differs between the two programs.
        ranks_agree: Steps in which all ranks of either side were given the same gradients.
    """

    def __init__(
        self,
        allowed: Allowed,
        differences: Sequence[Difference],
        ranks_agree: tuple[set[int], set[int]],
    ) -> None:
        self._allowed = allowed
        self._differences = differences
        self._ranks_agree = ranks_agree
        self._begun = False
        self._first_loss = 0.0
        # The largest error of a gradient so far: an optimizer remembers.
        self._gradients = 0.0
        self._by_path: dict[str, float] = {}

    def begun_apart(self, errors: StepErrors) -> bool:
        """Whether weights differ before the first update: then no stage follows from them."""
        first, self._begun = not self._begun, True
        return first and errors.distance > self._allowed.loss

    def look(self, errors: StepErrors) -> Break | None:
        """The first stage of this step that does not follow, or None."""
        # What an optimizer knows is settled before it is given anything.
        stages = (
            self._weights,
            self._passes,
            self._loss,
            self._updated,
            self._gradient,
            self._update,
        )
        for stage in stages:
            if (broken := stage(errors)) is not None:
                return broken
        return None

    def _break(
        self, errors: StepErrors, stage: Stage, words: str, error: float, why: str = ""
    ) -> Break:
        about = f" ({why})" if why else ""
        finding = f"{words}{about}{self._because(errors, stage)}"
        return Break(errors.step, stage, finding, error)

    def _because(self, errors: StepErrors, stage: Stage) -> str:
        """What explains a stage that differs, behind a colon; empty if nothing is known to."""
        causes = [
            f"{difference.path}: {difference.change}"
            for kind in _KINDS[stage]
            for difference in self._differences
            if difference.kind == kind and self._explains(difference, stage, errors.step)
        ]
        # A second cause is told where it is short: a schedule's functions are a line each.
        told = [*causes[:1], *(text for text in causes[1:2] if len(text) <= _SHORT)]
        return f": {'; '.join(told)}" if told else ""

    def _explains(self, difference: Difference, stage: Stage, step: int) -> bool:
        if difference.step is not None and difference.step > step:
            return False
        if difference.kind == "attribute":
            # A module that computes a loss is none of the model's own.
            return stage == "loss" and "loss" in difference.class_name.lower()
        if difference.kind == "parameter":
            # A tied weight is given the gradients of all its uses.
            return difference.relation == "tied"
        return difference.counts

    def _weights(self, errors: StepErrors) -> Break | None:
        step = errors.step
        for which, name in enumerate(("reference", "candidate")):
            lone = [path for path in errors.changed[which] if path not in errors.changed[1 - which]]
            if lone and not errors.changed[1 - which]:
                words = (
                    f"weights agree after the update of step {step - 1}, and something else "
                    f"changes them before step {step}, in the {name} only: {_named(lone)}"
                )
                return self._break(errors, "weights", words, math.inf)
        most = max(_AVERAGES, 3.0 * errors.distance)
        apart = {
            path: error
            for path, (error, trained) in errors.others.items()
            if error > max(most, 3.0 * trained)
        }
        if apart and step > 0:
            averages = all(path.startswith("(average") for path in apart)
            what = "their averages" if averages else "weights that no optimizer updates"
            words = (
                f"the trained weights agree before step {step}, and {what} differ by "
                f"{max(apart.values()):.2g}: {_named(apart)}"
            )
            why = "" if averages else "an average of weights, or a copy"
            return self._break(errors, "weights", words, max(apart.values()), why)
        return None

    def _passes(self, errors: StepErrors) -> Break | None:
        """Weights that change between two calls of the model in the step: how far they move."""
        # What moves them follows from the first backward pass.
        if errors.passes and (broken := self._loss(errors, 1)) is not None:
            return broken._replace(call=1)
        most = self._gradients_allowed(errors, 1)
        for moved in errors.passes:
            number = _ORDINALS[min(moved.call, len(_ORDINALS)) - 1]
            stage: Stage = "update" if moved.in_update else "weights"
            by = "the optimizer" if moved.in_update else "the program itself"
            words = f"the first pass of step {errors.step} agrees, and {by} "
            if moved.lone is not None:
                name = ("reference", "candidate")[moved.lone]
                words += f"changes the weights before the {number} pass in the {name} only"
                error = math.inf
            elif moved.error > most * max(moved.norms) + _CLEARLY * moved.rounding:
                error = moved.error / (moved.norms[0] or 1.0)
                why = f"the move is {_factor(*reversed(moved.norms)) or f'off by {error:.2g}'}"
                words += f"moves the weights to other values before the {number} pass ({why})"
            else:
                continue
            finding = words + self._because(errors, "update")  # a radius stands in its groups
            return Break(errors.step, stage, finding, error, call=moved.call)
        return None

    def _loss(self, errors: StepErrors, most_passes: int | None = None) -> Break | None:
        first, second = (losses[:most_passes] for losses in errors.losses)
        if not first or not second:
            return None
        self._first_loss = self._first_loss or abs(first[0])
        most = max(self._allowed.loss, _LOSS_BY_WAY * errors.apart(most_passes))
        if errors.weights == 0.0 and errors.distance == 0.0 and self._other_loss(errors.step):
            # Weights are equal to the bit, and the loss is made by other functions.
            most /= _OTHER_LOSS
        if len(first) != len(second):
            words = (
                f"there are {len(first)} backward passes in step {errors.step} of the reference "
                f"and {len(second)} in the candidate"
            )
            # The sums must agree all the same: that is what accumulation is.
            if relative_error(sum(first), sum(second), self._floor) > most:
                return self._break(errors, "loss", words, math.inf)
            return None
        for a, b in zip(first, second, strict=True):
            error = relative_error(a, b, self._floor)
            if error > most:
                factor = _factor(abs(b), abs(a))
                words = (
                    f"the forward pass agrees in step {errors.step}, the loss differs: "
                    f"{a:.6g} → {b:.6g}"
                )
                return self._break(errors, "loss", words, error, factor)
        return None

    def _other_loss(self, step: int) -> bool:
        return any(
            difference.kind == "loss" and self._explains(difference, "loss", step)
            for difference in self._differences
        )

    @property
    def _floor(self) -> float:
        return _NEAR_ZERO * self._first_loss

    def _gradient(self, errors: StepErrors) -> Break | None:
        for which, name in enumerate(("reference", "candidate")):
            if lone := errors.lone_gradients[which]:
                words = (
                    f"the loss agrees in step {errors.step}, and {_count(lone, 'parameter')} "
                    f"{'has' if len(lone) == 1 else 'have'} a gradient in the {name} only: "
                    f"{_named(lone)}"
                )
                return self._structural(errors, "gradients", words)
        error = errors.gradients
        if error is None:
            return None
        most = self._gradients_allowed(errors)
        if error > most:
            reduced, other = (errors.step in steps for steps in self._ranks_agree)
            if reduced != other:
                name = "candidate" if reduced else "reference"
                words = (
                    f"the loss agrees in step {errors.step}, the gradients that the optimizer sees "
                    f"differ by {error:.2g}: they are not reduced over ranks in the {name}, where "
                    "every rank has its own"
                )
                return Break(errors.step, "gradients", words, error)
            why = _factor(errors.ratio, 1.0)
            words = (
                f"the loss agrees in step {errors.step}, the gradients that the optimizer sees "
                f"differ by {error:.2g}{_clipping_words(errors, most)}"
            )
            return self._break(errors, "gradients", words, error, why)
        self._gradients = max(self._gradients, error)
        return None

    def _gradients_allowed(self, errors: StepErrors, most_passes: int | None = None) -> float:
        apart = errors.apart(most_passes)
        most = max(self._allowed.gradients, _GRADIENTS_BY_WAY * apart)
        # Equal to the bit as far as the loss: the same kernels computed it.
        is_same = apart == errors.distance == 0.0 and errors.has_same_losses(most_passes)
        return most / _SAME_KERNELS if is_same else most

    def _structural(self, errors: StepErrors, stage: Stage, words: str) -> Break:
        """What one side has and the other has not, with the parameters that are frozen or left."""
        causes = [
            f"{difference.path}: {difference.change}"
            for difference in self._differences
            if difference.relation == "requires_grad" or difference.kind == "optimizer"
        ]
        finding = words + (f"; {'; '.join(causes[:2])}" if causes else "")
        return Break(errors.step, stage, finding)

    def _updated(self, errors: StepErrors) -> Break | None:
        step = errors.step
        for which, name in enumerate(("reference", "candidate")):
            if lone := errors.lone_updates[which]:
                words = (
                    f"{_count(lone, 'parameter')} {'is' if len(lone) == 1 else 'are'} updated in "
                    f"step {step} in the {name} only: {_named(lone)}"
                )
                return self._structural(errors, "update", words)
        return None

    def _update(self, errors: StepErrors) -> Break | None:
        step = errors.step
        wrong = [change for change in errors.updates if self._is_wrong(change, errors.moved)]
        for change in errors.updates:
            if math.isfinite(change.gradient):
                before = self._by_path.get(change.path, 0.0)
                self._by_path[change.path] = max(before, change.gradient)
        if not wrong:
            return None
        norms = [math.hypot(*(change.norms[side] for change in wrong)) for side in (0, 1)]
        error = math.hypot(*(change.error for change in wrong)) / (norms[0] or 1.0)
        of = "" if len(wrong) == len(errors.updates) else f" of {len(errors.updates)}"
        words = (
            f"gradients agree in step {step}, weights differ after it, in "
            f"{_count(wrong, 'parameter', of)}"
        )
        if of:
            words += f" ({_named([change.path for change in wrong])})"
        why = f"the update is {_factor(norms[1], norms[0]) or f'off by {error:.2g}'}"
        for which, name in enumerate(("reference", "candidate")):
            if all(change.path in errors.zero_gradients[which] for change in wrong):
                # An optimizer passes over a parameter without a gradient, decay and momentum too.
                why = (
                    f"their gradients are zeros in the {name} and absent on the other side, where "
                    "they are left as they are"
                )
        return self._break(errors, "update", words, error, why)

    def _is_wrong(self, change: Change, moved: float) -> bool:
        """Whether an update does not follow from its gradient."""
        size = max(change.norms)
        # What an optimizer did between two passes followed, as far as arithmetic allows.
        history = max(self._by_path.get(change.path, 0.0), change.gradient, moved)
        if change.same_gradient and change.same_weights and history == 0.0:
            return change.error > _SAME_UPDATE * size + change.rounding
        # Without a gradient on either side a weight moves by its decay alone.
        if math.isnan(change.gradient):
            history = 0.0
        if history >= self._allowed.gradients:
            return False
        noise = _CLEARLY * (_SIGNS * math.sqrt(max(history, self._gradients)) * size)
        return change.error > noise + _CLEARLY * change.rounding + _SAME_UPDATE * size


# Words.


def _factor(second: float, first: float) -> str:
    """How many times as large, where that is the plain answer."""
    if not first or not second or not math.isfinite(second / first):
        return ""
    ratio = second / first
    if 0.95 < ratio < 1.05:
        return ""
    return f"{ratio:.3g} times as large"


def _clipping_words(errors: StepErrors, most: float) -> str:
    """Whether they differed before clipping already, as far as the norm tells."""
    first, second = errors.norms
    if not first or not second:
        return ""
    error = relative_error(first[-1], second[-1], 0.0)
    if error <= most:
        return ", and before clipping their norms agree"
    return f"; before clipping their norm is {first[-1]:.4g} → {second[-1]:.4g}"


def _count(things: Sequence[Any], word: str, of: str = "") -> str:
    return f"{len(things)}{of} {word}{'' if len(things) == 1 and not of else 's'}"


def _named(paths: Iterable[str]) -> str:
    listed = sorted(paths)
    more = f" and {len(listed) - _MOST_NAMES} more" if len(listed) > _MOST_NAMES else ""
    return ", ".join(listed[:_MOST_NAMES]) + more
