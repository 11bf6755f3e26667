"""How much of a model was looked at, where the two sides were cut in different ways.

Sound pairs pass: modules against the operators inside them, operators against both, an ONNX graph
against the modules it was exported from. Pairs with a hole, a part of which one side has nothing,
do not; and what is wrong in a pair of unlike cuts is found.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import driftline
from driftline.cli.main import main
from driftline.runs.memory import MemorySink


class Block(nn.Module):
    """A convolution block; its sum and its activations are code of its own."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, padding=1)
        self.norm = nn.GroupNorm(2, after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1)
        self.skip = nn.Conv2d(before, after, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.conv2(functional.silu(self.norm(self.conv1(x)))) + self.skip(x))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(4 if n else 3, 4) for n in range(5)))
        self.head = nn.Linear(4, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x).mean((2, 3)))


class Mixer(nn.Module):
    """Residual sums in the code of the model itself, transposed views, dropouts that do nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.ModuleList(nn.Linear(10, 10) for _ in range(5))
        self.channels = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Dropout(0.1), nn.Linear(24, 12))
            for _ in range(5)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(12) for _ in range(5))
        self.head = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for tokens, channels, norm in zip(self.tokens, self.channels, self.norms, strict=True):
            x = x + tokens(norm(x).transpose(1, 2)).transpose(1, 2)
            x = x + channels(x)
        return self.head(x)


class Attention(nn.Module):
    """One layer: its products work on a plain list of all tokens, its modules on rows of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(8, 32), nn.LayerNorm(32)
        self.query, self.key, self.value, self.out = (nn.Linear(32, 32) for _ in range(4))
        self.up, self.down, self.head = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        y = self.norm(x)
        shares = torch.softmax(self.query(y) @ self.key(y).transpose(-1, -2) / 6.0, -1)
        x = x + self.out(shares @ self.value(y))
        return self.head(x + self.down(functional.silu(self.up(x))))


MODELS: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "convolutions": (Convolutions, (2, 3, 8, 8)),
    "mixer": (Mixer, (2, 10, 12)),
    "attention": (Attention, (2, 6, 8)),
}
LEVELS = {"modules": ("modules",), "operators": ("ops",), "both": ("modules", "ops")}
CUTS = [("modules", "operators"), ("modules", "both"), ("operators", "both"), ("modules", "onnx")]
PAIRS = [*CUTS, *((second, first) for first, second in CUTS), ("modules", "modules")]


def model_of(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    kind, shape = MODELS[name]
    return kind().eval(), torch.randn(shape)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("cuts")
    for name in MODELS:
        model, x = model_of(name)
        for word, levels in LEVELS.items():
            with torch.no_grad(), driftline.capture(model, place / f"{name}-{word}", levels=levels):
                model(x)
        export(model, x, place / f"{name}-onnx")
    return place


def export(model: nn.Module, x: torch.Tensor, run: Path) -> None:
    """The model as an ONNX file, and a run of that."""
    path = run.with_suffix(".onnx")
    with contextlib.redirect_stdout(io.StringIO()):
        torch.onnx.export(model, (x,), str(path), dynamo=False, input_names=["x"], opset_version=18)
    np.savez(run.with_suffix(".npz"), x=x.numpy())
    words = ("--model", path, "--inputs", run.with_suffix(".npz"), "-o", run, "--optimize", "none")
    assert main(["dump", "--engine", "onnxruntime", *map(str, words)]) == 0


def holed(run: Path, first: float, last: float, copy: Path) -> Path:
    """A run without what was captured in a stretch of the execution, given as shares of it."""
    shutil.copytree(run, copy)
    (index,) = copy.glob("rank*/index.jsonl")
    lines = index.read_text().splitlines()
    orders = sorted(json.loads(line)["order"] for line in lines)
    start, end = (
        orders[int(first * len(orders))],
        orders[min(int(last * len(orders)), -1 % len(orders))],
    )
    kept = [line for line in lines if not start <= json.loads(line)["order"] <= end]
    index.write_text("".join(f"{line}\n" for line in kept))
    return copy


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("reference", "candidate"), PAIRS)
def test_sound_pairs_pass_and_pairs_with_a_hole_do_not(
    name: str, reference: str, candidate: str, runs: Path, tmp_path: Path, command: Callable
) -> None:
    pair = (runs / f"{name}-{reference}", runs / f"{name}-{candidate}")
    said = command("compare", *pair)
    assert (said.code, said.word) == (0, "PASS"), said.out
    # The end of the model, and a third in the middle of it.
    for number, (first, last) in enumerate(((0.7, 1.0), (0.35, 0.68))):
        lacking = holed(pair[1], first, last, tmp_path / f"hole{number}")
        for sides in ((pair[0], lacking), (lacking, pair[0])):
            said = command("compare", *sides)
            assert (said.code, said.word) == (2, "INCOMPLETE"), said.out
            assert "are covered, 90% are needed" in " ".join(said.out.split())


@pytest.mark.parametrize(("first", "last"), [(0.2, 0.4), (0.4, 0.6), (0.5, 0.7), (0.7, 0.9)])
@pytest.mark.parametrize(("whole", "cut"), [*PAIRS, ("both", "both")])
def test_a_fifth_that_is_missing_is_missed_wherever_it_begins(
    whole: str, cut: str, first: float, last: float, runs: Path, tmp_path: Path
) -> None:
    """Also where branches run side by side, and where it ends with what a container gives."""
    other = runs / f"convolutions-{whole}"
    lacking = holed(runs / f"convolutions-{cut}", first, last, tmp_path / "hole")
    for sides in ((other, lacking), (lacking, other)):
        assert driftline.compare(*sides).verdict == "incomplete"


class Branches(nn.Module):
    """Four branches of equal size whose results are mixed into one."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)) for _ in range(4)
        )
        self.mixed = nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mixed(torch.cat([branch(x) for branch in self.branches], -1))


@pytest.mark.parametrize("lower", [False, True], ids=["equal bits", "bfloat16"])
def test_branches_that_go_into_one_result_are_missed_together(
    lower: bool, tmp_path: Path, command: Callable
) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 16), *(Branches() for _ in range(4))), torch.randn(5, 16)
    whole, other = tmp_path / "whole", tmp_path / "other"
    with torch.no_grad(), driftline.capture(model, whole):
        model(x)
    dtype = torch.bfloat16 if lower else torch.float32
    with torch.no_grad(), driftline.capture(model.to(dtype), other):
        model(x.to(dtype))
    assert command("compare", whole, other).word == "PASS"
    # A branch is a short stretch; two of them are more than a tenth of the calls.
    for branches, word in (((0,), "PASS"), ((2,), "PASS"), ((0, 2), "INCOMPLETE")):
        lacking = shutil.copytree(other, tmp_path / f"lacking{branches}")
        (index,) = lacking.glob("rank*/index.jsonl")
        gone = tuple(f"{block}.branches.{b}" for block in (2, 4) for b in branches)
        lines = index.read_text().splitlines()
        kept = [line for line in lines if not json.loads(line)["site"].startswith(gone)]
        index.write_text("".join(f"{line}\n" for line in kept))
        for sides in ((whole, lacking), (lacking, whole)):
            assert command("compare", *sides).word == word, (branches, sides)


def test_a_container_without_its_parts_does_not_stand_for_half_a_model(
    runs: Path, tmp_path: Path
) -> None:
    whole = runs / "convolutions-modules"
    lacking = shutil.copytree(whole, tmp_path / "shell")
    (index,) = lacking.glob("rank*/index.jsonl")
    lines = index.read_text().splitlines()
    kept = [line for line in lines if not json.loads(line)["site"].startswith("blocks.")]
    index.write_text("".join(f"{line}\n" for line in kept))
    for sides in ((whole, lacking), (lacking, whole)):
        assert driftline.compare(*sides).verdict == "incomplete"


class PartsBypassed(nn.Module):
    """The convolutions with two blocks that are called as functions: no hook sees them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.blocks, self.head = model.blocks, model.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if number in (1, 2):
                x = (
                    functional.silu(block.norm.forward(block.conv1.forward(x))),
                    block.skip.forward(x),
                )
                x = functional.relu(block.conv2.forward(x[0]) + x[1])
            else:
                x = block(x)
        return self.head(x.mean((2, 3)))


def test_runs_in_memory_are_measured_as_those_on_disk_are(tmp_path: Path) -> None:
    model, x = model_of("convolutions")
    captured: list[tuple[Path, Any]] = []
    for name, side in (("whole", model), ("bypassed", PartsBypassed(model))):
        for sink in (tmp_path / name, MemorySink(name=name)):
            with torch.no_grad(), driftline.capture(side, sink):
                side(x)
        captured.append((tmp_path / name, sink.run()))
    told = {driftline.compare(*sides).finding for sides in zip(*captured, strict=True)}
    told.add(driftline.compare_models(model, PartsBypassed(model), x).finding)
    assert len(told) == 1
    assert "only 61.9% of the 21 calls of leaf modules" in told.pop()


def test_parameters_and_views_of_a_graph_cover_no_call(
    tmp_path: Path, warm_python: str, command: Callable
) -> None:
    """A graph of which 40 % of the operators are lost, and no placeholder of a weight is."""
    program = tmp_path / "program.py"
    program.write_text(
        f"import sys, torch\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_coverage_of_graphs import model_of\nmodel, x = model_of('attention')\n"
        "with torch.no_grad():\n    torch.compile(model)(x)\n"
    )
    graph = tmp_path / "graph"
    words = ("--graph", "fx", "-o", graph, "--exec", f"{warm_python} {program}")
    assert command("dump", *words).code == 0
    assert command("compare", graph, graph).word == "PASS"
    lacking = holed(graph, 0.5, 0.9, tmp_path / "hole")
    for sides in ((graph, lacking), (lacking, graph)):
        said = command("compare", *sides)
        assert (said.code, said.word) == (2, "INCOMPLETE"), said.out


@pytest.mark.parametrize("name", MODELS)
def test_a_fault_shows_between_modules_and_operators(
    name: str, runs: Path, tmp_path: Path, command: Callable
) -> None:
    model, x = model_of(name)
    faulty = {"convolutions": "blocks.2.conv2", "mixer": "channels.2.3", "attention": "up"}[name]
    with torch.no_grad():
        model.get_submodule(faulty).weight.mul_(1.2)
        with driftline.capture(model, tmp_path / "bad", levels=("ops",)):
            model(x)
    said = command("compare", runs / f"{name}-modules", tmp_path / "bad", "--format", "json")
    answer = json.loads(said.out)
    assert (said.code, answer["verdict"], answer["first_site"]) == (1, "fail", faulty)


def test_a_dump_of_another_tool_is_measured_against_what_it_holds(
    runs: Path, tmp_path: Path, command: Callable
) -> None:
    run = runs / "mixer-modules"
    half = holed(run, 0.5, 1.0, tmp_path / "half")
    for source, name in ((run, "tree"), (half, "half-tree")):
        assert command("convert", source, "-o", tmp_path / name, "--to", "ait").code == 0
    tree, half_tree = tmp_path / "tree", tmp_path / "half-tree"
    # It holds half of the model, and all of that was compared.
    for sides in ((run, half_tree), (half_tree, run), (tree, half_tree), (half_tree, tree)):
        said = command("compare", *sides)
        assert (said.code, said.word) == (0, "PASS"), said.out
    # It holds the whole model, of which half has no partner.
    for sides in ((half, tree), (tree, half)):
        said = command("compare", *sides)
        assert (said.code, said.word) == (2, "INCOMPLETE"), said.out


def test_the_share_is_the_same_in_every_command(
    runs: Path, tmp_path: Path, command: Callable[..., Any]
) -> None:
    """INCOMPLETE by a hole: compare, diagnose, check, merge and report say the same word."""
    whole = runs / "mixer-modules"
    pair = (whole, holed(whole, 0.5, 1.0, tmp_path / "half"))
    told = json.loads(command("compare", *pair, "--format", "json", "-o", tmp_path / "t").out)
    assert told["verdict"] == "incomplete"
    for number in (1, 2):
        command("compare", *pair, "--shard", f"{number}/2", "-o", tmp_path / "parts", "-q")
    for words in (("check", tmp_path / "t"), ("merge", tmp_path / "parts")):
        said = command(*words, "--format", "json")
        assert (said.code, json.loads(said.out)["finding"]) == (2, told["finding"])
    for words in (("diagnose", *pair), ("diagnose", tmp_path / "t")):
        said = command(*words, "--format", "json")
        assert (said.code, json.loads(said.out)["verdict"]) == (2, "incomplete")
        assert command(*words, "--allow-incomplete").code == 0
        assert command(*words, "--bisect-exit", "-q").code == 125
        assert (
            "::error title=driftline diagnose::INCOMPLETE"
            in command(*words, "--format", "github").out
        )
    assert command("compare", *pair, "--min-coverage", "0.4").code == 0
    page = tmp_path / "page.html"
    assert command("report", *pair, "-o", page, "-q", "--bisect-exit", "--no-diagnosis").code == 125
    assert 'data-verdict="incomplete"' in page.read_text()
