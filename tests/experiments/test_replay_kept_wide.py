"""What a replay keeps of a candidate in 32 bits: all that a diagnosis might convict."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from replay_pairs import Replay, Wide, diagnosed_both_ways
from torch import nn

from driftline.comparison.evidence.error_stats import effect
from driftline.diagnosis.evidence.replay import Limits, judge
from driftline.diagnosis.experiments.live.results import wide_nearness

UNIT = 2.0**-24


def one_row(y: torch.Tensor) -> torch.Tensor:
    y = y.clone()
    y[2, 17] *= 1 + 600 * UNIT
    return y


FAULTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a small factor": lambda y: y * (1 + 24 * UNIT),
    "a small offset": lambda y: y + 100 * UNIT * y.norm() / y.numel() ** 0.5,
    "one token": one_row,
    "a channel": lambda y: torch.cat((y[..., :4] * (1 + 900 * UNIT), y[..., 4:]), dim=-1),
    "fewer bits": lambda y: ((y.view(torch.int32) >> 8) << 8).view(torch.float32),
    "no number": lambda y: torch.where(y == y.max(), torch.nan, y),
}


def of_another_device(fault: str) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """A candidate in 32 bits of whose elements some fall to the neighbouring value."""
    torch.manual_seed(5)
    reference = Wide().eval()
    candidate = copy.deepcopy(reference)
    chance = torch.Generator().manual_seed(6)

    def nudged(module: nn.Module, args: object, result: torch.Tensor) -> torch.Tensor:
        up = torch.rand(result.shape, generator=chance) < 0.1
        down = torch.rand(result.shape, generator=chance) < 0.1
        codes = result.view(torch.int32) + (up ^ down).int() * (1 - 2 * down.int())
        result = codes.view(torch.float32)
        return FAULTS[fault](result) if fault and module is candidate.up else result

    for module in (candidate.up, candidate.act, candidate.down):
        module.register_forward_hook(nudged)
    return reference, candidate, torch.randn(4, 64, 64)


@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_wide_products_as_good_as_the_trusted_ones_are_told_from_faults(fault: str) -> None:
    reference, candidate, x = of_another_device(fault)
    whole, spare, made = diagnosed_both_ways(reference, candidate, x, wide=True)
    assert [s.status for s in whole.sites] == [s.status for s in spare.sites]
    assert (whole.verdict, whole.first_site, whole.cause) == (
        *(spare.verdict, spare.first_site),
        spare.cause,
    )
    assert spare.first_site == ("up" if fault else "")
    kept = {t.key.site for t in made.exact.tensors() if t.record.kept == "full"}
    if fault == "no number":  # what it reaches is no number either
        assert kept == {"up", "act", "down"}
        return
    assert kept == {"act", *(["up"] if fault else [])}
    about = made.sites["down"]
    assert "same_bits" not in about
    assert 0.0 < about["near"]["most"] < 1.0
    assert 0.0 < about["noise"]["error"] < 4 * UNIT
    assert about["near"]["digests"] == [made.captured.get("down").record.digest]


def test_what_is_near_another_wide_run_acquits_nobody() -> None:
    reference, clean, x = of_another_device("")
    made = Replay(reference, clean, x, keep_all=False)
    faulty = Replay(reference, of_another_device("a small offset")[1], x).captured
    judged = judge(faulty, made.evidence(wide=True))
    assert "no values of it were kept" in judged["up"].trouble


@pytest.mark.parametrize("units", [0.5, 1, 2, 3, 3.9, 4.1, 8, 40])
@pytest.mark.parametrize("leaning", [False, True])
def test_no_choice_of_rows_that_are_near_comes_to_a_limit(units: float, leaning: bool) -> None:
    chance = np.random.default_rng(int(units * 10) + leaning)
    made = chance.normal(size=(64, 96)).astype(np.float32).astype(np.float64)
    made *= chance.lognormal(0, 0.5, size=(64, 1))
    made = made.astype(np.float32).astype(np.float64)
    error = made if leaning else chance.normal(size=made.shape)
    error = error / np.linalg.norm(error, axis=1, keepdims=True)
    error *= units * UNIT * np.linalg.norm(made, axis=1, keepdims=True)
    # In 64 bits, so that the error is as large as said; the limits are those of the other format.
    wide = 2.0**-53 / UNIT
    apart = wide_nearness(torch.from_numpy(made + error * wide), torch.from_numpy(made))
    if units >= 4.1 + 2.0 * leaning:
        assert apart is None
    if apart is None:
        return
    for _ in range(20):
        rows = chance.choice(64, size=int(chance.integers(2, 64)), replace=False)
        nothing = effect(made[rows], made[rows])
        limits = Limits.of([nothing], UNIT, 0, complete=False, allowed=0.0)
        over = limits.excesses(effect(made[rows], made[rows] + error[rows]))
        assert max(over.values()) < 0.75


@pytest.mark.parametrize("value", [0.0, 1e-25, float("inf"), float("nan"), 1e30])
def test_rows_too_small_or_too_large_for_squares_are_not_near(value: float) -> None:
    made = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    made[3] = value
    other = made.clone()
    other[3] = value * 2 + 1e-30
    assert wide_nearness(other, made) is None
    assert wide_nearness(made.clone(), other) is None
