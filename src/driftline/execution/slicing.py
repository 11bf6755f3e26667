"""Divide work into parts of about equal weight, for shards and for the tasks of a job.

The result is deterministic: the same weights give the same parts on every machine. This file does
not know what the work is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from driftline.errors import BadInput

MOST_SHARDS = 100_000


class Shard(NamedTuple):
    """One of `of` slices, counted from 1."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


WHOLE = Shard(1, 1)


def parse_shard(text: str) -> Shard:
    """Parse a shard such as `3/8`.

    >>> parse_shard("3/8")
    Shard(number=3, of=8)

    Raises:
        BadInput: The text is not a shard.
    """
    number, slash, of = text.partition("/")
    if not slash or not _is_number(number) or not _is_number(of):
        raise BadInput(f"'{text}' is no shard", hint="write --shard 3/8 for the third of eight")
    shard = Shard(int(number), int(of))
    if not 1 <= shard.number <= shard.of:
        raise BadInput(
            f"there is no shard {text}",
            hint=f"shards are counted from 1/{shard.of} to {shard.of}/{shard.of}"
            if shard.of
            else "there must be one at least",
        )
    if shard.of > MOST_SHARDS:
        raise BadInput(
            f"{shard.of} shards are more than anybody has machines for", hint="such as --shard 3/8"
        )
    return shard


def _is_number(word: str) -> bool:
    # The text comes from a command line. A longer number would be slow to convert, and is a
    # mistake.
    return word.isascii() and word.isdigit() and len(word) < 12


def slice_of(weights: Sequence[int], shard: Shard) -> range:
    """Positions of the items of a shard: consecutive items, with about equal weight per shard.

    An item belongs to the shard that contains the middle of its weight.

    >>> [slice_of([1, 1, 1, 3], Shard(n, 2)) for n in (1, 2)]
    [range(0, 3), range(3, 4)]
    """
    total = sum(weights)
    first = last = 0
    before = 0
    for weight in weights:
        middle = 2 * before + weight  # doubled, so that it stays an integer
        # If the total is 0, everything belongs to the first shard.
        owner = min(middle * shard.of // (2 * total) if total else 0, shard.of - 1)
        first += owner < shard.number - 1
        last += owner < shard.number
        before += weight
    return range(first, last)


def groups(
    weights: Sequence[int], places: Sequence[str], *, least: int, most: int, count: int
) -> list[list[int]]:
    """Groups of consecutive items that have the same place.

    Args:
        weights: Weight of each item.
        places: Place of each item; all items of a group have the same one.
        least: Smallest useful weight of a group.
        most: Largest weight of a group that has more than one item.
        count: Approximate number of groups.
    """
    # Groups are large enough to be worth sending, and small enough that no worker waits for long.
    goal = min(max(sum(weights) // max(count, 1), least), most)
    complete: list[list[int]] = []
    group: list[int] = []
    weighs = 0
    for index, weight in enumerate(weights):
        if group and (weighs + weight > goal or places[index] != places[group[0]]):
            complete.append(group)
            group, weighs = [], 0
        group.append(index)
        weighs += weight
    return [*complete, group] if group else complete
