"""A final output that is off beyond measured noise though no site is convicted: not located."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from driftline.cli.main import main

PROGRAM = """
import sys, torch
from torch import nn

torch.set_num_threads(1)
words = set(sys.argv[1:])
direction = torch.randn(64, generator=torch.Generator().manual_seed(7))

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up, self.act, self.down = nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)
    def forward(self, x):
        torch.rand(1)  # so that its own code cannot be replayed
        y = self.down(self.act(self.up(self.norm(x))))
        if "drift" in words:
            y = y + 0.004 * x.abs().mean() * direction.to(x.dtype)
        return x + y

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 64)
        self.layers = nn.ModuleList(Layer() for _ in range(24))
        self.head = nn.Linear(64, 50)
    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

torch.manual_seed(0)
model = Model().eval()
if "bf16" in words:
    model.bfloat16()
with torch.no_grad():
    model(torch.arange(48).reshape(2, 24))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, warm_python: str) -> Path:
    """A deep model, clean in another format, and one of which every layer is off a little."""
    place = tmp_path_factory.mktemp("not_located")
    program = place / "program.py"
    program.write_text(PROGRAM)
    reference = ("--exec", f"{warm_python} {program}")
    main(["dump", "-o", str(place / "ref"), *reference])
    for name in ("clean", "drift"):
        main(["dump", "-o", str(place / name), "--exec", f"{warm_python} {program} bf16 {name}"])
        main(["replay", str(place / name), "-o", str(place / f"replay-{name}"), *reference])
    like = ("--like", str(place / "clean"), "--variant", "plain", "--variant", "dither")
    main(["noise", *like, "-o", str(place / "noise"), *reference])
    return place


@pytest.mark.parametrize("verb", ["compare", "diagnose"])
@pytest.mark.parametrize("kind", ["noise", "replay"])
def test_an_output_beyond_measured_noise_fails_though_no_site_is_convicted(
    kind: str, verb: str, place: Path, command: Callable[..., Any], tmp_path: Path
) -> None:
    """Each layer adds less than can be told from noise; 24 of them add up in one direction."""
    for name, expected in (("clean", (0, "pass")), ("drift", (1, "fail"))):
        evidence = place / ("noise" if kind == "noise" else f"replay-{name}")
        words = (place / "ref", place / name, f"--{kind}", evidence)
        said = command(verb, *words, "--format", "json")
        answer = json.loads(said.out)
        assert (said.code, answer["verdict"]) == expected, said.out
        first = command(verb, *words).out.splitlines()[0].lower()
        assert ("not located: the final output is off by 0.07" in first) == (name == "drift"), first
    # What a table keeps of its evidence says the same.
    command("compare", *words, "-o", tmp_path / "table", "-q")
    again = command("check", tmp_path / "table", "--format", "json")
    assert (again.code, json.loads(again.out)["verdict"]) == (1, "fail")
    assert "not located" in json.loads(again.out)["finding"]


def test_two_runs_alone_have_measured_no_noise(place: Path, command: Callable[..., Any]) -> None:
    said = command("compare", place / "ref", place / "drift", "--format", "json")
    assert "not located" not in json.loads(said.out)["finding"]
