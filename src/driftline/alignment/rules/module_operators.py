"""Pair inputs and outputs of modules with a run that holds only the operators inside them.

The name of an operator that torch dispatched says in which module it ran (`h.0.attn/aten.bmm`). A
module's input is the input of its first operator, and its output is the output of its last
operator, if the shapes fit. Views are not operators: axes may have been permuted between a module's
border and its operator. Shapes show that unless two axes have equal size; then an earlier operator
must have made the bytes, or a later one must read them.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from driftline.alignment.plan import Pair, Plan, execution
from driftline.alignment.reconcile.layout import merges
from driftline.alignment.sites.site_graph import ROOTS
from driftline.numerics.dtypes import DTYPES
from driftline.runs.records import Record
from driftline.runs.run import Run

if TYPE_CHECKING:
    from driftline.alignment.align import Context

_CONFIDENCE = 0.95
_Frame: TypeAlias = tuple[int, int, int]
"""Rank, process, step."""


def names_modules(operators: Run, modules: Run) -> bool:
    """Whether the operators of one run name modules of the other run, in which they ran."""
    around = {
        site.rpartition("/")[0]
        for site in {record.key.site for record in operators.records if _is_operator(record)}
    }
    # If the model has another name or structure, names are no evidence.
    return bool(around) and 2 * len(around & set(modules.sites())) > len(around)


def pair_modules_with_operators(plan: Plan, reference: Run, candidate: Run) -> list[Pair]:
    """Pairs for tensors of modules, if the other run has only the operators."""
    pairs: list[Pair] = []
    if not _has_operators(reference) and names_modules(candidate, reference):
        pairs += (
            Pair(module, operator, "structure", _CONFIDENCE)
            for module, operator in _borders(plan.missing, candidate.records)
        )
    if not _has_operators(candidate) and names_modules(reference, candidate):
        pairs += (
            Pair(operator, module, "structure", _CONFIDENCE)
            for module, operator in _borders(plan.extra, reference.records)
        )
    return pairs


def _has_operators(run: Run) -> bool:
    return any(map(_is_operator, run.records))


class _Operators(NamedTuple):
    """The operators of one frame.

    Attributes:
        made: Bytes of each value → when it was first returned.
        taken: Bytes of each value → when it was last read.
        inside: Tensors of the operators in each module, at any depth, in execution order.
    """

    made: dict[str, int]
    taken: dict[str, int]
    inside: dict[str, list[Record]]

    @classmethod
    def of(cls, records: Iterable[Record]) -> _Operators:
        operators = cls({}, {}, defaultdict(list))
        for record in records:
            digest = record.digest
            if record.key.port == "output":
                operators.made.setdefault(digest, record.order)
            elif record.key.port == "input":
                operators.taken[digest] = record.order
            for module in _modules_around(record.key.site):
                operators.inside[module].append(record)
        return operators


def _borders(
    modules: Iterable[Record], others: Iterable[Record]
) -> Iterator[tuple[Record, Record]]:
    """Tensors of modules, each with the corresponding tensor of an operator."""
    sites = {record.key.site for record in others}
    frames: dict[_Frame, list[Record]] = defaultdict(list)
    for record in sorted(filter(_is_operator, others), key=execution):
        frames[_frame(record)].append(record)
    by_frame = {frame: _Operators.of(records) for frame, records in frames.items()}
    calls: dict[tuple[_Frame, str], dict[int, list[Record]]] = defaultdict(dict)
    for record in modules:
        key = record.key
        # A module that the other run has, too, is paired by its name or not at all.
        if "/" not in key.site and key.phase == "forward" and key.site not in sites:
            calls[_frame(record), key.site].setdefault(key.visit, []).append(record)
    for (frame, site), visits in calls.items():
        if frame not in by_frame:
            continue
        operators = by_frame[frame]
        parts = _executions(operators.inside.get(site, ()), len(visits))
        for (_, records), part in zip(sorted(visits.items()), parts, strict=False):
            yield from _input_of(records, part, operators)
            yield from _output_of(records, part, operators)


def _executions(records: Sequence[Record], count: int) -> list[Sequence[Record]]:
    """Operators of each of `count` calls of a module; empty if the calls differ."""
    if not records or len(records) % count:
        return []
    size = len(records) // count
    parts = [records[start : start + size] for start in range(0, len(records), size)]
    looks = [[(record.key.site, *record.key[1:3]) for record in part] for part in parts]
    return parts if all(look == looks[0] for look in looks) else []


def _input_of(
    module: Sequence[Record], part: Sequence[Record], operators: _Operators
) -> Iterator[tuple[Record, Record]]:
    first = [record for record in _call(part) if record.key.port == "input"]
    taken = [record for record in module if record.key.port == "input"]
    for record in taken:
        fitting = [other for other in first if _fits(record, other)]
        # For two similar arguments, nothing shows which one the operator got.
        if len(fitting) != 1 or sum(_fits(other, fitting[0]) for other in taken) != 1:
            continue
        is_known = operators.made.get(fitting[0].digest, part[0].order) < part[0].order
        if is_known or not _has_like_axes(fitting[0].shape):
            yield record, fitting[0]


def _output_of(
    module: Sequence[Record], part: Sequence[Record], operators: _Operators
) -> Iterator[tuple[Record, Record]]:
    given = [record for record in module if record.key.port == "output"]
    last = [record for record in _call(reversed(part)) if record.key.port == "output"]
    if len(given) != 1:
        return
    fitting = [other for other in last if _fits(given[0], other)]
    if len(fitting) != 1:
        return
    end = part[-1].order
    if operators.taken.get(fitting[0].digest, end) > end:
        yield given[0], fitting[0]
        return
    # Another value that leaves the module may be its result.
    leaves = (
        operators.taken.get(other.digest, end) > end
        for other in part
        if other.key.port == "output" and _fits(given[0], other)
    )
    if not any(leaves) and not _has_like_axes(fitting[0].shape):
        yield given[0], fitting[0]


def _call(records: Iterable[Record]) -> list[Record]:
    """The tensors of the first call among records."""
    groups = itertools.groupby(records, key=lambda record: (record.key.site, record.key.visit))
    return list(next((group for _, group in groups), ()))


def _fits(module: Record, operator: Record) -> bool:
    """Whether an operator's tensor may be a module's: axes were only merged or split."""
    first, second = DTYPES.get(module.dtype), DTYPES.get(operator.dtype)
    if first is None or second is None or first.is_floating != second.is_floating:
        return False
    return merges(module.shape, operator.shape) or merges(operator.shape, module.shape)


def _has_like_axes(shape: Sequence[int]) -> bool:
    """Whether two axes have equal size, so that a permutation does not show.

    >>> _has_like_axes((2, 16, 16)), _has_like_axes((1, 1, 16))
    (True, False)
    """
    sizes = [size for size in shape if size > 1]
    return len(set(sizes)) < len(sizes)


def _is_operator(record: Record) -> bool:
    """Whether a tensor belongs to an operator that ran in a module's forward pass."""
    module, _, operator = record.key.site.rpartition("/")
    is_dispatched = bool(operator) and record.class_name.startswith(f"{operator}.")
    return bool(module) and is_dispatched and record.key.phase == "forward"


def _modules_around(site: str) -> Iterator[str]:
    """The modules in which an operator ran, the nearest first.

    >>> list(_modules_around("h.0.attn/aten.bmm"))
    ['h.0.attn', 'h.0', 'h', '(root)', '']
    """
    module = site.rpartition("/")[0]
    if module not in ROOTS:
        yield module
        while "." in module:
            module = module.rpartition(".")[0]
            yield module
    # The loss, and other code around the model, is not part of it.
    if module != "(program)":
        yield from ("(root)", "")


def _frame(record: Record) -> _Frame:
    return record.key.rank, record.key.process, record.key.step


def by_operators(plan: Plan, context: Context) -> Plan | None:
    """Pairs of modules with the operators that ran in them, by the operators' names."""
    runs = context.reference, context.candidate
    context.operators_named = names_modules(*runs) or names_modules(*reversed(runs))
    pairs = pair_modules_with_operators(plan, *runs) if context.operators_named else []
    return plan.with_pairs(pairs) if pairs else None
