"""How the q, k and v of a fused projection lie: one after the other, or head by head.

Classes that are known say it. Of others the shapes allow both, and values break that tie, but only
if one cut agrees with all three parts and the other with none: a fault is no reason to cut anew.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from driftline.alignment.normalise.view import AlignedView, Gathered, Replicas, origins_of
from driftline.alignment.plan import Pair, Plan
from driftline.alignment.recipe import Recipe, Step
from driftline.alignment.sites.kinds import OWN_LAYOUT, PER_HEAD, ROLE_ORDER, TRANSPOSED
from driftline.alignment.sites.site_graph import Call, enclosing, main_tensor
from driftline.errors import DriftlineError
from driftline.numerics.dtypes import DTYPES, to_float64
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run

_AGREE, _APART = 0.05, 0.5
_LARGEST = 1 << 22
"""Elements that are read of one tensor: whole rows from its beginning."""
_TRIES = 8
"""So many projections of a class are looked at before the usual cut is taken for all of them."""
_HEADS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 25, 28, 32, 36, 40, 48, 56, 64, 80, 96, 128)

F64 = npt.NDArray[np.float64]


class Interleaving:
    """Numbers of heads, by the class around a fused projection and its size."""

    def __init__(self, reference: Run, candidate: Run, notes: list[str]) -> None:
        self._runs = (reference, candidate)
        self._known: dict[tuple[str, int], int | None] = {}
        self._tries: dict[tuple[str, int], int] = {}
        self._notes = notes

    def heads(
        self, fused: Call, members: Sequence[Call], members_are_ours: bool, holder: str
    ) -> int | None:
        """The number of heads if the parts lie head by head; None if they do not, for all we know.

        Args:
            fused: The one site.
            members: q, k and v; k and v equally large, q as large or a multiple of that.
            members_are_ours: Whether they are of the reference.
            holder: Class of the module around the fused site.
        """
        about = (holder, fused.features)
        if about in self._known:
            return self._known[about]
        self._tries[about] = self._tries.get(about, 0) + 1
        if self._tries[about] > _TRIES:
            return None
        here, there = self._runs if members_are_ours else self._runs[::-1]
        whole = rows_of(there, main_tensor(fused.records, "output"))
        parts = [rows_of(here, main_tensor(member.records, "output")) for member in members]
        if whole is None or any(part is None for part in parts):
            return None
        found = _cut(whole, [part for part in parts if part is not None])
        if found is None:
            return None
        self._known[about] = found or None
        if found:
            where = f"of {holder}" if holder else f"of '{fused.site}'"
            output = main_tensor(fused.records, "output")
            origin = None if output is None else origins_of(there).get(output.key)
            ranks = len(origin.recipe.records) if isinstance(origin, Gathered) else 0
            shared = members[0].features != members[1].features  # several queries share a key
            what = "rank" if ranks == found else "group" if shared else "head"
            self._notes.append(
                f"the fused q, k and v {where} lie {what} by {what} ({found} {what}s): so cut all "
                "three agree, one after the other none does"
            )
        return self._known[about]


def _cut(whole: F64, parts: Sequence[F64]) -> int | None:
    """0 for one after the other, a number of heads for head by head, None if values do not say."""
    sizes = [part.shape[-1] for part in parts]
    rows = min(len(whole), *(len(part) for part in parts))
    if not rows or whole.shape[-1] != sum(sizes):
        return None
    whole, parts = whole[:rows], [part[:rows] for part in parts]
    plain = [
        share_off(part_of, part)
        for part_of, part in zip(_taken_apart(whole, sizes, 1), parts, strict=True)
    ]
    if max(plain) < _AGREE:
        return 0
    if min(plain) < _APART:
        return None  # some of it agrees: a fault in the rest, and no other cut
    fitting: list[int] = []
    for heads in _HEADS:
        if heads > 1 and not any(size % heads for size in sizes):
            cuts = zip(_taken_apart(whole, sizes, heads), parts, strict=True)
            if all(share_off(part_of, part) < _AGREE for part_of, part in cuts):
                fitting.append(heads)
    return fitting[0] if len(fitting) == 1 else None


def _taken_apart(whole: F64, sizes: Sequence[int], groups: int) -> list[F64]:
    """The parts of a matrix that has one piece of each in every group of columns."""
    split = whole.reshape(len(whole), groups, -1)
    ends = [0, *itertools.accumulate(size // groups for size in sizes)]
    return [split[:, :, a:b].reshape(len(whole), -1) for a, b in itertools.pairwise(ends)]


def share_off(ours: F64, theirs: F64) -> float:
    """How far off one matrix is, as a share of the other."""
    scale = float(np.linalg.norm(theirs))
    return float(np.linalg.norm(ours - theirs)) / scale if scale else math.inf


def rows_of(run: Run, record: Record | None) -> F64 | None:
    """The first rows of a tensor as numbers; of one that is joined from ranks, theirs."""
    if record is None:
        return None
    origin = origins_of(run).get(record.key)
    if isinstance(origin, Gathered):
        step = origin.recipe.steps[0]
        parts = [_stored(run, part) for part in origin.recipe.records]
        if len(origin.recipe.steps) > 1 or any(part is None for part in parts):
            return None
        known = [part for part in parts if part is not None]
        if step.kind != "concat" or step.axis != len(record.shape) - 1:
            return None
        return np.concatenate([part[: min(map(len, known))] for part in known], axis=1)
    if isinstance(origin, Replicas):
        return _stored(run, origin.records[0])
    return _stored(run, origin if isinstance(origin, Record) else record)


def _stored(run: Run, record: Record) -> F64 | None:
    if record.kept != "full" or len(record.shape) < 2:
        return None
    width = record.shape[-1]
    dtype = DTYPES.get(record.dtype)
    if dtype is None or not dtype.is_floating or dtype.bits < 16 or not 0 < width <= _LARGEST:
        return None
    whole = run.base if isinstance(run, AlignedView) else run
    try:
        raw: Any = whole.raw(record).reshape(-1, width)[: _LARGEST // width]
        numbers = to_float64(np.ascontiguousarray(raw).reshape(-1), dtype)
        return numbers.astype(np.float64, copy=False).reshape(-1, width)
    except (DriftlineError, OSError, ValueError):
        return None  # comparing it will say why


# One site on one side, several on the other: qkv against q, k and v; gate_up against gate and
# up.


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


# Pairs of a fused site and the several sites that it is elsewhere.


Name = tuple[str, int]


def pair_parts(
    fused: Call,
    members: list[Call],
    members_are_ours: bool,
    confidence: float,
    found: list[Pair],
    sides: tuple[Mapping[Name, Call], Mapping[Name, Call]],
    interleaving: Interleaving,
) -> str:
    """Pairs of a fused site and its members; a reason if the parts cannot be told."""
    around = sides[1] if members_are_ours else sides[0]
    holders = (around.get((site, fused.visit)) for site in enclosing(fused.site))
    holder = next((call.class_name for call in holders if call is not None), "")
    heads = None
    if holder.startswith(PER_HEAD) and len({member.features for member in members}) == 1:
        every = (call for side in sides for call in side.values())
        heads = _heads(every, members[0].features)
    if heads is None and _could_interleave(fused, members):
        heads = interleaving.heads(fused, members, members_are_ours, holder)
    parts, trouble = parts_of(fused, members, heads, holder)
    for part in parts:
        records = (part.member, part.fused) if members_are_ours else (part.fused, part.member)
        recipes = (
            (part.member_recipe, part.fused_recipe)
            if members_are_ours
            else (part.fused_recipe, part.member_recipe)
        )
        found.append(Pair(*records, "structure", confidence, *recipes))
    return trouble


def _could_interleave(fused: Call, members: list[Call]) -> bool:
    """Whether shapes leave open how three parts lie: the dataflow does not say it."""
    if len(members) != 3 or fused.layout:
        return False
    query, key, value = (member.features for member in members)
    return key == value > 0 and query % key == 0


def pair_relaid(one: Call, other: Call, confidence: float) -> list[Pair]:
    """Two fused projections whose parts lie in another order, part by part; else nothing."""
    spans = [{role: (a, b) for role, a, b in call.layout} for call in (one, other)]
    if not spans[0] or spans[0].keys() != spans[1].keys():
        return []
    sizes = [{role: b - a for role, (a, b) in side.items()} for side in spans]
    if sizes[0] != sizes[1]:
        return []
    if one.kind == other.kind == "cut":
        return _relaid_cuts(one, other, confidence)
    gaps = gaps_of(one), gaps_of(other)
    if [len(gap) for gap in gaps] == [1, 1]:  # the only part that nothing tells, in both
        for side, (gap,) in zip(spans, gaps, strict=True):
            side["the rest"] = gap
    if len({b - a for side in spans for a, b in (side.get("the rest", (0, 0)),)}) > 1:
        return []
    found: list[Pair] = []
    for role, span in spans[0].items():
        for record in one.records:
            axis = columns_axis(record, one)
            partner = None if axis is None else like_of(record, other.records)
            there = None if partner is None else columns_axis(partner, other)
            if axis is None or partner is None or there is None or record.shape != partner.shape:
                continue
            mine, theirs = cut(record, axis, span), cut(partner, there, spans[1][role])
            found.append(Pair(record, partner, "structure", confidence, mine, theirs))
    return found


def _relaid_cuts(one: Call, other: Call, confidence: float) -> list[Pair]:
    """The operators that cut two such projections: outputs by their parts, not by their places."""
    found: list[Pair] = []
    inputs = [main_tensor(call.records, "input") for call in (one, other)]
    outputs = [[r for r in call.records if r.key.port == "output"] for call in (one, other)]
    if inputs[0] is None or inputs[1] is None:
        return []
    last = len(inputs[0].shape) - 1, len(inputs[1].shape) - 1
    for at, (role, *span) in enumerate(one.layout):
        place = [part[0] for part in other.layout].index(role)
        span_there = other.layout[place][1:]
        mine = cut(inputs[0], last[0], (span[0], span[1]))
        theirs = cut(inputs[1], last[1], span_there)
        found.append(Pair(inputs[0], inputs[1], "structure", confidence, mine, theirs))
        if len(outputs[0]) == len(outputs[1]) == len(one.layout):
            both = outputs[0][at], outputs[1][place]
            found.append(Pair(*both, "structure", confidence))
    return found


def _heads(calls: Iterable[Call], features: int) -> int | None:
    """The number of heads, where some tensor of the runs shows it: (batch, heads, tokens, size)."""
    for call in calls:
        for record in call.records:
            shape = record.shape
            if len(shape) == 4 and "float" in record.dtype and shape[1] * shape[3] == features:
                return shape[1]
    return None


# Attention whose three projections are one parameter, against one with a layer for each.


_FUSED = {"in_proj_weight": "weight", "in_proj_bias": "bias"}
_PARTS = ("q_proj", "k_proj", "v_proj")
_PORTS = ("param", "param_grad", "optimizer_grad")
_SURE = 0.9


def pair_in_projections(plan: Plan) -> list[Pair]:
    """Pairs for fused projections that are still alone."""
    found = _pairs(plan.missing, plan.extra, _partners(plan, from_reference=True))
    turned = _pairs(plan.extra, plan.missing, _partners(plan, from_reference=False))
    found += [
        pair._replace(
            reference=pair.candidate,
            candidate=pair.reference,
            reference_recipe=pair.candidate_recipe,
            candidate_recipe=pair.reference_recipe,
        )
        for pair in turned
    ]
    return found


def _partners(plan: Plan, *, from_reference: bool) -> dict[str, str]:
    sites = ((pair.reference.key.site, pair.candidate.key.site) for pair in plan.pairs)
    return dict(sites if from_reference else ((there, here) for here, there in sites))


def _pairs(
    fused: Iterable[Record], members: Iterable[Record], partners: dict[str, str]
) -> list[Pair]:
    """The pairs with the fused side first."""
    whole = [r for r in fused if r.key.slot in _FUSED and r.key.port in _PORTS]
    if not whole:
        return []
    by_key = {_place(r.key): r for r in members if r.key.port in _PORTS}
    found: list[Pair] = []
    for record in whole:
        holder = partners.get(record.key.site, record.key.site)
        slot = _FUSED[record.key.slot]
        parts = [
            by_key.get(_place(record.key._replace(site=f"{holder}.{part}", slot=slot)))
            for part in _PARTS
        ]
        known = [part for part in parts if part is not None]
        width = record.shape[0] // len(_PARTS) if record.shape else 0
        fits = all(width in part.shape and len(part.shape) == len(record.shape) for part in known)
        if len(known) < len(_PARTS) or not fits or width * len(_PARTS) != record.shape[0]:
            continue
        if slot == "bias" and record.key.port != "param":
            # Of its key's part nothing but rounding is left: a share of the whole, not of itself.
            joined = Recipe(tuple(known), (Step("concat", 0),), record.shape)
            found.append(Pair(record, known[0], "structure", _SURE, None, joined))
            continue
        for place, part in enumerate(known):
            recipe = cut(record, 0, (place * width, (place + 1) * width))
            found.append(Pair(record, part, "structure", _SURE, recipe))
    return found


def _place(key: TensorKey) -> tuple[object, ...]:
    return (key.rank, key.process, key.step, key.site, key.visit, key.port, key.slot)
