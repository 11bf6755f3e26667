"""Link the leaves of two models in execution order.

`align_sequences` is the general part: the algorithm of Needleman and Wunsch with free gaps. An
element gets a partner only if every best alignment gives it the same one; ties are reported. It
knows labels and scores, but not their meaning. `link_leaves` scores calls by kind, class, role and
shape, and aligns them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from driftline.alignment.sites.kinds import is_known, is_solid, same_kind
from driftline.alignment.sites.site_graph import Call

MOST_CELLS = 80_000_000
"""With more cells, the table of scores would take more than 320 MB; such a pair is not aligned."""

Ints = npt.NDArray[np.int64]
Scores = npt.NDArray[np.int32]


class Matched(NamedTuple):
    """The result of an alignment.

    Attributes:
        pairs: (row, column), ascending.
        tied_rows: Rows that could have another partner, or none → these partners (at most two).
        tied_columns: Columns, likewise.
    """

    pairs: list[tuple[int, int]]
    tied_rows: dict[int, list[int]]
    tied_columns: dict[int, list[int]]


def align_sequences(
    row_labels: Ints, column_labels: Ints, scores: Scores, extra: Scores | None = None
) -> Matched:
    """Align two sequences of labels.

    Args:
        row_labels: Label of each element of the first sequence: an index into rows of `scores`.
        column_labels: Label of each element of the second sequence: an index into columns of
            `scores`.
        scores: Score of two labels as a pair; 0 if they cannot be one.
        extra: Additional score of each pair of elements. It only breaks ties if its sum stays below
            one unit of `scores`.

    Raises:
        ValueError: The sequences are too long for a table.
    """
    n, m = len(row_labels), len(column_labels)
    if n * m > MOST_CELLS:
        raise ValueError("too long")
    if not n or not m:
        return Matched([], {}, {})
    # Forward scores: forward[i, j] is the best total of the first i and j elements. Whole rows in
    # numpy, because a Python loop over every cell would be far slower.
    forward = np.zeros((n + 1, m + 1), np.int32)
    for i in range(n):
        row = _row(row_labels[i], column_labels, scores, extra, i)
        totals = forward[i, :-1] + row
        np.maximum(totals, forward[i, 1:], out=totals)
        np.maximum.accumulate(totals, out=forward[i + 1, 1:])
    # Backward pass with one row of memory. A cell is on some best alignment exactly if the score
    # before it, its own score and the score after it add up to the total.
    best = int(forward[n, m])
    after = np.zeros(m + 1, np.int32)
    rows: list[npt.NDArray[np.intp]] = [np.empty(0, np.intp)] * n
    column_counts = np.zeros(m, np.int64)
    for i in range(n - 1, -1, -1):
        row = _row(row_labels[i], column_labels, scores, extra, i)
        hits = np.flatnonzero((row > 0) & (forward[i, :-1] + row + after[1:] == best))
        rows[i] = hits
        column_counts[hits] += 1
        totals = after[1:] + row
        np.maximum(totals, after[:-1], out=totals)
        after[:-1] = np.maximum.accumulate(totals[::-1])[::-1]
    pairs: list[tuple[int, int]] = []
    tied_rows: dict[int, list[int]] = {}
    tied_columns: dict[int, list[int]] = {}
    # A pair is certain only if it is the single option for both elements in all best alignments.
    for i, hits in enumerate(rows):
        if len(hits) == 1 and column_counts[hits[0]] == 1:
            pairs.append((i, int(hits[0])))
        elif len(hits):
            tied_rows[i] = [int(j) for j in hits[:2]]
            # A few examples are enough for the reason that is printed; a thousand equal layers
            # would make this quadratic.
            for j in hits[:64]:
                options = tied_columns.setdefault(int(j), [])
                if len(options) < 2:
                    options.append(i)
    return Matched(pairs, tied_rows, tied_columns)


def _row(
    label: np.int64, column_labels: Ints, scores: Scores, extra: Scores | None, i: int
) -> npt.NDArray[np.int32]:
    row = scores[label][column_labels]
    return row if extra is None else np.where(row > 0, row + extra[i], 0).astype(np.int32)


def increasing(places: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The longest subsequence of pairs, sorted by first number, whose second numbers ascend.

    >>> increasing([(0, 0), (1, 3), (2, 1), (3, 2)])
    [(0, 0), (2, 1), (3, 2)]
    """
    import bisect

    # Patience sorting: the longest increasing subsequence in n log n.
    tails: list[int] = []
    ends: list[int] = []
    before: list[int] = []
    for index, (_, second) in enumerate(places):
        length = bisect.bisect_left(tails, second)
        before.append(ends[length - 1] if length else -1)
        if length == len(tails):
            tails.append(second)
            ends.append(index)
        else:
            tails[length] = second
            ends[length] = index
    kept: list[tuple[int, int]] = []
    index = ends[-1] if ends else -1
    while index >= 0:
        kept.append(places[index])
        index = before[index]
    return kept[::-1]


# --- leaves of two models


Alike = Callable[[Call, Call], bool]
"""Whether the outputs of two calls have similar values."""

_TIES_READ = 64
"""Values are read for at most this many tied calls of a side."""
# Confidence by how the link was made; the numbers only rank rules and are shown to the user.
CERTAIN, LIKELY, TIE_BROKEN, UNKNOWN_CLASS = 0.9, 0.8, 0.6, 0.5


class Link(NamedTuple):
    """Two calls that do the same work."""

    reference: Call
    candidate: Call
    confidence: float


class LeafLinks(NamedTuple):
    """Links, the possible partners of tied calls, and notes on stretches that were not aligned."""

    links: list[Link]
    reference_ties: dict[int, list[Call]]
    candidate_ties: dict[int, list[Call]]
    notes: list[str]


def link_leaves(
    reference: Sequence[Call],
    candidate: Sequence[Call],
    anchors: Sequence[tuple[Call, Call]],
    alike: Alike,
) -> LeafLinks:
    """Link the leaves of two models.

    Args:
        reference: Leaves of the reference in order, with families ordered and fused equally.
        candidate: Leaves of the candidate.
        anchors: Leaves that are already paired; they stay paired.
        alike: Compares values; called for ties only.
    """
    result = LeafLinks([], {}, {}, [])
    fixed = _places(reference, candidate, anchors)
    anchored = {id(call) for pair in anchors for call in pair}
    # Solid layers first: every implementation has them, so they divide the model into short
    # stretches. Activations and dropouts are then aligned only inside these stretches.
    solid = [
        _solve(part, anchored, _is_solid, alike, result, exact=False)
        for part in _between(reference, candidate, fixed)
    ]
    firm = [(link.reference, link.candidate) for links in solid for link in links]
    # If nearly all solid layers have equal shapes, the two runs saw the same input, so the shapes
    # of other layers must agree as well.
    exact = sum(a.out == b.out for a, b in firm) >= 0.9 * len(firm)
    fixed = _places(reference, candidate, [*anchors, *firm])
    done = anchored | {id(call) for pair in firm for call in pair}
    for links in solid:
        result.links.extend(links)
    for part in _between(reference, candidate, fixed):
        result.links.extend(_solve(part, done, _is_any, alike, result, exact=exact))
    return result


def _places(
    reference: Sequence[Call], candidate: Sequence[Call], pairs: Sequence[tuple[Call, Call]]
) -> list[tuple[int, int]]:
    reference_index = {id(call): index for index, call in enumerate(reference)}
    candidate_index = {id(call): index for index, call in enumerate(candidate)}
    placed = [
        (reference_index[id(a)], candidate_index[id(b)])
        for a, b in pairs
        if id(a) in reference_index and id(b) in candidate_index
    ]
    # Anchors that cross each other cannot all be kept in one order; the longest consistent set
    # stays.
    return increasing(sorted(placed))


def _between(
    reference: Sequence[Call], candidate: Sequence[Call], fixed: Sequence[tuple[int, int]]
) -> list[tuple[Sequence[Call], Sequence[Call]]]:
    """The stretches between neighbouring fixed pairs that are not empty on either side."""
    parts: list[tuple[Sequence[Call], Sequence[Call]]] = []
    i = j = 0
    for row, column in (*fixed, (len(reference), len(candidate))):
        if row > i and column > j:
            parts.append((reference[i:row], candidate[j:column]))
        i, j = row + 1, column + 1
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
    result: LeafLinks,
    *,
    exact: bool,
) -> list[Link]:
    """Align the wanted, unlinked calls of one stretch; ties are added to `result`."""
    reference, candidate = ([c for c in side if id(c) not in done and wanted(c)] for side in part)
    if not reference or not candidate:
        return []
    # The common case, equal counts with fitting pairs throughout, needs no table.
    if len(reference) == len(candidate) and all(
        _score(a, b, exact) > 1 for a, b in zip(reference, candidate, strict=True)
    ):
        # All calls of both sides, in order: no other alignment has as many pairs.
        return [Link(a, b, _confidence(a, b)) for a, b in zip(reference, candidate, strict=True)]
    reference_labels, reference_examples = _labels(reference)
    candidate_labels, candidate_examples = _labels(candidate)
    scores = _score_table(reference_examples, candidate_examples, exact)
    try:
        first = align_sequences(reference_labels, candidate_labels, scores)
    except ValueError:
        result.notes.append(
            f"{len(reference)} sites from '{reference[0].site}' on and {len(candidate)} from "
            f"'{candidate[0].site}' on are too many, and too different, "
            "to align by structure; --map says which is which"
        )
        return []
    links = [
        Link(reference[i], candidate[j], _confidence(reference[i], candidate[j]))
        for i, j in first.pairs
    ]
    if first.tied_rows:
        links += _break_ties(
            reference, candidate, first, (reference_labels, candidate_labels, scores), alike, result
        )
    return links


def _break_ties(
    reference: Sequence[Call],
    candidate: Sequence[Call],
    first: Matched,
    problem: tuple[Ints, Ints, Scores],
    alike: Alike,
    result: LeafLinks,
) -> list[Link]:
    reference_labels, candidate_labels, scores = problem
    second = first
    # Values are read only for a few ties: a model of equal layers would read everything.
    if max(len(first.tied_rows), len(first.tied_columns)) <= _TIES_READ:
        extra = np.zeros((len(reference), len(candidate)), np.int32)
        for i in first.tied_rows:
            for j in first.tied_columns:
                # Equal values do not make a pair of two classes if one of them is unknown.
                if scores[reference_labels[i]][candidate_labels[j]] > 1 and alike(
                    reference[i], candidate[j]
                ):
                    extra[i, j] = 1
        if extra.any():
            # The bonus must never outweigh structure, so structure is scaled above the sum of all
            # bonuses.
            scale = len(reference) + len(candidate) + 1
            second = align_sequences(reference_labels, candidate_labels, scores * scale, extra)
            settled = [(i, j) for i, j in second.pairs if i in first.tied_rows and extra[i, j]]
        else:
            settled = []
    else:
        settled = []
    settled_indices = {i for i, _ in settled}, {j for _, j in settled}
    for i, partners in first.tied_rows.items():
        if i not in settled_indices[0]:
            result.reference_ties[id(reference[i])] = [candidate[j] for j in partners]
    for j, partners in first.tied_columns.items():
        if j not in settled_indices[1]:
            result.candidate_ties[id(candidate[j])] = [reference[i] for i in partners]
    return [Link(reference[i], candidate[j], TIE_BROKEN) for i, j in settled]


def _labels(calls: Sequence[Call]) -> tuple[Ints, list[Call]]:
    """A label for each call, equal for interchangeable calls; and one example of each label."""
    numbers: dict[tuple[object, ...], int] = {}
    examples: list[Call] = []
    labels = np.empty(len(calls), np.int64)
    for index, call in enumerate(calls):
        # Calls that agree in all of this are interchangeable: the score table has one row for each
        # group.
        signature = (call.kind, call.class_name, call.role, call.out, call.into, bool(call.parts))
        number = numbers.setdefault(signature, len(numbers))
        if number == len(examples):
            examples.append(call)
        labels[index] = number
    return labels, examples


def _score_table(reference: list[Call], candidate: list[Call], exact: bool) -> Scores:
    """Scores of all pairs of examples.

    Only equality of shapes matters, so the scoring function is called once for each pair of kinds,
    however many shapes a model has.
    """
    reference_kinds, reference_examples = _kinds(reference)
    candidate_kinds, candidate_examples = _kinds(candidate)
    shapes: dict[object, int] = {None: 0}
    outs, intos = (
        [
            np.array([shapes.setdefault(getattr(call, name), len(shapes)) for call in side])
            for side in (reference, candidate)
        ]
        for name in ("out", "into")
    )
    # Unequal feature sizes score zero anyway, so only equal sizes are compared.
    by_size: dict[int, list[int]] = {}
    for column, call in enumerate(candidate_examples):
        by_size.setdefault(call.features, []).append(column)
    scores = np.zeros((3, len(reference_examples), len(candidate_examples)), np.int32)
    for row, call in enumerate(reference_examples):
        for column in by_size.get(call.features, ()):
            for number, same in enumerate(((False, False), (True, False), (True, True))):
                scores[number, row, column] = _score_of_shapes(
                    call, candidate_examples[column], exact, *same
                )
    table = np.empty((len(reference), len(candidate)), np.int32)
    # Three levels: other output shape, same output shape, and same input shape too.
    for row in range(len(reference)):
        same_out = outs[1] == outs[0][row]
        has_shapes = outs[0][row] > 0 and intos[0][row] > 0
        alike = same_out.astype(np.intp) + (same_out & (intos[1] == intos[0][row]) & has_shapes)
        table[row] = scores[alike, reference_kinds[row], candidate_kinds]
    return table


def _kinds(calls: Sequence[Call]) -> tuple[Ints, list[Call]]:
    """A label for each call, equal if only shapes differ; and one example of each label."""
    numbers: dict[tuple[object, ...], int] = {}
    examples: list[Call] = []
    for call in calls:
        signature = (call.kind, call.class_name, call.role, call.features, call.width)
        if numbers.setdefault(signature, len(examples)) == len(examples):
            examples.append(call)
    signatures = ((c.kind, c.class_name, c.role, c.features, c.width) for c in calls)
    return np.array([numbers[signature] for signature in signatures], np.int64), examples


def _score(reference: Call, candidate: Call, exact: bool) -> int:
    """Score of two calls as a pair; 0 if they cannot be one."""
    shapes = (reference.out, reference.into, candidate.out, candidate.into)
    same_all = None not in shapes and shapes[:2] == shapes[2:]
    return _score_of_shapes(reference, candidate, exact, reference.out == candidate.out, same_all)


def _score_of_shapes(
    reference: Call, candidate: Call, exact: bool, same_out: bool, same_all: bool
) -> int:
    alike = same_kind(reference.kind, candidate.kind)
    # Roles contradict each other only if both are known: an unnamed projection may be any of them.
    if not alike or (reference.role and candidate.role and reference.role != candidate.role):
        return 0
    if reference.features != candidate.features:
        return 0
    # An embedding's first input may be the ids or, if operators take weights, the table.
    unlike = reference.width != candidate.width and -1 not in (reference.width, candidate.width)
    if unlike and reference.kind != "embedding":
        return 0
    if alike == 1:
        # An unknown class pairs only if every shape agrees, and as the last resort.
        return int(same_all)
    if exact and not is_solid(reference.kind) and not same_out:
        return 0
    same_class = reference.class_name == candidate.class_name
    # 4 is the base score: one more pair always outweighs another pair's bonuses for class and role.
    return 4 + same_class + (bool(reference.role) and reference.role == candidate.role)


def _confidence(reference: Call, candidate: Call) -> float:
    if same_kind(reference.kind, candidate.kind) < 2:
        return UNKNOWN_CLASS
    if not is_known(reference.kind):
        return LIKELY
    return CERTAIN if is_solid(reference.kind) else LIKELY
