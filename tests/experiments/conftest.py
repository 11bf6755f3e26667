"""Programs that are started for real, with a model whose faults can be asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

PROGRAM = """
import argparse, sys
import torch
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--hf-token")
p.add_argument("--dtype", default="float32")
p.add_argument("--arch", default="toy")
p.add_argument("--fault", default="")
p.add_argument("--layers", type=int, default=2)
p.add_argument("--hidden", type=int, default=64)
p.add_argument("--tokens", type=int, default=0)
p.add_argument("--train", action="store_true")
p.add_argument("--batch", type=int, default=2)
p.add_argument("--save", default="")
a = p.parse_args()
torch.manual_seed(0)

class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.scale = (width // 4) ** -0.5
        self.dropout = 0.1

    def forward(self, x, mask=None):
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale,
            dropout_p=self.dropout if self.training else 0.0)
        return self.out(y.transpose(1, 2).flatten(2))


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.3 * torch.randn(width))
        self.eps = 1e-6

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, True) + self.eps)).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1 = Norm(width)
        self.attn = Attention(width)
        self.norm2 = Norm(width)
        self.up = nn.Linear(width, 96)
        self.act = nn.GELU()
        self.down = nn.Linear(96, width)

    def forward(self, x, mask=None):
        x = x + self.attn(self.norm1(x), mask=mask)
        return x + self.down(self.act(self.up(self.norm2(x))))


class Toy(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.embed = nn.Embedding(96, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm = Norm(width)
        self.head = nn.Linear(width, 96, bias=False)

    def forward(self, ids, attention_mask=None):
        x = 0.1 * self.embed(ids)
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        for layer in self.layers:
            x = layer(x, mask=mask)
        return self.head(self.norm(x))


def build():
    if a.arch == "toy":
        return Toy(a.hidden, a.layers)
    if a.arch == "llama":
        from transformers import LlamaConfig, LlamaForCausalLM
        return LlamaForCausalLM(LlamaConfig(hidden_size=a.hidden, intermediate_size=96,
            num_hidden_layers=a.layers, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=96, attention_dropout=0.1 if a.train else 0.0))
    if a.arch == "gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel
        return GPT2LMHeadModel(GPT2Config(n_embd=a.hidden, n_layer=a.layers, n_head=4,
            vocab_size=96, n_positions=64, bos_token_id=0, eos_token_id=1))
    if a.arch == "t5":
        from transformers import T5Config, T5ForConditionalGeneration
        return T5ForConditionalGeneration(T5Config(d_model=a.hidden, d_kv=16, d_ff=96,
            num_layers=a.layers, num_heads=4, vocab_size=96, decoder_start_token_id=0))
    if a.arch == "moe":
        from transformers import MixtralConfig, MixtralForCausalLM
        return MixtralForCausalLM(MixtralConfig(hidden_size=a.hidden, intermediate_size=96,
            num_hidden_layers=a.layers, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=96, num_local_experts=4))
    raise SystemExit("no such model")

m = build()
m.train() if a.train else m.eval()
m.to(getattr(torch, a.dtype))
if a.fault == "eps":
    m.layers[1].norm2.eps = 1e-3
if a.fault == "scale":
    m.layers[1].attn.scale *= 1.5
if a.fault == "down":
    with torch.no_grad():
        m.layers[1].down.weight.mul_(1.5)
if a.fault == "random":
    own = torch.Generator()
    own.seed()
    m.layers[1].act.register_forward_hook(lambda *x: x[2] + 1e-3 * torch.rand((), generator=own))
if a.fault == "batch":  # a row's result depends on who else is in the batch
    m.layers[1].norm2.register_forward_hook(lambda *x: x[2] * (1 + 1e-3 * len(x[2])))
if a.fault == "exit":
    sys.exit(3)
ids = torch.randint(2, 96, (a.batch, 12))
kwargs = {"attention_mask": torch.ones_like(ids)}
with torch.no_grad():
    if a.tokens:
        out = m.generate(ids, max_new_tokens=a.tokens, do_sample=False, pad_token_id=0, **kwargs)
    elif a.arch == "t5":
        out = m(input_ids=ids, decoder_input_ids=ids[:, :5], **kwargs).logits
    else:
        out = m(ids, **kwargs)
        out = getattr(out, "logits", out)
if a.save:
    torch.save(out, a.save)
print("drawn", torch.rand(1).item())
"""


class Said(NamedTuple):
    """What a command answered."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("program") / "infer.py"
    path.write_text(PROGRAM)
    return path


@pytest.fixture(scope="session")
def driftline(warm_python: str) -> Callable[..., Said]:
    """Run a command line in a process of its own; torch is there before it and our program."""

    def call(*words: object, cwd: Path | None = None) -> Said:
        python = sys.executable if "-c" in words else warm_python  # some never import torch
        given = [python if word == sys.executable else str(word) for word in words]
        done = subprocess.run(
            [warm_python, "-m", "driftline.cli.main", *given],
            capture_output=True,
            text=True,
            check=False,
            cwd=cwd,
            timeout=300,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160"},
        )
        return Said(done.returncode, done.stdout, done.stderr)

    return call


@pytest.fixture(scope="session")
def dumped(
    tmp_path_factory: pytest.TempPathFactory, program: Path, driftline: Callable[..., Said]
) -> Callable[..., Path]:
    """A dump of the program with some options; the same one for the same options."""
    made: dict[tuple[str, ...], Path] = {}

    def dump(*options: str) -> Path:
        if options not in made:
            folder = tmp_path_factory.mktemp("dump") / "run"
            said = driftline(
                "dump", "-o", folder, "--step", "*", "--", sys.executable, program, *options
            )
            assert said.code == 0, said.err
            made[options] = folder
        return made[options]

    return dump
