"""Two models side by side: the same rows as when both are captured, and nothing kept."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import driftline
from driftline.comparison import live_models


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.act = nn.Linear(8, 16), nn.ReLU(inplace=True)
        self.drop, self.b = nn.Dropout(0.3), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.drop(self.act(self.a(x))))


@pytest.fixture
def pair() -> tuple[Net, Net]:
    torch.manual_seed(0)
    good = Net()
    bad = copy.deepcopy(good)
    with torch.no_grad():
        bad.b.weight[0, 0] += 0.5
    return good, bad


def x() -> torch.Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(1))


def captured(monkeypatch: pytest.MonkeyPatch, *args: Any, **options: Any) -> driftline.Table:
    with monkeypatch.context() as patch:
        patch.setattr(live_models, "compared_in_step", lambda *_, **__: None)
        return driftline.compare_models(*args, **options)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_those_of_two_captured_models(
    pair: tuple[Net, Net], monkeypatch: pytest.MonkeyPatch, training: bool, dtype: torch.dtype
) -> None:
    good, bad = pair[0].train(training), pair[1].train(training).to(dtype)
    slow = captured(monkeypatch, good, bad, x())
    monkeypatch.setattr(live_models, "_run", lambda *_: pytest.fail("captured after all"))
    fast = driftline.lockstep(good, bad, x())
    assert fast.verdict == slow.verdict == "fail" and fast.first_site == slow.first_site == "b"
    for mine, theirs in zip(fast.rows, slow.rows, strict=True):
        assert (mine.key, mine.status, mine.order) == (theirs.key, theirs.status, theirs.order)
        assert dict(mine.metrics) == dict(theirs.metrics)


def test_random_state_is_left_as_it_was(pair: tuple[Net, Net]) -> None:
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    driftline.lockstep(pair[0].train(), pair[1].train(), x())
    assert torch.equal(torch.rand(3), wanted)


def test_models_that_are_not_built_alike_are_aligned_instead(pair: tuple[Net, Net]) -> None:
    longer = nn.Sequential(pair[1], nn.Identity())
    table = driftline.lockstep(nn.Sequential(pair[0]), longer, x())
    assert table.verdict == "fail"


def test_shapes_that_differ_are_rows_not_errors(pair: tuple[Net, Net]) -> None:
    wider = copy.deepcopy(pair[0])
    wider.a, wider.b = nn.Linear(8, 32), nn.Linear(32, 4)
    table = driftline.lockstep(pair[0], wider, x())
    assert any(row.status == "incomparable" for row in table.rows)


@pytest.mark.parametrize("broken", [0, 1])
def test_an_exception_of_a_model_is_the_caller_s(pair: tuple[Net, Net], broken: int) -> None:
    class Raises(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError("planted")

    pair[broken].drop = Raises()
    with pytest.raises(ZeroDivisionError, match="planted"):
        driftline.lockstep(*pair, x())


def test_a_metric_that_needs_all_values_is_measured_too(pair: tuple[Net, Net]) -> None:
    table = driftline.lockstep(*pair, x(), metrics=["kl"])
    assert any("kl" in row.metrics for row in table.rows)


def test_one_model_against_itself_passes(pair: tuple[Net, Net]) -> None:
    assert driftline.lockstep(pair[0].eval(), pair[0], x()).verdict == "pass"


def test_autocast_around_it_holds_for_both(pair: tuple[Net, Net]) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        table = driftline.lockstep(pair[0].eval(), copy.deepcopy(pair[0]).eval(), x())
    assert table.verdict == "pass"
    rows = {row.key.site: row for row in table.rows if row.key.port == "output"}
    assert rows["a"].reference_dtype == rows["a"].candidate_dtype == "bfloat16"


@pytest.mark.parametrize("compare", [driftline.lockstep, driftline.compare_models])
def test_models_side_by_side_show_what_differs(pair: tuple[Net, Net], compare: Any) -> None:
    good, bad = pair[0].eval(), pair[1].eval()
    bad.drop.p = 0.5
    differences = {
        difference.path: difference for difference in compare(good, bad, x()).differences
    }
    assert differences["drop.p"].change == "0.3 → 0.5"
    assert differences["b.weight"].relation == "different"
    assert differences["b.weight"].position == "at"


def test_nothing_that_was_replaced_for_lockstep_stays(pair: tuple[Net, Net]) -> None:
    replaced = torch.autograd.backward, nn.functional.scaled_dot_product_attention
    driftline.lockstep(*pair, x())
    assert (torch.autograd.backward, nn.functional.scaled_dot_product_attention) == replaced
