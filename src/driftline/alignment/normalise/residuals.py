"""Models as serving engines write them: sums that no tensor holds, and modules that do more.

If a norm gets two tensors, it adds them, normalises the sum, and returns both. Layers then pass two
tensors where the original model passes their sum. The view shows the sum (`add_residuals`). An
activation whose input has twice as many features also multiplies, so it is not the activation of
the same name (`release_wider`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import TypeAlias

from driftline.alignment.normalise.view import (
    AlignedView,
    Excluded,
    Gathered,
    Origin,
    excluded_of,
    origins_of,
)
from driftline.alignment.plan import Pair, Plan
from driftline.alignment.recipe import Recipe, Step
from driftline.alignment.sites.kinds import kind_of
from driftline.numerics.dtypes import DTYPES
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run

_Port: TypeAlias = tuple[int, int, int, str, int, str]
"""Rank, process, step, site, visit and port."""
_ADDED = "it is added to the other tensor there: the other run has their sum"
_SUM = "the sum that is normalised, which the other run has as the input"


def add_residuals(reference: Run, candidate: Run) -> tuple[Run, Run]:
    """Both runs, with two tensors that one of them adds in a norm shown as their sum.

    This is done only if one run adds in norms and the other does not.
    """
    ports = _ports(reference), _ports(candidate)
    sums = _fused_sums(ports[0]), _fused_sums(ports[1])
    if bool(sums[0]) == bool(sums[1]):
        return reference, candidate
    if sums[0]:
        return _with_sums(reference, ports[0], sums[0]), candidate
    return reference, _with_sums(candidate, ports[1], sums[1])


def _ports(run: Run) -> dict[_Port, list[Record]]:
    ports: dict[_Port, list[Record]] = defaultdict(list)
    for record in run.records:
        key = record.key
        is_float = record.dtype in DTYPES and DTYPES[record.dtype].is_floating
        if key.port in ("input", "output") and key.phase == "forward" and is_float:
            place = (key.rank, key.process, key.step, key.site, key.visit, key.port)
            ports[place].append(record)
    return ports


def _fused_sums(ports: Mapping[_Port, list[Record]]) -> set[frozenset[str]]:
    """Digests of the two tensors that each norm adds: two inputs and two outputs of one shape."""
    sums: set[frozenset[str]] = set()
    for place, given in ports.items():
        if (
            place[5] != "input"
            or len(given) != 2
            or not kind_of(given[0].class_name).startswith("norm")
        ):
            continue
        made = ports.get((*place[:5], "output"), [])
        shapes = {record.shape for record in (*given, *made)}
        digests = _digests(given)
        if len(made) == 2 and len(shapes) == 1 and len(digests) == 2 and "" not in digests:
            sums.add(digests)
    return sums


def _is_norm(record: Record) -> bool:
    return kind_of(record.class_name).startswith("norm")


def _with_sums(run: Run, ports: Mapping[_Port, list[Record]], sums: set[frozenset[str]]) -> Run:
    origins: dict[TensorKey, Origin] = dict(origins_of(run))
    excluded: list[Excluded] = list(excluded_of(run))
    replacements: dict[int, Record | None] = {}
    for place, held in ports.items():
        # Containers also have other inputs, such as positions and masks.
        records = next((two for two in combinations(held, 2) if _digests(two) in sums), None)
        if records is None:
            continue
        stored = [origins.get(record.key, record) for record in records]
        parts = tuple(part for part in stored if isinstance(part, Record))
        if len(parts) != 2:
            continue
        first, second = records
        origins[first.key] = Gathered(Recipe(parts, (Step("sum"),), first.shape))
        # The same two tensors have the same sum everywhere.
        digest = " + ".join(sorted(record.digest for record in records))
        replacements[id(first)] = first._replace(digest=digest, blob=None, summary=None)
        replacements[id(second)] = None
        excluded.append((second, parts[1], _ADDED))
        for total in _totals(place, records, ports):
            replacements[id(total)] = None
            excluded.append((total, origins.get(total.key, total), _SUM))
    records = [new for r in run.records if (new := replacements.get(id(r), r)) is not None]
    base = run.base if isinstance(run, AlignedView) else run
    return AlignedView(base, records, origins, excluded)


def _digests(records: Iterable[Record]) -> frozenset[str]:
    return frozenset(record.digest for record in records)


def _totals(
    place: _Port, records: tuple[Record, Record], ports: Mapping[_Port, list[Record]]
) -> list[Record]:
    """The outputs of a norm after the first, which is the normalised one."""
    is_norm = place[5] == "input" and _is_norm(records[0])
    return ports.get((*place[:5], "output"), [])[1:] if is_norm else []


def release_wider(plan: Plan) -> Plan:
    """The plan without outputs of modules whose input has more features than their namesake's.

    One module multiplies the two halves of its input, the other is an activation: their outputs
    have the same shape, but different values.
    """
    inputs: dict[tuple[int, str, int], list[Pair]] = defaultdict(list)
    for pair in plan.pairs:
        if pair.reference.key.port == "input":
            inputs[_call(pair.reference)].append(pair)
    wider = {
        call
        for call, pairs in inputs.items()
        if len(pairs) == 1 and _is_wider(pairs[0]) and not pairs[0].candidate_recipe
    }
    gone = [
        pair
        for pair in plan.pairs
        if _call(pair.reference) in wider
        and pair.by in ("name", "alias", "normalised")
        and pair.reference.class_name != pair.candidate.class_name
    ]
    if not gone:
        return plan
    loose = {id(pair) for pair in gone}
    why = "the module of the same name takes {} times as many features, and does more"
    reasons = dict(plan.reasons)
    for pair in gone:
        factor = pair.candidate.shape[-1] / max(pair.reference.shape[-1], 1)
        if pair.reference.key.port == "input":
            reasons["reference", pair.reference.key] = why.format(f"{factor:g}")
    return plan._replace(
        pairs=tuple(pair for pair in plan.pairs if id(pair) not in loose),
        missing=(*plan.missing, *(pair.reference for pair in gone)),
        extra=(*plan.extra, *(pair.candidate for pair in gone)),
        reasons=reasons,
    )


def _call(record: Record) -> tuple[int, str, int]:
    return record.key.step, record.key.site, record.key.visit


def _is_wider(pair: Pair) -> bool:
    reference, candidate = pair.reference.shape, pair.candidate.shape
    if not reference or not candidate or pair.reference_recipe:
        return False
    more, rest = divmod(candidate[-1], reference[-1]) if reference[-1] else (0, 1)
    # The same number of tokens, in any shape: a batch in one axis has no more features.
    return more > 1 and rest == 0 and math.prod(candidate) == more * math.prod(reference)


def reassign_inputs(plan: Plan) -> Plan:
    """The plan in which inputs that were paired by position get the partner that fits.

    A serving engine passes the positions first, and the hidden states as flat tokens. The partner
    is the only input of the same call with as many elements and features.
    """
    free: dict[tuple[int, str, int], list[Record]] = defaultdict(list)
    for record in plan.extra:
        if record.key.port == "input":
            free[_call(record)].append(record)
    pairs: list[Pair] = []
    released: list[Record] = []
    taken: set[int] = set()
    for pair in plan.pairs:
        options = free.get(_call(pair.candidate), []) if _is_unfit(pair) else []
        fitting = [r for r in options if _fits(pair.reference, r) and id(r) not in taken]
        if len(fitting) == 1:
            taken.add(id(fitting[0]))
            released.append(pair.candidate)
            pair = pair._replace(candidate=fitting[0], by="structure")
        pairs.append(pair)
    if not taken:
        return plan
    extra = (*(record for record in plan.extra if id(record) not in taken), *released)
    return plan._replace(pairs=tuple(pairs), extra=extra)


def _is_unfit(pair: Pair) -> bool:
    """Whether two inputs were paired by position although they differ in number of elements."""
    is_input = pair.by == "alias" and pair.reference.key.port == "input"
    return is_input and math.prod(pair.reference.shape) != math.prod(pair.candidate.shape)


def _fits(reference: Record, candidate: Record) -> bool:
    return (
        reference.dtype == candidate.dtype
        and reference.shape[-1:] == candidate.shape[-1:]
        and math.prod(reference.shape) == math.prod(candidate.shape)
    )
