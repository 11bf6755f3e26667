"""Slices: every thing in one of them, neighbours together, about equal, the same everywhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftline.errors import BadInput
from driftline.execution.slicing import Shard, groups, parse_shard, slice_of

WEIGHTS = st.lists(st.integers(0, 1 << 40), max_size=60)


@given(WEIGHTS, st.integers(1, 20))
def test_every_thing_is_in_one_shard_and_neighbours_are_together(weights, of):
    shards = [slice_of(weights, Shard(number, of)) for number in range(1, of + 1)]
    assert [at for shard in shards for at in shard] == list(range(len(weights)))


@given(WEIGHTS.filter(any), st.integers(1, 20))
def test_no_shard_is_heavier_than_its_share_and_one_thing(weights, of):
    heaviest = max(
        sum(weights[at] for at in slice_of(weights, Shard(number, of)))
        for number in range(1, of + 1)
    )
    assert heaviest <= sum(weights) / of + max(weights) + 1


@given(WEIGHTS, st.integers(1, 30), st.integers(0, 1 << 30))
def test_groups_hold_every_thing_once_in_order_and_one_place_each(weights, count, least):
    places = [str(at // 7) for at in range(len(weights))]
    found = groups(weights, places, least=least, most=1 << 41, count=count)
    assert [at for group in found for at in group] == list(range(len(weights)))
    assert all(len({places[at] for at in group}) == 1 for group in found)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("3", "is no shard"),
        ("a/b", "is no shard"),
        ("/", "is no shard"),
        ("1/2/3", "is no shard"),
        ("-1/4", "is no shard"),
        ("²/4", "is no shard"),
        ("0/8", "there is no shard 0/8"),
        ("9/8", "there is no shard 9/8"),
        ("0/0", "there is no shard 0/0"),
        ("1/99999999", "more than anybody has machines for"),
    ],
)
def test_what_is_no_shard_is_refused(text, said):
    with pytest.raises(BadInput, match=said):
        parse_shard(text)
