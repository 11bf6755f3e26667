"""Models of six architectures with random weights: clean ones raise no alarm, whatever their masks.

Left-padded batches, so that every mask a model has is in use; generation as well.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from driftline.captures.torch.errcheck.api import watch_errors

transformers = pytest.importorskip("transformers")

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODERS = {
    "Llama": {**SMALL, "intermediate_size": 64, "num_key_value_heads": 2},
    "Qwen2": {**SMALL, "intermediate_size": 64, "num_key_value_heads": 2,
              "use_sliding_window": True},
    "GPT2": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "Gemma2": {**SMALL, "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8,
               "sliding_window": 4},
    "Bloom": {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "OPT": {**SMALL, "ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
}  # fmt: skip
OTHERS = {
    "Bert": {**SMALL, "intermediate_size": 64},
    "T5": {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
           "decoder_start_token_id": 0},
}  # fmt: skip
TOKENS = torch.arange(24).view(2, 12)
MASK = torch.ones(2, 12, dtype=torch.long)
MASK[1, :5] = 0


def build(name: str, head: str, options: dict, attention: str, dtype: torch.dtype):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**options, pad_token_id=0)
    config._attn_implementation = attention
    head = "LMHeadModel" if name == "GPT2" else head
    model = getattr(transformers, f"{name}{head}")(config)
    return model.eval().to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", DECODERS)
def test_a_clean_decoder_raises_no_alarm(
    name: str, attention: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    try:
        model = build(name, "ForCausalLM", DECODERS[name], attention, dtype)
    except ValueError as problem:
        assert "does not support" in str(problem)
        pytest.skip(f"{name} has no {attention} attention")
    with torch.no_grad():
        plain = model(TOKENS, attention_mask=MASK).logits
        for level in ("operator", "module"):
            types = ["overflow", "saturation"]
            with watch_errors(tmp_path / "found", types=types, level=level) as watch:
                watched = model(TOKENS, attention_mask=MASK).logits
            assert [f.sentence() for f in watch.findings] == []
            assert torch.equal(plain, watched)


@pytest.mark.parametrize("name", ["Llama", "Qwen2"])
def test_a_clean_generation_with_sampling_raises_no_alarm(name: str, tmp_path: Path) -> None:
    model = build(name, "ForCausalLM", DECODERS[name], "sdpa", torch.float32)
    settings = {"max_new_tokens": 4, "do_sample": True, "top_k": 5, "top_p": 0.9, "min_p": 0.05}
    torch.manual_seed(3)
    plain = model.generate(TOKENS, attention_mask=MASK, **settings)
    torch.manual_seed(3)
    with watch_errors(tmp_path / "found") as watch:
        watched = model.generate(TOKENS, attention_mask=MASK, **settings)
    assert [f.sentence() for f in watch.findings] == []
    assert torch.equal(plain, watched)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", OTHERS)
def test_clean_encoders_train_without_an_alarm(name: str, attention: str, tmp_path: Path) -> None:
    head = "ForConditionalGeneration" if name == "T5" else "ForMaskedLM"
    model = build(name, head, OTHERS[name], attention, torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with watch_errors(tmp_path / "found", types=["overflow", "saturation"]) as watch:
        for _ in range(2):
            optimizer.zero_grad()
            model(TOKENS, attention_mask=MASK, labels=TOKENS).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    assert [f.sentence() for f in watch.findings] == []
    assert watch.reporter.calls > 500
