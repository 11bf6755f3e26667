"""Find the differences of two runs' models, and order them relative to the first divergence.

`differences_of` reads the facts of two runs. `placed` determines for each difference whether it is
at the first divergence, upstream of it or elsewhere. `explanation` says what it would explain.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from driftline.comparison.differences.difference import ABSENT, Difference, Position
from driftline.comparison.differences.models import (
    ModelPair,
    Names,
    folded,
    names_by_prefix,
)
from driftline.comparison.differences.training_settings import (
    OPTIMIZER,
    add_parameters,
    of_config,
    of_process,
    of_training,
)
from driftline.comparison.training.training_report import SITES
from driftline.runs.sidecars.model_facts import ModelFacts, read_model_facts

if TYPE_CHECKING:
    from driftline.alignment.plan import Plan
    from driftline.comparison.table.row import Row
    from driftline.comparison.table.table import Table
    from driftline.runs.records import TensorKey
    from driftline.runs.run import Run

ROOT = "(root)"
MOST = 1000
"""At most this many differences are listed; models with more have little in common."""
_TRAINING = frozenset({"optimizer", "scheduler", "scaler", "clipping", "average", "order"})
_MOST_PROCESSES = 64
_MOST_RANKS = 8
_AFTER_UPDATE = ("param", "param_grad", "optimizer_grad")


def differences_of(
    reference: Run, candidate: Run, plan: Plan | None = None
) -> tuple[Difference, ...] | None:
    """The differences of the models of two runs; None if one of them has no facts.

    Args:
        reference: The run that is assumed to be right.
        candidate: The run to test.
        plan: The alignment, which pairs sites whose names differ.
    """
    first, second = read_model_facts(reference), read_model_facts(candidate)
    if not first or not second:
        return None
    staged = bool(reference.facts.stages), bool(candidate.facts.stages)
    if plan is not None and staged[0] != staged[1]:
        return _of_pipeline(reference, candidate, plan, reference_staged=staged[0])
    names = names_of(first, second, plan)
    same_ranks = reference.facts.world == candidate.facts.world
    alone = ModelPair(first, second, names, same_ranks=same_ranks)
    on_first = set(alone.sites(0)).intersection(alone.sites(1))
    if not same_ranks:
        _add_other_ranks(reference, first)
        _add_other_ranks(candidate, second)
    pair = ModelPair(first, second, names, same_ranks=same_ranks)
    differences = _of_ranks(reference, candidate, pair, on_first)
    listed = folded(differences)[:MOST]
    return tuple(difference.moved("", explanation(difference)) for difference in listed)


def _of_pair(pair: ModelPair) -> Iterator[Difference]:
    """All differences of two processes."""
    of_models = list(pair.differences())
    yield from of_models
    yield from _later(pair, of_models)
    yield from of_config(pair)
    yield from of_process(pair.reference, pair.candidate)
    yield from of_training(pair)


# Ranks.


def _of_ranks(
    reference: Run, candidate: Run, first: ModelPair, on_first: set[str]
) -> list[Difference]:
    """The differences of the first processes, together with those of all other processes.

    The name of a difference that only some ranks have ends with their numbers. A module that
    another rank holds is not missing, because stages and experts are distributed over ranks.

    Args:
        reference: The reference run.
        candidate: The candidate run.
        first: The models of the first processes. If one process is compared with many, they include
            the modules of the other ranks.
        on_first: Sites of modules that the first processes themselves hold.
    """
    differences = list(_of_pair(first))
    pairs = [((0, 0), first)]
    listed = {_identity_of(difference): difference for difference in differences}
    ranks: dict[tuple[str, ...], list[tuple[int, int]]] = {
        key: [(0, 0)] if not of.site or of.site in on_first or first.same_ranks else []
        for key, of in listed.items()
    }
    for places, place in _other_places(reference, candidate):
        facts = [
            read_model_facts(run, *where, weights=first.same_ranks)
            for run, where in zip((reference, candidate), places, strict=True)
        ]
        if not all(facts):
            continue
        pair = ModelPair(facts[0], facts[1], first.names, same_ranks=first.same_ranks)
        pairs.append((place, pair))
        for difference in _of_pair(pair):
            # If one process is compared with many, modules, tensors and optimizers of all ranks
            # were merged and compared already.
            if first.same_ranks or difference.kind in _OF_EVERY_RANK:
                key = _identity_of(difference)
                listed.setdefault(key, difference)
                ranks.setdefault(key, []).append(place)
    if len(pairs) == 1:
        return differences
    held = [{site for _, pair in pairs for site in pair.sites(side)} for side in (0, 1)]
    return [
        _with_ranks(difference, ranks[key], _holders(difference, pairs, on_first))
        for key, difference in listed.items()
        if not (difference.relation in ("missing", "extra") and _is_held(difference, held))
    ]


_OF_EVERY_RANK = frozenset(
    {"class", "code", "attribute", "function", "hook", "mode", "process", "config"}
)


def _identity_of(difference: Difference) -> tuple[str, ...]:
    kind, own = difference.kind, (difference.reference, difference.candidate)
    # Every rank has its own loss, and parameters are distributed over ranks.
    values = () if kind == "loss" else own
    relation = "" if kind in _TRAINING else difference.relation
    return (kind, difference.site, difference.name, *values, relation)


def _other_places(
    reference: Run, candidate: Run
) -> Iterator[tuple[tuple[tuple[int, int], tuple[int, int]], tuple[int, int]]]:
    """The other processes to compare: their places in both runs, and the place to report."""
    first, second = _places(reference), _places(candidate)
    if reference.facts.world == candidate.facts.world:
        yield from (((place, place), place) for place in first if place in second)
    elif len(first) == 0:
        yield from ((((0, 0), place), place) for place in second)
    elif len(second) == 0:
        yield from (((place, (0, 0)), place) for place in first)


def _places(run: Run) -> list[tuple[int, int]]:
    """Rank and process of all processes but the first."""
    places = [
        (about.get("rank", 0), about.get("process", 0))
        for about in run.processes()[:_MOST_PROCESSES]
    ]
    return [
        (rank, process)
        for rank, process in places
        if type(rank) is int and type(process) is int and (rank, process) != (0, 0)
    ]


def _is_held(difference: Difference, held: Sequence[set[str]]) -> bool:
    """Whether a difference is a missing module that another rank of that side holds."""
    side = 1 if difference.relation == "missing" else 0
    return difference.kind == "module" and difference.site in held[side]


def _holders(
    difference: Difference, pairs: Sequence[tuple[tuple[int, int], ModelPair]], on_first: set[str]
) -> list[tuple[int, int]]:
    """The processes that could have a difference, because they hold its module."""
    if difference.relation in ("missing", "extra"):
        return [place for place, pair in pairs if pair.has(difference.site)]
    site = difference.site
    return [
        place
        for place, pair in pairs
        if not site or (site in on_first if place == (0, 0) else pair.has_both_modules(site))
    ]


def _with_ranks(
    difference: Difference, own: Sequence[tuple[int, int]], holders: Sequence[tuple[int, int]]
) -> Difference:
    """The difference, with the ranks that have it in its name if not all of them do."""
    if len(own) >= len(holders):
        return difference
    numbers = sorted({rank for rank, _ in own})
    word = "rank" if len(numbers) == 1 else "ranks"
    listed = ", ".join(map(str, numbers[:_MOST_RANKS]))
    more = ", ..." if len(numbers) > _MOST_RANKS else ""
    return replace(difference, name=f"{difference.name} ({word} {listed}{more})".lstrip())


def _add_other_ranks(run: Run, facts: ModelFacts) -> None:
    """Add modules and updated parameters that only other ranks hold, such as those of experts."""
    optimizers = {
        record.get("number"): record for record in facts.training if record.get("kind") == OPTIMIZER
    }
    for rank, process in _places(run):
        other = read_model_facts(run, rank, process, weights=False)
        for site, module in other.modules.items():
            facts.modules.setdefault(site, module)
        for path, tensor in other.tensors.items():
            facts.tensors.setdefault(path, tensor)
        for record in other.training:
            if record.get("kind") == OPTIMIZER and record.get("number") in optimizers:
                add_parameters(optimizers[record.get("number")], record)


def _later(pair: ModelPair, first: Sequence[Difference]) -> Iterator[Difference]:
    """Differences that appear while the programs run, because one or both change their model.

    Only descriptions that both captures made in the same step are compared: a counter that was read
    a step later has another value.
    """
    listed = {(difference.kind, difference.site, difference.name) for difference in first}
    looks = [look for look in pair.reference.looks if look in pair.candidate.looks]
    last: dict[int, int] = {}
    written = (0, 0)
    for look in looks:
        since, last[look.model] = last.get(look.model, 0) + 1, look.step
        changes = pair.reference.looks[look], pair.candidate.looks[look]
        if changes == written:
            continue
        written = changes
        sides = pair.reference.at(look), pair.candidate.at(look)
        for difference in ModelPair(*sides, pair.names, same_ranks=pair.same_ranks).differences():
            key = difference.kind, difference.site, difference.name
            if key not in listed:
                listed.add(key)
                begin = min(since, look.step)
                # Models are described rarely, and the change may be anywhere between two times.
                when = f"step {begin}" if begin == look.step else f"steps {begin}-{look.step}"
                name = f"{difference.name} (changed in {when})".lstrip()
                yield replace(difference, name=name, step=begin)


def _of_pipeline(
    reference: Run, candidate: Run, plan: Plan, *, reference_staged: bool
) -> tuple[Difference, ...]:
    """The differences of a model and one whose stages are on several ranks.

    The facts of all ranks are merged under the names of the other side. Losses, optimizers and the
    order of calls are left out, because a process describes them for its part of the model only.
    """
    if reference_staged:
        pairs = [(pair.reference.key, pair.candidate.key.site) for pair in plan.pairs]
        first, second = _all_stages(reference, pairs), read_model_facts(candidate)
    else:
        pairs = [(pair.candidate.key, pair.reference.key.site) for pair in plan.pairs]
        first, second = read_model_facts(reference), _all_stages(candidate, pairs)
    # A module whose output the plan does not pair (a root) is a different one on every rank.
    sites = first.modules.keys() & second.modules.keys()
    for facts in (first, second):
        facts.modules = {site: m for site, m in facts.modules.items() if site in sites}
        facts.tensors = {path: t for path, t in facts.tensors.items() if t.site in sites}
    pair = ModelPair(first, second, Names({}), same_ranks=False)
    listed = folded([*pair.differences(), *of_config(pair), *of_process(first, second)])[:MOST]
    return tuple(difference.moved("", explanation(difference)) for difference in listed)


def _all_stages(run: Run, pairs: Sequence[tuple[TensorKey, str]]) -> ModelFacts:
    """The merged facts of all ranks of a pipeline, under the other side's names of the sites."""
    names: dict[tuple[int, int], dict[str, str]] = {}
    for key, site in pairs:
        if key.port == "output" and site != ROOT:
            names.setdefault((key.rank, key.process), {})[key.site] = site
    merged = read_model_facts(run, weights=False)
    merged.modules, merged.tensors, merged.weights, merged.training = {}, {}, {}, []
    for place, renamed in sorted(names.items()):
        facts = read_model_facts(run, *place)
        merged.classes.update(facts.classes)
        for site, module in facts.modules.items():
            if site in renamed:
                merged.modules[renamed[site]] = replace(module, site=renamed[site])
        for tensor in facts.tensors.values():
            if tensor.site in renamed:
                moved = tensor._replace(site=renamed[tensor.site], tied="")
                merged.tensors[moved.path] = moved
                values = facts.weights.get(tensor.path)
                if values is not None:
                    merged.weights[moved.path] = values._replace(site=moved.site)
    return merged


def names_of(first: ModelFacts, second: ModelFacts, plan: Plan | None) -> Names:
    """The mapping from the candidate's sites to the reference's."""
    names = names_by_prefix(first, second)
    if plan is None:
        return names
    # Alignment uses the structure of the models, so it overrules equal names without a prefix.
    by_plan = {
        pair.candidate.key.site: pair.reference.key.site
        for pair in plan.pairs
        if pair.candidate.key.port == "output"
    }
    return Names({**names.to_reference, **by_plan})


def placed(
    differences: Sequence[Difference], table: Table, first: Row | None = None, home: str = ""
) -> tuple[Difference, ...]:
    """Differences in the order to read them: at the first divergence, upstream of it, the rest.

    Args:
        differences: The differences.
        table: The table, whose rows are in order of execution.
        first: The row where the divergence starts; by default the table's first one.
        home: The site where the divergence starts; by default the table's first site.
    """
    first = first or table.first
    step, rank = (0, 0) if first is None else (first.step, first.rank)
    order: dict[str, int] = {}
    for row in table.rows:
        if row.step == step and row.rank == rank:
            order.setdefault(row.site, row.order)
    view = _View(order, home or table.first_site or (first.site if first else ""), first)
    moved = [view.placed(difference) for difference in differences]
    nearness = {"at": 0, "upstream": 1, "elsewhere": 2, "": 3}
    return tuple(sorted(moved, key=lambda d: (not d.counts, nearness[d.position])))


class _View:
    """Determines the position of differences relative to the first divergence.

    Args:
        order: The order of the first call of each site.
        home: The site where the divergence starts; empty if nothing diverges.
        first: The first row that is off.
    """

    def __init__(self, order: Mapping[str, int], home: str, first: Row | None) -> None:
        self._order = order
        self._home = home
        self._start = math.inf
        self._updated = self._graded = False
        if first is not None:
            self._start = order.get(home, first.order)
            # Weights of later steps depend on the settings of training, and so do the weights and
            # gradients around an update.
            self._updated = first.step > 0 or first.port in _AFTER_UPDATE
            self._graded = self._updated or first.port.startswith("grad_")
        # The order in which each module, or something inside it, first ran.
        self._begins: dict[str, int] = {}
        for site, number in order.items():
            name = site.partition("/")[0]
            while name:
                self._begins[name] = min(number, self._begins.get(name, number))
                name = name.rpartition(".")[0]

    def placed(self, difference: Difference) -> Difference:
        sites = difference.sites or ((difference.site,) if difference.site else ())
        inside_home = [site for site in sites if self._home and _is_at(site, self._home)]
        # A difference of many modules is shown with the one at the divergence, or else with the one
        # that runs first.
        ran = sorted(sites, key=lambda site: self._begins.get(site, math.inf))
        nearest = inside_home[:1] or ran[:1]
        shown = replace(difference, site=nearest[0]) if nearest else difference
        return shown.moved(self._position(difference, sites, bool(inside_home)))

    def _position(
        self, difference: Difference, sites: Sequence[str], inside_home: bool
    ) -> Position:
        if not self._home:
            return ""
        # The first divergence may be a stage of training, such as the loss, instead of a module.
        if self._home in SITES.values():
            explains = difference.kind in (*_TRAINING, "loss") or (
                difference.relation in ("requires_grad", "tied")
            )
            return "at" if explains and difference.counts else "elsewhere"
        if difference.kind in _TRAINING:
            return "upstream" if self._updated else "elsewhere"
        if difference.kind == "loss":
            return "upstream" if self._graded else "elsewhere"
        if inside_home:
            return "at"
        if not sites:
            return "upstream"
        before = any(self._begins.get(site, math.inf) < self._start for site in sites)
        return "upstream" if before else "elsewhere"


def _is_at(site: str, home: str) -> bool:
    """Whether a module is the one where the divergence starts, or is inside it."""
    return site == home or site.startswith(f"{home}.") or home.startswith(f"{site}/")


# What a difference would explain.


_SENTENCES: Mapping[str, str] = {
    "mode": "in training mode dropout is active and batch norms use the batch's own statistics",
    "hook": "a hook may change what the module is given or returns",
    "class": "another class computes another function",
    "code": "the function itself changed",
    "module": "what this module computes is missing on one side",
    "function": "another function is called",
    "config": "it reaches every module that reads it",
    "process": "it changes the arithmetic of every module",
    "optimizer": "the weights after the update differ, and every later step with them",
    "scheduler": "learning rates differ, and the weights after the update",
    "scaler": "gradients are scaled differently; infinite ones skip the update",
    "clipping": "the gradients that the optimizer sees differ",
    "average": "weights that are tested or saved in place of the trained ones differ",
    "order": "gradients are accumulated, scaled or clipped differently before the update",
    "loss": "the loss and all gradients differ, the forward pass does not",
}
_ANOTHER_ORDER = "sums are added in another order, which is noise"
_NOISE: Mapping[str, str] = {
    "threads": _ANOTHER_ORDER,
    "interop_threads": _ANOTHER_ORDER,
    "deterministic_algorithms": _ANOTHER_ORDER,
    "cudnn_benchmark": _ANOTHER_ORDER,
    "cudnn_deterministic": _ANOTHER_ORDER,
    "sdpa_used": _ANOTHER_ORDER,
}
"""Effects of switches that may differ between correct runs; other such switches have no effect."""
_WEIGHTS: Mapping[str, str] = {
    "missing": "its term is missing from the result",
    "extra": "a term is added that the reference does not have",
    "tied": "the module computes with other values than those it shared",
    "unrelated": "the module computes with values that were never loaded, or are another's",
    "different": "the module computes with other values",
    "transposed": "the module computes with the transposed values",
    "permuted": "channels, heads or rows have changed places",
    "shape": "the weight is another one",
    "dtype": "what is computed from it has the digits of that format",
    "requires_grad": "the parameter is updated on one side only",
}


def explanation(difference: Difference) -> str:
    """What a difference would explain, as a sentence; empty if that is unknown."""
    if difference.kind in ("parameter", "buffer"):
        word = difference.relation.partition(" ")[0]
        if word == "rounded":
            if not difference.site:
                return "a rounding in every weight: noise of that format"
            return "what is computed from it has the digits of the coarser format"
        return _WEIGHTS.get(word, "")
    if difference.kind == "attribute":
        return _attribute(difference)
    if difference.kind == "loss" and difference.distance is not None:
        return ""
    if difference.kind == "process" and not difference.counts:
        return _NOISE.get(difference.name, "")
    return _SENTENCES.get(difference.kind, "")


def _attribute(difference: Difference) -> str:
    values = [_number(text) for text in (difference.reference, difference.candidate)]
    if ABSENT in (difference.reference, difference.candidate):
        return "the module has a setting that the other side lacks"
    if None in values or not difference.name:
        return "the module computes with another setting"
    first, second = values
    assert first is not None and second is not None
    name = difference.name.lower()
    # An epsilon is added to a variance, and its effect depends on how small that is.
    if "eps" in name and min(first, second) >= 0:
        return (
            f"a normalised output that is sqrt((variance + {first:.3g}) / (variance + "
            f"{second:.3g})) times as large"
        )
    if first and second and first != second:
        return f"a factor of {second / first:.4g} wherever it multiplies"
    return "the module computes with another setting"


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def summary(differences: Iterable[Difference], most: int = 3) -> str:
    """The first differences in a few words: `embed_norm.eps, (root).training and 2 more`."""
    names = [difference.label for difference in differences if difference.counts]
    shown = [f"'{name}'" for name in names[:most]]
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(shown) + rest
