"""The bar: no false alarm between number formats, every planted fault named at its module."""

import copy

import pytest
import torch
from planted import FAULTS, LAYER, broken, culprit, inputs, llama, sharpened

import driftline
from driftline.captures.torch.framework import capture
from driftline.runs.memory import MemorySink

DTYPES = [torch.bfloat16, torch.float16]
MORE_SEEDS = [pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2)]
LAYERS = [1, 4, *(pytest.param(layer, marks=pytest.mark.slow) for layer in (2, 3, 5, 6))]
"""Some of both attentions; the others with the long set."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("hidden", [64, 256])
@pytest.mark.parametrize("seed", [0, MORE_SEEDS[0]])
def test_a_fault_free_llama_in_another_number_format_has_no_failing_row(
    dtype, attention, hidden, seed
):
    model = llama(seed, hidden=hidden, attention=attention)
    for keep in ("full", "summary"):
        table = driftline.compare_models(
            model, copy.deepcopy(model).to(dtype), inputs(seed), keep=keep
        )
        assert table.failing == ()
        assert table.verdict == "pass"
        assert table.coverage.share == 1.0
        # Masks and position ids were among what was compared.
        assert {"attention_mask", "position_ids"} <= {row.slot for row in table}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
@pytest.mark.parametrize("seed", [0, *MORE_SEEDS])
def test_a_planted_fault_is_named_at_its_own_module(fault, dtype, seed):
    model = llama(seed)
    table = driftline.compare_models(model, broken(model, fault, dtype), inputs(seed))
    assert table.verdict == "fail"
    assert table.first_site == culprit(fault)
    assert table.first.port == "output"
    assert culprit(fault) in table.finding
    # Nothing before the culprit is accused.
    assert all(row.order >= table.first.order for row in table.failing)


@pytest.mark.parametrize("fault", list(FAULTS)[::2], ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_named_from_summaries_too(fault):
    model = llama(0)
    table = driftline.compare_models(
        model, broken(model, fault, torch.bfloat16), inputs(0), keep="summary"
    )
    assert table.first_site == culprit(fault)


def test_a_fault_in_a_module_s_own_code_is_blamed_on_the_enclosing_module():
    model = llama(0, attention="eager")
    other = copy.deepcopy(model)
    # Used between q_proj and o_proj, where no module's output shows it.
    other.model.layers[LAYER].self_attn.scaling = 40.0
    table = driftline.compare_models(model, other.to(torch.bfloat16), inputs(0))
    assert table.first_site == f"model.layers.{LAYER}.self_attn"
    assert "in its own code" in table.finding


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
def test_a_doubled_attention_scale_is_named_at_its_own_attention(layer, dtype):
    model = sharpened(llama(layer, attention=("eager", "sdpa")[layer % 2]))
    other = copy.deepcopy(model)
    assert driftline.compare_models(model, other.to(dtype), inputs(layer)).failing == ()
    other.model.layers[layer].self_attn.scaling *= 2
    table = driftline.compare_models(model, other, inputs(layer))
    assert table.first_site == f"model.layers.{layer}.self_attn"
    assert all(row.order >= table.first.order for row in table.failing)


def test_a_doubled_attention_scale_of_uniform_attention_is_named_in_float32_only():
    # Below bfloat16's noise there is nothing to see; docs/metrics.md has the figures.
    model = llama(0)
    other = copy.deepcopy(model)
    other.model.layers[LAYER].self_attn.scaling *= 2
    table = driftline.compare_models(model, other, inputs(0))
    assert table.first_site == f"model.layers.{LAYER}.self_attn"
    table = driftline.compare_models(model, other.to(torch.bfloat16), inputs(0))
    assert table.verdict == "pass"


def test_a_fault_between_the_layers_is_blamed_on_the_layer_whose_output_it_is():
    model = llama(0)
    other = copy.deepcopy(model)
    inner = other.model.layers[3].forward
    other.model.layers[3].forward = lambda *args, **kwargs: inner(*args, **kwargs) * 0.5
    table = driftline.compare_models(model, other, inputs(0))
    assert table.first_site == "model.layers.3"
    assert table.first.port == "output"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_a_fault_free_llama_pass_and_a_wrong_backward_is_named(dtype):
    def gradients(model):
        sink = MemorySink()
        with capture(model, sink, levels=("modules", "gradients", "params")):
            ids = inputs(0)["input_ids"]
            model(input_ids=ids, labels=ids).loss.backward()
        return sink.run()

    model = llama(0)
    reference = gradients(model)
    table = driftline.compare(reference, gradients(copy.deepcopy(model).to(dtype)))
    assert table.failing == ()
    assert {"grad_input", "grad_output", "param", "param_grad"} <= {row.port for row in table}

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return 2 * gradient

    other = copy.deepcopy(model)
    silu = other.model.layers[LAYER].mlp.act_fn.forward
    other.model.layers[LAYER].mlp.act_fn.forward = lambda x: silu(Doubled.apply(x))
    table = driftline.compare(reference, gradients(other.to(dtype)))
    assert table.first_site == f"model.layers.{LAYER}.mlp.act_fn"
    assert table.first.port == "grad_input"
    assert "in the gradient of its input" in table.finding


def test_inputs_that_differ_are_said_to_differ_already():
    model = llama(0)
    runs = []
    for seed in (0, 1):
        sink = MemorySink()
        with torch.no_grad(), capture(model, sink):
            model(**inputs(seed))
        runs.append(sink.run())
    table = driftline.compare(*runs)
    assert table.finding.startswith("the inputs differ already: 'input_ids' of the model itself")


def test_the_verdict_without_thresholds_names_the_coarser_dtype():
    model = llama(0)
    table = driftline.compare_models(model, copy.deepcopy(model).to(torch.bfloat16), inputs(0))
    sources = {row.limit_from for row in table}
    assert sources == {"bfloat16", "exact"}
    assert "lower precision" in table.limits["said"]
    assert "bfloat16" in table.finding
