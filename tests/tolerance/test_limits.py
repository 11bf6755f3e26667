"""Limits: how they are read, and that every float format has one."""

import math

import pytest

from driftline.comparison.metrics.catalogue import STANDARD
from driftline.comparison.tolerance.defaults import LIMITS, coarsest, is_exact
from driftline.comparison.tolerance.tolerance import Limit, Tolerance, limits_from
from driftline.errors import BadInput
from driftline.numerics.dtypes import DTYPES

COLUMNS = [metric.column for metric in STANDARD]


def test_every_floating_format_has_a_default_limit_and_coarser_ones_allow_more():
    floats = [dtype for dtype in DTYPES.values() if dtype.is_floating]
    assert set(LIMITS) == {dtype.name for dtype in floats}
    ordered = sorted(floats, key=lambda dtype: (dtype.unit_roundoff, dtype.name))
    allowed = [LIMITS[dtype.name] for dtype in ordered]
    assert allowed == sorted(allowed)
    for dtype in floats:
        assert LIMITS[dtype.name] > 4 * dtype.unit_roundoff or dtype.bits <= 8


def test_integers_and_booleans_are_exact():
    assert all(is_exact(name) for name in ("int64", "uint8", "bool", "int4"))
    assert not is_exact("float32")
    assert coarsest(("int64", "bool")) is None
    assert coarsest(("float16", "bfloat16")).name == "bfloat16"


def test_limits_are_read_from_words():
    limits = limits_from(
        {"max_ulp": 4}, COLUMNS, at_most=["relative_l2=1e-3"], at_least=["cosine=0.99"]
    )
    assert limits == (Limit("max_ulp", 4.0), Limit("relative_l2", 1e-3), Limit("cosine", 0.99))


@pytest.mark.parametrize(
    ("at_most", "at_least", "said", "hint"),
    [
        (["relative_12=1"], [], "no metric 'relative_12'", "relative_l2"),
        (["relative_l2"], [], "is no limit", "--max relative_l2=0.01"),
        (["relative_l2=big"], [], "is no number", ""),
        (["relative_l2=nan"], [], "is no number", ""),
        (["cosine=0.9"], [], "passes from above", "--min cosine=0.9"),
        ([], ["rmse=0.9"], "passes from below", "--max rmse=0.9"),
        (["reference_min=0"], [], "no limit can be put on it", ""),
    ],
)
def test_limits_that_cannot_mean_anything_are_refused(at_most, at_least, said, hint):
    with pytest.raises(BadInput, match=said) as caught:
        limits_from(None, COLUMNS, at_most=at_most, at_least=at_least)
    assert hint in caught.value.hint


@pytest.mark.parametrize("wrong", [-1.0, math.nan])
def test_a_negative_or_nan_tolerance_is_refused(wrong):
    with pytest.raises(BadInput):
        Tolerance(rtol=wrong)
    with pytest.raises(BadInput):
        Tolerance(atol=wrong)
    with pytest.raises(BadInput):
        Tolerance(min_coverage=wrong)


def test_a_tolerance_says_what_it_allows():
    assert str(Tolerance()) == "limits for the lower precision of the two dtypes"
    told = str(Tolerance((Limit("cosine", 0.99),), rtol=0.1))
    assert told == "limits: |c - r| <= 0 + 0.1 |r|, cosine 0.99"
    assert Tolerance(rtol=0.1).as_json()["metrics"] == {"outside_share": 0.0}
