"""Tensors of two paired sites: which tensors correspond to each other.

Ports, phases and moments must agree. Slots are paired by name, then by alias, then by position if
shapes leave no doubt. The second part pairs tensors under different ports: weights that are inputs,
and outputs that are only recorded where they are read. This file does not know why the sites are
paired.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from driftline.alignment.sites.site_graph import Call, main_tensor
from driftline.runs.records import Record

Pairs = list[tuple[Record, Record]]
_Name = tuple[str, int]


def pair_tensors(reference: Sequence[Record], candidate: Sequence[Record]) -> Pairs:
    """The pairs among the tensors of two calls; unpaired tensors are left out."""
    pairs: Pairs = []
    # Input against output, or forward against backward, is never the same tensor.
    partners = _by_port(candidate)
    for port, records in _by_port(reference).items():
        if (others := partners.get(port)) is not None:
            pairs += _pair_slots(records, others)
    return pairs


def pair_rest(
    mapped: Mapping[_Name, _Name],
    reference: Iterable[Call],
    candidate: Iterable[Call],
    free: set[int],
) -> Pairs:
    """Pair the remaining tensors of calls for which a map has paired single tensors.

    Args:
        mapped: Site and visit of the reference → those of the candidate.
        reference: Calls of the reference.
        candidate: Calls of the candidate.
        free: ids of the records that have no partner.
    """
    pairs: Pairs = []
    candidate_calls = {(call.site, call.visit): call for call in candidate} if mapped else {}
    for call in reference if mapped else ():
        partner = mapped.get((call.site, call.visit))
        if partner in candidate_calls:
            own = [record for record in call.records if id(record) in free]
            others = [record for record in candidate_calls[partner].records if id(record) in free]
            pairs += pair_tensors(own, others)
    return pairs


def _by_port(records: Iterable[Record]) -> dict[tuple[str, str, str], list[Record]]:
    grouped: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        key = record.key
        grouped.setdefault((key.port, key.phase, key.moment), []).append(record)
    return grouped


def _pair_slots(reference: list[Record], candidate: list[Record]) -> Pairs:
    """Pair the tensors of one port."""
    # A single tensor on each side needs no slot; names may differ, if the shapes could agree.
    if len(reference) == 1 and len(candidate) == 1:
        slot = reference[0].key.slot
        same = slot == candidate[0].key.slot and not slot.isdigit()
        fits = same or _could_be(reference[0], candidate[0])
        return [(reference[0], candidate[0])] if fits else []
    if not _same_places(reference, candidate):
        # Operators take weights as inputs, and an additional weight shifts all later positions.
        first = next(zip(reference, candidate, strict=False))
        if {record.key.slot for record in first} == {"0"} and _could_be(*first):
            return [first, *_unique_signatures(reference[1:], candidate[1:])]
        return _unique_signatures(reference, candidate)
    # Names first, then aliases (a position on one side and an argument's name on the other).
    pairs: Pairs = []
    for names in (_slots, _any_names):
        pairs += _pair_names(reference, candidate, names)
        used = {id(record) for pair in pairs for record in pair}
        reference = [record for record in reference if id(record) not in used]
        candidate = [record for record in candidate if id(record) not in used]
    return pairs + _by_place(reference, candidate)


def _pair_names(
    reference: list[Record], candidate: list[Record], names: Callable[[Record], list[str]]
) -> Pairs:
    """Pair tensors that share a name; each is used once."""
    pairs: Pairs = []
    by_name = {name: record for record in reversed(candidate) for name in names(record)}
    for record in reference:
        partner = next((by_name[name] for name in names(record) if name in by_name), None)
        # A position alone is weak evidence (argument 1 may be a mask), so shapes must fit.
        named = names is _slots and not record.key.slot.isdigit()
        if partner is not None and (named or _could_be(record, partner)):
            pairs.append((record, partner))
            by_name = {name: other for name, other in by_name.items() if other is not partner}
    return pairs


def _slots(record: Record) -> list[str]:
    return [record.key.slot]


def _any_names(record: Record) -> list[str]:
    return [record.key.slot, record.alias] if record.alias else [record.key.slot]


def _by_place(reference: list[Record], candidate: list[Record]) -> Pairs:
    """Pair tensors without a common name: in order if all fit, else only unique signatures."""
    # If not all fit in order, only unique tensors are paired, because a partial order would be a
    # guess.
    if len(reference) == len(candidate) and all(map(_could_be, reference, candidate)):
        return list(zip(reference, candidate, strict=True))
    return _unique_signatures(reference, candidate)


def _same_places(reference: list[Record], candidate: list[Record]) -> bool:
    """Whether slot numbers can mean the same on both sides; names always do."""
    # Only unnamed positions can be shifted by an additional operand.
    numbers = [
        [r for r in side if r.key.slot.isdigit() and not r.alias] for side in (reference, candidate)
    ]
    if len(numbers[0]) < len(reference) or len(numbers[1]) < len(candidate):
        return True
    by_slot = {record.key.slot: record for record in candidate}
    fitting = [_could_be(r, by_slot[r.key.slot]) for r in reference if r.key.slot in by_slot]
    return len(reference) == len(candidate) and all(fitting)


def _unique_signatures(reference: list[Record], candidate: list[Record]) -> Pairs:
    counts = Counter(map(_signature, reference)), Counter(map(_signature, candidate))
    alone = {
        signature for signature in counts[0] if counts[0][signature] == counts[1][signature] == 1
    }
    partners = {_signature(record): record for record in candidate}
    return [
        (record, partners[_signature(record)])
        for record in reference
        if _signature(record) in alone
    ]


def _signature(record: Record) -> tuple[tuple[int, ...], str]:
    return (record.shape, _family(record.dtype))


def _could_be(reference: Record, candidate: Record) -> bool:
    # Dtypes may differ (that is what is compared), but floats and indices never pair.
    if _family(reference.dtype) != _family(candidate.dtype):
        return False
    if reference.shape == candidate.shape or math.prod(reference.shape) == math.prod(
        candidate.shape
    ):
        return True
    # The number of tokens or rows may differ; the features may not.
    return bool(reference.shape and candidate.shape) and reference.shape[-1] == candidate.shape[-1]


def _family(dtype: str) -> str:
    if "float" in dtype:
        return "float"
    return "complex" if "complex" in dtype else "whole"


# --- equal tensors under different ports


WEIGHTS, READ = 0.8, 0.6
"""Upper limits of the confidence of the two rules."""

_CODES = frozenset({"int8", "int4", "uint4"})
_Shape = tuple[int, ...]


def pair_weights(reference: Sequence[Record], candidate: Sequence[Record]) -> Pairs:
    """Pair unpaired parameters of one call with unpaired inputs of the other.

    Shapes must identify them, a matrix in either orientation. Equal shapes (scale and shift of a
    norm) pair in order if both sides have equally many. One side must have no parameters at all.
    """
    # Either side may be the one that takes weights as inputs.
    if pairs := _weights(reference, candidate):
        return pairs
    return [(parameter, operand) for operand, parameter in _weights(candidate, reference)]


def _weights(params: Sequence[Record], inputs: Sequence[Record]) -> Pairs:
    if any(record.key.port == "param" for record in inputs):
        return []
    parameters_by_shape, inputs_by_shape = _by_shape(params, "param"), _by_shape(inputs, "input")
    return [
        pair
        for shape, group in parameters_by_shape.items()
        if len(group) == len(inputs_by_shape.get(shape, ()))
        for pair in zip(group, inputs_by_shape[shape], strict=True)
    ]


def _by_shape(records: Sequence[Record], port: str) -> dict[_Shape, list[Record]]:
    by_shape: dict[_Shape, list[Record]] = defaultdict(list)
    for record in records:
        key = record.key
        # The first input with several axes is the activation, which has a port of its own
        # elsewhere.
        first = port == "input" and key.slot == "0" and len(record.shape) > 2
        if key.port == port and key.phase == "forward" and "float" in record.dtype and not first:
            by_shape[tuple(sorted(record.shape))].append(record)
    return {shape: group for shape, group in by_shape.items() if shape}


def pair_codes(reference: Call, candidate: Call, free: set[int]) -> Pairs:
    """Pair input and weight of a matrix product with those of a quantised product.

    Only if they have no partner and exactly one of the two holds integer codes.
    """
    # Only matrix products have codes on one side and floats on the other.
    if reference.kind != "linear" or candidate.kind != "linear":
        return []
    pairs: Pairs = []
    fed = main_tensor(reference.records, "input"), main_tensor(candidate.records, "input")
    sides = [
        [
            record
            for record in call.records
            if record.key.port in ("input", "param") and record.key.phase == "forward"
            if record is not main and len(record.shape) == 2 and id(record) in free
        ]
        for call, main in ((reference, fed[0]), (candidate, fed[1]))
    ]
    weights = [(a, b) for a in sides[0] for b in sides[1] if sorted(a.shape) == sorted(b.shape)]
    inputs = [(a, b) for a in fed[:1] for b in fed[1:] if a is not None and b is not None]
    pairs += [
        (a, b)
        for a, b in inputs
        if {id(a), id(b)} <= free and a.shape[-1:] == b.shape[-1:] and _one_is_code(a, b)
    ]
    if len(weights) == 1 and _one_is_code(*weights[0]):
        pairs += weights
    return pairs


def _one_is_code(reference: Record, candidate: Record) -> bool:
    # Two codes or two floats are paired by the other rules; here exactly one must be a code.
    types = {reference.dtype, candidate.dtype}
    return bool(types & _CODES) and any("float" in dtype for dtype in types)


def pair_read(
    calls: Sequence[Call], links: Mapping[_Name, Call], free: set[int]
) -> list[tuple[Record, Record]]:
    """Pair outputs of unpaired attentions with the input of the partner of the next projection.

    Args:
        calls: Calls of one side, in execution order.
        links: Partners on the other side, by site and visit.
        free: ids of the records that have no partner.
    """
    leaves = [call for call in calls if call.leaf and call.called]
    pairs: Pairs = []
    for index, call in enumerate(leaves[:-1]):
        # The output of a fused attention and the input of the projection after it are the same
        # tensor; some libraries keep the first, others the second.
        reader = leaves[index + 1]
        if call.kind != "core attention" or (call.site, call.visit) in links:
            continue
        partner = links.get((reader.site, reader.visit))
        if reader.kind != "linear" or partner is None or partner.parts or reader.parts:
            continue
        made = main_tensor(call.records, "output")
        read = main_tensor(partner.records, "input")
        # If the reader's own input was recorded, that is the pair, and nothing is missing.
        if main_tensor(reader.records, "input") is not None or made is None or read is None:
            continue
        if id(made) in free and id(read) in free and _same_size(made, read):
            pairs.append((made, read))
    return pairs


def _same_size(record: Record, other: Record) -> bool:
    return (
        bool(record.shape and other.shape)
        and record.shape[-1] == other.shape[-1]
        and math.prod(record.shape) == math.prod(other.shape)
    )
