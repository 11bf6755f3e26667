"""Models as serving engines write them, against transformers' own.

One projection for query, key and value, one for gate and up, the tokens of a batch in one axis, and
norms that add the residual before they normalise. Written anew here in that shape; weights are
taken over from the original.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import driftline
from benchmarks.engines.cases import Case, Measured, measured, seconds
from driftline.runs.memory import MemorySink
from driftline.runs.run import Run

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "use_cache": False,
}


class FusedNorm(nn.Module):
    """An RMS norm that first adds the residual; gives the normalised sum and the sum."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        total = x if residual is None else x + residual
        scaled = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + self.eps)
        return (scaled * self.weight, total) if residual is not None else scaled * self.weight


class HeadNorm(nn.Module):
    """Qwen3's norm of every head."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def merged(*layers: nn.Linear) -> nn.Linear:
    """One projection of several, one after the other along its outputs."""
    weight = torch.cat([layer.weight for layer in layers])
    has_bias = layers[0].bias is not None
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=has_bias)
    linear.weight.data.copy_(weight)
    if has_bias:
        linear.bias.data.copy_(torch.cat([layer.bias for layer in layers]))
    return linear


class SiluAndMul(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up


class ServedAttention(nn.Module):
    """Attention over the tokens of a batch in one axis."""

    def __init__(self, source: Any, config: Any) -> None:
        super().__init__()
        self.qkv_proj = merged(source.q_proj, source.k_proj, source.v_proj)
        self.o_proj = merged(source.o_proj)
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.size = source.head_dim
        if hasattr(source, "q_norm"):
            self.q_norm = HeadNorm(source.q_norm.weight, config.rms_norm_eps)
            self.k_norm = HeadNorm(source.k_norm.weight, config.rms_norm_eps)

    def forward(
        self, positions: Tensor, x: Tensor, rope: tuple[Tensor, Tensor], rows: int
    ) -> Tensor:
        del positions
        widths = [self.heads * self.size, self.kv_heads * self.size, self.kv_heads * self.size]
        query, key, value = self.qkv_proj(x).split(widths, -1)
        query, key, value = (t.view(len(x), -1, self.size) for t in (query, key, value))
        if hasattr(self, "q_norm"):
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = (_turned(t, *rope) for t in (query, key))
        # [rows, heads, tokens, size]
        parts = [
            t.view(rows, -1, t.shape[1], self.size).transpose(1, 2) for t in (query, key, value)
        ]
        repeats = self.heads // self.kv_heads
        key, value = (t.repeat_interleave(repeats, 1) for t in parts[1:])
        mixed = F.scaled_dot_product_attention(parts[0], key, value, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(len(x), -1))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-right, left), -1) * sin[:, None]


class ServedMlp(nn.Module):
    def __init__(self, source: Any) -> None:
        super().__init__()
        self.gate_up_proj = merged(source.gate_proj, source.up_proj)
        self.act_fn = SiluAndMul()
        self.down_proj = merged(source.down_proj)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_up_proj(x)))


class ServedExperts(nn.Module):
    """Mixtral's block: a router, and the experts' weights as one tensor each."""

    def __init__(self, source: Any, config: Any) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.num_local_experts, bias=False)
        self.gate.weight.data.copy_(source.gate.weight)
        self.w13 = nn.Parameter(source.experts.gate_up_proj.detach().clone())
        self.w2 = nn.Parameter(source.experts.down_proj.detach().clone())
        self.top_k = config.num_experts_per_tok

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = torch.softmax(self.gate(x).float(), -1).topk(self.top_k, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for expert in range(self.w13.shape[0]):
            token, place = (chosen == expert).nonzero(as_tuple=True)
            gate, up = F.linear(x[token], self.w13[expert]).chunk(2, -1)
            part = F.linear(F.silu(gate) * up, self.w2[expert])
            out.index_add_(0, token, part * weights[token, place, None])
        return out


class ServedLayer(nn.Module):
    def __init__(self, source: Any, config: Any) -> None:
        super().__init__()
        eps = config.rms_norm_eps
        self.input_layernorm = FusedNorm(source.input_layernorm.weight, eps)
        self.self_attn = ServedAttention(source.self_attn, config)
        self.post_attention_layernorm = FusedNorm(source.post_attention_layernorm.weight, eps)
        if hasattr(config, "num_local_experts"):
            self.block_sparse_moe: nn.Module = ServedExperts(source.mlp, config)
        else:
            self.mlp: nn.Module = ServedMlp(source.mlp)

    def forward(
        self, positions: Tensor, x: Tensor, residual: Tensor | None, rope: Any, rows: int
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            residual, x = x, self.input_layernorm(x)
        else:
            x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(positions, x, rope, rows)
        x, residual = self.post_attention_layernorm(x, residual)
        block = self.block_sparse_moe if hasattr(self, "block_sparse_moe") else self.mlp
        return block(x), residual


class ServedInner(nn.Module):
    def __init__(self, source: Any, config: Any) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding.from_pretrained(
            source.embed_tokens.weight.detach().clone()
        )
        self.layers = nn.ModuleList(ServedLayer(layer, config) for layer in source.layers)
        self.norm = FusedNorm(source.norm.weight, config.rms_norm_eps)

    def forward(self, ids: Tensor, positions: Tensor, rope: Any, rows: int) -> Tensor:
        x, residual = self.embed_tokens(ids), None
        for layer in self.layers:
            x, residual = layer(positions, x, residual, rope, rows)
        return self.norm(x, residual)[0]


class Served(nn.Module):
    """A causal model in the shape of a serving engine."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.model = ServedInner(source.model, source.config)
        self.lm_head = nn.Linear(
            source.lm_head.in_features, source.lm_head.out_features, bias=False
        )
        self.lm_head.weight.data.copy_(source.lm_head.weight)
        self._rotary = [source.model.rotary_emb]

    def forward(self, ids: Tensor) -> Tensor:
        rows, tokens = ids.shape
        positions = torch.arange(tokens).repeat(rows)
        cos, sin = self._rotary[0](torch.zeros(1), positions[None])
        x = self.model(ids.reshape(-1), positions, (cos[0], sin[0]), rows)
        return self.lm_head(x)


def original(name: str) -> nn.Module:
    """transformers' model of a name, small, with weights as training leaves them."""
    import transformers

    sizes = dict(SIZES)
    if name == "Mixtral":
        sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    if name == "Qwen3":
        sizes |= {"head_dim": 16}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**sizes)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.uniform_(0.7, 1.3)
            elif parameter_name.endswith("bias"):
                parameter.normal_(0, 0.1)
            else:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    return model


IDS = torch.randint(0, 128, (2, 9), generator=torch.Generator().manual_seed(3))


def run_of(model: nn.Module) -> Run:
    sink = MemorySink()
    with torch.no_grad(), driftline.capture(model, sink, levels=("modules", "params")):
        model(IDS)
    return sink.run()


def plant(model: Served, fault: str) -> tuple[str, ...]:
    """Plant a fault in layer 2; gives the places where it may rightly be named."""
    layer: Any = model.model.layers[2]
    with torch.no_grad():
        if fault.startswith("queries"):
            width = layer.self_attn.heads * layer.self_attn.size
            layer.self_attn.qkv_proj.weight[:width] *= 2
            base = "model.layers.2.self_attn"
            return tuple(f"{base}.{part}" for part in ("q_proj", "qkv_proj"))
        if fault.startswith("gate"):
            weight = layer.mlp.gate_up_proj.weight
            weight.copy_(torch.cat(weight.chunk(2)[::-1]))
            return tuple(
                f"model.layers.2.mlp.{part}" for part in ("gate_proj", "gate_up_proj", "up_proj")
            )
        if fault.startswith("a norm"):
            layer.post_attention_layernorm.eps = 0.3
            return ("model.layers.2.post_attention_layernorm",)
        layer.block_sparse_moe.w2.copy_(layer.block_sparse_moe.w2.roll(1, 0))
    return tuple(f"model.layers.2.{part}" for part in ("mlp", "mlp.experts", "block_sparse_moe"))


def measure(name: str, fault: str, folder: Path) -> Measured:
    del folder
    source = original(name)
    reference = run_of(source)
    served = Served(source).eval()
    with torch.no_grad():
        plain = seconds(lambda: served(IDS), 3)
    cost = seconds(lambda: run_of(served)) / plain
    clean = driftline.compare(reference, run_of(served))
    places = plant(served, fault)
    faulty = driftline.compare(reference, run_of(served))
    return measured(clean, faulty, fault, places, cost)


CASES = tuple(
    Case("served model, as serving engines write it", name, partial(measure, name, fault))
    for name, fault in (
        ("Llama", "queries twice as large"),
        ("Llama", "a norm's epsilon of 0.3"),
        ("Qwen2", "gate and up exchanged"),
        ("Qwen3", "queries twice as large"),
        ("Mixtral", "the wrong experts' weights"),
    )
)
