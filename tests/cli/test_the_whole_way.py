"""The promise of the first page: dump an unchanged program twice, compare, read where it starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.act, self.down = (
            nn.LayerNorm(32), nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32))
    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(*[Block() for _ in range(4)]).eval()
x = torch.randn(8, 32)
if "--bf16" in sys.argv:
    model, x = model.bfloat16(), x.bfloat16()
if "--fault" in sys.argv:
    model[2].act = nn.ReLU()
with torch.no_grad():
    print(float(model(x).float().sum()))
"""


def driftline(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "driftline", *words], cwd=cwd, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory, warm_python: str) -> Path:
    place = tmp_path_factory.mktemp("whole")
    (place / "infer.py").write_text(PROGRAM)
    for name, python, options in (
        ("ref", sys.executable, ""),
        ("cand", warm_python, " --bf16"),
        ("bad", warm_python, " --bf16 --fault"),
    ):
        done = driftline("dump", "-o", name, "--exec", f"{python} infer.py{options}", cwd=place)
        assert done.returncode == 0, done.stderr
    return place


def test_a_lower_precision_without_a_fault_passes(dumps: Path) -> None:
    done = driftline("compare", "ref", "cand", cwd=dumps)
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith("PASS")


def test_the_faulty_layer_is_named_and_the_exit_code_is_1(dumps: Path) -> None:
    done = driftline("compare", "ref", "bad", cwd=dumps)
    assert done.returncode == 1
    assert "'2.act'" in done.stdout.splitlines()[0]


def test_the_ids_that_show_prints_are_the_ids_that_dump_takes(
    dumps: Path, warm_python: str
) -> None:
    shown = driftline("show", "ref", "--all", cwd=dumps).stdout
    ids = next(line.split()[0] for line in shown.splitlines() if " SiLU " in line)
    done = driftline(*("dump", "-o", "one", "-ids", ids, "--", warm_python, "infer.py"), cwd=dumps)
    assert done.returncode == 0, done.stderr
    sites = driftline("show", "one", "--format", "csv", cwd=dumps).stdout
    assert {line.split(",")[3] for line in sites.splitlines()[1:]} == {"0.act"}
