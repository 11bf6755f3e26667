"""Makes the dumps beside this file with MindStudio Probe itself (`pip install mindstudio-probe`).

    python make.py OUT

One training step of a tiny model per combination of level (L0 modules, L1 functions, mix) and task
(tensor, statistics), all with the same seed. Not run by the tests: they read what is committed.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from pathlib import Path

import torch


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.up = torch.nn.Linear(8, 16)
        self.down = torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Tiny(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 8)
        self.block = Block()
        self.head = torch.nn.Linear(8, 11)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = self.block(x)
        x = self.block(x)  # a shared layer: called twice in one step
        return self.head(x)


def one(out: Path, task: str, level: str) -> None:
    from msprobe.pytorch import PrecisionDebugger

    torch.manual_seed(0)
    model = Tiny()
    config = {
        "task": task,
        "dump_path": str(out),
        "rank": [],
        "step": [0],
        "level": level,
        "async_dump": False,
        "tensor": {"scope": [], "list": [], "data_mode": ["all"]},
        "statistics": {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        debugger = PrecisionDebugger(config_path=str(path))
        debugger.start(model=model)
        ids = torch.tensor([[1, 2, 3]])
        loss = torch.nn.functional.cross_entropy(model(ids).reshape(3, 11), ids.reshape(3))
        loss.backward()
        debugger.stop()
        debugger.step()


def tidy(place: Path) -> None:
    """No process number and no path of this machine in what is committed."""
    (found,) = (place / "step0").iterdir()
    rank = found.rename(found.parent / "proc0")
    for name in ("dump.json", "stack.json"):
        text = (rank / name).read_text()
        data = json.loads(text)
        if name == "dump.json" and data["dump_data_dir"]:
            data["dump_data_dir"] = f"{place.name}/step0/proc0/dump_tensor_data"
        if name == "stack.json":
            data = {number: [calls, stack[-1:]] for number, (calls, stack) in data.items()}
            data = json.loads(re.sub(r"File \S*/", "File ", json.dumps(data)))
        (rank / name).write_text(json.dumps(data, indent=1))


if __name__ == "__main__":
    if len(sys.argv) == 4:
        one(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
        sys.exit()
    import subprocess

    root = Path(sys.argv[1])
    for level in ("L0", "L1", "mix"):
        for task in ("tensor", "statistics"):
            place = root / f"{level}_{task}"
            shutil.rmtree(place, ignore_errors=True)
            subprocess.run([sys.executable, __file__, str(place), task, level], check=True)
            tidy(place)
