"""Filters and reductions are values: they travel as JSON and decide without a framework."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftline.captures.options import Reduction
from driftline.captures.selection import Selection, patterns
from driftline.cli.options import split_names, step_patterns
from driftline.errors import BadInput

TEXTS = st.lists(st.text(min_size=1, max_size=5)).map(tuple)
STEPS = st.lists(st.from_regex(r"[0-9]{1,3}|[0-9]-|0-[0-9]|[0-9]\?|\*", fullmatch=True)).map(tuple)


@given(
    sites=TEXTS,
    steps=STEPS,
    children=st.booleans(),
    time=st.sampled_from([None, 0, 1, 2]),
    part=st.sampled_from([0, 1, 2]),
    device=st.none() | st.integers(0, 7),
)
def test_a_selection_survives_the_journey_as_json(**filters: object) -> None:
    selection = Selection(**filters)  # type: ignore[arg-type]
    assert Selection.from_json(selection.to_json()) == selection


def test_an_id_is_matched_on_whole_components() -> None:
    selection = Selection(ids=("2",))
    assert [i for i in ("2", "2_0", "20", "20_1", "1_2") if selection.takes_place("x", "X", i)] == [
        "2",
        "2_0",
    ]
    assert not selection.takes_place("x", "X", None)


def test_execute_ranges_are_pairs_with_both_ends_included() -> None:
    selection = Selection(steps=step_patterns("3,5,7,7", None))
    assert [s for s in range(10) if selection.takes_step(s)] == [3, 4, 5, 7]
    assert selection.step_count() == 4
    for wrong in ("x", "1,", "3", "-1,3", "1,2,3"):
        with pytest.raises(BadInput):
            step_patterns(wrong, None)


def test_steps_may_be_globs_numbers_and_open_ranges() -> None:
    assert [s for s in range(30) if Selection(steps=("1?",)).takes_step(s)] == list(range(10, 20))
    assert [s for s in range(6) if Selection(steps=("4-",)).takes_step(s)] == [4, 5]
    assert patterns([1, range(3, 5), "7-9, x*"]) == ("1", "3", "4", "7-9", "x*")
    assert split_names(["2,", "3_1"]) == split_names(["2, 3_1"]) == ("2", "3_1")


def test_times_decide_which_side_of_the_call_is_looked_at() -> None:
    looks = {
        time: (
            Selection(time=time).moments("input"),
            Selection(time=time).takes_port("output"),
        )
        for time in (None, 0, 1, 2)
    }
    assert looks == {
        None: (("before",), True),
        0: (("before",), False),
        1: (("after",), True),
        2: (("before", "after"), True),
    }


@pytest.mark.parametrize(
    ("filters", "words"),
    [
        ({"ids": ("2_",)}, "is not an id"),
        ({"ports": ("outputs",)}, "no port matches"),
        ({"time": 3}, "time is 0"),
        ({"part": 5}, "part is 0"),
        ({"steps": ("x",)}, "'x' is no step"),
        ({"steps": ("5-3",)}, "end before they begin"),
        ({"ranks": ("one",)}, "'one' is no rank"),
    ],
)
def test_a_filter_that_cannot_mean_anything_is_refused(
    filters: dict[str, object], words: str
) -> None:
    with pytest.raises(BadInput, match=words):
        Selection(**filters)  # type: ignore[arg-type]


def test_device_filters_leave_host_tensors_alone() -> None:
    selection = Selection(device=1)
    assert [selection.takes_device(i) for i in (None, 0, 1)] == [True, False, True]


def test_reductions_are_written_as_they_are_said() -> None:
    for text in ("full", "summary", "digest", "describe", "sample(7)"):
        assert str(Reduction.parse(text)) == text
        assert Reduction.from_json(Reduction.parse(text).to_json()) == Reduction.parse(text)
    with pytest.raises(BadInput) as refused:
        Reduction.parse("summery")
    assert "summary" in refused.value.hint
    with pytest.raises(BadInput):
        Reduction.parse("sample(0)")
