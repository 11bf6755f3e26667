"""Leaves that `compare` computes again: what they add, on real modules with weights in the runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import driftline
from driftline.comparison.evidence.rules import ADDED_BY_OWN_WEIGHTS, ADDED_PROJECTION
from driftline.comparison.table.files import open_table
from driftline.comparison.table.row import Row
from driftline.comparison.table.table import Table
from driftline.comparison.tolerance.tolerance import ADDED, ADDED_ALLOWED
from driftline.comparison.verdict.own_error import added_error
from driftline.runs.memory import MemorySink
from driftline.runs.run import Run
from driftline.runs.sidecars.model_facts import MODEL, line_of


class WeightLessOne(nn.Module):
    """A norm that keeps its weight less one, as Gemma's does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(width))
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * (1.0 + self.weight.float())).type_as(x)


class TurnedLinear(nn.Module):
    """A linear whose weight is stored as [in, out], as Paddle's and transformers' Conv1D are."""

    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(given, made) / given**0.5)
        self.bias = nn.Parameter(torch.randn(made))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


def _norm(width: int) -> nn.Module:
    norm = nn.LayerNorm(width)
    with torch.no_grad():
        norm.weight.normal_(1.0, 0.2)
        norm.bias.normal_(0.0, 0.2)
    return norm


def _batch_norm() -> nn.Module:
    norm = nn.BatchNorm2d(6)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.2, 2.0)
    with torch.no_grad():
        norm.weight.normal_(1.0, 0.2)
    return norm.eval()


LEAVES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(48, 32), (3, 17, 48)),
    "linear without bias": (lambda: nn.Linear(48, 48, bias=False), (3, 17, 48)),
    "turned linear": (lambda: TurnedLinear(40, 40), (2, 30, 40)),
    "convolution of a sequence": (lambda: nn.Conv1d(8, 12, 5, padding=2), (2, 8, 40)),
    "strided convolution": (lambda: nn.Conv2d(6, 8, 3, stride=2, padding=1), (2, 6, 21, 16)),
    "patches": (lambda: nn.Conv2d(3, 16, 4, stride=4), (2, 3, 16, 16)),
    "dilated convolution": (lambda: nn.Conv2d(4, 4, 3, padding=2, dilation=2), (1, 4, 20, 20)),
    "depthwise convolution": (lambda: nn.Conv2d(8, 8, 3, padding=1, groups=8), (1, 8, 12, 12)),
    "convolution in groups": (lambda: nn.Conv2d(8, 6, 3, groups=2), (1, 8, 12, 12)),
    "convolution of a volume": (lambda: nn.Conv3d(2, 3, 3, padding=1), (1, 2, 6, 7, 8)),
    "layer norm": (lambda: _norm(64), (2, 20, 64)),
    "layer norm without weights": (lambda: nn.LayerNorm(64, elementwise_affine=False), (40, 64)),
    "RMS norm": (lambda: nn.RMSNorm(64, eps=1e-6), (2, 20, 64)),
    "norm less one": (lambda: WeightLessOne(64), (2, 20, 64)),
    "batch norm": (_batch_norm, (2, 6, 9, 9)),
    "group norm": (lambda: nn.GroupNorm(2, 8), (2, 8, 9, 9)),
    "instance norm": (lambda: nn.InstanceNorm2d(8, affine=True), (2, 8, 9, 9)),
    "gelu": (nn.GELU, (40, 64)),
    "gelu by tanh": (lambda: nn.GELU(approximate="tanh"), (40, 64)),
    "silu": (nn.SiLU, (40, 64)),
    "leaky relu": (lambda: nn.LeakyReLU(0.2), (40, 64)),
    "softmax": (lambda: nn.Softmax(-1), (40, 64)),
    "log softmax": (lambda: nn.LogSoftmax(-1), (40, 64)),
}


class Chain(nn.Module):
    """Something whose weights are in the run, then the leaf: activations have none themselves."""

    def __init__(self, leaf: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.leaf = leaf

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leaf(x if not x.is_floating_point() else x * self.scale)


def run_of(model: nn.Module, *inputs: torch.Tensor, sheet: str = "", **options: Any) -> Run:
    sink = MemorySink(name="run")
    if sheet:
        sink.sheet(MODEL, sheet)
    with torch.no_grad(), driftline.capture(model, sink, levels=("modules", "params"), **options):
        model(*inputs)
    return sink.run()


def chain_of(name: str) -> tuple[Chain, torch.Tensor]:
    make, shape = LEAVES[name]
    torch.manual_seed(3)
    model = Chain(make()).eval()
    return model, torch.randn(shape)


def row_of(table: Table, site: str = "leaf") -> Row:
    return next(row for row in table.rows if row.key.site == site and row.key.port == "output")


def forward_times(factor: float) -> Callable[..., torch.Tensor]:
    return lambda module, args, made: made * factor


@pytest.mark.parametrize("name", LEAVES)
def test_a_factor_that_a_leaf_adds_is_measured(name: str) -> None:
    model, x = chain_of(name)
    other = copy.deepcopy(model)
    other.leaf.register_forward_hook(forward_times(1.25))
    # The input is off as well, by more than the fault: it must not count.
    row = row_of(driftline.compare(run_of(model, x), run_of(other, x + 0.5 * torch.randn_like(x))))
    added = added_error(row)
    assert added is not None, row
    assert added.error == pytest.approx(0.25, abs=1e-4)
    assert added.projection == pytest.approx(0.25, abs=1e-4)
    assert added.fault == "function" and added.ratio > 100.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", LEAVES)
def test_rounding_of_a_leaf_is_explained_whatever_comes_in(name: str, dtype: torch.dtype) -> None:
    model, x = chain_of(name)
    other = copy.deepcopy(model).to(dtype)
    wrong = (x + 0.5 * torch.randn_like(x)).to(dtype)
    row = row_of(driftline.compare(run_of(model, x), run_of(other, wrong)))
    added = added_error(row)
    assert added is not None, row
    assert added.fault == "" and added.ratio < 0.8, added


def test_an_embedding_is_looked_up_again() -> None:
    torch.manual_seed(0)
    model = Chain(nn.Embedding(50, 24))
    other = copy.deepcopy(model)
    ids, others = torch.randint(0, 50, (2, 2, 30))
    with torch.no_grad():
        other.leaf.weight[others[0, 3]] += 0.2
    added = added_error(row_of(driftline.compare(run_of(model, ids), run_of(other, others))))
    assert added is not None and added.fault == "weights"
    assert "other weights" in added.reason


def test_other_weights_are_told_from_another_function() -> None:
    model, x = chain_of("linear")
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.leaf.weight += 0.02 * torch.randn_like(other.leaf.weight)
    row = row_of(driftline.compare(run_of(model, x), run_of(other, x)))
    added = added_error(row)
    assert added is not None and added.fault == "weights"
    assert row.metrics[ADDED_BY_OWN_WEIGHTS] < 1e-5 < row.metrics[ADDED]
    assert "other weights" in added.reason


def test_weights_of_another_layout_are_not_other_weights() -> None:
    """A square weight that is stored the other way round, as by another framework."""
    model, x = chain_of("linear without bias")
    turned = Chain(TurnedLinear(48, 48))
    with torch.no_grad():
        turned.leaf.weight.copy_(model.leaf.weight.T)
        turned.leaf.bias.zero_()
    turned.leaf.register_forward_hook(forward_times(1.1))
    delattr(turned.leaf, "bias")
    turned.leaf.bias = 0.0
    row = row_of(driftline.compare(run_of(model, x), run_of(turned, x)))
    assert row.metrics[ADDED_PROJECTION] == pytest.approx(0.1, abs=1e-5)
    assert row.metrics[ADDED_BY_OWN_WEIGHTS] == pytest.approx(0.1, abs=1e-5)


@pytest.mark.parametrize(
    ("leaf", "shape"),
    [
        (lambda: nn.LayerNorm(48, eps=0.03), (60, 48)),
        (lambda: nn.Conv2d(3, 5, 4, stride=6, padding=5, dilation=3), (1, 3, 40, 40)),
        (lambda: nn.GroupNorm(3, 12, eps=0.01), (2, 12, 7, 7)),
    ],
    ids=["epsilon", "window", "groups"],
)
def test_attributes_that_the_run_holds_are_used(
    leaf: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    """Values that nobody would try: only the facts about the model say them."""
    torch.manual_seed(0)
    model = Chain(leaf())
    other = copy.deepcopy(model)
    other.leaf.register_forward_hook(forward_times(1.25))
    x = torch.randn(shape)
    facts = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in vars(model.leaf).items()
        if isinstance(value, (int, float, tuple)) and not isinstance(value, bool)
    }
    line = line_of("module", site="leaf", attributes=facts)
    silent = {"model_facts": False}
    reference = run_of(model, x, sheet=line, **silent)
    candidate = run_of(other, x, **silent)
    assert ADDED not in row_of(driftline.compare(run_of(model, x, **silent), candidate)).metrics
    row = row_of(driftline.compare(reference, candidate))
    assert row.metrics[ADDED_PROJECTION] == pytest.approx(0.25, abs=1e-4)


def test_a_wrong_epsilon_is_another_function() -> None:
    torch.manual_seed(0)
    model = Chain(nn.LayerNorm(64, eps=1e-12))
    other = Chain(nn.LayerNorm(64, eps=1e-3))
    x = 0.02 * torch.randn(40, 64)
    added = added_error(row_of(driftline.compare(run_of(model, x), run_of(other, x))))
    assert added is not None and added.fault == "function"


def test_autocast_is_no_fault() -> None:
    """Weights and input are float32, the product is computed in bfloat16."""
    model, x = chain_of("linear")
    reference = run_of(model, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        candidate = run_of(copy.deepcopy(model), x + 0.3 * torch.randn_like(x))
    row = row_of(driftline.compare(reference, candidate))
    assert row.candidate_dtype == "bfloat16"
    added = added_error(row)
    assert added is not None and added.fault == "" and added.ratio < 0.8


def test_a_sum_that_cancels_in_a_coarse_format_asks_for_float32() -> None:
    """Weights of alternating sign on nearly equal inputs: only rounding is left in bfloat16."""
    torch.manual_seed(0)
    model = Chain(nn.Linear(64, 16, bias=False))
    with torch.no_grad():
        model.leaf.weight.copy_(torch.randn(16, 64))
        model.leaf.weight -= model.leaf.weight.mean(1, keepdim=True)
    x = 100.0 + torch.randn(32, 64)
    row = row_of(
        driftline.compare(run_of(model, x), run_of(copy.deepcopy(model).bfloat16(), x.bfloat16()))
    )
    added = added_error(row)
    assert added is not None and added.fault == "format"
    assert "bfloat16 is too coarse here" in added.reason
    assert "keep it in float32 here" in added.reason


def test_a_tied_weight_is_found_where_it_was_stored() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(40, 24)
            self.head = nn.Linear(24, 40, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(self.embed(ids)))

    torch.manual_seed(0)
    model, other = Tied(), Tied()
    other.load_state_dict(model.state_dict())
    other.head.register_forward_hook(forward_times(0.9))
    ids = torch.randint(0, 40, (3, 20))
    row = row_of(driftline.compare(run_of(model, ids), run_of(other, ids)), "head")
    assert row.metrics[ADDED_PROJECTION] == pytest.approx(-0.1, abs=1e-5)


def test_a_tied_weight_that_the_candidate_has_packed_is_left_alone() -> None:
    """Eight bits in the head, floats in the embedding: another function by intention."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(40, 24)
            self.head = nn.Linear(24, 40, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(self.embed(ids)))

    class Packed(nn.Module):
        def __init__(self, weight: torch.Tensor) -> None:
            super().__init__()
            scales = weight.abs().amax(1, keepdim=True) / 127
            self.register_buffer("codes", torch.round(weight / scales).to(torch.int8))
            self.register_buffer("scales", scales)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ (self.codes * self.scales).T

    torch.manual_seed(0)
    model = Tied()
    other = copy.deepcopy(model)
    other.head = Packed(model.head.weight.detach())
    ids = torch.randint(0, 40, (3, 20))
    row = row_of(driftline.compare(run_of(model, ids), run_of(other, ids)), "head")
    assert row.metrics["relative_l2"] > 1e-3
    assert ADDED not in row.metrics


class Rounded(nn.Linear):
    """A linear with a wrapper around it that is no linear any more."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).clamp(-0.5, 0.5)


@pytest.mark.parametrize(
    ("leaf", "options"),
    [
        pytest.param(lambda: Rounded(16, 16), {}, id="another function than its class says"),
        pytest.param(lambda: nn.Linear(16, 16), {"keep": "summary"}, id="summaries"),
        pytest.param(lambda: nn.Bilinear(16, 16, 8), {}, id="two inputs"),
        pytest.param(lambda: nn.ConvTranspose1d(16, 8, 3), {}, id="not among the functions"),
    ],
)
def test_what_cannot_be_computed_again_is_left_alone(
    leaf: Callable[[], nn.Module], options: dict[str, Any]
) -> None:
    torch.manual_seed(0)

    class Two(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            given = (x, x) if isinstance(self.leaf, nn.Bilinear) else (x,)
            return self.leaf(*given) * self.scale

    model = Two(leaf())
    other = copy.deepcopy(model)
    other.leaf.register_forward_hook(forward_times(1.2))
    x = torch.randn(16, 16) if not isinstance(model.leaf, nn.ConvTranspose1d) else None
    x = torch.randn(2, 16, 9) if x is None else x
    table = driftline.compare(run_of(model, x, **options), run_of(other, x, **options))
    assert ADDED not in row_of(table).metrics


def test_runs_without_weights_are_not_computed_again() -> None:
    model, x = chain_of("linear")
    runs: list[Run] = []
    for value in (x, x + 0.1):
        sink = MemorySink(name="run")
        with torch.no_grad(), driftline.capture(model, sink):
            model(value)
        runs.append(sink.run())
    assert all(ADDED not in row.metrics for row in driftline.compare(*runs).rows)


def test_one_wrong_channel_of_many_is_among_those_that_are_computed() -> None:
    torch.manual_seed(0)
    model = Chain(nn.Linear(16, 5000, bias=False))
    other = copy.deepcopy(model)

    def spoil(module: nn.Module, args: Any, made: torch.Tensor) -> torch.Tensor:
        made = made.clone()
        made[:, 4321] *= 3.0
        return made

    other.leaf.register_forward_hook(spoil)
    x = torch.randn(700, 16)
    added = added_error(row_of(driftline.compare(run_of(model, x), run_of(other, x))))
    assert added is not None and added.fault == "function"


def test_the_figures_are_columns_of_the_table_and_survive_its_file(tmp_path: Any) -> None:
    model, x = chain_of("linear")
    other = copy.deepcopy(model)
    other.leaf.register_forward_hook(forward_times(1.25))
    table = driftline.compare(run_of(model, x), run_of(other, x))
    assert {ADDED, ADDED_ALLOWED, ADDED_PROJECTION} <= {column.name for column in table.columns}
    table.write(tmp_path / "table")
    again = open_table(tmp_path / "table")
    assert row_of(again).metrics[ADDED] == pytest.approx(0.25, abs=1e-4)
