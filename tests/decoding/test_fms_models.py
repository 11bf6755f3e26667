"""Models of ibm-fms, which the golden files were made with. Skipped where it is not installed."""

from __future__ import annotations

import pytest
import torch
from tiny_decoders import FP16, GRANITE, LLAMA, PROMPTS, golden_logits, llama, tokenizer

from driftline.decoding.generation import generate
from driftline.decoding.models import load_model
from driftline.decoding.prompts import PromptPool
from driftline.decoding.targets import Target
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
    model = load_model(str(LLAMA), Target(), library="fms", variant="acme/tiny")
    assert model.name == "acme/tiny"
    assert model.eos_ids == (2,)
    assert model.vocabulary == 384


def test_a_micro_model_keeps_some_layers_or_draws_the_same_weights_for_every_target() -> None:
    one = load_model(str(GRANITE), Target(), library="fms", micro_layers=1)
    assert len(one.module.base_model.layers) == 1  # type: ignore[union-attr]
    drawn = PromptPool(PROMPTS, tokenizer()).sample(2, 32)
    theirs = load_model(str(GRANITE), Target(), micro_layers=1)
    assert torch.equal(generate(one, drawn, 3).tokens, generate(theirs, drawn, 3).tokens)
    words = {"library": "fms", "micro_layers": 1, "random_weights": True}
    left, right = (load_model(str(GRANITE), target, **words) for target in (Target(), FP16))
    name = "base_model.layers.0.ff_sub_layer.w2.weight"
    assert torch.equal(left.module.state_dict()[name].half(), right.module.state_dict()[name])


@pytest.mark.parametrize("model", [LLAMA, GRANITE], ids=lambda path: path.name)
@pytest.mark.parametrize("attention", ["paged", "eager"])
def test_other_attention_gives_the_same_numbers_by_another_way(model, attention) -> None:
    """Prompts of unlike lengths; the texts go on over the border of a block of 64 tokens."""
    drawn = PromptPool(PROMPTS, tokenizer()).sample(3, 60)
    plain, other = (
        load_model(str(model), Target(attention=words), library="fms") for words in ("", attention)
    )
    expected = generate(plain, drawn, 9, length=60)
    found = generate(other, drawn, 9, length=60)
    assert torch.equal(found.tokens, expected.tokens)
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=5e-5)
    assert not torch.equal(found.logits, expected.logits), "it was really computed otherwise"


def test_paged_attention_is_refused_where_it_cannot_be() -> None:
    with pytest.raises(BadInput, match="paged attention is one of ibm-fms"):
        llama(Target(attention="paged"))
    with pytest.raises(BadInput, match="split over ranks"):
        llama(Target(attention="paged"), library="fms", distributed=True)


def test_a_compiled_model_of_ibm_fms_runs() -> None:
    drawn = PromptPool(PROMPTS, tokenizer()).sample(1, 16)
    plain = generate(llama(library="fms"), drawn, 3)
    compiled = llama(Target(compile="aot_eager"), library="fms")
    made = generate(compiled, drawn, 3, forced=plain.tokens)
    torch.testing.assert_close(made.logits, plain.logits, rtol=0, atol=5e-5)
