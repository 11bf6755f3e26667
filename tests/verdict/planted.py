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


def sharpened(model, gain=6):
    """The same model with wider queries and keys, so that attention is not uniform.

    With the usual random weights (standard deviation 0.02) all scores are nearly zero, each token
    attends to all alike, and what scales the scores changes nothing. At a gain of 6 the entropy of
    attention is 0.9 of that of uniform attention; in trained models it is often below that.
    """
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= gain
            layer.self_attn.k_proj.weight *= gain
    return model


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


def doubled_down_output(model):
    down = model.model.layers[LAYER].mlp.down_proj
    inner = down.forward
    down.forward = lambda x: inner(x) * 2


FAULTS = {
    gelu_for_silu: "mlp.act_fn",
    exact_gelu_for_silu: "mlp.act_fn",
    zeroed_channels: "mlp.down_proj",
    zeroed_attention_channels: "self_attn.o_proj",
    doubled_norm: "input_layernorm",
    doubled_gate: "mlp.gate_proj",
    doubled_down_output: "mlp.down_proj",
}


def broken(model, fault, dtype):
    other = copy.deepcopy(model)
    fault(other)
    return other.to(dtype)


def culprit(fault):
    return f"model.layers.{LAYER}.{FAULTS[fault]}"
