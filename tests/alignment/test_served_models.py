"""Models as serving engines write them, against those of transformers: clean, with one fault."""

from __future__ import annotations

import pytest
from benchmarks.engines.served_models import FusedNorm, Served, original, plant, run_of

import driftline


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3", "Mixtral"])
def test_a_served_model_passes_against_its_original(name: str) -> None:
    source = original(name)
    reference = run_of(source)
    table = driftline.compare(reference, run_of(Served(source).eval()))
    assert table.verdict == "pass", table.finding
    assert table.covered is not None
    assert table.covered.leaves.share == 1.0
    rows = {(row.key.site, row.key.port, row.key.slot): row for row in table.rows if row.compared}
    # What a norm normalises is a sum that the served model holds in two tensors.
    norm = rows["model.layers.1.input_layernorm", "input", "hidden_states"]
    assert "sum" in norm.candidate_recipe
    # So is what a layer gives, and what the next one is given.
    assert "sum" in rows["model.layers.2", "input", "hidden_states"].candidate_recipe
    # The activation that also multiplies is not the one of the same name.
    assert ("model.layers.1.mlp.act_fn", "output", "0") not in rows


class RMS(FusedNorm):
    """The same norm, under a name that does not call it one."""


def test_a_norm_that_has_no_norm_in_its_name_adds_the_residual_too() -> None:
    source = original("Llama")
    served = Served(source).eval()
    for module in served.modules():
        if type(module) is FusedNorm:
            module.__class__ = RMS
    table = driftline.compare(run_of(source), run_of(served))
    assert table.verdict == "pass", table.finding


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("Llama", "queries twice as large"),
        ("Llama", "a norm's epsilon of 0.3"),
        ("Qwen2", "gate and up exchanged"),
        ("Mixtral", "the wrong experts' weights"),
    ],
)
def test_a_fault_in_a_served_model_is_named_in_its_module(name: str, fault: str) -> None:
    source = original(name)
    served = Served(source).eval()
    places = plant(served, fault)
    table = driftline.compare(run_of(source), run_of(served))
    assert table.verdict == "fail"
    assert table.first_site in places, table.finding


def test_a_norm_that_forgets_the_residual_is_named() -> None:
    source = original("Llama")
    served = Served(source).eval()
    norm = served.model.layers[1].post_attention_layernorm
    plain = norm.forward
    norm.forward = lambda x, residual: (plain(x), x + residual)
    table = driftline.compare(run_of(source), run_of(served))
    assert table.verdict == "fail"
    assert table.first_site == "model.layers.1.post_attention_layernorm", table.finding
