"""Attention whose three projections are one parameter (nn.MultiheadAttention), or separate layers.

The module calls no layer for its projections, so there is no site to pair: the names of parameters
are the evidence.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from driftline.alignment.plan import Pair, Plan
from driftline.alignment.recipe import Recipe, Step
from driftline.alignment.rules.fused_projections import cut
from driftline.runs.records import Record, TensorKey

if TYPE_CHECKING:
    from driftline.alignment.align import Context

# Names of torch's nn.MultiheadAttention, whose three projections are one parameter.
_FUSED = {"in_proj_weight": "weight", "in_proj_bias": "bias"}
_PARTS = ("q_proj", "k_proj", "v_proj")
_PORTS = ("param", "param_grad", "optimizer_grad")
_SURE = 0.9


def pair_in_projections(plan: Plan) -> list[Pair]:
    """Pairs for fused parameters that have no partner yet."""
    pairs = _pairs(plan.missing, plan.extra, _partners(plan, from_reference=True))
    flipped = _pairs(plan.extra, plan.missing, _partners(plan, from_reference=False))
    pairs += [
        pair._replace(
            reference=pair.candidate,
            candidate=pair.reference,
            reference_recipe=pair.candidate_recipe,
            candidate_recipe=pair.reference_recipe,
        )
        for pair in flipped
    ]
    return pairs


def _partners(plan: Plan, *, from_reference: bool) -> dict[str, str]:
    sites = ((pair.reference.key.site, pair.candidate.key.site) for pair in plan.pairs)
    return dict(
        sites if from_reference else ((candidate, reference) for reference, candidate in sites)
    )


def _pairs(
    fused: Iterable[Record], members: Iterable[Record], partners: dict[str, str]
) -> list[Pair]:
    """The pairs, with the fused side first."""
    fused_records = [r for r in fused if r.key.slot in _FUSED and r.key.port in _PORTS]
    if not fused_records:
        return []
    by_key = {_place(r.key): r for r in members if r.key.port in _PORTS}
    pairs: list[Pair] = []
    for record in fused_records:
        holder = partners.get(record.key.site, record.key.site)
        slot = _FUSED[record.key.slot]
        parts = [
            by_key.get(_place(record.key._replace(site=f"{holder}.{part}", slot=slot)))
            for part in _PARTS
        ]
        present = [part for part in parts if part is not None]
        width = record.shape[0] // len(_PARTS) if record.shape else 0
        # Each part must be a third of the fused parameter and have the same number of axes.
        fits = all(width in part.shape and len(part.shape) == len(record.shape) for part in present)
        if len(present) < len(_PARTS) or not fits or width * len(_PARTS) != record.shape[0]:
            continue
        if slot == "bias" and record.key.port != "param":
            # The gradient of the key's bias is zero except for rounding. Relative errors of that
            # part alone would be meaningless, so the bias gradients are compared as one tensor.
            joined = Recipe(tuple(present), (Step("concat", 0),), record.shape)
            pairs.append(Pair(record, present[0], "structure", _SURE, None, joined))
            continue
        for place, part in enumerate(present):
            recipe = cut(record, 0, (place * width, (place + 1) * width))
            pairs.append(Pair(record, part, "structure", _SURE, recipe))
    return pairs


def _place(key: TensorKey) -> tuple[object, ...]:
    return (key.rank, key.process, key.step, key.site, key.visit, key.port, key.slot, key.moment)


def by_projections(plan: Plan, context: Context) -> Plan | None:
    """Pairs of fused parameters (`in_proj_weight`) with separate ones."""
    del context
    projections = pair_in_projections(plan)
    return plan.with_pairs(projections).with_reasons_of_unpaired() if projections else None
