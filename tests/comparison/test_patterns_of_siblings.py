"""Patterns over like sites: found from rows alone, named as one, and absent where nothing is."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import driftline
from driftline.comparison.table.row import Row
from driftline.comparison.verdict.patterns import like_sites, scaled_siblings
from driftline.comparison.verdict.sites import Place, Site, sites_of
from driftline.runs.memory import MemorySink
from driftline.runs.records import TensorKey
from driftline.runs.run import Run


def row_of(site: str, port: str, order: int, error: float, projection: float) -> Row:
    """A measured row with a relative error and the part of it that lies along the result."""
    key = TensorKey.of(site, port)  # type: ignore[arg-type]
    metrics = {
        "relative_l2": error,
        "projection": projection,
        "reference_l2": 10.0 + order,
        "candidate_l2": 10.0 + order,
    }
    return Row(
        key,
        "unjudged",
        order=order,
        class_name=site.rpartition(".")[2].title(),
        reference_dtype="float32",
        candidate_dtype="bfloat16",
        reference_shape=(4, 8),
        candidate_shape=(4, 8),
        basis="values",
        metrics=metrics,
    )


def layers(
    count: int, lean: Callable[[int], float], noise: Callable[[int], float]
) -> dict[Place, Site]:
    """Layers of a `norm` and a `down`; the latter leans, in both there is noise."""
    rows: list[Row] = []
    generator = np.random.default_rng(0)
    for layer in range(count):
        across = noise(layer)
        for position, name in enumerate(("norm", "down")):
            own = lean(layer) if name == "down" else 0.0
            chance = generator.normal() * across**2 / 4.0
            order = 10 * layer + 4 * position
            rows.append(row_of(f"layers.{layer}.{name}", "input", order, across, chance))
            along = own + generator.normal() * across**2 / 4.0
            error = math.hypot(across, along)
            rows.append(row_of(f"layers.{layer}.{name}", "output", order + 1, error, along))
    return sites_of(rows)


def test_a_factor_that_all_siblings_have_is_one_pattern() -> None:
    (pattern,) = scaled_siblings(layers(32, lambda layer: 0.05, lambda layer: 0.02))
    assert pattern.sentence == "all 32 `down`: scaled by 1.05"
    assert pattern.first.site == "layers.0.down"


def test_noise_that_hides_a_factor_in_later_layers_does_not_hide_the_pattern() -> None:
    """The error that arrives grows with depth; the first layers still tell."""
    (pattern,) = scaled_siblings(layers(24, lambda layer: 0.03, lambda layer: 0.01 * 1.3**layer))
    assert pattern.siblings == 24 and pattern.factor == pytest.approx(1.03, abs=2e-3)
    assert "noise hides the others" in pattern.sentence


def test_factors_of_one_direction_and_many_sizes_are_given_as_a_range() -> None:
    (pattern,) = scaled_siblings(layers(12, lambda layer: -0.02 * (layer + 1), lambda _: 0.005))
    assert math.isnan(pattern.factor)
    assert pattern.sentence.startswith("all 12 `down`: scaled, by 0.7")


@pytest.mark.parametrize(
    ("lean", "noise"),
    [
        (lambda layer: 0.0, lambda layer: 0.05),
        (lambda layer: 0.03 * (-1) ** layer, lambda layer: 0.01),
        # Exchanged tokens: a share f of them gives a projection of -f and an energy of 2 f.
        (lambda layer: -0.02, lambda layer: 0.2),
        # A norm holds the size of what it gives: half the square of the error.
        (lambda layer: -0.0288, lambda layer: 0.24),
        (lambda layer: 0.004, lambda layer: 0.002),
        (lambda layer: 0.05 if layer == 3 else 0.0, lambda layer: 0.01),
    ],
    ids=["noise", "signs", "exchanged", "held size", "roundings", "one of them"],
)
def test_what_is_no_common_factor_is_no_pattern(
    lean: Callable[[int], float], noise: Callable[[int], float]
) -> None:
    assert scaled_siblings(layers(16, lean, noise)) == []


def test_three_siblings_are_too_few() -> None:
    assert scaled_siblings(layers(3, lambda layer: 0.05, lambda layer: 0.01)) == []


def test_sites_that_pass_a_factor_on_are_not_blamed() -> None:
    """A dropout behind the scaled site, and the container that returns its result."""
    rows: list[Row] = []
    for layer in range(6):
        base = f"layers.{layer}"
        rows += [
            row_of(f"{base}.mlp", "input", 10 * layer, 0.01, 0.0),
            row_of(f"{base}.mlp.down", "input", 10 * layer + 1, 0.01, 0.0001),
            row_of(f"{base}.mlp.down", "output", 10 * layer + 2, 0.051, 0.05),
            row_of(f"{base}.mlp.drop", "input", 10 * layer + 3, 0.051, 0.05),
            row_of(f"{base}.mlp.drop", "output", 10 * layer + 4, 0.051, 0.05),
            row_of(f"{base}.mlp", "output", 10 * layer + 5, 0.051, 0.05),
        ]
    assert [p.sentence for p in scaled_siblings(sites_of(rows))] == ["all 6 `down`: scaled by 1.05"]


def test_convicted_siblings_are_named_together() -> None:
    sites = layers(8, lambda layer: 0.05, lambda layer: 0.001)
    excesses = {
        place: 4.0 if place.site.endswith("down") else 0.2
        for place in sites
        if place.direction == "forward"
    }
    first = Place("forward", "layers.0.down")
    pattern = like_sites(sites, excesses, first)
    assert pattern is not None and pattern.sentence == "all 8 `Down`: scaled by 1.05"
    excesses |= {place: 0.5 for place in sites if place.site in ("layers.1.down", "layers.2.down")}
    assert like_sites(sites, excesses, first) is None


# --- real models


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, depth: int, width: int = 48) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 30)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def pair_of_runs(
    depth: int, dtype: torch.dtype, spoil: Callable[[str, nn.Module], None]
) -> tuple[Run, Run]:
    runs: list[Run] = []
    for wanted in (torch.float32, dtype):
        torch.manual_seed(1)
        model = Stack(depth)
        x = torch.randn(4, 20, 48)
        if runs:
            model = model.to(wanted)
            for name, module in model.named_modules():
                spoil(name, module)
        sink = MemorySink(name="run")
        with torch.no_grad(), driftline.capture(model, sink):
            model(x.to(wanted))
        runs.append(sink.run())
    return runs[0], runs[1]


def scaled(name: str, factor: float) -> Callable[[str, nn.Module], None]:
    def spoil(site: str, module: nn.Module) -> None:
        if site.endswith(f".{name}"):
            module.register_forward_hook(lambda module, args, made: made * factor)

    return spoil


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(("name", "factor"), [("down", 1.05), ("act", 0.97), ("up", 1.03)])
def test_a_factor_in_every_layer_of_a_real_model(
    name: str, factor: float, dtype: torch.dtype
) -> None:
    table = driftline.compare(*pair_of_runs(12, dtype, scaled(name, factor)))
    pattern = scaled_siblings(sites_of(table.rows))[0]
    assert f"`{name}`" in pattern.sentence and pattern.siblings == 12
    assert pattern.factor == pytest.approx(factor, abs=0.004)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("depth", [4, 16, 40])
def test_a_clean_model_has_no_pattern(depth: int, dtype: torch.dtype) -> None:
    table = driftline.compare(*pair_of_runs(depth, dtype, lambda name, module: None))
    assert scaled_siblings(sites_of(table.rows)) == []
