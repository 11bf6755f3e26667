"""Views that repeat their elements: large ones are summarised without being written out."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import driftline
from driftline.captures.torch import tensors
from driftline.numerics.dtypes import DTYPES
from driftline.numerics.kernel import summarize


class Corner(torch.nn.Module):
    """Looks at one element only: the program itself never writes the view out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:1, :1].clone()


@pytest.mark.parametrize("keep", ["full", "summary", "sample"])
def test_a_view_of_four_terabytes_is_summarised(keep: str, tmp_path: Path) -> None:
    line = torch.linspace(-1.0, 2.0, 1_000_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = Corner()
    with driftline.capture(model, tmp_path / "run2", keep=keep):
        model(line.expand(1_000_000, 1_000_000))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600_000  # kB
    run = driftline.open_run(tmp_path / "run2")
    record = run.get("(root)", "input", "x").record
    assert record.shape == (1_000_000, 1_000_000) and record.kept == "summary"
    summary = record.summary
    one = summarize(line.numpy(), DTYPES["float32"], count=1_000_000)
    assert summary is not None and summary.count == 10**12
    assert (summary.min, summary.max, summary.mean, summary.std) == one[1:5]
    assert summary.l2 == pytest.approx(one.l2 * 1000)
    assert record.digest.startswith("repeated-1000000-")
    assert any("repeats 4.0 MB 1000000 times" in str(e["message"]) for e in run.events())
    # The rest of the run is as usual.
    assert run.get("(root)").record.kept == keep


def test_two_runs_with_such_a_view_are_compared(tmp_path: Path) -> None:
    model = Corner()
    for name, shift in (("a", 0.0), ("b", 0.0), ("c", 0.5)):
        with driftline.capture(model, tmp_path / name):
            model((torch.linspace(-1.0, 2.0, 1_000_000) + shift).expand(1_000_000, 1_000_000))
    same = driftline.compare(tmp_path / "a", tmp_path / "b")
    assert [row.status for row in same.rows] == ["pass", "pass"]
    other = driftline.compare(tmp_path / "a", tmp_path / "c")
    assert "fail" in [row.status for row in other.rows]


def test_a_small_view_is_written_out_as_ever(tmp_path: Path) -> None:
    model = Corner()
    with driftline.capture(model, tmp_path / "run"):
        model(torch.arange(4.0).expand(3, 4))
    values = driftline.open_run(tmp_path / "run").get("(root)", "input", "x").numpy()
    assert np.array_equal(values, np.tile(np.arange(4, dtype=np.float32), (3, 1)))


def test_figures_of_a_repeated_view_are_those_of_the_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tensors, "LARGEST_EXPANSION", 64)
    base = torch.randn(5, 1, 7, dtype=torch.float64)
    base[0, 0, :3] = torch.tensor([float("nan"), float("inf"), 0.0])
    view = base.expand(5, 6, 7)[:, :, ::2]
    shot = tensors.snapshot(view)
    assert shot.repeats == 6 and shot.elements == 20
    data = view.contiguous().numpy().reshape(-1)
    expected = summarize(data, DTYPES["float64"], count=data.size)
    from driftline.numerics.fields import repeat_summary

    once = summarize(shot.data.view(np.float64), DTYPES["float64"], count=20)
    repeated = repeat_summary(once, 6)
    for name in ("count", "min", "max", "mean", "std", "l2", "zeros", "nan", "pos_inf", "neg_inf"):
        assert getattr(repeated, name) == pytest.approx(getattr(expected, name), rel=1e-12), name


def test_a_program_with_little_memory_lives(tmp_path: Path) -> None:
    """The view takes 40 GB written out, and the program may have 8."""
    program = f"""
import resource, torch, driftline
class M(torch.nn.Module):
    def forward(self, x):
        return x[:1, :1].clone()
m = M()
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
with driftline.capture(m, {str(tmp_path / "run")!r}):
    m(torch.ones(100_000).expand(100_000, 100_000))
print(driftline.open_run({str(tmp_path / "run")!r}).get("(root)", "input", "x").summary.count)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(10**10)
