"""One forward pass of a Llama of 134M parameters with random weights; a program that knows no tool.

python infer_llama.py --dtype float32
"""

from __future__ import annotations

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def build(dtype: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=12,
        vocab_size=32000,
        max_position_embeddings=512,
        use_cache=False,
    )
    return LlamaForCausalLM(config).eval().to(getattr(torch, dtype))


def prompt() -> torch.Tensor:
    return torch.randint(0, 32000, (1, 128), generator=torch.Generator().manual_seed(1))


def chosen_dtype() -> str:
    options = argparse.ArgumentParser()
    options.add_argument("--dtype", default="float32")
    return options.parse_known_args()[0].dtype


def main() -> None:
    torch.set_num_threads(1)
    model = build(chosen_dtype())
    with torch.no_grad():
        model(prompt())


if __name__ == "__main__":
    main()
