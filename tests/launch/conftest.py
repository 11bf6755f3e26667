"""Real programs, really launched: each test writes a small script and dumps it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from driftline.cli.main import main
from driftline.runs.reader import DiskRun, open_run

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.GELU())
        self.norm = nn.LayerNorm(8)
        self.last = nn.Linear(8, 2)

    def forward(self, x):
        h = self.body(self.first(x))
        return self.last(self.norm(self.norm(h)))

def run(steps=1):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = Net().eval()
    with torch.no_grad():
        for step in range(steps):
            y = net(torch.full((2, 4), 1.0 + step))
    return y
"""


@dataclass(frozen=True)
class Dumped:
    """One finished `driftline dump`."""

    code: int
    out: str
    err: str
    path: Path

    @property
    def run(self) -> DiskRun:
        return open_run(self.path)

    @property
    def folders(self) -> list[str]:
        return sorted(p.name for p in self.path.glob("rank*"))


Dump = Callable[..., Dumped]


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with `model.py` (a small network and `run(steps)`) in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "infer.py").write_text(
        "import sys\nfrom model import run\n"
        "print('sum', float(run(int(sys.argv[1]) if sys.argv[1:] else 1).sum()))\n"
    )
    return tmp_path


@pytest.fixture
def dump(workshop: Path, capfd: pytest.CaptureFixture[str]) -> Dump:
    """Dump a command: `dump("-er", "0,1", run=["infer.py"])`; Python is put before `run`."""

    def dump(*options: str, run: Sequence[str] = (), argv: Sequence[str] = ()) -> Dumped:
        command = list(argv) or ([sys.executable, *run] if run else [])
        words = ["dump", *options]
        if "-o" not in options:
            words += ["-o", "out"]
        capfd.readouterr()
        code = main([*words, "--", *command] if command else words)
        out, err = capfd.readouterr()
        return Dumped(code, out, err, workshop / "out")

    return dump


@pytest.fixture
def quick(dump: Dump, warm_python: str) -> Dump:
    """The same for programs whose start is not the point: torch is there before they begin."""

    def quick(*options: str, run: Sequence[str]) -> Dumped:
        return dump(*options, argv=[warm_python, *run])

    return quick


@pytest.fixture
def compiling(dump: Dump, warm_compiler: str) -> Dump:
    """The same for programs that compile: torch.compile is there too."""

    def compiling(*options: str, run: Sequence[str]) -> Dumped:
        return dump(*options, argv=[warm_compiler, *run])

    return compiling
