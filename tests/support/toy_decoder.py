"""A small decoder in torch with random weights and a cache: the model of the twins."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

Cache = list[tuple[torch.Tensor, torch.Tensor]]


class RMSNorm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class Attention(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(hidden, hidden, bias=False)
        self.k_proj = nn.Linear(hidden, hidden, bias=False)
        self.v_proj = nn.Linear(hidden, hidden, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor, cache: Cache, at: int) -> torch.Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if at < len(cache):
            k, v = torch.cat((cache[at][0], k), 1), torch.cat((cache[at][1], v), 1)
            cache[at] = (k, v)
        else:
            cache.append((k, v))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        hidden = torch.ones(scores.shape[-2:]).tril(k.shape[1] - q.shape[1]) == 0
        return self.o_proj(scores.masked_fill(hidden, -1e4).softmax(-1) @ v)


class MLP(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, 2 * hidden, bias=False)
        self.up_proj = nn.Linear(hidden, 2 * hidden, bias=False)
        self.act_fn = nn.SiLU()
        self.down_proj = nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class ToyLayer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(hidden)
        self.self_attn = Attention(hidden)
        self.post_attention_layernorm = RMSNorm(hidden)
        self.mlp = MLP(hidden)

    def forward(self, x: torch.Tensor, cache: Cache, at: int) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cache, at)
        return x + self.mlp(self.post_attention_layernorm(x))


class ToyDecoder(nn.Module):
    """Embedding, layers, norm and head; `forward` continues the sequence in the cache."""

    def __init__(self, layers: int, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(ToyLayer(hidden) for _ in range(layers))
        self.norm = RMSNorm(hidden)
        self.lm_head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        kept: Cache = [] if cache is None else cache
        x = self.embed_tokens(tokens)
        for at, layer in enumerate(self.layers):
            x = layer(x, kept, at)
        return self.lm_head(self.norm(x))


def toy_decoder(
    layers: int = 2, hidden: int = 32, vocabulary: int = 64, seed: int = 0
) -> ToyDecoder:
    """A decoder with seeded random weights."""
    with cast(Any, torch.random).fork_rng(devices=[]):
        cast(Any, torch).manual_seed(seed)
        return ToyDecoder(layers, hidden, vocabulary).eval()


def in_library_order(model: ToyDecoder) -> ToyDecoder:
    """Register the model's modules in the order of transformers' Llama; returns the model.

    That is not the order of execution: attention and mlp come before the norms, and the activation
    is the last in the mlp. The final norm comes before the head as usual.
    """
    for layer in model.layers:
        _register(layer, ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm"))
        _register(cast(ToyLayer, layer).mlp, ("gate_proj", "up_proj", "down_proj", "act_fn"))
    return model


def _register(module: nn.Module, names: tuple[str, ...]) -> None:
    children = dict(module.named_children())
    assert set(children) == set(names)
    for name in names:
        delattr(module, name)
    for name in names:
        module.add_module(name, children[name])
