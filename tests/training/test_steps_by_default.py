"""Without a choice of steps: step 0 in full, later ones as summaries on a ladder, in one budget."""

from __future__ import annotations

import dataclasses
import functools
import logging
import random
import threading
import time
import uuid
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import driftline
from driftline.captures.ladder import StepBudget, is_rung
from driftline.comparison.differences.difference import counted
from driftline.comparison.differences.find import differences_of
from driftline.comparison.differences.models import is_same_value
from driftline.runs.layout import STEPS
from driftline.runs.sidecars.step_facts import read_step_facts

RUNGS = [step for step in range(40) if is_rung(step)]


class Slow(nn.Module):
    """Takes longer than a millisecond, and has parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.last = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.002)
        return self.last(torch.relu(self.first(x)))


def run_of(path: Path, calls: int = 40, *, changed: int = -1, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Slow().eval()
    capture = driftline.capture(model, path, **options)
    with capture, torch.no_grad():
        for step in range(calls):
            x = torch.full((2, 4), float(step))
            model(x + 1.0 if step == changed else x)
    return driftline.open_run(path)


def kept_steps(run: Any) -> dict[int, set[str]]:
    kept: dict[int, set[str]] = {}
    for record in run.records:
        kept.setdefault(record.key.step, set()).add(record.kept)
    return kept


def test_step_0_is_full_and_rungs_are_summaries(tmp_path: Path):
    kept = kept_steps(run_of(tmp_path / "run"))
    assert sorted(kept) == RUNGS == [*range(18), 32, 33]
    assert kept.pop(0) == {"full"}
    assert all(kinds == {"summary"} for kinds in kept.values())


def test_between_rungs_the_parts_of_a_model_are_not_looked_at(tmp_path: Path, monkeypatch):
    from driftline.captures.session import Session

    counted_calls: dict[int, int] = {}
    count = Session.count_visit

    def counting(self: Session, site: str, step: int, *, recompute: bool) -> int:
        counted_calls[step] = counted_calls.get(step, 0) + 1
        return count(self, site, step, recompute=recompute)

    monkeypatch.setattr(Session, "count_visit", counting)
    run_of(tmp_path / "run")
    assert counted_calls[17] == 3 and counted_calls[20] == 1


def test_every_step_in_full_is_a_choice(tmp_path: Path):
    kept = kept_steps(run_of(tmp_path / "run", 20, steps="*"))
    assert sorted(kept) == [*range(20)] and all(kinds == {"full"} for kinds in kept.values())


def test_a_run_of_one_step_is_as_it_was(tmp_path: Path):
    run = run_of(tmp_path / "run", 1)
    assert kept_steps(run) == {0: {"full"}}
    assert not (tmp_path / "run" / "rank0" / STEPS).exists()


def test_the_budget_drops_whole_rungs_the_latest_first(tmp_path: Path):
    run = run_of(tmp_path / "run", budget=60_000)
    counts: dict[int, int] = {}
    for record in run.records:
        counts[record.key.step] = counts.get(record.key.step, 0) + 1
    steps = sorted(counts)
    assert steps == RUNGS[: len(steps)] and 2 < len(steps) < len(RUNGS)
    assert set(counts.values()) == {6}
    thinned = [event for event in run.events() if event["kind"] == "thinned"]
    assert f"steps from {RUNGS[len(steps)]} on were left out" in thinned[0]["message"]


def test_all_models_of_a_process_share_one_budget():
    budget = StepBudget(1000)
    taken = 0
    for step in range(1, 10):
        if not budget.allows(step):
            break
        for _ in range(5):  # five small models
            budget.charge(60)
        taken += 1
    assert taken == 3 and budget.dropped == 4 and budget.used <= 1000
    # A model that is still in an early step keeps it; no later one comes back.
    assert budget.allows(2) and not budget.allows(8)


def test_an_input_that_differs_between_two_rungs_is_found_with_its_step(tmp_path: Path):
    reference = run_of(tmp_path / "ref")
    candidate = run_of(tmp_path / "cand", changed=25)
    assert len(read_step_facts(candidate).calls) == 24
    table = driftline.compare(reference, candidate)
    assert table.verdict == "fail"
    assert "the inputs differ in step 25, and not before" in table.finding


def test_damaged_lines_about_steps_are_passed_over(tmp_path: Path):
    run_of(tmp_path / "run", 20)
    file = tmp_path / "run" / "rank0" / STEPS
    text = file.read_text()
    junk = [
        '{"kind":"state","step":1,"what":"weights","when":"after","digests":["a"],"counts":["x"]}',
        '{"kind":"state","step":-1}',
        '{"kind":"parameters","first":"no","paths":3}',
        '{"kind":"call","step":2,"digests":7}',
        '{"kind":"clipped","step":1,"norm":[]}',
        "{" * 2000,
        "[]",
    ]
    file.write_text("\n".join(junk) + "\n" + text + text[: len(text) // 2])
    facts = read_step_facts(driftline.open_run(tmp_path / "run"))
    assert {step for _, step in facts.calls} >= {16, 17, 18, 19}


# What two programs may differ in without being two programs.


class Named(nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@dataclasses.dataclass
class Place:
    """A configuration that says where a program runs."""

    data: str
    seed: int
    hidden: int = 4


SAME: dict[str, tuple[Any, Any]] = {
    "path": ("/home/a/model", "/data/b/model"),
    "cache_dir": ("~/.cache/one", "~/.cache/two"),
    "name_or_path": ("org/model", "/models/copy"),
    "device": ("cpu", "cuda:1"),
    "devices": (["cpu", "cuda:0"], ["cpu", "cuda:3"]),
    "seed": (1, 2),
    "data_seed": (3, 4),
    "version": ("4.1", "4.2"),
    "timestamp": ("monday", "tuesday"),
    "owner": ("<Thing at 0x7f01aa>", "<Thing at 0x7f02bb>"),
    "members": ({"a", "b", "c"}, {"c", "b", "a"}),
    "file": ("file:///x/y", "file:///z"),
    "output_dir": ("runs/a", "runs/b/c"),
    "cache": (None, "/data/cache"),
    "message": ("weights read from /data/a/b", "weights read from /mnt/c"),
    "url": ("tcp://127.0.0.1:29501", "tcp://127.0.0.1:29502"),
    "label": ("run-" + str(uuid.UUID(int=1)), "run-" + str(uuid.UUID(int=2))),
    "since": (1795100052.33, 1795100059.7),
    "gpu": (None, 0),
    "use_cuda": (False, True),
    "map": ({"layer": "cpu"}, {"layer": 0}),
    "pid": (300, 400),
    "config": (Place("/data/a", 1), Place("/mnt/b", 2)),
    "function": (
        functools.partial(max, default=object()),
        functools.partial(max, default=object()),
    ),
    "things": (
        [threading.Lock(), iter([1]), logging.getLogger("a"), np.arange(3), weakref.ref(Named)],
        [threading.Lock(), iter([2]), logging.getLogger("b"), np.arange(4), weakref.ref(Named)],
    ),
}
OTHER = {
    "mask": (-1e30, -1e38),
    "cache": ("static", "dynamic"),
    "since": (10000, 1000000),
    "parameters": (1_300_000_000, 1_500_000_000),
    "ratio": ("1/2", "1/3"),
    "layers": (None, 3),
    "use_bias": (False, True),
    "kind": ("cpu_offload", "none"),
}
"""Values of the same look that are settings."""


@pytest.mark.parametrize("name", OTHER)
def test_settings_that_look_like_places_are_differences(name: str):
    assert not is_same_value(name, *OTHER[name])


@pytest.mark.parametrize("name", SAME)
def test_what_differs_by_place_device_or_seed_is_no_difference(tmp_path: Path, name: str):
    runs = []
    for number, value in enumerate(SAME[name]):
        random.seed(number)
        torch.manual_seed(0)
        model = Named(**{name: value})
        torch.manual_seed(number)
        with driftline.capture(model, tmp_path / str(number)), torch.no_grad():
            model(torch.ones(1, 4))
        runs.append(driftline.open_run(tmp_path / str(number)))
    differences = differences_of(*runs)
    assert differences is not None and counted(differences) == 0, differences


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("schedule", "StepLR gamma: 0.5 → 0.9"),
        ("scaler", "GradScaler _growth_interval: 7 → 9"),
        ("warmup", "SGD lr in group 0 from step 1: 0.05 → 0.09"),
    ],
)
def test_schedulers_and_scalers_are_compared(tmp_path: Path, fault: str, words: str):
    runs = []
    for bad in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        gamma = 0.9 if bad and fault != "scaler" else 0.5
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=gamma)
        interval = 9 if bad and fault == "scaler" else 7
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=interval)
        path = tmp_path / str(bad)
        with driftline.capture(model, path):
            for _ in range(3):
                optimizer.zero_grad()
                scaler.scale(model(torch.ones(2, 4)).square().sum()).backward()
                scaler.step(optimizer)
                scaler.update()
                schedule.step()
        runs.append(driftline.open_run(path))
        del schedule, scaler
    differences = differences_of(*runs) or ()
    sentences = [difference.sentence for difference in differences]
    assert any(words in sentence for sentence in sentences), sentences
