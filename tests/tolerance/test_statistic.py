"""One number out of many values, and its interval."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftline.comparison.tolerance.statistics import AVERAGE, L2, P99, RESAMPLES, parse_statistic
from driftline.errors import BadInput

FLOATS = st.floats(-1e6, 1e6, allow_nan=False)


@given(st.lists(FLOATS, min_size=1, max_size=300))
def test_the_percentile_is_numpys_own(values):
    array = np.array(values)
    assert P99.of(array) == np.percentile(array, 99.0)
    assert P99.of(array, "higher") == np.percentile(array, 1.0)
    assert P99.of(array, "zero") == np.percentile(np.abs(array), 99.0)


@pytest.mark.parametrize("word", ["p99", "median", "max", "average", "l2", "std"])
def test_one_nan_makes_any_statistic_nan_and_takes_its_interval(word):
    values = np.ones(500)
    values[17] = math.nan
    statistic = parse_statistic(word)
    assert math.isnan(statistic.of(values))
    assert statistic.interval(values) is None


def test_no_value_gives_nan_and_one_value_no_interval():
    assert math.isnan(P99.of(np.empty(0)))
    assert P99.interval(np.ones(1)) is None


@pytest.mark.parametrize("word", ["p99", "p90", "median", "average", "l2", "std"])
def test_the_interval_holds_the_statistic_and_what_plain_resampling_gives(word):
    values = np.random.default_rng(5).gamma(2.0, size=400)
    statistic = parse_statistic(word)
    low, high = statistic.interval(values)
    assert low <= statistic.of(values) <= high
    draw = np.random.default_rng(6)
    plain = [statistic.of(draw.choice(values, values.size)) for _ in range(RESAMPLES)]
    width = np.subtract(*np.percentile(plain, [97.5, 2.5]))
    assert abs((high - low) / width - 1.0) < 0.25
    assert abs(low - np.percentile(plain, 2.5)) < 0.25 * width


def test_the_interval_depends_on_the_seed_and_on_nothing_else():
    values = np.random.default_rng(1).random(100)
    assert P99.interval(values, seed=4) == P99.interval(values, seed=4)
    assert AVERAGE.interval(values, seed=4) != AVERAGE.interval(values, seed=5)


def test_a_hundred_percent_is_the_largest_value_and_l2_the_norm():
    values = np.array([3.0, 4.0])
    assert parse_statistic("p100").of(values) == parse_statistic("max").of(values) == 4.0
    assert L2.of(values) == 5.0
    assert parse_statistic("mean") == parse_statistic("avg") == AVERAGE


@pytest.mark.parametrize("word", ["p101", "p", "", "p9x", "variance", "p-1"])
def test_an_unknown_statistic_is_refused(word):
    with pytest.raises(BadInput, match="no statistic"):
        parse_statistic(word)
