"""Models of ibm-fms, which the golden files were made with. Skipped where it is not installed."""

from __future__ import annotations

import json

import pytest
import torch
from tiny_decoders import DATA, FP16, GRANITE, LLAMA, PROMPTS, golden_logits, llama, tokenizer

from driftline.decoding.generation import generate
from driftline.decoding.models import fp8_attention
from driftline.decoding.models.loading import ModelSource, load_model
from driftline.decoding.models.paged_cache import FP8, OF_FMS, PAGED_FP8
from driftline.decoding.models.targets import Target
from driftline.decoding.prompts import PromptPool
from driftline.errors import BadInput

pytest.importorskip("fms", reason="ibm-fms is not installed")


def test_logits_are_those_that_the_documented_tool_saved() -> None:
    drawn = PromptPool(PROMPTS, tokenizer()).sample(1, 16)
    reference = generate(llama(library="fms", unfuse_weights=True), drawn, 8, length=16)
    device = llama(FP16, library="fms", unfuse_weights=True)
    forced = generate(device, drawn, 8, length=16, forced=reference.tokens)
    assert reference.logits is not None
    assert forced.logits is not None
    golden = golden_logits("cpu")
    assert torch.equal(reference.tokens[0], golden["tokens"])
    torch.testing.assert_close(reference.logits[0], golden["logits"], rtol=0, atol=2e-5)
    torch.testing.assert_close(forced.logits[0], golden_logits("cuda")["logits"], rtol=0, atol=4e-3)


def test_both_libraries_give_the_same_tokens_for_padded_prompts() -> None:
    drawn = PromptPool(PROMPTS, tokenizer()).sample(3, 32)
    ours = generate(llama(), drawn, 6, length=40)
    theirs = generate(llama(library="fms"), drawn, 6, length=40)
    assert torch.equal(ours.tokens, theirs.tokens)
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=0, atol=5e-5)


def test_an_id_may_name_a_local_model_and_end_ids_come_from_its_files() -> None:
    model = load_model(ModelSource(str(LLAMA), library="fms", variant="acme/tiny"), Target())
    assert model.name == "acme/tiny"
    assert model.eos_ids == (2,)
    assert model.vocabulary == 384


def test_a_micro_model_keeps_some_layers_or_draws_the_same_weights_for_every_target() -> None:
    one = load_model(ModelSource(str(GRANITE), library="fms", micro_layers=1), Target())
    assert len(one.module.base_model.layers) == 1  # type: ignore[union-attr]
    drawn = PromptPool(PROMPTS, tokenizer()).sample(2, 32)
    theirs = load_model(ModelSource(str(GRANITE), micro_layers=1), Target())
    assert torch.equal(generate(one, drawn, 3).tokens, generate(theirs, drawn, 3).tokens)
    words = {"library": "fms", "micro_layers": 1, "random_weights": True}
    left, right = (
        load_model(ModelSource(str(GRANITE), **words), target) for target in (Target(), FP16)
    )
    name = "base_model.layers.0.ff_sub_layer.w2.weight"
    assert torch.equal(left.module.state_dict()[name].half(), right.module.state_dict()[name])


@pytest.mark.parametrize("model", [LLAMA, GRANITE], ids=lambda path: path.name)
@pytest.mark.parametrize("attention", ["paged", "eager"])
def test_other_attention_gives_the_same_numbers_by_another_way(model, attention) -> None:
    """Prompts of unlike lengths; the texts go on over the border of a block of 64 tokens."""
    drawn = PromptPool(PROMPTS, tokenizer()).sample(3, 60)
    plain, other = (
        load_model(ModelSource(str(model), library="fms"), Target(attention=words))
        for words in ("", attention)
    )
    expected = generate(plain, drawn, 9, length=60)
    found = generate(other, drawn, 9, length=60)
    assert torch.equal(found.tokens, expected.tokens)
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=5e-5)
    assert not torch.equal(found.logits, expected.logits), "it was really computed otherwise"


@pytest.mark.parametrize("attention", OF_FMS)
def test_attention_of_ibm_fms_is_refused_of_another_library(attention) -> None:
    with pytest.raises(BadInput, match=f"{attention} is an attention of ibm-fms"):
        llama(Target(attention=attention))


def test_a_misspelt_attention_is_no_silent_other_one() -> None:
    with pytest.raises(BadInput, match="ibm-fms has no attention 'math_fp'") as trouble:
        llama(Target(attention="math_fp"), library="fms")
    assert "math_fp8" in trouble.value.hint


def test_attention_in_fp8_gives_what_the_original_gives() -> None:
    """Sixteen logits of four steps, by fms-model-optimizer 0.8.7, whose operators define it."""
    drawn = PromptPool(PROMPTS, tokenizer()).sample(3, 60)
    plain = generate(llama(library="fms"), drawn, 9, length=60)
    golden = json.loads((DATA / "fp8_attention.json").read_text())
    for attention in FP8:
        model = llama(Target(attention=attention), library="fms")
        found = generate(model, drawn, 9, length=60, forced=plain.tokens).logits
        assert found is not None
        some = found[:, [0, 1, 5, 8], ::24]
        torch.testing.assert_close(some, torch.tensor(golden[attention]), rtol=0, atol=1e-3)
        away = (found - plain.logits).abs().amax(dim=(0, 2))  # type: ignore[operator]
        assert away[1:].min() > 0.1, "it is really in fp8"
        # In blocks the first call computes with what it has, and keeps it in fp8.
        assert (float(away[0]) < 1e-4) == (attention == PAGED_FP8)


def test_fp8_keeps_the_scale_of_the_first_call_and_what_is_beyond_it_becomes_the_largest() -> None:
    store = fp8_attention._store_in_a_row  # type: ignore[attr-defined]
    first = torch.tensor([1.0, -2.0, 0.5, 4.0]).reshape(2, 1, 1, 2)  # two texts of one token
    keys, values, *_ = store(first, first, None, None)
    assert keys.scale.tolist() == pytest.approx([2 / 200, 4 / 200])
    assert values.scale.tolist() == pytest.approx([2 / 100, 4 / 100])
    assert keys.data.float().flatten().tolist() == [96, -192, 24, 192], "of 100, -200, 25, 200"
    later = torch.tensor([1000.0, 2.0, -1e9, 4.0]).reshape(2, 1, 1, 2)
    more, _, kept, _ = store(later, later, keys, values)
    assert torch.equal(more.scale, keys.scale)
    assert kept.data.shape == (2, 1, 2, 2)
    assert kept.data[:, 0, 1].float().tolist() == [[448, 192], [-448, 192]]


def test_a_model_with_sinks_has_no_attention_in_fp8() -> None:
    ones = torch.ones(1, 1, 1, 2)
    with pytest.raises(BadInput, match="whose attention has sinks"):
        fp8_attention._attend(ones, ones, ones, 1, 1, 0.0, None, sinks=ones)  # type: ignore[attr-defined]


def test_a_compiled_model_of_ibm_fms_runs() -> None:
    drawn = PromptPool(PROMPTS, tokenizer()).sample(1, 16)
    plain = generate(llama(library="fms"), drawn, 3)
    compiled = llama(Target(compile="aot_eager"), library="fms")
    made = generate(compiled, drawn, 3, forced=plain.tokens)
    torch.testing.assert_close(made.logits, plain.logits, rtol=0, atol=5e-5)
