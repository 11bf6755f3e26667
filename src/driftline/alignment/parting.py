"""Pairs of a fused site and the several sites that it is elsewhere.

Carries the answer of `fusion` into pairs with recipes; knows nothing of how the sites were found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from driftline.alignment.calls import Call, enclosing
from driftline.alignment.classes import PER_HEAD
from driftline.alignment.fusion import parts_of
from driftline.alignment.plan import Pair

Name = tuple[str, int]


def pair_parts(
    fused: Call,
    members: list[Call],
    members_are_ours: bool,
    confidence: float,
    found: list[Pair],
    sides: tuple[Mapping[Name, Call], Mapping[Name, Call]],
) -> str:
    """Pairs of a fused site and its members; a reason if the parts cannot be told."""
    around = sides[1] if members_are_ours else sides[0]
    holders = (around.get((site, fused.visit)) for site in enclosing(fused.site))
    holder = next((call.class_name for call in holders if call is not None), "")
    heads = None
    if holder.startswith(PER_HEAD):
        every = (call for side in sides for call in side.values())
        heads = _heads(every, members[0].features)
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


def _heads(calls: Iterable[Call], features: int) -> int | None:
    """The number of heads, where some tensor of the runs shows it: (batch, heads, tokens, size)."""
    for call in calls:
        for record in call.records:
            shape = record.shape
            if len(shape) == 4 and "float" in record.dtype and shape[1] * shape[3] == features:
                return shape[1]
    return None
