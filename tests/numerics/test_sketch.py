"""What the sketch is for: it sees permutations, and says how large a difference is."""

from __future__ import annotations

import math

import numpy as np
import pytest

from driftline.numerics import kernel
from driftline.numerics.definitions import (
    estimate_inner_product,
    estimate_l2,
    estimate_l2_distance,
    estimate_relative_l2,
    sketch,
)
from driftline.numerics.dtypes import DTYPES
from driftline.numerics.fields import Summary

FP32 = DTYPES["float32"]


def summary(values: np.ndarray) -> Summary:
    flat = np.ascontiguousarray(values, np.float32).reshape(-1)
    return kernel.summarize(flat, FP32, count=flat.size)


def activations(seed: int) -> np.ndarray:
    """Tokens x heads x width, each token and head with an offset of its own, as real ones have."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((48, 8, 64)) + rng.standard_normal((48, 8, 1))


def swap_heads(x: np.ndarray) -> np.ndarray:
    return x[:, [1, 0, 2, 3, 4, 5, 6, 7]]


def shift_tokens(x: np.ndarray) -> np.ndarray:
    return np.roll(x, 1, axis=0)


def reverse_features(x: np.ndarray) -> np.ndarray:
    return x[..., ::-1]


def round_to_bf16(x: np.ndarray) -> np.ndarray:
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x8000) & 0xFFFF0000).view(np.float32)


def small_noise(x: np.ndarray) -> np.ndarray:
    return x + 1e-6 * np.random.default_rng(9).standard_normal(x.shape)


CHANGES = [swap_heads, shift_tokens, reverse_features, round_to_bf16, small_noise]


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("seed", range(5))
def test_the_relative_distance_is_estimated_within_a_third(change, seed: int) -> None:
    x = activations(seed)
    y = change(x)
    x32, y32 = x.astype(np.float32).astype(np.float64), y.astype(np.float32).astype(np.float64)
    true = np.linalg.norm(y32 - x32) / np.linalg.norm(x32)
    a, b = summary(x), summary(y)
    estimate = estimate_relative_l2(a.sketch, b.sketch, reference_l2=a.l2)
    assert 0.67 * true < estimate < 1.33 * true


def test_the_estimate_is_right_on_average_and_rarely_a_quarter_off() -> None:
    ratios = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        x = rng.standard_normal(6000)
        e = 1e-3 * rng.standard_normal(6000)
        ratios.append(
            estimate_l2_distance(sketch(x).tolist(), sketch(x + e).tolist()) / np.linalg.norm(e)
        )
    assert abs(np.mean(ratios) - 1) < 0.04
    assert np.mean(np.abs(np.array(ratios) - 1) > 0.25) < 0.05


@pytest.mark.parametrize("change", [swap_heads, shift_tokens], ids=lambda f: f.__name__)
def test_a_permutation_is_seen_where_every_other_number_agrees(change) -> None:
    x = activations(1)
    a, b = summary(x), summary(change(x))
    assert (a.min, a.max, a.zeros) == (b.min, b.max, b.zeros)
    assert math.isclose(a.l2, b.l2, rel_tol=1e-6)
    assert estimate_relative_l2(a.sketch, b.sketch, reference_l2=a.l2) > 0.3


def test_equal_tensors_are_at_distance_zero() -> None:
    a, b = summary(activations(2)), summary(activations(2))
    assert estimate_l2_distance(a.sketch, b.sketch) == 0.0


def test_a_zero_reference_has_no_scale() -> None:
    nothing = sketch(np.zeros(100)).tolist()
    something = sketch(np.ones(100)).tolist()
    assert estimate_relative_l2(nothing, nothing, reference_l2=0.0) == 0.0
    assert estimate_relative_l2(nothing, something, reference_l2=0.0) == math.inf


def test_a_missing_sketch_gives_no_number() -> None:
    assert math.isnan(estimate_l2_distance((), (1.0,)))
    assert math.isnan(estimate_relative_l2((), (), reference_l2=1.0))
    assert math.isnan(estimate_inner_product((), ()))


def test_norm_and_inner_product_are_estimated_from_sketches() -> None:
    rng = np.random.default_rng(4)
    x = rng.standard_normal(20_000)
    y = x + 0.1 * rng.standard_normal(20_000)
    a, b = sketch(x).tolist(), sketch(y).tolist()
    assert math.isclose(estimate_l2(a), np.linalg.norm(x), rel_tol=0.3)
    assert abs(estimate_inner_product(a, b) - x @ y) < 0.5 * np.linalg.norm(x) * np.linalg.norm(y)


def test_a_sketch_made_in_parts_is_the_sketch_of_the_whole() -> None:
    x = np.random.default_rng(5).standard_normal(1000)
    parts = sketch(x[:300]) + sketch(x[300:], first=300)
    np.testing.assert_allclose(parts, sketch(x), atol=1e-12)
