"""Link the containers of two models: those that hold the same linked leaves are the same part.

This runs after the leaves are linked. If several nested containers hold the same leaves, class,
shape and the origin of their output decide; if these do not decide, the containers stay unpaired.
"""

from __future__ import annotations

import bisect
import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from driftline.alignment.rules.leaves import Link, align_sequences
from driftline.alignment.sites.kinds import container_kind, kind_of
from driftline.alignment.sites.site_graph import ROOTS, Call, enclosing

# Below a leaf's 0.9, because the choice among nested containers is inferred, not observed.
_CONFIDENCE = 0.85

Marks = Mapping[int, frozenset[int]]
"""id of a leaf → numbers of the links that it belongs to."""


class Tree:
    """One run in one frame: the leaves of each container."""

    def __init__(self, calls: Sequence[Call], marks: Marks) -> None:
        self.marks = marks
        by_site: dict[str, list[Call]] = defaultdict(list)
        for call in calls:
            by_site[call.site].append(call)
        # Calls of one site are sorted by their end, so that `_enclosing_calls` can find the call
        # that contains a leaf by bisection.
        for group in by_site.values():
            group.sort(key=_end_of)
        self.leaves: dict[int, list[Call]] = defaultdict(list)
        # Inner calls and fused families are leaves of the comparison, whatever they contain.
        self.containers = [
            call for call in calls if not call.leaf and not call.inner and not call.parts
        ]
        container_ids = {id(call) for call in self.containers}
        for leaf in calls:
            if leaf.leaf:
                for call in _enclosing_calls(leaf, by_site):
                    if id(call) in container_ids:
                        self.leaves[id(call)].append(leaf)

    def holds(self, call: Call) -> int:
        """A number for the set of linked leaves that a container holds; 0 if there are none."""
        total = 0
        for leaf in self.leaves[id(call)]:
            for mark in self.marks.get(id(leaf), ()):
                # XOR over spread marks is an order-independent hash of the set: two containers hold
                # the same leaves exactly if these numbers are equal, without building sets for
                # every container.
                total ^= _random_bits(mark)
        return total

    def origin(self, call: Call) -> frozenset[int] | None:
        """Links of the leaves whose output it returns; empty if it makes its own; None: unknown."""
        if not call.output_value:
            return None
        hands_on = [
            leaf for leaf in self.leaves[id(call)] if leaf.output_value == call.output_value
        ]
        marks = frozenset(mark for leaf in hands_on for mark in self.marks.get(id(leaf), ()))
        return None if hands_on and not marks else marks


def link_containers(
    reference_tree: Tree, candidate_tree: Tree, used_calls: set[int]
) -> tuple[list[Link], dict[int, list[Call]]]:
    """Link the containers of two models; also returns the options of tied containers."""
    reference_groups, candidate_groups = (
        _groups(reference_tree, used_calls),
        _groups(candidate_tree, used_calls),
    )
    links: list[Link] = []
    ties: dict[int, list[Call]] = {}
    # Containers that hold the same linked leaves form a chain of wrappers, outermost first on both
    # sides, so the chains can be aligned like sequences.
    for held, group in reference_groups.items():
        partners = candidate_groups.get(held)
        if partners is None:
            continue
        scores = np.array(
            [[_score(reference_tree, a, candidate_tree, b) for b in partners] for a in group],
            np.int32,
        )
        matched = align_sequences(np.arange(len(group)), np.arange(len(partners)), scores)
        links += [Link(group[i], partners[j], _CONFIDENCE) for i, j in matched.pairs]
        used = {j for _, j in matched.pairs}
        # A tie among wrappers that pass the same value through is harmless: any choice compares the
        # same tensor, so the innermost one is used.
        for i, places in matched.tied_rows.items():
            options = [partners[j] for j in places if j not in used]
            same = {(call.output_value, call.input_value) for call in options}
            if options and len(same) == 1 and "" not in same.pop():
                used.add(partners.index(options[-1]))
                links.append(Link(group[i], options[-1], _CONFIDENCE))
            else:
                ties[id(group[i])] = options
        for j, places in matched.tied_columns.items():
            if j not in used:
                ties[id(partners[j])] = [group[i] for i in places]
    return links, ties


def link_across(
    reference_tree: Tree,
    candidate_tree: Tree,
    reference_leaves: Sequence[Call],
    candidate_leaves: Sequence[Call],
) -> list[Link]:
    """Link a leaf with a container of the other side whose own leaves have no partner.

    An example is an attention that is one call, and an attention made of modules. Position between
    linked leaves, kind and shape must agree.
    """
    links = [
        Link(a, b, _CONFIDENCE - 0.1)
        for a, b in _pairs_in_gaps(
            reference_leaves, reference_tree, candidate_leaves, candidate_tree
        )
    ]
    return links + [
        Link(a, b, _CONFIDENCE - 0.1)
        for b, a in _pairs_in_gaps(
            candidate_leaves, candidate_tree, reference_leaves, reference_tree
        )
    ]


def _pairs_in_gaps(
    leaves: Sequence[Call], own_tree: Tree, others: Sequence[Call], other_tree: Tree
) -> Iterator[tuple[Call, Call]]:
    # Leaves between the same two linked neighbours compete for one place; only a single candidate
    # of the right kind and size may take it.
    own_gaps, other_gaps = _gaps(leaves, own_tree.marks), _gaps(others, other_tree.marks)
    options: dict[tuple[int, str], list[Call]] = defaultdict(list)
    for call in other_tree.containers:
        inside = other_tree.leaves[id(call)]
        where = {other_gaps.get(id(leaf), -1) for leaf in inside}
        if len(where) == 1 and -1 not in where and (kind := _kind(call)):
            options[where.pop(), kind].append(call)
    alone: dict[tuple[int, str], list[Call]] = defaultdict(list)
    for leaf in leaves:
        if id(leaf) in own_gaps and (kind := _kind(leaf)):
            alone[own_gaps[id(leaf)], kind].append(leaf)
    for place, lone in alone.items():
        fitting = [call for call in options.get(place, ()) if call.features == lone[0].features]
        if len(lone) == 1 and len(fitting) == 1:
            yield lone[0], fitting[0]


def link_uncalled(
    reference: Sequence[Call], candidate: Sequence[Call], linked: Sequence[tuple[Call, Call]]
) -> list[Link]:
    """Link sites that only have parameters, such as the projection inside a fused attention.

    They are not part of the execution order. The linked site around them and the shapes of their
    parameters must identify them.
    """
    names = {(a.site, b.site): number for number, (a, b) in enumerate(linked)}
    numbers = [dict[str, int](), dict[str, int]()]
    for pair, number in names.items():
        for side, site in zip(numbers, pair, strict=True):
            side.setdefault(site, number)
    groups = [
        _uncalled(calls, around)
        for calls, around in zip((reference, candidate), numbers, strict=True)
    ]
    # Exactly one on each side, because parameters have no execution order that could break a tie.
    return [
        Link(calls[0], groups[1][signature][0], _CONFIDENCE)
        for signature, calls in groups[0].items()
        if len(calls) == 1 == len(groups[1].get(signature, ()))
    ]


def _uncalled(calls: Sequence[Call], around: Mapping[str, int]) -> dict[object, list[Call]]:
    groups: dict[object, list[Call]] = defaultdict(list)
    for call in calls:
        if call.called or not call.leaf or call.inner:
            continue
        holders = (site for site in (*enclosing(call.site), *ROOTS) if site in around)
        holder = next(holders, None)
        if holder is not None:
            shapes = sorted((record.key.port, record.shape) for record in call.records)
            groups[around[holder], call.kind, tuple(shapes)].append(call)
    return groups


def _kind(call: Call) -> str:
    # An attention may be a leaf in one model and a container in the other; both must get the same
    # name.
    kind = kind_of(call.class_name)
    return kind if kind == "core attention" else container_kind(call.class_name)


def _gaps(leaves: Sequence[Call], marks: Marks) -> dict[int, int]:
    """For each unlinked leaf, the number of the last link before it."""
    gaps: dict[int, int] = {}
    last = -2
    for leaf in leaves:
        if own_marks := marks.get(id(leaf)):
            last = max(own_marks)
        else:
            gaps[id(leaf)] = last
    return gaps


def _groups(tree: Tree, used_calls: set[int]) -> dict[int, list[Call]]:
    groups: dict[int, list[Call]] = defaultdict(list)
    for call in tree.containers:
        if id(call) not in used_calls and (held := tree.holds(call)):
            groups[held].append(call)
    for calls in groups.values():
        calls.sort(key=_depth)
    return groups


def _depth(call: Call) -> tuple[int, int]:
    return (0 if call.site in ROOTS else 1 + sum(1 for _ in enclosing(call.site)), call.order)


def _score(reference_tree: Tree, reference: Call, candidate_tree: Tree, candidate: Call) -> int:
    kinds = container_kind(reference.class_name), container_kind(candidate.class_name)
    same = kinds[0] == kinds[1] != ""
    if all(kinds) and not same:
        return 0
    # Unequal feature sizes cannot hold the same tensor, whatever the classes.
    if reference.features != candidate.features:
        return 0
    reference_origin, candidate_origin = (
        reference_tree.origin(reference),
        candidate_tree.origin(candidate),
    )
    if reference_origin is not None and candidate_origin is not None and not same:
        # One returns a leaf's output and the other computes something from it: different tensors.
        together = reference_origin & candidate_origin if reference_origin else not candidate_origin
        if not together:
            return 0
    # Any fitting pair scores 4, so that kind and class only rank the candidates among themselves.
    return 4 + 2 * same + (reference.class_name == candidate.class_name)


def _enclosing_calls(leaf: Call, by_site: Mapping[str, list[Call]]) -> Iterator[Call]:
    """The container calls during which a leaf was called."""
    for site in (*enclosing(leaf.site), *ROOTS):
        calls = by_site.get(site, ())
        if site != leaf.site and calls:
            if len(calls) == 1:
                yield calls[0]
            else:  # the first to end after the leaf began
                index = bisect.bisect_left(calls, leaf.order, key=_end_of)
                yield calls[index if index < len(calls) else 0]


def _end_of(call: Call) -> int:
    return call.ended


def _random_bits(mark: int) -> int:
    """A number with random-looking bits, so that the XOR over a set identifies the set."""
    return int.from_bytes(hashlib.blake2b(mark.to_bytes(8, "little"), digest_size=16).digest())
