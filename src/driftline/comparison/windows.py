"""Long plans, measured a few thousand pairs at a time: rows go into a file as they come.

What comes out is what `engine.measure_pairs` and `sharing.share_out` give for all pairs at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from driftline.alignment.plan import Pair
from driftline.comparison.kept_rows import Keeper, KeptRows
from driftline.comparison.row import Row

WINDOW = 4096

Told = Callable[[int, int], None]


def windows(pairs: Sequence[Pair], size: int = WINDOW) -> Iterator[list[Pair]]:
    """Neighbours, so many at a time; each pair is made once."""
    more = iter(pairs)
    while window := list(itertools.islice(more, size)):
        yield window


def measured_in_windows(
    pairs: Sequence[Pair],
    measure: Callable[[Sequence[Pair], Told | None], Sequence[Row]],
    progress: Told | None,
) -> KeptRows:
    """Rows of all pairs, in their order.

    Args:
        pairs: As many as there are.
        measure: Measures some of them, and tells how far it is.
        progress: Told how far all of it is.
    """
    keeper = Keeper()
    done = 0
    for window in windows(pairs):
        before = done

        def tell(ready: int, _: int, before: int = before) -> None:
            assert progress is not None
            progress(before + ready, len(pairs))

        keeper.put(measure(window, None if progress is None else tell))
        done += len(window)
    return keeper.rows()
