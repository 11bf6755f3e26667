"""The yardstick's arithmetic: results that are made up, and the rates that follow from them."""

from __future__ import annotations

import math

import pytest

from driftline.testing.faults import rates


def _said(detected=True, exact=True, named=True, flagged=1, rows=50, wrong=0):
    return {
        "detected": detected,
        "exact": exact,
        "named": named,
        "flagged": flagged,
        "rows": rows,
        "first_site": "a",
        "cause": "scale",
        "wrong": wrong,
    }


def _fault(kind="scaled weight", error=0.5, changed=True, fmt="bf16", **said):
    return {
        "job": ["llama", fmt, 100, kind, 0.5, 40],
        "changed": changed,
        "error": error,
        "clean_error": 0.01,
        "sub_noise": False,
        "replay": _said(**said),
        "noise": _said(**said),
    }


def _clean(error=0.02, fmt="bf16", group="", **said):
    quiet = {"detected": False, "flagged": 0} | said
    return {
        "job": ["llama", fmt, 1100, "", 0.0, 40, "", 4, group],
        "changed": True,
        "error": error,
        "clean_error": error,
        "replay": _said(**quiet),
    }


def test_faults_below_the_percentile_of_fault_free_pairs_are_apart():
    results = [_clean(0.01), _clean(0.03), _clean(0.5, fmt="int8"), _fault(error=0.031)]
    results += [_fault(error=0.03), _fault(error=0.4, fmt="int8"), _fault(changed=False)]
    results += [{"job": ["llama", "bf16", 1, "offset", 1, 40], "broken": "ValueError: no"}]
    sets = rates.sort_out(results)
    assert sets.floors == {"bf16": 0.03, "int8": 0.5}
    assert [len(part) for part in (sets.clean, sets.above, sets.below)] == [3, 1, 2]
    assert (len(sets.unchanged), len(sets.broken)) == (1, 1)


def test_special_sets_do_not_move_the_floor():
    sets = rates.sort_out([_clean(0.01), _clean(0.9, group="16000 tokens")])
    assert sets.floors == {"bf16": 0.01}
    assert list(sets.groups) == ["16000 tokens"]


def test_an_output_that_is_no_number_is_above_every_floor():
    assert len(rates.sort_out([_clean(0.01), _fault(error=math.inf)]).above) == 1


@pytest.mark.parametrize(
    ("share", "value"),
    [(0.999, 999), (0.9991, 1000), (0.5, 500), (0.001, 1), (0.0, 1), (1.0, 1000)],
)
def test_a_percentile_is_one_of_the_values(share, value):
    assert rates.percentile(range(1, 1001), share) == value
    assert rates.percentile([], share) == 0.0


def test_a_rate_counts_only_trials_that_the_method_judged():
    results = [_fault(), _fault(exact=False), {**_fault(), "msprobe": _said(detected=False)}]
    assert rates.rate(results, "replay", "exact") == pytest.approx(2 / 3)
    assert rates.rate(results, "msprobe", "detected") == 0.0
    assert math.isnan(rates.rate(results, "three-way", "exact"))
    assert rates.mean([_fault(wrong=4), _fault()], "replay", "wrong") == 2.0


def test_one_row_in_ten_thousand_is_allowed_and_no_run():
    quiet = [_clean(rows=100) for _ in range(99)]
    one = rates.alarms([*quiet, _clean(rows=100, flagged=1)], "replay")
    assert (one.pairs, one.runs, one.rows, one.flagged) == (100, 0, 10_000, 1)
    assert one.per_10_000 == 1.0
    assert one.allowed
    assert not rates.alarms([*quiet, _clean(rows=99, flagged=1)], "replay").allowed
    assert not rates.alarms([*quiet, _clean(rows=100, detected=True)], "replay").allowed


def test_a_kind_that_misses_a_goal_is_named_with_its_rate():
    some = [_fault("window") for _ in range(9)] + [_fault("window", named=False, exact=False)]
    assert rates.shortfalls(some) == [("replay", "exact", 0.9)]
    assert rates.shortfalls([_fault()]) == []
    assert list(rates.by_kind([*some, _fault("offset")])) == ["offset", "window"]


def test_sub_noise_faults_that_mean_nothing_in_their_format_are_apart():
    unit = 2.0**-8
    faint = {**_fault(), "sub_noise": True, "effect": 0.01 * unit, "unit": unit}
    meant = {**_fault(), "sub_noise": True, "effect": 0.5 * unit, "unit": unit}
    assert rates.sub_noise([faint, meant, _fault()]) == ([meant], [faint])


def test_the_report_lists_what_is_excluded_and_what_falls_short(capsys):
    report = pytest.importorskip("benchmarks.faults.report").report
    results = [_clean(0.02), _fault(error=0.01), _fault("window", named=False)]
    assert not report(results)
    printed = capsys.readouterr().out
    assert "1 faults do not exceed it" in printed
    assert "scaled weight 1" in printed
    assert "window (1 trials): replay cause 0.0%" in printed
    assert "replay, cause                0.0%  goal  85.0%  missed by 85.0 points" in printed
    assert report([_clean(0.02), _fault()])
    assert not report([_clean(0.02, detected=True, flagged=3), _fault()])
    assert "above the bar" in capsys.readouterr().out
