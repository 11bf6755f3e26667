"""How the parallel programs are started: as the processes of one torchrun."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

PROGRAM = Path(__file__).with_name("parallel_programs.py")
LIMIT = 500


def run_ranks(python: str, folder: Path, ranks: int, programs: Sequence[str]) -> None:
    """Programs one after the other, by the processes of one torchrun."""
    torchrun = [python, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    program = ["--no-python", python, str(PROGRAM), str(folder), *programs]
    done = subprocess.run([*torchrun, *program], capture_output=True, text=True, timeout=LIMIT)
    said = [line for line in done.stderr.splitlines() if "leaked" not in line]  # triton, forked
    assert done.returncode == 0, "\n".join(said[-60:])
