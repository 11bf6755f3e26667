"""Two real models compared layer by layer while they run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tiny_decoders import FP16, FP32, GRANITE, PROMPTS, llama, tokenizer

from driftline.decoding.generation import generate
from driftline.decoding.layerwise.row_metrics import RowMetrics
from driftline.decoding.layerwise.walk import Walk, walk_layers
from driftline.decoding.models.compilation import Unit, compile_parts
from driftline.decoding.models.decoder import DecoderModel
from driftline.decoding.models.loading import ModelSource, load_model
from driftline.decoding.models.targets import Target
from driftline.decoding.prompts import Padded, PromptPool, pad_left
from driftline.errors import BadInput, DriftlineError

Found = dict[tuple[str, str, int], RowMetrics]


@pytest.fixture(scope="module")
def batch() -> Padded:
    return pad_left(PromptPool(PROMPTS, tokenizer()).sample(3, 24), 24)


def walked(
    reference: DecoderModel, candidate: DecoderModel, batch: Padded, **words: Any
) -> tuple[Walk, Found]:
    found: Found = {}

    def take(figures: RowMetrics) -> None:
        key = figures.row.key
        found[key.site, key.slot, key.step] = figures

    return walk_layers(reference, candidate, batch, take=take, **words), found


def hooked(model: DecoderModel, batch: Padded) -> dict[str, list[torch.Tensor]]:
    """What plain hooks see of one call: every tensor that every module gives."""
    seen: dict[str, list[torch.Tensor]] = defaultdict(list)

    def tensors(value: Any) -> Iterator[torch.Tensor]:
        if isinstance(value, torch.Tensor):
            yield value.detach().clone()
        elif isinstance(value, (tuple, list)):
            for item in value:
                yield from tensors(item)

    hooks = [
        module.register_forward_hook(
            lambda module, args, output, name=name: seen[name].extend(tensors(output))
        )
        for name, module in model.module.named_modules()
        if name
    ]
    with torch.no_grad():
        model.forward(*batch, every_position=True)
    for hook in hooks:
        hook.remove()
    return seen


def test_figures_are_those_of_what_plain_hooks_see(batch: Padded) -> None:
    reference, candidate = llama(), llama(FP16)
    ours, theirs = hooked(reference, batch), hooked(candidate, batch)
    _, found = walked(reference, candidate, batch, mode="model-forward")
    real = batch.mask.numpy()
    compared = 0
    for name, tensors in ours.items():
        for at, (a, b) in enumerate(zip(tensors, theirs[name], strict=True)):
            slot = str(at) if len(tensors) > 1 else ("0" if (name, "0", 0) in found else "")
            if not slot:
                continue
            figures = found[name, slot, 0]
            a, b = a.double(), b.double()
            wanted = (a - b).abs().mean(-1).numpy()[real]
            np.testing.assert_allclose(figures.abs_diff, wanted, rtol=1e-5, atol=1e-12)
            cosine = torch.cosine_similarity(a, b, dim=-1).numpy()
            # The sines of position 0: two zero vectors are equal.
            cosine[((a == 0).all(-1) & (b == 0).all(-1)).numpy()] = 1.0
            cosine = cosine[real]
            np.testing.assert_allclose(figures.cos_sim, cosine, atol=1e-9)
            compared += 1
    assert compared >= 29


def test_every_module_that_is_called_is_there_with_every_tensor_it_gives(batch: Padded) -> None:
    reference = llama()
    called: set[str] = set()
    hooks = [
        module.register_forward_hook(lambda module, args, output, name=name: called.add(name))
        for name, module in reference.module.named_modules()
    ]
    walk, found = walked(reference, llama(FP16), batch, mode="model-forward")
    for hook in hooks:
        hook.remove()
    assert {site for site, _, _ in found} == {name or "(root)" for name in called}
    assert "model.layers.1.self_attn" in called  # which transformers calls by keywords only
    slots = {slot for site, slot, _ in found if site == "(root)"}
    assert slots == {"logits", *(f"past_key_values.{n}.{m}" for n in (0, 1) for m in (0, 1))}
    assert {"0", "1"} == {slot for site, slot, _ in found if site == "model.rotary_emb"}
    assert all(row.status == "unjudged" for row in walk.rows)


def test_a_model_against_itself_differs_nowhere(batch: Padded) -> None:
    walk, found = walked(llama(), llama(), batch, new_tokens=3)
    assert all((figures.abs_diff == 0).all() for figures in found.values())
    assert all((figures.cos_sim == 1).all() for figures in found.values())
    assert {row.metrics["different"] for row in walk.rows} == {0}


def test_generation_is_that_of_the_reference_and_keeps_every_iteration(batch: Padded) -> None:
    reference, candidate = llama(), llama(FP16)
    with torch.no_grad():  # so that the candidate would go its own way at once
        candidate.module.lm_head.weight.copy_(candidate.module.lm_head.weight.flip(0))
    walk, found = walked(reference, candidate, batch, new_tokens=4)
    free = generate(llama(), batch, 4)
    assert torch.equal(walk.tokens, free.tokens)
    for step in range(4):
        figures = found["model.layers.0.mlp", "0", step]
        assert len(figures.abs_diff) == (batch.mask.sum() if step == 0 else 3)
        # Before the head both have read the same text: rounding is all that is between them.
        assert figures.cos_sim.min() > 0.9999
        assert found["(root)", "logits", step].cos_sim.max() < 0.9


def test_iterations_are_what_the_whole_text_in_one_call_gives(batch: Padded) -> None:
    """Teacher forcing with a cache computes what one call on the same text does."""
    reference, candidate = llama(), llama(FP16)
    walk, steps = walked(reference, candidate, batch, new_tokens=3)
    text = batch
    tokens = walk.tokens[:, :-1]  # the last one was chosen, and read by nobody
    mask = torch.cat([text.mask, torch.ones(3, 2, dtype=torch.bool)], dim=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    _, whole = walked(reference, candidate, Padded(tokens, mask, positions), mode="model-forward")
    site = ("model.layers.1.mlp.down_proj", "0")
    at_once = whole[(*site, 0)]
    assert at_once.counts is not None
    for step in (1, 2):
        rows = np.zeros(mask.shape)
        rows[at_once.counts] = at_once.abs_diff
        now = rows[:, text.ids.shape[1] + step - 1]
        np.testing.assert_allclose(steps[(*site, step)].abs_diff, now, rtol=0.3)


def test_padding_changes_no_figure(batch: Padded) -> None:
    prompts = PromptPool(PROMPTS, tokenizer()).sample(1, 24)
    reference, candidate = llama(), llama(FP16)
    _, tight = walked(reference, candidate, pad_left(prompts), mode="model-forward")
    _, wide = walked(reference, candidate, pad_left(prompts, 40), mode="model-forward")
    for key, figures in tight.items():
        assert len(figures.abs_diff) == len(wide[key].abs_diff)
        np.testing.assert_allclose(figures.abs_diff, wide[key].abs_diff, rtol=0.5, atol=2e-4)


def test_a_planted_fault_shows_first_at_its_own_layer(batch: Padded) -> None:
    reference, candidate = llama(), llama(FP16)
    with torch.no_grad():
        candidate.module.model.layers[1].mlp.up_proj.weight[3] *= -1
    walk, found = walked(reference, candidate, batch, mode="model-forward")
    off = [row.site for row in walk.rows if found[row.site, row.slot, 0].cos_sim.min() < 0.999]
    assert off[0] == "model.layers.1.mlp.up_proj"
    assert "model.layers.1.mlp.gate_proj" not in off


def test_a_layer_that_gives_nan_is_not_hidden(batch: Padded) -> None:
    reference, candidate = llama(), llama(FP16)
    with torch.no_grad():
        candidate.module.model.layers[0].mlp.down_proj.weight[0, 0] = torch.inf
    _, found = walked(reference, candidate, batch, mode="model-forward")
    assert np.isnan(found["model.layers.0.mlp.down_proj", "0", 0].abs_diff).all()
    assert not np.isnan(found["model.layers.0.mlp.up_proj", "0", 0].abs_diff).any()


def test_a_candidate_that_fails_raises_its_own_error(batch: Padded) -> None:
    reference, candidate = llama(), llama(FP16)
    candidate.module.model.layers[1].mlp.register_forward_hook(
        lambda module, args, output: output @ torch.ones(1)
    )
    with pytest.raises(DriftlineError, match=r"the candidate .* failed while it ran: RuntimeError"):
        walked(reference, candidate, batch)
    assert len(walked(reference, llama(FP16), batch, mode="model-forward")[1]) > 30


def test_a_reference_that_fails_raises_its_own_error(batch: Padded) -> None:
    reference = llama()
    reference.module.model.layers[1].mlp.register_forward_hook(
        lambda module, args, output: output @ torch.ones(1)
    )
    with pytest.raises(DriftlineError, match=r"the reference .* failed while it ran: RuntimeError"):
        walked(reference, llama(FP16), batch)


def test_trouble_of_whoever_takes_the_figures_is_raised(batch: Padded) -> None:
    def full(figures: RowMetrics) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        walk_layers(llama(), llama(FP16), batch, take=full)


def test_a_module_that_both_models_hold_is_each_side_s_own(batch: Padded) -> None:
    """As transformers keeps one activation for all models of some classes."""
    reference, candidate = llama(), llama(FP16)
    shared = reference.module.model.layers[0].mlp.act_fn
    for layer in (*reference.module.model.layers, *candidate.module.model.layers):
        layer.mlp.act_fn = shared
    walk, found = walked(reference, candidate, batch, mode="model-forward")
    assert {row.status for row in walk.rows} == {"unjudged"}
    assert candidate.module.model.layers[1].mlp.act_fn is shared
    assert any(site.endswith("act_fn") for site, _, _ in found)


def test_a_model_without_a_cache_counts_every_token_once(batch: Padded) -> None:
    from transformers import OpenAIGPTConfig, OpenAIGPTLMHeadModel

    config = OpenAIGPTConfig(n_embd=32, n_layer=2, n_head=4, vocab_size=400, n_positions=64)
    models = [OpenAIGPTLMHeadModel(config).eval() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    reference = DecoderModel(models[0], name="gpt", target=FP32)
    candidate = DecoderModel(models[1].to(torch.bfloat16), name="gpt", target=Target("cpu", "bf16"))
    assert not reference.caches
    _, found = walked(reference, candidate, batch, new_tokens=3)
    for step in range(3):
        rows = found["transformer.h.1.mlp", "0", step].abs_diff
        assert len(rows) == (batch.mask.sum() if step == 0 else 3)


def test_one_model_cannot_be_both_sides(batch: Padded) -> None:
    model = llama()
    with pytest.raises(BadInput, match="one and the same"):
        walked(model, model, batch)


@pytest.mark.parametrize(
    ("unit", "sites"),
    # Leaves are walked by the commands, too, on a device: tests/cli/test_aiu_stand_in.py.
    [("block", 8), pytest.param("leaf", 32, marks=pytest.mark.slow), ("model", 1)],
)
def test_a_compiled_candidate_shows_what_lies_between_its_graphs(
    batch: Padded, unit: Unit, sites: int
) -> None:
    torch._dynamo.reset()
    candidate = llama(Target("cpu", "fp16", "aot_eager"))
    parts = compile_parts(candidate, unit)
    walk, found = walked(llama(), candidate, batch, new_tokens=2)
    assert len({site for site, _, _ in found}) == sites
    assert parts == {"block": 6, "leaf": parts, "model": 0}[unit]
    assert min(figures.cos_sim.min() for figures in found.values()) > 0.9999
    assert not [row for row in walk.rows if row.status == "extra"]
    plain, eager = walked(llama(), llama(FP16), batch, new_tokens=2)
    assert torch.equal(plain.tokens, walk.tokens)
    assert len(walk.rows) == len(plain.rows)  # what is inside a graph is missing, not forgotten
    assert {row.status for row in walk.rows} <= {"unjudged", "missing"}
    for key, figures in found.items():
        np.testing.assert_allclose(figures.abs_diff, eager[key].abs_diff, atol=2e-3)


@pytest.mark.slow  # validate --explain shows such blocks in its own test, too
def test_the_stand_in_compiler_of_a_device_is_given_graphs_of_blocks(
    batch: Padded, stand_in: list[Any]
) -> None:
    candidate = llama(Target("aiu", "fp16", "sendnn"))
    assert compile_parts(candidate, "block") == 6
    _, found = walked(llama(), candidate, batch, mode="model-forward")
    assert stand_in
    assert ("model.layers.1", "0", 0) in found


def test_more_blocks_than_a_function_may_have_graphs_are_all_compiled(
    batch: Padded, stand_in: list[Any]
) -> None:
    """All blocks share one function, of which torch.compile makes eight graphs and no more."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=10,
        num_attention_heads=2,
        vocab_size=400,
    )
    models = [LlamaForCausalLM(config).eval() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    reference = DecoderModel(models[0], name="deep", target=FP32)
    candidate = DecoderModel(models[1].half(), name="deep", target=Target("aiu", "fp16", "sendnn"))
    compile_parts(candidate, "block")
    walk, found = walked(reference, candidate, batch, mode="model-forward")
    sites = {site for site, _, _ in found}
    assert {f"model.layers.{n}" for n in range(10)} <= sites
    assert not [site for site in sites if ".mlp" in site]  # seen only where nothing is compiled
    assert {row.status for row in walk.rows} == {"unjudged", "missing"}


def test_no_more_than_a_layer_is_held_at_once() -> None:
    """The sum of all outputs is many times what may wait, which is nothing in equal order."""
    batch = pad_left(PromptPool(PROMPTS, tokenizer()).sample(2, 32), 32)
    walk, _ = walked(llama(), llama(FP16), batch, new_tokens=2)
    assert walk.most_waiting == 0


def test_layers_of_fms_models_have_every_output_of_tuples(batch: Padded) -> None:
    pytest.importorskip("fms", reason="ibm-fms is not installed")
    words: dict[str, Any] = {"library": "fms", "unfuse_weights": True}
    reference = load_model(ModelSource(str(GRANITE), **words), FP32)
    candidate = load_model(ModelSource(str(GRANITE), **words), FP16)
    _, found = walked(reference, candidate, batch, new_tokens=2)
    sites = {site for site, _, _ in found}
    assert {"base_model.layers.1.attn", "base_model.layers.1", "base_model", "(root)"} <= sites
    in_proj = [slot for site, slot, step in found if site.endswith("0.attn.in_proj") and not step]
    assert in_proj == ["0", "1", "2"]
    rows = found["base_model.layers.0.attn.in_proj.query", "0", 0]
    assert np.array_equal(rows.abs_diff, found["base_model.layers.0.attn.in_proj", "0", 0].abs_diff)
    for (site, slot, step), figures in found.items():
        tokens = int(batch.mask.sum()) if step == 0 else 3
        assert len(figures.abs_diff) in (tokens, 2 * tokens, 3), (site, slot, step)
        assert figures.cos_sim.max() <= 1.0


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_gpu_gives_what_the_cpu_gives_in_every_layer(batch: Padded) -> None:
    walk, found = walked(llama(), llama(Target("cuda", "fp16")), batch, new_tokens=3)
    assert {row.status for row in walk.rows} == {"unjudged"}
    assert min(figures.cos_sim.min() for figures in found.values()) > 0.999
    assert torch.equal(walk.tokens, generate(llama(), batch, 3).tokens)
