"""Golden values against given ones: what passes, what fails, and by which bound."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from driftline.comparison.tolerance.defaults import allowed
from driftline.numerics.dtypes import DTYPES
from driftline.operators.definitions.call import rounded
from driftline.operators.judging import judge
from driftline.operators.result import OperatorCall, OutputRow, coverage, unchecked


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_equal_values_pass_in_every_type(dtype: str) -> None:
    kind = np.bool_ if dtype == "bool" else np.float64 if DTYPES[dtype].is_floating else np.int64
    values = np.array([[0, 1], [1, 0]]).astype(kind)
    figures = judge(values, values.copy(), dtype, metrics=("abs", "cos_sim", "kl"))
    assert (figures.status, figures.share, figures.max_abs_error) == ("pass", 100.0, 0.0)
    assert figures.cos_sim == pytest.approx(1.0)
    assert figures.kl == 0.0


def test_the_share_is_met_by_equality() -> None:
    golden = np.ones(1000)
    actual = golden.copy()
    actual[0] = 2.0
    assert judge(golden, actual, "float16").status == "pass", "99.9 % of 1000 are 999"
    actual[1] = 2.0
    figures = judge(golden, actual, "float16")
    assert (figures.status, figures.share) == ("fail", 99.8)
    assert figures.reason == "2 elements of 1000 outside the bound"


def test_an_error_where_golden_is_zero_counts() -> None:
    figures = judge(np.zeros(10), np.ones(10), "float32")
    assert (figures.status, figures.share) == ("fail", 0.0)
    assert math.isinf(figures.max_rel_error or 0.0)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_one_value_that_is_not_finite_fails_whatever_the_share(wrong: float) -> None:
    golden = np.ones(100_000)
    actual = golden.copy()
    actual[7] = wrong
    figures = judge(golden, actual, "float16")
    assert figures.status == "fail"
    assert "element 7" in figures.reason


def test_values_that_are_not_finite_agree_by_place_and_kind() -> None:
    golden = np.array([1.0, np.nan, np.inf, -np.inf])
    assert judge(golden, golden.copy(), "float32").status == "pass"
    assert judge(golden, golden[[0, 1, 3, 2]], "float32").status == "fail"


def test_integers_of_64_bits_are_compared_exactly() -> None:
    golden = np.array([2**53, -(2**63), 5])
    actual = golden + np.array([1, 0, 0])
    figures = judge(golden, actual, "int64")
    assert (figures.status, figures.max_abs_error, figures.bound_name) == ("fail", 1.0, "exact")
    far = judge(np.array([-(2**63)]), np.array([2**63 - 1]), "int64")
    assert far.max_abs_error == float(2**64 - 1)


def test_quantised_integers_may_be_off_by_one_step_and_no_more() -> None:
    golden = np.full(100, 50, np.int8)
    assert judge(golden, (golden + 1).astype(np.int8), "int8").status == "pass"
    assert judge(golden, (golden + 2).astype(np.int8), "int8").status == "fail"
    assert judge(golden, (golden + 1).astype(np.int8), "int8", exact=True).status == "fail"


def test_another_shape_fails_with_both_shapes() -> None:
    figures = judge(np.ones((2, 3)), np.ones((3, 2)), "float32")
    assert (figures.status, figures.reason) == ("fail", "shape [3, 2], but it should be [2, 3]")


def test_an_empty_output_passes() -> None:
    assert judge(np.empty((0, 3)), np.empty((0, 3)), "float16").status == "pass"


def test_a_long_sum_in_float16_is_no_failure_and_the_bound_says_so() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, 8192)).astype(np.float16)
    w = rng.standard_normal((8192, 32)).astype(np.float16)
    golden = rounded(x.astype(float) @ w.astype(float), "float16")
    scale = np.sqrt((x.astype(float) ** 2) @ (w.astype(float) ** 2))
    blocks = np.zeros((8, 32), np.float16)  # sums of 64 terms, added up in float16
    for at in range(0, 8192, 64):
        part = x[:, at : at + 64].astype(np.float32) @ w[at : at + 64].astype(np.float32)
        blocks = blocks + part.astype(np.float16)
    plain = judge(golden, blocks.astype(float), "float16")
    assert plain.status == "fail", "without the length of the sum it would be one"
    figures = judge(golden, blocks.astype(float), "float16", terms=8192, scale=scale)
    assert (figures.status, figures.bound_name) == ("pass", "float16, K=8192")


def test_the_growing_bound_still_sees_a_wrong_weight() -> None:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((8, 8192)), rng.standard_normal((8192, 32))
    scale = np.sqrt((x**2) @ (w**2))
    w_wrong = w.copy()
    w_wrong[:512] = 0.0  # one sixteenth of the rows
    figures = judge(x @ w, x @ w_wrong, "float16", terms=8192, scale=scale)
    assert figures.status == "fail"


def test_digits_lost_by_cancelling_are_told_from_outliers() -> None:
    golden, scale = np.full(10_000, 1e-6), np.ones(10_000)
    golden[5:] = 1.0
    actual = golden.copy()
    actual[:5] += 1e-4
    assert judge(golden, actual, "float16", terms=4, scale=scale).reason == ""
    actual[7] = 3.0
    found = judge(golden, actual, "float16", terms=4, scale=scale)
    assert (found.status, found.reason) == ("pass", "1 element outside, as allowed")


def test_a_short_sum_that_is_accurate_is_judged_by_the_plain_bound() -> None:
    figures = judge(np.ones(4), np.ones(4), "float16", terms=16, scale=np.ones(4))
    assert figures.bound_name == "float16"


def test_a_subnormal_may_be_off_by_one_step() -> None:
    step = 2.0**-24
    golden = np.array([3 * step])
    assert judge(golden, golden + step, "float16").status == "pass"
    assert judge(golden, golden + 2 * step, "float16").status == "fail"


def test_coverage_counts_calls_not_outputs() -> None:
    call = OperatorCall("a", "LinearOperation")
    good = OutputRow(call, "0", "float32", (1,), judge(np.ones(1), np.ones(1), "float32"))
    bad = good._replace(figures=judge(np.ones(1), np.zeros(1), "float32"))
    found = coverage([[good, bad], [good, good], [unchecked(call, "x")], [unchecked(call, "x")]], 3)
    assert found[:4] == (4, 1, 1, 2)
    assert (found.reasons, found.filtered) == ((("x", 2),), 3)


@settings(deadline=None)
@given(
    st.lists(st.floats(width=64), min_size=1, max_size=30),
    st.sampled_from(["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]),
)
def test_rounding_gives_numbers_of_the_format(values: list[float], dtype: str) -> None:
    once = rounded(np.array(values), dtype)
    again = torch.from_numpy(once.copy()).to(getattr(torch, dtype)).double().numpy()
    np.testing.assert_array_equal(once, again)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_numbers_are_rounded_as_torch_rounds_them(dtype: str) -> None:
    draw = np.random.default_rng(0)
    values = np.ldexp(draw.standard_normal(2000), draw.integers(-20, 6, 2000)).astype(np.float32)
    values[:8] = np.ldexp([0.5, 1.5, 2.5, 3.5, 1.0, 3.0, 5.0, 7.0], -16)
    theirs = torch.from_numpy(values).to(getattr(torch, dtype)).double().numpy()
    np.testing.assert_array_equal(rounded(values, dtype), theirs)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_every_bound_is_wider_than_one_rounding(dtype: str) -> None:
    assert allowed(dtype).error > DTYPES[dtype].unit_roundoff
