"""Models, their exports and what ONNX Runtime computes of them, as the tests of both want them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import onnx_zoo as zoo
import torch

import driftline
from driftline.alignment.plan import Plan
from driftline.comparison.table.table import Table
from driftline.comparison.verdict.divergence import Divergence, find_divergence
from driftline.runs.memory import MemorySink
from driftline.runs.run import Run


class Exported(NamedTuple):
    """A model, what it was given, what it computed, and its ONNX file."""

    model: torch.nn.Module
    given: torch.Tensor
    run: Run
    path: Path


def exported(made: tuple[torch.nn.Module, torch.Tensor], path: Path) -> Exported:
    model, given = made
    sink = MemorySink(name="torch")
    with torch.no_grad(), driftline.capture(model, sink):
        model(given)
    return Exported(model, given, sink.run(), zoo.export(model, given, path))


def run_of(path: Path, inputs: Any, **how: Any) -> Run:
    sink = MemorySink(name=path.name)
    result = driftline.capture_onnx(path, inputs, sink, **how)
    assert result.faithful
    return sink.run()


def leaves_of(model: torch.nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if name and not [*module.children()]}


def aligned_leaves(model: torch.nn.Module, plan: Plan) -> float:
    """The share of leaf modules whose output is compared, by itself or inside a fusion."""
    leaves = leaves_of(model)
    own = {p.reference.key.site for p in plan.pairs if p.reference.key.port == "output"}
    inside = {k.site for side, k in plan.inside if side == "reference" and k.port == "output"}
    return len(leaves & (own | inside)) / len(leaves)


def first_of(table: Table) -> Divergence:
    return find_divergence(table.rows)


def clean(table: Table) -> None:
    assert table.verdict == "pass", table.finding
    assert not [row for row in table.rows if row.status in ("fail", "incomparable")]
