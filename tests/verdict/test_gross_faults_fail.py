"""Faults that nobody would call noise: FAIL by `compare` and by `diagnose`, at their own site."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from two_runs import decoder, runs_of

LAYERS, LAYER = 8, 5
SITE = f"model.layers.{LAYER}"


def _swapped_heads(model: Any) -> None:
    weight = model.model.layers[LAYER].self_attn.v_proj.weight.data
    weight.copy_(torch.roll(weight, len(weight) // 2, 0).clone())


def _scaled(model: Any) -> None:
    model.model.layers[LAYER].mlp.down_proj.weight.data.mul_(1.2)


def _transposed(model: Any) -> None:
    weight = model.model.layers[LAYER].self_attn.o_proj.weight.data
    weight.copy_(weight.t().clone())


def _activation(model: Any) -> None:
    model.model.layers[LAYER].mlp.act_fn = nn.ReLU()


def _epsilon(model: Any) -> None:
    model.model.layers[LAYER].post_attention_layernorm.variance_epsilon = 10.0


PLANTS: dict[Callable[[Any], None], str] = {
    _swapped_heads: f"{SITE}.self_attn.v_proj",
    _scaled: f"{SITE}.mlp.down_proj",
    _transposed: f"{SITE}.self_attn.o_proj",
    _activation: f"{SITE}.mlp.act_fn",
    _epsilon: f"{SITE}.post_attention_layernorm",
}


@pytest.mark.parametrize("gain", [0.0, 1.0])
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__[1:])
def test_a_gross_fault_is_named_by_compare_and_diagnose(
    plant: Callable[[Any], None], gain: float, command: Callable, tmp_path: Path
) -> None:
    pair = runs_of(decoder("Llama", LAYERS, width=96, gain=gain), tmp_path, fault=plant)
    for verb in ("compare", "diagnose"):
        said = command(verb, *pair, "--format", "json")
        answer = json.loads(said.out)
        assert (said.code, answer["verdict"]) == (1, "fail"), verb
        assert answer["first_site"] == PLANTS[plant], verb


# A small error that every layer has.


def _all_scaled(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.data.mul_(1.05)


def _rotary_base(model: Any) -> None:
    rotary = model.model.rotary_emb
    exponents = torch.arange(len(rotary.inv_freq)).float() / len(rotary.inv_freq)
    rotary.inv_freq = 500_000.0**-exponents


def _all_in_fp8(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = module.weight.data.to(torch.float8_e4m3fn).float()


def _all_epsilons(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 0.3


EVERYWHERE = (_all_scaled, _rotary_base, _all_in_fp8, _all_epsilons)


@pytest.mark.parametrize("plant", EVERYWHERE, ids=lambda plant: plant.__name__[1:])
def test_a_small_error_of_every_layer_fails(
    plant: Callable[[Any], None], command: Callable, tmp_path: Path
) -> None:
    pair = runs_of(decoder("Llama", LAYERS, width=96, gain=1.0), tmp_path, fault=plant)
    for verb in ("compare", "diagnose"):
        assert command(verb, *pair).code == 1, verb


def test_an_error_of_like_sites_is_named_as_one(command: Callable, tmp_path: Path) -> None:
    pair = runs_of(decoder("Llama", LAYERS, width=96, gain=1.0), tmp_path, fault=_all_scaled)
    for verb in ("compare", "diagnose"):
        first = command(verb, *pair).out.splitlines()[0]
        assert "all 8" in first, first
        assert "down_proj" in first, first
        assert "1.05" in first, first
