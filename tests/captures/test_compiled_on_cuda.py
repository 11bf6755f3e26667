"""Triton kernels that inductor makes on a GPU: recorded and paired as those of a CPU are."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import driftline
from driftline.graphs.sources.graph_files import read_graphs
from driftline.runs.sidecars.calls import GRAPHS

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.down(self.act(self.up(x)) * 2), -1)


@contextlib.contextmanager
def no_caches() -> Iterator[None]:
    """Graphs are compiled anew, as they are under capture."""
    inductor: Any = importlib.import_module("torch._inductor.config")
    joint: Any = importlib.import_module("torch._functorch.config")
    with (
        inductor.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
        joint.patch(enable_autograd_cache=False),
    ):
        yield


@pytest.mark.parametrize("training", [False, True])
def test_triton_kernels_are_recorded_and_change_nothing(tmp_path: Path, training: bool) -> None:
    metrics: Any = importlib.import_module("torch._inductor.metrics")
    torch.manual_seed(0)
    model = Net().cuda().train(training)
    x = torch.randn(4, 16, 64, device="cuda")

    def run(call: Any) -> torch.Tensor:
        with torch.set_grad_enabled(training):
            out = call(x)
            if training:
                out.square().sum().backward()
        return out.detach()

    with driftline.capture(model, tmp_path / "modules"):
        run(model)
    plain: list[torch.Tensor] = []
    for _ in range(4):  # inductor tries kernels out, and does not always choose the same ones
        torch._dynamo.reset()
        metrics.reset()
        with no_caches():
            plain.append(run(torch.compile(model)))
    kernels = metrics.generated_kernel_count
    torch._dynamo.reset()
    metrics.reset()
    with driftline.capture(model, tmp_path / "inductor", graph="inductor"):
        seen = run(torch.compile(model))
    assert metrics.generated_kernel_count == kernels > 0
    assert any(torch.equal(one, seen) for one in plain)
    with driftline.capture(model, tmp_path / "fx", graph="fx"):
        run(torch.compile(model))
    torch._dynamo.reset()
    listed = list(read_graphs(driftline.open_run(tmp_path / "inductor").sheet(GRAPHS)))
    names = [kernel.name for graph in listed for kernel in graph.kernels if kernel.kept]
    assert any(name.startswith("triton_") for name in names), names
    for reference in ("modules", "fx"):
        table = driftline.compare(tmp_path / reference, tmp_path / "inductor")
        assert table.verdict == "pass", table.finding
        assert sum(row.compared for row in table.rows) >= 4


def test_kernels_of_a_program_with_cuda_graphs_are_called_one_by_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Net().cuda(), torch.randn(4, 16, 64, device="cuda")
    torch._dynamo.reset()
    compiled = torch.compile(model, mode="reduce-overhead")
    with torch.no_grad():
        with driftline.capture(model, tmp_path / "run", graph="inductor"):
            found = [compiled(x).clone() for _ in range(4)]
        torch._dynamo.reset()
    assert torch.allclose(found[0], model(x), atol=1e-5)
    assert all(torch.equal(found[0], one) for one in found)
    run = driftline.open_run(tmp_path / "run")
    steps = [len([r for r in run.records if r.key.step == step]) for step in range(4)]
    assert len(set(steps)) == 1 and steps[0] >= 4
    assert any("were not made" in e["message"] for e in run.events() if e["kind"] == "cuda-graph")
