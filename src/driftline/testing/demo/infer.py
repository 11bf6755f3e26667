"""A small Llama-like language model answers one prompt. It does not use Driftline.

    python infer.py --dtype float32
    python infer.py --dtype bfloat16 --fault gelu --fault-layer 5

The weights are random (a fixed seed), so nothing is downloaded. `--fault` plants the kind of
mistake people make when they port a model: it changes one layer, and nothing tells you which.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    def __init__(self, width: int, epsilon: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return self.weight * (wide * scale).to(hidden.dtype)


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.scale = (width // heads) ** -0.5
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        split = (batch, length, self.heads, width // self.heads)
        q = rotate(self.q_proj(hidden).view(split).transpose(1, 2), cos, sin)
        k = rotate(self.k_proj(hidden).view(split).transpose(1, 2), cos, sin)
        v = self.v_proj(hidden).view(split).transpose(1, 2)
        weights = torch.softmax((q @ k.transpose(-1, -2)) * self.scale + mask, dim=-1)
        return self.o_proj((weights @ v).transpose(1, 2).reshape(batch, length, width))


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.act_fn: nn.Module = nn.SiLU()

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(width)
        self.self_attn = Attention(width, heads)
        self.post_attention_layernorm = RMSNorm(width)
        self.mlp = Mlp(width, inner)

    def forward(self, hidden: Tensor, *, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos=cos, sin=sin, mask=mask)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class SmallLlama(nn.Module):
    def __init__(
        self, vocabulary: int = 512, width: int = 256, heads: int = 8, layers: int = 8
    ) -> None:
        super().__init__()
        self.head_width = width // heads
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, heads, 3 * width) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed_tokens(tokens)
        length = tokens.shape[1]
        half = torch.arange(0, self.head_width, 2) / self.head_width
        angles = torch.outer(torch.arange(length), 10000.0**-half).repeat(1, 2)
        cos, sin = angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)
        lowest = torch.finfo(hidden.dtype).min
        mask = torch.full((length, length), lowest, dtype=hidden.dtype).triu(1)
        for layer in self.layers:
            hidden = layer(hidden, cos=cos, sin=sin, mask=mask)
        return self.lm_head(self.norm(hidden))


def build(seed: int = 0) -> SmallLlama:
    """Weights of the size that keeps activations of order one through the depth."""
    torch.manual_seed(seed)
    model = SmallLlama()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=1 / math.sqrt(module.in_features))
    return model.eval()


def plant(model: SmallLlama, fault: str, layer: int) -> None:
    """Break one layer the way a port breaks it."""
    mlp = model.layers[layer].mlp
    if fault == "gelu":
        mlp.act_fn = nn.GELU()
    elif fault == "channels":
        with torch.no_grad():
            mlp.down_proj.weight[:16] = 0
    elif fault == "scale":
        model.layers[layer].self_attn.scale *= 2


def main() -> None:
    options = argparse.ArgumentParser(description="Answer one prompt with a small random Llama.")
    options.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    options.add_argument("--fault", default="none", choices=["none", "gelu", "channels", "scale"])
    options.add_argument("--fault-layer", type=int, default=5)
    options.add_argument("--tokens", type=int, default=3, help="how many tokens to generate")
    chosen = options.parse_args()

    model = build()
    plant(model, chosen.fault, chosen.fault_layer)
    model.to(getattr(torch, chosen.dtype))
    tokens = torch.randint(0, 512, (1, 48), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for _ in range(chosen.tokens):
            best = model(tokens)[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat((tokens, best), dim=1)
    print(f"{chosen.dtype}: the model says", *tokens[0, -chosen.tokens :].tolist())


if __name__ == "__main__":
    main()
