"""Metrics: the short cut from moments says what the definition says, on every edge."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from driftline.comparison.measure.operands import ValuePair
from driftline.comparison.metrics.catalogue import KNOWN, STANDARD, find, requested
from driftline.comparison.metrics.from_moments import needs_definition
from driftline.comparison.table.row import ROW_FIELDS
from driftline.errors import BadFile, BadInput
from driftline.numerics import definitions
from driftline.numerics.dtypes import DTYPES

F32 = DTYPES["float32"]
F64 = DTYPES["float64"]
DEFINED = [metric.name for metric in STANDARD if metric.definition is not None]


def derived(name, reference, candidate, dtype=F64):
    # The moments' own definition: that the kernel agrees with it is tested where the kernel lives.
    moments = definitions.pair_moments(reference, dtype, candidate, dtype, count=reference.size)
    return KNOWN[name].derive(moments)


def defined(name, reference, candidate):
    ours, theirs = reference.astype(np.float64), candidate.astype(np.float64)
    both = np.isfinite(ours) & np.isfinite(theirs)
    both &= (reference != F32.lowest) & (candidate != F32.lowest)
    return KNOWN[name].define()(ours[both], theirs[both])


@pytest.mark.parametrize(
    ("name", "stored", "means"),
    [
        ("float32", np.float32(F32.lowest), -math.inf),
        ("float16", np.float16(-65504), -math.inf),
        ("float8_e4m3fn", np.uint8(0xFE), -448.0),
        ("int16", np.int16(-32768), -32768.0),
    ],
)
def test_only_the_lowest_float_of_a_mask_is_read_as_minus_infinity(name, stored, means):
    values = np.array([stored])
    pair = ValuePair(values, DTYPES[name], values, DTYPES[name], 1, (1,))
    assert [side.tolist() for side in pair.decoded()] == [[means], [means]]


usual = st.floats(-1e6, 1e6, width=32).filter(lambda x: x == 0 or abs(x) > 1e-30)
odd = st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, float(F32.lowest), 1e-40])


@st.composite
def pairs(draw):
    size = draw(st.integers(0, 300))
    array = hnp.arrays(np.float32, size, elements=st.one_of(usual, odd))
    reference = draw(array)
    if draw(st.booleans()):
        noise = draw(st.sampled_from([0.0, 1e-6, 1e-2]))
        return reference, (reference * np.float32(1 + noise)).astype(np.float32)
    return reference, draw(array)


@settings(max_examples=120, deadline=None)
@given(pairs())
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid")
def test_every_metric_derived_from_moments_is_what_its_definition_says(pair):
    reference, candidate = pair
    for name in DEFINED:
        short, long = derived(name, reference, candidate, F32), defined(name, reference, candidate)
        if name in ("cosine", "projection"):  # differences of norms: absolute accuracy
            scale = 1.0 if name == "cosine" else max(1.0, abs(long))
            ok = short == long or abs(short - long) <= 1e-12 * scale
        else:
            ok = short == long or math.isclose(short, long, rel_tol=1e-9, abs_tol=0.0)
        assert ok or (math.isnan(short) and math.isnan(long)), (name, short, long)


@pytest.mark.parametrize(
    ("name", "both_zero", "zero_reference"),
    [
        ("relative_l2", 0.0, math.inf),
        ("cosine", 1.0, 0.0),
        ("projection", 0.0, math.inf),
        ("max_rel_error", 0.0, math.inf),
        ("mean_rel_error", 0.0, math.inf),
        ("max_abs_error", 0.0, 1e-9),
    ],
)
def test_a_zero_reference_is_equal_to_zeros_only(name, both_zero, zero_reference):
    zeros, other = np.zeros(3), np.array([0.0, 0.0, 1e-9])
    for measure in (derived, defined):
        assert measure(name, zeros, zeros) == both_zero
        assert measure(name, zeros, other) == zero_reference


@pytest.mark.parametrize("name", DEFINED)
def test_empty_tensors_do_not_differ(name):
    nothing = np.array([])
    expected = 1.0 if name == "cosine" else 0.0
    assert derived(name, nothing, nothing) == defined(name, nothing, nothing) == expected


@settings(max_examples=200, deadline=None)
@given(
    hnp.arrays(np.float64, st.integers(1, 64), elements=st.floats(-1e3, 1e3)),
    st.floats(0, 1e-6),
)
def test_cosine_never_exceeds_one_and_equal_tensors_have_exactly_one(values, noise):
    rng = np.random.default_rng(0)
    other = values + noise * rng.standard_normal(values.size)
    assert derived("cosine", values, values) == defined("cosine", values, values) == 1.0
    assert -1.0 <= derived("cosine", values, other) <= 1.0
    assert -1.0 <= defined("cosine", values, other) <= 1.0


def test_the_cosine_of_nearly_equal_tensors_keeps_its_digits():
    rng = np.random.default_rng(0)
    reference = rng.standard_normal(1 << 16)
    across = rng.standard_normal(1 << 16)
    across -= reference * (across @ reference) / (reference @ reference)
    across *= np.linalg.norm(reference) / np.linalg.norm(across)
    angle = 1e-6
    candidate = np.cos(angle) * reference + np.sin(angle) * across
    # 1 - cos is 5e-13, below what a quotient of float64 sums can resolve at this size.
    assert 1.0 - derived("cosine", reference, candidate) == pytest.approx(5e-13, rel=1e-3)
    assert 1.0 - defined("cosine", reference, candidate) == pytest.approx(5e-13, rel=1e-3)


def test_a_cosine_of_one_hides_a_doubled_scale_and_the_projection_shows_it():
    values = np.arange(1.0, 9.0)
    assert derived("cosine", values, 2 * values) == pytest.approx(1.0, abs=1e-15)
    assert derived("projection", values, 2 * values) == pytest.approx(1.0)
    assert derived("relative_l2", values, 2 * values) == pytest.approx(1.0)


@pytest.mark.parametrize("scale", [1e-170, 1e170, 1e-310])
def test_squares_that_leave_float64_are_noticed(scale):
    reference, candidate = np.array([3.0, 4.0]) * scale, np.array([3.0, 0.0]) * scale
    assert needs_definition(definitions.pair_moments(reference, F64, candidate, F64, count=2))
    assert KNOWN["relative_l2"].define()(reference, candidate) == pytest.approx(0.8)
    assert KNOWN["cosine"].define()(reference, candidate) == pytest.approx(0.6)


def test_kl_of_logits_beyond_float64_is_never_a_small_number():
    kl = KNOWN["kl"].define()
    assert kl(np.array([1.0, 2.0]), np.array([1.0, 2.0])) == 0.0
    assert kl(np.array([0.0, 10.0]), np.array([10.0, 0.0])) == pytest.approx(10.0, rel=1e-3)
    assert not kl(np.array([0.0, 1.0]), np.array([1e308, -1e308])) < math.inf
    assert not kl(np.array([1e308, -1e308]), np.array([0.0, 1.0])) < 0.1


def test_every_metric_states_a_direction_and_a_meaning_and_none_takes_a_field_s_name():
    names = [metric.name for metric in KNOWN.values()]
    assert len(set(names)) == len(names)
    assert not set(names) & set(ROW_FIELDS)
    for metric in KNOWN.values():
        assert metric.column.direction in ("lower", "higher", "zero", "none")
        assert metric.column.meaning
    assert KNOWN["cosine"].column.direction == "higher"


def test_an_unknown_metric_is_refused_with_the_nearest_name():
    with pytest.raises(BadInput, match="no metric 'cosin'") as caught:
        find("cosin")
    assert "cosine" in caught.value.hint


def test_a_user_s_function_becomes_a_metric(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "def agreement(reference, candidate):\n"
        "    '''Share of equal signs.'''\n"
        "    return ((reference >= 0) == (candidate >= 0)).mean()\n"
        "agreement.direction = 'higher'\n"
    )
    metric = requested([f"{path}:agreement"])[-1]
    assert metric.column.direction == "higher"
    assert metric.column.meaning == "Share of equal signs."
    assert metric.define()(np.array([1.0, -1.0]), np.array([1.0, 1.0])) == 0.5


@pytest.mark.parametrize(
    ("text", "name", "error"),
    [
        ("def f(a, b): return 1.0", "g", BadInput),
        ("def f(a, b): return 'many'", "f", BadFile),
        ("def f(a): return 1.0", "f", BadFile),
        ("import nothing_like_this", "f", BadFile),
        ("def cosine(a, b): return 1.0", "cosine", BadInput),
        ("def site(a, b): return 1.0", "site", BadInput),
        ("def f(a, b): return 1.0\nf.direction = 'up'", "f", BadInput),
    ],
)
def test_a_user_s_metric_that_cannot_work_is_refused_before_anything_is_read(
    tmp_path, text, name, error
):
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(error):
        find(f"{path}:{name}")


def test_a_metric_file_that_is_not_there_is_refused():
    with pytest.raises(BadInput, match="there is no file"):
        find("nowhere.py:f")
