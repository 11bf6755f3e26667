"""Attention whose three projections are one parameter, against one with a layer for each.

torch's `MultiheadAttention` has `in_proj_weight` and `in_proj_bias`, in which q, k and v lie one
after the other; Paddle's `MultiHeadAttention` has the layers `q_proj`, `k_proj` and `v_proj`. Where
the attentions themselves go together, the parts are set against the layers' parameters. By names
and shapes only; which way a matrix lies is asked afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable

from driftline.alignment.fusion import cut
from driftline.alignment.plan import Pair, Plan
from driftline.alignment.recipe import Recipe, Step
from driftline.runs.key import TensorKey
from driftline.runs.record import Record

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
