"""Whole programs through the command line: averages of weights, ranks, generated tokens, steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from driftline.cli.main import main

AVERAGE = """
import copy, sys, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
average = copy.deepcopy(model).requires_grad_(False).eval()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(16, 8), torch.randint(0, 4, (16,))
for _ in range(6):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    for own, trained in zip(average.parameters(), model.parameters()):
        own.data.lerp_(trained.data, float(sys.argv[1]))
average(x)
"""
RANKS = """
import os, sys, torch
import torch.distributed as dist
place = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", **place)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + dist.get_rank())
for _ in range(3):
    x, y = torch.randn(16, 8), torch.randint(0, 4, (16,))
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    if sys.argv[1] == "good":
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
    optimizer.step()
dist.destroy_process_group()
"""
DECODER = """
import sys, torch

class Decoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = torch.nn.Embedding(50, 32)
        self.places = torch.nn.Embedding(64, 32)
        self.mix = torch.nn.Linear(32, 32)
        self.head = torch.nn.Linear(32, 50)

    def forward(self, tokens, positions):
        return self.head(torch.tanh(self.mix(self.tokens(tokens) + self.places(positions))))

torch.manual_seed(0)
model = Decoder().eval()
tokens = torch.randint(0, 50, (1, 5))
with torch.no_grad():
    positions = torch.arange(5)[None]
    for step in range(6):
        following = model(tokens, positions)[:, -1:].argmax(-1)
        tokens, positions = following, positions[:, -1:] + 1 + (step == 0) * int(sys.argv[1])
"""


@pytest.fixture
def dumped(tmp_path: Path, warm_python: str) -> Callable[..., Path]:
    """Dumps a program with the options that everybody has: none."""

    def dump(source: str, name: str, *words: str, ranks: int = 0) -> Path:
        program = tmp_path / "program.py"
        program.write_text(source)
        out = tmp_path / name
        command = [warm_python, str(program), *words]
        if ranks:
            shell = " & ".join(
                f"RANK={rank} WORLD_SIZE={ranks} {' '.join(command)}" for rank in range(ranks)
            )
            command = ["bash", "-c", f"{shell}; wait"]
        assert main(["dump", "-o", str(out), "--log-level", "error", "--", *command]) == 0
        return out

    return dump


def compared(reference: Path, candidate: Path, capsys: pytest.CaptureFixture[str]) -> dict:
    capsys.readouterr()
    main(["compare", str(reference), str(candidate), "--format", "json"])
    return json.loads(capsys.readouterr().out)


def test_an_average_of_weights_with_another_decay_is_named(dumped, capsys):
    table = compared(dumped(AVERAGE, "ref", "0.1"), dumped(AVERAGE, "cand", "0.3"), capsys)
    assert table["verdict"] == "fail", table["finding"]
    assert "weights that no optimizer updates differ" in table["finding"]
    assert "an average of weights" in table["finding"]


def test_gradients_that_are_not_reduced_over_ranks_are_named(dumped, capsys, tmp_path):
    runs = [
        dumped(RANKS, fault, fault, str(tmp_path / f"{fault}.store"), ranks=2)
        for fault in ("good", "bad")
    ]
    table = compared(*runs, capsys)
    assert table["verdict"] == "fail", table["finding"]
    assert "they are not reduced over ranks in the candidate" in table["finding"]
    assert table["training"]["broken"]["step"] == 0


def test_positions_that_are_off_by_one_in_generated_tokens_are_found_without_an_option(
    dumped, capsys
):
    reference, candidate = dumped(DECODER, "ref", "0"), dumped(DECODER, "cand", "1")
    table = compared(reference, candidate, capsys)
    assert table["verdict"] == "fail", table["finding"]
    row = table["rows"][table["first_row"]]
    assert (row["step"], row["slot"]) == (1, "positions")
    assert main(["compare", str(reference), str(candidate)]) == 1
    printed = capsys.readouterr().out
    # The commands that keep this step in full, of both sides.
    for run in (reference, candidate):
        assert f"driftline dump --step 1 -o {run}.step1 -- " in printed.replace("\n", " ")


def test_the_same_generation_passes(dumped, capsys):
    table = compared(dumped(DECODER, "ref", "0"), dumped(DECODER, "cand", "0"), capsys)
    assert table["verdict"] == "pass"
    assert "6 steps" in table["finding"] or table["coverage"]["steps"]["count"] == 6
