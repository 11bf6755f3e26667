"""Roles of projections that follow from the dataflow: q, k and v; gate and up.

The first, second and third input of an attention are q, k and v, whatever operators are in between.
If two projections are multiplied, the gate is the one with an activation in between. A projection
that is cut into such pieces is fused, and the cuts give the columns of its parts. `rewired` finds
operators with equal numbers that have another role in the other run.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

from driftline.alignment.sites.site_graph import Call, Frame, calls_of, frames_of, main_tensor
from driftline.alignment.sites.values import Dataflow, Dataflows, Place
from driftline.runs.records import Record
from driftline.runs.run import Run

# Also protects against cycles in damaged topologies.
_STEPS = 16
"""Largest number of operators between a projection and its reader."""
_ATTENTION = ("q", "k", "v")
_CACHES = ("k", "v")
_QUANTISE = (6, 17, 19)
"""Numbers of ATB's element-wise operations that quantise per tensor, per column or per row."""
# Start of ATB's names for operators that move, pad or convert elements without computing new ones.
_MOVES_ELEMENTS = ("Transpose", "Reshape", "View", "Transdata", "TransData", "Cast", "Contiguous",
                   "Pad", "Unpad", "Squeeze", "Unsqueeze", "AsStrided")  # fmt: skip


class _Origin(NamedTuple):
    """The projection that a tensor comes from, and which columns of it."""

    linear: Call
    span: tuple[int, int] | None


def infer_roles(calls: Sequence[Call], flow: Dataflow) -> None:
    """Set the roles of projections that follow from their readers; roles from names stay.

    Args:
        calls: Calls of one step, in order. Their `role`, `layout`, `input_value` and `output_value`
            are changed in place.
        flow: The dataflow of the step.
    """
    if not flow.makers:
        return
    # First visits only, because a site that is called again has the same role again.
    leaves = {call.site: call for call in calls if call.leaf and call.called and not call.visit}
    for call in leaves.values():
        source, result = (main_tensor(call.records, port) for port in ("input", "output"))
        if not call.output_value and result is not None:
            call.output_value = f"{call.site}/{result.key.slot}"
        if not call.input_value and source is not None:
            call.input_value = _first_source(leaves, flow, call.site, source.key.slot)
    evidence: dict[int, list[tuple[str, tuple[int, int] | None]]] = {}
    # Evidence from all readers is collected before any role is set, because readers may contradict
    # each other.
    by_id = {id(call): call for call in leaves.values()}
    for role, origin in _used(leaves, flow):
        roles = evidence.setdefault(id(origin.linear), [])
        if (role, origin.span) not in roles:
            roles.append((role, origin.span))
    for call_id, roles in evidence.items():
        _set_role(by_id[call_id], roles)
    # The operator that cuts a projection has the same parts, in the same order.
    for call in leaves.values():
        maker = flow.makers.get((call.site, "0")) if call.kind == "cut" else None
        if maker is not None and maker[0] in leaves:
            call.layout = leaves[maker[0]].layout


def infer_elementwise_kinds(
    reference: Sequence[Call], candidate: Sequence[Call], flows: tuple[Dataflow, Dataflow]
) -> None:
    """Set the kind of element-wise operators by their parameter, if all of them have it.

    A product, a sum and a quantising cast are all an `ElewiseOperation`.
    """
    sides = [
        [call for call in side if call.leaf and call.class_name.startswith("Elewise")]
        for side in (reference, candidate)
    ]
    types = [
        [flow.params.get(call.site, {}).get("elewiseType") for call in side]
        for side, flow in zip(sides, flows, strict=True)
    ]
    # All or none: kinds by parameter on one side only would match nothing on the other.
    if all(isinstance(kind_number, int) for side in types for kind_number in side):
        for side, numbers in zip(sides, types, strict=True):
            for call, number in zip(side, numbers, strict=True):
                call.kind = f"elementwise {'quantise' if number in _QUANTISE else number}"


def _set_role(call: Call, evidence: Sequence[tuple[str, tuple[int, int] | None]]) -> None:
    """Set one role for the projection, or one for each of its parts; none if they clash."""
    if len(evidence) == 1 and evidence[0][1] is None:
        call.role = call.role or evidence[0][0]
        return
    # A projection that is used whole and in parts has no clear role.
    parts = [(span, role) for role, span in evidence if span is not None]
    # Parts with the same bytes cannot be distinguished; the others still can.
    clear = Counter(span for span, _ in parts), Counter(role for _, role in parts)
    spans = sorted(part for part in parts if clear[0][part[0]] == clear[1][part[1]] == 1)
    apart = all(a[0][1] <= b[0][0] for a, b in itertools.pairwise(spans))
    if len(parts) == len(evidence) and apart and not call.role:
        call.layout = tuple((role, *span) for span, role in spans)


def _used(leaves: dict[str, Call], flow: Dataflow) -> Iterable[tuple[str, _Origin]]:
    """Roles, and the projections that have them, by the readers of their results."""
    active: dict[Place, _Origin] = {}
    for call in leaves.values():
        names: Sequence[str] = ()
        if call.kind == "core attention":
            # A paged attention reads keys and values from the cache.
            names = _ATTENTION
        elif call.class_name.startswith("ReshapeAndCache"):
            names = _CACHES
        # Inputs 0, 1 and 2 of an attention are q, k and v; the operator that fills a cache takes k
        # and v.
        for slot, role in enumerate(names):
            if (origin := _traced(leaves, flow, call.site, str(slot))) is not None:
                yield role, origin
        if call.kind == "activation" and (origin := _traced(leaves, flow, call.site, "0")):
            wide = origin.linear.features if origin.span is None else 0
            # A fused SwiGLU takes gate and up as one tensor, of which the gate is the first half.
            if wide and 2 * call.features == wide:
                half = wide // 2
                yield "gate", _Origin(origin.linear, (0, half))
                yield "up", _Origin(origin.linear, (half, wide))
            else:
                active.update({(r.key.site, r.key.slot): origin for r in _ports(call, "output")})
    for call in leaves.values():
        inputs = _ports(call, "input")
        if len(inputs) != 2 or call.kind == "linear":
            continue
        for gated, other in (inputs, inputs[::-1]):
            maker = flow.makers.get((call.site, gated.key.slot))
            gate = active.get(maker) if maker is not None else None
            up = _traced(leaves, flow, call.site, other.key.slot) if gate is not None else None
            # Gate and up must read the same input; otherwise the product is something else.
            if (
                gate is None
                or up is None
                or gate == up
                or gate.linear.input_value != up.linear.input_value
            ):
                continue
            yield "gate", gate
            yield "up", up


def _ports(call: Call, port: str) -> list[Record]:
    return [r for r in call.records if r.key.port == port and r.key.phase == "forward"]


def _first_source(leaves: dict[str, Call], flow: Dataflow, site: str, slot: str) -> str:
    """The value that a projection reads, before operators that only change its type."""
    for _ in range(_STEPS):
        maker = flow.makers.get((site, slot))
        call = leaves.get(maker[0]) if maker is not None else None
        inputs = [] if call is None else [r for r in _ports(call, "input") if r.shape == call.out]
        # A quantising cast may come between a norm and the projections, which still share one
        # input.
        rest = call is not None and call.class_name.startswith(("Elewise", "Cast"))
        if call is None or not rest or len(inputs) != 1:
            break
        if len([r for r in _ports(call, "input") if len(r.shape) > 1]) != 1:
            break
        site, slot = call.site, inputs[0].key.slot
    return flow.source(site, slot)


def _traced(leaves: dict[str, Call], flow: Dataflow, site: str, slot: str) -> _Origin | None:
    """The projection whose result, or a part of it, an operator reads."""
    span: tuple[int, int] | None = None
    for _ in range(_STEPS):
        maker = flow.makers.get((site, slot))
        call = leaves.get(maker[0]) if maker is not None else None
        if maker is None or call is None:
            return None
        if call.kind == "linear":
            return _Origin(call, span)
        piece = _piece(call, maker[1], flow)
        if piece is not None:
            # A piece of a piece: offsets add up from the inner cut to the outer one.
            if span is not None:
                piece = (piece[0] + span[0], piece[0] + span[1])
            span = piece
            slot = "0"
        else:
            passed = _passed_input(call, maker[1], flow)
            if passed is None:
                return None
            slot = passed
        site = call.site
    return None


def _piece(call: Call, output: str, flow: Dataflow) -> tuple[int, int] | None:
    """The columns of its input that a cutting operator puts into one of its outputs."""
    source = next((r for r in _ports(call, "input") if r.key.slot == "0"), None)
    outputs = _ports(call, "output")
    if source is None or not source.shape or not outputs:
        return None
    width = source.shape[-1]
    if call.class_name.startswith("Split"):
        sizes = [(r.key.slot, r.shape[-1] if r.shape else 0) for r in outputs]
        if sum(size for _, size in sizes) != width:
            return None  # along another axis, or not all of it was dumped
        start = 0
        for slot, size in sizes:
            if slot == output:
                return (start, start + size)
            start += size
    if call.class_name.startswith("Slice"):
        offsets = flow.params.get(call.site, {}).get("offsets")
        size = outputs[0].shape[-1] if outputs[0].shape else 0
        last = cast("list[object]", offsets)[-1] if isinstance(offsets, list) and offsets else None
        if isinstance(last, int) and last >= 0 and last + size <= width:
            return (last, last + size)
    return None


def _passed_input(call: Call, output: str, flow: Dataflow) -> str | None:
    """The slot of the only input that an operator passes on as this output, or None."""
    # Rope rotates its first two inputs (q and k) and returns each at the same position.
    if call.kind == "rope":
        return output if output in ("0", "1") else None
    result = next((r for r in _ports(call, "output") if r.key.slot == output), None)
    if result is None:
        return None
    size = math.prod(result.shape)
    fed = [r for r in _ports(call, "input") if math.prod(r.shape) == size]
    with_maker = [r for r in fed if (call.site, r.key.slot) in flow.makers]
    simple = call.class_name.startswith(_MOVES_ELEMENTS) or call.class_name.startswith("Elewise")
    if not (simple or call.kind.startswith("norm")) or len(fed) != 1 or len(with_maker) != 1:
        return None  # a sum of two tensors is neither of them
    return with_maker[0].key.slot


# --- operators with equal numbers and different roles


def rewired(reference: Run, candidate: Run) -> str:
    """A site of both runs with different roles, by the dataflow; empty if there is none."""
    reference_frames = frames_of(reference.records)
    candidate_frames = frames_of(candidate.records)
    seen: set[tuple[int, int]] = set()
    # The first step of each process is enough, because later steps call the same operators.
    for frame in reference_frames:
        place = (frame.rank, frame.process)
        if place in seen or frame not in candidate_frames:
            continue
        seen.add(place)
        reference_roles = _inferred_roles(reference, frame, calls_of(reference_frames[frame]))
        candidate_roles = (
            _inferred_roles(candidate, frame, calls_of(candidate_frames[frame]))
            if reference_roles
            else {}
        )
        for site, role in reference_roles.items():
            if site in candidate_roles and candidate_roles[site] != role:
                return site
        places = _places(reference_roles), _places(candidate_roles)
        for what, site in places[0].items():
            if site and (other := places[1].get(what)) and other != site:
                return site  # the other run has this role at another site
    return ""


def _places(roles: dict[str, object]) -> dict[tuple[str, object], str]:
    """Layer and role → the only site with that role; empty if there are several."""
    sites: dict[tuple[str, object], str] = {}
    for site, role in roles.items():
        what = (site.rpartition(".")[0], role)
        sites[what] = "" if what in sites else site
    return sites


def _inferred_roles(run: Run, frame: Frame, calls: list[Call]) -> dict[str, object]:
    """Roles and layouts by the edges only, ignoring names."""
    flow = Dataflows(run).of(frame, calls, None)
    if not flow.makers:
        return {}
    # Roles by name would hide the roles that the edges show.
    for call in calls:
        call.role = ""
    infer_roles(calls, flow)
    return {c.site: (c.role, c.layout) for c in calls if c.role or c.layout}
