"""Tiny Llamas with a fault planted in one layer, and where a reader should be sent."""

import copy

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

LAYER = 4


def llama(seed, *, hidden=64, attention="sdpa"):
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=512,
        max_position_embeddings=256,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config).eval()


def inputs(seed, *, tokens=24):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 512, (2, tokens), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0  # left padding: the mask holds whole rows of the lowest value
    return {"input_ids": ids, "attention_mask": mask}


def gelu_for_silu(model):
    model.model.layers[LAYER].mlp.act_fn = nn.GELU(approximate="tanh")


def exact_gelu_for_silu(model):
    model.model.layers[LAYER].mlp.act_fn = nn.GELU()


def zeroed_channels(model):
    with torch.no_grad():
        model.model.layers[LAYER].mlp.down_proj.weight[:8] = 0


def zeroed_attention_channels(model):
    with torch.no_grad():
        model.model.layers[LAYER].self_attn.o_proj.weight[:8] = 0


def doubled_norm(model):
    with torch.no_grad():
        model.model.layers[LAYER].input_layernorm.weight *= 2


def doubled_gate(model):
    with torch.no_grad():
        model.model.layers[LAYER].mlp.gate_proj.weight *= 2


FAULTS = {
    gelu_for_silu: "mlp.act_fn",
    exact_gelu_for_silu: "mlp.act_fn",
    zeroed_channels: "mlp.down_proj",
    zeroed_attention_channels: "self_attn.o_proj",
    doubled_norm: "input_layernorm",
    doubled_gate: "mlp.gate_proj",
}


def broken(model, fault, dtype):
    other = copy.deepcopy(model)
    fault(other)
    return other.to(dtype)


def culprit(fault):
    return f"model.layers.{LAYER}.{FAULTS[fault]}"
