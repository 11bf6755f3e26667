"""Structure: pairs for tensors whose names do not agree, by class, shape and execution order.

The rule works frame by frame (one step of one process): leaves are aligned as a sequence,
containers by the leaves they hold, then the tensors of linked sites are paired. Pairs of stronger
rules stay, and anchor the alignment. A wrong pair is worse than none: a site without a unique
partner stays unpaired, with a reason.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from driftline.alignment.plan import Pair, Plan, execution
from driftline.alignment.rules.accidental_names import in_doubt, still_alone
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
from driftline.alignment.rules.maps import mapped_classes
from driftline.alignment.rules.same_value import ForwardedInputs
from driftline.alignment.sites.kinds import MAPPED, is_known
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
from driftline.errors import DriftlineError
from driftline.numerics import kernel
from driftline.numerics.dtypes import DTYPES
from driftline.numerics.fields import Summary
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run

if TYPE_CHECKING:
    from driftline.alignment.align import Context

# Relative difference that counts as close: wider than the noise of half precision.
_CLOSE = 0.02
_LARGEST = 1 << 26
"""Largest number of elements of a tensor that is read to break a tie; larger tensors break none."""

Reasons = dict[tuple[str, TensorKey], str]
_Name = tuple[str, int]
_Inner = dict[_Name, list[Call]]


class Conclusion(NamedTuple):
    """The result of the rule: new pairs, reasons for unpaired tensors, and notes."""

    pairs: list[Pair]
    reasons: Reasons
    notes: list[str]


class _NamedLink(NamedTuple):
    """A link by names; the parts are the members of a fused family on that side, or empty."""

    name: _Name
    partner: _Name
    parts: tuple[_Name, ...]
    partner_parts: tuple[_Name, ...]
    confidence: float


class _Solution(NamedTuple):
    """Links between two frames by name, so that they apply to every frame with the same calls."""

    links: list[_NamedLink]
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
    """Pair tensors that stronger rules left unpaired.

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
    # Existing pairs anchor the order inside their own frame.
    links: dict[Frame, list[Pair]] = {}
    for pair in paired:
        key = pair.reference.key
        links.setdefault(Frame(key.rank, key.process, key.step), []).append(pair)
    # Steps of one run repeat the same calls, so the alignment is computed once per distinct
    # sequence.
    solved: dict[object, _Solution] = {}
    # Records are compared by identity, because both runs may have equal keys.
    free = {id(record) for record in (*missing, *extra)}
    fingerprints = Fingerprints(reference, candidate)
    interleaving = Interleaving(reference, candidate, conclusion.notes)
    reference_flows, candidate_flows = Dataflows(reference), Dataflows(candidate)
    by_kind = any(run.facts.order == "registration" for run in (reference, candidate))
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
        # Roles by dataflow come before matching, because unnamed q, k and v have equal shapes.
        infer_roles(a, flows[0])
        infer_roles(b, flows[1])
        infer_elementwise_kinds(a, b, flows)
        # A bias that one library adds by a separate operator is part of a Linear elsewhere. If the
        # other side has such operators too, they pair with each other.
        for side, other_side in ((a, b), (b, a)):
            if not any(call.class_name.startswith("Elewise") for call in other_side):
                with_bias(side)
        if outline not in solved:
            solved[outline] = _solve(a, b, anchors, fingerprints, by_kind=by_kind)
            conclusion.notes.extend(solved[outline].notes)
        for rest_pair in pair_rest(mapped, a, b, free):
            conclusion.pairs.append(Pair(*rest_pair, "structure", WEIGHTS))
            free.difference_update(map(id, rest_pair))
        tensors = _FrameTensors((a, b), anchors, free, flows, interleaving)
        tensors.pair(solved[outline])
        conclusion.pairs.extend(tensors.pairs)
        used = {id(record) for pair in tensors.pairs for record in pair.records}
        conclusion.reasons.update(tensors.reasons(solved[outline], used))
    conclusion.pairs.sort(key=lambda pair: pair.reference.order)
    return conclusion


def _apply_class_map(
    same_class: Sequence[tuple[str, str]], reference: list[Call], candidate: list[Call]
) -> None:
    """Give leaves of mapped classes the same kind, if both sides have such leaves."""
    for number, words in enumerate(same_class):
        # A class map of the user overrides the kinds of classes.
        sides = [
            [call for call in side if call.leaf and any(word in call.class_name for word in words)]
            for side in (reference, candidate)
        ]
        # Classes that already have the same kind need no map; a new kind would separate them from
        # other classes of that kind.
        kinds = {call.kind for side in sides for call in side}
        if all(sides) and len(kinds) > 1:
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

    This skips the work if names have paired all sites and only single tensors are left.
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
    reference: list[Call],
    candidate: list[Call],
    anchors: Mapping[_Name, _Name],
    fingerprints: Fingerprints,
    *,
    by_kind: bool = False,
) -> _Solution:
    """Link the calls of two frames: leaves, then containers, then sites without a call."""
    by_name = {(call.site, call.visit): call for call in candidate}
    fixed = [
        (call, by_name[partner])
        for call in reference
        if (partner := anchors.get((call.site, call.visit))) in by_name
    ]
    paired = {id(call) for pair in fixed for call in pair}

    def alike(call: Call, other: Call) -> bool:
        return fingerprints.alike(
            main_tensor(call.records, "output"), main_tensor(other.records, "output")
        )

    sequences = _leaf_sequences(reference, candidate, paired)
    if by_kind:
        # Modules in registration order: only those of one kind are in the order of their calls.
        sequences = _sorted_by_kind(sequences[0]), _sorted_by_kind(sequences[1])
    anchored = [pair for pair in fixed if pair[0].leaf and pair[1].leaf]
    leaves = link_leaves(*sequences, anchored, alike)
    links = list(leaves.links)
    inside = _inner(reference), _inner(candidate)
    for link in leaves.links:  # calls inside a linked leaf: an adapted Linear, kernels
        links += _inside(link, inside)
    # Containers are matched by the leaves they hold, so leaves must be linked first.
    marks = _marks(fixed, links)
    trees = Tree(reference, marks[0]), Tree(candidate, marks[1])
    container_links, ties = link_containers(*trees, paired)
    links += container_links
    links += [
        link
        for link in link_across(*trees, *sequences)
        if id(link.reference) not in paired and id(link.candidate) not in paired
    ]
    linked = {id(call) for link in links for call in (link.reference, link.candidate)} | paired
    # Parameters without a call come last, because the linked sites around them identify them.
    links += link_uncalled(
        [call for call in reference if id(call) not in linked],
        [call for call in candidate if id(call) not in linked],
        [*fixed, *((link.reference, link.candidate) for link in links)],
    )
    solution = _Solution([_named_link(link) for link in links], {}, {}, list(leaves.notes))
    reference_ties = {**leaves.reference_ties, **ties}
    _explain(solution.reference_reasons, reference, candidate, "candidate", reference_ties)
    candidate_ties = {**leaves.candidate_ties, **ties}
    _explain(solution.candidate_reasons, candidate, reference, "reference", candidate_ties)
    return solution


def _leaf_sequences(
    reference: list[Call], candidate: list[Call], paired: set[int]
) -> tuple[list[Call], list[Call]]:
    """The leaves of both sides in comparable order, with families fused in the same way."""
    sides = [[call for call in side if call.leaf] for side in (reference, candidate)]
    # If calls were recorded, sites that only hold parameters are not part of the sequence.
    if all(any(call.called for call in side) for side in sides):
        sides = [[call for call in side if call.called] for side in sides]
    # Fuse before aligning, so that both sequences have the same units.
    return fuse_alike(in_family_order(sides[0]), in_family_order(sides[1]), paired)


def _sorted_by_kind(calls: Sequence[Call]) -> list[Call]:
    """Calls grouped by kind, in their order; all norms are one kind, unknown kinds come last."""
    return sorted(calls, key=lambda call: (not is_known(call.kind), call.kind.partition(".")[0]))


def _named_link(link: Link) -> _NamedLink:
    own, other = link.reference, link.candidate
    # If only their order distinguishes the members of a family, it is less certain than its link.
    sure = link.confidence if is_certain(own) and is_certain(other) else 0.7
    return _NamedLink(
        (own.site, own.visit),
        (other.site, other.visit),
        _names(own.parts),
        _names(other.parts),
        min(sure, link.confidence),
    )


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
            # A fused call has the marks of all its members, so that a container holds "the same
            # leaves" on both sides even if only one of them is fused.
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
        # Ties are the most useful reason, because they name what the user can decide with --map.
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


class _FrameTensors:
    """Pairs the tensors of the linked calls of one frame.

    Args:
        sides: The calls of the reference and of the candidate.
        anchors: Names of calls that stronger rules have paired.
        free: ids of the records without a partner.
        flows: The dataflow of both sides.
        interleaving: How fused projections are laid out.
    """

    def __init__(
        self,
        sides: tuple[list[Call], list[Call]],
        anchors: Mapping[_Name, _Name],
        free: set[int],
        flows: tuple[Dataflow, Dataflow],
        interleaving: Interleaving,
    ) -> None:
        self.pairs: list[Pair] = []
        self._sides = sides
        self._calls = tuple({(c.site, c.visit): c for c in side} for side in sides)
        self._anchors = anchors
        self._free = free
        self._flows = flows
        self._interleaving = interleaving
        self._forwarded: ForwardedInputs | None = None
        self._linked: dict[tuple[str, _Name], str] = {}
        for name, partner in anchors.items():
            self._link(name, partner)

    def _link(self, name: _Name, partner: _Name) -> None:
        self._linked["reference", name] = partner[0]
        self._linked["candidate", partner] = name[0]

    def pair(self, solution: _Solution) -> None:
        """Pair the tensors of all links; reasons of uncut families are added to the solution."""
        # Leaves first: inputs that a container passes on are paired like those of its leaves.
        for link in sorted(solution.links, key=lambda link: not self._calls[0][link.name].leaf):
            self._link(link.name, link.partner)
            if link.parts or link.partner_parts:
                self._pair_family(link, solution)
            else:
                self._pair_calls(link)
        partners = _partners(solution, self._anchors, *self._calls)
        rest = self._free - self._used()
        for made, read in pair_read(self._sides[0], partners[0], rest):
            self.pairs.append(Pair(made, read, "structure", READ))
        for made, read in pair_read(self._sides[1], partners[1], rest):
            self.pairs.append(Pair(read, made, "structure", READ))

    def _used(self) -> set[int]:
        return {id(record) for pair in self.pairs for record in pair.records}

    def _pair_family(self, link: _NamedLink, solution: _Solution) -> None:
        """Pair a fused site with the members of the family on the other side."""
        in_reference = bool(link.parts)
        own, others = self._calls if in_reference else self._calls[::-1]
        members = [own[part] for part in link.parts or link.partner_parts]
        fused = others[link.partner if in_reference else link.name]
        trouble = pair_parts(
            fused,
            members,
            in_reference,
            link.confidence,
            self.pairs,
            (self._calls[0], self._calls[1]),
            self._interleaving,
        )
        side = "reference" if in_reference else "candidate"
        reasons = solution.reference_reasons if in_reference else solution.candidate_reasons
        for member in members:
            name = (member.site, member.visit)
            self._linked[side, name] = fused.site
            if trouble:
                reasons[name] = trouble

    def _pair_calls(self, link: _NamedLink) -> None:
        """Pair the tensors of two calls, from the most certain evidence to the least."""
        call, other = self._calls[0][link.name], self._calls[1][link.partner]
        covered: set[int] = set()
        if not call.leaf and not other.leaf:
            # Built once, when all leaves are paired, because containers come after them.
            self._forwarded = self._forwarded or ForwardedInputs(self.pairs, *self._flows)
            new, covered = self._forwarded.pairs_of(call, other, self._free, link.confidence)
            self.pairs.extend(new)
        elif call.layout != other.layout:
            new = pair_reordered(call, other, link.confidence)
            self.pairs.extend(new)
            covered = {id(record) for pair in new for record in pair.records}
        own = [r for r in call.records if id(r) in self._free and id(r) not in covered]
        others = [r for r in other.records if id(r) in self._free and id(r) not in covered]
        tensor_pairs = pair_tensors(own, others)
        self._add(tensor_pairs, link.confidence)
        used = {id(record) for pair in tensor_pairs for record in pair}
        own = [record for record in own if id(record) not in used]
        others = [record for record in others if id(record) not in used]
        confidence = min(link.confidence, WEIGHTS)
        if call.leaf and other.leaf:
            self._add(pair_weights(own, others), confidence)
        self._add(pair_codes(call, other, {id(r) for r in (*own, *others)}), confidence)

    def _add(self, pairs: Iterable[tuple[Record, Record]], confidence: float) -> None:
        self.pairs.extend(Pair(*pair, "structure", confidence) for pair in pairs)

    def reasons(self, solution: _Solution, paired: set[int]) -> Reasons:
        """Why the remaining tensors of the frame have no partner."""
        reasons: Reasons = {}
        for side, calls, why in (
            ("reference", self._sides[0], solution.reference_reasons),
            ("candidate", self._sides[1], solution.candidate_reasons),
        ):
            for call in calls:
                name = (call.site, call.visit)
                partner = self._linked.get((side, name))
                for record in call.records:
                    if id(record) not in self._free or id(record) in paired:
                        continue
                    reasons[side, record.key] = (
                        f"its site goes with '{partner}', which has none that is surely the same"
                        if partner
                        else why[name]
                    )
        return reasons


def _partners(
    solution: _Solution,
    anchors: Mapping[_Name, _Name],
    reference_calls: Mapping[_Name, Call],
    candidate_calls: Mapping[_Name, Call],
) -> tuple[dict[_Name, Call], dict[_Name, Call]]:
    """Partner calls by name, for either side."""
    pairs = [*anchors.items(), *((link.name, link.partner) for link in solution.links)]
    of_reference = {
        name: candidate_calls[partner] for name, partner in pairs if partner in candidate_calls
    }
    of_candidate = {
        partner: reference_calls[name] for name, partner in pairs if name in reference_calls
    }
    return of_reference, of_candidate


class Fingerprints:
    """Summaries of the tensors of two runs; each is read or computed once.

    They show whether two tensors are close in norm, minimum and maximum. They are used only if
    order and shape leave a tie. If they decided more, they would hide the faults that the
    comparison looks for: a swapped q and k have each other's values. They never override structure.
    """

    def __init__(self, reference: Run, candidate: Run) -> None:
        self._runs = (reference, candidate)
        self._summaries: dict[tuple[int, int], Summary | None] = {}

    def alike(self, reference: Record | None, candidate: Record | None) -> bool:
        """Whether two tensors are equal or close; False if their values are unknown."""
        if reference is None or candidate is None:
            return False
        # Equal digests need no values. The type must be equal too, because a digest is of bytes.
        if (
            reference.digest
            and reference.digest == candidate.digest
            and reference.dtype == candidate.dtype
        ):
            return True
        reference_summary, candidate_summary = (
            self._summary(0, reference),
            self._summary(1, candidate),
        )
        if reference_summary is None or candidate_summary is None:
            return False
        scale = max(abs(reference_summary.l2), abs(candidate_summary.l2))
        # A norm that contains a NaN or an infinity says nothing about the other tensor.
        if not math.isfinite(scale):
            return False
        return (
            abs(reference_summary.l2 - candidate_summary.l2) <= _CLOSE * scale
            and _near(reference_summary.min, candidate_summary.min, scale)
            and _near(reference_summary.max, candidate_summary.max, scale)
        )

    def _summary(self, side: int, record: Record) -> Summary | None:
        if record.summary is not None:
            return record.summary
        # By identity, which is cheaper than hashing a key of nine fields.
        place = (side, id(record))
        if place not in self._summaries:
            self._summaries[place] = self._read(self._runs[side], record)
        return self._summaries[place]

    def _read(self, run: Run, record: Record) -> Summary | None:
        count = math.prod(record.shape)
        if record.kept != "full" or record.dtype not in DTYPES or not 0 < count <= _LARGEST:
            return None
        try:
            return kernel.summarize(run.raw(record), DTYPES[record.dtype], count=count)
        except (DriftlineError, OSError, ValueError):
            return None  # an unreadable tensor breaks no tie; comparing it will report the reason


def _near(reference: float, candidate: float, scale: float) -> bool:
    return abs(reference - candidate) <= _CLOSE * max(abs(reference), abs(candidate), scale * 1e-3)


def by_structure(plan: Plan, context: Context) -> Plan:
    """Pairs by class, shape and execution order."""
    # Names may agree by accident: such pairs are released, and structure decides them again.
    doubted = in_doubt(plan.pairs, plan.missing, plan.extra)
    if not doubted and not (plan.missing and plan.extra):
        return plan
    if doubted:
        loose = {id(pair) for pair in doubted}
        kept = tuple(pair for pair in plan.pairs if id(pair) not in loose)
        missing = sorted([*plan.missing, *(pair.reference for pair in doubted)], key=execution)
        extra = sorted([*plan.extra, *(pair.candidate for pair in doubted)], key=execution)
        plan = plan._replace(pairs=kept, missing=tuple(missing), extra=tuple(extra))
    structural = align_by_structure(
        context.reference,
        context.candidate,
        plan.pairs,
        plan.missing,
        plan.extra,
        mapped_classes(context.options.mapping_file),
    )
    again = still_alone(doubted, structural.pairs)
    notes = structural.notes
    # Released pairs that structure has not made again were accidental; a note tells the user which
    # rule decided.
    moved = {(p.reference.key.site, p.candidate.key.site) for p in doubted}
    moved -= {(p.reference.key.site, p.candidate.key.site) for p in (*again, *structural.pairs)}
    if moved:
        notes = [
            *notes,
            f"the names of {len(moved)} sites agree by accident (such as '{min(moved)[0]}'): they "
            "do other work or are in another place, so structure decides; --map overrides it",
        ]
    plan = plan.with_pairs([*structural.pairs, *again])
    # Steps that only one side has say nothing about the models.
    steps = {pair.reference.key.step for pair in plan.pairs}
    other_steps = {pair.candidate.key.step for pair in plan.pairs}
    least, most = sorted(
        (
            sum(record.key.step in steps for record in plan.missing),
            sum(record.key.step in other_steps for record in plan.extra),
        )
    )
    # If unpaired tensors are at least half as many as pairs, these are more likely two models than
    # two runs of one model.
    if 2 * least > len(plan.pairs) > 0:
        notes = [
            *notes,
            f"many tensors have no partner ({least} and {most} on the two sides, {len(plan.pairs)} "
            "pairs): are these runs of one model?",
        ]
    # A reason is kept only for a tensor that is still unpaired after the released pairs came back.
    reasons = {
        (side, record.key): structural.reasons[side, record.key]
        for side, records in plan.unpaired()
        for record in records
        if (side, record.key) in structural.reasons
    }
    return plan._replace(reasons=reasons, notes=(*plan.notes, *notes))
