"""Generation: the documented tool's tokens and logits, with padding, caches, forcing, compilers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_decoders import FP16, GRANITE, LLAMA, PROMPTS, golden_logits, llama, tokenizer

from driftline.decoding.generation import generate
from driftline.decoding.models.decoder import DecoderModel
from driftline.decoding.models.loading import ModelSource, end_ids, load_model, load_tokenizer
from driftline.decoding.models.targets import Target
from driftline.decoding.prompts import Prompt, PromptPool
from driftline.errors import BadInput, DriftlineError, NotInstalled

NEW = 6


@pytest.fixture(scope="module")
def reference() -> DecoderModel:
    return llama()


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    return PromptPool(PROMPTS, tokenizer()).sample(3, 32)


def test_the_tokens_are_those_of_the_documented_tool_and_the_logits_its_own_but_for_rounding(
    reference: DecoderModel,
) -> None:
    golden = golden_logits("cpu")
    drawn = PromptPool(PROMPTS, tokenizer()).sample(1, 16)
    made = generate(reference, drawn, 8, length=16)
    assert torch.equal(made.tokens[0], golden["tokens"])
    assert made.logits is not None
    assert made.logits.dtype == torch.float32
    torch.testing.assert_close(made.logits[0], golden["logits"], rtol=0, atol=2e-5)
    assert made.prompt_length == 16
    assert made.new_tokens == 8
    forced = generate(llama(FP16), drawn, 8, length=16, forced=made.tokens)
    assert forced.logits is not None
    assert forced.logits.dtype == torch.float16
    # Another library's fp16 rounds elsewhere: as far from each other as each from fp32.
    device = golden_logits("cuda")["logits"]
    torch.testing.assert_close(forced.logits[0], device, rtol=0, atol=0.02)


def test_padding_does_not_change_what_a_prompt_gives(
    reference: DecoderModel, prompts: list[Prompt]
) -> None:
    batch = generate(reference, prompts, NEW, length=40)
    assert batch.logits is not None
    for at, prompt in enumerate(prompts):
        alone = generate(reference, [prompt], NEW)
        assert alone.logits is not None
        assert torch.equal(alone.tokens[0, -NEW:], batch.tokens[at, -NEW:])
        torch.testing.assert_close(alone.logits[0], batch.logits[at], rtol=0, atol=2e-5)


def test_the_cache_gives_what_reading_the_whole_text_gives(
    reference: DecoderModel, prompts: list[Prompt]
) -> None:
    whole = llama()
    whole.caches = False
    with_cache = generate(reference, prompts, NEW)
    without = generate(whole, prompts, NEW)
    assert torch.equal(with_cache.tokens, without.tokens)
    torch.testing.assert_close(with_cache.logits, without.logits, rtol=0, atol=2e-5)


def test_a_forced_run_reads_the_forced_tokens_and_still_says_its_own_choice(
    reference: DecoderModel, prompts: list[Prompt]
) -> None:
    free = generate(reference, prompts, NEW)
    other = free.tokens.clone()
    other[:, -3] = (other[:, -3] + 1) % reference.vocabulary
    forced = generate(reference, prompts, NEW, forced=other)
    assert torch.equal(forced.tokens, other)
    assert torch.equal(forced.choices[:, : NEW - 2], free.choices[:, : NEW - 2])
    assert forced.logits is not None
    assert free.logits is not None
    assert torch.equal(forced.logits[:, : NEW - 2], free.logits[:, : NEW - 2])
    assert not torch.equal(forced.logits[:, NEW - 2], free.logits[:, NEW - 2])


def test_forced_tokens_of_another_prompt_or_shape_are_refused(
    reference: DecoderModel, prompts: list[Prompt]
) -> None:
    free = generate(reference, prompts, 2, keep_logits=False)
    assert free.logits is None
    with pytest.raises(BadInput, match="the batch needs"):
        generate(reference, prompts, 3, forced=free.tokens)
    with pytest.raises(BadInput, match="belong to other prompts"):
        generate(reference, prompts, 2, forced=free.tokens.flip(0))
    with pytest.raises(BadInput, match="0 new tokens"):
        generate(reference, prompts, 0)


def test_generation_goes_on_after_the_end_of_a_text(reference: DecoderModel) -> None:
    drawn = PromptPool(PROMPTS, tokenizer()).sample(1, 16)
    first = int(generate(reference, drawn, 1).tokens[0, -1])
    reference.module.generation_config.eos_token_id = first  # type: ignore[union-attr]
    assert generate(reference, drawn, 5).new_tokens == 5


@pytest.mark.parametrize("backend", [pytest.param("inductor", marks=pytest.mark.slow), "aot_eager"])
def test_a_compiled_candidate_really_runs_compiled_and_agrees(
    prompts: list[Prompt], backend: str
) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    # Of one layer: each one is compiled, which takes seconds.
    compiled = llama(Target(compile=backend, dynamic=True), micro_layers=1)
    plain = generate(llama(micro_layers=1), prompts, 3)
    made = generate(compiled, prompts, 3, forced=plain.tokens)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    torch.testing.assert_close(made.logits, plain.logits, rtol=0, atol=5e-5)
    torch._dynamo.reset()


@pytest.mark.slow  # metrics and validate run through that backend in their own tests, too
def test_the_aiu_target_hands_the_model_to_the_backend_of_that_name(
    reference: DecoderModel, prompts: list[Prompt], stand_in: list[Any]
) -> None:
    device = llama(Target("aiu", "fp16", "sendnn", True))
    plain = generate(reference, prompts, 2)
    made = generate(device, prompts, 2, forced=plain.tokens)
    assert stand_in, "the backend was given no graph"
    assert made.logits is not None
    assert made.logits.dtype == torch.float16
    torch.testing.assert_close(made.logits.float(), plain.logits, rtol=0, atol=0.05)


def test_end_ids_come_from_all_of_a_models_files(tmp_path: Path) -> None:
    for file in LLAMA.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = (tmp_path / "generation_config.json").read_text()
    (tmp_path / "generation_config.json").write_text(config.replace(": 2", ": [5, 9]"))
    assert end_ids(str(tmp_path)) == (2, 5, 9)
    assert load_model(ModelSource(str(tmp_path)), Target()).eos_ids == (2, 5, 9)
    assert end_ids("", tokenizer()) == (2,)


def test_a_micro_model_keeps_some_layers_or_draws_the_same_weights_for_every_target() -> None:
    one = load_model(ModelSource(str(GRANITE), micro_layers=1), Target())
    assert one.config.num_hidden_layers == 1
    assert len(one.module.model.layers) == 1  # type: ignore[union-attr]
    full = load_model(ModelSource(str(GRANITE)), Target())
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(one.module.state_dict()[name], full.module.state_dict()[name])
    drawn = [
        load_model(ModelSource(str(GRANITE), micro_layers=1, random_weights=True), target)
        for target in (Target(), FP16)
    ]
    left, right = (model.module.state_dict()[name] for model in drawn)
    assert torch.equal(left.half(), right)
    assert not torch.equal(left, full.module.state_dict()[name])
    with pytest.raises(BadInput, match="9 layers cannot be kept of a model that has 2"):
        load_model(ModelSource(str(GRANITE), micro_layers=9), Target())


def test_a_missing_model_or_tokenizer_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="there is no model folder"):
        load_model(ModelSource(str(tmp_path / "none")), Target())
    with pytest.raises(BadInput, match="cannot be loaded"):
        load_model(ModelSource(str(tmp_path)), Target())
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadInput, match="cannot be loaded"):
        load_model(ModelSource(str(tmp_path)), Target())
    with pytest.raises(BadInput, match="no model is named"):
        load_model(ModelSource(""), Target())
    with pytest.raises(BadInput, match="there is no tokenizer folder"):
        load_tokenizer(str(tmp_path / "none"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match=r"tokenizer .* cannot be loaded"):
        load_tokenizer(str(tmp_path / "empty"))


def test_truncated_weights_are_one_sentence(tmp_path: Path) -> None:
    for file in LLAMA.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(BadInput, match="cannot be loaded"):
        load_model(ModelSource(str(tmp_path)), Target())


def test_ibm_fms_that_is_not_installed_is_named() -> None:
    try:
        import fms  # noqa: F401
    except ImportError:
        pass
    else:
        pytest.skip("ibm-fms is installed here")
    with pytest.raises(NotInstalled, match="fms") as found:
        load_model(ModelSource(str(LLAMA), library="fms"), Target())
    assert "pip install ibm-fms" in found.value.hint
    with pytest.raises(NotInstalled, match="fms"):
        load_model(ModelSource(str(LLAMA), architecture="llama"), Target())


SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ZOO: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "bloom": {"vocab_size": 96, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mamba": {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "opt": SMALL | {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "gemma2": SMALL | {"head_dim": 8, "sliding_window": 4},
    "mixtral": SMALL | {"num_local_experts": 4},
}


@pytest.mark.parametrize("kind", ZOO)
def test_models_of_any_make_are_padded_and_cached_without_a_difference(kind: str) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **ZOO[kind])
    module = transformers.AutoModelForCausalLM.from_config(config).eval()
    model = DecoderModel(module, name=kind, target=Target())
    drawn = [Prompt(str(size), tuple(range(3, 3 + size))) for size in (4, 9, 13)]
    batch = generate(model, drawn, 5, length=16)
    assert batch.logits is not None
    for at, prompt in enumerate(drawn):
        alone = generate(model, [prompt], 5, forced=_unpadded(batch.tokens[at], prompt, 16))
        torch.testing.assert_close(alone.logits, batch.logits[at : at + 1], rtol=0, atol=2e-5)
    model.caches = False
    whole = generate(model, drawn, 5, length=16, forced=batch.tokens)
    torch.testing.assert_close(whole.logits, batch.logits, rtol=0, atol=2e-5)


def _unpadded(tokens: torch.Tensor, prompt: Prompt, length: int) -> torch.Tensor:
    return tokens[length - len(prompt.ids) :].unsqueeze(0)


def test_what_a_model_fails_at_is_a_sentence(reference: DecoderModel) -> None:
    with pytest.raises(BadInput, match=r"hold the id 400, but .* knows 384 ids"):
        generate(reference, [Prompt("a", (1, 400))], 2)
    import transformers

    config = transformers.AutoConfig.for_model("gpt2", **(ZOO["gpt2"] | {"n_positions": 8}))
    module = transformers.AutoModelForCausalLM.from_config(config).eval()
    model = DecoderModel(module, name="short", target=Target())
    with pytest.raises(DriftlineError, match=r"short .* failed on its way to token 9 of the text"):
        generate(model, [Prompt("a", tuple(range(3, 9)))], 6)
