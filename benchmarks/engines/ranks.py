"""Parallel programs on several ranks (gloo) against one process: those of tests/ranks.

The cost is that of the sound program under capture over the same program without, in CPU seconds of
all its processes, imports included.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import driftline
from benchmarks.engines.cases import Case, Measured, cpu_seconds, measured

PROGRAM = Path(__file__).resolve().parents[2] / "tests" / "ranks" / "parallel_programs.py"
# The program as it is, without a capture around its steps.
PLAIN = (
    "import contextlib, runpy, sys, driftline\n"
    "driftline.capture = lambda *a, **k: contextlib.nullcontext()\n"
    "sys.argv = sys.argv[1:]\n"
    "sys.path.insert(0, sys.argv[0].rpartition('/')[0])\n"
    "runpy.run_path(sys.argv[0], run_name='__main__')\n"
)


class Parallel(NamedTuple):
    """A way to deal work out: the program of one process, the sound and the faulty one of ranks."""

    ranks: int
    alone: str
    sound: str
    faulty: str
    fault: str
    place: str


GELU = "GELU in place of SiLU on the last rank"
PROGRAMS: dict[str, Parallel] = {
    "pipeline, 1F1B": Parallel(
        2, "plain_4", "alternating", "alternating_wrong", GELU, "layers.3.mlp.act"
    ),
    "experts dealt out": Parallel(
        2, "experts_2", "experts", "experts_wrong", GELU, "layers.1.moe.experts.1.act"
    ),
    "ZeRO": Parallel(
        2,
        "two_steps",
        "zero",
        "zero_wrong",
        "an update that does not reach the last rank",
        "(optimizer)",
    ),
    "tensor parallel": Parallel(
        4, "one", "tp", "no_reduce", "a missing all-reduce", "layers.1.self_attn.o_proj"
    ),
    "FSDP over tensor parallel": Parallel(4, "one", "mesh", "mesh_wrong", GELU, "layers.1.mlp.act"),
    "FSDP over tensor parallel, eight": Parallel(
        8, "one", "mesh", "mesh_wrong", GELU, "layers.1.mlp.act"
    ),
    "experts dealt out to eight": Parallel(
        8, "experts_8", "experts", "experts_wrong", GELU, "layers.1.moe.experts.7.act"
    ),
    "ZeRO over eight": Parallel(
        8,
        "two_steps",
        "zero",
        "zero_wrong",
        "an update that does not reach the last rank",
        "(optimizer)",
    ),
}


def _run(ranks: int, folder: Path, *names: str, captured: bool = True) -> None:
    python = [sys.executable]
    program = [str(PROGRAM), str(folder), *names]
    if not captured:
        stub = folder / "plain.py"
        stub.write_text(PLAIN, encoding="utf-8")
        program.insert(0, str(stub))
    if ranks > 1:
        python += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    subprocess.run([*python, *program], check=True, capture_output=True, timeout=600)


def measure(parallel: Parallel, folder: Path) -> Measured:
    _run(1, folder, parallel.alone)
    plain = cpu_seconds(lambda: _run(parallel.ranks, folder, parallel.sound, captured=False))
    captured = cpu_seconds(lambda: _run(parallel.ranks, folder, parallel.sound))
    _run(parallel.ranks, folder, parallel.faulty)
    clean = driftline.compare(folder / parallel.alone, folder / parallel.sound)
    wrong = driftline.compare(folder / parallel.alone, folder / parallel.faulty)
    return measured(clean, wrong, parallel.fault, (parallel.place,), captured / plain)


CASES = tuple(
    Case(
        f"torch.distributed, {parallel.ranks} ranks",
        f"Llama, small, {name}",
        partial(measure, parallel),
    )
    for name, parallel in PROGRAMS.items()
)
