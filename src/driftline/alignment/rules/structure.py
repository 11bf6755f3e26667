"""Structure: pairs for tensors whose names do not agree, by class, shape and execution order.

Works frame by frame (one step of one process): leaves are aligned as a sequence, containers by the
leaves they hold, then the tensors of linked sites are paired. Pairs of stronger rules stay and
anchor the rest. A wrong pair is worse than none: a site without a unique partner stays unpaired,
with a reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from driftline.alignment.fingerprints import Looks
from driftline.alignment.plan import Pair
from driftline.alignment.rules.containers import Tree, link_across, link_containers, link_uncalled
from driftline.alignment.rules.fused_projections import (
    Interleaving,
    fuse_alike,
    in_family_order,
    is_certain,
    pair_parts,
    pair_reordered,
)
from driftline.alignment.rules.leaves import Link, link_leaves
from driftline.alignment.rules.same_value import ForwardedInputs
from driftline.alignment.sites.kinds import MAPPED
from driftline.alignment.sites.roles import infer_elementwise_kinds, infer_roles
from driftline.alignment.sites.site_graph import (
    Call,
    Frame,
    calls_of,
    enclosing,
    frames_of,
    main_tensor,
    with_bias,
)
from driftline.alignment.sites.tensors import (
    READ,
    WEIGHTS,
    pair_codes,
    pair_read,
    pair_rest,
    pair_tensors,
    pair_weights,
)
from driftline.alignment.sites.values import Dataflow, Dataflows
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run

Reasons = dict[tuple[str, TensorKey], str]
_Name = tuple[str, int]
_Inner = dict[_Name, list[Call]]


class Conclusion(NamedTuple):
    """The result of the rule: new pairs, reasons for unpaired tensors, and notes."""

    pairs: list[Pair]
    reasons: Reasons
    notes: list[str]


class _Solution(NamedTuple):
    """Links between two frames by name, so that they hold for every frame with the same calls."""

    links: list[tuple[_Name, _Name, tuple[_Name, ...], tuple[_Name, ...], float]]
    reference_reasons: dict[_Name, str]
    candidate_reasons: dict[_Name, str]
    notes: list[str]


def align_by_structure(
    reference: Run,
    candidate: Run,
    paired: Sequence[Pair],
    missing: Sequence[Record],
    extra: Sequence[Record],
    same_class: Sequence[tuple[str, str]] = (),
) -> Conclusion:
    """Pair what stronger rules left unpaired.

    Args:
        reference: The reference run; values are read only to break ties.
        candidate: The candidate run.
        paired: The existing pairs.
        missing: Unpaired tensors of the reference.
        extra: Unpaired tensors of the candidate.
        same_class: Parts of class names that the user has mapped to each other.
    """
    conclusion = Conclusion([], {}, [])
    reference_frames = frames_of([*(pair.reference for pair in paired), *missing])
    candidate_frames = frames_of([*(pair.candidate for pair in paired), *extra])
    # Pairs that exist already anchor the order inside their own frame.
    links: dict[Frame, list[Pair]] = {}
    for pair in paired:
        key = pair.reference.key
        links.setdefault(Frame(key.rank, key.process, key.step), []).append(pair)
    # Steps of one run repeat the same calls; the alignment is solved once per distinct
    # sequence.
    solved: dict[object, _Solution] = {}
    # Records are compared by identity: equal keys may stand in both runs.
    free = {id(record) for record in (*missing, *extra)}
    looks = Looks(reference, candidate)
    interleaving = Interleaving(reference, candidate, conclusion.notes)
    reference_flows, candidate_flows = Dataflows(reference), Dataflows(candidate)
    for frame, other in _frames(reference_frames, candidate_frames):
        reference_records, candidate_records = (
            _in_order(reference_frames[frame]),
            _in_order(candidate_frames[other]),
        )
        anchors = _anchors(links.get(frame, ()))
        mapped = _anchors(pair for pair in links.get(frame, ()) if pair.by == "map")
        if not mapped and not _could_gain(reference_records, candidate_records, free, anchors):
            continue
        a, b = calls_of(reference_records), calls_of(candidate_records)
        _apply_class_map(same_class, a, b)
        outline = (_names(a), _names(b), tuple(anchors.items()))
        flows = reference_flows.of(frame, a, outline), candidate_flows.of(other, b, outline)
        # Roles by dataflow come before matching, since unnamed q, k and v are
        # indistinguishable by shape.
        infer_roles(a, flows[0])
        infer_roles(b, flows[1])
        infer_elementwise_kinds(a, b, flows)
        # A bias that one library adds by an operator of its own is part of a Linear
        # elsewhere, unless the other side has such operators, too: then they pair with each
        # other.
        for side, other_side in ((a, b), (b, a)):
            if not any(call.class_name.startswith("Elewise") for call in other_side):
                with_bias(side)
        if outline not in solved:
            solved[outline] = _solve(a, b, anchors, looks)
            conclusion.notes.extend(solved[outline].notes)
        for rest_pair in pair_rest(mapped, a, b, free):
            conclusion.pairs.append(Pair(*rest_pair, "structure", WEIGHTS))
            free.difference_update(map(id, rest_pair))
        _pair_up(solved[outline], a, b, anchors, free, conclusion, flows, interleaving)
    conclusion.pairs.sort(key=lambda pair: pair.reference.order)
    return conclusion


def _apply_class_map(
    same_class: Sequence[tuple[str, str]], reference: list[Call], candidate: list[Call]
) -> None:
    """Give leaves of mapped classes one kind, if both sides have such leaves."""
    for number, words in enumerate(same_class):
        # A class map of the user outranks what classes are called.
        sides = [
            [call for call in side if call.leaf and any(word in call.class_name for word in words)]
            for side in (reference, candidate)
        ]
        if all(sides):
            for call in (*sides[0], *sides[1]):
                call.kind = f"{MAPPED} {number}"


def _frames(reference: Iterable[Frame], candidate: Iterable[Frame]) -> list[tuple[Frame, Frame]]:
    reference_list, candidate_set = list(reference), set(candidate)
    common = [(frame, frame) for frame in reference_list if frame in candidate_set]
    # Two single steps belong together whatever their numbers are.
    if not common and len(reference_list) == len(candidate_set) == 1:
        return [(reference_list[0], candidate_set.pop())]
    return common


def _could_gain(
    reference: Iterable[Record],
    candidate: Iterable[Record],
    free: set[int],
    anchors: Mapping[_Name, _Name],
) -> bool:
    """Whether both sides have unpaired sites with unpaired tensors of a common port.

    Skips the work if names have paired all sites and only single tensors are left.
    """
    sides = (reference, set(anchors)), (candidate, set(anchors.values()))
    alone = [
        {r.key.port for r in side if id(r) in free and (r.key.site, r.key.visit) not in anchored}
        for side, anchored in sides
    ]
    return bool(alone[0] & alone[1])


def _in_order(records: list[Record]) -> list[Record]:
    return sorted(records, key=lambda record: record.order)


def _names(calls: Iterable[Call]) -> tuple[_Name, ...]:
    return tuple((call.site, call.visit) for call in calls)


def _anchors(pairs: Iterable[Pair]) -> dict[_Name, _Name]:
    anchors: dict[_Name, _Name] = {}
    for pair in pairs:
        key, partner = pair.reference.key, pair.candidate.key
        anchors.setdefault((key.site, key.visit), (partner.site, partner.visit))
    return anchors


def _solve(
    reference: list[Call], candidate: list[Call], anchors: Mapping[_Name, _Name], looks: Looks
) -> _Solution:
    by_name = {(call.site, call.visit): call for call in candidate}
    fixed = [
        (call, by_name[partner])
        for call in reference
        if (partner := anchors.get((call.site, call.visit))) in by_name
    ]
    paired = {id(call) for pair in fixed for call in pair}

    def alike(call: Call, other: Call) -> bool:
        return looks.alike(
            main_tensor(call.records, "output"), main_tensor(other.records, "output")
        )

    a, b = ([call for call in side if call.leaf] for side in (reference, candidate))
    # Where calls were recorded, sites that only hold parameters are not part of the sequence.
    if all(any(call.called for call in side) for side in (a, b)):
        a, b = ([call for call in side if call.called] for side in (a, b))
    a, b = in_family_order(a), in_family_order(b)
    # Fuse before aligning, so that both sequences have the same units.
    a, b = fuse_alike(a, b, paired)
    solution = _Solution([], {}, {}, [])
    leaves = link_leaves(a, b, [pair for pair in fixed if pair[0].leaf and pair[1].leaf], alike)
    links = list(leaves.links)
    solution.notes.extend(leaves.notes)
    inside = _inner(reference), _inner(candidate)
    for link in list(links):  # calls inside a linked leaf: an adapted Linear, kernels
        links += _inside(link, inside)
    # Containers are matched by the leaves they hold, so leaves must be linked first.
    reference_marks, candidate_marks = _marks(fixed, links)
    reference_tree, candidate_tree = (
        Tree(reference, reference_marks),
        Tree(candidate, candidate_marks),
    )
    container_links, ties = link_containers(reference_tree, candidate_tree, paired)
    links += container_links
    links += [
        link
        for link in link_across(reference_tree, candidate_tree, a, b)
        if id(link.reference) not in paired and id(link.candidate) not in paired
    ]
    linked = {id(call) for link in links for call in (link.reference, link.candidate)} | paired
    # Parameters without a call come last: they are found by the linked sites around them.
    links += link_uncalled(
        [call for call in reference if id(call) not in linked],
        [call for call in candidate if id(call) not in linked],
        [*fixed, *((link.reference, link.candidate) for link in links)],
    )
    for link in links:
        # A family whose members are told apart by order only is less certain than its link.
        sure = link.confidence if is_certain(link.reference) and is_certain(link.candidate) else 0.7
        name = (
            (link.reference.site, link.reference.visit),
            (link.candidate.site, link.candidate.visit),
        )
        parts = _names(link.reference.parts), _names(link.candidate.parts)
        solution.links.append((*name, *parts, min(sure, link.confidence)))
    _explain(
        solution.reference_reasons,
        reference,
        candidate,
        "candidate",
        {**leaves.reference_ties, **ties},
    )
    _explain(
        solution.candidate_reasons,
        candidate,
        reference,
        "reference",
        {**leaves.candidate_ties, **ties},
    )
    return solution


def _inner(calls: Iterable[Call]) -> _Inner:
    """Calls inside leaves (such as adapters), by the enclosing site and the visit."""
    inner: _Inner = {}
    for call in calls:
        if call.inner:
            for site in enclosing(call.site):
                inner.setdefault((site, call.visit), []).append(call)
    return inner


def _inside(link: Link, inside: tuple[_Inner, _Inner]) -> list[Link]:
    calls = inside[0].get((link.reference.site, link.reference.visit), [])
    partners = inside[1].get((link.candidate.site, link.candidate.visit), [])
    # Inner calls pair by position only if both sides have the same number and kinds of them.
    if len(calls) != len(partners) or not calls or link.reference.parts or link.candidate.parts:
        return []
    same = all(
        a.kind == b.kind and a.features == b.features for a, b in zip(calls, partners, strict=True)
    )
    pairs = zip(calls, partners, strict=True)
    return [Link(a, b, link.confidence) for a, b in pairs] if same else []


def _marks(
    fixed: Sequence[tuple[Call, Call]], links: Sequence[Link]
) -> tuple[dict[int, frozenset[int]], dict[int, frozenset[int]]]:
    """Numbers of links for each linked leaf; a fused call has those of all its parts."""
    reference_marks: dict[int, frozenset[int]] = {}
    candidate_marks: dict[int, frozenset[int]] = {}
    number = 0
    for reference, candidate in (*fixed, *((link.reference, link.candidate) for link in links)):
        if reference.leaf and candidate.leaf:
            own_calls, others = reference.parts or (reference,), candidate.parts or (candidate,)
            many = range(number, number + max(len(own_calls), len(others)))
            number += len(many)
            # A fused call carries the marks of all its members, so that a container
            # holds "the same leaves" on both sides even if only one of them is fused.
            for side, calls, fused in (
                (reference_marks, own_calls, reference),
                (candidate_marks, others, candidate),
            ):
                side[id(fused)] = frozenset(many)
                for place, call in enumerate(calls):
                    side[id(call)] = frozenset(many if len(calls) == 1 else (many[place],))
    return reference_marks, candidate_marks


def _explain(
    why: dict[_Name, str],
    calls: Sequence[Call],
    others: Sequence[Call],
    side: str,
    ties: Mapping[int, list[Call]],
) -> None:
    """Set a reason for every call; it is used only if the call stays unpaired."""
    classes = Counter(call.class_name for call in others)
    kinds = {call.kind for call in others}
    for call in calls:
        # Ties are the most useful reason: they name what the user can decide with --map.
        if options := ties.get(id(call)):
            shown = " and ".join(f"'{option.site}'" for option in options[:2])
            reason = f"{shown} of the {side} are equally good"
            if len(options) == 1:
                reason = f"{shown} of the {side} could as well be another's partner"
        elif call.inner:
            reason = "it is a part of what is compared as one"
        elif not call.leaf:
            reason = f"no site of the {side} holds the same part of the model"
        elif call.class_name and not classes[call.class_name] and call.kind not in kinds:
            reason = f"no site of class {call.class_name} in the {side}"
        else:
            reason = f"no site of its class and shape at this place in the {side}"
        why[call.site, call.visit] = reason


def _pair_up(
    solution: _Solution,
    reference: list[Call],
    candidate: list[Call],
    anchors: Mapping[_Name, _Name],
    free: set[int],
    conclusion: Conclusion,
    flows: tuple[Dataflow, Dataflow],
    interleaving: Interleaving,
) -> None:
    first = len(conclusion.pairs)
    inside: ForwardedInputs | None = None
    reference_calls = {(call.site, call.visit): call for call in reference}
    candidate_calls = {(call.site, call.visit): call for call in candidate}
    linked: dict[tuple[str, _Name], str] = {}
    for name, partner in anchors.items():
        linked["reference", name] = partner[0]
        linked["candidate", partner] = name[0]
    # Leaves first: inputs that a container passes on are paired like those of its leaves.
    ordered = sorted(solution.links, key=lambda link: not reference_calls[link[0]].leaf)
    for name, partner, parts, other_parts, confidence in ordered:
        call, other = reference_calls[name], candidate_calls[partner]
        linked["reference", name] = partner[0]
        linked["candidate", partner] = name[0]
        if parts or other_parts:
            members = [reference_calls[part] for part in parts] or [
                candidate_calls[part] for part in other_parts
            ]
            side = "reference" if parts else "candidate"
            trouble = pair_parts(
                other if parts else call,
                members,
                bool(parts),
                confidence,
                conclusion.pairs,
                (reference_calls, candidate_calls),
                interleaving,
            )
            for member in members:
                place = (member.site, member.visit)
                linked[side, place] = (other if parts else call).site
                if trouble:
                    (solution.reference_reasons if parts else solution.candidate_reasons)[place] = (
                        trouble
                    )
            continue
        covered: set[int] = set()
        if not call.leaf and not other.leaf:
            inside = inside or ForwardedInputs(conclusion.pairs[first:], *flows)
            handed, covered = inside.pairs_of(call, other, free, confidence)
            conclusion.pairs.extend(handed)
        elif call.layout != other.layout and (parted := pair_reordered(call, other, confidence)):
            conclusion.pairs.extend(parted)
            covered = {id(record) for pair in parted for record in pair.records}
        own = [r for r in call.records if id(r) in free and id(r) not in covered]
        others = [r for r in other.records if id(r) in free and id(r) not in covered]
        tensor_pairs = pair_tensors(own, others)
        for record, match in tensor_pairs:
            conclusion.pairs.append(Pair(record, match, "structure", confidence))
        used = {id(record) for pair in tensor_pairs for record in pair}
        own = [record for record in own if id(record) not in used]
        others = [record for record in others if id(record) not in used]
        for record, match in pair_weights(own, others) if call.leaf and other.leaf else ():
            conclusion.pairs.append(Pair(record, match, "structure", min(confidence, WEIGHTS)))
        used = {id(record) for record in (*own, *others)}
        for record, match in pair_codes(call, other, used):
            conclusion.pairs.append(Pair(record, match, "structure", min(confidence, WEIGHTS)))
    partners = _partners(solution, anchors, reference_calls, candidate_calls)
    used = {id(record) for pair in conclusion.pairs for record in pair.records}
    for made, read in pair_read(reference, partners[0], free - used):
        conclusion.pairs.append(Pair(made, read, "structure", READ))
    for made, read in pair_read(candidate, partners[1], free - used):
        conclusion.pairs.append(Pair(read, made, "structure", READ))
    paired = {id(record) for pair in conclusion.pairs for record in pair.records}
    for side, calls, why in (
        ("reference", reference, solution.reference_reasons),
        ("candidate", candidate, solution.candidate_reasons),
    ):
        for call in calls:
            name = (call.site, call.visit)
            for record in call.records:
                if id(record) in free and id(record) not in paired:
                    partner = linked.get((side, name))
                    reason = (
                        f"its site goes with '{partner}', which has none that is surely the same"
                    )
                    conclusion.reasons[side, record.key] = reason if partner else why[name]


def _partners(
    solution: _Solution,
    anchors: Mapping[_Name, _Name],
    reference_calls: Mapping[_Name, Call],
    candidate_calls: Mapping[_Name, Call],
) -> tuple[dict[_Name, Call], dict[_Name, Call]]:
    """Partner calls by name, for either side."""
    pairs = [*anchors.items(), *((link[0], link[1]) for link in solution.links)]
    of_reference = {
        name: candidate_calls[partner] for name, partner in pairs if partner in candidate_calls
    }
    of_candidate = {
        partner: reference_calls[name] for name, partner in pairs if name in reference_calls
    }
    return of_reference, of_candidate
