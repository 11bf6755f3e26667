"""Pairs of a fused site and the several sites that it is elsewhere.

Carries the answer of `fusion` into pairs with recipes; knows nothing of how the sites were found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from driftline.alignment.calls import Call, enclosing, main_tensor
from driftline.alignment.classes import PER_HEAD
from driftline.alignment.fusion import columns_axis, cut, gaps_of, like_of, parts_of
from driftline.alignment.interleaving import Interleaving
from driftline.alignment.plan import Pair

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
