"""Models of every kind train to the same bits while calls are listed and the profiler runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import capture_zoo as zoo
import onnx
import pytest
import torch

import driftline
from driftline.captures.torch.operators.call_list import CallTap
from driftline.captures.torch.profiler import ProfileTap
from driftline.captures.torch.session import CaptureSession
from driftline.runs.writer import RunWriter


@pytest.fixture(autouse=True)
def _one_thread():
    with zoo.one_thread():
        yield


def execute(name: str, *, checkpointing: bool = False) -> list[torch.Tensor]:
    model = zoo.build(name, train=True)
    if checkpointing:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept: list[torch.Tensor] = []
    torch.manual_seed(5)
    for _ in range(2):
        output: Any = model(**zoo.feed(name))
        zoo.collect(output, kept)
        loss = zoo.loss_of(output)
        optimizer.zero_grad()
        loss.backward()
        kept += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    kept += [p.detach().clone() for p in model.parameters()]
    return [*kept, torch.get_rng_state()]


def watched(path: Path, name: str, **more: bool) -> list[torch.Tensor]:
    writer = RunWriter(path)
    session = CaptureSession(writer, levels=("modules", "ops"))

    def line(text: str) -> None:
        writer.sheet("calls.jsonl", text)

    session.taps.append(CallTap(session, line))
    session.taps.append(ProfileTap(session, writer.sheet, kernels=True, times=True))
    session.start()
    try:
        return execute(name, **more)
    finally:
        session.stop()


@pytest.mark.parametrize("name", zoo.ZOO)
def test_a_model_trains_to_the_same_bits_and_its_graph_is_sound(tmp_path: Path, name: str) -> None:
    plain = execute(name)
    seen = watched(tmp_path / "run", name)
    assert len(plain) == len(seen)
    assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))
    run = driftline.open_run(tmp_path / "run")
    faults = [e for e in run.events() if e["kind"] in ("capture-fault", "operator-lost")]
    assert not faults, faults
    for level in (None, 1, 2):
        written = driftline.topology_to_onnx(tmp_path / "run", level, force=True)
        onnx.checker.check_model(onnx.load(written), full_check=True)


def test_recomputation_is_listed_as_such_and_changes_nothing(tmp_path: Path) -> None:
    name = next(n for n in zoo.ZOO if "llama" in n.lower())
    plain = execute(name, checkpointing=True)
    seen = watched(tmp_path / "run", name, checkpointing=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))
    text = driftline.open_run(tmp_path / "run").sheet("calls.jsonl")
    assert '"phase":"recompute"' in text
