"""Long runs whose tensors are called the same: paired by walking both indexes side by side.

A million tensors are paired without holding them: the plan keeps who stands where and makes pairs
when they are asked for. Taken only where every other rule would leave things as names have them;
`plan_alike` gives up at the first sign that one of them has something to say, and the rules decide.
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
    way,
    why_alone,
)
from driftline.alignment.plan import Pair, Plan, Rule
from driftline.alignment.rules.compiler_dumps import is_conversion
from driftline.alignment.rules.names import select
from driftline.alignment.sites.kinds import kind_of
from driftline.runs.index import KeptRecords
from driftline.runs.index_lines import Line, record_of
from driftline.runs.records import Record, TensorKey, usual_moment, usual_phase
from driftline.runs.run import Run

if TYPE_CHECKING:
    from driftline.runs.local_files import Listed

_MOST_APART = 20_000
"""Tensors that may wait for their partner, or be alone; more of them, and the rules decide."""
_FEW = 4_096
"""Pairs of a selection that may as well be held."""
_PASSING = frozenset({"dropout", "identity"})

_Key: TypeAlias = tuple[str, str, str, int, int, str, str]


class _NotAlike(Exception):
    """Another rule may have something to say."""


class _Together(NamedTuple):
    """What one process listed on both sides.

    Attributes:
        ours: The reference's lines.
        theirs: The candidate's.
        places: Lines of ours and of theirs that belong together; None where all do, in turn.
    """

    ours: Listed
    theirs: Listed
    places: tuple[Sequence[int], Sequence[int]] | None

    @property
    def pairs(self) -> int:
        return len(self.ours.lines) if self.places is None else len(self.places[0])


class KeptPairs(Sequence[Pair]):
    """Pairs by name of two runs, made when they are asked for."""

    def __init__(self, together: Sequence[_Together]) -> None:
        self._together = together
        # Running totals find the part that holds a pair by bisection.
        self._ends = list(itertools.accumulate(part.pairs for part in together))

    @property
    def ways(self) -> Counter[Rule]:
        """How many pairs each rule has made."""
        return Counter({"name": len(self)})

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> Pair: ...
    @overload
    def __getitem__(self, index: slice) -> list[Pair]: ...
    def __getitem__(self, index: int | slice) -> Pair | list[Pair]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError("the plan has no such pair")
        which = bisect.bisect_right(self._ends, at)
        part = self._together[which]
        at -= self._ends[which - 1] if which else 0
        here, there = (at, at) if part.places is None else (part.places[0][at], part.places[1][at])
        rank, process = part.ours.rank, part.ours.process
        return Pair(
            record_of(part.ours.lines[here], rank, process),
            record_of(part.theirs.lines[there], rank, process),
        )

    def __iter__(self) -> Iterator[Pair]:
        for part in self._together:
            rank, process = part.ours.rank, part.ours.process
            if part.places is None:
                for here, there in zip(part.ours.lines, part.theirs.lines, strict=True):
                    yield Pair(record_of(here, rank, process), record_of(there, rank, process))
            else:
                ours, theirs = part.ours.lines, part.theirs.lines
                for here, there in zip(*part.places, strict=True):
                    yield Pair(
                        record_of(ours[here], rank, process),
                        record_of(theirs[there], rank, process),
                    )

    def between(self, start: int, stop: int) -> KeptPairs:
        """A stretch of them."""
        found: list[_Together] = []
        for part, end in zip(self._together, self._ends, strict=True):
            # The stretch is given in pairs of the plan; here it becomes one of this
            # part.
            first = max(start - end + part.pairs, 0)
            last = min(stop - end, 0) + part.pairs
            if first < last:
                whole = range(part.pairs)
                ours, theirs = part.places or (whole, whole)
                found.append(part._replace(places=(ours[first:last], theirs[first:last])))
        return KeptPairs(found)

    def lines(self) -> Iterator[Line]:
        """The reference's lines."""
        for part in self._together:
            lines = part.ours.lines
            yield from lines if part.places is None else map(lines.__getitem__, part.places[0])

    def only(self, wanted: Collection[tuple[str, str]]) -> KeptPairs:
        """Those of some sites and ports."""
        found: list[_Together] = []
        for part in self._together:
            # Unsigned 64-bit numbers: eight bytes a pair instead of a Python object.
            kept = array("Q"), array("Q")
            places = part.places or (range(part.pairs), range(part.pairs))
            for here, there in zip(*places, strict=True):
                line = part.ours.lines[here]
                if (line.site, line.port) in wanted:
                    kept[0].append(here)
                    kept[1].append(there)
            if kept[0]:
                found.append(part._replace(places=kept))
        return KeptPairs(found)


def selected(plan: Plan, sites: Sequence[str], ports: Sequence[str]) -> Plan:
    """A plan of `plan_alike` with some sites and ports only.

    Raises:
        BadInput: A glob or a port matches nothing in the reference.
    """
    pairs = plan.pairs
    assert isinstance(pairs, KeptPairs)
    paired = {(line.site, line.port): None for line in pairs.lines()}
    ours = dict.fromkeys((record.key.site, record.key.port) for record in plan.missing)
    theirs = dict.fromkeys((record.key.site, record.key.port) for record in plan.extra)
    known, other = (
        # Only sites and ports matter for the selection, so one empty record stands for all
        # of theirs.
        [Record(TensorKey(site, cast("Any", port), ""), 0, "", ()) for site, port in each]
        for each in ({**paired, **ours}, theirs)
    )
    select(known, sites, ports)  # says what matches nothing
    found = select([*known, *other], sites, ports, strict=False)
    wanted = {(record.key.site, record.key.port) for record in found}
    some = pairs.only(wanted)
    return plan._replace(
        # A few pairs are made at once: a tuple is quicker to walk than lines that are
        # parsed again.
        pairs=tuple(some) if len(some) <= _FEW else some,
        missing=tuple(r for r in plan.missing if (r.key.site, r.key.port) in wanted),
        extra=tuple(r for r in plan.extra if (r.key.site, r.key.port) in wanted),
    )


class _Walk:
    """Both runs, walked once; what was met on the way."""

    def __init__(self, ranks: int) -> None:
        self.several = ranks > 1
        self.other_classes = False
        self.together: list[_Together] = []
        self.missing: list[Record] = []
        self.extra: list[Record] = []
        self.steps: tuple[set[int], set[int]] = (set(), set())

    def part(self, ours: Listed, theirs: Listed) -> None:
        """One process of both runs.

        Raises:
            _NotAlike: Something about it is out of the ordinary.
        """
        # Hashes instead of keys: eight bytes a tensor, for the test on duplicates at the
        # end.
        keys = array("q"), array("q")
        apart: tuple[dict[_Key, tuple[int, Line]], dict[_Key, tuple[int, Line]]] = ({}, {})
        places: tuple[array[int], array[int]] | None = None
        sides = (enumerate(ours.lines), enumerate(theirs.lines))
        for here, there in itertools.zip_longest(*sides):
            # The usual case, both lists in step with nobody waiting, must stay cheap:
            # it runs for every line.
            if here is not None and there is not None and not apart[0] and not apart[1]:
                mine, its = _key(here[1]), _key(there[1])
                if mine == its:
                    for known in keys:
                        known.append(hash(mine))
                    self._pair(here[1], there[1])
                    if places is not None:
                        places[0].append(here[0])
                        places[1].append(there[0])
                    continue
            # The lists part here for the first time. Until now line n belonged to line
            # n, and from now on the places are kept.
            if places is None:
                done = len(keys[0])
                places = array("Q", range(done)), array("Q", range(done))
            for side, each in enumerate((here, there)):
                if each is None:
                    continue
                key = _key(each[1])
                keys[side].append(hash(key))
                # A line waits until its partner comes by on the other side.
                partner = apart[1 - side].pop(key, None)
                if partner is None:
                    apart[side][key] = each
                    continue
                both = (each, partner) if side == 0 else (partner, each)
                self._pair(both[0][1], both[1][1])
                places[0].append(both[0][0])
                places[1].append(both[1][0])
            if max(map(len, apart)) > _MOST_APART:
                raise _NotAlike
        for known in keys:
            if _has_twice(known):
                raise _NotAlike  # somebody else's dump: who is whose is decided with care
        for side, alone in enumerate((self.missing, self.extra)):
            listed = (ours, theirs)[side]
            for _, line in apart[side].values():
                self.steps[side].add(line.step)
                alone.append(record_of(line, listed.rank, listed.process))
        # Lone tensors on both sides may belong together under other names: that is for the
        # rules.
        if min(len(self.missing), len(self.extra)) or len(self.missing + self.extra) > _MOST_APART:
            raise _NotAlike
        # Partners may have come late; a plan lists its pairs in the reference's order.
        if places is not None and any(a > b for a, b in itertools.pairwise(places[0])):
            order = sorted(range(len(places[0])), key=places[0].__getitem__)
            places = (
                array("Q", (places[0][at] for at in order)),
                array("Q", (places[1][at] for at in order)),
            )
        self.together.append(_Together(ours, theirs, places))

    def _pair(self, ours: Line, theirs: Line) -> None:
        """Looks at two lines of one name: is there anything that a rule would do to them?"""
        self.steps[0].add(ours.step)
        self.steps[1].add(ours.step)
        # Each of these tests is the condition of one rule or normaliser. Shapes call for a
        # reconciler, a late input for the rule of moments.
        if list(ours.shape) != list(theirs.shape) or (ours.port == "input" and _is_late(ours)):
            raise _NotAlike
        # Integers against floats may be codes of a quantised tensor.
        if ours.dtype != theirs.dtype and not (ours.dtype in PLAIN and theirs.dtype in PLAIN):
            raise _NotAlike
        if ours.class_ != theirs.class_:
            self.other_classes = True
            # Weights of other classes may be stored transposed, even where they are
            # square.
            if ours.port in WEIGHTS and len(ours.shape) == 2:
                raise _NotAlike
        if ours.site.endswith("qweight") or ours.slot == "qweight":
            raise _NotAlike
        # Other placements of ranks mean that the tensors must be gathered first.
        if self.several and way(ours.placement) != way(theirs.placement):
            raise _NotAlike


def plan_alike(reference: Run, candidate: Run) -> Plan | None:
    """The plan of two long runs by their names alone; None where the rules must decide."""
    ours, theirs = reference.records, candidate.records
    if not isinstance(ours, KeptRecords) or not isinstance(theirs, KeptRecords):
        return None
    if not _is_usual(reference, candidate):
        return None
    # Records are made and dropped while walking; they are kept only if the rules need them
    # after all.
    ours.hold = theirs.hold = False
    plan = _walked(reference, candidate, ours, theirs)
    ours.hold = theirs.hold = plan is None
    return plan


def _walked(reference: Run, candidate: Run, ours: KeptRecords, theirs: KeptRecords) -> Plan | None:
    parts = [[part for part in run.parts if len(part.lines)] for run in (ours, theirs)]
    # Processes are walked in pairs, so both runs must have the same ones.
    places = [[(part.rank, part.process) for part in side] for side in parts]
    if places[0] != places[1]:
        return None
    walk = _Walk(len({rank for rank, _ in places[0]}))
    try:
        for here, there in zip(*parts, strict=True):
            walk.part(here, there)
        notes = _about_lone(walk, reference, candidate)
    except _NotAlike:
        return None
    pairs = KeptPairs(walk.together)
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
    """Whether nothing about the runs as wholes asks for a rule of its own."""
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


def _about_lone(walk: _Walk, reference: Run, candidate: Run) -> Sequence[str]:
    """What is to be said where one side has tensors that the other has not.

    Raises:
        _NotAlike: A rule may find a partner for them, or other steps.
    """
    alone = [*walk.missing, *walk.extra]
    if not alone:
        return ()
    runs = (reference, candidate)
    if walk.other_classes or all(run.facts.numbered_names for run in runs):
        raise _NotAlike
    if keeps_graphs(reference) and keeps_graphs(candidate):
        raise _NotAlike
    # Each of these lone tensors is one that a rule may find a partner for.
    for record in alone:
        site, name = record.key.site, record.class_name
        if site.rpartition(".")[2].isdigit() or kind_of(name) in _PASSING or is_conversion(name):
            raise _NotAlike
        if site.endswith("qweight") or record.key.slot == "qweight":
            raise _NotAlike
        if record.key.moment == "after" and record.key.port == "input":
            raise _NotAlike
    # With several steps, a shifted count may be why tensors are alone.
    if len(walk.steps[0] | walk.steps[1]) == 1:
        return ()
    from driftline.alignment.normalise.steps import seen_steps

    seen = seen_steps(reference, candidate, None)
    if seen[0] is not reference or seen[1] is not candidate:
        raise _NotAlike
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


def _is_late(line: Line) -> bool:
    return line.moment == "after"


def _has_twice(hashes: array[int]) -> bool:
    """Whether a number is there twice; keys that only share their hash are looked at with care."""
    # Below this a set is quicker than importing numpy; above, it would take ten times the
    # memory.
    if len(hashes) < 50_000:
        return len(set(hashes)) < len(hashes)
    import numpy as np

    ordered = np.sort(np.frombuffer(hashes, np.int64))
    return bool((ordered[1:] == ordered[:-1]).any())
