"""Wrong decompositions and wrong generated code, planted in inductor: the node is named, fused or
not, against nodes, operators and modules of a run that is not compiled.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from capture_zoo import one_thread
from torch import nn

import driftline

decomposition: Any = importlib.import_module("torch._inductor.decomposition")
cpp: Any = importlib.import_module("torch._inductor.codegen.cpp")
aten: Any = torch.ops.aten
mine = torch.library.Library("driftline_planted", "DEF")
mine.define("swish(Tensor x, float beta) -> Tensor")
mine.impl("swish", lambda x, beta: x * torch.sigmoid(beta * x), "CompositeExplicitAutograd")


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + 1e-6))


class Attention(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(size, size) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.softmax(self.q(x) @ self.k(x).transpose(-1, -2) / 4, -1) @ self.v(x)


class Mlp(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(size, 2 * size),
            nn.Linear(size, 2 * size),
            nn.Linear(2 * size, size),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Net(nn.Module):
    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.first, self.attention = Norm(size), Attention(size)
        self.second, self.mlp = nn.LayerNorm(size), Mlp(size)
        self.head = nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x))
        x = x + self.mlp(self.second(x))
        if not torch.is_grad_enabled():
            x = torch.ops.driftline_planted.swish(x, 1.5)
        return self.head(F.gelu(x) * 2)


def _layer_norm(x: Any, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    mean, rstd = x.mean(-1, keepdim=True), torch.rsqrt(x.var(-1, keepdim=True) + eps)
    return (x - mean) * rstd * weight + bias, mean, rstd


FAULTS: dict[str, tuple[Any, Callable[..., Any], str]] = {
    "rsqrt": (aten.rsqrt.default, lambda x: 1 / torch.sqrt(1.01 * x), "first"),
    "mean": (aten.mean.dim, lambda x, dim, keep=False, dtype=None: x.sum(dim, keep) / 15, "first"),
    "softmax": (
        aten._softmax.default,
        lambda x, dim, half: torch.exp(x) / (torch.exp(x).sum(dim, keepdim=True) + 0.1),
        "attention",
    ),
    "layer_norm": (aten.native_layer_norm.default, _layer_norm, "second"),
    "silu": (aten.silu.default, lambda x: x * torch.sigmoid(1.05 * x), "mlp"),
    "gelu": (
        aten.gelu.default,
        lambda x, approximate="none": x * torch.sigmoid(1.702 * x),
        "(root)",
    ),
    "addmm": (
        aten.addmm.default,
        lambda bias, x, w, beta=1, alpha=1: torch.mm(x, w) * alpha + 1.1 * bias,
        "attention.q",
    ),
    "custom": (
        torch.ops.driftline_planted.swish.default,
        lambda x, beta: x * torch.sigmoid(x),
        "(root)",
    ),
    "silu_backward": (
        aten.silu_backward.default,
        lambda grad, x: grad * torch.sigmoid(x),
        "mlp",
    ),
    "softmax_backward": (
        aten._softmax_backward_data.default,
        lambda grad, out, dim, dtype: grad * out - 0.9 * out * (grad * out).sum(dim, keepdim=True),
        "attention",
    ),
}


@contextmanager
def planted(operator: Any, wrong: Callable[..., Any]) -> Generator[None]:
    table = decomposition.decompositions
    before = table.get(operator)
    table[operator] = wrong
    decomposition.fast_random_decomps.cache_clear()  # holds a copy of the table
    try:
        yield
    finally:
        del table[operator]
        if before is not None:
            table[operator] = before
        decomposition.fast_random_decomps.cache_clear()


def captured(path: Path, *, train: bool, graph: Any = None, levels: str = "modules") -> None:
    torch._dynamo.reset()
    torch.manual_seed(1)
    model, x = Net(), torch.randn(2, 6, 16)
    watching = driftline.capture(model, path, graph=graph, levels=levels)
    with one_thread(), torch.set_grad_enabled(train), watching:
        result = torch.compile(model)(x) if graph else model(x)
        if train:
            result.square().sum().backward()
    torch._dynamo.reset()


REFERENCES = {"fx": ("fx", "modules"), "ops": (None, "ops"), "modules": (None, "modules,gradients")}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("references")
    for train in (False, True):
        for name, (graph, levels) in REFERENCES.items():
            captured(path / f"{name}{train}", train=train, graph=graph, levels=levels)
    return path


def operator_of(name: str) -> str:
    return str(FAULTS[name][0])


@pytest.mark.slow
@pytest.mark.parametrize("train", [False, True])
def test_without_a_fault_nothing_is_off(references: Path, tmp_path: Path, train: bool) -> None:
    captured(tmp_path / "run", train=train, graph="inductor", levels="modules,gradients")
    for name in REFERENCES:
        table = driftline.compare(references / f"{name}{train}", tmp_path / "run")
        assert table.verdict == "pass", table.finding
        assert not any(row.culprit for row in table.rows)
        assert not any("are off" in note or "is off" in note for note in table.notes)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_decomposition_is_named_at_its_node_in_a_fusion(
    references: Path, tmp_path: Path, fault: str
) -> None:
    operator, wrong, module = FAULTS[fault]
    train = fault.endswith("backward")
    with planted(operator, wrong):
        captured(tmp_path / "run", train=train, graph="inductor", levels="modules,gradients")
    for name in REFERENCES:
        table = driftline.compare(references / f"{name}{train}", tmp_path / "run")
        assert table.verdict == "fail"
        assert f"wrong for its own inputs: {operator} of '{module}' at {__file__}:" in table.finding
        if name == "modules":
            continue
        first = next(row for row in table.rows if row.status == "fail")
        assert table.first_site.startswith(f"{module}/")
        assert first.class_name == str(operator)
        assert f"computed at {__file__}:" in table.finding


@pytest.mark.slow
def test_wrong_generated_code_is_told_from_a_wrong_decomposition(
    references: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for owner in (cpp.CppOverrides, cpp.CppVecOverrides):
        right = owner.rsqrt

        def rsqrt(x: Any, right: Any = right) -> str:
            return f"({right(x)} * decltype({x})(1.01))"

        monkeypatch.setattr(owner, "rsqrt", staticmethod(rsqrt))
    captured(tmp_path / "run", train=False, graph="inductor")
    for name in REFERENCES:
        table = driftline.compare(references / f"{name}False", tmp_path / "run")
        assert table.verdict == "fail"
        assert "wrong for its own inputs: aten.mul.Tensor of 'first'" in table.finding
        assert "the generated cpp_fused_" in table.finding
        assert "from the nodes that it was made of" in table.finding


@pytest.mark.slow
def test_what_cancels_to_nothing_is_not_called_off(tmp_path: Path) -> None:
    class Cancels(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x - x.mean(-1, keepdim=True)).sum(-1) * torch.sigmoid(x[..., 0])

    torch._dynamo.reset()
    model, x = Cancels(), torch.randn(4, 1000) + 100
    with (
        one_thread(),
        torch.no_grad(),
        driftline.capture(model, tmp_path / "run", graph="inductor"),
    ):
        torch.compile(model)(x)
    torch._dynamo.reset()
    assert '{"off"' not in driftline.open_run(tmp_path / "run").sheet("graphs.jsonl")
