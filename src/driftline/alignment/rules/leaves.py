"""Two sequences in order: which elements belong together, and where that cannot be said.

Needleman and Wunsch with free gaps. An element gets a partner only if every best alignment gives
it that one; a tie is an answer of its own. Knows numbers for labels, not what they stand for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from driftline.alignment.sites.kinds import is_known, is_solid, same_kind
from driftline.alignment.sites.site_graph import Call

MOST_CELLS = 80_000_000
"""Beyond this the table of scores takes more than 320 MB; such a pair is not aligned."""

Ints = npt.NDArray[np.int64]
Scores = npt.NDArray[np.int32]


class Matched(NamedTuple):
    """What an alignment says.

    Attributes:
        pairs: (place here, place there), ascending.
        tied_here: Places here that could as well have another partner, or none → those partners
            (two of them at most).
        tied_there: The same, seen from there.
    """

    pairs: list[tuple[int, int]]
    tied_here: dict[int, list[int]]
    tied_there: dict[int, list[int]]


def align_sequences(here: Ints, there: Ints, worth: Scores, extra: Scores | None = None) -> Matched:
    """Align two sequences of labels.

    Args:
        here: Label of each element, an index into the rows of `worth`.
        there: Label of each element, an index into the columns of `worth`.
        worth: What two labels are worth as a pair; 0 if they cannot be one.
        extra: What a pair is worth beyond that, element by element; breaks ties only if its sums
            stay below one unit of `worth`.

    Raises:
        ValueError: The sequences are too long for a table.
    """
    n, m = len(here), len(there)
    if n * m > MOST_CELLS:
        raise ValueError("too long")
    if not n or not m:
        return Matched([], {}, {})
    # Forward scores: forward[i, j] is the best total of the first i and j elements. Whole rows in
    # numpy: a Python loop over every cell would be far slower.
    forward = np.zeros((n + 1, m + 1), np.int32)
    for i in range(n):
        row = _row(here[i], there, worth, extra, i)
        taken = forward[i, :-1] + row
        np.maximum(taken, forward[i, 1:], out=taken)
        np.maximum.accumulate(taken, out=forward[i + 1, 1:])
    # Backward pass with one row of memory. A cell lies on some best alignment exactly if the
    # score before it, its own and the one after it add up to the total.
    best = int(forward[n, m])
    after = np.zeros(m + 1, np.int32)
    rows: list[npt.NDArray[np.intp]] = [np.empty(0, np.intp)] * n
    count_there = np.zeros(m, np.int64)
    for i in range(n - 1, -1, -1):
        row = _row(here[i], there, worth, extra, i)
        hits = np.flatnonzero((row > 0) & (forward[i, :-1] + row + after[1:] == best))
        rows[i] = hits
        count_there[hits] += 1
        taken = after[1:] + row
        np.maximum(taken, after[:-1], out=taken)
        after[:-1] = np.maximum.accumulate(taken[::-1])[::-1]
    pairs: list[tuple[int, int]] = []
    tied_here: dict[int, list[int]] = {}
    tied_there: dict[int, list[int]] = {}
    # A pair is certain only if it is the single option for both elements in all best
    # alignments.
    for i, hits in enumerate(rows):
        if len(hits) == 1 and count_there[hits[0]] == 1:
            pairs.append((i, int(hits[0])))
        elif len(hits):
            tied_here[i] = [int(j) for j in hits[:2]]
            # A few examples are enough for the reason that is printed; a thousand equal
            # layers would make this quadratic.
            for j in hits[:64]:
                known = tied_there.setdefault(int(j), [])
                if len(known) < 2:
                    known.append(i)
    return Matched(pairs, tied_here, tied_there)


def _row(
    label: np.int64, there: Ints, worth: Scores, extra: Scores | None, i: int
) -> npt.NDArray[np.int32]:
    row = worth[label][there]
    return row if extra is None else np.where(row > 0, row + extra[i], 0).astype(np.int32)


def increasing(places: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The longest part of a list of pairs, sorted by its first numbers, whose second ones ascend.

    >>> increasing([(0, 0), (1, 3), (2, 1), (3, 2)])
    [(0, 0), (2, 1), (3, 2)]
    """
    import bisect

    # Patience sorting: the longest increasing subsequence in n log n.
    tails: list[int] = []
    ends: list[int] = []
    before: list[int] = []
    for at, (_, there) in enumerate(places):
        length = bisect.bisect_left(tails, there)
        before.append(ends[length - 1] if length else -1)
        if length == len(tails):
            tails.append(there)
            ends.append(at)
        else:
            tails[length] = there
            ends[length] = at
    kept: list[tuple[int, int]] = []
    at = ends[-1] if ends else -1
    while at >= 0:
        kept.append(places[at])
        at = before[at]
    return kept[::-1]


# Leaves of two models, in order: which call does the same work as which.


Alike = Callable[[Call, Call], bool]
"""Whether the outputs of two calls look alike."""

_TIES_READ = 64
"""So many tied calls of a side have their values looked at; more of them say little anyway."""
# Confidence by how the link was made; the numbers only rank rules and are shown to the user.
CERTAIN, LIKELY, TIE_BROKEN, UNKNOWN_CLASS = 0.9, 0.8, 0.6, 0.5


class Link(NamedTuple):
    """Two calls that do the same work."""

    ours: Call
    theirs: Call
    confidence: float


class LeafLinks(NamedTuple):
    """What was found, the partners that tied calls could have had, and what was not tried."""

    links: list[Link]
    ties_here: dict[int, list[Call]]
    ties_there: dict[int, list[Call]]
    notes: list[str]


def link_leaves(
    ours: Sequence[Call],
    theirs: Sequence[Call],
    anchors: Sequence[tuple[Call, Call]],
    alike: Alike,
) -> LeafLinks:
    """Link the leaves of two models.

    Args:
        ours: Leaves of the reference in order, families side by side and fused alike.
        theirs: Those of the candidate.
        anchors: Leaves that are known to belong together; they stay together.
        alike: Asked for ties only.
    """
    found = LeafLinks([], {}, {}, [])
    fixed = _places(ours, theirs, anchors)
    anchored = {id(call) for pair in anchors for call in pair}
    # Solid layers first: every implementation has them, so they divide the model into short
    # stretches. Activations and dropouts are then looked for only between them.
    solid = [
        _solve(part, anchored, _is_solid, alike, found, exact=False)
        for part in _between(ours, theirs, fixed)
    ]
    firm = [(link.ours, link.theirs) for links in solid for link in links]
    # If nearly all solid layers have equal shapes, the two runs saw the same input, and other
    # layers must agree in shape as well.
    exact = sum(a.out == b.out for a, b in firm) >= 0.9 * len(firm)
    fixed = _places(ours, theirs, [*anchors, *firm])
    done = anchored | {id(call) for pair in firm for call in pair}
    for links in solid:
        found.links.extend(links)
    for part in _between(ours, theirs, fixed):
        found.links.extend(_solve(part, done, _is_any, alike, found, exact=exact))
    return found


def _places(
    ours: Sequence[Call], theirs: Sequence[Call], pairs: Sequence[tuple[Call, Call]]
) -> list[tuple[int, int]]:
    here = {id(call): at for at, call in enumerate(ours)}
    there = {id(call): at for at, call in enumerate(theirs)}
    placed = [(here[id(a)], there[id(b)]) for a, b in pairs if id(a) in here and id(b) in there]
    # Anchors that cross each other cannot all be kept in one order; the longest consistent set
    # stays.
    return increasing(sorted(placed))


def _between(
    ours: Sequence[Call], theirs: Sequence[Call], fixed: Sequence[tuple[int, int]]
) -> list[tuple[Sequence[Call], Sequence[Call]]]:
    """What lies between neighbouring fixed pairs, where both sides have something."""
    parts: list[tuple[Sequence[Call], Sequence[Call]]] = []
    i = j = 0
    for here, there in (*fixed, (len(ours), len(theirs))):
        if here > i and there > j:
            parts.append((ours[i:here], theirs[j:there]))
        i, j = here + 1, there + 1
    return parts


def _is_solid(call: Call) -> bool:
    return is_solid(call.kind)


def _is_any(call: Call) -> bool:
    del call
    return True


def _solve(
    part: tuple[Sequence[Call], Sequence[Call]],
    done: set[int],
    wanted: Callable[[Call], bool],
    alike: Alike,
    found: LeafLinks,
    *,
    exact: bool,
) -> list[Link]:
    """Align what is wanted and not done yet of one stretch; ties go to `found`."""
    here, there = ([c for c in side if id(c) not in done and wanted(c)] for side in part)
    if not here or not there:
        return []
    # The common case: equal counts and every pair fits. It needs no table.
    if len(here) == len(there) and all(
        _worth(a, b, exact) > 1 for a, b in zip(here, there, strict=True)
    ):
        # All of both sides, in order: no other alignment has as many pairs.
        return [Link(a, b, _confidence(a, b)) for a, b in zip(here, there, strict=True)]
    labels_here, looks_here = _labels(here)
    labels_there, looks_there = _labels(there)
    worth = _worths(looks_here, looks_there, exact)
    try:
        first = align_sequences(labels_here, labels_there, worth)
    except ValueError:
        found.notes.append(
            f"{len(here)} sites from '{here[0].site}' on and {len(there)} from '{there[0].site}' "
            "on are too many, and too different, to align by structure; --map tells which is which"
        )
        return []
    links = [Link(here[i], there[j], _confidence(here[i], there[j])) for i, j in first.pairs]
    if first.tied_here:
        links += _break_ties(here, there, first, (labels_here, labels_there, worth), alike, found)
    return links


def _break_ties(
    here: Sequence[Call],
    there: Sequence[Call],
    first: Matched,
    problem: tuple[Ints, Ints, Scores],
    alike: Alike,
    found: LeafLinks,
) -> list[Link]:
    labels_here, labels_there, worth = problem
    second = first
    # Values are read only for a handful of ties: a model of equal layers would read everything.
    if max(len(first.tied_here), len(first.tied_there)) <= _TIES_READ:
        extra = np.zeros((len(here), len(there)), np.int32)
        for i in first.tied_here:
            for j in first.tied_there:
                # Two classes of which one is unknown are no pair because their values agree.
                if worth[labels_here[i]][labels_there[j]] > 1 and alike(here[i], there[j]):
                    extra[i, j] = 1
        if extra.any():
            # The bonus must never outweigh structure, so structure is scaled above the
            # sum of all bonuses.
            scale = len(here) + len(there) + 1  # all of `extra` is less than one unit of worth
            second = align_sequences(labels_here, labels_there, worth * scale, extra)
            settled = [(i, j) for i, j in second.pairs if i in first.tied_here and extra[i, j]]
        else:
            settled = []
    else:
        settled = []
    taken = {i for i, _ in settled}, {j for _, j in settled}
    for i, partners in first.tied_here.items():
        if i not in taken[0]:
            found.ties_here[id(here[i])] = [there[j] for j in partners]
    for j, partners in first.tied_there.items():
        if j not in taken[1]:
            found.ties_there[id(there[j])] = [here[i] for i in partners]
    return [Link(here[i], there[j], TIE_BROKEN) for i, j in settled]


def _labels(calls: Sequence[Call]) -> tuple[Ints, list[Call]]:
    """A number for each call, equal where nothing that decides differs; and one call of each."""
    numbers: dict[tuple[object, ...], int] = {}
    examples: list[Call] = []
    labels = np.empty(len(calls), np.int64)
    for at, call in enumerate(calls):
        # Calls that agree in all of this are interchangeable: the score table has one row for each
        # group.
        look = (call.kind, call.class_name, call.role, call.out, call.into, bool(call.parts))
        number = numbers.setdefault(look, len(numbers))
        if number == len(examples):
            examples.append(call)
        labels[at] = number
    return labels, examples


def _worths(ours: list[Call], theirs: list[Call], exact: bool) -> Scores:
    """What all looks are worth to each other.

    Shapes only matter by whether they are the same, so that the many shapes that a model may have
    cost rows of a table and no calls.
    """
    kinds_here, few_here = _kinds(ours)
    kinds_there, few_there = _kinds(theirs)
    shapes: dict[object, int] = {None: 0}
    outs, intos = (
        [
            np.array([shapes.setdefault(getattr(call, name), len(shapes)) for call in side])
            for side in (ours, theirs)
        ]
        for name in ("out", "into")
    )
    # Unequal feature sizes score zero anyway; only fitting sizes are compared.
    by_size: dict[int, list[int]] = {}
    for at, call in enumerate(few_there):
        by_size.setdefault(call.features, []).append(at)
    rated = np.zeros((3, len(few_here), len(few_there)), np.int32)
    for row, call in enumerate(few_here):
        for at in by_size.get(call.features, ()):
            for number, same in enumerate(((False, False), (True, False), (True, True))):
                rated[number, row, at] = _rated(call, few_there[at], exact, *same)
    table = np.empty((len(ours), len(theirs)), np.int32)
    # Three levels: other output shape, same output shape, and same input shape too.
    for row in range(len(ours)):
        same_out = outs[1] == outs[0][row]
        known = outs[0][row] > 0 and intos[0][row] > 0
        alike = same_out.astype(np.intp) + (same_out & (intos[1] == intos[0][row]) & known)
        table[row] = rated[alike, kinds_here[row], kinds_there]
    return table


def _kinds(calls: Sequence[Call]) -> tuple[Ints, list[Call]]:
    """A number for each call, equal where nothing but shapes differs; and one call of each."""
    numbers: dict[tuple[object, ...], int] = {}
    examples: list[Call] = []
    for call in calls:
        look = (call.kind, call.class_name, call.role, call.features, call.width)
        if numbers.setdefault(look, len(examples)) == len(examples):
            examples.append(call)
    looks = ((c.kind, c.class_name, c.role, c.features, c.width) for c in calls)
    return np.array([numbers[look] for look in looks], np.int64), examples


def _worth(ours: Call, theirs: Call, exact: bool) -> int:
    """What two calls are worth as a pair: 0 if they cannot be one."""
    shapes = (ours.out, ours.into, theirs.out, theirs.into)
    same_all = None not in shapes and shapes[:2] == shapes[2:]
    return _rated(ours, theirs, exact, ours.out == theirs.out, same_all)


def _rated(ours: Call, theirs: Call, exact: bool, same_out: bool, same_all: bool) -> int:
    alike = same_kind(ours.kind, theirs.kind)
    # Roles contradict each other only if both are known: an unnamed projection may be any of
    # them.
    if not alike or (ours.role and theirs.role and ours.role != theirs.role):
        return 0
    if ours.features != theirs.features:
        return 0
    # An embedding's first input may be the ids or, where operators take weights, the table.
    unlike = ours.width != theirs.width and -1 not in (ours.width, theirs.width)
    if unlike and ours.kind != "embedding":
        return 0
    if alike == 1:
        # A class nobody knows: only where every shape agrees, and as the last resort.
        return int(same_all)
    if exact and not is_solid(ours.kind) and not same_out:
        return 0
    same_class = ours.class_name == theirs.class_name
    # 4 is the base score: one more pair always outweighs the bonuses for class and role of another.
    return 4 + same_class + (bool(ours.role) and ours.role == theirs.role)


def _confidence(ours: Call, theirs: Call) -> float:
    if same_kind(ours.kind, theirs.kind) < 2:
        return UNKNOWN_CLASS
    if not is_known(ours.kind):
        return LIKELY
    return CERTAIN if is_solid(ours.kind) else LIKELY
