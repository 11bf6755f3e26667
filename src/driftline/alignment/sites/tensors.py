"""Two sites belong together: which tensor of one is which of the other.

Ports, phases and moments must agree; slots by name, by alias, then by place where shapes leave no
doubt. Knows nothing of why the sites belong together.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from driftline.alignment.sites.site_graph import Call, main_tensor
from driftline.runs.records import Record

Pairs = list[tuple[Record, Record]]
_Name = tuple[str, int]


def pair_tensors(ours: Sequence[Record], theirs: Sequence[Record]) -> Pairs:
    """The pairs among the tensors of two calls; what has no partner is left out."""
    found: Pairs = []
    # Input against output, or forward against backward, is never the same tensor.
    there = _by_port(theirs)
    for port, here in _by_port(ours).items():
        if (others := there.get(port)) is not None:
            found += _pair_slots(here, others)
    return found


def pair_rest(
    mapped: Mapping[_Name, _Name], ours: Iterable[Call], theirs: Iterable[Call], free: set[int]
) -> Pairs:
    """What a map of single tensors leaves of calls that it has said belong together.

    Args:
        mapped: Site and visit of one side → those of the other.
        ours: Calls of the reference.
        theirs: Those of the candidate.
        free: ids of the records that have no partner.
    """
    found: Pairs = []
    there = {(call.site, call.visit): call for call in theirs} if mapped else {}
    for call in ours if mapped else ():
        partner = mapped.get((call.site, call.visit))
        if partner in there:
            mine = [record for record in call.records if id(record) in free]
            others = [record for record in there[partner].records if id(record) in free]
            found += pair_tensors(mine, others)
    return found


def _by_port(records: Iterable[Record]) -> dict[tuple[str, str, str], list[Record]]:
    grouped: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        key = record.key
        grouped.setdefault((key.port, key.phase, key.moment), []).append(record)
    return grouped


def _pair_slots(ours: list[Record], theirs: list[Record]) -> Pairs:
    # A single tensor on each side needs no slot; names may differ, if the shapes could agree.
    if len(ours) == 1 and len(theirs) == 1:
        same = ours[0].key.slot == theirs[0].key.slot and not ours[0].key.slot.isdigit()
        return [(ours[0], theirs[0])] if same or _could_be(ours[0], theirs[0]) else []
    found: Pairs = []
    if not _same_places(ours, theirs):
        # Operators take weights as further inputs, and one more of them moves all that follow.
        first = next(zip(ours, theirs, strict=False))
        if {record.key.slot for record in first} == {"0"} and _could_be(*first):
            found, ours, theirs = [first], ours[1:], theirs[1:]
        return found + _alone_of_their_look(ours, theirs)
    # Names first, then aliases (a position on one side and an argument's name on the other).
    for names in (_slots, _any_names):
        known = {name: record for record in reversed(theirs) for name in names(record)}
        for record in list(ours):
            partner = next((known[n] for n in names(record) if n in known), None)
            if partner is None:
                continue
            # By the place alone only what could be the same thing: argument 1 may be a mask here.
            named = names is _slots and not record.key.slot.isdigit()
            if named or _could_be(record, partner):
                found.append((record, partner))
                ours = [each for each in ours if each is not record]
                theirs = [each for each in theirs if each is not partner]
                known = {name: each for name, each in known.items() if each is not partner}
    return found + _by_place(ours, theirs)


def _slots(record: Record) -> list[str]:
    return [record.key.slot]


def _any_names(record: Record) -> list[str]:
    return [record.key.slot, record.alias] if record.alias else [record.key.slot]


def _by_place(ours: list[Record], theirs: list[Record]) -> Pairs:
    """What names leave over: in order if all fit, else only what there is one of on each side."""
    # All fit in order, or only what is unique: a partial order would guess.
    if len(ours) == len(theirs) and all(map(_could_be, ours, theirs)):
        return list(zip(ours, theirs, strict=True))
    return _alone_of_their_look(ours, theirs)


def _same_places(ours: list[Record], theirs: list[Record]) -> bool:
    """Whether numbers of slots can mean the same on both sides; names always can."""
    # Only unnamed positions can be shifted by an additional operand.
    numbers = [[r for r in side if r.key.slot.isdigit() and not r.alias] for side in (ours, theirs)]
    if len(numbers[0]) < len(ours) or len(numbers[1]) < len(theirs):
        return True
    known = {record.key.slot: record for record in theirs}
    fitting = [_could_be(r, known[r.key.slot]) for r in ours if r.key.slot in known]
    return len(ours) == len(theirs) and all(fitting)


def _alone_of_their_look(ours: list[Record], theirs: list[Record]) -> Pairs:
    counts = Counter(map(_look, ours)), Counter(map(_look, theirs))
    alone = {look for look in counts[0] if counts[0][look] == counts[1][look] == 1}
    there = {_look(record): record for record in theirs}
    return [(record, there[_look(record)]) for record in ours if _look(record) in alone]


def _look(record: Record) -> tuple[tuple[int, ...], str]:
    return (record.shape, _family(record.dtype))


def _could_be(ours: Record, theirs: Record) -> bool:
    # Dtypes may differ (that is what is compared), but floats and indices never pair.
    if _family(ours.dtype) != _family(theirs.dtype):
        return False
    if ours.shape == theirs.shape or math.prod(ours.shape) == math.prod(theirs.shape):
        return True
    # Another number of tokens or rows: the features stay.
    return bool(ours.shape and theirs.shape) and ours.shape[-1] == theirs.shape[-1]


def _family(dtype: str) -> str:
    if "float" in dtype:
        return "float"
    return "complex" if "complex" in dtype else "whole"


# Tensors that are the same under different ports: weights that are inputs, outputs that are
# read.


WEIGHTS, READ = 0.8, 0.6
"""Confidence of the two rules, at most."""

_CODES = frozenset({"int8", "int4", "uint4"})
_Look = tuple[int, ...]


def pair_weights(ours: Sequence[Record], theirs: Sequence[Record]) -> Pairs:
    """Parameters of one call against further inputs of the other; both still without a partner.

    Shapes must tell them apart, a matrix in either direction; equal ones (scale and shift of a
    norm) pair in order if both sides have as many. One side must have no parameters at all.
    """
    # Either side may be the one that takes weights as inputs.
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
        # The first input of several axes is the activation, which has a port of its own
        # elsewhere.
        first = port == "input" and key.slot == "0" and len(record.shape) > 2
        if key.port == port and key.phase == "forward" and "float" in record.dtype and not first:
            found[tuple(sorted(record.shape))].append(record)
    return {look: group for look, group in found.items() if look}


def pair_codes(ours: Call, theirs: Call, free: set[int]) -> Pairs:
    """The matrices of one product as floats and as the integers of a quantised one.

    The input and the weight of either, where they have no partner and one of the two is a code.
    """
    # Only matrix products have codes on one side and floats on the other.
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
    # Two codes or two floats are paired by the other rules; here exactly one must be a code.
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
        # The output of a fused attention and the input of the projection after it are one
        # tensor; some libraries keep the first, others the second.
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
