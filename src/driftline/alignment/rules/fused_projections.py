"""Fused projections: one site on one side, several on the other (qkv against q, k and v).

In the order of this file:
- `Interleaving` finds how the q, k and v of a fused projection are laid out: one after the other,
  or head by head. Known classes determine it. For others, values decide, but only if one layout
  agrees with all three parts and the other with none: a faulty tensor must not change the layout.
- `in_family_order` and `fuse_alike` prepare two sequences of leaves for alignment: families of
  projections are brought into one order, and fused if the other side has them fused.
- `parts_of`, `pair_parts` and `pair_reordered` cut the tensors of fused sites into parts and pair
  them.

`in_projections.py` pairs the single parameter of nn.MultiheadAttention with separate layers.
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
from driftline.alignment.plan import Pair
from driftline.alignment.recipe import Recipe, Step
from driftline.alignment.sites.kinds import OWN_LAYOUT, PER_HEAD, ROLE_ORDER, TRANSPOSED
from driftline.alignment.sites.site_graph import Call, enclosing, main_tensor
from driftline.errors import DriftlineError
from driftline.numerics.dtypes import DTYPES, to_float64
from driftline.runs.records import Record
from driftline.runs.run import Run

# Relative distances: below 0.05 counts as agreement, well above the rounding of half precision;
# above 0.5 the data are unrelated. A value in between means a faulty tensor, which is no reason to
# choose another layout.
_AGREE, _APART = 0.05, 0.5
_LARGEST = 1 << 22
"""At most this many elements of one tensor are read: complete rows from its beginning."""
_TRIES = 8
"""After this many undecided projections of a class, the usual layout is assumed for all."""
# Usual numbers of heads; trying every divisor would find accidental agreements.
_HEADS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 25, 28, 32, 36, 40, 48, 56, 64, 80, 96, 128)

F64 = npt.NDArray[np.float64]


class Interleaving:
    """Number of heads of interleaved projections, by the class around them and their size."""

    def __init__(self, reference: Run, candidate: Run, notes: list[str]) -> None:
        self._runs = (reference, candidate)
        self._known: dict[tuple[str, int], int | None] = {}
        self._tries: dict[tuple[str, int], int] = {}
        self._notes = notes

    def heads(
        self, fused: Call, members: Sequence[Call], members_in_reference: bool, holder: str
    ) -> int | None:
        """The number of heads if the parts are stored head by head; None if they are not, or if
        unknown.

        Args:
            fused: The fused site.
            members: q, k and v; k and v have the same size, q a multiple of it.
            members_in_reference: Whether the members belong to the reference.
            holder: Class of the module around the fused site.
        """
        # Layers of one class and size share a layout, so one decision applies to all of them.
        about = (holder, fused.features)
        if about in self._known:
            return self._known[about]
        self._tries[about] = self._tries.get(about, 0) + 1
        # After several layers that could not decide (zeros, faults), more reads are unlikely to
        # help.
        if self._tries[about] > _TRIES:
            return None
        member_run, fused_run = self._runs if members_in_reference else self._runs[::-1]
        fused_rows = rows_of(fused_run, main_tensor(fused.records, "output"))
        parts = [rows_of(member_run, main_tensor(member.records, "output")) for member in members]
        if fused_rows is None or any(part is None for part in parts):
            return None
        heads = _cut(fused_rows, [part for part in parts if part is not None])
        if heads is None:
            return None
        self._known[about] = heads or None
        if heads:
            where = f"of {holder}" if holder else f"of '{fused.site}'"
            # The number of groups is reported in the user's terms: tensor-parallel ranks, key
            # groups or heads.
            output = main_tensor(fused.records, "output")
            origin = None if output is None else origins_of(fused_run).get(output.key)
            ranks = len(origin.recipe.records) if isinstance(origin, Gathered) else 0
            shared = members[0].features != members[1].features  # several queries share a key
            what = "rank" if ranks == heads else "group" if shared else "head"
            self._notes.append(
                f"the fused q, k and v {where} are stored {what} by {what} ({heads} {what}s): cut "
                "in this way all three agree, cut one after the other none does"
            )
        return self._known[about]


def _cut(fused: F64, parts: Sequence[F64]) -> int | None:
    """0 for one after the other, the number of heads for head by head, None if undecided."""
    sizes = [part.shape[-1] for part in parts]
    rows = min(len(fused), *(len(part) for part in parts))
    if not rows or fused.shape[-1] != sum(sizes):
        return None
    fused, parts = fused[:rows], [part[:rows] for part in parts]
    plain = [
        relative_distance(part_of, part)
        for part_of, part in zip(_split_columns(fused, sizes, 1), parts, strict=True)
    ]
    # The usual layout is preferred whenever it fits.
    if max(plain) < _AGREE:
        return 0
    if min(plain) < _APART:
        return None  # a part agrees: the rest is faulty, not laid out differently
    fitting: list[int] = []
    for heads in _HEADS:
        if heads > 1 and not any(size % heads for size in sizes):
            cuts = zip(_split_columns(fused, sizes, heads), parts, strict=True)
            if all(relative_distance(part_of, part) < _AGREE for part_of, part in cuts):
                fitting.append(heads)
    return fitting[0] if len(fitting) == 1 else None


def _split_columns(fused: F64, sizes: Sequence[int], groups: int) -> list[F64]:
    """The parts of a matrix whose column groups each contain a piece of every part."""
    split = fused.reshape(len(fused), groups, -1)
    ends = [0, *itertools.accumulate(size // groups for size in sizes)]
    return [split[:, :, a:b].reshape(len(fused), -1) for a, b in itertools.pairwise(ends)]


def relative_distance(values: F64, expected: F64) -> float:
    """Norm of the difference divided by the norm of the expected matrix; inf if that is zero."""
    scale = float(np.linalg.norm(expected))
    return float(np.linalg.norm(values - expected)) / scale if scale else math.inf


def rows_of(run: Run, record: Record | None) -> F64 | None:
    """The first rows of a tensor as numbers, joined from the ranks' parts if necessary."""
    if record is None:
        return None
    origin = origins_of(run).get(record.key)
    if isinstance(origin, Gathered):
        # Only if the ranks were joined along the last axis do the rows of the parts correspond.
        step = origin.recipe.steps[0]
        parts = [_stored(run, part) for part in origin.recipe.records]
        if len(origin.recipe.steps) > 1 or any(part is None for part in parts):
            return None
        stored = [part for part in parts if part is not None]
        if step.kind != "concat" or step.axis != len(record.shape) - 1:
            return None
        return np.concatenate([part[: min(map(len, stored))] for part in stored], axis=1)
    if isinstance(origin, Replicas):
        return _stored(run, origin.records[0])
    return _stored(run, origin if isinstance(origin, Record) else record)


def _stored(run: Run, record: Record) -> F64 | None:
    if record.kept != "full" or len(record.shape) < 2:
        return None
    width = record.shape[-1]
    dtype = DTYPES.get(record.dtype)
    # Formats below 16 bits are codes that need scales, so their distances mean nothing.
    if dtype is None or not dtype.is_floating or dtype.bits < 16 or not 0 < width <= _LARGEST:
        return None
    source = run.base if isinstance(run, AlignedView) else run
    try:
        raw: Any = source.raw(record).reshape(-1, width)[: _LARGEST // width]
        numbers = to_float64(np.ascontiguousarray(raw).reshape(-1), dtype)
        return numbers.astype(np.float64, copy=False).reshape(-1, width)
    except (DriftlineError, OSError, ValueError):
        return None  # the comparison itself will report the reason


# --- families of projections: q, k and v; gate and up


class Part(NamedTuple):
    """A tensor of a fused site and one of a member; without a recipe, a tensor stays unchanged."""

    fused: Record
    member: Record
    fused_recipe: Recipe | None
    member_recipe: Recipe | None


_Family = tuple[Call, ...]
# q, k, v and gate, up: the two families that frameworks fuse.
_FAMILIES = (ROLE_ORDER[:3], ROLE_ORDER[3:])
_Type = tuple[int, tuple[int, ...]]
_Places = tuple[int, int, tuple[int, ...]]
"""Index of the part, number of heads (or groups of heads), and the sizes of all parts."""


def in_family_order(leaves: Sequence[Call]) -> list[Call]:
    """Leaves with the members of each family next to each other, in the order of their roles.

    The order of calls inside a family does not matter: `up` before `gate`, or an activation between
    the two, computes the same.
    """
    placed: set[int] = set()
    ordered: list[Call] = []
    families = _families(leaves)
    # Roles are needed before sorting, and names do not always give them.
    _assign_gates(leaves, families)
    by_first = {id(family[0]): family for family in families}
    for call in leaves:
        if id(call) in placed:
            continue
        family = by_first.get(id(call), (call,))
        placed.update(map(id, family))
        ordered.extend(_by_role(family))
    return ordered


def _assign_gates(leaves: Sequence[Call], families: Sequence[_Family]) -> None:
    """Set roles: of two unnamed projections, the one that feeds an activation is the gate."""
    # Activations are found by value, so an unnamed gate is recognised by its reader.
    activated = {
        call.input_value for call in leaves if call.kind == "activation" and call.input_value
    }
    for family in families:
        if len(family) != 2 or any(call.role for call in family) or not family[0].input_value:
            continue
        gates = [call for call in family if call.output_value in activated]
        if len(gates) == 1 and family[0].features == family[1].features:
            for call in family:
                call.role = "gate" if call is gates[0] else "up"


def fuse_alike(
    reference: list[Call], candidate: list[Call], paired: set[int]
) -> tuple[list[Call], list[Call]]:
    """Both sequences, with each family fused that the other side has as a single site.

    Args:
        reference: Leaves of the reference.
        candidate: Leaves of the candidate.
        paired: ids of the calls that have a partner and stay unchanged.
    """
    free = [[call for call in side if id(call) not in paired] for side in (reference, candidate)]
    fuse_reference = _to_fuse(free[0], free[1])
    fuse_candidate = _to_fuse(free[1], free[0])
    return _fused(reference, fuse_reference), _fused(candidate, fuse_candidate)


def is_certain(call: Call) -> bool:
    """Whether roles or sizes identify the members of a family."""
    if not call.parts:
        return True
    roles = [part.role for part in call.parts]
    sizes = [part.features for part in call.parts]
    return (all(roles) and len(set(roles)) == len(roles)) or len(set(sizes)) == len(sizes)


def _families(leaves: Sequence[Call]) -> list[_Family]:
    """Projections of the same input, by its value or by their roles."""
    # Equal inputs are the evidence for a family; names are used only if no digest was kept.
    groups: dict[object, list[Call]] = defaultdict(list)
    for call in leaves:
        if call.kind != "linear":
            continue
        if call.input_value:
            groups[call.input_value].append(call)
        elif call.role:
            which = "qkv" if call.role in "qkv" else "mlp"
            groups[_holder(call.site), call.visit, which].append(call)
    return [tuple(group) for group in groups.values() if len(group) > 1]


def _holder(site: str) -> str:
    """The module that contains a projection."""
    head, _, _ = site.rpartition(".")
    return head


def _by_role(family: _Family) -> _Family:
    roles = [call.role for call in family if call.role]
    if not roles or len(set(roles)) < len(roles):
        return family
    if len(roles) == len(family):
        return tuple(sorted(family, key=lambda call: ROLE_ORDER.index(call.role)))
    # Members without a role take the remaining places in the order of their calls.
    every = next((of for of in _FAMILIES if len(of) == len(family) and set(roles) <= set(of)), ())
    by_role = {call.role: call for call in family if call.role}
    rest = (call for call in family if not call.role)
    return tuple(by_role.get(role) or next(rest) for role in every) or family


def _type(family: _Family) -> _Type:
    return (family[0].width, tuple(call.features for call in family))


def _shares(leaves: Sequence[Call]) -> list[_Family]:
    """All groups of two or three neighbours in a family that could be a single site elsewhere."""
    families: list[_Family] = []
    for family in _families(leaves):
        members = _by_role(family)
        # Three before two, so that a fused qkv is not mistaken for a fused pair and a single
        # projection.
        for size in (3, 2):
            families += [members[first : first + size] for first in range(len(members) - size + 1)]
    return families


def _to_fuse(split: list[Call], fused: list[Call]) -> list[_Family]:
    """The families of one side that the other side has as single sites."""
    shares = _shares(split)
    if not shares:
        return []
    # Without recorded inputs the widths are unknown, and only the output size is compared.
    kept = all(call.width >= 0 for call in (*split, *fused) if call.kind == "linear")

    def signature(width: int, features: int) -> tuple[int, int]:
        return (width if kept else -1, features)

    own_singles = Counter(signature(c.width, c.features) for c in split if c.kind == "linear")
    other_singles = Counter(signature(c.width, c.features) for c in fused if c.kind == "linear")
    own_types = Counter(map(_type, shares))
    other_types = Counter(map(_type, _shares(fused)))
    chosen: list[_Family] = []
    used: set[int] = set()
    for share in shares:
        kind = _type(share)
        fused_signature = signature(kind[0], sum(kind[1]))
        # Fuse only if the other side lacks these parts and has a surplus single site of their total
        # size; otherwise the sites pair one to one.
        if (
            other_types[kind] >= own_types[kind]
            or other_singles[fused_signature] <= own_singles[fused_signature]
        ):
            continue
        if not used.intersection(map(id, share)):
            chosen.append(share)
            used.update(map(id, share))
    return chosen


def _fused(leaves: list[Call], families: list[_Family]) -> list[Call]:
    if not families:
        return leaves
    # The family takes the place of its first call, which keeps the execution order.
    first = {id(min(family, key=lambda call: call.order)): family for family in families}
    members = {id(call) for family in families for call in family}
    result: list[Call] = []
    for call in leaves:
        if (family := first.get(id(call))) is not None:
            result.append(_fused_call(family))
        elif id(call) not in members:
            result.append(call)
    return result


def _fused_call(family: _Family) -> Call:
    lead = min(family, key=lambda call: call.order)
    fused = Call(lead.site, lead.visit, lead.records)
    fused.parts = family
    fused.role = ""
    fused.kind = "linear"
    # A fused call has several outputs, so no single value identifies it.
    fused.output_value = ""
    if lead.out is not None:
        fused.out = (*lead.out[:-1], sum(call.features for call in family))
    return fused


def parts_of(
    fused: Call, members: Sequence[Call], heads: int | None, holder: str = ""
) -> tuple[list[Part], str]:
    """The parts of a fused site's tensors for each member, or a reason why they are unknown.

    Args:
        fused: The fused site.
        members: The separate sites, in the order of their parts in the fused tensor.
        heads: Number of attention heads if the parts are stored head by head and the number is
            known.
        holder: Class of the module around the fused site.
    """
    # A wrong cut would look like a fault of the model, so an unknown layout is refused.
    if len(members) == 3 and holder.startswith(OWN_LAYOUT):
        return [], f"the order of q, k and v inside {holder} is not known; a plan can state it"
    # Members of different sizes: several queries share a key.
    same_size = len({member.features for member in members}) == 1
    sizes = tuple(member.features for member in members)
    if len(members) == 3 and same_size and holder.startswith(PER_HEAD) and heads is None:
        return [], f"the qkv of {holder} goes head by head, and the number of heads is not known"
    # Columns come from the dataflow if operators cut the output, otherwise from the members' sizes.
    spans = _spans(fused, members)
    if not spans:
        shown = ", ".join(f"{role} {start}:{stop}" for role, start, stop in fused.layout)
        return [], f"'{fused.site}' is cut into {shown}, and nothing says which part is which"
    parts: list[Part] = []
    for which, (member, span) in enumerate(zip(members, spans, strict=True)):
        places = (which, heads, sizes) if len(members) == 3 and heads is not None else None
        for record in fused.records:
            operand = _operand(record, fused, member, span, places)
            if operand is not None:
                parts.append(operand)
            elif record.key.port != "grad_input":
                part = _part(record, fused, member, span, places)
                parts += [part] if part is not None else []
            elif which == 0 and (total := _gradient_sum(record, members)) is not None:
                parts.append(total)
    return parts, ""


def _part(
    record: Record, fused: Call, member: Call, span: tuple[int, int], places: _Places | None
) -> Part | None:
    """The columns of a fused site's tensor that belong to one member."""
    partner = matching_tensor(record, member.records)
    if partner is None:
        return None
    axis = _split_axis(record, fused)
    if axis is None:
        return Part(record, partner, None, None)
    # A tensor of another width (a scalar scale) has no columns to cut.
    if record.shape[axis] != fused.features:
        return None
    step = Step("split", axis, *span) if places is None else _per_head(axis, *places)
    shape = (*record.shape[:axis], member.features, *record.shape[axis + 1 :])
    return Part(record, partner, Recipe((record,), (step,), shape), None)


def _gradient_sum(record: Record, members: Sequence[Call]) -> Part | None:
    """The gradient of the shared input: each member computes a term, only the sum is comparable."""
    partner = matching_tensor(record, members[0].records)
    recipe = _sum_of_members(record, members) if partner is not None else None
    return None if partner is None or recipe is None else Part(record, partner, None, recipe)


def _spans(fused: Call, members: Sequence[Call]) -> list[tuple[int, int]]:
    """The columns of each member: as the dataflow cuts them, otherwise one after the other.

    Empty if the recorded cuts do not fit the members.
    """
    known_spans = {role: (start, stop) for role, start, stop in fused.layout}
    ends = [0, *itertools.accumulate(member.features for member in members)]
    plain = list(itertools.pairwise(ends))
    # If the known parts have their usual places, the unknown parts have theirs, too.
    confirmed = [
        (known_spans[m.role], span)
        for m, span in zip(members, plain, strict=True)
        if m.role in known_spans
    ]
    in_order = list(known_spans) == sorted(known_spans, key=ROLE_ORDER.index)
    if all(span == usual for span, usual in confirmed) and (confirmed or in_order):
        return plain
    # A single unknown part fills the gap; two of them could be swapped.
    gaps = gaps_of(fused)
    if len(confirmed) < len(members) and not (
        len(confirmed) == len(members) - 1 and len(gaps) == 1
    ):
        return []
    spans = [known_spans.get(member.role) or gaps[0] for member in members]
    fits = all(b - a == m.features for (a, b), m in zip(spans, members, strict=True))
    return spans if fits else []


def gaps_of(fused: Call) -> list[tuple[int, int]]:
    """The columns of a fused projection that no part of its layout covers."""
    ends = [0, *(end for _, *span in fused.layout for end in span), fused.features]
    return [(a, b) for a, b in zip(ends[::2], ends[1::2], strict=True) if a < b]


def _operand(
    record: Record,
    fused: Call,
    member: Call,
    span: tuple[int, int],
    places: _Places | None,
) -> Part | None:
    """Pair a weight, bias or scale, which either side may store as an input of an operator."""
    axis = _weights_axis(record, fused)
    if axis is None or fused.width < 0:
        return None
    # Parameters of two frameworks have names, which are stronger evidence than sizes.
    same_slot = [r for r in member.records if r.key.port == record.key.port == "param"]
    if any(r.key.slot == record.key.slot for r in same_slot):
        return None  # parameters of two frameworks, which have names
    fitting = [r for r in member.records if _weights_axis(r, member) is not None]
    # Bias and scale have the same shape; only equal slots can distinguish them.
    fitting = [r for r in fitting if len(r.shape) == len(record.shape)]
    by_place = [r for r in fitting if r.key.slot == record.key.slot]
    partner = fitting[0] if len(fitting) == 1 else (by_place[0] if len(by_place) == 1 else None)
    if partner is None:
        return None
    recipe = cut(record, axis, span)
    if places is not None:
        recipe = recipe._replace(steps=(_per_head(axis, *places),))
    return Part(record, partner, recipe, None)  # the reconcilers decide the orientation later


def columns_axis(record: Record, call: Call) -> int | None:
    """The axis along which a tensor of a projection holds its columns; None if it has none."""
    axis = _weights_axis(record, call)
    if axis is None:
        axis = _split_axis(record, call)
    return axis if axis is not None and record.shape[axis : axis + 1] == (call.features,) else None


def cut(record: Record, axis: int, span: tuple[int, int]) -> Recipe:
    """A recipe for some columns of a tensor."""
    shape = (*record.shape[:axis], span[1] - span[0], *record.shape[axis + 1 :])
    return Recipe((record,), (Step("split", axis, *span),), shape)


def _weights_axis(record: Record, call: Call) -> int | None:
    """The axis of a weight, bias or scale that holds the columns; None for other tensors."""
    key = record.key
    if key.port not in ("input", "param") or key.phase != "forward":
        return None
    if key.port == "input" and record is main_tensor(call.records, "input"):
        return None
    if record.shape == (call.features,):
        return 0
    if len(record.shape) != 2 or sorted(record.shape) != sorted((call.features, call.width)):
        return None
    # A square weight does not show its orientation; torch's (out, in) is the common one.
    if record.shape[0] == record.shape[1]:
        return 1 if call.class_name in TRANSPOSED else 0
    return record.shape.index(call.features)


def matching_tensor(record: Record, others: Sequence[Record]) -> Record | None:
    """The tensor of a member that corresponds to a tensor of the fused site."""
    key = record.key
    alike = [
        other
        for other in others
        if (other.key.port, other.key.phase, other.key.moment) == (key.port, key.phase, key.moment)
    ]
    by_slot = [other for other in alike if other.key.slot == key.slot]
    # Parameters are named: another parameter of the same call is never a substitute.
    if by_slot or "param" in key.port or key.port == "optimizer_grad":
        return by_slot[0] if by_slot else None
    if len(alike) != 1 or (key.port == "input" and alike[0].shape != record.shape):
        return None  # operators take weights as inputs: another shape is another operand
    return alike[0]


def _sum_of_members(record: Record, members: Sequence[Call]) -> Recipe | None:
    shares = [matching_tensor(record, member.records) for member in members]
    present = tuple(share for share in shares if share is not None)
    if len(present) < len(members) or len({share.shape for share in present}) > 1:
        return None
    return Recipe(present, (Step("sum"),), present[0].shape)


def _split_axis(record: Record, fused: Call) -> int | None:
    """The axis along which a tensor of a fused site holds its parts; None if all parts share it."""
    if record.key.port in ("output", "grad_output"):
        return len(record.shape) - 1
    if record.key.port in ("param", "param_grad", "optimizer_grad"):
        transposed = fused.class_name in TRANSPOSED and len(record.shape) == 2
        return 1 if transposed else 0
    return None


def _per_head(axis: int, which: int, heads: int, sizes: tuple[int, ...]) -> Step:
    # In a head-by-head layout, every head holds a slice of each part; the selected columns are
    # those of one part over all heads.
    size, first, all_of_head = (sum(n) // heads for n in (sizes[which:][:1], sizes[:which], sizes))
    places = [
        head * all_of_head + first + column for head in range(heads) for column in range(size)
    ]
    return Step("select", axis, numbers=tuple(places))


# --- pairs of a fused site and its members


Name = tuple[str, int]


def pair_parts(
    fused: Call,
    members: list[Call],
    members_in_reference: bool,
    confidence: float,
    pairs: list[Pair],
    sides: tuple[Mapping[Name, Call], Mapping[Name, Call]],
    interleaving: Interleaving,
) -> str:
    """Pair a fused site with its members; returns a reason if the parts are unknown."""
    around = sides[1] if members_in_reference else sides[0]
    holders = (around.get((site, fused.visit)) for site in enclosing(fused.site))
    holder = next((call.class_name for call in holders if call is not None), "")
    heads = None
    # For families that interleave, some 4-d tensor may show the number of heads.
    if holder.startswith(PER_HEAD) and len({member.features for member in members}) == 1:
        every = (call for side in sides for call in side.values())
        heads = _heads(every, members[0].features)
    if heads is None and _could_interleave(fused, members):
        heads = interleaving.heads(fused, members, members_in_reference, holder)
    parts, trouble = parts_of(fused, members, heads, holder)
    for part in parts:
        records = (part.member, part.fused) if members_in_reference else (part.fused, part.member)
        recipes = (
            (part.member_recipe, part.fused_recipe)
            if members_in_reference
            else (part.fused_recipe, part.member_recipe)
        )
        pairs.append(Pair(*records, "structure", confidence, *recipes))
    return trouble


def _could_interleave(fused: Call, members: list[Call]) -> bool:
    """Whether shapes allow an interleaved layout and the dataflow does not exclude it."""
    if len(members) != 3 or fused.layout:
        return False
    query, key, value = (member.features for member in members)
    return key == value > 0 and query % key == 0


def pair_reordered(reference: Call, candidate: Call, confidence: float) -> list[Pair]:
    """Pair two fused projections part by part if their parts are in different orders."""
    spans = _common_spans(reference, candidate)
    if spans is None:
        return []
    if reference.kind == candidate.kind == "cut":
        return _reordered_cuts(reference, candidate, confidence)
    gaps = gaps_of(reference), gaps_of(candidate)
    # If each side has only one part that nothing identifies, these must be the same part.
    if len(gaps[0]) == len(gaps[1]) == 1:
        sizes = {end - start for ((start, end),) in gaps}
        if len(sizes) > 1:
            return []
        for side, (gap,) in zip(spans, gaps, strict=True):
            side["the rest"] = gap
    pairs: list[Pair] = []
    for role, span in spans[0].items():
        for record in reference.records:
            axis = columns_axis(record, reference)
            partner = None if axis is None else matching_tensor(record, candidate.records)
            partner_axis = None if partner is None else columns_axis(partner, candidate)
            if axis is None or partner is None or partner_axis is None:
                continue
            if record.shape == partner.shape:
                recipes = cut(record, axis, span), cut(partner, partner_axis, spans[1][role])
                pairs.append(Pair(record, partner, "structure", confidence, *recipes))
    return pairs


def _common_spans(
    reference: Call, candidate: Call
) -> tuple[dict[str, tuple[int, int]], dict[str, tuple[int, int]]] | None:
    """Columns by role on both sides; None unless roles and sizes agree."""
    own, others = (
        {role: (start, end) for role, start, end in call.layout} for call in (reference, candidate)
    )
    if not own or own.keys() != others.keys():
        return None
    sizes = [{role: b - a for role, (a, b) in side.items()} for side in (own, others)]
    return (own, others) if sizes[0] == sizes[1] else None


def _reordered_cuts(reference: Call, candidate: Call, confidence: float) -> list[Pair]:
    """Pair the operators that cut such projections: outputs by role, not by position."""
    pairs: list[Pair] = []
    inputs = [main_tensor(call.records, "input") for call in (reference, candidate)]
    outputs = [
        [r for r in call.records if r.key.port == "output"] for call in (reference, candidate)
    ]
    if inputs[0] is None or inputs[1] is None:
        return []
    # The input of a cut is compared part by part as well; its outputs only if each part has one.
    last = len(inputs[0].shape) - 1, len(inputs[1].shape) - 1
    for index, (role, *span) in enumerate(reference.layout):
        place = [part[0] for part in candidate.layout].index(role)
        partner_span = candidate.layout[place][1:]
        recipe = cut(inputs[0], last[0], (span[0], span[1]))
        partner_recipe = cut(inputs[1], last[1], partner_span)
        pairs.append(Pair(inputs[0], inputs[1], "structure", confidence, recipe, partner_recipe))
        if len(outputs[0]) == len(outputs[1]) == len(reference.layout):
            part_outputs = outputs[0][index], outputs[1][place]
            pairs.append(Pair(*part_outputs, "structure", confidence))
    return pairs


def _heads(calls: Iterable[Call], features: int) -> int | None:
    """The number of heads, if some tensor has the shape (batch, heads, tokens, size)."""
    for call in calls:
        for record in call.records:
            shape = record.shape
            if len(shape) == 4 and "float" in record.dtype and shape[1] * shape[3] == features:
                return shape[1]
    return None
