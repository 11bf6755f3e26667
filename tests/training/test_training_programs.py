"""Whole programs through the command line: averages of weights, ranks, generated tokens, steps."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import driftline
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
            command = ["bash", "-c", of_ranks(" ".join(command), ranks)]
        words_of_dump = ["dump", "-o", str(out), "--log-level", "error", "--force", "--", *command]
        code = main(words_of_dump)
        if code and ranks:
            # Gloo may lose a connection between the ranks while they meet ("connectFullMesh
            # failed"). The file in which they meet is the last word, and serves only once.
            Path(words[-1]).unlink(missing_ok=True)
            code = main(words_of_dump)
        assert code == 0
        return out

    return dump


def of_ranks(command: str, ranks: int) -> str:
    """A line of bash that runs a command on several ranks, and fails if one of them does."""
    starts = [
        f'RANK={rank} WORLD_SIZE={ranks} {command} & started="$started $!"' for rank in range(ranks)
    ]
    return "; ".join([*starts, 'for rank in $started; do wait "$rank" || exit 1; done'])


def compared(reference: Path, candidate: Path, capsys: pytest.CaptureFixture[str]) -> dict:
    capsys.readouterr()
    main(["compare", str(reference), str(candidate), "--format", "json"])
    return json.loads(capsys.readouterr().out)


def test_an_average_of_weights_with_another_decay_is_named(dumped, capsys):
    table = compared(dumped(AVERAGE, "ref", "0.1"), dumped(AVERAGE, "cand", "0.3"), capsys)
    assert table["verdict"] == "fail", table["finding"]
    assert "their averages differ" in table["finding"]
    assert "measured before step 2: 0.9 → 0.7" in table["finding"]


class Shadow:
    """An average as it is often written: a table whose tensors are replaced."""

    def __init__(self, model: nn.Module) -> None:
        self.table = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, model: nn.Module, decay: float) -> None:
        for name, p in model.named_parameters():
            self.table[name] = (decay * self.table[name] + (1 - decay) * p.detach()).clone()


def with_average(folder: Path, kind: str, decay: float, *, autocast: bool = False) -> Path:
    """A training with an average of weights that nobody calls."""
    path = folder / f"{kind} {decay} {autocast}"
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    averaged = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(decay)
    )
    copied, shadow = copy.deepcopy(model), Shadow(model)
    listed = [p.detach().clone() for p in model.parameters()]
    # Of a weight's shape, and without memory, as sharded models leave them.
    freed = torch.empty(16, 8)
    freed.untyped_storage().resize_(0)
    x, y = torch.randn(16, 8), torch.randint(0, 4, (16,))
    with driftline.capture(model, path):
        for _ in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = nn.functional.cross_entropy(model(x).float(), y)
            loss.backward()
            optimizer.step()
            trained = [p.detach() for p in model.parameters()]
            if kind == "averaged":
                averaged.update_parameters(model)
            elif kind == "module":
                for own, weight in zip(copied.parameters(), trained, strict=True):
                    own.data.lerp_(weight, 1 - decay)
            elif kind == "table":
                shadow.update(model, decay)
            elif kind == "list":
                torch._foreach_lerp_(listed, trained, 1 - decay)
            else:
                # A copy that moves, and not towards the weights.
                for own in copied.parameters():
                    own.data.add_(torch.randn_like(own), alpha=1 - decay)
    faults = [e for e in driftline.open_run(path).events() if e.get("kind") == "capture-fault"]
    assert freed.shape == (16, 8) and not faults
    return path


@pytest.mark.parametrize("kind", ["averaged", "module", "table", "list"])
def test_the_decay_of_an_average_that_nobody_calls_is_named(tmp_path, kind):
    reference = with_average(tmp_path, kind, 0.99)
    table = driftline.compare(reference, with_average(tmp_path, kind, 0.9))
    assert table.verdict == "fail", table.finding
    assert "the trained weights agree before step 2, and their averages differ" in table.finding
    words = "decay of the average of weights, measured before step 2: 0.99 → 0.9"
    assert words in table.finding


def test_averages_in_other_arithmetic_pass(tmp_path):
    sides = [with_average(tmp_path, "table", 0.99, autocast=autocast) for autocast in (False, True)]
    table = driftline.compare(*sides)
    assert table.verdict == "pass", table.finding
    counted = {difference.name for difference in table.differences if difference.counts}
    assert counted == {"autocast_cpu"}


def test_an_average_that_never_moves_is_a_difference_and_noise_is_no_average(tmp_path):
    reference = with_average(tmp_path, "module", 0.99)
    table = driftline.compare(reference, with_average(tmp_path, "noise", 0.99))
    assert table.verdict == "pass", table.finding
    named = [(d.name, d.reference, d.candidate) for d in table.differences if d.counts]
    assert named == [("average of weights", "kept, and moves", "(absent)")]


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


FAULTS = """
import sys, torch
from torch import nn
kind, is_faulty = sys.argv[1], sys.argv[2] == "faulty"
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 8))
batches = [(torch.randn(12, 16), torch.randint(0, 8, (12,))) for _ in range(8)]
cross_entropy = nn.functional.cross_entropy

def train(optimizer, x, y):
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()

if kind == "schedule":
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)
    for x, y in batches:
        train(optimizer, x, y)
        for _ in range(1 + is_faulty):
            schedule.step()
elif kind == "divisor":
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches:
        optimizer.zero_grad()
        for part, labels in zip(x.split(5), y.split(5)):
            is_last = len(labels) < 5
            share = 1 / 3 if is_faulty and is_last else len(labels) / len(y)
            (cross_entropy(model(part), labels) * share).backward()
        optimizer.step()
elif kind == "thawed":
    model[0].requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for step, (x, y) in enumerate(batches):
        if step == 4:
            model[0].requires_grad_(True)
            if not is_faulty:
                optimizer.add_param_group({"params": list(model[0].parameters())})
        train(optimizer, x, y)
elif kind == "scaler":
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for x, y in batches:
        optimizer.zero_grad()
        scaler.scale(cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        if is_faulty:
            scaler._per_optimizer_states.clear()
        else:
            scaler.update()
elif kind == "resumed":
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, (x, y) in enumerate(batches):
        if step == 4:
            state = optimizer.state_dict()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            if not is_faulty:
                optimizer.load_state_dict(state)
        train(optimizer, x, y)
elif kind == "zeroed":
    aside = nn.Linear(16, 4)
    optimizer = torch.optim.AdamW([*model.parameters(), *aside.parameters()], lr=1e-2)
    for step, (x, y) in enumerate(batches):
        optimizer.zero_grad(set_to_none=not is_faulty)
        loss = cross_entropy(model(x), y)
        if step == 0:
            loss = loss + aside(x).square().mean()
        loss.backward()
        optimizer.step()
elif kind == "clipped":
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model[:3].parameters() if is_faulty else model.parameters(), 0.1)
        optimizer.step()
elif kind == "shifted":
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches:
        shift = 2 if is_faulty else 1
        optimizer.zero_grad()
        cross_entropy(model(x)[:-shift], y[shift:]).backward()
        optimizer.step()
elif kind == "untied":
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(8, 16), nn.Linear(16, 8, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens):
            return self.head(torch.tanh(self.embed(tokens)))

    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step, (x, y) in enumerate(batches):
        if step == 3 and is_faulty:
            model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
        train(optimizer, y, y.roll(1))
"""


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            "schedule",
            ["gradients agree in step 2", "AdamW lr in group 0 from step 2: 0.01 → 0.005"],
        ),
        ("divisor", ["the forward pass agrees in step 0, the loss differs", "2 times as large"]),
        (
            "thawed",
            [
                "2 parameters are updated in step 4 in the reference only",
                "AdamW parameters from step 4: updated → not in the optimizer",
            ],
        ),
        (
            "resumed",
            [
                "gradients agree in step 4, weights differ after it",
                "SGD state before its first update, in step 4: momentum_buffer → none",
            ],
        ),
        (
            "zeroed",
            [
                "gradients agree in step 1, weights differ after it, in 2 of 8 parameters",
                "their gradients are zeros in the candidate and absent on the other side",
            ],
        ),
        (
            "clipped",
            [
                "the gradients that the optimizer sees differ",
                "gradients of 3.bias, 3.weight: clipped → not clipped",
            ],
        ),
        (
            "shifted",
            [
                "the forward pass agrees in step 0, the loss differs",
                "SliceBackward0(dim=0, 0:-1) → SliceBackward0(dim=0, 0:-2)",
            ],
        ),
        (
            "untied",
            [
                "the loss agrees in step 3, the gradients that the optimizer sees differ",
                "head.weight (changed in steps",
                "tied to embed.weight → not tied",
            ],
        ),
    ],
)
def test_a_fault_of_training_is_named_in_the_first_sentence(dumped, capsys, kind, words):
    reference = dumped(FAULTS, "ref", kind, "sound")
    table = compared(reference, dumped(FAULTS, "cand", kind, "faulty"), capsys)
    assert table["verdict"] == "fail", table["finding"]
    for word in words:
        assert word in table["finding"]
    again = compared(reference, dumped(FAULTS, "again", kind, "sound"), capsys)
    assert again["verdict"] == "pass", again["finding"]
    assert not [entry for entry in again["differences"] if entry["counts"]]


def test_a_scale_that_is_never_updated_changes_no_number_and_is_named(dumped, capsys):
    reference = dumped(FAULTS, "ref", "scaler", "sound")
    table = compared(reference, dumped(FAULTS, "cand", "scaler", "faulty"), capsys)
    assert table["verdict"] == "pass", table["finding"]
    names = [entry["name"] for entry in table["differences"] if entry["counts"]]
    assert names == ["calls of step 1 (update_scale in the reference only)"]


def test_steps_that_the_budget_dropped_make_no_difference_of_the_loss(
    dumped, capsys, tmp_path, warm_python
):
    reference = dumped(FAULTS, "ref", "resumed", "sound")
    words = [warm_python, str(tmp_path / "program.py"), "resumed", "sound"]
    thinned = tmp_path / "thinned"
    assert main(["dump", "-o", str(thinned), "--budget", "10KB", "--", *words]) == 0
    table = compared(reference, thinned, capsys)
    assert table["verdict"] == "incomplete", table["finding"]
    assert "the candidate keeps no step after an update" in table["finding"]
    assert "dump it with a larger --budget" in table["finding"]
    assert "steps from 1 on were left out" in table["training"]["thinned"][0]
    assert not [entry for entry in table["differences"] if entry["counts"]]
