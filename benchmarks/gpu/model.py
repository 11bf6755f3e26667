"""The model of the table: a Llama of 1.10B parameters in bf16, from a configuration."""

from __future__ import annotations

from typing import Any


def llama() -> Any:
    """16 layers, random weights; all of its 214 modules are called in a forward pass."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def tokens(batch: int, length: int) -> Any:
    import torch

    return torch.randint(
        0, 32000, (batch, length), device="cuda", generator=torch.Generator("cuda").manual_seed(1)
    )
