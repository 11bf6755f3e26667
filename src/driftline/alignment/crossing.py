"""Tensors that are the same under different ports: weights that are inputs, outputs that are read.

An operator library takes weights as further inputs where a framework has parameters; and where only
outputs were kept, what an attention makes is what the projection after it reads elsewhere. Only for
calls that belong together, and only where shapes leave one answer.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from driftline.alignment.calls import Call, main_tensor
from driftline.runs.record import Record

Pairs = list[tuple[Record, Record]]
WEIGHTS, READ = 0.8, 0.6
"""Confidence of the two rules, at most."""

_CODES = frozenset({"int8", "int4", "uint4"})
_Name = tuple[str, int]
_Look = tuple[int, ...]


def pair_weights(ours: Sequence[Record], theirs: Sequence[Record]) -> Pairs:
    """Parameters of one call against further inputs of the other; both still without a partner.

    Shapes must tell them apart, a matrix in either direction; equal ones (scale and shift of a
    norm) pair in order if both sides have as many. One side must have no parameters at all.
    """
    if found := _weights(ours, theirs):
        return found
    return [(ours_, theirs_) for theirs_, ours_ in _weights(theirs, ours)]


def _weights(params: Sequence[Record], inputs: Sequence[Record]) -> Pairs:
    if any(record.key.port == "param" for record in inputs):
        return []
    here, there = _by_look(params, "param"), _by_look(inputs, "input")
    return [
        pair
        for look, group in here.items()
        if len(group) == len(there.get(look, ()))
        for pair in zip(group, there[look], strict=True)
    ]


def _by_look(records: Sequence[Record], port: str) -> dict[_Look, list[Record]]:
    found: dict[_Look, list[Record]] = defaultdict(list)
    for record in records:
        key = record.key
        first = port == "input" and key.slot == "0" and len(record.shape) > 2
        if key.port == port and key.phase == "forward" and "float" in record.dtype and not first:
            found[tuple(sorted(record.shape))].append(record)
    return {look: group for look, group in found.items() if look}


def pair_codes(ours: Call, theirs: Call, free: set[int]) -> Pairs:
    """The matrices of one product as floats and as the integers of a quantised one.

    The input and the weight of either, where they have no partner and one of the two is a code.
    """
    if ours.kind != "linear" or theirs.kind != "linear":
        return []
    found: Pairs = []
    fed = main_tensor(ours.records, "input"), main_tensor(theirs.records, "input")
    sides = [
        [
            record
            for record in call.records
            if record.key.port in ("input", "param") and record.key.phase == "forward"
            if record is not main and len(record.shape) == 2 and id(record) in free
        ]
        for call, main in ((ours, fed[0]), (theirs, fed[1]))
    ]
    weights = [(a, b) for a in sides[0] for b in sides[1] if sorted(a.shape) == sorted(b.shape)]
    both = [(a, b) for a in fed[:1] for b in fed[1:] if a is not None and b is not None]
    found += [
        (a, b)
        for a, b in both
        if {id(a), id(b)} <= free and a.shape[-1:] == b.shape[-1:] and _one_is_code(a, b)
    ]
    if len(weights) == 1 and _one_is_code(*weights[0]):
        found += weights
    return found


def _one_is_code(ours: Record, theirs: Record) -> bool:
    types = {ours.dtype, theirs.dtype}
    return bool(types & _CODES) and any("float" in dtype for dtype in types)


def pair_read(
    calls: Sequence[Call], links: Mapping[_Name, Call], free: set[int]
) -> list[tuple[Record, Record]]:
    """Outputs of attentions without a partner, and what the linked projection after each reads.

    Args:
        calls: Of one side, in order of execution.
        links: Partners on the other side, by name.
        free: ids of the records that have none.
    """
    leaves = [call for call in calls if call.leaf and call.called]
    found: Pairs = []
    for at, call in enumerate(leaves[:-1]):
        reader = leaves[at + 1]
        if call.kind != "core attention" or (call.site, call.visit) in links:
            continue
        partner = links.get((reader.site, reader.visit))
        if reader.kind != "linear" or partner is None or partner.parts or reader.parts:
            continue
        made = main_tensor(call.records, "output")
        read = main_tensor(partner.records, "input")
        # Where the reader's own input was kept, that is the pair, and there is nothing to add.
        if main_tensor(reader.records, "input") is not None or made is None or read is None:
            continue
        if id(made) in free and id(read) in free and _same_size(made, read):
            found.append((made, read))
    return found


def _same_size(ours: Record, theirs: Record) -> bool:
    return (
        bool(ours.shape and theirs.shape)
        and ours.shape[-1] == theirs.shape[-1]
        and math.prod(ours.shape) == math.prod(theirs.shape)
    )
