"""Two sides that meet output by output, whatever order they come in."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from driftline.alignment.plan import Pair
from driftline.decoding.layerwise.rendezvous import Rendezvous
from driftline.runs.records import Record, TensorKey


def record(site: str, slot: str = "0") -> Record:
    return Record(TensorKey.of(site, "output", slot), 0, "uint8", (4,))


def meet(ours: list[str], theirs: list[str], met: Any = None) -> tuple[Rendezvous, list[str]]:
    """Both sides put their sites; each site's bytes are its own."""
    pairs: list[str] = []

    def note(pair: Pair, here: Any, there: Any) -> None:
        assert np.array_equal(here, there)
        pairs.append(pair.reference.key.site)

    meeting = Rendezvous(met or note)

    def reference() -> None:
        meeting.await_turn()
        for site in ours:
            data = np.full(4, len(site), np.uint8)
            meeting.reference.put(record(site), data)
            data[:] = 0  # the program goes on and writes over its memory
        meeting.over("reference")

    meeting.begin()
    thread = threading.Thread(target=reference)
    thread.start()
    for site in theirs:
        meeting.candidate.put(record(site), np.full(4, len(site), np.uint8))
    meeting.over("candidate")
    thread.join(60)
    assert not thread.is_alive()
    return meeting, pairs


def test_equal_orders_meet_without_anything_put_aside() -> None:
    meeting, pairs = meet(["a", "bb", "ccc"], ["a", "bb", "ccc"])
    assert pairs == ["a", "bb", "ccc"]
    assert meeting.most == 0
    assert not meeting.alone


def test_other_orders_meet_too() -> None:
    meeting, pairs = meet(["a", "bb", "ccc"], ["ccc", "a", "bb"])
    assert pairs == ["ccc", "a", "bb"]
    assert meeting.most == 8


def test_what_only_one_side_has_stays_alone() -> None:
    meeting, pairs = meet(["a", "bb"], ["a", "x", "yy"])
    meeting.end()
    assert pairs == ["a"]
    named = {(side, record.key.site) for side, record in meeting.alone}
    assert named == {("reference", "bb"), ("candidate", "x"), ("candidate", "yy")}


def test_modules_inside_one_that_has_returned_are_not_kept() -> None:
    inner = [f"block.{n}" for n in range(50)]
    meeting, pairs = meet([*inner, "block", "(root)"], ["block", "(root)"])
    assert pairs == ["block", "(root)"]
    assert meeting.most == 0
    assert len(meeting.alone) == 50


def test_a_side_that_gives_nothing_blocks_nobody() -> None:
    meeting, pairs = meet(["a", "bb"], [])
    assert not pairs
    assert len(meeting.alone) == 2
    meeting, pairs = meet([], ["a", "bb"])
    assert len(meeting.alone) == 2


def test_trouble_while_a_pair_is_looked_at_is_raised_at_the_end() -> None:
    def fails(pair: Pair, ours: Any, theirs: Any) -> None:
        raise OSError("disk full")

    meeting, _ = meet(["a", "bb"], ["a", "bb"], met=fails)
    with pytest.raises(OSError, match="disk full"):
        meeting.end()


@pytest.mark.parametrize("seed", range(20))
def test_any_two_orders_come_to_an_end(seed: int) -> None:
    dice = np.random.default_rng(seed)
    names = ["a", "a.b", "a.b.c", "d", "d.e", "(root)", "f"]
    ours = [names[n] for n in dice.permutation(7)[: dice.integers(0, 8)]]
    theirs = [names[n] for n in dice.permutation(7)[: dice.integers(0, 8)]]
    meeting, pairs = meet(ours, theirs)
    meeting.end()
    assert set(pairs) <= set(ours) & set(theirs)
    assert 2 * len(pairs) + len(meeting.alone) == len(ours) + len(theirs)
