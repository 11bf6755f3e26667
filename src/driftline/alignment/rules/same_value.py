"""Pairs for tensors that repeat a value that is already paired.

A dropout in evaluation and an identity return their input, so their tensors equal those of the leaf
before or after them. The other run may not have such sites. A container returns a value that a leaf
inside made; operators of a library have no containers. Such tensors get the partner of the equal
tensor. `ForwardedInputs` does the same for inputs that a container passes to its operators.

Equality is decided within one run, by bytes; the two runs are never compared here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from driftline.alignment.plan import Pair, Plan
from driftline.alignment.recipe import Recipe
from driftline.alignment.sites.site_graph import (
    ROOTS,
    Call,
    Frame,
    calls_of,
    frames_of,
    main_tensor,
)
from driftline.alignment.sites.values import Dataflow, bytes_of
from driftline.runs.records import Record
from driftline.runs.run import Run

if TYPE_CHECKING:
    from driftline.alignment.align import Context

MOST_CONFIDENT = 0.8
"""Upper limit of the confidence of these pairs."""
_ENDS = 4
"""Number of leaves that are examined at either end of a container."""
_NEAR = 16
"""Number of leaves that are examined before and after a site."""
_KINDS = frozenset({"dropout", "identity"})


def pair_passed(plan: Plan, reference: Run, candidate: Run) -> list[Pair]:
    """Pairs for unpaired tensors of sites that return their input."""
    new_pairs: list[Pair] = []
    for run, alone, in_reference in (
        (reference, plan.missing, True),
        (candidate, plan.extra, False),
    ):
        if not alone:
            continue
        partners: dict[int, Pair | None] = {}
        for pair in plan.pairs:
            own = id(pair.reference if in_reference else pair.candidate)
            # A recipe changes the value, so a tensor that equals the stored one does not equal the
            # compared one. A tensor with two pairs has no single partner to share.
            unchanged = pair.reference_recipe is None and pair.candidate_recipe is None
            partners[own] = pair if unchanged and own not in partners else None
        other = candidate if in_reference else reference
        # Library operators have no modules around them, so all containers of a model would be
        # unpaired.
        modules = other.facts.operator_sites and not run.facts.operator_sites
        for record, pair in _of_passing_sites(run, alone, partners, modules):
            sure = min(pair.confidence, MOST_CONFIDENT)
            ordered = (record, pair.candidate) if in_reference else (pair.reference, record)
            new_pairs.append(Pair(*ordered, "structure", sure))
    return new_pairs


def _of_passing_sites(
    run: Run, alone: Sequence[Record], partners: Mapping[int, Pair | None], modules: bool
) -> Iterator[tuple[Record, Pair]]:
    """Unpaired tensors of one run, each with the pair of the equal tensor."""
    lone = {id(record) for record in alone}
    wanted = {Frame(r.key.rank, r.key.process, r.key.step) for r in alone}
    for frame, records in frames_of(run.records).items():
        if frame not in wanted:
            continue
        calls = [call for call in calls_of(_in_order(records)) if call.called]
        # Frames without an unpaired tensor are skipped before any byte is read.
        if not any(id(record) in lone for call in calls for record in call.records):
            continue
        leaves = [call for call in calls if call.leaf]
        yield from _of_leaves(run, leaves, lone, partners)
        for call in calls if modules else ():
            if not call.leaf and not call.inner:
                yield from _of_container(run, call, leaves, lone, partners)


def _of_leaves(
    run: Run, leaves: Sequence[Call], lone: set[int], partners: Mapping[int, Pair | None]
) -> Iterator[tuple[Record, Pair]]:
    """Input and output of each dropout or identity that returned its input."""
    passed_on: dict[str, Pair | None] = {}  # by the value that was passed on
    for index, call in enumerate(leaves):
        source, output = (main_tensor(call.records, port) for port in ("input", "output"))
        if call.kind not in _KINDS or source is None or output is None:
            continue
        # A site with one paired side needs no help.
        if not {id(source), id(output)} <= lone:
            continue
        value = bytes_of(run, source)
        # Unequal bytes mean that the dropout was active and changed the value.
        if not value or value != bytes_of(run, output):
            continue
        # A chain of dropouts passes one value on, so an earlier result applies to the next one.
        pair = passed_on.get(value) or _pair_around(run, leaves, index, source, partners)
        passed_on[value] = pair
        if pair is not None:
            yield source, pair
            yield output, pair


def _pair_around(
    run: Run,
    leaves: Sequence[Call],
    index: int,
    source: Record,
    partners: Mapping[int, Pair | None],
) -> Pair | None:
    """The pair of a neighbouring tensor that holds the bytes of a site's input."""
    value = bytes_of(run, source)
    for call, port in _around(leaves, index):
        record = main_tensor(call.records, port)
        if record is not None and record.shape == source.shape:
            pair = partners.get(id(record))
            if pair is not None and bytes_of(run, record) == value:
                return pair
    return None


def _of_container(
    run: Run,
    container: Call,
    leaves: Sequence[Call],
    lone: set[int],
    partners: Mapping[int, Pair | None],
) -> Iterator[tuple[Record, Pair]]:
    """Tensors of a container that its first leaves read, or that its last leaves made."""
    alone = [r for r in container.records if id(r) in lone and r.key.phase == "forward"]
    if not alone:
        return
    prefix = "" if container.site in ROOTS else f"{container.site}."
    inside = [leaf for leaf in leaves if leaf.site.startswith(prefix)]
    for record in alone:
        port = record.key.port
        # The first leaves read an input, the last ones make an output; examining more leaves costs
        # reads and finds unrelated equal values.
        ends = inside[:_ENDS] if port == "input" else inside[: -_ENDS - 1 : -1]
        same = bytes_of(run, record) if port in ("input", "output") else ""
        for leaf in ends if same else ():
            own = main_tensor(leaf.records, port)
            if own is None or own.shape != record.shape or bytes_of(run, own) != same:
                continue
            if (pair := partners.get(id(own))) is not None:
                yield record, pair
                break


def _in_order(records: Iterable[Record]) -> list[Record]:
    return sorted(records, key=lambda record: record.order)


def _around(leaves: Sequence[Call], index: int) -> Iterator[tuple[Call, str]]:
    """Calls that may have made the value that a site passes on, likeliest first, then its reader.

    In addition to the previous leaf, these are leaves of the same module, because a dump may list
    them in another order.
    """
    holder = leaves[index].site.rpartition(".")[0]
    if index:
        yield leaves[index - 1], "output"
    # Dumps of some tools list modules by registration, so the maker may come later in the list.
    for call in leaves[max(0, index - _NEAR) : index + _NEAR]:
        if call.site.rpartition(".")[0] == holder:
            yield call, "output"
    if (reader := _next(leaves, index)) is not None:
        yield reader, "input"


def _next(leaves: Sequence[Call], index: int) -> Call | None:
    return next((call for call in leaves[index + 1 :] if call.kind not in _KINDS), None)


# --- inputs that a container passes to its operators


_NONE: dict[object, Pair] = {}


def name_of(record: Record, flow: Dataflow) -> str:
    """The name of an input in the dump; empty if it has none."""
    if record.key.port != "input":
        return ""
    return flow.names.get((record.key.site, record.key.slot), "")


class ForwardedInputs:
    """Pairs of operators' inputs, by tensor name, to be repeated for the containers around."""

    def __init__(self, pairs: Iterable[Pair], reference: Dataflow, candidate: Dataflow) -> None:
        self._flows = (reference, candidate)
        self._pairs: dict[str, dict[object, Pair]] = {}
        for pair in pairs:
            names = name_of(pair.reference, reference), name_of(pair.candidate, candidate)
            if all(names):
                # Norms of all layers may hold the same bytes; equivalent pairs are kept once.
                self._pairs.setdefault(names[0], {}).setdefault((names[1], _signature(pair)), pair)

    def pairs_of(
        self, container: Call, other: Call, free: set[int], confidence: float
    ) -> tuple[list[Pair], set[int]]:
        """Pairs of two containers' inputs, and the ids of the records in them."""
        by_name: dict[str, list[Record]] = {}
        for record in other.records:
            if id(record) in free:
                by_name.setdefault(name_of(record, self._flows[1]), []).append(record)
        seen: Counter[str] = Counter()
        new_pairs: dict[tuple[int, int, str], Pair] = {}
        for record in container.records:
            if id(record) not in free:
                continue
            name = name_of(record, self._flows[0])
            # Several inputs of one container may hold equal bytes, such as the norms' weights of a
            # new model.
            nth = seen[name]  # equal bytes have equal names: pair the nth with the nth
            seen[name] += 1
            for pair in self._pairs.get(name, _NONE).values():
                fitting = by_name.get(name_of(pair.candidate, self._flows[1]), ())
                partner = fitting[min(nth, len(fitting) - 1)] if fitting else None
                alike = partner is not None and _same_signature(record, pair.reference)
                if partner is None or not alike or not _same_signature(partner, pair.candidate):
                    continue
                recipe = _with_source(pair.reference_recipe, pair.reference, record)
                partner_recipe = _with_source(pair.candidate_recipe, pair.candidate, partner)
                new = Pair(record, partner, "structure", confidence, recipe, partner_recipe)
                new_pairs.setdefault((id(record), id(partner), f"{recipe} {partner_recipe}"), new)
        used = {id(record) for pair in new_pairs.values() for record in pair.records}
        return list(new_pairs.values()), used


def _signature(pair: Pair) -> object:
    """Shapes, dtypes and steps of a pair, without the identity of its tensors."""
    parts: list[object] = []
    for record, recipe in (
        (pair.reference, pair.reference_recipe),
        (pair.candidate, pair.candidate_recipe),
    ):
        # Recipes with other sources are distinguished by identity: they cannot be moved to new
        # tensors.
        alone = recipe is None or recipe.sources == (record,)
        steps = () if recipe is None else recipe.steps
        parts.append((record.shape, record.dtype, steps, None if alone else id(recipe)))
    return tuple(parts)


def _same_signature(record: Record, other: Record) -> bool:
    return record.shape == other.shape and record.dtype == other.dtype


def _with_source(recipe: Recipe | None, old: Record, new: Record) -> Recipe | None:
    if recipe is None:
        return None
    sources = tuple(new if source is old else source for source in recipe.sources)
    return recipe._replace(sources=sources)


def by_same_value(plan: Plan, context: Context) -> Plan:
    """The plan with pairs for unpaired sites that return their input, such as dropouts."""
    if not plan.pairs or not (plan.missing or plan.extra):
        return plan
    passed = pair_passed(plan, context.reference, context.candidate)
    if not passed:
        return plan
    return plan.with_pairs(passed).with_reasons_of_unpaired()
