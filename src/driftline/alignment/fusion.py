"""One site on one side, several on the other: qkv against q, k and v; gate_up against gate and up.

Finds the families (projections of one tensor) that the other side has as one site, and says which
part of the fused tensor each member is. Knows shapes, roles and digests; carries nothing out.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from driftline.alignment.calls import Call, main_tensor
from driftline.alignment.classes import OWN_LAYOUT, PER_HEAD, ROLE_ORDER, TRANSPOSED
from driftline.alignment.recipe import Recipe, Step
from driftline.runs.record import Record


class Part(NamedTuple):
    """A pair that a fused site has a share in; recipes are None for what is taken as it is."""

    fused: Record
    member: Record
    fused_recipe: Recipe | None
    member_recipe: Recipe | None


_Family = tuple[Call, ...]
_FAMILIES = (ROLE_ORDER[:3], ROLE_ORDER[3:])
_Type = tuple[int, tuple[int, ...]]
_Places = tuple[int, int, tuple[int, ...]]
"""Which of the parts, how many heads (or groups of them), and the sizes of all parts."""


def in_family_order(leaves: Sequence[Call]) -> list[Call]:
    """Leaves with the members of each family side by side, in the order of their roles.

    Who calls `up` before `gate`, or the activation between the two, computes the same.
    """
    placed: set[int] = set()
    ordered: list[Call] = []
    families = _families(leaves)
    _tell_gates(leaves, families)
    by_first = {id(family[0]): family for family in families}
    for call in leaves:
        if id(call) in placed:
            continue
        family = by_first.get(id(call), (call,))
        placed.update(map(id, family))
        ordered.extend(_by_role(family))
    return ordered


def _tell_gates(leaves: Sequence[Call], families: Sequence[_Family]) -> None:
    """Of two projections that no name tells apart, the one that feeds an activation is the gate."""
    activated = {call.fed_by for call in leaves if call.kind == "activation" and call.fed_by}
    for family in families:
        if len(family) != 2 or any(call.role for call in family) or not family[0].fed_by:
            continue
        gates = [call for call in family if call.makes in activated]
        if len(gates) == 1 and family[0].features == family[1].features:
            for call in family:
                call.role = "gate" if call is gates[0] else "up"


def fuse_alike(
    ours: list[Call], theirs: list[Call], taken: set[int]
) -> tuple[list[Call], list[Call]]:
    """Both sequences, with the families that the other side has as one site made one.

    Args:
        ours: Leaves of the reference.
        theirs: Leaves of the candidate.
        taken: What is paired already and stays as it is.
    """
    free = [[call for call in side if id(call) not in taken] for side in (ours, theirs)]
    fuse_here = _to_fuse(free[0], free[1])
    fuse_there = _to_fuse(free[1], free[0])
    return _fused(ours, fuse_here), _fused(theirs, fuse_there)


def is_certain(call: Call) -> bool:
    """Whether it is known which member of a family is which: by roles, or by sizes."""
    if not call.parts:
        return True
    roles = [part.role for part in call.parts]
    sizes = [part.features for part in call.parts]
    return (all(roles) and len(set(roles)) == len(roles)) or len(set(sizes)) == len(sizes)


def _families(leaves: Sequence[Call]) -> list[_Family]:
    """Projections of one tensor: same digest of the input, or roles that say so."""
    groups: dict[object, list[Call]] = defaultdict(list)
    for call in leaves:
        if call.kind != "linear":
            continue
        if call.fed_by:
            groups[call.fed_by].append(call)
        elif call.role:
            which = "qkv" if call.role in "qkv" else "mlp"
            groups[_holder(call.site), call.visit, which].append(call)
    return [tuple(group) for group in groups.values() if len(group) > 1]


def _holder(site: str) -> str:
    """The module that holds a projection, through wrappers of its own (`attn.q.linear`)."""
    head, _, _ = site.rpartition(".")
    return head


def _by_role(family: _Family) -> _Family:
    roles = [call.role for call in family if call.role]
    if not roles or len(set(roles)) < len(roles):
        return family
    if len(roles) == len(family):
        return tuple(sorted(family, key=lambda call: ROLE_ORDER.index(call.role)))
    # Those that nothing tells apart take the places that are left, in the order they were called.
    every = next((of for of in _FAMILIES if len(of) == len(family) and set(roles) <= set(of)), ())
    known = {call.role: call for call in family if call.role}
    rest = (call for call in family if not call.role)
    return tuple(known.get(role) or next(rest) for role in every) or family


def _type(family: _Family) -> _Type:
    return (family[0].width, tuple(call.features for call in family))


def _shares(leaves: Sequence[Call]) -> list[_Family]:
    """Every two or three neighbours of a family that could be one site elsewhere."""
    found: list[_Family] = []
    for family in _families(leaves):
        members = _by_role(family)
        for size in (3, 2):
            found += [members[at : at + size] for at in range(len(members) - size + 1)]
    return found


def _to_fuse(split: list[Call], fused: list[Call]) -> list[_Family]:
    """The families of one side that stand against single sites of the other."""
    shares = _shares(split)
    if not shares:
        return []
    # Widths are not known where inputs were not kept.
    kept = all(call.width >= 0 for call in (*split, *fused) if call.kind == "linear")

    def look(width: int, features: int) -> tuple[int, int]:
        return (width if kept else -1, features)

    singles_here = Counter(look(c.width, c.features) for c in split if c.kind == "linear")
    singles_there = Counter(look(c.width, c.features) for c in fused if c.kind == "linear")
    types_here = Counter(map(_type, shares))
    types_there = Counter(map(_type, _shares(fused)))
    chosen: list[_Family] = []
    taken: set[int] = set()
    for share in shares:
        kind = _type(share)
        whole = look(kind[0], sum(kind[1]))
        if types_there[kind] >= types_here[kind] or singles_there[whole] <= singles_here[whole]:
            continue
        if not taken.intersection(map(id, share)):
            chosen.append(share)
            taken.update(map(id, share))
    return chosen


def _fused(leaves: list[Call], families: list[_Family]) -> list[Call]:
    if not families:
        return leaves
    first = {id(min(family, key=lambda call: call.order)): family for family in families}
    members = {id(call) for family in families for call in family}
    result: list[Call] = []
    for call in leaves:
        if (family := first.get(id(call))) is not None:
            result.append(_as_one(family))
        elif id(call) not in members:
            result.append(call)
    return result


def _as_one(family: _Family) -> Call:
    lead = min(family, key=lambda call: call.order)
    whole = Call(lead.site, lead.visit, lead.records)
    whole.parts = family
    whole.role = ""
    whole.kind = "linear"
    whole.makes = ""
    if lead.out is not None:
        whole.out = (*lead.out[:-1], sum(call.features for call in family))
    return whole


def parts_of(
    fused: Call, members: Sequence[Call], heads: int | None, holder: str = ""
) -> tuple[list[Part], str]:
    """Which part of a fused site's tensors each member's are; and why not, if they cannot be told.

    Args:
        fused: The one site.
        members: The several, in the order their parts lie in the fused tensor.
        heads: Number of attention heads where the parts go head by head, if it is known.
        holder: Class of the module around the fused site.
    """
    if len(members) == 3 and holder.startswith(OWN_LAYOUT):
        return [], f"the qkv of {holder} lies in an order of its own; a plan can say which"
    same_size = len({member.features for member in members}) == 1  # else the keys are shared
    interleaved = len(members) == 3 and heads is not None
    sizes = tuple(member.features for member in members)
    if len(members) == 3 and same_size and holder.startswith(PER_HEAD) and heads is None:
        return [], f"the qkv of {holder} goes head by head, and the number of heads is not known"
    spans = _spans(fused, members)
    if not spans:
        shown = ", ".join(f"{role} {start}:{stop}" for role, start, stop in fused.layout)
        return [], f"'{fused.site}' is cut into {shown}, and nothing says which part is which"
    found: list[Part] = []
    for which, (member, span) in enumerate(zip(members, spans, strict=True)):
        places = None if heads is None or not interleaved else (which, heads, sizes)
        for record in fused.records:
            if (operand := _operand(record, fused, member, span, places)) is not None:
                found.append(operand)
                continue
            partner = like_of(record, member.records)
            if partner is None:
                continue
            if record.key.port == "grad_input":  # of what all of them read: their shares add up
                if which == 0 and (share := _added_up(record, members)) is not None:
                    found.append(Part(record, partner, None, share))
                continue
            axis = _split_axis(record, fused)
            if axis is None or record.shape[axis] != fused.features:
                if axis is None:
                    found.append(Part(record, partner, None, None))
                continue
            if places is not None:
                step = _per_head(axis, *places)
            else:
                step = Step("split", axis, *span)
            shape = (*record.shape[:axis], member.features, *record.shape[axis + 1 :])
            found.append(Part(record, partner, Recipe((record,), (step,), shape), None))
    return found, ""


def _spans(fused: Call, members: Sequence[Call]) -> list[tuple[int, int]]:
    """Which columns each member has: as the dataflow cuts them, else one after the other.

    Empty where what is cut is not what the members are.
    """
    known = {role: (start, stop) for role, start, stop in fused.layout}
    ends = [0, *itertools.accumulate(member.features for member in members)]
    plain = list(itertools.pairwise(ends))
    told = [
        (known[m.role], span) for m, span in zip(members, plain, strict=True) if m.role in known
    ]
    in_order = list(known) == sorted(known, key=ROLE_ORDER.index)
    if all(span == usual for span, usual in told) and (told or in_order):
        return plain
    gaps = gaps_of(fused)
    if len(told) < len(members) and not (len(told) == len(members) - 1 and len(gaps) == 1):
        return []
    spans = [known.get(member.role) or gaps[0] for member in members]
    fits = all(b - a == m.features for (a, b), m in zip(spans, members, strict=True))
    return spans if fits else []


def gaps_of(fused: Call) -> list[tuple[int, int]]:
    """The columns of a fused projection that no part of its layout has."""
    ends = [0, *(end for _, *span in fused.layout for end in span), fused.features]
    return [(a, b) for a, b in zip(ends[::2], ends[1::2], strict=True) if a < b]


def _operand(
    record: Record,
    fused: Call,
    member: Call,
    span: tuple[int, int],
    places: _Places | None,
) -> Part | None:
    """A weight, bias or scale that either side may take as a further input of an operator."""
    mine = _weights_axis(record, fused)
    if mine is None or fused.width < 0:
        return None
    same_slot = [r for r in member.records if r.key.port == record.key.port == "param"]
    if any(r.key.slot == record.key.slot for r in same_slot):
        return None  # two frameworks' parameters, which have names
    fitting = [r for r in member.records if _weights_axis(r, member) is not None]
    # Of several vectors, which is a bias and which a scale, the place says if both have places.
    fitting = [r for r in fitting if len(r.shape) == len(record.shape)]
    by_place = [r for r in fitting if r.key.slot == record.key.slot]
    partner = fitting[0] if len(fitting) == 1 else (by_place[0] if len(by_place) == 1 else None)
    if partner is None:
        return None
    whole = cut(record, mine, span)
    if places is not None:
        whole = whole._replace(steps=(_per_head(mine, *places),))
    return Part(record, partner, whole, None)  # which way either lies is asked afterwards


def columns_axis(record: Record, call: Call) -> int | None:
    """Along which axis any tensor of a projection holds its columns; None for what all share."""
    axis = _weights_axis(record, call)
    if axis is None:
        axis = _split_axis(record, call)
    return axis if axis is not None and record.shape[axis : axis + 1] == (call.features,) else None


def cut(record: Record, axis: int, span: tuple[int, int]) -> Recipe:
    """Some columns of a tensor."""
    shape = (*record.shape[:axis], span[1] - span[0], *record.shape[axis + 1 :])
    return Recipe((record,), (Step("split", axis, *span),), shape)


def _weights_axis(record: Record, call: Call) -> int | None:
    """Along which axis an operand of a projection holds its columns; None for what is none."""
    key = record.key
    if key.port not in ("input", "param") or key.phase != "forward":
        return None
    if key.port == "input" and record is main_tensor(call.records, "input"):
        return None
    if record.shape == (call.features,):
        return 0
    if len(record.shape) != 2 or sorted(record.shape) != sorted((call.features, call.width)):
        return None
    if record.shape[0] == record.shape[1]:
        return 1 if call.class_name in TRANSPOSED else 0  # as nearly everybody keeps them
    return record.shape.index(call.features)


def like_of(record: Record, others: Sequence[Record]) -> Record | None:
    """The tensor of a member that the fused site's tensor has a part in."""
    key = record.key
    alike = [
        other
        for other in others
        if (other.key.port, other.key.phase, other.key.moment) == (key.port, key.phase, key.moment)
    ]
    by_slot = [other for other in alike if other.key.slot == key.slot]
    if by_slot or "param" in key.port or key.port == "optimizer_grad":
        return by_slot[0] if by_slot else None
    if len(alike) != 1 or (key.port == "input" and alike[0].shape != record.shape):
        return None  # where operators take weights as inputs, a weight is no activation
    return alike[0]


def _added_up(record: Record, members: Sequence[Call]) -> Recipe | None:
    shares = [like_of(record, member.records) for member in members]
    known = tuple(share for share in shares if share is not None)
    if len(known) < len(members) or len({share.shape for share in known}) > 1:
        return None
    return Recipe(known, (Step("sum"),), known[0].shape)


def _split_axis(record: Record, fused: Call) -> int | None:
    """Along which axis a tensor of a fused site holds its parts; None for one they all share."""
    if record.key.port in ("output", "grad_output"):
        return len(record.shape) - 1
    if record.key.port in ("param", "param_grad", "optimizer_grad"):
        transposed = fused.class_name in TRANSPOSED and len(record.shape) == 2
        return 1 if transposed else 0
    return None


def _per_head(axis: int, which: int, heads: int, sizes: tuple[int, ...]) -> Step:
    size, first, all_of_head = (sum(n) // heads for n in (sizes[which:][:1], sizes[:which], sizes))
    places = [head * all_of_head + first + at for head in range(heads) for at in range(size)]
    return Step("select", axis, numbers=tuple(places))
