"""A model whose noise hides faults: two runs cannot tell, a replay can."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAM = """
import math, sys
import torch
from torch import nn

WIDTH, HEADS, LAYERS = 64, 4, 32
torch.manual_seed(0)
torch.set_num_threads(1)


def linear(rows, columns, gain):
    module = nn.Linear(rows, columns, bias=False)
    nn.init.normal_(module.weight, 0.0, gain / math.sqrt(rows))
    return module


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = linear(WIDTH, WIDTH, 4.0), linear(WIDTH, WIDTH, 4.0)
        self.v_proj, self.o_proj = linear(WIDTH, WIDTH, 2.0), linear(WIDTH, WIDTH, 2.0)

    def forward(self, x):
        heads = [p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
                 for p in (self.q_proj, self.k_proj, self.v_proj)]
        y = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.up = nn.LayerNorm(WIDTH), linear(WIDTH, 128, 2.0)
        self.act, self.down = nn.GELU(), linear(128, WIDTH, 2.0)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(self.act(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), linear(WIDTH, 256, 1.0)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


model = Model().eval()
if "--fault" in sys.argv:
    rows = model.layers[24].attention.v_proj.weight.data
    rows.copy_(torch.roll(rows, WIDTH // HEADS, 0).clone())
if "--bf16" in sys.argv:
    model.bfloat16()
ids = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(1))
with torch.no_grad():
    model(ids)
"""
FAULTY = "layers.24.attention.v_proj"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, warm_python: str) -> Path:
    place = tmp_path_factory.mktemp("power")
    (place / "deep.py").write_text(PROGRAM)
    for name, options in (("ref", ""), ("clean", " --bf16"), ("bad", " --bf16 --fault")):
        _driftline("dump", "-o", name, "--exec", f"{warm_python} deep.py{options}", cwd=place)
    for name in ("clean", "bad"):
        exec_ = ("--exec", f"{warm_python} deep.py")
        _driftline("replay", name, "-o", f"replay-{name}", *exec_, cwd=place)
    return place


def _driftline(*words: str, cwd: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "driftline", *words], cwd=cwd, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


COMMANDS = ["compare", "diagnose"]


@pytest.mark.parametrize("verb", COMMANDS)
def test_two_runs_alone_say_that_they_cannot_tell(
    verb: str, place: Path, command: Callable
) -> None:
    said = command(verb, place / "ref", place / "clean")
    assert (said.code, said.word) == (2, "INCOMPLETE"), said.out
    assert "too noisy to tell from two runs" in said.out.lower()
    assert "driftline replay" in said.out


@pytest.mark.parametrize("verb", COMMANDS)
def test_two_runs_alone_do_not_pass_the_fault_and_accuse_nobody_else(
    verb: str, place: Path, command: Callable
) -> None:
    said = command(verb, place / "ref", place / "bad", "--format", "json")
    assert said.code in (1, 2), said.out
    if said.code == 1:
        assert json.loads(said.out)["first_site"] == FAULTY


@pytest.mark.parametrize("verb", COMMANDS)
def test_a_replay_passes_the_clean_one(verb: str, place: Path, command: Callable) -> None:
    said = command(verb, place / "ref", place / "clean", "--replay", place / "replay-clean")
    assert (said.code, said.word) == (0, "PASS"), said.out


@pytest.mark.parametrize("verb", COMMANDS)
def test_a_replay_names_the_fault(verb: str, place: Path, command: Callable) -> None:
    replay = ("--replay", place / "replay-bad", "--format", "json")
    said = command(verb, place / "ref", place / "bad", *replay)
    answer = json.loads(said.out)
    assert (said.code, answer["verdict"], answer["first_site"]) == (1, "fail", FAULTY)
