"""Small models and hand-written twins of theirs under other names, and captures of them."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import torch
from torch import nn

import driftline
from driftline.runs.run import Run

SMALL = {"n_layer": 12, "n_embd": 32, "n_head": 4, "vocab_size": 64, "n_positions": 32}


def gpt2(seed: int = 0, **changes: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**{**SMALL, **changes}, **ids)).eval()


def llama(seed: int = 0, **changes: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {
        "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 64,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})).eval()


def bert(seed: int = 0) -> Any:
    from transformers import BertConfig, BertModel

    torch.manual_seed(seed)
    config = BertConfig(
        num_hidden_layers=3, hidden_size=32, intermediate_size=64, num_attention_heads=4,
        vocab_size=64, max_position_embeddings=32,
    )  # fmt: skip
    return BertModel(config).eval()


def captured(model: nn.Module, path: Path, **options: Any) -> Run:
    with torch.no_grad(), driftline.capture(model, path, **options):
        model(torch.arange(8)[None] % 64)
    return driftline.open_run(path)


class SplitAttention(nn.Module):
    def __init__(self, size: int, heads: int, bias: bool = True, causal: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(size, size, bias=bias)
        self.second = nn.Linear(size, size, bias=bias)
        self.third = nn.Linear(size, size, bias=bias)
        self.mix = nn.Linear(size, size, bias=bias)
        self.heads = heads
        self.causal = causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.first(x), self.second(x), self.third(x)
        return self.mix(attend(q, k, v, self.heads, self.causal))


def attend(q: Any, k: Any, v: Any, heads: int, causal: bool = True) -> torch.Tensor:
    batch, tokens, size = q.shape
    parts = (t.view(batch, tokens, heads, -1).transpose(1, 2) for t in (q, k, v))
    mixed = nn.functional.scaled_dot_product_attention(*parts, is_causal=causal)
    return mixed.transpose(1, 2).reshape(batch, tokens, size)


class OurBlock(nn.Module):
    """Another nesting: the two halves of a layer are modules of their own, dropouts are gone."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.mixing = nn.ModuleDict(
            {"scale": nn.LayerNorm(size), "core": SplitAttention(size, heads)}
        )
        self.thinking = nn.Sequential(
            nn.LayerNorm(size), nn.Linear(size, 4 * size), nn.GELU(approximate="tanh"),
            nn.Linear(4 * size, size),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mixing["core"](self.mixing["scale"](x))
        return x + self.thinking(x)


class OurGPT(nn.Module):
    """GPT-2 written again: other names, other nesting, q, k and v as three Linears."""

    def __init__(self, layers: int, size: int, heads: int, vocab: int, places: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab, size)
        self.places = nn.Embedding(places, size)
        self.trunk = nn.ModuleList(OurBlock(size, heads) for _ in range(layers))
        self.closing = nn.LayerNorm(size)
        self.reader = nn.Linear(size, vocab, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        at = torch.arange(ids.shape[1])[None]
        x = self.words(ids) + self.places(at)
        for block in self.trunk:
            x = block(x)
        return self.reader(self.closing(x))


def our_gpt(theirs: Any) -> OurGPT:
    """The twin of a transformers GPT-2, with its weights."""
    config = theirs.config
    ours = OurGPT(
        config.n_layer, config.n_embd, config.n_head, config.vocab_size, config.n_positions
    ).eval()
    core = theirs.transformer
    with torch.no_grad():
        ours.words.weight.copy_(core.wte.weight)
        ours.places.weight.copy_(core.wpe.weight)
        _copy(ours.closing, core.ln_f)
        ours.reader.weight.copy_(theirs.lm_head.weight)
        for mine, block in zip(ours.trunk, core.h, strict=True):
            attention = mine.mixing["core"]
            _copy(mine.mixing["scale"], block.ln_1)
            _copy(mine.thinking[0], block.ln_2)
            weights = block.attn.c_attn.weight.T.chunk(3)
            biases = block.attn.c_attn.bias.chunk(3)
            three = (attention.first, attention.second, attention.third)
            for linear, weight, bias in zip(three, weights, biases, strict=True):
                linear.weight.copy_(weight)
                linear.bias.copy_(bias)
            for linear, conv in (
                (attention.mix, block.attn.c_proj),
                (mine.thinking[1], block.mlp.c_fc),
                (mine.thinking[3], block.mlp.c_proj),
            ):
                linear.weight.copy_(conv.weight.T)
                linear.bias.copy_(conv.bias)
    return ours


def _copy(mine: nn.Module, theirs: nn.Module) -> None:
    mine.load_state_dict(theirs.state_dict())


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gain * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class OurLlamaPart(nn.Module):
    """One layer of a Llama: gate and up in one Linear, the activation is a line of code."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.n1 = Norm(size, eps)
        self.a = nn.Linear(size, size, bias=False)
        self.b = nn.Linear(size, size, bias=False)
        self.c = nn.Linear(size, size, bias=False)
        self.d = nn.Linear(size, size, bias=False)
        self.n2 = Norm(size, eps)
        self.wide = nn.Linear(size, 2 * config.intermediate_size, bias=False)
        self.back = nn.Linear(config.intermediate_size, size, bias=False)
        self.heads = config.num_attention_heads

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        y = self.n1(x)
        batch, tokens, size = y.shape
        q, k, v = (
            linear(y).view(batch, tokens, self.heads, -1).transpose(1, 2)
            for linear in (self.a, self.b, self.c)
        )
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.d(mixed.transpose(1, 2).reshape(batch, tokens, size))
        gate, up = self.wide(self.n2(x)).chunk(2, -1)
        return x + self.back(nn.functional.silu(gate) * up)


class OurLlama(nn.Module):
    def __init__(self, theirs: Any) -> None:
        super().__init__()
        config = theirs.config
        core = theirs.model
        self.table = nn.Embedding(config.vocab_size, config.hidden_size)
        self.parts = nn.ModuleList(OurLlamaPart(config) for _ in core.layers)
        self.n = Norm(config.hidden_size, config.rms_norm_eps)
        self.out = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        object.__setattr__(self, "rope", core.rotary_emb)  # not a module of this model
        with torch.no_grad():
            self.table.weight.copy_(core.embed_tokens.weight)
            self.n.gain.copy_(core.norm.weight)
            self.out.weight.copy_(theirs.lm_head.weight)
            for mine, layer in zip(self.parts, core.layers, strict=True):
                mine.n1.gain.copy_(layer.input_layernorm.weight)
                mine.n2.gain.copy_(layer.post_attention_layernorm.weight)
                attention, mlp = layer.self_attn, layer.mlp
                for linear, source in (
                    (mine.a, attention.q_proj), (mine.b, attention.k_proj),
                    (mine.c, attention.v_proj), (mine.d, attention.o_proj),
                    (mine.back, mlp.down_proj),
                ):  # fmt: skip
                    linear.weight.copy_(source.weight)
                mine.wide.weight.copy_(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        config_dim = x.shape[-1] // self.parts[0].heads
        inverse = 1.0 / (10000.0 ** (torch.arange(0, config_dim, 2).float() / config_dim))
        angle = torch.outer(torch.arange(ids.shape[1]).float(), inverse)
        both = torch.cat([angle, angle], -1)[None]
        for part in self.parts:
            x = part(x, both.cos(), both.sin())
        return self.out(self.n(x))


def disguised(model: nn.Module, seed: int) -> tuple[nn.Module, dict[int, nn.Module]]:
    """A copy with random names, random order of registration, wrappers and dropouts left out.

    Also says which module of the copy is which of the model, by the id of the copy's.
    """
    chance = random.Random(seed)
    twin = copy.deepcopy(model)
    truth = {id(b): a for a, b in zip(model.modules(), twin.modules(), strict=True)}
    for module in list(twin.modules()):
        if isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
            continue
        items = list(module._modules.items())
        chance.shuffle(items)
        module._modules.clear()
        for name, child in items:
            if isinstance(child, nn.Dropout) and chance.random() < 0.5:
                module.__dict__[name] = _same
                continue
            many = isinstance(child, (nn.ModuleList, nn.ModuleDict))
            if chance.random() < 0.2 and child is not None and not many:
                shell = Shell(child)
                truth[id(shell)] = truth[id(child)]
                child = shell
            module._modules[f"{chance.choice('abcdefgh')}x{chance.randrange(10**6)}"] = child
            module.__dict__[name] = child  # what forward() asks for
    return twin, truth


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


class Shell(nn.Module):
    """A level that does nothing."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class OurBert(nn.Module):
    """BERT written again: fused qkv, post-norm, other names, no dropouts and no pooler module."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        config = theirs.config
        size = config.hidden_size
        self.tables = nn.ModuleList(
            copy.deepcopy(table)
            for table in (
                theirs.embeddings.word_embeddings,
                theirs.embeddings.token_type_embeddings,
                theirs.embeddings.position_embeddings,
            )
        )
        self.start = copy.deepcopy(theirs.embeddings.LayerNorm)
        self.stack = nn.ModuleList(nn.ModuleDict() for _ in theirs.encoder.layer)
        self.end = copy.deepcopy(theirs.pooler.dense)
        self.heads = config.num_attention_heads
        for mine, layer in zip(self.stack, theirs.encoder.layer, strict=True):
            attention = layer.attention
            three = [getattr(attention.self, name) for name in ("query", "key", "value")]
            fused = nn.Linear(size, 3 * size)
            with torch.no_grad():
                fused.weight.copy_(torch.cat([linear.weight for linear in three]))
                fused.bias.copy_(torch.cat([linear.bias for linear in three]))
            mine["fused"] = fused
            mine["out"] = copy.deepcopy(attention.output.dense)
            mine["n1"] = copy.deepcopy(attention.output.LayerNorm)
            mine["wide"] = copy.deepcopy(layer.intermediate.dense)
            mine["narrow"] = copy.deepcopy(layer.output.dense)
            mine["n2"] = copy.deepcopy(layer.output.LayerNorm)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        words, kinds, places = self.tables
        at = torch.arange(ids.shape[1])[None]
        x = self.start(words(ids) + kinds(torch.zeros_like(ids)) + places(at))
        for layer in self.stack:
            q, k, v = layer["fused"](x).chunk(3, -1)
            x = layer["n1"](layer["out"](attend(q, k, v, self.heads, causal=False)) + x)
            x = layer["n2"](layer["narrow"](nn.functional.gelu(layer["wide"](x))) + x)
        return torch.tanh(self.end(x[:, 0]))
