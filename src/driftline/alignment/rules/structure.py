"""Structure: pairs for tensors whose names say nothing, by class, shape and order of execution.

Frame by frame (one step of one process): leaves as a sequence, containers by the leaves they hold,
then tensor by tensor. What stronger rules have paired stays paired and holds the rest in place. A
wrong pair is worse than none: whatever is not the only answer stays alone, with a reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from driftline.alignment.fingerprints import Fingerprints
from driftline.alignment.plan import Pair
from driftline.alignment.rules.containers import Tree, link_across, link_containers, link_uncalled
from driftline.alignment.rules.fused_projections import (
    Interleaving,
    fuse_alike,
    in_family_order,
    is_certain,
    pair_parts,
    pair_relaid,
)
from driftline.alignment.rules.leaves import Link, link_leaves
from driftline.alignment.rules.same_value import HandedOn
from driftline.alignment.sites.kinds import MAPPED
from driftline.alignment.sites.roles import tell_by_dataflow, tell_elementwise
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


class Concluded(NamedTuple):
    """What structure says: new pairs, and why the rest is alone."""

    pairs: list[Pair]
    reasons: Reasons
    notes: list[str]


class _Solution(NamedTuple):
    """Links between two frames, in names, so that they hold for every frame with these calls."""

    links: list[tuple[_Name, _Name, tuple[_Name, ...], tuple[_Name, ...], float]]
    why_here: dict[_Name, str]
    why_there: dict[_Name, str]
    notes: list[str]


def align_by_structure(
    reference: Run,
    candidate: Run,
    known: Sequence[Pair],
    missing: Sequence[Record],
    extra: Sequence[Record],
    same_class: Sequence[tuple[str, str]] = (),
) -> Concluded:
    """Pair what stronger rules have left over.

    Args:
        reference: Where values are read from for ties.
        candidate: The same.
        known: The pairs there are.
        missing: What is left over of the reference.
        extra: What is left over of the candidate.
        same_class: Texts in class names that the user says mean the same work.
    """
    found = Concluded([], {}, [])
    here = frames_of([*(pair.reference for pair in known), *missing])
    there = frames_of([*(pair.candidate for pair in known), *extra])
    links: dict[Frame, list[Pair]] = {}
    for pair in known:
        key = pair.reference.key
        links.setdefault(Frame(key.rank, key.process, key.step), []).append(pair)
    solved: dict[object, _Solution] = {}
    free = {id(record) for record in (*missing, *extra)}
    looks = Fingerprints(reference, candidate)
    interleaving = Interleaving(reference, candidate, found.notes)
    here_flows, there_flows = Dataflows(reference), Dataflows(candidate)
    for frame, other in _frames(here, there):
        ours, theirs = _in_order(here[frame]), _in_order(there[other])
        anchors = _anchors(links.get(frame, ()))
        mapped = _anchors(pair for pair in links.get(frame, ()) if pair.by == "map")
        if not mapped and not _could_gain(ours, theirs, free, anchors):
            continue
        a, b = calls_of(ours), calls_of(theirs)
        _as_said(same_class, a, b)
        outline = (_names(a), _names(b), tuple(anchors.items()))
        flows = here_flows.of(frame, a, outline), there_flows.of(other, b, outline)
        tell_by_dataflow(a, flows[0])
        tell_by_dataflow(b, flows[1])
        tell_elementwise(a, b, flows)
        for side, other_side in ((a, b), (b, a)):
            if not any(call.class_name.startswith("Elewise") for call in other_side):
                with_bias(side)
        if outline not in solved:
            solved[outline] = _solve(a, b, anchors, looks)
            found.notes.extend(solved[outline].notes)
        for both in pair_rest(mapped, a, b, free):
            found.pairs.append(Pair(*both, "structure", WEIGHTS))
            free.difference_update(map(id, both))
        _pair_up(solved[outline], a, b, anchors, free, found, flows, interleaving)
    found.pairs.sort(key=lambda pair: pair.reference.order)
    return found


def _as_said(same_class: Sequence[tuple[str, str]], ours: list[Call], theirs: list[Call]) -> None:
    """Give leaves of classes that were mapped to each other one kind, if both sides have them."""
    for number, words in enumerate(same_class):
        sides = [
            [call for call in side if call.leaf and any(word in call.class_name for word in words)]
            for side in (ours, theirs)
        ]
        if all(sides):
            for call in (*sides[0], *sides[1]):
                call.kind = f"{MAPPED} {number}"


def _frames(here: Iterable[Frame], there: Iterable[Frame]) -> list[tuple[Frame, Frame]]:
    ours, theirs = list(here), set(there)
    common = [(frame, frame) for frame in ours if frame in theirs]
    if not common and len(ours) == len(theirs) == 1:
        return [(ours[0], theirs.pop())]
    return common


def _could_gain(
    ours: Iterable[Record], theirs: Iterable[Record], free: set[int], anchors: Mapping[_Name, _Name]
) -> bool:
    """Whether both sides have sites without a partner, with tensors of a common port left over.

    Spares the work where names have paired all sites and only single tensors are alone.
    """
    sides = (ours, set(anchors)), (theirs, set(anchors.values()))
    alone = [
        {r.key.port for r in side if id(r) in free and (r.key.site, r.key.visit) not in known}
        for side, known in sides
    ]
    return bool(alone[0] & alone[1])


def _in_order(records: list[Record]) -> list[Record]:
    return sorted(records, key=lambda record: record.order)


def _names(calls: Iterable[Call]) -> tuple[_Name, ...]:
    return tuple((call.site, call.visit) for call in calls)


def _anchors(pairs: Iterable[Pair]) -> dict[_Name, _Name]:
    found: dict[_Name, _Name] = {}
    for pair in pairs:
        ours, theirs = pair.reference.key, pair.candidate.key
        found.setdefault((ours.site, ours.visit), (theirs.site, theirs.visit))
    return found


def _solve(
    ours: list[Call], theirs: list[Call], anchors: Mapping[_Name, _Name], looks: Fingerprints
) -> _Solution:
    names_there = {(call.site, call.visit): call for call in theirs}
    fixed = [
        (call, names_there[partner])
        for call in ours
        if (partner := anchors.get((call.site, call.visit))) in names_there
    ]
    taken = {id(call) for pair in fixed for call in pair}

    def alike(one: Call, other: Call) -> bool:
        return looks.alike(main_tensor(one.records, "output"), main_tensor(other.records, "output"))

    a, b = ([call for call in side if call.leaf] for side in (ours, theirs))
    if all(any(call.called for call in side) for side in (a, b)):
        a, b = ([call for call in side if call.called] for side in (a, b))
    a, b = in_family_order(a), in_family_order(b)
    a, b = fuse_alike(a, b, taken)
    solution = _Solution([], {}, {}, [])
    leaves = link_leaves(a, b, [pair for pair in fixed if pair[0].leaf and pair[1].leaf], alike)
    links = list(leaves.links)
    solution.notes.extend(leaves.notes)
    inside = _inner(ours), _inner(theirs)
    for link in list(links):  # inside what counts as one: an adapted Linear, an operation's kernels
        links += _inside(link, inside)
    marks_here, marks_there = _marks(fixed, links)
    here, there = Tree(ours, marks_here), Tree(theirs, marks_there)
    found, ties = link_containers(here, there, taken)
    links += found
    links += [
        link
        for link in link_across(here, there, a, b)
        if id(link.ours) not in taken and id(link.theirs) not in taken
    ]
    linked = {id(call) for link in links for call in (link.ours, link.theirs)} | taken
    links += link_uncalled(
        [call for call in ours if id(call) not in linked],
        [call for call in theirs if id(call) not in linked],
        [*fixed, *((link.ours, link.theirs) for link in links)],
    )
    for link in links:
        sure = link.confidence if is_certain(link.ours) and is_certain(link.theirs) else 0.7
        name = (link.ours.site, link.ours.visit), (link.theirs.site, link.theirs.visit)
        parts = _names(link.ours.parts), _names(link.theirs.parts)
        solution.links.append((*name, *parts, min(sure, link.confidence)))
    _explain(solution.why_here, ours, theirs, "candidate", {**leaves.ties_here, **ties})
    _explain(solution.why_there, theirs, ours, "reference", {**leaves.ties_there, **ties})
    return solution


def _inner(calls: Iterable[Call]) -> _Inner:
    """What stands inside calls that count as one, by the site around it and the visit."""
    found: _Inner = {}
    for call in calls:
        if call.inner:
            for site in enclosing(call.site):
                found.setdefault((site, call.visit), []).append(call)
    return found


def _inside(link: Link, inside: tuple[_Inner, _Inner]) -> list[Link]:
    here = inside[0].get((link.ours.site, link.ours.visit), [])
    there = inside[1].get((link.theirs.site, link.theirs.visit), [])
    if len(here) != len(there) or not here or link.ours.parts or link.theirs.parts:
        return []
    same = all(
        a.kind == b.kind and a.features == b.features for a, b in zip(here, there, strict=True)
    )
    pairs = zip(here, there, strict=True)
    return [Link(a, b, link.confidence) for a, b in pairs] if same else []


def _marks(
    fixed: Sequence[tuple[Call, Call]], links: Sequence[Link]
) -> tuple[dict[int, frozenset[int]], dict[int, frozenset[int]]]:
    """Numbers for what is linked; a fused call has those of all its parts."""
    here: dict[int, frozenset[int]] = {}
    there: dict[int, frozenset[int]] = {}
    number = 0
    for ours, theirs in (*fixed, *((link.ours, link.theirs) for link in links)):
        if ours.leaf and theirs.leaf:
            mine, others = ours.parts or (ours,), theirs.parts or (theirs,)
            many = range(number, number + max(len(mine), len(others)))
            number += len(many)
            for side, calls, whole in ((here, mine, ours), (there, others, theirs)):
                side[id(whole)] = frozenset(many)
                for place, call in enumerate(calls):
                    side[id(call)] = frozenset(many if len(calls) == 1 else (many[place],))
    return here, there


def _explain(
    why: dict[_Name, str],
    calls: Sequence[Call],
    others: Sequence[Call],
    side: str,
    ties: Mapping[int, list[Call]],
) -> None:
    """A reason for every call, used only for those that stay alone."""
    classes = Counter(call.class_name for call in others)
    kinds = {call.kind for call in others}
    for call in calls:
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
    ours: list[Call],
    theirs: list[Call],
    anchors: Mapping[_Name, _Name],
    free: set[int],
    found: Concluded,
    flows: tuple[Dataflow, Dataflow],
    interleaving: Interleaving,
) -> None:
    first = len(found.pairs)
    inside: HandedOn | None = None
    here = {(call.site, call.visit): call for call in ours}
    there = {(call.site, call.visit): call for call in theirs}
    linked: dict[tuple[str, _Name], str] = {}
    for name, partner in anchors.items():
        linked["reference", name] = partner[0]
        linked["candidate", partner] = name[0]
    # Leaves first: what a container hands on goes as they go.
    ordered = sorted(solution.links, key=lambda link: not here[link[0]].leaf)
    for name, partner, parts, other_parts, confidence in ordered:
        one, other = here[name], there[partner]
        linked["reference", name] = partner[0]
        linked["candidate", partner] = name[0]
        if parts or other_parts:
            members = [here[part] for part in parts] or [there[part] for part in other_parts]
            side = "reference" if parts else "candidate"
            trouble = pair_parts(
                other if parts else one,
                members,
                bool(parts),
                confidence,
                found.pairs,
                (here, there),
                interleaving,
            )
            for member in members:
                place = (member.site, member.visit)
                linked[side, place] = (other if parts else one).site
                if trouble:
                    (solution.why_here if parts else solution.why_there)[place] = trouble
            continue
        told: set[int] = set()
        if not one.leaf and not other.leaf:
            inside = inside or HandedOn(found.pairs[first:], *flows)
            handed, told = inside.pairs_of(one, other, free, confidence)
            found.pairs.extend(handed)
        elif one.layout != other.layout and (parted := pair_relaid(one, other, confidence)):
            found.pairs.extend(parted)
            told = {id(record) for pair in parted for record in pair.records}
        mine = [r for r in one.records if id(r) in free and id(r) not in told]
        others = [r for r in other.records if id(r) in free and id(r) not in told]
        both = pair_tensors(mine, others)
        for record, match in both:
            found.pairs.append(Pair(record, match, "structure", confidence))
        used = {id(record) for pair in both for record in pair}
        mine = [record for record in mine if id(record) not in used]
        others = [record for record in others if id(record) not in used]
        for record, match in pair_weights(mine, others) if one.leaf and other.leaf else ():
            found.pairs.append(Pair(record, match, "structure", min(confidence, WEIGHTS)))
        used = {id(record) for record in (*mine, *others)}
        for record, match in pair_codes(one, other, used):
            found.pairs.append(Pair(record, match, "structure", min(confidence, WEIGHTS)))
    partners = _partners(solution, anchors, here, there)
    used = {id(record) for pair in found.pairs for record in pair.records}
    for made, read in pair_read(ours, partners[0], free - used):
        found.pairs.append(Pair(made, read, "structure", READ))
    for made, read in pair_read(theirs, partners[1], free - used):
        found.pairs.append(Pair(read, made, "structure", READ))
    paired = {id(record) for pair in found.pairs for record in pair.records}
    for side, calls, why in (
        ("reference", ours, solution.why_here),
        ("candidate", theirs, solution.why_there),
    ):
        for call in calls:
            name = (call.site, call.visit)
            for record in call.records:
                if id(record) in free and id(record) not in paired:
                    partner = linked.get((side, name))
                    reason = (
                        f"its site goes with '{partner}', which has none that is surely the same"
                    )
                    found.reasons[side, record.key] = reason if partner else why[name]


def _partners(
    solution: _Solution,
    anchors: Mapping[_Name, _Name],
    here: Mapping[_Name, Call],
    there: Mapping[_Name, Call],
) -> tuple[dict[_Name, Call], dict[_Name, Call]]:
    """Who goes with whom, seen from either side."""
    pairs = [*anchors.items(), *((link[0], link[1]) for link in solution.links)]
    ours = {name: there[partner] for name, partner in pairs if partner in there}
    theirs = {partner: here[name] for name, partner in pairs if name in here}
    return ours, theirs
