"""Sums in graphs and operators whose result is nothing but rounding: excused, and no cover."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn

import driftline
from driftline.comparison.shards import compare_shard, merge
from driftline.comparison.table.row import Row
from driftline.comparison.table.table import Table
from driftline.comparison.verdict.judge import judge
from driftline.runs.records import TensorKey

WIDTH = 16


class Shares(nn.Module):
    def __init__(self, *, by_hand: bool) -> None:
        super().__init__()
        self.by_hand = by_hand

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        if not self.by_hand:
            return torch.softmax(scores, -1)
        grown = torch.exp(scores)
        return grown / grown.sum(-1, keepdim=True)


class Attention(nn.Module):
    def __init__(self, *, by_hand: bool) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.shares = Shares(by_hand=by_hand)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.query(x) @ self.key(x).transpose(-1, -2)
        return self.shares(scores) @ self.value(x)


def trained(path: Path, how: str, *, by_hand: bool = False) -> Path:
    torch.manual_seed(0)
    model, x = Attention(by_hand=by_hand), torch.randn(2, 7, WIDTH)
    options: dict[str, Any] = {"graph": "fx"} if how == "fx" else {"levels": "ops"}
    with driftline.capture(model, path, **options):
        call = torch.compile(model, backend="eager") if how == "fx" else model
        call(x).square().sum().backward()
    torch._dynamo.reset()
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for how in ("fx", "ops"):
        trained(folder / how, how)
        trained(folder / f"{how} by hand", how, by_hand=True)
    return folder


@pytest.mark.parametrize(("ours", "theirs"), [("fx", "fx"), ("ops", "ops"), ("ops", "fx")])
def test_the_rounding_of_a_key_s_bias_is_no_alarm(runs: Path, ours: str, theirs: str) -> None:
    reference, candidate = runs / ours, runs / f"{theirs} by hand"
    table = driftline.compare(reference, candidate)
    failing = {row.site for row in table.rows if row.status == "fail"}
    assert all(site.startswith("shares/") for site in failing), table.finding  # other operators
    excused = [row for row in table.rows if row.metrics.get("summed_l2")]
    assert excused
    assert any(row.site.startswith("key/") and row.metrics["relative_l2"] > 0.01 for row in excused)
    assert {row.limit_from for row in excused} == {"float32, of the elements it sums"}
    assert "summed_l2" in {column.name for column in table.columns}
    parts = [compare_shard(reference, candidate, f"{n}/2") for n in (1, 2)]
    assert merge(parts).rows == table.rows


@pytest.mark.parametrize(
    ("apart", "candidate", "status"),
    [(1.2, 1e-6, "pass"), (900.0, 9e-4, "pass"), (5e4, 0.05, "fail"), (1.0, 0.0, "fail")],
)
def test_a_wrong_sum_is_found_by_what_it_added_up(
    apart: float, candidate: float, status: str
) -> None:
    metrics = {"relative_l2": apart, "reference_l2": 1e-6, "candidate_l2": candidate}
    row = Row(
        TensorKey("key/aten.sum", "output", "0", phase="backward"),
        "unjudged",
        class_name="aten.sum.dim_IntList",
        reference_dtype="float32",
        candidate_dtype="float32",
        reference_shape=(16,),
        candidate_shape=(16,),
        basis="values",
        metrics={**metrics, "summed_l2": 10.0},
    )
    (judged,) = judge(Table((row,))).rows
    assert judged.status == status
    (without,) = judge(Table((row._replace(metrics=metrics),))).rows
    assert without.status == "fail"
