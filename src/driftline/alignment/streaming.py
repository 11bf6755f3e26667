"""Streaming plan of long runs with equal names: both indexes are read in parallel.

A million tensors are paired without holding them in memory: the plan keeps the line numbers of the
two indexes and makes pairs on demand. It is used only if every other rule would leave the pairs by
name unchanged; `streamed_plan` gives up at the first tensor that another rule might change.
"""

from __future__ import annotations

import bisect
import itertools
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast, overload

from driftline.alignment.normalise.pipeline import (
    PLAIN,
    WEIGHTS,
    is_compiled,
    keeps_graphs,
    placement_kind,
    why_alone,
)
from driftline.alignment.plan import Pair, Plan, Rule
from driftline.alignment.rules.compiler_dumps import is_conversion
from driftline.alignment.rules.names import select
from driftline.alignment.sites.kinds import kind_of
from driftline.runs.index import IndexRecords
from driftline.runs.index_lines import Line, record_of
from driftline.runs.records import Record, TensorKey, usual_moment, usual_phase
from driftline.runs.run import Run

if TYPE_CHECKING:
    from driftline.runs.files.local_files import Listed

_MOST_UNPAIRED = 20_000
"""Largest number of tensors without a partner so far, before the rules must decide."""
_FEW = 4_096
"""Largest number of pairs of a selection that are held in memory."""
_PASSING = frozenset({"dropout", "identity"})

_Key: TypeAlias = tuple[str, str, str, int, int, str, str]
_Waiting: TypeAlias = tuple[dict[_Key, tuple[int, Line]], dict[_Key, tuple[int, Line]]]
"""For each side, the lines whose partner has not come yet, with their numbers."""
_Places: TypeAlias = "tuple[array[int], array[int]]"
"""For each pair, the numbers of its lines on the two sides."""


class _NeedsRules(Exception):
    """Another rule might change the pairs by name."""


class _ProcessPair(NamedTuple):
    """The lines that one process has listed on both sides.

    Attributes:
        reference: Lines of the reference.
        candidate: Lines of the candidate.
        places: Line numbers of the pairs on the two sides; None if line n is paired with line n.
    """

    reference: Listed
    candidate: Listed
    places: tuple[Sequence[int], Sequence[int]] | None

    @property
    def pairs(self) -> int:
        return len(self.reference.lines) if self.places is None else len(self.places[0])


class StreamedPairs(Sequence[Pair]):
    """Pairs by name of two runs, made on demand."""

    def __init__(self, processes: Sequence[_ProcessPair]) -> None:
        self._processes = processes
        # Running totals find the part that holds a pair by bisection.
        self._ends = list(itertools.accumulate(part.pairs for part in processes))

    @property
    def ways(self) -> Counter[Rule]:
        """Number of pairs that each rule has made."""
        return Counter({"name": len(self)})

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> Pair: ...
    @overload
    def __getitem__(self, index: slice) -> list[Pair]: ...
    def __getitem__(self, index: int | slice) -> Pair | list[Pair]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError("the plan has no such pair")
        part_index = bisect.bisect_right(self._ends, position)
        part = self._processes[part_index]
        position -= self._ends[part_index - 1] if part_index else 0
        reference_line, candidate_line = (
            (position, position)
            if part.places is None
            else (part.places[0][position], part.places[1][position])
        )
        rank, process = part.reference.rank, part.reference.process
        return Pair(
            record_of(part.reference.lines[reference_line], rank, process),
            record_of(part.candidate.lines[candidate_line], rank, process),
        )

    def __iter__(self) -> Iterator[Pair]:
        for part in self._processes:
            rank, process = part.reference.rank, part.reference.process
            if part.places is None:
                for reference_line, candidate_line in zip(
                    part.reference.lines, part.candidate.lines, strict=True
                ):
                    yield Pair(
                        record_of(reference_line, rank, process),
                        record_of(candidate_line, rank, process),
                    )
            else:
                reference_lines, candidate_lines = part.reference.lines, part.candidate.lines
                for reference_line, candidate_line in zip(*part.places, strict=True):
                    yield Pair(
                        record_of(reference_lines[reference_line], rank, process),
                        record_of(candidate_lines[candidate_line], rank, process),
                    )

    def between(self, start: int, stop: int) -> StreamedPairs:
        """The pairs from `start` to `stop`."""
        parts: list[_ProcessPair] = []
        for part, end in zip(self._processes, self._ends, strict=True):
            # Convert the range from pairs of the plan to pairs of this part.
            first = max(start - end + part.pairs, 0)
            last = min(stop - end, 0) + part.pairs
            if first < last:
                all_lines = range(part.pairs)
                reference_places, candidate_places = part.places or (all_lines, all_lines)
                parts.append(
                    part._replace(
                        places=(reference_places[first:last], candidate_places[first:last])
                    )
                )
        return StreamedPairs(parts)

    def lines(self) -> Iterator[Line]:
        """The reference's lines."""
        for part in self._processes:
            lines = part.reference.lines
            yield from lines if part.places is None else map(lines.__getitem__, part.places[0])

    def only(self, wanted: Collection[tuple[str, str]]) -> StreamedPairs:
        """The pairs of some sites and ports."""
        parts: list[_ProcessPair] = []
        for part in self._processes:
            # Unsigned 64-bit numbers: eight bytes per pair instead of a Python object.
            kept = array("Q"), array("Q")
            places = part.places or (range(part.pairs), range(part.pairs))
            for reference_line, candidate_line in zip(*places, strict=True):
                line = part.reference.lines[reference_line]
                if (line.site, line.port) in wanted:
                    kept[0].append(reference_line)
                    kept[1].append(candidate_line)
            if kept[0]:
                parts.append(part._replace(places=kept))
        return StreamedPairs(parts)


def selected(plan: Plan, sites: Sequence[str], ports: Sequence[str]) -> Plan:
    """A plan of `streamed_plan` with some sites and ports only.

    Raises:
        BadInput: A glob or a port matches nothing in the reference.
    """
    pairs = plan.pairs
    assert isinstance(pairs, StreamedPairs)
    paired = {(line.site, line.port): None for line in pairs.lines()}
    reference_only = dict.fromkeys((record.key.site, record.key.port) for record in plan.missing)
    candidate_only = dict.fromkeys((record.key.site, record.key.port) for record in plan.extra)
    reference_names, candidate_names = (
        # Only sites and ports matter for the selection, so one empty record represents all records
        # of a site and port.
        [Record(TensorKey(site, cast("Any", port), ""), 0, "", ()) for site, port in names]
        for names in ({**paired, **reference_only}, candidate_only)
    )
    select(reference_names, sites, ports)  # raises if nothing matches
    chosen = select([*reference_names, *candidate_names], sites, ports, strict=False)
    wanted = {(record.key.site, record.key.port) for record in chosen}
    selection = pairs.only(wanted)
    return plan._replace(
        # A few pairs are made at once, because iterating over a tuple is faster than parsing lines
        # again.
        pairs=tuple(selection) if len(selection) <= _FEW else selection,
        missing=tuple(r for r in plan.missing if (r.key.site, r.key.port) in wanted),
        extra=tuple(r for r in plan.extra if (r.key.site, r.key.port) in wanted),
    )


class _Walk:
    """Reads both runs once and collects pairs, unpaired tensors and steps."""

    def __init__(self, ranks: int) -> None:
        self.several = ranks > 1
        self.other_classes = False
        self.processes: list[_ProcessPair] = []
        self.missing: list[Record] = []
        self.extra: list[Record] = []
        self.steps: tuple[set[int], set[int]] = (set(), set())

    def part(self, reference: Listed, candidate: Listed) -> None:
        """Pair the lines of one process of both runs.

        Raises:
            _NeedsRules: Another rule might pair a line differently.
        """
        # Hashes instead of keys: eight bytes per tensor, for the check for duplicates at the end.
        hashes = array("q"), array("q")
        waiting: _Waiting = ({}, {})
        places: _Places | None = None
        sides = (enumerate(reference.lines), enumerate(candidate.lines))
        for first, second in itertools.zip_longest(*sides):
            # The usual case, equal lists without waiting lines, must stay cheap, because it runs
            # for every line.
            if first is not None and second is not None and not waiting[0] and not waiting[1]:
                key = _key(first[1])
                if key == _key(second[1]):
                    for side_hashes in hashes:
                        side_hashes.append(hash(key))
                    self._pair(first[1], second[1])
                    if places is not None:
                        places[0].append(first[0])
                        places[1].append(second[0])
                    continue
            # The lists differ here for the first time. So far line n was paired with line n; from
            # now on the line numbers are stored.
            if places is None:
                paired = range(len(hashes[0]))
                places = array("Q", paired), array("Q", paired)
            for side, numbered in enumerate((first, second)):
                if numbered is not None:
                    hashes[side].append(self._pair_or_wait(side, numbered, waiting, places))
            if max(map(len, waiting)) > _MOST_UNPAIRED:
                raise _NeedsRules
        for side_hashes in hashes:
            if _has_twice(side_hashes):
                raise _NeedsRules  # a foreign dump with repeated keys: the rules pair those
        for side, listed in enumerate((reference, candidate)):
            self._add_unpaired(side, listed, waiting[side].values())
        self.processes.append(_ProcessPair(reference, candidate, _in_order(places)))

    def _pair_or_wait(
        self, side: int, numbered: tuple[int, Line], waiting: _Waiting, places: _Places
    ) -> int:
        """Pair a line with its waiting partner, or let it wait; returns the hash of its key."""
        key = _key(numbered[1])
        partner = waiting[1 - side].pop(key, None)
        if partner is None:
            waiting[side][key] = numbered
            return hash(key)
        pair = (numbered, partner) if side == 0 else (partner, numbered)
        self._pair(pair[0][1], pair[1][1])
        places[0].append(pair[0][0])
        places[1].append(pair[1][0])
        return hash(key)

    def _add_unpaired(
        self, side: int, listed: Listed, waiting: Collection[tuple[int, Line]]
    ) -> None:
        """Add lines whose partner never came."""
        unpaired = (self.missing, self.extra)[side]
        for _, line in waiting:
            self.steps[side].add(line.step)
            unpaired.append(record_of(line, listed.rank, listed.process))
        # Unpaired tensors on both sides may correspond under other names, so the rules decide.
        if min(len(self.missing), len(self.extra)):
            raise _NeedsRules
        if len(self.missing) + len(self.extra) > _MOST_UNPAIRED:
            raise _NeedsRules

    def _pair(self, reference: Line, candidate: Line) -> None:
        """Check that no rule would change a pair of two lines of one name."""
        self.steps[0].add(reference.step)
        self.steps[1].add(reference.step)
        # Each of these checks is the condition of one rule or normaliser. Different shapes need a
        # reconciler; a late input needs the rule of moments.
        if list(reference.shape) != list(candidate.shape) or (
            reference.port == "input" and _is_late(reference)
        ):
            raise _NeedsRules
        # Integers against floats may be codes of a quantised tensor.
        if reference.dtype != candidate.dtype and not (
            reference.dtype in PLAIN and candidate.dtype in PLAIN
        ):
            raise _NeedsRules
        if reference.class_ != candidate.class_:
            self.other_classes = True
            # Weights of other classes may be stored transposed, even if they are square.
            if reference.port in WEIGHTS and len(reference.shape) == 2:
                raise _NeedsRules
        if reference.site.endswith("qweight") or reference.slot == "qweight":
            raise _NeedsRules
        # Other placements of ranks mean that the tensors must be gathered first.
        if self.several and placement_kind(reference.placement) != placement_kind(
            candidate.placement
        ):
            raise _NeedsRules


def streamed_plan(reference: Run, candidate: Run) -> Plan | None:
    """The plan of two long runs by their names alone; None if the rules must decide."""
    reference_records, candidate_records = reference.records, candidate.records
    if not isinstance(reference_records, IndexRecords) or not isinstance(
        candidate_records, IndexRecords
    ):
        return None
    if not _is_usual(reference, candidate):
        return None
    # Records are made and dropped while reading; they are kept only if the rules need them after
    # all.
    reference_records.hold = candidate_records.hold = False
    plan = _walk_both(reference, candidate, reference_records, candidate_records)
    reference_records.hold = candidate_records.hold = plan is None
    return plan


def _walk_both(
    reference: Run, candidate: Run, reference_records: IndexRecords, candidate_records: IndexRecords
) -> Plan | None:
    parts = [
        [part for part in run.parts if len(part.lines)]
        for run in (reference_records, candidate_records)
    ]
    # Processes are read in pairs, so both runs must have the same ones.
    places = [[(part.rank, part.process) for part in side] for side in parts]
    if places[0] != places[1]:
        return None
    walk = _Walk(len({rank for rank, _ in places[0]}))
    try:
        for reference_part, candidate_part in zip(*parts, strict=True):
            walk.part(reference_part, candidate_part)
        notes = _notes_on_unpaired(walk, reference, candidate)
    except _NeedsRules:
        return None
    pairs = StreamedPairs(walk.processes)
    if not len(pairs):
        return None
    reasons: dict[tuple[str, TensorKey], str] = {}
    ranks = {rank for rank, _ in places[0]}
    for side, other, alone, steps in (
        ("reference", "candidate", walk.missing, walk.steps[1]),
        ("candidate", "reference", walk.extra, walk.steps[0]),
    ):
        for record in alone:
            if why := why_alone(record.key, other, steps, ranks):
                reasons[side, record.key] = why
    return Plan(pairs, tuple(walk.missing), tuple(walk.extra), tuple(notes), reasons)


def _is_usual(reference: Run, candidate: Run) -> bool:
    """Whether nothing about the two runs needs another rule than names."""
    runs = (reference, candidate)
    if all("graphs" in run.manifest for run in runs) or all(
        run.facts.operator_sites for run in runs
    ):
        return False
    if reference.facts.framework != candidate.facts.framework:
        return False
    # Names that begin with a number are counted operators, which agree by accident.
    firsts = [run.records[0].key for run in runs]
    if all(key.site[:1].isdigit() for key in firsts):
        return False
    return not (is_compiled(reference) or is_compiled(candidate))


def _notes_on_unpaired(walk: _Walk, reference: Run, candidate: Run) -> Sequence[str]:
    """Notes about tensors that only one side has.

    Raises:
        _NeedsRules: A rule may find a partner for them, or change the steps.
    """
    alone = [*walk.missing, *walk.extra]
    if not alone:
        return ()
    runs = (reference, candidate)
    if walk.other_classes or all(run.facts.numbered_names for run in runs):
        raise _NeedsRules
    if keeps_graphs(reference) and keeps_graphs(candidate):
        raise _NeedsRules
    # For each of these unpaired tensors, a rule may find a partner.
    for record in alone:
        site, name = record.key.site, record.class_name
        if site.rpartition(".")[2].isdigit() or kind_of(name) in _PASSING or is_conversion(name):
            raise _NeedsRules
        if site.endswith("qweight") or record.key.slot == "qweight":
            raise _NeedsRules
        if record.key.moment == "after" and record.key.port == "input":
            raise _NeedsRules
    # With several steps, a shifted count may be the reason why tensors are unpaired.
    if len(walk.steps[0] | walk.steps[1]) == 1:
        return ()
    from driftline.alignment.normalise.steps import align_steps

    seen = align_steps(reference, candidate, None)
    if seen[0] is not reference or seen[1] is not candidate:
        raise _NeedsRules
    return seen[2]


def _key(line: Line) -> _Key:
    port = line.port
    return (
        line.site,
        port,
        line.slot,
        line.step,
        line.visit,
        line.phase or usual_phase(port),
        line.moment or usual_moment(port),
    )


def _in_order(places: _Places | None) -> _Places | None:
    """Places sorted by the reference's lines, because partners may have come late."""
    if places is None or all(a <= b for a, b in itertools.pairwise(places[0])):
        return places
    order = sorted(range(len(places[0])), key=places[0].__getitem__)
    return (
        array("Q", (places[0][index] for index in order)),
        array("Q", (places[1][index] for index in order)),
    )


def _is_late(line: Line) -> bool:
    return line.moment == "after"


def _has_twice(hashes: array[int]) -> bool:
    """Whether a hash occurs twice; different keys with one hash are then left to the rules, too."""
    # Below this number, a set is faster than importing numpy; above, it takes many times the
    # memory.
    if len(hashes) < 50_000:
        return len(set(hashes)) < len(hashes)
    import numpy as np

    ordered = np.sort(np.frombuffer(hashes, np.int64))
    return bool((ordered[1:] == ordered[:-1]).any())
