"""Quantised tensors in torch files: codes with their scales, which floats can be held against."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import driftline

pytestmark = pytest.mark.filterwarnings("ignore")  # torch wants others to quantise now

torch.manual_seed(0)
VALUES = torch.randn(8, 16)
ROWS = VALUES.abs().amax(1) / 127


def quantised(scheme: str, scale: float = 1.0) -> Any:
    if scheme == "per channel":
        zeros = torch.zeros(8, dtype=torch.long)
        return torch.quantize_per_channel(VALUES, ROWS.double() * scale, zeros, 0, torch.qint8)
    kind, zero = (torch.qint8, 5) if scheme == "qint8" else (torch.quint8, 128)
    return torch.quantize_per_tensor(VALUES, 0.03 * scale, zero, kind)


@pytest.mark.parametrize("scheme", ["qint8", "quint8", "per channel"])
@pytest.mark.parametrize("named", [False, True])
def test_a_quantised_tensor_is_held_against_floats(
    tmp_path: Path, scheme: str, named: bool
) -> None:
    for name, value in (("float", VALUES), ("codes", quantised(scheme))):
        torch.save(
            {"fc.weight": value, "b": VALUES[0]} if named else value, tmp_path / f"{name}.pt"
        )
    table = driftline.compare(tmp_path / "float.pt", tmp_path / "codes.pt")
    assert table.verdict == "pass", table.finding
    assert all(row.compared for row in table.rows)
    assert 0.001 < max(row.metrics["relative_l2"] for row in table.rows) < 0.02
    wrong = VALUES * 1.2
    torch.save({"fc.weight": wrong, "b": VALUES[0]} if named else wrong, tmp_path / "wrong.pt")
    assert driftline.compare(tmp_path / "wrong.pt", tmp_path / "codes.pt").verdict == "fail"


def test_what_it_holds_is_listed(tmp_path: Path) -> None:
    torch.save({"fc.weight": quantised("per channel")}, tmp_path / "x.pt")
    run = driftline.open_run(tmp_path / "x.pt")
    found = {record.key.site: (record.dtype, record.shape) for record in run.records}
    assert found == {
        "fc.weight": ("int8", (8, 16)),
        "fc.weight.scale": ("float64", (8,)),
        "fc.weight.zero_point": ("int64", (8,)),
    }
