"""Runs of the parallel programs: one process, then four at once, each variant by itself."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from warm_python import warm

PROGRAM = Path(__file__).with_name("parallel_programs.py")
ALONE = (
    *("one", "hand", "four_layers", "eight_layers", "shared_heads"),
    *("plain_4", "experts_2", "two_steps"),
)
TOGETHER = (
    "tp",
    "sp",
    "no_reduce",
    "wrong_cut",
    "odd_gradient",
    "hand",
    "hand_forgotten",
    "ddp",
    "not_averaged",
    "fsdp",
    "fsdp_tp",
    "pipeline",
    "late",
    "interleaved",
    "turned_back",
    "shared_heads",
    "shared_heads_forgotten",
    "flattened",
    "flat_pieces",
    "mesh_wrong",
)
IN_TWO = (
    *("gpipe", "alternating", "two_stages_each", "alternating_wrong"),
    *("experts", "experts_wrong", "zero", "zero_wrong"),
)
LIMIT = 500


@pytest.fixture(scope="session")
def warm_parallel(warm_python: str) -> Iterator[str]:
    """A Python that has imported what the programs import."""
    modules = ("tensor.parallel", "fsdp", "pipelining", "run")
    parallel = (f"torch.distributed.{name}" for name in modules)
    with warm(*parallel, start=warm_python) as python:
        yield python


@pytest.fixture(scope="session")
def alone(warm_parallel: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same work done by one process."""
    folder = tmp_path_factory.mktemp("alone")
    subprocess.run([warm_parallel, str(PROGRAM), str(folder), *ALONE], check=True, timeout=LIMIT)
    return folder


def run_ranks(python: str, folder: Path, ranks: int, programs: Sequence[str]) -> None:
    """Programs one after the other, by the processes of one torchrun."""
    torchrun = [python, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    program = ["--no-python", python, str(PROGRAM), str(folder), *programs]
    done = subprocess.run([*torchrun, *program], capture_output=True, text=True, timeout=LIMIT)
    said = [line for line in done.stderr.splitlines() if "leaked" not in line]  # triton, forked
    assert done.returncode == 0, "\n".join(said[-60:])


@pytest.fixture(scope="session")
def together(warm_parallel: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every variant, by four processes of one torchrun."""
    folder = tmp_path_factory.mktemp("together")
    run_ranks(warm_parallel, folder, 4, TOGETHER)
    return folder


@pytest.fixture(scope="session")
def in_two(warm_parallel: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Schedules, experts and sharded optimizers, by two processes."""
    folder = tmp_path_factory.mktemp("in_two")
    run_ranks(warm_parallel, folder, 2, IN_TWO)
    return folder
