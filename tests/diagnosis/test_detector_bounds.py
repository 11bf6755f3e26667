"""Bounds of detectors and sentences: just inside, and just outside."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from driftline.diagnosis.causes.case import Case
from driftline.diagnosis.causes.regions import _copied_rows
from driftline.diagnosis.causes.values import _may_be_scaled, _without_bias
from driftline.diagnosis.experiments.live.repeat import laid_out
from driftline.diagnosis.texts import share

DRAW = np.random.default_rng(5)


@pytest.mark.parametrize("width", [4, 16])
def test_copied_tokens_are_told_by_eight_channels_and_not_by_fewer(width: int) -> None:
    r = DRAW.standard_normal((40, width))
    c = r.copy()
    c[20:24] = r[3:7]
    clue = _copied_rows(Case(r, c, 1e-6, 1e-7))
    assert (clue is not None) is (width == 16)
    assert clue is None or (clue.cause == "stale" and clue.score > 0.9)


def test_a_scaled_weight_below_a_bias_is_named_with_its_factor_whatever_the_scale() -> None:
    bias = 40.0 + DRAW.standard_normal(12)
    product = 7.0 * DRAW.standard_normal((64, 12))
    r = product + bias
    clue = _without_bias(Case(r, 1.25 * product + bias, 1e-6, 1e-7), r)
    assert clue is not None and clue.cause == "scale" and clue.score > 0.9
    assert "1.25" in clue.sentence


@pytest.mark.parametrize(("followed", "scaled"), [(1.0, True), (0.45, True), (0.1, False)])
def test_a_constant_is_a_scale_where_what_varies_follows_a_third_of_the_way(
    followed: float, scaled: bool
) -> None:
    middle = 3.0 + DRAW.standard_normal(16)
    varying = DRAW.standard_normal((200, 16))
    varying -= varying.mean(axis=0)
    e = 0.1 * (middle + followed * varying)
    assert _may_be_scaled(e, 0.1 * middle, middle + varying) is scaled


@pytest.mark.parametrize(("noise", "said"), [(0.2, "explains by itself"), (0.5, "is not known")])
def test_noise_as_large_as_a_third_of_the_result_hides_what_a_site_explains(
    noise: float, said: str
) -> None:
    assert said in share(0.01, 0.1, noise)
    assert "by itself" not in share(0.8, 0.1, noise)


def test_values_are_laid_out_as_another_tensor_only_where_it_has_their_shape() -> None:
    values = torch.arange(24.0).reshape(6, 4)
    assert laid_out(values, torch.ones(4, 6).t()).stride() == (1, 6)
    other = laid_out(values, torch.ones(5, 3).t())
    assert other.stride() == (4, 1) and torch.equal(other, values)
    wide = laid_out(values, torch.ones(6, 1).expand(6, 4))
    assert wide.shape == (6, 4) and wide.stride() == (1, 0)
