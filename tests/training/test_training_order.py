"""Faults of a training are named where a step goes wrong: loss, gradients, update, weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import driftline
from driftline.cli.main import main
from driftline.reporting.html.report import page_of

STEPS = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.norm = nn.LayerNorm(16)
        self.hidden = nn.Linear(16, 24)
        self.head = nn.Linear(24, 8)
        self.loose: list[nn.Linear] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.hidden(self.norm(self.embed(tokens))))
        for layer in self.loose:
            hidden = hidden + layer(hidden)
        return self.head(hidden)


def optimizer_of(model: Net, fault: str) -> Any:
    if fault == "norms":
        decayed = [p for n, p in model.named_parameters()]
        bare: list[Any] = []
    else:
        decayed = [p for n, p in model.named_parameters() if p.ndim > 1]
        bare = [p for n, p in model.named_parameters() if p.ndim <= 1]
    if fault == "unregistered":
        decayed = [p for p in decayed if p is not model.hidden.weight]
    groups = [
        {"params": decayed, "weight_decay": 0.3},
        {"params": bare, "weight_decay": 0.0, "lr": 3e-3},
    ]
    if fault == "groups":
        groups[0]["params"], groups[1]["params"] = decayed[1:], [*bare, decayed[0]]
    kind = torch.optim.Adam if fault == "coupled" else torch.optim.AdamW
    return kind(
        [group for group in groups if group["params"]],
        lr=1e-2 if fault == "lr" else 1e-3,
        eps=1e-2 if fault == "eps" else 1e-8,
        betas=(0.5, 0.99) if fault == "betas" else (0.9, 0.999),
    )


def train(
    folder: Path, fault: str = "", *, steps: int = STEPS, steps_kept: Any = None, **options: Any
) -> Path:
    """A training of some steps, with accumulation, scaling, clipping and an average of weights."""
    path = folder / (fault or "good")
    if path.exists():
        return path
    torch.manual_seed(1 if fault == "other weights" else 0)
    model = Net().to(torch.float64 if fault == "float64" else torch.float32)
    average = copy.deepcopy(model)
    average.requires_grad_(False)
    if fault == "frozen":
        model.norm.requires_grad_(False)
    optimizer = optimizer_of(model, fault)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    generator = torch.Generator().manual_seed(1)
    loss_of = nn.CrossEntropyLoss(
        ignore_index=0, label_smoothing=0.1 if fault == "smoothing" else 0.0
    )
    with driftline.capture(model, path, steps=steps_kept, **options):
        for step in range(steps):
            if fault != "zero_grad":
                optimizer.zero_grad()
            for _ in range(2):
                tokens = torch.randint(0, 32, (4, 6), generator=generator)
                labels = torch.randint(0, 8, (4, 6), generator=generator)
                with torch.autocast("cpu", torch.bfloat16, enabled=fault == "bfloat16"):
                    logits = model(tokens)
                loss = loss_of(logits.float().flatten(0, 1), labels.flatten())
                scaler.scale(loss if fault == "accumulation" else loss / 2).backward()
            if fault == "late lr" and step == 2:
                optimizer.param_groups[0]["lr"] = 1e-2
            if fault == "clip":
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                scaler.unscale_(optimizer)
            else:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            with torch.no_grad():
                decay = 0.5 if fault == "average" else 0.9
                for own, trained in zip(average.parameters(), model.parameters(), strict=True):
                    own.mul_(decay).add_(trained, alpha=1 - decay)
                if fault == "swap" and step == 2:
                    model.load_state_dict(average.state_dict())
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainings")


@pytest.fixture(scope="module")
def good(place: Path) -> Path:
    return train(place)


FAULTS = {
    "lr": (0, "update", "AdamW lr: 0.001 → 0.01"),
    "late lr": (2, "update", "AdamW lr in group 0 from step 2: 0.001 → 0.01"),
    "coupled": (0, "update", "class of the optimizer: AdamW → Adam"),
    "norms": (0, "update", "AdamW weight_decay: 0.0 → 0.3"),
    "eps": (0, "update", "AdamW eps: 1e-08 → 0.01"),
    "betas": (1, "update", "AdamW betas: (0.9, 0.999) → (0.5, 0.99)"),
    "groups": (0, "update", "AdamW lr: 0.001 → 0.003, for 1 parameter: embed.weight"),
    "unregistered": (0, "update", "updated → not in the optimizer"),
    "frozen": (0, "gradients", "trained → frozen"),
    "clip": (0, "gradients", "unscale clip"),
    "zero_grad": (1, "gradients", "zero_grad"),
    "smoothing": (0, "loss", "functions of the loss in step 0"),
    "accumulation": (0, "loss", "2 times as large"),
    "swap": (3, "weights", "something else changes them before step 3"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_where_the_step_goes_wrong(good: Path, place: Path, fault: str):
    step, stage, words = FAULTS[fault]
    table = driftline.compare(good, train(place, fault))
    assert table.verdict == "fail", table.finding
    assert table.training is not None and table.training.broken is not None
    broken = table.training.broken
    assert (broken.step, broken.stage) == (step, stage), table.finding
    assert words in table.finding, table.finding
    assert f"step {step}" in table.finding


def test_two_equal_trainings_pass_and_say_what_was_compared(good: Path, place: Path):
    table = driftline.compare(good, train(place, "nothing"))
    assert table.verdict == "pass", table.finding
    assert "weights, loss and gradients agree in steps 1-3" in table.finding
    assert table.training is not None and table.training.compared == (1, 2, 3)


def test_what_fails_after_the_trainings_part_is_inherited(good: Path, place: Path):
    table = driftline.compare(good, train(place, "late lr"))
    assert table.first is not None and table.first.step == 3
    assert "what fails in step 3 is inherited from it" in table.finding
    assert all("inherited: the trainings part in step 2" in row.reason for row in table.failing)
    assert table.first_site == "(optimizer)"
    at = [d.path for d in table.differences or () if d.position == "at"]
    assert at == ["AdamW lr in group 0 from step 2"]
    # The page, and whoever reads the table from its file, finds the first row among the others.
    assert table.rows[table.as_json()["first_row"]] is table.first
    verdict = page_of(good, train(place, "late lr")).document["verdict"]
    assert verdict["sentence"] == table.finding and verdict["row"] is not None


def test_a_report_of_trainings_that_part_is_written(good: Path, place: Path, tmp_path: Path):
    late = train(place, "late lr")
    assert (table := driftline.compare(good, late)).first in table.rows
    page = tmp_path / "page.html"
    assert main(["report", str(good), str(late), "-o", str(page)]) in (0, 1)
    text = page.read_text()
    assert "AdamW lr in group 0 from step 2: 0.001 → 0.01" in text
    assert "not known" not in text.partition('<p class="cause">')[2].partition("</p>")[0]


def test_a_stored_table_is_judged_again_alike(good: Path, place: Path, tmp_path: Path):
    table = driftline.compare(good, train(place, "eps"))
    table.write(tmp_path / "table")
    again = driftline.check(tmp_path / "table")
    assert (again.verdict, again.finding) == (table.verdict, table.finding)


def test_shards_merge_to_the_same_finding_and_differences(good: Path, place: Path):
    candidate = train(place, "betas")
    table = driftline.compare(good, candidate)
    parts = [driftline.compare_shard(good, candidate, f"{n}/2") for n in (1, 2)]
    merged = driftline.merge(parts)
    assert (merged.verdict, merged.finding) == (table.verdict, table.finding)
    assert merged.differences == table.differences and merged.training == table.training


def test_a_training_of_one_update_is_incomplete(tmp_path: Path):
    runs = [train(tmp_path, name, steps=1) for name in ("one", "other")]
    table = driftline.compare(*runs)
    assert table.verdict == "incomplete"
    assert "only one update was made" in table.finding
    assert "let both programs run two steps" in table.finding


def test_a_training_without_facts_is_incomplete_and_says_what_to_add(good: Path, tmp_path: Path):
    table = driftline.compare(good, train(tmp_path, "bare", model_facts=False))
    assert table.verdict == "incomplete"
    assert "the candidate has no weights, gradients and loss" in table.finding
    assert "without --no-model-facts" in table.finding


@pytest.mark.parametrize("arithmetic", ["float64", "bfloat16"])
def test_other_arithmetic_is_no_fault(good: Path, place: Path, arithmetic: str):
    """Weights in float64, or autocast, give other bits everywhere, and the same training."""
    table = driftline.compare(good, train(place, arithmetic))
    assert table.training is not None and table.training.broken is None, table.finding
    assert table.training.compared == (1, 2, 3)
    assert table.verdict == "pass", table.finding


def test_a_training_of_other_weights_is_not_blamed_on_a_stage(good: Path, tmp_path: Path):
    run = train(tmp_path, "other weights")
    table = driftline.compare(good, run)
    assert table.training is not None and table.training.broken is None
    assert table.verdict == "fail" and "the drift starts at 'embed'" in table.finding


def test_parameters_are_stored_after_every_update_that_is_captured(tmp_path: Path):
    path = train(tmp_path, "stored", levels=("modules", "params"), steps_kept="*")
    run = driftline.open_run(path)
    heads = [r for r in run.records if (r.key.port, r.key.site) == ("param", "head")]
    after = {r.key.step: r.digest for r in heads if r.key.moment == "after" if r.key.slot == "bias"}
    assert sorted(after) == [*range(STEPS)] and len(set(after.values())) == STEPS
    before = [r for r in heads if r.key.moment == "before"]
    assert {r.key.step for r in before} == {0} and all(r.kept == "full" for r in heads)


def with_closure(path: Path, fault: str = "") -> Path:
    """A training whose model is called within the optimizer's step, as Lightning does it."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    with driftline.capture(model, path):
        for step in range(STEPS):
            tokens = torch.randint(0, 32, (4, 6), generator=generator)
            labels = torch.randint(0, 8, (24,), generator=generator)

            def closure(tokens: Any = tokens, labels: Any = labels, step: int = step) -> Any:
                if fault != "zero_grad" or step < 2:
                    model.zero_grad()
                loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.05 if fault == "clip" else 0.5)
                return loss

            optimizer.step(closure)
    return path


def test_gradients_that_a_closure_computes_are_those_of_its_step(tmp_path: Path):
    reference = with_closure(tmp_path / "good")
    table = driftline.compare(reference, with_closure(tmp_path / "same"))
    assert table.verdict == "pass", table.finding
    assert not [difference for difference in table.differences if difference.counts]
    table = driftline.compare(reference, with_closure(tmp_path / "clip", "clip"))
    # Adam's update hardly changes with the size of gradients.
    assert table.finding.startswith("the loss agrees in step 0, the gradients that the optimizer")
    assert "max_norm: 0.5 → 0.05" in table.finding
    table = driftline.compare(reference, with_closure(tmp_path / "zero", "zero_grad"))
    assert table.finding.startswith("the loss agrees in step 2, the gradients that the optimizer")
    assert "zero_grad in the reference only" in table.finding


class Decoupled(torch.optim.SGD):
    """Weight decay before the step of the base class: a step within a step."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(1 - group["lr"] * group["decay"])
        return super().step(closure)


def stepped(path: Path, fault: str) -> Path:
    """A training by two optimizers, one of them with a step within its step."""
    torch.manual_seed(0)
    model = Net()
    own, others = list(model.embed.parameters()), [*model.norm.parameters()]
    rest = [*model.hidden.parameters(), *model.head.parameters()]
    if fault == "other optimizer":
        others.append(rest.pop(0))
    decay = 0.5 if fault == "decay" else 0.1
    # Any instance has the step of its class watched, and so the one within.
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.SGD(own, lr=0.1),
        Decoupled([{"params": rest, "decay": decay}], lr=0.5, momentum=0.9),
        torch.optim.RMSprop(others, lr=1e-3),
    ]
    generator = torch.Generator().manual_seed(1)
    with driftline.capture(model, path):
        for _ in range(STEPS):
            model.zero_grad()
            tokens = torch.randint(0, 32, (4, 6), generator=generator)
            labels = torch.randint(0, 8, (24,), generator=generator)
            nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels).backward()
            for optimizer in optimizers:
                optimizer.step()
    return path


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("decay", "Decoupled decay: 0.1 → 0.5, for 4 parameters: hidden.weight"),
        (
            "other optimizer",
            "optimizer and its lr: Decoupled 0.5 → RMSprop 0.001, for 1 parameter: hidden.weight",
        ),
    ],
)
def test_faults_of_several_optimizers_are_named(tmp_path: Path, fault: str, words: str):
    table = driftline.compare(stepped(tmp_path / "good", ""), stepped(tmp_path / "bad", fault))
    assert table.finding.startswith("gradients agree in step 0, weights differ after it")
    assert words in table.finding


def in_two_passes(path: Path, fault: str, kind: str) -> Path:
    """A training whose weights change between two calls of the model in one step."""
    torch.manual_seed(0)
    model = Net().to(getattr(torch, fault, torch.float32))
    parameters = list(model.parameters())
    lr = 0.05 if fault == "lr" else 0.5
    if kind == "closure":
        optimizer: Any = torch.optim.LBFGS(parameters, lr=lr, max_iter=3)
    else:
        optimizer = torch.optim.SGD(parameters, lr=lr)
    generator = torch.Generator().manual_seed(1)
    smoothing = 0.1 if fault == "smoothing" else 0.0
    with driftline.capture(model, path):
        for _ in range(STEPS):
            tokens = torch.randint(0, 32, (4, 6), generator=generator)
            labels = torch.randint(0, 8, (24,), generator=generator)

            def closure(tokens: Any = tokens, labels: Any = labels) -> Any:
                optimizer.zero_grad()
                logits = model(tokens).flatten(0, 1)
                # In bfloat16 a loss has too few digits to be compared.
                criterion = nn.functional.cross_entropy
                loss = criterion(logits.float(), labels, label_smoothing=smoothing)
                loss.backward()
                return loss

            if kind == "closure":
                optimizer.step(closure)
                continue
            closure()
            if fault != "flat":
                with torch.no_grad():
                    ways = [0.05 * p.grad / p.grad.norm() for p in parameters if p.grad is not None]
                    ways = [4.0 * way if fault == "radius" else way for way in ways]
                    torch._foreach_add_(parameters, ways)
                closure()
                with torch.no_grad():
                    torch._foreach_sub_(parameters, ways)
            optimizer.step()
    return path


@pytest.mark.parametrize(
    ("kind", "fault", "words"),
    [
        ("closure", "", ""),
        (
            "closure",
            "lr",
            "the first pass of step 0 agrees, and the optimizer moves the weights to other values "
            "before the second pass (the move is 0.1 times as large): LBFGS lr: 0.5 → 0.05",
        ),
        ("closure", "smoothing", "the forward pass agrees in step 0, the loss differs"),
        ("sharpness", "", ""),
        (
            "sharpness",
            "radius",
            "the first pass of step 0 agrees, and the program itself moves the weights to other "
            "values before the second pass (the move is 4 times as large)",
        ),
        (
            "sharpness",
            "flat",
            "the first pass of step 0 agrees, and the program itself changes the weights before "
            "the second pass in the reference only",
        ),
        ("sharpness", "lr", "gradients agree in step 0, weights differ after it"),
        *(
            (kind, dtype, "")
            for kind in ("closure", "sharpness")
            for dtype in ("double", "bfloat16")
        ),
    ],
)
def test_weights_that_change_within_a_step_are_followed(
    tmp_path: Path, kind: str, fault: str, words: str
):
    good = in_two_passes(tmp_path / "good", "", kind)
    table = driftline.compare(good, in_two_passes(tmp_path / "bad", fault, kind))
    assert table.verdict == ("fail" if words else "pass"), table.finding
    assert words in table.finding
    if words.startswith("the first pass"):
        passes = {row.key.visit for row in table.rows if row.step == 0 and "inherit" in row.reason}
        assert passes <= {1, 2} and table.first_site in ("(optimizer)", "(program)")


def test_a_change_of_many_optimizers_is_one_difference(tmp_path: Path):
    def hooked(path: Path, lr: float) -> Path:
        torch.manual_seed(0)
        model = Net()
        rates = {p: lr if p.dim() == 1 else 0.1 for p in model.parameters()}
        optimizers = {p: torch.optim.SGD([p], rate) for p, rate in rates.items()}

        def update(parameter: Any) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        with driftline.capture(model, path):
            for _ in range(STEPS):
                nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels).backward()
        return path

    tokens, labels = torch.arange(24).reshape(4, 6), torch.arange(24) % 8
    table = driftline.compare(hooked(tmp_path / "good", 0.1), hooked(tmp_path / "bad", 0.5))
    assert "SGD lr: 0.1 → 0.5, for 4 parameters: " in table.finding
    assert len([difference for difference in table.differences if difference.counts]) == 1
