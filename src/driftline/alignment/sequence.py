"""Two sequences in order: which elements belong together, and where that cannot be said.

Needleman and Wunsch with free gaps. An element gets a partner only if every best alignment gives
it that one; a tie is an answer of its own. Knows numbers for labels, not what they stand for.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

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
    forward = np.zeros((n + 1, m + 1), np.int32)
    for i in range(n):
        row = _row(here[i], there, worth, extra, i)
        taken = forward[i, :-1] + row
        np.maximum(taken, forward[i, 1:], out=taken)
        np.maximum.accumulate(taken, out=forward[i + 1, 1:])
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
    for i, hits in enumerate(rows):
        if len(hits) == 1 and count_there[hits[0]] == 1:
            pairs.append((i, int(hits[0])))
        elif len(hits):
            tied_here[i] = [int(j) for j in hits[:2]]
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
